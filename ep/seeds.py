"""Where do random operators without a `seed` attribute get one, also inside a compiled function?"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np

_derived: ContextVar[Iterator[Any] | None] = ContextVar("seeds", default=None)


def seed_of(attribute: float | None) -> Any:
    """The seed that a random operator's attribute gives, else a fresh one: an int or a 0-d uint32 array."""
    if attribute is not None:
        return int(np.float32(attribute).view(np.uint32))  # seeds are floats in ONNX, and 0.5 is not 0
    derived = _derived.get()
    return secrets.randbits(32) if derived is None else next(derived)


@contextmanager
def derived_from(seed: Any) -> Iterator[None]:
    """Fresh seeds derive from `seed`; in a trace, a 0-d uint32 array that the function gets at every call."""
    token = _derived.set(seed + step for step in itertools.count())
    try:
        yield
    finally:
        _derived.reset(token)


def are_derived() -> bool:
    """Whether seeds derive from one that a function gets: then a compiled loop must vary them, see `varied`."""
    return _derived.get() is not None


@contextmanager
def varied(iteration: Any) -> Iterator[None]:
    """Inside the body of a compiled loop, which is traced once: seeds differ by `iteration`, a 0-d uint32 array."""
    outer = _derived.get()
    if outer is None:
        yield
        return
    mixed = (next(outer) ^ (iteration + 1) * 0x9E3779B9) * 0x85EBCA6B
    with derived_from(mixed ^ mixed >> 16):
        yield
