"""Which nodes of a model file have constant results, and what takes their place when the results are stored?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ep.errors import UnsupportedModel
from ep.wire import LARGE

if TYPE_CHECKING:
    import onnx


def tensors_of(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every tensor of a model: initializers and attributes, of subgraphs and functions too."""
    yield from _graph_tensors(model.graph)
    for function in model.functions:
        yield from _node_tensors(function.node)


def _graph_tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    yield from _node_tensors(graph.node)


def _node_tensors(nodes: Any) -> Iterator[onnx.TensorProto]:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
            for graph in [attribute.g] if attribute.HasField("g") else attribute.graphs:
                yield from _graph_tensors(graph)


def fold_in(proto: onnx.ModelProto, source: Any, weights: Any) -> int:
    """Replaces the nodes whose large results `load` would compute from constants; returns how many results.

    Nodes and initializers that only led to them are dropped. What a graph returns is left as it is.
    """
    producers = Counter(name for graph in _graphs(proto.graph) for node in graph.node for name in node.output)
    results = {name: array for name, array in _results(source, weights).items() if producers[name] == 1}
    return sum(_fold_graph(graph, results) for graph in reversed(list(_graphs(proto.graph))))  # inner graphs first


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """A graph and all graphs in it."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in [attribute.g] if attribute.HasField("g") else attribute.graphs:
                yield from _graphs(inner)


def _fold_graph(graph: onnx.GraphProto, results: Mapping[str, np.ndarray]) -> int:
    from onnx_ir import serde
    from onnx_ir import tensor as make_tensor

    kept_outputs = {value.name for value in graph.output}
    folded: dict[str, np.ndarray] = {}
    rest = []
    for node in graph.node:
        names = {name for name in node.output if name}
        made = {name: results[name] for name in names & results.keys()}
        whole = len(made) == len(names) and not kept_outputs & names
        if whole and any(array.nbytes > LARGE for array in made.values()):
            folded |= made
        else:
            rest.append(node)
    if not folded:
        return 0
    before = _reads(graph.node)
    _keep_needed(graph, rest, kept_outputs)
    after = _reads(graph.node) | kept_outputs
    for tensor in [t for t in graph.initializer if t.name in before and t.name not in after]:
        graph.initializer.remove(tensor)
    stored = [name for name in folded if name in after]
    for name in stored:
        graph.initializer.append(serde.serialize_tensor(make_tensor(np.asarray(folded[name], order="C"), name=name)))
    return len(stored)


def _results(source: Any, weights: Any) -> dict[str, np.ndarray]:
    """Name → constant that binding and folding left, of those that nodes produce."""
    from ep.loader import load_model
    from ep.passes import prepare

    try:
        constants = prepare(*load_model(source, weights)).constants
    except UnsupportedModel as error:
        raise UnsupportedModel(
            error.what, why=error.why, fix="pack it without folding: fold=False, --no-fold."
        ) from error
    return {
        value.name: array
        for value, array in constants.items()
        if value.name and value.producer() is not None and array.dtype.kind != "O"
    }


def _keep_needed(graph: onnx.GraphProto, nodes: list[Any], outputs: set[str]) -> None:
    """Leaves, of these nodes, those that lead to an output."""
    needed, kept = set(outputs), []
    for node in reversed(nodes):
        if needed.intersection(node.output):
            kept.append(node)
            needed |= _reads([node])
    kept.reverse()
    copies = [type(node).FromString(node.SerializeToString()) for node in kept]
    del graph.node[:]
    graph.node.extend(copies)


def _reads(nodes: Any) -> set[str]:
    """Names that nodes read, their subgraphs included."""
    found: set[str] = set()
    for node in nodes:
        found.update(node.input)
        for attribute in node.attribute:
            for graph in [attribute.g] if attribute.HasField("g") else attribute.graphs:
                found |= _reads(graph.node) | {value.name for value in graph.output}
    return found
