"""What is in a model, and what would each provider take of it? The facts behind `ep inspect`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ep.errors import EpError, counted
from ep.plan import Plan

MOST_NODES = 5  # names listed for one reason


@dataclass(frozen=True)
class Refusal:
    """Why a provider does not take some nodes, which all have the same operator and reason."""

    op: str
    reason: str
    count: int
    nodes: tuple[str, ...]  # the first few


@dataclass(frozen=True)
class ProviderReport:
    """What one provider would take; `unavailable` says why it cannot be asked on this machine."""

    name: str
    device: str = ""
    unavailable: str = ""
    taken: int = 0
    total: int = 0
    refusals: tuple[Refusal, ...] = ()

    def share(self) -> str:
        """How many of the nodes it takes, of those that are left after constants are folded."""
        return "-" if self.unavailable else f"{self.taken} of {self.total} nodes"

    def reasons(self) -> str:
        """Every refusal on a line of its own."""
        lines = [f"{r.op} × {r.count} ({', '.join(r.nodes)}): {r.reason}" for r in self.refusals]
        return self.unavailable or "\n".join(lines)


@dataclass(frozen=True)
class Summary:
    """A model's interface, operators and weights, and what each provider takes; `problems` stop them all.

    With a `plan`, which is that of one device, other providers are not asked.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    opsets: dict[str, int]
    nodes: int
    operators: dict[str, int]
    weights: int
    weight_bytes: int
    weight_dtypes: dict[str, int]  # bytes of each
    problems: str = ""
    providers: tuple[ProviderReport, ...] = ()
    memory: dict[str, Any] | None = None  # `ep.Estimate.to_dict`
    memory_text: str = ""
    plan: Plan | None = None
    contexts: tuple[str, ...] = ()  # what its EPContext nodes hold; all else here is of the graphs that they stand for

    def to_dict(self) -> dict[str, Any]:
        """The summary as plain data, ready for JSON."""
        return asdict(self)

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.table import Table
        from rich.text import Text

        opsets = ", ".join(f"{domain} {version}" for domain, version in self.opsets.items())
        dtypes = ", ".join(f"{d} {size(n)}" for d, n in self.weight_dtypes.items())
        rows = {
            "model": self.name,
            "inputs": "\n".join(self.inputs),
            "outputs": "\n".join(self.outputs),
            "opsets": opsets,
            "weights": f"{self.weights} tensors, {size(self.weight_bytes)}" + (f" ({dtypes})" if dtypes else ""),
            "nodes": f"{self.nodes}: " + ", ".join(f"{op} {n}" for op, n in self.operators.items()),
        }
        if self.contexts:
            rows["contexts"] = "\n".join(self.contexts)
        if self.memory_text:
            rows["memory"] = self.memory_text
        facts = Table.grid(padding=(0, 2))
        for label, text in rows.items():
            facts.add_row(Text(label, "bold"), Text(text))
        yield facts
        if self.problems:
            yield Text.assemble(("no provider can run it: ", "bold red"), self.problems)
            return
        if self.plan is not None:
            yield self.plan
            return
        table = Table("provider", "device", "takes", "what it does not take, and why", title_justify="left")
        for report in self.providers:
            cells = (report.name, report.device or "-", report.share(), report.reasons())
            table.add_row(*map(Text, cells))
        yield table


def size(count: int) -> str:
    """Bytes for people: 512 B, 3.1 MiB."""
    number, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while number >= 1024 and len(units) > 1:
        number, units = number / 1024, units[1:]
    return f"{number:.0f} B" if units[0] == "B" else f"{number:.1f} {units[0]}"


