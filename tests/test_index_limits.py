"""Is an index outside of what it indexes refused, on every device? The oracle is onnxruntime, which refuses them all.

Feeds are checked before a run, whatever the device, and constants when a node is traced. What a model computes on a
device is not: it stays inside there, and is refused where nothing is compiled.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import numpy as np
import onnx
import pytest
from conftest import parse

import ep
import ep.ops
from ep.errors import IndexOutOfRange
from ep.registry import OPS

X = np.arange(6, dtype=np.float32).reshape(3, 2)
IMAGE = X.reshape(1, 1, 3, 2)
BOX = np.array([[0, 0, 1, 1]], np.float32)
MAX, MIN = 2**63 - 1, -(2**63)


def model(text: str) -> Any:
    """The model of a graph, in the newest opset whose operators onnxruntime has."""
    newest = 24 if "TensorScatter" in text or "y = RotaryEmbedding" in text else 21
    return parse(f"g {text}", f'"": {newest}, "com.microsoft": 1, "ai.onnx.ml": 3')


def ints(*values: Any, dtype: Any = np.int64) -> np.ndarray:
    return np.array(values, dtype)


# Graph, feeds without `i`, a good `i`, and good and bad values for its last element: onnxruntime says which is which.
CASES: dict[str, tuple[str, dict[str, np.ndarray], np.ndarray, tuple[int, ...]]] = {
    "a weight's rows": (
        "(int64[n] i) => (float[n, 2] y) <float[3, 2] w = {1, 2, 3, 4, 5, 6}> { [look] y = Gather(w, i) }",
        {}, ints(0, 0), (2, 3, -3, -4, MAX, MIN, 2**32),
    ),
    "an input's columns": (
        "(float[a, b] x, int64[n] i) => (float[a, n] y) { [look] y = Gather <axis: int = -1> (x, i) }",
        {"x": X}, ints(0, 0), (1, 2, -2, -3),
    ),
    "32 bits": (
        "(float[a, b] x, int32[n] i) => (float[a, n] y) { [look] y = Gather <axis: int = 1> (x, i) }",
        {"x": X}, ints(0, 0, dtype=np.int32), (1, 2, -2, -3, 2**31 - 1, -(2**31)),
    ),
    "many": (
        "(float[a, b] x, int64[n] i) => (float[n, b] y) { [look] y = Gather(x, i) }",
        {"x": X}, np.zeros(1000, np.int64), (2, 3, -3, -4),
    ),
    "a computed tensor": (
        "(float[a, b] x, int64[n] i) => (float[n, a] y) { t = Transpose(x)\n [look] y = Gather(t, i) }",
        {"x": X}, ints(0, 0), (1, 2, -2, -3),
    ),
    "by way of other nodes": (
        "(float[a, b] x, int64[n] i) => (float[n, b] y) <int64[1] shape = {-1}, int64[1] axes = {0}>"
        "{ j = Unsqueeze(i, axes)\n k = Cast <to: int = 6> (j)\n l = Identity(k)\n m = Reshape(l, shape)\n"
        "[look] y = Gather(x, m) }",
        {"x": X}, ints(0, 0), (2, 3, -3, -4),
    ),
    "a row of edges": (
        "(float[a, b] x, int64[2, n] i) => (float[n, b] y) <int64 one = {1}>"
        "{ j = Gather(i, one)\n [look] y = Gather(x, j) }",
        {"x": X}, ints([8, 9], [0, 0]), (2, 3, -3, -4),
    ),
    "a part": (
        "(float[a, b] x, int64[2, n] i) => (float[n, b] y) <int64[1] zero = {0}>"
        "{ p, q = Split <axis = 0, num_outputs: int = 2> (i)\n r = Squeeze(q, zero)\n s = Cast <to: int = 6> (r)\n"
        "[look] y = Gather(x, s) }",
        {"x": X}, ints([8, 9], [0, 0]), (2, 3, -3, -4),
    ),
    "tuples of a slice": (
        "(float[a, b] x, int64[2, n, k] i) => (float[1, n] y) <int64[1] one = {1}, int64[1] two = {2}>"
        "{ j = Slice(i, one, two)\n [look] y = GatherND(x, j) }",
        {"x": X}, ints([[8, 9]], [[2, 0]]), (1, 2, -2, -3),
    ),
    "GatherElements": (
        "(float[a, b] x, int64[n, b] i) => (float[n, b] y) { [look] y = GatherElements(x, i) }",
        {"x": X}, ints([0, 0]), (2, 3, -3, -4),
    ),
    "GatherND": (
        "(float[a, b] x, int64[n, k] i) => (float[n] y) { [look] y = GatherND(x, i) }",
        {"x": X}, ints([2, 1], [0, 0]), (1, 2, -2, -3),
    ),
    "GatherND, first component": (
        "(float[a, b] x, int64[n, k] i) => (float[n, b] y) { [look] y = GatherND(x, i) }",
        {"x": X}, ints([2], [0]), (2, 3, -3, -4),
    ),
    "GatherND in batches": (
        "(float[a, b] x, int64[a, k] i) => (float[a] y) { [look] y = GatherND <batch_dims: int = 1> (x, i) }",
        {"x": X}, ints([0], [0], [0]), (1, 2, -2, -3),
    ),
    "GatherND after Unsqueeze": (
        "(float[a, b] x, int64[n] i) => (float[n, b] y) <int64[1] axes = {-1}>"
        "{ j = Unsqueeze(i, axes)\n [look] y = GatherND(x, j) }",
        {"x": X}, ints(0, 0), (2, 3, -3, -4),
    ),
    "ScatterElements": (
        "(float[a, b] x, int64[n, m] i, float[n, m] u) => (float[a, b] y)"
        "{ [look] y = ScatterElements <axis: int = 1> (x, i, u) }",
        {"x": X, "u": -X[:1, :1]}, ints([0]), (1, 2, -2, -3),
    ),
    "ScatterND": (
        "(float[a, b] x, int64[n, k] i, float[n] u) => (float[a, b] y) { [look] y = ScatterND(x, i, u) }",
        {"x": X, "u": -X[1, :1]}, ints([0, 0]), (1, 2, -2, -3),
    ),
    "TensorScatter": (
        "(float[a, b, c, d] x, float[a, b, e, d] u, int64[a] i) => (float[a, b, c, d] y)"
        "{ [look] y = TensorScatter(x, u, i) }",
        {"x": IMAGE, "u": -IMAGE[:, :, :2]}, ints(0), (1, 2, -1, MAX, MIN),
    ),
    "TensorScatter, circular": (
        "(float[a, b, c, d] x, float[a, b, e, d] u, int64[a] i) => (float[a, b, c, d] y)"
        '{ [look] y = TensorScatter <mode = "circular"> (x, u, i) }',
        {"x": IMAGE, "u": -IMAGE[:, :, :2]}, ints(0), (1, 2, 7, -1),
    ),
    "ArrayFeatureExtractor": (
        "(float[a, b] x, int64[n] i) => (float[a, n] y) { [look] y = ai.onnx.ml.ArrayFeatureExtractor(x, i) }",
        {"x": X}, ints(0, 0), (1, 2, -1),
    ),
    "RoiAlign": (
        "(float[a, b, c, d] x, float[r, 4] q, int64[r] i) => (float[r, b, e, f] y) { [look] y = RoiAlign(x, q, i) }",
        {"x": IMAGE, "q": BOX}, ints(0), (0, 1, -1),
    ),
    "CropAndResize": (
        "(float[a, b, c, d] x, float[r, 4] q, int32[r] i) => (float[r, b, e, f] y) <int32[2] s = {2, 2}>"
        "{ [look] y = com.microsoft.CropAndResize(x, q, i, s) }",
        {"x": IMAGE, "q": BOX}, ints(0, dtype=np.int32), (0, 1, -1),
    ),
    "MaxUnpool": (
        "(float[a, b, c] x, int64[a, b, c] i) => (float[a, b, e] y)"
        "{ [look] y = MaxUnpool <kernel_shape = [2], strides = [2]> (x, i) }",
        {"x": X.reshape(1, 1, 6)}, ints([[0, 2, 4, 6, 8, 0]]), (11, 12, -1),
    ),
    "ReverseSequence": (
        "(float[a, b] x, int64[b] i) => (float[a, b] y) { [look] y = ReverseSequence(x, i) }",
        {"x": X}, ints(1, 1), (0, 3, 4, -1),
    ),
    "RotaryEmbedding": (
        "(float[a, b, c, d] x, float[m, h] c, int64[a, e] i) => (float[a, b, c, d] y)"
        "{ [look] y = RotaryEmbedding(x, c, c, i) }",
        {"x": IMAGE, "c": np.ones((4, 1), np.float32)}, ints([0, 1, 0]), (3, 4, -1),
    ),
    "RotaryEmbedding of onnxruntime": (
        "(float[a, b, c, d] x, float[m, h] c, int64[a, e] i) => (float[a, b, c, d] y)"
        "{ [look] y = com.microsoft.RotaryEmbedding(x, i, c, c) }",
        {"x": IMAGE, "c": np.ones((4, 1), np.float32)}, ints([0, 1, 0]), (3, 4, -1),
    ),
    "RotaryEmbedding of onnxruntime, from a position on": (
        "(float[a, b, c, d] x, float[m, h] c, int64[e] i) => (float[a, b, c, d] y)"
        "{ [look] y = com.microsoft.RotaryEmbedding(x, i, c, c) }",
        {"x": IMAGE, "c": np.ones((4, 1), np.float32)}, ints(0), (1, 2, -1),
    ),
    "token ids": (
        "(int32[a, b] i, int32[a, b] s) => (float[a, b, 2] y) <float[3, 2] w = {1, 2, 3, 4, 5, 6}, float[2] g = {1, 1}>"
        "{ [look] y, m = com.microsoft.EmbedLayerNormalization(i, s, w, w, w, g, g) }",
        {"s": ints([0, 0], dtype=np.int32)}, ints([0, 0], dtype=np.int32), (2, 3, -1),
    ),
    "segment ids": (
        "(int32[a, b] s, int32[a, b] i) => (float[a, b, 2] y) <float[3, 2] w = {1, 2, 3, 4, 5, 6}, float[2] g = {1, 1}>"
        "{ [look] y, m = com.microsoft.EmbedLayerNormalization(s, i, w, w, w, g, g) }",
        {"s": ints([0, 0], dtype=np.int32)}, ints([0, 0], dtype=np.int32), (2, 3, -1),
    ),
    "classes": (
        "(float[a, b] x, int64[a] i) => (float y)"
        "{ [look] y = NegativeLogLikelihoodLoss <ignore_index: int = -7> (x, i) }",
        {"x": X}, ints(0, -7, 0), (1, 2, -7),
    ),
}  # fmt: skip


@functools.cache
def expected(name: str) -> dict[int, list[np.ndarray] | None]:
    """What onnxruntime gives for each value of a case; None: it refuses."""
    ort = pytest.importorskip("onnxruntime")
    options = ort.SessionOptions()
    options.log_severity_level = 4
    text, feeds, good, values = CASES[name]
    session = ort.InferenceSession(model(text).SerializeToString(), options, providers=["CPUExecutionProvider"])
    found = {}
    for number in values:
        try:
            found[number] = session.run(None, {**feeds, "i": replaced(good, number)})
        except Exception:  # noqa: BLE001 - its classes have no common base
            found[number] = None
    return found


def replaced(good: np.ndarray, number: int) -> np.ndarray:
    """The indices with another one at the end."""
    array = good.copy()
    array.reshape(-1)[-1] = number
    return array


@pytest.mark.parametrize("name", CASES)
def test_refused_is_what_onnxruntime_refuses(device: str, name: str) -> None:
    text, feeds, good, _ = CASES[name]
    session = ep.load(model(text), device)
    answers = expected(name)
    assert None in answers.values() and any(answer is not None for answer in answers.values())
    for number, answer in answers.items():
        fed = {**feeds, "i": replaced(good, number)}
        if answer is None:
            with pytest.raises(IndexOutOfRange, match=f"node 'look'.*index {number} ") as caught:
                session.run(None, fed)
            with pytest.raises(IndexOutOfRange):
                session(fed)
            error = caught.value
            assert error.index == number and not error.low <= number <= error.high
            assert re.search(r"'\w+' has shape \[[\d, ]+\]: indices go from", error.why) and error.fix
        else:
            np.testing.assert_allclose(session.run(None, fed)[0], answer[0], rtol=1e-5, atol=1e-6)


def test_what_the_specification_bounds_has_the_role() -> None:
    """All inputs of which the schemas say that an index out of bounds is an error."""
    found = {
        (schema.domain, schema.name, schema.since_version, position)
        for schema in onnx.defs.get_all_schemas_with_history()
        for position, parameter in enumerate(schema.inputs)
        if "error if any of the index values are out of bounds" in parameter.description
    }
    assert {"Gather", "GatherElements", "GatherND", "ScatterElements"} <= {name for _, name, *_ in found}
    for domain, name, since, position in found:
        lowering = OPS.find(domain, name, since)
        role = None if lowering is None else lowering.role(position)
        assert lowering is None or isinstance(role, ep.Index) or role is ep.Host, (name, since)  # Host: of sequences


def test_classes_do_not_count_from_the_end(device: str) -> None:
    """The specification has them in [0, C), where onnxruntime takes -1."""
    session = look(CASES["classes"][0], device)
    with pytest.raises(IndexOutOfRange, match="index -1 at"):
        session.run(None, {"x": X, "i": ints(0, -1, 0)})


def look(text: str, device: str, **options: Any) -> ep.InferenceSession:
    return ep.load(model(text), device, options=options)


ROWS = "(float[a, b] x, int64[n] i) => (float[n, b] y) { [look] y = Gather(x, i) }"


def test_limits_follow_the_shapes_of_each_call(device: str) -> None:
    session = look(ROWS, device)
    for rows in (3, 1, 5, 3):
        x = np.ones((rows, 2), np.float32)
        session.run(None, {"x": x, "i": ints(rows - 1, -rows)})
        for number in (rows, -rows - 1):
            with pytest.raises(IndexOutOfRange, match=f"index {number} at \\[1\\] of input 'i'|of 'indices'"):
                session.run(None, {"x": x, "i": ints(0, number)})
    with pytest.raises(IndexOutOfRange, match="there is nothing to index"):
        session.run(None, {"x": np.ones((0, 2), np.float32), "i": ints(0)})
    assert session.run(None, {"x": np.ones((0, 2), np.float32), "i": ints()})[0].shape == (0, 2)


def test_one_input_may_serve_several_nodes(device: str) -> None:
    """The first node would take what the second refuses, which is named."""
    session = look(
        "(float[a] x, float[b] z, int64[n] i) => (float[n] y) { [one] p = Gather(x, i)\n [two] q = Gather(z, i)\n"
        "y = Add(p, q) }",
        device,
    )
    feeds = {"x": np.ones(9, np.float32), "z": np.ones(4, np.float32)}
    session.run(None, {**feeds, "i": ints(3, -4)})
    with pytest.raises(IndexOutOfRange, match="node 'two'"):
        session.run(None, {**feeds, "i": ints(3, 4)})


@pytest.mark.parametrize("taken", [True, False])
def test_a_branch_refuses_what_it_indexes_only_if_it_is_taken(device: str, taken: bool) -> None:
    first, second = ("look", "cast") if taken else ("cast", "look")
    bodies = {"look": "t = Relu(x)\n j = Identity(i)\n [look] p = Gather(t, j)", "cast": "p = Cast <to: int = 1> (i)"}
    session = look(
        "(float[a] x, int64[n] i, bool[m] c) => (float[n] y) <int64[0] none = {}> { d = Reshape(c, none)\n"
        f"y = If (d) <then_branch = t () => (float[n] p) {{ {bodies[first]} }},"
        f"else_branch = e () => (float[n] p) {{ {bodies[second]} }}> }}",
        device,
    )
    feeds = {"x": np.ones(3, np.float32), "i": ints(7, 8)}
    np.testing.assert_equal(session.run(None, {**feeds, "c": np.array([not taken])})[0], [7, 8])
    with pytest.raises(IndexOutOfRange, match="node 'look'"):
        session.run(None, {**feeds, "c": np.array([taken])})
    np.testing.assert_equal(session.run(None, {**feeds, "c": np.array([taken]), "i": ints(0, 2)})[0], [1, 1])


def test_defaults_of_inputs_are_checked_as_feeds(device: str) -> None:
    text = "(float[a] x, int64[2] i = {0, 2}) => (float[2] y) { [look] y = Gather(x, i) }"
    session = look(text, device)
    session.run(None, {"x": np.ones(3, np.float32)})
    with pytest.raises(IndexOutOfRange, match="index 2 "):
        session.run(None, {"x": np.ones(2, np.float32)})


@pytest.mark.parametrize("count", [2, 1000])  # compiled in, and an argument of the compiled function
def test_constant_indices_are_checked(device: str, count: int) -> None:
    numbers = ", ".join(["0"] * (count - 1) + ["5"])
    text = f"(float[a] x) => (float[{count}] y) <int64[{count}] i = {{{numbers}}}>"
    for body in ("[look] y = Gather(x, i)", "z = Relu(x)\n [look] y = Gather(z, i)"):
        session = look(f"{text} {{ {body} }}", device)
        assert session.run(None, {"x": np.ones(6, np.float32)})[0].sum() == count
        with pytest.raises(IndexOutOfRange, match=f"node 'look'.*index 5 at \\[{count - 1}\\] of 'indices'"):
            session.run(None, {"x": np.ones(5, np.float32)})


def test_stored_code_is_checked_too(accelerator: str, tmp_path: Any) -> None:
    text = "(float[a, b] x, int64[n] i) => (float[n, a] y) { t = Transpose(x)\n [look] y = Gather(t, i) }"
    feeds = {"x": X, "i": ints(0, 0)}
    for _ in range(2):
        session = look(text, accelerator, **{"context.cache": str(tmp_path)})
        session.warmup({"x": (3, 2), "i": (2,)})
        session.run(None, feeds)
        with pytest.raises(IndexOutOfRange, match="index 2 at"):
            session.run(None, {**feeds, "i": ints(0, 2)})


COMPUTED = "(float[a] x, int64[n] i) => (float[n] y) { j = Add(i, i)\n [look] y = Gather(x, j) }"


def test_computed_indices_are_checked_where_the_host_computes_or_nothing_is_compiled(device: str) -> None:
    feeds = {"x": np.full(4, 7, np.float32), "i": ints(0, 3)}
    for session in (look(COMPUTED, device, compile="off"), *([look(COMPUTED, device)] if device == "host" else [])):
        with pytest.raises(IndexOutOfRange, match="node 'look'.*index 6 at \\[1\\] of 'indices'"):
            session.run(None, feeds)


@pytest.mark.parametrize("index", [5, 1 << 20, -(1 << 20)])
@pytest.mark.parametrize("node", ["y = Gather(x, j)", "y = GatherElements(x, j)", "y = ScatterElements(x, j, u)"])
def test_computed_indices_reach_no_foreign_memory(accelerator: str, node: str, index: int) -> None:
    """The specification calls them an error. A device cannot tell in time, but stays within the tensor."""
    session = look(f"(float[n] x, int64[1] i, float[1] u) => (float[m] y) {{ j = Add(i, i)\n {node} }}", accelerator)
    (y,) = session.run(None, {"x": np.full(4, 7, np.float32), "i": ints(index), "u": np.full(1, 7, np.float32)})
    assert np.all((y == 7) | np.isnan(y)), y


def test_arrays_of_the_device_are_looked_at_where_nothing_waits_for_it(accelerator: str) -> None:
    """A run waits for its results; a call does not, but JAX's arrays on the CPU are memory of the host."""
    session = look(ROWS, accelerator)
    backend = session._backend
    with backend.scope():
        good, bad = (backend.asarray(ints(0, n)) for n in (2, 3))
        backend.block([good, bad])
    assert backend.is_array(bad)
    session.run(None, {"x": X, "i": good})
    session(x=X, i=good)
    with pytest.raises(IndexOutOfRange, match="index 3 at"):
        session.run(None, {"x": X, "i": bad})
    if accelerator == "jax" and backend.device.type == ep.DeviceType.CPU:
        with pytest.raises(IndexOutOfRange, match="index 3 at"):
            session(x=X, i=bad)
    else:
        session(x=X, i=bad)


@pytest.mark.parametrize("parameters", ["", "x", "x, xp", "*xp", "x, *, xp"])
def test_a_lowering_begins_with_the_namespace(parameters: str) -> None:
    """Otherwise the first input would arrive in the place of another."""
    registry = ep.OpRegistry()
    space: dict[str, Any] = {}
    exec(f"def lowering({parameters}): pass", space)
    with pytest.raises(ValueError, match="com.example::Op-1 .* first parameter of lowering must be 'xp'"):
        registry.op("Op", domain="com.example")(space["lowering"])
    with pytest.raises(ValueError, match="must be 'xp'"):
        ep.Overrides().op("Op")(space["lowering"])
    assert len(registry) == 0
