"""Does a model travel as a context: standard nodes, the same answers, code only where it fits and is trusted?"""

import json
import os
import subprocess
import sys
import threading
import warnings

import ml_dtypes
import numpy as np
import onnx
import pytest
from conftest import parse, require
from onnx import TensorProto, helper, numpy_helper

import ep
from ep.container import unpack
from ep.context_cache import ContextNotice
from ep.errors import EpError, InvalidInput

RNG = np.random.default_rng(3)
# Their products are exact, so that they have the same bits whatever BLAS a process has found.
WEIGHT = (RNG.integers(-99, 100, (8, 64)) / 64).astype(np.float32)
X = (RNG.integers(-99, 100, (3, 8)) / 64).astype(np.float32)
TEXT = """
g (float[n, 8] x) => (float[n, 64] y, int64[n] best) <float[64] bias = {BIAS}, int64[1] axis = {1}> {
    h = MatMul(x, w)
    z = Add(h, bias)
    y = Softmax<axis = 1>(z)
    raw = ArgMax<axis = 1, keepdims = 0>(y)
    best = Identity(raw)
}
""".replace("BIAS", ", ".join("0.5" for _ in range(64)))
TWO_PARTS = """
g (float[n] x) => (float[m] y) {
    big = Relu(x)
    doubled = Add(big, big)
    at = NonZero(doubled)
    flat = Squeeze(at)
    picked = Gather(doubled, flat)
    halved = Neg(picked)
    y = Exp(halved)
}
"""
TRUST = {"trust_native": True}


def with_weight(array=WEIGHT):
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]>\n{TEXT}')
    model.graph.initializer.append(numpy_helper.from_array(array, "w"))
    onnx.checker.check_model(model)
    return model


def saved(model, device, folder, feeds, embed=False, **options):
    """A context model of a session that ran these feeds, and what it answered."""
    onnx.save(model, folder / "model.onnx")
    session = quiet(folder / "model.onnx", device)
    expected = session.run(None, feeds)
    return session.save_context(embed=embed, **options), expected


def quiet(*arguments, **keywords):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ep.HostFallbackWarning)
        return ep.load(*arguments, **keywords)


def same(got, expected):
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b, strict=True)


def contexts(path):
    return [node for node in onnx.load(path, load_external_data=False).graph.node if node.op_type == "EPContext"]


def attributes(node):
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


# There and back.


@pytest.mark.parametrize("embed", [True, False])
def test_the_code_of_a_context_is_used(accelerator, embed, tmp_path):
    made, expected = saved(with_weight(), accelerator, tmp_path, {"x": X}, embed)
    assert (made.model, made.partitions, made.functions) == (tmp_path / "model_ctx.onnx", 1, 1)
    assert made.blobs == (() if embed else (tmp_path / "model_ctx.epctx",)) and made.left_out == ()
    assert made.weights == (() if embed else (tmp_path / "model_ctx.data",))
    assert {path.name for path in tmp_path.iterdir()} == {
        path.name for path in (tmp_path / "model.onnx", made.model, *made.blobs, *made.weights)
    }
    session = ep.load(made.model, accelerator, options=TRUST)
    same(session.run(None, {"x": X}), expected)
    assert (session.counters.loaded, session.counters.misses) == (1, 0)
    assert [str(i) for i in session.inputs] == ["x: float32[n, 8]"]
    assert [o.name for o in session.outputs] == ["y", "best"]
    same(session.run(None, {"x": X[:2]}), [array[:2] for array in expected])
    assert (session.counters.loaded, session.counters.misses) == (1, 1), "another shape is compiled from the graph"


FRESH = """
import json, sys, numpy as np, ep
session = ep.load(sys.argv[1], sys.argv[2], options={"trust_native": True})
results = session.run(None, {"x": np.load(sys.argv[3])})
print(json.dumps([session.counters.loaded, session.counters.misses, [r.tobytes().hex() for r in results]]))
"""


