"""Transforms, complex products and matrices of onnxruntime's own domain; its experimental elementwise operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ep.errors import InvalidInput, InvalidModel
from ep.ops.generator import range_
from ep.ops.precision import in_wide, wide
from ep.registry import Host, op

MS = "com.microsoft"


@op("Rfft", domain=MS)
def rfft(xp, x, *, normalized=0, onesided=1, signal_ndim=1):
    """The last `signal_ndim` axes are the signal; a new last axis holds real and imaginary parts."""
    _check_transform(normalized, onesided)
    y = xp.fft.rfftn(wide(xp, x), axes=tuple(range(-signal_ndim, 0)))
    return xp.astype(xp.stack([xp.real(y), xp.imag(y)], axis=-1), xp.dtype_of(x))


@op("Irfft", domain=MS)
def irfft(xp, x, *, normalized=0, onesided=1, signal_ndim):
    _check_transform(normalized, onesided)
    parts = wide(xp, x)
    y = xp.fft.irfftn(parts[..., 0] + parts[..., 1] * 1j, axes=tuple(range(-signal_ndim, 0)))
    return xp.astype(y, xp.dtype_of(x))


def _check_transform(normalized: int, onesided: int) -> None:
    if normalized or not onesided:
        raise InvalidModel(
            f"a Fourier transform has normalized={normalized} and onesided={onesided}.",
            why="com.microsoft defines it only for normalized=0 and onesided=1.",
        )


def _complex_product(conjugate: bool) -> Callable[..., Any]:
    @in_wide
    def lowering(xp, a, b):
        real, imag = a[..., 0], a[..., 1]
        other, turn = b[..., 0], -b[..., 1] if conjugate else b[..., 1]
        return xp.stack([real * other - imag * turn, real * turn + imag * other], axis=-1)

    return lowering


op("ComplexMul", domain=MS)(_complex_product(conjugate=False))
op("ComplexMulConj", domain=MS)(_complex_product(conjugate=True))


@op("Inverse", domain=MS)
@in_wide
def inverse(xp, x):
    return xp.inv(x)


@op("SparseToDenseMatMul", domain=MS, out=(1,))
def sparse_to_dense_mat_mul(xp, a, b, *, alpha=1.0, transA=0, transB=0):
    """The sparse matrix is dense here: models store it as an initializer, and loading fills in its zeros."""
    a = xp.swapaxes(a, -1, -2) if transA else a
    b = xp.swapaxes(b, -1, -2) if transB else b
    y = xp.matmul(a, b)
    return y if alpha == 1 else xp.astype(wide(xp, y) * alpha, xp.dtype_of(b))


@op("Range", domain=MS)
def range_microsoft(xp, start: Host, limit: Host, delta: Host = None):
    return range_(xp, start, limit, np.asarray(1, start.dtype) if delta is None else delta)


@op("SampleOp", domain=MS)
def sample_op(xp, x):
    return x


@op("IsAllFinite", domain=MS, out=("bool",))
def is_all_finite(xp, *inputs, isinf_only=0, isnan_only=0):
    if isinf_only and isnan_only:
        raise InvalidModel("IsAllFinite has both isinf_only and isnan_only set.", fix="set at most one.")
    bad = xp.isinf if isinf_only else xp.isnan if isnan_only else lambda x: ~xp.isfinite(x)
    found = [xp.any(bad(x)) for x in inputs]
    result = found[0]
    for more in found[1:]:
        result = result | more
    return ~result


# Operators that ONNX dropped in opset 10 and onnxruntime still reads


@op("Affine")
@in_wide
def affine(xp, x, *, alpha=1.0, beta=0.0):
    return x * alpha + beta


@op("Scale")
@in_wide
def scale_(xp, x, *, scale=1.0):
    return x * scale


@op("ScaledTanh")
@in_wide
def scaled_tanh(xp, x, *, alpha=None, beta=None):
    return xp.tanh(x * (1.0 if beta is None else beta)) * (1.0 if alpha is None else alpha)


@op("ParametricSoftplus")
@in_wide
def parametric_softplus(xp, x, *, alpha=None, beta=None):
    x = x * (1.0 if beta is None else beta)
    return (xp.maximum(x, 0) + xp.log1p(xp.exp(-xp.abs(x)))) * (1.0 if alpha is None else alpha)


@op("ImageScaler")
def image_scaler(xp, x, *, bias=(), scale=1.0):
    """The bias belongs to the channels of [N, C, H, W]."""
    if len(bias) != x.shape[1]:
        raise InvalidModel(f"ImageScaler has {len(bias)} values of bias for {x.shape[1]} channels.")
    offsets = np.asarray(bias, np.float32).reshape(1, -1, 1, 1)
    return xp.astype(wide(xp, x) * scale + xp.asarray(offsets.astype(xp.dtype_of(wide(xp, x)))), xp.dtype_of(x))


@op("Crop")
def crop(xp, x, *, border=(), scale=None):
    """Borders are left, top, right, bottom; with a scale (height, width), the last two do not count."""
    if x.ndim != 4 or len(border) != 4:
        raise InvalidInput(f"Crop needs an image [N, C, H, W] and four borders, not rank {x.ndim} and {border}.")
    left, top, right, bottom = border
    high, wide_end = (x.shape[2] - bottom, x.shape[3] - right) if not scale else (top + scale[0], left + scale[1])
    if not (0 <= top < high <= x.shape[2] and 0 <= left < wide_end <= x.shape[3]):
        raise InvalidInput(f"Crop of rows {top} to {high} and columns {left} to {wide_end} leaves {x.shape}.")
    return x[:, :, top:high, left:wide_end]
