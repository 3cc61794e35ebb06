"""Do devices read the memory of mapped files, and does a session say of which weights they do not, and why?"""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import ep
from ep.cli import main
from ep.loader import load_model

ROWS = 64
NAMES = ("a", "b", "t", "h")


def arrays() -> dict[str, np.ndarray]:
    made = np.random.default_rng(0).standard_normal((len(NAMES), ROWS, ROWS)).astype(np.float32)
    found = dict(zip(NAMES, made / 8, strict=True))
    return found | {"h": found["h"].astype(np.float16)}


def model(typed: bool = False) -> onnx.ModelProto:
    """x · a · b · tᵀ · float(h): two plain weights, one that is transposed and one that is cast."""
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["xa"]),
        helper.make_node("MatMul", ["xa", "b"], ["xab"]),
        helper.make_node("Transpose", ["t"], ["tt"]),
        helper.make_node("MatMul", ["xab", "tt"], ["xabt"]),
        helper.make_node("Cast", ["h"], ["hf"], to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["xabt", "hf"], ["y"]),
    ]
    tensors = [numpy_helper.from_array(array, name) for name, array in arrays().items()]
    if typed:
        tensors[0] = helper.make_tensor("a", TensorProto.FLOAT16, (ROWS, ROWS), arrays()["a"].ravel())
        nodes[0] = helper.make_node("Cast", ["a"], ["xa"], to=TensorProto.FLOAT)
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", ROWS])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", ROWS])],
        tensors,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def save(folder: Path, align: int, shift: int = 0) -> Path:
    """The model with external data at multiples of `align`, plus `shift`."""
    made, content = model(), bytearray()
    for tensor in made.graph.initializer:
        content += bytes(-len(content) % align + shift)
        place = {"location": "m.data", "offset": len(content), "length": len(tensor.raw_data)}
        content += tensor.raw_data
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in place.items():
            tensor.external_data.add(key=key, value=str(value))
    folder.mkdir(exist_ok=True)
    (folder / "m.data").write_bytes(content)
    onnx.save(made, folder / "m.onnx")
    return folder / "m.onnx"


def expected(x: np.ndarray) -> np.ndarray:
    w = arrays()
    return x @ w["a"] @ w["b"] @ w["t"].T @ w["h"].astype(np.float32)


def run(session: ep.InferenceSession) -> None:
    x = np.random.default_rng(1).standard_normal((3, ROWS)).astype(np.float32)
    np.testing.assert_allclose(session.run(None, {"x": x})[0], expected(x), rtol=1e-3, atol=1e-3)


def pointer(array: Any) -> int:
    return array.unsafe_buffer_pointer()


def test_jax_reads_the_file(tmp_path):
    pytest.importorskip("jax")
    session = ep.load(save(tmp_path, 64), "jax")
    before = {w.name: w.why for w in session.weights}
    assert all(w.device_array is None for w in session.weights)  # nothing is read before the first run
    run(session)
    for name in ("a", "b"):
        weight = session.weights[name]
        buffer = weight.buffer()
        assert weight.is_borrowed and weight.source.startswith("m.data at ") and buffer.is_borrowed
        assert pointer(weight.device_array) == buffer.as_ptr() == weight.array.ctypes.data
    assert "row-major" in session.weights["tt"].why and "computed" in session.weights["hf"].why
    assert before == {w.name: w.why for w in session.weights}  # what was foretold came true
    assert session.weights.totals.borrowed == session.plan.weights.borrowed == 2
    assert "4 weights, 0.1 MiB: 50 % borrowed, 2 copied" in str(session.plan)


def test_what_is_not_aligned_is_copied_with_the_reason(tmp_path):
    pytest.importorskip("jax")
    session = ep.load(save(tmp_path, 64, shift=4), "jax")
    run(session)
    weight = session.weights["a"]
    assert (
        weight.why == "its address is not a multiple of 64" and pointer(weight.device_array) != weight.array.ctypes.data
    )
    assert weight.source.startswith("m.data at ")  # the host goes on to read the file


