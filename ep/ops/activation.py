"""Activation functions and the softmax family."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np

from ep.errors import InvalidInput
from ep.ops.axes import axis_of, one_of
from ep.ops.legacy import with_consumed_inputs
from ep.ops.math import since_opset_1
from ep.ops.precision import exact_dtype, exactly, in_wide, saturated, wide
from ep.registry import op


def relu(xp, x):
    return xp.maximum(x, 0)


@in_wide
def elu(xp, x, *, alpha=1.0):
    return xp.where(x > 0, x, alpha * _expm1(xp, x))


@in_wide
def selu(xp, x, *, alpha=1.6732631921768188, gamma=1.0507010221481323):
    return gamma * xp.where(x > 0, x, alpha * _expm1(xp, x))


def selu_1(xp, x, *, alpha=1.673200011253357, gamma=1.0506999492645264):
    return selu(xp, x, alpha=alpha, gamma=gamma)


def _expm1(xp: Any, x: Any) -> Any:
    """exp(x) - 1 for x ≤ 0; above, where the value is not used, it must not overflow."""
    return xp.expm1(xp.minimum(x, 0))


@in_wide
def leaky_relu(xp, x, *, alpha=0.01):
    return xp.where(x < 0, x * alpha, x)


@in_wide
def hard_sigmoid(xp, x, *, alpha=0.2, beta=0.5):
    return xp.clip(x * alpha + beta, 0, 1)


for _op, _fn in {
    **{"Relu": relu, "Elu": elu, "LeakyRelu": leaky_relu, "HardSigmoid": hard_sigmoid},
}.items():
    since_opset_1(_op, _fn)
op("Selu", since=6)(selu)
op("Selu")(with_consumed_inputs(selu_1))


@op("PRelu", since=7)
def prelu(xp, x, slope):
    return xp.where(x < 0, x * slope, x)


@op("PRelu", since=6)
def prelu_6(xp, x, slope):
    """One slope for all channels, or one per channel: the second axis."""
    return prelu(xp, x, xp.reshape(slope, (-1,) + (1,) * max(0, x.ndim - 2)))


op("PRelu")(with_consumed_inputs(prelu_6))


@op("Celu", since=12)
@in_wide
def celu(xp, x, *, alpha=1.0):
    return xp.maximum(x, 0) + xp.minimum(alpha * _expm1(xp, x / alpha), 0)


@op("ThresholdedRelu", since=1)  # in onnxruntime
@op("ThresholdedRelu", since=10)
def thresholded_relu(xp, x, *, alpha=1.0):
    return xp.where(x > alpha, x, 0)


@op(
    "Shrink", since=9, inside=lambda attributes, dtypes: exactly(attributes, dtypes) if attributes.get("bias") else None
)
def shrink(xp, x, *, bias=0.0, lambd=0.5):
    dtype = xp.dtype_of(x)
    inner = xp.astype(x, exact_dtype(dtype)) if bias else wide(xp, x)
    up, down = (saturated(xp, inner + bias, dtype), saturated(xp, inner - bias, dtype)) if bias else (x, x)
    return xp.where(inner < -lambd, up, xp.where(inner > lambd, down, xp.zeros_like(x)))


@op("Softsign")
@in_wide
def softsign(xp, x):
    return x / (1 + xp.abs(x))


@op("Softplus")
@in_wide
def softplus(xp, x):
    return xp.maximum(x, 0) + xp.log1p(xp.exp(-xp.abs(x)))


@op("Mish", since=18)
@in_wide
def mish(xp, x):
    return x * xp.tanh(softplus(xp, x))


@op("Gelu", since=20)
@in_wide
def gelu(xp, x, *, approximate="none"):
    one_of("approximate", approximate, "none", "tanh")
    if approximate == "tanh":
        return 0.5 * x * (1 + xp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))
    return 0.5 * x * (1 + xp.erf(x * math.sqrt(0.5)))


@op("HardSwish", since=14)
@in_wide
def hard_swish(xp, x):
    return x * xp.clip(x / 6 + 0.5, 0, 1)


@op("Swish", since=24)
@in_wide
def swish(xp, x, *, alpha=1.0):
    return x * xp.sigmoid(alpha * x)


@op("SwiGLU", since=28)
@in_wide
def swi_glu(xp, a, b, *, alpha=1.0):
    if a.shape != b.shape:
        raise InvalidInput(f"SwiGLU's gate is {list(a.shape)}, its linear input {list(b.shape)}: they must agree.")
    return swish(xp, a, alpha=alpha) * b


# Softmax and its relatives


def over_trailing_axes(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Before opset 13 the input is flattened to a matrix, whose rows start at `axis`."""

    @wraps(fn)
    def lowering(xp, x, *, axis=1):
        axis = x.ndim if axis == x.ndim else axis_of(axis, x.ndim)
        rows = (math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))
        return xp.reshape(fn(xp, xp.reshape(x, rows), axis=1), x.shape)

    del lowering.__wrapped__  # the signature is its own: the default axis differs
    return lowering


def softmax(xp, x, *, axis=-1):
    return xp.softmax(x, axis=axis_of(axis, x.ndim))


@in_wide
def log_softmax(xp, x, *, axis=-1):
    if x.size == 0:
        return x
    axis = axis_of(axis, x.ndim)
    x = x - xp.max(x, axis=axis, keepdims=True)  # before the logarithm, which loses its digits in large numbers
    return x - xp.logsumexp(x, axis=axis, keepdims=True)


def hardmax(xp, x, *, axis=-1):
    """1 at the first largest element, else 0."""
    if x.size == 0:
        return x
    axis = axis_of(axis, x.ndim)
    positions = np.arange(x.shape[axis]).reshape([-1 if i == axis else 1 for i in range(x.ndim)])
    first = xp.argmax(x, axis=axis, keepdims=True)
    return xp.astype(xp.asarray(positions) == first, xp.dtype_of(x))


for _op, _fn in {"Softmax": softmax, "LogSoftmax": log_softmax, "Hardmax": hardmax}.items():
    op(_op, since=13)(_fn)
    op(_op)(over_trailing_axes(_fn))
