"""How does a function keep what depends on its weights alone? Computed at the first call, shared by all who need it."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any
from weakref import WeakValueDictionary

import jax
import numpy as np

from ep.backend import Function

_MAGIC = b"ep kept\n"  # behind it: the lengths of the plan and of both executables


@dataclass(frozen=True)
class Plan:
    """Which of the last `weights` arguments the two parts of a function take, and what the first gives.

    `items` are, of each result of the first: how it is computed, as a digest, and from which weights.
    """

    weights: int
    sources: tuple[int, ...]
    raw: tuple[int, ...]
    items: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(eq=False)
class _Kept:
    """An array that was computed, and the host's arrays of the weights behind it: their addresses are in its name."""

    array: Any
    hosts: tuple[np.ndarray, ...]


_shared: WeakValueDictionary[Any, _Kept] = WeakValueDictionary()
_lock = threading.Lock()


class WithKept:
    """A function of arguments and weights: `first` gives, of weights, what `later` takes besides arguments."""

    def __init__(self, plan: Plan, first: Function, later: Function) -> None:
        self.plan, self.first, self.later = plan, first, later

    def __call__(self, *arrays: Any) -> Any:
        at = len(arrays) - self.plan.weights
        raw = [arrays[at + i] for i in self.plan.raw]
        return self.later(*arrays[:at], *raw, *self._compute(arrays[at:]))

    def bound(self, weights: Sequence[Any], hosts: Sequence[np.ndarray]) -> Function:
        """The function of the arguments alone. It tells what it holds besides weights, and which ones it does not read.

        `hosts` are the same weights as NumPy has them: where they lie tells which other functions share an array.
        """
        keys = [self._key(item, hosts) for item in self.plan.items]
        with _lock:
            entries = [_shared.get(key) for key in keys]
        if None in entries:
            for place, array in enumerate(self._compute(weights)):
                sources = tuple(hosts[i] for i in self.plan.items[place][1])
                with _lock:
                    entries[place] = _shared.setdefault(keys[place], _Kept(array, sources))
        kept = [entry.array for entry in entries if entry is not None]
        later, constants = self.later, [*(weights[i] for i in self.plan.raw), *kept]

        def call(*arguments: Any) -> Any:
            return later(*arguments, *constants)

        call.kept, call.entries = kept, entries  # type: ignore[attr-defined]
        call.unread = sorted(set(self.plan.sources) - set(self.plan.raw))  # type: ignore[attr-defined]
        return call

    def _compute(self, weights: Sequence[Any]) -> Sequence[Any]:
        return jax.block_until_ready(self.first(*(weights[i] for i in self.plan.sources)))

    def _key(self, item: tuple[str, tuple[int, ...]], hosts: Sequence[np.ndarray]) -> Any:
        digest, sources = item
        places = [(hosts[i].ctypes.data, hosts[i].dtype, hosts[i].shape, hosts[i].strides) for i in sources]
        return digest, tuple(places)


# The stored form: both executables, behind the plan.


def pair(plan: Plan, first: bytes, later: bytes) -> bytes:
    """Both parts of a function as one string of bytes."""
    head = json.dumps(asdict(plan)).encode()
    sizes = b"".join(len(part).to_bytes(8, "little") for part in (head, first, later))
    return b"".join((_MAGIC, sizes, head, first, later))


def is_pair(data: bytes) -> bool:
    """Whether bytes are those of `pair`, and not an executable alone."""
    return data.startswith(_MAGIC)


def unpair(data: bytes) -> tuple[Plan, bytes, bytes]:
    """What `pair` joined.

    Raises:
        ValueError: the bytes are damaged.
    """
    at = len(_MAGIC)
    head, first, later = (int.from_bytes(data[at + 8 * i : at + 8 * i + 8], "little") for i in range(3))
    at += 24
    if len(data) != at + head + first + later:
        raise ValueError("the parts of stored code have other lengths than it says")
    found = json.loads(data[at : at + head])
    try:
        plan = Plan(
            int(found["weights"]),
            _numbers(found["sources"], found["weights"]),
            _numbers(found["raw"], found["weights"]),
            tuple((str(digest), _numbers(sources, found["weights"])) for digest, sources in found["items"]),
        )
    except (KeyError, TypeError) as cause:
        raise ValueError(f"the plan of stored code is damaged ({cause!r})") from cause
    at += head
    return plan, data[at : at + first], data[at + first :]


def _numbers(values: Sequence[Any], limit: int) -> tuple[int, ...]:
    if not all(isinstance(value, int) and 0 <= value < limit for value in values):
        raise ValueError(f"stored code names weights {values} of {limit}")
    return tuple(values)