def test_a_fresh_process_starts_without_compiling(accelerator, tmp_path):
    made, expected = saved(with_weight(), accelerator, tmp_path, {"x": X})
    np.save(tmp_path / "x.npy", X)
    command = [sys.executable, "-c", FRESH, str(made.model), accelerator, str(tmp_path / "x.npy")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [1, 0, [array.tobytes().hex() for array in expected]]


def test_partitions_share_one_container(accelerator, tmp_path):
    onnx.save(parse(TWO_PARTS), tmp_path / "m.onnx")
    session = quiet(tmp_path / "m.onnx", accelerator)
    feeds = [{"x": np.array(values, np.float32)} for values in ([1, -2, 3], [1, 0, 0])]
    expected = [session.run(None, each) for each in feeds]
    made = session.save_context()
    nodes = contexts(made.model)
    assert [attributes(n)["main_context"] for n in nodes] == [1, 0] and made.partitions == 2
    assert ["ep_cache_context" in attributes(n) for n in nodes] == [True, False]
    assert len({attributes(n)["partition_name"] for n in nodes}) == 2
    again = quiet(made.model, accelerator, options=TRUST)
    for each, answer in zip(feeds, expected, strict=True):
        same(again.run(None, each), answer)
    assert (again.counters.loaded, again.counters.misses) == (session.counters.misses, 0)


@pytest.mark.parametrize("embed", [True, False])
def test_two_accelerators_share_a_model(embed, tmp_path):
    """MLX has no float64 on a GPU and little of it on a CPU: JAX takes these nodes, in its own scope of 64 bits."""
    require("jax"), require("mlx")
    from ep.devices import resolve

    text = """
    g (float[n, 8] x) => (double[n, 8] y, float[n, 8] z, int64[n] best) {
        z = Relu(x)
        d = Cast<to = 11>(z)
        e = Exp(d)
        y = Mul(e, e)
        best = ArgMax<axis = 1, keepdims = 0>(y)
    }"""
    onnx.save(parse(text), tmp_path / "m.onnx")
    providers = [resolve("mlx", {})[0], *resolve("jax", {})]
    session = quiet(tmp_path / "m.onnx", providers=providers)
    expected = session.run(None, {"x": X})
    np.testing.assert_allclose(expected[0], np.exp(2 * np.maximum(X, 0).astype(np.float64)), rtol=1e-14, strict=True)
    assert [array.dtype for array in expected] == [np.float64, np.float32, np.int64]
    made = session.save_context(embed=embed)
    sources = [attributes(n)["source"] for n in contexts(made.model) if attributes(n)["main_context"]]
    assert sources == [b"ep.mlx", b"ep.jax"] and len(made.blobs) == (0 if embed else 2)
    again = quiet(made.model, providers=providers, options=TRUST)
    same(again.run(None, {"x": X}), expected)
    assert (again.counters.loaded, again.counters.misses) == (2, 0)
    again.hibernate()
    again.wake()
    same(list(again(x=X).values()), expected)


def test_a_context_of_a_context(accelerator, tmp_path):
    made, expected = saved(with_weight(), accelerator, tmp_path, {"x": X})
    session = ep.load(made.model, accelerator, options=TRUST)
    session.run(None, {"x": X})
    second = session.save_context(tmp_path / "again.onnx", embed=True)
    last = ep.load(second.model, accelerator, options=TRUST)
    same(last.run(None, {"x": X}), expected)
    assert (last.counters.loaded, last.counters.misses) == (1, 0)


def test_bodies_and_branches_travel(accelerator, tmp_path):
    text = """
    g (float[n] x, int64 trips, bool more) => (float[n] y, float[k] z) {
        start = Identity(x)
        y = Loop(trips, more, start) <body = b (int64 i, bool c, float[n] a) => (bool d, float[n] t) {
            d = Identity(c)
            t = Add(a, x)
        }>
        total = ReduceSum<keepdims = 0>(y)
        some = Less(total, total)
        z = If(some) <
            then_branch = p () => (float[k] u) { u = Neg(y) },
            else_branch = q () => (float[k] v) { v = Concat<axis = 0>(y, y) }
        >
    }
    """
    feeds = {"x": X[0], "trips": np.array(3), "more": np.array(True)}
    made, expected = saved(parse(text), accelerator, tmp_path, feeds)
    np.testing.assert_allclose(expected[0], 4 * X[0], rtol=1e-6)
    session = quiet(made.model, accelerator, options=TRUST)
    same(session.run(None, feeds), expected)
    assert session.counters.misses == 0 and session.counters.loaded == made.functions


# The file is what onnxruntime defines.


def test_the_file_is_valid_and_onnxruntime_lacks_only_the_provider(accelerator, tmp_path):
    ort = pytest.importorskip("onnxruntime")
    made, _ = saved(with_weight(), accelerator, tmp_path, {"x": X}, embed=True)
    onnx.checker.check_model(str(made.model), full_check=True)
    with pytest.raises(Exception, match="EPContext") as raised:
        ort.InferenceSession(str(made.model), providers=["CPUExecutionProvider"])
    assert "NOT_IMPLEMENTED" in str(raised.value), raised.value


def test_the_node_has_the_schema_of_onnxruntime(accelerator, tmp_path):
    state = pytest.importorskip("onnxruntime.capi.onnxruntime_pybind11_state")
    schema = next(s for s in state.get_all_operator_schema() if s.name == "EPContext")
    made, _ = saved(with_weight(), accelerator, tmp_path, {"x": X})
    (node,) = contexts(made.model)
    assert node.domain == schema.domain
    kinds = {name: a.type.name for name, a in schema.attributes.items()}
    assert {a.name for a in node.attribute} <= kinds.keys() and len(node.attribute) == len(kinds)
    for attribute in node.attribute:
        assert onnx.AttributeProto.AttributeType.Name(attribute.type) == kinds[attribute.name]
    found = attributes(node)
    assert found["ep_cache_context"] == b"model_ctx.epctx" and found["embed_mode"] == 0
    assert found["onnx_model_filename"] == b"model.onnx" and found["source"] == f"ep.{accelerator}".encode()
    assert found["max_size"] == (tmp_path / "model_ctx.epctx").stat().st_size


# Weights stay outside.


def test_weights_are_not_in_the_container(accelerator, tmp_path):
    made, _ = saved(with_weight(), accelerator, tmp_path, {"x": X})
    assert WEIGHT.tobytes()[:16] not in made.blobs[0].read_bytes()
    kept = {t.name for t in onnx.load(made.model).graph.initializer}
    assert "w" in kept and "w" in contexts(made.model)[0].input


def test_external_weights_serve_both_models(accelerator, tmp_path):
    onnx.save(with_weight(), tmp_path / "model.onnx", save_as_external_data=True, location="w.bin", size_threshold=512)
    session = ep.load(tmp_path / "model.onnx", accelerator)
    expected = session.run(None, {"x": X})
    made = session.save_context()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.onnx", "model_ctx.epctx", "model_ctx.onnx", "w.bin"]
    same(ep.load(made.model, accelerator, options=TRUST).run(None, {"x": X}), expected)
    (tmp_path / "elsewhere").mkdir()
    moved = session.save_context(tmp_path / "elsewhere" / "m.onnx")
    assert (tmp_path / "elsewhere" / "m.data").stat().st_size >= WEIGHT.nbytes
    same(ep.load(moved.model, accelerator, options=TRUST).run(None, {"x": X}), expected)


def test_a_data_file_that_is_in_use_is_not_replaced(accelerator, tmp_path):
    model = with_weight()
    tensor = model.graph.initializer[-1]
    (tmp_path / "model_ctx.data").write_bytes(tensor.raw_data)
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="model_ctx.data")
    twice = numpy_helper.from_array(np.eye(64, dtype=np.float32) * 2, "twice")  # in the model's file
    model.graph.initializer.append(twice)
    model.graph.node[1].input[0] = "doubled"
    model.graph.node.insert(1, helper.make_node("MatMul", ["h", "twice"], ["doubled"]))
    made, expected = saved(model, accelerator, tmp_path, {"x": X})
    assert (tmp_path / "model_ctx.data").read_bytes() == WEIGHT.tobytes()
    same(ep.load(made.model, accelerator, options=TRUST).run(None, {"x": X}), expected)


