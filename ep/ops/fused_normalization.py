"""Normalisations that onnxruntime fuses with what comes before or after: residual sums, embeddings, SiLU."""

from __future__ import annotations

from typing import Any

import numpy as np

from ep.errors import InvalidInput
from ep.ops.convolution import channels_first, channels_last
from ep.ops.limits import along
from ep.ops.normalization import grouped, rms_factor, standardize
from ep.ops.precision import wide
from ep.registry import op

MS = "com.microsoft"


def _sum(xp: Any, *terms: Any) -> Any:
    """Sum of those terms that are present, in float32 at least."""
    total = None
    for term in terms:
        if term is not None:
            total = wide(xp, term) if total is None else total + wide(xp, term)
    return total


@op("SkipLayerNormalization", domain=MS, out=(0, "float32", "float32", 0))
def skip_layer_normalization(xp, x, skip, gamma, beta=None, bias=None, *, epsilon=1e-12):
    total = _sum(xp, x, skip, bias)
    y, mean, factor = standardize(xp, total, (x.ndim - 1,), epsilon)
    y = _sum(xp, y * wide(xp, gamma), beta)
    dtype = xp.dtype_of(x)
    return xp.astype(y, dtype), mean, factor, xp.astype(total, dtype)


@op("SkipSimplifiedLayerNormalization", domain=MS, out=(0, "float32", "float32", 0))
def skip_simplified_layer_normalization(xp, x, skip, gamma, bias=None, *, epsilon=1e-12):
    total = _sum(xp, x, skip, bias)
    factor = rms_factor(xp, total, (x.ndim - 1,), epsilon)
    dtype = xp.dtype_of(x)
    mean = xp.mean(total, axis=-1, keepdims=True)
    return xp.astype(total * factor * wide(xp, gamma), dtype), mean, factor, xp.astype(total, dtype)


@op("EmbedLayerNormalization", domain=MS, out=(2, "int32", 2))
def embed_layer_normalization(
    xp,
    input_ids: along("word_embedding", 0, wraps=False),
    segment_ids: along("segment_embedding", 0, wraps=False),
    word_embedding,
    position_embedding,
    segment_embedding,
    gamma,
    beta,
    mask=None,
    position_ids: along("position_embedding", 0, wraps=False) = None,
    *,
    epsilon=1e-12,
    mask_index_type=None,
):
    words = xp.take(word_embedding, input_ids, axis=0)
    if position_ids is None:
        positions = position_embedding[: input_ids.shape[1]][None]
    else:
        positions = xp.take(position_embedding, position_ids, axis=0)
    segments = None if segment_embedding is None else xp.take(segment_embedding, segment_ids, axis=0)
    total = _sum(xp, words, positions, segments)
    y = standardize(xp, total, (2,), epsilon)[0] * wide(xp, gamma) + wide(xp, beta)
    dtype = xp.dtype_of(word_embedding)
    return xp.astype(y, dtype), _mask_index(xp, input_ids, mask), xp.astype(total, dtype)


@op("QEmbedLayerNormalization", domain=MS, out=("float32", "int32"))
def q_embed_layer_normalization(
    xp, input_ids: along("word_embedding_quant", 0, wraps=False),
    segment_ids: along("segment_embedding", 0, wraps=False), word_embedding_quant, position_embedding_quant,
    segment_embedding, gamma_quant, beta_quant, mask=None, word_embedding_scale=None, position_embedding_scale=None,
    segment_embedding_scale=None, gamma_scale=None, beta_scale=None, word_embedding_zero_point=None,
    position_embedding_zero_point=None, segment_embedding_zero_point=None, gamma_zero_point=None, beta_zero_point=None,
    *, epsilon=1e-12,
):  # fmt: skip
    parameters = (
        (word_embedding_quant, word_embedding_scale, word_embedding_zero_point),
        (position_embedding_quant, position_embedding_scale, position_embedding_zero_point),
        (segment_embedding, segment_embedding_scale, segment_embedding_zero_point),
        (gamma_quant, gamma_scale, gamma_zero_point),
        (beta_quant, beta_scale, beta_zero_point),
    )
    words, positions, segments, gamma, beta = (_dequantized(xp, *parameter) for parameter in parameters)
    return embed_layer_normalization(
        xp, input_ids, segment_ids, words, positions, segments, gamma, beta, mask, epsilon=epsilon
    )[:2]


