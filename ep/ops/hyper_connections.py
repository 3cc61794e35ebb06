"""Gates and streams of recent language models: hyper-connections, gated sums, Engram gates, routers' first step."""

from __future__ import annotations

from typing import Any

import numpy as np

from ep.errors import InvalidModel
from ep.ops.contrib_activation import scaled_silu, swi_glu
from ep.ops.precision import wide
from ep.registry import op

MS = "com.microsoft"


@op("GatedAdd", domain=MS)
def gated_add(xp, x, y, gate, gate_weight=None):
    """x + y · gate, the product rounded; a gate with weights is the sigmoid of its projection."""
    dtype = xp.dtype_of(x)
    if gate_weight is not None:
        projected = _rounded(xp, xp.matmul(wide(xp, gate), wide(xp, gate_weight)), dtype)
        gate = _rounded(xp, xp.sigmoid(projected), dtype)
    product = _rounded(xp, wide(xp, y) * wide(xp, gate), dtype)
    return xp.astype(wide(xp, x) + product, dtype)


def _rounded(xp: Any, x: Any, dtype: Any) -> Any:
    """x after one rounding to the model's dtype, again as what is computed with."""
    return wide(xp, xp.astype(x, dtype))


@op("LinearAttentionGate", domain=MS)
def linear_attention_gate(xp, a, dt_bias, decay_scale, b=None):
    dtype = xp.dtype_of(a)
    x = wide(xp, a) + dt_bias
    softplus = xp.maximum(x, 0) + xp.log1p(xp.exp(-xp.abs(x)))
    beta = None if b is None else xp.astype(xp.sigmoid(wide(xp, b)), dtype)
    return xp.astype(decay_scale * softplus, dtype), beta


@op("EngramGate", domain=MS)
def engram_gate(xp, key, query, value, key_norm_scale, query_norm_scale, conv_norm_scale=None, *, epsilon=1e-5):
    dtype = xp.dtype_of(key)
    product = _rms(xp, wide(xp, key), key_norm_scale, epsilon) * _rms(xp, wide(xp, query), query_norm_scale, epsilon)
    dot = xp.sum(product, axis=-1, keepdims=True) / key.shape[-1] ** 0.5
    gate = xp.sigmoid(xp.sign(dot) * xp.sqrt(xp.maximum(xp.abs(dot), 1e-6)))
    gated = gate * xp.expand_dims(wide(xp, value), 2)
    normed = None
    if conv_norm_scale is not None:
        normed = xp.astype(_rms(xp, gated, conv_norm_scale, epsilon), dtype)
    return xp.astype(gated, dtype), normed


def _rms(xp: Any, x: Any, scale: Any, epsilon: float) -> Any:
    return x * xp.rsqrt(xp.mean(x * x, axis=-1, keepdims=True) + epsilon) * wide(xp, scale)


@op("HyperConnectionPreMix", domain=MS)
def hyper_connection_pre_mix(xp, streams, pre_mix, *, num_branches=0, reduction_scale=1.0):
    x = _grouped(xp, wide(xp, streams), num_branches)
    y = reduction_scale * xp.sum(x * _gates(xp, wide(xp, pre_mix), x), axis=-2)
    return xp.astype(y, xp.dtype_of(streams))


@op("HyperConnectionPostMix", domain=MS)
def hyper_connection_post_mix(xp, streams, block_output, post_mix, stream_mix=None, *, num_branches=0):
    x = _grouped(xp, wide(xp, streams), num_branches)
    mixed = x if stream_mix is None else xp.matmul(xp.swapaxes(wide(xp, stream_mix), -1, -2), x)
    y = mixed + _gates(xp, wide(xp, post_mix), x) * xp.expand_dims(wide(xp, block_output), -2)
    return xp.reshape(xp.astype(y, xp.dtype_of(streams)), streams.shape)


def _grouped(xp: Any, streams: Any, branches: int) -> Any:
    """Streams as [..., branches, width]."""
    if not branches:
        return streams
    if streams.shape[-1] % branches:
        raise InvalidModel(f"streams of width {streams.shape[-1]} cannot be {branches} branches.")
    return xp.reshape(streams, (*streams.shape[:-1], branches, -1))


