"""Which models does onnxruntime refuse, and in which words? Names, operators, attributes and types, node by node."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ep.onnxruntime.errors import Fail, InvalidArgument, InvalidGraph, NotImplemented_, failure
from ep.onnxruntime.model import NAMES, type_string

if TYPE_CHECKING:
    import onnx

_CONTRIB = ("com.microsoft", "com.microsoft.nchwc", "com.ms.internal.nhwc", "org.pytorch.aten")
_INVALID = "This is an invalid model."


def check(proto: onnx.ModelProto, where: str) -> None:
    """Raises the exception with which onnxruntime refuses a model; one that passes may still fail to load."""
    import ep.ops  # noqa: F401 - registers the lowerings
    from ep.passes import NEWEST_OPSET
    from ep.registry import normal_domain

    opsets = {normal_domain(entry.domain): entry.version for entry in proto.opset_import} or {"": 1}
    for domain, version in opsets.items():
        if version > NEWEST_OPSET.get(domain, version):
            raise failure(
                Fail,
                f"{where}ONNX Runtime only *guarantees* support for models stamped with official released onnx opset "
                f"versions. Opset {version} is under development and support for this is limited. The operator schemas "
                "and or other functionality may change before next ONNX release and in this case ONNX Runtime will not "
                f"guarantee backward compatibility. Current official support for domain {domain or 'ai.onnx'} is till "
                f"opset {NEWEST_OPSET[domain]}.\n",
            )
    functions = {(function.domain, function.name) for function in proto.functions}
    _Checker(opsets, functions, where).graph(proto.graph, {})


class _Checker:
    def __init__(self, opsets: Mapping[str, int], functions: set[tuple[str, str]], where: str) -> None:
        self.opsets, self.functions, self.where = opsets, functions, where

    def fail(self, kind: Any, message: str) -> Exception:
        return failure(kind, self.where + message)

    def graph(self, graph: onnx.GraphProto, outer: Mapping[str, str]) -> None:
        """Checks a graph; `outer` has the types of the values around it."""
        types = {**outer, **{v.name: type_string(v.type) for v in (*graph.input, *graph.value_info, *graph.output)}}
        types |= {t.name: f"tensor({NAMES.get(t.data_type, '')})" for t in graph.initializer}
        known = {*outer, *(v.name for v in graph.input), *(t.name for t in graph.initializer)}
        known |= {t.values.name for t in graph.sparse_initializer}
        own: set[str] = set()
        for node in graph.node:
            for name in node.output:
                if name and name in own:
                    raise self.fail(Fail, f"{_INVALID} Error: Duplicate definition of name ({name}).")
                own.add(name)
                types.setdefault(name, "")
        known |= own
        for node in graph.node:
            self._inputs(node, known)
            self._node(node, types)
        for value in graph.output:
            if value.name not in known:
                raise self.fail(Fail, f"{_INVALID} Graph output ({value.name}) does not exist in the graph.\n")

    def _inputs(self, node: onnx.NodeProto, known: set[str]) -> None:
        for name in node.input:
            if name and name not in known:
                raise self.fail(
                    InvalidArgument,
                    f"Invalid model. Node input '{name}' is not a graph input, initializer, "
                    "or output of a previous node.",
                )

    def _node(self, node: onnx.NodeProto, types: dict[str, str]) -> None:
        from ep.registry import normal_domain

        domain = normal_domain(node.domain)
        version = self.opsets.get(domain)
        if (node.domain, node.op_type) in self.functions:
            return
        if version is None:
            raise self._invalid(node, types, f"No opset import for domain '{node.domain}'")
        schema = _schema(node.op_type, version, domain)
        if schema is None:
            self._unregistered(node, types, domain, version)
            return
        for attribute in node.attribute:
            if attribute.name not in schema.attributes:
                raise self._invalid(
                    node, types, f"Unrecognized attribute: {attribute.name} for operator {node.op_type}"
                )
        self._types(node, schema, types)
        for attribute in node.attribute:
            for body in (attribute.g, *attribute.graphs):
                if body.node or body.output:
                    self.graph(body, types)

    def _unregistered(self, node: onnx.NodeProto, types: Mapping[str, str], domain: str, version: int) -> None:
        """An operator that ONNX does not define: one of onnxruntime's, one that the user added to `ep`, or nobody's."""
        from ep.registry import OPS

        if OPS.find(domain, node.op_type, version) is not None or node.op_type == "EPContext":
            return
        if domain in ("", "ai.onnx.ml"):
            raise self._invalid(node, types, f"No Op registered for {node.op_type} with domain_version of {version}")
        if domain in _CONTRIB:
            raise self.fail(
                NotImplemented_,
                f"Could not find an implementation for {node.op_type}({version}) node with name '{node.name}'",
            )
        raise self.fail(Fail, f"Fatal error: {domain}:{node.op_type}(-1) is not a registered function/op")

    def _invalid(self, node: onnx.NodeProto, types: Mapping[str, str], reason: str) -> Exception:
        def shown(names: Iterable[str]) -> str:
            return " ".join(f'"{name}": {types.get(name, "")},' if name else '"",' for name in names)

        return self.fail(
            InvalidGraph,
            f'{_INVALID} In Node, ("{node.name}", {node.op_type}, "{node.domain}", -1) : ({shown(node.input)}) -> '
            f"({shown(node.output)}) , Error {reason}",
        )

    def _types(self, node: onnx.NodeProto, schema: _Schema, types: dict[str, str]) -> None:
        bound: dict[str, str] = {}
        for name, formal in zip(node.input, schema.formal_inputs(len(node.input)), strict=False):
            actual = types.get(name, "") if name else ""
            if not actual:
                continue
            if actual not in formal.types:
                raise self.fail(
                    InvalidGraph,
                    f"{_INVALID} Type Error: Type '{actual}' of input parameter ({name}) of operator "
                    f"({node.op_type}) in node ({node.name}) is invalid.",
                )
            if formal.homogeneous and bound.setdefault(formal.parameter, actual) != actual:
                raise self.fail(
                    Fail,
                    f"Type Error: Type parameter ({formal.parameter}) of Optype ({node.op_type}) bound to different "
                    f"types ({bound[formal.parameter]} and {actual} in node ({node.name}).",
                )
        for name, formal in zip(node.output, schema.formal_outputs(len(node.output)), strict=False):
            expected = bound.get(formal.parameter, "") if formal.homogeneous else ""
            if not expected and len(formal.types) == 1:
                (expected,) = formal.types
            if not name or not expected:
                continue
            declared = types.setdefault(name, expected) or expected
            if declared != expected:
                raise self.fail(
                    Fail,
                    f"Type Error: Type ({declared}) of output arg ({name}) of node ({node.name}) does not match "
                    f"expected type ({expected}).",
                )
            types[name] = declared


class _Formal:
    """A parameter of an operator: its type variable, and the types that it may have."""

    def __init__(self, parameter: Any) -> None:
        self.parameter: str = parameter.type_str
        self.types = frozenset(parameter.types)
        self.homogeneous: bool = parameter.is_homogeneous


class _Schema:
    """What `onnx.defs` says of an operator, read once."""

    def __init__(self, schema: Any) -> None:
        self.attributes = frozenset(schema.attributes)
        self._inputs = [_Formal(parameter) for parameter in schema.inputs]
        self._outputs = [_Formal(parameter) for parameter in schema.outputs]

    def formal_inputs(self, count: int) -> list[_Formal]:
        """One parameter per input; the last one repeats."""
        return self._inputs + self._inputs[-1:] * (count - len(self._inputs))

    def formal_outputs(self, count: int) -> list[_Formal]:
        """One parameter per output; the last one repeats."""
        return self._outputs + self._outputs[-1:] * (count - len(self._outputs))


@lru_cache(maxsize=4096)
def _schema(op_type: str, version: int, domain: str) -> _Schema | None:
    import onnx

    if not onnx.defs.has(op_type, version, domain):
        return None
    return _Schema(onnx.defs.get_schema(op_type, version, domain))
