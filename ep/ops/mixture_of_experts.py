"""Mixtures of experts: a router picks k of E feed-forward networks for every token."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ep.errors import InvalidInput
from ep.ops.packed_weights import block_weights, unpack
from ep.ops.precision import wide
from ep.registry import op

JITTER = 0.01  # of SparseMixer: logits further than twice this (relatively) below the best are left out


@dataclass(frozen=True, slots=True)
class Expert:
    """What all experts share: the activation between their layers, and how the arrays of a layer become weights.

    A layer is a tuple of arrays, each with the experts as its first axis; the last one is the bias.
    """

    activation: str
    fusion: int
    alpha: float
    beta: float
    limit: float | None
    limit_after: int
    weights: Sequence[Callable[..., Any]]  # one per layer: arrays without their bias → [..., N, K]

    def apply(self, xp: Any, x: Any, layers: Sequence[tuple[Any, ...]]) -> Any:
        """The networks of `layers` on x [..., T, H]."""
        hidden = self._linear(xp, x, layers[0], 0)
        gate = self._linear(xp, x, layers[2], 2) if len(layers) > 2 else None
        return self._linear(xp, self.activate(xp, hidden, gate), layers[1], 1)

    def _linear(self, xp: Any, x: Any, layer: tuple[Any, ...], index: int) -> Any:
        *arrays, bias = layer
        w = self.weights[index](xp, *arrays)
        y = xp.matmul(x, xp.swapaxes(xp.astype(w, xp.dtype_of(x)), -1, -2))
        return y if bias is None else y + xp.astype(bias[..., None, :], xp.dtype_of(x))

    def activate(self, xp: Any, x: Any, linear: Any) -> Any:
        if self.activation in ("swiglu", "geglu"):
            gate, linear = (x, linear) if self.fusion == 0 else self._halves(x)
            return self._swiglu(xp, gate, linear) if self.activation == "swiglu" else _gelu(xp, gate) * linear
        y = _activation(self.activation)(xp, x)
        return y if linear is None else y * linear

    def _halves(self, x: Any) -> tuple[Any, Any]:
        if self.fusion == 1:
            return x[..., 0::2], x[..., 1::2]
        middle = x.shape[-1] // 2
        return x[..., :middle], x[..., middle:]

    def _swiglu(self, xp: Any, gate: Any, linear: Any) -> Any:
        if self.limit is not None:
            linear = xp.clip(linear, -self.limit, self.limit)
            gate = gate if self.limit_after else xp.minimum(gate, self.limit)
        opened = gate * xp.sigmoid(gate * self.alpha)
        if self.limit is not None and self.limit_after:
            opened = xp.minimum(opened, self.limit)
        return opened * (linear + self.beta)


def _gelu(xp: Any, x: Any) -> Any:
    return 0.5 * x * (1 + xp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


_ACTIVATIONS = {
    "relu": lambda xp, x: xp.maximum(x, 0),
    "relu2": lambda xp, x: xp.maximum(x, 0) ** 2,
    "gelu": _gelu,
    "silu": lambda xp, x: x * xp.sigmoid(x),
    "identity": lambda xp, x: x,
}


def _activation(name: str) -> Callable[[Any, Any], Any]:
    if name in _ACTIVATIONS:
        return _ACTIVATIONS[name]
    raise InvalidInput(
        f"activation_type {name!r} is unknown.", fix=f"use one of {', '.join(_ACTIVATIONS)}, swiglu, geglu."
    )


def route(xp: Any, logits: Any, weights: Any, k: int, normalize: bool, sparse: bool) -> tuple[Any, Any]:
    """The k experts of each token and their shares: [T, k] each."""
    logits = wide(xp, logits)
    if sparse:
        return _sparse_mixer(xp, logits, k)
    _, chosen = xp.topk(logits, k, axis=-1)
    shares = xp.take_along_axis(xp.softmax(logits, axis=-1) if weights is None else wide(xp, weights), chosen, axis=-1)
    if normalize:
        shares = shares / xp.sum(shares, axis=-1, keepdims=True)
    return chosen, shares


def _sparse_mixer(xp: Any, logits: Any, k: int) -> tuple[Any, Any]:
    """SparseMixer without noise (Phi-3.5-MoE): each choice has its share among the logits close to it."""
    chosen, shares, left = [], [], logits
    expert = xp.arange(logits.shape[-1], dtype=np.int64)
    for _ in range(k):
        best = xp.argmax(left, axis=-1, keepdims=True)
        top = xp.take_along_axis(left, best, axis=-1)
        distance = (top - logits) / xp.maximum(xp.abs(logits), top)
        near = xp.where(distance > 2 * JITTER, -math.inf, left)
        shares.append(xp.take_along_axis(xp.softmax(near, axis=-1), best, axis=-1))
        chosen.append(best)
        left = xp.where(expert == best, -math.inf, left)
    return xp.concatenate(chosen, axis=-1), xp.concatenate(shares, axis=-1)


def mix(xp: Any, expert: Expert, layers: Sequence[tuple[Any, ...]], x: Any, chosen: Any, shares: Any) -> Any:
    """The sum of the chosen experts' outputs by their shares, as the shape of x.

    For few tokens the weights of the chosen experts are gathered; for many, every expert runs on all tokens.
    """
    tokens = xp.reshape(x, (-1, x.shape[-1]))
    count, k = chosen.shape
    experts = layers[0][0].shape[0]
    if count * k <= experts:
        index = xp.reshape(chosen, (-1,))
        own = [tuple(None if a is None else xp.take(a, index, axis=0) for a in layer) for layer in layers]
        each = xp.repeat(tokens, k, axis=0)[:, None]
        y = wide(xp, xp.reshape(expert.apply(xp, each, own), (count, k, -1)))
        y = xp.sum(y * shares[:, :, None], axis=1)
    else:
        y = _all_experts(xp, expert, layers, tokens, chosen, shares, experts)
    return xp.astype(xp.reshape(y, x.shape), xp.dtype_of(x))


def _all_experts(
    xp: Any, expert: Expert, layers: Sequence[tuple[Any, ...]], tokens: Any, chosen: Any, shares: Any, experts: int
) -> Any:
    """One expert after the other, so that only one's weights are unpacked at a time."""
    places = [(i, j) for i, layer in enumerate(layers) for j, a in enumerate(layer) if a is not None]
    number = xp.arange(experts, dtype=xp.dtype_of(chosen))
    share = xp.sum(xp.where(chosen[None] == number[:, None, None], shares, 0), axis=-1)  # [E, T]

    def step(carry: Any, xs: Any) -> Any:
        own: list[list[Any]] = [[None] * len(layer) for layer in layers]
        for (i, j), a in zip(places, xs[1:], strict=True):
            own[i][j] = a
        y = wide(xp, expert.apply(xp, tokens, [tuple(layer) for layer in own]))
        return (carry[0] + y * xs[0][:, None],), ()

    start = xp.zeros(tokens.shape, dtype=xp.dtype_of(shares))
    arrays = (share, *(layers[i][j] for i, j in places))
    return xp.scan(step, (start,), arrays)[0][0]


