"""What must be known of an array library to make a provider of it? One frozen `Backend` value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from ep.device import DeviceId
from ep.memory import Memory
from ep.registry import OpKey, Overrides

Function = Callable[..., Any]
Code = Callable[[], bytes]  # the stored form of a compiled function, or `NotStorable`
Specs = Sequence[tuple[tuple[int, ...], np.dtype[Any]]]  # shape and dtype of each argument


class NotStorable(Exception):
    """A compiled function has no form that can be stored; the text says why."""


@dataclass(frozen=True, eq=False)
class Backend:
    """An array library on one device. All functions may be called from any thread, inside `scope()`."""

    name: str
    version: str
    device: DeviceId
    fingerprint: str  # hardware and versions that compiled code depends on
    xp: ModuleType  # the namespace of the lowerings
    dtypes: frozenset[np.dtype[Any]]  # held by the device in full width
    memory: Memory
    scope: Callable[[], AbstractContextManager[Any]]  # settings of the library that hold inside only
    asarray: Callable[[np.ndarray], Any]  # always copies: later writes to the argument must not show
    borrow: Callable[
        [Sequence[np.ndarray]], list[tuple[Any, str | None]]
    ]  # each with why it is a copy; None: it is not
    obstacle: Callable[[np.ndarray], str | None]  # why `borrow` would copy, without doing so
    to_numpy: Callable[[Any], np.ndarray]  # waits for the array; a read-only view where that is possible
    compile: Callable[[Function], Function]  # of a function from arrays to a tuple of arrays
    is_array: Callable[[Any], bool]  # whether a value is an array of the library
    start: Callable[[Sequence[Any]], Any]  # begins to compute the arrays without waiting
    block: Callable[[Sequence[Any]], Any]  # waits until the arrays are computed
    synchronize: Callable[[], Any]  # waits for all work on the device
    abstract: Callable[[Function, Specs], Sequence[Any]] | None = None  # results with shapes and dtypes, without data
    # An array as the host sees it, if that takes neither waiting nor copying.
    peek: Callable[[Any], np.ndarray | None] = lambda array: None
    overrides: Overrides | None = None
    # Compiles for these arguments, of which the last so many are the same in every call, and stores. A function with a
    # method `bound` takes the latter (`ep.device_weights.Pending`) and gives one of the others, with what it keeps in
    # their stead (`kept`: each with its `array`, and whether it `is_borrowed`), and the numbers of those that it does
    # not read any more (`unread`).
    ahead: Callable[[Function, Specs, int], tuple[Function, Code]] | None = None
    # What such a function would keep: its `plan`, and `compute`, which gives a part of it. None: nothing, ever.
    keeps: Callable[[Function, Specs, int], Any] | None = None
    # The function of stored code; where that cannot run in some thread, the other one, which it was made from, may.
    deserialize: Callable[[bytes, Function | None], Function] | None = None
    compiles_in_threads: bool = False  # several functions are compiled at a time faster than one after the other
    loads_in_threads: bool = False  # stored code can be loaded beside Python, and takes long enough for that to pay
    checks_stored: bool = False  # stored code is another form of the function: its results are compared first
    handle: Callable[[Any], Any] = lambda array: (
        array
    )  # another object for the same data, if writes replace an object's
    is_host: bool = False  # NumPy: runs what only the host can, strings among it
    narrows: frozenset[np.dtype[Any]] = frozenset()  # dtypes that lose width outside `scope`
    factor: Callable[[Any], Any] = lambda array: array  # a matrix in the dtype that products are fastest with
    takes_numpy: bool = False  # compiled functions take NumPy arrays, and faster than `asarray` does
    compiles_nodes: bool = False  # also outside `compile`, each operation for each shape and parameter
    traces_loops: bool = False  # xp.scan and xp.while_loop work inside a trace
    precise: Callable[[], AbstractContextManager[Any]] | None = None  # products in full width; None: they always are
    remark: Callable[[OpKey, dict[str, Any], Sequence[Any]], str] | None = None  # what a user should know of a node
    launch_us: float = 1.0  # starting one operation
    bytes_per_us: float = 10_000.0  # memory bandwidth
    notes: tuple[str, ...] = ()  # what `ep doctor` should tell the user
    settings: Callable[[], str] | None = None  # global settings of the library, as they are, that reach compiled code

    def needs(self) -> str:
        """What code that is compiled now will depend on, as "name value / name value / …"."""
        if self.settings is None:
            return self.fingerprint
        with self.scope():  # where it is compiled: some settings do not reach into it
            return f"{self.fingerprint} / settings {self.settings()}"

    def enter(self, value: Any) -> Any:
        """Return a value on the device: host arrays, also those in lists, are copied, others stay."""
        if isinstance(value, list):
            return [self.enter(item) for item in value]
        return self.asarray(np.asarray(value)) if isinstance(value, np.ndarray | np.generic) else value
