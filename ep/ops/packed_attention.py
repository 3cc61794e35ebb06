"""Attention over batches without padding: tokens of all sequences one after the other, and back."""

from __future__ import annotations

from typing import Any

import numpy as np

from ep.ops.attention import attend, default_scale, merge_heads, split_heads
from ep.registry import Host, op

MICROSOFT = "com.microsoft"


@op("RemovePadding", domain=MICROSOFT, out=(0, 1, 1, 1))
def remove_padding(xp, input, sequence_token_count: Host):
    """`token_offset` lists the places of all tokens, then those of all padding."""
    batch, length = input.shape[:2]
    counts = sequence_token_count.astype(np.int32)
    is_token = np.arange(length) < counts[:, None]
    offsets = np.argsort(~is_token.reshape(-1), kind="stable").astype(np.int32)
    tokens = offsets[: int(is_token.sum())]
    y = xp.take(xp.reshape(input, (batch * length, *input.shape[2:])), xp.asarray(tokens), axis=0)
    ends = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    longest = np.array([counts.max(initial=0)], np.int32)
    return y, xp.asarray(offsets.reshape(batch, length)), xp.asarray(ends), xp.asarray(longest)


@op("RestorePadding", domain=MICROSOFT)
def restore_padding(xp, input, token_offset):
    return restored(xp, input, token_offset)


def restored(xp: Any, tokens: Any, token_offset: Any) -> Any:
    """Tokens [T, …] at their places in [B, L, …], zeros elsewhere."""
    batch, length = token_offset.shape
    places = xp.reshape(token_offset, (-1,))[: tokens.shape[0]]
    empty = xp.zeros((batch * length, *tokens.shape[1:]), dtype=xp.dtype_of(tokens))
    return xp.reshape(xp.scatter(empty, (places,), tokens), (batch, length, *tokens.shape[1:]))


@op("PackedAttention", domain=MICROSOFT)
def packed_attention(
    xp, input, weights, bias, token_offset, cumulative_sequence_length, attention_bias=None, *,
    num_heads, qkv_hidden_sizes=None, scale=None,
):  # fmt: skip
    projected = xp.matmul(input, weights) + bias
    sizes = qkv_hidden_sizes or (projected.shape[1] // 3,) * 3
    q, k, v = (projected[:, sum(sizes[:i]) : sum(sizes[: i + 1])] for i in range(3))
    return _attend(xp, q, k, v, token_offset, cumulative_sequence_length, attention_bias, num_heads, scale)


@op("PackedMultiHeadAttention", domain=MICROSOFT)
def packed_multi_head_attention(
    xp, query, key, value, bias, token_offset, cumulative_sequence_length, attention_bias=None, *,
    mask_filter_value=None, num_heads, scale=None,
):  # fmt: skip
    if query.ndim == 4:  # [T, H, 3, D]
        query, key, value = (xp.reshape(query[:, :, i], (query.shape[0], -1)) for i in range(3))
    if bias is not None:
        first, second = query.shape[1], query.shape[1] + key.shape[1]
        query, key, value = query + bias[:first], key + bias[first:second], value + bias[second:]
    return _attend(xp, query, key, value, token_offset, cumulative_sequence_length, attention_bias, num_heads, scale)


def _attend(
    xp: Any, q: Any, k: Any, v: Any, token_offset: Any, ends: Any, bias: Any, heads: int, scale: float | None
) -> Any:
    """Attention of [T, heads * size] within each sequence, by way of the padded form."""
    tokens = q.shape[0]
    q, k, v = (split_heads(xp, restored(xp, x, token_offset), heads) for x in (q, k, v))
    lengths = xp.reshape(ends[1:] - ends[:-1], (-1, 1, 1, 1))
    allowed = xp.arange(k.shape[2], dtype=np.int32) < lengths
    y = merge_heads(xp, attend(xp, q, k, v, default_scale(scale, q.shape[3]), allowed=allowed, bias=bias).y)
    flat = xp.reshape(y, (-1, y.shape[2]))
    return xp.take(flat, xp.reshape(token_offset, (-1,))[:tokens], axis=0)
