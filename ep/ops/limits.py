"""Which indices may a node be given? The limits that the specification sets, as roles of inputs (`Index`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ep.ops.axes import axis_of
from ep.registry import Index, Shapes

ENDLESS = 2**63 - 1


def along(of: str, axis: str | int = "axis", *, wraps: bool = True) -> Index:
    """Indices along an axis, by number or by attribute; where it `wraps`, negative ones count from the end."""

    def limits(shapes: Shapes, attributes: Mapping[str, Any]) -> tuple[int, int]:
        shape = shapes[of]
        size = shape[axis_of(attributes[axis] if isinstance(axis, str) else axis, len(shape))]
        return -size if wraps else 0, size - 1

    return Index(of, limits, checks=wraps)


def coordinates(of: str, indices: str, first: str = "") -> Index:
    """Tuples of indices along the axes of `of` that follow the first so many (an attribute); negative ones wrap."""

    def limits(shapes: Shapes, attributes: Mapping[str, Any]) -> tuple[list[int], list[int]]:
        start = attributes[first] if first else 0
        sizes = shapes[of][start : start + shapes[indices][-1]]
        if len(sizes) != shapes[indices][-1]:
            raise LookupError("the node itself says that there are not so many axes")
        return [-size for size in sizes], [size - 1 for size in sizes]

    return Index(of, limits, (indices,), tuples=True, checks=True)


def classes(of: str, axis: int, spared: str) -> Index:
    """Numbers of classes along an axis, or the value of an attribute."""
    return Index(of, along(of, axis, wraps=False).limits, spared=spared)


def lengths(of: str, axis: str) -> Index:
    """How many elements count along the axis that an attribute names."""

    def limits(shapes: Shapes, attributes: Mapping[str, Any]) -> tuple[int, int]:
        return 0, shapes[of][axis_of(attributes[axis], len(shapes[of]))]

    return Index(of, limits)


def starts(of: str, update: str) -> Index:
    """Where to write along `axis`; in the mode "circular" the end follows on the beginning."""

    def limits(shapes: Shapes, attributes: Mapping[str, Any]) -> tuple[int, int]:
        if attributes["mode"] == "circular":
            return 0, ENDLESS
        axis = axis_of(attributes["axis"], len(shapes[of]))
        return 0, shapes[of][axis] - shapes[update][axis]

    return Index(of, limits, (update,))


def positions(of: str, tokens: str, position_ids: str) -> Index:
    """Rows of a table of angles; a single number is that of the first token, and the others follow."""

    def limits(shapes: Shapes, attributes: Mapping[str, Any]) -> tuple[int, int]:
        shape, rows = shapes[tokens], shapes[of][0]
        return 0, rows - (shape[2 if len(shape) == 4 else 1] if shapes[position_ids] == (1,) else 1)

    return Index(of, limits, (tokens, position_ids))
