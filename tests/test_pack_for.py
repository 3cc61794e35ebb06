"""Is everything that JAX computes with borrowed, of models that `ep pack --for jax` wrote?"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from test_pack import FORMATS, contents

import ep
from ep.errors import InvalidModel
from ep.packing import pack

pytest.importorskip("jax")
CORPUS = Path(os.environ.get("EP_CORPUS", Path(__file__).parents[2] / "shared" / "corpus"))


def corpus_models() -> list[Any]:
    every = sorted(p.parent.name for p in CORPUS.glob("*/model.onnx"))
    some = {"llm_tiny_qwen2_int4", "llm_micro_llama_fp16", "vad_silero", "sk_knn_clf", "face_mtcnn_onet"}
    return every if os.environ.get("EP_FULL") == "1" else sorted(some.intersection(every))


@pytest.mark.parametrize("name", corpus_models() or [pytest.param("", marks=pytest.mark.skip("no corpus: EP_CORPUS"))])
@pytest.mark.filterwarnings("ignore::ep.HostFallbackWarning")
def test_real_models_are_borrowed_whole(tmp_path, name):
    with np.load(CORPUS / name / "inputs_0.npz") as file:
        feeds = dict(file)
    shapes = {key: array.shape for key, array in feeds.items()}
    pack(CORPUS / name / "model.onnx", tmp_path, provider="jax", shapes=shapes)
    session = ep.load(tmp_path / "model.onnx", "jax")
    assert [w.name for w in session.weights if not w.is_borrowed] == []
    session.run(None, feeds)
    assert [w.name for w in session.weights if not w.is_borrowed] == []
    arrays = [w.device_array for w in session.weights if w.device_array is not None]
    arrays += [each.array for each in kept(session)]
    for array in arrays:
        address = array.ctypes.data if isinstance(array, np.ndarray) else array.unsafe_buffer_pointer()
        assert any(s.start <= address <= s.stop - array.nbytes for s in session._store.sources)


def kept(session: ep.InferenceSession) -> list[Any]:
    """What the compiled code of a session keeps of weights, and borrows."""
    functions = [f for _, g in session._opened.executable.every() for f in getattr(g, "cache", {}).values()]
    return [each for f in functions for each in getattr(f, "kept", ()) if each.is_borrowed]


def linear() -> onnx.ModelProto:
    """x · wᵀ · vᵀ, as exporters write linear layers, and w as a table."""
    numbers = np.random.default_rng(0).standard_normal((2, 48, 48)).astype(np.float32)
    nodes = [
        helper.make_node("Gemm", ["x", "w"], ["a"], transB=1),
        helper.make_node("Gemm", ["a", "v"], ["y"], transB=1),
        helper.make_node("Gather", ["w", "i"], ["z"]),
    ]
    inputs = [("x", TensorProto.FLOAT, ["n", 48]), ("i", TensorProto.INT64, ["m"])]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(*each) for each in inputs],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "yz"],
        [numpy_helper.from_array(array, name) for name, array in zip("wv", numbers, strict=True)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@FORMATS
def test_what_code_computes_of_weights_is_stored_and_borrowed(tmp_path, format):
    onnx.save(linear(), tmp_path / "m.onnx")
    pack(tmp_path / "m.onnx", tmp_path / "p.onnx", format=format, provider="jax", shapes={"n": 3})
    assert contents(tmp_path / "p.onnx") == contents(linear())
    feeds = {"x": np.random.default_rng(1).standard_normal((3, 48)).astype(np.float32), "i": np.arange(2)}
    session = ep.load(tmp_path / "p.onnx", "cpu", options={"context.cache": "off"})
    ours = session.run(None, feeds)
    theirs = ep.load(tmp_path / "m.onnx", "cpu", options={"context.cache": "off"}).run(None, feeds)
    for one, two, three in zip(
        ours, theirs, onnxruntime.InferenceSession(tmp_path / "p.onnx").run(None, feeds), strict=True
    ):
        np.testing.assert_array_equal(one, two)
        np.testing.assert_allclose(one, three, rtol=1e-4, atol=1e-4)
    totals = session.weights.totals
    assert totals.kept_borrowed_bytes == totals.kept_bytes == 2 * 48 * 48 * 4 and len(kept(session)) == 2
    assert "100 % borrowed; 0.0 MiB as compiled code computes, borrowed" in str(session.plan)
    sources = session._store.sources
    for each in kept(session):
        address = each.array.unsafe_buffer_pointer()
        assert address % 64 == 0 and any(s.start < address < s.stop for s in sources)
    assert ep.estimate(tmp_path / "p.onnx", {"n": 3}, device="cpu").copied == 0
    again = pack(tmp_path / "p.onnx", tmp_path / "again.onnx", format=format)  # for everybody: nothing is left of it
    assert again.nbytes == 2 * 48 * 48 * 4 and "ep.kept" not in str(
        onnx.load(tmp_path / "again.onnx", load_external_data=False)
    )


def test_a_stored_result_of_a_weight_that_was_changed_is_not_used(tmp_path):
    onnx.save(linear(), tmp_path / "m.onnx")
    pack(tmp_path / "m.onnx", tmp_path / "p.onnx", provider="jax")
    model = onnx.load(tmp_path / "p.onnx", load_external_data=False)
    for tensor in model.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(np.eye(48, dtype=np.float32), tensor.name))
    onnx.save(model, tmp_path / "changed.onnx")
    session, x = ep.load(tmp_path / "changed.onnx", "cpu"), np.eye(48, dtype=np.float32)
    np.testing.assert_array_equal(session.run(["y"], {"x": x, "i": [0]})[0], x)
    assert session.weights.totals.kept_borrowed_bytes == 0
    row = json.loads(model.metadata_props[-1].value)[0]
    for wrong in (
        "{",
        "1",
        "[5]",
        "[[]]",
        json.dumps([[*row[:2], "NOTHING", *row[3:]]]),
        json.dumps([[*row[:1], 5, *row[2:]]]),
    ):
        model.metadata_props[-1].value = wrong
        onnx.save(model, tmp_path / "changed.onnx")
        with pytest.raises(InvalidModel, match="ep.kept_weights"):
            ep.load(tmp_path / "changed.onnx", "cpu")
    original = onnx.load(tmp_path / "p.onnx", load_external_data=False)
    for place in (1 << 40, -1):  # nothing is read outside
        original.metadata_props[-1].value = json.dumps([[*row[:5], place, row[6]]])
        onnx.save(original, tmp_path / "changed.onnx")
        with pytest.raises(InvalidModel, match="does not fit"):
            ep.load(tmp_path / "changed.onnx", "cpu").run(["y"], {"x": x[:1], "i": [0]})


def halves() -> onnx.ModelProto:
    """x · w in float16, and w once more as a table."""
    w = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float16)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"]), helper.make_node("Gather", ["table", "i"], ["z"])]
    graph = helper.make_graph(
        nodes,
        "g",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT16, ["n", 64]),
            helper.make_tensor_value_info("i", TensorProto.INT64, ["m"]),
        ],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT16, None) for name in "yz"],
        [numpy_helper.from_array(w, "w"), numpy_helper.from_array(w + 1, "table")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@FORMATS
def test_halves_are_stored_as_jax_multiplies_them(tmp_path, format):
    onnx.save(halves(), tmp_path / "m.onnx")
    packed = pack(tmp_path / "m.onnx", tmp_path / "p.onnx", format=format, provider="jax")
    assert packed.nbytes == 2 * 64 * 64 * 2 + 64 * 64 * 4 and contents(tmp_path / "p.onnx") == contents(halves())
    feeds = {"x": np.random.default_rng(1).standard_normal((3, 64)).astype(np.float16), "i": np.arange(2)}
    session = ep.load(tmp_path / "p.onnx", "jax")
    assert session.weights.totals.borrowed == 2
    ours, theirs = session.run(None, feeds), ep.load(tmp_path / "m.onnx", "jax").run(None, feeds)
    weight = session.weights["w"]
    assert weight.is_borrowed and weight.device_array.dtype == np.float32
    address, sources = weight.device_array.unsafe_buffer_pointer(), session._store.sources
    assert any(source.start <= address < source.stop for source in sources) and address != weight.array.ctypes.data
    others = onnxruntime.InferenceSession(tmp_path / "p.onnx").run(None, feeds)
    for one, two, three in zip(ours, theirs, others, strict=True):
        np.testing.assert_array_equal(one, two)
        np.testing.assert_allclose(one.astype(np.float32), three.astype(np.float32), rtol=1e-2, atol=1e-2)
    assert "w" in contents(tmp_path / "p.onnx") and "mlx" not in str(packed)


def test_a_stored_copy_of_a_weight_that_was_changed_is_not_used(tmp_path):
    onnx.save(halves(), tmp_path / "m.onnx")
    pack(tmp_path / "m.onnx", tmp_path / "p.onnx", provider="jax")
    model = onnx.load(tmp_path / "p.onnx", load_external_data=False)
    w = next(tensor for tensor in model.graph.initializer if tensor.name == "w")
    w.CopyFrom(numpy_helper.from_array(np.eye(64, dtype=np.float16), "w"))
    onnx.save(model, tmp_path / "changed.onnx")
    x = np.random.default_rng(1).standard_normal((3, 64)).astype(np.float16)
    np.testing.assert_array_equal(ep.load(tmp_path / "changed.onnx", "jax").run(["y"], {"x": x, "i": [0]})[0], x)
    for wrong in ("{", "1", '{"table": 5}', '{"table": ["a", "b", "c", "d", "e"]}'):
        model.metadata_props[-1].value = wrong
        onnx.save(model, tmp_path / "changed.onnx")
        with pytest.raises(InvalidModel, match="ep.wide_weights"):
            ep.load(tmp_path / "changed.onnx", "jax")
