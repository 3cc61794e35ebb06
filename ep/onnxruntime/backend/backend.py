"""Which functions does `onnx.backend.base.Backend` ask of a runtime? Prepare a model, run it, say what works."""

from __future__ import annotations

import os
from typing import Any

import onnx
from onnx.backend.base import Backend

from ep.onnxruntime.backend.backend_rep import OnnxRuntimeBackendRep
from ep.onnxruntime.options import SessionOptions
from ep.onnxruntime.session import InferenceSession

_NAMES = {"CPU": None, "JAX": "JAXExecutionProvider", "MLX": "MLXExecutionProvider"}


class OnnxRuntimeBackend(Backend):
    """The backend of the drop-in: `CPU` is the default device, `JAX` and `MLX` are those providers."""

    allowReleasedOpsetsOnly = True

    @classmethod
    def is_opset_supported(cls, model: Any) -> tuple[bool, str]:
        """Whether the operator sets of a model are released ones, and why not."""
        from ep.passes import NEWEST_OPSET

        for entry in model.opset_import:
            domain = entry.domain or "ai.onnx"
            if entry.version > NEWEST_OPSET.get(entry.domain, entry.version):
                return False, (
                    "Skipping this test as only released onnx opsets are supported."
                    "To run this test set env variable ALLOW_RELEASED_ONNX_OPSET_ONLY to 0. "
                    f"Got Domain '{domain}' version '{entry.version}'."
                )
        return True, ""

    @classmethod
    def is_compatible(cls, model: Any, device: str | None = None, **kwargs: Any) -> bool:
        """Whether the device is supported and the operator sets of the model are released ones."""
        return device is None or cls.supports_device(device)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """Whether a device of this name can be used: `CPU`, `GPU`, `JAX` or `MLX`, also with an index (`CPU:0`)."""
        from ep.onnxruntime.providers import get_available_providers, get_device

        kind = device.partition(":")[0].upper()
        if kind in ("JAX", "MLX"):
            return _NAMES[kind] in get_available_providers()
        return kind in ("CPU", get_device())

    @classmethod
    def prepare(cls, model: Any, device: str | None = None, **kwargs: Any) -> OnnxRuntimeBackendRep:
        """Loads a path, bytes, a `ModelProto` or a session.

        Raises:
            RuntimeError: the device is not supported.
        """
        if isinstance(model, OnnxRuntimeBackendRep):
            return model
        if isinstance(model, InferenceSession):
            return OnnxRuntimeBackendRep(model)
        if device is not None and not cls.supports_device(device):
            raise RuntimeError(f"Incompatible device expected '{device}', got 'CPU'")
        if isinstance(model, onnx.ModelProto):
            model = model.SerializeToString()
        elif not isinstance(model, str | bytes | os.PathLike):
            raise TypeError(f"Unable to load from type '{type(model)}'")
        options = SessionOptions()
        for name, value in kwargs.items():
            if hasattr(options, name):
                setattr(options, name, value)
        kind = (device or "CPU").partition(":")[0].upper()
        provider = _NAMES.get(kind)
        return OnnxRuntimeBackendRep(InferenceSession(model, options, [provider] if provider else None))

    @classmethod
    def run_model(cls, model: Any, inputs: Any, device: str | None = None, **kwargs: Any) -> list[Any]:  # type: ignore[override]
        """Loads a model and runs it on arrays in the order of its inputs."""
        return cls.prepare(model, device, **kwargs).run(inputs)

    @classmethod
    def run_node(
        cls, node: Any, inputs: Any, device: str | None = None, outputs_info: Any = None, **kwargs: Any
    ) -> tuple[Any, ...]:
        """Runs one node, of the newest operator set unless `opset_version` says which, on arrays."""
        super().run_node(node, inputs, device or "CPU", outputs_info=outputs_info, **kwargs)  # checks the node
        names = [name for name in node.input if name]
        arrays = dict(zip(names, inputs, strict=False))
        version = kwargs.get("opset_version") or onnx.defs.onnx_opset_version()
        declared = [_declared(name, array) for name, array in arrays.items()]
        results = [onnx.helper.make_value_info(name, onnx.TypeProto()) for name in node.output if name]
        graph = onnx.helper.make_graph([node], "node", declared, results)
        domains = {"": version, **({node.domain: kwargs.get("domain_version", 1)} if node.domain else {})}
        opsets = [onnx.helper.make_opsetid(domain, number) for domain, number in domains.items()]
        return tuple(cls.run_model(onnx.helper.make_model(graph, opset_imports=opsets), list(arrays.values()), device))


def _declared(name: str, array: Any) -> Any:
    if isinstance(array, list):
        inner = onnx.helper.np_dtype_to_tensor_dtype(array[0].dtype)
        return onnx.helper.make_tensor_sequence_value_info(name, inner, None)
    number = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
    return onnx.helper.make_tensor_value_info(name, number, array.shape)


is_compatible = OnnxRuntimeBackend.is_compatible
prepare = OnnxRuntimeBackend.prepare
run = run_model = OnnxRuntimeBackend.run_model
run_node = OnnxRuntimeBackend.run_node
supports_device = OnnxRuntimeBackend.supports_device
