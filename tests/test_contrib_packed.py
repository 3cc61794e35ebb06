"""Do the operators over packed weights, packed sequences and memories give what onnxruntime gives?"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from nodes import onnxruntime_node, run_node

import ep
from ep.ops.packed_formats import FORMATS

MS = {"domain": "com.microsoft", "opset": 21}
RNG = np.random.default_rng(7)


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def agree(device: str, op: str, *inputs: Any, outputs: int = 1, tolerance: float = 1e-5, **attributes: Any) -> None:
    want = onnxruntime_node(op, *inputs, outputs=outputs, **MS, **attributes)
    got = run_node(device, op, *inputs, outputs=outputs, compile="on", **MS, **attributes)
    for g, w in zip([got] if outputs == 1 else got, [want] if outputs == 1 else want, strict=True):
        assert g.dtype == w.dtype and g.shape == w.shape
        scale = max(1.0, float(np.abs(w.astype(np.float64)).max(initial=0)))
        np.testing.assert_allclose(g.astype(np.float64) / scale, w.astype(np.float64) / scale, atol=tolerance)


# Packed weights


def packed(kind: int, rows: int, length: int) -> np.ndarray:
    """Random rows whose float16 scales are small numbers."""
    if kind in (0, 1, 30):
        dtype = {0: np.float32, 1: np.float16, 30: ml_dtypes.bfloat16}[kind]
        return floats(rows, length).astype(dtype).view(np.uint8)
    size, width, _ = FORMATS[kind]
    blocks = RNG.integers(0, 256, (rows, length // size, width)).astype(np.uint8)
    for start in {14: (208,), 13: (0, 2)}.get(kind, (0,)):
        scales = (RNG.random(blocks.shape[:2]) / 10).astype(np.float16)
        blocks[..., start : start + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("kind", FORMATS)
def test_packed_embeddings(device, kind):
    """Indices outside the table read its first row."""
    indices = np.array([[1, 0], [-1, 7], [4, 2]], np.int64)
    agree(device, "GatherPacked", packed(kind, 5, 512), indices, packed_type=kind, output_dtype=1, K=512)


def test_formats_with_codebooks_are_refused():
    with pytest.raises(ep.UnsupportedModel, match="packed_type 16"):
        run_node("host", "GatherPacked", np.zeros((2, 66), np.uint8), np.array([0]), packed_type=16, K=256, **MS)


@pytest.mark.parametrize(("kind", "size"), [(0, 32), (1, 32), (2, 64)])
@pytest.mark.parametrize("length", [64, 40])
def test_products_with_blobs_of_four_bits(device, kind, size, length):
    """Each column in blocks of a float32 scale, a zero point for kind 1, and low halves before high ones."""
    q = RNG.integers(0, 16, (3, -(-length // size), size))
    scales, zeros = RNG.random(q.shape[:2]).astype(np.float32), RNG.integers(0, 16, q.shape[:2])
    halves = q.reshape(*q.shape[:2], -1, 2, 16)
    data = (halves[..., 0, :] | halves[..., 1, :] << 4).reshape(*q.shape[:2], -1).astype(np.uint8)
    parts = [scales[..., None].view(np.uint8), *([zeros[..., None].astype(np.uint8)] if kind == 1 else []), data]
    weights = (q - (zeros if kind == 1 else 8 + 0 * zeros)[..., None]) * scales[..., None]
    x = floats(2, length)
    blob = np.concatenate(parts, axis=-1).reshape(-1)
    y = run_node(device, "MatMulFpQ4", x, blob, np.array([length, 3]), blk_quant_type=kind, **MS)
    np.testing.assert_allclose(y, x @ weights.reshape(3, -1)[:, :length].T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("segments", [True, False])
def test_quantized_embeddings_of_bert(device, segments):
    def quantized(*shape: int) -> np.ndarray:
        return RNG.integers(0, 255, shape).astype(np.uint8)

    def unless(kept: Any) -> Any:
        return kept if segments else None

    words = RNG.integers(0, 10, (2, 4)).astype(np.int32)
    tables = (quantized(10, 8), quantized(6, 8), unless(quantized(2, 8)), quantized(8), quantized(8))
    scales = [np.array(s, np.float32) for s in (0.05, 0.03, 0.02, 0.04, 0.01)]
    zeros = [np.array(z, np.uint8) for z in (120, 130, 110, 100, 140)]
    scales[2], zeros[2] = unless(scales[2]), unless(zeros[2])
    kinds = unless(RNG.integers(0, 2, (2, 4)).astype(np.int32))
    mask = np.array([[1, 1, 1, 0], [1, 1, 0, 0]], np.int32)
    inputs = (words, kinds, *tables, mask, *scales, *zeros)
    agree(device, "QEmbedLayerNormalization", *inputs, outputs=2, tolerance=1e-4, epsilon=1e-6)


@pytest.mark.parametrize("activation", ["NONE", "RELU"])
def test_products_of_eight_bit_floats(device, activation):
    """All values are multiples of eighths: the product is exact, and rounded once to eight bits."""
    a, b = (RNG.integers(-4, 5, shape).astype(ml_dtypes.float8_e4m3fn) for shape in ((3, 8), (8, 2)))
    c, scales = RNG.integers(-2, 3, (3, 2)).astype(np.float32), [np.array([s], np.float32) for s in (0.5, 2, 0.25)]
    y = run_node(device, "GemmFloat8", a, b, c, *scales, activation=activation, alpha=0.5, beta=2.0, dtype=17, **MS)
    want = 0.5 * (a.astype(np.float32) * 0.5) @ (b.astype(np.float32) * 2) + 2 * c
    want = (np.maximum(want, 0) if activation == "RELU" else want) * np.float32(0.25)
    assert (y == want.astype(ml_dtypes.float8_e4m3fn)).all()


@pytest.mark.parametrize(("shape", "kernel"), [((2, 3, 8), [3]), ((1, 2, 5, 6), [2, 3]), ((1, 2, 4, 5, 3), [2, 2, 2])])
@pytest.mark.parametrize("padded", [False, True])
def test_maxima_up_to_a_mask(device, shape, kernel, padded):
    mask = (RNG.random((1, 1, *shape[2:])) > 0.3).astype(np.int32)
    more = {"strides": [2] * len(kernel), "pads": [1] * 2 * len(kernel)} if padded else {}
    agree(device, "MaxpoolWithMask", floats(*shape), mask, kernel_shape=kernel, **more)


# Recurrences


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("layer", [True, False])
def test_lstm_with_attention(device, direction, layer):
    steps, batch, size, hidden, depth, queries, found = 5, 3, 4, 6, 7, 5, 8
    n = 2 if direction == "bidirectional" else 1
    inputs = (
        floats(steps, batch, size),
        floats(n, 4 * hidden, size + (found if layer else depth)) / 3,
        floats(n, 4 * hidden, hidden) / 3,
        floats(n, 8 * hidden),
        np.array([5, 3, 2], np.int32),
        None,
        None,
        floats(n, 3 * hidden),
        floats(n, hidden, queries),
        floats(n, depth, queries),
        floats(n, queries),
        floats(batch, 9, depth),
        np.array([9, 4, 6], np.int32),
        floats(n, depth + hidden, found) if layer else None,
    )
    agree(device, "AttnLSTM", *inputs, outputs=3, tolerance=1e-4, direction=direction, hidden_size=hidden)


ENDS = np.array([0, 3, 4, 9], np.int32)
TOKENS, KEYS, HEADS, DK, DV = 9, 2, 4, 8, 6


def delta_inputs(rule: str, per_key: bool = False) -> list[Any]:
    decay = -RNG.random((TOKENS, HEADS, DK) if per_key else (TOKENS, HEADS)).astype(np.float32)
    rate = RNG.random((TOKENS, HEADS)).astype(np.float32)
    return [
        floats(TOKENS, KEYS, DK), floats(TOKENS, KEYS, DK), floats(TOKENS, HEADS, DV), ENDS,
        decay if "gated" in rule else None, rate if "delta" in rule else None, floats(3, HEADS, DV, DK),
    ]  # fmt: skip


@pytest.mark.parametrize("rule", ["linear", "gated", "delta", "gated_delta"])
def test_gated_delta_rules(device, rule):
    agree(device, "GatedDeltaNet", *delta_inputs(rule), outputs=2, tolerance=1e-4, update_rule=rule, qk_l2_norm=1)


@pytest.mark.parametrize("gate", ["softplus", "sigmoid"])
def test_gates_of_the_delta_rule(gate):
    inputs = [*delta_inputs("gated_delta", per_key=True), floats(HEADS), floats(HEADS)]
    more = {"gate_activation": gate, "beta_activation": "sigmoid", "qk_l2_norm": 1}
    agree("host", "GatedDeltaNet", *inputs, outputs=2, tolerance=1e-4, **more)


def test_batches_and_packed_inputs_of_the_delta_rule():
    q, k, v, _, decay, rate, state = delta_inputs("gated_delta")
    packed = np.concatenate([x[:6].reshape(6, -1) for x in (q, k, v)], axis=1)
    inputs = (packed, None, None, None, decay[:6], rate[:6], state[:2])
    agree("host", "GatedDeltaNet", *inputs, outputs=2, tolerance=1e-4, qk_l2_norm=1)
    batch = [x[:6].reshape(2, 3, *x.shape[1:]) for x in (q, k, v)]
    more = [x[:6].reshape(2, 3, -1) for x in (decay, rate)]
    agree("host", "GatedDeltaNet", *batch, None, *more, state[:2], outputs=2, tolerance=1e-4, qk_l2_norm=1)


def test_captured_transitions_replay_the_state():
    """S *= decay; S += outer(delta, key) for each captured token gives the state after it."""
    q, k, v, _, decay, rate, state = (x if x is None else x[:2] for x in delta_inputs("gated_delta"))
    inputs = (q, k, v, np.array([0, 2], np.int32), decay, rate, state[:1], None, None, np.array([2], np.int32))
    attributes = {"state_update_capacity": 2, "qk_l2_norm": 1}
    _, final, update = run_node("host", "GatedDeltaNet", *inputs, outputs=3, **MS, **attributes)
    parts = np.split(update[0], np.cumsum([2 * HEADS, 2 * KEYS * DK]))
    decays, keys, deltas = (
        p.reshape(2, *shape) for p, shape in zip(parts, ((HEADS,), (KEYS, DK), (HEADS, DV)), strict=True)
    )
    s = state[0].copy()
    for t in range(2):
        s = s * decays[t][:, None, None] + deltas[t][:, :, None] * np.repeat(keys[t], HEADS // KEYS, axis=0)[:, None, :]
    np.testing.assert_allclose(s, final[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("taps", "dilation"), [(4, 1), (3, 2), (1, 1)])
def test_convolution_over_packed_sequences(device, taps, dilation):
    inputs = (floats(TOKENS, 5), floats(5, 1, taps), ENDS, floats(5), floats(3, 5, (taps - 1) * dilation))
    agree(device, "VarlenCausalConvWithState", *inputs, outputs=2, dilation=dilation, activation="silu")


def test_captured_tokens_of_the_convolution():
    inputs = (floats(TOKENS, 5), floats(5, 1, 4), ENDS, None, floats(3, 5, 3), np.array([2, 5, 0], np.int32))
    agree("host", "VarlenCausalConvWithState", *inputs, outputs=3, state_update_capacity=2)


def test_ends_that_do_not_fit_are_refused():
    inputs = (floats(TOKENS, 5), floats(5, 1, 4), np.array([0, 3, 4, 8], np.int32), None, floats(3, 5, 3))
    with pytest.raises(ep.InvalidInput, match="do not divide 9 tokens"):
        run_node("host", "VarlenCausalConvWithState", *inputs, outputs=2, **MS)


# Pages

PAGE, BLOCKS = 4, 8


def paged(seed: int = 0, latent: bool = False) -> dict[str, Any]:
    """Two sequences: 5 cached and 3 new tokens, 0 cached and 2 new; heads of 8 channels, 4 for queries, 2 for keys."""
    rng = np.random.default_rng(seed)

    def halves(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float16)

    groups = 1 if latent else 2
    return {
        "query": halves(5, 4 * 8), "key": halves(5, groups * 8),
        "value": None if latent else halves(5, groups * 8),
        "key_cache": halves(BLOCKS, PAGE, groups, 8),
        "value_cache": None if latent else halves(BLOCKS, PAGE, groups, 8),
        "cumulative_sequence_length": np.array([0, 3, 5], np.int32), "past_seqlens": np.array([5, 0], np.int32),
        "block_table": np.array([[6, 2, -1], [3, -1, -1]], np.int32),
    }  # fmt: skip


def by_sequences(
    x: dict[str, Any], window: int = 0, softcap: float = 0.0, sink: Any = None, width: int = 0
) -> np.ndarray:
    """The same, one sequence, token and head after the other."""
    ends, rows = x["cumulative_sequence_length"], []
    groups = x["key_cache"].shape[2]
    for b, past in enumerate(x["past_seqlens"]):
        pages = [p for p in x["block_table"][b] if p >= 0]
        new = slice(ends[b], ends[b + 1])
        parts = []
        for kind in ("key", "value"):
            cache = x[f"{kind}_cache"] if x[f"{kind}_cache"] is not None else x["key_cache"]
            own = x[kind] if x[kind] is not None else x["key"]
            old = cache[pages].reshape(-1, groups, 8)[:past]
            parts.append(np.concatenate([old, own[new].reshape(-1, groups, 8)]).astype(np.float64))
        k, v = parts
        v = v[..., :width] if width else v
        for t, q in enumerate(x["query"][new].reshape(-1, 4, 8).astype(np.float64)):
            at, heads = past + t, []
            for h in range(4):
                g = h * groups // 4
                seen = slice(max(0, at - window + 1) if window else 0, at + 1)
                logits = k[seen, g] @ q[h] / np.sqrt(8)
                logits = np.tanh(logits / softcap) * softcap if softcap else logits
                e = np.exp(logits)
                heads.append(e @ v[seen, g] / (e.sum() + (np.exp(float(sink[h])) if sink is not None else 0)))
            rows.append(np.concatenate(heads))
    return np.array(rows)


PAGED = {
    "plain": {},
    "window": {"window": 2},
    "softcap": {"softcap": 3.0},
    "sink": {"sink": np.array([0.5, -1, 0, 2], np.float16)},
}


@pytest.mark.parametrize("name", PAGED)
def test_attention_over_pages(device, name):
    x, more = paged(), PAGED[name]
    attributes = {"num_heads": 4, "kv_num_heads": 2, "local_window_size": more.get("window", -1)}
    attributes["softcap"] = more.get("softcap", 0.0)
    rest = [None, None, None, more.get("sink")]
    y, keys, _ = run_node(device, "PagedAttention", *x.values(), *rest, outputs=3, **MS, **attributes)
    assert y.dtype == np.float16
    np.testing.assert_allclose(y.astype(np.float64), by_sequences(x, **more), rtol=2e-3, atol=2e-3)
    written = keys.reshape(-1, 2, 8)  # positions 5, 6 and 7 lie in page 2, positions 0 and 1 in page 3
    assert (written[[9, 10, 11, 12, 13]] == x["key"].reshape(-1, 2, 8)).all()
    untouched = [i for i in range(PAGE * BLOCKS) if i not in (9, 10, 11, 12, 13)]
    assert (written[untouched] == x["key_cache"].reshape(-1, 2, 8)[untouched]).all()


def test_slots_say_where_to_write():
    """A slot of -1 keeps the cache as it is."""
    x = paged()
    slots = np.array([0, -1, 31, -1, 1], np.int32)
    y, keys, _ = run_node(
        "host", "PagedAttention", *x.values(), None, None, slots, outputs=3, num_heads=4, kv_num_heads=2, **MS
    )
    written = keys.reshape(-1, 2, 8)
    assert (written[[0, 31, 1]] == x["key"].reshape(-1, 2, 8)[[0, 2, 4]]).all()
    assert (written[9:14] == x["key_cache"].reshape(-1, 2, 8)[9:14]).all()


def test_latent_pages():
    """One cache holds keys, whose first channels are the values."""
    x = paged(latent=True)
    attributes = {"num_heads": 4, "kv_num_heads": 1, "kv_cache_layout": "LATENT", "v_head_size": 6, "scale": 8**-0.5}
    y = run_node("host", "PagedAttention", *x.values(), **MS, **attributes)
    np.testing.assert_allclose(y.astype(np.float64), by_sequences(x, width=6), rtol=2e-3, atol=2e-3)


def test_pages_of_eight_bits():
    """Powers of two as scales, and numbers that they hold exactly."""
    x = paged()
    for kind in ("key", "value"):
        x[kind] = np.round(x[kind] * 8).astype(np.float16) / np.float16(8)
        x[f"{kind}_cache"] = RNG.integers(-20, 20, x[f"{kind}_cache"].shape).astype(np.int8)
    plain = x | {f"{kind}_cache": x[f"{kind}_cache"].astype(np.float16) / 8 for kind in ("key", "value")}
    scales = [np.array([0.125], np.float32)] * 2
    kinds = {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR"}
    inputs = (*x.values(), *[None] * 6, *scales)
    y, keys, _ = run_node("host", "PagedAttention", *inputs, outputs=3, num_heads=4, kv_num_heads=2, **kinds, **MS)
    np.testing.assert_allclose(y.astype(np.float64), by_sequences(plain), rtol=2e-3, atol=2e-3)
    assert keys.dtype == np.int8 and (keys.reshape(-1, 16)[9] == x["key"][0] * 8).all()


def test_rotation_over_pages_is_that_of_the_operator():
    """Positions go on from the cached tokens."""
    x = paged()
    angles = np.arange(16)[:, None] * np.array([1, 0.3, 0.1, 0.03])
    cos, sin = np.cos(angles).astype(np.float16), np.sin(angles).astype(np.float16)
    y = run_node("host", "PagedAttention", *x.values(), cos, sin, num_heads=4, kv_num_heads=2, do_rotary=1, **MS)
    at = np.array([5, 6, 7, 0, 1])
    turned = dict(x)
    for name, heads in (("query", 4), ("key", 2)):
        rows = x[name].reshape(1, 5, heads, 8).transpose(0, 2, 1, 3)
        rows = run_node("host", "RotaryEmbedding", rows, cos[at][None], sin[at][None], opset=23)
        turned[name] = rows.transpose(0, 2, 1, 3).reshape(5, -1)
    np.testing.assert_allclose(y.astype(np.float64), by_sequences(turned), rtol=4e-3, atol=4e-3)