def test_a_context_model_is_not_packed(accelerator, tmp_path):
    """Its container may lie in another file, which the packed model would lack."""
    made, _ = saved(with_weight(), accelerator, tmp_path, {"x": X})
    with pytest.raises(InvalidInput, match="(?s)is a context model.*pack the model that it was made from"):
        ep.pack(made.model, tmp_path / "packed.onnx")


def test_one_safetensors_file_serves_both_models(accelerator, tmp_path):
    from safetensors.numpy import save_file

    save_file({"w": 2 * WEIGHT}, tmp_path / "w.safetensors")
    onnx.save(with_weight(), tmp_path / "model.onnx")
    session = ep.load(tmp_path / "model.onnx", accelerator, weights=tmp_path / "w.safetensors")
    expected = session.run(None, {"x": X})
    made = session.save_context()
    assert [p.name for p in tmp_path.iterdir() if p.suffix in (".data", ".weights")] == []
    same(ep.load(made.model, accelerator, options=TRUST).run(None, {"x": X}), expected)
    save_file({"w": WEIGHT}, tmp_path / "other.safetensors")
    other = ep.load(made.model, accelerator, weights=tmp_path / "other.safetensors", options=TRUST)
    original = ep.load(tmp_path / "model.onnx", accelerator)
    same(other.run(None, {"x": X}), original.run(None, {"x": X}))
    assert other.counters.misses == 0, "weights are arguments: the code serves others, too"


