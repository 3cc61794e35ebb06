"""Attention over a cache of pages, for batches of sequences of different lengths (PagedAttention of onnxruntime)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ep.errors import InvalidInput, UnsupportedModel
from ep.ops.attention import attend, rotate
from ep.ops.precision import wide
from ep.registry import op

PACKED = ("int4", "float4e2m1")  # two numbers in a byte


@dataclass(frozen=True, slots=True)
class Tokens:
    """Per token [T]: its sequence, its place among the new tokens of that, and its position in the whole of it."""

    sequence: Any
    local: Any
    position: Any
    total: Any  # per sequence: cached and new tokens

    @classmethod
    def of(cls, xp: Any, count: int, ends: Any, past: Any) -> Tokens:
        token = xp.arange(count, dtype=np.int32)
        sequence = xp.sum(xp.astype(token[:, None] >= ends[1:], np.int32), axis=1)
        local = token - xp.take(ends[:-1], sequence, axis=0)
        position = local + xp.take(past, sequence, axis=0)
        return cls(sequence, local, position, past + ends[1:] - ends[:-1])


@dataclass(frozen=True, slots=True)
class Pages:
    """A cache [pages, page size, heads, channels], whose numbers may be scaled to eight bits."""

    cache: Any
    scale: Any

    def written(self, xp: Any, slots: Any, x: Any) -> Pages:
        """With x [T, heads, channels] at the slots; those of -1 are not written."""
        if self.scale is not None:
            dtype = xp.dtype_of(self.cache)
            x = xp.divide(wide(xp, x), self._scale(xp))
            x = xp.clip(xp.round(x), -128, 127) if dtype == np.int8 else xp.clip(x, -448, 448)
            x = xp.astype(x, dtype)
        rows = xp.reshape(self.cache, (-1, *self.cache.shape[2:]))
        nowhere = xp.zeros((1, *rows.shape[1:]), dtype=xp.dtype_of(rows))
        places = xp.where(slots < 0, rows.shape[0], slots)
        rows = xp.scatter(xp.concatenate([rows, nowhere], axis=0), (places,), x)[:-1]
        return Pages(xp.reshape(rows, self.cache.shape), self.scale)

    def read(self, xp: Any, slots: Any) -> Any:
        """[batch, heads, length, channels] at the slots [batch, length]."""
        rows = xp.reshape(self.cache, (-1, *self.cache.shape[2:]))
        x = xp.take(rows, xp.maximum(slots, 0), axis=0)
        if self.scale is not None:
            x = xp.astype(x, np.float32) * self._scale(xp)
        return xp.swapaxes(wide(xp, x), 1, 2)

    def _scale(self, xp: Any) -> Any:
        """One for all, or one for each head and channel."""
        return xp.reshape(self.scale, () if self.scale.size == 1 else self.cache.shape[2:])


@op("PagedAttention", domain="com.microsoft", out=(0, 3, 4))
def paged_attention(
    xp, query, key, value, key_cache, value_cache, cumulative_sequence_length, past_seqlens, block_table,
    cos_cache=None, sin_cache=None, slot_mapping=None, head_sink=None, q_norm_weight=None, k_norm_weight=None,
    k_scale=None, v_scale=None, attention_metadata=None, *,
    do_rotary=0, is_causal=1, k_cache_dtype="", k_quant_type="NONE", kv_cache_layout="SEPARATE", kv_num_heads,
    local_window_size=-1, num_heads, qk_norm_epsilon=1e-6, rotary_interleaved=0, rotary_offset=0, scale=None,
    softcap=0.0, v_cache_dtype="", v_head_size=0, v_quant_type="NONE",
):  # fmt: skip
    if k_cache_dtype in PACKED or v_cache_dtype in PACKED:
        raise UnsupportedModel(
            f"PagedAttention with a cache of {k_cache_dtype or v_cache_dtype}.",
            why="ep has no pages of packed numbers.",
            fix="use a cache of 8 bits or more.",
        )
    latent = kv_cache_layout == "LATENT"
    q, k, v = _heads(xp, query, key, value, num_heads, kv_num_heads, latent)
    size = q.shape[2]
    if latent and v_head_size not in (0, size) and scale is None:
        raise InvalidInput("PagedAttention with v_head_size needs the attribute scale.", fix="give the scale.")
    tokens = Tokens.of(xp, q.shape[0], cumulative_sequence_length, past_seqlens)
    if q_norm_weight is not None:
        q, k = _normal(xp, q, q_norm_weight, qk_norm_epsilon), _normal(xp, k, k_norm_weight, qk_norm_epsilon)
    if do_rotary:
        q, k = (_turned(xp, x, cos_cache, sin_cache, tokens, rotary_interleaved, rotary_offset) for x in (q, k))
    page = key_cache.shape[1]
    slots = slot_mapping if slot_mapping is not None else _slots(xp, block_table, tokens, page)
    keys = Pages(key_cache, None if k_quant_type == "NONE" else k_scale).written(xp, slots, k)
    values = keys if latent else Pages(value_cache, None if v_quant_type == "NONE" else v_scale).written(xp, slots, v)
    y = _attend(xp, q, keys, values, tokens, block_table, page, v_head_size if latent else 0,
                causal=bool(is_causal), window=local_window_size, scale=scale or size**-0.5, softcap=softcap,
                sink=head_sink)  # fmt: skip
    return xp.astype(y, xp.dtype_of(query)), keys.cache, None if latent else values.cache


def _heads(xp: Any, query: Any, key: Any, value: Any, heads: int, kv_heads: int, latent: bool) -> tuple[Any, Any, Any]:
    """[T, heads, size] of queries, keys and values; without keys all lie side by side in the query."""
    if key is None:
        size = query.shape[1] // (heads + 2 * kv_heads)
        first, second = heads * size, (heads + kv_heads) * size
        query, key, value = query[:, :first], query[:, first:second], query[:, second:]
    q, k = (xp.reshape(x, (x.shape[0], n, -1)) for x, n in ((query, heads), (key, kv_heads)))
    return q, k, k if latent else xp.reshape(value, (value.shape[0], kv_heads, -1))


def _normal(xp: Any, x: Any, weight: Any, epsilon: float) -> Any:
    inner = wide(xp, x)
    factor = xp.rsqrt(xp.mean(inner * inner, axis=-1, keepdims=True) + epsilon)
    return xp.astype(inner * factor * wide(xp, weight), xp.dtype_of(x))


def _turned(xp: Any, x: Any, cos: Any, sin: Any, tokens: Tokens, interleaved: int, offset: int) -> Any:
    """x [T, heads, size], of which the channels from `offset` on are turned as far as the tables go."""
    at = xp.minimum(tokens.position, cos.shape[0] - 1)
    cos, sin = (xp.take(table, at, axis=0)[None, None] for table in (cos, sin))
    rows = xp.swapaxes(x, 0, 1)[None]
    turned = rotate(xp, rows[..., offset:], cos, sin, bool(interleaved), 2 * cos.shape[-1])
    rows = xp.concatenate([rows[..., :offset], turned], axis=-1) if offset else turned
    return xp.swapaxes(rows[0], 0, 1)


def _slots(xp: Any, table: Any, tokens: Tokens, page: int) -> Any:
    """Where each token is cached: its page, and its place there; -1 where there is no page."""
    width = table.shape[1]
    column = xp.minimum(tokens.position // page, width - 1)
    block = xp.take(xp.reshape(table, (-1,)), tokens.sequence * width + column, axis=0)
    return xp.where(block < 0, -1, block * page + tokens.position % page)


def _attend(
    xp: Any, q: Any, keys: Pages, values: Pages, tokens: Tokens, table: Any, page: int, width: int, *,
    causal: bool, window: int, scale: float, softcap: float, sink: Any,
) -> Any:  # fmt: skip
    """[T, heads * size]: every sequence padded to the number of all new tokens, attended, and taken apart again."""
    count, batch = q.shape[0], table.shape[0]
    places = tokens.sequence * count + tokens.local
    padded = xp.zeros((batch * count, *q.shape[1:]), dtype=np.float32)
    rows = xp.reshape(xp.scatter(padded, (places,), wide(xp, q)), (batch, count, *q.shape[1:]))
    within = xp.arange(page, dtype=np.int32)
    slots = xp.reshape(xp.where(table[..., None] < 0, -1, table[..., None] * page + within), (batch, -1))
    position = xp.arange(slots.shape[1], dtype=np.int32)
    exists = xp.logical_and(position < tokens.total[:, None], slots >= 0)
    allowed = exists[:, None, None, :]
    first = xp.reshape(tokens.total, (-1, 1)) - _new(xp, tokens, batch, count)
    query_at = (first + xp.arange(count, dtype=np.int32))[:, None, :, None]
    if causal:
        allowed = xp.logical_and(allowed, position <= query_at)
    if window > 0:
        allowed = xp.logical_and(allowed, position > query_at - window)
    k, v = keys.read(xp, slots), values.read(xp, slots)
    v = v[..., :width] if width else v
    v = xp.where(exists[:, None, :, None], v, xp.zeros_like(v))  # pages that nobody wrote may hold anything
    sink = None if sink is None else xp.reshape(wide(xp, sink), (1, -1, 1, 1))
    y = attend(xp, xp.swapaxes(rows, 1, 2), k, v, scale, allowed=allowed, softcap=softcap, sink=sink).y
    flat = xp.reshape(xp.swapaxes(y, 1, 2), (batch * count, -1))
    return xp.take(flat, places, axis=0)


def _new(xp: Any, tokens: Tokens, batch: int, count: int) -> Any:
    """How many new tokens each sequence has: [batch, 1]."""
    mine = tokens.sequence[None] == xp.arange(batch, dtype=np.int32)[:, None]
    return xp.sum(xp.astype(mine, np.int32), axis=1, keepdims=True)
