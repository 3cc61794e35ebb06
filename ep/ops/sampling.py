"""How are values between pixels read: gathering and linear interpolation at arbitrary points of an image."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np


def pixel_rows(xp: Any, image: Any) -> Any:
    """[B, C, *S] as [B, prod(S), C]: the channels of a pixel side by side, so that a gather moves whole rows."""
    flat = xp.reshape(image, (*image.shape[:2], math.prod(image.shape[2:])))
    return xp.swapaxes(flat, 1, 2)


def read_pixels(xp: Any, rows: Any, size: Sequence[int], index: Sequence[Any]) -> Any:
    """Pixels [B, P, C] of the `rows` at integer coordinates (one [B, P] array per axis, all inside)."""
    batch, pixels, channels = rows.shape
    flat = index[0]
    for n, i in zip(size[1:], index[1:], strict=True):
        flat = flat * n + i
    flat = flat + xp.reshape(xp.arange(batch, dtype=np.int32) * pixels, (batch, 1))
    return xp.take(xp.reshape(rows, (batch * pixels, channels)), flat, axis=0)


def sample_linear(xp: Any, image: Any, points: Sequence[Any]) -> Any:
    """[B, C, P]: the image [B, C, *S] at points (one [B, P] array of coordinates per axis), zeros outside."""
    size = image.shape[2:]
    rows = pixel_rows(xp, image)
    corners = [
        [tap_inside(xp, position, weight, n) for position, weight in linear_taps(xp, p)]
        for p, n in zip(points, size, strict=True)
    ]
    return xp.swapaxes(weighted_pixels(xp, rows, size, corners), 1, 2)


def weighted_pixels(xp: Any, rows: Any, size: Sequence[int], taps: Sequence[Sequence[tuple[Any, Any]]]) -> Any:
    """Sum over all combinations of one (index, weight) tap per axis of weight × pixel: [B, P, C]."""
    total = None
    for combination in itertools.product(*taps):
        weight = combination[0][1]
        for _, other in combination[1:]:
            weight = weight * other
        pixels = read_pixels(xp, rows, size, [index for index, _ in combination])
        term = pixels * xp.astype(weight, xp.dtype_of(rows))[..., None]
        total = term if total is None else total + term
    return total


def linear_taps(xp: Any, point: Any) -> list[tuple[Any, Any]]:
    """The two neighbours of a coordinate with their weights; positions are still floating-point."""
    low = xp.floor(point)
    fraction = point - low
    return [(low, 1 - fraction), (low + 1, fraction)]


def tap_inside(xp: Any, position: Any, weight: Any, n: int) -> tuple[Any, Any]:
    """A tap as an index that can be read, with weight 0 where it lies outside [0, n)."""
    inside = xp.logical_and(position >= 0, position <= n - 1)
    index = xp.astype(xp.clip(position, 0, n - 1), np.int32)
    return index, xp.where(inside, weight, 0)
