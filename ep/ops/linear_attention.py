"""Attention with a state instead of a cache: LinearAttention, and the causal convolution that goes before it."""

from __future__ import annotations

import math
from typing import Any

from ep.errors import InvalidInput
from ep.ops.precision import wide
from ep.registry import op

RULES = {  # whether the state decays, and whether it is corrected by what it already knows
    "linear": (False, False),
    "gated": (True, False),
    "delta": (False, True),
    "gated_delta": (True, True),
}


@op("LinearAttention", since=27)
def linear_attention(
    xp, query, key, value, past_state=None, decay=None, beta=None, *,
    chunk_size=64, kv_num_heads, q_num_heads, scale=0.0, update_rule="gated_delta",
):  # fmt: skip
    y, states = _recur(
        xp, query, key, value, past_state, decay, beta, kv_num_heads, q_num_heads, scale, update_rule, False
    )
    return y, xp.astype(states, xp.dtype_of(query if past_state is None else past_state))


@op("LinearAttention", domain="com.microsoft", out=(0, 3))
def ms_linear_attention(
    xp, query, key, value, past_state=None, decay=None, beta=None, *,
    chunk_size=64, kv_num_heads, q_num_heads, scale=0.0, state_window=0, update_rule="gated_delta",
):  # fmt: skip
    """With a window, the states after the last tokens lie one after the other, the newest last."""
    if past_state is not None and state_window:
        past_state = past_state[-1]
    y, states = _recur(
        xp, query, key, value, past_state, decay, beta, kv_num_heads, q_num_heads, scale, update_rule, state_window > 0
    )
    if state_window:
        states = states[-state_window:]
        missing = state_window - states.shape[0]
        states = xp.pad(states, [(missing, 0)] + [(0, 0)] * 4) if missing else states
    return y, xp.astype(states, xp.dtype_of(query if past_state is None else past_state))


def _recur(
    xp: Any, query: Any, key: Any, value: Any, past: Any, decay: Any, beta: Any, kv_heads: int, q_heads: int,
    scale: float, rule: str, keep_all: bool,
) -> tuple[Any, Any]:  # fmt: skip
    """Outputs [B, T, heads * dv], and the last state [B, H, dk, dv] or all of them."""
    if rule not in RULES:
        raise InvalidInput(f"update_rule {rule!r} is unknown.", fix=f"use one of {', '.join(RULES)}.")
    decays, corrects = RULES[rule]
    q, k, v = _by_time(xp, query, q_heads), _by_time(xp, key, kv_heads), _by_time(xp, value, kv_heads)
    size = q.shape[3]
    q = _grouped(xp, q, kv_heads) * (scale or 1 / math.sqrt(size))
    xs = [q, k, v]
    xs += [xp.exp(_by_time(xp, decay, kv_heads))] if decays else []
    xs += [_by_time(xp, beta, kv_heads if beta.shape[2] % kv_heads == 0 else 1)] if corrects else []

    def step(carry: Any, now: Any) -> Any:
        state, (q, k, v, *gates) = carry[0], now
        if decays:
            state = state * gates[0][..., None]
        if corrects:
            v = gates[-1] * (v - xp.matmul(k[..., None, :], state)[..., 0, :])
        state = state + k[..., None] * v[..., None, :]
        y = xp.matmul(q, state)
        return (state,), (y, state) if keep_all else (y,)

    shape = (q.shape[1], kv_heads, size, v.shape[3])
    start = xp.zeros(shape, dtype=xp.dtype_of(q)) if past is None else wide(xp, past)
    (state,), ys = xp.scan(step, (start,), tuple(xs))
    y = xp.swapaxes(xp.reshape(ys[0], (*ys[0].shape[:2], -1)), 0, 1)
    return xp.astype(y, xp.dtype_of(query)), ys[1] if keep_all else state


