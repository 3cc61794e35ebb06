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


# What of the data of large weights decided anything.

TABLE = normal(100, SIZE)
IDS = (("x", TensorProto.FLOAT, ("n", SIZE)), ("ids", TensorProto.INT64, ("k",)))


def agrees(tmp_path, old, new, feeds, write=save):
    """Whether a session, whose cache knows another model of the same outline, gives what one without a cache gives."""
    twice(write(tmp_path / "m.onnx", old), tmp_path / "c", feeds)
    path = write(tmp_path / "m.onnx", new)
    expected = ep.load(path, "jax", options={"context.cache": "off"}).run(None, feeds)
    for _ in range(2):
        session = load(path, tmp_path / "c")
        for ours, theirs in zip(session.run(None, feeds), expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    assert is_planned(session), "what it found was not of this model, and so it wrote a plan of its own"


def sliced(table):
    """A row is small, and compiled in; the table itself is an argument."""
    nodes = [
        node("Slice", ["table", "zero", "one"], ["row"]),
        node("Gather", ["table", "ids"], ["rows"]),
        node("ReduceSum", ["rows"], ["sum"], keepdims=0),
        node("Add", ["x", "row"], ["h"]),
        node("Mul", ["h", "sum"], ["y"]),
    ]
    return model(nodes, {"table": table, "zero": np.array([0]), "one": np.array([1])}, IDS)


def looped(table):
    """As above, within the body of a loop."""
    info = helper.make_tensor_value_info
    body = helper.make_graph(
        [node("Add", ["state", "row"], ["next"]), node("Identity", ["go"], ["on"])],
        "body",
        [info("i", TensorProto.INT64, ()), info("go", TensorProto.BOOL, ()), info("state", TensorProto.FLOAT, None)],
        [info("on", TensorProto.BOOL, ()), info("next", TensorProto.FLOAT, None)],
    )
    nodes = [
        node("Slice", ["table", "zero", "one"], ["row"]),
        node("Loop", ["three", "", "x"], ["h"], body=body),
        node("Gather", ["table", "ids"], ["rows"]),
        node("ReduceSum", ["rows"], ["sum"], keepdims=0),
        node("Mul", ["h", "sum"], ["y"]),
    ]
    numbers = {"zero": np.array([0]), "one": np.array([1]), "three": np.array(3)}
    return model(nodes, {"table": table, **numbers}, IDS)


@pytest.mark.parametrize("make", [sliced, looped])
@pytest.mark.parametrize("external", [False, True])
def test_a_small_part_of_a_large_weight_is_seen_to_change(tmp_path, make, external):
    changed = TABLE.copy()
    changed[0] += 5
    feeds = {"x": X, "ids": np.array([1, 2])}
    agrees(tmp_path, make(TABLE), make(changed), feeds, lambda path, proto: save(path, proto, external))


@pytest.mark.parametrize("within_branch", [False, True])
def test_a_weight_that_says_which_part_of_it_is_read_is_seen_to_change(tmp_path, within_branch):
    """rows = t[t[0] : t[1]]: the result is a view of what decided it."""

    def selected(ends):
        t = np.arange(1000)
        t[:2] = ends
        nodes = [
            node("Slice", ["t", "zero", "one"], ["from"]),
            node("Slice", ["t", "one", "two"], ["to"]),
            node("Slice", ["t", "from", "to"], ["rows"]),
        ]
        last = node("Gather", ["x", "rows"], ["y"])
        numbers = {"zero": np.array([0]), "one": np.array([1]), "two": np.array([2]), "t": t, "yes": np.array(True)}
        if within_branch:
            out = helper.make_tensor_value_info("rows", TensorProto.INT64, None)
            other = helper.make_tensor_value_info("same", TensorProto.INT64, None)
            branches = [(nodes, out), ([node("Identity", ["t"], ["same"])], other)]
            then, otherwise = (helper.make_graph(each, "branch", [], [result]) for each, result in branches)
            nodes = [node("If", ["yes"], ["chosen"], then_branch=then, else_branch=otherwise)]
            last = node("Gather", ["x", "chosen"], ["y"])
        return model([*nodes, last], numbers)

    x = np.arange(500 * SIZE, dtype=np.float32).reshape(500, SIZE)
    agrees(tmp_path, selected((0, 400)), selected((1, 401)), {"x": x})


def test_weights_that_shared_their_data_and_do_no_more(tmp_path):
    a, b = normal(SIZE, SIZE), normal(SIZE, SIZE)
    proto = model([node("MatMul", ["x", "a"], ["h"]), node("MatMul", ["h", "b"], ["y"])], {"a": a, "b": b})

    def write(path, starts):
        path.with_suffix(".data").unlink(missing_ok=True)
        path.with_suffix(".data").write_bytes(a.tobytes() + b.tobytes())
        for tensor, start in zip(proto.graph.initializer, starts, strict=True):
            tensor.ClearField("raw_data")
            del tensor.external_data[:]
            tensor.data_location = TensorProto.EXTERNAL
            for key, value in (("location", "m.data"), ("offset", start), ("length", a.nbytes)):
                tensor.external_data.add(key=key, value=str(value))
        onnx.save(proto, path)
        return path

    agrees(tmp_path, (0, 0), (0, a.nbytes), {"x": X}, write)
    path = write(tmp_path / "m.onnx", (0, 4))  # they overlap: an address does not tell which of them it is
    twice(path, tmp_path / "d", {"x": X})
    assert not is_planned(load(path, tmp_path / "d"))


@pytest.mark.parametrize("fed", [False, True])
def test_constants_in_branches_of_functions_are_data(tmp_path, fed):
    def function(w):
        info = helper.make_tensor_value_info("w", TensorProto.FLOAT, None)
        branches = [
            helper.make_graph([node("Constant", [], ["w"], value=numpy_helper.from_array(c))], "b", [], [info])
            for c in (w, 2 * w)
        ]
        nodes = [
            node("If", ["yes"], ["v"], then_branch=branches[0], else_branch=branches[1]),
            node("MatMul", ["x", "v"], ["y"]),
        ]
        made = helper.make_function("own", "F", ["x", "yes"], ["y"], nodes, [helper.make_opsetid("", 21)])
        inputs = [("x", TensorProto.FLOAT, ("n", SIZE)), *([("yes", TensorProto.BOOL, ())] if fed else [])]
        call = node("F", ["x", "yes"], ["y"], domain="own")
        proto = model([call], {} if fed else {"yes": np.array(True)}, inputs)
        proto.functions.append(made)
        proto.opset_import.append(helper.make_opsetid("own", 1))
        return proto

    w = normal(SIZE, SIZE)
    feeds = {"x": X, **({"yes": np.array(False)} if fed else {})}
    agrees(tmp_path, function(w), function(w + 1), feeds)


def test_data_of_another_size_than_their_tensor_are_refused(tmp_path):
    proto = dense()
    path = save(tmp_path / "m.onnx", proto)
    twice(path, tmp_path / "c", {"x": X})
    proto.graph.initializer[0].raw_data += bytes(8)
    save(path, proto)
    with pytest.raises(ep.InvalidModel, match="does not fit"):
        load(path, tmp_path / "c")


def test_minus_infinity_of_a_mask_is_a_scalar_of_the_plan(tmp_path):
    """What is not finite is an argument of compiled code, however small."""
    nodes = [node("Greater", ["x", "zero"], ["m"]), node("Where", ["m", "x", "low"], ["y"])]
    numbers = {"zero": np.float32(0), "low": np.array(-np.inf, np.float32)}
    path = save(tmp_path / "m.onnx", model(nodes, numbers))
    _, expected, second = twice(path, tmp_path / "c", {"x": X})
    same(second.run(None, {"x": X}), expected)
    assert is_planned(second) and second.counters.loaded == 1


def test_a_lowering_of_another_package_is_asked(tmp_path, monkeypatch):
    """It may be another one now, and no cache could tell; so might one that serves an operator of ONNX from now on."""
    from ep.registry import OPS

    path = save(tmp_path / "m.onnx", dense())
    _, expected, _ = twice(path, tmp_path / "c", {"x": X})
    versions = OPS._versions["", "Relu"]
    monkeypatch.setitem(OPS._versions, ("", "Relu"), dict(versions))

    @ep.op("Relu", since=20)
    def relu(xp, x):
        return -x

    session = load(path, tmp_path / "c")
    assert not is_planned(session)
    found = session.run(None, {"x": X})[0]
    np.testing.assert_allclose(np.maximum(-found, 0), expected[0], rtol=1e-6, atol=1e-6)
    assert (found > 0).any()


def test_threads_that_begin_with_one_signature_load_its_code_once(tmp_path):
    path = save(tmp_path / "m.onnx", dense())
    _, expected, second = twice(path, tmp_path / "c", {"x": X})
    barrier = threading.Barrier(6)

    def run(number):
        barrier.wait()
        return second.run(None, {"x": X})

    with ThreadPoolExecutor(6) as pool:
        for found in pool.map(run, range(6)):
            same(found, expected)
    assert is_planned(second) and second.counters.loaded == 1


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


@pytest.mark.parametrize("portable_only", [False, True])
def test_contexts_of_models_that_look_alike_share_a_cache(beside, portable_only):
    """All that tells them apart is in their containers."""
    w = normal(SIZE, SIZE)
    for name in ("Relu", "Tanh"):
        proto = model([node("MatMul", ["x", "w"], ["h"]), node(name, ["h"], ["y"])], {"w": w})
        _, expected, saved = context(beside, proto, {"x": X}, portable_only=portable_only)
        for _ in range(2):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ep.ContextNotice)
                session = load(saved.model, beside / "shared")
                found = session.run(None, {"x": X})[0]
            np.testing.assert_allclose(found, expected[0], rtol=1e-6, atol=1e-6)
        assert is_planned(session)
        for file in (beside / "ctx").iterdir():
            file.unlink()


