"""What `jax.numpy` does differently: the array namespace of the JAX provider (contract: `ep/namespace.py`).

Every function runs inside the caller's `jax.enable_x64(True)` scope, under standard or strict promotion.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jax.numpy import *  # noqa: F403

from ep.backends.jax.windows import conv, conv_transpose, pool, windows  # noqa: F401
from ep.program import Untraceable

HALVES = frozenset({np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)})


# Conversion


def asarray(x: Any, dtype: Any = None) -> jax.Array:
    return jnp.asarray(x, dtype=dtype)


def to_numpy(x: Any) -> np.ndarray:
    try:
        return np.asarray(x)
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as cause:
        raise Untraceable("a value is read that exists only when the compiled function runs") from cause


def astype(x: Any, dtype: Any) -> jax.Array:
    x = jnp.asarray(x)
    if jnp.iscomplexobj(x) and np.dtype(dtype).kind != "c":
        x = jnp.real(x)
    return x.astype(dtype)


def dtype_of(x: Any) -> np.dtype:
    return np.dtype(x.dtype) if hasattr(x, "dtype") else np.asarray(x).dtype


def bitcast(x: Any, dtype: Any) -> jax.Array:
    if x.dtype == np.bool_:  # the one dtype that XLA has no bits for
        x = x.astype(np.uint8)
    if dtype == np.bool_:
        return lax.bitcast_convert_type(x, np.uint8) != 0
    return lax.bitcast_convert_type(x, dtype)


def contiguous(x: Any) -> jax.Array:
    return x  # layouts are XLA's


def _wide(x: Any) -> jax.Array:
    """Float16 and bfloat16 lose digits in sums: they are accumulated in float32."""
    return x.astype(np.float32) if x.dtype in HALVES else x


# Elementwise functions and reductions


def divide(a: Any, b: Any) -> jax.Array:
    """XLA multiplies with the rounded reciprocal of a broadcast divisor: 41 / 41 < 1. A select hides it."""
    quotient_dtype = jnp.result_type(a, b)
    if not jnp.issubdtype(quotient_dtype, np.floating):
        return jnp.divide(a, b)
    return jnp.divide(a, jnp.where(a == a, b, np.nan))


erf = lax.erf
rsqrt = lax.rsqrt
sigmoid = jax.nn.sigmoid


def max(x: Any, axis: Any = None, keepdims: bool = False) -> jax.Array:
    return _extremum(jnp.max, x, axis, keepdims)


def min(x: Any, axis: Any = None, keepdims: bool = False) -> jax.Array:
    return _extremum(jnp.min, x, axis, keepdims)


def _extremum(reduce: Any, x: Any, axis: Any, keepdims: bool) -> jax.Array:
    """NaN wins, as NumPy has it: XLA's CPU kernels for larger arrays skip it."""
    found = reduce(x, axis=axis, keepdims=keepdims)
    if not jnp.issubdtype(found.dtype, jnp.floating):
        return found
    return jnp.where(jnp.any(jnp.isnan(x), axis=axis, keepdims=keepdims), jnp.nan, found)


def softmax(x: Any, axis: int = -1) -> jax.Array:
    return jax.nn.softmax(_wide(x), axis=axis).astype(x.dtype)


def logsumexp(x: Any, axis: Any = None, keepdims: bool = False) -> jax.Array:
    return jax.nn.logsumexp(_wide(x), axis=axis, keepdims=keepdims).astype(x.dtype)


def sum(x: Any, axis: Any = None, dtype: Any = None, keepdims: bool = False) -> jax.Array:
    wide = _wide(x)
    return jnp.sum(wide, axis=axis, dtype=wide.dtype, keepdims=keepdims).astype(dtype or x.dtype)


def prod(x: Any, axis: Any = None, dtype: Any = None, keepdims: bool = False) -> jax.Array:
    wide = _wide(x)
    return jnp.prod(wide, axis=axis, dtype=wide.dtype, keepdims=keepdims).astype(dtype or x.dtype)


def mean(x: Any, axis: Any = None, keepdims: bool = False) -> jax.Array:
    return jnp.mean(_wide(x), axis=axis, keepdims=keepdims).astype(x.dtype)


def cumsum(x: Any, axis: int) -> jax.Array:
    wide = _wide(x)
    return jnp.cumsum(wide, axis=axis, dtype=wide.dtype).astype(x.dtype)


def cumprod(x: Any, axis: int) -> jax.Array:
    wide = _wide(x)
    return jnp.cumprod(wide, axis=axis, dtype=wide.dtype).astype(x.dtype)


def matmul(a: Any, b: Any, dtype: Any = None) -> jax.Array:
    """XLA accumulates halves in float32 by itself; 8-bit products are what accelerators have."""
    if dtype is None and a.dtype in HALVES and b.dtype == np.float32:  # see `Factor`
        return jnp.matmul(a.astype(np.float32), b).astype(a.dtype)
    if dtype is None or a.dtype == b.dtype == np.int8:
        return jnp.matmul(a, b, preferred_element_type=dtype)
    return jnp.matmul(a.astype(dtype), b.astype(dtype))


