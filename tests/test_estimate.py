"""Does `ep.estimate` know, without reading weights, what a run would hold?"""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import onnx
import pytest
from conftest import parse
from onnx import TensorProto, helper

import ep
from ep.abstract_run import Abstract, abstract_run
from ep.cli import main
from ep.errors import InvalidInput
from ep.loader import load_model
from ep.passes import bind, prepare
from ep.program import Runner

CHAIN = """
g (float[n, 100] x) => (float[n, 100] y) {
    a = Relu(x)
    b = Add(a, a)
    shape = Constant<value_ints = [100, -1]>()
    view = Reshape(b, shape)
    c = Neg(view)
    back = Shape(x)
    y = Reshape(c, back)
}
"""


def test_results_count_from_their_node_to_their_last_reader(accelerator):
    found = ep.estimate(parse(CHAIN), {"n": 10}, device=accelerator)
    # x, a and b at Add; x, b (as view) and c at Neg: three arrays of 10 · 100 floats each time
    assert found.activations == 3 * 4000 and found.cache == 0 and found.unknown == 0 and found.assumed == {}
    by_shape = ep.estimate(parse(CHAIN), {"x": (10, 100)}, device=accelerator)
    assert replace(by_shape, available=None) == replace(found, available=None)
    alone = ep.estimate(parse(CHAIN), device=accelerator)
    assert alone.assumed == {"n": 1} and alone.activations == 3 * 400 and "n=1" in str(alone)


BLOCK = """
g (float[batch, length, 32] x, float[batch, 2, past, 16] past_k)
    => (float[batch, length, 32] y, float[batch, 2, total, 16] present_k) {
    xw = MatMul(x, w)
    dims = Shape(x)
    zero = Constant<value_int = 0>()
    b = Gather<axis = 0>(dims, zero)
    zeros = Constant<value_ints = [0]>()
    b1 = Unsqueeze(b, zeros)
    heads = Constant<value_ints = [-1, 2, 16]>()
    shape = Concat<axis = 0>(b1, heads)
    split = Reshape(xw, shape)
    k = Transpose<perm = [0, 2, 1, 3]>(split)
    present_k = Concat<axis = 2>(past_k, k)
    kt = Transpose<perm = [0, 1, 3, 2]>(present_k)
    scores = MatMul(k, kt)
    weights = Softmax(scores)
    mixed = MatMul(weights, present_k)
    merged = Transpose<perm = [0, 2, 1, 3]>(mixed)
    vt = Transpose(v)
    joined = Constant<value_ints = [0, 0, 32]>()
    flat = Reshape(merged, joined)
    y = MatMul(flat, vt)
}
"""


def test_a_block_with_a_cache(tmp_path, accelerator):
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]>\n{BLOCK}')
    values = np.random.default_rng(0).standard_normal((2, 32, 32)).astype(np.float32)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(a, n) for a, n in zip(values, "wv", strict=True))
    path = tmp_path / "m.onnx"
    onnx.save(model, path)
    found = ep.estimate(path, {"batch": 3, "length": 5, "past": 7}, device=accelerator)
    assert 2 * 32 * 32 * 4 <= found.weights < 2 * 32 * 32 * 4 + 100  # w, and vᵀ in place of v; a few integers
    assert found.cache == 3 * 2 * 16 * 4 * (7 + 12)
    assert found.unknown == 0 and found.fits and found.total == found.weights + found.activations + found.cache
    compare_with_a_run(path, {"x": (3, 5, 32), "past_k": (3, 2, 7, 16)}, accelerator)


def compare_with_a_run(path, shapes, accelerator):
    """Every value has the shape and dtype that NumPy's run of the lowerings gives it."""
    import ep.host_namespace as host
    from ep.discovery import provider

    graph = bind(*load_model(path))
    given = {v: np.ones(shapes[v.name], np.float32) for v in graph.inputs}
    env = dict(graph.constants) | given
    Runner(host, host).evaluate(graph.steps, env)
    found = dict(graph.constants) | {v: Abstract(a.shape, a.dtype) for v, a in given.items()}
    abstract_run(graph.steps, found, provider(accelerator).backend, {})
    for value, array in env.items():
        assert (found[value].shape, found[value].dtype) == (array.shape, array.dtype), value.name
    assert any(isinstance(v, Abstract) for v in found.values())


def test_no_weight_is_read(tmp_path, accelerator):
    """The data file is a hole of a terabyte: to read it would take hours."""
    rows = 1 << 19
    tensor = TensorProto(name="w", dims=[rows, rows], data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="w.data")
    nodes = [helper.make_node("Transpose", ["w"], ["wt"]), helper.make_node("MatMul", ["x", "wt"], ["y"])]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", rows])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", rows])],
        [tensor],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), tmp_path / "m.onnx")
    with (tmp_path / "w.data").open("wb") as file:
        file.truncate(4 * rows * rows)
    found = ep.estimate(tmp_path / "m.onnx", device=accelerator)
    assert found.weights >= 1 << 40 and found.fits is False
    text = found.verdict()
    assert "does not fit, because" in text and "weights take most of it" in text and "TiB" in text