@pytest.mark.parametrize("text", ["[]", "null", '"x"', '{"a": 1}', '{"a": ["f", 1e999, 1]}', "[" * 100000])
def test_damaged_places_of_a_plan_are_told(beside, text):
    _, _, saved = context(beside, dense(), {"x": X})
    proto = onnx.load(saved.model, load_external_data=False)
    proto.metadata_props.add(key="ep.plan_data", value=text)
    onnx.save(proto, saved.model)
    with pytest.raises(ep.InvalidModel, match="ep.plan_data"):
        ep.load(saved.model, "jax", options={"context.cache": "off", "trust_native": True})


@pytest.mark.parametrize(
    "place", [["../secret", 0, 2400], ["/etc/passwd", 0, 9], ["m.data", -1, 9], ["m.data", 0, 10**30]]
)
def test_places_of_a_plan_outside_the_model_are_not_read(beside, place):
    q = NUMBERS.integers(-9, 9, (SIZE, 64)).astype(np.int8)
    nodes = [node("Cast", ["q"], ["w"], to=TensorProto.FLOAT), node("MatMul", ["x", "w"], ["y"])]
    _, expected, saved = context(beside, model(nodes, {"q": q}), {"x": X})
    options = {"context.cache": "off", "trust_native": True}
    assert is_planned(ep.load(saved.model, "jax", options=options))
    (beside / "secret").write_bytes(bytes(1 << 16))
    proto = onnx.load(saved.model, load_external_data=False)
    (entry,) = [e for e in proto.metadata_props if e.key == "ep.plan_data"]
    entry.value = json.dumps(dict.fromkeys(json.loads(entry.value), place))
    onnx.save(proto, saved.model)
    session = ep.load(saved.model, "jax", options=options)
    assert not is_planned(session)
    same(session.run(None, {"x": X}), expected)


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


@pytest.mark.parametrize("word", [b"key", b"value", b"order"])
def test_metadata_that_are_no_text_do_not_matter(tmp_path, word):
    """Protobuf gives bytes for strings that are not UTF-8."""
    proto = dense()
    proto.metadata_props.add(key="a key", value="a value")
    proto.graph.node[0].metadata_props.add(key="ep.order", value="order")
    path = tmp_path / "m.onnx"
    path.write_bytes(proto.SerializeToString().replace(word, b"\xff" + word[1:]))
    first, expected, second = twice(path, tmp_path / "c", {"x": X})
    same(second.run(None, {"x": X}), expected)
    with pytest.raises(ep.EpError, match="no text that can be written"):
        first.save_context(tmp_path / "m_ctx.onnx")
