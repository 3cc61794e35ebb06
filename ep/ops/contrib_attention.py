"""Attention of onnxruntime before grouped queries: Attention, MultiHeadAttention and their decoding forms."""

from __future__ import annotations

from typing import Any

import numpy as np

from ep.errors import InvalidInput
from ep.ops.attention import attend, default_scale, merge_heads, split_heads, to_length, window_mask
from ep.ops.contrib_quantization import matmul_integer_to_float
from ep.registry import Outputs, op

MICROSOFT = "com.microsoft"
MASKED = -10000.0  # what onnxruntime adds to the logits of padding: small, but not nothing if all is padding


def padding_bias(xp: Any, mask: Any, batch: int, lq: int, lk: int, value: float) -> Any:
    """A mask in any of onnxruntime's forms as numbers to add to the logits [B, H, lq, lk]; 1 and more mean keep.

    (B) are lengths; (2B) ends, then starts; (3B + 2) lengths, then cumulated lengths; (B, lk) and (B, lq, lk) are
    masks; (B, 1, M, M) is a mask over the whole cache, of which the last lq rows before lk count.
    """
    if mask is None:
        return None
    if mask.ndim == 1:
        key = xp.arange(lk, dtype=np.int32)
        keep = key < xp.reshape(mask[:batch], (batch, 1, 1, 1))
        if mask.shape[0] == 2 * batch and batch:
            keep = xp.logical_and(keep, key >= xp.reshape(mask[batch:], (batch, 1, 1, 1)))
    elif mask.ndim == 4:
        keep = mask[:, :, lk - lq : lk, :lk] > 0
    else:
        keep = (mask[:, None, None] if mask.ndim == 2 else mask[:, None]) > 0
    return xp.where(keep, 0.0, xp.full((), value or MASKED, dtype=np.float32))


def add(a: Any, b: Any) -> Any:
    """The sum of two biases, each of which may be `None`."""
    if a is None or b is None:
        return b if a is None else a
    return a + b


def masked_attention(
    xp: Any, q: Any, k: Any, v: Any, mask: Any, attention_bias: Any, *,
    causal: int, mask_filter_value: float | None, scale: float | None, past: Any, valid: Any,
    stages: bool = False,
) -> Any:  # fmt: skip
    """Attention with onnxruntime's masks; `past` keys precede the queries, `valid` says which keys exist."""
    batch, _, lq, size = q.shape
    lk = k.shape[2]
    if valid is not None:  # masks may end with the keys, which fill a part of the buffer
        mask = to_length(xp, mask, lk) if mask is not None and mask.ndim in (2, 3) else mask
        attention_bias = None if attention_bias is None else to_length(xp, attention_bias, lk)
    bias = padding_bias(xp, mask, batch, lq, lk, mask_filter_value or MASKED)
    if attention_bias is not None:
        bias = add(bias, xp.astype(attention_bias, np.float32))
    allowed = window_mask(xp, lq, lk, past, True) if causal else None
    if valid is not None:
        allowed = valid if allowed is None else xp.logical_and(allowed, valid)
        v = xp.where(xp.swapaxes(valid, 2, 3), v, xp.zeros_like(v))  # what lies beyond may be anything, NaN too
    return attend(xp, q, k, v, default_scale(scale, size), allowed=allowed, bias=bias, stages=stages)


# The cache: either grows by concatenation, or is a buffer of fixed length into which is written


def extend(xp: Any, past: Any, new: Any, length: Any) -> tuple[Any, Any]:
    """Present keys or values [B, H, L, D] and the number of keys before the new ones.

    Without `length` the past is what was given; with it, the past is a buffer whose first `length` rows count.
    """
    if past is None:
        return new, 0
    if length is None:
        return xp.concatenate([past, new], axis=2), past.shape[2]
    start = xp.reshape(xp.astype(length, np.int32), (-1,))[0]
    return xp.slice_update(past, new, (0, 0, start, 0)), start


def written(xp: Any, k: Any, past: Any, lq: int) -> Any:
    """Which rows of a buffer are filled after lq more were written, or `None` when that is known to be all."""
    if isinstance(past, int):
        return None
    return xp.reshape(xp.arange(k.shape[2], dtype=np.int32) < past + lq, (1, 1, 1, -1))


