"""What NumPy does differently: the array namespace of the host (contract: `ep/namespace.py`)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ep.host_derivatives import derivatives
from ep.host_windows import HALVES, conv, conv_transpose, pool, windows  # noqa: F401


def __getattr__(name: str) -> Any:
    """All that is the same in NumPy. `from numpy import *` would also import numpy.f2py and numpy.testing: 0.1 s."""
    value = globals()[name] = getattr(np, name)
    return value


# Conversion


def asarray(x: Any, dtype: Any = None) -> np.ndarray:
    return np.asarray(x) if dtype is None else np.asarray(x).astype(dtype, copy=False)


def to_numpy(x: Any) -> np.ndarray:
    return np.asarray(x)


def astype(x: Any, dtype: Any) -> np.ndarray:
    x = np.asarray(x)
    if x.dtype.kind == "c" and np.dtype(dtype).kind != "c":
        x = x.real
    if x.dtype == np.float64 and np.dtype(dtype).isbuiltin == 2:  # one of ml_dtypes
        x = _sticky(x)
    return x.astype(dtype, copy=False)


def _sticky(x: np.ndarray) -> np.ndarray:
    """Doubles as float32 whose last bit says that something is missing: ml_dtypes goes by way of float32."""
    with np.errstate(over="ignore"):
        y = np.asarray(x.astype(np.float32))
    wide = y.astype(np.float64)
    bits = y.view(np.uint32) - (np.abs(wide) > np.abs(x)).astype(np.uint32)  # towards zero
    return np.where((wide == x) | np.isnan(x), y, (bits | 1).view(np.float32))


def dtype_of(x: Any) -> np.dtype:
    return np.asarray(x).dtype


def bitcast(x: Any, dtype: Any) -> np.ndarray:
    return np.ascontiguousarray(x).view(dtype).reshape(np.shape(x))  # ascontiguousarray makes 0-d 1-d


def contiguous(x: Any) -> np.ndarray:
    return np.asarray(x, order="C")


def _wide(x: Any) -> np.ndarray:
    """Float16 and bfloat16 lose digits in sums: they are accumulated in float32, as accelerators do."""
    x = np.asarray(x)
    return x.astype(np.float32) if x.dtype in HALVES else x


# Elementwise functions and reductions that NumPy lacks

_erf = np.frompyfunc(math.erf, 1, 1)


def erf(x: Any) -> np.ndarray:
    x = np.asarray(x)
    return np.asarray(_erf(x.astype(np.float64))).astype(x.dtype)


def sigmoid(x: Any) -> np.ndarray:
    x = np.asarray(x)
    e = np.exp(-np.abs(x))  # never overflows
    return np.where(x >= 0, 1 / (1 + e), e / (1 + e)).astype(x.dtype)


def rsqrt(x: Any) -> np.ndarray:
    return 1 / np.sqrt(x)


def softmax(x: Any, axis: int = -1) -> np.ndarray:
    wide = _wide(x)
    if wide.size == 0:
        return np.asarray(x)
    e = np.exp(wide - np.max(wide, axis=axis, keepdims=True))
    return (e / np.sum(e, axis=axis, keepdims=True)).astype(dtype_of(x))


def logsumexp(x: Any, axis: Any = None, keepdims: bool = False) -> np.ndarray:
    wide = _wide(x)
    top = np.max(wide, axis=axis, keepdims=True, initial=-np.inf)
    top = np.where(np.isfinite(top), top, 0).astype(wide.dtype)
    total = np.log(np.sum(np.exp(wide - top), axis=axis, keepdims=True)) + top
    return (total if keepdims else np.squeeze(total, axis=axis)).astype(dtype_of(x))


def sum(x: Any, axis: Any = None, dtype: Any = None, keepdims: bool = False) -> np.ndarray:
    wide = _wide(x)
    return np.sum(wide, axis=axis, dtype=wide.dtype, keepdims=keepdims).astype(dtype or dtype_of(x))


def prod(x: Any, axis: Any = None, dtype: Any = None, keepdims: bool = False) -> np.ndarray:
    wide = _wide(x)
    return np.prod(wide, axis=axis, dtype=wide.dtype, keepdims=keepdims).astype(dtype or dtype_of(x))


def mean(x: Any, axis: Any = None, keepdims: bool = False) -> np.ndarray:
    return np.mean(_wide(x), axis=axis, keepdims=keepdims).astype(dtype_of(x))


def cumsum(x: Any, axis: int) -> np.ndarray:
    wide = _wide(x)
    return np.cumsum(wide, axis=axis, dtype=wide.dtype).astype(dtype_of(x))


def cumprod(x: Any, axis: int) -> np.ndarray:
    wide = _wide(x)
    return np.cumprod(wide, axis=axis, dtype=wide.dtype).astype(dtype_of(x))


def matmul(a: Any, b: Any, dtype: Any = None) -> np.ndarray:
    if dtype is not None and a.dtype == np.int8 and b.dtype in (np.int8, np.float64):
        return np.asarray(np.matmul(a.astype(np.float64), int8_factor(b))).astype(dtype)
    if dtype is not None:
        a, b = astype(a, dtype), astype(b, dtype)
    return np.asarray(np.matmul(_wide(a), _wide(b))).astype(dtype_of(a), copy=False)


def int8_factor(b: Any) -> np.ndarray:
    return b.astype(np.float64, copy=False)  # exact for products of 8 bits, and with a fast product


def attention(q: Any, k: Any, v: Any, scale: float, mask: Any = None, sink: Any = None) -> Any:
    return NotImplemented


def einsum(subscripts: str, *operands: Any) -> np.ndarray:
    wide = [_wide(x) for x in operands]
    return np.asarray(np.einsum(subscripts, *wide)).astype(dtype_of(operands[0]), copy=False)


def any_bits(x: Any, axis: int) -> np.ndarray:
    return np.asarray(np.bitwise_or.reduce(x, axis=axis))


def argmax(x: Any, axis: int, keepdims: bool = False) -> np.ndarray:
    return np.asarray(np.argmax(x, axis=axis, keepdims=keepdims))


def argmin(x: Any, axis: int, keepdims: bool = False) -> np.ndarray:
    return np.asarray(np.argmin(x, axis=axis, keepdims=keepdims))


def det(x: Any) -> np.ndarray:
    return np.asarray(np.linalg.det(x))


inv = np.linalg.inv


# Order


def argsort(x: Any, axis: int = -1, descending: bool = False) -> np.ndarray:
    if not descending:
        return np.argsort(x, axis=axis, kind="stable")
    last = x.shape[axis] - 1
    return last - np.flip(np.argsort(np.flip(x, axis), axis=axis, kind="stable"), axis)


def topk(x: Any, k: int, axis: int = -1, largest: bool = True) -> tuple[np.ndarray, np.ndarray]:
    order = argsort(x, axis, descending=largest)
    indices = np.take(order, np.arange(k), axis=axis)
    return np.take_along_axis(x, indices, axis), indices


# Indexing


def take(x: Any, indices: Any, axis: int = 0) -> np.ndarray:
    return np.asarray(np.take(x, indices, axis=axis), dtype=x.dtype)  # names the dtype for a single string


_SCATTER = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}


def scatter(x: Any, index: tuple[Any, ...], updates: Any, reduction: str = "none") -> np.ndarray:
    result = np.array(x)
    if reduction == "none":
        result[index] = updates
    else:
        _SCATTER[reduction].at(result, index, updates)
    return result


def slice_update(x: Any, update: Any, starts: Any) -> np.ndarray:
    result = np.array(x)
    result[tuple(slice(int(s), int(s) + n) for s, n in zip(starts, update.shape, strict=True))] = update
    return result


def pad(x: Any, pads: Any, mode: str = "constant", constant_values: Any = 0) -> np.ndarray:
    if not pads:
        return np.asarray(x)
    if mode == "constant":
        return np.pad(x, pads, constant_values=constant_values)
    return np.pad(x, pads, mode=mode)


# Control flow


def scan(f: Any, carry: Any, xs: Any, length: int | None = None, reverse: bool = False) -> tuple[Any, Any]:
    length = xs[0].shape[0] if xs else length
    steps = range(length)
    rows = []
    for i in reversed(steps) if reverse else steps:
        carry, y = f(carry, tuple(x[i] for x in xs))
        rows.append(y)
    if reverse:
        rows.reverse()
    return carry, tuple(np.stack(column) for column in zip(*rows, strict=True))


def while_loop(cond: Any, body: Any, carry: Any) -> Any:
    while cond(carry):
        carry = body(carry)
    return carry


def cond(c: Any, then: Any, otherwise: Any) -> Any:
    return (then if c else otherwise)()


def rolled_loops() -> bool:
    return False


# Derivatives


def vjp(f: Any, xs: Any) -> tuple[np.ndarray, ...]:
    return derivatives(f, xs)  # NumPy knows no derivatives


# Random numbers


def random_uniform(shape: Any, seed: Any, low: float = 0.0, high: float = 1.0, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(int(seed)).uniform(low, high, shape).astype(dtype)


def random_normal(shape: Any, seed: Any, mean: float = 0.0, scale: float = 1.0, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(int(seed)).normal(mean, scale, shape).astype(dtype)
