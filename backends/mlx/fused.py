"""Attention of the MLX namespace: one kernel on the GPU that never stores the scores."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ep.backends.mlx.dtypes import HALVES
from ep.backends.mlx.target import on_gpu

FLOATS = HALVES | {mx.float32}


def takes(x: Any) -> bool:
    """Whether MLX's fused kernels take the array: on the CPU they sum halves in halves."""
    return x.dtype in FLOATS and x.size > 0 and (x.dtype == mx.float32 or on_gpu())


def attention(q: Any, k: Any, v: Any, scale: float, mask: Any = None, sink: Any = None) -> Any:
    if not takes(q) or k.size == 0 or not q.dtype == k.dtype == v.dtype:
        return NotImplemented
    if mask is not None and mask.dtype != mx.bool_:
        lowest = mx.finfo(q.dtype).min  # a large number of a wider dtype must not become infinite
        mask = mx.where(mask == -mx.inf, mask, mx.maximum(mask, lowest)).astype(q.dtype)
    if sink is not None:
        sink = mx.broadcast_to(mx.reshape(sink, (-1,)), (q.shape[1],)).astype(q.dtype)
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask, sinks=sink)
