"""Operators of onnxruntime on quantized tensors: they leave the integers only where the mathematics is real."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ep.ops.axes import axes_of
from ep.ops.convolution import channels_first, channels_last
from ep.ops.pooling import average_pool
from ep.ops.quantization import (
    dequantize_linear,
    dynamic_quantize_linear,
    integer_matmul,
    qlinear_conv,
    quantize_linear,
    requantize,
    to_integer,
)
from ep.registry import op

MICROSOFT = "com.microsoft"


def minus(xp: Any, x: Any, zero_point: Any) -> Any:
    """x - zero_point of 8-bit numbers as float32."""
    x = xp.astype(x, np.float32)
    return x if zero_point is None else x - xp.astype(xp.reshape(zero_point, ()), np.float32)


def quantized(xp: Any, y: Any, scale: Any, zero_point: Any, like: Any) -> Any:
    """The real numbers y in the quantization of an output, whose dtype is that of the input `like`."""
    zero_point = None if zero_point is None else xp.reshape(zero_point, ())
    return to_integer(xp, xp.divide(y, xp.reshape(scale, ())), xp.dtype_of(like), zero_point)


def real(xp: Any, x: Any, scale: Any, zero_point: Any) -> Any:
    return minus(xp, x, zero_point) * xp.reshape(scale, ())


@op("QuantizeLinear", domain=MICROSOFT, out=(2,))
def ms_quantize_linear(xp, x, y_scale, y_zero_point=None, *, axis=1):
    return quantize_linear(xp, x, y_scale, y_zero_point, axis=axis)


@op("DequantizeLinear", domain=MICROSOFT, out=(1,))
def ms_dequantize_linear(xp, x, x_scale, x_zero_point=None, *, axis=1):
    return dequantize_linear(xp, x, x_scale, x_zero_point, axis=axis)


# Elementwise


@op("QLinearAdd", domain=MICROSOFT)
def qlinear_add(xp, A, A_scale, A_zero_point, B, B_scale, B_zero_point, C_scale, C_zero_point=None):
    """The zero points are summed up first, as onnxruntime does: float32 rounds differently in another order."""
    a_ratio, b_ratio = _ratio(xp, A_scale, C_scale), _ratio(xp, B_scale, C_scale)
    shift = _float(xp, C_zero_point) - (a_ratio * _float(xp, A_zero_point) + b_ratio * _float(xp, B_zero_point))
    a, b = xp.astype(A, np.float32), xp.astype(B, np.float32)
    return to_integer(xp, a * a_ratio + (b * b_ratio + shift), xp.dtype_of(A))


def _float(xp: Any, zero_point: Any) -> Any:
    return 0.0 if zero_point is None else xp.astype(xp.reshape(zero_point, ()), np.float32)


@op("QLinearMul", domain=MICROSOFT)
def qlinear_mul(xp, A, A_scale, A_zero_point, B, B_scale, B_zero_point, C_scale, C_zero_point=None):
    product = minus(xp, A, A_zero_point) * minus(xp, B, B_zero_point)
    return _rounded(xp, product * (_ratio(xp, A_scale, C_scale) * xp.reshape(B_scale, ())), C_zero_point, A)


def _ratio(xp: Any, scale: Any, other: Any) -> Any:
    return xp.divide(xp.reshape(scale, ()), xp.reshape(other, ()))


def _rounded(xp: Any, y: Any, zero_point: Any, like: Any) -> Any:
    """The zero point is added before rounding, which decides ties differently."""
    if zero_point is not None:
        y = y + xp.astype(xp.reshape(zero_point, ()), np.float32)
    return to_integer(xp, y, xp.dtype_of(like))


def _shifted(xp: Any, y: Any, zero_point: Any, like: Any) -> Any:
    """Numbers in units of the output's scale as integers of the input's dtype."""
    zero_point = None if zero_point is None else xp.reshape(zero_point, ())
    return to_integer(xp, y, xp.dtype_of(like), zero_point)


@op("QLinearSigmoid", domain=MICROSOFT)
def qlinear_sigmoid(xp, X, X_scale, X_zero_point, Y_scale, Y_zero_point=None):
    return quantized(xp, xp.sigmoid(real(xp, X, X_scale, X_zero_point)), Y_scale, Y_zero_point, X)


@op("QLinearLeakyRelu", domain=MICROSOFT)
def qlinear_leaky_relu(xp, X, X_scale, X_zero_point, Y_scale, Y_zero_point=None, *, alpha=0.009999999776482582):
    x = real(xp, X, X_scale, X_zero_point)
    return quantized(xp, xp.where(x >= 0, x, x * alpha), Y_scale, Y_zero_point, X)


@op("QLinearWhere", domain=MICROSOFT, out=(1,))
def qlinear_where(xp, condition, X, x_scale, x_zero_point, Y, y_scale, y_zero_point, z_scale, z_zero_point):
    x = quantized(xp, real(xp, X, x_scale, x_zero_point), z_scale, z_zero_point, z_zero_point)
    y = quantized(xp, real(xp, Y, y_scale, y_zero_point), z_scale, z_zero_point, z_zero_point)
    return xp.where(condition, x, y)


@op("QLinearConcat", domain=MICROSOFT, out=(1,))
def qlinear_concat(xp, Y_scale, Y_zero_point, *inputs, axis):
    """`inputs` are triples of tensor, scale and zero point."""
    triples = zip(inputs[::3], inputs[1::3], inputs[2::3], strict=True)
    parts = [quantized(xp, real(xp, *triple), Y_scale, Y_zero_point, Y_zero_point) for triple in triples]
    return xp.concatenate(parts, axis=axis)


@op("MulInteger", domain=MICROSOFT, out=("int32",))
def mul_integer(xp, A, A_zero_point, B, B_zero_point=None):
    a, b = xp.astype(A, np.int32), xp.astype(B, np.int32)
    a = a if A_zero_point is None else a - xp.astype(A_zero_point, np.int32)
    return a * (b if B_zero_point is None else b - xp.astype(B_zero_point, np.int32))


# Reductions and windows


@op("QLinearAveragePool", domain=MICROSOFT)
def qlinear_average_pool(
    xp, X, x_scale, x_zero_point, y_scale, y_zero_point=None, *,
    auto_pad="NOTSET", ceil_mode=0, channels_last=0, count_include_pad=0, kernel_shape, pads=None, strides=None,
):  # fmt: skip
    x = real(xp, _first(xp, X, channels_last), x_scale, x_zero_point)
    y = average_pool(
        xp, x, auto_pad=auto_pad, ceil_mode=ceil_mode, count_include_pad=count_include_pad,
        kernel_shape=kernel_shape, pads=pads, strides=strides,
    )  # fmt: skip
    return _last(xp, quantized(xp, y, y_scale, y_zero_point, X), channels_last)


def _first(xp: Any, x: Any, is_last: int) -> Any:
    return channels_first(xp, x) if is_last else x


def _last(xp: Any, x: Any, is_last: int) -> Any:
    return channels_last(xp, x) if is_last else x


@op("QLinearGlobalAveragePool", domain=MICROSOFT)
def qlinear_global_average_pool(xp, X, x_scale, x_zero_point, y_scale, y_zero_point, *, channels_last=0):
    axes = tuple(range(1, X.ndim - 1)) if channels_last else tuple(range(2, X.ndim))
    return _mean(xp, X, x_scale, x_zero_point, y_scale, y_zero_point, axes, True)


@op("QLinearReduceMean", domain=MICROSOFT)
def qlinear_reduce_mean(
    xp, data, data_scale, data_zero_point, reduced_scale, reduced_zero_point=None, *, axes, keepdims
):
    axes = axes_of(axes, data.ndim) or tuple(range(data.ndim))
    return _mean(xp, data, data_scale, data_zero_point, reduced_scale, reduced_zero_point, axes, bool(keepdims))


def _mean(xp: Any, x: Any, x_scale: Any, x_zero: Any, y_scale: Any, y_zero: Any, axes: Any, keepdims: bool) -> Any:
    """The mean over axes, summed as integers."""
    whole = xp.astype(x, np.int32)
    whole = whole if x_zero is None else whole - xp.astype(xp.reshape(x_zero, ()), np.int32)
    total = xp.astype(xp.sum(whole, axis=axes, keepdims=keepdims), np.float32)
    scale = _ratio(xp, x_scale, y_scale) / math.prod(x.shape[i] for i in axes)
    return _shifted(xp, total * scale, y_zero, x)


@op("ReduceSumInteger", domain=MICROSOFT, out=("int32",))
def reduce_sum_integer(xp, data, *, axes, keepdims):
    return xp.sum(xp.astype(data, np.int32), axis=axes_of(axes, data.ndim), keepdims=bool(keepdims))


@op("QLinearSoftmax", domain=MICROSOFT)
def qlinear_softmax(xp, X, X_scale, x_zero_point, y_scale, y_zero_point, *, axis=-1, opset):
    """Before opset 13 all axes from `axis` on are normalized together."""
    x = real(xp, X, X_scale, x_zero_point)
    if opset < 13:
        x = xp.reshape(x, (*X.shape[: axis % X.ndim], -1))
        axis = -1
    y = xp.reshape(xp.softmax(x, axis=axis), X.shape)
    return quantized(xp, y, y_scale, y_zero_point, X)


# Products


@op("QLinearConv", domain=MICROSOFT, out=(7,))
def ms_qlinear_conv(
    xp, x, x_scale, x_zero_point, w, w_scale, w_zero_point, y_scale, y_zero_point, B=None, *,
    auto_pad="NOTSET", channels_last=0, dilations=None, group=1, kernel_shape=None, pads=None, strides=None,
):  # fmt: skip
    y = qlinear_conv(
        xp, _first(xp, x, channels_last), x_scale, x_zero_point, w, w_scale, w_zero_point, y_scale, y_zero_point, B,
        auto_pad=auto_pad, dilations=dilations, group=group, kernel_shape=kernel_shape, pads=pads, strides=strides,
    )  # fmt: skip
    return _last(xp, y, channels_last)


@op("QGemm", domain=MICROSOFT, out=(8,))
def qgemm(
    xp, A, a_scale, a_zero_point, B, b_scale, b_zero_point, C=None, y_scale=None, y_zero_point=None, *,
    alpha=1.0, transA=0, transB=0,
):  # fmt: skip
    a = xp.swapaxes(A, 0, 1) if transA else A
    b = xp.swapaxes(B, 0, 1) if transB else B
    y = integer_matmul(xp, a, b, a_zero_point, b_zero_point)
    y = y if C is None else y + C
    scale = a_scale * b_scale * alpha
    if y_zero_point is None:
        y = xp.astype(y, np.float32) * scale
        return y if y_scale is None else xp.divide(y, y_scale)
    return requantize(xp, y, xp.divide(scale, y_scale), xp.dtype_of(y_zero_point), y_zero_point)


@op("MatMulInteger16", domain=MICROSOFT, out=("int32",))
def matmul_integer16(xp, A, B):
    is_unsigned = xp.dtype_of(A) == np.uint16 and xp.dtype_of(B) == np.uint16
    dtype = np.uint32 if is_unsigned else np.int32
    return xp.matmul(xp.astype(A, dtype), xp.astype(B, dtype))


@op("MatMulIntegerToFloat", domain=MICROSOFT, out=(2,))
def matmul_integer_to_float(xp, A, B, a_scale, b_scale, a_zero_point=None, b_zero_point=None, bias=None):
    return scaled(xp, integer_matmul(xp, A, B, a_zero_point, b_zero_point), a_scale, b_scale, bias)


def scaled(xp: Any, y: Any, a_scale: Any, b_scale: Any, bias: Any = None) -> Any:
    """An int32 product as real numbers of the dtype of the scales."""
    y = xp.astype(y, np.float32) * (xp.astype(a_scale, np.float32) * xp.astype(b_scale, np.float32))
    y = y if bias is None else y + xp.astype(bias, np.float32)
    return xp.astype(y, xp.dtype_of(a_scale))


@op("DynamicQuantizeMatMul", domain=MICROSOFT)
def dynamic_quantize_matmul(xp, A, B, b_scale, b_zero_point=None, bias=None):
    a, a_scale, a_zero_point = dynamic_quantize_linear(xp, A)
    return matmul_integer_to_float(xp, a, B, a_scale, b_scale, a_zero_point, b_zero_point, bias)
