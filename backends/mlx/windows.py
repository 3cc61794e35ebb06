"""Convolution and pooling of the MLX namespace."""

from __future__ import annotations

from functools import reduce
from itertools import product
from math import prod
from typing import Any

import mlx.core as mx

from ep.backends.mlx.dtypes import HALVES, INTEGERS
from ep.backends.mlx.products import matmul
from ep.backends.mlx.target import on_gpu


def conv(x: Any, w: Any, strides: Any, pads: Any, dilations: Any, groups: int = 1) -> mx.array:
    return _conv(x, w, strides, pads, dilations, groups, (1,) * len(strides))


def _conv(x: Any, w: Any, strides: Any, pads: Any, dilations: Any, groups: int, spread: Any) -> mx.array:
    """MLX convolutions are channels-last, of up to 3 axes (without groups, then) and of float32 precision."""
    rank = len(strides)
    if x.shape[0] == 0:  # Metal's convolutions take no empty arrays
        one = mx.zeros((1, *x.shape[1:]), x.dtype)
        return _conv(one, w, strides, pads, dilations, groups, spread)[:0]
    if rank > 3 or x.dtype in INTEGERS or x.dtype == mx.float64:
        return _conv_by_windows(_spread(x, spread), w, strides, pads, dilations, groups)
    if not on_gpu() and max(groups, *dilations, *spread) > 1:  # MLX's CPU loops are 50 times slower
        x = _spread(x, spread)
        by = _conv_by_shifts if groups == x.shape[1] == w.shape[0] else _conv_by_windows
        return by(x, w, strides, pads, dilations, groups)
    if rank == 3 and groups > 1:
        parts = zip(mx.split(x, groups, axis=1), mx.split(w, groups, axis=0), strict=True)
        return mx.concatenate([_conv(a, b, strides, pads, dilations, 1, spread) for a, b in parts], axis=1)
    inner = tuple(range(2, x.ndim))
    y = mx.conv_general(
        mx.transpose(x, (0, *inner, 1)),
        mx.transpose(w, (0, *inner, 1)),
        stride=tuple(strides),
        padding=([lo for lo, _ in pads], [hi for _, hi in pads]),
        kernel_dilation=tuple(dilations),
        input_dilation=tuple(spread),
        groups=groups,
    )
    return mx.transpose(y, (0, y.ndim - 1, *range(1, y.ndim - 1)))


