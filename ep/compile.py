"""How a graph runs: its steps as groups, one after the other, on the host, step by step, or compiled."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from ep.bodies import Declared, InlineBody, declared
from ep.compiled_group import CompiledGroup, Context
from ep.errors import ExecutionError
from ep.partition import CONTROL, Group, partition
from ep.placement import Facts, Placement
from ep.program import Runner, Step, Untraceable, to_host, walk
from ep.provider import HOST


class Executable:
    """A graph, or the body of a loop, as groups in order. `run` fills an environment of values.

    `pinned` steps (by id) run on the host, one after the other, and are part of no trace.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        constants: dict[Any, np.ndarray],
        context: Context,
        pinned: frozenset[int] = frozenset(),
    ) -> None:
        self.steps, self.inputs, self.outputs = list(steps), tuple(inputs), tuple(outputs)
        self.constants, self.context, self.pinned = constants, context, pinned
        self._control: set[int] = set()
        self._lock = threading.Lock()
        self._is_mixed = context.is_mixed
        self._plan()

    def _plan(self) -> None:
        placer = self.context.placer
        self.placements: dict[int, Placement] = placer.support(self.steps)
        pinned = (inner for step in self.steps if id(step) in self.pinned for inner in walk([step]))
        self.placements |= {id(step): Placement(HOST, "its shapes change with every call") for step in pinned}
        hosted = {i for i, p in self.placements.items() if p.provider == HOST}
        facts = Facts(self.steps, self.constants, hosted, self.pinned, unrolls=placer.unrolls)
        placer.refine(self.placements, self.steps, self.inputs, facts, self.constants)
        groups = partition(self.steps, self.outputs, facts, self.placements, self.constants, self._control)
        self.groups = groups
        kinds: dict[str, Any] = {HOST: HostGroup, CONTROL: ControlGroup}
        self.runnables = tuple(
            kinds.get(group.kind, CompiledGroup)(group, self.constants, self.context) for group in groups
        )

    def every(self) -> Iterator[tuple[Executable, Any]]:
        """Each runnable of this graph and of its bodies, with the executable that it belongs to."""
        for runnable in self.runnables:
            yield self, runnable
            for body in getattr(runnable, "bodies", ()):
                yield from body.executable.every()

    def run(self, env: dict[Any, Any]) -> dict[Any, Any]:
        """Adds the outputs to `env`, which holds the inputs. Groups that cannot be traced are cut and run again."""
        while True:
            attempt, runnables = dict(env), self.runnables
            try:
                for runnable in runnables:
                    if self._is_mixed:
                        self._run_apart(runnable, attempt)
                    else:
                        runnable.run(attempt)
                break
            except Untraceable as signal:
                self._cut(signal, runnables)
        for value in self.outputs:
            if value not in attempt:
                attempt[value] = self.constants[value]
            elif self._is_mixed:
                attempt[value] = self.context.fetched(attempt[value])
        return attempt

    def _run_apart(self, runnable: Any, env: dict[Any, Any]) -> None:
        """Run a group within the scope of its own library, on NumPy arrays and those of that library."""
        group, context = runnable.group, self.context
        own = context.backends.get(group.provider) if group.kind != HOST else None
        for value in (*group.inputs, *group.host_inputs, *group.shapes):
            env[value] = context.fetched(env[value], own)
        with nullcontext() if own is None else own.scope():
            runnable.run(env)

    def _cut(self, signal: Untraceable, runnables: tuple[Any, ...]) -> None:
        step = signal.step
        with self._lock:
            if runnables is not self.runnables:  # another thread has planned again meanwhile
                return
            if step is None or id(step) in self._control:
                raise ExecutionError(
                    f"node '{getattr(step, 'name', '?')}' reads a value that its provider cannot give.",
                    why=str(signal),
                    fix="this is a defect of ep: please report the model.",
                ) from signal
            self._control.add(id(step))
            self._plan()


