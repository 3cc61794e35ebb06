"""Which small models were loaded a moment ago? Programs make sessions of the same bytes again and again.

A loaded model never changes, so sessions may share it, with its compiled code. Only what fits into a few megabytes is
kept, and only models that are complete in themselves: what lies in other files may change.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

MOST_BYTES = 1 << 20  # of one model
ALL_BYTES = 16 << 20  # of all kept models together
MOST_MODELS = 128  # tools that run a graph node by node make a session of each node

T = TypeVar("T")
_kept: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()  # the value, and the bytes of its model
_lock = threading.Lock()


def digest(content: Any) -> bytes | None:
    """What stands for a model's bytes; `None` for a model that is too large to keep."""
    return hashlib.sha256(content).digest() if len(content) <= MOST_BYTES else None


class Key(NamedTuple):
    """What tells one model from every other, and how large it is."""

    size: int
    rest: tuple[Hashable, ...]


def shared(key: Key | None, make: Callable[[], T]) -> T:
    """What `make` returned for this key the last time, if it is still kept; without a key, always a new one."""
    if key is None:
        return make()
    with _lock:
        if key in _kept:
            _kept.move_to_end(key)
            return _kept[key][0]
    made = make()
    with _lock:
        _kept[key] = made, key.size
        # each model has two entries: what it declares, and what runs it
        while len(_kept) > 2 * MOST_MODELS or sum(size for _, size in _kept.values()) > 2 * ALL_BYTES:
            _kept.popitem(last=False)
    return made


def forget() -> None:
    """Keeps nothing any more."""
    with _lock:
        _kept.clear()
