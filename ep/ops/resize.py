"""Resize and Upsample: where each output element reads, decided on the host, then one product or gather per axis."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from ep.errors import InvalidInput
from ep.ops.axes import at as along
from ep.ops.axes import axes_of
from ep.ops.precision import exact_dtype, exactly, saturated
from ep.registry import Host, op

Scale = Fraction | np.float32  # exact when it comes from sizes; float32 arithmetic when the model gives a float


@dataclass(frozen=True, slots=True)
class Reading:
    """What one axis reads: `index` [out] alone (nearest), or [out, taps] with `weights` of the same shape."""

    axis: int
    index: np.ndarray
    weights: np.ndarray | None
    outside: np.ndarray  # [out]: the extrapolation value is used here


def _inside(attributes: dict[str, Any], dtypes: Sequence[Any]) -> np.dtype | None:
    """Nearest pixels, the default, are not computed."""
    return exactly({"mode": "nearest"} | attributes, dtypes)


@op("Resize", since=11, inside=_inside)
def resize(
    xp,
    x,
    roi: Host = None,
    scales: Host = None,
    sizes: Host = None,
    *,
    antialias=0,
    axes=None,
    coordinate_transformation_mode="half_pixel",
    cubic_coeff_a=-0.75,
    exclude_outside=0,
    extrapolation_value=0.0,
    keep_aspect_ratio_policy="stretch",
    mode="nearest",
    nearest_mode="round_prefer_floor",
):
    where = tuple(range(x.ndim)) if axes is None else axes_of(axes, x.ndim)
    if scales is not None and scales.size and sizes is not None and sizes.size:
        raise InvalidInput("Resize has both scales and sizes.", fix="give one of them.")
    crop = coordinate_transformation_mode == "tf_crop_and_resize"
    regions = _regions(roi, len(where)) if crop else [(0.0, 1.0)] * len(where)
    targets = _targets([x.shape[a] for a in where], scales, sizes, keep_aspect_ratio_policy, regions)
    readings = []
    for axis, (out, scale), region in zip(where, targets, regions, strict=True):
        n = x.shape[axis]
        points = positions(coordinate_transformation_mode, n, out, scale, region)
        if out == n and np.array_equal(points, np.arange(n)):
            continue
        outside = (points < 0) | (points > n - 1) if crop else np.zeros(out, bool)
        if mode == "nearest":
            index, weights = nearest(points, n, nearest_mode), None
        else:
            stretch = max(1.0, float(1 / scale)) if antialias else 1.0
            index, weights = taps(points, n, mode, cubic_coeff_a, stretch, bool(exclude_outside))
        readings.append(Reading(axis, index, weights, outside))
    return read(xp, x, readings, extrapolation_value)


@op("Resize", since=10, inside=_inside)
def resize_10(xp, x, scales: Host, *, mode="nearest"):
    """Nearest rounds down when an axis grows and up when it shrinks, as onnx 1.5's own test cases do."""
    return _scaled(xp, x, scales.tolist(), mode, "ceil")


@op("Upsample", since=9, inside=_inside)
def upsample(xp, x, scales: Host, *, mode="nearest"):
    return _scaled(xp, x, scales.tolist(), mode, "floor")


@op("Upsample", since=7, inside=_inside)
def upsample_7(xp, x, *, mode="nearest", scales):
    return _scaled(xp, x, scales, mode, "floor")


@op("Upsample", since=1, inside=_inside)
def upsample_1(xp, x, *, height_scale, mode="nearest", width_scale):
    return _scaled(xp, x, (1.0, 1.0, height_scale, width_scale), mode, "floor")


def _scaled(xp: Any, x: Any, scales: Sequence[float], mode: str, shrinking: str) -> Any:
    readings = []
    for axis, (n, factor) in enumerate(zip(x.shape, scales, strict=True)):
        scale = np.float32(factor)
        out = int(np.floor(np.float32(n) * scale))
        points = positions("asymmetric", n, out, scale)
        if out == n and np.array_equal(points, np.arange(n)):
            continue
        if mode == "nearest":
            index, weights = nearest(points, n, shrinking if scale < 1 else "floor"), None
        else:
            index, weights = taps(points, n, "linear", 0.0, 1.0, False)
        readings.append(Reading(axis, index, weights, np.zeros(out, bool)))
    return read(xp, x, readings, 0.0)


# How large, and where


