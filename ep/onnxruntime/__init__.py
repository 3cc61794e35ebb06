"""How does code written for onnxruntime run on this runtime? `import ep.onnxruntime as onnxruntime`.

The names, arguments and answers are those of onnxruntime; the execution providers are ours.
"""

from __future__ import annotations

import enum
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ep import session as _session
from ep.feeds import ValueInfo
from ep.loader import type_string

_DEVICES = {"MLXExecutionProvider": "mlx", "JAXExecutionProvider": "jax", "CPUExecutionProvider": "cpu"}
_HOST = "CPUExecutionProvider"
_ELEMENTS = {"float32": "float", "float64": "double", "object": "string"}


class GraphOptimizationLevel(enum.IntEnum):
    """Accepted and without effect: a graph is always optimised, which never changes its results."""

    ORT_DISABLE_ALL = 0
    ORT_ENABLE_BASIC = 1
    ORT_ENABLE_EXTENDED = 2
    ORT_ENABLE_LAYOUT = 3
    ORT_ENABLE_ALL = 99


class ExecutionMode(enum.IntEnum):
    """Accepted and without effect: the array library schedules the work."""

    ORT_SEQUENTIAL = 0
    ORT_PARALLEL = 1


@dataclass(slots=True)
class SessionOptions:
    """Accepted and without effect: the array libraries manage threads, memory and logs themselves."""

    enable_cpu_mem_arena: bool = True
    enable_mem_pattern: bool = True
    enable_mem_reuse: bool = True
    enable_profiling: bool = False
    execution_mode: ExecutionMode = ExecutionMode.ORT_SEQUENTIAL
    execution_order: int = 0
    graph_optimization_level: GraphOptimizationLevel = GraphOptimizationLevel.ORT_ENABLE_ALL
    inter_op_num_threads: int = 0
    intra_op_num_threads: int = 0
    log_severity_level: int = -1
    log_verbosity_level: int = 0
    logid: str = ""
    optimized_model_filepath: str = ""
    profile_file_prefix: str = "onnxruntime_profile_"
    use_deterministic_compute: bool = False
    use_per_session_threads: bool = True
    _entries: dict[str, str] = field(default_factory=dict, repr=False)

    def add_session_config_entry(self, key: str, value: str) -> None:
        self._entries[key] = value

    def get_session_config_entry(self, key: str) -> str:
        return self._entries[key]


@dataclass(frozen=True, slots=True)
class NodeArg:
    """An input or output: its name, its type such as `tensor(float)`, and its shape."""

    name: str
    type: str
    shape: list[int | str | None]


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """What the model file says of itself."""

    producer_name: str
    graph_name: str
    graph_description: str
    description: str
    domain: str
    version: int
    custom_metadata_map: dict[str, str]


class InferenceSession:
    """onnxruntime's class of this name. `providers` is a list of names, or of (name, options), best first.

    >>> session = InferenceSession("model.onnx", providers=["MLXExecutionProvider"])  # doctest: +SKIP
    >>> session.run(None, {"x": x})  # doctest: +SKIP
    """

    def __init__(
        self,
        path_or_bytes: str | os.PathLike[str] | bytes,
        sess_options: SessionOptions | None = None,
        providers: Sequence[str | tuple[str, Mapping[Any, Any]]] | None = None,
        provider_options: Sequence[Mapping[Any, Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        self._source = path_or_bytes
        self._options = sess_options or SessionOptions()
        self._providers = _usable(providers)
        device = _DEVICES[self._providers[0]] if self._providers else "auto"
        self._session = _session.load(path_or_bytes, device)
        if not self._providers:
            names = {device: name for name, device in _DEVICES.items()}
            self._providers = [names[self._session.providers[0]]]
        self._providers += [_HOST] if _HOST not in self._providers else []
        self._meta: Any = None

    def run(
        self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any], run_options: Any = None
    ) -> list[Any]:
        """Runs the model; `output_names=None` (or an empty list) asks for all outputs."""
        return self._session.run(output_names, input_feed)

    def get_inputs(self) -> list[NodeArg]:
        return [self._argument(info) for info in self._session.inputs]

    def get_overridable_initializers(self) -> list[NodeArg]:
        return [self._argument(info) for info in self._session.overridable]

    def get_outputs(self) -> list[NodeArg]:
        return [self._argument(info) for info in self._session.outputs]

    def get_providers(self) -> list[str]:
        return list(self._providers)

    def get_provider_options(self) -> dict[str, dict[str, str]]:
        return {name: {} for name in self._providers}

    def get_session_options(self) -> SessionOptions:
        return self._options

    def get_modelmeta(self) -> ModelMetadata:
        proto = self._proto()
        custom = {p.key: p.value for p in proto.metadata_props}
        graph = proto.graph
        return ModelMetadata(
            proto.producer_name,
            graph.name,
            graph.doc_string,
            proto.doc_string,
            proto.domain,
            proto.model_version if proto.HasField("model_version") else 2**63 - 1,  # as onnxruntime
            custom,
        )

    def _argument(self, info: ValueInfo) -> NodeArg:
        if info.dtype is None:
            declared = {v.name: v.type for v in (*self._proto().graph.input, *self._proto().graph.output)}
            kind = type_string(declared[info.name])
        else:
            kind = f"tensor({_ELEMENTS.get(info.dtype.name, info.dtype.name)})"
            kind = {"sequence": f"seq({kind})", "optional": f"optional({kind})"}.get(info.kind, kind)
        shape = info.shape if info.kind != "sequence" else None  # onnxruntime gives none for sequences
        return NodeArg(info.name, kind, list(shape or ()))

    def _proto(self) -> Any:
        """The model file again, without its weights: only these rarely asked facts need it."""
        import onnx

        if self._meta is None:
            if isinstance(self._source, bytes):
                self._meta = onnx.ModelProto.FromString(self._source)
            else:
                self._meta = onnx.load(self._source, load_external_data=False)
            del self._meta.graph.initializer[:]
        return self._meta


def get_available_providers() -> list[str]:
    """Names of the providers that are installed here, the best first; `ep doctor` says whether they work."""
    from importlib.util import find_spec

    packages = {"MLXExecutionProvider": "mlx", "JAXExecutionProvider": "jax"}
    return [name for name, package in packages.items() if find_spec(package)] + [_HOST]


def _usable(providers: Sequence[str | tuple[str, Mapping[Any, Any]]] | None) -> list[str]:
    """The names that are ours, in order; others are skipped with a warning, as onnxruntime does."""
    names = [p if isinstance(p, str) else p[0] for p in providers or ()]
    for name in names:
        if name not in _DEVICES:
            warnings.warn(
                f"Specified provider '{name}' is not in available provider names."
                f"Available providers: '{', '.join(_DEVICES)}'",
                stacklevel=3,
            )
    return [name for name in names if name in _DEVICES] or ([_HOST] if names else [])
