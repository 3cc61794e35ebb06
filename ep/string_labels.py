"""How a classifier whose labels are strings runs on a device: it gives numbers, which the host turns into labels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx_ir as ir

ML = "ai.onnx.ml"
INTEGER_LABELS = {  # the attribute for integer labels of each classifier
    "TreeEnsembleClassifier": "classlabels_int64s",
    "LinearClassifier": "classlabels_ints",
    "SVMClassifier": "classlabels_ints",
}


def split_string_labels(model: ir.Model) -> None:
    """A classifier with string labels becomes one with the labels 0, 1, …, followed by a LabelEncoder."""
    for node in list(model.graph.all_nodes()):
        strings = node.attributes.get("classlabels_strings")
        if node.domain != ML or node.op_type not in INTEGER_LABELS or strings is None or not strings.value:
            continue
        labels = tuple(strings.as_strings())
        if INTEGER_LABELS[node.op_type] not in node.attributes and len(labels) > 1 and node.graph is not None:
            _split(node, labels)


def _split(node: ir.Node, labels: tuple[str, ...]) -> None:
    import onnx_ir as ir

    def ints(name: str) -> Any:
        return ir.AttrInt64s(name, range(len(labels)))

    kept = [a for name, a in node.attributes.items() if name != "classlabels_strings"]
    classifier = ir.Node(
        node.domain, node.op_type, node.inputs, [*kept, ints(INTEGER_LABELS[node.op_type])],
        num_outputs=len(node.outputs), name=node.name, version=node.version,
    )  # fmt: skip
    encoder = ir.Node(
        ML, "LabelEncoder", classifier.outputs[:1],
        [ints("keys_int64s"), ir.AttrStrings("values_strings", labels)],
        num_outputs=1, name=f"{node.name or node.op_type}/labels", version=2,
    )  # fmt: skip
    index = classifier.outputs[0]
    index.name, index.type = f"{node.outputs[0].name}/index", ir.TensorType(ir.DataType.INT64)
    new = [encoder.outputs[0], *classifier.outputs[1:]]
    for old, value in zip(node.outputs, new, strict=True):
        value.type, value.shape = old.type, old.shape
    assert node.graph is not None
    ir.convenience.replace_nodes_and_values(
        node.graph, node, [node], [classifier, encoder], node.outputs, new
    )  # fmt: skip
