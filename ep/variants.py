"""What is a signature of a group, and is one more of them compiled, or run without? Running is rent, compiling buys.

Two kinds of signatures come by the hundred and return late or never: host values that count (the position in a
loop), and shapes that grow because results are fed back (the cache of a language model, one longer with each token;
in a graph that is cut, groups that see no such result grow in an arithmetic progression). Of these, a group compiles
few; a further one only when running it without has cost, with the run to come, as much as compiling (at most twice
the best that could have been done), or when it comes several times in a row. Other shapes are all compiled, until
they are so many that the next one is probably new again.
"""

from __future__ import annotations

import math
import threading
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

MAX_SHAPES = 16  # shapes that are compiled in any case
MAX_HOST = 16  # host values compiled per combination of shapes; more of them are run without compiling
FEW_HOST = 2  # so many are compiled in any case, also where compiling does not pay
STEADY = 2  # so often in a row without compiling, and a signature is no passing one
REMEMBERED = 8  # signatures among which growth is looked for
MAX_RENTED = 128  # signatures whose rent is counted

Axes = frozenset[tuple[int, int]]  # (argument, axis)


class Variants:
    """What one group knows of its signatures. `feedback` is set once any group of the session gets its results back.

    Not synchronized: call it under the group's lock.
    """

    def __init__(self, feedback: threading.Event) -> None:
        self.feedback = feedback
        self.recent: deque[Past] = deque(maxlen=REMEMBERED)
        self.growing: list[Axes] = []  # axes that were seen to grow together
        self._known: dict[Any, tuple[Axes, Past]] = {}  # shapes → what `grown` said of them
        self.patient = True  # until running on the host was seen to take longer than compiling
        self._host: Counter[Any] = Counter()  # shapes → how many host values were compiled for them
        self._compiling, self._compiled = 0.0, 0  # seconds, and of how many functions
        self._rent = 0.0  # seconds of the last run without compiling
        self._spent: dict[Any, float] = {}  # signature → seconds of all its runs without compiling
        self._latest: tuple[Any, int] = (None, 0)  # what was run last without compiling, and how often in a row

    def pays_host(self, key: Any, shapes: Any) -> bool:
        """Whether to compile one more combination of host values."""
        compiled = self._host[shapes]
        if compiled < FEW_HOST or not self._compiled:
            return compiled < MAX_HOST
        return compiled < MAX_HOST and self._due(key)

    def pays_shapes(self, key: Any, shapes: Any) -> bool:
        """Whether to compile further shapes."""
        few = len(self._host) < MAX_SHAPES or shapes in self._host
        return few or not (self.patient and self._compiled) or self._due(key)

    @property
    def price(self) -> float:
        """Seconds that compiling took on average; infinite if nothing was compiled."""
        return self._compiling / self._compiled if self._compiled else math.inf

    def grown(self, key: Any, shapes: Any) -> tuple[Axes, Past] | None:
        """The axes that grow, and an earlier call from which this differs in them alone; `None`: compile."""
        found = self._known.get(shapes) or self._growth(shapes)
        if found is None:
            return None
        axes, _ = found
        if axes not in self.growing:
            self.growing.append(axes)
        elif self._due(key):
            return None
        if len(self._known) >= MAX_RENTED:
            self._known.clear()
        self._known[shapes] = found  # it may return when calls in between have pushed `past` out of `recent`
        return found

    def _growth(self, shapes: Any) -> tuple[Axes, Past] | None:
        for axes in self.growing:
            for past in reversed(self.recent):
                if past.shapes != shapes and longer(past.shapes, shapes) <= axes:
                    return axes, past
        for past in reversed(self.recent):
            axes = longer(past.shapes, shapes)
            if axes and self._established(axes, past, shapes):
                return axes, past
        return None

    def _established(self, axes: Axes, past: Past, shapes: Any) -> bool:
        if fed_back(axes, past, shapes):
            self.feedback.set()
            return True
        return self.feedback.is_set() and any(continues(first.shapes, past.shapes, shapes) for first in self.recent)

    def bought(self, past: Past, seconds: float | None) -> None:
        """A function was compiled in these seconds, or loaded (`None`), and called."""
        self.recent.append(past)
        self._host[past.shapes] += bool(past.host)
        if seconds is not None:
            self._compiling += seconds
            self._compiled += 1

    def rented(self, key: Any, past: Past, seconds: float) -> None:
        """A signature was run without compiling."""
        if all(past.shapes != other.shapes for other in self.recent):
            self.recent.append(past)
        if len(self._spent) >= MAX_RENTED:
            self._spent.clear()
        self._rent = seconds
        self._latest = key, self._latest[1] + 1 if self._latest[0] == key else 1
        self._spent[key] = self._spent.get(key, 0.0) + seconds

    def _due(self, key: Any) -> bool:
        if self._latest == (key, STEADY):
            return True
        return self._spent.get(key, 0.0) + self._rent >= self.price

    def forget(self) -> None:
        """Nothing is compiled any more."""
        self._host.clear()
        self._spent.clear()
        self._latest = None, 0


