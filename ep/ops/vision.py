"""Operators on images and boxes: GridSample, AffineGrid, RoiAlign, CropAndResize, NonMaxSuppression, ImageDecoder."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ep.errors import InvalidInput
from ep.ops.axes import one_of
from ep.ops.limits import along
from ep.ops.precision import wide
from ep.ops.sampling import linear_taps, pixel_rows, read_pixels, tap_inside, weighted_pixels
from ep.registry import Host, op

# Sampling on a grid


@op("GridSample", since=20)
def grid_sample(xp, x, grid, *, align_corners=0, mode="linear", padding_mode="zeros"):
    size = x.shape[2:]
    points = xp.reshape(wide(xp, grid), (grid.shape[0], math.prod(grid.shape[1:-1]), len(size)))
    taps = [
        _grid_taps(xp, points[:, :, len(size) - 1 - i], n, mode, padding_mode, bool(align_corners))
        for i, n in enumerate(size)  # the grid names the innermost axis first
    ]
    rows = wide(xp, pixel_rows(xp, x))
    y = xp.swapaxes(weighted_pixels(xp, rows, size, taps), 1, 2)
    return xp.astype(xp.reshape(y, (*x.shape[:2], *grid.shape[1:-1])), xp.dtype_of(x))


@op("GridSample", since=16)
def grid_sample_16(xp, x, grid, *, align_corners=0, mode="bilinear", padding_mode="zeros"):
    mode = {"bilinear": "linear", "bicubic": "cubic"}.get(mode, mode)
    return grid_sample(xp, x, grid, align_corners=align_corners, mode=mode, padding_mode=padding_mode)


@op("GridSample", domain="com.microsoft")
def grid_sample_ms(xp, x, grid, *, align_corners=0, mode="bilinear", padding_mode="zeros"):
    return grid_sample_16(xp, x, grid, align_corners=align_corners, mode=mode, padding_mode=padding_mode)


def _grid_taps(xp: Any, point: Any, n: int, mode: str, padding_mode: str, align: bool) -> list[tuple[Any, Any]]:
    """The pixels of one axis that a normalised coordinate reads, as (index, weight)."""
    point = (point + 1) / 2 * (n - 1) if align else ((point + 1) * n - 1) / 2
    inside = _PADDING.get(padding_mode)
    if inside is None or mode not in ("linear", "nearest", "cubic"):
        raise InvalidInput(
            f"mode {mode!r} with padding_mode {padding_mode!r} is unknown.",
            fix="use linear, nearest or cubic with zeros, border or reflection.",
        )
    if mode == "nearest":
        position = inside(xp, xp.round(point), n, align)
        return [tap_inside(xp, position, xp.ones_like(position), n)]
    if mode == "linear":
        return [tap_inside(xp, p, w, n) for p, w in linear_taps(xp, inside(xp, point, n, align))]
    taps = _cubic_taps(xp, point)  # every tap is moved inside on its own
    return [tap_inside(xp, inside(xp, p, n, align), w, n) for p, w in taps]


def _cubic_taps(xp: Any, point: Any) -> list[tuple[Any, Any]]:
    a = -0.75
    low = xp.floor(point)
    t = point - low

    def near(d: Any) -> Any:
        return ((a + 2) * d - (a + 3)) * d * d + 1

    def far(d: Any) -> Any:
        return ((a * d - 5 * a) * d + 8 * a) * d - 4 * a

    return [(low - 1, far(t + 1)), (low, near(t)), (low + 1, near(1 - t)), (low + 2, far(2 - t))]


def _reflect(xp: Any, position: Any, n: int, align: bool) -> Any:
    """Mirrored at the centres (align) or outer edges of the border pixels until it is inside."""
    if align and n == 1:
        return xp.zeros_like(position)
    lo, span = (0.0, float(n - 1)) if align else (-0.5, float(n))
    distance = xp.abs(position - lo)
    turns = xp.floor(distance / span)
    rest = distance - turns * span
    odd = turns - 2 * xp.floor(turns / 2)
    mirrored = xp.where(odd == 0, rest, span - rest) + lo
    return xp.clip(mirrored, 0, n - 1)


_PADDING: dict[str, Callable[..., Any]] = {
    "zeros": lambda xp, position, n, align: position,
    "border": lambda xp, position, n, align: xp.clip(position, 0, n - 1),
    "reflection": _reflect,
}


@op("AffineGrid", since=20)
def affine_grid(xp, theta, size: Host, *, align_corners=0):
    spatial = size.tolist()[2:]
    dtype = xp.dtype_of(theta)
    lines = []
    for n in spatial:
        line = np.linspace(-1, 1, n) if align_corners and n > 1 else (2 * np.arange(n) + 1) / n - 1
        lines.append(line)
    mesh = np.meshgrid(*lines, indexing="ij")[::-1]  # x before y before z
    points = np.stack([*mesh, np.ones_like(mesh[0])], axis=-1).reshape(-1, len(spatial) + 1)
    grid = xp.matmul(xp.asarray(points.astype(dtype)), xp.swapaxes(theta, 1, 2))
    return xp.reshape(grid, (theta.shape[0], *spatial, len(spatial)))


# Regions of interest


@op("RoiAlign", since=16)
def roi_align(
    xp, x, rois, batch_indices: along("x", 0, wraps=False), *, coordinate_transformation_mode="half_pixel",
    mode="avg", output_height=1, output_width=1, sampling_ratio=0, spatial_scale=1.0,
):  # fmt: skip
    one_of("mode", mode, "avg", "max")
    one_of("mode", coordinate_transformation_mode, "half_pixel", "output_half_pixel")
    half = 0.5 if coordinate_transformation_mode == "half_pixel" else 0.0
    corners = wide(xp, rois) * spatial_scale - half
    smallest = 0.0 if half else 1.0  # the older mode enlarges regions to one pixel
    axes = [
        _RoiAxis(xp, corners[:, 1], corners[:, 3], output_height, x.shape[2], smallest, sampling_ratio),
        _RoiAxis(xp, corners[:, 0], corners[:, 2], output_width, x.shape[3], smallest, sampling_ratio),
    ]
    y = _roi_samples(xp, wide(xp, x), xp.astype(batch_indices, np.int32), axes, mode, sampling_ratio)
    y = xp.reshape(y, (rois.shape[0], output_height, output_width, x.shape[1]))
    return xp.astype(xp.transpose(y, (0, 3, 1, 2)), xp.dtype_of(x))


@op("RoiAlign", since=10)
def roi_align_10(
    xp, x, rois, batch_indices: along("x", 0, wraps=False), *, mode="avg", output_height=1, output_width=1,
    sampling_ratio=0, spatial_scale=1.0,
):  # fmt: skip
    return roi_align(
        xp, x, rois, batch_indices, coordinate_transformation_mode="output_half_pixel", mode=mode,
        output_height=output_height, output_width=output_width, sampling_ratio=sampling_ratio,
        spatial_scale=spatial_scale,
    )  # fmt: skip


class _RoiAxis:
    """One axis of all regions: bins of equal width, each with `count` [R] evenly spaced samples."""

    def __init__(self, xp: Any, start: Any, stop: Any, bins: int, n: int, smallest: float, sampling_ratio: int) -> None:
        extent = xp.maximum(stop - start, smallest) if smallest else stop - start
        self.n = n
        self.width = extent / bins
        if sampling_ratio > 0:
            self.count = xp.full(extent.shape, sampling_ratio, dtype=xp.dtype_of(extent))
        else:
            self.count = xp.maximum(xp.ceil(self.width), 0)
        step = xp.arange(bins, dtype=xp.dtype_of(extent))
        self.origin = start[:, None] + self.width[:, None] * step  # [R, bins]

    def taps(self, xp: Any, sample: Any) -> list[tuple[Any, Any]]:
        """Both pixels that sample number `sample` [R] of every bin reads: (index, weight) of shape [R, bins]."""
        point = self.origin + (self.width * (sample + 0.5) / xp.maximum(self.count, 1))[:, None]
        near = xp.logical_and(point >= -1, point <= self.n)
        point = xp.clip(point, 0, self.n - 1)
        taps = [tap_inside(xp, p, w, self.n) for p, w in linear_taps(xp, point)]
        return [(index, xp.where(near, weight, 0)) for index, weight in taps]


def _roi_samples(xp: Any, x: Any, batch: Any, axes: Sequence[_RoiAxis], mode: str, sampling_ratio: int) -> Any:
    """Average, or maximum, of all samples of each bin: [R, bins, C]."""
    rows = pixel_rows(xp, x)
    shape = (batch.shape[0], axes[0].origin.shape[1] * axes[1].origin.shape[1], x.shape[1])
    total = axes[0].count * axes[1].count
    start = xp.full(shape, -np.inf if mode == "max" else 0.0, dtype=xp.dtype_of(x))

    def add(number: Any, result: Any) -> Any:
        """`result` with sample `number` of every region that has one."""
        row = xp.floor(number / xp.maximum(axes[1].count, 1))
        column = number - row * axes[1].count
        terms = _corner_terms(xp, rows, batch, axes, axes[0].taps(xp, row), axes[1].taps(xp, column))
        valid = (number < total)[:, None, None]
        if mode == "avg":
            return result + xp.where(valid, terms[0] + terms[1] + terms[2] + terms[3], 0)
        top = xp.maximum(xp.maximum(terms[0], terms[1]), xp.maximum(terms[2], terms[3]))
        return xp.where(valid, xp.maximum(result, top), result)

    def step(carry: Any) -> Any:
        return carry[0] + 1, add(carry[0] + xp.zeros_like(total), carry[1])

    if batch.shape[0] == 0:
        return start
    last = xp.max(total)
    first = (xp.zeros_like(last), start)
    if sampling_ratio > 0:  # rolled up, for one fusion of all samples is slower
        (_, result), _ = xp.scan(lambda carry, _: (step(carry), ()), first, (), length=sampling_ratio**2)
    else:
        _, result = xp.while_loop(lambda carry: carry[0] < last, step, first)
    if mode == "avg":
        return result / xp.maximum(total, 1)[:, None, None]
    return xp.where((total > 0)[:, None, None], result, 0)


def _corner_terms(
    xp: Any, rows: Any, batch: Any, axes: Sequence[_RoiAxis], vertical: Any, horizontal: Any
) -> list[Any]:
    """Weight × pixel of the four neighbours of one sample of every bin, each [R, bins, C]."""
    height, width = axes[0].n, axes[1].n
    regions = batch.shape[0]
    flat = xp.reshape(rows, (1, -1, rows.shape[2]))
    terms = []
    for (i, wi), (j, wj) in [(v, h) for v in vertical for h in horizontal]:
        index = (batch[:, None] * height + i)[:, :, None] * width + j[:, None, :]
        pixels = read_pixels(xp, flat, (flat.shape[1],), [xp.reshape(index, (1, -1))])
        weight = xp.reshape(wi[:, :, None] * wj[:, None, :], (regions, -1, 1))
        terms.append(xp.reshape(pixels, (*weight.shape[:2], -1)) * weight)
    return terms


@op("CropAndResize", domain="com.microsoft")
def crop_and_resize(
    xp, x, rois, batch_indices: along("x", 0, wraps=False), crop_size: Host, *, extrapolation_value=0.0, mode="bilinear"
):
    one_of("mode", mode, "bilinear", "nearest")
    height, width = crop_size.tolist()
    corners = wide(xp, rois)
    points = [
        _crop_points(xp, corners[:, 0], corners[:, 2], height, x.shape[2])[:, :, None],
        _crop_points(xp, corners[:, 1], corners[:, 3], width, x.shape[3])[:, None, :],
    ]
    shape = (rois.shape[0], height, width)
    points = [xp.reshape(xp.broadcast_to(p, shape), (rois.shape[0], height * width)) for p in points]
    inside = [xp.logical_and(p >= 0, p <= n - 1) for p, n in zip(points, x.shape[2:], strict=True)]
    if mode == "nearest":
        taps = [[tap_inside(xp, xp.round(p), xp.ones_like(p), n)] for p, n in zip(points, x.shape[2:], strict=True)]
    else:
        taps = [
            [tap_inside(xp, q, w, n) for q, w in linear_taps(xp, p)] for p, n in zip(points, x.shape[2:], strict=True)
        ]
    rows = xp.take(pixel_rows(xp, wide(xp, x)), xp.astype(batch_indices, np.int32), axis=0)
    y = weighted_pixels(xp, rows, x.shape[2:], taps)
    y = xp.where(xp.logical_and(*inside)[:, :, None], y, extrapolation_value)
    y = xp.reshape(xp.swapaxes(y, 1, 2), (rois.shape[0], x.shape[1], height, width))
    return xp.astype(y, xp.dtype_of(x))


def _crop_points(xp: Any, start: Any, stop: Any, count: int, n: int) -> Any:
    """Coordinates [R, count] from corner to corner; the middle when there is only one."""
    if count == 1:
        return (0.5 * (start + stop) * (n - 1))[:, None]
    step = (stop - start) * ((n - 1) / (count - 1))
    return (start * (n - 1))[:, None] + step[:, None] * xp.arange(count, dtype=xp.dtype_of(start))
