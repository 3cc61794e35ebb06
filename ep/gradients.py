"""How is `Gradient` (ai.onnx.preview.training) computed? Its subgraph becomes a body that `xp.vjp` differentiates.

The node names tensors of the graph around it: independent ones (`xs`, differentiated, and `zs`) and a result (`y`).
What lies between them is cloned into a graph attribute, and the node's inputs become the arguments of that graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ep.errors import InvalidModel

if TYPE_CHECKING:
    import onnx_ir as ir

TRAINING = "ai.onnx.preview.training"
INTERNAL = "ep"  # the domain of what only passes make


def outline_gradients(model: ir.Model) -> None:
    """Replaces every Gradient node, in order: one may differentiate what another gives."""
    for node in list(model.graph.all_nodes()):
        if node.domain == TRAINING and node.op_type == "Gradient":
            _outline(model, node)


def _outline(model: ir.Model, node: ir.Node) -> None:
    import onnx_ir as ir

    xs, zs, y = (_names(node, name) for name in ("xs", "zs", "y"))
    graph = node.graph
    if graph is None or not xs or len(y) != 1 or len(node.inputs) != len(xs) + len(zs):
        raise InvalidModel(
            f"node '{node.name}' (Gradient) has {len(node.inputs)} inputs for {len(xs)} xs and {len(zs)} zs.",
            why="it needs one value for each name in xs and zs, and the name y of what is differentiated.",
            fix="correct the node's attributes.",
        )
    try:
        body = ir.convenience.extract(graph, [*xs, *zs], y)
    except ValueError as cause:
        raise InvalidModel(
            f"node '{node.name}' (Gradient): '{y[0]}' is not a function of {', '.join(map(repr, (*xs, *zs)))} alone.",
            why=str(cause),
            fix="name in xs and zs all independent tensors that y is computed from, and no others.",
        ) from cause
    body.name = f"gradient_of_{y[0]}"
    attributes = [ir.AttrInt64("count", len(xs)), ir.AttrGraph("body", body)]
    made = ir.Node(
        INTERNAL, "Gradient", list(node.inputs), attributes, num_outputs=len(node.outputs), name=node.name, version=1
    )
    for old, new in zip(node.outputs, made.outputs, strict=True):
        new.name, new.type, new.shape = old.name, old.type, old.shape
    graph.insert_after(node, made)
    for i, output in enumerate(graph.outputs):
        if output in node.outputs:
            graph.outputs[i] = made.outputs[node.outputs.index(output)]
    for old, new in zip(node.outputs, made.outputs, strict=True):
        old.replace_all_uses_with(new)
    graph.remove(node, safe=True)
    model.graph.opset_imports.setdefault(INTERNAL, 1)


def _names(node: ir.Node, attribute: str) -> list[str]:
    found: Any = node.attributes.get(attribute)
    if found is None:
        return []
    return [found.value] if isinstance(found.value, str) else list(found.value)
