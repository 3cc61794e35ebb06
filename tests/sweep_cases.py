"""Random nodes for the differential sweep: for an operator, an opset and a dtype, inputs and attributes that are valid.

Shapes have rank 0 to 4 and sizes from 0; values contain NaN, infinities, -0.0, subnormals, and the ends of integers.
`MAKERS` says for each operator how a case is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import onnx

Rng = np.random.Generator
DTYPES = {
    "float": np.float32, "double": np.float64, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16,
    "bool": np.bool_, "string": object,
    **{f"{u}int{b}": np.dtype(f"{u}int{b}").type for u in ("", "u") for b in (8, 16, 32, 64)},
}  # fmt: skip


@dataclass
class Case:
    """One node: its operator, opset, inputs (`None` where omitted) and attributes."""

    op: str
    opset: int
    inputs: list[Any]
    attributes: dict[str, Any] = field(default_factory=dict)
    outputs: int = 1
    scale: float = 1.0  # how much more than one rounding the result may be off
    operand: float = 0.0  # of what magnitude: a sum may cancel what its operands were rounded to

    def __str__(self) -> str:
        shown = ", ".join("-" if x is None else f"{x.dtype}{list(x.shape)}" for x in self.inputs)
        return f"{self.op}-{self.opset}({shown}) {self.attributes}"


Maker = Callable[[Rng, int, Any], Case | None]
MAKERS: dict[str, Maker] = {}


def maker(*ops: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function of (op, rng, opset, dtype) for several operators."""

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        for op in ops:
            MAKERS[op] = lambda rng, opset, dtype, op=op: fn(op, rng, opset, dtype)  # type: ignore[misc]
        return fn

    return register


# Values and shapes.

EXTREMES = (np.nan, np.inf, -np.inf, -0.0, 0.0, 1e-40, 0.5, 1.5, 2.5, -0.5, -1.5, 3e38, -3e38)


def values(rng: Rng, dtype: Any, shape: tuple[int, ...], extreme: float = 0.25) -> np.ndarray:
    """Random values of a dtype; in a share of the arrays, some elements are extreme."""
    dtype = np.dtype(dtype)
    wild = rng.random() < extreme
    if dtype.hasobject:
        return rng.choice(np.array(["", "a", "Bc", "é x", "1.5"], object), shape)
    if dtype == np.bool_:
        return rng.random(shape) < 0.5
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        x = rng.integers(max(info.min, -9), min(info.max, 10), shape).astype(dtype)
        ends = np.array([info.min, info.max, 0, 1], dtype)
        return np.where(rng.random(shape) < 0.3, rng.choice(ends, shape), x).astype(dtype) if wild else x
    x = (rng.standard_normal(shape) * 3).astype(np.float32)
    if wild:
        x = np.where(rng.random(shape) < 0.4, rng.choice(np.array(EXTREMES, np.float32), shape), x)
    with np.errstate(all="ignore"):
        return np.asarray(x).astype(dtype)


def shape_of(rng: Rng, least: int = 0, most: int = 4, empty: float = 0.08) -> tuple[int, ...]:
    rank = int(rng.integers(least, most + 1))
    return tuple(0 if rng.random() < empty else int(rng.integers(1, 5)) for _ in range(rank))


