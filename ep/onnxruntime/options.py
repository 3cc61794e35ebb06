"""What can be configured of a session, and of a run? Every attribute of onnxruntime's, with its effect or none."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ep.onnxruntime import enums
from ep.onnxruntime.errors import Fail, failure
from ep.onnxruntime.providers import check_addable
from ep.onnxruntime.pybind import INT, STATE, a_bool, a_str, an_enum, an_int, incompatible, integer, text, unpicklable

_SELF = f"(self: {STATE}.SessionOptions"


class SessionOptions:
    """Configuration of an `InferenceSession`; one object may serve many."""

    __module__ = STATE
    _KEPT = ("_values", "_entries", "_dims", "_denotations", "_initializers", "_files", "_providers", "_cancelled")
    __slots__ = (*_KEPT, "__weakref__")
    __reduce_ex__ = unpicklable

    enable_cpu_mem_arena = a_bool(True, "No effect: the array library manages memory.")
    enable_mem_pattern = a_bool(True, "No effect: the compiler plans memory.")
    enable_mem_reuse = a_bool(True, "No effect: the compiler plans memory.")
    enable_profiling = a_bool(False, "Runs node by node and writes their times into a JSON file for trace viewers.")
    execution_mode = an_enum(enums.ExecutionMode.ORT_SEQUENTIAL, "No effect: the array library schedules the work.")
    execution_order = an_enum(enums.ExecutionOrder.DEFAULT, "No effect: the array library schedules the work.")
    graph_optimization_level = an_enum(
        enums.GraphOptimizationLevel.ORT_ENABLE_ALL, "No effect: optimising never changes results here."
    )
    inter_op_num_threads = an_int(0, "No effect: the array library manages threads.")
    intra_op_num_threads = an_int(0, "No effect: the array library manages threads.")
    log_severity_level = an_int(-1, "The least severity that this session logs; -1 is the default logger's.")
    log_verbosity_level = an_int(0, "No effect: there are no verbose messages.")
    logid = a_str("", "Passed on to the logger callback.")
    optimized_model_filepath = a_str("", "Where to write the model after its graph was simplified.")
    profile_file_prefix = a_str("onnxruntime_profile_", "How names of profiles begin; the time follows.")
    use_deterministic_compute = a_bool(False, "No effect: compiled code gives the same result for the same input.")
    use_per_session_threads = a_bool(True, "No effect: the array library manages threads.")

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._entries: dict[str, str] = {}
        self._dims: dict[str, int] = {}
        self._denotations: dict[str, int] = {}
        self._initializers: dict[str, Any] = {}
        self._files: dict[str, Any] = {}
        self._providers: list[tuple[str, dict[str, str]]] = []
        self._cancelled = False

    def add_session_config_entry(self, key: str, value: str) -> None:
        """Keeps a pair of strings; keys about EPContext, external initializers and assignment have their effects."""
        for item in (key, value):
            text(item, "add_session_config_entry", f"{_SELF}, arg0: str, arg1: str) -> None", self, key, value)
        self._entries[key] = _entry(key, value)

    def get_session_config_entry(self, key: str) -> str:
        """The value that was added for `key`; `RuntimeError` if there is none."""
        if key not in self._entries:
            raise RuntimeError(f"SessionOptions does not have configuration with key: {key}")
        return self._entries[key]

    def add_free_dimension_override_by_name(self, name: str, size: int) -> None:
        """Gives a symbolic dimension of the inputs a fixed size, which feeds must then have."""
        self._dims[name] = self._size("add_free_dimension_override_by_name", name, size)

    def add_free_dimension_override_by_denotation(self, denotation: str, size: int) -> None:
        """The same for dimensions that carry this denotation."""
        self._denotations[denotation] = self._size("add_free_dimension_override_by_denotation", denotation, size)

    def _size(self, method: str, name: str, size: int) -> int:
        signature = f"{_SELF}, arg0: str, arg1: {INT}) -> None"
        text(name, method, signature, self, name, size)
        return integer(size, method, signature, self, name, size)

    def add_initializer(self, name: str, ort_value: Any) -> None:
        """Uses this tensor in place of the initializer of the model."""
        text(name, "add_initializer", f"{_SELF}, arg0: str, arg1: object) -> None", self, name, ort_value)
        if not hasattr(getattr(ort_value, "_ortvalue", ort_value), "is_tensor"):
            raise RuntimeError("The provided Python object must be an OrtValue\n")
        self._initializers[name] = ort_value

    def add_external_initializers(self, names: Sequence[str], ort_values: Sequence[Any]) -> None:
        """Uses these tensors in place of the initializers that the model keeps in external files."""
        if len(names) != len(ort_values):
            raise RuntimeError("Expecting names and ort_values lists to have equal length")
        self._initializers.update(zip(names, ort_values, strict=True))

    def add_external_initializers_from_files_in_memory(
        self, file_names: Sequence[str], buffers: Sequence[Any], lengths: Sequence[int]
    ) -> None:
        """Uses these buffers in place of the model's external data files of these names."""
        if not len(file_names) == len(buffers) == len(lengths):
            raise RuntimeError("Expecting names, buffers and lengths lists to have equal length")
        for name, buffer, length in zip(file_names, buffers, lengths, strict=True):
            self._files[name] = memoryview(buffer)[:length]

    def add_provider(self, name: str, options: Mapping[str, str]) -> None:
        """Adds a provider, as `providers=` of `InferenceSession` does."""
        signature = f"{_SELF}, arg0: str, arg1: collections.abc.Mapping[str, str]) -> None"
        for item in (name, *options, *options.values()):
            text(item, "add_provider", signature, self, name, options)
        check_addable(name)
        self._providers.append((name, dict(options)))

    def add_provider_for_devices(self, devices: Sequence[Any], options: Mapping[str, str]) -> None:
        """Adds the provider of these devices of `get_ep_devices`."""
        if not devices:
            raise failure(Fail, "No devices were given to add_provider_for_devices.")
        self._providers.append((devices[0].ep_name, dict(options)))

    def has_providers(self) -> bool:
        """Whether a provider, or a policy for selecting one, was added."""
        return bool(self._providers)

    def set_provider_selection_policy(self, policy: Any) -> None:
        """Selects the CPU for `PREFER_CPU` and `DEFAULT`, and this machine's best device for every other policy."""
        if not isinstance(policy, enums.OrtExecutionProviderDevicePolicy):
            signature = f"{_SELF}, arg0: {STATE}.OrtExecutionProviderDevicePolicy) -> None"
            raise incompatible("set_provider_selection_policy", signature, self, policy)
        from ep.onnxruntime.providers import CPU, get_available_providers

        cpu = policy.name in ("DEFAULT", "PREFER_CPU")
        self._providers = [(CPU if cpu else get_available_providers()[0], {})]

    def set_provider_selection_policy_delegate(self, delegate: Callable[..., Sequence[Any]]) -> None:
        """Lets a function select among `get_ep_devices`: `(devices, model metadata, runtime metadata, most)`."""
        from ep.onnxruntime.devices import get_ep_devices

        chosen = delegate(get_ep_devices(), {}, {}, 8)
        self._providers = [(device.ep_name, {}) for device in chosen]

    def register_custom_ops_library(self, path: str) -> None:
        """Unsupported: native operators need onnxruntime's own library; write a lowering with `ep.op` instead."""
        if not os.path.exists(path):
            raise failure(
                Fail,
                f"Failed to load library {path} with error: {path}: cannot open shared object file: "
                "No such file or directory",
            )
        raise failure(
            Fail,
            f"Failed to load library {path} with error: it is built for onnxruntime's C++ interface, which ep does "
            'not have. Write its operators as lowerings: @ep.op("Name", domain="…").',
        )

    def set_load_cancellation_flag(self, cancelled: bool) -> None:
        """Makes loading with these options fail with `ModelLoadCanceled`."""
        self._cancelled = bool(cancelled)

    def set_ep_context_data_read_func(self, read_func: Callable[..., None], max_data_size: int) -> None:
        """Unsupported: compiled models are read from files."""
        raise failure_of("SessionOptions.set_ep_context_data_read_func", "load the compiled model by its path.")

    def clear_ep_context_data_read_func(self) -> None:
        """No effect: no such function can be set."""

    def _copy(self) -> SessionOptions:
        """What `InferenceSession.get_session_options` returns: equal, and no longer shared."""
        made = SessionOptions()
        for name in self._KEPT:
            value = getattr(self, name)
            setattr(made, name, value.copy() if hasattr(value, "copy") else value)
        return made


