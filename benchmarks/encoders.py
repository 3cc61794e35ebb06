"""Which models stand for an encoder and a decoder of common size? Built here, with random weights, as exporters do."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


class Builder:
    """Collects nodes and weights; every method returns the name of its result."""

    def __init__(self, seed: int = 0) -> None:
        self.nodes: list[Any] = []
        self.weights: list[Any] = []
        self.rng = np.random.default_rng(seed)

    def op(self, kind: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Any:
        names = [f"v{len(self.nodes)}_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(kind, inputs, names, f"{kind}_{len(self.nodes)}", **attributes))
        return names[0] if outputs == 1 else names

    def const(self, array: Any, dtype: Any = np.float32) -> str:
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(array, dtype), name))
        return name

    def linear(self, x: str, rows: int, columns: int) -> str:
        weight = self.const(self.rng.standard_normal((rows, columns)) / np.sqrt(rows))
        return self.op("Add", self.op("MatMul", x, weight), self.const(np.zeros(columns)))

    def norm(self, x: str, size: int) -> str:
        return self.op("LayerNormalization", x, self.const(np.ones(size)), self.const(np.zeros(size)), axis=-1)

    def heads(self, x: str, heads: int, size: int) -> str:
        shaped = self.op("Reshape", x, self.const([0, 0, heads, size], np.int64))
        return self.op("Transpose", shaped, perm=[0, 2, 1, 3])

    def attention(self, q: str, k: str, v: str, size: int, mask: str | None) -> str:
        scores = self.op("MatMul", q, self.op("Transpose", k, perm=[0, 1, 3, 2]))
        scores = self.op("Mul", scores, self.const(size**-0.5))
        scores = scores if mask is None else self.op("Add", scores, mask)
        mixed = self.op("Transpose", self.op("MatMul", self.op("Softmax", scores, axis=-1), v), perm=[0, 2, 1, 3])
        return self.op("Reshape", mixed, self.const([0, 0, -1], np.int64))

    def gelu(self, x: str) -> str:
        bent = self.op("Erf", self.op("Div", x, self.const(np.sqrt(2))))
        return self.op("Mul", self.op("Mul", x, self.op("Add", bent, self.const(1.0))), self.const(0.5))

    def model(self, name: str, inputs: list[Any], outputs: list[Any]) -> onnx.ModelProto:
        graph = helper.make_graph(self.nodes, name, inputs, outputs, self.weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def encoder(layers: int = 6, width: int = 384, heads: int = 12, vocabulary: int = 30_522) -> onnx.ModelProto:
    """MiniLM-L6 by size: token ids [batch, sequence] and a mask to hidden states."""
    b, size = Builder(), width // heads
    x = b.op("Gather", b.const(b.rng.standard_normal((vocabulary, width)) * 0.02), "ids")
    mask = b.op("Cast", b.op("Unsqueeze", "mask", b.const([1, 2], np.int64)), to=TensorProto.FLOAT)
    mask = b.op("Mul", b.op("Sub", b.const(1.0), mask), b.const(-1e4))
    x = b.norm(x, width)
    for _ in range(layers):
        q, k, v = (b.heads(b.linear(x, width, width), heads, size) for _ in range(3))
        x = b.norm(b.op("Add", x, b.linear(b.attention(q, k, v, size, mask), width, width)), width)
        inner = b.linear(b.gelu(b.linear(x, width, 4 * width)), 4 * width, width)
        x = b.norm(b.op("Add", x, inner), width)
    b.op("Identity", x)
    b.nodes[-1].output[0] = "hidden"
    info = helper.make_tensor_value_info
    ids = [info(name, TensorProto.INT64, ["batch", "sequence"]) for name in ("ids", "mask")]
    return b.model("encoder", ids, [info("hidden", TensorProto.FLOAT, ["batch", "sequence", width])])


def decoder(layers: int = 12, width: int = 512, heads: int = 8, vocabulary: int = 8_192) -> onnx.ModelProto:
    """One step of a decoder with a key-value cache: token ids and the past to logits and the present."""
    b, size = Builder(), width // heads
    info = helper.make_tensor_value_info
    inputs, outputs = [info("ids", TensorProto.INT64, ["batch", "sequence"])], []
    embedding = b.const(b.rng.standard_normal((vocabulary, width)) * 0.02)
    x = b.op("Gather", embedding, "ids")
    for layer in range(layers):
        y = b.norm(x, width)
        q, k, v = (b.heads(b.linear(y, width, width), heads, size) for _ in range(3))
        for kind in ("k", "v"):
            inputs.append(info(f"past_{kind}{layer}", TensorProto.FLOAT, ["batch", heads, "past", size]))
            outputs.append(info(f"present_{kind}{layer}", TensorProto.FLOAT, ["batch", heads, "total", size]))
        k = b.op("Concat", f"past_k{layer}", k, axis=2)
        b.nodes[-1].output[0] = k = f"present_k{layer}"
        v = b.op("Concat", f"past_v{layer}", v, axis=2)
        b.nodes[-1].output[0] = v = f"present_v{layer}"
        x = b.op("Add", x, b.linear(b.attention(q, k, v, size, None), width, width))
        y = b.linear(b.gelu(b.linear(b.norm(x, width), width, 4 * width)), 4 * width, width)
        x = b.op("Add", x, y)
    b.op("MatMul", b.norm(x, width), b.op("Transpose", embedding, perm=[1, 0]))
    b.nodes[-1].output[0] = "logits"
    return b.model("decoder", inputs, [info("logits", TensorProto.FLOAT, ["batch", "sequence", vocabulary]), *outputs])
