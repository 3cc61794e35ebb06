"""How do onnx's own tools drive this runtime? Through the interface `onnx.backend.base`, as onnxruntime's backend.

`ep.onnx_backend` is the same interface without onnxruntime's names.
"""

from ep.onnxruntime.backend.backend import (
    OnnxRuntimeBackend,
    is_compatible,
    prepare,
    run,
    run_model,
    run_node,
    supports_device,
)
from ep.onnxruntime.backend.backend_rep import OnnxRuntimeBackendRep

__all__ = [
    "OnnxRuntimeBackend",
    "OnnxRuntimeBackendRep",
    "is_compatible",
    "prepare",
    "run",
    "run_model",
    "run_node",
    "supports_device",
]
