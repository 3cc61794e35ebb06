"""Which provider runs each node, and why; which values exist before a graph runs, and which the host needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ep.program import Step
from ep.provider import HOST
from ep.registry import Host, HostIfCheap, ShapeOf

BIG = 4096  # constants with more elements than this are data, not bookkeeping


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one node runs: the provider's name and the reason, in words for the plan."""

    provider: str
    reason: str


class Facts:
    """What is known of a list of steps before anything runs.

    `static` values depend on constants and shapes only, so they exist inside a trace. `roots[v]` are the
    values whose shapes a static value reads. `needed` static values must be concrete on the host, because
    contents of theirs decide shapes; `fetched` values are needed there too, but only exist at run time.
    `preferred` values are of use there, if the host has them anyway; those in `at_host` are (see `Placer`).
    Where `unrolls`, loops that need the number of the iteration on the host are unrolled in a trace: that number,
    and what is `turning` with it, is static inside.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        constants: Iterable[Any],
        hosted: set[int],
        pinned: frozenset[int] = frozenset(),
        *,
        unrolls: bool = False,
        counters: Iterable[Any] = (),
    ) -> None:
        self.unrolls = unrolls
        self.hosted = hosted  # id() of steps, of bodies too, that no device takes
        self.turning: set[Any] = set(counters)
        self.static: set[Any] = {*constants, *self.turning}
        self.roots: dict[Any, frozenset[Any]] = {}
        self.needed: set[Any] = set()
        self.fetched: set[Any] = set()
        self.preferred: set[Any] = set()
        self.at_host: set[Any] = set()
        self.host_steps: set[int] = set()  # id() of steps that run with NumPy inside a trace
        for step in steps:
            if id(step) not in pinned:  # by id: those that run by themselves whatever is known of them
                self._find_static(step)
        for step in reversed(steps):
            self._find_needed(step)

    def _find_static(self, step: Step) -> None:
        roots: set[Any] = set()
        for index, value in enumerate(step.inputs):
            if value is None:
                continue
            if value in self.static:
                roots |= self.roots.get(value, frozenset())
            elif step.lowering.role(index) is ShapeOf:
                roots.add(value)
            else:
                return
        if step.bodies or step.lowering.random:
            return
        for value in step.outputs:
            if value is not None:
                self.static.add(value)
                self.roots[value] = frozenset(roots)
                if not self.turning.isdisjoint(step.inputs):
                    self.turning.add(value)

    def _find_needed(self, step: Step) -> None:
        is_static = all(v is None or v in self.static for v in step.outputs)
        if is_static and (id(step) in self.hosted or any(v in self.needed for v in step.outputs)):
            self.host_steps.add(id(step))
            self.need(v for i, v in enumerate(step.inputs) if step.lowering.role(i) is not ShapeOf)
        else:
            self.need(v for i, v in enumerate(step.inputs) if step.lowering.role(i) is Host)
        preferred = useful_inputs(step)
        for name, body in step.bodies.items():
            inner = body_facts(body, self, name in step.lowering.counted)
            self.host_steps |= inner.host_steps
            self.need(v for v in inner.needed | inner.fetched if v in body.captures)
            preferred |= inner.preferred & set(body.captures)
        self.need(v for v in preferred if v in self.static and v not in self.turning)
        self.preferred |= preferred - self.static

    def need(self, values: Iterable[Any]) -> None:
        for value in values:
            if value is not None:
                (self.needed if value in self.static else self.fetched).add(value)

    def host_inputs(self, step: Step) -> set[Any]:
        """Non-static values whose contents this step takes from the host, for itself or inside its bodies."""
        wanted = {v for i, v in enumerate(step.inputs) if v is not None and step.lowering.role(i) is Host}
        useful = useful_inputs(step)
        for name, body in step.bodies.items():
            inner = body_facts(body, self, name in step.lowering.counted)
            wanted |= inner.fetched & set(body.captures)
            useful |= inner.preferred & set(body.captures)
        return (wanted | (useful & self.at_host)) - self.static

    def pure(self, step: Step) -> bool:
        """Whether the bodies can be traced: nothing inside waits for a value that only running gives."""
        return all(self._pure_body(body, name in step.lowering.counted) for name, body in step.bodies.items())

    def _pure_body(self, body: Any, counted: bool) -> bool:
        inner = body_facts(body, self, counted)
        waits = inner.fetched - set(body.captures)
        hosted = any(id(s) in self.hosted and id(s) not in inner.host_steps for s in body.steps)
        return not waits and not hosted and all(inner.pure(s) for s in body.steps)


def body_facts(body: Any, outer: Facts, counted: bool = False) -> Facts:
    captured = [v for v in body.captures if v in outer.static]
    counters = [v for v in captured if v in outer.turning]
    if counted and outer.unrolls:
        counters += body.inputs[:1]
    known = [*body.constants, *captured]
    facts = Facts(body.steps, known, outer.hosted, unrolls=outer.unrolls, counters=counters)
    facts.roots.update({v: outer.roots[v] for v in captured if v in outer.roots})
    return facts


def useful_inputs(step: Step) -> set[Any]:
    """Integers and bools that the step would rather have on the host."""
    dtypes = step.input_dtypes + (None,) * (len(step.inputs) - len(step.input_dtypes))
    return {
        value
        for i, (value, dtype) in enumerate(zip(step.inputs, dtypes, strict=True))
        if step.lowering.role(i) is HostIfCheap and dtype is not None and dtype.kind in "biu"
    }


class Placer:
    """Places steps on the first provider that takes each; the host is the last resort."""

    def __init__(self, providers: Sequence[Any], dtypes: dict[Any, np.dtype | None]) -> None:
        self.providers, self.dtypes = providers, dtypes
        # Those that do not compile loops have no limit to unrolling them.
        self.unrolls = bool(providers) and all(provider.backend.traces_loops for provider in providers)

    def support(self, steps: Iterable[Step]) -> dict[int, Placement]:
        """`id(step)` → who takes it by operator and dtypes alone, for the steps and those of their bodies."""
        placements = {}
        for step in steps:
            placements[id(step)] = self._one(step)
            for body in step.bodies.values():
                placements |= self.support(body.steps)
        return placements

    def refine(
        self,
        placements: dict[int, Placement],
        steps: Sequence[Step],
        inputs: Iterable[Any],
        facts: Facts,
        constants: Any,
    ) -> None:
        """Moves integer bookkeeping to the host where a host value waits for it (in place)."""
        on_host = set(inputs)
        wanted = self._upstream(steps, facts)
        for step in steps:
            if id(step) not in facts.hosted and any(v in wanted for v in step.outputs):
                if self._cheap(step, on_host, facts, constants):
                    placements[id(step)] = Placement(HOST, "its integers decide shapes or control flow")
            if placements[id(step)].provider == HOST:
                on_host.update(v for v in step.outputs if v is not None)
        facts.at_host = {v for v in on_host if self._discrete(v)}

    def _one(self, step: Step) -> Placement:
        refusals: list[str] = []
        for provider in self.providers:
            match = provider.supports_op(step, dtypes=(step.input_dtypes, step.output_dtypes))
            if match.supported:
                return Placement(provider.name, "; ".join(filter(None, (*refusals, match.remark))) or "first choice")
            refusals.append(match.reason)
        return Placement(HOST, "; ".join(refusals))

    def _upstream(self, steps: Sequence[Step], facts: Facts) -> set[Any]:
        """Fetched values and, backwards, everything that they are computed from."""
        wanted = facts.fetched | facts.preferred
        for step in reversed(steps):
            if id(step) in facts.hosted or any(v in wanted for v in step.outputs):
                wanted.update(v for v in step.inputs if v is not None)
        return wanted

    def _cheap(self, step: Step, on_host: set[Any], facts: Facts, constants: Any) -> bool:
        """Integer bookkeeping on values that the host has anyway."""
        if step.bodies or step.lowering.random:
            return False
        for value in step.inputs:
            if value is None:
                continue
            if value in constants and np.size(constants[value]) > BIG:
                return False
            if value not in facts.static and not (value in on_host and self._discrete(value)):
                return False
        return True

    def _discrete(self, value: Any) -> bool:
        dtype = self.dtypes.get(value)
        return dtype is not None and dtype.kind in "biuO"
