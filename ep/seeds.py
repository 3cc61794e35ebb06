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