class OnHost:
    """What runnables share that hold nothing on a device."""

    def place(self) -> None:
        """Nothing has to get to a device."""

    def forget(self) -> None:
        """There is nothing to drop."""


class HostGroup(OnHost):
    """Steps that run with NumPy, one after the other."""

    def __init__(self, group: Group, constants: Mapping[Any, np.ndarray], context: Context) -> None:
        self.group = group
        self.constants = {v: constants[v] for v in (*group.constants, *group.weights)}
        self.runner = Runner(context.host, context.host)
        backends = [b for name, b in context.backends.items() if name != HOST]
        self.xp = backends[0].xp if backends else context.host
        self.fetch = [v for v in (*group.inputs, *group.host_inputs) if v not in group.shapes]

    def run(self, env: dict[Any, Any]) -> None:
        local = self.constants | {v: env[v] for v in self.group.shapes}
        for value in self.fetch:
            local[value] = to_host(env[value], self.xp)
        self.runner.evaluate(self.group.steps, local)
        for value in self.group.outputs:
            env[value] = local[value]


class ControlGroup(OnHost):
    """One step that runs eagerly because it reads device values as it goes; its bodies are executables."""

    def __init__(self, group: Group, constants: Mapping[Any, np.ndarray], context: Context) -> None:
        self.group, self.context = group, context
        self.constants = {v: constants[v] for v in (*group.constants, *group.weights)}
        self.backend = context.backends[group.provider]
        self.steps = [self._with_executables(step, constants) for step in group.steps]
        hosted = frozenset(
            id(new) for old, new in zip(group.steps, self.steps, strict=True) if id(old) in group.on_host
        )
        self.runner = context.runner(group.provider, hosted)
        self.bodies = tuple(body for step in self.steps for body in step.bodies.values())

    def _with_executables(self, step: Step, constants: Mapping[Any, np.ndarray]) -> Step:
        bodies = {name: CompiledBody(body, constants, self.context) for name, body in step.bodies.items()}
        return Step(step.name, step.lowering, step.opset, step.inputs, step.outputs, step.attributes, bodies)

    def run(self, env: dict[Any, Any]) -> None:
        local = self.constants | {v: env[v] for v in (*self.group.inputs, *self.group.host_inputs)}
        self.runner.evaluate(self.steps, local)
        for value in self.group.outputs:
            env[value] = local[value]


class CompiledBody:
    """The body of a control step: an executable of its own, bound to the values around it."""

    def __init__(self, body: InlineBody, constants: Mapping[Any, np.ndarray], context: Context) -> None:
        self.inputs, self.outputs, self.captures = body.inputs, body.outputs, body.captures
        self.declared = body.declared
        self.outer = tuple(v for v in body.captures if v not in constants)
        own = body.constants | {v: constants[v] for v in body.captures if v in constants}
        self.executable = Executable(body.steps, (*body.inputs, *self.outer), body.outputs, own, context)

    def bind(self, env: Mapping[Any, Any], runner: Runner) -> BoundExecutable:
        return BoundExecutable(self, {v: env[v] for v in self.outer})


@dataclass(frozen=True, eq=False)
class BoundExecutable:
    """A compiled body with the values around it; like `BoundBody`, but every call runs compiled groups."""

    body: CompiledBody
    outer: dict[Any, Any]

    @property
    def declared(self) -> tuple[Declared, ...]:
        return self.body.declared

    @property
    def parameters(self) -> tuple[Declared, ...]:
        """Dtype and shape that the model declares of each input."""
        return tuple(map(declared, self.body.inputs))

    def __call__(self, *arguments: Any) -> tuple[Any, ...]:
        result = self.body.executable.run(self.outer | dict(zip(self.body.inputs, arguments, strict=True)))
        return tuple(result[v] for v in self.body.outputs)

    def trips(self, limit: int | None, state: Sequence[Any]) -> None:
        """Not known in advance: this loop is stepped because its values exist only as it runs."""
