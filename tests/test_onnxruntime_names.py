"""Are the parts beside sessions as in onnxruntime: exceptions, devices, adapters? Every test runs on both modules."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
from onnxruntime_modules import CPU, DEFAULT, DOUBLE, MODULES, X, content, load, value

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
