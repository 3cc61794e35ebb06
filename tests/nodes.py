"""How does a test run one operator: a model with a single node, whose inputs are fed, on a device."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import ep


def run_node(
    device: str,
    op: str,
    *inputs: np.ndarray | None,
    opset: int = 22,
    domain: str = "",
    version: int = 1,
    outputs: int = 1,
    compile: str = "off",
    **attributes: Any,
) -> Any:
    """The output of the node, or the list of them; inputs that are `None` are omitted."""
    model, feeds = node_model(op, inputs, opset, domain, version, outputs, attributes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ep.HostFallbackWarning)
        values = ep.load(model, device, options={"compile": compile}).run(None, feeds)
    return values[0] if outputs == 1 else values


def onnxruntime_node(
    op: str,
    *inputs: np.ndarray | None,
    opset: int = 22,
    domain: str = "",
    version: int = 1,
    outputs: int = 1,
    **attributes: Any,
) -> Any:
    """What onnxruntime's CPU provider gives for the same node."""
    ort = pytest.importorskip("onnxruntime")
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    model, feeds = node_model(op, inputs, opset, domain, version, outputs, attributes)
    values = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"]).run(
        None, feeds
    )
    return values[0] if outputs == 1 else values


def node_model(
    op: str, inputs: Any, opset: int, domain: str, version: int, outputs: int, attributes: dict[str, Any]
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A model of one node, and its feeds."""
    names = ["" if x is None else f"x{i}" for i, x in enumerate(inputs)]
    feeds = {name: x for name, x in zip(names, inputs, strict=True) if x is not None}
    results = [f"y{i}" for i in range(outputs)]
    graph = helper.make_graph(
        [helper.make_node(op, names, results, domain=domain, **attributes)],
        op,
        [helper.make_tensor_value_info(name, element_type(x), x.shape) for name, x in feeds.items()],
        [onnx.ValueInfoProto(name=name) for name in results],
    )
    opsets = [helper.make_opsetid("", opset)] + ([helper.make_opsetid(domain, version)] if domain else [])
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return model, feeds


def element_type(x: np.ndarray) -> int:
    return onnx.TensorProto.STRING if x.dtype == object else helper.np_dtype_to_tensor_dtype(x.dtype)
