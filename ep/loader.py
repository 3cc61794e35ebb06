"""How a file, bytes or a `ModelProto` becomes an `onnx_ir.Model`, without reading its weights."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ep import stored_results, wide_weights
from ep.context_reader import CONTEXTS, Contexts, read_contexts
from ep.errors import InvalidModel, did_you_mean
from ep.mapping import Content, read_only
from ep.named_weights import attach
from ep.proto_graphs import in_order
from ep.scopes import check_cycles, define_missing
from ep.structure import PROBLEMS, mend, understood
from ep.weights import WeightStore, directories
from ep.wire import skeleton

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir

MAP_TYPES = "ep.map_types"  # key in `model.graph.meta`: value name → type, which `onnx_ir` cannot hold
Source = Any  # str | os.PathLike | bytes | onnx.ModelProto


def load_model(
    source: Source, weights: Any = None, *, copy: bool = False, sources: Sequence[str] = ()
) -> tuple[ir.Model, WeightStore, str]:
    """The model, the store of its weights, and a name for messages; `InvalidModel` says what is wrong with it.

    `weights` names safetensors files (see `ep.named_weights`); `copy` reads files into memory instead of mapping them.
    `sources` are the EPContext sources that the session's providers accept.
    """
    proto, store, name = read_proto(source, copy=copy)
    contexts = read_contexts(proto, store.directories, name, sources)
    return build_model(proto, store, name, contexts, weights), store, name


def build_model(
    proto: onnx.ModelProto, store: WeightStore, name: str, contexts: Contexts | None, weights: Any = None
) -> ir.Model:
    """The model of a protobuf, which is changed on the way, and of the contexts that were read from it."""
    import onnx_ir as ir

    if contexts is not None:
        contexts.expand()
    if weights is not None:  # after the contexts, which give weights the names that they had
        attach(proto, store, weights, name)
    problems = mend(proto, name)
    maps = _take_map_types(proto.graph)
    with understood(name, problems):
        ordered = in_order(proto.graph)
        if not ordered:
            problems += define_missing(proto.graph)
            check_cycles(proto.graph, name, problems)
        model = ir.serde.deserialize_model(proto)
        if not ordered:
            model.graph.sort()
        brought = () if contexts is None else tuple(contexts.brought)
        model.graph.meta.update({MAP_TYPES: maps, CONTEXTS: brought, PROBLEMS: problems})
    read_copies(proto, store)
    return model


def read_copies(proto: onnx.ModelProto, store: WeightStore) -> None:
    """Tells the store in which other forms a packed model has its weights."""
    wide_weights.read(proto, store)
    stored_results.read(proto, store)


def read_proto(source: Source, weights: Any = None, *, copy: bool = False) -> tuple[onnx.ModelProto, WeightStore, str]:
    """As `load_model`, but the protobuf: its large tensors are external data of the store."""
    proto, store, name = _read(source, copy)
    _check_envelope(proto, name)
    if weights is not None:
        attach(proto, store, weights, name)
    return proto, store, name


def _read(source: Source, copy: bool) -> tuple[onnx.ModelProto, WeightStore, str]:
    """The protobuf without its large tensors, and the store that has them."""
    import onnx

    if isinstance(source, onnx.ModelProto):
        proto = onnx.ModelProto()
        proto.CopyFrom(source)
        return proto, WeightStore(copy=copy), proto.graph.name or "model"
    if isinstance(source, bytes | bytearray | memoryview):
        content = bytes(source)
        return _parse(content, "model"), WeightStore(own=content, copy=copy), "model"
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        content = _content(path, copy)
        return (
            _parse(content, path.name),
            WeightStore(directories(path), own=content, name=path.name, file=path, copy=copy),
            path.name,
        )
    raise TypeError(f"load expects a path, bytes or an onnx.ModelProto, not {type(source).__name__}")


def _parse(content: Content, name: str) -> onnx.ModelProto:
    import onnx
    from google.protobuf.message import DecodeError

    if bytes(content[4:8]) == b"ORTM":
        raise InvalidModel(
            f"{name} is not an ONNX model: it is in onnxruntime's own format (.ort).",
            why="that format holds a graph prepared for one version of onnxruntime.",
            fix="load the .onnx file that it was made from.",
        )
    try:
        return onnx.ModelProto.FromString(skeleton(content))
    except DecodeError as error:
        why, fix = _foreign(content) or (str(error), "check that the file is complete, and that it is an ONNX model.")
        raise InvalidModel(
            f"{name} is not an ONNX model: protobuf cannot parse its {len(content)} bytes.", why=why, fix=fix
        ) from error


_FOREIGN = (  # how files begin that are taken for models
    (b"version https://git-lfs", "it is a pointer of Git LFS, not the file itself.", "fetch the file: git lfs pull."),
    (b"PK\x03\x04", "it is a zip archive, such as PyTorch saves.", "export the model to ONNX (torch.onnx.export)."),
    (b"\x80", "it looks like a pickle, such as PyTorch saves.", "export the model to ONNX (torch.onnx.export)."),
    (b"GGUF", "it is a GGUF file.", "export the original model to ONNX."),
    (b"\x89HDF", "it is an HDF5 file, such as Keras saves.", "export the model to ONNX."),
    (b"<", "it is text, such as the page with which a server answers.", "download the file itself."),
    (b"{", "it is text, such as JSON.", "name the .onnx file."),
)


def _foreign(content: Content) -> tuple[str, str] | None:
    """What a file is that is no model, where its first bytes tell, and what to do about it."""
    if not len(content):
        return "the file is empty.", "copy or download it again."
    start = bytes(content[:32])
    return next(((why, fix) for magic, why, fix in _FOREIGN if start.startswith(magic)), None)


def _content(path: Path, copy: bool) -> Content:
    try:
        return read_only(path, copy=copy)
    except (OSError, ValueError) as error:  # a NUL in the path
        raise InvalidModel(
            f"the model file '{path}' cannot be read.",
            why=str(getattr(error, "strerror", None) or error) + _similar(path),
            fix="check the path.",
        ) from error


def _similar(path: Path) -> str:
    """The model of a similar name in the folder of a file that is not there."""
    try:
        beside = [] if path.exists() else [other.name for other in path.parent.glob("*.onnx")]
    except (OSError, ValueError):
        return ""
    guess = did_you_mean(path.name, beside)
    return f".{guess}" if guess else ""


def _check_envelope(proto: onnx.ModelProto, name: str) -> None:
    if not proto.HasField("graph") or not (proto.graph.node or proto.graph.output):
        empty = not proto.ByteSize()
        raise InvalidModel(
            f"{name} holds no graph.",
            why="the file is empty." if empty else "the file parses as protobuf, but its graph is missing or empty.",
            fix="check that the file is complete and that it is an ONNX model.",
        )
    if not proto.opset_import:
        default = proto.opset_import.add()  # IR version 1 and 2 knew one opset only
        default.domain, default.version = "", 1


def _take_map_types(graph: onnx.GraphProto) -> dict[str, str]:
    """Removes map types from the values that have them and returns them as onnxruntime writes them."""
    taken = {}
    for value in [*graph.input, *graph.output, *graph.value_info]:
        text = type_string(value.type)
        if "map(" in text:
            taken[value.name] = text
            value.ClearField("type")
    return taken


def type_string(proto: onnx.TypeProto) -> str:
    """`tensor(float)`, `seq(map(string,tensor(float)))`, …"""
    kind = proto.WhichOneof("value")
    if kind == "map_type":
        return f"map({_element(proto.map_type.key_type)},{type_string(proto.map_type.value_type)})"
    if kind in ("sequence_type", "optional_type"):
        name = "seq" if kind == "sequence_type" else "optional"
        return f"{name}({type_string(getattr(proto, kind).elem_type)})"
    if kind == "tensor_type":
        return f"tensor({_element(proto.tensor_type.elem_type)})"
    return kind or "unknown"


def map_type(text: str) -> onnx.TypeProto:
    """The type that `type_string` writes so."""
    import onnx

    made, (kind, _, inner) = onnx.TypeProto(), text.rstrip(")").partition("(")
    if kind == "map":
        key, _, value = inner.partition(",")
        made.map_type.key_type = _code(key)
        made.map_type.value_type.CopyFrom(map_type(value))
    elif kind in ("seq", "optional"):
        outer = made.sequence_type if kind == "seq" else made.optional_type
        outer.elem_type.CopyFrom(map_type(inner))
    else:
        made.tensor_type.elem_type = _code(inner)
    return made


def _code(element: str) -> int:
    import onnx

    return onnx.TensorProto.DataType.Value(element.upper())


def _element(code: int) -> str:
    import onnx

    return onnx.TensorProto.DataType.Name(code).lower()
