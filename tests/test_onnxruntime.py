"""Does `ep.onnxruntime` behave like onnxruntime? Every test here runs against both modules, and passes on both."""

from __future__ import annotations

import copy
import importlib
import json
import threading
from collections import OrderedDict
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper, parser

MODULES = ["onnxruntime", "ep.onnxruntime"]
CPU = ["CPUExecutionProvider"]
X = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture(params=MODULES, scope="module")
def ort(request: pytest.FixtureRequest) -> ModuleType:
    """The genuine onnxruntime, then ours."""
    return pytest.importorskip(request.param, reason="onnxruntime is not installed")


@pytest.fixture(scope="module")
def native(ort: ModuleType) -> ModuleType:
    """Where both keep their exceptions."""
    return importlib.import_module(f"{ort.__name__}.capi.onnxruntime_pybind11_state")


def parsed(text: str, opsets: str = '"": 17, "ai.onnx.ml": 3', ir: int = 8) -> onnx.ModelProto:
    return parser.parse_model(f"<ir_version: {ir}, opset_import: [{opsets}]> {text}")


def content(text: str, **keywords) -> bytes:
    return parsed(text, **keywords).SerializeToString()


TWO = "g (float[N, 3] a, float[N, 3] b) => (float[N, 3] s, float[N, 3] p) { s = Add(a, b)\n p = Mul(a, b) }"
DOUBLE = "g (float[N, 3] x) => (float[N, 3] y) { y = Add(x, x) }"
DEFAULT = "g (float[2] x, float[2] w = {1, 2}) => (float[2] y) { y = Add(x, w) }"


def load(ort: ModuleType, text: str, *arguments, **keywords):
    return ort.InferenceSession(content(text), *arguments, providers=CPU, **keywords)


# What is fed, and what is asked for.


@pytest.mark.parametrize("names", [None, [], ["p"], ("p", "s"), ["s", "s"]])
def test_outputs_come_as_asked(ort, names):
    results = load(ort, TWO).run(names, {"a": X, "b": X})
    expected = {"s": X + X, "p": X * X}
    assert type(results) is list
    np.testing.assert_equal(results, [expected[name] for name in names or ("s", "p")])


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


# Loading, and refusing to.


def test_sources(ort, tmp_path):
    path = tmp_path / "m.onnx"
    path.write_bytes(content(DOUBLE))
    subclass = type("Bytes", (bytes,), {})
    for source in (path, str(path), path.read_bytes(), subclass(path.read_bytes())):
        session = ort.InferenceSession(path_or_bytes=source, providers=CPU, bogus=1, disabled_optimizers=["A"])
        np.testing.assert_equal(session.run(None, {"x": X}), [X + X])
        assert session._model_path == (str(path) if source in (path, str(path)) else None)
    for source in (bytearray(b""), memoryview(b""), None, parsed(DOUBLE), 3):
        with pytest.raises(TypeError, match="Unable to load from type '<class"):
            ort.InferenceSession(source, providers=CPU)


def test_files_that_are_no_models(ort, native, tmp_path):
    def refused(name: str, data: bytes | None, kind: str) -> str:
        path = tmp_path / name
        if data is not None:
            path.write_bytes(data)
        with pytest.raises(getattr(native, kind)) as caught:
            ort.InferenceSession(path, providers=CPU)
        return str(caught.value).replace(str(path), "P")

    gone, garbage = refused("gone", None, "NoSuchFile"), refused("garbage", b"not a model" * 9, "InvalidProtobuf")
    assert gone == (
        "[ONNXRuntimeError] : 3 : NO_SUCHFILE : Load model from P failed:Load model P failed. File doesn't exist"
    )
    assert garbage == "[ONNXRuntimeError] : 7 : INVALID_PROTOBUF : Load model from P failed:Protobuf parsing failed."
    empty = refused("empty", b"", "InvalidArgument")
    assert empty.endswith("Load model from P failed:No graph was found in the protobuf.")
    with pytest.raises(native.InvalidProtobuf, match="Failed to load model because protobuf parsing failed"):
        ort.InferenceSession(b"garbage!", providers=CPU)


INVALID = {
    ("InvalidGraph", "This is an invalid model. In Node, (\"\", Bogus, \"\", -1) : (\"x\": tensor(float),) -> (\"y\": "
     "tensor(float),) , Error No Op registered for Bogus with domain_version of 17"): "y = Bogus(x)",
    ("InvalidGraph", "Error No opset import for domain 'my.dom'"): "y = my.dom.Bogus(x)",
    ("InvalidGraph", "Error Unrecognized attribute: foo for operator Softmax"): "y = Softmax <foo = 1> (x)",
    ("InvalidArgument", "Invalid model. Node input 'q' is not a graph input, initializer, or output of a previous "
     "node."): "y = Add(x, q)",
    ("Fail", "This is an invalid model. Graph output (y) does not exist in the graph."): "z = Add(x, x)",
    ("Fail", "This is an invalid model. Error: Duplicate definition of name (y)."): "y = Abs(x)\n y = Neg(x)",
    ("Fail", "Type Error: Type parameter (T) of Optype (Add) bound to different types (tensor(float) and "
     "tensor(int64) in node ()."): "y = Add(x, i)",
    ("Fail", "Type Error: Type (tensor(float)) of output arg (y) of node () does not match expected type "
     "(tensor(int64))."): "y = Abs(i)",
    ("InvalidGraph", "Type Error: Type 'tensor(int64)' of input parameter (i) of operator (Exp) in node () is "
     "invalid."): "y = Exp(i)",
    ("Fail", "Node () Op (MatMul) [ShapeInferenceError] Incompatible dimensions for matrix multiplication"):
    "y = MatMul(x, w)",
}  # fmt: skip


