"""Are models and providers taken and refused as onnxruntime does? Every test runs on both modules."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnxruntime_modules import CPU, DOUBLE, X, content, load, parsed

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


def test_operator_sets_of_the_future(ort, native):
    with pytest.raises(native.Fail, match="Current official support for domain ai.onnx is till opset 28") as caught:
        ort.InferenceSession(content(DOUBLE, opsets='"": 99'), providers=CPU)
    assert "ONNX Runtime only *guarantees* support for models stamped with official released" in str(caught.value)


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
    with pytest.raises(native.Fail, match="External data path validation failed for initializer: w. Error: ") as caught:
        ort.InferenceSession(tmp_path / "m.onnx", providers=CPU)
    assert str(caught.value).endswith(f'External data path does not exist: "{tmp_path / "m.data"}"')


def test_external_data_of_bytes_lie_in_the_working_directory(ort, native, tmp_path, monkeypatch):
    model = parsed("g (float[300] x) => (float[300] y) { y = Add(x, w) }")
    model.graph.initializer.append(numpy_helper.from_array(np.arange(300, dtype=np.float32), "w"))
    (tmp_path / "inner").mkdir()
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    data = (tmp_path / "m.onnx").read_bytes()
    monkeypatch.chdir(tmp_path)
    (y,) = ort.InferenceSession(data, providers=CPU).run(None, {"x": np.ones(300, np.float32)})
    np.testing.assert_equal(y, np.arange(1, 301))
    monkeypatch.chdir(tmp_path / "inner")
    with pytest.raises(native.Fail, match="initializer: w. Error: External data path for model loaded from bytes esca"):
        ort.InferenceSession(data, providers=CPU)
    for tensor in model.graph.initializer:
        tensor.external_data[0].value = "../m.data"
    with pytest.raises(native.Fail, match="External data path validation failed for initializer: w"):
        ort.InferenceSession(model.SerializeToString(), providers=CPU)


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
