"""Do weights of 4 and 2 bits stay packed on the device, and mean what ONNX says?"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import ep

TYPES = ("int4", "uint4", "int2", "uint2")
ROWS, COLUMNS, BLOCK = 128, 65, 32  # an odd number of columns: rows do not start at whole bytes


def integers(name: str, *shape: int) -> np.ndarray:
    info = ml_dtypes.iinfo(name)
    values = np.random.default_rng(0).integers(info.min, info.max + 1, shape)
    return values.astype(np.int8 if info.min else np.uint8)


def stored(name: str, values: np.ndarray, dtype: str) -> TensorProto:
    return numpy_helper.from_array(values.astype(getattr(ml_dtypes, dtype)), name)


def model(nodes: list[Any], tensors: list[TensorProto], columns: int = COLUMNS) -> bytes:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", ROWS])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", columns])],
        tensors,
    )
    opsets = [helper.make_opsetid("", 25)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=13).SerializeToString()


def x() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((3, ROWS)).astype(np.float32)


@pytest.mark.parametrize("points", ["none", "small", "large"])
@pytest.mark.parametrize("dtype", TYPES)
def test_dequantized_weights_stay_packed(dtype, points, device, monkeypatch):
    from ep import passes

    monkeypatch.setattr(passes, "FOLD_BYTES", 0)  # as if the weights were large
    columns = COLUMNS if points != "large" else 8192  # their zero points are packed, then, too
    w = integers(dtype, ROWS, columns)
    if points == "none":
        scale, zero, fields = np.float32(0.25), None, {}
    else:
        scale = np.random.default_rng(2).random((ROWS // BLOCK, columns)).astype(np.float32)
        zero, fields = integers(dtype, ROWS // BLOCK, columns), {"axis": 0, "block_size": BLOCK}
    tensors = [stored("w", w, dtype), numpy_helper.from_array(np.asarray(scale), "s")]
    names = ["w", "s"]
    if zero is not None:
        tensors.append(stored("z", zero, dtype))
        names.append("z")
    nodes = [
        helper.make_node("DequantizeLinear", names, ["f"], **fields),
        helper.make_node("MatMul", ["x", "f"], ["y"]),
    ]
    session = ep.load(model(nodes, tensors, columns), device)
    (y,) = session.run(None, {"x": x()})
    spread = (lambda a: np.repeat(a, BLOCK, 0)) if zero is not None else np.asarray
    wide = w.astype(np.float32) - (0 if zero is None else spread(zero).astype(np.float32))
    np.testing.assert_allclose(y, x() @ (wide * spread(scale)), rtol=1e-4, atol=1e-4)
    assert session.plan.fallbacks == ()
    if device != "host":  # NumPy has the whole product's right side at hand, and no arguments
        packed = session.weights["w (packed)"]
        assert packed.nbytes == -(-w.size * ml_dtypes.iinfo(dtype).bits // 8) and packed.dtype == "uint8"


@pytest.mark.parametrize("dtype", TYPES)
def test_packed_weights_that_are_not_dequantized(dtype, device):
    w = integers(dtype, ROWS, COLUMNS)
    nodes = [
        helper.make_node("Cast", ["w"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["x", "f"], ["y"]),
    ]
    with pytest.warns(ep.HostFallbackWarning) if device == "mlx" else nothing():
        session = ep.load(model(nodes, [stored("w", w, dtype)]), device)
    np.testing.assert_allclose(session.run(None, {"x": x()})[0], x() @ w.astype(np.float32), rtol=1e-4, atol=1e-3)


def test_4_bit_constants_of_nodes_are_weights_too(device):
    w = integers("int4", ROWS, COLUMNS)
    constant = stored("w", w, "int4")
    nodes = [
        helper.make_node("Constant", [], ["w"], value=constant),
        helper.make_node("Transpose", ["w"], ["t"]),
        helper.make_node("Transpose", ["t"], ["u"]),
        helper.make_node("DequantizeLinear", ["u", "s"], ["f"]),
        helper.make_node("MatMul", ["x", "f"], ["y"]),
    ]
    session = ep.load(model(nodes, [numpy_helper.from_array(np.float32(0.5), "s")]), device)
    np.testing.assert_allclose(session.run(None, {"x": x()})[0], x() @ w * np.float32(0.5), rtol=1e-4, atol=1e-3)


def nothing() -> Any:
    import contextlib

    return contextlib.nullcontext()


def test_no_operator_of_passes_is_for_models():
    text = '<ir_version: 10, opset_import: ["": 21, "ep": 1]> g (float[n] x) => (float[n] y) { y = ep.Unpack(x) }'
    with pytest.raises(ep.EpError):
        ep.load(onnx.parser.parse_model(text), "host")
