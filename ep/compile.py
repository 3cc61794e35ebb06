"""How groups run: one compiled callable per input signature, cached and counted."""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ep.bodies import Declared, InlineBody, declared
from ep.device_weights import DeviceWeights
from ep.errors import EpError, ExecutionError
from ep.growth import changing
from ep.library import Library
from ep.partition import CONTROL, Group, partition
from ep.placement import HOST, Facts, Placement, Placer
from ep.program import Runner, Step, Untraceable, describe, to_host, walk
from ep.seeds import derived_from
from ep.variants import Axes, Past, Variants, contents, copied, signature

MAX_SIGNATURES = 128  # compiled callables kept per group; the least recently used one goes


@dataclass
class Counters:
    """What compiling cost: signatures found (`hits`), compiled (`misses`) and taken from a context or the cache
    (`loaded`), calls run uncompiled, and the seconds that compiling took."""

    hits: int = 0
    misses: int = 0
    loaded: int = 0
    eager: int = 0
    compile_seconds: float = 0.0


@dataclass(frozen=True)
class Context:
    """What all groups of a session share."""

    placer: Placer
    backends: Mapping[str, Any]  # provider name → Backend
    host: Any
    weights: Mapping[str, DeviceWeights]
    counters: Counters
    eager: bool = False
    library: Library = field(default_factory=Library)
    feedback: threading.Event = field(default_factory=threading.Event)  # set once results came back as arguments

    def runner(self, provider: str, on_host: frozenset[int] = frozenset()) -> Runner:
        backend = self.backends[provider]
        return Runner(backend.xp, self.host, backend.overrides, on_host)


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
                for group in runnables:
                    group.run(attempt)
                break
            except Untraceable as signal:
                self._cut(signal, runnables)
        for value in self.outputs:
            if value not in attempt:
                attempt[value] = self.constants[value]
        return attempt

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


