"""Small language models with random weights, as the subgraphs that onnxruntime's generation operators expect."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper, parser

WORDS, HEADS, SIZE = 13, 2, 4
WIDTH = HEADS * SIZE

ATTEND = """
    q4 = Reshape (q, split)
    k4 = Reshape (k, split)
    v4 = Reshape (v, split)
    qh = Transpose <perm = [0, 2, 1, 3]> (q4)
    kh = Transpose <perm = [0, 2, 1, 3]> (k4)
    vh = Transpose <perm = [0, 2, 1, 3]> (v4)
"""
SOFTMAX = """
    kt = Transpose <perm = [0, 1, 3, 2]> (kall)
    scores = MatMul (qh, kt)
    masked = Add (scores, bias)
    p = Softmax <axis = -1> (masked)
    context = MatMul (p, vall)
    back = Transpose <perm = [0, 2, 1, 3]> (context)
    flat = Reshape (back, join)
"""
CAUSAL = """
    total_shape = Shape <start = {axis}, end = {end}> ({of})
    new_shape = Shape <start = 1, end = 2> (input_ids)
    total = Squeeze (total_shape, zero)
    new = Squeeze (new_shape, zero)
    first = Sub (total, new)
    rows = Range (first, total, one)
    columns = Range (zero0, total, one)
    rows2 = Unsqueeze (rows, one1)
    past_or_now = LessOrEqual (columns, rows2)
    causal = Where (past_or_now, zerof, lowest)
"""


def weights(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {
        "words": (WORDS, WIDTH), "places": (32, WIDTH), "w_out": (WIDTH, WORDS), "w_cross": (WIDTH, WIDTH),
        **{f"w_{n}": (WIDTH, WIDTH) for n in ("q", "k", "v", "ck", "cv", "cq")},
    }  # fmt: skip
    arrays = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    arrays["w_out"] *= 3
    return arrays | {
        "split": np.array([0, 0, HEADS, SIZE]), "join": np.array([0, 0, WIDTH]), "zero": np.array([0]),
        "zero0": np.array(0), "one": np.array(1), "one1": np.array([1]), "axes12": np.array([1, 2]),
        "last": np.array([2]),
        "zerof": np.array(0, np.float32), "lowest": np.array(-1e9, np.float32), "int0": np.array(0, np.int32),
    }  # fmt: skip


def graph(text: str, seed: int) -> onnx.GraphProto:
    """A graph from its text, with the weights that it reads."""
    made = parser.parse_graph(text)
    read = {name for node in made.node for name in node.input}
    made.initializer.extend(numpy_helper.from_array(a, n) for n, a in weights(seed).items() if n in read)
    return made


def gpt(seed: int = 0) -> onnx.GraphProto:
    """A decoder like GPT-2: one layer, positions, an attention mask, a cache [2, batch, heads, length, size]."""
    return graph(
        f"""gpt (int32[B, S] input_ids, int32[B, S] position_ids, int32[B, T] attention_mask,
                 float[2, B, {HEADS}, P, {SIZE}] past_0)
            => (float[B, S, {WORDS}] logits, float[2, B, {HEADS}, T, {SIZE}] present_0) {{
            word = Gather (words, input_ids)
            place = Gather (places, position_ids)
            x = Add (word, place)
            q = MatMul (x, w_q)
            k = MatMul (x, w_k)
            v = MatMul (x, w_v)
            {ATTEND}
            k5 = Unsqueeze (kh, zero)
            v5 = Unsqueeze (vh, zero)
            kv = Concat <axis = 0> (k5, v5)
            present_0 = Concat <axis = 3> (past_0, kv)
            k1, v1 = Split <axis = 0, num_outputs = 2> (present_0)
            kall = Squeeze (k1, zero)
            vall = Squeeze (v1, zero)
            {CAUSAL.format(axis=1, end=2, of="attention_mask")}
            seen = Equal (attention_mask, int0)
            hidden = Where (seen, lowest, zerof)
            hidden4 = Unsqueeze (hidden, axes12)
            bias = Add (hidden4, causal)
            {SOFTMAX}
            sum = Add (x, flat)
            logits = MatMul (sum, w_out)
        }}""",
        seed,
    )


CROSS_CACHE = f"float[B, {HEADS}, L, {SIZE}]"
OWN_CACHE = f"float[B, {HEADS}, {{}}, {SIZE}]"


def encoder(seed: int = 0, mask: bool = True) -> onnx.GraphProto:
    """An encoder that gives the cross attention's keys and values."""
    source = "int32[B, L] encoder_input_ids, int32[B, L] encoder_attention_mask"
    return graph(
        f"""encoder ({source}) => ({CROSS_CACHE} present_key_cross_0, {CROSS_CACHE} present_value_cross_0) {{
            word = Gather (words, encoder_input_ids)
            number = Cast <to = 1> (encoder_attention_mask)
            number3 = Unsqueeze (number, last)
            x = Mul (word, number3)
            ck = MatMul (x, w_ck)
            cv = MatMul (x, w_cv)
            ck4 = Reshape (ck, split)
            cv4 = Reshape (cv, split)
            present_key_cross_0 = Transpose <perm = [0, 2, 1, 3]> (ck4)
            present_value_cross_0 = Transpose <perm = [0, 2, 1, 3]> (cv4)
        }}""",
        seed,
    )


