"""Do the array namespaces keep their contract (`ep/namespace.py`)? Each must agree with NumPy's."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from conftest import require

import ep.host_namespace as host
from ep.program import Untraceable

RNG = np.random.default_rng(0)
INTEGERS = [np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)]
FLOATS = [np.dtype(t) for t in (np.float16, ml_dtypes.bfloat16, np.float32)]
TOLERANCE = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 2e-5}


@pytest.fixture(params=["jax", "mlx"])
def xp(request: pytest.FixtureRequest) -> Iterator[Any]:
    require(request.param)
    importlib.import_module(f"ep.backends.{request.param}")
    with contextlib.ExitStack() as scope:
        if request.param == "jax":
            import jax

            scope.enter_context(jax.enable_x64(True))
            scope.enter_context(jax.numpy_dtype_promotion("strict"))
        yield importlib.import_module(f"ep.backends.{request.param}.namespace")


def agree(xp: Any, fn: Callable[..., Any], *arrays: np.ndarray) -> None:
    """fn(namespace, *arrays) has the same shape, dtype and values as with NumPy."""
    want, got = fn(host, *arrays), fn(xp, *map(xp.asarray, arrays))
    pairs = zip(want, got, strict=True) if isinstance(want, tuple) else [(want, got)]
    for expected, result in pairs:
        result = xp.to_numpy(result)
        assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
        if expected.dtype.kind in "biu":
            np.testing.assert_array_equal(result, expected)
        else:
            tolerance = TOLERANCE[expected.dtype.name]
            wide = expected.astype(np.float64)
            np.testing.assert_allclose(result.astype(np.float64), wide, rtol=tolerance, atol=tolerance)


def numbers(dtype: np.dtype, *shape: int) -> np.ndarray:
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return RNG.integers(limits.min, limits.max, shape, dtype, endpoint=True)
    return RNG.normal(size=shape).astype(dtype)


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS, np.dtype(np.bool_)], ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)], ids=str)
def test_arrays_come_back_as_they_were(xp, dtype, shape):
    x = numbers(np.dtype(np.int8), *shape).astype(dtype)
    array = xp.asarray(x)
    assert xp.dtype_of(array) == dtype
    result = xp.to_numpy(array)
    assert (result.shape, result.dtype, result.tobytes()) == (shape, dtype, x.tobytes())


def test_float64_is_never_narrowed_silently(xp):
    third = np.asarray(1 / 3)
    assert xp.to_numpy(xp.asarray(third)) == third
    assert xp.to_numpy(xp.asarray(third[()])) == third


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integer_products_are_exact_and_wrap(xp, dtype):
    a, b = numbers(dtype, 2, 4, 600), numbers(dtype, 600, 5)
    agree(xp, lambda xp, a, b: xp.matmul(a, b), a, b)
    agree(xp, lambda xp, a, b: xp.matmul(a, b), a, b[:, 0])
    agree(xp, lambda xp, a, b: xp.matmul(a, b), a[0, 0], b)
    agree(xp, lambda xp, a, b: xp.einsum("bij,jk->kb", a, b), a[..., :9], b[:9])
    agree(xp, lambda xp, a: xp.einsum("iij->ji", a), numbers(dtype, 3, 3, 2))
    if dtype.itemsize == 1:
        agree(xp, lambda xp, a, b: xp.matmul(a, b, np.int32), a, b)


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS], ids=str)
def test_reductions_keep_the_dtype(xp, dtype):
    x = numbers(dtype, 3, 4, 5)
    agree(xp, lambda xp, x: (xp.sum(x, axis=1), xp.prod(x, axis=(0, 2), keepdims=True)), x)
    agree(xp, lambda xp, x: (xp.cumsum(x, 1), xp.cumprod(x, -1), xp.max(x, axis=0), xp.min(x, axis=1)), x)
    agree(xp, lambda xp, x: (xp.argmax(x, 1), xp.argmin(x, axis=-1, keepdims=True)), x)


def test_reductions_of_nothing(xp):
    x = np.zeros((2, 0, 3), np.float32)
    agree(xp, lambda xp, x: (xp.sum(x, axis=1), xp.prod(x, axis=(0, 1)), xp.sum(x, axis=0, keepdims=True)), x)
    agree(xp, lambda xp, x: (xp.all(x == 0, axis=1), xp.any(x == 0, axis=1), xp.cumsum(x, 1)), x)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_sums_of_small_floats_do_not_stall(xp, dtype):
    ones = xp.asarray(np.ones(5000, dtype))
    assert float(xp.to_numpy(xp.sum(ones, axis=0))) == float(dtype.type(5000))
    assert float(xp.to_numpy(xp.mean(ones, axis=0))) == 1


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_functions_of_floats(xp, dtype):
    x = numbers(dtype, 3, 4) * dtype.type(3)
    agree(xp, lambda xp, x: (xp.erf(x), xp.sigmoid(x), xp.sign(x), xp.softmax(x, 1)), x)
    agree(xp, lambda xp, x: (xp.logsumexp(x, 0, True), xp.logsumexp(x, (0, 1)), xp.rsqrt(xp.abs(x))), x)


def test_nan_and_infinity(xp):
    x = np.asarray([np.nan, np.inf, -np.inf, 0.0], np.float32)
    with np.errstate(all="ignore"):
        agree(xp, lambda xp, x: (xp.sign(x), xp.maximum(x, 1), xp.max(x, axis=0), xp.sigmoid(x)), x)
        agree(xp, lambda xp, x: (xp.softmax(x, 0), xp.logsumexp(x[2:3], 0, True), xp.erf(x)), x)


def test_remainders_take_the_sign_that_is_asked_for(xp):
    a = np.asarray([7, -7, 7, -7, np.iinfo(np.int32).min], np.int32)
    b = np.asarray([3, 3, -3, -3, -1], np.int32)
    agree(xp, lambda xp, a, b: (xp.remainder(a, b), xp.floor_divide(a, b)), a[:4], b[:4])
    assert xp.to_numpy(xp.remainder(xp.asarray(a), xp.asarray(b)))[4] == 0  # a trap on x86
    agree(xp, lambda xp, a, b: (xp.remainder(a, b), xp.fmod(a, b)), a.astype(np.float32), b.astype(np.float32))


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_shifts_by_the_width_or_more(xp, dtype):
    x = numbers(dtype, 4)
    counts = np.asarray([0, 3, 8 * dtype.itemsize, 8 * dtype.itemsize + 1], dtype)
    right = np.asarray([int(v) >> int(n) for v, n in zip(x, counts, strict=True)], dtype)
    np.testing.assert_array_equal(xp.to_numpy(xp.right_shift(xp.asarray(x), xp.asarray(counts))), right)
    assert not xp.to_numpy(xp.left_shift(xp.asarray(x), xp.asarray(counts)))[2:].any()


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS, np.dtype(np.bool_)], ids=str)
def test_order_is_stable(xp, dtype):
    x = RNG.integers(0, 3, (4, 30)).astype(dtype)
    for descending in (False, True):
        agree(xp, lambda xp, x, d=descending: xp.argsort(x, 1, descending=d), x)
        for k in (1, 7):
            agree(xp, lambda xp, x, d=descending, k=k: xp.topk(x, k, 1, largest=d), x)
    zeros = np.asarray([0.0, -0.0, 0.0, -0.0], np.float32)
    agree(xp, lambda xp, x: xp.topk(x, 3, 0)[1], zeros)


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS], ids=str)
@pytest.mark.parametrize("reduction", ["none", "add", "mul", "max", "min"])
def test_scatter(xp, dtype, reduction):
    x, updates = numbers(dtype, 4, 6), numbers(dtype, 2, 6)
    rows, columns = np.asarray([0, 3]), np.asarray([2, -1])
    agree(xp, lambda xp, x, u, i: xp.scatter(x, (i,), u, reduction), x, updates, rows)
    agree(xp, lambda xp, x, u, i, j: xp.scatter(x, (i, j), u[:, 0], reduction), x, updates, rows, columns)


def test_reading_and_writing_at_indices(xp):
    x = numbers(np.dtype(np.int64), 3, 4, 5)
    index = np.asarray([[0, -1], [2, 1]])
    agree(xp, lambda xp, x, i: (xp.take(x, i, 1), xp.take(x, i, axis=-1)), x, index)
    agree(xp, lambda xp, x, i: xp.take_along_axis(x, i, 1), x, np.asarray(index[..., None]).repeat(5, 2)[[0, 1, 0]])
    agree(xp, lambda xp, x: xp.slice_update(x, x[:1, :2], (1, 2, 0)), x)
    agree(xp, lambda xp, x, start: xp.slice_update(x, x[:1, :2], (1, start, 0)), x, np.asarray(2))


@pytest.mark.parametrize("mode", ["constant", "edge", "reflect", "wrap"])
def test_pad(xp, mode):
    x = numbers(np.dtype(np.float32), 2, 3)
    agree(xp, lambda xp, x: xp.pad(x, [(1, 0), (2, 7)], mode=mode), x)
    agree(xp, lambda xp, x: xp.pad(x, [(0, 0), (0, 0)], mode=mode), x)


CONVOLUTIONS = [  # x, w (times groups), strides, pads, dilations
    ((2, 4, 9, 8), (8, 4, 3, 2), (2, 1), [(1, 0), (2, 1)], (1, 2)),
    ((2, 4, 9), (8, 4, 1), (2,), [(0, 1)], (1,)),
    ((1, 4, 5, 4, 5), (8, 4, 2, 3, 2), (2, 1, 1), [(1, 0)] * 3, (1, 1, 2)),
    ((1, 4, 3, 4, 3, 4), (4, 4, 2, 2, 2, 2), (1, 1, 1, 2), [(0, 1)] * 4, (1, 1, 1, 1)),
]


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("x, w, strides, pads, dilations", CONVOLUTIONS)
def test_convolution(xp, x, w, strides, pads, dilations, groups):
    image, kernel = numbers(FLOATS[2], *x), numbers(FLOATS[2], w[0], w[1] // groups, *w[2:])
    agree(xp, lambda xp, x, w: xp.conv(x, w, strides, pads, dilations, groups), image, kernel)


def test_convolution_of_integers_is_exact(xp):
    x, w = numbers(np.dtype(np.int32), 1, 3, 4, 5), numbers(np.dtype(np.int32), 2, 3, 2, 3)
    agree(xp, lambda xp, x, w: xp.conv(x, w, (1, 1), [(1, 0)] * 2, (1, 1), 1), x // 1000, w // 1000)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(
    "size, kernel, stride, dilation, pads, extra",
    [(5, 3, 2, 1, (1, 1), 1), (5, 4, 3, 2, (0, 2), 0), (4, 1, 2, 1, (0, 0), 1), (6, 2, 4, 3, (1, 0), 2)],
)
def test_transposed_convolution(xp, groups, size, kernel, stride, dilation, pads, extra):
    x, w = numbers(FLOATS[2], 2, 4, size, 3), numbers(FLOATS[2], 4, 8 // groups, kernel, 2)
    arguments = ((stride, 1), [pads, (0, 1)], (dilation, 1), groups, (extra, 0))
    agree(xp, lambda xp, x, w: xp.conv_transpose(x, w, *arguments), x, w)


@pytest.mark.parametrize("kind", ["max", "min", "sum"])
@pytest.mark.parametrize("kernel, strides, dilations", [((3, 2), (2, 1), (1, 3)), ((20, 2), (3, 2), (1, 1))])
def test_windows(xp, kind, kernel, strides, dilations):
    x = numbers(FLOATS[2], 2, 3, 24, 9)
    agree(xp, lambda xp, x: xp.pool(x, kernel, strides, dilations, kind), x)
    agree(xp, lambda xp, x: xp.windows(x, kernel, strides, dilations), x)


def test_loops(xp):
    x = numbers(FLOATS[2], 3, 4)

    def sums(xp, x):
        (total,), (rows,) = xp.scan(lambda c, r: ((c[0] + r[0],), (c[0],)), (x[0],), (x,), reverse=True)
        return total, rows

    agree(xp, sums, x)
    agree(xp, lambda xp, x: xp.while_loop(lambda c: xp.max(c[0]) < 9, lambda c: (c[0] + 1,), (x,))[0], x)


def test_random_numbers_depend_on_the_seed_only(xp):
    one = [xp.to_numpy(xp.random_uniform((1000,), seed, 2.0, 3.0, np.float32)) for seed in (1, 1, 2)]
    np.testing.assert_array_equal(one[0], one[1])
    assert (one[0] != one[2]).any() and one[0].min() >= 2 and one[0].max() < 3
    array = xp.asarray(np.asarray(1, np.uint32))
    np.testing.assert_array_equal(xp.to_numpy(xp.random_uniform((1000,), array, 2.0, 3.0, np.float32)), one[0])
    normal = xp.to_numpy(xp.random_normal((10_000,), 3, 1.0, 2.0, np.float16)).astype(np.float32)
    assert abs(normal.mean() - 1) < 0.1 and abs(normal.std() - 2) < 0.1


def test_contents_are_not_read_inside_a_trace():
    jax = pytest.importorskip("jax")
    import ep.backends.jax.namespace as xp

    with pytest.raises(Untraceable):
        jax.jit(xp.to_numpy)(np.ones(2, np.float32))


def test_contents_are_not_read_inside_an_mlx_trace():
    require("mlx")
    importlib.import_module("ep.backends.mlx")
    import mlx.core as mx

    import ep.backends.mlx.namespace as xp

    def reads(x):
        return xp.asarray(xp.to_numpy(x))

    with pytest.raises(Untraceable):
        mx.compile(reads)(mx.ones(2))