@pytest.mark.parametrize(("kind", "message"), INVALID)
def test_models_that_break_a_rule(ort, native, kind, message, tmp_path):
    body = INVALID[kind, message]
    data = content(f"g (float[1, 3] x, int64[1, 3] i, float[4, 2] w) => (float[?, ?] y) {{ {body} }}")
    with pytest.raises(getattr(native, kind)) as caught:
        ort.InferenceSession(data, providers=CPU)
    assert message in str(caught.value)


def test_operators_of_nobody(ort, native):
    data = content("g (float[1] x) => (float[1] y) { y = my.dom.Bogus(x) }", opsets='"": 17, "my.dom": 1')
    with pytest.raises(native.Fail, match=r"Fatal error: my.dom:Bogus\(-1\) is not a registered function/op"):
        ort.InferenceSession(data, providers=CPU)


def test_nodes_that_fail(ort, native):
    session = load(ort, "g (float[N] x, int64[K] s) => (float[?] y) { [rs] y = Reshape(x, s) }")
    with pytest.raises(native.Fail) as caught:
        session.run(None, {"x": np.ones(5, np.float32), "s": np.array([2, 2])})
    assert "FAIL : Non-zero status code returned while running Reshape node. Name:'rs'" in str(caught.value)


def test_a_declared_output_shape_does_not_bind(ort):
    (y,) = load(ort, "g (float[N] x) => (float[7] y) { y = Add(x, x) }").run(None, {"x": X[0]})
    assert y.shape == (3,)


def test_external_data(ort, native, tmp_path):
    model = parsed("g (float[4000] x) => (float[4000] y) { y = Add(x, w) }")
    model.graph.initializer.append(numpy_helper.from_array(np.arange(4000, dtype=np.float32), "w"))
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    (y,) = ort.InferenceSession(tmp_path / "m.onnx", providers=CPU).run(None, {"x": np.ones(4000, np.float32)})
    assert y[-1] == 4000
    (tmp_path / "m.data").rename(tmp_path / "moved.data")
    with pytest.raises(native.Fail, match="External data path validation failed for initializer"):
        ort.InferenceSession(tmp_path / "m.onnx", providers=CPU)


# Providers.


@pytest.mark.parametrize("providers", [None, [], CPU, tuple(CPU), [(CPU[0], {"x": 1})], CPU * 2])
@pytest.mark.filterwarnings("ignore:Duplicate provider")
def test_the_cpu_is_always_there(ort, providers):
    session = ort.InferenceSession(content(DOUBLE), None, providers)
    assert session.get_providers() == CPU and session.get_provider_options() == {CPU[0]: {}}


def test_providers_that_are_not_available(ort):
    with pytest.warns(UserWarning, match="'CUDAExecutionProvider' is not in available provider names.Available prov"):
        session = ort.InferenceSession(content(DOUBLE), providers=["CUDAExecutionProvider", *CPU])
    assert session.get_providers() == CPU


MALFORMED = {
    "'providers' values must be either strings or (string, dict) tuples.": {"providers": [[CPU[0], {}]]},
    "'providers' should be a sequence.": {"providers": set(CPU)},
    "'providers' and 'provider_options' should be the same length if both are given.": {
        "providers": CPU,
        "provider_options": [{}, {}],
    },
    "'provider_options' values must be dicts.": {"providers": CPU, "provider_options": ["x"]},
    "Only string values for 'providers' are supported if 'provider_options' is given.": {
        "providers": [(CPU[0], {})],
        "provider_options": [{}],
    },
    "Unknown Provider Type: FooExecutionProvider": {"providers": ["FooExecutionProvider"]},
}


@pytest.mark.parametrize("message", MALFORMED)
@pytest.mark.filterwarnings("ignore:Specified provider")
def test_what_is_wrong_with_providers_is_printed_before_the_cpu_is_used(ort, message, capsys):
    given = MALFORMED[message]
    assert ort.InferenceSession(content(DOUBLE), **given).get_providers() == CPU
    printed = capsys.readouterr().out
    assert f"EP Error {message} when using {given['providers']}\nFalling back to {CPU} and retrying.\n" in printed
    with pytest.raises((ValueError, RuntimeError)) as caught:
        ort.InferenceSession(content(DOUBLE), enable_fallback=0, **given)
    assert str(caught.value) == message