def test_large_constants_of_nodes_are_weights_too(accelerator, tmp_path):
    model = with_weight()
    node = helper.make_node("Constant", [], ["w"], value=numpy_helper.from_array(WEIGHT))
    del model.graph.initializer[-1]
    model.graph.node.insert(0, node)
    made, expected = saved(model, accelerator, tmp_path, {"x": X})
    assert WEIGHT.tobytes()[:16] not in made.blobs[0].read_bytes()
    same(ep.load(made.model, accelerator, options=TRUST).run(None, {"x": X}), expected)


def test_branches_may_call_different_weights_the_same(accelerator, tmp_path):
    text = """
    g (float[n, 8] x, bool more) => (float[n, 64] y) {
        z = Relu(x)
        y = If(more) <
            then_branch = p () => (float[n, 64] u) { u = MatMul(z, w) },
            else_branch = q () => (float[n, 64] v) { v = MatMul(z, w) }
        >
    }
    """
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]>\n{text}')
    for branch, weight in zip(model.graph.node[1].attribute, (WEIGHT, 2 * WEIGHT), strict=True):
        constant = helper.make_node("Constant", [], ["w"], value=numpy_helper.from_array(weight))
        branch.g.node.insert(0, constant)
    onnx.checker.check_model(model)
    made, expected = saved(model, accelerator, tmp_path, {"x": X, "more": np.array(True)})
    assert WEIGHT.tobytes()[:16] not in made.blobs[0].read_bytes()
    session = ep.load(made.model, accelerator, options=TRUST)
    same(session.run(None, {"x": X, "more": np.array(True)}), expected)
    same(session.run(None, {"x": X, "more": np.array(False)}), [2 * expected[0]])
    assert session.counters.loaded == 1


@pytest.mark.parametrize("kind", ["INT4", "FLOAT8E4M3FN"])
def test_weights_of_other_types_cross_as_bytes(kind, tmp_path):
    require("jax")
    names = {"INT4": ml_dtypes.int4, "FLOAT8E4M3FN": ml_dtypes.float8_e4m3fn}
    codes = np.arange(-7, 8, dtype=np.float32).repeat(200).reshape(40, 75).astype(names[kind])
    text = "g (float[n, 40] x) => (float[n, 75] y) <float s = {0.5}> { d = DequantizeLinear(w, s) y = MatMul(x, d) }"
    model = onnx.parser.parse_model(f'<ir_version: 11, opset_import: ["": 23]>\n{text}')
    model.graph.initializer.append(numpy_helper.from_array(codes, "w"))
    assert model.graph.initializer[-1].data_type == TensorProto.DataType.Value(kind)
    x = RNG.standard_normal((2, 40)).astype(np.float32)
    made, expected = saved(model, "jax", tmp_path, {"x": x})
    onnx.checker.check_model(str(made.model))
    weights = {t.name: t for t in onnx.load(made.model).graph.initializer}
    assert weights["w__bytes"].data_type == TensorProto.UINT8 and "w" not in weights
    (partition,) = unpack(made.blobs[0].read_bytes()).partitions
    assert [b.dtype for b in partition.inputs if b.packed] == [np.dtype(names[kind]).name]
    session = ep.load(made.model, "jax", options=TRUST)
    same(session.run(None, {"x": x}), expected)
    assert session.counters.misses == 0
    np.testing.assert_allclose(expected[0], x @ (codes.astype(np.float32) * 0.5), rtol=1e-4, atol=1e-4)
    again = session.save_context(tmp_path / "again.onnx")
    assert "w__bytes" in {t.name for t in onnx.load(again.model).graph.initializer}
    if kind.startswith("FLOAT8"):
        other = (codes.astype(np.float32) * 2).astype(names[kind])
        head = json.dumps({"w": {"dtype": "F8_E4M3", "shape": other.shape, "data_offsets": [0, other.nbytes]}}).encode()
        content = len(head).to_bytes(8, "little") + head + other.tobytes()
        (tmp_path / "other.safetensors").write_bytes(content)
        twice = ep.load(made.model, "jax", weights=tmp_path / "other.safetensors", options=TRUST)
        same(twice.run(None, {"x": x}), [2 * expected[0]])