def int8_factor(b: Any) -> jax.Array:
    return b


def attention(q: Any, k: Any, v: Any, scale: float, mask: Any = None, sink: Any = None) -> Any:
    return NotImplemented  # XLA sees the products and the softmax, and fuses what it can


einsum = jnp.einsum


def any_bits(x: Any, axis: int) -> jax.Array:
    return lax.reduce(x, np.zeros((), x.dtype), lax.bitwise_or, (axis % x.ndim,))


def argmax(x: Any, axis: int, keepdims: bool = False) -> jax.Array:
    return jnp.argmax(x, axis=axis, keepdims=keepdims).astype(np.int64)


def argmin(x: Any, axis: int, keepdims: bool = False) -> jax.Array:
    return jnp.argmin(x, axis=axis, keepdims=keepdims).astype(np.int64)


det = jnp.linalg.det
inv = jnp.linalg.inv


# Order


def argsort(x: Any, axis: int = -1, descending: bool = False) -> jax.Array:
    return jnp.argsort(x, axis=axis, stable=True, descending=descending).astype(np.int64)


def topk(x: Any, k: int, axis: int = -1, largest: bool = True) -> tuple[jax.Array, jax.Array]:
    last = jnp.moveaxis(x, axis, -1)
    _, indices = lax.top_k(_ranked(last, largest), k)
    values = take_along_axis(last, indices, -1)
    return jnp.moveaxis(values, -1, axis), jnp.moveaxis(indices, -1, axis).astype(np.int64)


def _ranked(x: Any, largest: bool) -> jax.Array:
    """Keys whose largest come first: XLA orders -0.0 before 0.0, and knows no smallest."""
    if jnp.issubdtype(x.dtype, np.floating):
        x = jnp.where(x == 0, 0, x)
        return x if largest else -x
    if x.dtype == np.bool_:
        x = x.astype(np.uint8)
    return x if largest else ~x


# Indexing


def take(x: Any, indices: Any, axis: int = 0) -> jax.Array:
    axis = axis % x.ndim
    index = (slice(None),) * axis + (_wrapped(indices, x.shape[axis]),)
    return x.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)


def take_along_axis(x: Any, indices: Any, axis: int) -> jax.Array:
    return jnp.take_along_axis(x, _wrapped(indices, x.shape[axis]), axis=axis, mode="promise_in_bounds")


def _wrapped(indices: Any, size: int) -> jax.Array:
    indices = jnp.asarray(indices)
    if not jnp.issubdtype(indices.dtype, np.signedinteger):
        return indices
    return jnp.where(indices < 0, indices + size, indices)


_SCATTER = {"none": "set", "add": "add", "mul": "multiply", "max": "max", "min": "min"}


def scatter(x: Any, index: tuple[Any, ...], updates: Any, reduction: str = "none") -> jax.Array:
    return getattr(jnp.asarray(x).at[index], _SCATTER[reduction])(updates)


def slice_update(x: Any, update: Any, starts: Any) -> jax.Array:
    return lax.dynamic_update_slice(x, update, [jnp.asarray(s, np.int32) for s in starts])


def pad(x: Any, pads: Any, mode: str = "constant", constant_values: Any = 0) -> jax.Array:
    if not pads:
        return x
    if mode == "constant":
        return jnp.pad(x, pads, constant_values=jnp.asarray(constant_values, x.dtype))
    return jnp.pad(x, pads, mode=mode)


# Control flow


def scan(f: Any, carry: Any, xs: Any, length: int | None = None, reverse: bool = False) -> tuple[Any, Any]:
    return lax.scan(f, tuple(carry), tuple(xs), length=length, reverse=reverse)


def while_loop(cond: Any, body: Any, carry: Any) -> Any:
    return lax.while_loop(cond, body, carry)


def cond(c: Any, then: Any, otherwise: Any) -> Any:
    if not isinstance(c, jax.core.Tracer):
        return (then if bool(c) else otherwise)()
    try:
        return lax.cond(c, lambda: _arrays(then()), lambda: _arrays(otherwise()))
    except TypeError as cause:
        raise Untraceable("the branches give different shapes or dtypes") from cause


def _arrays(values: Any) -> tuple[Any, ...]:
    return tuple(jnp.asarray(v) if isinstance(v, np.ndarray) else v for v in values)


def rolled_loops() -> bool:
    return isinstance(jnp.zeros(()), jax.core.Tracer)


# Derivatives


def vjp(f: Any, xs: Any) -> tuple[jax.Array, ...]:
    y, pull = jax.vjp(lambda *xs: jnp.asarray(f(*xs)), *xs)
    return pull(jnp.ones_like(y))


# Random numbers


def random_uniform(shape: Any, seed: Any, low: float = 0.0, high: float = 1.0, dtype: Any = np.float32) -> jax.Array:
    return jax.random.uniform(jax.random.key(seed), tuple(shape), dtype, low, high)


def random_normal(shape: Any, seed: Any, mean: float = 0.0, scale: float = 1.0, dtype: Any = np.float32) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), tuple(shape), dtype) * scale + mean