@pytest.mark.filterwarnings("ignore:Specified provider")
def test_providers_change_and_fallback_switches(ort):
    session = load(ort, DOUBLE)
    with pytest.raises(RuntimeError, match="Unknown Provider Type: FooExecutionProvider"):
        session.set_providers(["FooExecutionProvider"])
    session.set_providers(CPU)
    session.disable_fallback()
    session.enable_fallback()
    np.testing.assert_equal(session.run(None, {"x": X}), [X + X])


@pytest.mark.filterwarnings("ignore:Specified 'providers'")
def test_providers_of_the_options(ort):
    options = ort.SessionOptions()
    assert not options.has_providers()
    options.add_provider(CPU[0], {})
    assert options.has_providers() and ort.InferenceSession(content(DOUBLE), options).get_providers() == CPU
    assert ort.InferenceSession(content(DOUBLE), options, providers=CPU).get_providers() == CPU
    chosen = ort.SessionOptions()
    chosen.add_provider_for_devices([d for d in ort.get_ep_devices() if d.ep_name == CPU[0]], {})
    assert ort.InferenceSession(content(DOUBLE), chosen).get_providers() == CPU
    chosen.set_provider_selection_policy(ort.OrtExecutionProviderDevicePolicy.PREFER_CPU)
    assert ort.InferenceSession(content(DOUBLE), chosen).get_providers() == CPU


# Options.


def test_defaults_of_options(ort):
    options, run = ort.SessionOptions(), ort.RunOptions()
    assert options.graph_optimization_level == ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    assert options.execution_mode is not None and options.profile_file_prefix == "onnxruntime_profile_"
    assert (options.intra_op_num_threads, options.log_severity_level, options.logid) == (0, -1, "")
    assert options.enable_mem_pattern and options.use_per_session_threads and not options.enable_profiling
    assert (run.log_severity_level, run.logid, run.terminate, run.only_execute_path_to_fetches) == (
        -1,
        "",
        False,
        False,
    )


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("intra_op_num_threads", "2"), ("intra_op_num_threads", 2.0), ("inter_op_num_threads", None),
     ("graph_optimization_level", 99), ("execution_mode", 0)],
)  # fmt: skip
def test_options_of_the_wrong_type(ort, name, wrong):
    with pytest.raises(TypeError, match="incompatible function arguments"):
        setattr(ort.SessionOptions(), name, wrong)


def test_options_that_are_taken(ort):
    options = ort.SessionOptions()
    options.intra_op_num_threads = np.int64(1)
    options.graph_optimization_level = ort.GraphOptimizationLevel(0)
    options.execution_mode = ort.ExecutionMode.ORT_PARALLEL
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.intra_op.allow_spinning", "1")
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "1"
    session = load(ort, DOUBLE, options)
    np.testing.assert_equal(session.run(None, {"x": X}), [X + X])
    kept = session.get_session_options()
    assert kept is not options and kept.intra_op_num_threads == 1
    np.testing.assert_equal(load(ort, DOUBLE, options).run(None, {"x": X}), [X + X])


def test_options_refuse_what_they_do_not_know(ort):
    options, run = ort.SessionOptions(), ort.RunOptions()
    with pytest.raises(AttributeError):
        options.foo = 1
    with pytest.raises(RuntimeError, match="SessionOptions does not have configuration with key: nope"):
        options.get_session_config_entry("nope")
    with pytest.raises(RuntimeError, match="RunOptions does not have configuration with key: nope"):
        run.get_run_config_entry("nope")
    with pytest.raises(TypeError, match="incompatible function arguments"):
        options.add_session_config_entry("a", 1)
    with pytest.raises(TypeError, match="cannot pickle"):
        copy.deepcopy(options)
    with pytest.raises(AttributeError, match="'dict' object has no attribute 'has_providers'"):
        ort.InferenceSession(content(DOUBLE), {"a": 1}, providers=CPU)


def test_enumerations(ort):
    level = ort.GraphOptimizationLevel
    assert (repr(level(99)), str(level(99))) == (
        "<GraphOptimizationLevel.ORT_ENABLE_ALL: 99>",
        "GraphOptimizationLevel.ORT_ENABLE_ALL",
    )
    assert level.ORT_ENABLE_ALL == 99 == int(level.ORT_ENABLE_ALL) == level.ORT_ENABLE_ALL.value
    assert level.ORT_ENABLE_ALL.name == "ORT_ENABLE_ALL" and level(5).name == "???"
    assert list(level.__members__)[0] == "ORT_DISABLE_ALL" and hash(level(1)) == hash(level.ORT_ENABLE_BASIC)
    for wrong in (lambda: list(level), lambda: level["ORT_ENABLE_ALL"], lambda: level(1) < 2):
        with pytest.raises(TypeError):
            wrong()


