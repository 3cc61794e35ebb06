"""What does a model file declare? Its inputs, outputs and metadata, read without its weights, and the options' changes.

`open_model` gives what `ep.load` should load: the file itself wherever it can, so that its weights stay mapped, and
a changed model only where the options replace initializers.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ep.onnxruntime.elements import DTYPES, NAMES, STRING
from ep.onnxruntime.errors import Fail, InvalidArgument, InvalidProtobuf, NoSuchFile, failure
from ep.onnxruntime.pybind import STATE, anything, unpicklable
from ep.onnxruntime.recent import MOST_BYTES, Key, digest
from ep.wire import IN_FILE, skeleton

if TYPE_CHECKING:
    import onnx

    from ep.onnxruntime.options import SessionOptions

MAX_IR_VERSION = 14  # of onnxruntime 1.32
FOLDER = "session.model_external_initializers_file_folder_path"  # of models given as bytes
UNSET = 2**63 - 1  # model_version, where the file has none
Dims = list[int | str | None]


class NodeArg:
    """An input or output: its name, its type such as `tensor(float)`, and its shape."""

    __module__ = STATE
    __slots__ = ("_name", "_type", "_shape", "__weakref__")
    __reduce_ex__ = unpicklable

    def __init__(self, name: str, kind: str, shape: Dims | None) -> None:
        self._name, self._type, self._shape = name, kind, shape

    name = property(lambda self: self._name, doc="The name.")
    type = property(lambda self: self._type, doc="`tensor(float)`, `seq(map(int64,tensor(float)))`, …")
    shape = property(
        lambda self: list(self._shape or ()),
        doc="Sizes, names, and `None` for unknown; empty for scalars, unknown ranks and sequences.",
    )

    def __str__(self) -> str:
        return f"NodeArg(name='{self._name}', type='{self._type}', shape={self.shape})"


class ModelMetadata:
    """What the model file says of itself."""

    __module__ = STATE
    __reduce_ex__ = unpicklable

    producer_name = anything("Who made the file.")
    graph_name = anything("The graph's name.")
    graph_description = anything("The graph's documentation.")
    description = anything("The model's documentation.")
    domain = anything("The model's domain.")
    version = anything("The model's version; the largest 64-bit integer where the file has none.")
    custom_metadata_map = anything("The file's own keys and values, a `dict`.")

    def __init__(self, proto: onnx.ModelProto) -> None:
        self._values: dict[str, Any] = {}
        self.producer_name = proto.producer_name
        self.graph_name = proto.graph.name
        self.graph_description = proto.graph.doc_string
        self.description = proto.doc_string
        self.domain = proto.domain
        self.version = proto.model_version if proto.HasField("model_version") else UNSET
        self.custom_metadata_map = {p.key: p.value for p in proto.metadata_props}


@dataclass(frozen=True)
class Opened:
    """A model: what to load, what it declares, and what onnxruntime says in front of errors about it."""

    source: Any
    proto: onnx.ModelProto  # without its large tensors
    where: str


def open_model(path: str | None, content: bytes | None, options: SessionOptions) -> Opened:
    """The model of a path or of bytes.

    Raises:
        NoSuchFile, InvalidProtobuf, InvalidArgument, Fail: it is not there, or no model that can be read.
    """
    from ep.mapping import read_only

    where = "" if path is None else f"Load model from {path} failed:"
    data: Any = content
    if path is not None:
        file = Path(path)
        if not file.exists():
            raise failure(NoSuchFile, f"{where}Load model {path} failed. File doesn't exist")
        if not file.is_file():
            raise failure(InvalidProtobuf, f"{where}Protobuf parsing failed.")
        data = read_only(file)
    proto = _parse(data, where)
    if not proto.HasField("graph"):
        raise failure(InvalidArgument, f"{where}No graph was found in the protobuf.")
    if proto.ir_version > MAX_IR_VERSION:
        raise failure(
            Fail,
            f"{where}Unsupported model IR version: {proto.ir_version}, max supported IR version: {MAX_IR_VERSION}\n",
        )
    override_dimensions(proto.graph, options)
    outside = _check_external(proto.graph, path, options)
    changed = options._initializers or options._files or FOLDER in options._entries
    if not changed and (path is not None or not outside):
        return Opened(path if path is not None else content, proto, where)
    return Opened(_full(path, content, options), proto, where)


def identity(path: str | None, content: bytes | None, options: SessionOptions) -> Key | None:
    """What tells this model, as these options load it, from every other; `None` where that is not known for sure."""
    from ep.registry import OPS

    if options._initializers or options._files or FOLDER in options._entries:
        return None
    try:
        data = content if path is None else Path(path).read_bytes() if _small(path) else None
    except OSError:
        return None
    mark = None if data is None else digest(data)
    if data is None or mark is None or any(word in data for word in (b"external_data", b"location", b"EPContext")):
        return None
    changes = (*sorted(options._dims.items()), *sorted(options._denotations.items()))
    return Key(len(data), (path, mark, changes, len(OPS)))


def _folder(path: str | None, options: SessionOptions) -> str:
    """Where data files lie: the folder of the options, else that of the model, else the working directory."""
    return options._entries.get(FOLDER, os.path.dirname(path or "") or os.curdir)


def _check_external(graph: onnx.GraphProto, path: str | None, options: SessionOptions) -> bool:
    """Whether initializers lie outside the model file; `Fail` if one of their files is not there."""
    folder, found = os.path.abspath(_folder(path, options)), False
    for tensor in graph.initializer:
        location = next((entry.value for entry in tensor.external_data if entry.key == "location"), IN_FILE)
        if location == IN_FILE or tensor.name in options._initializers:
            continue
        found = True
        if location in options._files or os.path.exists(os.path.join(folder, location.replace("\0", "?"))):
            continue
        escapes = "External data path for model loaded from bytes escapes working directory. " if path is None else ""
        where = os.path.join(folder, location)
        raise _unusable(tensor.name, f'{escapes}External data path does not exist: "{where}"')
    return found


def _unusable(name: str, reason: object) -> Exception:
    return failure(Fail, f"External data path validation failed for initializer: {name}. Error: {reason}")


def _small(path: str) -> bool:
    return Path(path).is_file() and Path(path).stat().st_size <= MOST_BYTES


def _parse(data: Any, where: str) -> onnx.ModelProto:
    import onnx
    from google.protobuf.message import DecodeError

    try:
        return onnx.ModelProto.FromString(skeleton(data))
    except DecodeError as cause:
        reason = "Protobuf parsing failed." if where else "Failed to load model because protobuf parsing failed."
        raise failure(InvalidProtobuf, where + reason) from cause


# Changes that options make.


def override_dimensions(graph: onnx.GraphProto, options: SessionOptions) -> None:
    """Gives symbolic dimensions the sizes of the options."""
    if not options._dims and not options._denotations:
        return
    sizes = dict(options._dims)
    for value in graph.input:
        for dim in value.type.tensor_type.shape.dim:
            if dim.denotation in options._denotations and dim.dim_param:
                sizes[dim.dim_param] = options._denotations[dim.denotation]
    for value in [*graph.input, *graph.output, *graph.value_info]:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in sizes:
                dim.dim_value = sizes[dim.dim_param]


def _full(path: str | None, content: bytes | None, options: SessionOptions) -> onnx.ModelProto:
    """The whole model with the initializers of the options in place of its own."""
    import onnx
    from onnx import numpy_helper

    if path is not None:
        model = onnx.load(path, load_external_data=False)
    else:
        model = onnx.ModelProto.FromString(content or b"")
    directory = _folder(path, options)
    for tensor in model.graph.initializer:
        replacement = options._initializers.get(tensor.name)
        if replacement is not None:
            value = getattr(replacement, "_ortvalue", replacement)
            tensor.CopyFrom(numpy_helper.from_array(value._view(), tensor.name))
        elif tensor.data_location == onnx.TensorProto.EXTERNAL:
            try:
                _bring(tensor, options, directory)
            except (OSError, ValueError, onnx.checker.ValidationError) as cause:
                raise _unusable(tensor.name, cause) from cause
    return model


def _bring(tensor: onnx.TensorProto, options: SessionOptions, directory: str) -> None:
    """Puts the data of a tensor that lie in a file, or in memory that the options name, into the model."""
    from onnx import external_data_helper

    place = external_data_helper.ExternalDataInfo(tensor)
    if place.location not in options._files:
        external_data_helper.load_external_data_for_tensor(tensor, directory)
        return
    start = place.offset or 0
    end = start + place.length if place.length else None
    tensor.raw_data = bytes(options._files[place.location][start:end])
    del tensor.external_data[:]
    tensor.data_location = tensor.DEFAULT


# What is declared.


def type_string(proto: onnx.TypeProto) -> str:
    """`tensor(float)`, `seq(map(string,tensor(float)))`, …; empty where nothing is declared."""
    kind = proto.WhichOneof("value")
    if kind == "map_type":
        return f"map({NAMES[proto.map_type.key_type]},{type_string(proto.map_type.value_type)})"
    if kind == "sequence_type":
        return f"seq({type_string(proto.sequence_type.elem_type)})"
    if kind == "optional_type":
        return f"optional({type_string(proto.optional_type.elem_type)})"
    if kind in ("tensor_type", "sparse_tensor_type"):
        number = getattr(proto, kind).elem_type
        return f"{kind.removesuffix('_type')}({NAMES[number]})" if number in NAMES else ""
    return ""


def dims_of(proto: onnx.TypeProto) -> Dims | None:
    """The declared shape of a tensor (or of an optional tensor); `None` for an unknown rank and everything else."""
    if proto.HasField("optional_type"):
        proto = proto.optional_type.elem_type
    if not proto.HasField("tensor_type") or not proto.tensor_type.HasField("shape"):
        return None
    return [_dim(dim) for dim in proto.tensor_type.shape.dim]


def _dim(dim: Any) -> int | str | None:
    if dim.HasField("dim_value"):
        return dim.dim_value if dim.dim_value >= 0 else None
    return dim.dim_param or None


def element_of(proto: onnx.TypeProto) -> np.dtype[Any] | None:
    """The dtype of a tensor, or of the tensors in a sequence or an optional; `None` for maps."""
    for wrapper in ("optional_type", "sequence_type", "optional_type"):
        if proto.HasField(wrapper):
            proto = getattr(proto, wrapper).elem_type
    return DTYPES.get(proto.tensor_type.elem_type) if proto.HasField("tensor_type") else None


def argument(value: onnx.ValueInfoProto) -> NodeArg:
    """An input as users see it."""
    return NodeArg(value.name, type_string(value.type), dims_of(value.type))


def overridable(proto: onnx.ModelProto) -> set[str]:
    """Names of inputs that have an initializer as their default."""
    given = {tensor.name for tensor in proto.graph.initializer}
    given |= {sparse.values.name for sparse in proto.graph.sparse_initializer}
    return {value.name for value in proto.graph.input if value.name in given}


# Outputs: what is declared and what can be inferred.


def outputs(proto: onnx.ModelProto, inferred: onnx.GraphProto | None) -> list[NodeArg]:
    """The outputs with shapes and types that the model does not declare but the operators imply."""
    known = {value.name: value.type for value in inferred.output} if inferred is not None else {}
    names = _dimension_names(proto.graph)
    return [_output(value, known.get(value.name), names) for value in proto.graph.output]


def _output(value: onnx.ValueInfoProto, inferred: onnx.TypeProto | None, names: set[str]) -> NodeArg:
    kind = type_string(value.type) or ("" if inferred is None else type_string(inferred))
    declared = dims_of(value.type)
    if inferred is None or (found := dims_of(inferred)) is None:
        return NodeArg(value.name, kind, declared)
    return NodeArg(value.name, kind, merged(declared, [_original(dim, names) for dim in found]))


def _original(dim: int | str | None, names: set[str]) -> int | str | None:
    """Inference invents names such as `unk__0`; they are unknown dimensions."""
    return None if isinstance(dim, str) and dim not in names else dim


def merged(declared: Dims | None, inferred: Dims) -> Dims:
    """Both shapes as one; where two sizes contradict each other, only what they agree on is kept."""
    if declared is None:
        return inferred
    if len(declared) != len(inferred):
        return declared
    pairs = list(zip(declared, inferred, strict=True))
    if any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in pairs):
        return [a if a == b else None for a, b in pairs]
    return [b if a is None or (isinstance(a, str) and isinstance(b, int)) else a for a, b in pairs]


def _dimension_names(graph: onnx.GraphProto) -> set[str]:
    values: Iterable[Any] = [*graph.input, *graph.output, *graph.value_info]
    return {dim for value in values for dim in dims_of(value.type) or () if isinstance(dim, str)}


_INCOMPATIBLE = re.compile(r"op_type:(\w+)(?:, node name: (.*?))?\): (\[\w+\] Incompatible dimensions[^\n]*)")


def infer(proto: onnx.ModelProto, where: str) -> onnx.GraphProto | None:
    """The graph with inferred shapes, its declared outputs left aside; `None` where inference fails.

    Raises:
        Fail: operands can never fit, whatever is fed.
    """
    import onnx

    open_ended = onnx.ModelProto()
    open_ended.CopyFrom(proto)
    for value in open_ended.graph.output:
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.ClearField("shape")
    for strict in (True, False):
        with contextlib.suppress(onnx.shape_inference.InferenceError, RuntimeError, ValueError):
            try:
                return onnx.shape_inference.infer_shapes(open_ended, strict_mode=strict).graph
            except onnx.shape_inference.InferenceError as error:
                found = _INCOMPATIBLE.search(str(error))
                if found:
                    raise failure(Fail, f"{where}Node ({found[2] or ''}) Op ({found[1]}) {found[3]}") from error
                raise
    return None


def is_string(dtype: np.dtype[Any] | None) -> bool:
    """Whether elements are strings."""
    return dtype is not None and dtype == DTYPES[STRING]