def partner(rng: Rng, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape that broadcasts to `shape`."""
    own = [1 if rng.random() < 0.3 else n for n in shape]
    return tuple(own[int(rng.integers(0, len(own) + 1)) :]) if rng.random() < 0.4 else tuple(own)


def axis_of(rng: Rng, rank: int) -> int:
    return int(rng.integers(-rank, rank)) if rank else 0


def ints(*values: Any) -> np.ndarray:
    return np.array(values, np.int64)


def coin(rng: Rng, p: float = 0.5) -> bool:
    return bool(rng.random() < p)


def is_float(dtype: Any) -> bool:
    return np.dtype(dtype).kind == "f" or np.dtype(dtype) == ml_dtypes.bfloat16


# Elementwise

UNARY = (
    "Abs Neg Sign Ceil Floor Round Sqrt Exp Log Reciprocal Relu Sigmoid Tanh Erf Sin Cos Tan Asin Acos Atan Sinh Cosh "
    "Asinh Acosh Atanh Softplus Softsign Identity Not BitwiseNot IsNaN IsInf HardSwish Mish Shape Size"
).split()


CURVED = set(UNARY) - set("Abs Neg Sign Ceil Floor Round Relu Identity Not BitwiseNot IsNaN IsInf Shape Size".split())


@maker(*UNARY)
def unary(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    return Case(op, opset, [values(rng, dtype, shape_of(rng))], scale=4 if op in CURVED else 1)


ALPHA = {
    "LeakyRelu": ("alpha",), "Elu": ("alpha",), "Selu": ("alpha", "gamma"), "Celu": ("alpha",),
    "HardSigmoid": ("alpha", "beta"), "ThresholdedRelu": ("alpha",), "Shrink": ("lambd", "bias"),
}  # fmt: skip


@maker(*ALPHA)
def with_alpha(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    attributes = {n: float(np.float32(rng.random() + 0.1)) for n in ALPHA[op] if coin(rng)}
    return Case(op, opset, [values(rng, dtype, shape_of(rng))], attributes)


@maker("Gelu")
def gelu(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    return Case(
        op, opset, [values(rng, dtype, shape_of(rng))], {"approximate": str(rng.choice(["none", "tanh"]))}, scale=8
    )


@maker("Swish")
def swish(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    return Case(
        op, opset, [values(rng, dtype, shape_of(rng))], {"alpha": float(np.float32(rng.random() + 0.5))}, scale=4
    )


BINARY = (
    "Add Sub Mul Div And Or Xor Equal Less Greater LessOrEqual GreaterOrEqual BitwiseAnd BitwiseOr BitwiseXor".split()
)


@maker(*BINARY)
def binary(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    shape = shape_of(rng)
    a, b = values(rng, dtype, shape), values(rng, dtype, partner(rng, shape))
    if op == "Div" and np.dtype(dtype).kind in "iu":
        b = np.where(b == 0, np.ones_like(b), b)  # undefined
    return Case(op, opset, [b, a] if coin(rng) and op != "Div" else [a, b])


@maker("Mod")
def mod(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    shape = shape_of(rng)
    a, b = values(rng, dtype, shape), values(rng, dtype, partner(rng, shape))
    whole = np.dtype(dtype).kind in "iu"
    return Case(
        op, opset, [a, np.where(b == 0, np.ones_like(b), b) if whole else b], {"fmod": int(not whole or coin(rng))}
    )


@maker("Pow")
def power(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    shape = shape_of(rng)
    b = values(rng, dtype, partner(rng, shape), 0.1)
    if np.dtype(dtype).kind in "iu":
        b = np.abs(b.astype(np.int64) % 4).astype(dtype)
    return Case(op, opset, [values(rng, dtype, shape, 0.1), b], scale=4)


@maker("BitShift")
def bit_shift(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    shape = shape_of(rng)
    by = rng.integers(0, 8 * np.dtype(dtype).itemsize, partner(rng, shape)).astype(dtype)
    return Case(op, opset, [values(rng, dtype, shape), by], {"direction": str(rng.choice(["LEFT", "RIGHT"]))})


@maker("Max", "Min", "Sum", "Mean")
def variadic(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    shape = shape_of(rng)
    count = int(rng.integers(1, 4))
    shapes = [shape if i == 0 or opset < 8 else partner(rng, shape) for i in range(count)]
    return Case(op, opset, [values(rng, dtype, s) for s in shapes], scale=2)


@maker("Where")
def where(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    shape = shape_of(rng)
    parts = [values(rng, t, shape if i == 1 else partner(rng, shape)) for i, t in enumerate((bool, dtype, dtype))]
    return Case(op, opset, parts)


@maker("PRelu")
def prelu(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    shape = shape_of(rng)
    return Case(op, opset, [values(rng, dtype, shape), values(rng, dtype, partner(rng, shape))])


@maker("Clip")
def clip(op: str, rng: Rng, opset: int, dtype: Any) -> Case | None:
    x = values(rng, dtype, shape_of(rng))
    low, high = np.sort(values(rng, dtype, (2,), 0).astype(np.float64)).astype(dtype)
    if opset < 11:
        return Case(op, opset, [x], {"min": float(low), "max": float(high)})
    return Case(op, opset, [x, np.array(low) if coin(rng) else None, np.array(high) if coin(rng) else None])


@maker("Cast")
def cast(op: str, rng: Rng, opset: int, dtype: Any) -> Case | None:
    names = [n for n in DTYPES if n not in ("string",) and (n != "bfloat16" or opset >= 13)]
    to = str(rng.choice(names))
    code = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(DTYPES[to]))
    x = values(
        rng, dtype, shape_of(rng), 0.25 if is_float(dtype) and to in ("float", "double", "float16", "bfloat16") else 0
    )
    if np.dtype(dtype) == object:
        x = np.array(["1", "-2.5", "0"], object)
        return None if to in ("bool",) or "int" in to else Case(op, opset, [x], {"to": code})
    if np.dtype(DTYPES[to]).kind == "u":
        x = np.abs(x) if np.dtype(dtype) != bool else x  # a negative number has no unsigned value
    return Case(op, opset, [x], {"to": code})


# Reductions and order

REDUCE = [f"Reduce{n}" for n in "Sum Mean Max Min Prod L1 L2 SumSquare LogSum LogSumExp".split()]


@maker(*REDUCE)
def reduction(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    shape = shape_of(rng, empty=0.0 if opset < 18 else 0.08)
    x = values(rng, dtype, shape, 0.15)
    if op == "ReduceLogSum" and np.dtype(dtype).kind in "iu":
        x = np.abs(x % 9 + 1).astype(dtype)  # NaN is no integer
    attributes: dict[str, Any] = {"keepdims": int(coin(rng))}
    axes = None
    if coin(rng, 0.7) and shape:
        count = int(rng.integers(1, len(shape) + 1))
        axes = [int(a) - (len(shape) if coin(rng, 0.3) else 0) for a in rng.permutation(len(shape))[:count]]
    inputs: list[Any] = [x]
    by_input = opset >= (13 if op == "ReduceSum" else 18)
    if by_input:
        attributes["noop_with_empty_axes"] = int(coin(rng, 0.3))
        inputs.append(None if axes is None else ints(*axes))
    elif axes is not None:
        attributes["axes"] = axes
    return Case(op, opset, inputs, attributes, scale=8)


@maker("ArgMax", "ArgMin")
def arg(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    shape = shape_of(rng, 1, empty=0)
    x = values(rng, dtype, shape)
    x = np.where(x != x, np.zeros_like(x), x)  # the order of NaN is open
    attributes = {"axis": axis_of(rng, len(shape)), "keepdims": int(coin(rng))}
    if opset >= 12:
        attributes["select_last_index"] = int(coin(rng))
    return Case(op, opset, [x], attributes)


@maker("TopK")
def topk(op: str, rng: Rng, opset: int, dtype: Any) -> Case | None:
    shape = shape_of(rng, 1, empty=0)
    axis = axis_of(rng, len(shape))
    k = int(rng.integers(1, shape[axis] + 1))
    x = values(rng, dtype, shape)
    x = np.where(x != x, np.zeros_like(x), x)
    if opset < 10:
        return None
    attributes = {"axis": axis} | ({"largest": int(coin(rng)), "sorted": 1} if opset >= 11 else {})
    return Case(op, opset, [x, ints(k)], attributes, 2)


@maker("CumSum", "CumProd")
def cumulate(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    shape = shape_of(rng, 1)
    axis = np.array(axis_of(rng, len(shape)), np.int64)
    return Case(
        op,
        opset,
        [values(rng, dtype, shape, 0.1), axis],
        {"exclusive": int(coin(rng)), "reverse": int(coin(rng))},
        scale=8,
    )


@maker("Softmax", "LogSoftmax", "Hardmax")
def softmax(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    shape = shape_of(rng, 1 if opset >= 11 else 2)
    return Case(
        op, opset, [values(rng, dtype, shape, 0.1)], {"axis": axis_of(rng, len(shape)) if opset >= 11 else 1}, scale=4
    )


@maker("LpNormalization")
def lp(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    shape = shape_of(rng, 1)
    return Case(
        op,
        opset,
        [values(rng, dtype, shape, 0)],
        {"axis": axis_of(rng, len(shape)), "p": int(rng.integers(1, 3))},
        scale=4,
    )


# Shape and indexing


@maker("Reshape")
def reshape(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    shape = shape_of(rng)
    x = values(rng, dtype, shape)
    target = list(rng.permutation(shape).astype(int)) if shape else []
    if coin(rng) and target and 0 not in shape:
        target[int(rng.integers(len(target)))] = -1
    more = {"allowzero": 1} if opset >= 14 else {}
    if 0 in target and not more:
        target = [int(n) for n in shape]  # 0 copies the size
    return Case(op, opset, [x, ints(*target)], more)


@maker("Transpose")
def transpose(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    shape = shape_of(rng)
    perm = {"perm": [int(p) for p in rng.permutation(len(shape))]} if coin(rng, 0.8) and shape else {}
    return Case(op, opset, [values(rng, dtype, shape)], perm)


@maker("Squeeze", "Unsqueeze")
def squeeze(op: str, rng: Rng, opset: int, dtype: Any) -> Case | None:
    shape = list(shape_of(rng, 1, 3))
    if op == "Squeeze":
        shape[int(rng.integers(len(shape)))] = 1
        axes = [i - (len(shape) if coin(rng) else 0) for i, n in enumerate(shape) if n == 1]
    else:
        rank = len(shape) + 2
        axes = [int(a) - (rank if coin(rng) else 0) for a in rng.permutation(rank)[:2]]
    if opset < 11:
        axes = sorted(a % (len(shape) + (2 if op == "Unsqueeze" else 0)) for a in axes)
    x = values(rng, dtype, tuple(shape))
    return Case(op, opset, [x], {"axes": axes}) if opset < 13 else Case(op, opset, [x, ints(*axes)])


@maker("Flatten")
def flatten(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    shape = shape_of(rng)
    axis = int(rng.integers(-len(shape) if opset >= 11 else 0, len(shape) + 1))
    return Case(op, opset, [values(rng, dtype, shape)], {"axis": axis})


@maker("Concat")
def concat(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    shape = shape_of(rng, 1)
    axis = axis_of(rng, len(shape)) if opset >= 11 else int(rng.integers(len(shape)))
    parts = []
    for _ in range(int(rng.integers(1, 4))):
        own = list(shape)
        own[axis] = int(rng.integers(0, 4))
        parts.append(values(rng, dtype, tuple(own)))
    return Case(op, opset, parts, {"axis": axis})


@maker("Split")
def split(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    shape = list(shape_of(rng, 1, empty=0))
    axis = axis_of(rng, len(shape)) if opset >= 11 else int(rng.integers(len(shape)))
    parts = [int(n) for n in rng.integers(0, 4, int(rng.integers(1, 4)))]
    shape[axis] = sum(parts)
    x = values(rng, dtype, tuple(shape))
    if opset < 13:
        return Case(op, opset, [x], {"axis": axis, "split": parts}, len(parts))
    return Case(op, opset, [x, ints(*parts)], {"axis": axis}, len(parts))


@maker("Slice")
def slice_(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    shape = shape_of(rng, 1)
    count = int(rng.integers(1, len(shape) + 1))
    axes = [int(a) for a in rng.permutation(len(shape))[:count]]
    odd = [np.iinfo(np.int64).max, np.iinfo(np.int64).min, 100, -100]
    starts, ends = ([int(rng.choice([*range(-5, 6), *odd])) for _ in axes] for _ in range(2))
    if opset < 10:
        return Case(op, opset, [values(rng, dtype, shape)], {"axes": axes, "starts": starts, "ends": ends})
    steps = [int(rng.choice([1, 1, 2, 3, -1, -2, 7, -9])) for _ in axes]
    axes = [a - (len(shape) if coin(rng) else 0) for a in axes]
    return Case(op, opset, [values(rng, dtype, shape), ints(*starts), ints(*ends), ints(*axes), ints(*steps)])


@maker("Pad")
def pad(op: str, rng: Rng, opset: int, dtype: Any) -> Case | None:
    shape = shape_of(rng, 1, empty=0)
    modes = ["constant", "reflect", "edge"] + (["wrap"] if opset >= 19 else [])
    mode = str(rng.choice(modes))
    pads = [
        int(rng.integers(-1 if mode == "constant" else 0, 3 if mode == "constant" else max(1, min(n, 3))))
        for n in shape * 2
    ]
    pads = [max(p, -(shape[i % len(shape)] // 2)) for i, p in enumerate(pads)]
    x = values(rng, dtype, shape)
    if opset < 11:
        return Case(op, opset, [x], {"mode": mode, "pads": pads, "value": 1.5})
    value = values(rng, dtype, (), 0) if coin(rng) else None
    return Case(op, opset, [x, ints(*pads), value], {"mode": mode})


@maker("Expand")
def expand(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    shape = shape_of(rng)
    return Case(op, opset, [values(rng, dtype, partner(rng, shape)), ints(*shape)])


@maker("Tile")
def tile(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    shape = shape_of(rng, 1, 3)
    return Case(op, opset, [values(rng, dtype, shape), ints(*rng.integers(0, 4, len(shape)))])


def indices(rng: Rng, n: int, shape: tuple[int, ...]) -> np.ndarray:
    return rng.integers(-n, n, shape).astype(np.int64)


@maker("Gather")
def gather(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    shape = shape_of(rng, 1, 3, empty=0)
    axis = axis_of(rng, len(shape))
    index = indices(rng, shape[axis], shape_of(rng, 0, 2))
    return Case(
        op, opset, [values(rng, dtype, shape), index if opset >= 11 else np.abs(index) % shape[axis]], {"axis": axis}
    )


@maker("GatherElements")
def gather_elements(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    shape = shape_of(rng, 1, 3, empty=0)
    axis = axis_of(rng, len(shape))
    own = list(shape)
    own[axis] = int(rng.integers(0, 5))
    return Case(op, opset, [values(rng, dtype, shape), indices(rng, shape[axis], tuple(own))], {"axis": axis})


@maker("GatherND")
def gather_nd(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    shape = shape_of(rng, 1, 4, empty=0)
    batch = int(rng.integers(0, len(shape))) if opset >= 12 else 0
    depth = int(rng.integers(1, len(shape) - batch + 1))
    lead = (*shape[:batch], *shape_of(rng, 0 if batch else 1, 2))
    parts = [indices(rng, n, lead) for n in shape[batch : batch + depth]]
    return Case(
        op, opset, [values(rng, dtype, shape), np.stack(parts, axis=-1)], {"batch_dims": batch} if batch else {}
    )


@maker("ScatterElements")
def scatter_elements(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    shape = shape_of(rng, 1, 3, empty=0)
    axis = axis_of(rng, len(shape))
    own = tuple(n if i == axis % len(shape) else int(rng.integers(0, n + 1)) for i, n in enumerate(shape))
    reductions = ["none"] + (["add", "mul"] if opset >= 16 else []) + (["max", "min"] if opset >= 18 else [])
    how = str(rng.choice(reductions)) if np.dtype(dtype).kind not in "bO" else "none"
    order = np.argsort(rng.random(own), axis=axis).astype(np.int64)  # no index twice, unless results are combined
    index = order if how == "none" else indices(rng, shape[axis], own)
    more = {"reduction": how} if opset >= 16 else {}
    extreme = 0.1 if how == "none" else 0
    parts = [values(rng, dtype, shape, extreme), index, values(rng, dtype, own, extreme)]
    return Case(op, opset, parts, {"axis": axis} | more, scale=4)


@maker("ScatterND")
def scatter_nd(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    shape = shape_of(rng, 1, 3, empty=0)
    depth = int(rng.integers(1, len(shape) + 1))
    count = int(rng.integers(0, 4))
    reductions = ["none"] + (["add", "mul"] if opset >= 16 else []) + (["max", "min"] if opset >= 18 else [])
    how = str(rng.choice(reductions)) if np.dtype(dtype).kind not in "bO" else "none"
    places = math.prod(shape[:depth])
    flat = rng.choice(places, min(count, places), replace=how != "none")
    index = np.stack(np.unravel_index(flat, shape[:depth]), axis=-1).astype(np.int64)
    more = {"reduction": how} if opset >= 16 else {}
    updates = values(rng, dtype, (len(flat), *shape[depth:]), 0)
    return Case(op, opset, [values(rng, dtype, shape, 0), index, updates], more, scale=4)


@maker("OneHot")
def one_hot(op: str, rng: Rng, opset: int, dtype: Any) -> Case | None:
    if np.dtype(dtype) not in (np.dtype(np.int64), np.dtype(np.int32), np.dtype(np.float32)):
        return None
    shape, depth = shape_of(rng, 1, 3), int(rng.integers(1, 5))
    axis = int(rng.integers(-len(shape) - 1, len(shape) + 1))
    index = rng.integers(-depth - 1, depth + 1, shape).astype(dtype)
    return Case(op, opset, [index, ints(depth), np.array([0, 1], np.float32)], {"axis": axis})


@maker("Trilu")
def trilu(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    k = ints(rng.integers(-5, 6))[0] if coin(rng) else None
    return Case(
        op, opset, [values(rng, dtype, shape_of(rng, 2)), None if k is None else np.array(k)], {"upper": int(coin(rng))}
    )


@maker("ReverseSequence")
def reverse_sequence(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    shape = shape_of(rng, 2, empty=0)
    batch = int(rng.integers(2))
    lengths = rng.integers(1, shape[1 - batch] + 1, shape[batch])
    return Case(op, opset, [values(rng, dtype, shape), lengths], {"batch_axis": batch, "time_axis": 1 - batch})


@maker("Compress")
def compress(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    shape = shape_of(rng, 1, 3, empty=0)
    axis = axis_of(rng, len(shape)) if coin(rng) else None
    n = math.prod(shape) if axis is None else shape[axis]
    condition = rng.random(int(rng.integers(1, n + 1))) < 0.5
    return Case(
        op,
        opset,
        [values(rng, dtype, shape), condition],
        {} if axis is None else {"axis": axis if opset >= 11 else axis % len(shape)},
    )


@maker("NonZero")
def non_zero(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    x = values(rng, dtype, shape_of(rng, 1))
    return Case(op, opset, [np.where(rng.random(x.shape) < 0.5, np.zeros_like(x), x)])


@maker("Unique")
def unique(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    shape = shape_of(rng, 1, 2, empty=0)
    attributes: dict[str, Any] = {"sorted": int(coin(rng))} | ({"axis": axis_of(rng, len(shape))} if coin(rng) else {})
    return Case(op, opset, [values(rng, dtype, shape, 0)], attributes, 4)


@maker("DepthToSpace", "SpaceToDepth")
def blocks(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    n, c, h, w = (int(v) for v in rng.integers(1, 3, 4))
    if op == "SpaceToDepth":
        return Case(op, opset, [values(rng, dtype, (n, c, 2 * h, 2 * w))], {"blocksize": 2})
    mode = {"mode": str(rng.choice(["DCR", "CRD"]))} if opset >= 11 else {}
    return Case(op, opset, [values(rng, dtype, (n, 4 * c, h, w))], {"blocksize": 2} | mode)


@maker("Range")
def range_(op: str, rng: Rng, opset: int, dtype: Any) -> Case | None:
    if np.dtype(dtype).kind not in "if" or np.dtype(dtype).itemsize < 4:
        return None
    start, stop = (np.array(v, dtype) for v in rng.integers(-5, 10, 2))
    return Case(op, opset, [start, stop, np.array(rng.choice([1, 2, -1, 3]), dtype)])


@maker("EyeLike")
def eye_like(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    return Case(op, opset, [values(rng, dtype, shape_of(rng, 2, 2))], {"k": int(rng.integers(-3, 4))})


# Products, windows, normalization


@maker("MatMul")
def matmul(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    n, k, m = (int(v) for v in rng.integers(1, 5, 3))
    lead = shape_of(rng, 0, 2, empty=0)
    a, b = (*lead, n, k), (*partner(rng, lead), k, m)
    a, b = (k,) if coin(rng, 0.15) else a, (k,) if coin(rng, 0.15) else b
    return Case(op, opset, [values(rng, dtype, a, 0), values(rng, dtype, b, 0)], scale=8)


@maker("Gemm")
def gemm(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    n, k, m = (int(v) for v in rng.integers(1, 5, 3))
    ta, tb = int(coin(rng)), int(coin(rng))
    parts = [values(rng, dtype, (k, n) if ta else (n, k), 0), values(rng, dtype, (m, k) if tb else (k, m), 0)]
    if opset < 11 or coin(rng):
        parts.append(values(rng, dtype, partner(rng, (n, m)), 0))
    more = {} if np.dtype(dtype).kind in "iu" else {"alpha": 0.5, "beta": 2.0}
    return Case(op, opset, parts, {"transA": ta, "transB": tb} | more, scale=8)


@maker("Einsum")
def einsum(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    forms = ["ij,jk->ik", "ii->i", "ij->", "...ij,...jk", "i,j", "ij,ij->j", "bij,bjk->bki", "...i->...", "ijj->i"]
    equation = str(rng.choice(forms))
    sizes = {c: int(rng.integers(1, 4)) for c in "ijkb"}
    shapes = [
        tuple(s for c in term.strip().replace("...", ".") for s in ((2,) if c == "." else (sizes[c],)))
        for term in equation.split("->")[0].split(",")
    ]
    return Case(op, opset, [values(rng, dtype, s, 0) for s in shapes], {"equation": equation}, scale=8)


def window(rng: Rng, rank: int, size: tuple[int, ...]) -> dict[str, Any]:
    kernel = [int(rng.integers(1, min(n, 3) + 1)) for n in size]
    attributes: dict[str, Any] = {"kernel_shape": kernel, "strides": [int(s) for s in rng.integers(1, 3, rank)]}
    if coin(rng, 0.3):
        attributes["auto_pad"] = str(rng.choice(["SAME_UPPER", "SAME_LOWER", "VALID"]))
    elif coin(rng):
        attributes["pads"] = [int(rng.integers(0, k)) for k in kernel * 2]
    return attributes


@maker("MaxPool", "AveragePool", "LpPool")
def pool(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    rank = int(rng.integers(1, 4))
    size = tuple(int(v) for v in rng.integers(2, 7, rank))
    attributes = window(rng, rank, size)
    since = {"MaxPool": 10, "AveragePool": 10, "LpPool": 18}[op]
    if opset >= since and "auto_pad" not in attributes:
        attributes["ceil_mode"] = int(coin(rng))
    if op == "AveragePool":
        attributes["count_include_pad"] = int(coin(rng))
    if (
        opset >= {"MaxPool": 10, "AveragePool": 19, "LpPool": 18}[op]
        and coin(rng, 0.3)
        and "auto_pad" not in attributes
    ):
        attributes["dilations"] = [
            2 if (k - 1) * 2 + 1 <= n else 1 for k, n in zip(attributes["kernel_shape"], size, strict=True)
        ]
    shape = (int(rng.integers(1, 3)), int(rng.integers(1, 3)), *size)
    return Case(op, opset, [values(rng, dtype, shape, 0)], attributes, scale=4)


@maker("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
def global_pool(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    x = values(rng, dtype, shape_of(rng, 3, empty=0), 0)
    return Case(op, opset, [x], scale=4, operand=float(np.abs(x.astype(np.float64)).max()))


@maker("Conv", "ConvTranspose")
def conv(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    rank = int(rng.integers(1, 4))
    size = tuple(int(v) for v in rng.integers(3, 7, rank))
    attributes = window(rng, rank, size)
    groups, a, b = int(rng.integers(1, 3)), int(rng.integers(1, 3)), int(rng.integers(1, 3))
    attributes["group"] = groups
    if coin(rng, 0.3) and "auto_pad" not in attributes:
        attributes["dilations"] = [
            2 if (k - 1) * 2 + 1 <= n else 1 for k, n in zip(attributes["kernel_shape"], size, strict=True)
        ]
    c, o = groups * a, groups * b
    w = (o, a) if op == "Conv" else (c, b)
    if op == "ConvTranspose":
        attributes.pop("auto_pad", None)
        if coin(rng, 0.3):
            attributes["output_padding"] = [int(rng.integers(0, s)) for s in attributes["strides"]]
    parts = [
        values(rng, dtype, (int(rng.integers(1, 3)), c, *size), 0),
        values(rng, dtype, (*w, *attributes["kernel_shape"]), 0),
    ]
    return Case(op, opset, [*parts, values(rng, dtype, (o,), 0) if coin(rng) else None], attributes, scale=16)


@maker("BatchNormalization")
def batch_norm(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    shape = shape_of(rng, 2, empty=0)
    c = (shape[1],)
    parts = [values(rng, dtype, s, 0) for s in (shape, c, c, c)]
    return Case(op, opset, [*parts, np.abs(values(rng, dtype, c, 0))], {"epsilon": 1e-3}, scale=16)


@maker("InstanceNormalization")
def instance_norm(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    shape = shape_of(rng, 3, empty=0)
    return Case(
        op, opset, [values(rng, dtype, s, 0) for s in (shape, shape[1:2], shape[1:2])], {"epsilon": 1e-2}, scale=32
    )


@maker("LayerNormalization", "RMSNormalization")
def layer_norm(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    shape = shape_of(rng, 1, empty=0)
    axis = axis_of(rng, len(shape))
    scale = values(rng, dtype, shape[axis:], 0)
    more = [values(rng, dtype, shape[axis:], 0)] if op == "LayerNormalization" and coin(rng) else []
    return Case(op, opset, [values(rng, dtype, shape, 0), scale, *more], {"axis": axis, "epsilon": 1e-2}, scale=32)


@maker("GroupNormalization")
def group_norm(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    groups, each = int(rng.integers(1, 3)), int(rng.integers(1, 3))
    shape = (2, groups * each, *shape_of(rng, 1, 2, empty=0))
    c = (groups if opset < 21 else groups * each,)
    parts = [values(rng, dtype, s, 0) for s in (shape, c, c)]
    return Case(op, opset, parts, {"num_groups": groups, "epsilon": 1e-2}, scale=32)


@maker("LRN")
def lrn(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    return Case(
        op, opset, [values(rng, dtype, shape_of(rng, 3, empty=0), 0)], {"size": int(rng.choice([1, 3, 5]))}, scale=8
    )


# Quantization


def quantized(rng: Rng, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
    info = np.iinfo(dtype)
    return rng.integers(info.min, info.max + 1, shape).astype(dtype)


@maker("QuantizeLinear", "DequantizeLinear")
def quantize(op: str, rng: Rng, opset: int, dtype: Any) -> Case | None:
    shape = shape_of(rng, 1, 3, empty=0.03)
    axis = axis_of(rng, len(shape)) if opset >= 13 else 0
    per_axis = coin(rng) and opset >= 13
    own = (shape[axis],) if per_axis else ()
    kinds = [np.uint8, np.int8] + ([np.int16, np.uint16] if opset >= 21 else [])
    kind = kinds[int(rng.integers(len(kinds)))]
    scale = np.exp2(rng.integers(-3, 2, own)).astype(np.float32)
    zero = quantized(rng, kind, own)
    more = {"axis": axis} if opset >= 13 else {}
    if op == "QuantizeLinear":
        if np.dtype(dtype) == np.int32 or not is_float(dtype):
            return None
        half = rng.integers(-400, 400, shape) / 2  # many halves: they go to the even neighbour
        return Case(op, opset, [half.astype(dtype), scale.astype(dtype if opset >= 19 else np.float32), zero], more)
    if np.dtype(dtype).kind not in "iu" or np.dtype(dtype).itemsize > 2:
        return None
    return Case(op, opset, [quantized(rng, dtype, shape), scale, quantized(rng, dtype, own)], more)


@maker("DynamicQuantizeLinear")
def dynamic_quantize(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    return Case(op, opset, [values(rng, dtype, shape_of(rng, 1, empty=0), 0)], {}, 3)


@maker("MatMulInteger")
def matmul_integer(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    n, k, m = (int(v) for v in rng.integers(1, 5, 3))
    b = np.int8 if coin(rng) else np.uint8
    zeros = [quantized(rng, dtype, ()), quantized(rng, b, ())] if coin(rng) else []
    return Case(op, opset, [quantized(rng, dtype, (n, k)), quantized(rng, b, (k, m)), *zeros])


# Images


@maker("Resize")
def resize(op: str, rng: Rng, opset: int, dtype: Any) -> Case | None:
    if opset < 13 or dtype is object:
        return None
    size = tuple(int(v) for v in rng.integers(2, 6, 2))
    x = values(rng, dtype, (1, int(rng.integers(1, 3)), *size), 0)
    mode = str(rng.choice(["nearest", "linear", "cubic"]))
    where = ["half_pixel", "align_corners", "asymmetric", "pytorch_half_pixel"] + (
        ["half_pixel_symmetric"] if opset >= 19 else []
    )
    attributes: dict[str, Any] = {"mode": mode, "coordinate_transformation_mode": str(rng.choice(where))}
    if mode == "nearest":
        attributes["nearest_mode"] = str(rng.choice(["floor", "ceil", "round_prefer_floor", "round_prefer_ceil"]))
    if mode == "cubic":
        attributes |= {"cubic_coeff_a": -0.5, "exclude_outside": int(coin(rng))}
    if opset >= 18 and mode != "nearest" and coin(rng, 0.3):
        attributes["antialias"] = 1
    if coin(rng):
        out = [int(v) for v in rng.integers(1, 9, 2)]
        return Case(op, opset, [x, None, None, ints(*x.shape[:2], *out)], attributes, scale=64)
    scales = rng.choice([0.5, 0.75, 1, 1.5, 2], 2)
    return Case(op, opset, [x, None, np.array([1, 1, *scales], np.float32)], attributes, scale=64)


@maker("GridSample")
def grid_sample(op: str, rng: Rng, opset: int, dtype: Any) -> Case | None:
    if dtype is object:
        return None
    rank = 2 if opset < 20 else int(rng.integers(2, 4))
    size = tuple(int(v) for v in rng.integers(2, 5, rank))
    out = tuple(int(v) for v in rng.integers(1, 4, rank))
    grid = (rng.random((1, *out, rank)) * 3 - 1.5).astype(dtype if is_float(dtype) else np.float32)
    modes = ["bilinear", "nearest", "bicubic"] if opset < 20 else ["linear", "nearest", "cubic"]
    attributes = {
        "mode": str(rng.choice(modes[: 3 if rank == 2 else 2])),
        "padding_mode": str(rng.choice(["zeros", "border", "reflection"])), "align_corners": int(coin(rng)),
    }  # fmt: skip
    return Case(op, opset, [values(rng, dtype, (1, 2, *size), 0), grid], attributes, scale=64)


@maker("RoiAlign")
def roi_align(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    corners = np.sort(rng.random((2, 2, 2)) * 5, axis=1).astype(dtype).reshape(2, 4)
    attributes = {
        "mode": str(rng.choice(["avg", "max"])), "output_height": 2, "output_width": 3,
        "sampling_ratio": int(rng.integers(0, 3)), "spatial_scale": 0.75,
    }  # fmt: skip
    if opset >= 16:
        attributes["coordinate_transformation_mode"] = str(rng.choice(["half_pixel", "output_half_pixel"]))
    return Case(op, opset, [values(rng, dtype, (2, 2, 6, 5), 0), corners, ints(0, 1)], attributes, scale=64)


@maker("Det")
def det(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    n = int(rng.integers(1, 4))
    return Case(op, opset, [values(rng, dtype, (*shape_of(rng, 0, 2, empty=0), n, n), 0)], scale=64)


@maker("DFT")
def dft(op: str, rng: Rng, opset: int, dtype: Any) -> Case | None:
    if opset < 20:
        return None
    inverse = coin(rng)
    onesided = not inverse and coin(rng)
    length = int(rng.integers(1, 6) if coin(rng) else rng.integers(6, 70))
    shape = (*shape_of(rng, 1, 2, empty=0), length, 1 if onesided or coin(rng) else 2)
    attributes = {"inverse": int(inverse), "onesided": int(onesided)}
    return Case(op, opset, [values(rng, dtype, shape, 0), None, np.array(-2, np.int64)], attributes, scale=32)


# Which dtypes and opsets a case can be drawn for.


def opsets(op: str, newest: int) -> list[int]:
    """The versions of an operator from opset 7 on, each named by the first opset that has it (at least 7)."""
    versions = sorted(
        {s.since_version for s in onnx.defs.get_all_schemas_with_history() if s.name == op and not s.domain}
    )
    found = sorted({max(v, 7) for v in versions if v <= newest})
    return [v for v in found if onnx.defs.has(op, v) and not onnx.defs.get_schema(op, v).deprecated]


def dtypes(op: str, opset: int) -> list[Any]:
    """Dtypes that the first input may have."""
    schema: Any = onnx.defs.get_schema(op, opset)
    kind = schema.inputs[0].type_str
    allowed = next((c.allowed_type_strs for c in schema.type_constraints if c.type_param_str == kind), [kind])
    names = [t.removeprefix("tensor(").removesuffix(")") for t in allowed]
    return [DTYPES[n] for n in names if n in DTYPES]
