"""How does `onnx.backend.test`, or any tool of onnx, run models here? This module is an `onnx.backend.base.Backend`.

>>> import ep.onnx_backend as backend  # doctest: +SKIP
>>> backend.prepare(model, "JAX").run([x])  # doctest: +SKIP
>>> onnx.backend.test.BackendTest(backend, __name__)  # doctest: +SKIP
"""

from ep.onnxruntime.backend import OnnxRuntimeBackend as Backend
from ep.onnxruntime.backend import OnnxRuntimeBackendRep as BackendRep
from ep.onnxruntime.backend import is_compatible, prepare, run_model, run_node, supports_device

__all__ = ["Backend", "BackendRep", "is_compatible", "prepare", "run_model", "run_node", "supports_device"]
