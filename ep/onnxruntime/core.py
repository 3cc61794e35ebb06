"""How does a loaded model run? The session behind `onnxruntime.InferenceSession`, which clients see as `_sess`."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence, Set, ValuesView
from types import GeneratorType
from typing import Any

import numpy as np

from ep.context_options import ENABLE
from ep.errors import EpError
from ep.onnxruntime import checks, model, profiling
from ep.onnxruntime.devices import cpu_memory, get_ep_devices
from ep.onnxruntime.errors import Fail, InvalidArgument, ModelLoadCanceled, bare, failure, while_loading, while_running
from ep.onnxruntime.feeds import SIGNATURE, Feeds
from ep.onnxruntime.messages import log
from ep.onnxruntime.options import RunOptions, SessionOptions
from ep.onnxruntime.providers import CPU, choose, explained
from ep.onnxruntime.pybind import STATE, incompatible, unpicklable
from ep.onnxruntime.recent import Key, shared
from ep.onnxruntime.values import COrtValue, OrtValueVector

_RECORD = "session.record_ep_graph_assignment_info"
_NO_FALLBACK = "session.disable_cpu_ep_fallback"
_NAMES = (Sequence, Set, ValuesView, GeneratorType, map, np.ndarray)  # what may hold the names of outputs


class CInferenceSession:
    """A model on its provider. Every method may be called from any thread."""

    __module__, __qualname__ = STATE, "InferenceSession"
    __reduce_ex__ = unpicklable

    def __init__(self, options: SessionOptions, path: str | None, content: bytes | None) -> None:
        """Reads and checks the model; `initialize_session` makes it ready to run."""
        if not isinstance(options, SessionOptions) or (path is None and content is None) or path == "":
            cls = f"{STATE}.InferenceSession"
            signature = f"{cls}(arg0: {STATE}.SessionOptions, arg1: str, arg2: bool, arg3: bool)"
            raise incompatible("__init__", signature, options, path, False, False, kind="constructor")
        if options._cancelled:
            raise failure(ModelLoadCanceled, "Session initialization canceled due to user request.")
        self._options = options._copy()
        self._profile = profiling.Profile(options.profile_file_prefix) if options.enable_profiling else None
        started = self._profile.now() if self._profile else 0
        self._key = model.identity(path, content, options)
        self._opened, self._inferred = shared(self._key, lambda: _read(path, content, options))
        if self._profile:
            self._profile.add("Session", f"model_loading_{'array' if path is None else 'uri'}", started)

    def initialize_session(
        self, providers: Sequence[str], options: Sequence[Mapping[str, str]], disabled_optimizers: Any = ()
    ) -> None:
        """Loads the model on the first of these providers; the CPU follows them."""
        from ep.results import fresh

        del disabled_optimizers  # no rewrite changes results
        self._fresh = fresh
        started = self._profile.now() if self._profile else 0
        self._chosen = list(zip(providers, options, strict=True))
        if CPU not in providers:
            self._chosen.append((CPU, {}))
        elif self._options._entries.get(_NO_FALLBACK) == "1":
            raise failure(
                InvalidArgument,
                "Conflicting session configuration: explicitly added the CPU EP to the session, but also disabled "
                "fallback to the CPU EP via session configuration options.",
            )
        try:
            device, settings = choose(self._chosen, self._options._entries)
        except EpError as error:
            raise while_loading(error, self._opened.where) from error
        key = None
        if self._key is not None and ENABLE not in settings:
            key = Key(self._key.size, (*self._key.rest, device, tuple(sorted(settings.items()))))
        self._session, self._feeds = shared(key, lambda: self._load(device, settings))
        on_cpu = self._chosen[0][0] == CPU or bool(self._session.plan.fallbacks)
        if on_cpu and self._options._entries.get(_NO_FALLBACK) == "1":
            raise failure(
                Fail,
                "This session contains graph nodes that are assigned to the default CPU EP, but fallback to CPU EP has "
                "been explicitly disabled by the user.",
            )
        self._provider = self._feeds.provider
        self._names = tuple(value.name for value in self._opened.proto.graph.output)
        self._say_fallbacks()
        if self._options.optimized_model_filepath:
            from ep.onnxruntime.optimized import write

            write(self._opened.source, self._options)
        if self._profile:
            self._profile.add("Session", "session_initialization", started)

    def _load(self, device: str, settings: Mapping[str, str]) -> tuple[Any, Feeds]:
        """The session of `ep` that runs the model, and what it may be fed."""
        from ep.session import InferenceSession

        opened = self._opened
        try:
            session = InferenceSession(opened.source, device, options=settings, warn=False)
        except EpError as error:
            raise while_loading(explained(error, self._chosen[0][0]), opened.where) from error
        return session, Feeds(opened.proto, session._providers[0])

    def _say_fallbacks(self) -> None:
        """What `ep.load` warns of is logged here: clients turn warnings into errors, onnxruntime logs."""
        least = self._options.log_severity_level
        where = f"{self._session.name} is loaded on {', '.join(self._session.providers)}"
        log(0, where, least=least, logid=self._options.logid)
        plan = self._session.plan
        if plan.fallbacks:
            reasons = "; ".join(f"'{n.node}' ({n.op}): {n.reason}" for n in plan.fallbacks[:3])
            count = f"{len(plan.fallbacks)} of {len(plan.nodes)} nodes"
            log(1, f"{count} of {plan.model} run on the host: {reasons}", least=least, logid=self._options.logid)

    # What the model and the session say of themselves.

    @property
    def inputs_meta(self) -> list[model.NodeArg]:
        """The inputs that must be fed."""
        return [model.NodeArg(spec.name, spec.type, spec.dims) for spec in self._feeds.inputs]

    @property
    def overridable_initializers(self) -> list[model.NodeArg]:
        """The inputs that have a default."""
        return [model.NodeArg(spec.name, spec.type, spec.dims) for spec in self._feeds.overridable]

    @property
    def outputs_meta(self) -> list[model.NodeArg]:
        """The outputs."""
        return model.outputs(self._opened.proto, self._inferred)

    @functools.cached_property
    def model_meta(self) -> model.ModelMetadata:
        """What the file says of itself."""
        return model.ModelMetadata(self._opened.proto)

    @property
    def session_options(self) -> SessionOptions:
        """A copy of the options."""
        return self._options._copy()

    @property
    def input_meminfos(self) -> list[Any]:
        """The host's memory, once per input."""
        return [cpu_memory() for _ in self._feeds.inputs]

    @property
    def output_meminfos(self) -> list[Any]:
        """The host's memory, once per output."""
        return [cpu_memory() for _ in self._names]

    @property
    def input_epdevices(self) -> list[Any]:
        """The device of the provider, once per input."""
        name = self._chosen[0][0]
        device = next((d for d in get_ep_devices() if d.ep_name == name), None)
        return [device for _ in self._feeds.inputs]

    def get_providers(self) -> list[str]:
        """Names of the providers, best first."""
        return [name for name, _ in self._chosen]

    def get_provider_options(self) -> dict[str, dict[str, str]]:
        """Their options; the CPU's are not kept, as in onnxruntime."""
        return {name: {} if name == "CPUExecutionProvider" else dict(options) for name, options in self._chosen}

    def get_provider_graph_assignment_info(self) -> list[Any]:
        """Which provider runs which nodes, if the options asked to record it."""
        from ep.onnxruntime.assignment import assignment

        if self._options._entries.get(_RECORD) != "1":
            raise failure(
                Fail, f"Session configuration entry '{_RECORD}' must be set to \"1\" to retrieve this information."
            )
        return assignment(self._session, self._chosen[0][0])

    def get_tuning_results(self) -> list[Any]:
        """Empty: there is nothing to tune."""
        return []

    def set_tuning_results(self, results: Any, error_on_invalid: bool = False) -> None:
        """No effect: there is nothing to tune."""

    def set_ep_dynamic_options(self, options: Mapping[str, str]) -> None:
        """No effect: providers have no options that change while they run."""

    def end_profiling(self) -> str:
        """Writes the profile and returns the name of its file; empty without profiling."""
        return self._profile.end() if self._profile else ""

    @property
    def get_profiling_start_time_ns(self) -> int:
        """When profiling began, in nanoseconds of the system clock; 0 without profiling."""
        return self._profile.start_ns if self._profile else 0

    # Running.

    def run(self, output_names: Sequence[str], feed: Mapping[str, Any], options: RunOptions | None = None) -> list[Any]:
        """Runs the model and returns fresh, writable arrays, lists, dictionaries or `None`."""
        wanted = self._wanted(output_names, feed, options)
        if options is not None:
            feed = self._with_options(feed, options)
        return self._fetch(self._feeds.enter(feed), wanted)

    def _fetch(self, entered: Mapping[str, Any], wanted: Sequence[int]) -> list[Any]:
        """Results as arrays of the caller's own."""
        backend = self._provider.backend
        with backend.scope():
            results = self._evaluate(entered)
            try:
                return [self._fresh(results[index], backend.xp) for index in wanted]
            except EpError as error:
                raise while_running(error) from error

    def run_with_ort_values(
        self, feed: Mapping[str, COrtValue], output_names: Sequence[str], options: RunOptions | None = None
    ) -> OrtValueVector:
        """Runs the model on values and returns values, which stay on the device."""
        wanted = self._wanted(output_names, feed, options)
        backend, provider = self._provider.backend, self._provider
        if options is not None:
            feed = self._with_options(feed, options)
        entered = self._feeds.enter(feed)
        with backend.scope():
            if backend.takes_numpy:  # it may keep the memory of an array, which the user may write later
                entered = {name: np.array(v) if isinstance(v, np.ndarray) else v for name, v in entered.items()}
            results = self._evaluate(entered)
            kept = [results[index] for index in wanted]
            backend.block([result for result in kept if backend.is_array(result)])
        types = [value.type for value in self._opened.proto.graph.output]
        return OrtValueVector(
            COrtValue(owned(result, backend), provider, model.type_string(types[index]))
            for result, index in zip(kept, wanted, strict=True)
        )

    def _evaluate(self, entered: Mapping[str, Any]) -> list[Any]:
        """All results, on the device perhaps."""
        try:
            if self._profile:
                return profiling.run(self._session, entered, self._profile, self._chosen[0][0])
            return self._session.evaluate(entered)
        except EpError as error:
            raise while_running(error) from error

    def _with_options(self, feed: Mapping[str, Any], options: RunOptions) -> Mapping[str, Any]:
        if options.terminate:
            raise failure(Fail, "Exiting due to terminate flag being set to true.")
        if options._adapters:
            return {**feed, **{k: v for adapter in options._adapters for k, v in adapter._parameters.items()}}
        return feed

    def _wanted(self, names: Any, feed: Any, options: Any) -> Sequence[int]:
        """Positions of the outputs asked for."""
        if names == self._names:
            wanted: Sequence[int] = range(len(self._names))
        elif isinstance(names, str) or not isinstance(names, _NAMES):
            raise incompatible("run", SIGNATURE, self, names, feed, options)
        else:
            wanted = [self._position(name, names, feed, options) for name in names]
        if options is not None and not isinstance(options, RunOptions):
            raise incompatible("run", SIGNATURE, self, names, feed, options)
        return wanted

    def _position(self, name: Any, names: Any, feed: Any, options: Any) -> int:
        if not isinstance(name, str):
            raise incompatible("run", SIGNATURE, self, names, feed, options)
        if name not in self._names:
            raise failure(InvalidArgument, f"Invalid output name:{name}")
        return self._names.index(name)

    def run_async(
        self,
        output_names: Sequence[str],
        feed: Mapping[str, Any],
        callback: Callable[[list[Any], Any, str], None],
        user_data: Any,
        options: RunOptions | None = None,
    ) -> None:
        """Runs the model on another thread and calls `callback(results, user_data, error message)` there.

        What cannot be made into tensors is refused at once; what does not fit the model is told to the callback.
        """
        if not callable(callback):
            raise incompatible("run_async", SIGNATURE, self, output_names, feed, callback, user_data, options)
        problem: Exception | None = None
        entered: Mapping[str, Any] = {}
        wanted = self._wanted(output_names, feed, options)
        try:
            entered = self._feeds.enter(feed if options is None else self._with_options(feed, options))
        except (InvalidArgument, Fail) as error:
            problem = error

        def work() -> None:
            results: list[Any] = []
            message = "" if problem is None else bare(problem)
            if problem is None:
                try:
                    results = self._fetch(entered, wanted)
                except Exception as error:  # noqa: BLE001 - whatever fails is the callback's to know
                    message = bare(error)
            callback(results, user_data, message)

        threading.Thread(target=work, name="ep-run-async", daemon=True).start()

    def run_with_iobinding(self, binding: Any, options: RunOptions | None = None) -> None:
        """Runs the model on what was bound."""
        try:
            binding._run(self, options)
        except Exception as error:
            raise RuntimeError(f"Error in execution: {bare(error)}") from error

    def run_with_ortvaluevector(
        self,
        options: RunOptions | None,
        feed_names: Sequence[str],
        feeds: OrtValueVector,
        fetch_names: Sequence[str],
        fetches: OrtValueVector,
        fetch_devices: Any,
    ) -> None:
        """Runs the model on a vector of values and appends the results to another."""
        del fetch_devices
        fetches[:] = self.run_with_ort_values(dict(zip(feed_names, feeds, strict=True)), fetch_names, options)

    def create_ortvalue_from_shape_and_type(self, shape: Sequence[int], element_type: Any, device: Any) -> COrtValue:
        """A value of this shape and type."""
        return COrtValue.ortvalue_from_shape_and_type(shape, element_type, device)

    create_ortvalue_from_shape_and_onnx_type = create_ortvalue_from_shape_and_type

    def release_captured_graph(self, graph_annotation_id: int = 0) -> None:
        """No effect: no graphs are captured."""

    @property
    def is_webgpu_graph_capture_enabled(self) -> bool:
        """False: there is no WebGPU here."""
        return False

    @property
    def webgpu_context_id(self) -> int:
        """-1: there is no WebGPU here."""
        return -1


def _read(path: str | None, content: bytes | None, options: SessionOptions) -> tuple[model.Opened, Any]:
    """A model that passed the checks, and its graph with inferred shapes."""
    opened = model.open_model(path, content, options)
    checks.check(opened.proto, opened.where)
    return opened, model.infer(opened.proto, opened.where)


def owned(result: Any, backend: Any) -> Any:
    """A result that nobody else can write: results of the host may be a constant, or share memory with one."""
    if isinstance(result, np.ndarray):
        return np.array(result)
    if isinstance(result, list):
        return [item if isinstance(item, dict) else np.array(_host(item, backend)) for item in result]
    return result


def _host(value: Any, backend: Any) -> Any:
    return backend.to_numpy(value) if backend.is_array(value) else value
