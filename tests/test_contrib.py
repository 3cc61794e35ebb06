"""Do the smaller operators of onnxruntime's own domain do what their documentation says, on every device?

Those of attention, quantization and mixtures of experts have their own files. Expected values are worked out by hand
or by NumPy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from nodes import run_node

import ep


def ms(device: str, op: str, *inputs: Any, **attributes: Any) -> Any:
    return run_node(device, op, *inputs, domain="com.microsoft", **attributes)


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def near(got: np.ndarray, want: Any, tolerance: float = 2e-5) -> None:
    assert got.shape == np.shape(want)
    np.testing.assert_allclose(got, np.asarray(want), rtol=tolerance, atol=tolerance)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def ids(*values: Any) -> np.ndarray:
    return np.asarray(values, np.int64)


# Transforms and matrices


@pytest.mark.parametrize("dims", [1, 2])
def test_real_transforms_and_back(device, dims):
    x = random(2, 4, 6)
    spectrum = ms(device, "Rfft", x, signal_ndim=dims)
    want = np.fft.rfftn(x, axes=range(-dims, 0))
    near(spectrum, np.stack([want.real, want.imag], axis=-1), 1e-4)
    near(ms(device, "Irfft", spectrum, signal_ndim=dims), x)


@pytest.mark.parametrize(("op", "want"), [("ComplexMul", [[-5, 10]]), ("ComplexMulConj", [[11, 2]])])
def test_complex_products(device, op, want):
    """(1 + 2i) · (3 + 4i), and with the second factor conjugate."""
    x, y = np.array([[1, 2]], np.float32), np.array([[3, 4]], np.float32)
    near(ms(device, op, x, y), want)


def test_inverses_of_a_batch(device):
    x = random(3, 4, 4)
    near(np.matmul(ms(device, "Inverse", x), x), np.broadcast_to(np.eye(4), (3, 4, 4)), 1e-3)


@pytest.mark.parametrize(
    ("value", "attributes", "want"),
    [
        (1.0, {}, True), (np.inf, {}, False), (np.nan, {}, False),
        (np.nan, {"isinf_only": 1}, True), (-np.inf, {"isinf_only": 1}, False), (np.inf, {"isnan_only": 1}, True),
    ],
)  # fmt: skip
def test_what_is_not_finite_is_found_in_any_input(device, value, attributes, want):
    got = ms(device, "IsAllFinite", random(3), np.array([0, value], np.float32), **attributes)
    assert got.shape == () and got.dtype == np.bool_ and bool(got) is want


def test_the_step_of_a_range_is_one_unless_given(device):
    assert ms(device, "Range", ids(2), ids(5)).tolist() == [2, 3, 4]
    assert ms(device, "Range", np.float32(2)[None], np.float32(0)[None], np.float32(-0.5)[None]).tolist() == [
        2, 1.5, 1, 0.5,
    ]  # fmt: skip


# Operators that ONNX has dropped


@pytest.mark.parametrize(
    ("op", "attributes", "fn"),
    [
        ("Affine", {"alpha": 2.0, "beta": 1.0}, lambda x: 2 * x + 1),
        ("Scale", {"scale": 3.0}, lambda x: 3 * x),
        ("ScaledTanh", {"alpha": 2.0, "beta": 0.5}, lambda x: 2 * np.tanh(0.5 * x)),
        ("ParametricSoftplus", {"alpha": 2.0, "beta": 3.0}, lambda x: 2 * np.log1p(np.exp(3 * x))),
        ("ImageScaler", {"scale": 2.0, "bias": [1.0, -1.0]}, lambda x: 2 * x + np.array([1, -1]).reshape(1, 2, 1, 1)),
        ("Crop", {"border": [1, 0, 2, 1]}, lambda x: x[:, :, 0:-1, 1:-2]),
        ("Crop", {"border": [1, 2, 9, 9], "scale": [1, 3]}, lambda x: x[:, :, 2:3, 1:4]),
    ],
)
def test_dropped_operators(device, op, attributes, fn):
    x = random(1, 2, 4, 6)
    near(run_node(device, op, x, opset=9, **attributes), fn(x))


# Tokens


def test_words_are_embedded_by_their_characters(device):
    """Windows of two characters whose embeddings are their ids; 0 ends a word, and a word of one fills a window."""
    words = np.array([[1, 2, 3], [2, 0, 0], [0, 1, 1]], np.int32)
    w, b = np.array([[[[1.0], [-1.0]]]], np.float32), np.zeros(1, np.float32)
    got = ms(device, "WordConvEmbedding", words, w, b, np.arange(4, dtype=np.float32)[:, None])
    near(got, [[np.tanh(-1)], [np.tanh(2)], [0]])


@pytest.mark.parametrize(
    ("predicted", "tokens", "match"),
    [
        (None, [1, 2], 2),  # the last token, 2, occurs once: the source goes on at 2
        ([3, 9, 5, 6], [1, 2, 3, 9], -1),  # accepted up to the first that differs from 3 4 3
        ([3, 4, 3, 8], [1, 2, 3, 4, 3, 8], -1),
        ([4, 4, 3, 8], [1, 2, 4], 4),
    ],
)
def test_decoding_goes_on_where_the_source_does(device, predicted, tokens, match):
    given = None if predicted is None else ids(*predicted)
    got, place = ms(device, "BifurcationDetector", ids(1, 2, 3, 4, 3), ids(1, 2), ids(2), given, outputs=2)
    assert got.tolist() == tokens and place.tolist() == [match]


HASHES = {"max_ngram_size": 3, "n_head_per_ngram": 2, "pad_id": 0}
MULTIPLIERS, SIZES = ids(3, 5, 7), ids(10, 11, 12, 13)


def test_hashed_n_grams_by_hand(device):
    got, present = ms(device, "NGramHashMapping", ids([4, 6]), MULTIPLIERS, SIZES, outputs=2, **HASHES)
    pairs = [4 * 3 ^ 0, 6 * 3 ^ 4 * 5]
    assert got[0].tolist() == [[m % 10, m % 11, m % 12, m % 13] for m in pairs]
    assert present.tolist() == [[4, 6]]


def test_requests_one_after_the_other_are_hashed_like_rows(device):
    """Also with a past, ends of text and segments; the second row is shorter."""
    first, second = ids([4, 2, 6, 1]), ids([5, 2])
    past, offsets, eos = ids([7, 8], [2, 9]), ids(100, 200, 300, 400), np.asarray(2, np.int64)
    want = [
        ms(device, "NGramHashMapping", row, MULTIPLIERS, SIZES, past[i : i + 1], offsets, eos, outputs=2,
           reset_on_eos=1, **HASHES)
        for i, row in enumerate([first, second])
    ]  # fmt: skip
    got, present, _, states = ms(
        device, "VarlenNGramHashMapping", np.concatenate([first[0], second[0]]), MULTIPLIERS, SIZES,
        np.array([0, 4, 6], np.int32), past, offsets, eos, np.zeros(6, np.int32), None,
        np.array([1, 5], np.int32), outputs=4, reset_on_eos=1, state_update_capacity=3, **HASHES,
    )  # fmt: skip
    assert got.tolist() == np.concatenate([w[0][0] for w in want]).tolist()
    assert present.tolist() == np.concatenate([w[1] for w in want]).tolist()
    assert states.tolist() == [[[8, 4], [0, 0], [0, 0]], [[9, 5], [5, 2], [0, 0]]]


# Gates and streams


def test_a_gate_scales_what_is_added(device):
    x, y, gate, weight = random(2, 3), random(3, 2).reshape(2, 3), random(2, 1), random(1, 1)
    near(ms(device, "GatedAdd", x, y, gate), x + y * gate)
    near(ms(device, "GatedAdd", x, y, gate, weight), x + y * sigmoid(gate @ weight))


def test_decay_and_rate_of_linear_attention(device):
    a, bias, scale, b = random(2, 3, 4), random(4), random(4, 1)[:, 0], random(2, 3, 4) + 1
    decay, beta = ms(device, "LinearAttentionGate", a, bias, scale, b, outputs=2)
    near(decay, scale * np.log1p(np.exp(a + bias)))
    near(beta, sigmoid(b))


def test_streams_are_mixed_grouped_and_flattened(device):
    streams, block, post, mix = random(2, 3, 4), random(2, 4), random(2, 3), random(2, 3, 3)
    want = np.einsum("bck,bch->bkh", mix, streams) + post[..., None] * block[:, None]
    near(ms(device, "HyperConnectionPostMix", streams, block, post, mix), want)
    flat = ms(device, "HyperConnectionPostMix", streams.reshape(2, 12), block, post, mix, num_branches=3)
    near(flat, want.reshape(2, 12))
    near(
        ms(device, "HyperConnectionPreMix", streams, post, reduction_scale=0.5),
        0.5 * (streams * post[..., None]).sum(axis=1),
    )


def test_low_rank_gates_of_streams(device):
    """One branch of width 2, all gate weights 0: every gate is ½."""
    streams, zeros = np.array([[3.0, 4.0]], np.float32), np.zeros((2, 1), np.float32)
    output, post, out = ms(
        device, "HyperConnectionLowRankMix", streams, np.ones(2, np.float32), zeros, zeros.T.copy(), zeros,
        num_branches=1, epsilon=0.0, gate_mul=3.0, reduction_scale=2.0, outputs=3,
    )  # fmt: skip
    near(output, streams / np.sqrt(12.5))
    near(post, [[1.5]])
    near(out, streams)


def test_engram_gate_of_equal_key_and_query(device):
    """Key and query of norm √2 each in every direction: their product is √2, and its root the gate's logit."""
    key = np.full((1, 1, 1, 2), 5, np.float32)
    value, ones = np.array([[[2.0, -4.0]]], np.float32), np.ones((1, 2), np.float32)
    gated, normed = ms(device, "EngramGate", key, key, value, ones, ones, ones, epsilon=0.0, outputs=2)
    near(gated, sigmoid(np.sqrt(np.sqrt(2))) * value[:, :, None])
    near(normed, value[:, :, None] / np.sqrt(10))