def test_mlx_says_why_it_copies(tmp_path):
    mx = pytest.importorskip("mlx.core")
    session = ep.load(save(tmp_path, 64), "mlx")
    run(session)
    expected = "" if mx.metal.is_available() else "MLX shares host memory only on Metal"
    assert session.weights["a"].why == expected


def test_the_host_reads_the_file(tmp_path):
    session = ep.load(save(tmp_path, 1, shift=4), "host")
    run(session)
    assert session.weights.totals.borrowed == 3  # tᵀ is a view
    weight = session.weights["a"]
    assert weight.device_array is weight.array


def test_two_sessions_share_the_map_and_what_the_device_made_of_it(tmp_path, accelerator):
    path = save(tmp_path, 64, shift=4)
    first, second = ep.load(path, accelerator), ep.load(path, accelerator)
    run(first)
    run(second)
    for name in ("a", "b", "tt"):
        one, other = first.weights[name], second.weights[name]
        assert one.device_array is other.device_array and one.array.ctypes.data == other.array.ctypes.data
    assert first.weights["hf"].device_array is not second.weights["hf"].device_array
    kept = weakref.ref(first.weights["a"].device_array)
    del first, one, other
    gc.collect()
    run(second)
    assert kept() is second.weights["a"].device_array
    del second
    gc.collect()
    assert kept() is None


def test_a_changed_file_is_mapped_anew(tmp_path, accelerator):
    first = ep.load(save(tmp_path, 64), accelerator)
    run(first)
    data = tmp_path / "m.data"
    changed = bytearray(data.read_bytes())
    changed[: ROWS * ROWS * 4] = bytes(ROWS * ROWS * 4)
    (tmp_path / "new").write_bytes(changed)
    (tmp_path / "new").rename(data)  # as one should: a new file over the old one
    second = ep.load(tmp_path / "m.onnx", accelerator)
    assert not second.run(None, {"x": np.ones((1, ROWS), np.float32)})[0].any()
    run(first)


def test_computed_weights_are_held_once(tmp_path, accelerator):
    """What was made at load leaves the host's memory when the device has it: both look at the same bytes."""
    session = ep.load(save(tmp_path, 64), accelerator)
    first, address = weakref.ref(session.weights["hf"].array), session.weights["hf"].array.ctypes.data
    run(session)
    gc.collect()
    weight = session.weights["hf"]
    assert first() is None or pointer_of_any(weight.device_array) == address  # JAX adopts what happens to be aligned
    assert pointer_of_any(weight.device_array) == weight.array.ctypes.data
    np.testing.assert_array_equal(weight.array, arrays()["h"].astype(np.float32))


def pointer_of_any(array: Any) -> int:
    return np.asarray(memoryview(array)).ctypes.data


def test_hibernate_frees_and_wake_restores(tmp_path, accelerator):
    session = ep.load(save(tmp_path, 64, shift=4), accelerator)
    run(session)
    plan, compiled = str(session.plan), session.counters.misses
    array = weakref.ref(session.weights["a"].device_array)
    session.hibernate()
    gc.collect()
    assert array() is None and all(w.device_array is None for w in session.weights)
    assert str(session.plan) == plan
    session.wake()
    assert all(w.device_array is not None for w in session.weights)
    run(session)
    session.hibernate()
    run(session)  # wakes by itself
    assert session.counters.misses == compiled + 2


def test_weights_stored_as_numbers_say_so(tmp_path):
    pytest.importorskip("jax")
    onnx.save(model(typed=True), tmp_path / "m.onnx")
    sources = {w.name: w for w in ep.load(tmp_path / "m.onnx", "jax").weights}
    assert all(
        "computed" in w.why or w.source.startswith("m.onnx at ") or "row-major" in w.why for w in sources.values()
    )


