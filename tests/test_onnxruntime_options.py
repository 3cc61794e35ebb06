"""Do options have the effects that they have in onnxruntime? Every test runs on both modules."""

from __future__ import annotations

import copy
import importlib
import weakref

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnxruntime_modules import CPU, DOUBLE, TWO, X, content, load, parsed, value

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


def test_lengths_of_configuration_entries(ort):
    for entries in (ort.SessionOptions().add_session_config_entry, ort.RunOptions().add_run_config_entry):
        entries("k" * 1024, "v" * 8192)
        for key in ("", "k" * 1025):
            with pytest.raises(RuntimeError, match="Config key is empty or longer than maximum length 1024"):
                entries(key, "v")
        with pytest.raises(RuntimeError, match="Config value is longer than maximum length: 8192"):
            entries("k", "v" * 8193)


@pytest.mark.parametrize("options", ["text", {"a": 1}, 5])
def test_what_is_no_options_is_refused(ort, options):
    with pytest.raises(TypeError, match="incompatible constructor arguments"):
        ort.InferenceSession(content(DOUBLE), options)
    assert ort.InferenceSession(content(DOUBLE), {}).get_providers()


def test_the_cpu_can_be_forbidden(ort):
    options = ort.SessionOptions()
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    with pytest.raises(Exception, match="INVALID_ARGUMENT : Conflicting session configuration"):
        load(ort, DOUBLE, options)
    with pytest.raises(Exception, match="nodes that are assigned to the default CPU EP, but fallback"):
        ort.InferenceSession(content(DOUBLE), options)


def test_weak_references(ort):
    session = load(ort, DOUBLE)
    for made in (ort.SessionOptions(), ort.RunOptions(), session, session.get_inputs()[0], session.get_modelmeta()):
        assert weakref.ref(made)() is made


def test_attributes_that_subclasses_read(ort):
    session = load(ort, DOUBLE)
    assert session._outputs_meta is session.get_outputs() and session._inputs_meta is session.get_inputs()
    assert session._model_meta.graph_name == session.get_modelmeta().graph_name
    assert session._model_path is None and session._model_bytes == content(DOUBLE)


def test_the_optimized_model_cannot_be_written(ort, tmp_path):
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "nowhere" / "model.onnx")
    with pytest.raises(Exception, match="SystemError : 2"):
        load(ort, DOUBLE, options)


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
