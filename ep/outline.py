"""Which model is this, whatever the data of its weights? A digest of all else, and where these data lie.

Large tensors are external data when a model has been read (`ep.wire`), in its own file or in another one. Two models
that differ in nothing but these data, and in where they lie, have the same digest; so has a context model whatever
its context holds, so that the context may name it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ep import model_metadata
from ep.context_reader import is_context
from ep.places import Place
from ep.proto_graphs import graphs
from ep.wire import LARGE

if TYPE_CHECKING:
    import onnx

KEY = "ep.plan_data"  # in a model's metadata: name → [location, offset, length]
_OF_CONTEXTS = frozenset(("source", "partition_name"))  # what of an EPContext node does not change with what it stores


@dataclass(frozen=True, slots=True)
class Outline:
    """The digest (SHA-256), and the places of all data that it leaves out, by the name of their value.

    `extras` are data beside those of the model: what a stored plan brings.
    """

    digest: str
    places: Mapping[str, Place]
    extras: Mapping[str, Place]


def outline(proto: onnx.ModelProto) -> Outline | None:
    """The outline of a model as it was read; `None` where data have no name of their own, or lie in no file."""
    import onnx

    if proto.graph.sparse_initializer:
        return None
    bare = onnx.ModelProto()
    bare.CopyFrom(proto)
    places: dict[str, Place] = {}
    try:
        for name, tensor in _tensors(bare):
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                if name in places:
                    return None
                places[name] = _taken_out(tensor, name)
            elif len(tensor.raw_data) >= LARGE:
                return None
    except (ValueError, IndexError):  # it is malformed; who loads it says how
        return None
    for graph in graphs(bare.graph):
        for node in graph.node:
            if is_context(node):
                _replace(node, "attribute", [a for a in node.attribute if a.name in _OF_CONTEXTS])
    _replace(bare, "metadata_props", [p for p in bare.metadata_props if not p.key.startswith("ep.")])  # more places
    digest = hashlib.sha256(bare.SerializeToString(deterministic=True)).hexdigest()
    return Outline(digest, places, _extras(proto))


def write_extras(proto: onnx.ModelProto, extras: Iterable[Place]) -> None:
    """Says in a model's metadata where data lie that are none of its weights."""
    model_metadata.write(proto, KEY, {p.name: [p.location, p.offset, p.length] for p in extras})


def _extras(proto: onnx.ModelProto) -> dict[str, Place]:
    found: dict[str, Place] = {}

    def take(rows: Any) -> None:
        for name, (location, offset, length) in rows.items():
            found[name] = Place(name, str(location), int(offset), int(length))

    model_metadata.read(proto, KEY, take)
    return found


def _replace(message: Any, field: str, kept: list[Any]) -> None:
    message.ClearField(field)
    getattr(message, field).extend(kept)


def _tensors(proto: onnx.ModelProto) -> Iterator[tuple[str, onnx.TensorProto]]:
    """All tensors, each with the name of the value that it is, or one made of the node's and the attribute's."""
    for graph in graphs(proto.graph):
        yield from ((tensor.name, tensor) for tensor in graph.initializer)
        yield from _of_nodes(graph.node)
    for function in proto.functions:
        yield from _of_nodes(function.node)


def _of_nodes(nodes: Any) -> Iterator[tuple[str, onnx.TensorProto]]:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                constant = node.op_type == "Constant" and not node.domain
                yield node.output[0] if constant else f"{node.output[0]}/{attribute.name}", attribute.t
            for number, tensor in enumerate(attribute.tensors):
                yield f"{node.output[0]}/{attribute.name}/{number}", tensor


def _taken_out(tensor: onnx.TensorProto, name: str) -> Place:
    """The place of external data, which is taken out of the tensor."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    tensor.ClearField("external_data")
    offset, length = (int(entries.get(key) or 0) for key in ("offset", "length"))
    return Place(name, entries.get("location", ""), offset, length or _bytes(tensor))


def _bytes(tensor: onnx.TensorProto) -> int:
    import math

    import onnx_ir as ir

    return (math.prod(tensor.dims) * ir.DataType(tensor.data_type).bitwidth + 7) // 8