@pytest.mark.parametrize("how", ["name", "denotation"])
def test_free_dimensions_get_sizes(ort, native, how):
    model = parsed(DOUBLE)
    model.graph.input[0].type.tensor_type.shape.dim[0].denotation = "BATCH"
    options = ort.SessionOptions()
    getattr(options, f"add_free_dimension_override_by_{how}")({"name": "N", "denotation": "BATCH"}[how], 2)
    options.add_free_dimension_override_by_name("unknown", 7)
    session = ort.InferenceSession(model.SerializeToString(), options, providers=CPU)
    assert session.get_inputs()[0].shape == session.get_outputs()[0].shape == [2, 3]
    np.testing.assert_equal(session.run(None, {"x": X}), [X + X])
    with pytest.raises(native.InvalidArgument, match="index: 0 Got: 1 Expected: 2"):
        session.run(None, {"x": X[:1]})


def test_the_optimized_model_is_written(ort, tmp_path):
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    load(ort, "g (float[N, 3] x) => (float[N, 3] y) { t = Identity(x)\n y = Add(t, t) }", options)
    written = onnx.load(tmp_path / "optimized.onnx")
    assert [node.op_type for node in written.graph.node] == ["Add"]
    session = ort.InferenceSession(tmp_path / "optimized.onnx", providers=CPU)
    np.testing.assert_equal(session.run(None, {"x": X}), [X + X])


def test_initializers_are_replaced(ort, tmp_path):
    model = parsed("g (float[300] x) => (float[300] y) { y = Add(x, w) }")
    model.graph.initializer.append(numpy_helper.from_array(np.full(300, 4, np.float32), "w"))
    x, w = np.zeros(300, np.float32), value(ort, np.full(300, 5, np.float32))
    options = ort.SessionOptions()
    options.add_initializer("w", w)
    assert ort.InferenceSession(model.SerializeToString(), options, providers=CPU).run(None, {"x": x})[0][0] == 5
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    data = (tmp_path / "m.data").read_bytes()
    (tmp_path / "m.data").unlink()
    external, memory = ort.SessionOptions(), ort.SessionOptions()
    external.add_external_initializers(["w"], [w])
    memory.add_external_initializers_from_files_in_memory(["m.data"], [data], [len(data)])
    for options, expected in ((external, 5), (memory, 4)):
        session = ort.InferenceSession((tmp_path / "m.onnx").read_bytes(), options, providers=CPU)
        assert session.run(None, {"x": x})[0][0] == expected


def test_external_initializers_in_a_folder_and_beside_the_optimized_model(ort, tmp_path):
    model = parsed("g (float[300] x) => (float[300] y) { y = Add(x, w) }")
    model.graph.initializer.append(numpy_helper.from_array(np.full(300, 4, np.float32), "w"))
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    options, x = ort.SessionOptions(), np.zeros(300, np.float32)
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(tmp_path))
    session = ort.InferenceSession((tmp_path / "m.onnx").read_bytes(), options, providers=CPU)
    assert session.run(None, {"x": x})[0][0] == 4
    options, key = ort.SessionOptions(), "session.optimized_model_external_initializers"
    options.optimized_model_filepath = str(tmp_path / "o.onnx")
    options.add_session_config_entry(f"{key}_file_name", "o.bin")
    options.add_session_config_entry(f"{key}_min_size_in_bytes", "100")
    ort.InferenceSession(tmp_path / "m.onnx", options, providers=CPU)
    assert (tmp_path / "o.bin").stat().st_size >= 1200
    assert ort.InferenceSession(tmp_path / "o.onnx", providers=CPU).run(None, {"x": x})[0][0] == 4


def test_the_logger_calls_back(ort):
    messages: list[tuple] = []
    ort.set_default_logger_callback(lambda *message: messages.append(message), 0)
    try:
        load(ort, DOUBLE)
        assert messages and all([type(part) for part in m] == [int, str, str, str, str] for m in messages)
        for wrong in (lambda: ort.set_default_logger_callback("no"), lambda: ort.set_default_logger_callback(print, 5)):
            with pytest.raises(RuntimeError):
                wrong()
    finally:
        ort.set_default_logger_callback(None)
        ort.set_default_logger_severity(2)


def test_arguments_about_providers_are_normalized(ort):
    normalize = importlib.import_module(
        f"{ort.__name__}.capi.onnxruntime_inference_collection"
    ).check_and_normalize_provider_args
    known = ["a", "b", "c"]
    assert normalize(None, None, known) == ([], [])
    assert normalize([("a", {1: 2}), "b"], None, known) == (["a", "b"], [{"1": "2"}, {}])
    assert normalize(["a", "b"], [{1: 2}, {}], known) == (["a", "b"], [{"1": "2"}, {}])
    for wrong in ((3, None), ([3], None), (["a"], 3), (["a", "b"], [{1: 2}])):
        with pytest.raises(ValueError):
            normalize(*wrong, known)


