"""Does every official ONNX case give the specification's answer, on each provider, compiled and eager?

The cases come with the `onnx` package: the node suite is built in memory, `simple`, `pytorch-converted` and
`pytorch-operator` are files inside its wheel. Ids read like `mlx-compiled-test_gelu_tanh_1`. What must fail is
listed in `xfails/*.txt`, with reasons, and is strict: a case that passes there is an error. `conftest.py`
prints, per provider and mode, how many cases ran on the device and how many needed host nodes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - registers bfloat16 and the small dtypes with NumPy
import numpy as np
import onnx
import pytest
from conftest import require
from onnx import numpy_helper
from onnx.backend.test.case.node import collect_testcases
from onnx.backend.test.loader import load_model_tests

import ep
from ep.provider import HOST

DEVICES = ("jax", "mlx", "host")
MODES = {"compiled": "on", "eager": "off"}
FILES = ("simple", "pytorch-converted", "pytorch-operator")
XFAILS = Path(__file__).parent / "xfails"
FULL = os.environ.get("EP_FULL") == "1"


# How close is right? (rtol, atol per unit of the largest finite value expected), by dtype of the output.
# Integers, booleans, strings and types of eight bits or less must be equal: what rounds to them is exact by
# specification. A floating-point answer may differ by the roundings on the way to it: a chain of k operations
# with unit roundoff u typically loses sqrt(k)·u of the largest operand, and the suite's k is at most a few
# hundred (attention, LSTM, convolutions). For float32 that is below 2e-6; the table allows five times as much.
TOLERANCES: dict[str, tuple[float, float]] = {
    "float64": (1e-7, 1e-9),  # the suite computes many float64 answers through float32 constants
    "float32": (1e-5, 1e-5),  # u = 6e-8
    "float16": (2**-9, 2**-10),  # two roundings: spacing 2^-10
    "bfloat16": (2**-6, 2**-7),  # two roundings: spacing 2^-7; onnx's own runner allows the same 2^-6
    "complex64": (1e-5, 1e-5),
    "complex128": (1e-7, 1e-9),
}
# Cases that need more, each for a reason: (names, rtol = atol).
WIDER: tuple[tuple[str, float], ...] = (
    (r"test_roialign_aligned_(true|false)$", 1e-3),  # the suite writes the answers with four digits
    (r"test_averagepool_2d_ceil_last_window_starts_on_pad$", 1e-3),  # four digits, too
    (r"test_nllloss_NCd1d2d3d4d5_mean_weight", 1e-4),  # sums 6,480 terms, which MLX adds one after the other
)


@dataclass(frozen=True)
class Case:
    """One case of a suite: a model and its data sets; files are read when asked for."""

    suite: str
    name: str
    source: Any

    def model(self) -> onnx.ModelProto:
        return self.source.model if self.suite == "node" else onnx.load(Path(self.source.model_dir) / "model.onnx")

    def data(self, model: onnx.ModelProto) -> Iterator[tuple[dict[str, Any], list[Any]]]:
        """Feeds by name, and the outputs to expect."""
        constants = {i.name for i in model.graph.initializer}
        names = [i.name for i in model.graph.input if i.name not in constants]
        sets = self.source.data_sets if self.suite == "node" else stored(Path(self.source.model_dir), model)
        for inputs, outputs in sets:
            feeds = dict(zip(names, map(array, inputs), strict=True))
            yield feeds, [array(o) for o in outputs]


def stored(folder: Path, model: onnx.ModelProto) -> Iterator[tuple[list[Any], list[Any]]]:
    """The data sets of a case on disk."""
    for data in sorted(folder.glob("test_data_set_*")):
        yield tuple(
            [read(data / f"{kind}_{i}.pb", value.type) for i, value in enumerate(values)
             if (data / f"{kind}_{i}.pb").exists()]
            for kind, values in (("input", model.graph.input), ("output", model.graph.output))
        )  # fmt: skip


def read(path: Path, kind: onnx.TypeProto) -> Any:
    proto = onnx.SequenceProto() if kind.HasField("sequence_type") else onnx.TensorProto()
    proto.ParseFromString(path.read_bytes())
    return proto


def array(value: Any) -> Any:
    """A NumPy array (object dtype for strings), a list of arrays, or `None`."""
    if isinstance(value, onnx.TensorProto):
        return array(numpy_helper.to_array(value))
    if isinstance(value, onnx.SequenceProto):
        return [array(item) for item in numpy_helper.to_list(value)]
    if isinstance(value, list | tuple):
        return [array(item) for item in value]
    if value is None:
        return None
    value = np.asarray(value)
    if value.dtype.kind not in "OSU":
        return value
    text = [s.decode() if isinstance(s, bytes) else str(s) for s in value.ravel()]
    return np.array(text, dtype=object).reshape(value.shape)


@functools.cache
def cases() -> dict[str, Case]:
    """All cases by name; built once per process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the reference implementations divide by zero on purpose
        found = [Case("node", c.name, c) for c in collect_testcases(None)]
    found += [Case(suite, c.name, c) for suite in FILES for c in load_model_tests(kind=suite)]
    named = {case.name: case for case in found}
    assert len(named) == len(found), "two suites use the same name"
    return named


