"""Random nodes for the differential sweep, continued: layers, attention, losses, detection, text and what is made of
nothing but numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
from sweep_cases import (
    DTYPES,
    Case,
    Rng,
    coin,
    ints,
    is_float,
    maker,
    partner,
    quantized,
    shape_of,
    values,
    window,
)


def some(rng: Rng, low: int, high: int) -> int:
    """A number from low to high, both included."""
    return int(rng.integers(low, high + 1))


def small(rng: Rng, dtype: Any, *shape: int) -> np.ndarray:
    """Weights of a layer: numbers about as large as one."""
    return np.asarray(rng.standard_normal(shape) * 0.5).astype(dtype)


# Recurrent layers

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
PLAIN = "Relu Tanh Sigmoid Softsign Softplus".split()
SHAPED = {"LeakyRelu": 1, "ThresholdedRelu": 1, "Elu": 1, "Affine": 2, "ScaledTanh": 2, "HardSigmoid": 2}


def activations(rng: Rng, count: int) -> dict[str, Any]:
    """Names, with `activation_alpha` and `activation_beta` for those that take them."""
    names = [str(rng.choice(PLAIN)) for _ in range(count)]
    if coin(rng, 0.4):
        names = [str(rng.choice([*PLAIN, *SHAPED])) for _ in range(count)]
        # one operand for each function that takes one, in order; onnxruntime wants them in front
        names.sort(key=lambda n: -SHAPED.get(n, 0))
    found: dict[str, Any] = {"activations": names}
    for i, key in enumerate(("activation_alpha", "activation_beta")):
        operands = [round(float(rng.random()) + 0.1, 2) for n in names if SHAPED.get(n, 0) > i]
        if operands:
            found[key] = operands
    return found


@maker(*GATES)
def recurrent(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    gates, direction = GATES[op], str(rng.choice(["forward", "reverse", "bidirectional"]))
    directions = 2 if direction == "bidirectional" else 1
    length, batch, size, hidden = some(rng, 1, 4), some(rng, 1, 3), some(rng, 1, 3), some(rng, 1, 3)
    attributes: dict[str, Any] = {"hidden_size": hidden, "direction": direction}
    if coin(rng, 0.3):
        attributes["clip"] = 0.75
    if op == "GRU":
        attributes["linear_before_reset"] = int(coin(rng))
    if op == "LSTM" and coin(rng, 0.3):
        attributes["input_forget"] = 1
    if coin(rng, 0.5):
        attributes |= activations(rng, {"RNN": 1, "GRU": 2, "LSTM": 3}[op] * directions)
    layout = int(opset >= 14 and coin(rng, 0.2))
    if layout:
        attributes["layout"] = 1
    x = small(rng, dtype, *((batch, length) if layout else (length, batch)), size)
    state = (batch, directions, hidden) if layout else (directions, batch, hidden)
    inputs = [
        x,
        small(rng, dtype, directions, gates * hidden, size),
        small(rng, dtype, directions, gates * hidden, hidden),
        small(rng, dtype, directions, 2 * gates * hidden) if coin(rng) else None,
        rng.integers(1, length + 1, batch).astype(np.int32) if coin(rng) else None,
        small(rng, dtype, *state) if coin(rng) else None,
    ]
    if op == "LSTM":
        inputs.append(small(rng, dtype, *state) if coin(rng) else None)
        inputs.append(small(rng, dtype, directions, 3 * hidden) if coin(rng) else None)
    return Case(op, opset, inputs, attributes, 3 if op == "LSTM" else 2, scale=64)


# Attention


@maker("Attention")
def attention(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    batch, kv_heads, each = some(rng, 1, 2), some(rng, 1, 2), some(rng, 1, 2)
    heads, size, v_size = kv_heads * each, 2 * some(rng, 1, 2), some(rng, 1, 3)
    new, keys, past = some(rng, 1, 4), some(rng, 1, 4), some(rng, 0, 3) if coin(rng, 0.4) else None
    attributes: dict[str, Any] = {"is_causal": int(coin(rng))}
    flat = coin(rng, 0.4)
    q, k, v = ((batch, heads, new, size), (batch, kv_heads, keys, size), (batch, kv_heads, keys, v_size))
    if flat:
        attributes |= {"q_num_heads": heads, "kv_num_heads": kv_heads}
        q, k, v = ((b, n, h * s) for b, h, n, s in (q, k, v))
    if coin(rng, 0.3):
        attributes["scale"] = 0.3
    if coin(rng, 0.3):
        attributes["softcap"] = 2.0
    total = keys + (past or 0)
    mask = None
    if coin(rng):
        shape = partner(rng, (batch, heads, new))
        shape = (*shape, total) if shape else (new, total)
        shape = shape if len(shape) > 1 else (1, *shape)
        kind = bool if coin(rng) else dtype
        mask = values(rng, kind, shape, 0)
    inputs = [*(small(rng, dtype, *s) for s in (q, k, v)), mask]
    outputs = 1
    if past is not None:
        inputs += [small(rng, dtype, batch, kv_heads, past, s) for s in (size, v_size)]
        outputs = 3
    elif opset >= 24 and coin(rng, 0.3):
        inputs += [None, None, rng.integers(1, keys + 1, batch)]
    if coin(rng, 0.2):
        outputs = 4
        attributes["qk_matmul_output_mode"] = some(rng, 0, 3)
    return Case(op, opset, inputs, attributes, outputs, scale=64)


@maker("RotaryEmbedding")
def rotary(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    batch, length, heads, half = some(rng, 1, 2), some(rng, 1, 4), some(rng, 1, 3), some(rng, 1, 3)
    part = some(rng, 1, half) if coin(rng, 0.3) else 0
    attributes: dict[str, Any] = {"interleaved": int(coin(rng))}
    shape: tuple[int, ...] = (batch, heads, length, 2 * half)
    if part or coin(rng, 0.4):
        shape, attributes["num_heads"] = (batch, length, heads * 2 * half), heads
    if part:
        attributes["rotary_embedding_dim"] = 2 * part
    table: tuple[int, ...] = (5, part or half)
    places = rng.integers(0, 5, (batch, length)) if coin(rng) else None
    if places is None:
        table = (batch, length, part or half)
    inputs = [small(rng, dtype, *shape), small(rng, dtype, *table), small(rng, dtype, *table)]
    return Case(op, opset, [*inputs, places], attributes, scale=8)


@maker("TensorScatter")
def tensor_scatter(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    batch, longest, size = some(rng, 1, 3), some(rng, 2, 5), some(rng, 1, 2)
    new = some(rng, 1, longest)
    mode = str(rng.choice(["linear", "circular"]))
    middle = shape_of(rng, 0, 1, empty=0)
    places = rng.integers(0, longest if mode == "circular" else longest - new + 1, batch)
    cache, update = ((batch, *middle, n, size) for n in (longest, new))
    return Case(
        op, opset, [values(rng, dtype, cache), values(rng, dtype, update), places if coin(rng, 0.8) else None],
        {"mode": mode, "axis": -2},
    )  # fmt: skip


# Images


@maker("AffineGrid")
def affine_grid(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    rank = some(rng, 2, 3)
    size = ints(some(rng, 1, 2), 1, *rng.integers(1, 4, rank))
    theta = small(rng, dtype, int(size[0]), rank, rank + 1)
    return Case(op, opset, [theta, size], {"align_corners": int(coin(rng))}, scale=16)


@maker("CenterCropPad")
def center_crop_pad(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    shape = shape_of(rng, 1, 3, empty=0)
    count = some(rng, 1, len(shape))
    axes = [int(a) - (len(shape) if coin(rng) else 0) for a in rng.permutation(len(shape))[:count]]
    whole = count == len(shape) and coin(rng)
    return Case(
        op, opset, [values(rng, dtype, shape), ints(*rng.integers(1, 7, count))], {} if whole else {"axes": axes}
    )


@maker("Col2Im")
def col_to_image(op: str, rng: Rng, opset: int, dtype: Any) -> Case | None:
    if not is_float(dtype):
        return None
    rank = some(rng, 1, 3)
    size, block = rng.integers(3, 6, rank), rng.integers(1, 3, rank)
    strides, dilations, pads = rng.integers(1, 3, rank), rng.integers(1, 3, rank), rng.integers(0, 2, 2 * rank)
    spans = (block - 1) * dilations + 1
    blocks = (size + pads[:rank] + pads[rank:] - spans) // strides + 1
    columns = values(rng, dtype, (some(rng, 1, 2), 2 * math.prod(block.tolist()), math.prod(blocks.tolist())), 0)
    attributes = {"strides": strides.tolist(), "dilations": dilations.tolist(), "pads": pads.tolist()}
    return Case(op, opset, [columns, size, block], attributes, scale=16)


@maker("DeformConv")
def deform_conv(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    groups, offsets, a, b = some(rng, 1, 2), some(rng, 1, 2), some(rng, 1, 2), some(rng, 1, 2)
    size, kernel, strides = rng.integers(3, 6, 2), rng.integers(1, 4, 2), rng.integers(1, 3, 2)
    pads, dilations = rng.integers(0, 2, 4), np.ones(2, int)
    out = (size + pads[:2] + pads[2:] - kernel) // strides + 1
    c, n, cells = groups * offsets * a, some(rng, 1, 2), int(kernel.prod())
    inputs = [
        small(rng, dtype, n, c, *size),
        small(rng, dtype, groups * b, c // groups, *kernel),
        small(rng, dtype, n, offsets * cells * 2, *out) * np.asarray(2, dtype),
        small(rng, dtype, groups * b) if coin(rng) else None,
        small(rng, dtype, n, offsets * cells, *out) if coin(rng) else None,
    ]
    attributes = {
        "group": groups, "offset_group": offsets, "strides": strides.tolist(), "pads": pads.tolist(),
        "dilations": dilations.tolist(), "kernel_shape": kernel.tolist(),
    }  # fmt: skip
    return Case(op, opset, inputs, attributes, scale=64)


@maker("MaxRoiPool")
def max_roi_pool(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    corners = np.sort(rng.integers(0, 6, (2, 2, 2)), axis=1).reshape(2, 4)
    regions = np.concatenate([[[0], [1]], corners], axis=1).astype(dtype)
    return Case(op, opset, [values(rng, dtype, (2, 2, 6, 6), 0), regions], {"pooled_shape": [2, 2]})


@maker("MaxUnpool")
def max_unpool(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    size = rng.integers(1, 4, 2)
    x = values(rng, dtype, (1, 2, *size), 0)
    places = rng.permutation(int(2 * 4 * size.prod()))[: x.size].reshape(x.shape)
    return Case(op, opset, [x, places], {"kernel_shape": [2, 2], "strides": [2, 2]})


@maker("NonMaxSuppression")
def suppression(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    batch, classes, count = some(rng, 1, 2), some(rng, 1, 2), some(rng, 1, 6)
    center = int(coin(rng))
    boxes = rng.random((batch, count, 4)).astype(np.float32)
    if not center:
        boxes[..., 2:] += boxes[..., :2]
        boxes = boxes[..., [2, 3, 0, 1]] if coin(rng, 0.3) else boxes  # corners in any order
    scores = rng.random((batch, classes, count)).astype(np.float32)
    limits = [ints(some(rng, 0, 3)), np.array([0.3], np.float32), np.array([0.4], np.float32)]
    given: list[Any] = [x if coin(rng, 0.8) else None for x in limits]
    given[0] = limits[0]
    return Case(op, opset, [boxes, scores, *given], {"center_point_box": center})


# Normalization, losses, dropout


@maker("MeanVarianceNormalization")
def mean_variance(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    return Case(op, opset, [values(rng, dtype, shape_of(rng, 4, 4, empty=0), 0)], scale=64)


@maker("Dropout")
def dropout(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    x = values(rng, dtype, shape_of(rng))
    if opset < 12:
        return Case(op, opset, [x], {"ratio": 0.3}, 1 if opset < 10 else 2)
    return Case(op, opset, [x, np.array(0.3, np.float32) if coin(rng) else None], {}, 2)


@maker("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss")
def loss(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    batch, classes, rest = some(rng, 1, 3), some(rng, 1, 4), shape_of(rng, 0, 2, empty=0)
    target = rng.integers(0, classes, (batch, *rest))
    attributes: dict[str, Any] = {"reduction": str(rng.choice(["none", "sum", "mean"]))}
    if coin(rng, 0.4):
        attributes["ignore_index"] = some(rng, -1, classes - 1)
        target[rng.random(target.shape) < 0.3] = attributes["ignore_index"]
        target.flat[0] = 0 if attributes["ignore_index"] else classes - 1  # not all: 0 / 0
    weight = [np.abs(values(rng, dtype, (classes,), 0)) + np.asarray(0.5, dtype)] if coin(rng) else []
    outputs = 2 if op.startswith("Softmax") and coin(rng) else 1
    scores = values(rng, dtype, (batch, classes, *rest), 0)
    kind = np.int32 if coin(rng, 0.3) else np.int64
    return Case(op, opset, [scores, target.astype(kind), *weight], attributes, outputs, scale=32)


# Windows, spectra and other things made of numbers


@maker("BlackmanWindow", "HannWindow", "HammingWindow")
def signal_window(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    kind = int(rng.choice([1, 10, 11, 6, 7, 2]))
    size = np.array(some(rng, 1, 40), dtype)
    return Case(op, opset, [size], {"periodic": int(coin(rng)), "output_datatype": kind}, scale=64)


@maker("MelWeightMatrix")
def mel(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    rate = int(rng.choice([8000, 16000]))
    high = np.array(rate / 2 if coin(rng) else 3000, np.float32)
    whole = [np.array(v, dtype) for v in (some(rng, 1, 8), int(rng.choice([16, 64, 255])), rate)]
    return Case(op, opset, [*whole, np.array(rng.choice([0, 200]), np.float32), high], {}, scale=16)


@maker("STFT")
def stft(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    length, frame = some(rng, 40, 90), int(rng.choice([1, 2, 7, 16, 33, 40]))
    parts = some(rng, 1, 2)
    signal = values(rng, dtype, (some(rng, 1, 2), length, parts), 0)
    own = values(rng, dtype, (frame,), 0) if coin(rng) else None
    size = np.array(frame, np.int64) if own is None or coin(rng) else None
    onesided = int(parts == 1 and coin(rng))
    return Case(op, opset, [signal, np.array(some(rng, 1, 9), np.int64), own, size], {"onesided": onesided}, scale=64)


@maker("ConstantOfShape")
def constant_of_shape(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    names = [n for n in DTYPES if n not in ("string", "bfloat16")]
    value = values(rng, DTYPES[str(rng.choice(names))], (1,), 0.5)
    more = {"value": onnx.numpy_helper.from_array(value)} if coin(rng, 0.8) else {}
    return Case(op, opset, [ints(*shape_of(rng))], more)


@maker("CastLike")
def cast_like(op: str, rng: Rng, opset: int, dtype: Any) -> Case | None:
    x = values(rng, dtype, shape_of(rng), 0)
    to = DTYPES[str(rng.choice([n for n in DTYPES if n not in ("string", "bfloat16")]))]
    if dtype is object or np.dtype(to).kind == "u":
        return None
    return Case(op, opset, [x, np.zeros(1, to)])


@maker("BitCast")
def bit_cast(op: str, rng: Rng, opset: int, dtype: Any) -> Case | None:
    same = [t for t in DTYPES.values() if t is not object and np.dtype(t).itemsize == np.dtype(dtype).itemsize]
    to = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(same[int(rng.integers(len(same)))]))
    x = values(rng, dtype, shape_of(rng))
    return None if to == onnx.TensorProto.BOOL else Case(op, opset, [x], {"to": to})


@maker("SwiGLU")
def swiglu(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    shape = shape_of(rng)
    a, b = (values(rng, dtype, shape, 0) for _ in range(2))
    return Case(op, opset, [a, b], {"alpha": float(rng.uniform(0.5, 2))} if coin(rng) else {}, scale=8)


# Quantized products


@maker("ConvInteger")
def conv_integer(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    rank = some(rng, 1, 2)
    size = tuple(int(v) for v in rng.integers(3, 7, rank))
    attributes = window(rng, rank, size)
    kind = np.uint8 if coin(rng) else np.int8
    x, w = quantized(rng, dtype, (1, 2, *size)), quantized(rng, kind, (2, 2, *attributes["kernel_shape"]))
    zeros = [quantized(rng, dtype, ()), quantized(rng, kind, ())] if coin(rng) else []
    return Case(op, opset, [x, w, *zeros], attributes)


def scales(rng: Rng, shape: tuple[int, ...] = ()) -> np.ndarray:
    return np.asarray(np.exp2(rng.integers(-4, 0, shape)), np.float32)


@maker("QLinearMatMul")
def qlinear_matmul(op: str, rng: Rng, opset: int, dtype: Any) -> Case | None:
    if dtype not in (np.int8, np.uint8):
        return None
    n, k, m = (int(v) for v in rng.integers(1, 5, 3))
    own = (m,) if coin(rng, 0.3) else ()
    a, b = quantized(rng, dtype, (n, k)), quantized(rng, dtype, (k, m))
    parts = [
        a, scales(rng), quantized(rng, dtype, ()), b, scales(rng, own), quantized(rng, dtype, own),
        np.array(32, np.float32), quantized(rng, dtype, ()),
    ]  # fmt: skip
    return Case(op, opset, parts)


@maker("QLinearConv")
def qlinear_conv(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    rank, groups = some(rng, 1, 2), some(rng, 1, 2)
    size = tuple(int(v) for v in rng.integers(3, 7, rank))
    attributes = window(rng, rank, size) | {"group": groups}
    kind = dtype
    own = (2 * groups,) if coin(rng) else ()
    x, w = (
        quantized(rng, dtype, (1, 2 * groups, *size)),
        quantized(rng, kind, (2 * groups, 2, *attributes["kernel_shape"])),
    )
    parts: list[Any] = [
        x, scales(rng), quantized(rng, dtype, ()), w, scales(rng, own), np.zeros(own, kind),
        np.array(32, np.float32), quantized(rng, dtype, ()),
    ]  # fmt: skip
    if coin(rng):
        parts.append(rng.integers(-999, 999, 2 * groups).astype(np.int32))
    return Case(op, opset, parts, attributes)


# Text

WORDS = np.array(["", "a", "Bc", "é x", "The the", "a,b,,c", "  two  words ", "x1y22", "ΣΑΣ", "ǅ"], object)


@maker("StringConcat")
def string_concat(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    shape = shape_of(rng, 0, 3)
    return Case(op, opset, [np.asarray(rng.choice(WORDS, s), object) for s in (shape, partner(rng, shape))])


@maker("StringSplit")
def string_split(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    delimiter = [None, "", ",", " ", "b,"][int(rng.integers(5))]
    attributes: dict[str, Any] = {} if delimiter is None else {"delimiter": delimiter}
    if coin(rng):
        attributes["maxsplit"] = some(rng, 1, 2)
    return Case(op, opset, [np.asarray(rng.choice(WORDS, shape_of(rng, 0, 2, empty=0)), object)], attributes, 2)


@maker("StringNormalizer")
def string_normalizer(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    shape = (some(rng, 1, 4),) if coin(rng) else (1, some(rng, 1, 4))
    attributes: dict[str, Any] = {
        "case_change_action": str(rng.choice(["NONE", "LOWER", "UPPER"])), "is_case_sensitive": int(coin(rng)),
    }  # fmt: skip
    if coin(rng, 0.7):
        attributes["stopwords"] = [str(w) for w in rng.choice(["a", "bc", "the the", "A"], 2, replace=False)]
    return Case(op, opset, [np.asarray(rng.choice(WORDS[:5], shape), object)], attributes)


@maker("RegexFullMatch")
def regex_full_match(op: str, rng: Rng, opset: int, dtype: Any) -> Case:
    pattern = str(rng.choice(["a", ".*", r"[a-z]\d[a-z]\d+", r"(\w+,?)+", "[^a]*", "(?i)bc", r"\s*\w+\s+\w+\s*", ""]))
    return Case(op, opset, [np.asarray(rng.choice(WORDS, shape_of(rng, 0, 2)), object)], {"pattern": pattern})


@maker("TfIdfVectorizer")
def tfidf(op: str, rng: Rng, opset: int, dtype: Any) -> Case | None:
    if dtype is object:
        pool_key, pool = "pool_strings", ["a", "Bc", "a", "Bc", "Bc", "a", "x"]
        x: Any = rng.choice(np.array(["a", "Bc", "x"], object), (some(rng, 1, 6),))
    else:
        pool_key, pool = "pool_int64s", [2, 3, 2, 3, 3, 2, 5]
        x = rng.integers(2, 6, (some(rng, 1, 6),)).astype(dtype)
    if coin(rng, 0.3):
        x = x[None]
    least = some(rng, 1, 2)
    attributes = {
        "mode": str(rng.choice(["TF", "IDF", "TFIDF"])), "min_gram_length": least,
        "max_gram_length": some(rng, least, 2), "max_skip_count": some(rng, 0, 3), pool_key: pool,
        "ngram_counts": [0, 1], "ngram_indexes": [0, 1, 2, 3],  # one word, and three pairs
    }  # fmt: skip
    if coin(rng):
        attributes["weights"] = [0.5, 2.0, 1.5, 3.0]
    return Case(op, opset, [x], attributes)