def test_run_options(ort, native):
    session, options = load(ort, TWO), ort.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    options.logid, options.log_severity_level, options.only_execute_path_to_fetches = "tag", 3, True
    np.testing.assert_equal(session.run(["s"], {"a": X, "b": X}, run_options=options), [X + X])
    options.terminate = True
    with pytest.raises(native.Fail, match="Exiting due to terminate flag being set to true"):
        session.run(None, {"a": X, "b": X}, options)


# Values and bindings.


def value(ort: ModuleType, array: np.ndarray):
    return ort.OrtValue.ortvalue_from_numpy(array)


def test_a_value_is_the_array_it_was_made_from(ort):
    x = X.copy()
    made = value(ort, x)
    x[0, 0] = 42
    assert made.data_ptr() == x.ctypes.data and made.numpy()[0, 0] == 42 and made.numpy().flags.writeable
    assert (made.data_type(), made.element_type(), made.shape()) == ("tensor(float)", 1, [2, 3])
    assert (made.device_name(), made.tensor_size_in_bytes(), made.is_tensor(), made.has_value()) == (
        "cpu",
        24,
        True,
        True,
    )
    assert not made.is_tensor_sequence() and not made.is_sparse_tensor()
    np.testing.assert_equal(np.asarray(made), x)
    np.testing.assert_equal(np.from_dlpack(made), x)
    np.testing.assert_equal(ort.OrtValue.from_dlpack(x).numpy(), x)


@pytest.mark.parametrize("wrong", [[1, 2], np.array(["a"]), np.array(["a"], object)])
def test_values_hold_no_strings(ort, wrong):
    with pytest.raises(RuntimeError, match="only supported from non-string numpy arrays"):
        value(ort, wrong)


def test_values_of_devices_that_are_not_there(ort):
    with pytest.raises(RuntimeError, match="Can't allocate memory on the .*device using this package of OnnxRuntime"):
        ort.OrtValue.ortvalue_from_numpy(X, "cuda", 0)
    with pytest.raises(Exception, match="^Unsupported device type: foo$") as caught:
        ort.OrtValue.ortvalue_from_numpy(X, "foo")
    assert caught.type is Exception
    with pytest.raises(ValueError, match="`Provided ortvalue` needs to be of type"):
        ort.OrtValue(X)


@pytest.mark.parametrize("element_type", [np.float32, np.dtype("float32"), "float32", 1])
def test_values_of_a_shape_and_a_type(ort, element_type):
    made = ort.OrtValue.ortvalue_from_shape_and_type([2, 3], element_type)
    assert made.data_type() == "tensor(float)" and made.shape() == [2, 3]
    made.update_inplace(X)
    np.testing.assert_equal(made.numpy(), X)
    for wrong in (np.ones(5, np.float32), np.ones(2, np.float32)):
        with pytest.raises(RuntimeError, match="does not match the size of the OrtValue"):
            made.update_inplace(wrong)


def test_values_of_types_that_numpy_lacks(ort):
    bits = np.array([0x3F80, 0], np.uint16)
    made = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, onnx.TensorProto.BFLOAT16)
    assert (made.data_type(), made.element_type()) == ("tensor(bfloat16)", 16)
    session = load(ort, "g (bfloat16[N] x) => (float[N] y) { y = Cast <to = 1> (x) }")
    np.testing.assert_equal(session.run_with_ort_values(None, {"x": made})[0].numpy(), [1, 0])


def test_runs_on_values(ort):
    session, a = load(ort, TWO), value(ort, X)
    results = session.run_with_ort_values(["p", "s"], {"a": a, "b": a})
    assert type(results) is list and all(type(result) is ort.OrtValue for result in results)
    np.testing.assert_equal([result.numpy() for result in results], [X * X, X + X])
    again = session.run_with_ort_values(None, {"a": results[0], "b": a})
    np.testing.assert_equal(again[0].numpy(), X * X + X)
    np.testing.assert_equal(session.run(["s"], {"a": a, "b": X}), [X + X])
    results[0].numpy()[:] = 1
    np.testing.assert_equal(session.run_with_ort_values(["s"], {"a": results[0], "b": a})[0].numpy(), X + 1)


def test_native_values_and_capsules(ort, native):
    session, x = load(ort, DOUBLE), X.copy()
    made = value(ort, x)._get_c_value()
    vector = session._sess.run_with_ort_values({"x": made}, ["y"], ort.RunOptions())
    assert isinstance(vector, native.OrtValueVector)
    np.testing.assert_equal(vector[0].numpy(), X + X)
    for capsule in (made.to_dlpack(), made.__dlpack__()):
        again = native.OrtValue.from_dlpack(capsule)
        assert again.data_ptr() == made.data_ptr() and again.numpy().flags.writeable
    np.testing.assert_equal(ort.OrtValue.from_dlpack(value(ort, np.array([True, False]))).numpy(), [True, False])
    device = native.OrtDevice(native.OrtDevice.cpu(), native.OrtDevice.default_memory(), 0)
    binding = native.SessionIOBinding(session._sess)
    binding.bind_ortvalue_input("x", native.OrtValue.ortvalue_from_numpy(x, device))
    binding.bind_output("y", device)
    session._sess.run_with_iobinding(binding, None)
    assert isinstance(binding.get_outputs(), native.OrtValueVector)
    np.testing.assert_equal(binding.get_outputs()[0].numpy(), X + X)


