"""How does a context model become an ordinary one again? Each EPContext node is replaced by the graph it stands for.

The graph is the portable part of its container, checked against the node; compiled code comes back beside it, for
the session to use or not. Nothing is run here.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ep.container import Boundary, Container, Partition, damaged, is_container, unpack
from ep.errors import NoEpForContextSource
from ep.proto_graphs import graphs, rename, walk

if TYPE_CHECKING:
    import onnx

DOMAIN, OP_TYPE = "com.microsoft", "EPContext"
ORDER = "ep.order"  # metadata of a node: its place in the original graph
CONTEXTS = "ep.contexts"  # key in `model.graph.meta`: the containers that a model brought
_PLACE = re.compile("[0-9]{1,9}")
_HASH = re.compile(r"sha256=([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class Brought:
    """A container, what to call it in messages, and the file that it is in, unless that is the model's."""

    name: str
    container: Container
    file: Path | None = None


def read_contexts(
    proto: onnx.ModelProto, directories: Sequence[Path], name: str, sources: Sequence[str] = ()
) -> Contexts | None:
    """The containers of a context model, each read once; `None` of other models. `sources` are those of our providers.

    Containers in files must lie in or below one of the `directories`, of which the first is the model's.

    Raises:
        InvalidModel: a node or its blob is damaged or missing.
        NoEpForContextSource: a blob is none of ours, and so of another provider.
    """
    if not any(is_context(node) for node in walk(proto.graph)):
        return None
    reader = Contexts(proto, directories, name, sources)
    reader.read_primaries()
    return reader


def is_context(node: onnx.NodeProto) -> bool:
    return node.op_type == OP_TYPE and node.domain == DOMAIN


@dataclass(frozen=True, slots=True)
class Node:
    """The attributes of one EPContext node, with the schema's defaults."""

    label: str
    main: bool
    embedded: bool
    source: str
    partition: str
    payload: bytes
    notes: str
    max_size: int

    @staticmethod
    def of(node: onnx.NodeProto, model: str) -> Node:
        label = f"EPContext node '{node.name}' of {model}"
        found: dict[str, Any] = {}
        for attribute in node.attribute:
            kind = _KINDS.get(attribute.name)
            if attribute.name in found or (kind is not None and attribute.type != kind):
                raise damaged(label, f"its attribute '{attribute.name}' occurs twice or is of the wrong type.")
            found[attribute.name] = attribute.i if kind == _INT else attribute.s
        numbers = {name: found.get(name, 1) for name in ("main_context", "embed_mode")}
        for name, value in numbers.items():
            if value not in (0, 1):
                raise damaged(label, f"its attribute {name} is {value}, neither 0 nor 1.")
        texts = [found.get(name, b"").decode("utf-8", "replace") for name in ("source", "partition_name", "notes")]
        return Node(
            label, bool(numbers["main_context"]), bool(numbers["embed_mode"]), texts[0], texts[1],
            found.get("ep_cache_context", b""), texts[2], found.get("max_size", 0),
        )  # fmt: skip


_INT, _STRING = 2, 3  # onnx.AttributeProto.INT and STRING
_KINDS = dict.fromkeys(("main_context", "embed_mode", "max_size"), _INT) | dict.fromkeys(
    "ep_cache_context ep_sdk_version onnx_model_filename hardware_architecture partition_name source notes".split(),
    _STRING,
)


