"""Linear attention and causal convolution over sequences of different lengths, one after the other without padding."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ep.errors import InvalidInput
from ep.ops.axes import ints
from ep.ops.linear_attention import RULES
from ep.ops.precision import wide
from ep.registry import Host, op

MS = "com.microsoft"


@dataclass(frozen=True, slots=True)
class Packing:
    """Where each sequence lies among `tokens`: half-open ranges that follow each other."""

    starts: np.ndarray
    lengths: np.ndarray

    @classmethod
    def of(cls, ends: Any, tokens: int) -> Packing:
        """From the cumulated lengths [batch + 1]."""
        ends = np.asarray(ints(ends))
        if ends[0] != 0 or ends[-1] != tokens or (np.diff(ends) < 0).any():
            raise InvalidInput(
                f"cumulated lengths {ends.tolist()} do not divide {tokens} tokens.",
                fix=f"let them start at 0, never decrease, and end at {tokens}.",
            )
        return cls(ends[:-1], np.diff(ends))

    def by_time(self) -> tuple[np.ndarray, np.ndarray]:
        """The token of each step and sequence, and whether there is one: two arrays [longest, batch]."""
        clock = np.arange(self.lengths.max(initial=0))[:, None]
        last = max(int(self.lengths.sum()) - 1, 0)
        return np.minimum(self.starts + clock, last), clock < self.lengths

    def places(self) -> np.ndarray:
        """For each token, where it is in [longest, batch] flattened."""
        sequence = np.repeat(np.arange(len(self.lengths)), self.lengths)
        return (np.arange(len(sequence)) - self.starts[sequence]) * len(self.lengths) + sequence


@op("GatedDeltaNet", domain=MS, out=(0, "float32", "float32"))
def gated_delta_net(
    xp, query, key=None, value=None, cu_seqlens: Host = None, decay=None, beta=None, initial_state=None, a_log=None,
    dt_bias=None, capture_count=None, state_update_active=None, *,
    beta_activation="none", chunk_size=64, gate_activation="none", gate_lower_bound=-5.0, qk_l2_norm=0, scale=0.0,
    state_update_capacity=0, update_rule="gated_delta",
):  # fmt: skip
    if update_rule not in RULES:
        raise InvalidInput(f"update_rule {update_rule!r} is unknown.", fix=f"use one of {', '.join(RULES)}.")
    decays, corrects = RULES[update_rule]
    lead = query.shape[:1]
    if key is not None and query.ndim == 4:
        lead = query.shape[:2]
    q, k, v = _queries_keys_values(xp, query, key, value, initial_state)
    tokens, heads = q.shape[0], v.shape[1]
    if cu_seqlens is not None:
        packing = Packing.of(cu_seqlens, tokens)
    else:
        batch = initial_state.shape[0] if initial_state is not None else lead[0]
        packing = Packing.of(np.arange(batch + 1) * (tokens // batch), tokens)
    if qk_l2_norm:
        q, k = _unit(xp, q), _unit(xp, k)
    parts = {"q": q * (scale or 1 / math.sqrt(q.shape[2])), "k": k, "v": v}
    if decays:
        gate = wide(xp, xp.reshape(decay, (tokens, heads, -1)))
        parts["decay"] = xp.exp(_gate(xp, gate, a_log, dt_bias, gate_activation, gate_lower_bound))
    if corrects:
        rate = wide(xp, xp.reshape(beta, (tokens, heads, 1)))
        parts["beta"] = xp.sigmoid(rate) if beta_activation == "sigmoid" else rate
    y, state, taken = _run(xp, parts, packing, initial_state)
    y = xp.astype(xp.reshape(y, (*lead, heads, v.shape[2])), xp.dtype_of(query))
    update = _captured(xp, parts, taken, packing, state_update_capacity, capture_count, state_update_active)
    return y, state, update


def _queries_keys_values(xp: Any, query: Any, key: Any, value: Any, state: Any) -> tuple[Any, Any, Any]:
    """[tokens, heads, size] of each, in float32; packed ones are told apart by the state."""
    if key is not None:
        return tuple(wide(xp, xp.reshape(x, (-1, *x.shape[-2:]))) for x in (query, key, value))  # type: ignore[return-value]
    _, heads, dv, dk = state.shape
    x = wide(xp, xp.reshape(query, (-1, query.shape[-1])))
    wide_heads = (x.shape[1] - heads * dv) // 2
    q, k, v = x[:, :wide_heads], x[:, wide_heads : 2 * wide_heads], x[:, 2 * wide_heads :]
    return (
        xp.reshape(q, (-1, wide_heads // dk, dk)),
        xp.reshape(k, (-1, wide_heads // dk, dk)),
        xp.reshape(v, (-1, heads, dv)),
    )


def _unit(xp: Any, x: Any) -> Any:
    return x * xp.rsqrt(xp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def _gate(xp: Any, gate: Any, a_log: Any, dt_bias: Any, activation: str, lowest: float) -> Any:
    """The logarithm of the decay [tokens, heads, 1 or dk]."""
    if activation == "none":
        return gate
    if activation not in ("softplus", "qwen", "sigmoid", "kda"):
        raise InvalidInput(f"gate_activation {activation!r} is unknown.", fix="use none, softplus or sigmoid.")
    heads = gate.shape[1]
    gate = gate if dt_bias is None else gate + xp.reshape(dt_bias, (heads, -1))
    rate = xp.exp(xp.reshape(a_log, (heads, 1)))
    if activation in ("softplus", "qwen"):
        return -rate * xp.logaddexp(gate, xp.zeros_like(gate))
    return lowest * xp.sigmoid(rate * gate)


def _run(xp: Any, parts: dict[str, Any], packing: Packing, state: Any) -> tuple[Any, Any, Any]:
    """Outputs [tokens, heads, dv], last states [batch, heads, dv, dk], each token's change [tokens, heads, dv]."""
    heads, groups = parts["v"].shape[1], parts["k"].shape[1]
    token, alive = packing.by_time()
    rows = {name: xp.take(x, xp.asarray(token), axis=0) for name, x in parts.items()}  # [T, B, heads, size]
    for name in ("q", "k"):
        rows[name] = xp.repeat(rows[name], heads // groups, axis=2) if heads != groups else rows[name]
    if state is None:
        shape = (token.shape[1], heads, parts["v"].shape[2], parts["k"].shape[2])
        state = xp.zeros(shape, dtype=np.float32)

    def step(carry: Any, now: Any) -> Any:
        (old,), row = carry, dict(zip((*rows, "alive"), now, strict=True))
        new = old * row["decay"][:, :, None, :] if "decay" in row else old
        change = row["v"]
        if "beta" in row:
            change = row["beta"] * (change - xp.sum(new * row["k"][:, :, None, :], axis=-1))
        new = new + change[..., None] * row["k"][:, :, None, :]
        y = xp.sum(new * row["q"][:, :, None, :], axis=-1)
        return (xp.where(xp.reshape(row["alive"], (-1, 1, 1, 1)), new, old),), (y, change)

    if token.shape[0] == 0:
        return parts["v"], state, parts["v"]
    (state,), columns = xp.scan(step, (state,), (*rows.values(), xp.asarray(alive)))
    places = xp.asarray(packing.places())
    y, change = (xp.take(xp.reshape(c, (-1, *c.shape[2:])), places, axis=0) for c in columns)
    return y, state, change


def _captured(
    xp: Any, parts: dict[str, Any], change: Any, packing: Packing, capacity: int, count: Any, active: Any
) -> Any:
    """Decays, keys and changes of each sequence's first tokens, in this order [batch, capacity * …], zeros else."""
    if not capacity:
        return None
    batch = len(packing.lengths)
    heads = change.shape[1]
    decay = parts["decay"] if "decay" in parts else xp.ones((change.shape[0], heads, 1), dtype=np.float32)
    clock = np.arange(capacity)
    token = np.minimum(packing.starts[:, None] + clock, max(change.shape[0] - 1, 0))
    most = (
        xp.asarray(packing.lengths.astype(np.int32))
        if count is None
        else xp.minimum(xp.astype(count, np.int32), xp.asarray(packing.lengths.astype(np.int32)))
    )
    kept = xp.asarray(clock.astype(np.int32)) < xp.reshape(most, (batch, 1))
    if active is not None:
        kept = xp.logical_and(kept, xp.reshape(active, ()) != 0)
    columns = []
    for x in (decay, parts["k"], change):
        x = xp.reshape(x, (x.shape[0], -1))
        x = xp.where(kept[..., None], xp.take(x, xp.asarray(token), axis=0), 0)
        columns.append(xp.reshape(x, (batch, -1)))
    return xp.concatenate(columns, axis=1)


@op("VarlenCausalConvWithState", domain=MS, out=(0, 0, 0))
def varlen_causal_conv_with_state(
    xp, input, weight, cumulative_sequence_length: Host, bias=None, initial_state=None, capture_count=None,
    kernel_delta=None, previous_mask=None, *,
    activation="none", delta_offset=0, dilation=1, group_size=1, state_update_capacity=0,
):  # fmt: skip
    if kernel_delta is not None:
        raise InvalidInput(
            "VarlenCausalConvWithState with kernel_delta.",
            why="that mode is specified for CUDA only.",
            fix="export the model without dynamic kernels.",
        )
    (tokens, channels), taps = input.shape, weight.shape[2]
    packing, reach = Packing.of(cumulative_sequence_length, tokens), (taps - 1) * dilation
    batch = len(packing.lengths)
    before = xp.reshape(xp.swapaxes(initial_state, 1, 2), (batch * reach, channels))
    rows = xp.concatenate([before, input], axis=0)  # first all states, then all tokens

    sequence = np.repeat(np.arange(batch), packing.lengths)
    local = np.arange(tokens) - packing.starts[sequence]

    def row_of(sequence: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Where an element stands in `rows`; negative positions are those of the state."""
        return np.where(
            position < 0, sequence * reach + reach + position, batch * reach + packing.starts[sequence] + position
        )

    y = None
    for tap in range(taps):
        index = row_of(sequence, local - (taps - 1 - tap) * dilation)
        term = wide(xp, xp.take(rows, xp.asarray(index), axis=0)) * wide(xp, weight[:, 0, tap])
        y = term if y is None else y + term
    y = y if bias is None else y + wide(xp, bias)
    y = y * xp.sigmoid(y) if activation in ("silu", "swish") else y
    last = packing.lengths[:, None] - reach + np.arange(reach)
    state = xp.swapaxes(xp.take(rows, xp.asarray(row_of(np.arange(batch)[:, None], last)), axis=0), 1, 2)
    update = None
    if state_update_capacity:
        clock = np.arange(state_update_capacity)
        inside = np.minimum(clock, np.maximum(packing.lengths[:, None] - 1, 0))
        most = xp.minimum(xp.astype(capture_count, np.int32), xp.asarray(packing.lengths.astype(np.int32)))
        kept = xp.asarray(clock.astype(np.int32)) < xp.reshape(most, (batch, 1))
        taken = xp.take(rows, xp.asarray(row_of(np.arange(batch)[:, None], inside)), axis=0)
        update = xp.where(kept[..., None], taken, 0)
    return xp.astype(y, xp.dtype_of(input)), state, update