def test_experts_are_chosen_from_the_best_groups(device):
    """Groups {0, 1} and {2, 3}: by their two best scores the first wins, although expert 2 is the best of all."""
    logits, bias = np.array([[1.0, 1.0, 3.0, -9.0]], np.float32), np.array([0, 0.25, 0, 0], np.float32)
    got = ms(device, "MoEGroupRouter", logits, bias, n_group=2, topk_group=1, top_k=1)
    near(got, [[-10000, np.log(sigmoid(np.float32(1))), -10000, -10000]])


def test_the_first_product_of_a_router_is_split(device):
    x, w = random(2, 3).astype(np.float16), random(3, 6).astype(np.float16)
    router, activated = ms(device, "RouterGateUpProj", x, w, router_size=2, outputs=2)
    y = x.astype(np.float32) @ w.astype(np.float32)
    near(router.astype(np.float32), y[:, :2], 5e-3)
    near(activated.astype(np.float32), y[:, 2:4] * sigmoid(y[:, 2:4]) * y[:, 4:], 1e-2)


def test_contradictions_are_refused():
    with pytest.raises(ep.EpError, match="both isinf_only and isnan_only"):
        ms("host", "IsAllFinite", random(2), isinf_only=1, isnan_only=1)
    with pytest.raises(ep.EpError, match="normalized=1"):
        ms("host", "Rfft", random(4), normalized=1)


@pytest.mark.parametrize("group", [1, 2])
def test_convolution_channels_last_takes_weights_of_either_layout(device, group):
    """onnxruntime's optimizer writes [M, h, w, C / group], its documentation says [M, C / group, h, w]."""
    x, w = random(1, 6, 5, 4), random(6, 4 // group, 3, 2)
    want = np.moveaxis(run_node(device, "Conv", np.moveaxis(x, 3, 1), w, group=group), 1, 3)
    for weights in (np.moveaxis(w, 1, 3), w):
        near(ms(device, "NhwcConv", x, weights, group=group, kernel_shape=[3, 2]), want)
    w = random(3, 3, 3, 3)  # fits both: the optimizer's, since all models come from it
    want = np.moveaxis(run_node(device, "Conv", np.moveaxis(x[..., :3], 3, 1), w), 1, 3)
    near(ms(device, "NhwcConv", x[..., :3], np.moveaxis(w, 1, 3)), want)