def _by_time(xp: Any, x: Any, heads: int) -> Any:
    """[B, T, heads * size] → [T, B, heads, size], in float32 at least."""
    x = wide(xp, x)
    return xp.swapaxes(xp.reshape(x, (*x.shape[:2], heads, -1)), 0, 1)


def _grouped(xp: Any, q: Any, kv_heads: int) -> Any:
    """Queries [T, B, heads, size] as [T, B, kv_heads, queries per state, size]; few queries serve several states."""
    heads = q.shape[2]
    if heads < kv_heads:
        q = xp.repeat(q, kv_heads // heads, axis=2)
    return xp.reshape(q, (*q.shape[:2], kv_heads, -1, q.shape[3]))


@op("CausalConvWithState", since=27)
def causal_conv_with_state(xp, input, weight, bias=None, past_state=None, *, activation="none"):
    y, virtual = _causal_conv(xp, input, weight, bias, past_state, activation, 1)
    return y, virtual[:, :, input.shape[2] :]


def _causal_conv(xp: Any, x: Any, weight: Any, bias: Any, past: Any, activation: str, dilation: int) -> tuple[Any, Any]:
    """The output [B, C, L], and the input with what came before it; a sum of shifted products, one per tap."""
    taps, length = weight.shape[2], x.shape[2]
    reach = (taps - 1) * dilation
    if past is None:
        past = xp.zeros((*x.shape[:2], reach), dtype=xp.dtype_of(x))
    virtual = xp.concatenate([past, x], axis=2)
    read, w = wide(xp, virtual), wide(xp, weight)
    y = read[:, :, :length] * w[:, 0, 0][:, None]
    for i in range(1, taps):
        y = y + read[:, :, i * dilation :][:, :, :length] * w[:, 0, i][:, None]
    y = y if bias is None else y + wide(xp, bias)[:, None]
    y = y * xp.sigmoid(y) if activation in ("silu", "swish") else y
    return xp.astype(y, xp.dtype_of(x)), virtual


@op("CausalConvWithState", domain="com.microsoft", out=(0, 0, 0))
def ms_causal_conv_with_state(
    xp, input, weight, bias=None, past_state=None, *,
    activation="none", channels_last=0, dilation=1, input_channel_offset=0, input_channels=0, ndim=1,
    state_channels_last=-1, state_length=0, state_update_capacity=0, state_window=0,
):  # fmt: skip
    if ndim != 1 or input_channels or state_length or state_update_capacity or state_channels_last >= 0:
        raise InvalidInput(
            "CausalConvWithState with the attributes of onnxruntime's CUDA path, or with ndim > 1.",
            why="only the portable one-dimensional form is specified for all devices.",
            fix="export with ndim=1 and without input_channels, state_length and state_update_capacity.",
        )
    past = None if past_state is None else past_state[-1] if state_window else past_state
    shape = input.shape
    if channels_last:
        x = xp.swapaxes(xp.reshape(input, (*shape[:2], -1)), 1, 2)
        past = None if past is None else xp.swapaxes(xp.reshape(past, (*past.shape[:2], -1)), 1, 2)
    else:
        x = input
    y, virtual = _causal_conv(xp, x, weight, bias, past, activation, dilation)
    states = _states(xp, virtual, x.shape[2], state_window)
    if channels_last:
        y = xp.reshape(xp.swapaxes(y, 1, 2), shape)
        states = xp.swapaxes(states, -1, -2)
        states = xp.reshape(states, (*states.shape[:-1], *shape[2:]))
    return y, states


def _states(xp: Any, virtual: Any, length: int, window: int) -> Any:
    """The last columns of [before, input]; with a window, also those after each of the last tokens."""
    if not window:
        return virtual[:, :, length:]
    reach = virtual.shape[2] - length
    slots = [virtual[:, :, i : i + reach] for i in range(max(0, length - window) + 1, length + 1)]
    zeros = [xp.zeros_like(virtual[:, :, :reach])] * (window - len(slots[-window:]))
    return xp.stack([*zeros, *slots[-window:]])
