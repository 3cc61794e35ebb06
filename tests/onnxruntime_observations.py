"""How does a module that passes for onnxruntime answer? What tests of differences ask of both modules."""

from __future__ import annotations

import importlib
import importlib.util
import json
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnxruntime_modules import CPU, DOUBLE, TWO, X, content, load, parsed, value

Observation = Callable[[ModuleType], Any]


def observed(see: Observation, ort: ModuleType) -> Any:
    """The answer, the class and text of an exception, and what was warned of meanwhile."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            answer = see(ort)
        except Exception as error:  # noqa: BLE001 - whatever is raised is the answer
            answer = f"{type(error).__module__}.{type(error).__name__}: {error}"
    return repr(answer), [str(w.message) for w in warned if w.category is UserWarning]


def providers(*names: Any, **keywords: Any) -> Observation:
    """Which providers a session gets that asks for these."""
    return lambda ort: ort.InferenceSession(content(DOUBLE), providers=list(names), **keywords).get_providers()


def ran(text: str, **feed: Any) -> Observation:
    """What a graph makes of a feed."""
    return lambda ort: load(ort, text).run(None, feed)


def passed(number: int, array: Any, opset: int = 21) -> Observation:
    """What `Identity` of an element type makes of an array."""

    def see(ort: ModuleType) -> Any:
        x, y = (helper.make_tensor_value_info(name, number, ["N"]) for name in "xy")
        graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", [x], [y])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
        return ort.InferenceSession(model.SerializeToString(), providers=CPU).run(None, {"x": array})

    return see


def sequence(items: list[Any]) -> Observation:
    """What `SequenceAt` 0 makes of a sequence."""
    return ran("g (seq(float[N]) s, int64 i) => (float[N] y) { y = SequenceAt(s, i) }", s=items, i=np.array(0))


def bound(ort: ModuleType, unbound: str = "", target: Any = None, clear: bool = False) -> Any:
    """A bound run, with an input left out, a wrong output, or after its inputs were cleared."""
    session = load(ort, TWO)
    binding = session.io_binding()
    for name in {"a", "b"} - {unbound}:
        binding.bind_cpu_input(name, X)
    if target is None:
        binding.bind_output("s")
    else:
        binding.bind_ortvalue_output("s", value(ort, target))
    if clear:
        binding.clear_binding_inputs()
    return session.run_with_iobinding(binding)


def external(ort: ModuleType, from_bytes: bool) -> Any:
    """A model whose data file is missing."""
    model = parsed("g (float[300] x) => (float[300] y) { y = Add(x, w) }")
    model.graph.initializer.append(numpy_helper.from_array(np.zeros(300, np.float32), "w"))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.onnx"
        onnx.save(model, path, save_as_external_data=True, location="m.data", size_threshold=0)
        (path.parent / "m.data").unlink()
        return ort.InferenceSession(path.read_bytes() if from_bytes else path, providers=CPU)


def sparse(ort: ModuleType) -> Any:
    """The text in which a sparse value refuses to become an array."""
    device = ort.OrtDevice.make("cpu", 0)
    tensor = ort.SparseTensor.sparse_coo_from_numpy([3, 3], X[0], np.array([1, 5, 6]), device)
    return ort.OrtValue.ort_value_from_sparse_tensor(tensor).numpy()


def sequence_value(ort: ModuleType) -> Any:
    """The same of a sequence."""
    session = load(ort, "g (float[N] x) => (seq(float[N]) s) { s = SequenceConstruct(x, x) }")
    return session.run_with_ort_values(None, {"x": value(ort, X[0])})[0].numpy()


def updated(ort: ModuleType) -> Any:
    """A value after `update_inplace` with another dtype."""
    kept = value(ort, np.zeros(3, np.float32))
    kept.update_inplace(np.arange(3.0))
    return kept.numpy()


def metadata(ort: ModuleType) -> Any:
    """The order of the model's own keys."""
    model = parsed(DOUBLE)
    helper.set_model_props(model, {key: key for key in "kjihgfedcba"})
    session = ort.InferenceSession(model.SerializeToString(), providers=CPU)
    return list(session.get_modelmeta().custom_metadata_map)


def optimized(ort: ModuleType) -> Any:
    """The operator sets that an optimised model imports."""
    with tempfile.TemporaryDirectory() as folder:
        options = ort.SessionOptions()
        options.optimized_model_filepath = f"{folder}/o.onnx"
        ort.InferenceSession(content(DOUBLE, opsets='"": 17'), options, providers=CPU)
        return sorted(entry.domain for entry in onnx.load(f"{folder}/o.onnx").opset_import)


def profiled(ort: ModuleType) -> Any:
    """What a profile says of a node."""
    with tempfile.TemporaryDirectory() as folder:
        options = ort.SessionOptions()
        options.enable_profiling, options.profile_file_prefix = True, f"{folder}/p"
        session = load(ort, DOUBLE, options)
        session.run(None, {"x": X})
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    return [sorted(event["args"]) for event in events if event["name"].endswith("_kernel_time")]


def random_twice(ort: ModuleType) -> Any:
    """Whether sessions repeat themselves after `set_seed`."""
    draws, ones = [], np.ones(99, np.float32)
    for _ in range(2):
        ort.set_seed(7)
        draws += load(ort, "g (float[N] x) => (float[N] y) { y = RandomUniformLike(x) }").run(None, {"x": ones})
    return bool((draws[0] == draws[1]).all())


def saved_for_itself(ort: ModuleType) -> Any:
    """A model in onnxruntime's own format."""
    genuine = importlib.import_module("onnxruntime")
    with tempfile.TemporaryDirectory() as folder:
        options = genuine.SessionOptions()
        options.optimized_model_filepath = f"{folder}/m.ort"
        options.add_session_config_entry("session.save_model_format", "ORT")
        load(genuine, DOUBLE, options)
        return ort.InferenceSession(f"{folder}/m.ort", providers=CPU).get_providers()


def tool(ort: ModuleType) -> Any:
    """Whether the tools are there; importing those of the genuine package would add names to it."""
    return importlib.util.find_spec(f"{ort.__name__}.tools") is not None


def backend(ort: ModuleType) -> Any:
    """A dictionary fed through onnx's interface for backends."""
    return importlib.import_module(f"{ort.__name__}.backend").prepare(parsed(DOUBLE)).run({"x": X})


def unnamed(ort: ModuleType) -> Any:
    """The name of a node without one, in a message."""
    try:
        ran("g (float[N] x, float[M] z) => (float[?] y) { y = Add(x, z) }", x=X[0], z=X[0, :2])(ort)
    except Exception as error:  # noqa: BLE001
        return str(error).partition("Name:")[2].partition(" ")[0]
    return None


def failed(body: str, inputs: str, **feed: Any) -> Observation:
    """The text of a node that fails."""
    return ran(f"g ({inputs}) => (float[?] y) {{ [n] y = {body} }}", **feed)


def attribute(make: str, name: str) -> Observation:
    """Setting an attribute that cannot be set."""
    return lambda ort: setattr(load(ort, DOUBLE).get_inputs()[0] if not make else getattr(ort, make)(), name, 1)


def element(dtype: Any) -> Any:
    """[1, 0] in a dtype."""
    return np.array([1, 0]).astype(dtype)


def bfloat16_value(ort: ModuleType) -> Any:
    """An array of a bfloat16 value."""
    number = TensorProto.BFLOAT16
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(np.array([0x3F80], np.uint16), number).numpy().dtype
