"""Where does a compiled function come from? From the model's context, the user's cache, or the compiler, in this order.

Each group of a session asks here once per signature. What the compiler makes is kept: in the cache for the next
process, and here for `save_context`.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ep import container
from ep.backend import Backend, Function, NotStorable, Specs
from ep.container import Container, Cut
from ep.context_cache import Cache, ContextNotice
from ep.errors import EpError
from ep.identity import Unstorable, fingerprint, function_key, group_digest, name_of
from ep.program import Untraceable

MOST_MADE = 1024  # functions that a session remembers for `save_context`; the oldest go
MOST_LIVE = 256  # of these, such as hold a compiled function: those that no group keeps any more take memory
GAIN = 2.0  # how many times faster than compiling loading must be, where it is measured
MOST_LOADED_AHEAD = 4  # functions of a model that are loaded before one is called: more signatures are a choice of many
WORTH = 0.005  # seconds of compiling from which storing pays


@dataclass(frozen=True, slots=True)
class Made:
    """A function of this session: the provider it is for, its arguments, and what gives its stored form.

    One that is `live` is not stored yet, and so holds the compiled function itself.
    """

    provider: str
    arguments: tuple[container.Spec, ...]
    code: Callable[[], Any]
    live: bool = False


@dataclass
class Library:
    """Stored functions of one session. `shelf` is what its model brought and may be used; `withheld` says why not."""

    cache: Cache | None = None
    shelf: Mapping[str, container.Code | Cut] = field(default_factory=dict)
    withheld: Mapping[str, str] = field(default_factory=dict)  # key → the notice to give when it would have served
    keeping: bool = False  # whether what is compiled will be saved, so that its stored form is made at once
    made: dict[str, Made] = field(default_factory=dict)
    cuts: dict[str, tuple[str, int]] = field(default_factory=dict)  # key → provider, number of the step
    refused: dict[str, str] = field(default_factory=dict)  # name of a group's first node → why it is not stored
    loading: dict[str, Future[Function]] = field(default_factory=dict)  # key → what a thread loads meanwhile
    unplanned: bool = False  # whether the cache got code, or gave some, since the session last looked
    _seen: dict[Backend, str] = field(default_factory=dict)  # the fingerprint of each provider's code, when first asked
    _told: set[str] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def first(
        self, group: Any, host: Sequence[Any], arguments: Sequence[Any], trace: Function
    ) -> tuple[Function, Any, bool]:
        """The function of a `CompiledGroup` without its weights, its results, and whether it was stored.

        The weights are the last of the arguments.

        Raises:
            Untraceable: the group has to be cut, as compiling it told, now or in an earlier process.
        """
        backend = group.backend
        specs = specs_of(backend, arguments)
        if specs is None:
            self.refused[group.group.steps[0].name] = "not all its arguments are tensors"
        if specs is None or backend.ahead is None:
            return *called(backend.compile(trace), group, arguments), False
        key = self._key(group, backend, specs, host)
        function = self._find(key, backend, specs, group, trace) if key else None
        if function is not None:
            self.unplanned = self.cache is not None
            return *called(function, group, arguments), True
        return *self._compile(group, backend, specs, arguments, trace, key), False

    def load_ahead(self, backend: Backend, codes: Iterable[container.Code]) -> None:
        """Begin to load stored code in threads, while the session is made; errors are for the first call to tell."""
        few = [code for code in codes if self.shelf.get(code.key) is code]
        if not backend.loads_in_threads or not 0 < len(few) <= MOST_LOADED_AHEAD:
            return

        def load(code: Any) -> Function:
            with backend.scope():
                return backend.deserialize(bytes(code), None)  # type: ignore[misc]

        pool = ThreadPoolExecutor(2, "ep-load")
        self.loading |= {code.key: pool.submit(load, code.code) for code in few}
        pool.shutdown(wait=False)

    def holds(self, group: Any, host: Sequence[Any], arguments: Sequence[Any]) -> bool:
        """Whether a function for these arguments is stored, so that nothing has to be compiled."""
        specs = specs_of(group.backend, arguments)
        if specs is None or group.backend.ahead is None:
            return False
        backend = group.backend
        made_for = self._seen.get(backend) or self._seen.setdefault(backend, fingerprint(backend))  # it takes a while
        key = self._key(group, backend, specs, host, made_for)
        return bool(key) and (key in self.shelf or (self.cache is not None and key in self.cache))

    def _key(self, group: Any, backend: Backend, specs: Specs, host: Sequence[Any], made_for: str = "") -> str:
        try:
            if group.identity is None:
                group.identity = group_digest(group.group, group.all_constants, backend)
            return function_key(group.identity, made_for or fingerprint(backend), specs, host)
        except Unstorable as why:
            self.refused[group.group.steps[0].name] = str(why)
            return ""

    def _find(self, key: str, backend: Backend, specs: Specs, group: Any, trace: Function) -> Function | None:
        entry = self.entry(key)
        if entry is None:
            self._tell(self.withheld.get(key))
            return None
        if isinstance(entry, Cut):
            self._cut_again(entry, group, backend)
            return None
        return self.load(entry, backend, specs, trace)

    def entry(self, key: str) -> container.Code | Cut | None:
        """What is stored under a key, in the model's context or in the cache."""
        entry = self.shelf.get(key)
        return entry if entry is not None or self.cache is None else self.cache.get(key)

    def load(self, entry: container.Code, backend: Backend, specs: Specs, trace: Function | None) -> Function | None:
        """The function of stored code; `None`, and a notice, if it is not what was asked for."""
        key = entry.key
        if entry.arguments != written(specs):
            self._tell(f"stored code is of other arguments, {entry.arguments}; it is compiled again.")
            return None
        code = entry.code
        try:
            assert backend.deserialize is not None
            begun = self.loading.pop(key, None)
            function = begun.result() if begun else backend.deserialize(bytes(code), trace)
        except (RuntimeError, ValueError) as cause:
            self._tell(f"stored code could not be loaded ({type(cause).__name__}: {cause}); it is compiled again.")
            return None
        self._remember(key, Made(backend.name, entry.arguments, lambda: bytes(code)))
        return function

    def _cut_again(self, cut: Cut, group: Any, backend: Backend) -> None:
        if cut.step >= len(group.group.steps):
            return
        self.cuts[cut.key] = backend.name, cut.step
        signal = Untraceable("compiling it was tried before")
        signal.step = group.group.steps[cut.step]
        raise signal

    def _compile(
        self, group: Any, backend: Backend, specs: Specs, arguments: Sequence[Any], trace: Function, key: str
    ) -> tuple[Function, Any]:
        started = time.perf_counter()
        assert backend.ahead is not None
        try:
            made, code = backend.ahead(trace, specs, len(group.group.weights))
            function, results = called(made, group, arguments)
        except Untraceable as signal:
            number = next((i for i, step in enumerate(group.group.steps) if step is signal.step), None)
            if key and number is not None:
                self.cuts[key] = backend.name, number
                self._store(key, backend, cuts=(Cut(key, number),))
            raise
        if key:
            self._remember(key, Made(backend.name, written(specs), code, live=True))
            seconds = time.perf_counter() - started
            if self.keeping or (self.cache is not None and seconds >= WORTH):
                self._keep(key, self.made[key], backend, group, arguments, results, seconds)
        return function, results

    def _remember(self, key: str, made: Made) -> None:
        with self._lock:
            self.made[key] = made
            live = [k for k, m in self.made.items() if m.live] if len(self.made) > MOST_LIVE else []
            for oldest in live[:-MOST_LIVE]:
                del self.made[oldest]
            while len(self.made) > MOST_MADE:
                del self.made[next(iter(self.made))]

    def forget(self) -> None:
        """Drop compiled functions; what is stored of them stays."""
        with self._lock:
            self.made = {key: made for key, made in self.made.items() if not made.live}
            self.loading.clear()

    def _keep(
        self,
        key: str,
        made: Made,
        backend: Backend,
        group: Any,
        arguments: Sequence[Any],
        results: Sequence[Any],
        seconds: float,
    ) -> None:
        """Store what was compiled, unless its stored form gives other results, or takes as long to load as to make."""
        loading = 0.0
        try:
            data = made.code()
            if backend.checks_stored:
                own = arguments[: len(arguments) - len(group.group.weights)]
                loading = compare(backend, data, [*own, *group.place()], results)
        except NotStorable as why:
            self.refused[group.group.steps[0].name] = str(why)
            del self.made[key]
            return
        self._remember(key, Made(made.provider, made.arguments, lambda: data))
        if loading * GAIN < seconds:
            self._store(key, backend, codes=(container.Code(key, made.arguments, data),))

    def _store(self, key: str, backend: Backend, **parts: Any) -> None:
        if self.cache is not None:
            self.cache.put(key, Container(f"ep.{backend.name}", backend.version, fingerprint(backend), **parts))
            self.unplanned = True

    def put_plan(self, key: str, backend: Backend, plan: bytes) -> None:
        """Keep the plan of a model beside its code (`ep.stored_plan`)."""
        self._store(key, backend, codes=(container.Code(key, (), plan),))
        self.unplanned = False

    def _tell(self, notice: str | None) -> None:
        """Warn, once per text."""
        with self._lock:
            if notice is None or notice in self._told:
                return
            self._told.add(notice)
        warnings.warn(notice, ContextNotice, stacklevel=2)


