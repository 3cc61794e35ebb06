"""How does a model run by a stored plan? Each group by stored code, with neither the graph nor its operators loaded.

That serves the signatures that code is stored for. Any other needs the graph, and the session then opens it.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from ep.backend import Backend, Function
from ep.compiled_group import MAX_SIGNATURES, Counters, guarded
from ep.container import Cut
from ep.context_reader import Contexts
from ep.device_weights import DeviceWeights
from ep.errors import InvalidModel
from ep.fed_indices import at_hand, cast, looks
from ep.feeds import FeedCheck
from ep.identity import fingerprint, function_key
from ep.indices import inside
from ep.library import Library, called, specs_of
from ep.loader import read_copies
from ep.opened import Opened
from ep.outline import Outline, outline
from ep.places import Place, Weight
from ep.program import to_host
from ep.proto_graphs import walk
from ep.registry import OPS, normal_domain
from ep.stored_plan import Damaged, Part, StoredPlan, contents_digest, for_cache, group_of, plan_key, read
from ep.variants import Past, contents, copied, signature
from ep.weights import WeightStore


class NeedsGraph(Exception):
    """No code is stored for these arguments, so that some has to be compiled."""


class Planned:
    """A model that runs by a plan; the values of its environments are numbers."""

    def __init__(
        self, name: str, plan: StoredPlan, places: Mapping[str, Place], weights: DeviceWeights, library: Library,
        counters: Counters,
    ) -> None:  # fmt: skip
        """Raises `ValueError` for weights that do not lie within their tensors."""
        self.inputs, self.output_infos, self.outputs = plan.inputs, plan.outputs, plan.output_values
        self.overridable: tuple[Any, ...] = ()
        values = {info.name: number for info, number in zip(plan.inputs, plan.input_values, strict=True)}
        self.feeds = FeedCheck(name, plan.inputs, (), values, {}, KnownLimits(plan))
        store = weights.store
        arrays = {number: _array(w, plan, places, store) for number, w in enumerate(plan.weights)}
        self.groups = [PlannedGroup(part, arrays, weights, library, counters) for part in plan.parts]

    def run(self, env: dict[Any, Any]) -> dict[Any, Any]:
        """The environment with what the groups give.

        Raises:
            NeedsGraph: code for these arguments is not stored.
        """
        env = dict(env)
        for group in self.groups:
            group.run(env)
        return env

    def forget(self) -> None:
        """Drops device copies of weights and all code; the next run loads both again."""
        for group in self.groups:
            group.cache.clear()
            group.weights.drop()
            group.library.forget()

    def place(self) -> None:
        """Brings the weights to the device, before a run would."""
        for group in self.groups:
            with group.backend.scope():
                group.place()


class KnownLimits:
    """The limits of a plan for the indices that a model is fed; who has the graph says what is wrong with others."""

    def __init__(self, plan: StoredPlan) -> None:
        self.by, self.known = plan.limited_by, dict(plan.limits)
        every = {limits.casts for rows in self.known.values() for limits in rows}
        self.casts = {names: tuple(map(np.dtype, names)) for names in every}

    def check(self, env: Mapping[Any, Any], backend: Backend, waits: bool = False) -> None:
        """Raises `NeedsGraph` for indices that are not known to be within their limits."""
        rows = self.known.get(tuple([getattr(env.get(v), "shape", None) for v in self.by]))
        if rows is None:
            raise NeedsGraph
        look = looks(backend, waits)
        for limits in rows:
            array = at_hand(env.get(limits.source), look)
            if array is None:
                continue
            array = cast(array, self.casts[limits.casts])
            if array.dtype.kind in "iu" and not inside(array, limits.low, limits.high):
                raise NeedsGraph


class Plans:
    """The stored plans of one model: in its context, or in the user's cache."""

    def __init__(
        self, key: str, outline: Outline, name: str, weights: DeviceWeights, library: Library, counters: Counters
    ):
        self.key, self.outline, self.name = key, outline, name
        self.weights, self.library, self.counters = weights, library, counters
        self._kept: Any = None  # the groups of which a plan was kept, or could not be

    @staticmethod
    def of(
        proto: Any, contexts: Contexts | None, store: WeightStore, name: str, backend: Backend,
        options: Mapping[str, str], library: Library, counters: Counters,
    ) -> Plans | None:  # fmt: skip
        """`None` for a model that can have none."""
        stands_for = () if contexts is None else contexts.graphs()
        found = None if _may_use_foreign(proto, stands_for) else outline(proto, stands_for)
        if found is None:
            return None
        read_copies(proto, store)
        key = plan_key(found, backend, options)
        return Plans(key, found, name, DeviceWeights(backend, store), library, counters)

    def find(self) -> Planned | None:
        """The model by its stored plan, if there is one, and it is of these weights.

        Where weights are missing, there is none either: who opens the graph says which of them are needed.
        """
        entry = self.library.entry(self.key)
        if entry is None or isinstance(entry, Cut):
            return None
        outline = self.outline
        try:
            plan = read(entry.code)
            if contents_digest(plan.hashed, outline.places, self.weights.store) != plan.digest:
                return None
            places = {**outline.extras, **outline.places}
            return Planned(self.name, plan, places, self.weights, self.library, self.counters)
        except (Damaged, InvalidModel, KeyError, ValueError, TypeError, OverflowError):
            return None

    def keep(self, opened: Opened) -> None:
        """Keep the plan of a model that ran, for the next process."""
        self.library.unplanned = False
        state = opened.executable.runnables, opened.feeds.indices.count  # both may change with further calls
        if self._kept == state:
            return
        self._kept = state
        plan = for_cache(opened, self.outline)
        if plan is not None:
            self.library.put_plan(self.key, opened.backend, plan)


