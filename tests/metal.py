"""Would Metal run this MLX function? Judged on any machine, from the graph that MLX would give to Metal.

`refusals(function, *arrays)` traces with `mx.export_function` and holds every node against `data/metal_kernels.json`
(the kernels in Metal's library) and the rules below, which come from MLX's sources and documentation. A trace on
the CPU hides three things: what `mx.fast` and a few others stand for (they are judged by their arguments, at the
call), which stream a node is on (what goes through `on_cpu_stream` is left out), and primitives that cannot be
exported (replaced by their inputs' shapes).
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

_FILE = json.loads((Path(__file__).parent / "data" / "metal_kernels.json").read_text())
KERNELS = {name: set(row["dtypes"]) for row in _FILE["kernels"] for name in row["primitives"]}
HALVES, FLOATS = {"float16", "bfloat16"}, {"float16", "bfloat16", "float32"}
INEXPORTABLE = ("bitwise_invert", "contiguous", "logcumsumexp", "to_fp8", "from_fp8", "segmented_mm", "qqmm")
MOST_INDICES = 11  # of 31 buffers of a Metal kernel, 20 are taken


@dataclass(frozen=True)
class Operand:
    """Shape and dtype of what enters or leaves a node."""

    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, shape: Any, dtype: Any) -> Operand:
        return cls(tuple(shape), str(dtype).removeprefix("mlx.core."))

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Call:
    """One node: a primitive with its arguments, inputs and outputs."""

    name: str
    arguments: tuple[Any, ...]
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]

    def __str__(self) -> str:
        shown = ", ".join(f"{o.dtype}{list(o.shape)}" for o in self.inputs)
        return f"{self.name}{list(self.arguments)}({shown})"

    @property
    def typed(self) -> Operand:
        """The operand whose dtype names the kernel."""
        if self.name == "Select":
            return self.inputs[1]
        return self.outputs[0] if self.name == "Arange" or not self.inputs else self.inputs[0]


# Rules: for a node, why Metal refuses it or answers wrongly, or nothing.


def scatter(call: Call) -> str:
    overwrites, sums = call.arguments[0] in (4, None), call.arguments[0] == 2
    if call.inputs[0].dtype == "complex64" and not (overwrites or sums):
        return "complex numbers are only summed"
    return "too many index arrays" if len(call.inputs) - 2 > MOST_INDICES else ""


def gather(call: Call) -> str:
    if any(index.dtype == "bool" for index in call.inputs[1:]):
        return "bools are no indices"
    return "too many index arrays" if len(call.inputs) - 1 > MOST_INDICES else ""


def reduce(call: Call) -> str:
    x, out = call.inputs[0], call.outputs[0]
    long = out.size and x.size // out.size > 256
    return "a long sum in half precision" if call.arguments[0] in (2, 3) and x.dtype in HALVES and long else ""


def scan(call: Call) -> str:
    x = call.inputs[0]
    if call.arguments[0] == 4 and x.dtype not in FLOATS | {"complex64"}:
        return "logaddexp of floats only"
    return "nothing to scan" if not x.size else ""


def fft(call: Call) -> str:
    axes, inverse, real = call.arguments[:3]
    x, out = call.inputs[0], call.outputs[0]
    if real and (out if inverse else x).shape[axes[-1]] == 1:
        return "a real transform of length 1 is wrong"
    lengths = [(out if inverse and real else x).shape[axis] for axis in axes]
    if any(n > (2**23 if n & (n - 1) else 2**24) for n in lengths):
        return "too long"
    return "nothing to transform" if not x.size else ""


def convolution(call: Call) -> str:
    if len(call.outputs[0].shape) not in (3, 4, 5):
        return "convolutions have 1 to 3 spatial axes"
    if not call.inputs[0].size or not call.inputs[1].size:
        return "nothing to convolve"
    return "too many outputs" if call.outputs[0].size // call.inputs[1].shape[0] >= 2**31 else ""


def packed(call: Call) -> str:
    group, bits, mode = call.arguments[:3]
    if not call.inputs[0].size:
        return "nothing to multiply"
    if mode == 0:
        return "" if group in (32, 64, 128) and bits in (1, 2, 3, 4, 5, 6, 8) else "no such group or width"
    return "" if group == (16 if mode == 3 else 32) else "no such group"


def empty(call: Call) -> str:
    return "nothing to sort" if not call.inputs[0].size else ""


RULES: dict[str, Callable[[Call], str]] = {
    "Scatter": scatter,
    "ScatterAxis": lambda call: (
        "complex numbers are only summed" if call.inputs[0].dtype == "complex64" and call.arguments[0] != 0 else ""
    ),
    "Gather": gather,
    "Reduce": reduce,
    "Scan": scan,
    "FFT": fft,
    "Convolution": convolution,
    "QuantizedMatmul": packed,
    "GatherQMM": packed,
    **dict.fromkeys(("Sort", "ArgSort", "Partition", "ArgPartition"), empty),
    "Softmax": lambda call: (
        "halves summed as halves" if call.arguments[:1] == (False,) and call.inputs[0].dtype in HALVES else ""
    ),
    "BitwiseBinary": lambda call: (
        "bools are not shifted" if call.arguments[0] in (3, 4) and call.inputs[0].dtype == "bool" else ""
    ),
    "Equal": lambda call: (
        "NaNs of floats only"
        if call.arguments[:1] == (True,) and call.inputs[0].dtype not in FLOATS | {"complex64"}
        else ""
    ),
}


def judge(call: Call) -> str:
    """Why Metal refuses a node, or an empty string."""
    if any(o.dtype == "float64" for o in (*call.inputs, *call.outputs)):
        return "there is no float64"
    if call.name not in KERNELS:
        return "an unknown primitive"
    if not KERNELS[call.name]:
        return "MLX runs it on the CPU only"
    if call.typed.dtype not in KERNELS[call.name]:
        return f"no kernel for {call.typed.dtype}"
    return RULES.get(call.name, lambda call: "")(call)


# The trace.


def refusals(function: Callable[..., Any], *arguments: Any) -> list[str]:
    """What Metal would refuse of `function(*arguments)`, one line per node; empty if nothing."""
    nodes: list[Any] = []
    arrays: list[mx.array] = []
    form = taken_apart(list(arguments), arrays)

    def flat(*values: mx.array) -> tuple[mx.array, ...]:
        results: list[mx.array] = []
        taken_apart(function(*put_together(form, iter(values))), results)
        return tuple(results)

    with watched() as found:
        mx.export_function(lambda node: nodes.append(node) if node["type"] == "primitive" else None, flat, *arrays)
    for node in nodes:
        operands = [tuple(Operand.of(*value[1:]) for value in node[side]) for side in ("inputs", "outputs")]
        call = Call(node["name"], tuple(node["arguments"]), *operands)
        why = judge(call)
        if why:
            found.append(f"{call}: {why}")
    return found


def taken_apart(value: Any, arrays: list[mx.array]) -> Any:
    """The form of nested sequences, with `...` for each array; the arrays are appended to `arrays`."""
    if isinstance(value, list | tuple):
        return [taken_apart(item, arrays) for item in value]
    if not isinstance(value, mx.array):
        return value
    arrays.append(value)
    return ...


def put_together(form: Any, arrays: Iterator[mx.array]) -> Any:
    if isinstance(form, list):
        return [put_together(item, arrays) for item in form]
    return next(arrays) if form is ... else form


@contextlib.contextmanager
def watched() -> Iterator[list[str]]:
    """While a function is traced: judges calls that the trace would not show, and hides what is not Metal's."""
    found: list[str] = []

    def floats_only(name: str) -> Callable[..., None]:
        def judge(result: Any, *arguments: Any, **keywords: Any) -> None:
            x = Operand.of(arguments[0].shape, arguments[0].dtype)
            if x.dtype not in FLOATS or not x.size:
                found.append(f"{name}({x.dtype}{list(x.shape)}): no kernel")

        return judge

    def integers_only(result: Any, x: Any, **keywords: Any) -> None:
        if str(x.dtype).removeprefix("mlx.core.") not in KERNELS["BitwiseInvert"]:
            found.append(f"BitwiseInvert({x.dtype}): no kernel")

    def on_gpu_stream(name: str) -> Callable[..., None]:
        return lambda result, *arguments, **keywords: found.append(f"linalg.{name}: MLX runs it on the CPU only")

    with contextlib.ExitStack() as stack:
        for name in ("scaled_dot_product_attention", "rms_norm", "layer_norm", "rope"):
            stack.enter_context(replaced(mx.fast, name, floats_only(name)))
        for name in ("inv", "det", "slogdet", "lu", "solve", "cholesky", "qr", "svd", "eigh", "pinv"):
            stack.enter_context(replaced(mx.linalg, name, on_gpu_stream(name)))
        for name in INEXPORTABLE:
            nothing = integers_only if name == "bitwise_invert" else lambda result, *a, **k: None
            stack.enter_context(replaced(mx, name, nothing))
        stack.enter_context(replaced(mx.array, "__invert__", integers_only))
        for module in [m for n, m in sys.modules.items() if n.startswith("ep.backends.mlx")]:
            if hasattr(module, "on_cpu_stream"):
                stack.enter_context(moved(module, found))
        yield found


