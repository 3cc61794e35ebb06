"""What `mlx.core` does differently: the array namespace of the MLX provider (contract: `ep/namespace.py`).

Everything here is legal on Metal: no float64 is created that the caller did not bring, no integer matmul,
no sort of bools, no 64-bit scatter on the GPU.
"""

from __future__ import annotations

import threading
from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np
from mlx.core import *  # noqa: F403

from ep.backends.mlx.dtypes import HALVES, NUMPY_DTYPES, mlx_dtype
from ep.backends.mlx.fused import attention  # noqa: F401
from ep.backends.mlx.indexing import pad, scatter, slice_update, take, take_along_axis  # noqa: F401
from ep.backends.mlx.products import einsum, int8_factor, matmul  # noqa: F401
from ep.backends.mlx.target import on_cpu_stream, on_gpu
from ep.backends.mlx.windows import conv, conv_transpose, pool, row_major, windows  # noqa: F401
from ep.program import Untraceable

# Conversion


def asarray(x: Any, dtype: Any = None) -> mx.array:
    if isinstance(x, mx.array):
        return x if dtype is None else x.astype(mlx_dtype(dtype))
    if isinstance(x, bool | int | float | complex) and not isinstance(x, np.generic):
        return mx.array(x) if dtype is None else mx.array(x, mlx_dtype(dtype))
    x = np.asarray(x)
    x = x if x.flags.c_contiguous else x.copy()  # MLX keeps strides, and exports such a constant wrongly
    theirs = mlx_dtype(x.dtype)
    if theirs == mx.bfloat16:
        array = mx.array(x.view(np.uint16)).view(mx.bfloat16)
    else:
        array = mx.array(x, theirs)  # naming the dtype keeps float64, which MLX would narrow silently
    return array if dtype is None else array.astype(mlx_dtype(dtype))


reads = threading.local()  # `count` of arrays that this thread has read, also while it traces


def to_numpy(x: Any) -> np.ndarray:
    if not isinstance(x, mx.array):
        return np.asarray(x)
    try:
        reads.count = getattr(reads, "count", 0) + 1
        if x.dtype == mx.bfloat16:
            return np.array(x.view(mx.uint16)).view(ml_dtypes.bfloat16)
        return np.array(x)
    except ValueError as cause:  # "[eval] Attempting to eval an array during function transformations"
        raise Untraceable("a value is read that exists only when the compiled function runs") from cause


def astype(x: Any, dtype: Any) -> mx.array:
    return asarray(x).astype(mlx_dtype(dtype))


def dtype_of(x: Any) -> np.dtype:
    return NUMPY_DTYPES[x.dtype] if isinstance(x, mx.array) else np.asarray(x).dtype


def bitcast(x: Any, dtype: Any) -> mx.array:
    if x.ndim == 0:  # views of scalars are refused
        return mx.reshape(mx.view(mx.reshape(x, (1,)), mlx_dtype(dtype)), ())
    return mx.view(x, mlx_dtype(dtype))


def contiguous(x: Any) -> mx.array:
    return row_major(x)


# Creation: MLX takes its own dtypes only


def zeros(shape: Any, dtype: Any = np.float32) -> mx.array:
    return mx.zeros(shape, mlx_dtype(dtype))


def ones(shape: Any, dtype: Any = np.float32) -> mx.array:
    return mx.ones(shape, mlx_dtype(dtype))


def full(shape: Any, value: Any, dtype: Any = None) -> mx.array:
    if dtype is not None and not isinstance(value, mx.array):
        value = asarray(np.asarray(value, dtype))  # MLX refuses large unsigned Python ints
    return mx.full(shape, value, None if dtype is None else mlx_dtype(dtype))


def zeros_like(x: Any, dtype: Any = None) -> mx.array:
    return mx.zeros(x.shape, x.dtype if dtype is None else mlx_dtype(dtype))


def ones_like(x: Any, dtype: Any = None) -> mx.array:
    return mx.ones(x.shape, x.dtype if dtype is None else mlx_dtype(dtype))


def full_like(x: Any, value: Any, dtype: Any = None) -> mx.array:
    return full(x.shape, value, dtype_of(x) if dtype is None else dtype)


def arange(start: Any, stop: Any = None, step: Any = 1, dtype: Any = None) -> mx.array:
    if stop is None:
        start, stop = 0, start
    dtype = np.dtype(dtype) if dtype is not None else np.arange(start, stop, step).dtype
    if dtype.kind in "iu":  # mx.arange counts in float64 and loses large integers
        return asarray(np.arange(start, stop, step, dtype))
    return mx.arange(start, stop, step, mlx_dtype(dtype))


def linspace(start: Any, stop: Any, num: int = 50, endpoint: bool = True, dtype: Any = np.float32) -> mx.array:
    return mx.linspace(start, stop, num, endpoint, mlx_dtype(dtype))


