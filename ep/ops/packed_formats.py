"""How are rows of weights in the packed formats of GGUF files read? (GatherPacked of onnxruntime.)

A format is a sequence of blocks, each with its own scales; the layouts are those of the GGUF specification
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) and of ONNX's `DequantizePacked`
(https://onnx.ai/onnx/repo-docs/DequantizePacked.html). Formats with codebooks of hundreds of entries
(IQ2, IQ3) are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from ep.dtypes import onnx_dtype
from ep.errors import InvalidInput, UnsupportedModel
from ep.registry import op

# The 16 values that four bits of IQ4_NL and IQ4_XS stand for.
NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

Blocks = Any  # uint8 [rows, blocks, bytes of a block]


@op("GatherPacked", domain="com.microsoft", out=("output_dtype",))
def gather_packed(xp, data, indices, *, K, output_dtype=16, packed_type):
    """An index outside [0, rows) reads row 0."""
    if packed_type not in FORMATS:
        raise UnsupportedModel(
            f"GatherPacked with packed_type {packed_type}.",
            why=f"known formats are {', '.join(map(str, FORMATS))}; others need codebooks that ep does not have.",
            fix="store the embedding in one of these, such as Q8_0 (8) or Q6_K (14).",
        )
    size, width, decode = FORMATS[packed_type]
    if K % size or data.shape[1] != K // size * width:
        raise InvalidInput(
            f"rows of {data.shape[1]} bytes do not hold {K} elements of format {packed_type}.",
            why=f"the format stores {size} elements in {width} bytes.",
            fix="check K and packed_type.",
        )
    inside = xp.logical_and(indices >= 0, indices < data.shape[0])
    rows = xp.take(data, xp.reshape(xp.where(inside, indices, 0), (-1,)), axis=0)
    values = decode(xp, xp.reshape(rows, (rows.shape[0], K // size, width)))
    return xp.astype(xp.reshape(values, (*indices.shape, K)), onnx_dtype(output_dtype))


# Parts of blocks.


def _bytes_as(xp: Any, blocks: Blocks, dtype: Any) -> Any:
    """All bytes of each block as little-endian numbers of `dtype`, in float32."""
    width = np.dtype(dtype).itemsize
    word = np.dtype(f"u{width}")
    total: Any = 0
    for i in range(width):
        byte = xp.astype(blocks[..., i::width], word)
        total = byte if i == 0 else xp.bitwise_or(total, xp.left_shift(byte, 8 * i))
    return xp.astype(xp.bitcast(total, dtype), np.float32)


def _scale(xp: Any, blocks: Blocks, start: int) -> Any:
    """A float16 of each block: [rows, blocks, 1]."""
    return _bytes_as(xp, blocks[..., start : start + 2], np.float16)


def _halves(xp: Any, q: Any) -> tuple[Any, Any]:
    """The low and the high four bits of bytes."""
    return xp.bitwise_and(q, 15), xp.right_shift(q, 4)


def _nibbles(xp: Any, q: Any) -> Any:
    """The low halves of all bytes, then the high ones."""
    return xp.concatenate(_halves(xp, q), axis=-1)


def _bits(xp: Any, q: Any, shift: int, count: int = 1) -> Any:
    """`count` bits of each byte from bit `shift` on."""
    return xp.bitwise_and(xp.right_shift(q, shift) if shift else q, 2**count - 1)


def _plain(dtype: Any) -> Callable[[Any, Blocks], Any]:
    return lambda xp, blocks: _bytes_as(xp, blocks, dtype)


def _float(xp: Any, q: Any) -> Any:
    return xp.astype(q, np.float32)


# Whole formats: float32 [rows, blocks, elements of a block].


def q4_0(xp: Any, blocks: Blocks) -> Any:
    return (_float(xp, _nibbles(xp, blocks[..., 2:])) - 8) * _scale(xp, blocks, 0)


def q5_0(xp: Any, blocks: Blocks) -> Any:
    """The fifth bits of 32 elements lie in four bytes before their low bits."""
    fifth = xp.stack([_bits(xp, blocks[..., 2:6], i) for i in range(8)], axis=-1)
    fifth = xp.reshape(fifth, (*blocks.shape[:-1], 32))
    q = xp.bitwise_or(_nibbles(xp, blocks[..., 6:]), xp.left_shift(fifth, 4))
    return (_float(xp, q) - 16) * _scale(xp, blocks, 0)


def q8_0(xp: Any, blocks: Blocks) -> Any:
    return _float(xp, xp.bitcast(blocks[..., 2:], np.int8)) * _scale(xp, blocks, 0)


def q5_k(xp: Any, blocks: Blocks) -> Any:
    """Eight groups of 32, each with a scale and a minimum of six bits."""
    scales, minima = _six_bits(xp, blocks[..., 4:16])
    high, low = blocks[..., 16:48], blocks[..., 48:]
    groups = []
    for i in range(4):
        for half, q in enumerate(_halves(xp, low[..., 32 * i : 32 * i + 32])):
            fifth = _bits(xp, high, 2 * i + half)
            groups.append(_float(xp, xp.bitwise_or(q, xp.left_shift(fifth, 4))))
    scale = _scale(xp, blocks, 0) * _float(xp, scales)
    minimum = _scale(xp, blocks, 2) * _float(xp, minima)
    y = xp.stack(groups, axis=-2) * scale[..., None] - minimum[..., None]
    return xp.reshape(y, (*blocks.shape[:-1], 256))


def _six_bits(xp: Any, packed: Any) -> tuple[Any, Any]:
    """Eight scales and eight minima from twelve bytes; the upper two bits of the last four lie elsewhere."""
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    low, high = _halves(xp, third)
    scales = [_bits(xp, first, 0, 6), xp.bitwise_or(low, xp.left_shift(_bits(xp, first, 6, 2), 4))]
    minima = [_bits(xp, second, 0, 6), xp.bitwise_or(high, xp.left_shift(_bits(xp, second, 6, 2), 4))]
    return xp.concatenate(scales, axis=-1), xp.concatenate(minima, axis=-1)


def q6_k(xp: Any, blocks: Blocks) -> Any:
    """Sixteen groups of 16, each with a signed scale of eight bits."""
    scales = _float(xp, xp.bitcast(blocks[..., 192:208], np.int8))
    parts = []
    for i in range(2):
        low, high = blocks[..., 64 * i : 64 * i + 64], blocks[..., 128 + 32 * i : 160 + 32 * i]
        for j, q in enumerate((*_split(_halves(xp, low)[0]), *_split(_halves(xp, low)[1]))):
            parts.append(xp.bitwise_or(q, xp.left_shift(_bits(xp, high, 2 * j, 2), 4)))
    q = xp.reshape(_float(xp, xp.concatenate(parts, axis=-1)) - 32, (*blocks.shape[:-1], 16, 16))
    return xp.reshape(q * (scales * _scale(xp, blocks, 208))[..., None], (*blocks.shape[:-1], 256))


def _split(q: Any) -> tuple[Any, Any]:
    return q[..., :32], q[..., 32:]


def iq4_nl(xp: Any, blocks: Blocks) -> Any:
    return _nonlinear(xp, _nibbles(xp, blocks[..., 2:])) * _scale(xp, blocks, 0)


def iq4_xs(xp: Any, blocks: Blocks) -> Any:
    """Eight groups of 32, each with a scale of six bits."""
    low = xp.stack(_halves(xp, blocks[..., 4:8]), axis=-1)
    high = xp.stack([_bits(xp, blocks[..., 2:4], i, 2) for i in (0, 2, 4, 6)], axis=-1)
    flat = (*blocks.shape[:-1], 8)
    scales = xp.bitwise_or(xp.reshape(low, flat), xp.left_shift(xp.reshape(high, flat), 4))
    scale = _scale(xp, blocks, 0) * (_float(xp, scales) - 32)
    q = xp.reshape(blocks[..., 8:], (*blocks.shape[:-1], 8, 16))
    return xp.reshape(_nonlinear(xp, _nibbles(xp, q)) * scale[..., None], (*blocks.shape[:-1], 256))


def _nonlinear(xp: Any, q: Any) -> Any:
    return xp.take(xp.asarray(np.array(NONLINEAR, np.float32)), xp.astype(q, np.int32), axis=0)


# packed_type: (elements of a block, its bytes, how it is read)
FORMATS: dict[int, tuple[int, int, Callable[[Any, Blocks], Any]]] = {
    0: (1, 4, _plain(np.float32)),
    1: (1, 2, _plain(np.float16)),
    2: (32, 18, q4_0),
    6: (32, 22, q5_0),
    8: (32, 34, q8_0),
    13: (256, 176, q5_k),
    14: (256, 210, q6_k),
    20: (32, 18, iq4_nl),
    23: (256, 136, iq4_xs),
    30: (1, 2, _plain(ml_dtypes.bfloat16)),
}