@dataclass(frozen=True, slots=True)
class Past:
    """A call: the signatures of its arguments and results, and its host values."""

    shapes: tuple[Any, ...]
    host: Sequence[Any]
    results: tuple[Any, ...]

    @classmethod
    def of(cls, key: Any, host: Sequence[Any], results: Sequence[Any]) -> Past:
        """The call of a signature, which is the shapes, with the contents of host values where there are any."""
        return cls(key[0] if host else key, host, tuple(map(signature, results)))


NOT_ALONE: Axes = frozenset({(-1, -1)})  # in no set of growing axes


def longer(before: Sequence[Any], after: Sequence[Any]) -> Axes:
    """The axes in which tensors have other sizes; `NOT_ALONE` if they differ in more than that."""
    axes: set[tuple[int, int]] = set()
    for number, (old, new) in enumerate(zip(before, after, strict=True)):
        if old == new:
            continue
        if not (is_tensor(old) and is_tensor(new) and old[1] == new[1] and len(old[0]) == len(new[0])):
            return NOT_ALONE
        axes.update((number, axis) for axis, (a, b) in enumerate(zip(old[0], new[0], strict=True)) if a != b)
    return frozenset(axes)


def fed_back(axes: Axes, past: Past, shapes: Sequence[Any]) -> bool:
    """Whether these axes grew because results of the earlier call are arguments now."""
    if not _grows(axes, past.shapes, shapes):
        return False
    return any(shapes[number] in past.results for number, _ in axes)


def continues(first: Sequence[Any], second: Sequence[Any], third: Sequence[Any]) -> bool:
    """Whether three signatures grow, in the same axes by the same steps."""
    axes = longer(first, second)
    if axes != longer(second, third) or not _grows(axes, first, second):
        return False
    return all(third[n][0][axis] - second[n][0][axis] == second[n][0][axis] - first[n][0][axis] for n, axis in axes)


def _grows(axes: Axes, before: Sequence[Any], after: Sequence[Any]) -> bool:
    return axes != NOT_ALONE and all(after[n][0][axis] > before[n][0][axis] for n, axis in axes)


def is_tensor(entry: Any) -> bool:
    """Whether an entry of a signature is a shape and a dtype, rather than those of a sequence's elements."""
    return entry is not None and len(entry) == 2 and all(isinstance(size, int) for size in entry[0])


def signature(value: Any) -> Any:
    """What compiled code depends on: shape and dtype, of every element for sequences."""
    if isinstance(value, list):
        return tuple(map(signature, value))
    return (value.shape, value.dtype) if value is not None else None


def contents(value: Any) -> Any:
    """Hashable form of a host value that is compiled in."""
    if isinstance(value, list):
        return tuple(map(contents, value))
    if value is None:
        return None
    return value.shape, value.dtype, tuple(value.flat) if value.dtype.kind == "O" else value.tobytes()


def copied(value: Any) -> Any:
    """A host value in memory of its own."""
    if isinstance(value, list):
        return list(map(copied, value))
    return None if value is None else np.array(value)
