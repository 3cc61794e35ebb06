"""Are quantized numbers rounded, saturated and multiplied exactly as specified, on every device?

Expected values are worked out by hand or in exact integers. Where onnxruntime departs, a comment says so.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from conftest import parse
from nodes import run_node
from onnx import numpy_helper

import ep

MICROSOFT = {"domain": "com.microsoft"}
FLOAT16, INT16, FLOAT8 = 10, 5, 17  # ONNX's numbers of dtypes


def f32(*values: Any) -> np.ndarray:
    return np.asarray(values, np.float32)


def scalar(value: Any, dtype: Any = np.float32) -> np.ndarray:
    return np.asarray(value, dtype)


def random(dtype: Any, *shape: int) -> np.ndarray:
    """Integers over the whole range of the dtype."""
    limits = np.iinfo(dtype)
    return np.random.default_rng(sum(shape)).integers(limits.min, limits.max + 1, shape).astype(dtype)


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def same(got: np.ndarray, want: Any, dtype: Any) -> None:
    assert got.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(got.astype(np.float64), np.asarray(want, np.float64))


# QuantizeLinear and DequantizeLinear


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.int16])
def test_what_is_no_number_becomes_the_lowest_one(device, dtype):
    """The specification is silent; onnxruntime does it so."""
    y = run_node(device, "QuantizeLinear", f32(np.nan, 1, np.nan), scalar(1), scalar(7, dtype))
    same(y, [np.iinfo(dtype).min, 8, np.iinfo(dtype).min], dtype)


def test_an_infinite_scale_gives_the_same_in_every_use(device):
    """Quantizers give masks of -inf such scales: 0 * inf is NaN, whatever a compiler makes of constants."""
    model = parse("""
        agraph (int8[4, 7, 8] a, int8[4, 8, 7] b) => (float[4, 7, 7] y, bool[4, 7, 7] none)
        <float zero = {0}, float infinite = {1}>
        { c = MatMulInteger(a, b)  f = Cast<to = 1>(c)  m = Mul(f, zero)  x = Mul(m, infinite)
          y = Softmax<axis = -1>(x)  none = IsNaN(y) }
    """)
    model.graph.initializer[1].CopyFrom(numpy_helper.from_array(scalar(np.inf), "infinite"))
    session = ep.load(model, device)
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-128, 128, shape).astype(np.int8) for shape in ((4, 7, 8), (4, 8, 7)))
    for _ in range(5):
        y, none = session.run(None, {"a": a, "b": b})
        assert np.isnan(y).all() and none.all()


def test_quantize_rounds_half_to_even_and_saturates(device):
    x = f32(0.5, 1.5, 2.5, -0.5, -1.5, 1e9, -1e9, np.inf)
    y = run_node(device, "QuantizeLinear", x, scalar(1), scalar(0, np.int8))
    same(y, [0, 2, 2, 0, -2, 127, -128, 127], np.int8)


def test_quantize_adds_the_zero_point_after_rounding(device):
    """2.5 becomes 2, then 3; rounding 2.5 + 1 would give 4."""
    same(run_node(device, "QuantizeLinear", f32(2.5), scalar(1), scalar(1, np.uint8)), [3], np.uint8)


@pytest.mark.parametrize("compile", ["off", "on"])
def test_quantize_divides_exactly(device, compile):
    """-2.5 / (5 / 255) is just above -127.5; the product with the rounded reciprocal is not."""
    scale = f32(5)[0] / f32(255)[0]
    y = run_node(device, "QuantizeLinear", f32(-2.5, 0, 2.5, 1), scalar(scale), scalar(0, np.int8), compile=compile)
    same(y, [-127, 0, 127, 51], np.int8)


@pytest.mark.parametrize("axis", [0, -2])
def test_quantize_per_axis(device, axis):
    x = f32([10, 20], [10, 20], [10, 20])
    y = run_node(device, "QuantizeLinear", x, f32(1, 2, 5), np.asarray([0, 1, 2], np.int8), axis=axis)
    same(y, [[10, 20], [6, 11], [4, 6]], np.int8)


def test_a_vector_has_one_scale_whatever_the_axis(device):
    y = run_node(device, "QuantizeLinear", f32(2, 4, 6), f32(2), np.asarray([1], np.uint8), axis=1)
    same(y, [2, 3, 4], np.uint8)


def test_quantize_by_blocks_whose_last_one_is_short(device):
    x = f32([2, 4, 6, 8, 10])
    y = run_node(device, "QuantizeLinear", x, f32([1, 2, 5]), np.asarray([[0, 0, 1]], np.int8), axis=1, block_size=2)
    same(y, [[2, 4, 3, 4, 3]], np.int8)


def test_quantize_without_zero_point_takes_the_dtype_asked_for(device):
    x = f32(-1e6, 300, 1e6)
    same(run_node(device, "QuantizeLinear", x, scalar(1)), [0, 255, 255], np.uint8)
    same(run_node(device, "QuantizeLinear", x, scalar(1), output_dtype=INT16), [-32768, 300, 32767], np.int16)


def test_quantize_in_the_precision_asked_for(device):
    """Float16 has no 2049."""
    x, zero = f32(2049), scalar(0, np.uint16)
    same(run_node(device, "QuantizeLinear", x, scalar(1), zero, opset=23), [2049], np.uint16)
    same(run_node(device, "QuantizeLinear", x, scalar(1), zero, opset=23, precision=FLOAT16), [2048], np.uint16)


def test_quantize_to_four_bits(device):
    y = run_node(device, "QuantizeLinear", f32(-20, -2.5, 3.5, 20), scalar(1), scalar(0, ml_dtypes.int4))
    same(y, [-8, -2, 4, 7], ml_dtypes.int4)


@pytest.mark.parametrize(("saturate", "want"), [(1, [448, 448, 1, np.nan]), (0, [np.nan, np.nan, 1, np.nan])])
def test_quantize_to_eight_bit_floats(device, saturate, want):
    x = f32(1000, np.inf, 1.03, np.nan)
    y = run_node(device, "QuantizeLinear", x, scalar(1), saturate=saturate, output_dtype=FLOAT8)
    same(y, want, ml_dtypes.float8_e4m3fn)


def test_dequantize_subtracts_before_it_rounds(device):
    """2^24 + 1 is no float32."""
    x = np.asarray([2**24 + 1], np.int32)
    same(run_node(device, "DequantizeLinear", x, scalar(1), scalar(2**24, np.int32)), [1], np.float32)


def test_dequantize_by_blocks_of_the_first_axis(device):
    x = np.asarray([[1, 2], [3, 4], [5, 6]], np.uint8)
    scale, zero = f32([1, 10], [100, 1000]), np.asarray([[0, 1], [2, 3]], np.uint8)
    y = run_node(device, "DequantizeLinear", x, scale, zero, axis=0, block_size=2)
    same(y, [[1, 10], [3, 30], [300, 3000]], np.float32)


def test_dequantize_to_the_dtype_asked_for(device):
    y = run_node(device, "DequantizeLinear", random(np.int8, 3), scalar(0.1), opset=23, output_dtype=FLOAT16)
    same(y, (random(np.int8, 3) * np.float32(0.1)).astype(np.float16), np.float16)


def test_dynamic_quantization_of_zeros_is_defined(device):
    y, scale, zero = run_node(device, "DynamicQuantizeLinear", f32(0, 0), outputs=3)
    same(y, [0, 0], np.uint8)
    assert (scale, zero) == (1, 0)


def test_dynamic_quantization_includes_zero(device):
    y, scale, zero = run_node(device, "DynamicQuantizeLinear", f32(51, 255), outputs=3)
    same(y, [51, 255], np.uint8)
    assert (scale, zero) == (1, 0)


# Products of integers


@pytest.mark.parametrize("compile", ["off", "on"])
@pytest.mark.parametrize(("a", "b"), [(np.uint8, np.int8), (np.int8, np.int8), (np.uint8, np.uint8)])
def test_integer_products_are_exact_at_the_limits(device, compile, a, b):
    """4095 products of the largest numbers; onnxruntime 1.32 saturates uint8 times int8 on some processors."""
    left, right = np.full((2, 4095), np.iinfo(a).max, a), np.full((4095, 3), np.iinfo(b).min, b)
    zero = scalar(np.iinfo(b).max, b)
    y = run_node(device, "MatMulInteger", left, right, scalar(0, a), zero, compile=compile)
    same(y, np.full((2, 3), 4095 * int(np.iinfo(a).max) * -255), np.int32)


def test_integer_products_have_zero_points_per_row_and_column(device):
    a, b = random(np.uint8, 2, 3, 7), random(np.int8, 7, 4)
    rows, columns = random(np.uint8, 2, 3, 1), random(np.int8, 4)
    want = (a.astype(int) - rows) @ (b.astype(int) - columns)
    same(run_node(device, "MatMulInteger", a, b, rows, columns), want, np.int32)


def test_integer_products_have_a_vector_of_zero_points_for_the_rows(device):
    a, b, rows = random(np.int8, 3, 7), random(np.uint8, 7, 4), random(np.int8, 3)
    want = (a.astype(int) - rows[:, None]) @ b.astype(int)
    same(run_node(device, "MatMulInteger", a, b, rows), want, np.int32)


@pytest.mark.parametrize(("left", "right"), [((7,), (7, 4)), ((3, 7), (7,)), ((7,), (7,)), ((2, 1, 3, 7), (5, 7, 4))])
def test_integer_products_of_vectors_and_batches(device, left, right):
    a, b = random(np.uint8, *left), random(np.int8, *right)
    want = np.matmul(a.astype(int) - 3, b.astype(int) - 5)
    same(run_node(device, "MatMulInteger", a, b, scalar(3, np.uint8), scalar(5, np.int8)), want, np.int32)


def convolution(x: np.ndarray, w: np.ndarray, strides: tuple[int, int], dilations: tuple[int, int]) -> np.ndarray:
    """A convolution [N, O, H, W] of integers of any size, without padding or groups."""
    spans = [(k - 1) * d + 1 for k, d in zip(w.shape[2:], dilations, strict=True)]
    view = np.lib.stride_tricks.sliding_window_view(x.astype(np.int64), spans, axis=(2, 3))
    view = view[:, :, :: strides[0], :: strides[1], :: dilations[0], :: dilations[1]]
    return np.einsum("nchwij,ocij->nohw", view, w.astype(np.int64))


def test_the_padding_of_an_integer_convolution_is_the_zero_point(device):
    x = np.full((1, 1, 2, 2), 7, np.uint8)
    y = run_node(device, "ConvInteger", x, np.ones((1, 1, 3, 3), np.uint8), scalar(5, np.uint8), pads=[1, 1, 1, 1])
    same(y, np.full((1, 1, 2, 2), 4 * 2), np.int32)


@pytest.mark.parametrize("shape", [(600, 1, 1), (64, 3, 3), (1, 20, 31)])
def test_integer_convolutions_over_many_numbers_are_exact(device, shape):
    """One sum of float32 would be rounded: 600 · 255 · 255 > 2^24."""
    x = np.maximum(random(np.uint8, 1, shape[0], 24, 40), 200)
    w = np.maximum(random(np.uint8, 2, *shape), 200)
    y = run_node(device, "ConvInteger", x, w, strides=[1, 2], dilations=[1, 1])
    same(y, convolution(x, w, (1, 2), (1, 1)), np.int32)


def test_integer_convolutions_of_groups(device):
    x, w = random(np.uint8, 1, 520, 4, 4), random(np.int8, 6, 260, 2, 2)
    parts = [convolution(x[:, 260 * g :][:, :260], w[3 * g :][:3], (1, 1), (2, 1)) for g in range(2)]
    y = run_node(device, "ConvInteger", x, w, group=2, dilations=[2, 1])
    same(y, np.concatenate(parts, axis=1), np.int32)


def test_qlinear_matmul_scales_rows_and_columns(device):
    a, b = np.asarray([[1, 2], [3, 4]], np.uint8), np.asarray([[1, 0], [0, 1]], np.int8)
    scales = f32(1, 10), np.zeros(2, np.uint8), f32(1, 2), np.zeros(2, np.int8)
    y = run_node(device, "QLinearMatMul", a, scales[0], scales[1], b, scales[2], scales[3], scalar(2),
                 scalar(3, np.uint8))  # fmt: skip
    same(y, [[3, 5], [18, 43]], np.uint8)  # 0.5 → 0, 2, 15, 40


def test_qlinear_conv_has_a_scale_per_channel_and_a_bias(device):
    x, w = np.full((1, 1, 1, 2), 5, np.uint8), np.asarray([[[[2]]], [[[3]]]], np.int8)
    y = run_node(
        device, "QLinearConv", x, scalar(0.5), scalar(1, np.uint8), w, f32(1, 2), np.zeros(2, np.int8), scalar(1),
        scalar(10, np.uint8), np.asarray([1, -1], np.int32),
    )  # fmt: skip
    same(y, [[[[14, 14]], [[21, 21]]]], np.uint8)  # (4·2 + 1)/2 = 4.5 → 4; (4·3 - 1)·1 = 11


# Operators of onnxruntime


def test_qlinear_add_rounds_with_the_zero_point(device):
    """0.5 + 1 becomes 2; 0.5 would become 0."""
    half, one, zero = scalar(0.5), scalar(1), scalar(0, np.uint8)
    y = run_node(device, "QLinearAdd", np.asarray([1], np.uint8), half, zero, np.asarray([0], np.uint8), one, zero,
                 one, scalar(1, np.uint8), **MICROSOFT)  # fmt: skip
    same(y, [2], np.uint8)


def test_qlinear_pooling_and_means(device):
    x, one, zero = np.asarray([[[[1, 2], [3, 6]]]], np.uint8), scalar(1), scalar(0, np.uint8)
    y = run_node(device, "QLinearGlobalAveragePool", x, one, zero, scalar(0.5), zero, **MICROSOFT)
    same(y, [[[[6]]]], np.uint8)
    y = run_node(device, "QLinearAveragePool", x, one, scalar(1, np.uint8), one, zero, kernel_shape=[2, 2],
                 pads=[1, 1, 0, 0], **MICROSOFT)  # fmt: skip
    same(y, [[[[0, 0], [1, 2]]]], np.uint8)  # of 0; 0, 1; 0, 2; 0, 1, 2, 5
    y = run_node(device, "QLinearReduceMean", x, one, zero, one, zero, axes=[3], keepdims=0, **MICROSOFT)
    same(y, [[[2, 4]]], np.uint8)


@pytest.mark.parametrize(("opset", "want"), [(12, 64), (13, 128)])
def test_qlinear_softmax_flattens_before_opset_13(device, opset, want):
    model = parse(
        f"""g (uint8[1,2,2] x, float s, uint8 z, float t) => (uint8[1,2,2] y)
            {{ y = com.microsoft.QLinearSoftmax <axis = 1, opset = {opset}> (x, s, z, t, z) }}""",
        '"": 21, "com.microsoft": 1',
    )
    feeds = {"x": np.zeros((1, 2, 2), np.uint8), "s": scalar(1), "z": scalar(0, np.uint8), "t": scalar(1 / 256)}
    same(ep.load(model, device).run(None, feeds)[0], np.full((1, 2, 2), want), np.uint8)


def test_qgemm_gives_floats_without_an_output_scale(device):
    a, b, c = np.asarray([[3], [4]], np.uint8), np.asarray([[5, 6]], np.int8), np.asarray([1, 2], np.int32)
    y = run_node(device, "QGemm", a, scalar(0.5), scalar(1, np.uint8), b, f32(1, 2), np.asarray([1, 2], np.int8), c,
                 alpha=2.0, **MICROSOFT)  # fmt: skip
    same(y, [[9, 20], [13, 28]], np.float32)


def dynamic(x: np.ndarray) -> tuple[np.ndarray, np.float32]:
    """Integers without their zero point, and their scale, as DynamicQuantizeLinear has them."""
    low, high = min(x.min(), np.float32(0)), max(x.max(), np.float32(0))
    scale = (high - low) / np.float32(255)
    zero = np.rint(np.clip(-low / scale, 0, 255))
    return np.clip(np.rint(x / scale) + zero, 0, 255) - zero, scale


@pytest.mark.parametrize("compile", ["off", "on"])
def test_dynamic_quantize_lstm_quantizes_the_hidden_state_at_every_step(device, compile):
    steps, size, hidden = 4, 6, 5
    x, h, c = normal(steps, 1, size), normal(1, 1, hidden), normal(1, 1, hidden)
    w, r, b = random(np.int8, 1, size, 4 * hidden), random(np.int8, 1, hidden, 4 * hidden), normal(1, 8 * hidden)
    w_zero, r_scale = np.asarray([3], np.int8), np.abs(normal(1, 4 * hidden)) / 100
    r_zero = random(np.int8, 1, 4 * hidden)
    y, last, _ = run_node(
        device, "DynamicQuantizeLSTM", x, w, r, b, None, h, c, None, f32(0.01), w_zero, r_scale, r_zero, outputs=3,
        compile=compile, hidden_size=hidden, **MICROSOFT,
    )  # fmt: skip
    q, scale = dynamic(x)
    inputs = (q @ (w[0].astype(int) - 3)) * scale * 0.01 + b[0, : 4 * hidden] + b[0, 4 * hidden :]
    state, cell, want = h[0], c[0], []
    for now in inputs:
        q, scale = dynamic(state.astype(np.float32))
        gates = now + (q @ (r[0].astype(int) - r_zero[0])) * scale * r_scale[0]
        i, o, f, g = np.split(gates, 4, axis=1)
        i, o, f = (1 / (1 + np.exp(-gate)) for gate in (i, o, f))
        cell = f * cell + i * np.tanh(g)
        state = o * np.tanh(cell)
        want.append(state)
    np.testing.assert_allclose(y[:, 0], want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(last[0], want[-1], rtol=1e-4, atol=1e-5)


# Packed weights


def pack(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Numbers of the last axis as a stream of bits, low bits first, in whole bytes."""
    stream = (numbers[..., None] >> np.arange(bits)) & 1
    return np.packbits(stream.reshape(*numbers.shape[:-1], -1).astype(np.uint8), axis=-1, bitorder="little")


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("zero_points", ["none", "packed", "float"])
@pytest.mark.parametrize("block", [16, 32])
def test_matmul_nbits_reads_a_stream_of_bits(device, bits, zero_points, block):
    n, k = 3, 40
    blocks = -(-k // block)
    rng = np.random.default_rng(bits)
    q, zero = rng.integers(0, 2**bits, (n, blocks, block)), rng.integers(0, 2**bits, (n, blocks))
    a, scales, bias = normal(2, k), normal(n, blocks), normal(n)
    given = {"none": None, "packed": pack(zero, bits), "float": zero + np.float32(0.5)}[zero_points]
    taken = {"none": np.full_like(zero, 2 ** (bits - 1)), "packed": zero, "float": zero + 0.5}[zero_points]
    y = run_node(
        device, "MatMulNBits", a, pack(q, bits), scales, given, None, bias, K=k, N=n, bits=bits, block_size=block,
        **MICROSOFT,
    )  # fmt: skip
    w = ((q - taken[..., None]) * scales[..., None]).reshape(n, -1)[:, :k]
    np.testing.assert_allclose(y, a @ w.T + bias, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_matmul_nbits_of_halves(device, dtype):
    """Products are summed in float32, and zero points are exact."""
    n, k = 4, 256
    q, zero = random(np.uint8, n, 8, 32).astype(int), np.asarray([[3, 250, 128, 1] * 2] * n)
    a, scales = normal(2, k).astype(dtype), (np.abs(normal(n, 8)) / 64).astype(dtype)
    y = run_node(
        device, "MatMulNBits", a, pack(q, 8), scales, pack(zero, 8), K=k, N=n, bits=8, block_size=32, **MICROSOFT
    )
    w = ((q - zero[..., None]) * scales[..., None].astype(np.float64)).reshape(n, k)
    want = a.astype(np.float64) @ w.T
    np.testing.assert_allclose(y.astype(np.float64), want, rtol=2**-6, atol=2**-7 * np.abs(want).max())


def test_matmul_nbits_with_groups_in_any_order(device):
    """onnxruntime 1.32 forgets the zero points here."""
    n, k, block = 2, 32, 16
    q, zero, group = random(np.uint8, n, 2, block) % 16, np.asarray([[3, 9], [15, 0]]), np.arange(k) % 2
    scales, a = normal(n, 2), normal(1, k)
    y = run_node(
        device, "MatMulNBits", a, pack(q.astype(int), 4), scales, pack(zero, 4), group.astype(np.int32), K=k, N=n,
        block_size=block, **MICROSOFT,
    )  # fmt: skip
    w = (q.reshape(n, k) - zero[:, group].astype(int)) * scales[:, group]
    np.testing.assert_allclose(y, a @ w.T, rtol=1e-4, atol=1e-4)


def test_matmul_nbits_without_weights_is_the_bias(device):
    y = run_node(device, "MatMulNBits", normal(2, 32), np.zeros((3, 0, 16), np.uint8), np.zeros((3, 0), np.float32),
                 None, None, f32(1, 2, 3), K=32, N=3, block_size=32, **MICROSOFT)  # fmt: skip
    same(y, [[1, 2, 3], [1, 2, 3]], np.float32)


def test_matmul_nbits_refuses_weights_of_one_kind_of_gpu(device):
    with pytest.raises(ep.EpError, match="weight_prepacked=1"):
        run_node(device, "MatMulNBits", normal(2, 32), random(np.uint8, 3, 1, 16), normal(3, 1), K=32, N=3,
                 block_size=32, weight_prepacked=1, **MICROSOFT)  # fmt: skip


def test_gather_block_quantized_gives_zeros_out_of_range(device):
    q = np.arange(32).reshape(2, 16) % 16
    indices = np.asarray([1, -1, 2, -3, 0], np.int64)
    y = run_node(device, "GatherBlockQuantized", pack(q, 4), indices, f32([1], [2]), block_size=16, **MICROSOFT)
    rows = (q - 8) * np.asarray([[1], [2]])
    same(y, [rows[1], rows[1], 0 * rows[0], 0 * rows[0], rows[0]], np.float32)


def test_gather_block_quantized_unpacks_zero_points(device):
    q, zero = np.arange(64).reshape(1, 64) % 4, np.asarray([[1, 2, 3, 0]])
    y = run_node(device, "GatherBlockQuantized", pack(q, 2), np.asarray([[0]], np.int32), np.ones((1, 4), np.float32),
                 pack(zero, 2), bits=2, block_size=16, **MICROSOFT)  # fmt: skip
    same(y, (q - np.repeat(zero, 16, axis=1))[None], np.float32)


def test_matmul_bnb4_reads_the_high_half_first(device):
    """NF4 codes 0 and 15 stand for -1 and 1."""
    b, eye = np.full(16, 0x0F, np.uint8), np.eye(16, dtype=np.float32)
    y = run_node(device, "MatMulBnb4", eye, b, f32(2, 3), K=16, N=2, block_size=16, quant_type=1, **MICROSOFT)
    same(y, np.tile([[-2, -3], [2, 3]], (8, 1)), np.float32)
