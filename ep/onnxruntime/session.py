"""How is onnxruntime's `InferenceSession` answered? Its arguments and methods, around the session that runs."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ep.onnxruntime.core import CInferenceSession
from ep.onnxruntime.devices import OrtDevice, OrtEpDevice, OrtMemoryInfo
from ep.onnxruntime.iobinding import IOBinding
from ep.onnxruntime.model import ModelMetadata, NodeArg
from ep.onnxruntime.options import RunOptions, SessionOptions
from ep.onnxruntime.ortvalue import OrtValue
from ep.onnxruntime.providers import CPU, normalize
from ep.onnxruntime.pybind import COLLECTION
from ep.onnxruntime.values import COrtValue, OrtValueVector


class Session:
    """What every kind of session has."""

    __module__ = COLLECTION

    def __init__(self, enable_fallback: bool = True) -> None:
        self._sess: Any = None
        self._enable_fallback = bool(enable_fallback)

    def get_session_options(self) -> SessionOptions:
        """A copy of the options."""
        return self._sess.session_options

    # Attributes that subclasses read. What takes time is computed when it is first asked for.

    @functools.cached_property
    def _outputs_meta(self) -> list[NodeArg]:
        return self._sess.outputs_meta

    _model_meta = property(lambda self: self._sess.model_meta)
    _input_meminfos = property(lambda self: self._sess.input_meminfos)
    _output_meminfos = property(lambda self: self._sess.output_meminfos)
    _input_epdevices = property(lambda self: self._sess.input_epdevices)
    _profiling_start_time_ns = property(lambda self: self._sess.get_profiling_start_time_ns)

    def get_inputs(self) -> Sequence[NodeArg]:
        """The inputs that must be fed, in the model's order."""
        return self._inputs_meta

    def get_outputs(self) -> Sequence[NodeArg]:
        """The outputs, in the model's order, with shapes that follow from the operators where none are declared."""
        return self._outputs_meta

    def get_overridable_initializers(self) -> Sequence[NodeArg]:
        """The inputs that have a default, which a feed replaces."""
        return self._overridable_initializers

    def get_modelmeta(self) -> ModelMetadata:
        """What the model file says of itself."""
        return self._sess.model_meta

    def get_input_memory_infos(self) -> Sequence[OrtMemoryInfo]:
        """Where inputs are taken from: the host's memory."""
        return self._sess.input_meminfos

    def get_output_memory_infos(self) -> Sequence[OrtMemoryInfo]:
        """Where outputs go: the host's memory."""
        return self._sess.output_meminfos

    def get_input_epdevices(self) -> Sequence[OrtEpDevice]:
        """The device of the provider, once per input."""
        return self._sess.input_epdevices

    def get_providers(self) -> Sequence[str]:
        """Names of the providers, best first; `CPUExecutionProvider` is always the last."""
        return self._providers

    def get_provider_options(self) -> dict[str, dict[str, str]]:
        """The options of each provider."""
        return self._provider_options

    def get_provider_graph_assignment_info(self) -> Sequence[Any]:
        """Which provider runs which nodes; needs the option `session.record_ep_graph_assignment_info`."""
        return self._sess.get_provider_graph_assignment_info()

    def set_providers(self, providers: Any = None, provider_options: Any = None) -> None:
        """Loads the model again, on other providers."""
        self._reset_session(providers, provider_options)

    def disable_fallback(self) -> None:
        """Lets errors about providers be raised, rather than printed before loading on the CPU."""
        self._enable_fallback = False

    def enable_fallback(self) -> None:
        """Lets errors about providers be printed, and loads the model on the CPU."""
        self._enable_fallback = True

    def _validate_input(self, feed_input_names: Sequence[str]) -> None:
        """`ValueError` if an input is missing."""
        self._sess._feeds.check_names(dict.fromkeys(feed_input_names))

    def run(
        self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any], run_options: RunOptions | None = None
    ) -> Sequence[Any]:
        """Runs the model; `output_names=None` (or an empty list) asks for all outputs.

        Returns arrays of the caller's own, lists of them for sequences, dictionaries for maps, `None` for an empty
        optional.

        Raises:
            ValueError: an input is missing.
            InvalidArgument: a feed does not fit the model; `Fail`: a node failed.
        """
        sess = self._sess
        if not sess._feeds.required_set.issubset(input_feed.keys()):
            sess._feeds.check_names(input_feed)
        return sess.run(output_names or sess._names, input_feed, run_options)

    def run_async(
        self,
        output_names: Sequence[str] | None,
        input_feed: Mapping[str, Any],
        callback: Callable[[list[Any], Any, str], None],
        user_data: Any,
        run_options: RunOptions | None = None,
    ) -> None:
        """Runs the model on another thread, which then calls `callback(results, user_data, error message)`."""
        self._validate_input(list(input_feed.keys()))
        self._sess.run_async(output_names or self._sess._names, input_feed, callback, user_data, run_options)

    def run_with_ort_values(
        self,
        output_names: Sequence[str] | None,
        input_dict_ort_values: Mapping[str, OrtValue],
        run_options: RunOptions | None = None,
    ) -> Sequence[OrtValue]:
        """Runs the model on values; the results stay on the device until they are read."""
        self._validate_input(list(input_dict_ort_values.keys()))
        feed = {name: value._get_c_value() for name, value in input_dict_ort_values.items()}
        results = self._sess.run_with_ort_values(feed, output_names or self._sess._names, run_options)
        return [OrtValue(result) for result in results]

    def end_profiling(self) -> str:
        """Writes the profile and returns the name of its file; empty without profiling."""
        return self._sess.end_profiling()

    def get_profiling_start_time_ns(self) -> int:
        """When profiling began, in nanoseconds."""
        return self._sess.get_profiling_start_time_ns

    def io_binding(self) -> IOBinding:
        """An `IOBinding` for this session."""
        return IOBinding(self)

    def create_ortvalue_from_shape_and_type(
        self, shape: Sequence[int], element_type: Any, device_type: str, device_id: int = 0, vendor_id: int = -1
    ) -> OrtValue:
        """A value of this shape and type."""
        device = OrtDevice.make(device_type, device_id, vendor_id)
        return OrtValue(COrtValue.ortvalue_from_shape_and_type(shape, element_type, device))

    def release_captured_graph(self, graph_annotation_id: int = 0) -> None:
        """No effect: no graphs are captured."""

    def run_with_iobinding(self, iobinding: IOBinding, run_options: RunOptions | None = None) -> None:
        """Runs the model on what was bound; `RuntimeError` if it fails."""
        if iobinding._session is not self:
            raise ValueError("IOBinding must be used with the session that created it.")
        self._sess.run_with_iobinding(iobinding._iobinding, run_options)

    def set_ep_dynamic_options(self, options: dict[str, str]) -> None:
        """No effect: providers have no options that change while they run."""
        self._sess.set_ep_dynamic_options(options)

    def get_tuning_results(self) -> list[Any]:
        """Empty: there is nothing to tune."""
        return self._sess.get_tuning_results()

    def set_tuning_results(self, results: Any, *, error_on_invalid: bool = False) -> None:
        """No effect: there is nothing to tune."""

    def run_with_ortvaluevector(
        self,
        run_options: RunOptions | None,
        feed_names: Sequence[str],
        feeds: OrtValueVector,
        fetch_names: Sequence[str],
        fetches: OrtValueVector,
        fetch_devices: Any,
    ) -> None:
        """Runs the model on a vector of values and puts the results into another."""
        self._sess.run_with_ortvaluevector(run_options, feed_names, feeds, fetch_names, fetches, fetch_devices)

    _inputs_meta: list[NodeArg]
    _overridable_initializers: list[NodeArg]
    _providers: list[str]
    _provider_options: dict[str, dict[str, str]]

    def _reset_session(self, providers: Any, provider_options: Any) -> None:
        raise NotImplementedError


