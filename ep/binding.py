"""Which lowering each node gets: an `onnx_ir` graph becomes a `BoundGraph` of steps, or a list of problems."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ep.bodies import InlineBody, declared
from ep.dtypes import output_dtypes, value_dtype
from ep.packed_constants import packed_steps
from ep.program import Step
from ep.registry import OPS, REQUIRED, Lowering
from ep.weights import WeightStore

if TYPE_CHECKING:
    import onnx_ir as ir


@dataclass
class BoundGraph:
    """A graph whose nodes have lowerings. Values are `onnx_ir.Value` objects, used as keys only."""

    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    declared_outputs: tuple[Any, ...]  # the same, with their names and types, before aliases were resolved
    steps: list[Step]
    constants: dict[Any, np.ndarray]
    defaults: dict[Any, np.ndarray]  # initializers that are also inputs: a feed may override them
    dtypes: dict[Any, np.dtype | None]  # element dtype of every value, subgraphs included
    opsets: Mapping[str, int]


class Binder:
    """Binds one model; `problems` collects everything that is wrong with it, for one error."""

    def __init__(self, model: ir.Model, store: WeightStore, *, drop_aliases: bool = True) -> None:
        self.drop_aliases = drop_aliases
        self.opsets = dict(model.graph.opset_imports)
        self.ir_version = model.ir_version
        self.store = store
        self.dtypes: dict[Any, np.dtype | None] = {}
        self.aliases: dict[Any, Any] = {}  # output of an alias → the value that it stands for
        self.problems: list[str] = []
        self.unsupported: dict[str, list[str]] = {}

    def bind(self, graph: ir.Graph) -> BoundGraph:
        """The main graph with all its subgraphs."""
        unpacking = list(packed_steps(graph, self.store))
        constants = self._constants(graph, {step.outputs[0] for step, _, _ in unpacking})
        known = self._enter(graph, constants)
        for step, source, data in unpacking:
            constants[source] = data
            known.add(step.outputs[0])
            self.dtypes[step.outputs[0]] = step.output_dtypes[0]
        steps = [*(step for step, _, _ in unpacking), *self._steps(graph, known)]
        self._check_outputs(graph, known)
        overridable = {v for v in graph.inputs if v in constants and self.ir_version >= 4}
        defaults = {v: constants.pop(v) for v in overridable}
        inputs = tuple(v for v in graph.inputs if v not in constants)
        return BoundGraph(
            inputs, self._resolved(graph.outputs), tuple(graph.outputs), steps, constants, defaults,
            self.dtypes, self.opsets,
        )  # fmt: skip

    def _enter(self, graph: ir.Graph, constants: dict[Any, np.ndarray]) -> set[Any]:
        self.dtypes |= {v: value_dtype(v) for v in graph.inputs} | {v: a.dtype for v, a in constants.items()}
        return {*graph.inputs, *constants}

    def _constants(self, graph: ir.Graph, without: Collection[Any] = ()) -> dict[Any, np.ndarray]:
        return {
            value: self.store.array(value.const_value)
            for value in graph.initializers.values()
            if value.const_value is not None and value not in without
        }

    def _steps(self, graph: ir.Graph, known: set[Any]) -> list[Step]:
        steps = []
        for index, node in enumerate(graph):
            step = self._step(node, index, known)
            known.update(node.outputs)
            if step is not None:
                steps.append(step)
        return steps

    def _step(self, node: ir.Node, index: int, known: set[Any]) -> Step | None:
        name = node.name or f"{node.op_type}_{index}"
        opset = node.version if node.version is not None else self.opsets.get(node.domain)
        for value in node.inputs:
            if value is not None and value not in known:
                self.problems.append(f"node '{name}' reads '{value.name}', which nothing produces before it")
        if opset is None:
            self.problems.append(f"node '{name}' uses domain '{node.domain}', which the model does not import")
            return None
        lowering = OPS.find(node.domain, node.op_type, opset)
        if lowering is None:
            self.unsupported.setdefault(f"{node.domain or 'ai.onnx'}::{node.op_type}-{opset}", []).append(name)
            return None
        attributes, bodies = self._attributes(node, known)
        self._check(name, lowering, node, attributes, bodies)
        if lowering.outputs_keyword:
            attributes[lowering.outputs_keyword] = len(node.outputs)
        outputs = tuple(v if v.name else None for v in node.outputs)
        dtypes = self._infer(lowering, node, attributes, opset)
        inputs = self._resolved(node.inputs)
        if lowering.alias and inputs and self.drop_aliases:
            self.aliases[node.outputs[0]] = inputs[0]
            return None
        return Step(name, lowering, opset, inputs, outputs, attributes, bodies, *dtypes)

    def _infer(
        self, lowering: Lowering, node: ir.Node, attributes: dict[str, Any], opset: int
    ) -> tuple[tuple[np.dtype | None, ...], tuple[np.dtype | None, ...]]:
        inputs = tuple(None if v is None else self.dtypes.get(v) for v in node.inputs)
        inferred = output_dtypes(lowering, attributes, inputs, len(node.outputs), opset)
        outputs = tuple(
            dtype if dtype is not None else value_dtype(value)
            for value, dtype in zip(node.outputs, inferred, strict=True)
        )
        self.dtypes.update(zip(node.outputs, outputs, strict=True))
        return inputs, outputs

    def _attributes(self, node: ir.Node, known: set[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        from onnx_ir import AttributeType as T

        attributes: dict[str, Any] = {}
        bodies: dict[str, Any] = {}
        for name, attribute in node.attributes.items():
            if attribute.type == T.GRAPH:
                bodies[name] = self._body(attribute.as_graph(), known)
            elif attribute.type == T.TENSOR:
                attributes[name] = self.store.array(attribute.value)  # `as_tensor` checks the type once more, slowly
            elif attribute.type == T.TENSORS:
                attributes[name] = tuple(map(self.store.array, attribute.value))
            elif attribute.type in (T.INTS, T.FLOATS, T.STRINGS):
                attributes[name] = tuple(attribute.value)
            else:
                attributes[name] = attribute.value
        return attributes, bodies

    def _body(self, graph: ir.Graph, outer: set[Any]) -> InlineBody:
        constants = self._constants(graph)
        inner = outer | self._enter(graph, constants)
        steps = self._steps(graph, inner)
        self._check_outputs(graph, inner)
        outputs = self._resolved(graph.outputs)
        return InlineBody(
            graph.name or "body", tuple(graph.inputs), outputs, tuple(steps),
            captures(steps, (*graph.inputs, *constants), outputs), constants, tuple(map(declared, graph.outputs)),
        )  # fmt: skip

    def _resolved(self, values: Any) -> tuple[Any, ...]:
        return tuple(self.aliases.get(v, v) for v in values)

    def _check_outputs(self, graph: ir.Graph, known: set[Any]) -> None:
        self.problems += [
            f"graph '{graph.name}' returns '{value.name}', which nothing produces"
            for value in graph.outputs
            if value not in known
        ]

    def _check(self, name: str, lowering: Lowering, node: ir.Node, attributes: dict, bodies: dict) -> None:
        where = f"node '{name}' ({lowering.key})"
        given = attributes.keys() | bodies.keys()
        for unknown in sorted(given - lowering.attributes.keys()):
            allowed = ", ".join(sorted(lowering.attributes)) or "none"
            self.problems.append(f"{where} has the unknown attribute '{unknown}' (allowed: {allowed})")
        for attribute, default in lowering.attributes.items():
            if default is REQUIRED and attribute not in given:
                self.problems.append(f"{where} lacks the required attribute '{attribute}'")
        count = len(node.inputs)
        if count > len(lowering.inputs) and not lowering.variadic:
            self.problems.append(f"{where} has {count} inputs; at most {len(lowering.inputs)} are allowed")
        # Python has no optional parameter before a required one; contrib operators have such inputs.
        strict = node.domain in ("", "ai.onnx.ml")
        missing = [
            lowering.inputs[i]
            for i in range(lowering.required_inputs)
            if i >= count or (strict and node.inputs[i] is None)
        ]
        if missing:
            self.problems.append(f"{where} lacks the required input {', '.join(map(repr, missing))}")


def captures(steps: Any, own: Any, outputs: Any) -> tuple[Any, ...]:
    """Values of the surrounding scopes that a body reads, each once, in order of first use."""
    produced = {*own, *(v for step in steps for v in step.outputs if v is not None)}
    reads = dict.fromkeys(v for step in steps for v in step.reads())
    reads.update(dict.fromkeys(outputs))
    return tuple(v for v in reads if v not in produced)
