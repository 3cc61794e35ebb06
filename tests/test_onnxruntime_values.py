"""Do values, bindings and the rest of a session behave as in onnxruntime? Every test runs on both modules."""

from __future__ import annotations

import copy
import json
import threading
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import pytest
from onnxruntime_modules import CPU, DOUBLE, TWO, X, content, load, value


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