class InferenceSession(Session):
    """A model, loaded to be run. `providers` is a list of names, or of (name, options), best first.

    >>> session = InferenceSession("model.onnx", providers=["MLXExecutionProvider"])  # doctest: +SKIP
    >>> session.run(None, {"x": x})  # doctest: +SKIP
    """

    __module__ = COLLECTION

    def __init__(
        self,
        path_or_bytes: str | bytes | os.PathLike[str],
        sess_options: SessionOptions | None = None,
        providers: Sequence[str | tuple[str, dict[Any, Any]]] | None = None,
        provider_options: Sequence[dict[Any, Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        """Loads a model from a path or from its bytes. `enable_fallback=0` raises errors about providers.

        Raises:
            NoSuchFile, InvalidProtobuf, InvalidGraph, Fail, NotImplemented: the model cannot be used.
            TypeError: it is neither a path nor bytes.
        """
        super().__init__(enable_fallback=int(kwargs.get("enable_fallback", 1)) == 1)
        self._model_path: str | None = None
        self._model_bytes: bytes | None = None
        if isinstance(path_or_bytes, str | os.PathLike):
            self._model_path = os.fspath(path_or_bytes)
        elif isinstance(path_or_bytes, bytes):
            self._model_bytes = path_or_bytes
        else:
            raise TypeError(f"Unable to load from type '{type(path_or_bytes)}'")
        self._sess_options = self._sess_options_initial = sess_options
        self._fallback_providers = [CPU]
        disabled = kwargs.get("disabled_optimizers")
        try:
            self._create_inference_session(providers, provider_options, disabled)
        except (ValueError, RuntimeError) as error:
            if not self._enable_fallback:
                raise
            print("*************** EP Error ***************")
            print(f"EP Error {error} when using {providers}")
            print(f"Falling back to {self._fallback_providers} and retrying.")
            print("****************************************")
            self._create_inference_session(self._fallback_providers, None)
            self._enable_fallback = False

    def _create_inference_session(self, providers: Any, provider_options: Any, disabled_optimizers: Any = None) -> None:
        options = self._sess_options
        asked = providers or provider_options
        if options is not None and asked and options.has_providers():
            warnings.warn(
                "Specified 'providers'/'provider_options' when creating InferenceSession but SessionOptions has "
                "already been configured with providers. InferenceSession will only use the providers "
                "passed to InferenceSession().",
                stacklevel=3,
            )
        options = options or SessionOptions()
        if isinstance(options, SessionOptions) and options.has_providers() and not asked:
            providers, provider_options = list(options._providers), None
        chosen = normalize(providers, provider_options)
        sess = CInferenceSession(options, self._model_path, self._model_bytes)
        sess.initialize_session([name for name, _ in chosen], [given for _, given in chosen], disabled_optimizers)
        self._bind_session(sess)

    def _bind_session(self, sess: CInferenceSession) -> None:
        self._sess = sess
        self._sess_options = sess.session_options
        self._inputs_meta = sess.inputs_meta
        self.__dict__.pop("_outputs_meta", None)
        self._overridable_initializers = sess.overridable_initializers
        self._providers = sess.get_providers()
        self._provider_options = sess.get_provider_options()

    def _reset_session(self, providers: Any, provider_options: Any) -> None:
        self._sess_options = self._sess_options_initial
        self._create_inference_session(providers, provider_options)
