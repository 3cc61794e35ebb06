"""Which operators have a kernel of MLX's own: norms, and products with packed weights.

On the CPU the fused functions fall back to plain ones; the packed products run there too. Halves are left to
the lowerings on the CPU, where MLX sums them in halves.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ep.backends.mlx.dtypes import HALVES
from ep.backends.mlx.fused import takes
from ep.backends.mlx.target import on_gpu
from ep.ops.mixture_of_experts import Expert, route
from ep.ops.normalization import rms_factor, standardize
from ep.ops.packed_weights import block_zero_points
from ep.registry import Overrides

OVERRIDES = Overrides()
MICROSOFT = "com.microsoft"
BITS = frozenset({2, 3, 4, 5, 6, 8})
BLOCKS = frozenset({32, 64, 128})


# Norms over the last axis. The statistics are lazy: nothing computes them unless they are used.


def _fits(x: Any, axis: int, *weights: Any) -> bool:
    return (
        takes(x)
        and axis in (-1, x.ndim - 1)
        and all(w is None or (w.dtype == x.dtype and w.shape == x.shape[-1:]) for w in weights)
    )


@OVERRIDES.op("LayerNormalization")
@OVERRIDES.op("LayerNormalization", since=17)
def layer_normalization(xp, x, scale, bias=None, *, axis=-1, epsilon=1e-5, stash_type=1):
    if stash_type != 1 or not _fits(x, axis, scale, bias):
        return NotImplemented
    _, mean, factor = standardize(xp, x.astype(mx.float32), (x.ndim - 1,), epsilon)
    return mx.fast.layer_norm(x, scale, bias, epsilon), mean, factor


@OVERRIDES.op("RMSNormalization", since=23)
def rms_normalization(xp, x, scale, *, axis=-1, epsilon=1e-5, stash_type=1):
    if stash_type != 1 or not _fits(x, axis, scale):
        return NotImplemented
    return mx.fast.rms_norm(x, scale, epsilon)


@OVERRIDES.op("SimplifiedLayerNormalization")
def simplified_layer_normalization(xp, x, scale, *, axis=-1, epsilon=1e-5, stash_type=1):
    if stash_type != 1 or not _fits(x, axis, scale):
        return NotImplemented
    return mx.fast.rms_norm(x, scale, epsilon), rms_factor(xp, x.astype(mx.float32), (x.ndim - 1,), epsilon)


@OVERRIDES.op("SkipSimplifiedLayerNormalization", domain=MICROSOFT)
def skip_simplified_layer_normalization(xp, x, skip, gamma, bias=None, *, epsilon=1e-12):
    if not _fits(x, -1, gamma, bias):
        return NotImplemented
    total = _sum(x, skip, bias)
    wide = total.astype(mx.float32)
    mean, factor = mx.mean(wide, axis=-1, keepdims=True), rms_factor(xp, wide, (x.ndim - 1,), epsilon)
    return mx.fast.rms_norm(total, gamma, epsilon), mean, factor, total


@OVERRIDES.op("SkipLayerNormalization", domain=MICROSOFT)
def skip_layer_normalization(xp, x, skip, gamma, beta=None, bias=None, *, epsilon=1e-12):
    if not _fits(x, -1, gamma, beta, bias):
        return NotImplemented
    total = _sum(x, skip, bias)
    _, mean, factor = standardize(xp, total.astype(mx.float32), (x.ndim - 1,), epsilon)
    return mx.fast.layer_norm(total, gamma, beta, epsilon), mean, factor, total


def _sum(x: Any, skip: Any, bias: Any) -> mx.array:
    return x + skip if bias is None else x + skip + bias


# Products with packed weights: a row of uint8 is the same stream of bits as MLX's uint32


@OVERRIDES.op("MatMulNBits", domain=MICROSOFT)
def matmul_nbits(
    xp, A, B, scales, zero_points=None, g_idx=None, bias=None, *,
    K, N, bits=4, block_size, accuracy_level=0, weight_prepacked=0,
):  # fmt: skip
    if weight_prepacked or g_idx is not None or not B.size or A.ndim < 2 or not takes(A):
        return NotImplemented
    if bits not in BITS or block_size not in BLOCKS or scales.dtype != A.dtype or _is_slow(A):
        return NotImplemented
    blocks = -(-K // block_size)
    weights, scales = mx.view(mx.reshape(B, (N, -1)), mx.uint32), mx.reshape(scales, (N, blocks))
    zeros = None if zero_points is None else block_zero_points(xp, zero_points, (N, blocks), bits)
    x = mx.pad(A, [(0, 0)] * (A.ndim - 1) + [(0, blocks * block_size - K)])
    y = _by_packed(x, weights, scales, zeros, bits, block_size)
    return y if bias is None else y + bias


def _is_slow(x: Any) -> bool:
    """On the CPU, MLX unpacks the weights anew for every row: for 4 rows that is slower than a plain product."""
    return x.size > 2 * x.shape[-1] and not on_gpu()


def _by_packed(x: Any, weights: Any, scales: Any, zeros: Any, bits: int, size: int) -> mx.array:
    """x @ ((weights - zeros) * scales)ᵀ; halves would round zeros * scales, so what differs is added in float32."""
    middle = 2 ** (bits - 1)
    is_half = x.dtype in HALVES
    offset = middle if zeros is None or is_half else zeros.astype(scales.dtype)
    y = mx.quantized_matmul(x, weights, scales, -(offset * scales), transpose=True, group_size=size, bits=bits)
    if zeros is None or not is_half:
        return y
    sums = mx.sum(mx.unflatten(x.astype(mx.float32), -1, (-1, size)), axis=-1)
    rest = (middle - zeros.astype(mx.float32)) * scales.astype(mx.float32)
    return (y.astype(mx.float32) + mx.matmul(sums, rest.T)).astype(x.dtype)


@OVERRIDES.op("QMoE", domain=MICROSOFT)
def qmoe(
    xp, input, router_probs, fc1_experts_weights, fc1_scales, fc1_experts_bias, fc2_experts_weights, fc2_scales=None,
    fc2_experts_bias=None, fc3_experts_weights=None, fc3_scales=None, fc3_experts_bias=None, fc1_zero_points=None,
    fc2_zero_points=None, fc3_zero_points=None, router_weights=None, fc1_global_scale=None, fc2_global_scale=None,
    fc1_act_scale=None, fc2_act_scale=None, fc1_act_block_scale=None, fc2_act_block_scale=None, *,
    accuracy_level=0, activation_alpha=1.0, activation_beta=0.0, activation_type="relu", block_size=0,
    expert_weight_bits=4, fc1_expert_weight_bits=None, fc2_expert_weight_bits=None, fc3_expert_weight_bits=None, k=1,
    normalize_routing_weights=0, quant_type="int", swiglu_fusion=0, swiglu_limit=None,
    swiglu_limit_after_activation=0, use_sparse_mixer=0, weights_prepacked=-1,
):  # fmt: skip
    """The weights of the chosen experts are read where they lie; nothing is gathered or unpacked."""
    layers = [
        (fc1_experts_weights, fc1_scales, fc1_experts_bias, fc1_expert_weight_bits or expert_weight_bits),
        (fc2_experts_weights, fc2_scales, fc2_experts_bias, fc2_expert_weight_bits or expert_weight_bits),
        (fc3_experts_weights, fc3_scales, fc3_experts_bias, fc3_expert_weight_bits or expert_weight_bits),
    ]
    layers = layers if fc3_experts_weights is not None else layers[:2]
    zeros = (fc1_zero_points, fc2_zero_points, fc3_zero_points)
    if quant_type != "int" or weights_prepacked == 1 or any(z is not None for z in zeros):
        return NotImplemented
    if not takes(input) or _is_slow(input):
        return NotImplemented
    packed = [_expert_weights(*layer) for layer in layers]
    if any(p is None or p[1].dtype != input.dtype for p in packed):
        return NotImplemented
    expert = Expert(
        activation_type, swiglu_fusion, activation_alpha, activation_beta, swiglu_limit,
        swiglu_limit_after_activation, (),
    )  # fmt: skip
    chosen, shares = route(xp, router_probs, router_weights, k, bool(normalize_routing_weights), bool(use_sparse_mixer))
    chosen = chosen.astype(mx.uint32)
    x = mx.reshape(input, (-1, 1, 1, input.shape[-1]))
    gate = _by_expert(x, packed[2], chosen) if len(packed) > 2 else None
    hidden = expert.activate(xp, _by_expert(x, packed[0], chosen), gate)
    y = mx.squeeze(_by_expert(hidden, packed[1], chosen), 2).astype(mx.float32)
    return mx.reshape(mx.sum(y * shares[..., None], axis=1), input.shape).astype(input.dtype)


def _expert_weights(weights: Any, scales: Any, bias: Any, bits: int) -> tuple[Any, ...] | None:
    """Weights, scales, offsets, bias, size of blocks and bits as MLX takes them; one scale per row becomes many."""
    length = weights.shape[-1] * 8 // bits
    size = length // scales.shape[-1] if scales.ndim == 3 else next((b for b in (128, 64, 32) if length % b == 0), 0)
    if bits not in BITS or size not in BLOCKS or weights.shape[-1] % 4:
        return None
    if scales.ndim == 2:
        scales = mx.repeat(scales[..., None], length // size, axis=-1)
    return mx.view(weights, mx.uint32), scales, -(2 ** (bits - 1)) * scales, bias, size, bits


def _by_expert(x: Any, packed: tuple[Any, ...], chosen: Any) -> mx.array:
    """x [T, 1 or k, 1, K] times the weights of each token's experts [T, k]: [T, k, 1, N]."""
    weights, scales, offsets, bias, size, bits = packed
    y = mx.gather_qmm(x, weights, scales, offsets, rhs_indices=chosen, transpose=True, group_size=size, bits=bits)
    return y if bias is None else y + mx.take(bias, chosen, axis=0)[:, :, None]
