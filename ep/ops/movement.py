"""Operators that cut, join, pad or reorder a tensor at places known before it is: Concat, Slice, Pad, …"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ep.errors import InvalidInput
from ep.ops.axes import axes_of, axis_of, ints
from ep.ops.limits import lengths
from ep.registry import Host, Outputs, op

# Concat and Split


@op("Concat", since=4)
def concat(xp, *inputs, axis):
    return xp.concatenate(inputs, axis=axis_of(axis, inputs[0].ndim))


@op("Concat", since=1)
def concat_1(xp, *inputs, axis=None):
    return concat(xp, *inputs, axis=1 if axis is None else axis)


@op("Split", since=18, picks=True)
def split(xp, x, split: Host = None, *, axis=0, num_outputs=None, outputs: Outputs):
    axis = axis_of(axis, x.ndim)
    if num_outputs not in (None, outputs):
        raise InvalidInput(f"num_outputs is {num_outputs}, but the node has {outputs} outputs.")
    return cut(xp, x, axis, even_sizes(x.shape[axis], outputs) if split is None else ints(split))


@op("Split", since=13, picks=True)
def split_13(xp, x, split: Host = None, *, axis=0, outputs: Outputs):
    axis = axis_of(axis, x.ndim)
    if split is None and x.shape[axis] % outputs:
        raise InvalidInput(
            f"axis {axis} with {x.shape[axis]} elements cannot be split into {outputs} equal parts.",
            fix="give the sizes as the input `split`, or export the model at opset 18 or newer.",
        )
    return cut(xp, x, axis, even_sizes(x.shape[axis], outputs) if split is None else ints(split))


@op("Split", since=2, picks=True)
def split_2(xp, x, *, split=None, axis=0, outputs: Outputs):
    return split_13(xp, x, split, axis=axis, outputs=outputs)


@op("Split", since=1, picks=True)
def split_1(xp, x, sizes: Host = None, *, split=None, axis=None, outputs: Outputs):
    return split_13(xp, x, split if sizes is None else sizes, axis=axis or 0, outputs=outputs)


def even_sizes(total: int, parts: int) -> tuple[int, ...]:
    """Parts of equal size, the last one smaller where they do not come out even."""
    size = math.ceil(total / parts)
    last = total - size * (parts - 1)
    if last >= 0:
        return (size,) * (parts - 1) + (last,)
    raise InvalidInput(
        f"{total} elements cannot be split into {parts} parts of which only the last is smaller.",
        why=f"{parts - 1} parts of {size} are more than there is.",
        fix="give the sizes as the input `split`.",
    )


def cut(xp, x, axis: int, sizes: tuple[int, ...]) -> tuple[Any, ...]:
    """Consecutive parts of x along an axis."""
    if sum(sizes) != x.shape[axis] or min(sizes, default=0) < 0:
        raise InvalidInput(
            f"sizes {list(sizes)} do not split axis {axis} of a tensor of shape {list(x.shape)}.",
            why=f"they must be positive and sum up to {x.shape[axis]}.",
        )
    return tuple(xp.split(x, np.cumsum(sizes[:-1], dtype=np.int64).tolist(), axis=axis))


# Slice


@op("Slice", since=10, picks=True)
def slice_(xp, data, starts: Host, ends: Host, axes: Host = None, steps: Host = None):
    starts, ends = ints(starts), ints(ends)
    axes = range(len(starts)) if axes is None else ints(axes)
    steps = (1,) * len(starts) if steps is None else ints(steps)
    index = [slice(None)] * data.ndim
    spans = zip(axes_of(axes, data.ndim), starts, ends, steps, strict=True)
    for axis, start, end, step in spans:
        index[axis] = _span(data.shape[axis], start, end, step)
    return data[tuple(index)] if index else data


@op("Slice", since=1, picks=True)
def slice_1(xp, data, *, starts, ends, axes=None):
    return slice_(xp, data, starts, ends, axes)


def _span(size: int, start: int, end: int, step: int) -> slice:
    """The clamping of the spec. Python's differs: it finds nothing where a backward slice starts before 0."""
    if step == 0:
        raise InvalidInput("a Slice step is 0.", fix="use a step of 1 or more, or -1 or less.")
    start, end = (i + size if i < 0 else i for i in (start, end))
    low, high = (0, size) if step > 0 else (-1, size - 1)
    start, end = min(max(start, 0), high), min(max(end, low), high)
    step = min(max(step, -size), size) or 1  # library indices have 32 bits, exporters write INT64_MAX
    if start == end or (end > start) != (step > 0):
        return slice(0, 0)
    return slice(start, None if end < 0 else end, step)


