"""How does a session become a context model? Each compiled group of nodes becomes one `com.microsoft::EPContext` node.

The schema is onnxruntime's. The first node of a source carries the container (`main_context=1`), for all partitions
and signatures; the others name their partition in it. Weights stay initializers, and are inputs of the nodes. Nodes of
the host, and groups with a border that such a node cannot have, stay as they are.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ep import context_weights
from ep.backend import NotStorable
from ep.container import Boundary, Code, Container, Cut, Partition, pack
from ep.context_reader import CONTEXTS, DOMAIN, OP_TYPE, ORDER, defined
from ep.context_slice import carriable
from ep.context_types import tensor_info, tensor_type
from ep.data_files import DataFile
from ep.errors import UnsupportedContext, counted
from ep.identity import fingerprint
from ep.library import Library
from ep.loader import MAP_TYPES, map_type
from ep.one_opset import shared_opsets
from ep.packing import write
from ep.partition import Group
from ep.proto_graphs import graphs, order, outer_reads, rename, subgraphs, walk
from ep.provider import HOST
from ep.wire import LARGE

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir

    from ep.stored_plan import ForContext, Kept
    from ep.weights import WeightStore

SUFFIX = ".epctx"
MOST_EMBEDDED = 3 << 29  # bytes; a protobuf file ends at 2 GiB
CARRIED = frozenset(  # element types of the node's schema
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 bfloat16".split()
)


@dataclass(frozen=True, slots=True)
class Saved:
    """What was written: the files, the partitions, the stored functions with their bytes, and what was left out.

    `weights` are files made for weights that have no file beside the model; the model reads others, too.
    """

    model: Path
    blobs: tuple[Path, ...]
    weights: tuple[Path, ...]
    partitions: int
    functions: int
    blob_bytes: int
    left_out: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """What a context model is made from: a session's graph and groups, its stored code, and where its weights lie."""

    name: str
    model: ir.Model
    dtypes: Mapping[Any, np.dtype | None]
    groups: Sequence[Group]
    providers: Sequence[Any]
    library: Library
    store: WeightStore
    plan: Callable[[onnx.ModelProto, Sequence[bytes | memoryview], bool], ForContext | None]  # of the context model

    @property
    def files(self) -> list[Path]:
        """The files that the session reads."""
        brought = (one.file for one in self.model.graph.meta[CONTEXTS])
        return [*self.store.files, *(file for file in brought if file is not None)]


def write_model(source: Source, path: Path, *, embed: bool, portable_only: bool) -> Saved:
    """Write the context model, and its container beside it unless it is to be embedded.

    Raises:
        UnsupportedContext: no group of the model can be stored.
        InvalidInput: a file cannot be written, or would replace one that the session reads.
    """
    writer = _Writer(source)
    writer.cover()
    blobs = writer.finish(portable_only, embed)
    embed = embed and sum(map(len, blobs.values())) < MOST_EMBEDDED
    names = {key: f"{path.stem}{f'_{i}' if i else ''}{SUFFIX}" for i, key in enumerate(blobs)}
    for node in writer.primaries:
        where = _text(node, "source")
        _set(node, embed_mode=int(embed), ep_cache_context=blobs[where] if embed else names[where])
    weights = context_weights.place(writer.proto, source.store, path, embed, writer.extras, writer.kept)
    files = [] if embed else [DataFile(names[key], blob, ()) for key, blob in blobs.items()]
    write(path, writer.proto, [*weights, *files], source.files)
    size = sum(map(len, blobs.values()))
    blob_files, weight_files = (tuple(path.with_name(file.name) for file in group) for group in (files, weights))
    return Saved(path, blob_files, weight_files, len(writer.nodes), writer.functions, size, tuple(writer.left_out))