def _dequantized(xp: Any, x: Any, scale: Any, zero_point: Any) -> Any:
    if x is None:
        return None
    scale, zero_point = xp.reshape(scale, ()), xp.reshape(zero_point, ())
    return (xp.astype(x, np.float32) - xp.astype(zero_point, np.float32)) * scale


def _mask_index(xp: Any, input_ids: Any, mask: Any) -> Any:
    """How many words of each sentence are not masked; zeros without a mask, as onnxruntime returns them."""
    if mask is None:
        return xp.zeros((input_ids.shape[0],), dtype=np.int32)
    return xp.sum(xp.astype(mask == 1, np.int32), axis=1)


@op("GroupNorm", domain=MS)
def group_norm(xp, x, gamma, beta, *, activation, channels_last: int = 1, epsilon=1e-5, groups):
    return xp.astype(
        _group_norm(xp, wide(xp, x), gamma, beta, activation, channels_last, epsilon, groups), xp.dtype_of(x)
    )


@op("SkipGroupNorm", domain=MS, out=(0, 0))
def skip_group_norm(xp, x, gamma, beta, skip, bias=None, *, activation, channels_last: int = 1, epsilon=1e-5, groups):
    if skip.ndim == 2:  # one vector per image
        skip = skip[:, None, None, :]
    if not channels_last and skip.shape != x.shape:
        skip = channels_first(xp, skip)
    if bias is not None and not channels_last:
        bias = xp.reshape(bias, (-1, 1, 1))
    total = _sum(xp, x, skip, bias)
    y = _group_norm(xp, total, gamma, beta, activation, channels_last, epsilon, groups)
    return xp.astype(y, xp.dtype_of(x)), xp.astype(total, xp.dtype_of(x))


def _group_norm(
    xp: Any, x: Any, gamma: Any, beta: Any, activation: int, is_last: int, epsilon: float, groups: int
) -> Any:
    if activation not in (0, 1):
        raise InvalidInput(f"activation {activation} is unknown.", fix="use 0 (none) or 1 (SiLU).")
    y = grouped(xp, channels_first(xp, x) if is_last else x, groups, epsilon)
    shape = (1, -1) + (1,) * (x.ndim - 2)
    y = y * xp.reshape(wide(xp, gamma), shape) + xp.reshape(wide(xp, beta), shape)
    y = y * xp.sigmoid(y) if activation else y
    return channels_last(xp, y) if is_last else y


@op("GatedRMSNorm", domain=MS)
def gated_rms_norm(xp, x, scale, gate, *, activation="silu", epsilon=1e-5):
    if activation not in ("silu", "swish", "sigmoid"):
        raise InvalidInput(f"activation {activation!r} is unknown.", fix="use silu, swish or sigmoid.")
    width = scale.shape[0]
    rows = xp.reshape(wide(xp, x), (-1, width))
    y = xp.reshape(rows * rms_factor(xp, rows, (1,), epsilon) * wide(xp, scale), x.shape)
    z = wide(xp, gate)
    opened = xp.sigmoid(z) if activation == "sigmoid" else z * xp.sigmoid(z)
    return xp.astype(y * opened, xp.dtype_of(x))


@op("BranchwiseRMSNorm", domain=MS)
def branchwise_rms_norm(xp, x, scale=None, *, epsilon=1e-5, num_branches=0):
    shape = (*x.shape[:-1], num_branches, x.shape[-1] // num_branches) if num_branches else x.shape
    inner = xp.reshape(wide(xp, x), shape)
    y = inner * rms_factor(xp, inner, (len(shape) - 1,), epsilon)
    if scale is not None:
        flat = scale.shape == (shape[-2] * shape[-1],) and shape[-2] > 1
        y = y * xp.reshape(wide(xp, scale), shape[-2:] if flat else scale.shape)
    return xp.astype(xp.reshape(y, x.shape), xp.dtype_of(x))