# Pad


@op("Pad", since=18)
def pad(xp, data, pads: Host, constant_value=None, axes: Host = None, *, mode="constant"):
    axes = range(data.ndim) if axes is None else axes_of(ints(axes), data.ndim)
    pads = ints(pads)
    if len(pads) != 2 * len(axes):
        raise InvalidInput(
            f"{len(pads)} pads are given for {len(axes)} axes.",
            fix=f"give {2 * len(axes)}: all begins, all ends.",
        )
    widths = [(0, 0)] * data.ndim
    for axis, begin, end in zip(axes, pads[: len(axes)], pads[len(axes) :], strict=True):
        widths[axis] = (begin, end)
    return padded(xp, data, widths, mode, constant_value)


@op("Pad", since=11)
def pad_11(xp, data, pads: Host, constant_value=None, *, mode="constant"):
    return pad(xp, data, pads, constant_value, mode=mode)


@op("Pad", since=2)
def pad_2(xp, data, *, pads, mode="constant", value=0.0):
    return pad(xp, data, pads, xp.asarray(value, xp.dtype_of(data)), mode=mode)


@op("Pad", since=1)
def pad_1(xp, data, *, paddings, mode="constant", value=0.0):
    return pad_2(xp, data, pads=paddings, mode=mode, value=value)


def padded(xp, x, widths: Sequence[tuple[int, int]], mode: str = "constant", value: Any = None):
    """Negative widths cut; they do so first, so that what is reflected or repeated is what remains."""
    if not widths:
        return x
    pairs = zip(x.shape, widths, strict=True)
    spans, widths = zip(*(_kept(axis, n, a, b) for axis, (n, (a, b)) in enumerate(pairs)), strict=True)
    if any(span != slice(0, n) for n, span in zip(x.shape, spans, strict=True)):
        x = x[spans]
    if not any(a or b for a, b in widths):
        return x
    if mode == "constant":
        return xp.pad(x, widths, constant_values=fill(xp, x) if value is None else xp.reshape(value, ()))
    wide = mode == "wrap" or any(max(w) >= n for n, w in zip(x.shape, widths, strict=True) if max(w))
    return _gathered(xp, x, widths, mode) if wide else xp.pad(x, widths, mode=mode)


def _kept(axis: int, n: int, before: int, after: int) -> tuple[slice, tuple[int, int]]:
    """What cutting leaves of an axis, and the pads. Cutting more than there is goes on in the other pad."""
    start, stop = max(-before, 0), n - max(-after, 0)
    before, after = max(before, 0), max(after, 0)
    missing = max(start - stop, 0)
    if missing > before + after:
        raise InvalidInput(f"pads remove {missing} more than the {n} elements of axis {axis}.")
    if missing:
        return slice(0, 0), (max(before - missing, 0), max(after - missing, 0))
    return slice(start, stop), (before, after)


def _gathered(xp, x, widths: Sequence[tuple[int, int]], mode: str):
    """Pads of any width, by the index of the element that each place shows."""
    for axis, (before, after) in enumerate(widths):
        if before or after:
            n = x.shape[axis]
            if n == 0:
                raise InvalidInput(f"axis {axis} has no element to pad with (mode '{mode}').")
            x = xp.take(x, xp.asarray(_SOURCE[mode](np.arange(-before, n + after), n)), axis=axis)
    return x


def _reflected(i: np.ndarray, n: int) -> np.ndarray:
    period = max(2 * (n - 1), 1)
    i = i % period
    return np.minimum(i, period - i) if n > 1 else np.zeros_like(i)


_SOURCE = {"reflect": _reflected, "edge": lambda i, n: np.clip(i, 0, n - 1), "wrap": lambda i, n: i % n}


def fill(xp, x) -> Any:
    """What stands where a tensor has no element: 0, False or the empty string."""
    dtype = xp.dtype_of(x)
    return np.asarray("", object) if dtype.kind == "O" else xp.zeros((), dtype=dtype)


