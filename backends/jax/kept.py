"""How does a function keep what depends on its weights alone? Computed at the first call, shared by all who need it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from weakref import WeakValueDictionary

import jax
import numpy as np

from ep.backend import Function

_MAGIC = b"ep kept\n"  # behind it: the length of the plan, the plan, and the executables


@dataclass(frozen=True)
class Item:
    """An array that is kept: how it is computed, as a digest, from which weights, and what it is."""

    digest: str
    sources: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Part:
    """Items that one call of a code computes, and the weights that it takes; several parts may share a code."""

    code: int
    items: tuple[int, ...]
    sources: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """Of the last `weights` arguments of a function: those that it goes on to take, and what it keeps of others."""

    weights: int
    raw: tuple[int, ...]
    items: tuple[Item, ...]
    parts: tuple[Part, ...]


@dataclass(eq=False)
class _Kept:
    """An array that is kept, and the host's arrays of the weights behind it: their addresses are in its name."""

    digest: str
    array: Any
    hosts: tuple[np.ndarray, ...]
    is_borrowed: bool = False


_shared: WeakValueDictionary[Any, _Kept] = WeakValueDictionary()
_lock = threading.Lock()


class WithKept:
    """A function of arguments and weights: `codes` give, of weights, what `later` takes besides arguments.

    Each code is made when it is first needed: where all that it gives is there already, it never is.
    """

    def __init__(self, plan: Plan, codes: Sequence[Callable[[], Function]], later: Function, device: Any) -> None:
        self.plan, self.later = plan, later
        self._where = device.platform, device.id
        self._make = codes
        self._codes: list[Any] = [None] * len(codes)

    def __call__(self, *arrays: Any) -> Any:
        at = len(arrays) - self.plan.weights
        kept: list[Any] = [None] * len(self.plan.items)
        for part in self.plan.parts:
            results = self.compute(part, [arrays[at + i] for i in part.sources])
            for place, array in zip(part.items, results, strict=True):
                kept[place] = array
        return self.later(*arrays[:at], *(arrays[at + i] for i in self.plan.raw), *kept)

    def bound(self, weights: Sequence[Any]) -> Function:
        """The function of the arguments alone. It tells what it holds besides weights, and which ones it does not read.

        `weights` are those of `ep.device_weights.Pending`: where the host has them tells which functions share an
        array, and one that nobody else reads is on the device no longer than it takes to compute what is kept.
        """
        raw = [weights[i].array() for i in self.plan.raw]  # first: it may move what the host has
        sources = [tuple(weights[i].host for i in item.sources) for item in self.plan.items]
        keys = [self._key(item, hosts) for item, hosts in zip(self.plan.items, sources, strict=True)]
        with _lock:
            entries = [_shared.get(key) for key in keys]

        def add(place: int, array: Any, is_borrowed: bool) -> None:
            with _lock:
                made = _Kept(self.plan.items[place].digest, array, sources[place], is_borrowed)
                entries[place] = _shared.setdefault(keys[place], made)

        owner, absent = weights[0].owner, [place for place, entry in enumerate(entries) if entry is None]
        stored = owner.stored([(self.plan.items[place], sources[place]) for place in absent])
        for place, found in zip(absent, stored, strict=True):
            if found is not None:
                add(place, *found)
        for part in self.plan.parts:
            missing = [place for place in part.items if entries[place] is None]
            if missing:
                sources_of_part = owner.once([weights[i] for i in part.sources])
                results = dict(zip(part.items, self.compute(part, sources_of_part), strict=True))
                del sources_of_part
                for place in missing:
                    add(place, results[place], False)
                del results
                for i in set(part.sources).difference(self.plan.raw):
                    weights[i].rest()
        later, constants = self.later, [*raw, *(entry.array for entry in entries if entry is not None)]

        def call(*arguments: Any) -> Any:
            return later(*arguments, *constants)

        call.kept = entries  # type: ignore[attr-defined]
        read = set(self.plan.raw)
        call.unread = sorted({i for item in self.plan.items for i in item.sources} - read)  # type: ignore[attr-defined]
        return call

    def compute(self, part: Part, sources: Sequence[Any]) -> Sequence[Any]:
        """The items of a part, from its weights."""
        code = self._codes[part.code]
        if code is None:
            code = self._codes[part.code] = self._make[part.code]()
        return jax.block_until_ready(code(*sources))

    def item(self, place: int, sources: Sequence[Any]) -> Any:
        """One item, from its weights, where each has a part of its own."""
        return self.compute(self.plan.parts[place], sources)[0]

    def _key(self, item: Item, hosts: Sequence[np.ndarray]) -> Any:
        return item.digest, self._where, tuple((a.ctypes.data, a.dtype, a.shape, a.strides) for a in hosts)


# The stored form: all executables, behind the plan.


def join(plan: Plan, codes: Sequence[bytes], later: bytes) -> bytes:
    """All of a function as one string of bytes."""
    blobs = [*codes, later]
    head = json.dumps(asdict(plan) | {"lengths": list(map(len, blobs))}).encode()
    return b"".join((_MAGIC, len(head).to_bytes(8, "little"), head, *blobs))


def is_joined(data: bytes) -> bool:
    """Whether bytes are those of `join`, and not an executable alone."""
    return data.startswith(_MAGIC)


def parted(data: bytes) -> tuple[Plan, list[bytes], bytes]:
    """What `join` joined.

    Raises:
        ValueError: the bytes are damaged.
    """
    at = len(_MAGIC) + 8
    end = at + int.from_bytes(data[len(_MAGIC) : at], "little")
    try:
        found = json.loads(data[at:end])
        lengths = _numbers(found["lengths"], len(data) + 1)
        if not lengths or end + sum(lengths) != len(data):
            raise ValueError("the parts of stored code have other lengths than it says")
        plan = _plan(found, len(lengths) - 1)
    except (KeyError, TypeError, ValueError) as cause:
        raise ValueError(f"the plan of stored code is damaged ({cause!r})") from cause
    blobs = []
    for length in lengths:
        blobs.append(data[end : end + length])
        end += length
    return plan, blobs[:-1], blobs[-1]


def _plan(found: Any, codes: int) -> Plan:
    weights = found["weights"]
    items = tuple(
        Item(str(i["digest"]), _numbers(i["sources"], weights), tuple(map(int, i["shape"])), str(i["dtype"]))
        for i in found["items"]
    )
    parts = tuple(
        Part(_numbers([p["code"]], codes)[0], _numbers(p["items"], len(items)), _numbers(p["sources"], weights))
        for p in found["parts"]
    )
    if sorted(place for part in parts for place in part.items) != list(range(len(items))):
        raise ValueError("not every item is computed once")
    return Plan(int(weights), _numbers(found["raw"], weights), items, parts)


def _numbers(values: Sequence[Any], limit: int) -> tuple[int, ...]:
    if not all(isinstance(value, int) and 0 <= value < limit for value in values):
        raise ValueError(f"stored code names numbers {values} of {limit}")
    return tuple(values)