@op("MultiHeadAttention", domain=MICROSOFT, out=(0, 0, 0, 0))
def multi_head_attention(
    xp, query, key=None, value=None, bias=None, key_padding_mask=None, attention_bias=None, past_key=None,
    past_value=None, past_sequence_length=None, cache_indirection=None, *,
    mask_filter_value=None, num_heads, scale=None, unidirectional=0, outputs: Outputs = 1,
):  # fmt: skip
    q, k, v = _heads(xp, query, key, value, bias, num_heads)
    k, past = extend(xp, past_key, k, past_sequence_length)
    v, _ = extend(xp, past_value, v, past_sequence_length)
    result = masked_attention(
        xp, q, _of_beam(xp, k, cache_indirection, past), _of_beam(xp, v, cache_indirection, past), key_padding_mask,
        attention_bias, causal=unidirectional, mask_filter_value=mask_filter_value, scale=scale,
        past=past, valid=written(xp, k, past, q.shape[2]), stages=outputs > 3,
    )  # fmt: skip
    logits = None
    if outputs > 3:  # onnxruntime shows no -inf here
        logits = xp.astype(xp.maximum(result.masked, float(np.finfo(np.float32).min)), xp.dtype_of(query))
    return merge_heads(xp, result.y), k, v, logits


def _heads(xp: Any, query: Any, key: Any, value: Any, bias: Any, heads: int) -> tuple[Any, Any, Any]:
    """Queries, keys and values as [B, H, L, D], from all the ways in which they may be packed."""
    if query.ndim == 5:  # [B, L, H, 3, D]
        parts = [query[:, :, :, i] for i in range(3)]
        return tuple(_biased(xp, p, bias, i) for i, p in enumerate(parts))
    q = xp.reshape(query, (*query.shape[:2], heads, -1))
    if key is None:  # [B, L, 3 * hidden]
        parts = (xp.reshape(x, (*x.shape[:2], heads, -1)) for x in xp.split(query, 3, axis=2))
        return tuple(_biased(xp, part, bias, i) for i, part in enumerate(parts))
    if key.ndim == 5:  # [B, L, H, 2, D]
        return _biased(xp, q, bias, 0), _biased(xp, key[:, :, :, 0], bias, 1), _biased(xp, key[:, :, :, 1], bias, 2)
    if key.ndim == 4:  # already [B, H, L, D], and without bias
        return _biased(xp, q, bias, 0), key, value
    k, v = (xp.reshape(x, (*x.shape[:2], heads, -1)) for x in (key, value))
    return _biased(xp, q, bias, 0), _biased(xp, k, bias, 1), _biased(xp, v, bias, 2)


def _biased(xp: Any, x: Any, bias: Any, part: int) -> Any:
    """[B, L, H, D] plus its part of the bias (queries, keys, values one after the other), as [B, H, L, D]."""
    if bias is not None:
        hidden = x.shape[2] * x.shape[3]
        own = bias[part * hidden :][:hidden] if part < 2 else bias[bias.shape[0] - hidden :]
        x = x + xp.reshape(own, x.shape[2:])
    return xp.swapaxes(x, 1, 2)


def _of_beam(xp: Any, cache: Any, indirection: Any, past: Any) -> Any:
    """The cache [batch * beams, H, L, D] as each beam sees it: every past key comes from the beam that made it."""
    if indirection is None:
        return cache
    batch, beams, _ = indirection.shape
    length = cache.shape[2]
    source = xp.astype(indirection[:, :, :length], np.int32)
    own = xp.arange(beams, dtype=np.int32)[:, None]
    position = xp.arange(length, dtype=np.int32)
    source = xp.where(position < past, source, own)  # [batch, beams, L]
    lanes = xp.reshape(cache, (batch, beams, *cache.shape[1:]))
    index = xp.broadcast_to(source[:, :, None, :, None], lanes.shape)
    return xp.reshape(xp.take_along_axis(lanes, index, axis=1), cache.shape)


@op("DecoderMaskedMultiHeadAttention", domain=MICROSOFT, out=(0, 0, 0, 0))
def decoder_masked_multi_head_attention(
    xp, query, key=None, value=None, mask_index=None, attention_bias=None, past_key=None, past_value=None,
    past_sequence_length=None, beam_width=None, cache_indirection=None, bias=None, *,
    mask_filter_value=None, num_heads, output_qk=0, past_present_share_buffer=0, scale=None, outputs: Outputs = 1,
):  # fmt: skip
    return multi_head_attention(
        xp, query, key, value, bias, mask_index, attention_bias, past_key, past_value,
        past_sequence_length if past_present_share_buffer else None, cache_indirection,
        mask_filter_value=mask_filter_value, num_heads=num_heads, scale=scale, outputs=outputs,
    )  # fmt: skip