@op("CenterCropPad", since=18)
def center_crop_pad(xp, x, shape: Host, *, axes=None):
    axes = range(x.ndim) if axes is None else axes_of(axes, x.ndim)
    widths = [(0, 0)] * x.ndim
    for axis, target in zip(axes, ints(shape), strict=True):
        missing = target - x.shape[axis]
        before = missing // 2 if missing > 0 else -(-missing // 2)  # both round towards the begin
        widths[axis] = (before, missing - before)
    return padded(xp, x, widths)


# Reordering


@op("Trilu", since=14)
def trilu(xp, x, k=None, *, upper=1):
    rows, columns = x.shape[-2:]
    diagonal = xp.arange(columns, dtype=np.int64)[None, :] - xp.arange(rows, dtype=np.int64)[:, None]
    k = 0 if k is None else xp.reshape(xp.astype(k, np.int64), ())
    return xp.where(diagonal >= k if upper else diagonal <= k, x, fill(xp, x))


@op("ReverseSequence", since=10)
def reverse_sequence(xp, x, sequence_lens: lengths("x", "time_axis"), *, batch_axis=1, time_axis=0):
    """Rows of the flattened batch and time axes are taken in the new order."""
    x = xp.swapaxes(x, 0, 1) if batch_axis else x
    batch, time = x.shape[:2]
    t = xp.arange(time, dtype=np.int64)[None, :]
    lens = xp.astype(sequence_lens, np.int64)[:, None]
    rows = xp.where(t < lens, lens - 1 - t, t) + xp.arange(batch, dtype=np.int64)[:, None] * time
    y = xp.take(xp.reshape(x, (batch * time, *x.shape[2:])), xp.reshape(rows, (-1,)), axis=0)
    y = xp.reshape(y, x.shape)
    return xp.swapaxes(y, 0, 1) if batch_axis else y


@op("Compress", since=9, host_only="the number of elements that it selects depends on data")
def compress(xp, x, condition, *, axis=None):
    if axis is None:
        x, axis = xp.reshape(x, (-1,)), 0
    axis = axis_of(axis, x.ndim)
    return xp.take(x, np.flatnonzero(condition[: x.shape[axis]]), axis=axis)


@op("Col2Im", since=18)
def col2im(xp, x, image_shape: Host, block_shape: Host, *, strides=None, pads=None, dilations=None):
    """Blocks are added up one spatial axis after the other: the axes are independent of each other."""
    image, block = ints(image_shape), ints(block_shape)
    rank = len(image)
    strides, dilations, pads = strides or (1,) * rank, dilations or (1,) * rank, pads or (0,) * (2 * rank)
    total = [n + pads[i] + pads[rank + i] for i, n in enumerate(image)]
    spans = [(k - 1) * d for k, d in zip(block, dilations, strict=True)]
    grid = [(n - span - 1) // s + 1 for n, span, s in zip(total, spans, strides, strict=True)]
    x = xp.reshape(x, (x.shape[0], x.shape[1] // math.prod(block), *block, *grid))
    for i in range(rank):  # the first of the remaining block axes meets the first of the remaining grid axes
        pair = (2, 2 + rank - i)
        x = xp.transpose(x, (*(a for a in range(x.ndim) if a not in pair), *pair))
        x = _overlap_add(xp, x, total[i], strides[i], dilations[i])
        x = x[..., pads[i] : pads[i] + image[i]]
    return x


def _overlap_add(xp, x, total: int, stride: int, dilation: int):
    """[…, block, place] → […, total]: block k of place g is added at g·stride + k·dilation."""
    blocks, places = x.shape[-2:]
    if stride > 1:  # zeros between the places
        x = padded(xp, x[..., None], [(0, 0)] * x.ndim + [(0, stride - 1)])
        x = xp.reshape(x, (*x.shape[:-2], places * stride))
    width = x.shape[-1]
    length = max(total, width + (blocks - 1) * dilation)
    lead = [(0, 0)] * (x.ndim - 2)
    shifts = [k * dilation for k in range(blocks)]
    parts = [padded(xp, x[..., k, :], [*lead, (shift, length - width - shift)]) for k, shift in enumerate(shifts)]
    return functools.reduce(xp.add, parts)[..., :total]