def _regions(roi: Any, count: int) -> list[tuple[float, float]]:
    if roi is None or roi.size != 2 * count:
        size = 0 if roi is None else roi.size
        raise InvalidInput(
            f"tf_crop_and_resize on {count} axes needs a roi of {2 * count} elements; it has {size}.",
            fix="give a start and an end for every resized axis.",
        )
    values = roi.astype(np.float64).tolist()
    return list(zip(values[:count], values[count:], strict=True))


def _targets(
    lengths: Sequence[int], scales: Any, sizes: Any, policy: str, regions: Sequence[tuple[float, float]]
) -> list[tuple[int, Scale]]:
    """The output length and the scale of every axis."""
    given = next((v for v in (scales, sizes) if v is not None and v.size), None)
    if given is None or given.size != len(lengths):
        size = 0 if given is None else given.size
        raise InvalidInput(
            f"{len(lengths)} axes are resized, but {size} scales or sizes are given.",
            fix="give one scale or one size for every resized axis.",
        )
    if scales is not None and scales.size:
        factors = [np.float32(s) for s in scales.tolist()]
        return [
            (int(np.floor(np.float32(n) * np.float32(end - start) * s)), s)
            for n, s, (start, end) in zip(lengths, factors, regions, strict=True)
        ]
    wanted = [Fraction(int(s), n) if n else Fraction(1) for s, n in zip(sizes.tolist(), lengths, strict=True)]
    if policy == "stretch":
        return [(int(s), scale) for s, scale in zip(sizes.tolist(), wanted, strict=True)]
    if policy not in ("not_larger", "not_smaller"):
        raise InvalidInput(
            f"keep_aspect_ratio_policy {policy!r} is unknown.", fix="use stretch, not_larger or not_smaller."
        )
    common = min(wanted) if policy == "not_larger" else max(wanted)
    return [(math.floor(common * n + Fraction(1, 2)), common) for n in lengths]


def positions(mode: str, n: int, out: int, scale: Scale, region: tuple[float, float] = (0.0, 1.0)) -> np.ndarray:
    """The coordinate in the input of every output element."""
    exact = isinstance(scale, Fraction)
    x = np.arange(out, dtype=np.float64 if exact else np.float32)
    width = float(n * scale)  # fractional where scales are given; the node tests of align_corners expect that

    def shrunk(v: np.ndarray) -> np.ndarray:
        return v * scale.denominator / scale.numerator if exact else v / scale

    def cropped() -> np.ndarray:
        start, end = region
        if out > 1:
            return start * (n - 1) + x * ((end - start) * (n - 1) / (out - 1))
        return np.full(out, 0.5 * (start + end) * (n - 1))

    table = {
        "half_pixel": lambda: shrunk(x + x.dtype.type(0.5)) - x.dtype.type(0.5),
        "half_pixel_symmetric": lambda: n / 2 * (1 - out / width) + shrunk(x + x.dtype.type(0.5)) - 0.5,
        "pytorch_half_pixel": lambda: shrunk(x + x.dtype.type(0.5)) - x.dtype.type(0.5) if out > 1 else 0 * x,
        "align_corners": lambda: x * (n - 1) / (width - 1) if out > 1 else 0 * x,
        "asymmetric": lambda: shrunk(x),
        "tf_half_pixel_for_nn": lambda: shrunk(x + x.dtype.type(0.5)),
        "tf_crop_and_resize": cropped,
    }
    if mode not in table:
        raise InvalidInput(
            f"coordinate_transformation_mode {mode!r} is unknown.", fix=f"use one of {', '.join(table)}."
        )
    return table[mode]().astype(np.float64)


# Which elements, with which weights


def nearest(points: np.ndarray, n: int, mode: str) -> np.ndarray:
    rounding = {
        "round_prefer_floor": lambda p: np.ceil(p - 0.5),
        "round_prefer_ceil": lambda p: np.floor(p + 0.5),
        "floor": np.floor,
        "ceil": np.ceil,
    }
    if mode not in rounding:
        raise InvalidInput(f"nearest_mode {mode!r} is unknown.", fix=f"use one of {', '.join(rounding)}.")
    return np.clip(rounding[mode](points), 0, n - 1).astype(np.int64)