class CompiledGroup:
    """Steps that one provider compiles together, once per signature."""

    def __init__(self, group: Group, constants: dict[Any, np.ndarray], context: Context) -> None:
        self.group, self.context = group, context
        self.backend = context.backends[group.provider]
        self.runner = context.runner(group.provider, group.on_host)
        self.constants = {v: constants[v] for v in group.constants}
        self.all_constants, self.weights = constants, context.weights[group.provider]
        self.cache: OrderedDict[Any, Callable[..., tuple[Any, ...]]] = OrderedDict()
        self.random = any(step.lowering.random for step in walk(group.steps))  # each call then gets a seed
        self.variants = Variants(context.feedback)
        self.growing: dict[Axes, Executable] = {}  # axes that grow → the same steps, compiled where these do not matter
        self.identity: str | None = None  # `ep.identity.group_digest`, once it is known
        self._lock = threading.Lock()
        self._building: dict[Any, threading.Lock] = {}  # signature → held while it is compiled

    def run(self, env: dict[Any, Any]) -> None:
        group = self.group
        arguments = [env[v] for v in group.inputs]
        if self.random:
            arguments.append(np.asarray(secrets.randbits(32), np.uint32))
        if not self.backend.takes_numpy or self.context.eager:
            arguments = list(map(self.backend.enter, arguments))
        host = [to_host(env[v], self.backend.xp) for v in group.host_inputs]
        if self.context.eager:
            results = self.trace(host, arguments + self.place())
        else:
            results = self._call(host, arguments)
        for value, result in zip(group.outputs, results, strict=True):
            env[value] = result

    def place(self) -> list[Any]:
        """The weights on the device."""
        return self.weights.get(self.group.weights, self.all_constants, self.group.factors)

    def _release(self, unread: Sequence[int]) -> None:
        """Lets copies of weights go that compiled code does not read, having computed what it needs of them."""
        values = [self.group.weights[number] for number in unread]
        self.weights.release(values, self.all_constants, self.group.factors)

    def forget(self) -> None:
        """Drops all compiled code, and the weights that it holds; the next run makes it again."""
        with self._lock:
            self.cache.clear()
            self.growing.clear()
            self.variants.forget()

    def _call(self, host: list[np.ndarray], arguments: list[Any]) -> Any:
        shapes = tuple(map(signature, arguments))
        key = (shapes, tuple(map(contents, host))) if host else shapes
        function = self.cache.get(key)
        counters = self.context.counters
        if function is not None:
            counters.hits += 1
            if len(self.cache) > 1:
                self._touch(key)
            return self._guarded(function, arguments)
        weights = self.weights.arguments(self.group.weights, self.all_constants, self.group.factors)
        host = list(map(copied, host))  # what is compiled keeps them: the caller may write into its own
        if self.cache:
            with self._lock:
                grown = self.variants.grown(key, shapes)
            if grown and not self.context.library.holds(self, host, [*arguments, *weights]):
                if self.backend.compiles_nodes:
                    return self._grown(key, grown, host, arguments, weights)
                return self._uncompiled(key, host, arguments, weights)
        if host and not self.variants.pays_host(key, shapes):
            return self._uncompiled(key, host, arguments, weights)
        with self._lock:
            building = self._building.setdefault(key, threading.Lock())
        with building:  # threads that come with the same signature wait, and do not compile it again
            if key not in self.cache:
                try:
                    return self._compile(key, host, arguments, weights)
                finally:
                    self._building.pop(key, None)
        return self._call(host, arguments)

    def _compile(self, key: Any, host: list[np.ndarray], arguments: list[Any], weights: list[Any]) -> Any:
        counters, started = self.context.counters, time.perf_counter()
        function, results, stored = self._guarded(lambda *own: self._first(host, [*own, *weights]), arguments)
        seconds = time.perf_counter() - started
        with self._lock:
            if stored:
                counters.loaded += 1
            else:
                counters.misses += 1
                counters.compile_seconds += seconds
            self._release(getattr(function, "unread", ()))
            self.variants.bought(Past.of(key, host, results), None if stored else seconds)
            self.cache[key] = function
            if len(self.cache) > MAX_SIGNATURES:
                self.cache.popitem(last=False)
        return results

    def _first(self, host: list[np.ndarray], values: Sequence[Any]) -> tuple[Callable[..., Any], Any, bool]:
        """A function for these arguments, its results, and whether it was stored; else it is newly compiled."""
        return self.context.library.first(self, host, values, lambda *traced: self.trace(host, traced))

    def _grown(self, key: Any, grown: Any, host: list[np.ndarray], arguments: list[Any], weights: list[Any]) -> Any:
        """What does not depend on the growing axes compiled, the rest on the host."""
        (axes, past), group, counters = grown, self.group, self.context.counters
        executable = self.growing.get(axes)
        if executable is None:
            calls = (past.shapes, past.host), (tuple(map(signature, arguments)), host)
            pinned = changing(group, self.backend, partial(self._environment, self.runner), *calls, weights)
            inputs = (*group.inputs, *group.host_inputs)
            executable = Executable(group.steps, inputs, group.outputs, self.all_constants, self.context, pinned)
            self.growing[axes] = executable
        started = time.perf_counter() - counters.compile_seconds
        env = executable.run(dict(zip(executable.inputs, (*arguments[: len(group.inputs)], *host), strict=True)))
        results = list(map(env.get, group.outputs))
        self._rented(key, host, results, time.perf_counter() - counters.compile_seconds - started)
        return results

    def _uncompiled(self, key: Any, host: list[np.ndarray], arguments: list[Any], weights: list[Any]) -> Sequence[Any]:
        """Node by node: on the device, or on the host where the library would compile each node for each value."""
        started, backend = time.perf_counter(), self.backend
        results: Sequence[Any]
        if backend.compiles_nodes:
            constants = [self.all_constants[v] for v in self.group.weights]
            values = [*(to_host(a, backend.xp) for a in arguments), *constants]
            results = self._evaluate(Runner(self.context.host, self.context.host), host, values)
        else:
            results = self.trace(host, [*map(backend.enter, arguments), *weights])
        self._rented(key, host, results, time.perf_counter() - started)
        return results

    def _rented(self, key: Any, host: list[np.ndarray], results: Sequence[Any], seconds: float) -> None:
        self.context.counters.eager += 1
        with self._lock:
            self.variants.rented(key, Past.of(key, host, results), seconds)

    def _touch(self, key: Any) -> None:
        with self._lock:
            if key in self.cache:
                self.cache.move_to_end(key)

    def _guarded(self, function: Callable[..., Any], arguments: list[Any]) -> Any:
        try:
            return function(*arguments)
        except (EpError, Untraceable):
            raise
        except Exception as cause:
            raise ExecutionError(
                f"a compiled group of {len(self.group.steps)} nodes ('{self.group.steps[0].name}' … "
                f"'{self.group.steps[-1].name}') failed on {self.group.provider} with inputs "
                f"({', '.join(map(describe, arguments))}).",
                why=f"{type(cause).__name__}: {cause}",
                fix="run it with options={'compile': 'off'} to learn which node fails.",
            ) from cause

    def trace(self, host: list[np.ndarray], values: Sequence[Any]) -> tuple[Any, ...]:
        """The function that is compiled: the outputs for arguments and weights, given the host's values."""
        results, asarray = self._evaluate(self.runner, host, values), self.backend.xp.asarray
        return tuple(asarray(r) if isinstance(r, np.ndarray | np.generic) else r for r in results)

    def _evaluate(self, runner: Runner, host: list[np.ndarray], values: Sequence[Any]) -> list[Any]:
        """The outputs of the group for its arguments and weights."""
        return list(map(self._environment(runner, host, values).get, self.group.outputs))

    def _environment(self, runner: Runner, host: list[np.ndarray], values: Sequence[Any]) -> dict[Any, Any]:
        """Every value of the group for its arguments and weights."""
        group, seed = self.group, None
        if self.random:
            at = len(group.inputs)
            seed, values = values[at], [*values[:at], *values[at + 1 :]]
        env = self.constants | dict(zip(group.host_inputs, host, strict=True))
        env.update(zip((*group.inputs, *group.weights), values, strict=True))
        with nullcontext() if seed is None else derived_from(seed):
            runner.evaluate(group.steps, env)
        return env
