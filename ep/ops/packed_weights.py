"""Weights of 2 to 8 bits in blocks: how they are unpacked, scaled, gathered and multiplied (contrib operators)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ep.errors import InvalidInput
from ep.ops.axes import at, axis_of, ints
from ep.registry import Host, op


def unpack(xp: Any, packed: Any, bits: int) -> Any:
    """The last axis of bytes as a stream of `bits`-wide numbers, low bits first: uint8 [..., bytes * 8 // bits]."""
    if bits == 8:
        return packed
    common = math.gcd(bits, 8)
    group = bits // common  # bytes after which numbers and bytes end together
    if packed.shape[-1] % group:
        missing = -packed.shape[-1] % group
        packed = xp.pad(packed, [(0, 0)] * (packed.ndim - 1) + [(0, missing)])
    parts = xp.reshape(packed, (*packed.shape[:-1], -1, group))
    numbers = [_number(xp, parts, start, bits) for start in range(0, 8 * group, bits)]
    return xp.reshape(xp.stack(numbers, axis=-1), (*packed.shape[:-1], -1))


def _number(xp: Any, parts: Any, start: int, bits: int) -> Any:
    """Bits start … start + bits - 1 of the groups of bytes."""
    byte, shift = divmod(start, 8)
    value = xp.right_shift(parts[..., byte], shift) if shift else parts[..., byte]
    if shift + bits > 8:
        value = xp.bitwise_or(value, xp.left_shift(parts[..., byte + 1], 8 - shift))
    return xp.bitwise_and(value, 2**bits - 1)


def block_weights(xp: Any, packed: Any, scales: Any, zero_points: Any, bits: int, dtype: np.dtype) -> Any:
    """(q - zero_point) * scale of packed blocks [..., blocks, bytes] with scales [..., blocks]: [..., blocks, size]."""
    numbers = xp.astype(unpack(xp, packed, bits), dtype)
    if zero_points is None:
        numbers = numbers - 2 ** (bits - 1)
    else:
        numbers = numbers - xp.astype(block_zero_points(xp, zero_points, scales.shape, bits), dtype)[..., None]
    return numbers * xp.astype(scales, dtype)[..., None]


def block_zero_points(xp: Any, zero_points: Any, shape: tuple[int, ...], bits: int) -> Any:
    """Zero points in the shape of the scales; uint8 ones are packed like the weights, each row to whole bytes."""
    if xp.dtype_of(zero_points) == np.uint8:
        rows = xp.reshape(zero_points, (*shape[:-1], -(-shape[-1] * bits // 8)))
        zero_points = unpack(xp, rows, bits)[..., : shape[-1]]
    return xp.reshape(zero_points, shape)


@op("MatMulNBits", domain="com.microsoft")
def matmul_nbits(
    xp, A, B, scales, zero_points=None, g_idx=None, bias=None, *,
    K, N, bits=4, block_size, accuracy_level=0, weight_prepacked=0,
):  # fmt: skip
    """Activations stay floats at every accuracy level: 4 only allows onnxruntime to quantize them."""
    if weight_prepacked:
        raise InvalidInput(
            f"MatMulNBits with weight_prepacked={weight_prepacked}.",
            why="those weights are laid out for one kind of NVIDIA GPU.",
            fix="export the model with weight_prepacked=0.",
        )
    dtype = xp.dtype_of(A)
    if B.size == 0:  # an optional projection that was left out
        y = xp.zeros((*A.shape[:-1], N), dtype=dtype)
    else:
        y = xp.matmul(A, xp.swapaxes(_columns(xp, B, scales, zero_points, g_idx, K, N, bits, block_size, dtype), 0, 1))
    return y if bias is None else y + bias


def _columns(
    xp: Any,
    B: Any,
    scales: Any,
    zero_points: Any,
    g_idx: Any,
    K: int,
    N: int,
    bits: int,
    block_size: int,
    dtype: Any,
) -> Any:
    """The weights of MatMulNBits, [N, K]."""
    blocks = -(-K // block_size)
    B = xp.reshape(B, (N, blocks, block_size * bits // 8))
    scales = xp.reshape(scales, (N, blocks))
    if g_idx is None:
        return xp.reshape(block_weights(xp, B, scales, zero_points, bits, dtype), (N, -1))[:, :K]
    numbers = xp.astype(xp.reshape(unpack(xp, B, bits), (N, -1))[:, :K], dtype)
    group = g_idx[:K]
    if zero_points is None:
        zeros = 2 ** (bits - 1)
    else:
        zeros = xp.take(xp.astype(block_zero_points(xp, zero_points, (N, blocks), bits), dtype), group, axis=1)
    return (numbers - zeros) * xp.take(xp.astype(scales, dtype), group, axis=1)


@op("GatherBlockQuantized", domain="com.microsoft", out=(2,))
def gather_block_quantized(
    xp, data, indices, scales, zero_points=None, *, bits=4, block_size=128, gather_axis=0, quantize_axis=1
):
    """Gather, then dequantize what was gathered; an index out of range gives zeros."""
    rank = data.ndim
    gather, quantize = axis_of(gather_axis, rank), axis_of(quantize_axis, rank)
    is_packed = xp.dtype_of(data) == np.uint8
    size = data.shape[gather]
    inside = xp.logical_and(indices >= -size, indices < size)
    rows = xp.where(inside, indices, xp.zeros_like(indices))
    rows = xp.where(rows < 0, rows + size, rows)
    numbers = xp.take(data, rows, axis=gather)
    factor = _gathered(xp, scales, rows, gather, gather == quantize, block_size)
    offset = None if zero_points is None else _gathered(xp, zero_points, rows, gather, gather == quantize, block_size)
    dtype = xp.dtype_of(scales)
    if is_packed:
        numbers = unpack(xp, numbers, bits)
        offset = None if offset is None else unpack(xp, offset, bits)[..., : factor.shape[-1]]
    numbers = xp.astype(numbers, dtype)
    if gather != quantize:
        axis = quantize + (indices.ndim - 1 if quantize > gather else 0)
        factor = _repeat(xp, factor, numbers.shape, axis, block_size)
        offset = _repeat(xp, offset, numbers.shape, axis, block_size)
    if offset is not None:
        numbers = numbers - xp.astype(offset, dtype)
    elif is_packed:
        numbers = numbers - 2 ** (bits - 1)
    kept = xp.reshape(inside, (*inside.shape, *(1,) * (rank - gather - 1)))
    return xp.where(kept, numbers * factor, xp.zeros_like(numbers))


def _gathered(xp: Any, x: Any, rows: Any, axis: int, in_blocks: bool, block_size: int) -> Any:
    """Scales or zero points of the gathered elements; one row may stand for all."""
    if in_blocks and block_size:
        rows = rows // block_size
    return xp.take(x, rows if x.shape[axis] > 1 else xp.zeros_like(rows), axis=axis)


def _repeat(xp: Any, x: Any, shape: tuple[int, ...], axis: int, block_size: int) -> Any:
    """One value per block as one per element of the axis."""
    if x is None or x.shape[axis] == 1:
        return x
    return xp.repeat(x, block_size, axis=axis)[at(axis, slice(0, shape[axis]))]


FP4 = [0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4]
NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip
CODES = {0: [*FP4, *(-x for x in FP4)], 1: NF4}


@op("MatMulBnb4", domain="com.microsoft")
def matmul_bnb4(xp, A, B, absmax, *, K, N, block_size, quant_type, training_mode=0, transB=1):
    """Weights [N, K] as 4-bit codes of a table, high half of each byte first, flattened and scaled in blocks."""
    dtype = xp.dtype_of(A)
    codes = xp.stack([xp.right_shift(B, 4), xp.bitwise_and(B, 15)], axis=-1)
    table = xp.asarray(np.asarray(CODES[quant_type], np.float32).astype(dtype))
    values = xp.take(table, xp.reshape(xp.astype(codes, np.int32), (-1,)), axis=0)[: N * K]
    scales = xp.repeat(xp.reshape(absmax, (-1,)), block_size, axis=0)[: N * K]
    w = xp.reshape(values * xp.astype(scales, dtype), (N, K))
    return xp.matmul(A, xp.swapaxes(w, 0, 1) if transB else w)


# Of MatMulFpQ4, by blk_quant_type: elements of a block, and whether it has a zero point.
FPQ4_BLOCKS = {0: (32, False), 1: (32, True), 2: (64, False), 4: (128, False)}


@op("MatMulFpQ4", domain="com.microsoft")
def matmul_fp_q4(xp, A, B, B_shape: Host, *, blk_quant_type=1):
    """B holds each column's blocks in turn: a float32 scale, a zero point (if any), then four bits per element.

    Of every 32 elements, the first half lies in the low bits of 16 bytes and the second in the high ones.
    """
    if blk_quant_type not in FPQ4_BLOCKS:
        raise InvalidInput(f"blk_quant_type is {blk_quant_type}.", fix="use 0, 1 or 2.")
    size, has_zero = FPQ4_BLOCKS[blk_quant_type]
    rows, columns = ints(B_shape)
    start = 5 if has_zero else 4
    blocks = xp.reshape(B, (columns, -(-rows // size), start + size // 2))
    scale = xp.bitcast(_words(xp, blocks[..., :4]), np.float32)
    zero = xp.astype(blocks[..., 4:5], np.float32) if has_zero else 8
    packed = xp.reshape(blocks[..., start:], (columns, -1, 16))
    q = xp.concatenate([xp.bitwise_and(packed, 15), xp.right_shift(packed, 4)], axis=-1)
    q = xp.reshape(xp.astype(q, np.float32), (*blocks.shape[:2], size))
    weights = xp.reshape((q - zero) * scale[..., None], (columns, -1))[:, :rows]
    return xp.matmul(A, xp.swapaxes(weights, 0, 1))


def _words(xp: Any, x: Any) -> Any:
    """Groups of four bytes as little-endian uint32."""
    total = xp.astype(x[..., 0], np.uint32)
    for i in range(1, 4):
        total = xp.bitwise_or(total, xp.left_shift(xp.astype(x[..., i], np.uint32), 8 * i))
    return total
