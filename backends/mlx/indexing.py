"""Reads and writes at indices, and padding, of the MLX namespace."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from ep.backends.mlx.target import on_cpu_stream


def _indices(index: Any) -> Any:
    return mx.array(index) if isinstance(index, np.ndarray) else index


def _within(index: Any, size: int) -> Any:
    """Indices that stay inside: MLX checks none, and would read or write memory that belongs to others."""
    if isinstance(index, np.ndarray) and index.dtype.kind in "iu":
        if index.size and not -size <= index.min() <= index.max() < size:
            raise IndexError(f"an index from {index.min()} to {index.max()} is outside of {size} elements")
    elif isinstance(index, mx.array) and index.dtype != mx.bool_ and size:
        wide = index if index.dtype.size > 2 else index.astype(mx.int32)
        return mx.minimum(wide, size - 1) if index.dtype in _UNSIGNED else mx.clip(wide, -size, size - 1)
    return _indices(index)


_UNSIGNED = (mx.uint8, mx.uint16, mx.uint32, mx.uint64)


def take(x: Any, indices: Any, axis: int = 0) -> mx.array:
    return mx.take(x, _within(indices, x.shape[axis]), axis=axis)


def take_along_axis(x: Any, indices: Any, axis: int) -> mx.array:
    return mx.take_along_axis(x, _within(indices, x.shape[axis]), axis=axis)


_SCATTER = {"add": "add", "mul": "multiply", "max": "maximum", "min": "minimum"}


def scatter(x: Any, index: tuple[Any, ...], updates: Any, reduction: str = "none") -> mx.array:
    index = tuple(_within(i, size) for i, size in zip(index, x.shape, strict=False))
    if reduction == "none":
        return _overwritten(x, index, updates)
    if x.dtype.size == 8:  # Metal has no 64-bit atomics
        return on_cpu_stream(lambda x, updates: getattr(x.at[index], _SCATTER[reduction])(updates), x, updates)
    return getattr(x.at[index], _SCATTER[reduction])(updates)


def _overwritten(x: Any, index: tuple[Any, ...], updates: Any) -> mx.array:
    if x.dtype.size == 8 and x.ndim:  # Metal refuses 64-bit scatters, so the halves are written as int32
        halves = _overwritten(_halves(x), index, _halves(mx.broadcast_to(updates, x[index].shape)))
        return mx.reshape(mx.view(mx.reshape(halves, (*x.shape[:-1], -1)), x.dtype), x.shape)
    result = mx.array(x)
    result[index] = updates
    return result


def _halves(x: Any) -> mx.array:
    return mx.reshape(mx.view(mx.reshape(x, (-1,)), mx.int32), (*x.shape, 2))


def slice_update(x: Any, update: Any, starts: Any) -> mx.array:
    room = [n - m for n, m in zip(x.shape, update.shape, strict=True)]
    if min(room, default=0) < 0:
        raise ValueError(f"{list(update.shape)} elements do not fit into {list(x.shape)}")
    if all(isinstance(s, int | np.integer) for s in starts):
        if any(not 0 <= s <= most for s, most in zip(starts, room, strict=True)):
            raise IndexError(f"{list(update.shape)} elements at {list(starts)} lie outside of {list(x.shape)}")
        result = mx.array(x)
        result[tuple(slice(int(s), int(s) + n) for s, n in zip(starts, update.shape, strict=True))] = update
        return result
    # inside, as `_within` says: MLX writes wherever it is told to
    inside = (mx.clip(mx.array(s), 0, most) for s, most in zip(starts, room, strict=True))
    start = mx.stack([s.astype(mx.int32) for s in inside])
    return mx.slice_update(x, update, start, tuple(range(x.ndim)))


def pad(x: Any, pads: Any, mode: Any = "constant", constant_values: Any = 0) -> mx.array:
    pads = [(int(lo), int(hi)) for lo, hi in pads]
    if not any(map(any, pads)):
        return x
    if mode == "constant":
        return mx.pad(x, pads, constant_values=mx.array(constant_values, x.dtype))
    for axis, (lo, hi) in enumerate(pads):
        if lo or hi:  # one gather per axis serves every mode; mx.pad lacks wrap and repeated reflection
            x = take(x, np.pad(np.arange(x.shape[axis]), (lo, hi), mode=mode), axis)
    return x
