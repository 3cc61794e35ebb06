"""How real numbers become small integers and back, and how such integers are multiplied exactly."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from ep.dtypes import named_by, onnx_dtype
from ep.ops.axes import at
from ep.ops.windows import place
from ep.registry import op

UINT8 = np.dtype(np.uint8)
INT8 = np.dtype(np.int8)


# Scales and zero points: per tensor, per axis, or per block of an axis


def spread(xp: Any, scale: Any, x: Any, axis: int, block_size: int) -> Any:
    """A scale or zero point in a shape that broadcasts against x."""
    if scale is None or scale.ndim == 0:
        return scale
    if scale.size == 1 and not block_size:
        return xp.reshape(scale, ())
    axis = axis % x.ndim if -x.ndim <= axis < x.ndim else 0  # a vector has one axis, whatever `axis` says
    if block_size:
        index = [slice(None)] * x.ndim
        index[axis] = slice(0, x.shape[axis])
        return xp.repeat(scale, block_size, axis=axis)[tuple(index)]
    return xp.reshape(scale, [-1 if i == axis else 1 for i in range(x.ndim)])


def is_integer(dtype: np.dtype) -> bool:
    """Whether a dtype is an integer; the 4-bit and 2-bit ones have no NumPy kind of their own."""
    return dtype.kind in "iu" or dtype.name.startswith(("int", "uint"))


def limits(dtype: np.dtype) -> tuple[float, float]:
    """Smallest and largest value of an integer dtype, or of a finite float dtype."""
    info = ml_dtypes.iinfo(dtype) if is_integer(dtype) else ml_dtypes.finfo(dtype)
    return (int(info.min), int(info.max)) if is_integer(dtype) else (float(info.min), float(info.max))


def to_integer(xp: Any, x: Any, dtype: np.dtype, zero_point: Any = None) -> Any:
    """x, a float32 array in units of the scale, rounded half to even, shifted and clipped to the integer dtype.

    NaN becomes the lowest integer, as in onnxruntime; left to a cast, it may differ between two uses of the result.
    """
    x, (low, high) = xp.round(x), limits(dtype)
    if zero_point is not None:
        x = x + xp.astype(zero_point, np.float32)
    return xp.astype(xp.where(x > low, xp.minimum(x, high), low), dtype)


def to_small_float(xp: Any, x: Any, dtype: np.dtype, saturates: bool) -> Any:
    """x in an 8-bit or smaller float dtype; out of range it becomes the largest value, or what the cast gives."""
    if saturates or dtype.name.startswith(("float4", "float6")):  # those have neither infinity nor NaN
        x = xp.clip(x, *limits(dtype))
    return xp.astype(x, dtype)


@op("QuantizeLinear", since=10)
def quantize_linear(
    xp, x, y_scale, y_zero_point=None, *, axis=1, block_size=0, output_dtype=0, precision=0, saturate=1
):
    if output_dtype:
        dtype = onnx_dtype(output_dtype)
    else:
        dtype = UINT8 if y_zero_point is None else xp.dtype_of(y_zero_point)
    ratio = _ratio(xp, x, spread(xp, y_scale, x, axis, block_size), precision)
    zero_point = spread(xp, y_zero_point, x, axis, block_size)
    if is_integer(dtype):
        return to_integer(xp, ratio, dtype, zero_point)
    if zero_point is not None:
        ratio = ratio + xp.astype(zero_point, np.float32)
    return to_small_float(xp, ratio, dtype, bool(saturate))


def _ratio(xp: Any, x: Any, scale: Any, precision: int) -> Any:
    """x / scale, rounded to the precision of the division, as float32."""
    dtype = onnx_dtype(precision) if precision else xp.dtype_of(scale)
    if is_integer(dtype) or dtype.name.startswith("float8"):  # an int32 or a power-of-two scale
        dtype = np.dtype(np.float32)
    return xp.astype(xp.divide(xp.astype(x, dtype), xp.astype(scale, dtype)), np.float32)


@op("DequantizeLinear", since=10, out=(named_by("output_dtype", 1),))
def dequantize_linear(xp, x, x_scale, x_zero_point=None, *, axis=1, block_size=0, output_dtype=0):
    dtype = onnx_dtype(output_dtype) if output_dtype else xp.dtype_of(x_scale)
    wide = np.float64 if dtype == np.float64 else np.float32
    zero_point = spread(xp, x_zero_point, x, axis, block_size)
    values = _minus(xp, x, zero_point, wide)
    scale = xp.astype(spread(xp, x_scale, x, axis, block_size), wide)
    return xp.astype(values * scale, dtype)


def _minus(xp: Any, x: Any, zero_point: Any, dtype: Any) -> Any:
    """x - zero_point as a float; int32 is subtracted before it is rounded to float32."""
    if zero_point is None:
        return xp.astype(x, dtype)
    if xp.dtype_of(x) == np.int32:
        return xp.astype(x - zero_point, dtype)
    return xp.astype(x, dtype) - xp.astype(zero_point, dtype)


@op("DynamicQuantizeLinear", since=11)
def dynamic_quantize_linear(xp, x):
    """A tensor of zeros has scale 1, where the formula of the specification would divide by zero."""
    if x.size == 0:
        return xp.astype(x, np.uint8), xp.asarray(np.float32(1)), xp.asarray(np.uint8(0))
    low = xp.minimum(xp.min(x), 0)
    high = xp.maximum(xp.max(x), 0)
    scale = xp.divide(high - low, 255)
    scale = xp.where(scale == 0, xp.ones_like(scale), scale)
    zero_point = to_integer(xp, xp.clip(xp.divide(-low, scale), 0, 255), UINT8)
    return to_integer(xp, xp.divide(x, scale), UINT8, zero_point), scale, zero_point


# Products of integers


def integer_matmul(xp: Any, a: Any, b: Any, a_zero: Any = None, b_zero: Any = None) -> Any:
    """(a - a_zero) @ (b - b_zero) of 8-bit integers, exactly, as int32.

    The product of the raw numbers, as int8, is corrected by sums of rows and columns: an 8-bit product is what
    accelerators have. a_zero is a scalar, one number per row, or [..., M, 1]; b_zero a scalar, [N] or [..., 1, N].
    """
    row, column = a.ndim == 1, b.ndim == 1
    a, a_offset = _as_int8(xp, a[None] if row else a)
    b, b_offset = _as_int8(xp, b[:, None] if column else b)
    a_shift, b_shift = _shift(xp, _rows(xp, a_zero), a_offset), _shift(xp, b_zero, b_offset)
    y, columns = (xp.matmul(a, b, np.int32), None) if a_shift is None else _with_column_sums(xp, a, b)
    y = _corrected(xp, y, a, columns, a_shift, b_shift)
    y = y[..., 0, :] if row else y
    return y[..., 0] if column else y


def _corrected(xp: Any, y: Any, a: Any, columns: Any, a_shift: Any, b_shift: Any) -> Any:
    """y = a @ b for operands from which the shifts are still to be taken off; `columns` are the sums of b's."""
    if a_shift is not None:
        y = y - a_shift * (columns if b_shift is None else columns - b_shift * a.shape[-1])
    if b_shift is not None:
        y = y - b_shift * xp.sum(xp.astype(a, np.int32), axis=-1, keepdims=True)
    return y


