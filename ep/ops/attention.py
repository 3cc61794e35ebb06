"""Attention of the ONNX standard, and the parts that all attention operators share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ep.dtypes import onnx_dtype
from ep.errors import InvalidInput
from ep.ops.limits import along
from ep.ops.precision import is_float, wide, wide_dtype
from ep.registry import Body, Outputs, op

# Heads


def split_heads(xp: Any, x: Any, heads: int) -> Any:
    """[batch, length, heads * size] → [batch, heads, length, size]."""
    return xp.swapaxes(xp.reshape(x, (*x.shape[:2], heads, x.shape[2] // heads if heads else 0)), 1, 2)


def merge_heads(xp: Any, x: Any) -> Any:
    """[batch, heads, length, size] → [batch, length, heads * size]."""
    return xp.reshape(xp.swapaxes(x, 1, 2), (x.shape[0], x.shape[2], x.shape[1] * x.shape[3]))


def grouped_matmul(xp: Any, a: Any, b: Any, dtype: Any) -> Any:
    """a [B, H, M, K] @ b [B, G, K, N] where H / G consecutive heads of a share one of b, which is not repeated."""
    batch, heads, rows, _ = a.shape
    groups = b.shape[1]
    if heads != groups:
        a = xp.reshape(a, (batch, groups, heads // groups * rows, a.shape[3]))
    y = xp.matmul(a, b, dtype)
    return xp.reshape(y, (batch, heads, rows, b.shape[3]))


# Scaled dot product attention


@dataclass(frozen=True, slots=True)
class Attended:
    """The result of attention; if they were asked for, the stages on the way: logits, capped, masked, probabilities."""

    y: Any
    logits: Any = None
    capped: Any = None
    masked: Any = None
    probabilities: Any = None


def attend(
    xp: Any, q: Any, k: Any, v: Any, scale: float, *,
    allowed: Any = None, bias: Any = None, softcap: float = 0.0, sink: Any = None, dtype: Any = None,
    stages: bool = False,
) -> Attended:  # fmt: skip
    """softmax(cap(q @ kᵀ * scale) + bias) @ v over [B, H, L, D]; a row in which nothing is allowed gives zeros.

    `allowed` (bool) and `bias` broadcast to [B, H, Lq, Lk]; `sink` is one more logit of every row, without a value.
    """
    dtype = np.dtype(dtype or wide_dtype(xp.dtype_of(q)))
    if not stages and not softcap:
        y = _fused(xp, q, k, v, scale, allowed, bias, sink)
        if y is not NotImplemented:
            return Attended(y)
    logits = grouped_matmul(xp, q, xp.swapaxes(k, 2, 3), dtype) * scale
    capped = xp.tanh(logits / softcap) * softcap if softcap else logits
    masked = capped if bias is None else capped + xp.astype(bias, dtype)
    if allowed is not None:
        masked = xp.where(allowed, masked, -math.inf)
    probabilities = masked_softmax(xp, masked, sink, can_be_empty=allowed is not None or bias is not None)
    y = grouped_matmul(xp, xp.astype(probabilities, xp.dtype_of(v)), v, None)
    return Attended(y, logits, capped, masked, probabilities)


def _fused(xp: Any, q: Any, k: Any, v: Any, scale: float, allowed: Any, bias: Any, sink: Any) -> Any:
    """Attention by the kernel of the library, if it has one that takes these arrays."""
    mask = allowed if bias is None else bias
    if allowed is not None and bias is not None:
        mask = xp.where(allowed, bias, -math.inf)
    y = xp.attention(q, k, v, scale, mask, sink)
    if y is NotImplemented or mask is None:
        return y
    seen = xp.any(mask if bias is None else mask > -math.inf, axis=-1, keepdims=True)
    return xp.where(seen, y, xp.zeros_like(y))


def masked_softmax(xp: Any, x: Any, sink: Any = None, can_be_empty: bool = True) -> Any:
    """Softmax of the last axis where rows of -inf give zeros; `sink` is a logit that only takes its share."""
    if not can_be_empty and sink is None and x.shape[-1]:
        return xp.softmax(x, axis=-1)
    if x.shape[-1] == 0:
        return x
    top = xp.max(x, axis=-1, keepdims=True)
    if sink is not None:
        top = xp.maximum(top, sink)
    top = xp.where(top == -math.inf, xp.zeros_like(top), top)
    weights = xp.exp(x - top)
    total = xp.sum(weights, axis=-1, keepdims=True)
    if sink is not None:
        total = total + xp.exp(sink - top)
    return weights / xp.where(total == 0, xp.ones_like(total), total)


def window_mask(xp: Any, lq: int, lk: int, offset: Any, causal: bool, left: int = -1, right: int = -1) -> Any:
    """Which keys j each query i sees, when it stands at position i + offset: bool [(B, 1,) lq, lk], or `None` for all.

    `offset` is an int or one integer per batch entry; `left` and `right` bound the distance, -1 does not.
    """
    if causal:
        right = 0 if right < 0 else min(right, 0)
    if isinstance(offset, int):
        right = -1 if right >= 0 and offset + right >= lk - 1 else right  # the first query sees the last key
        left = -1 if left >= 0 and offset + lq - 1 <= left else left  # the last query sees the first key
        position = xp.arange(offset, offset + lq, dtype=np.int32)[:, None]
    else:
        position = xp.arange(lq, dtype=np.int32)[:, None] + xp.reshape(xp.astype(offset, np.int32), (-1, 1, 1, 1))
    key = xp.arange(lk, dtype=np.int32)
    allowed = key <= position + right if right >= 0 else None
    if left >= 0:
        near = key >= position - left
        allowed = near if allowed is None else xp.logical_and(allowed, near)
    return allowed


def both(xp: Any, a: Any, b: Any) -> Any:
    """The conjunction of two masks, each of which may be `None`."""
    if a is None or b is None:
        return b if a is None else a
    return xp.logical_and(a, b)


def default_scale(scale: float | None, size: int) -> float:
    return 1 / math.sqrt(size) if not scale else scale


@op("Attention", since=23, inside="softmax_precision")
def attention(
    xp, Q, K, V, attn_mask=None, past_key=None, past_value=None, nonpad_kv_seqlen=None, *,
    is_causal=0, kv_num_heads=None, left_window_size=-1, q_num_heads=None, qk_matmul_output_mode=0,
    right_window_size=-1, scale=None, softcap=0.0, softmax_precision=None, outputs: Outputs = 1,
):  # fmt: skip
    flat = Q.ndim == 3
    if flat:
        Q, K, V = (
            split_heads(xp, Q, q_num_heads),
            split_heads(xp, K, kv_num_heads),
            split_heads(xp, V, kv_num_heads),
        )
    if past_key is not None:
        K, V = xp.concatenate([past_key, K], axis=2), xp.concatenate([past_value, V], axis=2)
    lq, lk = Q.shape[2], K.shape[2]
    offset = past_key.shape[2] if past_key is not None else 0
    if past_key is None and nonpad_kv_seqlen is not None:
        offset = xp.astype(nonpad_kv_seqlen, np.int32) - lq
    allowed = window_mask(xp, lq, lk, offset, bool(is_causal), left_window_size, right_window_size)
    if nonpad_kv_seqlen is not None:
        lengths = xp.reshape(xp.astype(nonpad_kv_seqlen, np.int32), (-1, 1, 1, 1))
        allowed = both(xp, allowed, xp.arange(lk, dtype=np.int32) < lengths)
    bias = None
    if attn_mask is not None:
        attn_mask = to_length(xp, attn_mask, lk)
        if xp.dtype_of(attn_mask) == np.bool_:
            allowed = both(xp, allowed, attn_mask)
        else:
            bias = attn_mask
    precision = wide_dtype(onnx_dtype(softmax_precision)) if softmax_precision else wide_dtype(xp.dtype_of(Q))
    result = attend(
        xp, Q, K, V, default_scale(scale, Q.shape[3]), allowed=allowed, bias=bias, softcap=softcap, dtype=precision,
        stages=outputs > 3,
    )  # fmt: skip
    stages = (result.logits, result.capped, result.masked, result.probabilities)
    stage = xp.astype(stages[qk_matmul_output_mode], xp.dtype_of(Q)) if outputs > 3 else None
    y = xp.astype(result.y, xp.dtype_of(Q))
    return merge_heads(xp, y) if flat else y, K, V, stage


def to_length(xp: Any, mask: Any, length: int) -> Any:
    """A mask that ends before the keys do forbids the rest."""
    missing = length - mask.shape[-1]
    if missing <= 0:
        return mask
    nothing = -math.inf if is_float(xp.dtype_of(mask)) else 0
    return xp.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, missing)], constant_values=nothing)


@op("FlexAttention", domain="ai.onnx.preview", inside="softmax_precision")
def flex_attention(xp, Q, K, V, *, prob_mod: Body = None, scale=None, score_mod: Body = None, softmax_precision=None):
    dtype = onnx_dtype(softmax_precision) if softmax_precision else wide_dtype(xp.dtype_of(Q))
    scores = grouped_matmul(xp, Q, xp.swapaxes(K, 2, 3), wide_dtype(dtype)) * default_scale(scale, Q.shape[3])
    scores = xp.astype(scores, dtype)
    if score_mod is not None:
        (scores,) = score_mod(scores)
    probabilities = xp.astype(xp.softmax(wide(xp, scores), axis=-1), dtype)
    if prob_mod is not None:
        (probabilities,) = prob_mod(probabilities)
    return xp.astype(grouped_matmul(xp, wide(xp, probabilities), wide(xp, V), None), xp.dtype_of(Q))


# Rotary position embedding


@op("RotaryEmbedding", since=23)
def rotary_embedding(
    xp, X, cos_cache, sin_cache, position_ids: along("cos_cache", 0, wraps=False) = None, *,
    interleaved=0, num_heads=None, rotary_embedding_dim=0,
):  # fmt: skip
    if position_ids is not None:
        cos_cache, sin_cache = (xp.take(cache, position_ids, axis=0) for cache in (cos_cache, sin_cache))
    x = X if X.ndim == 4 else split_heads(xp, X, num_heads)
    y = rotate(xp, x, cos_cache[:, None], sin_cache[:, None], bool(interleaved), rotary_embedding_dim)
    return y if X.ndim == 4 else merge_heads(xp, y)


def rotate(xp: Any, x: Any, cos: Any, sin: Any, interleaved: bool, size: int = 0) -> Any:
    """The first `size` (0: all) channels of x [B, H, L, D] turned in pairs by angles [B or 1, 1, L, size / 2]."""
    size = size or x.shape[-1]
    if size % 2 or size > x.shape[-1]:
        raise InvalidInput(f"{size} of {x.shape[-1]} channels cannot be turned in pairs.")
    turned, cos, sin = wide(xp, x[..., :size]), wide(xp, cos), wide(xp, sin)
    half = size // 2
    if interleaved:
        pairs = xp.reshape(turned, (*turned.shape[:-1], half, 2))
        a, b = pairs[..., 0], pairs[..., 1]
    else:
        a, b = turned[..., :half], turned[..., half:]
    parts = [a * cos - b * sin, a * sin + b * cos]
    y = xp.reshape(xp.stack(parts, axis=-1), turned.shape) if interleaved else xp.concatenate(parts, axis=-1)
    y = xp.astype(y, xp.dtype_of(x))
    return y if size == x.shape[-1] else xp.concatenate([y, x[..., size:]], axis=-1)