def eye(n: int, m: int | None = None, k: int = 0, dtype: Any = np.float32) -> mx.array:
    rows, columns = mx.arange(n)[:, None], mx.arange(n if m is None else m)
    return (columns - rows == k).astype(mlx_dtype(dtype))  # mx.eye scatters, which Metal refuses for int64


def tri(n: int, m: int | None = None, k: int = 0, dtype: Any = np.float32) -> mx.array:
    rows, columns = mx.arange(n)[:, None], mx.arange(n if m is None else m)
    return (columns - rows <= k).astype(mlx_dtype(dtype))


# Elementwise functions


def sigmoid(x: Any) -> mx.array:
    return mx.sigmoid(x)


def sign(x: Any) -> mx.array:
    return mx.where(mx.isnan(x), x, mx.sign(x))  # mx.sign(nan) is 0


def floor_divide(a: Any, b: Any) -> mx.array:
    if not mx.issubdtype(a.dtype, mx.signedinteger):
        return mx.floor_divide(a, b)
    return mx.where(b == -1, -a, mx.floor_divide(a, _no_minus_one(b)))


def remainder(a: Any, b: Any) -> mx.array:
    """The sign is that of b, also that of a zero."""
    if mx.issubdtype(a.dtype, mx.floating):
        r = mx.remainder(a, b)
        return mx.where(r == 0, mx.where(b < 0, -0.0, 0.0).astype(r.dtype), r)
    if not mx.issubdtype(a.dtype, mx.signedinteger):
        return mx.remainder(a, b)
    return mx.where(b == -1, 0, mx.remainder(a, _no_minus_one(b)))


def _no_minus_one(b: Any) -> mx.array:
    return mx.where(b == -1, 1, b)  # the smallest integer by -1 stops the process on x86


def fmod(a: Any, b: Any) -> mx.array:
    r = mx.remainder(mx.abs(a), mx.abs(b))
    return mx.where(a < 0, -r, r)


def left_shift(a: Any, b: Any) -> mx.array:
    bits = 8 * a.dtype.size  # a shift by that much or more is undefined in MLX
    b = mx.array(b, a.dtype) if isinstance(b, int) else b  # a condition without an array would make int32
    return mx.where(b >= bits, 0, mx.left_shift(a, mx.where(b >= bits, 0, b)))


def right_shift(a: Any, b: Any) -> mx.array:
    bits = 8 * a.dtype.size
    b = mx.array(b, a.dtype) if isinstance(b, int) else b
    if mx.issubdtype(a.dtype, mx.signedinteger):
        return mx.right_shift(a, mx.minimum(b, bits - 1))
    return mx.where(b >= bits, 0, mx.right_shift(a, mx.where(b >= bits, 0, b)))


bitwise_left_shift, bitwise_right_shift = left_shift, right_shift


def bitwise_invert(x: Any) -> mx.array:
    return mx.logical_not(x) if x.dtype == mx.bool_ else mx.bitwise_invert(x)


# Reductions: MLX widens bool and small integers; float16 and bfloat16 are accumulated in float32


def _wide(x: Any) -> mx.array:
    return x.astype(mx.float32) if x.dtype in HALVES else x


def _summable(x: Any) -> mx.array:
    """MLX's CPU adds up long axes one by one: 1e-3 off after 70,000 float32 numbers. Metal adds in a tree."""
    long = x.dtype == mx.float32 and x.size > 1 << 12 and not on_gpu()
    return x.astype(mx.float64) if long else _wide(x)


def _reduced(reduce: Any, x: Any, axis: Any, keepdims: bool, of_nothing: float, dtype: Any = None) -> mx.array:
    own = x.dtype if dtype is None else mlx_dtype(dtype)
    if x.size == 0:  # MLX may loop for minutes over an empty axis, or refuse it
        axes = range(x.ndim) if axis is None else [axis] if isinstance(axis, int) else axis
        axes = {i % x.ndim for i in axes}
        return mx.full([1 if i in axes else n for i, n in enumerate(x.shape) if keepdims or i not in axes],
                       of_nothing, own)  # fmt: skip
    return reduce((_summable if reduce in (mx.sum, mx.mean) else _wide)(x), axis=axis, keepdims=keepdims).astype(own)


def sum(x: Any, axis: Any = None, dtype: Any = None, keepdims: bool = False) -> mx.array:
    return _reduced(mx.sum, x, axis, keepdims, 0, dtype)


def prod(x: Any, axis: Any = None, dtype: Any = None, keepdims: bool = False) -> mx.array:
    return _reduced(mx.prod, x, axis, keepdims, 1, dtype)


def mean(x: Any, axis: Any = None, keepdims: bool = False) -> mx.array:
    return _reduced(mx.mean, x, axis, keepdims, np.nan)


def all(x: Any, axis: Any = None, keepdims: bool = False) -> mx.array:
    return _reduced(mx.all, x, axis, keepdims, True, np.bool_)


def any(x: Any, axis: Any = None, keepdims: bool = False) -> mx.array:
    return _reduced(mx.any, x, axis, keepdims, False, np.bool_)