def test_values_that_are_sequences(ort):
    session = load(ort, "g (float[N] x) => (seq(float[N]) s) { s = SequenceConstruct(x, x) }")
    (made,) = session.run_with_ort_values(None, {"x": value(ort, X[0])})
    assert made.is_tensor_sequence() and made.data_type() == "seq(tensor(float))"
    with pytest.raises(RuntimeError, match="Only OrtValues that are Tensors are convertible to Numpy objects"):
        made.numpy()


def bound(ort: ModuleType, session, *outputs: str):
    binding = session.io_binding()
    for name in "ab":
        binding.bind_cpu_input(name, X)
    for name in outputs:
        binding.bind_output(name)
    return binding


def test_bound_arrays(ort):
    session = load(ort, TWO)
    binding = bound(ort, session, "p", "s")
    session.run_with_iobinding(binding)
    np.testing.assert_equal(binding.copy_outputs_to_cpu(), [X * X, X + X])
    outputs = binding.get_outputs()
    assert [type(output) for output in outputs] == [ort.OrtValue] * 2 and outputs[0].device_name() == "cpu"
    binding.clear_binding_outputs()
    binding.bind_output("s")
    session.run_with_iobinding(binding, ort.RunOptions())
    np.testing.assert_equal(binding.copy_outputs_to_cpu(), [X + X])


@pytest.mark.parametrize("element_type", [np.float32, "float32", 1])
def test_bound_memory_is_read_and_written(ort, element_type):
    session, x, s, p = load(ort, TWO), X.copy(), np.zeros_like(X), np.zeros_like(X)
    binding = session.io_binding()
    for name in "ab":
        binding.bind_input(name, "cpu", 0, element_type, x.shape, x.ctypes.data)
    binding.bind_output("s", "cpu", 0, element_type, s.shape, s.ctypes.data)
    binding.bind_output("p", device_type="cpu", element_type=element_type, shape=p.shape, buffer_ptr=p.ctypes.data)
    for _ in range(2):
        x += 1
        binding.synchronize_inputs()
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        np.testing.assert_equal([s, p], [x + x, x * x])


def test_bound_values(ort):
    session, a, s = load(ort, TWO), value(ort, X), ort.OrtValue.ortvalue_from_shape_and_type([2, 3], np.float32)
    address = s.data_ptr()
    binding = session.io_binding()
    for name in "ab":
        binding.bind_ortvalue_input(name, a)
    binding.bind_ortvalue_output("s", s)
    session.run_with_iobinding(binding)
    np.testing.assert_equal(s.numpy(), X + X)
    assert binding.get_outputs()[0].data_ptr() == s.data_ptr() == address
    vector = binding.get_outputs_as_ortvaluevector()
    assert len(vector) == 1 and vector.element_type_at(0) == 1


def test_outputs_of_another_size_each_time(ort):
    session = load(ort, DOUBLE)
    binding = session.io_binding()
    for rows in (1, 2, 0):
        binding.bind_cpu_input("x", X[:rows])
        binding.bind_output("y")
        session.run_with_iobinding(binding)
        np.testing.assert_equal(binding.copy_outputs_to_cpu(), [X[:rows] * 2])


def test_bindings_that_do_not_fit(ort):
    session = load(ort, TWO)
    with pytest.raises(RuntimeError, match="^Failed to find NodeArg with name: zz in the def list$"):
        session.io_binding().bind_cpu_input("zz", X)
    with pytest.raises(ValueError, match="`element_type` and `shape` are to be provided"):
        session.io_binding().bind_output("s", "cpu", 0, None, None, 123)
    with pytest.raises(ValueError, match="IOBinding must be used with the session that created it"):
        load(ort, TWO).run_with_iobinding(session.io_binding())
    cases = {
        "At least one output should be requested.": bound(ort, session),
        "Invalid output name: zz": bound(ort, session, "zz"),
        "Unexpected input data type. Actual: (tensor(double)) , expected: (tensor(float))": bound(ort, session, "s"),
        "Got invalid dimensions for input: a for the following indices": bound(ort, session, "s"),
        "but the computed output shape for this run is {2,3}": bound(ort, session),
    }
    names = list(cases)
    cases[names[2]].bind_cpu_input("a", X.astype(float))
    cases[names[3]].bind_cpu_input("a", X[:, :2])
    cases[names[4]].bind_ortvalue_output("s", ort.OrtValue.ortvalue_from_shape_and_type([5, 3], np.float32))
    for message, binding in cases.items():
        with pytest.raises(RuntimeError) as caught:
            session.run_with_iobinding(binding)
        assert str(caught.value).startswith("Error in execution: ") and message in str(caught.value)


