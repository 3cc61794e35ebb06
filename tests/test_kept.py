"""What JAX computes of weights once: is it the same as computed in every call, shared, stored, told, and let go?"""

import gc
import os
import subprocess
import sys
import warnings
from collections import OrderedDict
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import ep

pytest.importorskip("jax")
import jax

from ep.backends.jax import executable, kept, prelude

NUMBERS = np.random.default_rng(5)
SIZE = 48


def normal(*shape):
    return NUMBERS.normal(size=shape).astype(np.float32)


def save(path, nodes, weights, outputs=("y",), shape=("n", SIZE), **options):
    """A model of x [n, SIZE] with initializers, and its feeds."""
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(model, path, **options)
    return path


def dense(path, **options):
    """x · wᵀ, as exporters write linear layers."""
    w = normal(SIZE, SIZE)
    node = helper.make_node("Gemm", ["x", "w"], ["y"], transB=1)
    return save(path, [node], {"w": w}, **options), w


def load(path, **options):
    return ep.load(path, "jax", options={"context.cache": "off", **options})


def functions(session):
    return [f for _, g in session._opened.executable.every() for f in getattr(g, "cache", {}).values()]


def held(session):
    return [each.array for function in functions(session) for each in getattr(function, "kept", ())]


def test_a_transposed_matrix_is_turned_once(tmp_path):
    path, w = dense(tmp_path / "m.onnx")
    session = load(path)
    x = normal(3, SIZE)
    for _ in range(2):
        np.testing.assert_allclose(session.run(None, {"x": x})[0], x @ w.T, rtol=1e-5, atol=1e-5)
    (array,) = held(session)
    np.testing.assert_array_equal(array, w.T)


def test_signatures_and_sessions_share_it(tmp_path):
    path, w = dense(tmp_path / "m.onnx", save_as_external_data=True, size_threshold=0)
    first, second = load(path), load(path)
    for session in (first, second):
        for rows in (1, 2, 5):
            x = normal(rows, SIZE)
            np.testing.assert_allclose(session.run(None, {"x": x})[0], x @ w.T, rtol=1e-5, atol=1e-5)
    assert len(functions(first)) == 3
    assert len({id(array) for array in held(first) + held(second)}) == 1


def test_models_that_are_alike_share_nothing(tmp_path):
    pairs = [dense(tmp_path / f"{n}.onnx") for n in range(3)]
    sessions = [load(path) for path, _ in pairs]
    x = normal(2, SIZE)
    for session, (_, w) in zip(sessions, pairs, strict=True):
        np.testing.assert_allclose(session.run(None, {"x": x})[0], x @ w.T, rtol=1e-5, atol=1e-5)
    del sessions, session
    gc.collect()
    path, w = dense(tmp_path / "0.onnx")  # other weights in a file of the same name
    np.testing.assert_allclose(load(path).run(None, {"x": x})[0], x @ w.T, rtol=1e-5, atol=1e-5)


def test_it_goes_with_its_session(tmp_path):
    session = load(dense(tmp_path / "m.onnx")[0])
    before = len(kept._shared)
    session.run(None, {"x": normal(2, SIZE)})
    assert len(kept._shared) == before + 1
    session.hibernate()
    gc.collect()
    assert len(kept._shared) == before
    session.run(None, {"x": normal(2, SIZE)})
    assert len(kept._shared) == before + 1
    del session
    gc.collect()
    assert len(kept._shared) == before


def test_copies_that_are_not_read_any_more_are_let_go(tmp_path):
    path, w = dense(tmp_path / "m.onnx", save_as_external_data=True, size_threshold=0)
    data = (tmp_path / next(p.name for p in tmp_path.iterdir() if p.suffix != ".onnx")).read_bytes()
    model = onnx.load(path, load_external_data=False)
    entries = {entry.key: entry for entry in model.graph.initializer[0].external_data}
    entries["offset"].value = "4"  # no library borrows from there
    (tmp_path / entries["location"].value).write_bytes(b"\0" * 4 + data)
    onnx.save(model, path)
    session = load(path)
    assert not session.weights["w"].is_borrowed
    for rows in (2, 3):
        x = normal(rows, SIZE)
        np.testing.assert_allclose(session.run(None, {"x": x})[0], x @ w.T, rtol=1e-5, atol=1e-5)
        assert session.weights["w"].device_array is None
    assert f"{w.nbytes / 2**20:.1f} MiB as compiled code computes" in str(session.weights)
    assert session.weights.totals.kept_bytes == w.nbytes


