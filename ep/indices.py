"""Do the indices that a node reads lie within what they index? Its limits, and the error that names what does not.

Devices do not tell: they clamp an index, or read whatever is there. So what the host has is checked by the host.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ep.errors import EpError, IndexOutOfRange
from ep.registry import Index, Shapes

FEW = 16  # up to this many numbers, Python is faster than NumPy
_UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
MODEL = "correct the model, or the inputs that these indices are computed from."


def limits_of(step: Any, index: Index, shapes: Shapes) -> tuple[Any, Any] | None:
    """The least and the greatest index of a node, as `Index.limits` gives them, or None where nothing limits them."""
    try:
        return index.limits(shapes, ChainMap(step.attributes, step.lowering.attributes))
    except (LookupError, EpError):  # an axis that does not exist: the node says so
        return None


def shapes_of(step: Any, shape_of: Callable[[Any], tuple[int, ...] | None]) -> dict[str, tuple[int, ...]]:
    """The known shapes of a node's inputs, by the names that its lowering gives them."""
    found = {}
    for name, value in zip(step.lowering.inputs, step.inputs, strict=False):
        shape = None if value is None else shape_of(value)
        if shape is not None:
            found[name] = tuple(shape)
    return found


def inside(array: np.ndarray, low: int, high: int) -> bool:
    """Whether all elements lie from `low`, which is not above 0, to `high`."""
    if array.size > FEW:
        if array.view(_UNSIGNED[array.itemsize]).max() <= high:  # none is negative, as is usual: one pass is enough
            return True
        return bool(low <= array.min() and array.max() <= high)
    values = array.ravel().tolist()
    return not values or (low <= min(values) and max(values) <= high)


def refuse(
    array: np.ndarray, step: Any, index: Index, limits: tuple[Any, Any], shapes: Shapes, name: str, fix: str
) -> None:
    """Raise `IndexOutOfRange` for the first element of `name` beyond the limits; `at` is the caller's to say."""
    low, high = np.broadcast_arrays(*map(np.asarray, limits))
    wrong = (array < low) | (array > high)
    spared = ChainMap(step.attributes, step.lowering.attributes).get(index.spared)
    if spared is not None:
        wrong &= array != spared
    if not wrong.any():
        return
    place = tuple(map(int, np.argwhere(wrong)[0]))
    component = place[-1] if index.tuples else ()
    at = f"at {list(place)} of {name}" if place else f"of {name}"
    indexed = f"'{index.of}' has shape {list(shapes[index.of])}"
    raise IndexOutOfRange(
        int(array[place]), int(low[component]), int(high[component]), where=at, bound=indexed, fix=fix
    )


def check_step(step: Any, shape_of: Callable[[Any], Any], content: Callable[[Any], np.ndarray | None]) -> None:
    """Check those indices of a node that the host has: `content` gives them, or None.

    Raises:
        IndexOutOfRange: an index is beyond its limits.
    """
    for position, index in step.lowering.indices:
        value = step.inputs[position] if position < len(step.inputs) else None
        array = None if value is None else content(value)
        if array is None or array.dtype.kind not in "iu":
            continue
        shapes = shapes_of(step, shape_of)
        limits = limits_of(step, index, shapes)
        if limits is None or (not index.tuples and inside(array, *limits)):
            continue
        refuse(array, step, index, limits, shapes, f"'{step.lowering.inputs[position]}'", MODEL)


def tables(steps: Iterable[Any]) -> set[Any]:
    """The values that steps, and those of their bodies, read as indices."""
    found: set[Any] = set()
    for step in steps:
        found.update(step.inputs[i] for i, _ in step.lowering.indices if i < len(step.inputs))
        for body in step.bodies.values():
            found |= tables(body.steps)
    return found


def tightest(limits: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """The limits that all of these allow."""
    lows, highs = zip(*limits, strict=True)
    return max(lows), min(highs)