# Borders that the node's schema lacks stay outside of it.

BORDERS = {
    "a result": ("float[n, 8] x", "float8e4m3fn[n, 8] y, float[n, 8] z", "a = Relu(x) y = Cast<to = 17>(a) z = Exp(a)"),
    "an argument": (
        "seq(float[n, 8]) x",
        "float[m, 8] y",
        "one = Constant<value = int64 {0}>() a = SequenceAt(x, one) b = Relu(a) y = Exp(b)",
    ),
    "both": (
        "float8e4m3fn[n] x",
        "float8e4m3fn[n] y",
        "a = Cast<to = 1>(x) b = Relu(a) c = Exp(b) y = Cast<to = 17>(c)",
    ),
    "undeclared sequences": (
        "float[n, 8] x",
        "float[m, 8] y",
        """one = Constant<value = int64 {1}>() zero = Constant<value = int64 {0}>()
        a = Relu(x) s = SplitToSequence<axis = 0>(a, one) t = SequenceInsert(s, a) u = Identity(t)
        c = SequenceAt(u, zero) found = NonZero(c) rows = Gather(found, zero) picked = Gather(c, rows)
        v = SequenceInsert(u, picked) b = ConcatFromSequence<axis = 0>(v) y = Exp(b)""",
    ),
}


@pytest.mark.parametrize("border", BORDERS)
def test_what_a_node_cannot_carry_stays_outside(border, tmp_path):
    require("jax")
    takes, gives, body = BORDERS[border]
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]>\ng ({takes}) => ({gives}) {{ {body} }}')
    x = [X] if takes.startswith("seq") else X[0].astype(ml_dtypes.float8_e4m3fn) if "float8" in takes else X
    made, expected = saved(model, "jax", tmp_path, {"x": x})
    onnx.checker.check_model(str(made.model), full_check=True)
    assert made.left_out and "is no tensor of a type that EPContext nodes carry" in made.left_out[0]
    kinds = [n.op_type for n in onnx.load(made.model).graph.node]
    assert "EPContext" in kinds and len(set(kinds)) > 1 and "Exp" not in kinds
    with warnings.catch_warnings():
        warnings.simplefilter("error", ContextNotice)
        same(quiet(made.model, "jax", options=TRUST).run(None, {"x": x}), expected)


@pytest.mark.parametrize("op", ["DequantizeLinear(x, half)", "Sub(x, x)"])
def test_types_at_borders_are_known_where_no_model_declares_them(op, tmp_path):
    require("jax")
    text = f"""<ir_version: 11, opset_import: ["": 23]>
    g (int8[n] x) => (float[m] y) <float half = {{0.5}}> {{
        d = {op} at = NonZero(d) flat = Squeeze(at) picked = Gather(d, flat) f = Cast<to = 1>(picked) y = Exp(f)
    }}"""
    x = np.array([1, 0, 3], np.int8)
    made, expected = saved(onnx.parser.parse_model(text), "jax", tmp_path, {"x": x})
    assert made.left_out == ()
    same(quiet(made.model, "jax", options=TRUST).run(None, {"x": x}), expected)


# Trust, and other machines.


def test_code_of_a_file_is_not_run_unless_trusted(accelerator, tmp_path):
    made, expected = saved(with_weight(), accelerator, tmp_path, {"x": X})
    session = ep.load(made.model, accelerator)
    with pytest.warns(ContextNotice, match=r"can do whatever a program can.*\{'trust_native': True\}") as caught:
        got = session.run(None, {"x": X})
    assert len(caught) == 1 and (session.counters.loaded, session.counters.misses) == (0, 1)
    same(got, expected)


@pytest.mark.parametrize(("options", "ahead"), [(TRUST, True), ({**TRUST, "compile": "off"}, False), ({}, False)])
def test_trusted_code_is_loaded_while_the_session_is_made(options, ahead, tmp_path, monkeypatch):
    require("jax")
    from ep.backends.jax import executable

    made, expected = saved(with_weight(), "jax", tmp_path, {"x": X})
    began, load = [], executable._loaded
    monkeypatch.setattr(executable, "_loaded", lambda *given: began.append(threading.current_thread()) or load(*given))
    session = ep.load(made.model, "jax", options=options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ContextNotice)
        same(session.run(None, {"x": X}), expected) if options else session.run(None, {"x": X})
    assert bool(began) is ahead and threading.main_thread() not in began