def test_a_weight_that_is_also_read_as_it_is(tmp_path):
    table = normal(SIZE, SIZE)
    nodes = [
        helper.make_node("Gemm", ["x", "w"], ["a"], transB=1),
        helper.make_node("Cast", ["x"], ["i"], to=TensorProto.INT64),
        helper.make_node("Gather", ["w", "i"], ["rows"]),
        helper.make_node("ReduceSum", ["rows", "axes"], ["b"], keepdims=0),
        helper.make_node("Add", ["a", "b"], ["y"]),
    ]
    session = load(save(tmp_path / "m.onnx", nodes, {"w": table, "axes": np.array([1])}))
    x = NUMBERS.integers(0, SIZE, (3, SIZE)).astype(np.float32)
    expected = x @ table.T + table[x.astype(int)].sum(1)
    np.testing.assert_allclose(session.run(None, {"x": x})[0], expected, rtol=1e-4, atol=1e-3)


def test_a_weight_that_is_a_result_stays_the_callers(tmp_path):
    w = normal(SIZE, SIZE)
    nodes = [
        helper.make_node("Transpose", ["w"], ["t"], perm=[1, 0]),
        helper.make_node("MatMul", ["x", "t"], ["y"]),
        helper.make_node("Neg", ["t"], ["n"]),
    ]
    session = load(save(tmp_path / "m.onnx", nodes, {"w": w}, ("y", "t", "n")))
    x = normal(2, SIZE)
    for _ in range(2):
        y, t, n = session.run(None, {"x": x})
        np.testing.assert_allclose(y, x @ w.T, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(t, w.T)
        np.testing.assert_array_equal(n, -w.T)
        t[:], n[:] = 0, 0


@pytest.mark.parametrize("group", [1, 3])
def test_kernels(tmp_path, group):
    import onnxruntime

    weights = {"w": normal(6, 6 // group, 3, 3), "b": normal(6), "r": normal(6, 6, 3, 3)}
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["h"], pads=[1, 1, 1, 1], group=group),
        helper.make_node("Relu", ["h"], ["p"]),
        helper.make_node("ConvTranspose", ["p", "r"], ["y"], strides=[2, 2]),
    ]
    path = save(tmp_path / "m.onnx", nodes, weights, shape=("n", 6, None, None))
    session, x = load(path), normal(2, 6, 7, 8)
    expected = onnxruntime.InferenceSession(path).run(None, {"x": x})[0]
    np.testing.assert_allclose(session.run(None, {"x": x})[0], expected, rtol=1e-4, atol=1e-4)
    assert held(session)


def test_stored_code_keeps_its_parts(tmp_path):
    path, w = dense(tmp_path / "m.onnx")
    options = {"context.cache": str(tmp_path / "cache")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ep.library.WORTH", 0.0)
        patch.setattr("ep.library.GAIN", 0.0)
        first = load(path, **options)
        x = normal(2, SIZE)
        expected = first.run(None, {"x": x})[0]
    second = load(path, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert second.run(None, {"x": x})[0].tobytes() == expected.tobytes()
    assert second.counters.loaded == 1 and len(held(second)) == 1


def test_shapes_share_the_code_that_makes_it(tmp_path, monkeypatch):
    """Each needs it to be stored; compiling it for each would take a tenth of the time that a new shape takes."""
    path, w = dense(tmp_path / "m.onnx")
    compiled, original = [], executable._compile

    def counted(device, fn, arguments, options=None):
        compiled.append(options is executable.ONCE)
        return original(device, fn, arguments, options)

    monkeypatch.setattr(executable, "_compile", counted)
    monkeypatch.setattr(executable, "_made_lately", OrderedDict())
    feeds = [{"x": normal(n, SIZE)} for n in (2, 3)]
    for attempt in range(2):
        session = load(path, **{"context.cache": str(tmp_path / "cache")})
        for feed in feeds:
            np.testing.assert_allclose(session.run(None, feed)[0], feed["x"] @ w.T, rtol=1e-4, atol=1e-4)
        assert session.counters.loaded == 2 * attempt
    assert (compiled.count(True), compiled.count(False)) == (1, 2)


def test_damaged_parts_are_refused():
    items = (kept.Item("d", (0, 1), (2, 3), "float32"),)
    plan = kept.Plan(2, (1,), items, (kept.Part(0, (0,), (0, 1)),))
    data = kept.join(plan, [b"first"], b"later")
    assert kept.is_joined(data) and kept.parted(data) == (plan, [b"first"], b"later")
    damages = ((b'"weights": 2', b'"weights": 1'), (b'"code": 0', b'"code": 1'), (b'"items": [0]', b'"items": [1]'))
    changed = [data.replace(*damage) for damage in (*damages, (b'"parts": [{', b'"parts": [3, {'))]
    for damaged in (data[:-1], data + b"x", data[:20], data[:10], *changed):
        assert damaged != data
        with pytest.raises(ValueError, match="stored code"):
            kept.parted(damaged)


# What is kept, and what is not.


def split(function, arguments, weights):
    specs = [jax.ShapeDtypeStruct(np.shape(a), np.asarray(a).dtype) for a in (*arguments, *weights)]
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*specs)
    return prelude.split(closed, jax.tree.structure(shapes), len(weights))


def parts(function, arguments, weights):
    found = split(function, arguments, weights)
    if found is None:
        return None
    arrays = [None] * len(found.items)
    for part in found.parts:
        for place, array in zip(part.items, found.codes[part.code](*(weights[i] for i in part.sources)), strict=True):
            item, arrays[place] = found.items[place], array
            assert (item.shape, item.dtype) == (array.shape, array.dtype.name)
    results = found.main(*arguments, *(weights[i] for i in found.raw), *arrays)
    for result, expected in zip(results, function(*arguments, *weights), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)
    return [tuple(array.shape) for array in arrays], found.raw


X, W = normal(4, 6), normal(5, 6)


@pytest.mark.parametrize(
    ("function", "weights", "expected"),
    [
        (lambda x, w: (x @ w.T,), [W], ([(6, 5)], ())),
        (lambda x, w: (jax.lax.dot_general(x, w, (((1,), (1,)), ((), ()))),), [W], ([(6, 5)], ())),
        (lambda x, w: (jax.lax.dot_general(w, x.T, (((0,), (0,)), ((), ()))),), [W.T.copy()], ([(5, 6)], ())),
        (lambda x, w: (x @ w,), [W.T.copy()], None),  # it lies as it should
        (lambda x, w: (x + w.reshape(6),), [normal(1, 6)], None),  # a view costs nothing
        (lambda x, b: (x + jax.numpy.broadcast_to(b, (4, 6)),), [normal(6)], None),  # so does repeating
        (lambda x, q, s: (x @ (q.astype(np.float32) * s),), [W.T.astype(np.int8), normal(5)], ([(6, 5)], ())),
        (lambda x, w: (x @ w.T + (w * 2)[:4],), [normal(6, 6)], ([(6, 6), (4, 6)], ())),
        (lambda x, w: (x @ w.T, w), [W], ([(6, 5)], (0,))),
        (lambda x, w: (x * 2, w.T), [W], None),  # a result is computed in the call that returns it
    ],
)
def test_what_is_kept(function, weights, expected):
    assert parts(function, [X], weights) == expected


def test_little_is_kept_of_what_grows(monkeypatch):
    function = lambda x, q: (x @ q.astype(np.float32),)  # noqa: E731
    weights = [W.T.astype(np.int8)]
    assert parts(function, [X], weights) is not None
    monkeypatch.setattr(prelude, "SPARE", 10)
    assert parts(function, [X], weights) is None


def test_what_would_fill_the_machine_is_not_kept(monkeypatch):
    function = lambda x, w: (x @ w.T,)  # noqa: E731
    monkeypatch.setattr(prelude, "_memory", lambda: 4 * W.nbytes)
    assert parts(function, [X], [W]) is not None
    monkeypatch.setattr(prelude, "_memory", lambda: 4 * W.nbytes - 1)
    assert parts(function, [X], [W]) is None


@pytest.mark.parametrize(("batch", "calls", "codes"), [(1, 5, 3), (4 * 36 * 2, 3, 3), (1 << 20, 1, 1)])
def test_weights_are_taken_in_batches_and_like_ones_by_the_same_code(monkeypatch, batch, calls, codes):
    monkeypatch.setattr(prelude, "BATCH", batch)

    def function(x, a, b, c, d, e):
        return (x @ a.T + x @ b.T + x @ c.T + x @ (d * 2) + x @ (a * e),)

    weights = [np.eye(6, k=k, dtype=np.float32) + normal(6, 6) / 50 for k in range(5)]
    assert parts(function, [abs(X)], weights) == ([(6, 6)] * 5, ())
    found = split(function, [X], weights)
    assert len(found.parts) == calls and len(found.codes) == codes


def test_names_tell_computations_apart():
    def item(function, *weights):
        return split(function, [X], weights).items[0]

    square = normal(6, 6)
    same = item(lambda x, w: (x @ w.T,), square)
    assert item(lambda x, w: (-(x @ w.T),), square) == same
    narrow, wide = (item(lambda x, w: (x.astype(w.dtype) @ w.T,), square.astype(dtype)) for dtype in ("f2", "f4"))
    assert narrow != wide, "one weight may come in its own dtype or widened"
    different = [
        lambda x, w: (x @ (w.T * 2),),
        lambda x, w: (x @ (w.T * 3),),
        lambda x, w: (x @ (w.T + np.arange(6, dtype=np.float32)),),
        lambda x, w: (x @ (w.T + np.arange(6, dtype=np.float32)[::-1]),),
        lambda x, w: (x @ w[::-1],),
    ]
    assert len({same, *(item(function, square) for function in different)}) == 6


def test_a_number_in_another_shape_has_nothing_behind_it():
    """Quantized products reshape zero points that are written in the function itself."""

    def function(x, w):
        shift = jax.lax.reshape(np.float32(2), (1, 1))
        return x @ w.T + shift, jax.lax.reshape(np.float32(3), (1,))

    x, w = normal(2, SIZE), normal(SIZE, SIZE)
    closed = jax.make_jaxpr(function)(x, w)
    assert any(
        isinstance(e.invars[0], jax.extend.core.Literal) for e in closed.jaxpr.eqns if e.primitive.name == "reshape"
    )
    assert parts(function, [x], [w]) == ([(SIZE, SIZE)], ())


def test_groups_that_are_split_tell_what_they_keep(tmp_path, monkeypatch):
    monkeypatch.setattr("ep.variants.Variants._due", lambda self, key: False)
    w, v = normal(SIZE, SIZE) / 8, normal(SIZE, SIZE) / 8
    nodes = [
        helper.make_node("Gemm", ["x", "w"], ["a"], transB=1),
        helper.make_node("Gemm", ["a", "v"], ["b"], transB=1),
        helper.make_node("Concat", ["past", "b"], ["rows"], axis=0),
        helper.make_node("ReduceSum", ["rows", "axes"], ["y"], keepdims=1),
    ]
    path = save(tmp_path / "m.onnx", nodes, {"w": w, "v": v, "axes": np.array([0])}, ("y", "rows"), (1, SIZE))
    model = onnx.load(path)
    model.graph.input.append(helper.make_tensor_value_info("past", TensorProto.FLOAT, ["n", SIZE]))
    onnx.save(model, path)
    session = load(path)
    x, rows = normal(1, SIZE), np.zeros((0, SIZE), np.float32)
    for _ in range(8):
        y, rows = session.run(None, {"x": x, "past": rows})
        np.testing.assert_allclose(y, rows.sum(0, keepdims=True), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(rows, np.repeat(x @ w.T @ v.T, 8, 0), rtol=1e-4, atol=1e-5)
    assert any(getattr(g, "growing", None) for _, g in session._opened.executable.every())
    assert session.weights.totals.kept_bytes == w.nbytes + v.nbytes
    for _, runnable in session._opened.executable.every():
        runnable.cache.clear()  # what is left belongs to the parts that do not grow
    assert session.weights.totals.kept_bytes == w.nbytes + v.nbytes


DEVICES = """
import sys, numpy as np, onnx, ep
w = onnx.numpy_helper.to_array(onnx.load(sys.argv[1]).graph.initializer[0])
x = np.ones((2, len(w)), np.float32)
for device in ("cpu:0", "cpu:1"):
    session = ep.load(sys.argv[1], device, options={"context.cache": "off"})
    np.testing.assert_allclose(session.run(None, {"x": x})[0], x @ w.T, rtol=1e-5, atol=1e-5)
    every = session._opened.executable.every()
    (place,) = {each.array.device for _, g in every for f in g.cache.values() for each in f.kept}
    assert place.id == int(device[-1]), place
    sys.first = session  # lives on, so that the second could share
"""


def test_devices_share_nothing(tmp_path):
    path, _ = dense(tmp_path / "m.onnx", save_as_external_data=True, size_threshold=0)
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    done = subprocess.run(
        [sys.executable, "-c", DEVICES, str(path)],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


CACHED = """
import sys, numpy as np, ep
x = np.ones((2, int(sys.argv[3])), np.float32)
results = []
for device in ("cpu:1", "cpu:0", "cpu:1"):
    session = ep.load(sys.argv[1], device, options={"context.cache": sys.argv[2]})
    results.append(session.run(None, {"x": x})[0].tobytes())
    (array,) = session(x=x).values()
    assert next(iter(array.devices())).id == int(device[-1]), array.devices()
assert len(set(results)) == 1 and session.counters.loaded == 1 and not session.counters.misses, session.counters
"""


def test_stored_code_runs_on_another_device_of_its_kind(tmp_path):
    path, _ = dense(tmp_path / "m.onnx")
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    done = subprocess.run(
        [sys.executable, "-c", "import ep.library; ep.library.WORTH = ep.library.GAIN = 0\n" + CACHED,
         str(path), str(tmp_path / "c"), str(SIZE)],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_a_resting_session_gives_the_memory_back(tmp_path):
    def private():
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

    side = 2048
    w = np.ones((side, side), np.float32)
    node = helper.make_node("Gemm", ["x", "w"], ["y"], transB=1)
    session = load(save(tmp_path / "m.onnx", [node], {"w": w}, shape=("n", side)))
    session.run(None, {"x": np.ones((1, side), np.float32)})
    held = private()
    session.hibernate()
    assert private() < held - w.nbytes * 0.9
