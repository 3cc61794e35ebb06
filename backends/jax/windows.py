"""Convolution and pooling of the JAX namespace.

XLA's convolutions on the CPU are fast channels-last only, slow for one-pixel kernels, and 10 to 100 times too
slow for groups, so there they are written as matrix products and sums of shifted images.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import product
from math import gcd, prod
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

HALVES = frozenset({np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)})
FEW_GROUPS = 64  # more than that, and the program gets long


def on_cpu() -> bool:
    """Whether arrays are made on the CPU in the current scope."""
    device = jax.default_device.value
    return (jax.default_backend() if device is None else getattr(device, "platform", device)) == "cpu"


def conv(x: Any, w: Any, strides: Any, pads: Any, dilations: Any, groups: int = 1) -> jax.Array:
    if not on_cpu():
        return _by_xla(x, w, strides, pads, dilations, groups)
    dtype = x.dtype
    if dtype in HALVES:  # XLA's CPU convolutions would do this inside, more slowly
        x, w = x.astype(np.float32), w.astype(np.float32)
    channels_last = jnp.moveaxis(x, 1, -1)
    y = _on_cpu(channels_last, w, strides, pads, dilations, groups)
    return jnp.moveaxis(y, -1, 1).astype(dtype)


def _on_cpu(x: Any, w: Any, strides: Any, pads: Any, dilations: Any, groups: int) -> jax.Array:
    """x [N, *S, C], w [O, C/g, *K] → [N, *out, O]."""
    kernel = w.shape[2:]
    if groups == x.shape[-1] and groups > 1:
        return _depthwise(x, w, strides, pads, dilations)
    if 1 < groups <= FEW_GROUPS:
        parts = zip(jnp.split(x, groups, axis=-1), jnp.split(w, groups), strict=True)
        return jnp.concatenate([_on_cpu(a, b, strides, pads, dilations, 1) for a, b in parts], axis=-1)
    if groups == 1 and set(kernel) == {1}:
        x = _shifted(_padded(x, pads), (0,) * len(kernel), _out(x, kernel, strides, pads, dilations), strides)
        return jnp.matmul(x, w.reshape(w.shape[:2]).T)
    one_channel = x.shape[-1] == 1 and kernel[0] > 4 and prod(kernel) > 64  # spectrograms
    sequence = kernel[1:] == (1,) and kernel[0] <= 8 and x.shape[-1] >= 64  # a few products: 5 times faster
    if groups == 1 and (len(kernel) > 2 or len(kernel) == 2 and (one_channel or sequence)):
        return _by_planes(x, w, strides, pads, dilations)
    if groups == 1 and x.shape[-1] == 3:  # a multiple of 4 channels has a kernel of its own
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, 1)])
        w = jnp.pad(w, [(0, 0), (0, 1)] + [(0, 0)] * len(kernel))
    return _channels_last(x, w, strides, pads, dilations, groups)


FEW_CHANNELS = 32  # up to that, one product over stacked planes beats a sum of products


def _by_planes(x: Any, w: Any, strides: Any, pads: Any, dilations: Any) -> jax.Array:
    """The first axis as convolutions of fewer axes, summed or with the planes stacked as channels.

    5 to 10 times faster than XLA's own with three axes, 3 times with one channel and a large kernel.
    """
    length, *inner = _out(x, w.shape[2:], strides, pads, dilations)
    x = _padded(x, [pads[0]] + [(0, 0)] * len(inner))
    span = (length - 1) * strides[0] + 1
    starts = [i * dilations[0] for i in range(w.shape[2])]
    planes = [x[:, i : i + span : strides[0]] for i in starts]
    planes = [plane.reshape(-1, *plane.shape[2:]) for plane in planes]
    weights = [w[:, :, i] for i in range(w.shape[2])]
    if x.shape[-1] == 1 or x.shape[-1] * len(planes) <= FEW_CHANNELS:
        planes, weights = [jnp.concatenate(planes, axis=-1)], [jnp.concatenate(weights, axis=1)]
    terms = [_on_cpu(a, b, strides[1:], pads[1:], dilations[1:], 1) for a, b in zip(planes, weights, strict=True)]
    return reduce(jnp.add, terms).reshape(x.shape[0], length, *inner, w.shape[0])


def _depthwise(x: Any, w: Any, strides: Any, pads: Any, dilations: Any) -> jax.Array:
    """Each pixel of the kernel times the image shifted by it."""
    kernel = w.shape[2:]
    out = _out(x, kernel, strides, pads, dilations)
    x = _padded(x, pads)
    multiplier = w.shape[0] // x.shape[-1]
    if multiplier > 1:
        x = jnp.repeat(x, multiplier, axis=-1)
    terms = (
        _shifted(x, [i * d for i, d in zip(pixel, dilations, strict=True)], out, strides) * w[(..., 0, *pixel)]
        for pixel in product(*map(range, kernel))
    )
    return reduce(jnp.add, terms)


def _padded(x: Any, pads: Any) -> jax.Array:
    """x with zeros around, or with its border cut off."""
    return lax.pad(x, np.zeros((), x.dtype), [(0, 0, 0), *((lo, hi, 0) for lo, hi in pads), (0, 0, 0)])


def _shifted(x: Any, start: Sequence[int], out: Sequence[int], strides: Sequence[int]) -> jax.Array:
    windows = (slice(i, i + (n - 1) * s + 1, s) for i, n, s in zip(start, out, strides, strict=True))
    return x[(slice(None), *windows)]


def _out(x: Any, kernel: Any, strides: Any, pads: Any, dilations: Any) -> list[int]:
    """Spatial size of the result for x [N, *S, C]."""
    sizes = zip(x.shape[1:-1], kernel, strides, pads, dilations, strict=True)
    return [(n + lo + hi - (k - 1) * d - 1) // s + 1 for n, k, s, (lo, hi), d in sizes]


def _by_xla(x: Any, w: Any, strides: Any, pads: Any, dilations: Any, groups: int, spread: Any = None) -> jax.Array:
    if not jnp.issubdtype(x.dtype, np.floating):  # GPUs convolve no integers; float64 is exact up to 2^53
        wide = x.astype(np.float64), w.astype(np.float64)
        return _by_xla(*wide, strides, pads, dilations, groups, spread).astype(x.dtype)
    return lax.conv_general_dilated(
        x,
        w,
        window_strides=tuple(strides),
        padding=[tuple(p) for p in pads],
        lhs_dilation=spread,
        rhs_dilation=tuple(dilations),
        feature_group_count=groups,
    )


def _channels_last(x: Any, w: Any, strides: Any, pads: Any, dilations: Any, groups: int) -> jax.Array:
    spatial = "".join(chr(ord("a") + i) for i in range(x.ndim - 2))
    return lax.conv_general_dilated(
        x,
        jnp.moveaxis(w, (0, 1), (-1, -2)),
        window_strides=tuple(strides),
        padding=[tuple(p) for p in pads],
        rhs_dilation=tuple(dilations),
        dimension_numbers=(f"N{spatial}C", f"{spatial}IO", f"N{spatial}C"),
        feature_group_count=groups,
    )


def conv_transpose(
    x: Any, w: Any, strides: Any, pads: Any, dilations: Any, groups: int = 1, output_padding: Any = None
) -> jax.Array:
    """A convolution of x spread out by the strides with the mirrored kernel."""
    kernel = w.shape[2:]
    rank = len(kernel)
    w = jnp.swapaxes(w.reshape(groups, w.shape[0] // groups, w.shape[1], *kernel), 1, 2)
    w = w.reshape(-1, w.shape[2], *kernel)
    extra = output_padding or (0,) * rank
    if on_cpu():
        return _by_phases(x, w, strides, pads, dilations, groups, extra)
    w = jnp.flip(w, axis=tuple(range(2, 2 + rank)))
    reach = [(k - 1) * d for k, d in zip(kernel, dilations, strict=True)]
    pads = [(r - lo, r - hi + e) for r, (lo, hi), e in zip(reach, pads, extra, strict=True)]
    return _by_xla(x, w, (1,) * rank, pads, dilations, groups, tuple(strides))


def _by_phases(x: Any, w: Any, strides: Any, pads: Any, dilations: Any, groups: int, extra: Any) -> jax.Array:
    """Outputs that are equal modulo the strides use the same weights: one plain convolution for each class.

    XLA's convolutions with spread out images are slow on the CPU.
    """
    dtype, size = x.dtype, x.shape[2:]
    if dtype in HALVES:
        x, w = x.astype(np.float32), w.astype(np.float32)
    axes = list(zip(size, w.shape[2:], strides, dilations, strict=True))
    whole = [(n - 1) * s + (k - 1) * d + 1 for n, k, s, d in axes]
    rows = [-(-n // s) for n, s in zip(whole, strides, strict=True)]
    x = jnp.moveaxis(x, 1, -1)
    y = jnp.stack([_phase(x, w, rows, axes, groups, remainders) for remainders in product(*map(range, strides))])
    y = y.reshape(*strides, x.shape[0], *rows, w.shape[0])
    rank = len(rows)
    woven = [axis for i in range(rank) for axis in (rank + 1 + i, i)]
    y = jnp.transpose(y, (rank, 2 * rank + 1, *woven))
    y = y.reshape(*y.shape[:2], *(n * s for n, s in zip(rows, strides, strict=True)))
    cuts = [(-lo, n + e - hi - m, 0) for (lo, hi), n, e, m in zip(pads, whole, extra, y.shape[2:], strict=True)]
    return lax.pad(y, np.zeros((), y.dtype), [(0, 0, 0), (0, 0, 0), *cuts]).astype(dtype)


def _phase(
    x: Any, w: Any, rows: Sequence[int], axes: Sequence[Any], groups: int, remainders: Sequence[int]
) -> jax.Array:
    """The outputs at positions `remainders` modulo the strides: [N, *rows, O]."""
    taps, pads, dilations = [], [], []
    for m, (n, k, s, d), remainder in zip(rows, axes, remainders, strict=True):
        used = [i for i in range(k) if i * d % s == remainder]
        if not used:
            return jnp.zeros((x.shape[0], *rows, w.shape[0]), x.dtype)
        step, first = d // gcd(s, d), (used[0] * d - remainder) // s
        taps.append(slice(used[0], None, s // gcd(s, d)))
        pads.append((first + (len(used) - 1) * step, m - n - first))
        dilations.append(step)
    w = jnp.flip(w[(..., *taps)], axis=tuple(range(2, w.ndim)))
    return _on_cpu(x, w, (1,) * len(rows), pads, dilations, groups)


def windows(x: Any, kernel: Any, strides: Any, dilations: Any) -> jax.Array:
    rank = len(kernel)
    for i, (k, s, d) in enumerate(zip(kernel, strides, dilations, strict=True)):
        axis = 2 + 2 * i  # each spatial axis becomes (out, kernel)
        out = (x.shape[axis] - (k - 1) * d - 1) // s + 1
        index = np.arange(out)[:, None] * s + np.arange(k) * d
        x = x.at[(slice(None),) * axis + (index,)].get(mode="promise_in_bounds")
    return jnp.transpose(x, (0, 1, *range(2, 2 + 2 * rank, 2), *range(3, 3 + 2 * rank, 2)))


_FOLD = {"max": lax.max, "min": lax.min, "sum": lax.add}
SHORT = 16  # longer kernels are not unrolled


def pool(x: Any, kernel: Any, strides: Any, dilations: Any, kind: str) -> jax.Array:
    dtype = x.dtype
    if kind == "sum" and dtype in HALVES:
        x = x.astype(np.float32)
    if on_cpu() and max(kernel) <= SHORT:
        y = _by_folds(x, kernel, strides, dilations, _FOLD[kind])
    else:
        start = 0 if kind == "sum" else _extreme(dtype, kind)
        y = lax.reduce_window(
            x,
            np.asarray(start, x.dtype),
            _FOLD[kind],
            window_dimensions=(1, 1, *kernel),
            window_strides=(1, 1, *strides),
            padding="VALID",
            window_dilation=(1, 1, *dilations),
        )
    return y.astype(dtype)


def _by_folds(x: Any, kernel: Any, strides: Any, dilations: Any, fold: Any) -> jax.Array:
    """One axis after the other, each a fold over shifted slices, which vectorise on the CPU."""
    for i, (k, s, d) in enumerate(zip(kernel, strides, dilations, strict=True)):
        axis = 2 + i
        last = (x.shape[axis] - (k - 1) * d - 1) // s * s
        lead = (slice(None),) * axis
        x = reduce(fold, (x[(*lead, slice(j * d, j * d + last + 1, s))] for j in range(k)))
    return x


def _extreme(dtype: Any, kind: str) -> Any:
    """The neutral value of a maximum or minimum."""
    if jnp.issubdtype(dtype, np.floating):
        return -np.inf if kind == "max" else np.inf
    limits = jnp.iinfo(dtype)
    return limits.min if kind == "max" else limits.max