def t5_decoder(seed: int = 0) -> onnx.GraphProto:
    """A decoder like T5's, with a cache of its own and the encoder's."""
    own, new = OWN_CACHE.format("P"), OWN_CACHE.format("Q")
    return graph(
        f"""decoder (int32[B, 1] input_ids, int32[B, L] encoder_attention_mask,
                     {own} past_key_self_0, {own} past_value_self_0,
                     {CROSS_CACHE} past_key_cross_0, {CROSS_CACHE} past_value_cross_0)
            => (float[B, 1, {WORDS}] logits, {new} present_key_self_0, {new} present_value_self_0) {{
            {_own_attention()}
            cq = MatMul (y, w_cq)
            cq4 = Reshape (cq, split)
            cqh = Transpose <perm = [0, 2, 1, 3]> (cq4)
            seen = Equal (encoder_attention_mask, int0)
            hidden = Where (seen, lowest, zerof)
            hidden4 = Unsqueeze (hidden, axes12)
            ckt = Transpose <perm = [0, 1, 3, 2]> (past_key_cross_0)
            cscores = MatMul (cqh, ckt)
            cmasked = Add (cscores, hidden4)
            cp = Softmax <axis = -1> (cmasked)
            {_read()}
        }}""",
        seed,
    )


def whisper_encoder(seed: int = 0) -> onnx.GraphProto:
    """An encoder of features that also runs the decoder's first tokens."""
    new = OWN_CACHE.format("S")
    return graph(
        f"""encoder (float[B, {WIDTH}, L] encoder_input_ids, int32[B, S] decoder_input_ids)
            => (float[B, S, {WORDS}] logits, float[B, L, {WIDTH}] encoder_hidden_states,
                {new} present_key_self_0, {new} present_value_self_0,
                {CROSS_CACHE} present_key_cross_0, {CROSS_CACHE} present_value_cross_0) {{
            encoder_hidden_states = Transpose <perm = [0, 2, 1]> (encoder_input_ids)
            ck = MatMul (encoder_hidden_states, w_ck)
            cv = MatMul (encoder_hidden_states, w_cv)
            ck4 = Reshape (ck, split)
            cv4 = Reshape (cv, split)
            present_key_cross_0 = Transpose <perm = [0, 2, 1, 3]> (ck4)
            present_value_cross_0 = Transpose <perm = [0, 2, 1, 3]> (cv4)
            x = Gather (words, decoder_input_ids)
            q = MatMul (x, w_q)
            k = MatMul (x, w_k)
            v = MatMul (x, w_v)
            {ATTEND}
            present_key_self_0 = Identity (kh)
            present_value_self_0 = Identity (vh)
            kall = Identity (kh)
            vall = Identity (vh)
            {CAUSAL.format(axis=1, end=2, of="decoder_input_ids").replace("(input_ids)", "(decoder_input_ids)")}
            bias = Identity (causal)
            {SOFTMAX}
            y = Add (x, flat)
            cq = MatMul (y, w_cq)
            cq4 = Reshape (cq, split)
            cqh = Transpose <perm = [0, 2, 1, 3]> (cq4)
            ckt = Transpose <perm = [0, 1, 3, 2]> (present_key_cross_0)
            cscores = MatMul (cqh, ckt)
            cp = Softmax <axis = -1> (cscores)
            {_read().replace("past_value", "present_value")}
        }}""",
        seed,
    )


def whisper_decoder(seed: int = 0) -> onnx.GraphProto:
    own, new = OWN_CACHE.format("P"), OWN_CACHE.format("Q")
    return graph(
        f"""decoder (int32[B, 1] input_ids, {own} past_key_self_0, {own} past_value_self_0,
                     {CROSS_CACHE} past_key_cross_0, {CROSS_CACHE} past_value_cross_0)
            => (float[B, 1, {WORDS}] logits, {new} present_key_self_0, {new} present_value_self_0) {{
            {_own_attention()}
            cq = MatMul (y, w_cq)
            cq4 = Reshape (cq, split)
            cqh = Transpose <perm = [0, 2, 1, 3]> (cq4)
            ckt = Transpose <perm = [0, 1, 3, 2]> (past_key_cross_0)
            cscores = MatMul (cqh, ckt)
            cp = Softmax <axis = -1> (cscores)
            {_read()}
        }}""",
        seed,
    )


def _own_attention() -> str:
    return f"""
            x = Gather (words, input_ids)
            q = MatMul (x, w_q)
            k = MatMul (x, w_k)
            v = MatMul (x, w_v)
            {ATTEND}
            present_key_self_0 = Concat <axis = 2> (past_key_self_0, kh)
            present_value_self_0 = Concat <axis = 2> (past_value_self_0, vh)
            kall = Identity (present_key_self_0)
            vall = Identity (present_value_self_0)
            bias = Identity (zerof)
            {SOFTMAX}
            y = Add (x, flat)
    """


def _read() -> str:
    return """
            ccontext = MatMul (cp, past_value_cross_0)
            cback = Transpose <perm = [0, 2, 1, 3]> (ccontext)
            cflat = Reshape (cback, join)
            sum = Add (y, cflat)
            logits = MatMul (sum, w_out)
    """


def model(op: str, inputs: dict[str, np.ndarray | None], outputs: int, **attributes: Any) -> onnx.ModelProto:
    """A model with one generation operator; inputs that are `None` are omitted."""
    given = {n: x for n, x in inputs.items() if x is not None}
    node = helper.make_node(
        op, [n if x is not None else "" for n, x in inputs.items()], [f"y{i}" for i in range(outputs)],
        domain="com.microsoft", **attributes,
    )  # fmt: skip
    kinds = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape) for n, x in given.items()
    ]
    made = helper.make_graph([node], op, kinds, [onnx.ValueInfoProto(name=f"y{i}") for i in range(outputs)])
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(made, opset_imports=opsets, ir_version=10)
