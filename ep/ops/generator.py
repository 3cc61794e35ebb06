"""Operators that make tensors from numbers: constants, ranges, random numbers, windows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ep.dtypes import named_by, onnx_dtype
from ep.errors import InvalidInput
from ep.ops.axes import ints, scalar
from ep.ops.precision import is_float, wide, wide_dtype
from ep.registry import Host, ShapeOf, op
from ep.seeds import seed_of

# Constants


@op("Constant", since=12)
def constant(
    xp,
    *,
    value=None,
    sparse_value=None,
    value_float=None,
    value_floats=None,
    value_int=None,
    value_ints=None,
    value_string=None,
    value_strings=None,
):
    """Stays a NumPy array; the loader has made sparse values dense."""
    choices = (
        *((value, None), (sparse_value, None), (value_float, np.float32), (value_floats, np.float32)),
        *((value_int, np.int64), (value_ints, np.int64), (value_string, object), (value_strings, object)),
    )
    given = [np.asarray(content, dtype) for content, dtype in choices if content is not None]
    if len(given) != 1:
        raise InvalidInput(f"a Constant has {len(given)} values.", fix="give it exactly one value attribute.")
    return given[0]


@op("Constant", since=11)
def constant_11(xp, *, value=None, sparse_value=None):
    return constant(xp, value=value, sparse_value=sparse_value)


@op("Constant")
def constant_1(xp, *, value):
    return constant(xp, value=value)


@op("ConstantOfShape", since=9)
def constant_of_shape(xp, shape: Host, *, value=None):
    value = np.zeros(1, np.float32) if value is None else value
    return xp.full(ints(shape), value.reshape(-1)[0].item(), dtype=value.dtype)


@op("EyeLike", since=9, out=(named_by("dtype", 0),))
def eye_like(xp, x: ShapeOf, *, dtype=None, k=0):
    rows, columns = x.shape
    return xp.eye(rows, columns, k=k, dtype=onnx_dtype(dtype) if dtype else xp.dtype_of(x))


MOST_STEPS = 1 << 40


@op("Range", since=11)
def range_(xp, start: Host, limit: Host, delta: Host):
    dtype = start.dtype
    start, limit, delta = scalar(start), scalar(limit), scalar(delta)
    if delta == 0:
        raise InvalidInput("the delta of a Range is 0.")
    if is_float(dtype):
        steps = xp.astype(xp.arange(max(0, math.ceil((limit - start) / delta)), dtype=np.int32), wide_dtype(dtype))
        return xp.astype(steps * delta + start, dtype)
    if -((start - limit) // delta) > MOST_STEPS:
        raise InvalidInput(f"a Range from {start} to {limit} has more than {MOST_STEPS:,} elements.")
    return xp.arange(start, limit, delta, dtype=dtype)


@op("Range", since=27)
def range_27(xp, start: Host, limit: Host, delta: Host, *, stash_type=1):
    return range_(xp, start, limit, delta)


# Random numbers


@op("RandomNormal", random=True, out=(named_by("dtype", "float"),))
def random_normal(xp, *, shape, mean=0.0, scale=1.0, dtype=1, seed=None):
    return xp.random_normal(tuple(shape), seed_of(seed), mean, scale, onnx_dtype(dtype))


@op("RandomNormalLike", random=True, out=(named_by("dtype", 0),))
def random_normal_like(xp, x: ShapeOf, *, mean=0.0, scale=1.0, dtype=None, seed=None):
    dtype = onnx_dtype(dtype) if dtype else xp.dtype_of(x)
    return xp.random_normal(tuple(x.shape), seed_of(seed), mean, scale, dtype)


@op("RandomUniform", random=True, out=(named_by("dtype", "float"),))
def random_uniform(xp, *, shape, low=0.0, high=1.0, dtype=1, seed=None):
    return xp.random_uniform(tuple(shape), seed_of(seed), low, high, onnx_dtype(dtype))


@op("RandomUniformLike", random=True, out=(named_by("dtype", 0),))
def random_uniform_like(xp, x: ShapeOf, *, low=0.0, high=1.0, dtype=None, seed=None):
    dtype = onnx_dtype(dtype) if dtype else xp.dtype_of(x)
    return xp.random_uniform(tuple(x.shape), seed_of(seed), low, high, dtype)


@op("Bernoulli", since=15, random=True, out=(named_by("dtype", 0),))
def bernoulli(xp, x, *, dtype=None, seed=None):
    numbers = xp.random_uniform(x.shape, seed_of(seed), 0.0, 1.0, np.float32)
    hit = xp.astype(numbers, wide_dtype(xp.dtype_of(x))) < wide(xp, x)
    return xp.astype(hit, onnx_dtype(dtype) if dtype else xp.dtype_of(x))


@op("Multinomial", since=7, random=True, out=(named_by("dtype", "int32"),))
def multinomial(xp, x, *, dtype=6, sample_size=1, seed=None):
    """Where a uniform number falls between the running sums of the probabilities."""
    limits = xp.cumsum(xp.softmax(wide(xp, x), axis=1), axis=1)
    batch, classes = x.shape
    numbers = xp.random_uniform((batch, sample_size), seed_of(seed), 0.0, 1.0, xp.dtype_of(limits))
    passed = xp.astype(limits[:, None, : classes - 1] <= numbers[:, :, None], np.int32)
    return xp.astype(xp.sum(passed, axis=2), onnx_dtype(dtype))


# Windows of signal processing

WINDOW = (named_by("output_datatype", "float"),)


def window(*coefficients: float) -> Callable[..., Any]:
    """Sums coefficient · cos(2πk·n / N) over k, with alternating signs."""

    def lowering(xp, size: Host, *, output_datatype=1, periodic=1):
        size = scalar(size)
        angle = 2 * np.pi * np.arange(size) / max(1, size if periodic else size - 1)
        terms = [c * np.cos(k * angle) for k, c in reversed(list(enumerate(coefficients)))]  # 0.08 + 0.5 + 0.42 is 1
        return xp.asarray(np.asarray(sum(terms)).astype(onnx_dtype(output_datatype)))

    return lowering


op("HannWindow", since=17, out=WINDOW)(window(0.5, -0.5))
op("HammingWindow", since=17, out=WINDOW)(window(25 / 46, -21 / 46))
op("BlackmanWindow", since=17, out=WINDOW)(window(0.42, -0.5, 0.08))


@op("MelWeightMatrix", since=17, out=WINDOW)
def mel_weight_matrix(
    xp,
    num_mel_bins: Host,
    dft_length: Host,
    sample_rate: Host,
    lower_edge_hertz: Host,
    upper_edge_hertz: Host,
    *,
    output_datatype=1,
):
    """Column i is a triangle over the spectrum from edge i to edge i + 2, with its peak, 1, at edge i + 1."""
    bands, length, rate = scalar(num_mel_bins), scalar(dft_length), scalar(sample_rate)
    mel = [2595 * math.log10(1 + scalar(edge) / 700) for edge in (lower_edge_hertz, upper_edge_hertz)]
    mels = mel[0] + np.arange(bands + 2) * (mel[1] - mel[0]) / (bands + 2)
    hertz = 700 * (10 ** (mels / 2595) - 1)
    edges = np.floor((length + 1) * hertz / rate)
    bins = np.arange(length // 2 + 1)[:, None]
    left, peak, right = edges[:-2], edges[1:-1], edges[2:]
    rising = (bins - left) / np.maximum(peak - left, 1)
    falling = (right - bins) / np.maximum(right - peak, 1)
    weights = np.where(bins < peak, rising, np.where(bins == peak, 1, falling))
    inside = (bins >= left) & ((bins < right) | (bins == peak))
    return xp.asarray(np.where(inside, weights, 0).astype(onnx_dtype(output_datatype)))