class _Writer:
    """Builds the context model in `proto`, and the containers."""

    def __init__(self, source: Source) -> None:
        import onnx_ir as ir

        self.source = source
        try:
            self.proto: onnx.ModelProto = ir.serde.serialize_model(source.model)
        except ir.serde.SerdeError as cause:  # a description or metadata, perhaps: names were looked at
            why = "something in it is no text that can be written."
            raise UnsupportedContext.of_model(source.providers[0].name, source.name, why) from cause
        self.graph = self.proto.graph
        opsets, why = shared_opsets(source.model.graph)
        if why:
            raise UnsupportedContext.of_model(source.providers[0].name, source.name, f"it has no single opset: {why}.")
        for opset in self.proto.opset_import:
            opset.version = opsets[opset.domain]
        _restore_maps(source, self.graph)
        _modern(self.proto)
        _lift_constants(self.graph, self.graph, Counter(n for each in graphs(self.graph) for n in defined(each)))
        context_weights.inline_attributes(self.proto, source.store)
        for index, node in enumerate(self.graph.node):
            node.metadata_props.add(key=ORDER, value=str(index))
        self.types = {v.name: tensor_type(v, source.dtypes, opsets) for v in source.dtypes if v.name}
        self.weights = {t.name: t for t in self.graph.initializer}
        self.nodes: list[onnx.NodeProto] = []  # the EPContext nodes
        self.primaries: list[onnx.NodeProto] = []
        self.partitions: dict[str, list[Partition]] = {}  # by source
        self.left_out: list[str] = []
        self.extras: Mapping[str, np.ndarray] = {}  # weights that the plan brings
        self.kept: Sequence[Kept] = ()  # what code computed of weights
        self.functions = 0

    def cover(self) -> None:
        """Make a node of each group that can be one, and leave the rest of the graph around them."""
        makers = {p.name: key for p in self.source.providers for key in p.context_source_keys()[:1]}
        produced = {name: node for node in self.graph.node for name in node.output if name}
        for group in self.source.groups:
            if group.kind == HOST or group.provider not in makers or not group.outputs:
                continue
            self._cover_one(group, makers[group.provider], produced)
        if not self.nodes:
            raise UnsupportedContext.of_model(
                self.source.providers[0].name,
                self.source.name,
                ("; ".join(self.left_out) or "all its nodes run on the host, or were computed at load") + ".",
            )
        self._rebuild(produced)

    def _cover_one(self, group: Group, source: str, produced: Mapping[str, onnx.NodeProto]) -> None:
        """Make an EPContext node of what fits of a group, and note what does not."""
        import onnx

        border = {v.name for v in (*group.inputs, *group.host_inputs)} | self.weights.keys()
        found = carriable(self.graph.node, produced, [v.name for v in group.outputs], border, self._carried)
        nodes, outputs = found.nodes, found.outputs
        inputs = [n for n in found.inputs if n not in self.weights] + [n for n in found.inputs if n in self.weights]
        why = f"'{found.wrong[0]}' is no tensor of a type that EPContext nodes carry" if found.wrong else ""
        if not inputs:
            why = why or "it has no inputs"
        if why:
            stay = counted(found.left if inputs else len(group.steps), "node")
            self.left_out.append(f"{stay} from '{group.steps[0].name}' left as in the model: {why}")
        if not inputs:
            return
        name = f"{source.replace('.', '_')}_{len(self.nodes)}"
        before = [self._weight(n) if n in self.weights else self._boundary(n) for n in inputs]
        graph = self._portable(name, nodes, inputs, outputs)
        self.partitions.setdefault(source, []).append(
            Partition(name, tuple(before), tuple(map(self._boundary, outputs)), graph)
        )
        names = [self._packed(n) if b.packed else n for n, b in zip(inputs, before, strict=True)]
        node = onnx.helper.make_node(OP_TYPE, names, outputs, name, domain=DOMAIN)
        _set(node, source=source, partition_name=name, onnx_model_filename=self.source.name)
        primary = len(self.partitions[source]) == 1
        _set(node, main_context=int(primary))
        self.primaries += [node] if primary else []
        self.nodes.append(node)

    def _carried(self, name: str) -> bool:
        """Whether a node's border can carry a value: in its own type, or a weight as bytes."""
        if name in self.weights:
            return self._weight(name).dtype != "string"
        found = self.types.get(name)
        return found is not None and found[0] in CARRIED

    def _boundary(self, name: str) -> Boundary:
        found = self.types[name]
        assert found is not None
        return Boundary(*found)

    def _weight(self, name: str) -> Boundary:
        """A weight by its true type; one that the node cannot carry crosses as bytes."""
        import onnx
        import onnx_ir as ir

        tensor = self.weights[name]
        if tensor.data_type == onnx.TensorProto.STRING:
            return Boundary("string")
        dtype = ir.DataType(tensor.data_type).numpy().name
        return Boundary(dtype, tuple(tensor.dims), dtype not in CARRIED)

    def _packed(self, name: str) -> str:
        """The name of the initializer that holds the bytes of a weight."""
        twin = f"{name}__bytes"
        if twin not in self.weights:
            self.weights[twin] = self.graph.initializer.add()
            context_weights.as_bytes(self.weights[name], self.weights[twin], twin)
        return twin

    def _portable(
        self, name: str, nodes: Sequence[onnx.NodeProto], inputs: Sequence[str], outputs: Sequence[str]
    ) -> bytes:
        import onnx

        inner = {o for node in nodes for o in node.output} - set(outputs)
        graph = onnx.helper.make_graph(
            nodes,
            name,
            [self._info(n) for n in inputs],
            [self._info(n) for n in outputs],
            value_info=[info for info in self.graph.value_info if info.name in inner],
        )
        used = {node.domain for node in walk(graph)}
        opsets = [o for o in self.proto.opset_import if o.domain in used]
        model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=self.proto.ir_version)
        return model.SerializeToString(deterministic=True)

    def _info(self, name: str) -> onnx.ValueInfoProto:
        import onnx

        if name in self.weights:
            tensor = self.weights[name]
            return onnx.helper.make_tensor_value_info(name, tensor.data_type, tensor.dims)
        found = self.types[name]
        assert found is not None
        return tensor_info(name, *found)

    def _rebuild(self, produced: Mapping[str, onnx.NodeProto]) -> None:
        """Keep the nodes that the graph's outputs need beside the EPContext nodes, in an order that works."""
        made = {**produced, **{name: node for node in self.nodes for name in node.output}}
        nodes = order([v.name for v in self.graph.output], made)
        names = {name for node in nodes for name in outer_reads(node)} | {v.name for v in self.graph.output}
        declared = {v.name for v in (*self.graph.input, *self.graph.output)}
        kept = {name for node in nodes for name in node.output}
        infos = {info.name: info for info in self.graph.value_info if info.name in kept}
        infos |= {n: self._info(n) for node in self.nodes for n in node.output if n not in declared}
        weights = [t for t in self.weights.values() if t.name in names or t.name in declared]
        for field, items in (("node", nodes), ("value_info", infos.values()), ("initializer", weights)):
            items = list(items)
            self.graph.ClearField(field)
            getattr(self.graph, field).extend(items)
        primaries = {node.name for node in self.primaries}
        self.nodes = [node for node in self.graph.node if node.domain == DOMAIN and node.op_type == OP_TYPE]
        self.primaries = [node for node in self.nodes if node.name in primaries]
        if all(o.domain != DOMAIN for o in self.proto.opset_import):
            self.proto.opset_import.add(domain=DOMAIN, version=1)

    def finish(self, portable_only: bool, embed: bool) -> dict[str, bytes]:
        """The container of each source; sets what the nodes say of it."""
        blobs: dict[str, bytes] = {}
        for node in self.nodes:
            source = _text(node, "source")
            backend = next(p for p in self.source.providers if source in p.context_source_keys()).backend
            if source not in blobs:
                codes = () if portable_only else tuple(self._codes(backend))
                plans = self._plans(embed) if codes and backend.loads_in_threads else ()
                cuts = tuple(Cut(k, s) for k, (p, s) in self.source.library.cuts.items() if p == backend.name)
                facts = source, backend.version, fingerprint(backend)
                blobs[source] = pack(Container(*facts, tuple(self.partitions[source]), codes + plans, cuts))
                self.functions += len(codes)
                digest = hashlib.sha256(blobs[source]).hexdigest()
                _set(node, max_size=len(blobs[source]), notes=f"sha256={digest}")
            _set(node, ep_sdk_version=f"{backend.name} {backend.version}", hardware_architecture=str(backend.device))
        return blobs

    def _plans(self, embed: bool) -> tuple[Code, ...]:
        """The plan, if there is one; it may want a data file."""
        partitions = {(source, p.name): p.graph for source, every in self.partitions.items() for p in every}
        made = self.source.plan(self.proto, [partitions[key] for key in sorted(partitions)], not embed)
        if made is None:
            return ()
        self.extras, self.kept = made.extras, made.kept
        return (Code(made.key, (), made.plan),)

    def _codes(self, backend: Any) -> Iterator[Code]:
        library = self.source.library
        for key, made in list(library.made.items()):
            if made.provider != backend.name:
                continue
            try:
                yield Code(key, made.arguments, made.code())
            except NotStorable as why:
                self.left_out.append(f"a compiled function is not stored: {why}")
        self.left_out += [f"the code of '{node}' is not stored: {why}" for node, why in library.refused.items()]
        self.left_out[:] = dict.fromkeys(self.left_out)  # each once


