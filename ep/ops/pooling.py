"""Pooling: maxima, averages and Lp norms over windows and over whole images, and their inverses."""

from __future__ import annotations

import math
from functools import reduce
from typing import Any

import numpy as np

from ep.ops.axes import ints
from ep.ops.convolution import channels_first, channels_last
from ep.ops.precision import wide
from ep.ops.windows import Windows, place
from ep.registry import Host, Index, Outputs, op


@op("MaxPool")
def max_pool(
    xp,
    x,
    *,
    kernel_shape,
    auto_pad="NOTSET",
    ceil_mode=0,
    dilations=None,
    pads=None,
    storage_order=0,
    strides=None,
    outputs: Outputs = 1,
):
    at = place(x.shape[2:], kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    padded = at.padded(xp, x, lowest(xp.dtype_of(x)))
    y = xp.pool(padded, at.kernel, at.strides, at.dilations, "max")
    return y if outputs < 2 else (y, _max_indices(xp, padded, y, at, storage_order))


def lowest(dtype: Any) -> float | int:
    """The value that no maximum prefers."""
    return int(np.iinfo(dtype).min) if np.dtype(dtype).kind in "iu" else -np.inf


def _max_indices(xp: Any, padded: Any, y: Any, at: Windows, storage_order: int) -> Any:
    """Position of each maximum in the flattened unpadded tensor: the first one, and never in the padding."""
    rank = len(at.kernel)
    view = xp.windows(padded, at.kernel, at.strides, at.dilations)
    hit = view == xp.reshape(y, (*y.shape, *(1,) * rank))
    reads = [_positions(at, i) for i in range(rank)]
    if at.is_padded:
        for i, (read, n) in enumerate(zip(reads, at.size, strict=True)):
            inside = _spread((read >= 0) & (read < n), (i, rank + i), 2 * rank)
            hit = xp.logical_and(hit, xp.asarray(inside))
    taps = xp.argmax(xp.reshape(xp.astype(hit, np.uint8), (*y.shape, math.prod(at.kernel))), axis=-1)
    order = range(rank) if storage_order == 0 else range(rank - 1, -1, -1)
    flat = xp.reshape(xp.arange(math.prod(y.shape[:2]), dtype=np.int64), (*y.shape[:2], *(1,) * rank))
    for i in order:
        tap = (taps // math.prod(at.kernel[i + 1 :])) % at.kernel[i]
        origin = xp.asarray(_spread(reads[i][:, 0], (i,), rank))
        flat = flat * at.size[i] + (origin + tap * at.dilations[i])
    return flat


def _positions(at: Windows, i: int) -> np.ndarray:
    """Coordinates [out, kernel] that the windows read on axis `i`; padding is negative or past the end."""
    starts = np.arange(at.out[i], dtype=np.int64) * at.strides[i] - at.pads[i][0]
    return starts[:, None] + np.arange(at.kernel[i], dtype=np.int64) * at.dilations[i]


def _spread(values: np.ndarray, where: tuple[int, ...], rank: int) -> np.ndarray:
    """`values` with its axes at the places `where` among `rank` axes, for broadcasting."""
    shape = [1] * rank
    for axis, n in zip(where, values.shape, strict=True):
        shape[axis] = n
    return values.reshape(shape)


@op("AveragePool")
def average_pool(
    xp,
    x,
    *,
    kernel_shape,
    auto_pad="NOTSET",
    ceil_mode=0,
    count_include_pad=0,
    dilations=None,
    pads=None,
    strides=None,
):
    at = place(x.shape[2:], kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    total = xp.pool(at.padded(xp, wide(xp, x), 0), at.kernel, at.strides, at.dilations, "sum")
    return xp.astype(total / _counts(xp, total, at, count_include_pad), xp.dtype_of(x))


def _counts(xp: Any, total: Any, at: Windows, count_include_pad: int) -> Any:
    """How many elements each window averages; what ceil_mode reads beyond the padding never counts."""
    counts = []
    for i, (n, (lo, hi)) in enumerate(zip(at.size, at.pads, strict=True)):
        start, stop = (-lo, n + hi) if count_include_pad else (0, n)
        read = _positions(at, i)
        counts.append(((read >= start) & (read < stop)).sum(axis=1))
    if all(c.size == 0 or (c == c[0]).all() for c in counts):
        return math.prod(int(c[0]) for c in counts if c.size)
    return xp.asarray(reduce(np.multiply.outer, counts).astype(xp.dtype_of(total)))


@op("LpPool")
def lp_pool(
    xp,
    x,
    *,
    kernel_shape,
    auto_pad="NOTSET",
    ceil_mode=0,
    dilations=None,
    p=2,
    pads=None,
    strides=None,
):
    at = place(x.shape[2:], kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    powers = at.padded(xp, _power(xp, wide(xp, x), p), 0)
    total = xp.pool(powers, at.kernel, at.strides, at.dilations, "sum")
    return xp.astype(_root(xp, total, p), xp.dtype_of(x))


def _power(xp: Any, x: Any, p: float) -> Any:
    """|x| to the power `p`, with the two usual cases written out."""
    if p == 1:
        return xp.abs(x)
    return x * x if p == 2 else xp.abs(x) ** p


def _root(xp: Any, x: Any, p: float) -> Any:
    if p == 1:
        return x
    return xp.sqrt(x) if p == 2 else x ** (1 / p)


def _spatial(x: Any) -> tuple[int, ...]:
    return tuple(range(2, x.ndim))


@op("GlobalMaxPool")
def global_max_pool(xp, x):
    return xp.max(x, axis=_spatial(x), keepdims=True)


@op("GlobalAveragePool")
def global_average_pool(xp, x):
    return xp.mean(x, axis=_spatial(x), keepdims=True)


@op("GlobalLpPool")
def global_lp_pool(xp, x, *, p=2):
    total = xp.sum(_power(xp, wide(xp, x), p), axis=_spatial(x), keepdims=True)
    return xp.astype(_root(xp, total, p), xp.dtype_of(x))


def _pooled(x: tuple[int, ...], at: Windows) -> tuple[int, ...]:
    """The shape of what was pooled to the shape `x`, as far as the attributes tell."""
    facts = zip(x[2:], at.kernel, at.strides, at.pads, strict=True)
    return (*x[:2], *((n - 1) * s + k - lo - hi for n, k, s, (lo, hi) in facts))


def _places(shapes: Any, attributes: Any) -> tuple[int, int]:
    """The limits of indices into what was pooled; an `output_shape` may be counted in another way."""
    if "output_shape" in shapes:
        raise LookupError("output_shape")
    kernel = attributes["kernel_shape"]
    return 0, math.prod(
        _pooled(shapes["x"], place(kernel, kernel, attributes["strides"], None, attributes["pads"]))
    ) - 1


@op("MaxUnpool", since=9)
def max_unpool(
    xp, x, indices: Index("x", _places), output_shape: Host = None, *, kernel_shape, pads=None, strides=None
):
    """Indices count in the tensor that was pooled: of `output_shape`, or of the shape inferred from attributes.

    Only MaxPool's inverse makes sense of both, but the node test of `output_shape` counts in the inferred shape:
    https://github.com/onnx/onnx/issues/5398. So the second reading is taken when the first cannot be true.
    """
    at = place(kernel_shape, kernel_shape, strides, None, pads)
    inferred = _pooled(x.shape, at)
    shape = inferred if output_shape is None else ints(output_shape)
    if shape != inferred:
        indices = _recounted(xp, indices, inferred, shape, at)
    empty = xp.zeros((math.prod(shape),), dtype=xp.dtype_of(x))
    return xp.reshape(xp.scatter(empty, (xp.reshape(indices, (-1,)),), xp.reshape(x, (-1,))), shape)


def _recounted(xp: Any, indices: Any, inferred: tuple[int, ...], shape: tuple[int, ...], at: Windows) -> Any:
    """The indices in `shape`: unchanged if each lies in the window that its place pools, else read in `inferred`."""
    rank, inside, rest = len(at.kernel), None, indices
    for i in reversed(range(rank)):
        coordinate, rest = rest % shape[2 + i], rest // shape[2 + i]
        first = np.arange(indices.shape[2 + i]) * at.strides[i] - at.pads[i][0]
        offset = coordinate - xp.asarray(_spread(first, (i,), rank))
        here = xp.logical_and(offset >= 0, offset < at.kernel[i])
        inside = here if inside is None else xp.logical_and(inside, here)
    moved, rest, step = xp.zeros_like(indices), indices, 1
    for n, m in zip(reversed(inferred), reversed(shape), strict=True):
        moved, rest, step = moved + rest % n * step, rest // n, step * m
    return xp.where(xp.all(inside), indices, moved)


@op("MaxRoiPool")
def max_roi_pool(xp, x, rois, *, pooled_shape, spatial_scale=1.0):
    """Bins follow Caffe's ROIPooling, where the specification is silent: corners are rounded, the end is inclusive."""
    images = xp.take(x, xp.astype(rois[:, 0], np.int32), axis=0)
    corners = xp.floor(wide(xp, rois[:, 1:]) * spatial_scale + 0.5)
    rows = _roi_bins(xp, corners[:, 1], corners[:, 3], pooled_shape[0], x.shape[2])
    columns = _roi_bins(xp, corners[:, 0], corners[:, 2], pooled_shape[1], x.shape[3])
    filler = lowest(xp.dtype_of(x))
    bands = [xp.max(xp.where(rows[:, i][:, None, :, None], images, filler), axis=2) for i in range(pooled_shape[0])]
    tall = xp.stack(bands, axis=2)
    cells = [xp.max(xp.where(columns[:, j][:, None, None, :], tall, filler), axis=3) for j in range(pooled_shape[1])]
    y = xp.stack(cells, axis=3)
    filled = xp.logical_and(xp.any(rows, axis=2)[:, :, None], xp.any(columns, axis=2)[:, None, :])
    return xp.where(filled[:, None], y, 0)


def _roi_bins(xp: Any, start: Any, stop: Any, bins: int, size: int) -> Any:
    """Which pixels belong to which bin: booleans [roi, bin, size]."""
    step = (xp.maximum(stop - start + 1, 1) / bins)[:, None]
    index = xp.arange(bins, dtype=xp.dtype_of(start))[None, :]
    lo = xp.floor(index * step) + start[:, None]
    hi = xp.ceil((index + 1) * step) + start[:, None]
    pixel = xp.reshape(xp.arange(size, dtype=xp.dtype_of(start)), (1, 1, -1))
    return xp.logical_and(pixel >= lo[..., None], pixel < hi[..., None])


@op("NhwcMaxPool", domain="com.microsoft")
def nhwc_max_pool(xp, x, *, kernel_shape, auto_pad="NOTSET", ceil_mode=0, dilations=None, pads=None, strides=None):
    window = {"dilations": dilations, "pads": pads, "strides": strides}
    y = max_pool(xp, channels_first(xp, x), kernel_shape=kernel_shape, auto_pad=auto_pad, ceil_mode=ceil_mode, **window)
    return channels_last(xp, y)


@op("MaxpoolWithMask", domain="com.microsoft")
def maxpool_with_mask(xp, X, M, *, auto_pad="NOTSET", kernel_shape=None, pads=None, storage_order=0, strides=None):
    """In each window a row is read up to the first element whose mask is 0.

    On more than one axis, the very first element of the image always counts. The mask's channels repeat over
    those of X. An empty window gives the lowest finite number.
    """
    at = place(X.shape[2:], kernel_shape or (), strides, None, pads, auto_pad, 0)
    mask = xp.reshape(M, (-1, *M.shape[2:]))
    channels = X.shape[0] * X.shape[1]
    mask = xp.take(mask, xp.asarray(np.arange(channels) % mask.shape[0]), axis=0)
    mask = xp.reshape(xp.astype(mask != 0, np.float32), X.shape)
    if len(at.size) > 1:
        first = xp.asarray(np.arange(math.prod(at.size)).reshape(at.size) == 0)
        mask = xp.where(first, xp.ones_like(mask), mask)
    lowest_finite = float(np.finfo(np.float32).min)
    seen = xp.windows(at.padded(xp, mask, 1), at.kernel, at.strides, at.dilations)
    values = xp.windows(at.padded(xp, X, lowest_finite), at.kernel, at.strides, at.dilations)
    values = xp.where(xp.cumprod(seen, axis=seen.ndim - 1) > 0, values, lowest_finite)
    return xp.max(values, axis=tuple(range(X.ndim, values.ndim)))
