"""Normalisation: by batch, instance, layer, group, root mean square, neighbourhood or Lp norm."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ep.errors import InvalidInput
from ep.ops.axes import axes_of, axis_of
from ep.ops.precision import wide, wide_dtype
from ep.registry import Outputs, op

STASH_DTYPES = {1: np.float32, 10: np.float16, 11: np.float64}  # bfloat16 statistics are taken in float32


def standardize(xp: Any, x: Any, axes: tuple[int, ...], epsilon: float) -> tuple[Any, Any, Any]:
    """(x - mean) / sqrt(variance + epsilon), the mean and the factor; `x` has the dtype of the statistics."""
    mean = xp.mean(x, axis=axes, keepdims=True)
    centred = x - mean
    factor = xp.rsqrt(xp.mean(centred * centred, axis=axes, keepdims=True) + epsilon)
    return centred * factor, mean, factor


def _per_channel(xp: Any, values: Any, x: Any) -> Any:
    return xp.reshape(values, (1, -1) + (1,) * (x.ndim - 2))


# Over the batch


@op("BatchNormalization", since=14)
def batch_normalization(
    xp, x, scale, b, mean, var, *, epsilon=1e-5, momentum=0.9, training_mode=0, outputs: Outputs = 1
):
    if not training_mode:
        return _affine_batch(xp, x, scale, b, mean, var, epsilon)
    return _train_batch(xp, x, scale, b, mean, var, epsilon, momentum)[:3]


@op("BatchNormalization", since=9)
def batch_normalization_9(xp, x, scale, b, mean, var, *, epsilon=1e-5, momentum=0.9, outputs: Outputs = 1):
    if outputs == 1:
        return _affine_batch(xp, x, scale, b, mean, var, epsilon)
    return _train_batch(xp, x, scale, b, mean, var, epsilon, momentum)


@op("BatchNormalization", since=7)
def batch_normalization_7(xp, x, scale, b, mean, var, *, epsilon=1e-5, momentum=0.9, spatial=1, outputs: Outputs = 1):
    if spatial:
        return batch_normalization_9(xp, x, scale, b, mean, var, epsilon=epsilon, momentum=momentum, outputs=outputs)
    # every element is a channel of its own
    shape, inner = x.shape, tuple(scale.shape)
    flat = [xp.reshape(v, (-1,)) for v in (scale, b, mean, var)]
    results = batch_normalization_9(
        xp, xp.reshape(x, (shape[0], math.prod(shape[1:]))), *flat, epsilon=epsilon, momentum=momentum, outputs=outputs
    )
    if outputs == 1:
        return xp.reshape(results, shape)
    return xp.reshape(results[0], shape), *(xp.reshape(r, inner) for r in results[1:])


@op("BatchNormalization", since=1)
def batch_normalization_1(
    xp,
    x,
    scale,
    b,
    mean,
    var,
    *,
    consumed_inputs=None,
    epsilon=1e-5,
    is_test=0,
    momentum=0.9,
    spatial=1,
    outputs: Outputs = 1,
):
    """One output means test mode, whatever `is_test` says: the specification ties the modes to the outputs."""
    count = 1 if is_test else outputs
    y = batch_normalization_7(
        xp, x, scale, b, mean, var, epsilon=epsilon, momentum=momentum, spatial=spatial, outputs=count
    )
    return (y, mean, var, mean, var) if count < outputs else y


def _affine_batch(xp: Any, x: Any, scale: Any, b: Any, mean: Any, var: Any, epsilon: float) -> Any:
    dtype = wide_dtype(xp.dtype_of(x))
    scale, b, mean, var = (xp.astype(v, dtype) for v in (scale, b, mean, var))
    factor = scale * xp.rsqrt(var + epsilon)
    shift = b - mean * factor
    y = xp.astype(x, dtype) * _per_channel(xp, factor, x) + _per_channel(xp, shift, x)
    return xp.astype(y, xp.dtype_of(x))


def _train_batch(
    xp: Any, x: Any, scale: Any, b: Any, mean: Any, var: Any, epsilon: float, momentum: float
) -> tuple[Any, ...]:
    """The result, the running statistics and those of this batch."""
    dtype, running = xp.dtype_of(x), xp.dtype_of(mean)
    axes = (0, *range(2, x.ndim))
    x = wide(xp, x)
    now_mean = xp.mean(x, axis=axes)
    now_var = xp.mean(xp.square(x - _per_channel(xp, now_mean, x)), axis=axes)
    y = _affine_batch(xp, x, scale, b, now_mean, now_var, epsilon)
    statistics = [
        wide(xp, old) * momentum + xp.astype(new, wide_dtype(running)) * (1 - momentum)
        for old, new in ((mean, now_mean), (var, now_var))
    ]
    rest = (xp.astype(v, running) for v in (*statistics, now_mean, now_var))
    return xp.astype(y, dtype), *rest


# Over each instance, layer or group


@op("InstanceNormalization", since=6)
def instance_normalization(xp, x, scale, b, *, epsilon=1e-5):
    y = standardize(xp, wide(xp, x), tuple(range(2, x.ndim)), epsilon)[0]
    y = y * _per_channel(xp, wide(xp, scale), x) + _per_channel(xp, wide(xp, b), x)
    return xp.astype(y, xp.dtype_of(x))


@op("InstanceNormalization", since=1)
def instance_normalization_1(xp, x, scale, b, *, consumed_inputs=None, epsilon=1e-5):
    return instance_normalization(xp, x, scale, b, epsilon=epsilon)


@op("LayerNormalization", since=1, out=(0, "stash_type", "stash_type"), inside="stash_type")  # in onnxruntime
@op("LayerNormalization", since=17, out=(0, "stash_type", "stash_type"), inside="stash_type")
def layer_normalization(xp, x, scale, bias=None, *, axis=-1, epsilon=1e-5, stash_type=1):
    axes = tuple(range(axis_of(axis, x.ndim), x.ndim))
    y, mean, factor = standardize(xp, stashed(xp, x, stash_type), axes, epsilon)
    y = y * xp.astype(scale, xp.dtype_of(y))
    if bias is not None:
        y = y + xp.astype(bias, xp.dtype_of(y))
    return xp.astype(y, xp.dtype_of(x)), *_stash(xp, stash_type, mean, factor)


def stashed(xp: Any, x: Any, stash_type: int) -> Any:
    """`x` in the dtype of the first stage: `stash_type`, but never narrower than float32 or than `x`."""
    asked = wide_dtype(STASH_DTYPES.get(stash_type, np.float32))
    return xp.astype(x, np.promote_types(asked, wide_dtype(xp.dtype_of(x))))


def _stash(xp: Any, stash_type: int, *statistics: Any) -> tuple[Any, ...]:
    import ml_dtypes

    dtype = ml_dtypes.bfloat16 if stash_type == 16 else STASH_DTYPES.get(stash_type)
    if dtype is None:
        raise InvalidInput(f"stash_type {stash_type} is not a floating-point type.", fix="use 1, 10, 11 or 16.")
    return tuple(xp.astype(s, dtype) for s in statistics)


@op("GroupNormalization", since=21, inside="stash_type")
def group_normalization(xp, x, scale, bias, *, epsilon=1e-5, num_groups, stash_type=1):
    y = grouped(xp, stashed(xp, x, stash_type), num_groups, epsilon)
    y = y * _per_channel(xp, wide(xp, scale), x) + _per_channel(xp, wide(xp, bias), x)
    return xp.astype(y, xp.dtype_of(x))


@op("GroupNormalization", since=18)
def group_normalization_18(xp, x, scale, bias, *, epsilon=1e-5, num_groups):
    size = x.shape[1] // num_groups
    scale, bias = xp.repeat(scale, size, axis=0), xp.repeat(bias, size, axis=0)
    return group_normalization(xp, x, scale, bias, epsilon=epsilon, num_groups=num_groups)


def grouped(xp: Any, x: Any, num_groups: int, epsilon: float) -> Any:
    """`x` [N, C, …] standardised in groups of channels."""
    if x.shape[1] % num_groups:
        raise InvalidInput(
            f"{x.shape[1]} channels cannot be divided into {num_groups} groups.", fix="correct num_groups."
        )
    groups = xp.reshape(x, (x.shape[0], num_groups, math.prod(x.shape[1:]) // num_groups))
    return xp.reshape(standardize(xp, groups, (2,), epsilon)[0], x.shape)


# By root mean square or Lp norm


def rms_factor(xp: Any, x: Any, axes: tuple[int, ...], epsilon: float) -> Any:
    return xp.rsqrt(xp.mean(x * x, axis=axes, keepdims=True) + epsilon)


@op("RMSNormalization", since=23, out=(1,), inside="stash_type")
def rms_normalization(xp, x, scale, *, axis=-1, epsilon=1e-5, stash_type=1):
    return simplified_layer_normalization(xp, x, scale, axis=axis, epsilon=epsilon, stash_type=stash_type)[0]


@op("SimplifiedLayerNormalization", out=(1, "stash_type"), inside="stash_type")
def simplified_layer_normalization(xp, x, scale, *, axis=-1, epsilon=1e-5, stash_type=1):
    axes = tuple(range(axis_of(axis, x.ndim), x.ndim))
    inner = stashed(xp, x, stash_type)
    factor = rms_factor(xp, inner, axes, epsilon)
    y = inner * factor * xp.astype(scale, xp.dtype_of(inner))
    return xp.astype(y, xp.dtype_of(scale)), *_stash(xp, stash_type, factor)


@op("LpNormalization")
def lp_normalization(xp, x, *, axis=-1, p=2):
    axis = axis_of(axis, x.ndim)
    inner = wide(xp, x)
    if p == 1:
        norm = xp.sum(xp.abs(inner), axis=axis, keepdims=True)
    else:
        norm = xp.sqrt(xp.sum(inner * inner, axis=axis, keepdims=True))
    return xp.astype(inner / xp.where(norm == 0, 1, norm), xp.dtype_of(x))  # zeros stay zeros


# Over a neighbourhood or chosen axes


@op("LRN")
def lrn(xp, x, *, alpha=1e-4, beta=0.75, bias=1.0, size):
    inner = wide(xp, x)
    before = (size - 1) // 2
    squares = xp.pad(inner * inner, [(0, 0), (before, size - 1 - before)] + [(0, 0)] * (x.ndim - 2))
    total = squares[:, : x.shape[1]]
    for shift in range(1, size):
        total = total + squares[:, shift : shift + x.shape[1]]
    return xp.astype(inner * (bias + alpha / size * total) ** -beta, xp.dtype_of(x))


@op("MeanVarianceNormalization", since=9)
def mean_variance_normalization(xp, x, *, axes=(0, 2, 3)):
    inner = wide(xp, x)
    where = axes_of(axes, x.ndim)
    centred = inner - xp.mean(inner, axis=where, keepdims=True)
    deviation = xp.sqrt(xp.mean(centred * centred, axis=where, keepdims=True))
    return xp.astype(centred / (deviation + 1e-9), xp.dtype_of(x))  # 1e-9 as in ONNX's function body


@op("MeanVarianceNormalization", since=1)
def mean_variance_normalization_1(xp, x, *, across_channels=0, normalize_variance=1):
    axes = tuple(range(1 if across_channels else 2, x.ndim))
    if normalize_variance:
        return mean_variance_normalization(xp, x, axes=(0, *axes))
    inner = wide(xp, x)
    return xp.astype(inner - xp.mean(inner, axis=(0, *axes), keepdims=True), xp.dtype_of(x))
