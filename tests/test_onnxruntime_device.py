"""Where do the values of `ep.onnxruntime` live, and do many threads get what one gets?"""

from __future__ import annotations

import copy
import multiprocessing
import threading

import numpy as np
import onnx
import pytest
from onnx import parser

import ep.onnxruntime as ort
from ep.onnxruntime import providers, recent
from ep.onnxruntime.capi import onnxruntime_pybind11_state as native

MODEL = (
    '<ir_version: 8, opset_import: ["": 17]> g (float[N] x, float[N] state) => (float[N] y, float[N] next) '
    "{ next = Add(state, x)\n y = Mul(next, x) }"
)
X = np.arange(1, 5, dtype=np.float32)


@pytest.fixture
def session(accelerator: str) -> ort.InferenceSession:
    """A model with a state that goes from run to run."""
    name = f"{accelerator.upper()}ExecutionProvider"
    return ort.InferenceSession(parser.parse_model(MODEL).SerializeToString(), providers=[name])


class Transfers:
    """Counts arrays of the host that enter runs, and arrays of the device that leave for the host."""

    def __init__(self, session: ort.InferenceSession, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered = self.left = 0
        core, counts = session._sess, self
        backend = copy.copy(core._provider.backend)
        evaluate, to_numpy = core._session.evaluate, backend.to_numpy

        def entering(feeds):
            counts.entered += sum(not backend.is_array(value) for value in feeds.values())
            return evaluate(feeds)

        def leaving(array):
            counts.left += 1
            return to_numpy(array)

        object.__setattr__(backend, "to_numpy", leaving)
        monkeypatch.setattr(core._session, "evaluate", entering)
        monkeypatch.setattr(core._provider, "backend", backend)


def held(value: ort.OrtValue):
    return value._get_c_value()._held


def test_a_state_stays_on_the_device_from_run_to_run(session, monkeypatch):
    count = Transfers(session, monkeypatch)
    x, state = (ort.OrtValue.ortvalue_from_numpy(array) for array in (X, np.zeros_like(X)))
    for _ in range(3):
        y, state = session.run_with_ort_values(None, {"x": x, "state": state})
        assert session._sess._provider.backend.is_array(held(state))
    assert (count.entered, count.left) == (1 + 3, 0)  # the first state once, and x for each run
    np.testing.assert_equal(state.numpy(), 3 * X)
    np.testing.assert_equal(y.numpy(), 3 * X * X)
    assert count.left == 2
    assert state.numpy() is state.numpy() and count.left == 2  # it has moved


def test_a_binding_hands_over_the_device_s_own_array(session, monkeypatch):
    count = Transfers(session, monkeypatch)
    first, second = session.io_binding(), session.io_binding()
    first.bind_cpu_input("x", X)
    first.bind_cpu_input("state", X)
    first.bind_output("next")
    session.run_with_iobinding(first)
    (state,) = first.get_outputs()
    address = state.data_ptr()
    entered = count.entered
    second.bind_ortvalue_input("state", state)
    second.bind_ortvalue_input("x", state)
    second.bind_output("y", state.device_name())
    session.run_with_iobinding(second)
    assert state.data_ptr() == address and count.entered == entered  # nothing moved
    np.testing.assert_equal(second.copy_outputs_to_cpu(), [(2 * X + 2 * X) * 2 * X])
    assert session._sess._provider.backend.is_array(held(state))


def test_writing_into_a_result_reaches_the_next_run_and_no_other_value(session):
    x = ort.OrtValue.ortvalue_from_numpy(X)
    y, state = session.run_with_ort_values(None, {"x": x, "state": x})
    (_, later) = session.run_with_ort_values(None, {"x": x, "state": state})
    state.numpy()[:] = 100
    (_, written) = session.run_with_ort_values(None, {"x": x, "state": state})
    np.testing.assert_equal(later.numpy(), 3 * X)
    np.testing.assert_equal(written.numpy(), 100 + X)
    y.update_inplace(X + 0.5)
    np.testing.assert_equal(y.numpy(), X + 0.5)


def test_later_writes_into_a_feed_reach_no_result(session):
    fed = X.copy()
    value = ort.OrtValue.ortvalue_from_numpy(fed)
    y, state = session.run_with_ort_values(None, {"x": value, "state": value})
    results = session.run(None, {"x": fed, "state": fed})
    fed[:] = 9
    for got in ([y.numpy(), state.numpy()], results):
        np.testing.assert_equal(got, [2 * X * X, 2 * X])


def test_a_device_of_another_session_is_no_obstacle():
    pytest.importorskip("jax")
    pytest.importorskip("mlx")
    content = parser.parse_model(MODEL).SerializeToString()
    jax, mlx = (ort.InferenceSession(content, providers=[f"{n}ExecutionProvider"]) for n in ("JAX", "MLX"))
    x = ort.OrtValue.ortvalue_from_numpy(X)
    (state,) = jax.run_with_ort_values(["next"], {"x": x, "state": x})
    (state,) = mlx.run_with_ort_values(["next"], {"x": x, "state": state})
    np.testing.assert_equal(state.numpy(), 3 * X)


def test_eight_threads_get_what_one_gets(session):
    expected = {k: session.run(None, {"x": X + k, "state": X}) for k in range(8)}
    wrong: list[int] = []

    def work(k: int) -> None:
        for _ in range(25):
            results = session.run(None, {"x": X + k, "state": X})
            values = session.run_with_ort_values(
                None, {name: ort.OrtValue.ortvalue_from_numpy(a) for name, a in (("x", X + k), ("state", X))}
            )
            for got in (results, [value.numpy() for value in values]):
                if not all(np.array_equal(a, b) for a, b in zip(got, expected[k], strict=True)):
                    wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# Providers.


def test_the_provider_that_is_asked_for_runs(session, accelerator):
    assert session.get_providers() == [f"{accelerator.upper()}ExecutionProvider", "CPUExecutionProvider"]
    assert session._sess._session.providers[0] == accelerator
    assert session.get_providers()[0] in ort.get_available_providers()


def test_the_first_available_provider_runs_everything():
    content = parser.parse_model(MODEL).SerializeToString()
    for first in ort.get_available_providers():
        session = ort.InferenceSession(content, providers=[first], provider_options=[{}])
        assert session.get_providers()[0] == first
        np.testing.assert_equal(session.run(["next"], {"x": X, "state": X}), [2 * X])


@pytest.mark.parametrize("device", ["host", "jax", "mlx"])
def test_the_environment_says_what_the_cpu_stands_for(device, monkeypatch):
    pytest.importorskip({"host": "numpy"}.get(device, device))
    monkeypatch.setenv(providers.DEVICE, device)
    session = ort.InferenceSession(parser.parse_model(MODEL).SerializeToString())
    assert session.get_providers() == ["CPUExecutionProvider"]
    assert session._sess._session.providers[0] == device


def test_foreign_providers_become_the_nearest_of_ours_and_say_so_once(monkeypatch):
    pytest.importorskip("jax")
    monkeypatch.setattr(providers, "nearest", {"CUDAExecutionProvider": providers.JAX}.get)
    monkeypatch.setattr(providers, "_mapped", set())
    said: list[tuple] = []
    ort.set_default_logger_callback(lambda *message: said.append(message))
    try:
        for _ in range(2):
            session = ort.InferenceSession(
                parser.parse_model(MODEL).SerializeToString(),
                providers=[("CUDAExecutionProvider", {"device_id": 0, "cudnn_conv_algo_search": "EXHAUSTIVE"})],
            )
            assert session.get_providers() == ["JAXExecutionProvider", "CPUExecutionProvider"]
    finally:
        ort.set_default_logger_callback(None)
    (message,) = said
    assert message[0] == 2 and "JAXExecutionProvider runs this session" in message[4]


def test_options_of_our_providers_reach_them():
    pytest.importorskip("jax")
    content = parser.parse_model(MODEL).SerializeToString()
    session = ort.InferenceSession(content, providers=[("JAXExecutionProvider", {"device": "cpu", "compile": "off"})])
    assert session.get_provider_options()["JAXExecutionProvider"] == {"device": "cpu", "compile": "off"}
    with pytest.raises(native.EPFail, match="unknown option"):
        ort.InferenceSession(content, providers=[("JAXExecutionProvider", {"nope": "1"})])


def test_context_models_are_written_and_loaded(accelerator, tmp_path):
    name = f"{accelerator.upper()}ExecutionProvider"
    fixed = parser.parse_model(MODEL.replace("[N]", "[4]"))
    (tmp_path / "m.onnx").write_bytes(fixed.SerializeToString())
    options = ort.SessionOptions()
    for key, value in (("enable", "1"), ("file_path", str(tmp_path / "c.onnx")), ("embed_mode", "1")):
        options.add_session_config_entry(f"ep.context_{key}", value)
    for _ in range(2):  # each session writes it
        ort.InferenceSession(tmp_path / "m.onnx", options, providers=[name])
        assert (tmp_path / "c.onnx").read_bytes().count(b"EPContext")
        (tmp_path / "c.onnx").rename(tmp_path / "moved.onnx")
    session = ort.InferenceSession(tmp_path / "moved.onnx", providers=[(name, {"trust_native": "1"})])
    assert [(v.name, v.shape) for v in session.get_outputs()] == [("y", [4]), ("next", [4])]
    np.testing.assert_equal(session.run(None, {"x": X, "state": X}), [2 * X * X, 2 * X])


@pytest.fixture
def compiler(accelerator, tmp_path):
    """Makes a compiler for a provider that compiles, and one dimension."""

    def make(size=4, **keywords):
        options = ort.SessionOptions()
        options.add_provider(f"{accelerator.upper()}ExecutionProvider", {})
        if size:
            options.add_free_dimension_override_by_name("N", size)
        (tmp_path / "m.onnx").write_bytes(parser.parse_model(MODEL).SerializeToString())
        flags = ort.OrtCompileApiFlags.ERROR_IF_NO_NODES_COMPILED
        return ort.ModelCompiler(options, tmp_path / "m.onnx", flags=flags, **keywords)

    return make


def runs(source, accelerator):
    """Whether a compiled model gives the right results, and how many of its functions were stored."""
    chosen = {"trust_native": "1", "context.cache": "off"}
    session = ort.InferenceSession(source, providers=[(f"{accelerator.upper()}ExecutionProvider", chosen)])
    np.testing.assert_equal(session.run(None, {"x": X, "state": X}), [2 * X * X, 2 * X])
    return session._sess._session.counters.loaded


def operators(source):
    model = onnx.load(source) if not isinstance(source, bytes) else onnx.ModelProto.FromString(source)
    return {node.op_type for node in model.graph.node}


def test_a_compiler_for_a_provider_that_compiles_writes_contexts(accelerator, compiler, tmp_path):
    compiler().compile_to_file(str(tmp_path / "c.onnx"))
    assert operators(tmp_path / "c.onnx") == {"EPContext"} and (tmp_path / "c.epctx").exists()
    assert runs(tmp_path / "c.onnx", accelerator) == 1
    compiler(embed_compiled_data_into_model=True).compile_to_file(str(tmp_path / "e.onnx"))
    assert runs(tmp_path / "e.onnx", accelerator) == 1 and not (tmp_path / "e.epctx").exists()
    whole = compiler().compile_to_bytes()
    assert operators(whole) == {"EPContext"} and runs(whole, accelerator) == 1


def test_where_compiled_data_go(accelerator, compiler, tmp_path):
    (tmp_path / "out").mkdir()
    made, taken = compiler(), {}
    made.set_ep_context_binary_information(tmp_path / "out", "name.onnx")
    (tmp_path / "out" / "c.onnx").write_bytes(made.compile_to_bytes())
    assert (tmp_path / "out" / "name.epctx").exists() and runs(tmp_path / "out" / "c.onnx", accelerator) == 1

    def take(name, data):
        taken[name] = data.read(0, 7) + data.read(7)
        assert len(taken[name]) == data.size

    made.set_ep_context_data_write_func(take)
    made.compile_to_file(str(tmp_path / "w.onnx"))
    (name,) = taken
    (tmp_path / name).write_bytes(taken[name])
    assert runs(tmp_path / "w.onnx", accelerator) == 1


def test_without_shapes_a_compiled_model_holds_graphs(accelerator, compiler, tmp_path, capfd):
    compiler(size=None).compile_to_file(str(tmp_path / "c.onnx"))
    assert operators(tmp_path / "c.onnx") == {"EPContext"} and runs(tmp_path / "c.onnx", accelerator) == 0
    assert "add_free_dimension_override_by_name" in capfd.readouterr().err


# What is shared, and what crosses processes.


def test_sessions_of_the_same_small_model_share_what_was_loaded():
    content = parser.parse_model(MODEL).SerializeToString()
    one, other = (ort.InferenceSession(content) for _ in range(2))
    assert one._sess._session is other._sess._session
    options = ort.SessionOptions()
    options.add_free_dimension_override_by_name("N", 4)
    assert ort.InferenceSession(content, options)._sess._session is not one._sess._session
    recent.forget()
    assert ort.InferenceSession(content)._sess._session is not one._sess._session


def test_only_small_models_are_kept():
    assert recent.digest(b"x") and recent.digest(bytes(recent.MOST_BYTES + 1)) is None
    for key in range(3 * recent.MOST_MODELS):
        recent.shared(recent.Key(9, ("test", key)), object)
    assert 0 < len(recent._kept) <= 2 * recent.MOST_MODELS
    for key in range(3 * recent.ALL_BYTES // recent.MOST_BYTES):
        recent.shared(recent.Key(recent.MOST_BYTES, ("test", key)), object)
    assert 0 < len(recent._kept) <= 2 * recent.ALL_BYTES // recent.MOST_BYTES
    recent.forget()


@pytest.mark.parametrize(
    "value", [ort.GraphOptimizationLevel.ORT_ENABLE_BASIC, native.Fail("[ONNXRuntimeError] : 1 : FAIL : no")]
)
def test_constants_and_errors_reach_other_processes(value):
    here, there = multiprocessing.Pipe()
    here.send(value)
    again = there.recv()
    assert type(again) is type(value) and str(again) == str(value)


@pytest.mark.parametrize("device", ["jax", "mlx"])
def test_a_condition_in_memory_that_is_written_later(monkeypatch, device):
    """What was compiled for a value keeps the value, not the caller's memory."""
    pytest.importorskip(device)
    monkeypatch.setenv("EP_ONNXRUNTIME_DEVICE", device)
    text = """<ir_version: 8, opset_import: ["": 17]> g (bool[1] c, float[n] x) => (float[n] y) {
        y = If (c) <then_branch = t () => (float[n] a) { a = Add(x, x) },
                    else_branch = e () => (float[n] b) { b = Mul(x, x) }> }"""
    session = ort.InferenceSession(parser.parse_model(text).SerializeToString())
    x = np.array([3, 5], np.float32)
    for turn in range(3):
        for chosen, expected in ((True, x + x), (False, x * x)):
            condition = np.array([chosen])
            assert session.run(None, {"c": condition, "x": x})[0].tolist() == expected.tolist(), (turn, chosen)
            condition[:] = not chosen


def refused(*provider) -> str:
    with pytest.raises(native.EPFail) as error:
        ort.InferenceSession(parser.parse_model(MODEL).SerializeToString(), providers=[*provider])
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("JAX", {"devise": "cpu"}, ["unknown option 'devise'", "'device'", "'device_id'", "'memory_limit'"]),
        ("MLX", {"precison": "fast"}, ["unknown option 'precison'", "Did you mean 'precision'"]),
        ("JAX", {"device": "foo"}, ["option 'device' of JAXExecutionProvider is 'foo'", "cpu, gpu, cuda"]),
        ("JAX", {"device": "mlx"}, ["option 'device' of JAXExecutionProvider is 'mlx'"]),
        ("MLX", {"device": "cuda"}, ["option 'device' of MLXExecutionProvider is 'cuda'", "cpu, gpu"]),
        ("MLX", {"device_id": "x"}, ["option 'device_id' of MLXExecutionProvider is 'x'"]),
    ],
)
def test_options_of_a_provider_that_it_does_not_take(name, options, words):
    pytest.importorskip(name.lower())
    text = refused((f"{name}ExecutionProvider", options))
    assert all(word in text for word in words), text


@pytest.mark.parametrize("name", ["JAX", "MLX"])
def test_the_cpu_of_a_provider_is_that_of_its_library(name):
    pytest.importorskip(name.lower())
    session = ort.InferenceSession(
        parser.parse_model(MODEL).SerializeToString(), providers=[(f"{name}ExecutionProvider", {"device": "cpu"})]
    )
    assert session._sess._session.providers[0] == name.lower()


@pytest.mark.parametrize(("device", "words"), [("foo", "is 'foo': unknown device"), ("tpu:7", "asks for 'tpu:7'")])
def test_a_device_that_the_environment_asks_for_in_vain(monkeypatch, device, words):
    pytest.importorskip("jax")
    monkeypatch.setenv("EP_ONNXRUNTIME_DEVICE", device)
    text = refused("CPUExecutionProvider")
    assert "EP_ONNXRUNTIME_DEVICE" in text and words in text
