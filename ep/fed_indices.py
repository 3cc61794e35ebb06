"""Are the indices that a model is fed within what its nodes index with them? Found at load, checked before each run.

An input is followed through nodes that keep its elements (Cast, Reshape, …), or pick some of them by constants (Split,
Slice, …: these run on the host, too, before the run), to the nodes that index with it. What they index is a weight,
another input, or computed by a few nodes: then its shape is traced, once for the shapes of the feeds. In a branch (of
If) indices are checked where a condition that is fed says that it is taken. All other indices are computed by the
model: the host checks those that it computes itself, and in a trace those that are constant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ep.abstract_run import Abstract, abstract_run
from ep.backend import Backend
from ep.errors import EpError
from ep.indices import inside, limits_of, refuse, shapes_of, tightest
from ep.program import Runner, Step, Untraceable, located
from ep.registry import Index

MOST_STEPS = 8  # of what computes a shape: each takes up to a millisecond of JAX for new shapes of feeds
MOST_KNOWN = 64  # shapes of feeds whose limits are remembered
FIX = "feed indices within these limits (token ids: from the tokenizer that belongs to the model)."

Limits = tuple[Any, Any]
Conditions = tuple[tuple[Any, bool], ...]  # inputs, and what they must be
Env = Mapping[Any, Any]
Look = Callable[[Any], np.ndarray | None]  # at an array of the device


@dataclass(frozen=True, eq=False)
class Use:
    """A node that indexes with elements of the input `source`, in a place that is reached under `conditions`.

    The host looks at `seen`, the input or what the steps of `path` make of it, after some `casts`.
    """

    step: Step
    index: Index
    position: int
    source: Any
    seen: Any
    path: tuple[Step, ...]
    casts: tuple[np.dtype[Any], ...]
    conditions: Conditions


Limited = tuple[Use, Limits, Mapping[str, tuple[int, ...]]]  # with the shapes that the limits follow from


@dataclass(frozen=True, eq=False)
class Checks:
    """What a value must fulfil: elements from `low` to `high`, for some uses; others have limits of their own kind."""

    seen: Any
    casts: tuple[np.dtype[Any], ...]
    conditions: Conditions
    low: int | None
    high: int | None
    uses: tuple[Limited, ...]
    others: tuple[Limited, ...]


class FedIndices:
    """The checks of one graph. Its methods may be called from any thread."""

    def __init__(self, graph: Any) -> None:
        self.constants, self.dtypes, self.fed = graph.constants, graph.dtypes, frozenset(graph.inputs)
        self._producers: dict[Any, Step] = {}
        self._order: dict[int, int] = {}  # id() of a step → its place
        self._computed: dict[Any, tuple[Step, ...]] = {}  # value → the steps that its shape follows from
        shaping: dict[Any, None] = {}
        self.uses = tuple(self._uses(graph.steps, (), shaping))
        self._path = tuple({id(step): step for use in self.uses for step in use.path}.values())
        self._shaping = tuple(shaping)  # the inputs whose shapes decide limits
        self._known: dict[Any, tuple[Checks, ...]] = {}

    # At load.

    def _uses(self, steps: Sequence[Step], conditions: Conditions, shaping: dict[Any, None]) -> Iterator[Use]:
        for step in steps:
            self._order[id(step)] = len(self._order)
            self._producers.update((v, step) for v in step.outputs if v is not None)
        for step in steps:
            for position, index in step.lowering.indices:
                value = step.inputs[position] if position < len(step.inputs) else None
                use = None if value is None else self._use(step, index, position, value, conditions)
                sources = None if use is None else self._shape_sources(use)
                if use is not None and sources is not None:
                    shaping.update(dict.fromkeys(sources))
                    yield use
            for name, taken in step.lowering.branches.items():
                source, _ = self._origin(step.inputs[0])
                if source in self.fed and (body := step.bodies.get(name)) is not None:
                    self.constants = {**self.constants, **body.constants}
                    yield from self._uses(body.steps, (*conditions, (source, taken)), shaping)

    def _use(self, step: Step, index: Index, position: int, value: Any, conditions: Conditions) -> Use | None:
        source, path = self._origin(value, or_part=True)
        kinds = [(s.input_dtypes[0], s.output_dtypes[0]) for s in path]
        if source not in self.fed or any(None in pair for pair in kinds):
            return None
        # Tuples lie along the last axis, which a cast leaves alone; else it is enough to know which elements are left.
        moved = [s.lowering.picks or (index.tuples and a == b) for s, (a, b) in zip(path, kinds, strict=True)]
        end = len(path) if index.tuples and any(moved) else max((i + 1 for i, m in enumerate(moved) if m), default=0)
        seen = source if not end else path[end].inputs[0] if end < len(path) else value
        casts = tuple(b for a, b in kinds[end:] if a != b and b is not None)
        return Use(step, index, position, source, seen, path[:end], casts, conditions)

    def _origin(self, value: Any, or_part: bool = False) -> tuple[Any, tuple[Step, ...]]:
        """What a value is, or a part of what, but for its shape and dtype; and the steps that make it of that."""
        path: list[Step] = []
        while (maker := self._producers.get(value)) is not None:
            constant = all(v in self.constants for v in maker.inputs[1:] if v is not None)
            if not maker.lowering.keeps and not (or_part and maker.lowering.picks and constant):
                break
            path.insert(0, maker)
            value = maker.inputs[0]
        return value, tuple(path)

    def _shape_sources(self, use: Use) -> list[Any] | None:
        """The inputs from whose shapes the limits follow; None where these cannot be known."""
        names = dict(zip(use.step.lowering.inputs, use.step.inputs, strict=False))
        found: list[Any] = []
        for name in (use.index.of, *use.index.also):
            value = names.get(name)
            if value == use.seen or value == use.step.inputs[use.position]:
                found.append(use.source)
            elif value is not None and value not in self.constants:
                sources = self._slice(value)
                if sources is None:
                    return None
                found += sources
        return found

    def _slice(self, value: Any) -> list[Any] | None:
        """The inputs that a value is computed from by a few steps, which are noted in `_computed`; else None."""
        wanted: dict[int, Step] = {}
        sources, todo = [], [value]
        while todo:
            one = todo.pop()
            if one in self.fed:
                sources.append(one)
            elif (step := self._producers.get(one)) is not None and id(step) not in wanted:
                wanted[id(step)] = step
                todo += step.reads()
                if len(wanted) > MOST_STEPS or step.bodies or step.lowering.random:
                    return None
        if wanted:
            self._computed[value] = tuple(sorted(wanted.values(), key=lambda step: self._order[id(step)]))
        return sources

    # Before a run.

    def check(self, env: Env, backend: Backend, waits: bool = False) -> None:
        """Check feeds: arrays of NumPy, and of the device where the host sees them at once, or where it `waits`.

        Raises:
            IndexOutOfRange: an index is beyond what a node indexes with it.
        """
        if not self.uses:
            return
        look = looks(backend, waits)
        made = self._made(env, look) if self._path else env
        key = tuple([getattr(env.get(v), "shape", None) for v in self._shaping])
        checks = self._known.get(key)
        if checks is None:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            checks = self._known[key] = tuple(self._checks(made, backend))
        for each in checks:
            array = at_hand(made.get(each.seen), look)
            if array is not None and all(_holds(env.get(v), wanted, look) for v, wanted in each.conditions):
                _check(each, array)

    def highest(self, env: Env, backend: Backend) -> dict[str, int]:
        """Name of each input that indexes → the greatest index that all its nodes allow for feeds of these shapes."""
        found: dict[str, int] = {}
        for each in self._checks(self._made(env, backend.peek), backend):
            for use, (_, high), _ in (*each.uses, *each.others):
                found[use.source.name] = min(int(np.min(high)), found.get(use.source.name, int(np.min(high))))
        return found

    @property
    def count(self) -> int:
        """For how many shapes limits were found."""
        return len(self._known)

    def plain(self) -> tuple[tuple[Any, ...], dict[Any, list[tuple[Any, tuple[np.dtype[Any], ...], int, int]]]] | None:
        """The limits found so far, of inputs alone, that hold in any case; `None` if there are others.

        They go by the shapes of the first: for these, an input's elements, after casts, lie from the least to the
        greatest.
        """
        found: dict[Any, list[Any]] = {} if self.uses else {(): []}
        for key, checks in dict(self._known).items():
            if any(c.others or c.conditions or c.low is None or c.seen not in self.fed for c in checks):
                return None
            found[key] = [(c.seen, c.casts, c.low, c.high) for c in checks]
        return self._shaping, found

    def _made(self, env: Env, look: Look) -> Env:
        """The feeds, and what paths make of them where the host sees a feed and constants say all else."""
        import ep.host_namespace as host

        runner, made = Runner(host, host), dict(env)
        for step in self._path:
            local = {v: self.constants[v] if v in self.constants else made.get(v) for v in step.reads()}
            local = {v: at_hand(array, look) for v, array in local.items()}
            if all(array is not None for array in local.values()):
                try:
                    runner.evaluate([step], local)
                except EpError:  # the node itself will tell
                    continue
                made.update((v, local[v]) for v in step.outputs if v is not None)
        return made

    def _checks(self, env: Env, backend: Backend) -> Iterator[Checks]:
        """What is to be checked for feeds of these shapes."""
        computed = self._computed_shapes(env, backend)
        grouped: dict[Any, list[Limited]] = {}
        for use in self.uses:
            shapes = shapes_of(use.step, lambda v: self._shape(v, env, computed))
            limits = limits_of(use.step, use.index, shapes)
            if limits is not None:
                grouped.setdefault((use.seen, use.casts, use.conditions), []).append((use, limits, shapes))
        for (seen, casts, conditions), uses in grouped.items():
            plain = tuple(u for u in uses if not u[0].index.tuples and not u[0].index.spared)
            low, high = tightest(limits for _, limits, _ in plain) if plain else (None, None)
            yield Checks(seen, casts, conditions, low, high, plain, tuple(u for u in uses if u not in plain))

    def _shape(self, value: Any, env: Env, computed: Mapping[Any, Any]) -> tuple[int, ...] | None:
        for known in (self.constants, env, computed):
            if value in known:
                return getattr(known[value], "shape", None)
        return None

    def _computed_shapes(self, env: Env, backend: Backend) -> dict[Any, Any]:
        """Value → what an abstract run knows of it, for what is neither fed nor constant."""
        found: dict[Any, Any] = {}
        for value, steps in self._computed.items():
            local = {v: self._abstract(v, env) for step in steps for v in step.reads() if v not in self._producers}
            abstract_run(steps, local, backend, {})
            found[value] = local.get(value)
        return found

    def _abstract(self, value: Any, env: Env) -> Any:
        dtype, array = self.dtypes.get(value), self.constants.get(value)
        if array is not None:
            return array
        shape = getattr(env.get(value), "shape", None)
        return None if shape is None or dtype is None else Abstract(tuple(shape), dtype)


def _check(checks: Checks, array: np.ndarray) -> None:
    array = cast(array, checks.casts)
    if array.dtype.kind not in "iu":
        return
    if checks.low is None or checks.high is None or inside(array, checks.low, checks.high):
        suspects = checks.others
    else:
        suspects = (*checks.uses, *checks.others)
    for use, limits, shapes in suspects:
        name = f"input '{use.source.name}'"
        if use.path:
            name = f"'{use.step.lowering.inputs[use.position]}', which comes from {name},"
        try:
            refuse(array, use.step, use.index, limits, shapes, name, FIX)
        except EpError as error:
            error.at = located(use.step)
            raise


def looks(backend: Backend, waits: bool) -> Look:
    """What looks at an array of the device: it waits for it, or sees only what is there."""
    return partial(_waited_for, backend) if waits else backend.peek


def _waited_for(backend: Backend, value: Any) -> np.ndarray | None:
    """The contents of an array of the device, unless it is traced."""
    try:
        return backend.to_numpy(value)
    except Untraceable:
        return None


def at_hand(value: Any, look: Look) -> np.ndarray | None:
    """The contents of a value, where the host has them or may look at them."""
    if type(value) is np.ndarray:
        return value
    return None if value is None or isinstance(value, list | dict) else look(value)


def cast(array: np.ndarray, dtypes: Sequence[np.dtype[Any]]) -> np.ndarray:
    """The array in one dtype after the other."""
    with np.errstate(all="ignore"):
        for dtype in dtypes:
            array = array.astype(dtype)
    return array


def _holds(value: Any, wanted: bool, look: Look) -> bool:
    """Whether a condition is known to have a value."""
    array = at_hand(value, look)
    return array is not None and array.size == 1 and bool(array.item()) is wanted
