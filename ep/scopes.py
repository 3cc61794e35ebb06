"""Which names does a graph read that nothing gives, and which of its nodes wait for each other?

Both are found in the protobuf, by names: libraries would only say that something is wrong, or write it to the log.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ep.errors import InvalidModel
from ep.proto_graphs import graphs, outer_reads, subgraphs

if TYPE_CHECKING:
    import onnx

MOST_SHOWN = 8  # nodes of a cycle that an error names


def define_missing(graph: onnx.GraphProto) -> list[str]:
    """A line for each name that is read and nothing gives; it becomes an input, so that all else can be checked."""
    found = list(_missing(graph, frozenset()))
    for name in dict.fromkeys(name for _, name in found):
        graph.input.add().name = name
    return [f"node '{node}' reads '{name}', which nothing produces" for node, name in found]


def _missing(graph: onnx.GraphProto, around: frozenset[str]) -> Iterator[tuple[str, str]]:
    """The nodes that read what is defined nowhere, with what they read; the order of nodes does not matter."""
    known = around | {v.name for v in graph.input} | {t.name for t in graph.initializer}
    known |= {name for node in graph.node for name in node.output}
    for index, node in enumerate(graph.node):
        for name in node.input:
            if name and name not in known:
                yield node.name or f"{node.op_type}_{index}", name
        for inner in subgraphs(node):
            yield from _missing(inner, known)


def check_cycles(graph: onnx.GraphProto, model: str, problems: Sequence[str] = ()) -> None:
    """Refuses nodes that wait for each other.

    Raises:
        InvalidModel: it names them, after the problems found before.
    """
    for each in graphs(graph):
        cycle = _cycle(each.node)
        if cycle:
            names = [f"'{each.node[i].name or f'{each.node[i].op_type}_{i}'}'" for i in cycle]
            shown = (
                names
                if len(names) <= MOST_SHOWN
                else [*names[: MOST_SHOWN - 1], f"… {len(names) - MOST_SHOWN + 1} more"]
            )
            raise InvalidModel.from_problems(
                model,
                [*problems, f"graph '{each.name}' has a cycle: {' → '.join([*shown, names[0]])}"],
                why="each of these nodes needs the result of the one before it, so that none can run first.",
                fix="correct the names of their inputs and outputs; what repeats is written as Loop or Scan.",
            )


def _cycle(nodes: Sequence[onnx.NodeProto]) -> list[int]:
    """Numbers of nodes of which each reads a result of the one before it, and the first of the last; or nothing."""
    produced = {name: i for i, node in enumerate(nodes) for name in node.output if name}
    done: set[int] = set()
    for start in range(len(nodes)):
        if start in done:
            continue
        path, waiting = [start], [_sources(nodes[start], produced)]
        entered = {start}
        while path:
            source = next(waiting[-1], None)
            if source is None:
                waiting.pop()
                last = path.pop()
                entered.discard(last)
                done.add(last)
            elif source in entered:
                return path[path.index(source) :][::-1]
            elif source not in done:
                path.append(source)
                entered.add(source)
                waiting.append(_sources(nodes[source], produced))
    return []


def _sources(node: onnx.NodeProto, produced: dict[str, int]) -> Iterator[int]:
    return iter([produced[name] for name in outer_reads(node) if name in produced])