class RunOptions:
    """Configuration of one run."""

    __module__ = STATE
    __slots__ = ("_values", "_entries", "_adapters", "__weakref__")
    __reduce_ex__ = unpicklable

    log_severity_level = an_int(-1, "No effect: runs log nothing.")
    log_verbosity_level = an_int(0, "No effect: runs log nothing.")
    logid = a_str("", "No effect: runs log nothing.")
    only_execute_path_to_fetches = a_bool(False, "No effect: compiled code computes all outputs at once.")
    terminate = a_bool(False, "Refuses runs that start with it; one that is running goes on to its end.")

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._entries: dict[str, str] = {}
        self._adapters: list[Any] = []

    def add_run_config_entry(self, key: str, value: str) -> None:
        """No effect: the pair of strings is kept, and none of onnxruntime's keys applies here."""
        signature = f"(self: {STATE}.RunOptions, arg0: str, arg1: str) -> None"
        for item in (key, value):
            text(item, "add_run_config_entry", signature, self, key, value)
        self._entries[key] = _entry(key, value)

    def get_run_config_entry(self, key: str) -> str:
        """The value that was added for `key`; `RuntimeError` if there is none."""
        if key not in self._entries:
            raise RuntimeError(f"RunOptions does not have configuration with key: {key}")
        return self._entries[key]

    def add_active_adapter(self, adapter: Any) -> None:
        """Feeds the parameters of a `LoraAdapter` to the inputs of their names."""
        self._adapters.append(adapter)


def _entry(key: str, value: str) -> str:
    """The value of a configuration entry, if neither it nor its key is longer than onnxruntime takes."""
    if not 0 < len(key.encode()) <= 1024:
        raise RuntimeError("Config key is empty or longer than maximum length 1024")
    if len(value.encode()) > 8192:
        raise RuntimeError("Config value is longer than maximum length: 8192")
    return value


def failure_of(name: str, instead: str) -> Exception:
    """The refusal of a part of onnxruntime's API that has no meaning here."""
    from ep.onnxruntime.errors import NotImplemented_

    return failure(NotImplemented_, f"ep does not support {name}: {instead}")
