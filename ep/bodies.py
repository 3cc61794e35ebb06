"""What becomes of a subgraph: a callable for the lowering of If, Loop or Scan, and how often its loop runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ep.dtypes import value_dtype
from ep.program import Runner, Step

Declared = tuple[np.dtype, tuple[int | None, ...]] | None  # dtype and shape of an output, if the model says
MOST_TRIPS = 100_000  # loops that run longer are not counted in advance


@dataclass(frozen=True, eq=False)
class InlineBody:
    """A subgraph that is evaluated where its node is: inside the trace, or eagerly step by step."""

    name: str
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    steps: tuple[Step, ...]
    captures: tuple[Any, ...]
    constants: dict[Any, np.ndarray]
    declared: tuple[Declared, ...] = ()

    def bind(self, env: Mapping[Any, Any], runner: Runner) -> BoundBody:
        return BoundBody(self, {value: env[value] for value in self.captures}, runner)

    def condition(self) -> tuple[list[Step], set[Any]]:
        """The steps that a loop's condition comes from, through carried state too, and all that they read."""
        needed, carried = {self.outputs[0]}, dict(zip(self.inputs[2:], self.outputs[1:], strict=False))
        while True:
            steps = []
            for step in reversed(self.steps):
                if any(v in needed for v in step.outputs):
                    steps.append(step)
                    needed.update(step.reads())
            more = {carried[v] for v in needed if v in carried} - needed
            if not more:
                return steps[::-1], needed
            needed |= more


@dataclass(frozen=True, eq=False)
class BoundBody:
    """A body with the values around it: call it with arrays to get a tuple of arrays."""

    body: InlineBody
    outer: dict[Any, Any]
    runner: Runner

    @property
    def declared(self) -> tuple[Declared, ...]:
        return self.body.declared

    @property
    def parameters(self) -> tuple[Declared, ...]:
        """Dtype and shape that the model declares of each input."""
        return tuple(map(declared, self.body.inputs))

    def __call__(self, *arguments: Any) -> tuple[Any, ...]:
        body = self.body
        inner = self.outer | body.constants | dict(zip(body.inputs, arguments, strict=True))
        self.runner.evaluate(body.steps, inner)
        return tuple(inner[value] for value in body.outputs)

    def trips(self, limit: int | None, state: Sequence[Any]) -> int | None:
        """How often the loop runs, where its condition depends on values that the host has; else `None`.

        Converters write `for` loops as `while i < n`, with `i` and `n` carried: the condition's own steps
        are run here, on the host, and nothing else.
        """
        body = self.body
        steps, needed = body.condition()
        known = self.outer | body.constants | dict(zip(body.inputs[2:], state, strict=True))
        leaves = {v: known[v] for v in needed if v in known}
        if any(s.bodies or s.lowering.random for s in steps) or not all(map(_at_host, leaves.values())):
            return None
        return self._count(limit, steps, leaves)

    def _count(self, limit: int | None, steps: list[Step], env: dict[Any, Any]) -> int | None:
        body, runner = self.body, Runner(self.runner.host, self.runner.host)
        carried = [(i, o) for i, o in zip(body.inputs[2:], body.outputs[1:], strict=False) if i in env]
        for trip in range(MOST_TRIPS if limit is None else min(limit, MOST_TRIPS)):
            inner = env | {body.inputs[0]: np.asarray(trip, np.int64), body.inputs[1]: np.asarray(True)}
            runner.evaluate(steps, inner)
            if not np.all(inner[body.outputs[0]]):
                return trip + 1
            env = env | {i: inner[o] for i, o in carried}
        return limit if limit is not None and limit <= MOST_TRIPS else None


def declared(value: Any) -> Declared:
    """Dtype and shape that the model declares of a value, unknown dimensions `None`; or `None`."""
    dtype = value_dtype(value)
    if dtype is None or value.shape is None:
        return None
    return dtype, tuple(d if isinstance(d, int) else None for d in value.shape)


def _at_host(value: Any) -> bool:
    return isinstance(value, np.ndarray)
