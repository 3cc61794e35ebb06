"""Operators whose number of results depends on values, or that decode files: they run on the host with NumPy."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from ep.errors import BackendUnavailable, InvalidInput
from ep.registry import op


@op(
    "NonMaxSuppression",
    since=10,
    host_only="how many boxes it selects depends on their values",
)
def non_max_suppression(
    xp,
    boxes,
    scores,
    max_output_boxes_per_class=None,
    iou_threshold=None,
    score_threshold=None,
    *,
    center_point_box=0,
):
    limit = 0 if max_output_boxes_per_class is None else int(max_output_boxes_per_class.item())
    overlap = 0.0 if iou_threshold is None else float(iou_threshold.item())
    lowest = None if score_threshold is None else float(score_threshold.item())
    selected = []
    for batch in range(scores.shape[0] if limit > 0 else 0):
        corners = _corners(boxes[batch], bool(center_point_box))
        for category in range(scores.shape[1]):
            chosen = _suppress(corners, scores[batch, category], limit, overlap, lowest)
            selected += [(batch, category, box) for box in chosen]
    return np.array(selected, np.int64).reshape(-1, 3)


def _corners(boxes: np.ndarray, is_centre: bool) -> np.ndarray:
    """[4, n]: both smaller, then both larger coordinates."""
    a, b, c, d = boxes.T
    if is_centre:
        return np.stack([a - c / 2, b - d / 2, a + c / 2, b + d / 2])
    return np.stack([np.minimum(a, c), np.minimum(b, d), np.maximum(a, c), np.maximum(b, d)])


def _suppress(corners: np.ndarray, scores: np.ndarray, limit: int, overlap: float, lowest: float | None) -> list[int]:
    """Indices of the best boxes, each of which overlaps no better one by more than `overlap`."""
    candidates = np.arange(len(scores)) if lowest is None else np.flatnonzero(scores > lowest)
    order = candidates[np.argsort(-scores[candidates], kind="stable")]
    x0, y0, x1, y1 = corners[:, order]
    areas = (x1 - x0) * (y1 - y0)
    alive = np.ones(len(order), bool)
    chosen: list[int] = []
    for i in range(len(order)):
        if not alive[i]:
            continue
        chosen.append(int(order[i]))
        if len(chosen) == limit:
            break
        rest = slice(i + 1, None)
        width = np.minimum(x1[i], x1[rest]) - np.maximum(x0[i], x0[rest])
        height = np.minimum(y1[i], y1[rest]) - np.maximum(y0[i], y0[rest])
        shared = np.maximum(width, 0) * np.maximum(height, 0)
        union = areas[i] + areas[rest] - shared
        # an empty box overlaps nothing; comparing products spares the division by zero
        alive[rest] &= ~((shared > overlap * union) & (shared > 0))
    return chosen


@op("ImageDecoder", since=20, host_only="it decodes image files", out=("uint8",))
def image_decoder(xp, encoded_stream, *, pixel_format="RGB"):
    modes = {"RGB": "RGB", "BGR": "RGB", "Grayscale": "L"}
    if pixel_format not in modes:
        raise InvalidInput(f"pixel_format {pixel_format!r} is unknown.", fix=f"use one of {', '.join(modes)}.")
    image = np.asarray(_pillow().open(io.BytesIO(encoded_stream.tobytes())).convert(modes[pixel_format]))
    image = image[..., None] if image.ndim == 2 else image
    return np.ascontiguousarray(image[..., ::-1]) if pixel_format == "BGR" else image


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as cause:
        raise BackendUnavailable(
            "ImageDecoder needs Pillow, which is not installed.",
            why="image formats are decoded by that library.",
            fix="pip install pillow",
        ) from cause
    return Image
