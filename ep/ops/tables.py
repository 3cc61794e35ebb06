"""How tables that a lowering makes of its node's attributes are made once and not at every call."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any

import numpy as np


class _Same:
    """A list or array of attributes, compared by identity: a node hands the same objects to every call."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value


def once_per_node(build: Callable[..., Any]) -> Callable[..., Any]:
    """Remembers what `build` makes of attribute values, given by position; it must not depend on anything else."""
    cached = lru_cache(maxsize=64)(lambda *keys: build(*(key.value if isinstance(key, _Same) else key for key in keys)))

    @wraps(build)
    def built(*attributes: Any) -> Any:
        return cached(*(_Same(a) if isinstance(a, tuple | np.ndarray) else a for a in attributes))

    return built
