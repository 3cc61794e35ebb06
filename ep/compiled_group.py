"""How a group runs that one provider compiles: one callable per input signature, cached and counted."""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ep.device import DeviceType
from ep.device_weights import DeviceWeights
from ep.errors import EpError, ExecutionError
from ep.growth import changing
from ep.library import Library
from ep.partition import Group
from ep.placement import Placer
from ep.program import Runner, TooLong, Untraceable, describe, to_host, walk
from ep.provider import HOST
from ep.seeds import derived_from
from ep.variants import Axes, Past, Variants, contents, copied, signature

if TYPE_CHECKING:
    from ep.compile import Executable

COMPILE_ALL: ContextVar[bool] = ContextVar("COMPILE_ALL", default=False)  # every signature of this thread's runs
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

    @property
    def is_mixed(self) -> bool:
        """Whether several libraries run groups, none of which knows the arrays of another."""
        return sum(name != HOST for name in self.backends) > 1

    def fetched(self, value: Any, keep: Any = None) -> Any:
        """The value as NumPy holds it, unless it is an array of the backend to `keep`."""
        if isinstance(value, list):
            return [self.fetched(item, keep) for item in value]
        if keep is not None and keep.is_array(value):
            return value
        owner = next((b for b in self.backends.values() if b.is_array(value)), None)
        return value if owner is None else owner.to_numpy(value)

    def runner(
        self, provider: str, on_host: frozenset[int] = frozenset(), contents: Mapping[Any, np.ndarray] | None = None
    ) -> Runner:
        backend = self.backends[provider]
        return Runner(backend.xp, self.host, backend.overrides, on_host, contents=contents or {}, looks=self.eager)


class CompiledGroup:
    """Steps that one provider compiles together, once per signature."""

    def __init__(self, group: Group, constants: dict[Any, np.ndarray], context: Context) -> None:
        self.group, self.context = group, context
        self.backend = context.backends[group.provider]
        self.runner = context.runner(group.provider, group.on_host, constants)
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
        if self.cache and not COMPILE_ALL.get():
            with self._lock:
                grown = self.variants.grown(key, shapes)
            if grown and not self.context.library.holds(self, host, [*arguments, *weights]):
                if self.backend.compiles_nodes:
                    return self._grown(key, grown, host, arguments, weights)
                return self._uncompiled(key, host, arguments, weights)
        if host and not (COMPILE_ALL.get() or self.variants.pays_host(key, shapes)):
            return self._uncompiled(key, host, arguments, weights)
        if self._may_rent(key, shapes) and not self.context.library.holds(self, host, [*arguments, *weights]):
            try:
                return self._uncompiled(key, host, arguments, weights, self.variants.price)
            except TooLong:
                self.variants.patient = False
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
            from ep.compile import Executable  # which makes groups

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

    def _may_rent(self, key: Any, shapes: Any) -> bool:
        """Whether shapes are so many that another one runs on the host first, where that has the device's memory."""
        backend = self.backend
        return (
            not COMPILE_ALL.get()
            and backend.compiles_nodes
            and backend.device.type == DeviceType.CPU
            and not self.variants.pays_shapes(key, shapes)
        )

    def _uncompiled(
        self, key: Any, host: list[np.ndarray], arguments: list[Any], weights: list[Any], most: float = math.inf
    ) -> Sequence[Any]:
        """Node by node: on the device, or on the host where the library would compile each node for each value.

        Raises:
            TooLong: it took more than so many seconds on the host.
        """
        started, backend = time.perf_counter(), self.backend
        results: Sequence[Any]
        if backend.compiles_nodes:
            constants = [self.all_constants[v] for v in self.group.weights]
            values = [*(to_host(a, backend.xp) for a in arguments), *constants]
            runner = Runner(self.context.host, self.context.host, until=started + most)
            results = self._evaluate(runner, host, values)
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
        steps = self.group.steps
        return guarded(function, arguments, self.group.provider, len(steps), steps[0].name, steps[-1].name)

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


def guarded(
    function: Callable[..., Any], arguments: list[Any], provider: str, count: int, first: str, last: str
) -> Any:
    """What a compiled function gives; an error of the library names its group: so many nodes, from first to last.

    Raises:
        ExecutionError: the function failed.
    """
    try:
        return function(*arguments)
    except (EpError, Untraceable):
        raise
    except Exception as cause:
        raise ExecutionError(
            f"a compiled group of {count} nodes ('{first}' … '{last}') failed on {provider} with inputs "
            f"({', '.join(map(describe, arguments))}).",
            why=f"{type(cause).__name__}: {cause}",
            fix="run it with options={'compile': 'off'} to learn which node fails.",
        ) from cause