def test_trusted_code_that_does_not_load_is_compiled_again(tmp_path, monkeypatch):
    require("jax")
    from ep.backends.jax import executable

    made, expected = saved(with_weight(), "jax", tmp_path, {"x": X})

    def broken(*given):
        raise RuntimeError("no such symbol")

    monkeypatch.setattr(executable, "_loaded", broken)
    session = ep.load(made.model, "jax", options=TRUST)
    with pytest.warns(ContextNotice, match=r"not be loaded \(RuntimeError: no such symbol\); it is compiled again"):
        same(session.run(None, {"x": X}), expected)


def test_the_users_own_cache_needs_no_trust(accelerator, tmp_path, monkeypatch):
    monkeypatch.setattr("ep.library.WORTH", 0.0)
    monkeypatch.setattr("ep.library.GAIN", 0.0)
    monkeypatch.setenv("EP_CONTEXT_CACHE", str(tmp_path / "cache"))
    made, expected = saved(with_weight(), accelerator, tmp_path, {"x": X})
    session = ep.load(made.model, accelerator)
    same(session.run(None, {"x": X}), expected)
    assert (session.counters.loaded, session.counters.misses) == (1, 0)


def test_another_machine_compiles_the_graph_and_says_why(accelerator, tmp_path, monkeypatch):
    made, expected = saved(with_weight(), accelerator, tmp_path, {"x": X})
    monkeypatch.setattr("ep.identity.code_identity", lambda: "9.9-elsewhere")
    with pytest.warns(ContextNotice, match="was not used: it was made for ep .* instead of 9.9-elsewhere.") as caught:
        session = ep.load(made.model, accelerator, options=TRUST)
    assert len(caught) == 1
    same(session.run(None, {"x": X}), expected)
    assert (session.counters.loaded, session.counters.misses) == (0, 1)


@pytest.mark.parametrize(("maker", "user"), [("jax", "mlx"), ("mlx", "jax"), ("jax", "host")])
def test_another_provider_compiles_the_graph(maker, user, tmp_path):
    require(maker), require(user)
    made, expected = saved(with_weight(), maker, tmp_path, {"x": X})
    with pytest.warns(ContextNotice, match=f"'ep.{maker}' made it, and this session has"):
        session = ep.load(made.model, user, options=TRUST)
    got = session.run(None, {"x": X})
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(got[1], expected[1])


def test_a_graph_without_code_needs_no_notice(accelerator, tmp_path):
    made, expected = saved(with_weight(), accelerator, tmp_path, {"x": X}, portable_only=True)
    assert made.functions == 0
    same(ep.load(made.model, accelerator).run(None, {"x": X}), expected)


def test_a_model_without_compiled_groups_is_refused(accelerator, tmp_path):
    onnx.save(parse("g (string[n] x) => (string[n] y) { y = StringConcat(x, x) }"), tmp_path / "m.onnx")
    with pytest.raises(
        ep.UnsupportedModel, match="nothing of m.onnx can be stored .*\n.*all its nodes run on the host"
    ):
        quiet(tmp_path / "m.onnx", accelerator).save_context()
    with pytest.raises(InvalidInput, match="has no path"):
        ep.load(with_weight(), accelerator).save_context()


def test_a_context_is_described(accelerator, tmp_path):
    from ep.summary import summarize

    made, _ = saved(with_weight(), accelerator, tmp_path, {"x": X})
    (text,) = summarize(made.model).contexts
    assert text.startswith(f"ep.{accelerator}: 1 partition, 1 compiled function of ") and ", made for " in text


def test_a_session_that_rested_still_saves_what_was_stored(accelerator, tmp_path):
    session = ep.load(with_weight(), accelerator)
    session.warmup({"n": 3})
    expected = session.run(None, {"x": X})
    session.hibernate()
    made = session.save_context(tmp_path / "c.onnx")
    assert made.functions == 1
    same(ep.load(made.model, accelerator, options=TRUST).run(None, {"x": X}), expected)


# Options of onnxruntime, and warming up.


