"""Dropout: the identity in inference, random zeros in training, and the fused forms of onnxruntime."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ep.ops.precision import wide
from ep.registry import Host, op
from ep.seeds import seed_of


@op("Dropout", since=12, random=True)
def dropout(xp, data, ratio: Host = None, training_mode: Host = None, *, seed=None):
    rate = _rate(ratio, training_mode)
    if rate == 0:
        return data, xp.ones(data.shape, dtype=np.bool_)
    return drop(xp, data, rate, seed)


@op("Dropout", since=10)
def dropout_10(xp, data, *, ratio=0.5):
    return data, xp.ones(data.shape, dtype=np.bool_)


@op("Dropout", since=7)
def dropout_7(xp, data, *, ratio=0.5):
    return data, xp.ones(data.shape, dtype=xp.dtype_of(data))


@op("Dropout", since=1, random=True)
def dropout_1(xp, data, *, consumed_inputs=None, is_test=0, ratio=0.5):
    if is_test or ratio == 0:
        return dropout_7(xp, data)
    y, mask = drop(xp, data, ratio, None)
    return y, xp.astype(mask, xp.dtype_of(data))


def _rate(ratio: Any, training_mode: Any) -> float:
    """The share of dropped elements; nothing is dropped in inference."""
    if training_mode is None or not bool(training_mode):
        return 0.0
    return 0.5 if ratio is None else float(ratio)


def drop(xp: Any, data: Any, rate: float, seed: int | None) -> tuple[Any, Any]:
    """The data with dropped elements, the rest scaled up, and which elements are kept."""
    mask = xp.random_uniform(data.shape, seed_of(seed), 0.0, 1.0, np.float32) >= rate
    kept = xp.where(mask, wide(xp, data) / (1 - rate), 0)
    return xp.astype(kept, xp.dtype_of(data)), mask


@op("BiasDropout", domain="com.microsoft", random=True, out=(0, "bool"))
def bias_dropout(xp, data, bias, residual=None, ratio: Host = None, training_mode: Host = None, *, seed=None):
    y, mask = dropout(xp, data + bias, ratio, training_mode, seed=seed)
    return (y if residual is None else y + residual), mask


@op("BitmaskDropout", domain="com.microsoft", random=True, out=(0, "uint32"))
def bitmask_dropout(xp, data, ratio: Host = None, training_mode: Host = None, *, seed=None):
    y, mask = dropout(xp, data, ratio, training_mode, seed=seed)
    return y, _bits(xp, mask)


@op("BitmaskBiasDropout", domain="com.microsoft", random=True, out=(0, "uint32"))
def bitmask_bias_dropout(xp, data, bias, residual=None, ratio: Host = None, training_mode: Host = None, *, seed=None):
    y, mask = bias_dropout(xp, data, bias, residual, ratio, training_mode, seed=seed)
    return y, _bits(xp, mask)


def _bits(xp: Any, mask: Any) -> Any:
    """32 booleans per uint32, the first one lowest."""
    flat = xp.reshape(mask, (-1,))
    words = math.ceil(flat.shape[0] / 32)
    flat = xp.pad(flat, [(0, 32 * words - flat.shape[0])], constant_values=False)
    weights = xp.asarray((1 << np.arange(32, dtype=np.uint64)).astype(np.uint32))
    return xp.sum(xp.astype(xp.reshape(flat, (words, 32)), np.uint32) * weights, axis=1)