@op("MoE", domain="com.microsoft")
def moe(
    xp, input, router_probs, fc1_experts_weights, fc1_experts_bias, fc2_experts_weights, fc2_experts_bias=None,
    fc3_experts_weights=None, fc3_experts_bias=None, *,
    activation_alpha=1.0, activation_beta=0.0, activation_type="relu", k=1, normalize_routing_weights=0,
    swiglu_fusion=0, swiglu_limit=None, swiglu_limit_after_activation=0, use_sparse_mixer=0,
):  # fmt: skip
    layers = [(fc1_experts_weights, fc1_experts_bias), (fc2_experts_weights, fc2_experts_bias)]
    if fc3_experts_weights is not None:
        layers.append((fc3_experts_weights, fc3_experts_bias))
    expert = Expert(
        activation_type, swiglu_fusion, activation_alpha, activation_beta, swiglu_limit,
        swiglu_limit_after_activation, [lambda xp, w: w] * 3,
    )  # fmt: skip
    chosen, shares = route(xp, router_probs, None, k, bool(normalize_routing_weights), bool(use_sparse_mixer))
    return mix(xp, expert, layers, input, chosen, shares)


@op("QMoE", domain="com.microsoft")
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
    _refuse(quant_type, weights_prepacked)
    layers = [
        (fc1_experts_weights, fc1_scales, fc1_zero_points, fc1_experts_bias),
        (fc2_experts_weights, fc2_scales, fc2_zero_points, fc2_experts_bias),
        (fc3_experts_weights, fc3_scales, fc3_zero_points, fc3_experts_bias),
    ]
    layers = layers if fc3_experts_weights is not None else layers[:2]
    own = (fc1_expert_weight_bits, fc2_expert_weight_bits, fc3_expert_weight_bits)
    expert = Expert(
        activation_type, swiglu_fusion, activation_alpha, activation_beta, swiglu_limit,
        swiglu_limit_after_activation, [_unpacker(bits or expert_weight_bits) for bits in own],
    )  # fmt: skip
    chosen, shares = route(xp, router_probs, router_weights, k, bool(normalize_routing_weights), bool(use_sparse_mixer))
    return mix(xp, expert, layers, input, chosen, shares)


def _refuse(quant_type: str, prepacked: int) -> None:
    if quant_type != "int" or prepacked == 1:
        raise InvalidInput(
            f"QMoE with quant_type={quant_type!r} and weights_prepacked={prepacked}.",
            why="those weights are laid out for onnxruntime's CUDA kernels.",
            fix="export with quant_type='int' and weights_prepacked=0.",
        )


def _unpacker(bits: int) -> Callable[..., Any]:
    """Packed weights [..., N, bytes] with scales [..., N] or [..., N, blocks] → [..., N, K] in the scales' dtype."""

    def weights(xp: Any, packed: Any, scales: Any, zero_points: Any) -> Any:
        dtype = xp.dtype_of(scales)
        if scales.ndim < packed.ndim:  # one scale per row: its zero points are packed along the rows
            numbers = xp.astype(unpack(xp, packed, bits), dtype)
            zeros = 2 ** (bits - 1)
            if zero_points is not None:
                zeros = xp.astype(unpack(xp, zero_points, bits)[..., : scales.shape[-1], None], dtype)
            return (numbers - zeros) * scales[..., None]
        blocks = scales.shape[-1]
        numbers = xp.reshape(packed, (*packed.shape[:-1], blocks, -1))
        w = block_weights(xp, numbers, scales, zero_points, bits, dtype)
        return xp.reshape(w, (*packed.shape[:-1], -1))

    return weights
