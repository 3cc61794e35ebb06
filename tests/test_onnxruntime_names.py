"""Are the parts beside sessions as in onnxruntime: exceptions, devices, adapters? Every test runs on both modules."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
from onnxruntime_modules import CPU, DEFAULT, DOUBLE, MODULES, X, content, load, parsed, value

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


def test_a_compiler_that_cannot_write(ort, native, tmp_path):
    model, flags = tmp_path / "m.onnx", ort.OrtCompileApiFlags
    model.write_bytes(content(DOUBLE))

    def compiler(source=model, **keywords):
        return ort.ModelCompiler(ort.SessionOptions(), source, **keywords)

    absent = compiler(tmp_path / "absent.onnx")  # told when it compiles
    with pytest.raises(native.InvalidArgument, match="Input model path does not exist"):
        absent.compile_to_file(str(tmp_path / "c.onnx"))
    with pytest.raises(native.InvalidArgument, match=r"open file .* failed: No such file or directory"):
        compiler().compile_to_file(str(tmp_path / "no" / "c.onnx"))
    with pytest.raises(native.Fail, match="exists already"):
        compiler(flags=flags.ERROR_IF_OUTPUT_FILE_EXISTS).compile_to_file(str(model))
    with pytest.raises(native.Fail, match="Unable to compile any nodes"):  # the CPU compiles none
        compiler(flags=flags.ERROR_IF_NO_NODES_COMPILED).compile_to_file(str(tmp_path / "c.onnx"))
    with pytest.raises(native.InvalidArgument, match="output_dir is not a valid directory"):
        compiler().set_ep_context_binary_information("no", "m")
    with pytest.raises(TypeError, match=r"set_ep_context_data_write_func\(\): incompatible"):
        compiler().set_ep_context_data_write_func(3)
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]


def test_a_model_that_is_compiled_or_optimized_onto_itself(ort, tmp_path):
    """Whoever runs the old one still can."""
    model = tmp_path / "m.onnx"
    model.write_bytes(content(DOUBLE))
    session = ort.InferenceSession(model, providers=CPU)
    ort.ModelCompiler(ort.SessionOptions(), model).compile_to_file(str(model))
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(model)
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    for each in (session, ort.InferenceSession(model, options, providers=CPU), ort.InferenceSession(model)):
        np.testing.assert_equal(each.run(None, {"x": X}), [X + X])
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]


def test_a_compiler_moves_weights_to_a_file(ort, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "g (float[2] x) => (float[2] y) <float[2] w = {3, 4}> { y = Mul(x, w) }"
    (tmp_path / "m.onnx").write_bytes(content(text))
    keywords = {"external_initializers_file_path": "w.bin", "external_initializers_size_threshold": 1}
    ort.ModelCompiler(ort.SessionOptions(), "m.onnx", **keywords).compile_to_file("c.onnx")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.onnx", "m.onnx", "w.bin"]
    x = np.array([1, 2], np.float32)
    np.testing.assert_equal(ort.InferenceSession("c.onnx", providers=CPU).run(None, {"x": x}), [[3, 8]])


def test_example_models(ort):
    datasets = importlib.import_module(f"{ort.__name__}.datasets")
    session = ort.InferenceSession(datasets.get_example("mul_1.onnx"), providers=CPU)
    (y,) = session.run(None, {session.get_inputs()[0].name: np.ones((3, 2), np.float32)})
    np.testing.assert_equal(y, [[1, 2], [3, 4], [5, 6]])
    with pytest.raises(FileNotFoundError):
        datasets.get_example("zz")


REFUSED = {  # message: kind of exception, and the call
    "set_seed(): incompatible": (TypeError, lambda ort: ort.set_seed("x")),
    "set_default_logger_verbosity(): incompatible": (TypeError, lambda ort: ort.set_default_logger_verbosity("x")),
    "set_global_thread_pool_sizes(): incompatible": (TypeError, lambda ort: ort.set_global_thread_pool_sizes("x")),
    "register_execution_provider_library(): incompatible": (
        TypeError,
        lambda ort: ort.register_execution_provider_library("x", 3),
    ),
    "add_initializer(): incompatible": (
        TypeError,
        lambda ort: ort.SessionOptions().add_initializer(3, value(ort, X)),
    ),
    "add_provider(): incompatible": (TypeError, lambda ort: ort.SessionOptions().add_provider(CPU[0], {"a": 1})),
    "run_async(): incompatible": (
        TypeError,
        lambda ort: load(ort, DOUBLE).run_async(["y"], {"x": X}, 3, None),
    ),
    "compile_to_stream(): incompatible": (
        TypeError,
        lambda ort: ort.ModelCompiler(ort.SessionOptions(), content(DOUBLE)).compile_to_stream(3),
    ),
    "The provided Python object must be an OrtValue": (
        RuntimeError,
        lambda ort: ort.SessionOptions().add_initializer("a", 3),
    ),
    "Unknown Provider Type: Foo": (RuntimeError, lambda ort: ort.SessionOptions().add_provider("Foo", {})),
    "callback must be a callable": (RuntimeError, lambda ort: ort.set_default_logger_callback(3)),
    "Invalid OrtArenaCfg option: zzz": (RuntimeError, lambda ort: ort.OrtArenaCfg({"zzz": 5})),
    "This OrtValue does not contain SparseTensor. Check data_type() value.": (
        RuntimeError,
        lambda ort: value(ort, X)._ortvalue.as_sparse_tensor(),
    ),
    "This sparse tensor does not contain CSR(C) format": (RuntimeError, lambda ort: coo(ort).as_csrc_view()),
    "This sparse tensor does not contain BlockSparse format": (
        RuntimeError,
        lambda ort: coo(ort).as_blocksparse_view(),
    ),
    "Cuda is not available in this build": (RuntimeError, lambda ort: coo(ort).to_cuda(ort.OrtDevice.make("cpu", 0))),
    "Unable to create OrtValue from the given python object": (
        RuntimeError,
        lambda ort: load(ort, DOUBLE).io_binding().bind_cpu_input("x", [1.0]),
    ),
    "": (RuntimeError, lambda ort: ort.LoraAdapter().Load("/nonexistent")),
    "does not appear to be a valid lora parameter format": (
        RuntimeError,
        lambda ort: ort.AdapterFormat.read_adapter(__file__),
    ),
}


def coo(ort):
    """A sparse tensor by coordinates."""
    return ort.SparseTensor.sparse_coo_from_numpy([3, 3], X[0], np.array([1, 5, 6]), ort.OrtDevice.make("cpu", 0))


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_fit_is_refused_in_the_same_words(ort, message):
    kind, call = REFUSED[message]
    with pytest.raises(kind) as caught:
        call(ort)
    assert type(caught.value) is kind and message in str(caught.value)


def test_providers_that_options_cannot_add(ort, native):
    with pytest.raises(native.InvalidArgument, match="Failed to add provider of type 'XnnpackExecutionProvider'"):
        ort.SessionOptions().add_provider("XnnpackExecutionProvider", {})


def test_memory_of_inputs_and_outputs(ort):
    session = load(ort, DOUBLE)
    for (info,) in (session.get_input_memory_infos(), session.get_output_memory_infos()):
        assert (info.name, info.device_id, int(info.allocator_type), int(info.mem_type)) == ("Cpu", 0, 1, 0)


@pytest.mark.filterwarnings("ignore:onnx.version is deprecated")  # the genuine backend imports it
def test_operator_sets_of_the_backend(ort):
    backend = importlib.import_module(f"{ort.__name__}.backend.backend").OnnxRuntimeBackend
    assert backend.allowReleasedOpsetsOnly and backend.is_opset_supported(parsed(DOUBLE)) == (True, "")
    fine, reason = backend.is_opset_supported(parsed(DOUBLE, opsets='"": 99'))
    assert not fine and reason.endswith("Got Domain 'ai.onnx' version '99'.")


def test_strings_cannot_be_bound(ort):
    session = load(ort, "g (string[N] x) => (string[N] y) { y = Identity(x) }")
    with pytest.raises(RuntimeError, match="^Only binding non-string Tensors is currently supported$"):
        session.io_binding().bind_cpu_input("x", np.array(["a"], object))
