"""How tables that a lowering makes of its node's attributes are made once and not at every call."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np

MOST_TABLES = 64  # per kind of table; beyond, all are forgotten and made again when needed


def once_per_node(build: Callable[..., Any]) -> Callable[..., Any]:
    """Remembers what `build` makes of attributes, given by position; it must not depend on anything else.

    Lists and arrays are compared by identity: a node hands the same objects to every call. They are kept, so that
    no other object can get their identity.
    """
    made: dict[tuple[Any, ...], tuple[tuple[Any, ...], Any]] = {}

    @wraps(build)
    def built(*attributes: Any) -> Any:
        key = tuple([id(a) if isinstance(a, tuple | np.ndarray) else a for a in attributes])
        found = made.get(key)
        if found is None:
            if len(made) >= MOST_TABLES:
                made.clear()
            found = made[key] = (attributes, build(*attributes))
        return found[1]

    return built