def called(function: Function, group: Any, arguments: Sequence[Any]) -> tuple[Function, Any]:
    """A function with its last arguments, the weights of a group, given once and for all; and its results."""
    values = group.group.weights
    count = len(arguments) - len(values)
    own, weights = arguments[:count], arguments[count:]
    bound = getattr(function, "bound", None)
    if bound is not None:
        function = bound(weights)
    elif weights:
        function = _with(function, group.place())
    return function, function(*own)


def _with(function: Function, weights: Sequence[Any]) -> Function:
    return lambda *arguments: function(*arguments, *weights)


def compare(backend: Backend, data: bytes, arguments: Sequence[Any], results: Sequence[Any]) -> float:
    """Raise `NotStorable` unless stored code gives the same bits as what it was made from; the seconds to load it."""
    assert backend.deserialize is not None
    started = time.perf_counter()
    try:
        again = backend.deserialize(data, None)(*arguments)
    except (RuntimeError, ValueError, EpError) as cause:
        raise NotStorable(f"its stored form does not run: {cause}") from cause
    seconds = time.perf_counter() - started
    for ours, theirs in zip(map(backend.to_numpy, results), map(backend.to_numpy, again), strict=True):
        if ours.dtype != theirs.dtype or ours.shape != theirs.shape or ours.tobytes() != theirs.tobytes():
            raise NotStorable("its stored form gives other results")
    return seconds


def specs_of(backend: Backend, arguments: Sequence[Any]) -> Specs | None:
    """Shape and dtype of each argument; None where one is no tensor."""
    dtype_of = backend.xp.dtype_of
    if any(value is None or isinstance(value, list) for value in arguments):
        return None
    return [(tuple(a.shape), a.dtype if isinstance(a.dtype, np.dtype) else dtype_of(a)) for a in arguments]


def written(specs: Specs) -> tuple[container.Spec, ...]:
    """Specs as a container holds them."""
    return tuple((tuple(map(int, shape)), name_of(dtype)) for shape, dtype in specs)
