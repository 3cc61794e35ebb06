"""Matrix products of the MLX namespace; MLX multiplies no integers, so these go through float32, exactly."""

from __future__ import annotations

from functools import reduce
from typing import Any

import mlx.core as mx

from ep.backends.mlx.dtypes import INTEGERS, mlx_dtype


def matmul(a: Any, b: Any, dtype: Any = None) -> mx.array:
    target = a.dtype if dtype is None else mlx_dtype(dtype)
    if a.dtype in INTEGERS:
        return _integer_matmul(a, b, target)
    return mx.matmul(a.astype(target), b.astype(target))


def int8_factor(b: Any) -> mx.array:
    return b.astype(mx.float32)


def _integer_matmul(a: Any, b: Any, target: mx.Dtype) -> mx.array:
    """Sums the products of the operands' bytes; partial sums stay below 2^24, where float32 is exact."""
    if a.ndim == 1 or b.ndim == 1:
        result = _integer_matmul(a[None] if a.ndim == 1 else a, b[:, None] if b.ndim == 1 else b, target)
        result = mx.squeeze(result, -1) if b.ndim == 1 else result
        return mx.squeeze(result, -1 if b.ndim == 1 else -2) if a.ndim == 1 else result
    signed = a.dtype == mx.int8 and b.dtype in (mx.int8, mx.float32)
    chunk = SIGNED_CHUNK if signed else CHUNK
    total: Any = None
    for i, left in enumerate(_bytes(a)):
        for j, right in enumerate(_bytes(b)):
            if i + j < target.size:
                part = _chunked(left, right, target, chunk)
                part = mx.left_shift(part, 8 * (i + j)) if i + j else part
                total = part if total is None else total + part
    return total


def _bytes(x: Any) -> list[mx.array]:
    """Digits of x to the base 256 as float32, least significant first; the last one carries the sign."""
    if x.dtype.size == 1 or x.dtype == mx.float32:
        return [x.astype(mx.float32)]
    low = [(mx.right_shift(x, 8 * i) & 255).astype(mx.float32) for i in range(x.dtype.size - 1)]
    return [*low, mx.right_shift(x, 8 * (x.dtype.size - 1)).astype(mx.float32)]


CHUNK = 256  # 255 · 255 · 256 < 2^24
SIGNED_CHUNK = 1024  # 128 · 128 · 1024 = 2^24


def _chunked(a: Any, b: Any, target: mx.Dtype, chunk: int) -> mx.array:
    length = a.shape[-1]
    if length <= chunk:
        return _exact(mx.matmul(a, b), target)
    missing = -length % chunk
    if missing:
        a = mx.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, missing)])
        b = mx.pad(b, [(0, 0)] * (b.ndim - 2) + [(0, missing), (0, 0)])
    a = mx.swapaxes(mx.unflatten(a, -1, (-1, chunk)), -3, -2)
    b = mx.unflatten(b, -2, (-1, chunk))
    return mx.sum(_exact(mx.matmul(a, b), target), axis=-3).astype(target)


def _exact(product: Any, target: mx.Dtype) -> mx.array:
    return product.astype(mx.int32).astype(target)  # a negative float does not convert to an unsigned integer


def einsum(subscripts: str, *operands: Any) -> mx.array:
    """Subscripts name every axis and the output; integers are multiplied with broadcasting, then summed."""
    if operands[0].dtype not in INTEGERS:
        return mx.einsum(subscripts, *operands)
    inputs, output = subscripts.split("->")
    labels = output + "".join(sorted(set(inputs) - set(output) - {","}))
    pairs = zip(operands, inputs.split(","), strict=True)
    product = reduce(mx.multiply, (_aligned(x, term, labels) for x, term in pairs))
    return mx.sum(product, axis=tuple(range(len(output), len(labels)))).astype(operands[0].dtype)


def _aligned(x: Any, term: str, labels: str) -> mx.array:
    """x with one axis for each of `labels`, of length 1 where it has none."""
    for label in sorted(set(term)):
        while term.count(label) > 1:
            i, j = term.index(label), term.rindex(label)
            x = mx.diagonal(x, axis1=i, axis2=j)
            term = term[:i] + term[i + 1 : j] + term[j + 1 :] + label
    sizes = dict(zip(term, x.shape, strict=True))
    x = mx.transpose(x, [term.index(label) for label in labels if label in term])
    return mx.reshape(x, [sizes.get(label, 1) for label in labels])
