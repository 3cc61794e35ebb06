"""Does `ep.onnxruntime` take and give what onnxruntime does? Every test runs on both modules, and passes on both."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from onnx import helper
from onnxruntime_modules import CPU, DEFAULT, DOUBLE, MODULES, TWO, X, content, load, parsed, value

# What is fed, and what is asked for.


@pytest.mark.parametrize("names", [None, [], ["p"], ("p", "s"), ["s", "s"]])
def test_outputs_come_as_asked(ort, names):
    results = load(ort, TWO).run(names, {"a": X, "b": X})
    expected = {"s": X + X, "p": X * X}
    assert type(results) is list
    np.testing.assert_equal(results, [expected[name] for name in names or ("s", "p")])


@pytest.mark.parametrize("kind", [set, frozenset, iter, list, dict.fromkeys, np.array], ids=lambda kind: kind.__name__)
def test_what_may_hold_names_of_outputs(ort, kind):
    """Sets, views of dictionaries, generators and arrays may; iterators and dictionaries may not."""
    session, names = load(ort, DOUBLE), kind(["y"])
    if kind is iter or isinstance(names, dict):
        with pytest.raises(TypeError, match="incompatible function arguments"):
            session.run(names, {"x": X})
        names = (name for name in ["y"]) if kind is iter else names.keys()
    np.testing.assert_equal(session.run(names, {"x": X}), [X + X])


LAYOUTS = {
    "fortran": np.asfortranarray,
    "strided": lambda x: np.repeat(x, 2, 1)[:, ::2],
    "negative": lambda x: x[:, ::-1][:, ::-1],
    "read-only": lambda x: np.broadcast_to(x, x.shape),
    "matrix": lambda x: x.view(np.matrix),
    "masked": np.ma.array,
    "list": lambda x: x.tolist(),
    "integers": lambda x: x.astype(int).tolist(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_arrays_of_every_layout_and_lists_are_taken(ort, layout):
    (y,) = load(ort, DOUBLE).run(None, {"x": LAYOUTS[layout](X)})
    assert type(y) is np.ndarray and y.dtype == np.float32 and y.flags.c_contiguous and y.flags.writeable
    np.testing.assert_equal(y, X + X)


def test_lists_become_the_declared_type(ort):
    session = load(ort, "g (int64[N] x) => (int64[N] y) { y = Add(x, x) }")
    np.testing.assert_equal(session.run(None, {"x": [1.5, 2, True]}), [np.array([2, 4, 2])])
    session = load(ort, "g (bool[N] x) => (bool[N] y) { y = Not(x) }")
    np.testing.assert_equal(session.run(None, OrderedDict(x=[True, False])), [np.array([False, True])])


def test_symbolic_dimensions_may_differ_and_broadcast(ort):
    (s, _) = load(ort, TWO).run(None, {"a": X[:1], "b": X})
    np.testing.assert_equal(s, X[:1] + X)


def test_results_share_memory_with_nothing(ort):
    session = load(
        ort, "g (float[N] x) => (float[N] x, float[2] w, float[N] i) <float[2] w = {1, 2}> { i = Identity(x) }"
    )
    x = np.ones(2, np.float32)
    first = session.run(None, {"x": x})
    for result in first:
        result[:] = 7
    again = session.run(None, {"x": x})
    np.testing.assert_equal(x, [1, 1])
    np.testing.assert_equal(again, [[1, 1], [1, 2], [1, 1]])


def test_scalars_are_arrays_of_rank_zero(ort):
    (y,) = load(ort, "g (float[N] x) => (float y) { y = ReduceSum <keepdims = 0> (x) }").run(None, {"x": X[1]})
    assert type(y) is np.ndarray and y.shape == () and y == 12


def test_missing_inputs(ort):
    session = load(ort, TWO)
    for run in (session.run, lambda n, f: session.run_with_ort_values(n, {k: value(ort, v) for k, v in f.items()})):
        with pytest.raises(ValueError) as caught:
            run(None, {"a": X})
        assert str(caught.value) == "Required inputs (['b']) are missing from input feed (['a'])."


WRONG_FEEDS = {
    "Invalid input name: zz": {"zz": X},
    "Unexpected input data type. Actual: (tensor(double)) , expected: (tensor(float))": {"a": X.astype(float)},
    "Unexpected input data type. Actual: (tensor(string)) , expected: (tensor(float))": {"a": X.astype(object)},
    "Invalid rank for input: a Got: 1 Expected: 2 Please fix either the inputs/outputs or the model.": {"a": X[0]},
    "Got invalid dimensions for input: a for the following indices\n index: 1 Got: 2 Expected: 3\n "
    "Please fix either the inputs/outputs or the model.": {"a": X[:, :2]},
}


@pytest.mark.parametrize("message", WRONG_FEEDS)
def test_feeds_that_do_not_fit(ort, native, message):
    with pytest.raises(native.InvalidArgument) as caught:
        load(ort, TWO).run(None, {"a": X, "b": X, **WRONG_FEEDS[message]})
    assert str(caught.value) == f"[ONNXRuntimeError] : 2 : INVALID_ARGUMENT : {message}"


def test_unknown_outputs(ort, native):
    with pytest.raises(native.InvalidArgument, match="INVALID_ARGUMENT : Invalid output name:nope$"):
        load(ort, TWO).run(["nope"], {"a": X, "b": X})


@pytest.mark.parametrize(
    ("fed", "message"),
    [
        (1.0, "Unable to handle object of type <class 'float'>"),
        (np.float32(1), "Unable to handle object of type <class 'numpy.float32'>"),
        ("x", "Input must be a list of dictionaries or a single numpy array for input 'x'."),
        ((1, 2, 3), "Input must be a list of dictionaries or a single numpy array for input 'x'."),
        ([[1, 2, "a"]], "Could not create tensor from given input list"),
        ([[1, 2], [1]], "Could not create tensor from given input list"),
    ],
)
def test_values_that_are_no_tensors(ort, fed, message):
    with pytest.raises(RuntimeError) as caught:
        load(ort, DOUBLE).run(None, {"x": fed})
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "arguments", [("y", {"x": X}), (3, {"x": X}), (["y"], {1: X, "x": X}), (None, {"x": X}, {"options": 1})]
)
def test_arguments_of_the_wrong_kind(ort, arguments):
    with pytest.raises(TypeError, match=r"^run\(\): incompatible function arguments\. The following argument types"):
        load(ort, DOUBLE).run(*arguments)


def test_a_list_is_no_feed(ort):
    with pytest.raises(AttributeError, match="'list' object has no attribute 'keys'"):
        load(ort, DOUBLE).run(None, [X])


EMBEDDING = "g (int64[n] i) => (float[n, 2] y) <float[3, 2] w = {1, 2, 3, 4, 5, 6}> { [look] y = Gather(w, i) }"
COLUMNS = "g (float[a, b] x, int64[n] i) => (float[a, n] y) { [look] y = Gather <axis: int = -1> (x, i) }"


@pytest.mark.parametrize("index", [3, -4, 2**40])
def test_indices_out_of_bounds(ort, native, index):
    message = f"Gather node. Name:'look' Status Message: .* idx={index} must be within the inclusive range"
    for text, feed in ((EMBEDDING, {}), (COLUMNS, {"x": X})):
        session = load(ort, text)
        session.run(None, {**feed, "i": np.array([-3, 2, 0])})
        session.run(None, {**feed, "i": np.zeros(0, np.int64)})
        with pytest.raises(native.InvalidArgument, match=message + r" \[-3,2\]$"):
            session.run(None, {**feed, "i": np.array([0, index])})


@pytest.mark.parametrize(
    "node",
    ["GatherND(x, i)", "ScatterND(x, i, u)", "ScatterElements(x, i, u)", "ai.onnx.ml.ArrayFeatureExtractor(x, i)"],
)
def test_indices_of_other_operators(ort, native, node):
    text = f"g (float[a, b] x, int64[c, d] i, float[c, d] u) => (float[?] y) {{ [look] y = {node} }}"
    feeds = {"x": X, "u": -X[:1, :1]}
    session = load(ort, text)
    session.run(None, {**feeds, "i": np.array([[1]])} | ({"u": -X[:1]} if "ND" in node else {}))
    with pytest.raises(native.InvalidArgument, match=f"{node.partition('(')[0].rpartition('.')[2]} node. Name:'look'"):
        session.run(None, {**feeds, "i": np.array([[3]])} | ({"u": -X[:1]} if "ND" in node else {}))


def test_initializers_that_are_inputs_may_be_fed(ort, native):
    x = np.zeros(2, np.float32)
    session = load(ort, DEFAULT)
    assert [v.name for v in session.get_inputs()] == ["x"]
    assert [v.name for v in session.get_overridable_initializers()] == ["w"]
    np.testing.assert_equal(session.run(None, {"x": x}), [[1, 2]])
    np.testing.assert_equal(session.run(None, {"x": x, "w": x + 5}), [[5, 5]])
    old = ort.InferenceSession(content(DEFAULT, ir=3), providers=CPU)
    assert [v.name for v in old.get_inputs()] == ["x"] and not old.get_overridable_initializers()


# Strings, sequences, maps and optionals.

KINDS = {
    "strings": "g (string[n] s) => (string[n] t) { t = Concat <axis = 0> (s) }",
    "sequence": "g (seq(float[n]) s) => (seq(float[n]) t) { t = Identity(s) }",
    "int map": "g (float[n, 2] x) => (seq(map(int64, float)) y)"
    "{ y = ai.onnx.ml.ZipMap <classlabels_int64s = [3, 5]> (x) }",
    "string map": "g (float[n, 2] x) => (seq(map(string, float)) y)"
    '{ y = ai.onnx.ml.ZipMap <classlabels_strings = ["a", "b"]> (x) }',
    "map input": "g (map(string, float) m) => (float[1, 2] y)"
    '{ y = ai.onnx.ml.DictVectorizer <string_vocabulary = ["a", "b"]> (m) }',
    "tensors": "g (float[n, 2] x, float16[?] h, int64 i, double[2, n] d, bool[] b) => (float[n, 2] y, float16[?] k, "
    "int64 j, double[2, n] e, bool[] c) { y = Relu(x)\n k = Abs(h)\n j = Abs(i)\n e = Abs(d)\n c = Not(b) }",
}
KIND_FEEDS = {
    "strings": {"s": np.array(["a", "ä"], object)},
    "sequence": {"s": [np.ones(2, np.float32), np.zeros(1, np.float32)]},
    "int map": {"x": np.array([[0.25, 0.75], [1, 0]], np.float32)},
    "string map": {"x": np.array([[0.25, 0.75], [1, 0]], np.float32)},
    "map input": {"m": {"b": 2.0, "a": 1.0}},
    "tensors": {
        "x": np.array([[-1, 2]], np.float32),
        "h": np.array([-1], np.float16),
        "i": np.array(-3),
        "d": np.array([[-1.5], [2]]),
        "b": np.array([True]),
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_value_comes_and_goes_alike(kind):
    """One answer of both, since no test knows better than onnxruntime what it gives."""
    answers = []
    for name in MODULES:
        ort = pytest.importorskip(name)
        session = load(ort, KINDS[kind])
        values = [(v.name, v.type, v.shape, str(v)) for v in (*session.get_inputs(), *session.get_outputs())]
        results = session.run(None, KIND_FEEDS[kind])
        answers.append((values, [typed(result) for result in results]))
    assert answers[1] == answers[0]


def typed(value):
    """A value with the types of all its parts."""
    if isinstance(value, np.ndarray):
        return "array", value.dtype, value.shape, [typed(item) for item in value.ravel().tolist()]
    if isinstance(value, list):
        return "list", [typed(item) for item in value]
    if isinstance(value, dict):
        return "dict", [(typed(key), typed(item)) for key, item in value.items()]
    return type(value), value


@pytest.mark.parametrize("fed", [["a", "b"], np.array(["a", "b"]), np.array(["a", "b"], object)])
def test_strings_in_every_form(ort, fed):
    (t,) = load(ort, KINDS["strings"]).run(None, {"s": fed})
    assert t.dtype == object and t.tolist() == ["a", "b"]


def test_objects_become_their_text(ort):
    (t,) = load(ort, KINDS["strings"]).run(None, {"s": np.array(["a", 1, None], object)})
    assert t.tolist() == ["a", "1", "None"]
    (t,) = load(ort, KINDS["strings"]).run(None, {"s": np.array([b"must", b"have"], np.void)})
    assert t.tolist() == ["must", "have"]


def test_optional_sequences(ort):
    session = load(ort, "g (optional(seq(float[N])) o) => (optional(seq(float[N])) p) { p = Identity(o) }")
    np.testing.assert_equal(session.run(None, {"o": [X[0], X[1]]}), [[X[0], X[1]]])


def test_sequences_are_lists(ort, native):
    session = load(ort, KINDS["sequence"])
    with pytest.raises(RuntimeError, match="should be given as array for input 's'"):
        session.run(None, {"s": (X[0], X[1])})
    with pytest.raises(native.InvalidArgument, match="input with name: 's' expected to be of type: 3 but received"):
        session.run(None, {"s": X})


def test_optionals(ort):
    session = load(ort, "g (optional(float[N]) o) => (bool y) { y = OptionalHasElement(o) }")
    assert [session.run(None, feed)[0].item() for feed in ({"o": X[0]}, {"o": None}, {})] == [True, False, False]


# What a model says of itself.


def test_metadata(ort):
    model = parsed(DOUBLE)
    model.producer_name, model.domain, model.doc_string, model.graph.doc_string = "tests", "com.example", "a", "b"
    helper.set_model_props(model, {"language": "en"})
    meta = ort.InferenceSession(model.SerializeToString(), providers=CPU).get_modelmeta()
    assert (meta.producer_name, meta.graph_name, meta.domain) == ("tests", "g", "com.example")
    assert (meta.description, meta.graph_description, meta.version) == ("a", "b", 2**63 - 1)
    session = ort.InferenceSession(model.SerializeToString(), providers=CPU)
    assert session.get_modelmeta() is session.get_modelmeta()
    assert type(meta.custom_metadata_map) is dict and meta.custom_metadata_map == {"language": "en"}


def test_shapes_that_operators_imply(ort):
    model = parsed("g (float[N, 3] x, float[?, 3] z) => (float[M, ?] y, float[N, 4] c) <float[3, 2] w = "
                   "{1, 2, 3, 4, 5, 6}> { y = MatMul(x, w)\n c = Identity(z) }")  # fmt: skip
    model.graph.output[0].ClearField("type")
    session = ort.InferenceSession(model.SerializeToString(), providers=CPU)
    assert [(v.name, v.type, v.shape) for v in session.get_outputs()] == [
        ("y", "tensor(float)", ["N", 2]),
        ("c", "tensor(float)", [None, None]),  # 3 and 4 contradict each other
    ]


def test_unknown_dimensions(ort):
    model = parsed("g (float[N, 3] x) => (float[N, 3] y) { y = Identity(x) }")
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = -1
    model.graph.output[0].type.tensor_type.shape.dim[0].dim_param = ""
    session = ort.InferenceSession(model.SerializeToString(), providers=CPU)
    assert session.get_inputs()[0].shape == session.get_outputs()[0].shape == [None, 3]
    with pytest.raises(AttributeError):
        session.get_inputs()[0].name = "q"