def test_what_depends_on_data_is_unknown(accelerator):
    model = parse("g (float[n] x) => (float[n] y, int64[a, m] i) { i = NonZero(x)\n y = Relu(x) }")
    found = ep.estimate(model, {"n": 8}, device=accelerator)
    assert found.unknown == 1 and "1 results" in str(found) and found.activations == 64


@pytest.mark.parametrize(
    ("shapes", "fact"),
    [
        ({"z": 1}, "neither an input nor a dimension 'z'"),
        ({"x": (1, 2)}, "is no shape of the input"),
        ({"x": (1, 2, 3)}, "is no shape of the input"),
        ({"n": -1}, "cannot be -1"),
        ({"n": 2, "x": (3, 100)}, "it is 2 elsewhere"),
    ],
)
def test_shapes_that_the_model_does_not_have(shapes, fact):
    with pytest.raises(InvalidInput) as caught:
        ep.estimate(parse(CHAIN), shapes)
    assert fact in str(caught.value)


def test_weights_in_branches_count(accelerator):
    """They are arguments of the compiled graph, as all others."""

    def branch(name: str, number: float) -> str:
        values = ", ".join([str(number)] * 300)
        return f"() => (float[300] {name}) {{ k{name} = Constant<value_floats = [{values}]>() {name} = Neg(k{name}) }}"

    model = parse(
        "g (bool c, float[300] x) => (float[300] y) {"
        f" h = If (c) <then_branch = t {branch('a', 1.0)}, else_branch = e {branch('b', 2.0)}> y = Add(h, x) }}"
    )
    assert sum(a.nbytes for a in prepare(*load_model(model)).constants.values()) == 2 * 1200
    assert len(ep.load(model, accelerator).weights) == 2


def test_inspect_says_whether_it_fits(tmp_path, capsys):
    onnx.save(parse(CHAIN), tmp_path / "m.onnx")
    assert main(["inspect", str(tmp_path / "m.onnx"), "--dim", "n=10", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["memory"]
    assert found["activations"] == 12000 and found["fits"] is True
    assert main(["inspect", str(tmp_path / "m.onnx")]) == 0
    assert "fits: " in capsys.readouterr().out


def test_halves_count_as_the_library_holds_them(tmp_path):
    pytest.importorskip("jax")
    w = np.zeros((64, 64), np.float16)
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float16[n, 64] x) => (float16[n, 64] y) { y = MatMul(x, w) }'
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    onnx.save(model, tmp_path / "m.onnx")
    found = ep.estimate(tmp_path / "m.onnx", device="cpu")
    assert found.weights == found.copied == 2 * w.nbytes  # JAX multiplies them as float32


@pytest.mark.parametrize("half", [False, True])
def test_what_code_keeps_of_weights_is_foreseen(tmp_path, half):
    """Instead of weights that no code reads then; of one that is also read as it is, in addition."""
    pytest.importorskip("jax")
    numbers = np.random.default_rng(0).standard_normal((3, 48, 48)).astype(np.float32)
    kind = TensorProto.FLOAT16 if half else TensorProto.FLOAT
    nodes = [
        helper.make_node("Gemm", ["x", "a"], ["xa"], transB=1),
        helper.make_node("Gemm", ["xa", "b"], ["xb"], transB=1),
        helper.make_node("Add", ["b", "xb"], ["sum"]),
        helper.make_node("Transpose", ["c"], ["turned"]),  # computed at load
        helper.make_node("Gemm", ["sum", "turned"], ["y"], transB=1),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", kind, ["n", 48])],
        [helper.make_tensor_value_info("y", kind, ["n", 48])],
        [
            onnx.numpy_helper.from_array(w.astype(np.float16 if half else np.float32), n)
            for n, w in zip("abc", numbers, strict=True)
        ],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), tmp_path / "m.onnx")
    found = ep.estimate(tmp_path / "m.onnx", {"n": 48}, device="cpu")
    session = ep.load(tmp_path / "m.onnx", "cpu", options={"context.cache": "off"})
    session.run(None, {"x": numbers[0].astype(np.float16 if half else np.float32)})
    totals = session.weights.totals
    assert found.kept == totals.kept_bytes > 0
    on_device = sum(w.device_array.nbytes for w in session.weights if w.device_array is not None)
    assert found.weights == on_device + totals.kept_bytes
    assert f"{found.kept / 1024:.1f} KiB as compiled code computes" in str(found)
