"""Convolution and pooling of the NumPy namespace."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

HALVES = frozenset({np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)})


def conv(x: Any, w: Any, strides: Any, pads: Any, dilations: Any, groups: int = 1) -> np.ndarray:
    """Windows of each group, [N, C/g, *out, *K], times its weights, [O/g, C/g, *K]."""
    dtype, rank = x.dtype, x.ndim - 2
    if dtype in HALVES:
        x, w = x.astype(np.float32), w.astype(np.float32)
    x = np.pad(x, [(0, 0), (0, 0), *pads])
    view = windows(x, w.shape[2:], strides, dilations)
    contracted = ((1, *range(2, 2 + rank)), (1, *range(2 + rank, 2 + 2 * rank)))
    parts = [
        np.tensordot(weights, view[:, g * weights.shape[1] : (g + 1) * weights.shape[1]], contracted)
        for g, weights in enumerate(np.split(w, groups))
    ]  # [O/g, N, *out]
    return np.moveaxis(np.concatenate(parts), 0, 1).astype(dtype, copy=False)


def conv_transpose(
    x: Any, w: Any, strides: Any, pads: Any, dilations: Any, groups: int = 1, output_padding: Any = None
) -> np.ndarray:
    """A convolution of x spread out by the strides with the mirrored kernel."""
    kernel = w.shape[2:]
    rank = len(kernel)
    w = w.reshape(groups, w.shape[0] // groups, w.shape[1], *kernel).swapaxes(1, 2)
    w = np.flip(w.reshape(-1, w.shape[2], *kernel), axis=tuple(range(2, 2 + rank)))
    reach = [(k - 1) * d for k, d in zip(kernel, dilations, strict=True)]
    extra = output_padding or (0,) * rank
    pads = [(r - lo, r - hi + e) for r, (lo, hi), e in zip(reach, pads, extra, strict=True)]
    spread = _spread(x, strides)
    cut = [slice(max(0, -lo), n - max(0, -hi)) for (lo, hi), n in zip(pads, spread.shape[2:], strict=True)]
    spread = spread[(slice(None), slice(None), *cut)]
    return conv(spread, w, (1,) * rank, [(max(0, lo), max(0, hi)) for lo, hi in pads], dilations, groups)


def _spread(x: Any, strides: Any) -> np.ndarray:
    """x with strides - 1 zeros between neighbours."""
    sizes = [max(0, (n - 1) * s + 1) for n, s in zip(x.shape[2:], strides, strict=True)]
    result = np.zeros((*x.shape[:2], *sizes), x.dtype)
    result[(slice(None), slice(None), *(slice(None, None, s) for s in strides))] = x
    return result


def windows(x: Any, kernel: Any, strides: Any, dilations: Any) -> np.ndarray:
    spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    view = sliding_window_view(x, spans, axis=tuple(range(2, 2 + len(spans))))
    return view[(slice(None), slice(None), *(slice(None, None, step) for step in (*strides, *dilations)))]


_REDUCE: dict[str, Any] = {"max": np.max, "min": np.min, "sum": np.sum}


def pool(x: Any, kernel: Any, strides: Any, dilations: Any, kind: str) -> np.ndarray:
    dtype = x.dtype
    wide = x.astype(np.float32) if dtype in HALVES else x
    view = windows(wide, kernel, strides, dilations)
    return _REDUCE[kind](view, axis=tuple(range(-len(kernel), 0))).astype(dtype)