# The rest of the session.


def test_asynchronous_runs(ort):
    session, done, got = load(ort, TWO), threading.Event(), []

    def callback(results, data, message):
        got.append((results, data, message))
        done.set()

    session.run_async(["s"], {"a": X, "b": X}, callback, "data")
    assert done.wait(20) and got[0][1:] == ("data", "")
    np.testing.assert_equal(got[0][0], [X + X])
    done.clear()
    session.run_async(["s"], {"a": X[:, :2], "b": X}, callback, None)
    assert done.wait(20) and got[1][:2] == ([], None)
    assert got[1][2].startswith("Got invalid dimensions for input: a")
    with pytest.raises(RuntimeError, match="Unable to handle object of type <class 'int'>"):
        session.run_async(["s"], {"a": 1, "b": X}, callback, None)


def test_profiles_open_in_trace_viewers(ort, tmp_path):
    assert load(ort, DOUBLE).end_profiling() == ""
    options = ort.SessionOptions()
    options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "prof")
    session = load(ort, DOUBLE, options)
    session.run(None, {"x": X})
    path = session.end_profiling()
    assert path.startswith(str(tmp_path / "prof_")) and path.endswith(".json")
    events = json.loads(Path(path).read_text())
    assert {event["ph"] for event in events} == {"X"} and {event["cat"] for event in events} == {"Session", "Node"}
    assert all(event.keys() >= {"cat", "pid", "tid", "dur", "ts", "ph", "name", "args"} for event in events)
    (node,) = (event for event in events if event["name"].endswith("_kernel_time"))
    assert (node["name"], node["args"]["op_name"], node["args"]["provider"]) == ("Add_0_kernel_time", "Add", CPU[0])
    assert node["args"]["output_type_shape"] == [{"float": [2, 3]}] and node["args"]["output_size"] == "24"
    assert {"model_run", "SequentialExecutor::Execute"} <= {event["name"] for event in events}
    assert isinstance(session.get_profiling_start_time_ns(), int)


def test_sessions_can_be_subclassed_and_made_again(ort):
    class Again(ort.InferenceSession):
        def __init__(self, data, **keywords):
            super().__init__(data, providers=CPU, **keywords)
            self.data = data

        def __getstate__(self):
            return {"data": self.data}

        def __setstate__(self, state):
            self.__init__(state["data"])

    made = copy.copy(Again(content(DOUBLE)))
    np.testing.assert_equal(made.run(None, {"x": X}), [X + X])
    with pytest.raises(TypeError, match="cannot pickle"):
        copy.deepcopy(load(ort, DOUBLE))


def test_assignment_and_memory(ort, native):
    options = ort.SessionOptions()
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    session = load(ort, DOUBLE, options)
    with pytest.raises(native.Fail, match="'session.record_ep_graph_assignment_info' must be set to \"1\""):
        load(ort, DOUBLE).get_provider_graph_assignment_info()
    assert len(load(ort, TWO, options).get_provider_graph_assignment_info()) == 2
    (subgraph,) = session.get_provider_graph_assignment_info()
    assert (subgraph.ep_name, [node.op_type for node in subgraph.get_nodes()]) == (CPU[0], ["Add"])
    (memory,) = session.get_input_memory_infos()
    assert (memory.name, memory.device_id, str(memory.mem_type)) == ("Cpu", 0, "OrtMemType.DEFAULT")
    assert session.get_tuning_results() == [] and session.set_ep_dynamic_options({"a": "b"}) is None


# The module.


def test_exceptions_and_where_they_are_found(ort, native):
    for name in ("Fail", "InvalidArgument", "NoSuchFile", "InvalidProtobuf", "NotImplemented", "InvalidGraph", "EPFail",
                 "RuntimeException", "ModelLoaded", "EngineError", "NoModel", "NotFound"):  # fmt: skip
        kind = getattr(native, name)
        assert kind.__mro__[1:] == (Exception, BaseException, object)
        assert f"{kind.__module__}.{kind.__name__}" == f"onnxruntime.capi.onnxruntime_pybind11_state.{name}"
    assert importlib.import_module(f"{ort.__name__}.capi._pybind_state").InvalidGraph is native.InvalidGraph


def test_what_the_module_says(ort):
    assert ort.__version__ == ort.version == ort.get_version_string() and ort.__version__.split(".")[0] == "1"
    assert ort.get_device() == "CPU" and ort.package_name == "onnxruntime" and not ort.has_collective_ops()
    assert ort.get_available_providers()[-1] == CPU[0] and "CoreMLExecutionProvider" in ort.get_all_providers()
    assert ort.get_build_info().startswith("ORT Build Info: ")
    for quiet in (ort.disable_telemetry_events, ort.enable_telemetry_events, lambda: ort.set_seed(1), ort.preload_dlls):
        assert quiet() is None
    with pytest.raises(RuntimeError, match="Invalid logging severity"):
        ort.set_default_logger_severity(9)


