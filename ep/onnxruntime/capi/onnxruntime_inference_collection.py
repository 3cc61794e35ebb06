"""What is written in Python in onnxruntime: the public classes around those of `onnxruntime_pybind11_state`."""

from collections.abc import Mapping, Sequence
from typing import Any

from ep.onnxruntime.adapters import AdapterFormat
from ep.onnxruntime.capi import onnxruntime_pybind11_state as C
from ep.onnxruntime.compiler import ModelCompiler
from ep.onnxruntime.devices import OrtDevice
from ep.onnxruntime.devices import device_number as get_ort_device_type
from ep.onnxruntime.enums import OrtDeviceVendorId
from ep.onnxruntime.iobinding import IOBinding
from ep.onnxruntime.ortvalue import OrtValue, copy_tensors
from ep.onnxruntime.providers import checked, pairs
from ep.onnxruntime.session import InferenceSession, Session
from ep.onnxruntime.sparse import SparseTensor


def check_and_normalize_provider_args(
    providers: Sequence[Any] | None,
    provider_options: Sequence[Mapping[Any, Any]] | None,
    available_provider_names: Sequence[str],
) -> tuple[list[str], list[dict[str, str]]]:
    """Names and options of providers, checked, with a warning for names that are not available."""
    chosen = checked(pairs(providers, provider_options), available_provider_names)
    return list(chosen), list(chosen.values())


__all__ = [
    "AdapterFormat",
    "C",
    "IOBinding",
    "InferenceSession",
    "ModelCompiler",
    "OrtDevice",
    "OrtDeviceVendorId",
    "OrtValue",
    "Session",
    "SparseTensor",
    "check_and_normalize_provider_args",
    "copy_tensors",
    "get_ort_device_type",
]
