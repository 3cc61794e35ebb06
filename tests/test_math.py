"""Do arithmetic, reductions, casts and generators follow the specification in its corners, old opsets included?

Expected values are NumPy formulas or written by hand. Each lowering is called with every namespace directly.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from conftest import require

import ep.ops  # noqa: F401 - registers the lowerings
from ep.errors import InvalidInput
from ep.program import to_host
from ep.registry import OPS, Host, ShapeOf
from ep.seeds import derived_from, seed_of

CUBE = np.arange(24, dtype=np.float32).reshape(2, 3, 4) - 7
INF = np.inf


@pytest.fixture(params=["host", "jax", "mlx"])
def xp(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "host":
        with np.errstate(all="ignore"):
            yield importlib.import_module("ep.host_namespace")
        return
    require(request.param)
    importlib.import_module(f"ep.backends.{request.param}")
    with contextlib.ExitStack() as scope:
        if request.param == "jax":
            import jax

            scope.enter_context(jax.enable_x64(True))
            scope.enter_context(jax.numpy_dtype_promotion("strict"))
        yield importlib.import_module(f"ep.backends.{request.param}.namespace")


def call(xp: Any, op: str, opset: int, *inputs: Any, **attributes: Any) -> Any:
    lowering = OPS.find("", op, opset)
    assert lowering is not None
    arguments = [x if x is None or lowering.role(i) in (Host, ShapeOf) else xp.asarray(x) for i, x in enumerate(inputs)]
    return to_host(lowering.fn(xp, *arguments, **attributes), xp)


def f(*values: Any, dtype: Any = np.float32) -> np.ndarray:
    return np.asarray(values, dtype)


def i(*values: int, dtype: Any = np.int32) -> np.ndarray:
    return np.asarray(values, dtype)


AXES = i(1, dtype=np.int64)
NONE = i(dtype=np.int64)
AXIS = np.asarray(1)
SMALLEST = -(2**31)

# operator, opset, inputs, attributes, expected
CASES: list[tuple[str, int, list[Any], dict[str, Any], Any]] = [
    # broadcasting as opsets 1 to 6 spelled it
    ("Add", 1, [CUBE, f(1, 2, 3)], {"broadcast": 1, "axis": 1, "consumed_inputs": (0, 0)}, CUBE + [[1], [2], [3]]),
    ("Sub", 6, [CUBE, f(1, 2, 3, 4)], {"broadcast": 1}, CUBE - [1, 2, 3, 4]),
    ("Pow", 1, [CUBE, f(1, 2)], {"broadcast": 1, "axis": 0}, CUBE ** f(1, 2).reshape(2, 1, 1)),
    ("Gemm", 6, [CUBE[0], CUBE[1].T, f(1, 2, 3)], {"broadcast": 1}, CUBE[0] @ CUBE[1].T + [1, 2, 3]),
    ("PRelu", 6, [CUBE, f(1, 2, 3)], {}, np.where(CUBE < 0, CUBE * [[1], [2], [3]], CUBE)),
    ("Relu", 1, [f(-1, 2)], {"consumed_inputs": (0,)}, f(0, 2)),
    # limits
    ("Clip", 1, [f(-2, 0, 2)], {"max": 1.0}, f(-2, 0, 1)),
    ("Clip", 6, [f(-2, 0, 2, INF)], {"min": -1.0}, f(-1, 0, 2, INF)),
    ("Clip", 13, [f(-2, 0, 2), f(3)[0], f(1)[0]], {}, f(1, 1, 1)),
    ("Clip", 13, [i(-2, 0, 2), None, i(1)[0]], {}, i(-2, 0, 1)),
    # integers
    ("Div", 14, [i(7, -7, 7, -7), i(2, 2, -2, -2)], {}, i(3, -3, -3, 3)),
    ("Mod", 13, [i(7, -7, 7, -7), i(3, 3, -3, -3)], {}, i(1, 2, -2, -1)),
    ("Mod", 13, [i(7, -7, 7, -7), i(3, 3, -3, -3)], {"fmod": 1}, i(1, -1, 1, -1)),
    ("Mod", 13, [f(7.5, -7.5, 5), f(2, 2, INF)], {"fmod": 1}, f(1.5, -1.5, 5)),
    ("Mod", 28, [f(7.5, -7.5, -5), f(2, 2, INF)], {}, f(1.5, 0.5, INF)),
    ("Pow", 15, [i(2, 1, -1, -1, 3), i(-1, -5, -3, -4, 4)], {}, i(0, 1, -1, 1, 81)),
    ("Pow", 15, [i(4, 9), f(0.5, 0.5)], {}, i(2, 3)),
    ("Pow", 15, [f(2, 3), i(3, -1, dtype=np.int64)], {}, f(8, 1 / 3)),
    ("BitShift", 28, [i(-8, -8, 8, 1), i(1, 40, 40, -1)], {"direction": "RIGHT"}, i(-4, -1, 0, 0)),
    ("BitShift", 28, [i(-8, 1, 1), i(1, 32, -1)], {"direction": "LEFT"}, i(-16, 0, 0)),
    ("BitwiseNot", 18, [i(0, -1)], {}, i(-1, 0)),
    ("Abs", 13, [i(SMALLEST, -3)], {}, i(SMALLEST, 3)),
    # floats
    ("Round", 22, [f(0.5, 1.5, 2.5, -0.5)], {}, f(0, 2, 2, -0.0)),
    ("Sign", 13, [f(-2, 0, np.nan)], {}, f(-1, 0, np.nan)),
    ("IsInf", 20, [f(INF, -INF, 1)], {"detect_negative": 0}, np.asarray([True, False, False])),
    ("IsInf", 20, [f(INF, -INF)], {"detect_negative": 0, "detect_positive": 0}, np.asarray([False, False])),
    ("Max", 13, [f(1, np.nan), f(2, 2), f(0, 3)], {}, f(2, np.nan)),
    ("Mean", 13, [f(1, 2, dtype=np.float16), f(2, 5, dtype=np.float16)], {}, f(1.5, 3.5, dtype=np.float16)),
    ("Shrink", 9, [i(-3, 0, 3)], {"lambd": 1.5, "bias": 1.0}, i(-2, 0, 2)),
    ("Gelu", 20, [f(-1e4, 0, 1e4)], {}, f(0, 0, 1e4)),
    ("Softplus", 22, [f(-1e4, 0, 1e4)], {}, f(0, np.log(2), 1e4)),
    ("Elu", 22, [f(-INF, 1e4)], {"alpha": 2.0}, f(-2, 1e4)),
    # softmax over all trailing axes, before opset 13
    ("Softmax", 11, [np.zeros((2, 3, 4), np.float32)], {}, np.full((2, 3, 4), 1 / 12, np.float32)),
    ("Softmax", 13, [np.zeros((2, 3, 4), np.float32)], {}, np.full((2, 3, 4), 1 / 4, np.float32)),
    ("Hardmax", 11, [f([1, 3], [3, 2]).reshape(1, 2, 2)], {}, f([0, 1], [0, 0]).reshape(1, 2, 2)),
    ("LogSoftmax", 13, [f(1e4, 1e4 - 1)], {}, f(-np.log1p(np.exp(-1)), -1 - np.log1p(np.exp(-1)))),
    # reductions
    ("ReduceSum", 13, [CUBE, NONE], {"noop_with_empty_axes": 1}, CUBE),
    ("ReduceSumSquare", 18, [CUBE, None], {"noop_with_empty_axes": 1}, CUBE**2),
    ("ReduceSum", 13, [CUBE, NONE], {"keepdims": 0}, CUBE.sum()),
    ("ReduceSum", 11, [CUBE], {"axes": (-1,), "keepdims": 0}, CUBE.sum(-1)),
    ("ReduceMean", 18, [i(-3, -4), None], {"keepdims": 0}, i(-3)[0]),
    ("ReduceMax", 20, [np.zeros((2, 0), np.float32), AXES], {}, f([-INF], [-INF])),
    ("ReduceMin", 20, [np.zeros((2, 0), np.uint8), AXES], {"keepdims": 0}, i(255, 255, dtype=np.uint8)),
    ("ReduceMax", 20, [np.asarray([[True, False]]), AXES], {"keepdims": 0}, np.asarray([True])),
    ("ReduceProd", 18, [np.zeros((2, 0), np.float32), AXES], {"keepdims": 0}, f(1, 1)),
    ("ReduceLogSumExp", 18, [f([1e4, 1e4]), AXES], {"keepdims": 0}, f(1e4 + np.log(2))),
    ("ReduceL2", 18, [f(3, 4, dtype=np.float16), None], {"keepdims": 0}, f(5, dtype=np.float16)[0]),
    ("ReduceMean", 18, [np.asarray(3, np.float32), None], {}, np.asarray(3, np.float32)),
    ("ArgMax", 13, [f([1, 3, 3])], {"axis": 1}, i([1], dtype=np.int64)),
    ("ArgMax", 13, [f([1, 3, 3])], {"axis": -1, "select_last_index": 1}, i([2], dtype=np.int64)),
    ("CumSum", 14, [i([1, 2, 3]), AXIS], {"exclusive": 1, "reverse": 1}, i([5, 3, 0])),
    ("CumProd", 26, [i([1, 2, 3]), AXIS], {"exclusive": 1}, i([1, 1, 2])),
    # products
    ("Gemm", 13, [i([1, 2]), i([3, 4]), i(5)], {"transB": 1, "alpha": 2.0, "beta": 3.0}, i([37])),
    ("Gemm", 13, [f([1, 2]), f([3, 4]), f(np.nan)], {"transB": 1, "beta": 0.0}, f([11])),
    ("Einsum", 12, [CUBE, CUBE[0]], {"equation": "...ij, kj"}, np.einsum("bij,kj->bik", CUBE, CUBE[0])),
    ("Einsum", 12, [CUBE], {"equation": "b i a -> ... a"}, CUBE.sum((0, 1))),
    ("Einsum", 12, [i([1, 2], [3, 4])], {"equation": "ii"}, np.asarray(5, np.int32)),
    ("Det", 22, [f([2, 1], [1, 3]) * np.ones((2, 1, 1), np.float32)], {}, f(5, 5)),
    # generators
    ("Range", 27, [np.asarray(v, ml_dtypes.bfloat16) for v in (0, 3, 1)], {}, f(0, 1, 2, dtype=ml_dtypes.bfloat16)),
    ("Range", 11, [np.asarray(v) for v in (10, 4, -4)], {}, i(10, 6, dtype=np.int64)),
    ("Range", 11, [np.asarray(v) for v in (2**60, 2**60 + 2, 1)], {}, i(2**60, 2**60 + 1, dtype=np.int64)),
    ("EyeLike", 22, [np.zeros((2, 3), np.int64)], {"k": 1}, np.eye(2, 3, 1, np.int64)),
    ("ConstantOfShape", 9, [i(2, 0)], {"value": i(7, dtype=np.int64)}, np.zeros((2, 0), np.int64)),
    ("ConstantOfShape", 9, [i()], {}, np.asarray(0, np.float32)),
    ("Constant", 13, [], {"value_ints": (1, 2)}, i(1, 2, dtype=np.int64)),
    ("Constant", 13, [], {"value_string": "a"}, np.asarray("a", object)),
    ("HannWindow", 17, [np.asarray(4)], {}, f(0, 0.5, 1, 0.5)),
    ("HannWindow", 17, [np.asarray(5)], {"periodic": 0}, f(0, 0.5, 1, 0.5, 0)),
    # Fourier transforms
    ("DFT", 20, [f([[1], [2], [4]]), None, np.asarray(1)], {"onesided": 1}, f([[7, 0], [-2, np.sqrt(3)]])),
    ("DFT", 17, [f([[7, 0], [-2, np.sqrt(3)]]), np.asarray(3)], {"inverse": 1, "onesided": 1}, f([[1], [2], [4]])),
    ("DFT", 17, [f([[1, 2]])], {}, f([[1, 2]])),
    ("DFT", 17, [f([[1], [2]]), np.asarray(4)], {}, f([[3, 0], [1, -2], [-1, 0], [1, 2]])),
    ("STFT", 17, [f([[1], [2], [4], [8]]), np.asarray(2), f(1, 2)], {}, f([[[5, 0], [-3, 0]], [[20, 0], [-12, 0]]])),
    ("STFT", 17, [f([1, 2, 4, 8]), np.asarray(2), f(1, 2)], {}, f([[[5, 0], [-3, 0]], [[20, 0], [-12, 0]]])),
    # conversions
    ("Cast", 1, [f(1.9, -1.9)], {"to": "INT32"}, i(1, -1)),
    ("Cast", 13, [i(200, -1)], {"to": 3}, i(-56, -1, dtype=np.int8)),
    ("Cast", 13, [f(0.4, 0, np.nan)], {"to": 9}, np.asarray([True, False, True])),
    ("BitCast", 26, [f(1, -0.0)], {"to": 6}, i(0x3F800000, SMALLEST)),
    ("BitCast", 26, [np.asarray([True, False])], {"to": 2}, i(1, 0, dtype=np.uint8)),
]


@pytest.mark.parametrize("op, opset, inputs, attributes, expected", CASES, ids=[f"{c[0]}-{c[1]}" for c in CASES])
def test_corner(xp, op, opset, inputs, attributes, expected):
    got = call(xp, op, opset, *inputs, **attributes)
    expected = np.asarray(expected)
    wanted = expected.dtype if op not in ("Add", "Sub", "Pow", "Gemm", "PRelu") else inputs[0].dtype
    assert (got.shape, got.dtype) == (expected.shape, wanted)
    if expected.dtype.kind == "O":
        assert got.tolist() == expected.tolist()
    else:
        np.testing.assert_allclose(got.astype(np.float64), expected.astype(np.float64), rtol=1e-5, atol=1e-6)


def on_host(op: str, opset: int, *inputs: Any, **attributes: Any) -> Any:
    return call(importlib.import_module("ep.host_namespace"), op, opset, *inputs, **attributes)


def test_strings_become_numbers_and_back():
    texts = np.asarray(["1e-1", "+INF", "-inf", "NaN", "42"], object)
    np.testing.assert_array_equal(on_host("Cast", 13, texts, to=1), f(0.1, INF, -INF, np.nan, 42))
    assert on_host("Cast", 13, np.asarray(["7", "1e2"], object), to=7).tolist() == [7, 100]
    assert on_host("Cast", 13, f(0.1, INF, np.nan), to=8).tolist() == ["0.1", "INF", "NaN"]
    assert on_host("Cast", 13, i(-3), to=8).tolist() == ["-3"]
    with pytest.raises(InvalidInput, match="hello"):
        on_host("Cast", 13, np.asarray(["hello"], object), to=1)


@pytest.mark.parametrize(
    "name, inf", [("float8_e4m3fn", 448), ("float8_e4m3fnuz", 240), ("float8_e5m2", 57344), ("float8_e5m2fnuz", 57344)]
)
def test_infinity_becomes_the_largest_float8(name, inf):
    from ep.ops.cast import cast_to

    host = importlib.import_module("ep.host_namespace")
    dtype = np.dtype(getattr(ml_dtypes, name))
    assert cast_to(host, f(INF, 1e6), dtype).astype(np.float32).tolist() == [inf, inf]
    assert not np.isfinite(cast_to(host, f(INF, 1e6), dtype, saturate=False).astype(np.float32)).any()


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"])
def test_doubles_are_rounded_once(name):
    """What lies so close to the middle between two numbers that float32 does not see on which side."""
    dtype = np.dtype(getattr(ml_dtypes, name))
    low, high = np.asarray([1, 2 if name == "float4_e2m1fn" else 1 + float(ml_dtypes.finfo(dtype).eps)])
    low = 1.5 if name == "float4_e2m1fn" else low
    middle = (low + high) / 2
    x = np.asarray([np.nextafter(middle, 0), np.nextafter(middle, 9), 1e300, np.nan])
    got = on_host("Cast", 24, np.concatenate([x, -x]), to=onnx.helper.np_dtype_to_tensor_dtype(dtype)).astype(
        np.float64
    )
    np.testing.assert_array_equal(got[:2], [low, high])
    np.testing.assert_array_equal(np.abs(got[:3]), np.abs(got[4:7]))
    assert got[2] == (np.inf if name == "bfloat16" else float(ml_dtypes.finfo(dtype).max))


def test_before_opset_24_infinity_became_nan_in_the_types_without_it():
    assert np.isnan(on_host("Cast", 19, f(INF), to=18).astype(np.float32)).all()
    assert on_host("Cast", 24, f(INF), to=18).astype(np.float32).tolist() == [240]


@pytest.mark.parametrize(
    "mode, codes", [("up", [127, 128, 128]), ("down", [127, 127, 127]), ("nearest", [127, 127, 128])]
)
def test_powers_of_two_are_rounded_as_asked(mode, codes):
    got = on_host("Cast", 24, f(1.0, 1.25, 1.5), to=24, round_mode=mode)
    assert got.view(np.uint8).tolist() == codes


def test_bits_keep_their_width():
    with pytest.raises(InvalidInput, match="width"):
        on_host("BitCast", 26, f(1), to=10)


def test_bounds_are_scalars():
    with pytest.raises(InvalidInput, match="max has the shape"):
        on_host("Clip", 13, f(1, 2), None, f(0, 1))


def test_integers_stop_at_the_ends_of_their_range(xp):
    x = np.asarray([np.iinfo(np.int64).max, np.iinfo(np.int64).min, 3])
    assert call(xp, "Shrink", 9, x, lambd=1.0, bias=-5.0).tolist() == [x[0], x[1], 8]


def test_an_equation_that_does_not_fit_its_inputs_is_refused():
    with pytest.raises(InvalidInput, match="rank 3"):
        on_host("Einsum", 12, CUBE, equation="ij->j")
    with pytest.raises(InvalidInput, match="2 terms for 1"):
        on_host("Einsum", 12, CUBE, equation="ijk,k->j")


@pytest.mark.parametrize("n", [1, 2, 7, 32, 33, 50, 64])
@pytest.mark.parametrize("onesided", [0, 1])
def test_spectra_of_real_signals_of_any_length(xp, n, onesided):
    x = np.random.default_rng(n).standard_normal((2, n, 3, 1)).astype(np.float32)
    want = np.fft.fft(x[..., 0].astype(np.float64), axis=1)[:, : n // 2 + 1 if onesided else n]
    got = call(xp, "DFT", 20, x, None, np.asarray(1), onesided=onesided)
    np.testing.assert_allclose(got, np.stack([want.real, want.imag], -1), rtol=0, atol=4e-7 * n)


def test_a_silent_frame_keeps_its_phases(xp):
    """Vocoders divide both parts by each other: no coefficient of float32 numbers that is not zero becomes 0 + 0i."""
    window = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(20) / 20)).astype(np.float32)
    signal = np.repeat(f(-0.02944175, -0.029441746, -0.11808011, 0.3)[:, None], 20, axis=1)
    frames = call(xp, "STFT", 17, signal, np.asarray(5), window, np.asarray(20))
    assert np.abs(frames).max(axis=-1).min() > 0


def test_samples_follow_their_probabilities(xp):
    logits = np.log(f([0.1, 0.9], [0.5, 0.5]))
    drawn = call(xp, "Multinomial", 22, logits, sample_size=4000, seed=1.0, dtype=7)
    assert drawn.dtype == np.int64 and drawn.shape == (2, 4000)
    np.testing.assert_allclose(drawn.mean(axis=1), [0.9, 0.5], atol=0.05)
    hits = call(xp, "Bernoulli", 22, np.full((4000,), 0.3, np.float32), seed=1.0)
    assert abs(hits.mean() - 0.3) < 0.05


def test_seeds_are_fresh_unless_given():
    assert seed_of(0.5) == seed_of(0.5) != seed_of(0.25)
    assert len({seed_of(None) for _ in range(10)}) == 10
    with derived_from(np.uint32(7)):
        assert [seed_of(None), seed_of(None)] == [7, 8]