@functools.cache
def expected_failures() -> dict[tuple[str, str, str], str]:
    """(device, mode, case) → reason, from lines `case [mode]  # reason`; one file per device, `all.txt` for all."""
    found = {}
    for path in sorted(XFAILS.glob("*.txt")):
        devices = list(DEVICES) if path.stem == "all" else [path.stem]
        for line in path.read_text().splitlines():
            entry, _, reason = line.partition("#")
            if entry.strip():
                name, *modes = entry.split()
                found.update({(d, m, name): reason.strip() for d in devices for m in modes or MODES})
    return found


def selected(device: str, mode: str) -> list[str]:
    """Names of the cases to run: all, but a sample of the node suite for JAX, whose compiler takes most of the time.

    Compiled, it runs every case but the `_expanded` ones, which spell an operator out in others that have cases of
    their own (MLX and the host run them). Eager, it compiles every primitive, and shows beyond the compiled mode only
    how a lowering treats concrete values: two cases per operator tell. `EP_FULL=1` runs all.
    """
    if FULL or device != "jax":
        return list(cases())
    chosen, count = [], Counter[str]()
    for name, case in cases().items():
        operator = case.source.model.graph.node[0].op_type if case.suite == "node" else name
        if "_expanded" not in name and (mode == "compiled" or count[operator] < 2):
            count[operator] += 1
            chosen.append(name)
    return chosen


@functools.cache
def size(suite: str) -> int:
    return sum(case.suite == suite for case in cases().values())


def parameters() -> list[Any]:
    found, failures = [], expected_failures()
    for device in DEVICES:
        for mode in MODES:
            for name in selected(device, mode):
                reason = failures.get((device, mode, name))
                marks = [pytest.mark.xfail(reason=reason, strict=True)] if reason is not None else []
                found.append(pytest.param(device, mode, name, id=f"{device}-{mode}-{name}", marks=marks))
    return found


@pytest.mark.parametrize(("device", "mode", "name"), parameters())
def test_case(device: str, mode: str, name: str, request: pytest.FixtureRequest) -> None:
    require(device)
    case = cases()[name]
    request.node.user_properties.append(("case", (device, mode, case.suite, size(case.suite))))
    with settings(device):
        model = case.model()
        session = ep.load(model, device, options={"compile": MODES[mode]})
        for feeds, expected in case.data(model):
            check = next((check for pattern, check in OPEN.items() if re.match(pattern, name)), None)
            if check is None:
                compare(session.run(None, feeds), expected, name)
            else:
                check(model, device, mode, feeds, expected)
        request.node.user_properties.append(("where", where(session, device)))