def taps(
    points: np.ndarray, n: int, mode: str, a: float, stretch: float, exclude_outside: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Indices and weights [out, taps]; antialiasing stretches the filter, outside taps read the border."""
    if mode not in ("linear", "cubic"):
        raise InvalidInput(f"mode {mode!r} is unknown.", fix="use nearest, linear or cubic.")
    radius = (1 if mode == "linear" else 2) * stretch
    low = np.floor(points)
    offsets = np.arange(math.floor(-radius) + 1, math.ceil(radius) + 1)
    index = low[:, None] + offsets
    distance = np.abs(index - points[:, None]) / stretch
    weights = np.maximum(1 - distance, 0) if mode == "linear" else _cubic(distance, a)
    if exclude_outside:
        weights = np.where((index >= 0) & (index < n), weights, 0)
    if exclude_outside or stretch > 1:
        weights = weights / weights.sum(axis=1, keepdims=True)
    return np.clip(index, 0, n - 1).astype(np.int64), weights


def _cubic(d: np.ndarray, a: float) -> np.ndarray:
    """Keys' kernel: https://ieeexplore.ieee.org/document/1163711, equation 4."""
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return np.where(d <= 1, near, np.where(d < 2, far, 0))


# The reading itself


def read(xp: Any, x: Any, readings: Sequence[Reading], extrapolation_value: float) -> Any:
    """`x` with every reading applied, the most shrinking first; sums run in `exact_dtype`."""
    dtype = xp.dtype_of(x)
    ordered = sorted(readings, key=lambda r: len(r.index) / max(x.shape[r.axis], 1))
    weighted = any(r.weights is not None for r in readings)
    y = xp.astype(x, exact_dtype(dtype)) if weighted else x
    for reading in ordered:
        y = _pick(xp, y, reading) if reading.weights is None else _blend(xp, y, reading)
    y = _rounded(xp, y, dtype) if weighted else y
    for reading in readings:
        if reading.outside.any():
            shape = tuple(-1 if a == reading.axis else 1 for a in range(x.ndim))
            y = xp.where(xp.asarray(reading.outside.reshape(shape)), _constant(extrapolation_value, dtype), y)
    return y


def _constant(value: float, dtype: np.dtype) -> float | int:
    return int(value) if dtype.kind in "iu" else value


def _rounded(xp: Any, y: Any, dtype: np.dtype) -> Any:
    """Integers are rounded to the nearest and saturate, as in onnx's reference implementation."""
    return saturated(xp, xp.round(y) if dtype.kind in "iu" else y, dtype)


def _pick(xp: Any, x: Any, reading: Reading) -> Any:
    """Nearest: repetition and strided slices are recognised, for they are far cheaper than a gather."""
    n, axis, index = x.shape[reading.axis], reading.axis, reading.index
    out = len(index)
    if n and out % n == 0 and np.array_equal(index, np.arange(out) // (out // n)):
        shape = list(x.shape)
        grown = xp.broadcast_to(xp.expand_dims(x, axis + 1), (*shape[: axis + 1], out // n, *shape[axis + 1 :]))
        return xp.reshape(grown, (*shape[:axis], out, *shape[axis + 1 :]))
    steps = set(np.diff(index).tolist())
    if len(steps) == 1 and min(steps) > 0:
        return x[along(axis, slice(int(index[0]), int(index[-1]) + 1, steps.pop()))]
    return xp.take(x, xp.asarray(index), axis=axis)


LARGEST_MATRIX = 1 << 16  # elements; larger weight matrices bloat the program, so taps are gathered instead


def _blend(xp: Any, x: Any, reading: Reading) -> Any:
    n, axis = x.shape[reading.axis], reading.axis
    out, count = reading.index.shape
    dtype = xp.dtype_of(x)
    if n * out > LARGEST_MATRIX and count < n:
        shape = (-1, *(1,) * (x.ndim - 1 - axis))
        terms = _terms(xp, x, reading, shape, dtype)
        return sum(terms, start=next(terms))
    matrix = np.zeros((out, n))
    np.add.at(matrix, (np.arange(out)[:, None], reading.index), reading.weights)
    before, after = math.prod(x.shape[:axis]), math.prod(x.shape[axis + 1 :])
    if after == 1:
        y = xp.matmul(xp.reshape(x, (before, n)), xp.asarray(matrix.T.astype(dtype)))
    else:
        y = xp.matmul(xp.asarray(matrix.astype(dtype)), xp.reshape(x, (before, n, after)))
    return xp.reshape(y, (*x.shape[:axis], out, *x.shape[axis + 1 :]))


def _terms(xp: Any, x: Any, reading: Reading, shape: tuple[int, ...], dtype: np.dtype) -> Iterator[Any]:
    for index, weights in zip(reading.index.T, reading.weights.T, strict=True):
        picked = xp.take(x, xp.asarray(np.ascontiguousarray(index)), axis=reading.axis)
        yield picked * xp.asarray(np.ascontiguousarray(weights).astype(dtype).reshape(shape))
