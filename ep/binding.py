"""Which lowering each node gets: an `onnx_ir` graph becomes a `BoundGraph` of steps, or a list of problems."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ep.bodies import InlineBody, declared
from ep.dtypes import conflict, output_dtypes, schema_of, value_dtype
from ep.errors import InvalidModel
from ep.packed_constants import packed_steps
from ep.program import Step
from ep.registry import OPS, REQUIRED, Lowering
from ep.structure import PROBLEMS
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
    baked: set[int] = field(default_factory=set)  # addresses of constants whose contents decided other constants


class Binder:
    """Binds one model; `problems` collects everything that is wrong with it, for one error."""

    def __init__(self, model: ir.Model, store: WeightStore, *, drop_aliases: bool = True) -> None:
        self.drop_aliases = drop_aliases
        self.opsets = dict(model.graph.opset_imports)
        self.ir_version = model.ir_version
        self.store = store
        self.dtypes: dict[Any, np.dtype | None] = {}
        self.aliases: dict[Any, Any] = {}  # output of an alias → the value that it stands for
        self.problems: list[str] = list(model.graph.meta.get(PROBLEMS, ()))
        self.damaged: list[InvalidModel] = []  # what the store said of tensors that cannot be read
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
            value: self._array(value.const_value)
            for value in graph.initializers.values()
            if value.const_value is not None and value not in without
        }

    def _array(self, tensor: Any) -> np.ndarray:
        try:
            array = self.store.array(tensor)
            array.flags.writeable = False  # results may be views of it
            return array
        except InvalidModel as error:
            self.damaged.append(error)
            return np.zeros(0, np.float32)

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
        if not self._check(name, lowering, opset, node, attributes, bodies):
            return None
        if lowering.outputs_keyword:
            attributes[lowering.outputs_keyword] = len(node.outputs)
        outputs = tuple(v if v.name else None for v in node.outputs)
        try:
            dtypes = self._infer(lowering, node, attributes, opset)
        except (ValueError, TypeError, LookupError) as error:
            self.problems.append(f"node '{name}' ({lowering.key}) names a type that does not exist: {error}")
            return None
        if problem := conflict(lowering, dtypes[0], opset):
            self.problems.append(f"node '{name}' ({lowering.key}) {problem}")
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
                attributes[name] = self._array(attribute.value)  # `as_tensor` checks the type once more, slowly
            elif attribute.type == T.TENSORS:
                attributes[name] = tuple(map(self._array, attribute.value))
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

    def _check(self, name: str, lowering: Lowering, opset: int, node: ir.Node, attributes: dict, bodies: dict) -> bool:
        """Whether the node fits its lowering; what does not is among the problems."""
        found = [
            *attribute_problems(lowering, node, attributes.keys() | bodies.keys(), expected_types(lowering, opset)),
            *input_problems(lowering, node),
            *output_problems(lowering, node, opset),
        ]
        self.problems += [f"node '{name}' ({lowering.key}) {problem}" for problem in found]
        return not found


def attribute_problems(
    lowering: Lowering, node: ir.Node, given: Set[str], expected: Mapping[str, ir.AttributeType]
) -> Iterator[str]:
    for unknown in sorted(given - lowering.attributes.keys()):
        allowed = ", ".join(sorted(lowering.attributes)) or "none"
        yield f"has the unknown attribute '{unknown}' (allowed: {allowed})"
    for attribute, default in lowering.attributes.items():
        if default is REQUIRED and attribute not in given:
            yield f"lacks the required attribute '{attribute}'"
    for attribute in sorted(given & expected.keys()):
        kind = node.attributes[attribute].type
        if kind != expected[attribute]:
            yield f"has the attribute '{attribute}' of type {kind.name}, which must be {expected[attribute].name}"


def input_problems(lowering: Lowering, node: ir.Node) -> Iterator[str]:
    count = len(node.inputs)
    if count > len(lowering.inputs) and not lowering.variadic:
        yield f"has {count} inputs; at most {len(lowering.inputs)} are allowed"
    # Python has no optional parameter before a required one; contrib operators have such inputs.
    strict = node.domain in ("", "ai.onnx.ml")
    missing = [
        lowering.inputs[i] for i in range(lowering.required_inputs) if i >= count or (strict and node.inputs[i] is None)
    ]
    if missing:
        yield f"lacks the required input {', '.join(map(repr, missing))}"


def output_problems(lowering: Lowering, node: ir.Node, opset: int) -> Iterator[str]:
    count, schema = len(node.outputs), schema_of(lowering.key.domain, lowering.key.op_type, opset)
    if not count:
        yield "has no output"
    elif schema is not None and count > schema.max_output:
        yield f"has {count} outputs; at most {schema.max_output} are allowed"


def expected_types(lowering: Lowering, opset: int) -> Mapping[str, ir.AttributeType]:
    """Attribute → its type in the ONNX schema, or where there is none, the one that a default of the lowering has."""
    from onnx_ir import AttributeType

    known = schema_types(lowering.key.domain, lowering.key.op_type, opset)
    if known is not None:
        return known
    kinds = {int: AttributeType.INT, float: AttributeType.FLOAT, str: AttributeType.STRING}
    return {name: kinds[type(default)] for name, default in lowering.attributes.items() if type(default) in kinds}


@cache
def schema_types(domain: str, op_type: str, opset: int) -> dict[str, ir.AttributeType] | None:
    from onnx_ir import AttributeType

    schema = schema_of(domain, op_type, opset)
    return None if schema is None else {n: AttributeType(int(a.type)) for n, a in schema.attributes.items()}


def captures(steps: Any, own: Any, outputs: Any) -> tuple[Any, ...]:
    """Values of the surrounding scopes that a body reads, each once, in order of first use."""
    produced = {*own, *(v for step in steps for v in step.outputs if v is not None)}
    reads = dict.fromkeys(v for step in steps for v in step.reads())
    reads.update(dict.fromkeys(outputs))
    return tuple(v for v in reads if v not in produced)
