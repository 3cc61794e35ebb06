"""How a placed graph is cut: an ordered list of groups, each run whole by one provider."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ep.placement import Facts, Placement
from ep.program import Step
from ep.provider import HOST
from ep.registry import Factor, ShapeOf

CONTROL = "control"  # a loop that runs step by step, its bodies compiled
EMBEDDED_BYTES = 1024  # constants up to this size are compiled in; larger ones are arguments


@dataclass
class Group:
    """Steps that run together, and the values that cross their border.

    `inputs` come from feeds or other groups (of those in `shapes` only the shape is read), `host_inputs` are
    inputs whose contents are part of the compiled signature, `weights` are constants that enter as
    arguments (those in `factors` are read by nothing but products), `constants` those that are compiled in.
    """

    kind: str  # HOST, CONTROL, or a provider's name
    provider: str
    steps: list[Step]
    inputs: tuple[Any, ...] = ()
    host_inputs: tuple[Any, ...] = ()
    weights: tuple[Any, ...] = ()
    factors: frozenset[Any] = frozenset()
    constants: tuple[Any, ...] = ()
    outputs: tuple[Any, ...] = ()
    shapes: frozenset[Any] = frozenset()
    on_host: frozenset[int] = field(default_factory=frozenset)


def partition(
    steps: Sequence[Step],
    outputs: Iterable[Any],
    facts: Facts,
    placements: dict[int, Placement],
    constants: Any,
    control: set[int],
) -> list[Group]:
    """Convex groups in an order that respects every edge; edges only lead to the same or to later stages."""
    stages = Stages(facts, placements, control)
    moving = [step for step in steps if stages.assign(step) is not None]
    stages.sink(moving)
    grouped: dict[Key, list[Step]] = {}
    for step in moving:
        grouped.setdefault(stages.key(step), []).append(step)
    outputs = tuple(outputs)
    static_outputs = [v for v in outputs if v in facts.static and v not in constants]
    groups = [
        Group(kind, placements[id(members[0])].provider, members) for (_, kind, _), members in sorted(grouped.items())
    ]
    if static_outputs:
        groups.append(Group(HOST, HOST, []))
    connect(groups, steps, outputs, facts, constants)
    return groups


Key = tuple[int, str, int]  # stage, kind, and a number that keeps control steps apart (0 for others)


class Stages:
    """Finds a group for each step: first the earliest one possible, then a later one that saves a group."""

    def __init__(self, facts: Facts, placements: dict[int, Placement], control: set[int]) -> None:
        self.facts, self.placements, self.control = facts, placements, control
        self.of: dict[Any, Key] = {}  # value → key of its group
        self._edges: dict[int, list[tuple[Any, bool]]] = {}  # id(step) → values it reads, and whether on the host

    def assign(self, step: Step) -> Key | None:
        """The first group at whose time all that the step reads exists where it reads it; `None` for static steps."""
        if step.outputs and all(v is None or v in self.facts.static for v in step.outputs):
            return None
        kind = self._kind(step)
        edges = self._edges[id(step)] = list(self._sources(step, kind))
        stage = max([self._after(value, kind, fetched) for value, fetched in edges], default=0)
        return self._put(step, (stage, kind, id(step) if kind == CONTROL else 0))

    def key(self, step: Step) -> Key:
        return next(self.of[v] for v in step.outputs if v is not None)

    def sink(self, steps: Sequence[Step]) -> None:
        """Moves compiled steps to later groups of their provider, where all that reads them allows it."""
        keys = {self.key(step) for step in steps}
        readers: dict[Any, list[tuple[Key, bool]]] = {}
        for step in reversed(steps):
            stage, kind, number = self.key(step)
            users = [user for v in step.outputs for user in readers.get(v, ())]
            if users and kind not in (HOST, CONTROL):
                last = min(s if k == kind and not fetched else s - 1 for (s, k, _), fetched in users)
                stage = max(s for s, k, _ in keys if k == kind and stage <= s <= max(last, stage))
                self._put(step, (stage, kind, number))
            for value, fetched in self._edges[id(step)]:
                readers.setdefault(value, []).append((self.key(step), fetched))

    def _put(self, step: Step, key: Key) -> Key:
        self.of.update({v: key for v in step.outputs if v is not None})
        return key

    def _sources(self, step: Step, kind: str) -> Iterable[tuple[Any, bool]]:
        facts = self.facts
        fetched = facts.host_inputs(step) if kind not in (HOST, CONTROL) else set()
        for value in step.reads():
            for source in facts.roots.get(value, ()) if value in facts.static else (value,):
                yield source, source in fetched

    def _kind(self, step: Step) -> str:
        if id(step) in self.control or (step.bodies and not self.facts.pure(step)):
            return CONTROL
        return self.placements[id(step)].provider

    def _after(self, value: Any, kind: str, fetched: bool) -> int:
        if value not in self.of:
            return 0
        stage, producer_kind, _ = self.of[value]
        return stage if producer_kind == kind != CONTROL and not fetched else stage + 1


def connect(groups: list[Group], steps: Sequence[Step], outputs: tuple[Any, ...], facts: Facts, constants: Any) -> None:
    """Adds to each group the static steps it needs, and finds what enters and leaves it."""
    order = {id(step): i for i, step in enumerate(steps)}
    static_producer = {v: step for step in steps for v in step.outputs if v is not None and v in facts.static}
    produced_by: dict[Any, int] = {}
    for index, group in enumerate(groups):
        for step in group.steps:
            produced_by.update({v: index for v in step.outputs if v is not None})
    wanted: dict[Any, set[int]] = {}
    for index, group in enumerate(groups):
        own = group.steps
        extra = [] if own else [v for v in outputs if v in facts.static]
        _complete(group, extra, static_producer, order, facts, constants)
        for value in (*group.inputs, *group.host_inputs):
            wanted.setdefault(value, set()).add(index)
    for index, group in enumerate(groups):
        produced = [v for step in group.steps for v in step.outputs if v is not None]
        group.outputs = tuple(
            v
            for v in produced
            if (produced_by.get(v) == index and (v in outputs or wanted.get(v, set()) - {index}))
            or (index == len(groups) - 1 and group.kind == HOST and v in outputs and v in facts.static)
        )


def _complete(
    group: Group,
    extra: Sequence[Any],
    static_producer: dict[Any, Step],
    order: dict[int, int],
    facts: Facts,
    constants: Any,
) -> None:
    pulled: dict[int, Step] = {}
    todo = [*extra, *(v for step in group.steps for v in step.reads())]
    while todo:
        step = static_producer.get(todo.pop())
        if step is not None and id(step) not in pulled:
            pulled[id(step)] = step
            todo.extend(step.reads())
    own = {v for step in group.steps for v in step.outputs}
    host_inputs = {v for step in group.steps for v in facts.host_inputs(step)}
    group.steps = sorted([*group.steps, *pulled.values()], key=lambda s: order[id(s)])
    group.on_host = frozenset(facts.host_steps)
    produced = own | {v for step in pulled.values() for v in step.outputs}
    reads = dict.fromkeys(v for step in group.steps for v in step.reads())
    reads.update(dict.fromkeys(extra))
    outside = [v for v in reads if v not in produced and v not in constants]
    group.constants = tuple(
        v for v in reads if v in constants and (group.kind == CONTROL or embeds(v, facts, constants))
    )
    group.weights = tuple(v for v in reads if v in constants and v not in group.constants)
    group.factors = frozenset(group.weights) - read_otherwise(group.steps)
    group.host_inputs = tuple(v for v in outside if v in host_inputs and group.kind != CONTROL)
    group.inputs = tuple(v for v in outside if v not in group.host_inputs)
    group.shapes = frozenset(v for v in group.inputs if v not in _contents(group.steps))


def embeds(value: Any, facts: Facts, constants: Any) -> bool:
    """Whether a constant is part of the trace rather than an argument: small, or needed there on the host.

    One that is not finite is not: what XLA's CPU compiler knows to be NaN, it takes for whatever is in memory (`exp`).
    """
    array = constants[value]
    small = array.nbytes <= EMBEDDED_BYTES and (array.dtype.kind != "f" or bool(np.isfinite(array).all()))
    return value in facts.needed or small or array.dtype.kind == "O"


def read_otherwise(steps: Sequence[Step]) -> set[Any]:
    """Values that are read by more than products."""
    reads: set[Any] = set()
    for step in steps:
        reads.update(v for i, v in enumerate(step.inputs) if step.lowering.role(i) is not Factor)
        reads.update(v for body in step.bodies.values() for v in body.captures)
    return reads


def _contents(steps: Sequence[Step]) -> set[Any]:
    """Values of which some step reads more than the shape."""
    reads: set[Any] = set()
    for step in steps:
        reads.update(v for i, v in enumerate(step.inputs) if step.lowering.role(i) is not ShapeOf)
        for body in step.bodies.values():
            reads |= _contents(body.steps) | set(body.outputs)
    return reads
