"""Convolution and pooling of the JAX namespace."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

HALVES = frozenset({np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)})


def conv(x: Any, w: Any, strides: Any, pads: Any, dilations: Any, groups: int = 1) -> jax.Array:
    return _conv(x, w, strides, pads, dilations, groups, (1,) * len(strides))


def _conv(x: Any, w: Any, strides: Any, pads: Any, dilations: Any, groups: int, spread: Any) -> jax.Array:
    rank = x.ndim - 2
    spatial = "DHW"[-rank:] if rank <= 3 else "".join(chr(ord("a") + i) for i in range(rank))
    last = (f"N{spatial}C", f"{spatial}IO", f"N{spatial}C")
    inner = tuple(range(2, 2 + rank))
    y = lax.conv_general_dilated(
        jnp.transpose(x, (0, *inner, 1)),
        jnp.transpose(w, (*inner, 1, 0)),
        window_strides=tuple(strides),
        padding=[tuple(p) for p in pads],
        lhs_dilation=tuple(spread),
        rhs_dilation=tuple(dilations),
        dimension_numbers=last,
        feature_group_count=groups,
        preferred_element_type=np.float32 if x.dtype in HALVES else None,
    )
    return jnp.transpose(y, (0, 1 + rank, *range(1, 1 + rank))).astype(x.dtype)


def conv_transpose(
    x: Any, w: Any, strides: Any, pads: Any, dilations: Any, groups: int = 1, output_padding: Any = None
) -> jax.Array:
    """A convolution of x spread out by the strides with the mirrored kernel."""
    kernel = w.shape[2:]
    rank = len(kernel)
    w = jnp.swapaxes(w.reshape(groups, w.shape[0] // groups, w.shape[1], *kernel), 1, 2)
    w = jnp.flip(w.reshape(-1, w.shape[2], *kernel), axis=tuple(range(2, 2 + rank)))
    reach = [(k - 1) * d for k, d in zip(kernel, dilations, strict=True)]
    extra = output_padding or (0,) * rank
    pads = [(r - lo, r - hi + e) for r, (lo, hi), e in zip(reach, pads, extra, strict=True)]
    return _conv(x, w, (1,) * rank, pads, dilations, groups, strides)


def windows(x: Any, kernel: Any, strides: Any, dilations: Any) -> jax.Array:
    rank = len(kernel)
    for i, (k, s, d) in enumerate(zip(kernel, strides, dilations, strict=True)):
        axis = 2 + 2 * i  # each spatial axis becomes (out, kernel)
        out = (x.shape[axis] - (k - 1) * d - 1) // s + 1
        index = np.arange(out)[:, None] * s + np.arange(k) * d
        x = x.at[(slice(None),) * axis + (index,)].get(mode="promise_in_bounds")
    return jnp.transpose(x, (0, 1, *range(2, 2 + 2 * rank, 2), *range(3, 3 + 2 * rank, 2)))


def pool(x: Any, kernel: Any, strides: Any, dilations: Any, kind: str) -> jax.Array:
    dtype = x.dtype
    if kind == "sum":
        x = x.astype(np.float32) if dtype in HALVES else x
        start, reduce = 0, lax.add
    else:
        start, reduce = _extreme(dtype, kind), lax.max if kind == "max" else lax.min
    y = lax.reduce_window(
        x,
        np.asarray(start, x.dtype),
        reduce,
        window_dimensions=(1, 1, *kernel),
        window_strides=(1, 1, *strides),
        padding="VALID",
        window_dilation=(1, 1, *dilations),
    )
    return y.astype(dtype)


def _extreme(dtype: Any, kind: str) -> Any:
    """The neutral value of a maximum or minimum."""
    if jnp.issubdtype(dtype, np.floating):
        return -np.inf if kind == "max" else np.inf
    limits = jnp.iinfo(dtype)
    return limits.min if kind == "max" else limits.max
