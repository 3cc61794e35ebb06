"""SparseAttention (Phi-3-small): grouped queries that see only some blocks of the keys."""

from __future__ import annotations

from typing import Any

import numpy as np

from ep.ops.attention import attend, default_scale, merge_heads
from ep.ops.grouped_query_attention import Positions, append, heads_of, turn, visible
from ep.registry import Host, op


@op("SparseAttention", domain="com.microsoft", out=(0, 0, 0))
def sparse_attention(
    xp, query, key, value, past_key, past_value, block_row_indices: Host, block_col_indices: Host,
    total_sequence_length, key_total_sequence_lengths, cos_cache=None, sin_cache=None, *,
    do_rotary=0, kv_num_heads, num_heads, rotary_interleaved=0, scale=None, sparse_block_size,
):  # fmt: skip
    q, k, v = heads_of(xp, query, key, value, num_heads, kv_num_heads)
    at = Positions.of(xp, key_total_sequence_lengths - 1, None, q.shape[2])
    if do_rotary:
        q, k = (turn(xp, x, cos_cache, sin_cache, None, at, False, rotary_interleaved) for x in (q, k))
    present_key, present_value = append(xp, past_key, k, at, 0), append(xp, past_value, v, at, 0)
    keys = past_key.shape[2]
    allowed, exists = visible(xp, at, q.shape[2], xp.arange(keys, dtype=np.int32)[None], True, -1)
    blocks = _block_mask(block_row_indices, block_col_indices)
    allowed = xp.logical_and(allowed, _of_heads(xp, at, blocks, q.shape, keys, sparse_block_size))
    v = xp.where(exists[..., None], present_value, xp.zeros_like(present_value))
    y = attend(xp, q, present_key, v, default_scale(scale, q.shape[3]), allowed=allowed).y
    return merge_heads(xp, xp.astype(y, xp.dtype_of(query))), present_key, present_value


def _block_mask(rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Compressed rows as a dense mask [layouts, blocks, blocks]."""
    layouts, blocks = rows.shape[0], rows.shape[1] - 1
    mask = np.zeros((layouts, blocks, blocks), bool)
    for layout in range(layouts):
        counts = np.diff(rows[layout])
        mask[layout, np.repeat(np.arange(blocks), counts), columns[layout, : counts.sum()]] = True
    return mask


def _of_heads(xp: Any, at: Positions, blocks: np.ndarray, shape: tuple[int, ...], keys: int, size: int) -> Any:
    """The mask [B, H, L, keys] of each query; the layouts take turns among the heads."""
    batch, heads, rows, _ = shape
    layouts, count, _ = blocks.shape
    per_key = np.repeat(blocks, size, axis=2)[:, :, :keys]
    per_key = np.pad(per_key, [(0, 0), (0, 0), (0, keys - per_key.shape[2])])
    row = xp.clip((at.past[:, None] + xp.arange(rows, dtype=np.int32)) // size, 0, count - 1)
    mask = xp.swapaxes(xp.take(xp.asarray(per_key), row, axis=1), 0, 1)  # [B, layouts, L, keys]
    mask = xp.broadcast_to(mask[:, None], (batch, heads // layouts, layouts, rows, keys))
    return xp.reshape(mask, (batch, heads, rows, keys))
