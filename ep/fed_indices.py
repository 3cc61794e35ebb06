"""Are the indices that a model is fed within what its nodes index with them? Found at load, checked before each run.

An input is followed through nodes that keep its elements (Cast, Reshape, …) to the nodes that index with it. What they
index is a weight, another input, or computed: then its shape is traced, once for the shapes of the feeds. Indices that
the model computes are no feeds: the host checks those that it computes itself, and in a trace those that are constant.
In a branch (of If) indices are checked where a condition that is fed says that it is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ep.abstract_run import Abstract, abstract_run
from ep.backend import Backend
from ep.errors import EpError
from ep.indices import inside, limits_of, refuse, shapes_of, tightest
from ep.program import Runner, Step, located
from ep.registry import Index

MOST_STEPS = 16  # of what computes a shape: where it is more, the indices are not checked
MOST_KNOWN = 64  # shapes of feeds whose limits are remembered
FIX = "feed indices within these limits (token ids: from the tokenizer that belongs to the model)."

Limits = tuple[Any, Any]
Env = Mapping[Any, Any]


@dataclass(frozen=True, eq=False)
class Use:
    """A node that indexes with an input of the model, `source`, after the steps of `path`.

    It runs where inputs have the values in `conditions`.
    """

    step: Step
    index: Index
    position: int
    source: Any
    path: tuple[Step, ...]
    conditions: tuple[tuple[Any, bool], ...] = ()

    @property
    def casts(self) -> tuple[np.dtype[Any], ...]:
        """The dtypes that the indices take on the way."""
        return tuple(s.output_dtypes[0] for s in self.path if s.output_dtypes[0] != s.input_dtypes[0])  # type: ignore


@dataclass(frozen=True, eq=False)
class Checks:
    """What one input must fulfil: elements from `low` to `high` after the casts, and what else a use says by itself."""

    source: Any
    casts: tuple[np.dtype[Any], ...]
    conditions: tuple[tuple[Any, bool], ...]
    low: int | None
    high: int | None
    uses: tuple[tuple[Use, Limits, Mapping[str, Any]], ...]
    others: tuple[tuple[Use, Limits, Mapping[str, Any]], ...]


class FedIndices:
    """The checks of one graph. Its methods may be called from any thread."""

    def __init__(self, graph: Any) -> None:
        self.constants, self.dtypes, self.fed = graph.constants, graph.dtypes, frozenset(graph.inputs)
        self.producers: dict[Any, Step] = {}
        self.uses = tuple(self._uses(graph.steps, ()))
        self.computed: dict[Any, tuple[Step, ...]] = {}  # value → the steps that its shape follows from
        self.dependent = self._dependencies()
        self._known: dict[Any, tuple[Checks, ...]] = {}

    def _uses(self, steps: Sequence[Step], conditions: tuple[tuple[Any, bool], ...]) -> Iterator[Use]:
        self.producers |= {v: step for step in steps for v in step.outputs if v is not None}
        for step in steps:
            for position, index in step.lowering.indices:
                source, path = self._origin(step.inputs[position] if position < len(step.inputs) else None)
                if source in self.fed and all(s.output_dtypes[0] is not None for s in path):
                    yield Use(step, index, position, source, path, conditions)
            for name, taken in step.lowering.branches.items():
                source, _ = self._origin(step.inputs[0])
                if source in self.fed and (body := step.bodies.get(name)) is not None:
                    self.constants = {**self.constants, **body.constants}
                    yield from self._uses(body.steps, (*conditions, (source, taken)))

    def _origin(self, value: Any) -> tuple[Any, tuple[Step, ...]]:
        """What a value is but for its shape and dtype, and the steps that change these."""
        path: list[Step] = []
        while (maker := self.producers.get(value)) is not None and maker.lowering.keeps:
            path.insert(0, maker)
            value = maker.inputs[0]
        return value, tuple(path)

    def _dependencies(self) -> tuple[Any, ...]:
        """The inputs whose shapes decide limits."""
        found: dict[Any, None] = {}
        for use in self.uses:
            others = {n: v for n, v in zip(use.step.lowering.inputs, use.step.inputs, strict=False) if v is not None}
            shapes = shapes_of(use.step, lambda v: self.constants[v].shape if v in self.constants else None)
            if limits_of(use.step, use.index, shapes) is not None:
                continue
            for value in others.values():
                found.update(dict.fromkeys(self._sources(value)))
        return tuple(found)

    def _sources(self, value: Any) -> list[Any]:
        """The inputs that a value is computed from; its steps are noted in `computed` unless they are too many."""
        wanted, sources, todo = {}, [], [value]
        while todo:
            value_ = todo.pop()
            if value_ in self.fed:
                sources.append(value_)
            elif (step := self.producers.get(value_)) is not None and id(step) not in wanted:
                wanted[id(step)] = step
                todo += step.reads()
                if len(wanted) > MOST_STEPS or step.bodies or step.lowering.random:
                    return []
        if wanted:
            self.computed[value] = tuple(s for s in self.producers.values() if id(s) in wanted)
        return sources

    def check(self, env: Env, backend: Backend) -> None:
        """Check feeds: arrays of NumPy, and of the device where the host sees them at once; others are not looked at.

        Raises:
            IndexOutOfRange: an index is beyond what a node indexes with it.
        """
        if not self.uses:
            return
        key = tuple([getattr(env.get(v), "shape", None) for v in self.dependent])
        checks = self._known.get(key)
        if checks is None:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            checks = self._known[key] = tuple(self._checks(env, backend))
        for each in checks:
            array = _seen(env.get(each.source), backend)
            if array is not None and all(_holds(env.get(v), wanted, backend) for v, wanted in each.conditions):
                self._check(each, array)

    def highest(self, env: Env, backend: Backend) -> dict[str, int]:
        """Name of each input that indexes → the greatest index that all its nodes allow for feeds of these shapes."""
        found: dict[str, int] = {}
        for each in self._checks(env, backend):
            for use, (_, high), _ in (*each.uses, *each.others):
                found[use.source.name] = min(int(np.min(high)), found.get(use.source.name, int(np.min(high))))
        return found

    def _check(self, checks: Checks, array: np.ndarray) -> None:
        fed = array
        if checks.casts:
            with np.errstate(all="ignore"):
                for dtype in checks.casts:
                    array = array.astype(dtype)
        if array.dtype.kind not in "iu":
            return
        if checks.low is not None and not inside(array, checks.low, checks.high):  # type: ignore[arg-type]
            for use, limits, shapes in checks.uses:
                _refuse(use, array, limits, shapes)
        for use, limits, shapes in checks.others:
            at_node = array if len(use.path) == len(checks.casts) else self._along(use, fed)
            if at_node is not None:
                _refuse(use, at_node, limits, shapes)

    def _along(self, use: Use, array: np.ndarray) -> np.ndarray | None:
        """The indices as the node gets them, where constants say what happens on the way."""
        import ep.host_namespace as host

        local = {v: self.constants[v] for s in use.path for v in s.reads() if v in self.constants}
        local[use.source] = array
        try:
            Runner(host, host).evaluate(use.path, local)
        except (EpError, KeyError):  # a shape that is not constant; what fails is told by the node
            return None
        return local[use.step.inputs[use.position]]

    def _checks(self, env: Env, backend: Backend) -> Iterator[Checks]:
        """What is to be checked for feeds of these shapes."""
        shapes = self._computed_shapes(env, backend)
        grouped: dict[Any, list[tuple[Use, Limits, Mapping[str, Any]]]] = {}
        for use in self.uses:
            known = shapes_of(use.step, lambda v: self._shape(v, env, shapes))
            limits = limits_of(use.step, use.index, known)
            if limits is not None:
                grouped.setdefault((use.source, use.casts, use.conditions), []).append((use, limits, known))
        for (source, casts, conditions), uses in grouped.items():
            plain = tuple(u for u in uses if not u[0].index.tuples and not u[0].index.spared)
            low, high = tightest(limits for _, limits, _ in plain) if plain else (None, None)
            yield Checks(source, casts, conditions, low, high, plain, tuple(u for u in uses if u not in plain))

    def _shape(self, value: Any, env: Env, computed: Mapping[Any, Any]) -> tuple[int, ...] | None:
        known = self.constants.get(value)
        known = env.get(value) if known is None else known
        return getattr(computed.get(value) if known is None else known, "shape", None)

    def _computed_shapes(self, env: Env, backend: Backend) -> dict[Any, Any]:
        """Value → what an abstract run knows of it, for what is neither fed nor constant."""
        found: dict[Any, Any] = {}
        for value, steps in self.computed.items():
            local = {v: self._abstract(v, env) for step in steps for v in step.reads() if v not in self.producers}
            abstract_run(steps, local, backend, {})
            found[value] = local.get(value)
        return found

    def _abstract(self, value: Any, env: Env) -> Any:
        dtype, array = self.dtypes.get(value), self.constants.get(value)
        if array is not None:
            return array
        shape = getattr(env.get(value), "shape", None)
        return None if shape is None or dtype is None else Abstract(tuple(shape), dtype)


def _seen(value: Any, backend: Backend) -> np.ndarray | None:
    """The contents of a feed, where the host sees them at once."""
    if type(value) is np.ndarray:
        return value
    return None if value is None or isinstance(value, list | dict) else backend.peek(value)


def _holds(value: Any, wanted: bool, backend: Backend) -> bool:
    """Whether a condition is known to have a value."""
    array = _seen(value, backend)
    return array is not None and array.size == 1 and bool(array.item()) is wanted


def _refuse(use: Use, array: np.ndarray, limits: Limits, shapes: Mapping[str, Any]) -> None:
    try:
        refuse(array, use.step, use.index, limits, shapes, f"input '{use.source.name}'", FIX)
    except EpError as error:
        error.at = located(use.step)
        raise