class Contexts:
    """The contexts of a model: what they `brought`, and, by `expand`, the graphs that they stand for."""

    def __init__(self, proto: onnx.ModelProto, directories: Sequence[Path], name: str, sources: Sequence[str]) -> None:
        self.proto, self.directories, self.name, self.sources = proto, directories, name, sources
        self.brought: list[Brought] = []
        self.partitions: dict[tuple[str, str], Partition] = {}
        self.used: set[tuple[str, str]] = set()
        self.restored: dict[str, str] = {}  # name of a weight that crossed as bytes → the one that it had
        self.weights = {t.name: t for graph in graphs(proto.graph) for t in graph.initializer}
        self.names = {name for graph in graphs(proto.graph) for name in defined(graph)}

    def read_primaries(self) -> None:
        """Load each container once."""
        for proto in list(walk(self.proto.graph)):
            if is_context(proto) and (node := Node.of(proto, self.name)).main:
                container = self._container(node)
                file = None if node.embedded else self._path(node)
                self.brought.append(Brought(node.label, container, file))
                for partition in container.partitions:
                    key = node.source, partition.name
                    if key in self.partitions:
                        raise damaged(node.label, f"another node brought partition '{partition.name}' already.")
                    self.partitions[key] = partition

    def graphs(self) -> list[bytes | memoryview]:
        """What the nodes stand for."""
        return [self.partitions[key].graph for key in sorted(self.partitions)]

    def _container(self, node: Node) -> Container:
        blob = node.payload if node.embedded else self._external(node)
        if not is_container(blob):
            if node.source and node.source not in self.sources:
                raise NoEpForContextSource(node.source, self.sources)
            raise damaged(node.label, f"its context of {len(blob)} bytes does not begin as one.")
        if 0 < node.max_size < len(blob):
            raise damaged(node.label, f"its context has {len(blob)} bytes, more than its max_size {node.max_size}.")
        wanted = _HASH.search(node.notes)
        if wanted is not None and hashlib.sha256(blob).hexdigest() != wanted[1]:
            why = "its context differs from the SHA-256 in the node: it is damaged, or is of another model."
            raise damaged(node.label, why)
        container = unpack(blob, node.label)
        if container.source != node.source:
            raise damaged(node.label, f"its source is '{node.source}', that of its context '{container.source}'.")
        return container

    def _external(self, node: Node) -> bytes:
        """The bytes of a file beside or below the model."""
        location = node.payload.decode("utf-8", "replace")
        if not self.directories:
            raise damaged(node.label, f"its context lies in '{location}', but the model has no directory.")
        try:
            path = self._path(node)
            inside = not Path(location).is_absolute() and any(map(path.is_relative_to, self.directories))
            if location and inside:
                return path.read_bytes()
        except (OSError, ValueError, RuntimeError) as error:  # no file, a name that none can have, links in a circle
            why = getattr(error, "strerror", None) or error
            raise damaged(node.label, f"its context {location!r} cannot be read: {why}.") from error
        raise damaged(node.label, f"its context {location!r} lies outside the model's directory.")

    def _path(self, node: Node) -> Path:
        return (self.directories[0] / node.payload.decode("utf-8", "replace")).resolve()

    def expand(self) -> None:
        """Replace all EPContext nodes in place.

        Raises:
            InvalidModel: a node or its graph is damaged, or belongs to another model.
        """
        for graph in list(graphs(self.proto.graph)):
            nodes: list[onnx.NodeProto] = []
            makers = {name: node for node in graph.node for name in node.output if not is_context(node)}
            for node in graph.node:
                nodes += self._expanded(graph, node, makers) if is_context(node) else [node]
            if len(nodes) != len(graph.node) or any(is_context(node) for node in graph.node):
                nodes = [_copy(node) for node in ordered(nodes)]
                graph.ClearField("node")
                graph.node.extend(nodes)
        unused = [name for key in self.partitions if key not in self.used for name in key[1:]]
        if unused:
            raise damaged(self.name, f"no EPContext node stands for partition '{unused[0]}' of its context.")

    def _expanded(
        self, graph: onnx.GraphProto, proto: onnx.NodeProto, makers: dict[str, onnx.NodeProto]
    ) -> list[onnx.NodeProto]:
        """The nodes that an EPContext node stands for. Several may hold the same node, and then it comes once."""
        node = Node.of(proto, self.name)
        key = node.source, node.partition
        if key not in self.partitions:
            have = ", ".join(f"'{name}'" for source, name in self.partitions if source == node.source) or "none"
            raise damaged(
                node.label,
                f"no node with main_context=1 and source '{node.source}' brings its partition '{node.partition}' "
                f"(there are: {have}).",
            )
        if key in self.used:
            raise damaged(node.label, f"another node stands for partition '{node.partition}' already.")
        self.used.add(key)
        partition = self.partitions[key]
        inner = self._graph(node, partition)
        inputs = self._match(node, "input", proto.input, inner.input, partition.inputs)
        self._match(node, "output", proto.output, inner.output, partition.outputs)
        self._unpack(node, inputs, partition.inputs)
        self._name_again(inputs, [v.name for v in inner.input], partition.inputs)
        renamed = {old: new for old, new in zip((v.name for v in inner.input), inputs, strict=True) if old != new}
        rename(inner, renamed)
        nodes = [n for n in inner.node if not all(o in makers and makers[o] == n for o in n.output)]
        inner.ClearField("node")
        inner.node.extend(nodes)
        border = {v.name for v in (*inner.input, *inner.output)} | set(inputs)
        fresh = {n for each in graphs(inner) for n in defined(each)} - border
        renamed = {}
        for name in sorted(fresh & self.names):
            renamed[name] = self._free_name(f"{node.partition}/{name}")
        self.names |= fresh | set(renamed.values())
        rename(inner, renamed)
        graph.value_info.extend(info for info in inner.value_info if info.name in fresh | set(renamed.values()))
        makers |= {name: each for each in inner.node for name in each.output}
        return list(inner.node)

    def _name_again(self, names: list[str], before: Sequence[str], border: Sequence[Boundary]) -> None:
        """Give weights that crossed as bytes the names that they had, unless another value has it."""
        for index, (name, old, kind) in enumerate(zip(names, before, border, strict=True)):
            if not kind.packed or name == old:
                continue
            if old not in self.names:
                self.names.add(old)
                self.restored[name] = old
                self.weights[name].name = old
            names[index] = self.restored.get(name, name)

    def _free_name(self, name: str) -> str:
        while name in self.names:
            name += "_"
        self.names.add(name)
        return name

    def _graph(self, node: Node, partition: Partition) -> onnx.GraphProto:
        """The graph of a partition, which may hold neither weights nor contexts of its own."""
        import onnx
        from google.protobuf.message import DecodeError

        try:
            model = onnx.ModelProto.FromString(bytes(partition.graph))
        except DecodeError as error:
            raise damaged(node.label, f"the graph of partition '{partition.name}' is no ONNX: {error}.") from error
        graph = model.graph
        if model.functions or graph.initializer or graph.sparse_initializer or any(map(is_context, walk(graph))):
            raise damaged(node.label, f"the graph of partition '{partition.name}' holds more than nodes.")
        ours = {o.domain: o.version for o in self.proto.opset_import}
        for opset in model.opset_import:
            if ours.setdefault(opset.domain, opset.version) != opset.version:
                raise damaged(
                    node.label,
                    f"partition '{partition.name}' is of opset {opset.version} of domain "
                    f"'{opset.domain or 'ai.onnx'}'; the model is of {ours[opset.domain]}.",
                )
            if all(o.domain != opset.domain for o in self.proto.opset_import):
                self.proto.opset_import.append(opset)
        return graph

    def _match(
        self, node: Node, what: str, names: Sequence[str], inner: Sequence[onnx.ValueInfoProto], border: Any
    ) -> list[str]:
        """The node's names at its border, which must be those of its graph; a packed weight has another one."""
        if not len(names) == len(inner) == len(border):
            raise damaged(node.label, f"it has {len(names)} {what}s; its graph has {len(inner)}.")
        for name, info, kind in zip(names, inner, border, strict=True):
            if name != info.name and not kind.packed:
                raise damaged(
                    node.label, f"its {what} '{name}' is '{info.name}' in its context: the context is of another model."
                )
        return list(names)

    def _unpack(self, node: Node, names: Sequence[str], border: Sequence[Boundary]) -> None:
        """Check the weights among the inputs, and give those that cross as bytes their dtype again."""
        import onnx_ir as ir

        for name, kind in zip(names, border, strict=True):
            tensor = self.weights.get(name)
            code = int(ir.DataType.from_numpy(np.dtype(kind.dtype)))
            known = None if kind.shape is None or None in kind.shape else tuple(d or 0 for d in kind.shape)
            if kind.packed and (tensor is None or known is None):
                raise damaged(node.label, f"its input '{name}' is to be the bytes of a weight, and is none.")
            if tensor is None:
                continue
            if kind.packed and known is not None and tensor.data_type != code:
                size = (math.prod(known) * ir.DataType(code).bitwidth + 7) // 8
                if tensor.data_type != ir.DataType.UINT8 or tuple(tensor.dims) != (size,):
                    raise damaged(node.label, f"its weight '{name}' has not the {size} bytes of {_described(kind)}.")
                tensor.data_type = code
                tensor.ClearField("dims")
                tensor.dims.extend(known)
            elif tensor.data_type != code or (known is not None and tuple(tensor.dims) != known):
                theirs = f"{ir.DataType(tensor.data_type).name.lower()}{list(tensor.dims)}"
                raise damaged(
                    node.label, f"its weight '{name}' is {theirs}, not {_described(kind)}: it is of another model."
                )


def _described(kind: Boundary) -> str:
    return f"{kind.dtype}{[] if kind.shape is None else list(kind.shape)}"


def ordered(nodes: list[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """The nodes as the original model had them, so that the session cuts it into the same groups."""
    places = [
        next((int(p.value) for p in n.metadata_props if p.key == ORDER and re.fullmatch(_PLACE, str(p.value))), -1)
        for n in nodes
    ]
    return [node for _, node in sorted(zip(places, nodes, strict=True), key=lambda pair: pair[0])]


def defined(graph: onnx.GraphProto) -> Iterator[str]:
    """The names that a graph gives to values, without its subgraphs."""
    yield from (v.name for v in graph.input)
    yield from (t.name for t in graph.initializer)
    yield from (name for node in graph.node for name in node.output if name)


def _copy(node: onnx.NodeProto) -> onnx.NodeProto:
    made = type(node)()
    made.CopyFrom(node)
    return made