def _conv_by_shifts(x: Any, w: Any, strides: Any, pads: Any, dilations: Any, groups: int) -> mx.array:
    """Depthwise: each pixel of the kernel times the image shifted by it."""
    x, kernel = mx.pad(x, [(0, 0), (0, 0), *pads]), w.shape[2:]
    axes = list(zip(x.shape[2:], kernel, strides, dilations, strict=True))
    out = [(n - (k - 1) * d - 1) // s + 1 for n, k, s, d in axes]
    terms = []
    for pixel in product(*map(range, kernel)):
        starts = [i * d for i, d in zip(pixel, dilations, strict=True)]
        cut = [slice(i, i + (n - 1) * s + 1, s) for i, n, s in zip(starts, out, strides, strict=True)]
        terms.append(x[(slice(None), slice(None), *cut)] * mx.reshape(w[(..., *pixel)], (groups, *(1,) * len(kernel))))
    return reduce(mx.add, terms)


def _spread(x: Any, spread: Any) -> mx.array:
    """x with zeros between its elements."""
    for axis, s in enumerate(spread, start=2):
        if s > 1:
            n = x.shape[axis]
            wide = mx.pad(mx.expand_dims(x, axis + 1), [(0, s - 1 if i == axis + 1 else 0) for i in range(x.ndim + 1)])
            x = mx.flatten(wide, axis, axis + 1)[(slice(None),) * axis + (slice(0, (n - 1) * s + 1),)]
    return x


def _conv_by_windows(x: Any, w: Any, strides: Any, pads: Any, dilations: Any, groups: int) -> mx.array:
    x = mx.pad(x, [(0, 0), (0, 0), *pads])
    rank = len(strides)
    view = windows(x, w.shape[2:], strides, dilations)
    n, out, kernel = x.shape[0], view.shape[2 : 2 + rank], prod(w.shape[2:])
    c, o = x.shape[1] // groups, w.shape[0] // groups
    view = mx.reshape(view, (n, groups, c, prod(out), kernel))
    view = mx.reshape(mx.transpose(view, (0, 1, 3, 2, 4)), (n, groups, prod(out), c * kernel))
    y = matmul(view, mx.swapaxes(mx.reshape(w, (groups, o, c * kernel)), 1, 2))
    return mx.reshape(mx.swapaxes(y, 2, 3), (n, groups * o, *out))


def conv_transpose(
    x: Any, w: Any, strides: Any, pads: Any, dilations: Any, groups: int = 1, output_padding: Any = None
) -> mx.array:
    """A convolution of x spread out by the strides with the mirrored kernel."""
    kernel = w.shape[2:]
    rank = len(kernel)
    w = mx.swapaxes(mx.reshape(w, (groups, w.shape[0] // groups, w.shape[1], *kernel)), 1, 2)
    w = mx.flip(mx.reshape(w, (-1, w.shape[2], *kernel)), axis=tuple(range(2, 2 + rank)))
    reach = [(k - 1) * d for k, d in zip(kernel, dilations, strict=True)]
    extra = output_padding or (0,) * rank
    pads = [(r - lo, r - hi + e) for r, (lo, hi), e in zip(reach, pads, extra, strict=True)]
    y = _conv(x, w, (1,) * rank, [(max(0, lo), max(0, hi)) for lo, hi in pads], dilations, groups, tuple(strides))
    cut = [slice(max(0, -lo), n - max(0, -hi)) for (lo, hi), n in zip(pads, y.shape[2:], strict=True)]
    return y[(slice(None), slice(None), *cut)]


def windows(x: Any, kernel: Any, strides: Any, dilations: Any) -> mx.array:
    steps = [1] * x.ndim
    for i in reversed(range(x.ndim - 1)):
        steps[i] = steps[i + 1] * x.shape[i + 1]
    shape = (*x.shape[:2], *_out(x, kernel, strides, dilations), *kernel)
    outer = [step * s for step, s in zip(steps[2:], strides, strict=True)]
    inner = [step * d for step, d in zip(steps[2:], dilations, strict=True)]
    return mx.as_strided(row_major(x), shape, (*steps[:2], *outer, *inner))


def row_major(x: Any) -> mx.array:
    """As `mx.contiguous`, which MLX cannot export: flattening copies exactly where the memory is not row-major."""
    return mx.reshape(mx.flatten(x), x.shape)


def _out(x: Any, kernel: Any, strides: Any, dilations: Any) -> list[int]:
    sizes = zip(x.shape[2:], kernel, strides, dilations, strict=True)
    return [(n - (k - 1) * d - 1) // s + 1 for n, k, s, d in sizes]


_FOLD: dict[str, Any] = {"max": mx.maximum, "min": mx.minimum, "sum": mx.add}


def pool(x: Any, kernel: Any, strides: Any, dilations: Any, kind: str) -> mx.array:
    """One axis after the other, each a fold over shifted slices: cheaper than reducing a view of windows."""
    dtype = x.dtype
    if kind == "sum" and dtype in HALVES:
        x = x.astype(mx.float32)
    for i, out in enumerate(_out(x, kernel, strides, dilations)):
        axis, s, d = 2 + i, strides[i], dilations[i]
        lead = (slice(None),) * axis
        rows = (x[(*lead, slice(j * d, j * d + (out - 1) * s + 1, s))] for j in range(kernel[i]))
        x = reduce(_FOLD[kind], rows)
    return x.astype(dtype)
