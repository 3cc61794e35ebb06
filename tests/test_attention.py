"""Do the operators of transformers attend to what they must, in whatever form and portions it is given?

Most tests compare two ways to the same result: a prompt at once or token by token, a mask in two notations,
padded and packed batches. The others have hand-made values.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from nodes import run_node

MICROSOFT = {"domain": "com.microsoft"}
COMPILE = pytest.mark.parametrize("compile", ["off", "on"])


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def i32(*values: Any) -> np.ndarray:
    return np.asarray(values, np.int32)


def near(got: np.ndarray, want: Any, tolerance: float = 2e-5) -> None:
    want = np.asarray(want)
    assert got.shape == want.shape
    np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=tolerance, atol=tolerance)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


# Attention of ONNX


def test_consecutive_heads_share_keys_and_values(device):
    """With equal scores the output is the mean of the values; heads 0 and 1 read the first, 2 and 3 the second."""
    q, k, v = np.zeros((1, 4, 2, 8), np.float32), normal(1, 2, 3, 8), normal(1, 2, 3, 8)
    y = run_node(device, "Attention", q, k, v, opset=23)
    near(y, np.repeat(v.mean(axis=2, keepdims=True), 2, axis=1).repeat(2, axis=2))


def test_three_axes_are_split_into_heads(device):
    q, k, v = normal(2, 3, 4 * 8), normal(2, 5, 2 * 8), normal(2, 5, 2 * 6)
    flat = run_node(device, "Attention", q, k, v, opset=23, q_num_heads=4, kv_num_heads=2)
    heads = [x.reshape(*x.shape[:2], n, -1).swapaxes(1, 2) for x, n in ((q, 4), (k, 2), (v, 2))]
    y = run_node(device, "Attention", *heads, opset=23)
    near(flat, y.swapaxes(1, 2).reshape(2, 3, -1))


@COMPILE
def test_a_causal_query_sees_the_past_and_itself(device, compile):
    q, k, v = normal(1, 2, 5, 8), normal(1, 2, 5, 8, seed=1), normal(1, 2, 5, 8, seed=2)
    whole = run_node(device, "Attention", q, k, v, opset=23, is_causal=1, compile=compile)
    later, key, value = run_node(
        device, "Attention", q[:, :, 3:], k[:, :, 3:], v[:, :, 3:], None, k[:, :, :3], v[:, :, :3], opset=23,
        is_causal=1, outputs=3, compile=compile,
    )  # fmt: skip
    near(later, whole[:, :, 3:])
    near(key, k)
    near(value, v)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_query_that_sees_nothing_gives_zeros(device, kind):
    q, k, v = normal(1, 1, 2, 8), normal(1, 1, 3, 8), normal(1, 1, 3, 8)
    mask = np.asarray([[True, False, True], [False, False, False]])
    mask = mask if kind == "bool" else np.where(mask, 0, -np.inf).astype(np.float32)
    y, _, _, p = run_node(device, "Attention", q, k, v, mask, opset=23, outputs=4, qk_matmul_output_mode=3)
    assert not y[0, 0, 1].any() and not p[0, 0, 1].any()
    near(y, p @ v)
    near(p[0, 0, 0], softmax(q[0, 0, 0] @ k[0, 0, [0, 2]].T / np.sqrt(8))[[0, 0, 1]] * [1, 0, 1])


def test_a_short_mask_forbids_the_rest(device):
    q, k, v = normal(1, 1, 2, 8), normal(1, 1, 4, 8), normal(1, 1, 4, 8)
    y = run_node(device, "Attention", q, k, v, np.ones((2, 2), bool), opset=24)
    near(y, run_node(device, "Attention", q, k[:, :, :2], v[:, :, :2], opset=24))


def test_the_cap_comes_before_the_mask(device):
    """A capped -inf would be -1, and seen."""
    q, k, v = normal(1, 1, 1, 8), normal(1, 1, 2, 8), normal(1, 1, 2, 8)
    y = run_node(device, "Attention", q, k, v, np.asarray([[0, -np.inf]], np.float32), opset=23, softcap=1.0)
    near(y, v[:, :, :1])


@pytest.mark.parametrize(("mode", "stage"), [(0, "raw"), (1, "capped"), (2, "masked"), (3, "softmax")])
def test_each_stage_can_be_seen(device, mode, stage):
    q, k, v, mask = normal(1, 1, 2, 8), normal(1, 1, 3, 8), normal(1, 1, 3, 8), normal(2, 3)
    got = run_node(device, "Attention", q, k, v, mask, opset=23, outputs=4, qk_matmul_output_mode=mode,
                   softcap=0.0 if stage == "raw" else 2.0)[3]  # fmt: skip
    raw = q @ k.swapaxes(2, 3) / np.sqrt(8)
    capped = 2 * np.tanh(raw / 2)
    near(got, {"raw": raw, "capped": capped, "masked": capped + mask, "softmax": softmax(capped + mask)}[stage])


def test_an_external_cache_is_aligned_to_its_end(device):
    """Of 3 queries over 2 valid keys the first one sees nothing, the second the first key."""
    q, k, v = normal(1, 1, 3, 8), normal(1, 1, 4, 8), normal(1, 1, 4, 8)
    y = run_node(device, "Attention", q, k, v, None, None, None, np.asarray([2]), opset=24, is_causal=1)
    assert not y[0, 0, 0].any()
    near(y[0, 0, 1], v[0, 0, 0])


def test_a_window_bounds_the_distance_on_both_sides(device):
    q, k, v = np.zeros((1, 1, 4, 8), np.float32), normal(1, 1, 6, 8), np.eye(6, dtype=np.float32)[None, None]
    y = run_node(device, "Attention", q, k, v, opset=25, left_window_size=2, right_window_size=1)
    seen = [[1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 0]]
    near(y[0, 0], np.asarray(seen) / np.sum(seen, axis=1, keepdims=True))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_halves_do_not_overflow_inside(device, dtype):
    """Logits of 90000, beyond float16, of which the difference counts."""
    q = np.full((1, 1, 1, 16), 150, dtype)
    k = np.stack([np.full(16, 150), np.full(16, 150.0)]).astype(dtype)[None, None]
    v = np.asarray([[1.0], [3.0]], dtype)[None, None]
    near(run_node(device, "Attention", q, k, v, opset=23), np.full((1, 1, 1, 1), 2.0))


# Rotary embedding


@pytest.mark.parametrize(("interleaved", "want"), [(0, [-3, -4, 1, 2, 5]), (1, [-2, 1, -4, 3, 5])])
def test_rotary_embedding_turns_pairs_and_leaves_the_rest(device, interleaved, want):
    """By a quarter: (a, b) becomes (-b, a). The fifth channel is outside."""
    x = np.asarray([1, 2, 3, 4, 5], np.float32).reshape(1, 1, 1, 5)
    cos, sin = np.zeros((1, 2), np.float32), np.ones((1, 2), np.float32)
    y = run_node(device, "RotaryEmbedding", x, cos, sin, np.zeros((1, 1), np.int64), opset=23,
                 interleaved=interleaved, rotary_embedding_dim=4)  # fmt: skip
    near(y.ravel(), want)


def angles(positions: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    turns = np.arange(positions)[:, None] / 10.0 ** np.arange(size // 2)
    return np.cos(turns).astype(np.float32), np.sin(turns).astype(np.float32)


def test_one_position_is_that_of_the_first_token(device):
    x, tables = normal(2, 3, 16), angles(9, 8)
    first = run_node(device, "RotaryEmbedding", x, np.asarray([4]), *tables, **MICROSOFT)
    near(first, run_node(device, "RotaryEmbedding", x, np.tile(np.arange(4, 7), (2, 1)), *tables, **MICROSOFT))


# GroupQueryAttention

HEADS, GROUPS, SIZE = 4, 2, 16
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"local_window_size": 3},
    "capped": {"softcap": 2.0},
    "smooth": {"smooth_softmax": 1},
    "rotary": {"do_rotary": 1},
    "interleaved": {"do_rotary": 1, "rotary_interleaved": 1},
}


def tokens(batch: int, length: int) -> tuple[np.ndarray, ...]:
    """Queries, keys and values."""
    widths = HEADS * SIZE, GROUPS * SIZE, GROUPS * SIZE
    return tuple(normal(batch, length, width, seed=i) for i, width in enumerate(widths))


def grouped(device: str, qkv: Any, past: Any, totals: Any, bound: int | None = None, rest: Any = (), **how: Any) -> Any:
    """Output, present keys and values; `totals` are the tokens of each entry after this step."""
    tables = angles(64, SIZE) if how.get("do_rotary") else (None, None)
    compile = how.pop("compile", "off")
    outputs = how.pop("outputs", 3)
    lengths, total = np.asarray(totals, np.int32) - 1, np.asarray(bound or max(totals), np.int32)
    return run_node(
        device, "GroupQueryAttention", *qkv, *past, lengths, total, *tables, *rest, outputs=outputs, compile=compile,
        num_heads=HEADS, kv_num_heads=GROUPS, **MICROSOFT, **how,
    )  # fmt: skip


def buffers(batch: int, length: int) -> list[np.ndarray]:
    """A cache whose rows hold nothing yet, and so anything."""
    return [np.full((batch, GROUPS, length, SIZE), np.nan, np.float32) for _ in range(2)]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("cache", ["growing", "shared"])
def test_tokens_one_by_one_attend_as_the_whole_prompt_does(device, variant, cache):
    qkv, how = tokens(2, 6), VARIANTS[variant]
    whole, keys, values = grouped(device, qkv, (None, None), [6, 6], **how)
    past: Any = (None, None) if cache == "growing" else buffers(2, 9)
    for portion in (slice(0, 3), slice(3, 4), slice(4, 5), slice(5, 6)):
        y, *past = grouped(device, [x[:, portion] for x in qkv], past, [portion.stop] * 2, **how)
        near(y, whole[:, portion])
    near(past[0][:, :, :6], keys)
    near(past[1][:, :, :6], values)
    assert past[0].shape[2] == (6 if cache == "growing" else 9)


@COMPILE
def test_entries_of_a_batch_have_pasts_of_their_own(device, compile):
    qkv, how = tokens(2, 5), {"do_rotary": 1, "compile": compile}
    _, *past = grouped(device, [x[:, :4] for x in qkv], buffers(2, 8), [4, 2], bound=4, **how)
    step = [np.stack([x[0, 4:5], x[1, 2:3]]) for x in qkv]
    y, *_ = grouped(device, step, past, [5, 3], **how)
    for entry, length in enumerate((5, 3)):
        alone = [x[entry : entry + 1, :length] for x in qkv]
        near(y[entry, 0], grouped(device, alone, (None, None), [length], do_rotary=1)[0][0, -1])


def test_queries_keys_and_values_may_lie_side_by_side(device):
    qkv = tokens(2, 3)
    packed = [np.concatenate(qkv, axis=2), None, None]
    for got, want in zip(
        grouped(device, packed, (None, None), [3, 3], do_rotary=1),
        grouped(device, qkv, (None, None), [3, 3], do_rotary=1),
        strict=True,
    ):
        near(got, want)


def test_a_sink_takes_its_share(device):
    """With values of one, the output is what the sinks leave."""
    q, k, v = tokens(1, 1)
    sinks = normal(HEADS)
    y, *_ = grouped(device, (0 * q, k, np.ones_like(v)), (None, None), [1], rest=(None, None, sinks))
    near(y.reshape(HEADS, SIZE)[:, 0], 1 / (1 + np.exp(sinks)))


def test_positions_may_be_given(device):
    qkv = tokens(1, 1)
    past = normal(2, 1, GROUPS, 3, SIZE)
    given = grouped(device, qkv, past, [4], do_rotary=1, rest=(np.asarray([[3]], np.int64),))
    for got, want in zip(given, grouped(device, qkv, past, [4], do_rotary=1), strict=True):
        near(got, want)


def test_padding_of_a_chunk_does_not_reach_the_cache(device):
    qkv, past = tokens(2, 3), [normal(2, GROUPS, 8, SIZE, seed=i) for i in range(2)]
    rest = (None,) * 7 + (i32(2, 0),)
    y, keys, _ = grouped(device, qkv, past, [5, 4], bound=8, rest=rest, do_rotary=1)
    short = [x[:1, :2] for x in qkv]
    want, want_keys, _ = grouped(device, short, [p[:1] for p in past], [5], do_rotary=1)
    near(y[0, :2], want[0])
    near(keys[0, :, :5], want_keys[0, :, :5])
    near(keys[1, :, :4], past[0][1, :, :4])


@pytest.mark.parametrize(("rows", "capacity"), [(1, 3), (1, 5), (4, 3), (4, 5)])
def test_a_sliding_cache_attends_as_a_whole_one_with_a_window(device, rows, capacity):
    qkv, how = tokens(1, 12), {"do_rotary": 1, "local_window_size": 3}
    whole, keys, _ = grouped(device, qkv, (None, None), [12], **how)
    past: Any = buffers(1, capacity)
    for start in range(0, 12, rows):
        part = [x[:, start : start + rows] for x in qkv]
        y, *past = grouped(device, part, past, [start + rows], sliding_window_cache=1, **how)
        near(y, whole[:, start : start + rows])
    near(past[0][:, :, :3], keys[:, :, 9:] if capacity == 3 else keys[:, :, 12 - kept(12, 5, 3) :][:, :, :3])


def kept(total: int, capacity: int, window: int) -> int:
    """How many positions a sliding cache holds, by the operator's formula."""
    step = capacity - window + 1
    return total if total <= capacity else total - step * -(-(total - capacity) // step)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_quantized_cache_is_read_with_its_scales(device, bits):
    qkv, dtype = tokens(1, 1), np.int8 if bits == 8 else np.uint8
    past = np.random.default_rng(0).integers(0, 128, (2, 1, GROUPS, 3, SIZE * bits // 8)).astype(dtype)
    scale = np.asarray([0.02 if bits == 8 else 0.3], np.float32)
    how = {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR", "kv_cache_bit_width": bits}
    y, keys, values = grouped(device, qkv, past, [4], rest=(None,) * 3 + (scale, scale), **how)
    real = [unpacked(x, bits) * scale[0] for x in (keys, values)]
    want, *_ = grouped(device, (qkv[0], qkv[1], qkv[2]), [x[:, :, :3] for x in real], [4])
    near(y, want, 0.2)
    near(real[0][:, :, 3], qkv[1].reshape(1, GROUPS, SIZE).clip(-128 * scale, 127 * scale), scale[0])
    np.testing.assert_array_equal(keys[:, :, :3], past[0])


def unpacked(x: np.ndarray, bits: int) -> np.ndarray:
    return x if bits == 8 else np.stack([x & 15, x >> 4], axis=-1).reshape(*x.shape[:-1], -1) - np.float32(8)


def test_a_sparse_mask_of_all_blocks_is_no_mask(device):
    qkv, past = tokens(1, 5), np.zeros((2, 1, GROUPS, 32, SIZE), np.float32)
    rows, columns = i32([0, 1, 3]), i32([0, 0, 1])
    args = (*qkv, *past, rows, columns, np.asarray(5, np.int32), i32(5))
    y, *_ = run_node(device, "SparseAttention", *args, outputs=3, num_heads=HEADS, kv_num_heads=GROUPS,
                     sparse_block_size=16, **MICROSOFT)  # fmt: skip
    near(y, grouped(device, qkv, past, [5])[0])


def test_a_sparse_mask_hides_blocks_of_keys(device):
    """The 17th query sees the second block only, and in it only itself."""
    qkv, past = tokens(1, 17), np.zeros((2, 1, GROUPS, 32, SIZE), np.float32)
    args = (*qkv, *past, i32([0, 1, 2]), i32([0, 1]), np.asarray(17, np.int32), i32(17))
    y, *_ = run_node(device, "SparseAttention", *args, outputs=3, num_heads=HEADS, kv_num_heads=GROUPS,
                     sparse_block_size=16, **MICROSOFT)  # fmt: skip
    near(y[0, 16].reshape(GROUPS, -1, SIZE), qkv[2][0, 16].reshape(GROUPS, 1, SIZE).repeat(HEADS // GROUPS, axis=1))


# MultiHeadAttention and Attention of onnxruntime


def heads(device: str, *inputs: Any, **how: Any) -> Any:
    return run_node(device, "MultiHeadAttention", *inputs, num_heads=2, **MICROSOFT, **how)


def test_lengths_and_masks_of_padding_agree(device):
    q, k, v = normal(2, 3, 16), normal(2, 4, 16, seed=1), normal(2, 4, 16, seed=2)
    short = heads(device, q, k, v, None, i32(4, 2))
    near(short, heads(device, q, k, v, None, i32([1, 1, 1, 1], [1, 1, 0, 0])))
    near(short[1:], heads(device, q[1:], k[1:, :2], v[1:, :2]))


def test_padding_is_only_unlikely(device):
    """Where all is padding, onnxruntime attends to it as if nothing was: -10000 is added everywhere."""
    q, k, v = normal(1, 3, 16), normal(1, 4, 16, seed=1), normal(1, 4, 16, seed=2)
    near(heads(device, q, k, v, None, i32([0, 0, 0, 0])), heads(device, q, k, v), 1e-3)


def test_packed_projections_agree(device):
    q, k, v = (normal(2, 3, 2, 8, seed=i) for i in range(3))
    flat = [x.reshape(2, 3, 16) for x in (q, k, v)]
    want = heads(device, *flat)
    near(heads(device, np.stack([q, k, v], axis=3)), want)
    near(heads(device, flat[0], np.stack([k, v], axis=3)), want)
    near(heads(device, flat[0], k.swapaxes(1, 2), v.swapaxes(1, 2)), want)


@pytest.mark.parametrize("shared", [False, True])
def test_past_keys_of_many_heads(device, shared):
    q, k, v = (normal(1, 4, 16, seed=i) for i in range(3))
    whole = heads(device, q, k, v, unidirectional=1)
    past = [x[:, :3].reshape(1, 3, 2, 8).swapaxes(1, 2) for x in (k, v)]
    if shared:
        past = [np.concatenate([x, np.full((1, 2, 4, 8), np.nan, np.float32)], axis=2) for x in past]
    last = [x[:, 3:] for x in (q, k, v)]
    y, keys, _ = heads(device, *last, None, None, None, *past, i32(3) if shared else None, outputs=3, unidirectional=1)
    near(y, whole[:, 3:])
    near(keys[:, :, :4], k.reshape(1, 4, 2, 8).swapaxes(1, 2))


def test_masks_of_a_buffer_may_end_with_its_keys(device):
    """Three keys are cached in a buffer of six; mask and bias say something of these and the new one only."""
    q, k, v = (normal(1, 1, 16, seed=i) for i in range(3))
    past = [normal(1, 2, 6, 8, seed=i) for i in range(2)]
    mask, bias = np.array([[1, 0, 1, 1]], np.int32), normal(1, 1, 1, 4, seed=5)

    def decode(mask: Any, bias: Any) -> Any:
        return run_node(
            device, "DecoderMaskedMultiHeadAttention", q, k, v, mask, bias, *past, i32(3),
            num_heads=2, past_present_share_buffer=1, outputs=3, **MICROSOFT,
        )[0]  # fmt: skip

    whole = [np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, 2)], constant_values=1) for x in (mask, bias)]
    near(decode(mask, bias), decode(*whole))


def test_a_beam_reads_the_keys_of_the_beams_before(device):
    """Two beams swap their pasts."""
    q, k, v = (normal(2, 1, 16, seed=i) for i in range(3))
    past = [normal(2, 2, 6, 8, seed=i) for i in range(2)]
    swap = np.zeros((1, 2, 6), np.int32)
    swap[0, 0] = 1

    def decode(past: Any, indirection: Any) -> Any:
        return run_node(
            device, "DecoderMaskedMultiHeadAttention", q, k, v, None, None, *past, i32(5), i32(2), indirection,
            num_heads=2, past_present_share_buffer=1, outputs=3, **MICROSOFT,
        )[0]  # fmt: skip

    near(decode(past, swap), decode([x[::-1].copy() for x in past], None))


def test_attention_projects_its_input(device):
    x, w, b = normal(2, 3, 10), normal(10, 48), normal(48)
    q, k, v = np.split(x @ w + b, 3, axis=2)
    y = run_node(device, "Attention", x, w, b, num_heads=2, unidirectional=1, **MICROSOFT)
    near(y, heads(device, q, k, v, unidirectional=1))


def test_quantized_attention_multiplies_integers(device):
    rng = np.random.default_rng(0)
    x, w, b = rng.integers(0, 256, (1, 3, 8)).astype(np.uint8), rng.integers(-9, 9, (8, 48)).astype(np.int8), normal(48)
    scale = np.asarray(0.05, np.float32)
    y = run_node(device, "QAttention", x, w, b, scale, scale, None, np.asarray(100, np.uint8), num_heads=2, **MICROSOFT)
    real = (x.astype(np.float32) - 100) * scale
    near(y, run_node(device, "Attention", real, w * scale, b, num_heads=2, **MICROSOFT))


def test_batches_without_padding_attend_as_padded_ones(device):
    x, lengths, w, b = normal(2, 4, 8), i32(2, 4), normal(8, 48), normal(48)
    packed, offsets, ends, longest = run_node(device, "RemovePadding", x, lengths, outputs=4, **MICROSOFT)
    near(packed, np.concatenate([x[0, :2], x[1]]))
    np.testing.assert_array_equal(offsets, [[0, 1, 4, 5], [6, 7, 2, 3]])
    np.testing.assert_array_equal(ends, [0, 2, 6])
    assert longest == [4]
    y = run_node(device, "PackedAttention", packed, w, b, offsets, ends, num_heads=2, **MICROSOFT)
    back = run_node(device, "RestorePadding", y, offsets, **MICROSOFT)
    want = run_node(device, "Attention", x, w, b, lengths, num_heads=2, **MICROSOFT)
    near(back[0, :2], want[0, :2])
    near(back[1], want[1])
    assert not back[0, 2:].any()


# Attention with a state


@pytest.mark.parametrize("rule", ["linear", "gated", "delta", "gated_delta"])
def test_linear_attention_carries_its_state(device, rule):
    q, k, v = normal(2, 5, 4 * 8), normal(2, 5, 2 * 8, seed=1) / 3, normal(2, 5, 2 * 6, seed=2)
    decay = -np.abs(normal(2, 5, 2, seed=3)) if "gated" in rule else None
    beta = softmax(normal(2, 5, 2, seed=4)) if "delta" in rule else None

    def run(part: slice, state: Any) -> Any:
        sliced = [None if x is None else x[:, part] for x in (q, k, v, decay, beta)]
        return run_node(device, "LinearAttention", *sliced[:3], state, *sliced[3:], opset=27, outputs=2,
                        q_num_heads=4, kv_num_heads=2, update_rule=rule)  # fmt: skip

    whole, state = run(slice(None), None)
    first, between = run(slice(0, 3), None)
    second, last = run(slice(3, 5), between)
    near(np.concatenate([first, second], axis=1), whole)
    near(last, state)


def test_a_window_of_states_ends_with_the_newest(device):
    q, k, v = (normal(1, 3, 8, seed=i) for i in range(3))
    how = {"q_num_heads": 1, "kv_num_heads": 1, "update_rule": "linear", "outputs": 2, **MICROSOFT}
    _, states = run_node(device, "LinearAttention", q, k, v, state_window=4, **how)
    assert states.shape == (4, 1, 1, 8, 8) and not states[0].any()
    for i in range(3):
        part = [x[:, : i + 1] for x in (q, k, v)]
        near(states[i + 1], run_node(device, "LinearAttention", *part, **how)[1])


def test_a_causal_convolution_carries_its_last_inputs(device):
    x, w, b = normal(1, 3, 6), normal(3, 1, 4), normal(3)
    whole, _ = run_node(device, "CausalConvWithState", x, w, b, opset=27, outputs=2, activation="silu")
    state, parts = None, []
    for part in (x[:, :, :1], x[:, :, 1:]):
        y, state = run_node(device, "CausalConvWithState", part, w, b, state, opset=27, outputs=2, activation="silu")
        parts.append(y)
    near(np.concatenate(parts, axis=2), whole)
    near(state, x[:, :, 3:])


# Experts


def experts(x: np.ndarray, router: np.ndarray, w1: np.ndarray, w2: np.ndarray, k: int) -> np.ndarray:
    """Token by token: the k best experts with their shares of the softmax over all."""
    rows = []
    for token, logits in zip(x, router, strict=True):
        share = softmax(logits)
        best = np.argsort(-logits)[:k]
        rows.append(sum(share[e] * (w2[e] @ np.maximum(w1[e] @ token, 0)) for e in best))
    return np.stack(rows)


@COMPILE
@pytest.mark.parametrize("count", [1, 7])
def test_a_mixture_of_experts_for_few_and_for_many_tokens(device, count, compile):
    x, router, w1, w2 = normal(count, 8), normal(count, 4), normal(4, 6, 8), normal(4, 8, 6)
    y = run_node(device, "MoE", x, router, w1, None, w2, k=2, compile=compile, **MICROSOFT)
    near(y, experts(x, router, w1, w2, 2))


@pytest.mark.parametrize("block", [0, 16, 32])
@pytest.mark.parametrize("count", [1, 7])
def test_a_mixture_of_quantized_experts(device, count, block):
    x, router = normal(count, 32), normal(count, 4)
    q1, q2 = np.random.default_rng(0).integers(0, 256, (2, 4, 32, 16)).astype(np.uint8)
    shapes = ((4, 32, 32 // block),) * 2 if block else ((4, 32),) * 2
    s1, s2 = (normal(*shape) / 10 for shape in shapes)
    y = run_node(device, "QMoE", x, router, q1, s1, None, q2, s2, k=2, **MICROSOFT,
                 **({"block_size": block} if block else {}))  # fmt: skip
    w1, w2 = (unpacked(q, 4) * np.atleast_3d(s).repeat(block or 32, axis=2) for q, s in ((q1, s1), (q2, s2)))
    near(y, experts(x, router, w1, w2, 2), 1e-4)


def test_interleaved_gates_of_experts(device):
    x, router, w1, w2 = normal(2, 8), normal(2, 3), normal(3, 12, 8), normal(3, 8, 6)
    how = {"activation_type": "swiglu", "activation_alpha": 1.7, "activation_beta": 1.0, "swiglu_limit": 0.5}
    y = run_node(device, "MoE", x, router, w1, None, w2, k=1, normalize_routing_weights=1, swiglu_fusion=1, **how,
                 **MICROSOFT)  # fmt: skip
    for token, logits, got in zip(x, router, y, strict=True):
        gate, linear = (w1[logits.argmax()] @ token).reshape(-1, 2).T
        gate, linear = np.minimum(gate, 0.5), np.clip(linear, -0.5, 0.5)
        near(got, w2[logits.argmax()] @ (gate / (1 + np.exp(-1.7 * gate)) * (linear + 1)))


# Positions and products


def test_relative_positions_fall_into_buckets(device):
    """4 buckets each way: distances 0, 1, then [2, 4) and [4, 8); the table lies in memory head by head."""
    table = np.arange(8, dtype=np.float32).reshape(8, 1)
    y = run_node(device, "RelativePositionBias", table, np.asarray([2]), np.asarray([9]), max_distance=8,
                 is_bidirectional=1, **MICROSOFT)  # fmt: skip
    near(y[0, 0], [[0, 5, 6, 6, 7, 7, 7, 7, 7], [1, 0, 5, 6, 6, 7, 7, 7, 7]])


def test_gated_relative_positions(device):
    x, b, rel, w, c, eco = normal(1, 3, 8), normal(8), normal(1, 2, 3, 3), normal(4, 6), normal(6), normal(1, 2, 1, 1)
    y = run_node(device, "GatedRelativePositionBias", x, b, rel, w, c, eco, num_heads=2, **MICROSOFT)
    gates = ((x + b).reshape(1, 3, 2, 4).swapaxes(1, 2) @ w + c).reshape(1, 2, 3, 2, 3).sum(-1)
    gates = 1 / (1 + np.exp(-gates))
    near(y, (gates[..., :1] * (gates[..., 1:] * eco - 1) + 2) * rel)


@pytest.mark.parametrize(("transpose", "shape"), [(0, (4, 3, 5)), (1, (5, 3, 4))])
def test_fused_matmul_moves_the_first_axis_inside(device, transpose, shape):
    a, b = normal(*shape), normal(3, 5, 6)
    y = run_node(device, "FusedMatMul", a, b, transBatchA=1, transA=transpose, alpha=0.5, **MICROSOFT)
    moved = np.moveaxis(a, 0, 1)
    near(y, 0.5 * (moved.swapaxes(1, 2) if transpose else moved) @ b)


def test_fused_gemm_applies_its_activation(device):
    a, b = np.asarray([[1, -1]], np.float32), np.asarray([[2, 0], [0, 2]], np.float32)
    y = run_node(device, "FusedGemm", a, b, activation="LeakyRelu", activation_alpha=0.25, **MICROSOFT)
    near(y, [[2, -0.5]])
