"""How onnxruntime's operators encode positions: rotations of queries and keys, and biases by distance."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ep.errors import InvalidInput
from ep.ops.attention import merge_heads, rotate, split_heads
from ep.ops.axes import scalar
from ep.ops.limits import along, positions
from ep.ops.packed_attention import restored
from ep.ops.precision import wide
from ep.registry import Host, op

MICROSOFT = "com.microsoft"


@op("RotaryEmbedding", domain=MICROSOFT)
def ms_rotary_embedding(
    xp, input, position_ids: positions("cos_cache", "input", "position_ids"), cos_cache, sin_cache, *,
    interleaved=0, is_packed_batching=0, num_heads=0, rotary_embedding_dim=0, scale=1.0,
):  # fmt: skip
    """onnxruntime ignores `scale`, and so does this."""
    length = input.shape[2 if input.ndim == 4 else 1]
    if position_ids.size == 1 and position_ids.ndim == 1:  # the position of the first token
        position_ids = position_ids[:, None] + xp.arange(length, dtype=xp.dtype_of(position_ids))
    cos, sin = (xp.take(table, position_ids, axis=0) for table in (cos_cache, sin_cache))
    return _turned(xp, input, cos, sin, interleaved, num_heads, rotary_embedding_dim)


def _turned(xp: Any, x: Any, cos: Any, sin: Any, interleaved: int, heads: int, size: int) -> Any:
    """x, as [B, L, heads * size] or [B, H, L, D], by angles [B or 1, L, D / 2]."""
    if x.ndim == 4:
        return rotate(xp, x, cos[:, None], sin[:, None], bool(interleaved), size)
    heads = heads or x.shape[2] // (2 * cos.shape[-1])
    return merge_heads(xp, rotate(xp, split_heads(xp, x, heads), cos[:, None], sin[:, None], bool(interleaved), size))


@op("MRotaryEmbedding", domain=MICROSOFT)
def multimodal_rotary_embedding(
    xp, input, position_ids: along("cos_cache", 0, wraps=False), cos_cache, sin_cache, *,
    interleaved=0, is_packed_batching=0, mrope_layout=0, mrope_section, num_heads=0, rotary_embedding_dim=0, scale=1.0,
):  # fmt: skip
    """Every channel follows one of three positions (time, height, width) of its token."""
    stream = _streams(tuple(mrope_section), mrope_layout)
    if len(stream) != cos_cache.shape[1]:
        raise InvalidInput(
            f"mrope_section {tuple(mrope_section)} names {len(stream)} channels; the cache has {cos_cache.shape[1]}.",
            fix="let the sections add up to half of the rotary dimension.",
        )
    stream = xp.asarray(stream)
    cos, sin = (_by_stream(xp, xp.take(table, position_ids, axis=0), stream) for table in (cos_cache, sin_cache))
    return _turned(xp, input, cos, sin, interleaved, num_heads, rotary_embedding_dim)


def _by_stream(xp: Any, rows: Any, stream: Any) -> Any:
    """From rows [3, B, L, D] the one that each channel follows."""
    return xp.where(stream == 2, rows[2], xp.where(stream == 1, rows[1], rows[0]))


def _streams(sections: tuple[int, ...], layout: int) -> np.ndarray:
    """Which of the three positions each channel follows: in sections, or every third one."""
    stream = np.repeat(np.arange(3), sections) if layout == 0 else np.zeros(sum(sections), np.int64)
    if layout == 1:
        for i in (1, 2):
            stream[i : 3 * sections[i] : 3] = i
    return stream


@op("GemmaRotaryEmbedding", domain=MICROSOFT, out=(1, 1))
def gemma_rotary_embedding(xp, emb, q, q_rot, k, k_rot):
    dtype = xp.dtype_of(q)
    cos, sin = (xp.astype(turn(emb), dtype)[:, None] for turn in (xp.cos, xp.sin))
    return q * cos + q_rot * sin, k * cos + k_rot * sin


@op("RelativePositionBias", domain=MICROSOFT)
def relative_position_bias(xp, bias_table, query_length: Host, key_length: Host, *, is_bidirectional=0, max_distance):
    """The table [buckets, heads] lies in memory column by column, as onnxruntime writes it."""
    buckets, heads = bias_table.shape
    distance = np.arange(int(scalar(key_length))) - np.arange(int(scalar(query_length)))[:, None]
    bucket = _bucket(distance, buckets, bool(is_bidirectional), max_distance)
    return xp.take(xp.reshape(bias_table, (heads, buckets)), xp.asarray(bucket), axis=1)[None]


def _bucket(distance: np.ndarray, buckets: int, both_ways: bool, max_distance: int) -> np.ndarray:
    """T5's buckets: one per small distance, then logarithmically wider ones up to max_distance."""
    start = np.zeros_like(distance)
    if both_ways:
        buckets //= 2
        start = np.where(distance > 0, buckets, 0)
        distance = np.abs(distance)
    else:
        distance = np.maximum(-distance, 0)
    exact = buckets // 2
    ratio = np.log(np.maximum(distance, 1).astype(np.float32) / np.float32(exact)) / math.log(max_distance / exact)
    far = np.minimum(exact + (ratio * (buckets - exact)).astype(np.int64), buckets - 1)
    return start + np.where(distance < exact, distance, far)


@op("GatedRelativePositionBias", domain=MICROSOFT)
def gated_relative_position_bias(
    xp, query_layer, query_bias, rel_pos, weight, bias, eco_a, token_offset=None, *, num_heads
):
    x = query_layer + query_bias
    x = x if token_offset is None else restored(xp, x, token_offset)
    x = split_heads(xp, x, num_heads)
    gates = wide(xp, xp.matmul(x, weight) + bias)
    gates = xp.sigmoid(xp.sum(xp.reshape(gates, (*gates.shape[:3], 2, -1)), axis=-1))
    update, reset = gates[..., :1], gates[..., 1:]
    y = (update * (reset * wide(xp, eco_a) - 1.0) + 2.0) * wide(xp, rel_pos)
    return xp.astype(y, xp.dtype_of(query_layer))
