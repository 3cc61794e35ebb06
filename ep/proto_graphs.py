"""Which nodes of an ONNX graph lead to a value? Walks, slices and orders over protobuf graphs, by names."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The branches or the body of a node."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """The graph and all below it."""
    yield graph
    for node in graph.node:
        for inner in subgraphs(node):
            yield from graphs(inner)


def walk(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """All nodes, those of subgraphs too."""
    for each in graphs(graph):
        yield from each.node


def in_order(graph: onnx.GraphProto, known: set[str] | None = None) -> bool:
    """Whether each node comes after those that it reads, in subgraphs too; `known` are names from around the graph."""
    known = {""} if known is None else known
    own = {v.name for v in graph.input} | {t.name for t in graph.initializer}
    own |= {t.values.name for t in graph.sparse_initializer}
    own -= known
    known |= own
    for node in graph.node:
        if not known.issuperset(node.input) or not all(in_order(inner, known) for inner in subgraphs(node)):
            return False
        made = set(node.output) - known
        own |= made
        known |= made
    known -= own
    return True


def outer_reads(node: onnx.NodeProto) -> list[str]:
    """The names that a node reads from the graph around it, also inside its subgraphs; each once, in order."""
    reads = dict.fromkeys(name for name in node.input if name)
    for inner in subgraphs(node):
        reads.update(dict.fromkeys(free_names(inner)))
    return list(reads)


def free_names(graph: onnx.GraphProto) -> list[str]:
    """The names that a subgraph reads and does not define."""
    own = {v.name for v in graph.input} | {t.name for t in graph.initializer}
    own |= {name for node in graph.node for name in node.output}
    reads = dict.fromkeys(name for node in graph.node for name in outer_reads(node))
    reads.update(dict.fromkeys(v.name for v in graph.output))
    return [name for name in reads if name not in own]


def sliced(
    nodes: Sequence[onnx.NodeProto],
    produced: Mapping[str, onnx.NodeProto],
    targets: Sequence[str],
    border: Collection[str],
) -> tuple[list[onnx.NodeProto], list[str]]:
    """The nodes that compute `targets` from names in `border`, in their order, and the names that they read of others.

    `produced` maps a name to its node; what no node produces is read from outside, too.
    """
    wanted: set[int] = set()
    todo = [name for name in targets if name in produced]
    while todo:
        node = produced[todo.pop()]
        if id(node) not in wanted:
            wanted.add(id(node))
            todo += [name for name in outer_reads(node) if name in produced and name not in border]
    kept = [node for node in nodes if id(node) in wanted]
    own = {name for node in kept for name in node.output}
    reads = dict.fromkeys(name for node in kept for name in outer_reads(node))
    return kept, [name for name in reads if name not in own]


def order(targets: Sequence[str], produced: Mapping[str, onnx.NodeProto]) -> list[onnx.NodeProto]:
    """All nodes that compute `targets`, each after those that it reads."""
    done: set[int] = set()
    nodes: list[onnx.NodeProto] = []
    todo = [(produced[name], False) for name in reversed(targets) if name in produced]
    while todo:
        node, ready = todo.pop()
        if id(node) in done:
            continue
        if ready:
            done.add(id(node))
            nodes.append(node)
            continue
        todo.append((node, True))
        todo += [(produced[name], False) for name in reversed(outer_reads(node)) if name in produced]
    return nodes


def rename(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    """Give values other names, in subgraphs too: a name means one value in all of them."""
    if not names:
        return
    for each in graphs(graph):
        for node in each.node:
            for field in (node.input, node.output):
                for index, name in enumerate(field):
                    if name in names:
                        field[index] = names[name]
        for info in (*each.input, *each.output, *each.value_info):
            info.name = names.get(info.name, info.name)
