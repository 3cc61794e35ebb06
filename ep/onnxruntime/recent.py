"""Which small models were loaded a moment ago? Programs make sessions of the same bytes again and again.

A loaded model never changes, so sessions may share it, with its compiled code. Only what fits into a few megabytes is
kept, and only models that are complete in themselves: what lies in other files may change.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

MOST_BYTES = 1 << 20  # of one model
MOST_MODELS = 32

T = TypeVar("T")
_kept: OrderedDict[Hashable, Any] = OrderedDict()
_lock = threading.Lock()


def digest(content: Any) -> bytes | None:
    """What stands for a model's bytes; `None` for a model that is too large to keep."""
    return hashlib.sha256(content).digest() if len(content) <= MOST_BYTES else None


def shared(key: Hashable | None, make: Callable[[], T]) -> T:
    """What `make` returned for this key the last time, if it is still kept; without a key, always a new one."""
    if key is None:
        return make()
    with _lock:
        if key in _kept:
            _kept.move_to_end(key)
            return _kept[key]
    made = make()
    with _lock:
        _kept[key] = made
        while len(_kept) > 2 * MOST_MODELS:  # each has two entries: what it declares, and what runs it
            _kept.popitem(last=False)
    return made


def forget() -> None:
    """Keeps nothing any more."""
    with _lock:
        _kept.clear()
