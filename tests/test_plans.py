"""Does a session that starts by a stored plan give what the graph gives, and open the graph where it has to?"""

import json
import os
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import ep

pytest.importorskip("jax")

from ep import stored_plan
from ep.errors import IndexOutOfRange
from ep.opened import Opened
from ep.outline import outline
from ep.planned import Planned

NUMBERS = np.random.default_rng(11)
SIZE = 24
X = NUMBERS.normal(size=(3, SIZE)).astype(np.float32)


@pytest.fixture(autouse=True)
def store_everything(monkeypatch):
    monkeypatch.setattr("ep.library.WORTH", 0.0)
    monkeypatch.setattr("ep.library.GAIN", 0.0)


def normal(*shape):
    return NUMBERS.normal(size=shape).astype(np.float32)


def model(nodes, weights, inputs=(("x", TensorProto.FLOAT, ("n", SIZE)),), outputs=("y",), opset=21):
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(*spec) for spec in inputs],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def node(*arguments, **attributes):
    return helper.make_node(*arguments, **attributes)


def dense(w=None, b=None):
    """y = relu(x · wᵀ + b): a large weight, and a small one that is compiled in."""
    w, b = normal(SIZE, SIZE) if w is None else w, normal(SIZE) if b is None else b
    nodes = [node("Gemm", ["x", "w", "b"], ["z"], transB=1), node("Relu", ["z"], ["y"])]
    return model(nodes, {"w": w, "b": b})


def save(path, proto, external=False):
    onnx.save(proto, path, save_as_external_data=external, location=f"{path.stem}.data", size_threshold=0)
    return path


def load(path, folder, **options):
    return ep.load(path, "jax", options={"context.cache": str(folder), **options})


def twice(path, folder, feeds):
    """A first session that compiled, its results, and a second one that has not run yet."""
    first = load(path, folder)
    expected = first.run(None, feeds)
    return first, expected, load(path, folder)


