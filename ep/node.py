"""What is one node, taken by itself? Its operator, opset, dtypes, and the step that runs it alone.

A node is either an `onnx_ir` node of a graph or a `Step` of a program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ep.errors import InvalidModel, UnsupportedModel
from ep.program import Step
from ep.registry import OPS, Lowering

if TYPE_CHECKING:
    import onnx_ir as ir

NEWEST = 2**31  # the opset of a node that belongs to no graph


def op_name(node: Step | ir.Node) -> str:
    """Return the operator with its domain, such as "ai.onnx::Gemm"."""
    return node.op if isinstance(node, Step) else f"{node.domain or 'ai.onnx'}::{node.op_type}"


def lowering_of(node: Step | ir.Node) -> Lowering | None:
    """Return the lowering of a node in the opset of its graph, or None where there is none."""
    if isinstance(node, Step):
        return node.lowering
    return find(node.domain, node.op_type, _opset(node))


def find(domain: str, op_type: str, opset: int) -> Lowering | None:
    """Return the lowering of an operator, or None where there is none."""
    import ep.ops  # noqa: F401 - registers the lowerings

    return OPS.find(domain, op_type, opset)


def _opset(node: ir.Node) -> int:
    if node.version is not None:
        return node.version
    graph = node.graph
    return NEWEST if graph is None else graph.opset_imports.get(node.domain, NEWEST)


def attributes_of(node: Step | ir.Node) -> dict[str, Any]:
    """Return the attributes by name."""
    if isinstance(node, Step):
        return node.attributes
    return {name: attribute.value for name, attribute in node.attributes.items()}


def dtypes_of(values: Sequence[Any]) -> list[np.dtype[Any] | None]:
    """Return the declared dtype of each value; None where it is not declared, or the value is omitted."""
    from ep.dtypes import value_dtype

    return [None if value is None or not hasattr(value, "type") else value_dtype(value) for value in values]


def inner_dtype(
    node: Step | ir.Node, lowering: Lowering, inputs: Sequence[np.dtype[Any] | None]
) -> np.dtype[Any] | None:
    """Return the dtype in which a node computes, by its attributes or inputs; None where it is that of an input."""
    from ep.dtypes import onnx_dtype

    if callable(lowering.inside):
        return lowering.inside(attributes_of(node), inputs)
    code = attributes_of(node).get(lowering.inside) if lowering.inside else None
    return onnx_dtype(code) if code else None


def alone(node: Step | ir.Node, opset: int) -> Step:
    """Return a step that runs the node as the opset defines it, on inputs keyed 0, 1, … and outputs -1, -2, …

    Raises:
        InvalidModel: the node breaks the operator's schema.
        UnsupportedModel: the operator has no lowering in this opset, or the node's subgraphs read values
            around it, which it cannot have alone.
    """
    step = node if isinstance(node, Step) else _bound(node, opset)
    key = step.lowering.key
    lowering = find(key.domain, key.op_type, opset)
    if lowering is None:
        raise UnsupportedModel(f"{step.op} has no lowering for opset {opset}.", fix="use a newer opset.")
    outer = [value for body in step.bodies.values() for value in body.captures]
    if outer:
        raise UnsupportedModel(
            f"node {step.name!r} ({step.op}) cannot run alone.",
            why=f"its subgraphs read {len(outer)} values of the graph around it.",
            fix="compile the partition that contains it.",
        )
    inputs = tuple(None if value is None else index for index, value in enumerate(step.inputs))
    outputs = tuple(-1 - index for index in range(len(step.outputs)))
    return dataclasses.replace(step, lowering=lowering, opset=opset, inputs=inputs, outputs=outputs)


def _bound(node: ir.Node, opset: int) -> Step:
    """Bind the node in a graph of its own, whose inputs are the node's."""
    import onnx_ir as ir

    import ep.ops  # noqa: F401 - registers the lowerings
    from ep.binding import Binder
    from ep.weights import WeightStore

    inputs = [None if v is None else ir.Value(name=f"x{i}", type=v.type) for i, v in enumerate(node.inputs)]
    outputs = [ir.Value(name=f"y{i}", type=v.type) for i, v in enumerate(node.outputs)]
    made_of = node.domain, node.op_type, inputs, node.attributes.values()
    copy = ir.Node(*made_of, outputs=outputs, version=opset, name=node.name)
    opsets = {} if node.graph is None else dict(node.graph.opset_imports)
    given = [value for value in inputs if value is not None]
    graph = ir.Graph(given, outputs, nodes=[copy], opset_imports=opsets | {node.domain: opset})
    binder = Binder(ir.Model(graph, ir_version=10), WeightStore(), drop_aliases=False)
    steps = binder.bind(graph).steps
    if binder.damaged:
        raise binder.damaged[0]
    if binder.problems:
        raise InvalidModel.from_problems(f"node {node.name!r}", binder.problems)
    if not steps:
        what = f"{op_name(node)} has no lowering for opset {opset}."
        raise UnsupportedModel(what, fix="use a newer opset.")
    return steps[0]
