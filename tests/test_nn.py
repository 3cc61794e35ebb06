"""Do layers of neural networks follow the specification in its corners, on every device?

Expected values are worked out by hand, or by another way to the same result; each test names the corner.
Where onnxruntime departs from the specification, a comment says so.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import parse
from nodes import onnxruntime_node, run_node

import ep


def row(*values: float, dtype: Any = np.float32) -> np.ndarray:
    """A signal [1, 1, n]."""
    return np.asarray(values, dtype).reshape(1, 1, -1)


def ints(*values: int) -> np.ndarray:
    return np.asarray(values, np.int64)


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def near(got: np.ndarray, want: Any, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    want = np.asarray(want)
    assert got.shape == want.shape
    np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=rtol, atol=atol)


# Convolutions


@pytest.mark.parametrize(
    ("auto_pad", "want"), [("SAME_UPPER", [21, 32, 3]), ("SAME_LOWER", [10, 21, 32]), ("VALID", [21, 32])]
)
def test_conv_puts_the_odd_padding_on_the_named_side(device, auto_pad, want):
    near(run_node(device, "Conv", row(1, 2, 3), row(1, 10), auto_pad=auto_pad), row(*want))


def test_conv_of_groups_is_a_conv_of_each_part(device):
    x, w = random(1, 4, 3, 4, 5), random(6, 2, 2, 2, 2)
    parts = [run_node(device, "Conv", x[:, 2 * g : 2 * g + 2], w[3 * g : 3 * g + 3]) for g in range(2)]
    near(run_node(device, "Conv", x, w, group=2), np.concatenate(parts, axis=1), atol=1e-5)


def test_conv_refuses_weights_of_other_channels(device):
    with pytest.raises(ep.EpError, match="3 channels, but the weights are made for 2"):
        run_node(device, "Conv", random(1, 3, 5, 5), random(4, 2, 3, 3))


@pytest.mark.parametrize(
    ("attributes", "want"),
    [
        ({}, [1, 1, 3, 2, 2]),
        ({"output_shape": [4]}, [1, 3, 2, 2]),
        ({"output_shape": [4], "auto_pad": "SAME_UPPER"}, [1, 1, 3, 2]),
        ({"output_shape": [6]}, [1, 1, 3, 2, 2, 0]),
        ({"output_padding": [1]}, [1, 1, 3, 2, 2, 0]),
        ({"pads": [1, 0]}, [1, 3, 2, 2]),
    ],
)
def test_conv_transpose_cuts_or_extends_the_full_result(device, attributes, want):
    got = run_node(device, "ConvTranspose", row(1, 2), row(1, 1, 1), strides=[2], **attributes)
    near(got, row(*want))


def test_conv_transpose_with_same_padding_multiplies_the_length(device):
    """Onnxruntime 1.32 returns 4 elements; the specification says input length times stride."""
    got = run_node(device, "ConvTranspose", row(1, 2), row(5), strides=[3], auto_pad="SAME_UPPER")
    near(got, row(5, 0, 0, 10, 0, 0))


def test_deform_conv_interpolates_between_pixels_and_fades_out_at_the_border(device):
    x = np.arange(1, 10, dtype=np.float32).reshape(1, 1, 3, 3)
    offset = np.zeros((1, 2, 3, 3), np.float32)
    offset[0, 1] = 0.5  # half a pixel to the right
    got = run_node(device, "DeformConv", x, np.ones((1, 1, 1, 1), np.float32), offset)
    near(got[0, 0], [[1.5, 2.5, 1.5], [4.5, 5.5, 3], [7.5, 8.5, 4.5]])


# Pooling


def test_max_pool_drops_a_window_that_would_start_in_the_padding(device):
    near(run_node(device, "MaxPool", row(1, 2), kernel_shape=[1], strides=[3], ceil_mode=1), row(1))


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_max_pool_never_points_into_the_padding(device, dtype):
    """The lowest value of uint8 is what the padding holds, too."""
    x = np.zeros((1, 1, 2, 2), dtype)
    y, indices = run_node(
        device, "MaxPool", x, outputs=2, opset=12, kernel_shape=[2, 2], pads=[1, 1, 1, 1], strides=[2, 2]
    )
    assert y.dtype == dtype and indices.dtype == np.int64
    near(indices, [[[[0, 1], [2, 3]]]])


@pytest.mark.parametrize(("storage_order", "want"), [(0, 1 * 6 + 2), (1, 2 * 4 + 1)])
def test_max_pool_counts_indices_in_the_order_asked_for(device, storage_order, want):
    x = np.zeros((1, 2, 4, 6), np.float32)
    x[0, :, 1, 2] = 1
    _, indices = run_node(device, "MaxPool", x, outputs=2, kernel_shape=[4, 6], storage_order=storage_order)
    near(indices.ravel(), [want, want + 24])


@pytest.mark.parametrize(("count_include_pad", "want"), [(0, [1.5, 3, 4]), (1, [1, 3, 2])])
def test_average_pool_never_counts_what_ceil_mode_adds(device, count_include_pad, want):
    got = run_node(
        device, "AveragePool", row(1, 2, 3, 4), kernel_shape=[3], strides=[2], pads=[1, 1], ceil_mode=1,
        count_include_pad=count_include_pad,
    )  # fmt: skip
    near(got, row(*want))


def test_average_pool_of_float16_does_not_overflow(device):
    x = np.full((1, 1, 4), 60000, np.float16)
    near(run_node(device, "AveragePool", x, kernel_shape=[4]), row(60000))


def test_lp_pool_with_dilation(device):
    got = run_node(device, "LpPool", row(3, 9, -4, 9), kernel_shape=[2], dilations=[2], p=2)
    near(got, row(5, np.sqrt(162)))


def test_max_unpool_inverts_max_pool_of_an_odd_length(device):
    x = row(1, 5, 3, 4, 2)
    y, indices = run_node(device, "MaxPool", x, outputs=2, kernel_shape=[2], strides=[2])
    back = run_node(device, "MaxUnpool", y, indices, ints(1, 1, 5), kernel_shape=[2], strides=[2])
    near(back, row(0, 5, 0, 4, 0))


def test_max_unpool_of_two_channels_inverts_max_pool(device):
    x = random(2, 3, 5, 7)
    window = {"kernel_shape": [2, 3], "strides": [2, 3]}
    y, indices = run_node(device, "MaxPool", x, outputs=2, **window)
    back = run_node(device, "MaxUnpool", y, indices, ints(*x.shape), **window)
    want = np.zeros(x.size, np.float32)
    want[indices.ravel()] = y.ravel()
    near(back, want.reshape(x.shape))


# Normalisation


def test_batch_normalization_7_without_spatial_normalizes_every_element(device):
    x, scale, b, mean, var = random(3, 2, 4), *(random(2, 4 + i)[:, :4] for i in range(3)), np.ones((2, 4), "f")
    got = run_node(device, "BatchNormalization", x, scale, b, mean, var, opset=7, spatial=0, epsilon=0.0)
    near(got, (x - mean) * scale + b, atol=1e-5)


def test_batch_normalization_trains_on_the_population_variance(device):
    x = np.asarray([[1, 10], [3, 30]], np.float32)
    zero, one = np.zeros(2, np.float32), np.ones(2, np.float32)
    y, mean, var = run_node(
        device, "BatchNormalization", x, one, zero, zero, one, outputs=3, opset=15, training_mode=1,
        momentum=0.75, epsilon=0.0,
    )  # fmt: skip
    near(y, [[-1, -1], [1, 1]])
    near(mean, [0.25 * 2, 0.25 * 20])
    near(var, [0.75 + 0.25 * 1, 0.75 + 0.25 * 100])


def test_layer_normalization_of_float16_keeps_its_statistics_in_float32(device):
    x = (random(2, 64) * 500).astype(np.float16)  # the squares overflow float16
    y, mean, factor = run_node(
        device, "LayerNormalization", x, np.ones(64, np.float16), outputs=3, opset=17, epsilon=0.0
    )
    wide = x.astype(np.float64)
    assert (y.dtype, mean.dtype, factor.dtype) == (np.float16, np.float32, np.float32)
    near(mean, wide.mean(1, keepdims=True), rtol=1e-4)
    near(factor, 1 / wide.std(1, keepdims=True), rtol=1e-4)
    near(y, (wide - wide.mean(1, keepdims=True)) / wide.std(1, keepdims=True), rtol=4e-3, atol=2e-3)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_layer_normalization_from_any_axis(device, axis):
    x = random(2, 3, 4)
    axes = tuple(range(axis % 3, 3))
    scale = random(*x.shape[axis % 3 :])
    y, mean, _ = run_node(device, "LayerNormalization", x, scale, outputs=3, axis=axis, epsilon=0.0)
    near(mean, x.mean(axes, keepdims=True))
    near(y, (x - mean) / x.std(axes, keepdims=True) * scale, atol=1e-5)


@pytest.mark.parametrize(
    ("op", "attributes"),
    [
        ("LayerNormalization", {"axis": 2, "epsilon": 1e-3}),
        ("MeanVarianceNormalization", {}),
        ("MeanVarianceNormalization", {"across_channels": 1, "normalize_variance": 0}),
        ("ThresholdedRelu", {"alpha": 0.3}),
    ],
)
def test_what_onnxruntime_has_in_opsets_before_onnx_does(device, op, attributes):
    """Its optimizer writes LayerNormalization into models of any opset."""
    inputs = [random(2, 3, 4)] + [random(4)] * 2 * (op == "LayerNormalization")
    want = onnxruntime_node(op, *inputs, opset=8, **attributes)
    near(run_node(device, op, *inputs, opset=8, **attributes), want, atol=1e-5)


def test_group_normalization_18_scales_groups_and_21_scales_channels(device):
    x = random(1, 4, 3)
    parts = x.reshape(1, 2, 6)
    normal = (parts - parts.mean(2, keepdims=True)) / parts.std(2, keepdims=True)
    normal = normal.reshape(x.shape)
    groups, channels = np.asarray([2, 3], np.float32), np.asarray([2, 2, 3, 3], np.float32)
    for opset, scale in ((18, groups), (21, channels)):
        got = run_node(device, "GroupNormalization", x, scale, 0 * scale, opset=opset, num_groups=2, epsilon=0.0)
        near(got, normal * channels[:, None], atol=1e-5)


def test_lp_normalization_leaves_zeros_as_they_are(device):
    x = np.asarray([[3, -4], [0, 0]], np.float32)
    near(run_node(device, "LpNormalization", x, p=2), [[0.6, -0.8], [0, 0]])
    near(run_node(device, "LpNormalization", x, p=1), [[3 / 7, -4 / 7], [0, 0]])


def test_lrn_of_an_even_size_reaches_further_up(device):
    x = np.asarray([1, 2, 3], np.float32).reshape(1, 3, 1)
    got = run_node(device, "LRN", x, size=2, alpha=2.0, beta=1.0, bias=0.0)
    near(got.ravel(), [1 / 5, 2 / 13, 3 / 9])


def test_skip_layer_normalization_also_returns_the_sum(device):
    x, skip, bias = random(2, 3, 8), random(1, 3, 8), random(8)
    y, _, _, total = run_node(
        device, "SkipLayerNormalization", x, skip, np.ones(8, np.float32), None, bias, outputs=4,
        domain="com.microsoft", epsilon=0.0,
    )  # fmt: skip
    want = x + skip + bias
    near(total, want)
    near(y, (want - want.mean(-1, keepdims=True)) / want.std(-1, keepdims=True), atol=1e-5)


# Dropout and losses


def test_dropout_is_the_identity_unless_it_trains(device):
    x = random(3, 4)
    y, mask = run_node(device, "Dropout", x, np.float32(0.5), outputs=2)
    near(y, x)
    assert mask.dtype == bool and mask.all()


def test_dropout_in_training_scales_what_it_keeps_and_repeats_a_seed(device):
    x = np.ones((50, 40), np.float32)
    runs = [run_node(device, "Dropout", x, np.float32(0.25), np.asarray(True), outputs=2, seed=7) for _ in range(2)]
    (y, mask), (again, _) = runs
    near(y, np.where(mask, 4 / 3, 0))
    near(again, y)
    assert 0.7 < mask.mean() < 0.8


@pytest.mark.parametrize(("reduction", "want"), [("none", [[2, 0], [4, 0]]), ("sum", 6), ("mean", 6 / 3)])
def test_loss_ignores_targets_that_are_no_class(device, reduction, want):
    scores = -np.asarray([[[2, 9], [1, 9]], [[3, 9], [2, 9]]], np.float32)  # [N, C, d]
    target = np.asarray([[0, -1], [1, -1]])
    weight = np.asarray([1, 2], np.float32)
    got = run_node(device, "NegativeLogLikelihoodLoss", scores, target, weight, ignore_index=-1, reduction=reduction)
    near(got, np.asarray(want, np.float32))


def test_softmax_cross_entropy_returns_log_probabilities(device):
    scores = np.asarray([[1000, 1000], [0, np.log(3)]], np.float32)
    loss, log_prob = run_node(
        device, "SoftmaxCrossEntropyLoss", scores, ints(0, 1), outputs=2, opset=13, reduction="none"
    )
    near(loss, -np.log([0.5, 0.75]))
    near(log_prob, np.log([[0.5, 0.5], [0.25, 0.75]]))


# Resize

TIES = {"round_prefer_floor": [0, 0, 1], "round_prefer_ceil": [0, 1, 2], "floor": [0, 0, 1], "ceil": [0, 1, 2]}


@pytest.mark.parametrize("nearest_mode", TIES)
def test_resize_rounds_halves_as_asked(device, nearest_mode):
    """Elements of the result lie at -1/6, 1/2 and 7/6: only the middle one is a tie."""
    got = run_node(device, "Resize", row(0, 1), None, None, ints(1, 1, 3), nearest_mode=nearest_mode)
    middle = TIES[nearest_mode][1]
    near(got, row(0, middle, 1))


def test_resize_by_a_float_third_reads_every_third_element(device):
    """1 / float32(1/3) is 3 in float32, but 2.9999999 in float64, which rounds down to 2."""
    got = run_node(
        device, "Resize", row(*range(9)), None, np.asarray([1, 1, 1 / 3], np.float32), nearest_mode="floor",
        coordinate_transformation_mode="asymmetric",
    )  # fmt: skip
    near(got, row(0, 3, 6))


def test_resize_10_rounds_up_when_it_shrinks(device):
    x = np.arange(1, 9, dtype=np.float32).reshape(1, 1, 2, 4)
    near(run_node(device, "Resize", x, np.asarray([1, 1, 0.6, 0.6], np.float32), opset=10), [[[[1, 3]]]])


def test_resize_crops_and_extrapolates(device):
    got = run_node(
        device, "Resize", row(1, 2, 3), np.asarray([0, 0, 0.5, 1, 1, 1.5], np.float32), None, ints(1, 1, 3),
        mode="linear", coordinate_transformation_mode="tf_crop_and_resize", extrapolation_value=-1.0,
    )  # fmt: skip
    near(got, row(2, 3, -1))


@pytest.mark.parametrize(("policy", "want"), [("not_larger", (1, 1, 4, 6)), ("not_smaller", (1, 1, 5, 8))])
def test_resize_keeps_the_aspect_ratio(device, policy, want):
    got = run_node(
        device, "Resize", random(1, 1, 2, 3), None, None, ints(5, 6), axes=[2, 3],
        keep_aspect_ratio_policy=policy,
    )  # fmt: skip
    assert got.shape == want


def test_resize_of_bytes_saturates_where_the_cubic_overshoots(device):
    got = run_node(device, "Resize", row(0, 255, 255, 0, dtype=np.uint8), None, None, ints(1, 1, 8), mode="cubic")
    assert got.dtype == np.uint8 and got.ravel()[3] == 255 and got.ravel()[0] == 0


def test_resize_with_antialiasing_averages_what_it_skips(device):
    got = run_node(device, "Resize", row(0, 8, 0, 8), None, None, ints(1, 1, 2), mode="linear", antialias=1)
    near(got, row(3, 5))  # weights 1/8, 3/8, 3/8, 1/8; the border stands for what lies outside


@pytest.mark.parametrize("lengths", [(300, 700), (700, 300)])
def test_resize_of_long_axes_equals_interpolation(device, lengths):
    """Long axes gather their neighbours, short ones multiply with a matrix of weights."""
    n, out = lengths
    x = random(1, 2, n)
    got = run_node(
        device, "Resize", x, None, None, ints(1, 2, out), mode="linear",
        coordinate_transformation_mode="align_corners",
    )  # fmt: skip
    at = np.linspace(0, n - 1, out)
    near(got[0], [np.interp(at, np.arange(n), line) for line in x[0]], atol=1e-4)


# Recurrent layers

SUM = {"activations": ["Affine"], "activation_alpha": [1.0], "activation_beta": [0.0], "hidden_size": 1}
ONE = np.ones((1, 1, 1), np.float32)


def steps(*values: float) -> np.ndarray:
    """A sequence [T, 1, 1]."""
    return np.asarray(values, np.float32).reshape(-1, 1, 1)


def test_rnn_backwards_starts_at_the_end_of_each_sequence(device):
    x = np.asarray([[1, 1], [2, 2], [3, 9], [4, 9]], np.float32)[:, :, None]
    lengths = np.asarray([4, 2], np.int32)
    y, last = run_node(device, "RNN", x, ONE, ONE, None, lengths, outputs=2, direction="reverse", **SUM)
    near(y[:, 0, :, 0], [[10, 3], [9, 2], [7, 0], [4, 0]])
    near(last[0, :, 0], [10, 3])


def test_rnn_in_both_directions_batch_first(device):
    x = np.asarray([[[1], [2], [3]]], np.float32)  # [B, T, 1]
    both = {"activations": ["Affine"] * 2, "activation_alpha": [1.0, 2.0], "activation_beta": [0.0, 1.0]}
    w = np.ones((2, 1, 1), np.float32)
    y, last = run_node(device, "RNN", x, w, w, outputs=2, direction="bidirectional", layout=1, hidden_size=1, **both)
    near(y[0, :, :, 0], [[1, 2 * (1 + 19) + 1], [3, 2 * (2 + 7) + 1], [6, 7]])
    near(last[0, :, 0], [6, 41])


@pytest.mark.parametrize(("linear_before_reset", "want"), [(0, 0.25), (1, 0.75)])
def test_gru_applies_the_reset_gate_before_or_after_the_product(device, linear_before_reset, want):
    """z = r = 1/2; the candidate is the reset state times 1 plus the recurrent bias 1, h = (candidate + 1) / 2."""
    r = np.asarray([0, 0, 1], np.float32).reshape(1, 3, 1)
    b = np.asarray([[0, 0, 0, 0, 0, 1]], np.float32)
    _, last = run_node(
        device, "GRU", steps(0), np.zeros((1, 3, 1), np.float32), r, b, None, np.full((1, 1, 1), 1, np.float32),
        outputs=2, hidden_size=1, linear_before_reset=linear_before_reset, activations=["Sigmoid", "Affine"],
        activation_alpha=[1.0], activation_beta=[-1.0],
    )  # fmt: skip
    candidate = 0.5 * 1 + 1 - 1 if linear_before_reset == 0 else 0.5 * (1 + 1) - 1
    near(last.ravel(), [0.5 * candidate + 0.5 * 1])


def sigmoid(x: float) -> float:
    return float(1 / (1 + np.exp(-x)))


def test_lstm_with_peepholes_looks_at_the_old_and_at_the_new_cell(device):
    """Gates in the order i, o, f, c; peepholes in the order i, o, f: only o sees the new cell."""
    w = np.asarray([0, 0, 0, 1], np.float32).reshape(1, 4, 1)
    p = np.asarray([[1, 2, 3]], np.float32)
    cell = np.full((1, 1, 1), 2, np.float32)
    y, h, c = run_node(device, "LSTM", steps(0.5), w, 0 * w, None, None, 0 * cell, cell, p, outputs=3, hidden_size=1)
    want = sigmoid(3 * 2) * 2 + sigmoid(1 * 2) * np.tanh(0.5)
    near(c.ravel(), [want])
    near(h.ravel(), [sigmoid(2 * want) * np.tanh(want)])
    near(y.ravel(), h.ravel())


def test_lstm_clips_what_enters_the_gates_but_not_the_cell(device):
    """As onnxruntime and OpenVINO read "clip is applied to the input of activations"."""
    w = np.asarray([9, 9, 9, 9], np.float32).reshape(1, 4, 1)
    cell = np.full((1, 1, 1), 2, np.float32)
    _, h, c = run_node(
        device, "LSTM", steps(1), w, 0 * w, None, None, 0 * cell, cell, outputs=3, hidden_size=1, clip=0.5
    )
    gate = sigmoid(0.5)
    near(c.ravel(), [gate * 2 + gate * np.tanh(0.5)])
    near(h.ravel(), gate * np.tanh(c.ravel()))


def test_lstm_couples_the_forget_gate(device):
    w = np.asarray([1, 0, 7, 0], np.float32).reshape(1, 4, 1)
    cell = np.ones((1, 1, 1), np.float32)
    _, _, c = run_node(
        device, "LSTM", steps(1), w, 0 * w, None, None, 0 * cell, cell, outputs=3, hidden_size=1, input_forget=1
    )
    near(c.ravel(), [1 - sigmoid(1)])


@pytest.mark.parametrize("hidden", [4, 40])  # directions are joined in small layers
@pytest.mark.parametrize(
    ("op", "attributes"),
    [("RNN", {}), ("GRU", {}), ("GRU", {"linear_before_reset": 1, "clip": 0.5}), ("LSTM", {"input_forget": 1})],
)
def test_both_directions_give_what_each_gives_alone(device, op, attributes, hidden):
    gates, batch = {"RNN": 1, "GRU": 3, "LSTM": 4}[op], 2
    x, lengths = random(6, batch, 3), np.asarray([6, 4], np.int32)
    # Recurrent weights of a layer that is stable: others grow every rounding from step to step.
    recurrent = random(2, gates * hidden, hidden) / np.float32(hidden**0.5)
    own = [random(2, gates * hidden, 3), recurrent, random(2, 2 * gates * hidden)]
    states = [random(2, batch, hidden)] * (2 if op == "LSTM" else 1)
    peepholes = [random(2, 3 * hidden)] if op == "LSTM" else []
    attributes = attributes | {"outputs": 1 + len(states), "hidden_size": hidden}
    y, *last = run_node(
        device, op, x, *own, lengths, *states, *peepholes, direction="bidirectional", compile="on", **attributes
    )
    for d, direction in enumerate(("forward", "reverse")):
        mine = [x, *(v[d : d + 1] for v in own), lengths, *(v[d : d + 1] for v in (*states, *peepholes))]
        want, *ends = run_node("host", op, *mine, direction=direction, **attributes)
        near(y[:, d : d + 1], want, rtol=1e-4, atol=1e-5)
        for end, wanted in zip(last, ends, strict=True):
            near(end[d : d + 1], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("op", ["RNN", "GRU", "LSTM"])
def test_recurrent_layers_with_other_activations_backwards(device, op):
    each = {"RNN": 1, "GRU": 2, "LSTM": 3}[op]
    x, w, r = random(5, 2, 3), *(random(2, {"RNN": 1, "GRU": 3, "LSTM": 4}[op] * 4, n) for n in (3, 4))
    names = ["Tanh"] * each + ["Sigmoid"] * each
    y, _ = run_node(
        device, op, x, w, r, outputs=2, direction="bidirectional", hidden_size=4, activations=names, compile="on"
    )
    for d, direction in enumerate(("forward", "reverse")):
        mine = names[d * each : (d + 1) * each]
        one = run_node(
            "host", op, x, w[d : d + 1], r[d : d + 1], outputs=2, direction=direction, hidden_size=4, activations=mine
        )
        near(y[:, d : d + 1], one[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("op", ["RNN", "GRU", "LSTM"])
def test_compiled_recurrence_equals_eager(accelerator, op):
    gates = {"RNN": 1, "GRU": 3, "LSTM": 4}[op]
    x, w, r, b = random(7, 2, 3), random(2, 4 * gates, 3), random(2, 4 * gates, 4), random(2, 8 * gates)
    lengths = np.asarray([7, 4], np.int32)
    runs = [
        run_node(accelerator, op, x, w, r, b, lengths, outputs=2, hidden_size=4, direction="bidirectional", compile=c)
        for c in ("on", "off")
    ]
    for compiled, eager in zip(*runs, strict=True):
        near(compiled, eager, atol=1e-5)


# Images and boxes


@pytest.mark.parametrize(
    ("padding_mode", "align_corners", "want"),
    [
        ("zeros", 1, [1, 2, 0]),
        ("border", 1, [1, 2, 3]),
        ("reflection", 1, [1, 2, 2]),
        ("zeros", 0, [0.5, 2, 0]),
        ("border", 0, [1, 2, 3]),
        ("reflection", 0, [1, 2, 2]),
    ],
)
def test_grid_sample_pads(device, padding_mode, align_corners, want):
    x = np.asarray([1, 2, 3], np.float32).reshape(1, 1, 1, 3)
    grid = np.zeros((1, 1, 3, 2), np.float32)
    grid[..., 0] = [-1, 0, 2]
    got = run_node(device, "GridSample", x, grid, padding_mode=padding_mode, align_corners=align_corners, mode="linear")
    near(got.ravel(), want)


def test_roi_align_takes_one_sample_per_pixel_unless_told(device):
    x, rois = random(1, 3, 8, 8), np.asarray([[0.5, 1, 6.5, 5]], np.float32)
    size = {"output_height": 2, "output_width": 3, "mode": "avg"}
    adaptive = run_node(device, "RoiAlign", x, rois, ints(0), **size)
    near(adaptive, run_node(device, "RoiAlign", x, rois, ints(0), sampling_ratio=2, **size), atol=1e-5)


def test_roi_align_of_no_region(device):
    got = run_node(device, "RoiAlign", random(1, 3, 8, 8), np.zeros((0, 4), np.float32), ints(), output_height=2)
    assert got.shape == (0, 3, 2, 1)


BOXES = np.asarray([[[0, 0, 1, 1], [0, 0.1, 1, 1.1], [0, 0, 1, 1], [0, 5, 1, 6]]], np.float32)


def suppress(device: str, scores: list[float], *rest: Any) -> list[int]:
    got = run_node(device, "NonMaxSuppression", BOXES, np.asarray([[scores]], np.float32), *rest)
    assert got.dtype == np.int64 and got.shape[1:] == (3,)
    return got[:, 2].tolist()


def test_non_max_suppression_prefers_the_first_among_equals(device):
    limit, overlap = ints(10), np.asarray([0.5], np.float32)
    assert suppress(device, [0.9, 0.9, 0.9, 0.1], limit, overlap) == [0, 3]


def test_non_max_suppression_selects_nothing_by_default(device):
    assert suppress(device, [0.9, 0.8, 0.7, 0.6]) == []


def test_non_max_suppression_needs_a_score_above_the_threshold(device):
    limit, overlap = ints(10), np.asarray([1.0], np.float32)
    assert suppress(device, [0.9, 0.5, 0.8, 0.2], limit, overlap, np.asarray([0.5], np.float32)) == [0, 2]


def test_max_roi_pool_leaves_empty_bins_at_zero(device):
    x = -np.ones((1, 1, 4, 4), np.float32)
    rois = np.asarray([[0, 0, 0, 1, 1], [0, 8, 8, 9, 9]], np.float32)
    near(run_node(device, "MaxRoiPool", x, rois, pooled_shape=[1, 1]).ravel(), [-1, 0])


# Not a number


@pytest.mark.parametrize("op", ["ReduceMax", "ReduceMin", "GlobalMaxPool"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_one_that_is_no_number_wins_in_large_arrays_too(device, op, dtype):
    """Libraries have kernels of their own for these, which may skip it."""
    x = np.random.default_rng(0).standard_normal((1, 3, 64, 96)).astype(dtype)
    x[0, 1, 63, 95] = np.nan
    axes = [] if op == "GlobalMaxPool" else [ints(2, 3)]
    y = run_node(device, op, x, *axes, opset=20)
    np.testing.assert_array_equal(np.isnan(y).ravel(), [False, True, False])


def test_it_survives_in_what_a_compiler_fuses(device):
    x = np.random.default_rng(0).standard_normal((139, 285)).astype(np.float32)
    x[3] = x[7, 9] = np.nan
    session = ep.load(
        parse("agraph (float[n, m] x) => (float[n, m] y) { r = Relu(x)  y = Softmax<axis = -1>(r) }"), device
    )
    rows = np.isnan(session.run(None, {"x": x})[0]).all(axis=1)
    np.testing.assert_array_equal(np.flatnonzero(rows), [3, 7])