def same(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def is_planned(session):
    return isinstance(session._running, Planned)


def test_the_second_session_needs_neither_graph_nor_operators(tmp_path):
    path = save(tmp_path / "m.onnx", dense())
    first, expected, second = twice(path, tmp_path / "c", {"x": X})
    assert isinstance(first._running, Opened) and is_planned(second)
    same(second.run(None, {"x": X}), expected)
    assert (second.counters.loaded, second.counters.misses) == (1, 0) and is_planned(second)
    assert (second.inputs, second.outputs) == (first.inputs, first.outputs)
    second.run(None, {"x": X})
    assert second.counters.hits == 1
    code = (
        "import sys, numpy as np, ep; s = ep.load(sys.argv[1], 'jax', options={'context.cache': sys.argv[2]});"
        "y = s.run(None, {'x': np.load(sys.argv[3])})[0]; np.save(sys.argv[4], y);"
        "print([m for m in ('onnx_ir', 'ep.ops', 'onnxscript') if m in sys.modules], s.counters.loaded)"
    )
    np.save(tmp_path / "x.npy", X)
    files = [path, tmp_path / "c", tmp_path / "x.npy", tmp_path / "y.npy"]
    environment = {**os.environ, "EP_CONTEXT_CACHE": "off"}
    done = subprocess.run([sys.executable, "-c", code, *files], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "[] 1", done.stderr
    same([np.load(tmp_path / "y.npy")], expected)


def test_another_shape_opens_the_graph_which_goes_on_with_what_was_loaded(tmp_path):
    path = save(tmp_path / "m.onnx", dense())
    first, expected, second = twice(path, tmp_path / "c", {"x": X})
    same(second.run(None, {"x": X}), expected)
    same(second.run(None, {"x": X[:1]}), first.run(None, {"x": X[:1]}))
    assert isinstance(second._running, Opened)
    same(second.run(None, {"x": X}), expected)
    counted = second.counters
    assert (counted.loaded, counted.misses, counted.hits) == (1, 1, 1), "X was loaded before, and is not once more"
    third = load(path, tmp_path / "c")
    same(third.run(None, {"x": X[:1]}), first.run(None, {"x": X[:1]}))
    assert is_planned(third)


def test_what_a_session_tells_is_the_same_after_a_start_by_plan(tmp_path):
    path = save(tmp_path / "m.onnx", dense(), external=True)
    first, _, second = twice(path, tmp_path / "c", {"x": X})
    second.run(None, {"x": X})
    assert str(second.weights.totals) == str(first.weights.totals)
    ours, theirs = second.weights.to_dict(), first.weights.to_dict()
    assert ours == theirs
    assert second.plan.to_dict() == first.plan.to_dict() and second.counters.loaded == 1


def test_hibernate_and_wake_keep_the_plan(tmp_path):
    path = save(tmp_path / "m.onnx", dense())
    _, expected, second = twice(path, tmp_path / "c", {"x": X})
    for _ in range(2):
        same(second.run(None, {"x": X}), expected)
        second.hibernate()
        second.wake()
    same(second.run(None, {"x": X}), expected)
    assert is_planned(second) and second.counters.loaded == 3


def test_large_weights_may_change_behind_a_plan(tmp_path):
    path = save(tmp_path / "m.onnx", dense(b=np.zeros(SIZE, np.float32)))
    twice(path, tmp_path / "c", {"x": X})
    w = normal(SIZE, SIZE)
    save(path, dense(w, np.zeros(SIZE, np.float32)))
    second = load(path, tmp_path / "c")
    assert is_planned(second)
    np.testing.assert_allclose(second.run(None, {"x": X})[0], np.maximum(X @ w.T, 0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("external", [False, True])
def test_a_small_weight_that_changes_is_seen(tmp_path, external):
    w = normal(SIZE, SIZE)
    path = save(tmp_path / "m.onnx", dense(w, np.zeros(SIZE, np.float32)), external)
    twice(path, tmp_path / "c", {"x": X})
    save(path, dense(w, np.full(SIZE, 3.0, np.float32)), external)
    second = load(path, tmp_path / "c")
    assert not is_planned(second)
    np.testing.assert_allclose(second.run(None, {"x": X})[0], np.maximum(X @ w.T + 3, 0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("external", [False, True])
def test_weights_that_are_computed_of_others_are_seen_to_change(tmp_path, external):
    """w = int8 · scale, folded at load: the plan has the result, and a hash of what it came from."""

    def quantized(q):
        nodes = [
            node("Cast", ["q"], ["f"], to=TensorProto.FLOAT),
            node("Mul", ["f", "s"], ["w"]),
            node("MatMul", ["x", "w"], ["y"]),
        ]
        return model(nodes, {"q": q, "s": np.full((1, 64), 0.5, np.float32)})

    q = NUMBERS.integers(-9, 9, (SIZE, 64)).astype(np.int8)
    path = save(tmp_path / "m.onnx", quantized(q), external)
    _, expected, second = twice(path, tmp_path / "c", {"x": X})
    assert is_planned(second)
    same(second.run(None, {"x": X}), expected)
    save(path, quantized(-q), external)
    third = load(path, tmp_path / "c")
    assert not is_planned(third)
    np.testing.assert_allclose(third.run(None, {"x": X})[0], -expected[0], rtol=1e-5, atol=1e-6)
    assert is_planned(load(path, tmp_path / "c")), "the plan of the new weights took the old one's place"


def test_views_of_weights_are_views_again(tmp_path):
    """A tied embedding: the table is read as it is, and transposed; both are the file's memory."""
    table = normal(300, SIZE)
    nodes = [
        node("Transpose", ["table"], ["t"], perm=[1, 0]),
        node("Gather", ["table", "ids"], ["rows"]),
        node("Add", ["rows", "x"], ["h"]),
        node("MatMul", ["h", "t"], ["y"]),
    ]
    inputs = (("x", TensorProto.FLOAT, ("n", SIZE)), ("ids", TensorProto.INT64, ("n",)))
    path = save(tmp_path / "m.onnx", model(nodes, {"table": table}, inputs), external=True)
    feeds = {"x": X, "ids": np.array([5, -300, 299])}
    _, expected, second = twice(path, tmp_path / "c", feeds)
    assert is_planned(second)
    same(second.run(None, feeds), expected)
    entry = second._library.entry(second._plans.key)
    plan = stored_plan.read(entry.code)
    assert all(weight.tensor == "table" for weight in plan.weights) and not plan.data.size and not plan.hashed
    for wrong in (300, -301):
        other = load(path, tmp_path / "c")
        with pytest.raises(IndexOutOfRange, match=str(wrong)):
            other.run(None, {"x": X, "ids": np.array([0, wrong, 0])})
        same(other.run(None, feeds), expected)


@pytest.mark.parametrize("external", [False, True])
def test_a_table_of_indices_that_changes_is_checked_again(tmp_path, external):
    """Compiling checks it; code that is stored for another table must not stand in for that."""

    def looked_up(table):
        return model([node("Gather", ["x", "table"], ["y"], axis=1)], {"table": table})

    table = NUMBERS.integers(-SIZE, SIZE, 300)
    path = save(tmp_path / "m.onnx", looked_up(table), external)
    _, expected, second = twice(path, tmp_path / "c", {"x": X})
    assert is_planned(second)
    same(second.run(None, {"x": X}), expected)
    save(path, looked_up(np.append(table[:-1], SIZE)), external)
    with pytest.raises(IndexOutOfRange, match=str(SIZE)):
        load(path, tmp_path / "c").run(None, {"x": X})
    save(path, looked_up(table[::-1].copy()), external)
    np.testing.assert_array_equal(load(path, tmp_path / "c").run(None, {"x": X})[0], X[:, table[::-1]])


def test_limits_of_indices_that_depend_on_feeds(tmp_path):
    nodes = [node("Gather", ["x", "ids"], ["y"])]
    inputs = (("x", TensorProto.FLOAT, ("n", SIZE)), ("ids", TensorProto.INT64, ("k",)))
    path = save(tmp_path / "m.onnx", model(nodes, {}, inputs))
    feeds = {"x": X, "ids": np.array([2, -3])}
    _, expected, second = twice(path, tmp_path / "c", feeds)
    assert is_planned(second)
    same(second.run(None, feeds), expected)
    with pytest.raises(IndexOutOfRange):
        second.run(None, {"x": X, "ids": np.array([3, 0])})
    third = load(path, tmp_path / "c")
    with pytest.raises(IndexOutOfRange):
        third.run(None, {"x": X[:2], "ids": np.array([2, 0])})
    np.testing.assert_array_equal(third.run(None, {"x": X[:2], "ids": np.array([1, -2])})[0], X[[1, 0]])


def test_errors_of_feeds_are_those_of_the_graph(tmp_path):
    path = save(tmp_path / "m.onnx", dense())
    first, _, second = twice(path, tmp_path / "c", {"x": X})
    for feeds in ({}, {"y": X}, {"x": X.astype(np.float64)}, {"x": X[:, :3]}, {"x": X[0]}, [X], {"x": "text"}):
        texts = []
        for session in (first, second):
            with pytest.raises(ep.InvalidInput) as error:
                session.run(None, feeds)
            texts.append(str(error.value))
        assert texts[0] == texts[1]
    assert is_planned(second)
    with pytest.raises(ep.InvalidInput, match="no output"):
        second.run(["z"], {"x": X})
    assert len(second.run(["y", "y"], {"x": X})) == 2


def test_results_belong_to_the_user(tmp_path):
    nodes = [node("Identity", ["x"], ["same"]), node("MatMul", ["x", "w"], ["y"])]
    path = save(tmp_path / "m.onnx", model(nodes, {"w": normal(SIZE, SIZE)}, outputs=("same", "y")))
    _, expected, second = twice(path, tmp_path / "c", {"x": X})
    assert is_planned(second)
    fed = X.copy()
    found = second.run(None, {"x": fed})
    same(found, expected)
    found[0][:] = 0
    found[1][:] = 0
    np.testing.assert_array_equal(fed, X)
    outputs = second(x=fed)
    fed[:] = 7
    np.testing.assert_array_equal(np.asarray(outputs["same"]), X)
    np.testing.assert_array_equal(np.asarray(outputs["y"]), expected[1])


def test_random_nodes_differ_between_calls(tmp_path):
    nodes = [node("RandomNormalLike", ["x"], ["r"]), node("Add", ["x", "r"], ["y"])]
    path = save(tmp_path / "m.onnx", model(nodes, {}))
    twice(path, tmp_path / "c", {"x": X})
    second = load(path, tmp_path / "c")
    assert is_planned(second)
    a, b = (second.run(None, {"x": X})[0] for _ in range(2))
    assert second.counters.loaded == 1 and not np.array_equal(a, b)


def hosted():
    """A string output: the host has to make it."""
    nodes = [node("MatMul", ["x", "w"], ["y"]), node("Cast", ["y"], ["text"], to=TensorProto.STRING)]
    proto = model(nodes, {"w": normal(SIZE, SIZE)})
    proto.graph.output.append(helper.make_tensor_value_info("text", TensorProto.STRING, None))
    return proto


def overridable():
    proto = dense()
    proto.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, (SIZE, SIZE)))
    return proto


def constant_output():
    proto = dense()
    proto.graph.node.append(node("Identity", ["b"], ["same"]))
    proto.graph.output.append(helper.make_tensor_value_info("same", TensorProto.FLOAT, (SIZE,)))
    return proto


@pytest.mark.parametrize("make", [hosted, overridable, constant_output])
@pytest.mark.filterwarnings("ignore::ep.HostFallbackWarning")
def test_models_that_need_more_than_stored_code_have_no_plan(tmp_path, make):
    path = save(tmp_path / "m.onnx", make())
    first, expected, second = twice(path, tmp_path / "c", {"x": X})
    assert not is_planned(second)
    for ours, theirs in zip(second.run(None, {"x": X}), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert second.plan.to_dict() == first.plan.to_dict()


def test_a_missing_or_short_data_file_is_told(tmp_path):
    path = save(tmp_path / "m.onnx", dense(), external=True)
    twice(path, tmp_path / "c", {"x": X})
    data = tmp_path / "m.data"
    content = data.read_bytes()
    data.unlink()
    data.write_bytes(content[:100])
    with pytest.raises(ep.InvalidModel, match="m.data"):
        load(path, tmp_path / "c")
    data.unlink()
    with pytest.raises(ep.InvalidModel, match="m.data"):
        load(path, tmp_path / "c")


def test_threads_share_a_plan_and_open_the_graph_once(tmp_path):
    path = save(tmp_path / "m.onnx", dense())
    first, _, second = twice(path, tmp_path / "c", {"x": X})
    feeds = [X, X[:1], X[:2], X] * 4
    expected = [first.run(None, {"x": x})[0] for x in feeds]
    barrier = threading.Barrier(8)

    def run(number):
        barrier.wait()
        return [second.run(None, {"x": x})[0] for x in feeds[number % 2 :]]

    with ThreadPoolExecutor(8) as pool:
        for number, found in enumerate(pool.map(run, range(8))):
            same(found, expected[number % 2 :])


# Contexts.


def context(tmp_path, proto, feeds, **options):
    path = save(tmp_path / "m.onnx", proto)
    first = load(path, tmp_path / "c")
    expected = first.run(None, feeds)
    saved = first.save_context(tmp_path / "ctx" / "m_ctx.onnx", **options)
    return first, expected, saved


@pytest.fixture
def beside(tmp_path):
    (tmp_path / "ctx").mkdir()
    return tmp_path


@pytest.mark.parametrize("embed", [False, True])
def test_a_trusted_context_starts_by_its_plan(beside, embed):
    _, expected, saved = context(beside, dense(), {"x": X}, embed=embed)
    session = ep.load(saved.model, "jax", options={"context.cache": "off", "trust_native": True})
    assert is_planned(session)
    same(session.run(None, {"x": X}), expected)
    assert session.counters.loaded == 1
    assert session.run(None, {"x": X[:1]})[0].shape == (1, SIZE) and session.counters.misses == 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ep.ContextNotice)
        untrusted = ep.load(saved.model, "jax", options={"context.cache": "off"})
        assert not is_planned(untrusted)
        np.testing.assert_allclose(untrusted.run(None, {"x": X})[0], expected[0], rtol=1e-6, atol=1e-6)


def test_what_code_keeps_of_weights_is_borrowed_from_the_context(beside):
    first, expected, saved = context(beside, dense(), {"x": X})
    assert first.weights.totals.kept_bytes > 0
    session = ep.load(saved.model, "jax", options={"context.cache": "off", "trust_native": True})
    same(session.run(None, {"x": X}), expected)
    totals = session.weights.totals
    assert totals.kept_bytes == totals.kept_borrowed_bytes == first.weights.totals.kept_bytes
    w = normal(SIZE, SIZE)  # another weight in the place of the first: what was computed of that is not used
    proto = onnx.load(saved.model, load_external_data=False)
    tensor = next(t for t in proto.graph.initializer if t.name == "w")
    where = {entry.key: entry for entry in tensor.external_data}
    (beside / "ctx" / "other.data").write_bytes(w.tobytes())
    where["location"].value, where["offset"].value = "other.data", "0"
    onnx.save(proto, saved.model)
    session = ep.load(saved.model, "jax", options={"context.cache": "off", "trust_native": True})
    b = first._opened.graph.constants
    bias = next(a for v, a in b.items() if v.name == "b")
    np.testing.assert_allclose(session.run(None, {"x": X})[0], np.maximum(X @ w.T + bias, 0), rtol=1e-5, atol=1e-5)


def test_a_context_does_not_hold_weights_in_its_container(beside):
    """Weights that were computed at load lie in the data file; a context of one file has no plan then."""
    q = NUMBERS.integers(-9, 9, (SIZE, 4096)).astype(np.int8)
    nodes = [node("Cast", ["q"], ["w"], to=TensorProto.FLOAT), node("MatMul", ["x", "w"], ["y"])]
    _, expected, saved = context(beside, model(nodes, {"q": q}), {"x": X})
    assert saved.blob_bytes < q.size
    options = {"context.cache": "off", "trust_native": True}
    session = ep.load(saved.model, "jax", options=options)
    assert is_planned(session)
    same(session.run(None, {"x": X}), expected)
    _, expected, saved = context(beside, model(nodes, {"q": q}), {"x": X}, embed=True)
    session = ep.load(saved.model, "jax", options=options)
    assert not is_planned(session) and saved.blob_bytes < q.size
    same(session.run(None, {"x": X}), expected)


def test_a_context_whose_data_file_is_cut_is_refused(beside):
    _, _, saved = context(beside, dense(), {"x": X})
    (data,) = saved.weights
    content = data.read_bytes()
    data.unlink()
    data.write_bytes(content[:64])
    with pytest.raises(ep.InvalidModel, match=data.name):
        ep.load(saved.model, "jax", options={"context.cache": "off", "trust_native": True})


# The stored form.


def plan_of(tmp_path):
    path = save(tmp_path / "m.onnx", dense())
    _, _, second = twice(path, tmp_path / "c", {"x": X})
    return bytes(second._library.entry(second._plans.key).code), second


def test_a_damaged_plan_is_none(tmp_path):
    content, _ = plan_of(tmp_path)
    assert stored_plan.read(content).parts
    end = 8 + int.from_bytes(content[:8], "little")
    head = json.loads(content[8:end])

    def packed(entry):
        text = json.dumps(entry).encode()
        return len(text).to_bytes(8, "little") + text + content[end:]

    for cut in range(0, len(content), 7):
        with pytest.raises(stored_plan.Damaged):
            stored_plan.read(content[:cut])
    for name in head:
        for value in (None, [], {}, "text", -1, [[1]], 10**30):
            if value == head[name]:
                continue
            try:
                stored_plan.read(packed({**head, name: value}))
            except stored_plan.Damaged:
                pass
    for wrong in ({"inputs": []}, {"output_values": [99]}, {"version": 2}, {"weights": []}, {"parts": [{}]}):
        with pytest.raises(stored_plan.Damaged):
            stored_plan.read(packed({**head, **wrong}))


def test_a_plan_of_weights_beyond_their_tensors_is_not_used(tmp_path, monkeypatch):
    content, second = plan_of(tmp_path)
    end = 8 + int.from_bytes(content[:8], "little")
    head = json.loads(content[8:end])
    for change in ({"offset": 10**9}, {"shape": [10**6, 10**6]}, {"strides": [10**6, 4]}, {"dtype": "none"}):
        head_ = {**head, "weights": [{**weight, **change} for weight in head["weights"]]}
        text = json.dumps(head_).encode()
        second._library.put_plan(second._plans.key, second._backend, len(text).to_bytes(8, "little") + text)
        session = load(tmp_path / "m.onnx", tmp_path / "c")
        assert not is_planned(session)
        assert session.run(None, {"x": X})[0].shape == X.shape


def test_an_outline_leaves_out_data_and_places_alone(tmp_path):
    from ep.loader import read_proto

    def of(proto, external=False):
        return outline(read_proto(save(tmp_path / "o.onnx", proto, external))[0])

    w, b = normal(SIZE, SIZE), normal(SIZE)
    first, second = of(dense(w, b)), of(dense(w + 1, b))
    assert first.digest == second.digest and first.places.keys() == {"w"}
    assert of(dense(w, b + 1)).digest != first.digest
    assert of(dense(w[:, :5].repeat(5, 1)[:, :SIZE].astype(np.float64), b)).digest != first.digest
    assert of(dense(w, b), external=True).places.keys() == {"w", "b"}
    assert outline(dense(w, b)) is None, "its data lie in no file"