@contextlib.contextmanager
def replaced(owner: Any, name: str, seen: Callable[..., None]) -> Iterator[None]:
    """Reports each call of a function, and hides what the function expands to."""
    original = getattr(owner, name)

    def call(*arguments: Any, **keywords: Any) -> Any:
        result = original(*arguments, **keywords)
        seen(result, *arguments, **keywords)
        return hidden(result, [*arguments, *keywords.values()])

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextlib.contextmanager
def moved(module: Any, found: list[str]) -> Iterator[None]:
    """Hides what a module computes on the CPU stream, where all is legal."""
    original = module.on_cpu_stream

    def call(function: Callable[..., Any], *arrays: Any) -> Any:
        count = len(found)
        result = function(*arrays)
        del found[count:]
        return hidden(result, list(arrays))

    module.on_cpu_stream = call
    try:
        yield
    finally:
        module.on_cpu_stream = original


def hidden(result: Any, arguments: list[Any]) -> Any:
    """Arrays of the result's shapes that depend on the arguments, and on nothing else."""
    needed = [a for a in arguments if isinstance(a, mx.array)]
    if isinstance(result, tuple | list):
        return tuple(hidden(r, arguments) for r in result)
    like = mx.zeros(result.shape, result.dtype)
    return mx.depends(like, needed) if needed else like
