"""The differential sweep: one random node on every provider and on onnxruntime; what disagrees, and why it may.

`docs/decisions.md` has a row for each entry of `EXPLAINED`.
"""

from __future__ import annotations

import math
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import sweep_cases
import sweep_layers  # noqa: F401 - more makers
from nodes import node_model
from sweep_cases import MAKERS, Case

import ep

NEWEST = 28
UNIT = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def cases(op: str, seed: int, count: int) -> Iterator[tuple[int, Any, Case]]:
    """`count` random cases for each opset and dtype of an operator."""
    for opset in sweep_cases.opsets(op, NEWEST):
        for dtype in sweep_cases.dtypes(op, opset):
            # each group has its own seed, so that it stays the same when others change
            name = f"{seed} {op} {opset} {np.dtype(dtype).name}"
            rng = np.random.default_rng(zlib.crc32(name.encode()))
            for _ in range(count):
                case = MAKERS[op](rng, opset, dtype)
                if case is not None:
                    yield opset, dtype, case


# Running

Outcome = list[Any] | str  # arrays, or why there are none


def on_device(case: Case, device: str) -> Outcome:
    model, feeds = as_model(case)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ep.HostFallbackWarning)
            return ep.load(model, device, options={"compile": "off"}).run(None, feeds)
    except ep.EpError as error:
        return f"{type(error).__name__}: {error}"


def on_onnxruntime(case: Case) -> Outcome:
    import onnxruntime as ort

    model, feeds = as_model(case)
    if any(x.dtype == ml_dtypes.bfloat16 for x in feeds.values()):
        return "NOT_IMPLEMENTED: its Python interface has no bfloat16"
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return session.run(None, feeds)
    except Exception as error:  # noqa: BLE001 - its classes have no common base
        return f"{type(error).__name__}: {error}"


def as_model(case: Case) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    inputs = [None if x is None else np.asarray(x) for x in case.inputs]
    return node_model(case.op, inputs, case.opset, "", 1, case.outputs, case.attributes)


# Comparison


def differs(case: Case, got: Outcome, want: Outcome) -> str:
    """What is different, or an empty string; two refusals agree."""
    if isinstance(got, str) or isinstance(want, str):
        if isinstance(got, str) and isinstance(want, str):
            return ""
        return (
            f"{got if isinstance(got, str) else 'an answer'} against {want if isinstance(want, str) else 'an answer'}"
        )
    for g, w in zip(got, want, strict=True):
        problem = arrays_differ(np.asarray(g), np.asarray(w), case.scale, case.operand)
        if problem:
            return problem
    return ""


def arrays_differ(got: np.ndarray, want: np.ndarray, scale: float, operand: float = 0.0) -> str:
    if got.dtype != want.dtype or got.shape != want.shape:
        return f"{got.dtype}{list(got.shape)} against {want.dtype}{list(want.shape)}"
    unit = UNIT.get(got.dtype.name)
    if unit is None:
        same = got == want
    else:
        got, want = got.astype(np.float64), want.astype(np.float64)
        largest = np.abs(want[np.isfinite(want)]).max(initial=operand) if scale > 1 else 0
        with np.errstate(all="ignore"):
            near = np.abs(got - want) <= 4 * unit * np.maximum(np.abs(want) * scale, largest * scale) + TINY[unit]
        same = near | (got == want) | (np.isnan(got) & np.isnan(want))
    if np.all(same):
        return ""
    wrong = np.flatnonzero(~np.asarray(same))
    pair = f"{got.reshape(-1)[wrong[0]]} against {want.reshape(-1)[wrong[0]]}"
    return f"{len(wrong)} of {got.size} differ, the first at {wrong[0]}: {pair}"


# A subnormal result may be flushed to zero: XLA does so on the CPU.
TINY = {2.0**-52: 2.3e-308, 2.0**-23: 1.2e-38, 2.0**-10: 6.2e-5 / 2**10, 2.0**-7: 1.2e-38}


# Reasons


@dataclass(frozen=True)
class Reason:
    """Why two may disagree: a row of the table of decisions."""

    key: str
    who: tuple[str, ...]  # whose answer is the other one: onnxruntime, or a device
    ops: tuple[str, ...] = ()  # empty: any
    when: Callable[[Case, Outcome, Outcome], bool] = lambda case, got, other: True


def is_integer(case: Case) -> bool:
    return case.inputs[0].dtype.kind in "iu"


def extreme(case: Case) -> bool:
    """Whether some input holds numbers near the ends of its dtype, or that are not finite."""
    return any(
        not np.isfinite(x.astype(np.float64)).all() or (x.size and np.abs(x.astype(np.float64)).max() > 1e4)
        for x in case.inputs
        if x is not None and x.dtype != object and x.dtype.kind != "b"
    )


def refuses(case: Case, got: Outcome, other: Outcome) -> bool:
    return isinstance(other, str)


def has_nan(case: Case, got: Outcome, other: Outcome) -> bool:
    return any(np.isnan(np.asarray(x, np.float64)).any() for x in case.inputs[:1])


def backwards_to_the_end(case: Case, got: Outcome, other: Outcome) -> bool:
    return len(case.inputs) == 5 and any(case.inputs[2][i] > 2**62 and s < 0 for i, s in enumerate(case.inputs[4]))


def has_subnormal(case: Case, got: Outcome, other: Outcome) -> bool:
    """Whether an input holds a number so small that a library may read it as zero."""
    floats = [x.astype(np.float64) for x in case.inputs if x is not None and x.dtype.name in UNIT]
    return any(((x != 0) & (np.abs(x) < TINY[UNIT["float32"]])).any() for x in floats)