def test_native_plugins_that_are_not_there(ort, native):
    with pytest.raises(native.Fail, match="Failed to load library /nonexistent.so with error"):
        ort.register_execution_provider_library("foo", "/nonexistent.so")
    with pytest.raises(native.Fail, match="Execution provider library: foo was not registered"):
        ort.unregister_execution_provider_library("foo")
    with pytest.raises(native.Fail, match="Failed to load library /nope.so"):
        ort.SessionOptions().register_custom_ops_library("/nope.so")


def test_devices(ort):
    device = ort.OrtDevice.make("cpu", 0)
    assert (device.device_id(), device.device_type(), device.device_mem_type(), device.device_vendor_id()) == (0,) * 4
    assert ort.OrtDevice.make("cuda", 1).device_id() == 1
    memory = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    assert (memory.name, memory.device_id) == ("Cpu", 0)
    assert ort.OrtArenaCfg(0, -1, -1, -1) is not None
    (cpu,) = (d for d in ort.get_ep_devices() if d.ep_name == CPU[0])
    assert cpu.device.type == ort.OrtHardwareDeviceType.CPU


def test_sparse_tensors(ort):
    where = ort.OrtDevice.make("cpu", 0)
    values, positions = np.array([1, 2], np.float32), np.array([1, 5])
    made = ort.SparseTensor.sparse_coo_from_numpy(np.array([3, 3]), values, positions, where)
    assert (made.data_type(), str(made.format())) == ("sparse_tensor(float)", "OrtSparseFormat.ORT_SPARSE_COO")
    assert list(made.dense_shape()) == [3, 3] and made.device_name() == "cpu"
    np.testing.assert_equal([made.values(), made.as_coo_view().indices()], [values, positions])
    assert not made.values().flags.writeable and not made.as_coo_view().indices().flags.writeable
    csr = ort.SparseTensor.sparse_csr_from_numpy
    words = csr(np.array([2, 9]), np.array(["a", "b"]), positions, np.array([0, 1, 2]), where)
    assert words.data_type() == "sparse_tensor(string)" and list(words.values()) == ["a", "b"]
    np.testing.assert_equal(words.as_csrc_view().inner(), positions)
    with pytest.raises(RuntimeError, match="Outer index count must be rows \\+ 1 or zero. Got: 2 rows: 2"):
        csr(np.array([2, 9]), values, positions, positions, where)
    held = ort.OrtValue.ort_value_from_sparse_tensor(made)
    assert held.is_sparse_tensor() and not held.is_tensor() and held.data_type() == "sparse_tensor(float)"


def test_adapters(ort, tmp_path):
    adapter = ort.AdapterFormat()
    adapter.set_adapter_version(3)
    adapter.set_model_version(4)
    adapter.set_parameters({"w": value(ort, np.ones(2, np.float32)), "other": value(ort, np.arange(6).reshape(2, 3))})
    adapter.export_adapter(str(tmp_path / "a.onnx_adapter"))
    for name in MODULES:  # each reads what the other wrote
        read = pytest.importorskip(name).AdapterFormat.read_adapter(str(tmp_path / "a.onnx_adapter"))
        assert (read.get_format_version(), read.get_adapter_version(), read.get_model_version()) == (1, 3, 4)
        np.testing.assert_equal(read.get_parameters()["other"].numpy(), np.arange(6).reshape(2, 3))
    adapter.set_parameters({"w": value(ort, np.ones(2, np.float32))})
    adapter.export_adapter(str(tmp_path / "a.onnx_adapter"))
    loaded, options = ort.LoraAdapter(), ort.RunOptions()
    loaded.Load(str(tmp_path / "a.onnx_adapter"))
    options.add_active_adapter(loaded)
    (y,) = load(ort, DEFAULT).run(None, {"x": np.zeros(2, np.float32)}, options)
    np.testing.assert_equal(y, [1, 1])


def test_compiled_models_load(ort, tmp_path):
    compiler = ort.ModelCompiler(ort.SessionOptions(), content(DOUBLE))
    compiler.compile_to_file(str(tmp_path / "compiled.onnx"))
    for source in (tmp_path / "compiled.onnx", compiler.compile_to_bytes()):
        np.testing.assert_equal(ort.InferenceSession(source, providers=CPU).run(None, {"x": X}), [X + X])
    with pytest.raises(TypeError, match="Unable to load from type '<class 'int'>'"):
        ort.ModelCompiler(ort.SessionOptions(), 3)


def test_example_models(ort):
    datasets = importlib.import_module(f"{ort.__name__}.datasets")
    session = ort.InferenceSession(datasets.get_example("mul_1.onnx"), providers=CPU)
    (y,) = session.run(None, {session.get_inputs()[0].name: np.ones((3, 2), np.float32)})
    np.testing.assert_equal(y, [[1, 2], [3, 4], [5, 6]])
    with pytest.raises(FileNotFoundError):
        datasets.get_example("zz")
