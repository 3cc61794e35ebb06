"""What the tests of `ep.onnxruntime` share: both modules, and small models as text. Fixtures are in conftest.py."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import onnx
from onnx import parser

MODULES = ["onnxruntime", "ep.onnxruntime"]
CPU = ["CPUExecutionProvider"]
X = np.arange(6, dtype=np.float32).reshape(2, 3)
TWO = "g (float[N, 3] a, float[N, 3] b) => (float[N, 3] s, float[N, 3] p) { s = Add(a, b)\n p = Mul(a, b) }"
DOUBLE = "g (float[N, 3] x) => (float[N, 3] y) { y = Add(x, x) }"
DEFAULT = "g (float[2] x, float[2] w = {1, 2}) => (float[2] y) { y = Add(x, w) }"


def parsed(text: str, opsets: str = '"": 17, "ai.onnx.ml": 3', ir: int = 8) -> onnx.ModelProto:
    """The model of a graph's text."""
    return parser.parse_model(f"<ir_version: {ir}, opset_import: [{opsets}]> {text}")


def content(text: str, **keywords) -> bytes:
    """The same as bytes."""
    return parsed(text, **keywords).SerializeToString()


def load(ort: ModuleType, text: str, *arguments, **keywords):
    """A session of a graph's text on the CPU."""
    return ort.InferenceSession(content(text), *arguments, providers=CPU, **keywords)


def value(ort: ModuleType, array: np.ndarray):
    """An `OrtValue` over an array."""
    return ort.OrtValue.ortvalue_from_numpy(array)
