"""Integers of 4 and 2 bits that are packed as ONNX stores them: operators of passes, not of models."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np

from ep.ops.packed_weights import unpack
from ep.ops.quantization import dequantize_linear
from ep.registry import op


@op("Unpack", domain="ep")
def unpack_integers(xp, x, *, dtype, shape):
    return xp.astype(_bytes(xp, x, dtype, shape), np.dtype(getattr(ml_dtypes, dtype)))


@op("DequantizePacked", domain="ep")
def dequantize_packed(
    xp, x, x_scale, x_zero_point=None, *, dtype, shape, axis=1, block_size=0, output_dtype=0,
):  # fmt: skip
    """DequantizeLinear of packed integers; zero points have a byte each."""
    numbers = _bytes(xp, x, dtype, shape)
    return dequantize_linear(
        xp, numbers, x_scale, x_zero_point, axis=axis, block_size=block_size, output_dtype=output_dtype
    )


def _bytes(xp: Any, x: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    """The integers in a byte each, signed if `dtype` is."""
    bits = 4 if dtype.endswith("4") else 2
    numbers = xp.reshape(unpack(xp, x, bits)[: math.prod(shape)], shape)
    if dtype.startswith("u"):
        return numbers
    half = 1 << (bits - 1)
    return xp.astype(xp.bitwise_xor(numbers, half), np.int8) - half