def _may_use_foreign(proto: Any, stands_for: Sequence[bytes | memoryview]) -> bool:
    """Whether a lowering of another package may serve the model: no plan knows its source, and that it is here."""
    foreign = {lowering.key for lowering in OPS if not lowering.fn.__module__.startswith("ep.")}
    if not foreign:
        return False
    ours = {(key.domain, key.op_type) for key in foreign}
    nodes = chain(walk(proto.graph), (node for function in proto.functions for node in function.node))
    inner = [bytes(graph) for graph in stands_for]
    return any((normal_domain(n.domain), n.op_type) in ours for n in nodes) or any(
        op_type.encode() in graph for _, op_type in ours for graph in inner
    )


def _array(weight: Weight, plan: StoredPlan, places: Mapping[str, Place], store: WeightStore) -> np.ndarray:
    return weight.of(store.content(places[weight.tensor]) if weight.tensor else plan.data)


class PlannedGroup:
    """As `ep.compiled_group.CompiledGroup`, but of stored code alone."""

    def __init__(
        self, part: Part, constants: dict[Any, np.ndarray], weights: DeviceWeights, library: Library, counters: Counters
    ) -> None:
        self.part, self.constants, self.weights = part, constants, weights
        self.backend = weights.backend
        self.group = group_of(part, self.backend.name)
        self.library, self.counters = library, counters
        self.cache: dict[Any, Function] = {}
        self.calls: list[Past] = []  # the first of each signature
        self._lock = threading.Lock()

    def run(self, env: dict[Any, Any]) -> None:
        part, backend = self.part, self.backend
        arguments = [env[v] for v in part.inputs]
        if part.is_random:
            arguments.append(np.asarray(secrets.randbits(32), np.uint32))
        if not backend.takes_numpy:
            arguments = list(map(backend.enter, arguments))
        host = [to_host(env[v], backend.xp) for v in part.host_inputs]
        shapes = tuple(map(signature, arguments))
        key = (shapes, tuple(map(contents, host))) if host else shapes
        function, results = self.cache.get(key), None
        if function is None:
            with self._lock:  # threads that come with the same signature wait, and do not load it again
                function = self.cache.get(key)
                results = self._first(key, host, arguments) if function is None else None
        if results is None:
            self.counters.hits += 1
            results = self._guarded(function, arguments)
        for value, result in zip(part.outputs, results, strict=True):
            env[value] = result

    def _first(self, key: Any, host: Sequence[np.ndarray], arguments: list[Any]) -> Sequence[Any]:
        group = self.group
        weights = self.weights.arguments(group.weights, self.constants, group.factors)
        host = list(map(copied, host))  # what is loaded is remembered with them
        specs = specs_of(self.backend, [*arguments, *weights])
        if specs is None or len(self.cache) >= MAX_SIGNATURES:  # with the graph, it keeps those that were used last
            raise NeedsGraph
        entry = self.library.entry(function_key(self.part.identity, fingerprint(self.backend), specs, host))
        if entry is None or isinstance(entry, Cut):
            raise NeedsGraph
        stored = self.library.load(entry, self.backend, specs, None)
        if stored is None:
            raise NeedsGraph
        function, results = self._guarded(lambda *own: called(stored, self, [*own, *weights]), arguments)
        released = [group.weights[number] for number in getattr(function, "unread", ())]
        self.weights.release(released, self.constants, group.factors)
        self.calls.append(Past.of(key, host, results))
        self.cache[key] = function
        self.counters.loaded += 1
        return results

    def place(self) -> list[Any]:
        """The weights on the device."""
        return self.weights.get(self.group.weights, self.constants, self.group.factors)

    def _guarded(self, function: Any, arguments: list[Any]) -> Any:
        part = self.part
        return guarded(function, arguments, self.backend.name, part.steps, part.first, part.last)