def _restore_maps(source: Source, graph: onnx.GraphProto) -> None:
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.name in source.model.graph.meta.get(MAP_TYPES, {}):
            value.type.CopyFrom(map_type(source.model.graph.meta[MAP_TYPES][value.name]))


def _modern(proto: onnx.ModelProto) -> None:
    """Before IR version 4, initializers were inputs too; since then such an input may be fed."""
    if proto.ir_version < 4:
        weights = {t.name for t in proto.graph.initializer}
        inputs = [v for v in proto.graph.input if v.name not in weights]
        proto.graph.ClearField("input")
        proto.graph.input.extend(inputs)
        proto.ir_version = 4


def _lift_constants(graph: onnx.GraphProto, main: onnx.GraphProto, names: Counter[str]) -> None:
    """Large constants of nodes are weights: they become initializers of the main graph.

    `names` counts who defines a name: branches may give one to different things, the main graph may not.
    """
    kept, returned = [], {v.name for v in graph.output if graph is not main}
    for node in graph.node:
        for subgraph in subgraphs(node):
            _lift_constants(subgraph, main, names)
        tensor = node.attribute[0].t if node.op_type == "Constant" and node.attribute[0].name == "value" else None
        if tensor is None or node.domain or _nbytes(tensor) <= LARGE or node.output[0] in returned:
            kept.append(node)
            continue
        name = tensor.name = node.output[0]
        while names[tensor.name] > (tensor.name == name):
            tensor.name += "_"
        if tensor.name != name:
            names[tensor.name] = 1
            rename(graph, {name: tensor.name})
        main.initializer.append(tensor)
    if len(kept) < len(graph.node):
        graph.ClearField("node")
        graph.node.extend(kept)


def _nbytes(tensor: onnx.TensorProto) -> int:
    import onnx_ir as ir

    return math.prod(tensor.dims) * ir.DataType(tensor.data_type).bitwidth // 8


def _set(node: onnx.NodeProto, **values: Any) -> None:
    import onnx

    for name, value in values.items():
        node.attribute.append(onnx.helper.make_attribute(name, value))


def _text(node: onnx.NodeProto, name: str) -> str:
    return next(a.s.decode() for a in node.attribute if a.name == name)