ORT = ("onnxruntime",)
OVERFLOWING = (
    "ReduceSum",
    "ReduceProd",
    "ReduceL1",
    "ReduceL2",
    "ReduceSumSquare",
    "ReduceMean",
    "Pow",
    "CumSum",
    "Shrink",
)
EXPLAINED: list[Reason] = [
    Reason("flushed-to-zero", ("jax",), when=has_subnormal),
    Reason("onnxruntime-refuses", ORT, when=refuses),
    Reason("integer-overflow", ORT, OVERFLOWING, lambda case, got, other: is_integer(case)),
    Reason("mean-of-nothing", ORT, ("ReduceMean",), lambda case, got, other: case.inputs[0].size == 0),
    Reason("integer-log-sum-exp", ORT, ("ReduceLogSumExp", "ReduceLogSum"), lambda case, got, other: is_integer(case)),
    Reason("nan-in-extrema", ORT, ("ReduceMax", "ReduceMin", "Max", "Min", "MaxPool", "Hardmax", "ReduceLogSumExp"),
           has_nan),
    Reason("slice-to-int-max-backwards", ORT, ("Slice",), backwards_to_the_end),
    Reason("strings-twice", ORT, ("Gather", "Expand", "Tile", "GatherElements", "GatherND"),
           lambda case, got, other: case.inputs[0].dtype == object),
    Reason("one-hot-9", ORT, ("OneHot",), lambda case, got, other: case.opset < 11),
    Reason("clip-without-bounds", ORT, ("Clip",), lambda case, got, other: extreme(case)),
    Reason("approximations", ORT, ("Sigmoid", "Erf", "Tanh", "Gelu", "Mish", "Softplus", "HardSwish", "Swish",
                                    "Elu", "Selu", "Celu")),
    Reason("stash-type", ORT, ("GroupNormalization", "LayerNormalization", "RMSNormalization"),
           lambda case, got, other: case.inputs[0].dtype == np.float64),
    Reason("infinite-logits", ORT, ("Softmax", "LogSoftmax"), lambda case, got, other: extreme(case)),
    Reason("doubles-in-float", ORT, ("DFT", "Shrink", "Attention"),
           lambda case, got, other: case.inputs[0].dtype == np.float64),
    Reason("doubles-in-float", ORT, ("BlackmanWindow", "HannWindow", "HammingWindow"),
           lambda case, got, other: case.attributes["output_datatype"] == 11),
    Reason("saturating-products", ORT, ("MatMulInteger", "ConvInteger"),
           lambda case, got, other: {case.inputs[0].dtype.kind, case.inputs[1].dtype.kind} == {"u", "i"}),
    Reason("affine-grid-of-one", ORT, ("AffineGrid",),
           lambda case, got, other: bool(case.attributes["align_corners"]) and 1 in case.inputs[1][2:]),
    Reason("causal-with-past", ORT, ("Attention",),
           lambda case, got, other: len(case.inputs) == 6 and bool(case.attributes["is_causal"])),
    Reason("lowest-for-infinity", ORT, ("Attention",),
           lambda case, got, other: case.attributes.get("qk_matmul_output_mode") == 2),
    Reason("variance-of-one", ORT, ("MeanVarianceNormalization",),
           lambda case, got, other: math.prod(case.inputs[0].shape) == case.inputs[0].shape[1]),
    Reason("dropout-mask-before-12", ORT, ("Dropout",), lambda case, got, other: case.opset < 12),
    Reason("split-of-nothing", ORT, ("StringSplit",), lambda case, got, other: "" in case.inputs[0]),
    Reason("image-of-columns", ORT, ("Col2Im",), lambda case, got, other: case.inputs[1].size != 2),
    Reason("resize-integers", ORT, ("Resize",),
           lambda case, got, other: is_integer(case) and case.attributes["mode"] != "nearest"),
    Reason("resize-fractional-lengths", ORT, ("Resize",),
           lambda case, got, other: case.attributes["coordinate_transformation_mode"] == "align_corners"),
]  # fmt: skip


def reason_for(case: Case, who: str, got: Outcome, other: Outcome) -> str:
    for reason in EXPLAINED:
        if who in reason.who and (not reason.ops or case.op in reason.ops) and reason.when(case, got, other):
            return reason.key
    return ""


# The sweep


@dataclass
class Tally:
    """What a sweep found."""

    compared: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    explained: Counter[str] = field(default_factory=Counter)
    unexplained: list[str] = field(default_factory=list)


def sweep(ops: Sequence[str], seed: int, count: int, devices: Sequence[str], with_ort: bool, every: int = 1) -> Tally:
    """Compares every device, and onnxruntime, with the host; JAX takes part in every `every`th case."""
    tally = Tally()
    number = 0
    for op in ops:
        for _, _, case in cases(op, seed, count):
            number += 1
            base = on_device(case, "host")
            others = {d: on_device(case, d) for d in devices if d != "jax" or number % every == 0}
            if with_ort:
                others["onnxruntime"] = on_onnxruntime(case)
            for who, other in others.items():
                _judge(tally, case, who, base, other)
    return tally


def _judge(tally: Tally, case: Case, who: str, base: Outcome, other: Outcome) -> None:
    if who == "onnxruntime" and isinstance(other, str) and any(word in other for word in UNIMPLEMENTED):
        return
    tally.compared[who] += 1
    tally.refused += isinstance(base, str) and isinstance(other, str)
    problem = differs(case, base, other)
    if not problem:
        return
    key = reason_for(case, who, base, other)
    if key:
        tally.explained[key] += 1
    else:
        tally.unexplained.append(f"{case}: host against {who}: {problem[:300]}")


UNIMPLEMENTED = (
    "NOT_IMPLEMENTED",
    "NotImplemented",
    "is invalid",
    "Type Error",
    "not implemented",
    "under development",
)