def option(folder, **more):
    return {"ep.context_enable": "1", "ep.context_file_path": str(folder / "out" / "c.onnx"), **more}


@pytest.mark.parametrize("embed", ["0", "1"])
def test_session_options_write_a_context(accelerator, embed, tmp_path):
    model = with_weight()
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 3
    (tmp_path / "out").mkdir()
    session = ep.load(model, accelerator, options=option(tmp_path, **{"ep.context_embed_mode": embed}))
    path = tmp_path / "out" / "c.onnx"
    assert attributes(contexts(path)[0])["embed_mode"] == int(embed)
    again = ep.load(path, accelerator, options=TRUST)
    same(again.run(None, {"x": X}), session.run(None, {"x": X}))
    assert (again.counters.loaded, again.counters.misses) == (1, 0)
    with pytest.raises(InvalidInput, match="exists already"):
        ep.load(model, accelerator, options=option(tmp_path))
    with pytest.raises(InvalidInput, match="is a context model already"):
        ep.load(path, accelerator, options=option(tmp_path, **{"ep.context_file_path": str(tmp_path / "d.onnx")}))


def test_dynamic_shapes_give_a_context_without_code(accelerator, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.warns(ContextNotice, match="its inputs have dynamic shapes.*session.warmup"):
        ep.load(with_weight(), accelerator, options=option(tmp_path))
    assert unpack((tmp_path / "out" / "c.epctx").read_bytes()).codes == ()


@pytest.mark.parametrize("wrong", [{"trust_native": "maybe"}, {"ep.context_enable": "2"}, {"context.cach": "off"}])
def test_wrong_options_are_refused(wrong):
    with pytest.raises(InvalidInput, match="option"):
        ep.load(with_weight(), "host", options=wrong)


def test_warming_up_compiles_each_signature_once(accelerator):
    session, seen = ep.load(with_weight(), accelerator), []
    session.warmup([{"x": (2, 8)}, {"n": 5}, {"x": X}], progress=lambda done, total: seen.append((done, total)))
    assert session.counters.misses == 3 and seen == [(0, 3), (1, 3), (2, 3), (3, 3)]
    for rows in (2, 5, 3):
        session.run(None, {"x": np.zeros((rows, 8), np.float32)})
    assert (session.counters.misses, session.counters.hits) == (3, 3)


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        ({"y": (1,)}, "which is no input and no dimension"),
        ({}, "dimension 'n' of no known size"),
        ({"n": 2, "x": (3, 8)}, "dimension 'n' is both 2 and 3"),
        ({"n": "two"}, "dimension 'n' is given as 'two'"),
        ({"x": (2, 9)}, "is given with shape"),
        ({"x": (2,)}, r"'x' is given with shape \[2\]"),
    ],
)
def test_warming_up_says_what_is_missing(shapes, text):
    with pytest.raises(InvalidInput, match=text):
        ep.load(with_weight(), "host").warmup(shapes)


# Damage.


def edit(path, change):
    """The context model with its first EPContext node changed."""
    model = onnx.load(path)
    change(next(node for node in model.graph.node if node.op_type == "EPContext"), model)
    onnx.save(model, path.parent / "changed.onnx")
    return path.parent / "changed.onnx"


def put(**values):
    def change(node, model):
        kept = [a for a in node.attribute if a.name not in values]
        del node.attribute[:]
        node.attribute.extend(kept + [helper.make_attribute(k, v) for k, v in values.items() if v is not None])

    return change


def twice(node, model):
    model.graph.node.add().CopyFrom(node)
    model.graph.node[-1].output[:] = [f"{name}2" for name in node.output]


def swapped(node, model):
    node.input[0], node.input[1] = node.input[1], node.input[0]


def without(node, model):
    del node.input[-1]


