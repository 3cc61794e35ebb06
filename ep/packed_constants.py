"""How do 4-bit and 2-bit weights stay packed? They enter as bytes, and the compiled graph unpacks them.

NumPy's and JAX's arrays of such integers take a byte for each, so reading them would double the memory of a file, and
dequantizing them at load would take eight times as much.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ep.program import Step
from ep.registry import OPS

if TYPE_CHECKING:
    import onnx_ir as ir

    from ep.binding import BoundGraph
    from ep.weights import WeightStore

DOMAIN = "ep"  # of operators that no model may use: passes make them
UINT8 = np.dtype(np.uint8)


def packed_steps(graph: ir.Graph, store: WeightStore) -> Iterator[tuple[Step, Any, np.ndarray]]:
    """For each large initializer of packed integers a step that unpacks it, and what it reads: a value and bytes."""
    import onnx_ir as ir

    for value in graph.initializers.values():
        tensor = value.const_value
        data = None if tensor is None or value in graph.inputs else store.packed(tensor)
        if tensor is None or data is None:
            continue
        source = ir.Value(name=f"{value.name} (packed)")
        dtype, shape = tensor.dtype.numpy(), tuple(tensor.shape.numpy())
        yield _unpacking(value, source, np.dtype(dtype), shape), source, data


def _unpacking(value: Any, source: Any, dtype: np.dtype, shape: tuple[int, ...]) -> Step:
    lowering = OPS.find(DOMAIN, "Unpack", 1)
    assert lowering is not None
    attributes = {"dtype": dtype.name, "shape": shape}
    return Step(f"unpack {value.name}", lowering, 1, (source,), (value,), attributes, {}, (UINT8,), (dtype,))


def fuse_dequantization(graph: BoundGraph) -> None:
    """DequantizeLinear of unpacked integers reads the bytes itself: then also libraries without such dtypes run it."""
    unpacking = {step.outputs[0]: step for step in graph.steps if step.lowering.key.domain == DOMAIN}
    if not unpacking:
        return
    steps = [_fused(step, unpacking, graph) for step in graph.steps]
    read = {v for step in steps for v in step.reads()} | set(graph.outputs)
    graph.steps[:] = [step for step in steps if step not in unpacking.values() or step.outputs[0] in read]


def _fused(step: Step, unpacking: Mapping[Any, Step], graph: BoundGraph) -> Step:
    source = unpacking.get(step.inputs[0]) if step.inputs else None
    if source is None or step.op != "ai.onnx::DequantizeLinear":
        return step
    inputs, dtypes = list(step.inputs), list(step.input_dtypes)
    inputs[0], dtypes[0] = source.inputs[0], UINT8
    if len(inputs) > 2 and inputs[2] is not None:
        points = _zero_points(inputs[2], unpacking, graph)
        if points is None:
            return step
        inputs[2], dtypes[2] = points, graph.constants[points].dtype
    lowering = OPS.find(DOMAIN, "DequantizePacked", 1)
    assert lowering is not None
    attributes = step.attributes | source.attributes
    return replace(step, lowering=lowering, inputs=tuple(inputs), input_dtypes=tuple(dtypes), attributes=attributes)


def _zero_points(value: Any, unpacking: Mapping[Any, Step], graph: BoundGraph) -> Any:
    """A constant with the zero points in a byte each; `None` if they are no constant."""
    import onnx_ir as ir

    import ep.host_namespace as host

    constants = graph.constants
    if value in unpacking:
        step = unpacking[value]
        source = constants[step.inputs[0]]
        points = step.lowering.fn(host, source, **step.attributes)
    elif value in constants:
        source = points = constants[value]
    else:
        return None
    made = ir.Value(name=f"{value.name} (bytes)")
    constants[made] = points.astype(np.int8 if points.dtype.name.startswith("int") else UINT8)
    graph.baked.add(source.ctypes.data)
    return made