def _with_column_sums(xp: Any, a: Any, b: Any) -> tuple[Any, Any]:
    """a @ b, and the sums of b's columns: a row of ones in the product costs less than a pass over b."""
    ones = xp.ones((1, b.shape[-2]), dtype=INT8)
    if b.ndim > 2:
        return xp.matmul(a, b, np.int32), xp.matmul(ones, b, np.int32)
    rows = xp.reshape(a, (math.prod(a.shape[:-1]), a.shape[-1]))
    y = xp.matmul(xp.concatenate([rows, ones], axis=0), b, np.int32)
    return xp.reshape(y[:-1], (*a.shape[:-1], b.shape[1])), y[-1:]


def integer_factor(xp: Any, b: Any, b_zero: Any) -> Callable[[Any, Any], Any]:
    """`integer_matmul` by the same weights [K, N] again and again, a function of a [M, K] and the scalar a_zero."""
    b, b_offset = _as_int8(xp, b)
    b_shift, factor = _shift(xp, b_zero, b_offset), xp.int8_factor(b)
    columns = xp.matmul(xp.ones((1, b.shape[0]), dtype=INT8), factor, np.int32)

    def multiply(a: Any, a_zero: Any) -> Any:
        a, a_offset = _as_int8(xp, a)
        return _corrected(xp, xp.matmul(a, factor, np.int32), a, columns, _shift(xp, a_zero, a_offset), b_shift)

    return multiply


def _as_int8(xp: Any, x: Any) -> tuple[Any, int]:
    """An int8 array and what was taken off its numbers; flipping the top bit of a uint8 subtracts 128."""
    if xp.dtype_of(x) == INT8:
        return x, 0
    return xp.bitcast(xp.bitwise_xor(x, xp.full((), 128, dtype=np.uint8)), INT8), 128


def _shift(xp: Any, zero_point: Any, offset: int) -> Any:
    """The zero point of shifted numbers as int32, or `None` for zero."""
    if zero_point is None:
        return xp.asarray(np.int32(-offset)) if offset else None
    zero_point = xp.reshape(zero_point, ()) if zero_point.size == 1 else zero_point
    return xp.astype(zero_point, np.int32) - offset


EXACT = 2**24 // 255**2  # float32 holds integers up to 2^24, hence sums of so many products of 9-bit numbers


def integer_conv(
    xp: Any, x: Any, w: Any, x_zero: Any, w_zero: Any, *,
    auto_pad: str, dilations: Any, group: int, kernel_shape: Any, pads: Any, strides: Any,
) -> Any:  # fmt: skip
    """The convolution of (x - x_zero) and (w - w_zero), exactly, as int32."""
    windows = place(x.shape[2:], kernel_shape or w.shape[2:], strides, dilations, pads, auto_pad)
    x = _minus(xp, x, x_zero, np.float32)
    w = _minus(xp, w, along(xp, w_zero, 0, w.ndim), np.float32)
    return _exact_conv(xp, x, w, windows.strides, windows.pads, windows.dilations, group)


