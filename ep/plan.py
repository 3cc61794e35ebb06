"""Where each node runs and why, and what crosses between groups: `session.plan`, for people and machines."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ep.errors import counted
from ep.partition import CONTROL, Group
from ep.program import walk
from ep.provider import HOST
from ep.weight_report import WeightTotals


@dataclass(frozen=True, slots=True)
class NodePlacement:
    """One node: its name, operator (`domain::type-version`), provider, and the reason for that provider."""

    node: str
    op: str
    provider: str
    reason: str


@dataclass(frozen=True, slots=True)
class PartitionSummary:
    """One group of nodes that runs as a whole; `how` is compiled, host or step by step."""

    provider: str
    how: str
    nodes: int
    inputs: tuple[str, ...]
    host_inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: int
    weight_bytes: int


@dataclass(frozen=True)
class Plan:
    """Nodes with their providers, and partitions in the order in which they run. Prints itself as tables."""

    model: str
    providers: tuple[str, ...]
    nodes: tuple[NodePlacement, ...]
    partitions: tuple[PartitionSummary, ...]
    fallbacks: tuple[NodePlacement, ...]  # nodes that the first provider declined
    weights: WeightTotals | None = None

    def counts(self) -> dict[str, int]:
        """Provider → number of nodes."""
        return dict(Counter(n.provider for n in self.nodes))

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        counts = ", ".join(f"{count} on {provider}" for provider, count in sorted(self.counts().items()))
        nodes, partitions = counted(len(self.nodes), "node"), counted(len(self.partitions), "partition")
        lines = [f"{self.model}: {nodes} ({counts or 'all folded'}), {partitions}"]
        lines += [f"  {i}: {p.how} on {p.provider}, {counted(p.nodes, 'node')}" for i, p in enumerate(self.partitions)]
        lines += [f"  {self.weights}"] if self.weights else []
        lines += [f"  fallback: '{n.node}' ({n.op}) on {n.provider}: {n.reason}" for n in self.fallbacks]
        return "\n".join(lines)

    __repr__ = __str__

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.table import Table
        from rich.text import Text

        for title, header, rows in self._tables():
            table = Table(*header, title=title, title_justify="left")
            for row in rows:
                table.add_row(*map(Text, row))  # names are not markup
            yield table

    def _repr_html_(self) -> str:
        parts = []
        for title, header, rows in self._tables():
            cells = ["<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in rows]
            head = "".join(f"<th>{html.escape(h)}</th>" for h in header)
            parts.append(f"<p><b>{html.escape(title)}</b></p><table><tr>{head}</tr>{''.join(cells)}</table>")
        return "".join(parts)

    def _tables(self) -> Iterator[tuple[str, tuple[str, ...], list[Any]]]:
        summary = str(self).splitlines()[0]
        rows = [
            (
                str(i), p.provider, p.how, str(p.nodes), names(p.inputs), names(p.host_inputs), names(p.outputs),
                f"{p.weights} ({p.weight_bytes / 2**20:.1f} MiB)",
            )
            for i, p in enumerate(self.partitions)
        ]  # fmt: skip
        summary += f"; {self.weights}" if self.weights else ""
        header = ("#", "provider", "how", "nodes", "inputs", "values compiled in", "outputs", "weights")
        yield summary, header, rows
        grouped: dict[tuple[str, str, str], list[str]] = {}
        for n in self.nodes:
            grouped.setdefault((n.provider, n.op, n.reason), []).append(n.node)
        nodes = [(p, op, str(len(members)), names(members), reason) for (p, op, reason), members in grouped.items()]
        yield "nodes", ("provider", "operator", "count", "nodes", "why"), nodes


def names(items: Any, most: int = 3) -> str:
    """The first few items, and how many more there are."""
    items = list(items)
    return ", ".join(map(str, items[:most])) + (f", … {len(items) - most} more" if len(items) > most else "")


def describe_plan(model: str, providers: tuple[str, ...], executable: Any, weights: WeightTotals | None = None) -> Plan:
    """The plan of an executable, its loop bodies included."""
    nodes: dict[int, NodePlacement] = {}
    partitions: list[PartitionSummary] = []
    _collect(executable, nodes, partitions)
    first = providers[0]
    bookkeeping = "its integers decide"
    fallbacks = tuple(n for n in nodes.values() if n.provider != first and not n.reason.startswith(bookkeeping))
    return Plan(model, providers, tuple(nodes.values()), tuple(partitions), fallbacks, weights)


def _collect(executable: Any, nodes: dict[int, NodePlacement], partitions: list[PartitionSummary]) -> None:
    for step in walk(executable.steps):
        placement = executable.placements[id(step)]
        nodes[id(step)] = NodePlacement(step.name, str(step.lowering.key), placement.provider, placement.reason)
    for group, runnable in zip(executable.groups, executable.runnables, strict=True):
        partitions.append(_summary(group, executable.constants))
        for body in getattr(runnable, "bodies", ()):
            _collect(body.executable, nodes, partitions)


def _summary(group: Group, constants: Any) -> PartitionSummary:
    how = {HOST: "NumPy", CONTROL: "step by step"}.get(group.kind, "compiled")

    def named(values: Any) -> tuple[str, ...]:
        return tuple(v.name or "?" for v in values)

    return PartitionSummary(
        group.provider, how, len(group.steps), named(group.inputs), named(group.host_inputs), named(group.outputs),
        len(group.weights), sum(constants[v].nbytes for v in group.weights),
    )  # fmt: skip