def logsumexp(x: Any, axis: Any = None, keepdims: bool = False) -> mx.array:
    return _reduced(mx.logsumexp, x, axis, keepdims, -np.inf)


def cumsum(x: Any, axis: int) -> mx.array:
    return mx.cumsum(_wide(x), axis=axis).astype(x.dtype) if x.size else x  # Metal's scans take nothing empty


def cumprod(x: Any, axis: int) -> mx.array:
    return mx.cumprod(_wide(x), axis=axis).astype(x.dtype) if x.size else x


def softmax(x: Any, axis: int = -1) -> mx.array:
    return mx.softmax(x, axis=axis, precise=True)


def any_bits(x: Any, axis: int) -> mx.array:
    """MLX reduces integers by sums, products and extrema only: halves are joined until one is left."""
    x = mx.moveaxis(x, axis, 0)
    while (n := x.shape[0]) > 1:
        joined = mx.bitwise_or(x[: n // 2], x[n // 2 : n - n % 2])
        x = mx.concatenate([joined, x[n - 1 :]]) if n % 2 else joined
    return x[0]


def argmax(x: Any, axis: int, keepdims: bool = False) -> mx.array:
    return _position(mx.argmax, x, axis, keepdims)


def argmin(x: Any, axis: int, keepdims: bool = False) -> mx.array:
    return _position(mx.argmin, x, axis, keepdims)


def _position(find: Any, x: Any, axis: int, keepdims: bool) -> mx.array:
    if x.size == 0 and x.shape[axis]:  # MLX refuses empty arrays, also where there is nothing to find
        return mx.zeros_like(mx.sum(x, axis=axis, keepdims=keepdims)).astype(mx.int64)
    return find(_sortable(x), axis=axis, keepdims=keepdims).astype(mx.int64)  # MLX gives uint32


# Order


def _sortable(x: Any) -> mx.array:
    return x.astype(mx.uint8) if x.dtype == mx.bool_ else x  # Metal sorts no bools


def argsort(x: Any, axis: int = -1, descending: bool = False) -> mx.array:
    if x.size == 0:
        return mx.zeros(x.shape, mx.int64)
    x = _sortable(x)
    if not descending:
        return mx.argsort(x, axis=axis).astype(mx.int64)
    order = mx.argsort(mx.flip(x, axis), axis=axis).astype(mx.int64)
    return x.shape[axis] - 1 - mx.flip(order, axis)


def sort(x: Any, axis: int = -1) -> mx.array:
    return mx.sort(_sortable(x), axis=axis).astype(x.dtype) if x.size else x


def topk(x: Any, k: int, axis: int = -1, largest: bool = True) -> tuple[mx.array, mx.array]:
    if k == 1:  # Metal's sorts cost much more than finding the extreme
        indices = (argmax if largest else argmin)(x, axis, keepdims=True)
    else:
        indices = take(argsort(x, axis, descending=largest), np.arange(k), axis)
    return take_along_axis(x, indices, axis), indices


# Linear algebra


def det(x: Any) -> mx.array:
    return on_cpu_stream(mx.linalg.det, x)  # MLX factorises on the CPU only


def inv(x: Any) -> mx.array:
    return on_cpu_stream(mx.linalg.inv, x)


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
    return carry, tuple(mx.stack(column) for column in zip(*rows, strict=True))


def while_loop(cond: Any, body: Any, carry: Any) -> Any:
    while bool(to_numpy(cond(carry))):
        carry = body(carry)
    return carry


def cond(c: Any, then: Any, otherwise: Any) -> Any:
    return (then if bool(to_numpy(c)) else otherwise)()


def rolled_loops() -> bool:
    return False  # MLX has no loops: a trace unrolls them


# Derivatives


def vjp(f: Any, xs: Any) -> tuple[mx.array, ...]:
    def function(*xs: mx.array) -> list[mx.array]:
        return [asarray(f(*xs))]

    (y,) = function(*xs)
    _, derivatives = mx.vjp(function, list(xs), [mx.ones(y.shape, y.dtype)])
    return tuple(derivatives)


# Random numbers


def _key(seed: Any) -> mx.array:
    if isinstance(seed, mx.array):
        return mx.stack([seed.astype(mx.uint64) >> 32, seed.astype(mx.uint64)]).astype(mx.uint32)
    return mx.random.key(int(seed))


def random_uniform(shape: Any, seed: Any, low: float = 0.0, high: float = 1.0, dtype: Any = np.float32) -> mx.array:
    numbers = mx.random.uniform(low, high, tuple(shape), key=_key(seed))
    return numbers.astype(mlx_dtype(dtype))


def random_normal(shape: Any, seed: Any, mean: float = 0.0, scale: float = 1.0, dtype: Any = np.float32) -> mx.array:
    numbers = mx.random.normal(tuple(shape), key=_key(seed))
    return (numbers * scale + mean).astype(mlx_dtype(dtype))
