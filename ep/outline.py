"""Which model is this, whatever the data of its weights? A digest of all else, and where these data lie.

Large tensors are external data when a model has been read (`ep.wire`), in its own file or in another one. Two models
that differ in nothing but these data, and in where they lie, have the same digest; so has a context model whatever
its context holds, so that the context may name it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ep import model_metadata
from ep.context_reader import is_context
from ep.places import Place
from ep.proto_graphs import graphs, subgraphs
from ep.safetensors import DTYPES
from ep.wire import LARGE

if TYPE_CHECKING:
    import onnx

KEY = "ep.plan_data"  # in a model's metadata: name → [location, offset, length]
_OF_CONTEXTS = frozenset(("source", "partition_name"))  # what of an EPContext node does not change with what it stores
_PACKED = {"INT4": 4, "UINT4": 4, "INT2": 2, "UINT2": 2, "COMPLEX128": 128}
_BITS = {name: bits for bits, names in DTYPES.values() for name in names} | _PACKED  # of an element


@dataclass(frozen=True, slots=True)
class Outline:
    """The digest (SHA-256), and the places of all data that it leaves out, by the name of their value.

    Where values share their data, which the digest says, one of them has the place. `extras` are data beside those of
    the model: what a stored plan brings.
    """

    digest: str
    places: Mapping[str, Place]
    extras: Mapping[str, Place]


def outline(proto: onnx.ModelProto, stands_for: Iterable[bytes | memoryview] = ()) -> Outline | None:
    """The outline of a model as it was read; `None` where data lie in no file.

    `stands_for` are the graphs that the model's EPContext nodes stand for, in an order that follows from the model.
    """
    import onnx

    bare = onnx.ModelProto()
    bare.CopyFrom(proto)
    named: dict[str, Place] = {}
    try:
        for name, tensor in _tensors(bare):
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                while name in named:  # in another scope
                    name += "'"
                named[name] = _taken_out(tensor, name)
            elif len(tensor.raw_data) >= LARGE:
                return None
    except (ValueError, IndexError, KeyError):  # it is malformed; who loads it says how
        return None
    for graph in graphs(bare.graph):
        for node in graph.node:
            if is_context(node):
                _replace(node, "attribute", [a for a in node.attribute if a.name in _OF_CONTEXTS])
    _replace(
        bare, "metadata_props", [p for p in bare.metadata_props if not str(p.key).startswith("ep.")]
    )  # more places
    digest = hashlib.sha256()
    for part in (bare.SerializeToString(deterministic=True), *stands_for):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    owners: dict[tuple[str, int, int], str] = {}
    for name, place in named.items():
        owner = owners.setdefault((place.location, place.offset, place.length), name)
        if owner != name:
            digest.update(f"{len(name)} {name} {owner}".encode())
    return Outline(digest.hexdigest(), {name: named[name] for name in owners.values()}, _extras(proto))


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
    yield from _of_graph(proto.graph, "")
    for function in proto.functions:
        yield from _of_nodes(function.node, f"{function.domain}/{function.name}/{function.overload}/")


def _of_graph(graph: onnx.GraphProto, prefix: str) -> Iterator[tuple[str, onnx.TensorProto]]:
    if graph.sparse_initializer:
        raise ValueError("sparse tensors have data elsewhere")
    yield from ((f"{prefix}{tensor.name}", tensor) for tensor in graph.initializer)
    yield from _of_nodes(graph.node, prefix)


def _of_nodes(nodes: Any, prefix: str) -> Iterator[tuple[str, onnx.TensorProto]]:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                constant = node.op_type == "Constant" and not node.domain
                value = node.output[0] if constant else f"{node.output[0]}/{attribute.name}"
                yield f"{prefix}{value}", attribute.t
            for number, tensor in enumerate(attribute.tensors):
                yield f"{prefix}{node.output[0]}/{attribute.name}/{number}", tensor
        for graph in subgraphs(node):
            yield from _of_graph(graph, prefix)


def _taken_out(tensor: onnx.TensorProto, name: str) -> Place:
    """The place of external data, which is taken out of the tensor. `ValueError` if they are not of its size."""
    import onnx

    entries = {entry.key: entry.value for entry in tensor.external_data}
    bits = math.prod(tensor.dims) * _BITS[onnx.TensorProto.DataType.Name(tensor.data_type)]
    offset, length = int(entries.get("offset") or 0), (bits + 7) // 8
    if int(entries.get("length") or length) != length or len(entries) != len(tensor.external_data):
        raise ValueError(f"the data of '{name}' are not of its size")
    tensor.ClearField("external_data")
    return Place(name, entries.get("location", ""), offset, length)