# Attention projects its input itself


@op("Attention", domain=MICROSOFT, out=(0, 0))
def ms_attention(
    xp, input, weights, bias=None, mask_index=None, past=None, attention_bias=None, past_sequence_length=None, *,
    do_rotary=0, mask_filter_value=None, num_heads, past_present_share_buffer=0, qkv_hidden_sizes=None,
    rotary_embedding_dim=0, scale=None, unidirectional=0,
):  # fmt: skip
    refuse_rotary(do_rotary)
    projected = xp.matmul(input, weights)
    projected = projected if bias is None else projected + bias
    return _self_attention(
        xp, projected, qkv_hidden_sizes, num_heads, mask_index, past, attention_bias,
        past_sequence_length if past_present_share_buffer else None,
        causal=unidirectional, mask_filter_value=mask_filter_value, scale=scale,
    )  # fmt: skip


def refuse_rotary(do_rotary: int) -> None:
    if do_rotary:
        raise InvalidInput(
            "Attention with do_rotary=1.",
            why="it computes its angles from a base that the node does not name.",
            fix="export with GroupQueryAttention, or with RotaryEmbedding nodes.",
        )


def _self_attention(
    xp: Any, projected: Any, sizes: Any, heads: int, mask: Any, past: Any, attention_bias: Any, length: Any,
    **attributes: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """Output and present [2, B, H, L, D] of queries, keys and values that lie side by side."""
    q, k, v = (split_heads(xp, part, heads) for part in _columns(projected, sizes))
    k, before = extend(xp, None if past is None else past[0], k, length)
    v, _ = extend(xp, None if past is None else past[1], v, length)
    result = masked_attention(
        xp, q, k, v, mask, attention_bias, past=before, valid=written(xp, k, before, q.shape[2]), **attributes
    )
    present = xp.stack([k, v]) if k.shape == v.shape else None
    return merge_heads(xp, xp.astype(result.y, xp.dtype_of(projected))), present


def _columns(x: Any, sizes: Any) -> list[Any]:
    sizes = sizes or (x.shape[-1] // 3,) * 3
    return [x[..., : sizes[0]], x[..., sizes[0] : sizes[0] + sizes[1]], x[..., sizes[0] + sizes[1] :]]


@op("DecoderMaskedSelfAttention", domain=MICROSOFT, out=(0, 0))
def decoder_masked_self_attention(
    xp, input, weights, bias, mask_index, past, attention_bias, past_sequence_length, beam_width=None,
    cache_indirection=None, *, do_rotary=0, mask_filter_value=None, num_heads, past_present_share_buffer=0,
    scale=None,
):  # fmt: skip
    refuse_rotary(do_rotary)
    if cache_indirection is not None:
        raise InvalidInput(
            "DecoderMaskedSelfAttention with cache_indirection.",
            why="beam search inside of a node is made for onnxruntime's CUDA kernels.",
            fix="export the decoder without the BeamSearch operator.",
        )
    return ms_attention(
        xp, input, weights, bias, mask_index, past, attention_bias, past_sequence_length,
        mask_filter_value=mask_filter_value, num_heads=num_heads,
        past_present_share_buffer=past_present_share_buffer, scale=scale,
    )  # fmt: skip


@op("QAttention", domain=MICROSOFT, out=(3, 3))
def qattention(
    xp, input, weight, bias, input_scale, weight_scale, mask_index=None, input_zero_point=None,
    weight_zero_point=None, past=None, *,
    do_rotary=0, mask_filter_value=None, num_heads, past_present_share_buffer=0, scale=None, unidirectional=0,
):  # fmt: skip
    refuse_rotary(do_rotary)
    projected = matmul_integer_to_float(
        xp, input, weight, input_scale, weight_scale, input_zero_point, weight_zero_point, bias
    )
    return _self_attention(
        xp, projected, None, num_heads, mask_index, past, None, None,
        causal=unidirectional, mask_filter_value=mask_filter_value, scale=scale,
    )  # fmt: skip