def reshaped(node, model):
    weight = next(t for t in model.graph.initializer if t.name == "w")
    weight.dims[:] = [64, 8]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (put(source="ep.other"), "no provider accepts EPContext nodes with source='ep.other'|that of its context"),
        (put(source="QNN", ep_cache_context=b"blob"), "no provider accepts .*'QNN'"),
        (put(source="ep.jax", ep_cache_context=b"blob"), "does not begin as one"),
        (put(ep_cache_context=None), "does not begin as one"),
        (put(main_context=0), "no node with main_context=1 and source 'ep.jax' brings"),
        (put(main_context=2), "main_context is 2"),
        (put(embed_mode=7), "embed_mode is 7"),
        (put(embed_mode=b"1"), "'embed_mode' occurs twice or is of the wrong type"),
        (put(partition_name="other"), r"its partition 'other' \(there are: 'ep_jax_0'\)"),
        (put(max_size=10), "more than its max_size 10"),
        (put(notes="sha256=" + "0" * 64), "is of another model"),
        (put(embed_mode=0, ep_cache_context="missing.epctx"), "'missing.epctx' cannot be read"),
        (put(embed_mode=0, ep_cache_context="../secret"), "outside the model's directory"),
        (put(embed_mode=0, ep_cache_context="/etc/passwd"), "outside the model's directory"),
        (put(embed_mode=0, ep_cache_context=""), "outside the model's directory"),
        (put(embed_mode=0, ep_cache_context="."), "cannot be read"),
        (put(embed_mode=0, ep_cache_context="a\0b"), "cannot be read"),
        (put(embed_mode=0, ep_cache_context="a" * 5000), "cannot be read"),
        (twice, "brought partition 'ep_jax_0' already"),
        (swapped, "of another model"),
        (without, "inputs; its graph has"),
        (reshaped, "of another model"),
    ],
)
def test_a_damaged_node_is_refused(change, text, tmp_path):
    require("jax")
    made, _ = saved(with_weight(), "jax", tmp_path, {"x": X}, embed=True, portable_only=True)
    with pytest.raises(EpError, match=text):
        ep.load(edit(made.model, change), "jax", options=TRUST)


def test_a_context_of_another_model_is_refused(tmp_path):
    """Even one with the same shapes: its constants are others."""
    require("jax")
    made, _ = saved(with_weight(), "jax", tmp_path, {"x": X}, portable_only=True)
    (tmp_path / "other").mkdir()
    model = with_weight()
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.ones(64, np.float32), "bias"))
    other, _ = saved(model, "jax", tmp_path / "other", {"x": X})
    os.replace(other.blobs[0], made.blobs[0])
    with pytest.raises(ep.InvalidModel, match=r"more than its max_size|is of another model"):
        ep.load(made.model, "jax", options=TRUST)


def test_a_link_that_leads_out_is_refused(tmp_path):
    require("jax")
    (tmp_path / "in").mkdir()
    made, _ = saved(with_weight(), "jax", tmp_path / "in", {"x": X}, portable_only=True)
    os.replace(made.blobs[0], tmp_path / "outside.epctx")
    try:
        made.blobs[0].symlink_to(tmp_path / "outside.epctx")
    except OSError:
        pytest.skip("no symbolic links here")
    with pytest.raises(ep.InvalidModel, match="outside the model's directory"):
        ep.load(made.model, "jax")


def test_a_store_of_links_is_no_way_out(tmp_path):
    """A model hub's cache: the model and what belongs to it are links into one folder of contents."""
    require("jax")
    (tmp_path / "blobs").mkdir(), (tmp_path / "snapshot").mkdir()
    made, expected = saved(with_weight(), "jax", tmp_path / "blobs", {"x": X})
    try:
        for path in (made.model, *made.blobs, made.model.with_suffix(".data")):
            (tmp_path / "snapshot" / path.name).symlink_to(path.rename(path.with_suffix(f"{path.suffix}-content")))
    except OSError:
        pytest.skip("no symbolic links here")
    session = ep.load(tmp_path / "snapshot" / made.model.name, "jax", options=TRUST)
    same(session.run(None, {"x": X}), expected)
    assert session.counters.misses == 0


def test_mutations_are_refused_or_harmless(accelerator, tmp_path):
    """Of the container in its file, and of all that the node says; benchmarks/mutations.py does many more."""
    made, expected = saved(with_weight(), accelerator, tmp_path, {"x": X})
    blob, rng = made.blobs[0].read_bytes(), np.random.default_rng(9)
    for _ in range(60):
        changed = bytearray(blob)
        at, count = int(rng.integers(len(blob))), int(rng.integers(1, 9))
        changed[at : at + count] = rng.bytes(count if rng.random() < 0.7 else 0)
        made.blobs[0].write_bytes(changed)
        if changed == blob:
            continue
        with pytest.raises(ep.InvalidModel, match="cannot be read as a stored context"):
            ep.load(made.model, accelerator, options=TRUST)
    made.blobs[0].write_bytes(blob)
    same(ep.load(made.model, accelerator, options=TRUST).run(None, {"x": X}), expected)
