"""GroupQueryAttention: decoding with a cache of keys and values that may be ragged, windowed or quantized."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ep.errors import InvalidInput
from ep.ops.attention import attend, default_scale, merge_heads, rotate, split_heads
from ep.ops.axes import scalar
from ep.ops.packed_weights import unpack
from ep.ops.precision import wide
from ep.registry import Host, op


@dataclass(frozen=True, slots=True)
class Positions:
    """Where a step stands, per batch entry: `past` tokens are cached, `new` of the rows given are valid, `total`.

    `is_padded`: rows that are not valid must not reach the cache.
    """

    past: Any
    new: Any
    total: Any
    is_padded: bool

    @staticmethod
    def of(xp: Any, seqlens_k: Any, query_seqlens: Any, rows: int) -> Positions:
        total = xp.reshape(xp.astype(seqlens_k, np.int32), (-1,)) + 1
        if query_seqlens is None:
            new = xp.minimum(total, rows)
        else:
            new = xp.reshape(xp.astype(query_seqlens, np.int32), (-1,))
        return Positions(total - new, new, total, query_seqlens is not None)


@op("GroupQueryAttention", domain="com.microsoft", out=(0, 3, 3, 0))
def group_query_attention(
    xp, query, key, value, past_key, past_value, seqlens_k, total_sequence_length: Host, cos_cache=None,
    sin_cache=None, position_ids=None, attention_bias=None, head_sink=None, k_scale=None, v_scale=None,
    q_norm_weight=None, k_norm_weight=None, query_seqlens=None, *,
    causal=1, do_rotary=0, k_norm_epsilon=None, k_quant_type="NONE", kv_cache_bit_width=0, kv_num_heads,
    local_window_size=-1, num_heads, q_norm_epsilon=None, qk_norm_epsilon=9.999999974752427e-07, qk_output=0,
    rotary_interleaved=0, scale=None, sliding_window_cache=0, smooth_softmax=-1, softcap=0.0, v_quant_type="NONE",
):  # fmt: skip
    """The past length of each entry is a value on the device: rows are written and masked by position."""
    q, k, v = heads_of(xp, query, key, value, num_heads, kv_num_heads)
    if q_norm_weight is not None:
        q = _rms_norm(xp, q, q_norm_weight, q_norm_epsilon or qk_norm_epsilon)
        k = _rms_norm(xp, k, k_norm_weight, k_norm_epsilon or qk_norm_epsilon)
    at = Positions.of(xp, seqlens_k, query_seqlens, q.shape[2])
    total = int(scalar(total_sequence_length))
    if do_rotary:
        is_prompt = query_seqlens is None and q.shape[2] == total
        table = cos_cache, sin_cache, position_ids, at, is_prompt, rotary_interleaved
        q, k = turn(xp, q, *table), turn(xp, k, *table)
    caches = [
        Cache(past, scale, kind, kv_cache_bit_width or 8)
        for past, scale, kind in ((past_key, k_scale, k_quant_type), (past_value, v_scale, v_quant_type))
    ]
    store = _slide if sliding_window_cache else _grow
    (present_key, k), (present_value, v), key_positions = store(xp, caches, k, v, at, total, local_window_size)
    allowed, exists = visible(xp, at, q.shape[2], key_positions, bool(causal), local_window_size)
    v = xp.where(exists[..., None], v, xp.zeros_like(v))  # rows beyond the total may hold anything, NaN too
    bias = attention_bias
    if bias is not None and sliding_window_cache:
        bias = _bias_at(xp, bias, key_positions, q.shape[0])
    elif bias is not None:
        bias = bias[..., : k.shape[2]]
    sink = None if head_sink is None else xp.reshape(wide(xp, head_sink), (1, -1, 1, 1))
    if sink is None and smooth_softmax == 1:
        sink = xp.zeros((1, 1, 1, 1), dtype=np.float32)
    result = attend(
        xp, q, k, v, default_scale(scale, q.shape[3]), allowed=allowed, bias=bias, softcap=softcap, sink=sink,
        stages=bool(qk_output),
    )  # fmt: skip
    y = merge_heads(xp, xp.astype(result.y, xp.dtype_of(query)))
    stage = None
    if qk_output:
        stage = xp.where(allowed, result.masked, 0.0) if qk_output == 1 else result.probabilities
        stage = xp.astype(stage, xp.dtype_of(query))
    return y, present_key, present_value, stage


def heads_of(xp: Any, query: Any, key: Any, value: Any, heads: int, kv_heads: int) -> tuple[Any, Any, Any]:
    """Queries, keys and values as [B, H, L, D]; without keys they lie side by side in the query."""
    if key is None:
        size = query.shape[2] // (heads + 2 * kv_heads)
        first, second = heads * size, (heads + kv_heads) * size
        query, key, value = query[..., :first], query[..., first:second], query[..., second:]
    key = key if key.ndim == 4 else split_heads(xp, key, kv_heads)
    value = value if value.ndim == 4 else split_heads(xp, value, kv_heads)
    return split_heads(xp, query, heads), key, value


def _rms_norm(xp: Any, x: Any, weight: Any, epsilon: float) -> Any:
    x32 = wide(xp, x)
    normal = x32 * xp.rsqrt(xp.mean(x32 * x32, axis=-1, keepdims=True) + epsilon)
    return xp.astype(normal * wide(xp, weight), xp.dtype_of(x))


def turn(
    xp: Any, x: Any, cos: Any, sin: Any, position_ids: Any, at: Positions, is_prompt: bool, interleaved: int
) -> Any:
    """Rotary embedding at the positions given, or else at those that follow the cached tokens.

    Of the positions of a prompt only the very first is read, as the operator is specified.
    """
    rows = xp.arange(x.shape[2], dtype=np.int32)
    if position_ids is None:
        position = xp.minimum(at.past[:, None] + rows, cos.shape[0] - 1)  # padding may lie beyond the table
    elif is_prompt or position_ids.size == 1:
        position = xp.astype(xp.reshape(position_ids, (-1,))[:1, None], np.int32) + rows
    else:
        position = position_ids
    cos, sin = (xp.take(table, position, axis=0)[:, None] for table in (cos, sin))
    return rotate(xp, x, cos, sin, bool(interleaved), 2 * cos.shape[-1])


def visible(xp: Any, at: Positions, rows: int, key_positions: Any, causal: bool, window: int) -> tuple[Any, Any]:
    """Masks [B, 1, rows, keys] of what each query sees and [B, 1, keys] of the keys that exist."""
    exists = key_positions < at.total[:, None]
    exists = xp.logical_and(exists, key_positions >= 0)[:, None]
    allowed = exists[:, :, None]
    if causal:
        position = (at.past[:, None] + xp.arange(rows, dtype=np.int32))[:, None, :, None]
        keys = key_positions[:, None, None]
        allowed = xp.logical_and(allowed, keys <= position)
        if window > 0:
            allowed = xp.logical_and(allowed, keys > position - window)
    return allowed, exists


def _bias_at(xp: Any, bias: Any, key_positions: Any, batch: int) -> Any:
    """The columns of a bias over absolute positions that belong to the keys at hand."""
    column = xp.clip(key_positions, 0, bias.shape[-1] - 1)[:, None, None]
    shape = (batch, *bias.shape[1:3], column.shape[-1])
    bias = xp.broadcast_to(bias, (batch, *bias.shape[1:]))
    return xp.take_along_axis(bias, xp.broadcast_to(column, shape), axis=3)


# Caches


@dataclass(frozen=True, slots=True)
class Cache:
    """Past keys or values [B, H, C, D] and how their numbers are stored."""

    past: Any
    scale: Any
    kind: str
    bits: int

    def stored(self, xp: Any, x: Any) -> Any:
        """New numbers in the form of the cache."""
        if self.past is None or self.kind == "NONE":
            return x
        dtype = xp.dtype_of(self.past)
        x = xp.divide(wide(xp, x), wide(xp, self._scale(xp)))
        if dtype.name.startswith("float8"):
            return xp.astype(xp.clip(x, -448, 448), dtype)
        if self.bits == 8:
            return xp.astype(xp.clip(xp.round(x), -128, 127), dtype)
        code = xp.astype(xp.clip(xp.round(x), -8, 7) + 8, np.uint8)
        return xp.bitwise_or(code[..., 0::2], xp.left_shift(code[..., 1::2], 4))

    def loaded(self, xp: Any, x: Any, dtype: Any) -> Any:
        """Numbers of the cache as they enter attention."""
        if self.past is None or self.kind == "NONE":
            return x
        if self.bits == 4:
            x = xp.astype(unpack(xp, x, 4), np.float32) - 8
        return xp.astype(xp.astype(x, np.float32) * wide(xp, self._scale(xp)), dtype)

    def _scale(self, xp: Any) -> Any:
        """[1] for all, [H * D] or [1, H, 1, D] for each channel."""
        if self.scale.size == 1 or self.scale.ndim == 4:
            return xp.reshape(self.scale, ()) if self.scale.size == 1 else self.scale
        return xp.reshape(self.scale, (1, self.past.shape[1], 1, -1))


def _grow(xp: Any, caches: list[Cache], k: Any, v: Any, at: Positions, total: int, window: int) -> tuple[Any, Any, Any]:
    """Presents of max(past, total) rows with the new rows at their positions, and what attention reads of them."""
    pairs = []
    for cache, new in zip(caches, (k, v), strict=True):
        present = append(xp, cache.past, cache.stored(xp, new), at, total)
        pairs.append((present, cache.loaded(xp, present[:, :, :total], xp.dtype_of(new))))
    return *pairs, xp.arange(pairs[0][1].shape[2], dtype=np.int32)[None]


def append(xp: Any, past: Any, new: Any, at: Positions, total: int) -> Any:
    """The new rows behind the past ones of each batch entry, in a buffer of max(past, total) rows."""
    batch, heads, rows, size = new.shape
    length = 0 if past is None else past.shape[2]
    if length == 0 and rows == total:
        return new
    if length < total:
        filler = xp.zeros((batch, heads, total - length, size), dtype=xp.dtype_of(new))
        past = filler if past is None else xp.concatenate([past, filler], axis=2)
    if batch == 1:
        return xp.slice_update(past, new, (0, 0, at.past[0], 0))
    if not at.is_padded:
        entry = xp.arange(batch, dtype=np.int32)[:, None]
        row = at.past[:, None] + xp.arange(rows, dtype=np.int32)
        return xp.scatter(past, (entry, slice(None), row), xp.swapaxes(new, 1, 2))
    source = xp.arange(past.shape[2], dtype=np.int32) - at.past[:, None]  # which new row stands at each row
    is_new = xp.logical_and(source >= 0, source < at.new[:, None])[:, None, :, None]
    index = xp.broadcast_to(xp.clip(source, 0, rows - 1)[:, None, :, None], past.shape)
    return xp.where(is_new, xp.take_along_axis(new, index, axis=2), past)


def _slide(
    xp: Any, caches: list[Cache], k: Any, v: Any, at: Positions, total: int, window: int
) -> tuple[Any, Any, Any]:
    """A cache of the last L(T) positions of each entry: attention sees past and new rows, then the old ones leave."""
    capacity, rows = caches[0].past.shape[2], k.shape[2]
    if not 0 < window <= capacity:
        raise InvalidInput(
            f"sliding_window_cache with local_window_size={window} and a cache of {capacity} rows.",
            why="the cache must hold the whole window.",
            fix="allocate at least local_window_size rows.",
        )
    before, after = (_resident(xp, count, capacity, window) for count in (at.past, at.total))
    row = xp.arange(capacity, dtype=np.int32)
    old = xp.where(row < before[:, None], (at.past - before)[:, None] + row, -1)
    fresh = xp.arange(rows, dtype=np.int32)
    fresh = xp.where(fresh < at.new[:, None], at.past[:, None] + fresh, -1)
    kept = (at.total - after)[:, None] + row  # absolute position of each row of the new cache
    source = xp.where(kept < at.past[:, None], kept - (at.past - before)[:, None], capacity + kept - at.past[:, None])
    source = xp.clip(source, 0, capacity + rows - 1)[:, None, :, None]
    pairs = []
    for cache, new in zip(caches, (k, v), strict=True):
        staged = xp.concatenate([cache.past, cache.stored(xp, new)], axis=2)
        index = xp.broadcast_to(source, cache.past.shape)
        pairs.append((xp.take_along_axis(staged, index, axis=2), cache.loaded(xp, staged, xp.dtype_of(new))))
    return *pairs, xp.concatenate([old, fresh], axis=1)


def _resident(xp: Any, total: Any, capacity: int, window: int) -> Any:
    """L(T): how many positions a window cache holds after T tokens; it lets go of several at once."""
    step = capacity - window + 1
    return total - step * (xp.maximum(total - capacity + step - 1, 0) // step)
