"""Which steps of a group depend on axes that grow from call to call, such as those of a cache of attention?

The others have the same shapes in every call, so that compiling them once is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ep.backend import Backend
from ep.errors import EpError
from ep.partition import Group
from ep.program import Untraceable


class Known(tuple[Any, ...]):
    """The form of a value whose contents exist in a trace."""


Call = tuple[Sequence[Any], list[np.ndarray]]  # shape and dtype of each argument, and the host values


def changing(
    group: Group,
    backend: Backend,
    environment: Callable[[list[np.ndarray], Sequence[Any]], dict[Any, Any]],
    before: Call,
    now: Call,
    weights: Sequence[Any],
) -> frozenset[int]:
    """The steps (by id) that read or give other shapes, or other values on the host, in one call than in another.

    Steps whose results are known in a trace are among them: compiled with their readers, they would bring the
    growing shapes that they are made of into the signature. `environment` gives every value of the group.
    """
    try:
        old, new = (_forms(backend, environment, call, weights) for call in (before, now))
    except (EpError, Untraceable):
        return frozenset(map(id, group.steps))
    differs = {value for value, form in new.items() if form != old.get(value)}
    return frozenset(
        id(step)
        for step in group.steps
        if any(v in differs for v in (*step.reads(), *step.outputs))
        or all(v is None or isinstance(new.get(v), Known) for v in step.outputs)
    )


def _forms(backend: Backend, environment: Any, call: Call, weights: Sequence[Any]) -> dict[Any, Any]:
    shapes, host = call
    found: dict[Any, Any] = {}

    def trace(*values: Any) -> tuple[Any, ...]:
        found.update((value, _form(result)) for value, result in environment(host, values).items())
        return ()

    assert backend.abstract is not None
    backend.abstract(trace, [*shapes, *((tuple(w.shape), np.dtype(w.dtype)) for w in weights)])
    return found


def _form(value: Any) -> Any:
    """Shape and dtype of what is traced, contents of what the host knows."""
    if isinstance(value, list):
        return tuple(map(_form, value))
    if isinstance(value, np.ndarray):
        return Known((value.shape, value.dtype, value.tolist() if value.dtype.hasobject else value.tobytes()))
    return (value.shape, value.dtype) if hasattr(value, "shape") else value
