"""Activations that onnxruntime fuses with a bias, a mask or a scale (domain com.microsoft)."""

from __future__ import annotations

import math
from typing import Any

from ep.ops.axes import axis_of
from ep.ops.precision import wide
from ep.registry import op

MS = "com.microsoft"


def _gelu(xp: Any, x: Any) -> Any:
    return 0.5 * x * (1 + xp.erf(x * math.sqrt(0.5)))


def _tanh_gelu(xp: Any, x: Any) -> Any:
    return 0.5 * x * (1 + xp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


@op("Gelu", domain=MS)
def gelu(xp, x):
    return xp.astype(_gelu(xp, wide(xp, x)), xp.dtype_of(x))


@op("BiasGelu", domain=MS)
def bias_gelu(xp, a, b):
    return gelu(xp, a + b)


@op("FastGelu", domain=MS)
def fast_gelu(xp, x, bias=None):
    y = wide(xp, x if bias is None else x + bias)
    return xp.astype(_tanh_gelu(xp, y), xp.dtype_of(x))


@op("QuickGelu", domain=MS)
def quick_gelu(xp, x, *, alpha=1.702):
    y = wide(xp, x)
    return xp.astype(y * xp.sigmoid(alpha * y), xp.dtype_of(x))


@op("BiasSplitGelu", domain=MS)
def bias_split_gelu(xp, x, bias):
    left, right = _halves(xp, x + bias)
    return left * gelu(xp, right)


def _halves(xp: Any, x: Any) -> tuple[Any, Any]:
    middle = x.shape[-1] // 2
    return x[..., :middle], x[..., middle:]


@op("BiasAdd", domain=MS)
def bias_add(xp, x, bias, skip):
    return x + bias + skip


@op("BiasSoftmax", domain=MS)
def bias_softmax(xp, data, bias, *, axis=1, is_inner_broadcast):
    """Softmax over all axes from `axis` on; each row of the bias serves several neighbouring or distant rows."""
    axis = axis_of(axis, data.ndim)
    width = math.prod(data.shape[axis:])
    bias = xp.reshape(bias, (-1, width))
    rows = bias.shape[0]
    if is_inner_broadcast:
        scores = xp.reshape(data, (rows, -1, width)) + bias[:, None, :]
    else:
        scores = xp.reshape(data, (-1, rows, width)) + bias[None]
    return xp.reshape(xp.softmax(scores, axis=-1), data.shape)


@op("ScaledSiLU", domain=MS)
def scaled_silu(xp, x, scale=None, *, alpha=1.0):
    """Every step is rounded to the input's dtype, as the specification asks."""
    dtype = xp.dtype_of(x)
    factor = alpha if scale is None else wide(xp, scale)
    z = xp.astype(wide(xp, x) * factor, dtype)
    gate = xp.astype(xp.sigmoid(wide(xp, z)), dtype)
    return z * gate


@op("SwiGLU", domain=MS)
def swi_glu(xp, gate, up=None, *, activation_alpha=1.0, activation_beta=0.0, limit=0.0, round_activation=0):
    dtype = xp.dtype_of(gate)
    gate, up = _halves(xp, gate) if up is None else (gate, up)
    gate, up = wide(xp, gate), wide(xp, up)
    if limit > 0:
        gate, up = xp.minimum(gate, limit), xp.clip(up, -limit, limit)
    activated = gate * xp.sigmoid(activation_alpha * gate)
    if round_activation:
        activated = wide(xp, xp.astype(activated, dtype))
    return xp.astype(activated * (up + activation_beta), dtype)
