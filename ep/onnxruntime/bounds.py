"""Which fed indices lie outside the tensor that they index? Compiled code does not look; onnxruntime refuses them.

What is checked is what the host knows without waiting for a device: indices of `Gather` that are inputs of the model,
into weights or into other inputs. Token ids beyond a vocabulary are the case that happens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ep.onnxruntime.errors import InvalidArgument, failure, in_node

if TYPE_CHECKING:
    import onnx


class Bound(NamedTuple):
    """A `Gather` whose indices are the input `indices`, along an axis of `data`: an input, or of a known shape."""

    node: str
    data: str
    indices: str
    axis: int
    shape: tuple[int, ...]


def bounds(proto: onnx.ModelProto) -> tuple[Bound, ...]:
    """Every `Gather` of the main graph whose indices are an input, and whose data an input or an initializer."""
    shapes = {tensor.name: tuple(tensor.dims) for tensor in proto.graph.initializer}
    inputs = {value.name for value in proto.graph.input}
    return tuple(
        Bound(node.name, node.input[0], node.input[1], _axis(node), shapes.get(node.input[0], ()))
        for node in proto.graph.node
        if node.op_type == "Gather" and node.domain in ("", "ai.onnx") and len(node.input) == 2
        if node.input[1] in inputs and node.input[0] in inputs | shapes.keys()
    )


def _axis(node: onnx.NodeProto) -> int:
    return next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)


def check(bound: Bound, entered: Mapping[str, Any]) -> None:
    """`InvalidArgument` if an index is out of bounds; indices on a device are not looked at."""
    indices = entered.get(bound.indices)
    if not isinstance(indices, np.ndarray) or not indices.size:
        return
    shape = getattr(entered.get(bound.data), "shape", bound.shape)
    if not -len(shape) <= bound.axis < len(shape):
        return  # no such axis: the node itself says so
    size = shape[bound.axis]
    if -size <= indices.min() and indices.max() < size:
        return
    wrong = next(index for index in indices.flat if not -size <= index < size)
    raise failure(
        InvalidArgument,
        in_node(
            "Gather",
            bound.node,
            f"indices element out of data bounds, idx={wrong} must be within the inclusive range [{-size},{size - 1}]",
        ),
    )