@contextlib.contextmanager
def settings(device: str) -> Iterator[None]:
    """Implicit casts are errors under JAX; nodes that fall back to the host are counted instead of warned about."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", ep.HostFallbackWarning)
        if device == "jax":
            import jax

            stack.enter_context(jax.numpy_dtype_promotion("strict"))
        yield


def where(session: ep.InferenceSession, device: str) -> str:
    """Whether the provider ran all nodes ("device"), some ran on the host ("host"), or none was left ("folded")."""
    plan = session.plan
    if not plan.nodes:
        return "folded"
    hosted = any(n.provider == HOST for n in plan.nodes) or any(p.provider == HOST for p in plan.partitions)
    return "host" if hosted and device != "host" else "device"


# Comparison.


def compare(results: list[Any], expected: list[Any], name: str) -> None:
    wider = next((tolerance for pattern, tolerance in WIDER if re.match(pattern, name)), 0.0)
    assert len(results) == len(expected)
    for index, (got, want) in enumerate(zip(results, expected, strict=True)):
        compare_value(got, want, f"output {index}", wider)


def compare_value(got: Any, want: Any, label: str, wider: float = 0.0) -> None:
    if want is None or isinstance(want, list):
        assert type(got) is type(want), f"{label} is a {type(got).__name__}, not a {type(want).__name__}"
        if want is not None:
            assert len(got) == len(want), f"{label} has {len(got)} elements, not {len(want)}"
            for i, (g, w) in enumerate(zip(got, want, strict=True)):
                compare_value(g, w, f"{label}[{i}]", wider)
        return
    assert isinstance(got, np.ndarray), f"{label} is a {type(got).__name__}"
    assert got.dtype == want.dtype, f"{label} has dtype {got.dtype}, not {want.dtype}"
    assert got.shape == want.shape, f"{label} has shape {got.shape}, not {want.shape}"
    if want.dtype.name not in TOLERANCES:
        same = got == want if want.dtype.kind in "biuO" else equal_with_nan(got, want)
        assert same.all(), f"{label}: {np.count_nonzero(~same)} of {want.size} differ: {got} is not {want}"
        return
    rtol, scaled = (max(wider, tolerance) for tolerance in TOLERANCES[want.dtype.name])
    wide = np.complex128 if want.dtype.kind == "c" else np.float64
    want, got = want.astype(wide), got.astype(wide)
    finite = np.abs(want[np.isfinite(want)])
    atol = scaled * float(finite.max(initial=0.0))
    np.testing.assert_allclose(got, want, rtol=rtol, atol=max(atol, 1e-7), err_msg=label)


def equal_with_nan(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Float8, float4 and int4: equal values, NaN equal to NaN."""
    got, want = got.astype(np.float64), want.astype(np.float64)
    return (got == want) | (np.isnan(got) & np.isnan(want))


# Cases whose values the specification leaves open: shape, dtype, allowed values, statistics, fresh draws.

DRAWS = 20
SIGMAS = 5  # a right implementation fails one of these checks once in 1.7 million


def draw(model: onnx.ModelProto, device: str, mode: str, feeds: dict, expected: list) -> list[list[np.ndarray]]:
    """Results of several runs, after what holds for every generator: shapes, dtypes, seeds, fresh draws."""
    session, other = (ep.load(model, device, options={"compile": MODES[mode]}) for _ in range(2))
    runs = [session.run(None, feeds) for _ in range(DRAWS)]
    for results in runs:
        assert [(r.shape, r.dtype) for r in results] == [(e.shape, e.dtype) for e in expected]
    first = [run[0].tobytes() for run in runs]
    if any(a.name == "seed" for node in model.graph.node for a in node.attribute):
        assert other.run(None, feeds)[0].tobytes() == first[0], "the same seed gave other values in a second session"
    else:
        assert len(set(first)) > 1, f"{DRAWS} runs without a seed all drew the same values"
    return runs


def check_bernoulli(model: onnx.ModelProto, device: str, mode: str, feeds: dict, expected: list) -> None:
    (p,) = (np.asarray(feed, dtype=np.float64) for feed in feeds.values())
    runs = draw(model, device, mode, feeds, expected)
    for (y,) in runs:
        assert np.isin(y, (0, 1)).all()
        assert not y[p == 0].any() and y[p == 1].all()
        assert abs(y.astype(np.float64).sum() - p.sum()) <= SIGMAS * np.sqrt((p * (1 - p)).sum())


def check_dropout(model: onnx.ModelProto, device: str, mode: str, feeds: dict, expected: list) -> None:
    x, *rest = feeds.values()
    ratio = float(rest[0])
    for y, *mask in draw(model, device, mode, feeds, expected):
        kept = mask[0] if mask else y != 0
        compare_value(y, np.where(kept, x / np.float32(1 - ratio), 0).astype(x.dtype), "the kept elements")
        assert abs(kept.sum() - x.size * (1 - ratio)) <= SIGMAS * np.sqrt(x.size * ratio * (1 - ratio))


OPEN = {
    r"test_bernoulli": check_bernoulli,
    r"test_training_dropout(_default)?(_mask)?$": check_dropout,
}


# The lists themselves.


def test_expected_failures_name_cases_and_reasons() -> None:
    for (device, mode, name), reason in expected_failures().items():
        assert name in cases(), f"{device}: {name} is not a case"
        assert device in DEVICES and mode in MODES
        assert len(reason) > 20, f"{device}-{mode}-{name} needs a reason"


def test_patterns_match_cases() -> None:
    for pattern in (*OPEN, *(pattern for pattern, _ in WIDER)):
        assert any(re.match(pattern, name) for name in cases()), pattern
