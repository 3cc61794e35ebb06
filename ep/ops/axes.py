"""How attributes and small inputs of ONNX become Python: axes counted from the front, arrays as ints, known words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from ep.errors import InvalidInput


def axis_of(axis: int, rank: int) -> int:
    """The axis counted from the front."""
    if -rank <= axis < rank:
        return axis % rank
    raise InvalidInput(
        f"axis {axis} does not exist in a tensor of rank {rank}.",
        why=f"axes of this tensor go from {-rank} to {rank - 1}." if rank else "a scalar has no axes.",
        fix="correct the axis, or the shape of the input.",
    )


def axes_of(axes: Iterable[int], rank: int) -> tuple[int, ...]:
    """The axes counted from the front, each at most once."""
    result = tuple(axis_of(axis, rank) for axis in axes)
    if len(set(result)) < len(result):
        raise InvalidInput(f"axes {result} name an axis twice.", fix="name each axis once.")
    return result


def ints(values: Any) -> tuple[int, ...]:
    """A host tensor of integers, or an attribute, as Python ints."""
    return tuple(map(int, np.asarray(values).reshape(-1).tolist()))


def scalar(value: Any) -> Any:
    """The only element of a host tensor as a Python value: exporters write scalars as [] and as [1]."""
    value = np.asarray(value)
    if value.size == 1:
        return value.item()
    raise InvalidInput(f"a scalar is expected, but a tensor of shape {list(value.shape)} was given.")


def one_of(name: str, value: str, *known: str) -> None:
    """Refuses a word that the specification does not list: a branch would take it for the last one that it does."""
    if value not in known:
        raise InvalidInput(f"{name} {value!r} is unknown.", fix=f"use one of {', '.join(known)}.")


def at(axis: int, index: Any) -> tuple[Any, ...]:
    """An index that applies `index` to one axis and leaves the axes before it whole."""
    return (slice(None),) * axis + (index,)
