"""Which tensor type does a value have that enters or leaves an EPContext node, if it is a tensor?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ep.dtypes import schema_of

if TYPE_CHECKING:
    import onnx


def tensor_info(name: str, dtype: str, shape: Sequence[int | None] | None) -> onnx.ValueInfoProto:
    """The declaration of a tensor; unknown dimensions stay unknown."""
    import onnx
    import onnx_ir as ir

    code = int(ir.DataType.from_numpy(np.dtype(dtype)))
    return onnx.helper.make_tensor_value_info(name, code, shape)


def tensor_type(
    value: Any, dtypes: Mapping[Any, np.dtype | None], opsets: Mapping[str, int]
) -> tuple[str, tuple[int | None, ...] | None] | None:
    """Dtype name and shape of an `onnx_ir.Value`; None unless it is a tensor of a known numeric dtype."""
    declared = value
    while declared is not None and dtypes.get(declared) is None:
        declared = _inner(declared)  # the schemas of If, Loop and Scan do not tell, their bodies do
    dtype = dtypes.get(declared)
    if dtype is None or dtype.hasobject or not _is_tensor(value, opsets):
        return None
    shape = None if value.shape is None else tuple(d if isinstance(d, int) else None for d in value.shape)
    return dtype.name, shape if shape is None or all(d is None or d >= 0 for d in shape) else None


def _is_tensor(value: Any, opsets: Mapping[str, int]) -> bool:
    """Whether a value is no sequence, optional or map, as far as its declaration or what makes it tells."""
    if value.type is not None:
        return type(value.type).__name__ not in ("SequenceType", "OptionalType")
    node = value.producer()
    if node is None:
        return True
    if (inner := _inner(value)) is not None:
        return _is_tensor(inner, opsets)
    opset = node.version if node.version is not None else opsets.get(node.domain, 1)
    schema = schema_of(node.domain, node.op_type, opset)
    if schema is None or not schema.outputs:
        return True
    formal = schema.outputs[min(node.outputs.index(value), len(schema.outputs) - 1)]
    kinds = {kind.startswith("tensor(") for kind in formal.types}
    if len(kinds) == 1:
        return kinds.pop()
    return all(_is_tensor(v, opsets) for v in node.inputs if v is not None)  # as of Identity


def _inner(value: Any) -> Any:
    """What a node with a body returns as this value of it, or None."""
    node = value.producer()
    if node is None:
        return None
    bodies = {n: a.value for n, a in node.attributes.items() if n in ("then_branch", "else_branch", "body")}
    body = next(iter(bodies.values()), None)
    index = node.outputs.index(value) + (node.op_type == "Loop")
    return body.outputs[index] if body is not None and index < len(body.outputs) else None