def summarize(
    source: Any,
    shapes: Mapping[str, int] | None = None,
    device: str = "",
    options: Mapping[str, Any] | None = None,
) -> Summary:
    """Reads a model without running it. A damaged file raises `InvalidModel`; other problems are listed.

    `shapes` are sizes of symbolic dimensions. With a `device`, as `ep.load` names them, memory and placement are those
    there, under the `options` of `ep.load`.

    Raises:
        InvalidInput, BackendUnavailable: there is no such device, here or anywhere.
    """
    from ep.context_reader import CONTEXTS
    from ep.devices import resolve
    from ep.dtypes import value_dtype
    from ep.feeds import ValueInfo
    from ep.inputs import check_dims
    from ep.loader import load_model
    from ep.memory_estimate import estimate
    from ep.passes import prepare
    from ep.session import load

    if device:
        resolve(device, {})  # it is refused before the model is read
    model, store, name = load_model(source)
    graph = model.graph
    check_dims(
        shapes or {}, [ValueInfo.of(v, value_dtype(v)) for v in graph.inputs if v.name not in graph.initializers]
    )
    nodes = [*graph.all_nodes(), *(n for f in model.functions.values() for n in f.all_nodes())]
    weights = list(_weights(model))
    by_dtype: Counter[str] = Counter()
    for tensor in weights:
        by_dtype[tensor.dtype.name.lower()] += tensor.nbytes
    brought = tuple(map(_context, graph.meta[CONTEXTS]))
    facts = Summary(
        name,
        tuple(str(ValueInfo.of(v, value_dtype(v))) for v in graph.inputs if v.name not in graph.initializers),
        tuple(str(ValueInfo.of(v, value_dtype(v))) for v in graph.outputs),
        {domain or "ai.onnx": version for domain, version in graph.opset_imports.items()},
        len(nodes),
        dict(Counter(_op_type(n) for n in nodes).most_common()),
        len(weights),
        sum(by_dtype.values()),
        dict(by_dtype),
        contexts=brought,
    )
    try:
        steps = prepare(model, store, name).steps
    except EpError as error:
        return Summary(**{**vars(facts), "problems": str(error)})
    needed = estimate(source, shapes, device=device or "auto")
    plan = load(source, device, options=options).plan if device else None
    reports = () if device else tuple(_reports(steps))
    return Summary(
        **{**vars(facts), "providers": reports, "plan": plan, "memory": needed.to_dict(),
           "memory_text": str(needed).partition(": ")[2]}
    )  # fmt: skip


def _op_type(node: Any) -> str:
    return f"{node.domain}::{node.op_type}" if node.domain else node.op_type


def _context(brought: Any) -> str:
    """One container in words; `ep.load` says whether its code is used."""
    held = brought.container
    code = sum(len(each.code) for each in held.codes)
    made_for = f", made for {held.fingerprint}" if held.codes else ""
    functions = f"{counted(len(held.functions), 'compiled function')} of {size(code)}"
    return f"{held.source}: {counted(len(held.partitions), 'partition')}, {functions}{made_for}"


def _weights(model: Any) -> Iterator[Any]:
    """Tensors of initializers and constants, of subgraphs too, each once."""
    seen: set[int] = set()
    for graph in model.graphs():
        constants = [a.as_tensor() for n in graph if n.op_type == "Constant" for a in _tensor_attributes(n)]
        initializers = [v.const_value for v in graph.initializers.values() if v.const_value is not None]
        for tensor in [*initializers, *constants]:
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor


def _tensor_attributes(node: Any) -> list[Any]:
    return [a for a in node.attributes.values() if a.type.name == "TENSOR"]


def _reports(steps: Sequence[Any]) -> Iterator[ProviderReport]:
    from ep.discovery import entry_points, provider
    from ep.program import walk

    every = list(walk(steps))
    for name in entry_points():
        try:
            asked = provider(name)
        except EpError as error:
            yield ProviderReport(name, unavailable=str(error))
            continue
        refusals = tuple(_refusals(asked, every))
        taken = len(every) - sum(r.count for r in refusals)
        yield ProviderReport(name, str(asked.device_id), "", taken, len(every), refusals)
        asked.shutdown()


def _refusals(provider: Any, steps: Sequence[Any]) -> Iterator[Refusal]:
    grouped: dict[tuple[str, str], list[str]] = {}
    for step in steps:
        match = provider.supports_op(step)
        if not match.supported:
            grouped.setdefault((str(step.lowering.key), match.reason), []).append(step.name)
    for (op, reason), names in grouped.items():
        yield Refusal(op, reason, len(names), tuple(names[:MOST_NODES]))
