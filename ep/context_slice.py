"""Which nodes of a group fit into one EPContext node, whose borders carry tensors of some types only?"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ep.proto_graphs import outer_reads, sliced

if TYPE_CHECKING:
    import onnx

Fits = Callable[[str], bool]  # whether the node's border can carry the value of this name


@dataclass(frozen=True, slots=True)
class Slice:
    """Nodes in their order, the names that they read of others, and those that they give; `left` stay outside."""

    nodes: Sequence[onnx.NodeProto]
    inputs: Sequence[str]
    outputs: Sequence[str]
    wrong: Sequence[str]  # names that the border cannot carry
    left: int  # nodes that make or read these


def carriable(
    every: Sequence[onnx.NodeProto],
    produced: Mapping[str, onnx.NodeProto],
    outputs: Sequence[str],
    border: Collection[str],
    fits: Fits,
) -> Slice:
    """As `proto_graphs.sliced`, but without the nodes at borders that do not fit.

    Readers of such inputs stay outside with all before them, and makers of such outputs with all behind them, so that
    no path leaves the slice and comes back.
    """
    nodes, inputs = sliced(every, produced, outputs, border)
    whole, wrong = len(nodes), list[str]()
    border = set(border)
    while True:
        inward = {name for name in inputs if not fits(name)}
        outward = {name for name in outputs if not fits(name)}
        if not (inward or outward):
            return Slice(nodes, inputs, outputs, wrong, whole - len(nodes))
        wrong += [name for name in (*inputs, *outputs) if name in inward | outward]
        readers = [name for node in nodes if inward.intersection(outer_reads(node)) for name in node.output]
        before = _outputs(sliced(nodes, produced, readers, border)[0])
        behind = _outputs(_behind(nodes, outward))
        border |= before
        reads = {name for node in nodes if behind.intersection(node.output) for name in outer_reads(node)}
        inner = _outputs(nodes) - before - behind
        outputs = [*dict.fromkeys(name for name in (*outputs, *sorted(reads)) if name in inner)]
        nodes, inputs = sliced(every, produced, outputs, border)


def _outputs(nodes: Iterable[onnx.NodeProto]) -> set[str]:
    return {name for node in nodes for name in node.output if name}


def _behind(nodes: Sequence[onnx.NodeProto], names: set[str]) -> list[onnx.NodeProto]:
    """The nodes that make these values, and all that read what they make; nodes come after what they read."""
    found, made = [], set[str]()
    for node in nodes:
        if names.intersection(node.output) or made.intersection(outer_reads(node)):
            found.append(node)
            made.update(name for name in node.output if name)
    return found