def _gates(xp: Any, gates: Any, x: Any) -> Any:
    """Gates of branches [..., C], of features [..., C, H] or of flattened features [..., C · H], as [..., C, H]."""
    if gates.ndim == x.ndim:
        return gates
    return xp.reshape(gates, (*gates.shape[:-1], x.shape[-2], -1))


@op("HyperConnectionLowRankMix", domain=MS)
def hyper_connection_low_rank_mix(
    xp, streams, norm_scale, down_weight, up_weight, inject_weight, prev_block_output=None, prev_post_gate=None,
    *, epsilon=1e-5, gate_div=1.0, gate_mul=1.0, num_branches, reduction_scale=1.0, silu_alpha=1.0,
):  # fmt: skip
    """Each step is rounded to the model's dtype once, as separate operators would."""
    dtype = xp.dtype_of(streams)
    if prev_block_output is not None:
        streams = hyper_connection_post_mix(xp, streams, prev_block_output, prev_post_gate, num_branches=num_branches)
    grouped = _grouped(xp, wide(xp, streams), num_branches)
    scale = xp.reshape(norm_scale, (num_branches, -1))
    hn = _rounded(xp, xp.reshape(_rms(xp, grouped, scale, epsilon), streams.shape), dtype)
    down = xp.astype(xp.matmul(hn, wide(xp, down_weight)), dtype)
    hidden = scaled_silu(xp, down, alpha=silu_alpha)
    up = _rounded(xp, xp.matmul(wide(xp, hidden), wide(xp, up_weight)), dtype)
    gate = _rounded(xp, xp.sigmoid(up), dtype)
    output = reduction_scale * xp.sum(_grouped(xp, hn * gate, num_branches), axis=-2)
    inject = _rounded(xp, xp.matmul(hn, wide(xp, inject_weight)), dtype)
    post = _rounded(xp, xp.sigmoid(_rounded(xp, inject / gate_div, dtype)), dtype) * gate_mul
    return xp.astype(output, dtype), xp.astype(post, dtype), streams


@op("RouterGateUpProj", domain=MS)
def router_gate_up_proj(
    xp, x, w, *, activation="swiglu", activation_alpha=1.0, activation_beta=0.0, limit=0.0, router_size
):
    if activation != "swiglu":
        raise InvalidModel(f"RouterGateUpProj knows no activation '{activation}'.", fix="use 'swiglu'.")
    y = xp.astype(xp.matmul(wide(xp, x), wide(xp, w)), xp.dtype_of(x))
    activated = swi_glu(
        xp, y[..., router_size:], activation_alpha=activation_alpha, activation_beta=activation_beta, limit=limit
    )  # fmt: skip
    return y[..., :router_size], activated


@op("MoEGroupRouter", domain=MS, out=(0, "float32", "float32"))
def moe_group_router(
    xp, logits, expert_bias, projection_weight=None, *, group_topk=2, n_group=1, router_sentinel=-10000.0,
    top_k, topk_group=1,
):  # fmt: skip
    """Log-scores of the chosen experts and a sentinel for the others; beside them, all scores unselected."""
    dtype, x = xp.dtype_of(logits), wide(xp, logits)
    if projection_weight is not None:
        x = xp.matmul(x, xp.swapaxes(wide(xp, projection_weight), 0, 1))
    x = xp.reshape(x, (-1, x.shape[-1]))
    weights = xp.sigmoid(x)
    scores = weights + expert_bias
    tokens, experts = scores.shape
    grouped = xp.reshape(scores, (tokens, n_group, -1))
    best = xp.topk(grouped, min(group_topk, grouped.shape[2]), axis=2)[0]
    groups = xp.topk(xp.sum(best, axis=2), topk_group, axis=1)[1]
    member = xp.any(xp.expand_dims(groups, 2) == xp.asarray(np.arange(n_group)), axis=1)
    open_ = xp.reshape(xp.where(xp.expand_dims(member, 2), grouped, -np.inf), (tokens, experts))
    chosen = xp.topk(open_, top_k, axis=1)[1]
    selected = xp.any(xp.expand_dims(chosen, 2) == xp.asarray(np.arange(experts)), axis=1)
    logs = xp.where(selected, xp.log(xp.maximum(weights, 1e-20)), router_sentinel)
    return xp.astype(logs, dtype), xp.astype(scores, np.float32), xp.astype(weights, np.float32)