def _exact_conv(xp: Any, x: Any, w: Any, strides: Any, pads: Any, dilations: Any, group: int) -> Any:
    """Halves the weights along their longest inner axis until no sum can leave what float32 holds exactly."""
    if math.prod(w.shape[1:]) <= EXACT:
        return xp.astype(xp.conv(x, w, strides, pads, dilations, group), np.int32)
    axis = max(range(1, w.ndim), key=lambda i: w.shape[i])
    if axis > 1:
        x, pads = xp.pad(x, [(0, 0), (0, 0), *pads]), [(0, 0)] * len(strides)
    half = w.shape[axis] // 2
    first, second = (
        _exact_conv(
            xp,
            _read(xp, x, w, axis, part, strides, dilations, group),
            w[at(axis, part)],
            strides,
            pads,
            dilations,
            group,
        )
        for part in (slice(0, half), slice(half, w.shape[axis]))
    )
    return first + second


def _read(xp: Any, x: Any, w: Any, axis: int, part: slice, strides: Any, dilations: Any, group: int) -> Any:
    """What a part of the weights (of the input channels, or of one kernel axis) reads of the padded input."""
    if axis == 1:
        lanes = xp.reshape(x, (x.shape[0], group, w.shape[1], *x.shape[2:]))[:, :, part]
        return xp.reshape(lanes, (x.shape[0], -1, *x.shape[2:]))
    stride, dilation = strides[axis - 2], dilations[axis - 2]
    out = (x.shape[axis] - (w.shape[axis] - 1) * dilation - 1) // stride + 1
    first = part.start * dilation
    return x[at(axis, slice(first, first + (out - 1) * stride + (part.stop - part.start - 1) * dilation + 1))]


def along(xp: Any, x: Any, axis: int, ndim: int) -> Any:
    """A scalar, or a vector along one axis, in a shape that broadcasts."""
    if x is None or x.ndim == 0 or x.size == 1:
        return x if x is None else xp.reshape(x, ())
    return xp.reshape(x, [-1 if i == axis else 1 for i in range(ndim)])


def requantize(xp: Any, y: Any, scale: Any, dtype: np.dtype, zero_point: Any) -> Any:
    """An int32 accumulator times a real scale, as a quantized number."""
    return to_integer(xp, xp.astype(y, np.float32) * xp.astype(scale, np.float32), dtype, zero_point)


@op("MatMulInteger", since=10)
def matmul_integer(xp, A, B, a_zero_point=None, b_zero_point=None):
    return integer_matmul(xp, A, B, a_zero_point, b_zero_point)


@op("ConvInteger", since=10)
def conv_integer(
    xp, x, w, x_zero_point=None, w_zero_point=None, *,
    auto_pad="NOTSET", dilations=None, group=1, kernel_shape=None, pads=None, strides=None,
):  # fmt: skip
    return integer_conv(
        xp, x, w, x_zero_point, w_zero_point, auto_pad=auto_pad, dilations=dilations, group=group,
        kernel_shape=kernel_shape, pads=pads, strides=strides,
    )  # fmt: skip


@op("QLinearMatMul", since=10)
def qlinear_matmul(xp, a, a_scale, a_zero_point, b, b_scale, b_zero_point, y_scale, y_zero_point):
    row, column = _rows(xp, a_scale), b_scale if b_scale.size > 1 else xp.reshape(b_scale, ())
    scale = xp.astype(row, np.float32) * xp.astype(column, np.float32) / xp.astype(y_scale, np.float32)
    dtype = xp.dtype_of(y_zero_point)
    if is_integer(dtype):
        y = integer_matmul(xp, a, b, a_zero_point, b_zero_point)
        return requantize(xp, y, scale, dtype, y_zero_point)
    a = _minus(xp, a, _rows(xp, a_zero_point), np.float32)
    b = _minus(xp, b, b_zero_point, np.float32)
    y = xp.matmul(a, b) * scale + xp.astype(y_zero_point, np.float32)
    return to_small_float(xp, y, dtype, True)


def _rows(xp: Any, x: Any) -> Any:
    """One number per row of a matrix as a column; one for all as a scalar."""
    if x is None or x.size == 1:
        return x if x is None else xp.reshape(x, ())
    return x[:, None] if x.ndim == 1 else x


@op("QLinearConv", since=10)
def qlinear_conv(
    xp, x, x_scale, x_zero_point, w, w_scale, w_zero_point, y_scale, y_zero_point, B=None, *,
    auto_pad="NOTSET", dilations=None, group=1, kernel_shape=None, pads=None, strides=None,
):  # fmt: skip
    y = integer_conv(
        xp, x, w, x_zero_point, w_zero_point, auto_pad=auto_pad, dilations=dilations, group=group,
        kernel_shape=kernel_shape, pads=pads, strides=strides,
    )  # fmt: skip
    if B is not None:
        y = y + along(xp, B, 1, y.ndim)
    scale = x_scale * along(xp, w_scale, 1, y.ndim) / y_scale
    return requantize(xp, y, scale, xp.dtype_of(y_zero_point), y_zero_point)
