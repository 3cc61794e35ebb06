"""Convolutions: Conv, ConvTranspose, DeformConv and the fused and channels-last forms of onnxruntime."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import wraps
from typing import Any

import numpy as np

from ep.ops.sampling import sample_linear
from ep.ops.windows import Ints, per_axis, place, sides_of, split_padding
from ep.registry import Factor, Host, op


@op("Conv")
def conv(
    xp,
    x,
    w: Factor,
    b=None,
    *,
    auto_pad="NOTSET",
    dilations=None,
    group=1,
    kernel_shape=None,
    pads=None,
    strides=None,
):
    _check_channels(x, w.shape[1] * group, group)
    _check_kernel(kernel_shape, w)
    at = place(x.shape[2:], w.shape[2:], strides, dilations, pads, auto_pad)
    return add_bias(xp, xp.conv(x, w, at.strides, at.pads, at.dilations, group), b)


@op("ConvTranspose")
def conv_transpose(
    xp,
    x,
    w: Factor,
    b=None,
    *,
    auto_pad="NOTSET",
    dilations=None,
    group=1,
    kernel_shape=None,
    output_padding=None,
    output_shape=None,
    pads=None,
    strides=None,
):
    _check_channels(x, w.shape[0], group)
    _check_kernel(kernel_shape, w)
    rank = x.ndim - 2
    strides, dilations = per_axis(strides, rank), per_axis(dilations, rank)
    cut, extra = transpose_padding(
        x.shape[2:], w.shape[2:], strides, dilations, pads, auto_pad, output_padding, output_shape
    )
    return add_bias(xp, xp.conv_transpose(x, w, strides, cut, dilations, group, extra), b)


def transpose_padding(
    size: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    pads: Ints,
    auto_pad: str,
    output_padding: Ints,
    output_shape: Ints,
) -> tuple[list[tuple[int, int]], tuple[int, ...]]:
    """What ConvTranspose cuts off both ends of the full result, and what it adds (zeros) at the end."""
    rank = len(size)
    extra = tuple(output_padding) if output_padding else (0,) * rank
    if any(not 0 <= e < max(s, d) for e, s, d in zip(extra, strides, dilations, strict=True)):
        raise ValueError(f"output_padding {extra} is not smaller than strides or dilations")
    if output_shape:
        target = output_shape[-rank:]  # some exporters write batch and channels too
    elif auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        target = [n * s for n, s in zip(size, strides, strict=True)]
    else:
        return ([(0, 0)] * rank if auto_pad == "VALID" else sides_of(pads, rank)), extra
    cut, added = [], []
    for n, k, s, d, e, wanted in zip(size, kernel, strides, dilations, extra, target, strict=True):
        surplus = s * (n - 1) + e + (k - 1) * d + 1 - wanted
        side = "SAME_UPPER" if auto_pad == "SAME_UPPER" else "SAME_LOWER"
        cut.append(split_padding(max(surplus, 0), side))
        added.append(e + max(-surplus, 0))
    return cut, tuple(added)


def add_bias(xp: Any, y: Any, b: Any) -> Any:
    """`y` [N, C, …] plus one value per channel."""
    return y if b is None else y + xp.reshape(b, (1, -1) + (1,) * (y.ndim - 2))


def _check_channels(x: Any, expected: int, group: int) -> None:
    if x.shape[1] != expected:
        raise ValueError(
            f"the input has {x.shape[1]} channels, but the weights are made for {expected} (group={group})"
        )


def _check_kernel(kernel_shape: Ints, w: Any) -> None:
    if kernel_shape and tuple(kernel_shape) != tuple(w.shape[2:]):
        raise ValueError(f"kernel_shape is {tuple(kernel_shape)}, but the weights are {tuple(w.shape)}")


@op("DeformConv", since=19)
def deform_conv(
    xp,
    x,
    w,
    offset,
    b=None,
    mask=None,
    *,
    dilations=None,
    group=1,
    kernel_shape=None,
    offset_group=1,
    pads=None,
    strides=None,
):
    _check_channels(x, w.shape[1] * group, group)
    _check_kernel(kernel_shape, w)
    at = place(x.shape[2:], w.shape[2:], strides, dilations, pads)
    n, c, taps, places = x.shape[0], x.shape[1], math.prod(at.kernel), math.prod(at.out)
    groups, rank = n * offset_group, len(at.size)
    shifts = xp.reshape(offset, (groups, taps, rank, places))
    points = [shifts[:, :, i] + xp.asarray(grid, xp.dtype_of(offset)) for i, grid in enumerate(_tap_positions(at))]
    image = xp.reshape(x, (groups, c // offset_group, *at.size))
    columns = sample_linear(xp, image, [xp.reshape(p, (groups, taps * places)) for p in points])
    columns = xp.reshape(columns, (groups, c // offset_group, taps, places))
    if mask is not None:
        columns = columns * xp.reshape(mask, (groups, 1, taps, places))
    columns = xp.reshape(columns, (n, group, c // group * taps, places))
    y = xp.matmul(xp.reshape(w, (1, group, w.shape[0] // group, -1)), columns)
    return add_bias(xp, xp.reshape(y, (n, w.shape[0], *at.out)), b)


def _tap_positions(at: Any) -> list[np.ndarray]:
    """For every spatial axis the undisturbed coordinate [taps, places] that each tap reads."""
    taps = np.indices(at.kernel).reshape(len(at.kernel), -1, 1)
    places = np.indices(at.out).reshape(len(at.out), 1, -1)
    facts = zip(taps, places, at.dilations, at.strides, at.pads, strict=True)
    return [tap * d + place * s - lo for tap, place, d, s, (lo, _) in facts]


@op("FusedConv", domain="com.microsoft")
def fused_conv(
    xp,
    x,
    w,
    b=None,
    z=None,
    *,
    activation="",
    activation_params=None,
    auto_pad="NOTSET",
    dilations=None,
    group=1,
    kernel_shape=None,
    pads=None,
    strides=None,
):
    window = {"dilations": dilations, "kernel_shape": kernel_shape, "pads": pads, "strides": strides}
    y = conv(xp, x, w, b, auto_pad=auto_pad, group=group, **window)
    if z is not None:
        y = y + z
    return _activate(xp, y, activation, tuple(activation_params or ()))


def _activate(xp: Any, y: Any, activation: str, params: tuple[float, ...]) -> Any:
    """The activations that onnxruntime fuses into convolutions."""
    table = {
        "": lambda: y,
        "Relu": lambda: xp.maximum(y, 0),
        "Tanh": lambda: xp.tanh(y),
        "Sigmoid": lambda: xp.sigmoid(y),
        "LeakyRelu": lambda: xp.where(y >= 0, y, y * params[0]),
        "Clip": lambda: xp.clip(y, params[0], params[1]),
        "HardSigmoid": lambda: xp.clip(y * params[0] + params[1], 0, 1),
        "HardSwish": lambda: y * xp.clip(y / 6 + 0.5, 0, 1),
    }
    if activation not in table:
        raise ValueError(f"activation {activation!r} is not one of {', '.join(filter(None, table))}")
    return table[activation]()


@op("NhwcConv", domain="com.microsoft")
@wraps(conv, assigned=())
def nhwc_conv(xp, x, w, b=None, **attributes):
    """Weights are [M, …, C/group], as onnxruntime's optimizer and CUDA kernel have them; its documentation's
    [M, C/group, …] is taken where nothing else fits."""
    kernel, channels = attributes.get("kernel_shape"), x.shape[-1] // attributes.get("group", 1)
    if w.shape[-1] == channels and (not kernel or tuple(kernel) == tuple(w.shape[1:-1])):
        w = channels_first(xp, w)
    return channels_last(xp, conv(xp, channels_first(xp, x), w, b, **attributes))


@op("NhwcFusedConv", domain="com.microsoft")
@wraps(fused_conv, assigned=())
def nhwc_fused_conv(xp, x, w, b=None, z=None, **attributes):
    z = None if z is None else channels_first(xp, z)
    return channels_last(xp, fused_conv(xp, channels_first(xp, x), w, b, z, **attributes))


@op("ConvTransposeWithDynamicPads", domain="com.microsoft")
def conv_transpose_with_dynamic_pads(
    xp,
    x,
    w,
    pads: Host = None,
    b=None,
    *,
    auto_pad="NOTSET",
    dilations=None,
    group=1,
    kernel_shape=None,
    output_padding=None,
    strides=None,
):
    window = {"dilations": dilations, "kernel_shape": kernel_shape, "strides": strides}
    flat = None if pads is None else pads.ravel().tolist()
    return conv_transpose(
        xp, x, w, b, auto_pad=auto_pad, group=group, output_padding=output_padding, pads=flat, **window
    )


def channels_first(xp: Any, x: Any) -> Any:
    return xp.transpose(x, (0, x.ndim - 1, *range(1, x.ndim - 1)))


def channels_last(xp: Any, x: Any) -> Any:
    return xp.transpose(x, (0, *range(2, x.ndim), 1))
