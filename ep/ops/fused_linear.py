"""Matrix products that onnxruntime fuses with transpositions, scales, biases, norms and activations."""

from __future__ import annotations

from typing import Any

import numpy as np

from ep.dtypes import onnx_dtype
from ep.errors import InvalidInput
from ep.ops.cast import cast_to
from ep.ops.contrib_activation import fast_gelu
from ep.ops.fused_normalization import skip_simplified_layer_normalization
from ep.ops.linear import gemm
from ep.ops.packed_weights import matmul_nbits
from ep.registry import OPS, Factor, op

MICROSOFT = "com.microsoft"


@op("FusedMatMul", domain=MICROSOFT)
def fused_matmul(xp, A, B: Factor, *, alpha=1.0, transA=0, transB=0, transBatchA=0, transBatchB=0):
    y = xp.matmul(_turned(xp, A, transA, transBatchA), _turned(xp, B, transB, transBatchB))
    return y if alpha == 1 else y * alpha


def _turned(xp: Any, x: Any, transpose: int, transpose_batch: int) -> Any:
    """`transpose_batch` moves the first axis before the last one; vectors are never turned."""
    if transpose_batch and x.ndim > 2:
        x = xp.moveaxis(x, 0, x.ndim - 2)
    return xp.swapaxes(x, -1, -2) if transpose and x.ndim > 1 else x


@op("TransposeMatMul", domain=MICROSOFT)
def transpose_matmul(xp, A, B, *, alpha=1.0, transA=0, transB=0):
    return fused_matmul(xp, A, B, alpha=alpha, transA=transA, transB=transB)


@op("FusedMatMulActivation", domain=MICROSOFT)
def fused_matmul_activation(
    xp, A, B, *, activation, activation_alpha=None, activation_axis=None, activation_beta=None,
    activation_gamma=None, alpha=1.0, transA=0, transB=0, transBatchA=0, transBatchB=0,
):  # fmt: skip
    y = fused_matmul(
        xp, A, B, alpha=alpha, transA=transA, transB=transB, transBatchA=transBatchA, transBatchB=transBatchB
    )
    given = {"alpha": activation_alpha, "axis": activation_axis, "beta": activation_beta, "gamma": activation_gamma}
    return activated(xp, y, activation, given)


@op("FusedGemm", domain=MICROSOFT)
def fused_gemm(
    xp, A, B, C=None, *, activation="", activation_alpha=None, activation_beta=None, activation_gamma=None,
    alpha=1.0, beta=1.0, transA=0, transB=0,
):  # fmt: skip
    y = gemm(xp, A, B, C, alpha=alpha, beta=beta, transA=transA, transB=transB)
    return activated(xp, y, activation, {"alpha": activation_alpha, "beta": activation_beta, "gamma": activation_gamma})


def activated(xp: Any, x: Any, name: str, attributes: dict[str, Any]) -> Any:
    """x through the operator of that name, with those of the attributes that are set and that it has."""
    if not name:
        return x
    lowering = OPS.find("", name, 21)
    if lowering is None or lowering.required_inputs != 1:
        raise InvalidInput(f"activation {name!r} is unknown.", fix="use the name of an activation operator of ONNX.")
    known = {k: v for k, v in attributes.items() if v is not None and k in lowering.attributes}
    return lowering.fn(xp, x, **known)


@op("GemmFastGelu", domain=MICROSOFT)
def gemm_fast_gelu(xp, X, W: Factor, bias=None):
    return fast_gelu(xp, xp.matmul(X, W), bias)


# Decoder layers over packed weights


@op("MatMulNBitsQkv", domain=MICROSOFT, out=(0, 0, 0, 0))
def matmul_nbits_qkv(
    xp, A, skip, norm_scale, q_B, q_scales, q_bias, k_B, k_scales, k_bias, v_B, v_scales, v_bias=None, *,
    K, Nkv, Nq, accuracy_level=0, bits=4, block_size, epsilon=9.999999974752427e-07,
):  # fmt: skip
    x, total = _normalized(xp, A, skip, norm_scale, epsilon)
    packed = ((q_B, q_scales, q_bias, Nq), (k_B, k_scales, k_bias, Nkv), (v_B, v_scales, v_bias, Nkv))
    outputs = (
        matmul_nbits(xp, x, w, scales, bias=bias, K=K, N=n, bits=bits, block_size=block_size)
        for w, scales, bias, n in packed
    )
    return *outputs, total


def _normalized(xp: Any, x: Any, skip: Any, scale: Any, epsilon: float) -> tuple[Any, Any]:
    """The RMS norm of x (+ skip), if there is one, and the sum before it."""
    if scale is None:
        return x, x
    normal, _, _, total = skip_simplified_layer_normalization(xp, x, skip, scale, epsilon=epsilon)
    return normal, total


@op("MatMulNBitsMlp", domain=MICROSOFT, out=(0, 0))
def matmul_nbits_mlp(
    xp, A, skip, norm_scale, gate_B, gate_scales, gate_bias, up_B, up_scales, up_bias=None, *,
    K, N, accuracy_level=0, activation, bits=4, block_size, epsilon=9.999999747378752e-06,
):  # fmt: skip
    x, total = _normalized(xp, A, skip, norm_scale, epsilon)
    gate, up = (
        matmul_nbits(xp, x, w, scales, bias=bias, K=K, N=N, bits=bits, block_size=block_size)
        for w, scales, bias in ((gate_B, gate_scales, gate_bias), (up_B, up_scales, up_bias))
    )
    if activation.lower() in ("silu", "swish"):
        gate = gate * xp.sigmoid(gate)
    else:
        gate = activated(xp, gate, activation.capitalize(), {})
    return gate * up, total


@op("GemmFloat8", domain=MICROSOFT, out=("dtype",))
def gemm_float8(
    xp, A, B, C=None, scaleA=None, scaleB=None, scaleY=None, *,
    activation="NONE", alpha=1.0, beta=0.0, dtype=1, transA=0, transB=0,
):  # fmt: skip
    """Scales multiply, as in cuBLASLt: activation(alpha A scaleA @ B scaleB + beta C) scaleY, rounded once."""
    a, b = (_scaled(xp, x, scale) for x, scale in ((A, scaleA), (B, scaleB)))
    y = xp.matmul(xp.swapaxes(a, 0, 1) if transA else a, xp.swapaxes(b, 0, 1) if transB else b) * alpha
    if C is not None and beta:
        y = y + xp.astype(C, np.float32) * beta
    if activation not in GEMM_ACTIVATIONS:
        raise InvalidInput(f"activation is {activation!r}.", fix=f"use one of {', '.join(GEMM_ACTIVATIONS)}.")
    y = activated(xp, y, GEMM_ACTIVATIONS[activation], {})
    return cast_to(xp, y if scaleY is None else y * xp.reshape(scaleY, ()), onnx_dtype(dtype), True)


GEMM_ACTIVATIONS = {"NONE": "", "RELU": "Relu", "GELU": "Gelu"}


def _scaled(xp: Any, x: Any, scale: Any) -> Any:
    x = xp.astype(x, np.float32)
    return x if scale is None else x * xp.reshape(scale, ())
