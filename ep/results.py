"""What does a user get? Arrays that share memory with nothing else, by name or in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from ep.program import to_host


class Outputs(Mapping[str, Any]):
    """Outputs by name, in the model's order."""

    def __init__(self, items: Any) -> None:
        self._items = dict(items)

    def __getitem__(self, name: str) -> Any:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return f"Outputs({', '.join(f'{name}: {_type(value)}' for name, value in self._items.items())})"


def _type(value: Any) -> str:
    """`float32[1, 3]`, without waiting for the value."""
    if isinstance(value, list):
        return f"sequence of {len(value)}"
    if not hasattr(value, "shape"):
        return type(value).__name__
    dtype = str(value.dtype).rpartition(".")[2]  # MLX says "mlx.core.float32"
    return f"{'string' if dtype == 'object' else dtype}[{', '.join(map(str, value.shape))}]"


def apart(results: list[Any], entered: Iterable[Any], handle: Callable[[Any], Any]) -> list[Any]:
    """The results, none of which is a feed, a constant or another result: a write into one reaches no other."""
    seen = set(map(id, _arrays(entered)))

    def own(value: Any) -> Any:
        if isinstance(value, list):
            return [own(item) for item in value]
        if isinstance(value, np.ndarray):
            flags = value.flags
            value = value if flags.owndata and flags.writeable and id(value) not in seen else value.copy()
        elif id(value) in seen and value is not None:
            value = handle(value)
        seen.add(id(value))
        return value

    return [own(value) for value in results]


def _arrays(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list):
            yield from _arrays(value)
        else:
            yield value


def fresh(value: Any, xp: Any) -> Any:
    """The value as arrays of the user's own: NumPy, writable, shared with nobody."""
    if isinstance(value, list):
        return [fresh(item, xp) for item in value]
    if value is None or isinstance(value, dict):
        return value
    array = to_host(value, xp)
    return array if array.flags.writeable and array.flags.owndata and array is not value else np.array(array)