def test_inspect_weights(tmp_path, capsys):
    pytest.importorskip("jax")
    path = save(tmp_path, 64)
    assert main(["inspect", str(path), "--weights", "--device", "jax", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["totals"]["count"] == 4 and found["totals"]["borrowed"] == 2
    assert {w["name"]: w["borrowed"] for w in found["weights"]} == {"a": True, "b": True, "tt": False, "hf": False}
    assert main(["inspect", str(path), "--weights", "--device", "jax"]) == 0
    text = capsys.readouterr().out
    assert (
        "50 % borrowed" in text and "m.data at 0" in text and "copied: its elements are not in row-major order" in text
    )


def test_bfloat16_and_float8_are_borrowed_too(tmp_path):
    pytest.importorskip("jax")
    for dtype in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.int64, np.bool_):
        content = np.zeros(4096 // np.dtype(dtype).itemsize, dtype)
        (tmp_path / "w.bin").write_bytes(content.tobytes())
        code = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        tensor = TensorProto(name="w", dims=content.shape, data_type=code, data_location=TensorProto.EXTERNAL)
        tensor.external_data.add(key="location", value="w.bin")
        graph = helper.make_graph(
            [helper.make_node("Gather", ["w", "i"], ["y"])],
            "g",
            [helper.make_tensor_value_info("i", TensorProto.INT64, ["n"])],
            [helper.make_tensor_value_info("y", code, ["n"])],
            [tensor],
        )
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)]), tmp_path / "m.onnx")
        session = ep.load(tmp_path / "m.onnx", "jax")
        session.run(None, {"i": np.arange(3)})
        (weight,) = session.weights
        assert weight.is_borrowed and pointer(weight.device_array) == weight.array.ctypes.data, dtype
    assert load_model(tmp_path / "m.onnx")[1].sources


def test_halves_that_jax_widens_for_its_products_are_copies_and_shared(tmp_path):
    pytest.importorskip("jax")
    w = np.random.default_rng(0).standard_normal((ROWS, ROWS)).astype(np.float16)
    (tmp_path / "w.bin").write_bytes(w.tobytes())
    tensor = TensorProto(name="w", dims=w.shape, data_type=TensorProto.FLOAT16, data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="w.bin")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT16, ["n", ROWS])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT16, ["n", ROWS])],
        [tensor],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), tmp_path / "m.onnx")
    first, second = (ep.load(tmp_path / "m.onnx", "jax") for _ in range(2))
    foretold = first.weights["w"].why
    for session in (first, second):
        session.run(None, {"x": w[:2]})
    weight = first.weights["w"]
    assert weight.why == foretold and "wider dtype" in weight.why and weight.dtype == "float16"
    assert weight.device_array.dtype == np.float32 and weight.device_array is second.weights["w"].device_array
    np.testing.assert_array_equal(np.asarray(weight.device_array), w)


def test_a_large_constant_of_a_node_is_a_weight_like_others(tmp_path, accelerator):
    """Also one that is larger than anything that is folded."""
    w = np.random.default_rng(0).standard_normal((4096, 1100)).astype(np.float32)
    nodes = [
        helper.make_node("Constant", [], ["w"], value=numpy_helper.from_array(w, "")),
        helper.make_node("MatMul", ["x", "w"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4096])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 1100])],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), tmp_path / "m.onnx")
    session = ep.load(tmp_path / "m.onnx", accelerator)
    (weight,) = session.weights
    assert weight.nbytes == w.nbytes and weight.source.startswith("m.onnx at ")
    x = np.random.default_rng(1).standard_normal((1, 4096)).astype(np.float32)
    np.testing.assert_allclose(session.run(None, {"x": x})[0], x @ w, rtol=1e-3, atol=1e-3)
    assert ep.estimate(tmp_path / "m.onnx", device=accelerator).weights == w.nbytes
