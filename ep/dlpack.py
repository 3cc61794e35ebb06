"""How does memory cross library borders? DLPack capsules, read and written without copying.

NumPy makes the capsules, but knows neither bfloat16 nor devices: those fields are set here, in the capsule.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from ep.device import DeviceId, DeviceType
from ep.errors import InvalidTensorView, ReadOnlyBuffer

_KINDS = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}
_EXTENDED = {  # ml_dtypes scalar -> DLPack type code; sub-byte types differ in layout and are left out
    "bfloat16": 4,
    "float8_e3m4": 7,
    "float8_e4m3": 8,
    "float8_e4m3b11fnuz": 9,
    "float8_e4m3fn": 10,
    "float8_e4m3fnuz": 11,
    "float8_e5m2": 12,
    "float8_e5m2fnuz": 13,
    "float8_e8m0fnu": 14,
}
_CODES = {np.dtype(getattr(ml_dtypes, name)): code for name, code in _EXTENDED.items() if hasattr(ml_dtypes, name)}
_DTYPES = {(code, dtype.itemsize * 8): dtype for dtype, code in _CODES.items()} | {
    (_KINDS[dtype.kind], dtype.itemsize * 8): dtype for dtype in map(np.dtype, "?bBhHiIqQefdFD")
}
_CUDA_LEGACY_STREAM = 1
# Pinned host memory (3) reads as host memory, managed memory (13) as the GPU's.
_DEVICES = {
    1: DeviceType.CPU,
    2: DeviceType.CUDA,
    3: DeviceType.CPU,
    10: DeviceType.ROCM,
    13: DeviceType.CUDA,
    15: DeviceType.WEBGPU,
}


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_index", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, [ctypes.py_object, ctypes.c_char_p]


def _tensor(capsule: object) -> _Tensor:
    """Return the struct inside an unconsumed capsule; it lives as long as the capsule."""
    if _is_valid(capsule, b"dltensor_versioned"):
        tensor: _Tensor = _Versioned.from_address(_pointer(capsule, b"dltensor_versioned")).tensor
        return tensor
    return _Tensor.from_address(_pointer(capsule, b"dltensor"))


def export(array: np.ndarray, device: DeviceId, max_version: tuple[int, int] | None) -> object:
    """Return a capsule over memory on `device` that `array` describes (its data are not touched).

    Raises:
        ReadOnlyBuffer: the array is read-only and the consumer cannot be told so (DLPack before 1.0).
        InvalidTensorView: DLPack has no number for the dtype or the device.
    """
    code, number = _CODES.get(array.dtype), device.type.dlpack
    if number is None or (code is None and array.dtype.kind not in _KINDS):
        missing = f"device {device}" if number is None else f"dtype {array.dtype}"
        raise InvalidTensorView(f"DLPack has no {missing}.", fix="pass np.asarray(view) instead.")
    if not array.flags.writeable and (max_version is None or max_version < (1, 0)):
        raise ReadOnlyBuffer(
            "it is borrowed, and the consumer asked for a DLPack older than 1.0, which cannot say read-only.",
            fix="pass np.asarray(view), or ask for a copy: view.__dlpack__(copy=True).",
        )
    plain = array if code is None else array.view(f"u{array.dtype.itemsize}")
    capsule = plain.__dlpack__(max_version=max_version)
    tensor = _tensor(capsule)
    if code is not None:
        tensor.code = code
    index = 0 if device.is_host_accessible else device.index
    tensor.device_type, tensor.device_index = number, index
    return capsule


@dataclass(frozen=True, slots=True)
class Imported:
    """What a capsule describes. `owner` keeps the memory alive: the capsule, which is never consumed."""

    address: int
    device: DeviceId
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    owner: object


def read(array: Any) -> Imported:
    """Describe the memory of any array that exports DLPack, without copying or converting it.

    Raises:
        InvalidTensorView: the device or the dtype has no counterpart here.
    """
    number, index = array.__dlpack_device__()
    kind = _DEVICES.get(int(number))
    if kind is None:
        raise InvalidTensorView(
            f"DLPack device number {int(number)} is not readable here.",
            fix="pass a host array, or use the provider's to_view.",
        )
    capsule = _capsule(array, _CUDA_LEGACY_STREAM if kind == DeviceType.CUDA else None)
    tensor = _tensor(capsule)
    dtype = _DTYPES.get((tensor.code, tensor.bits))
    if dtype is None or tensor.lanes != 1:
        raise InvalidTensorView(f"DLPack type code {tensor.code} of {tensor.bits} bits has no NumPy dtype.")
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else row_major(shape)
    address = (tensor.data or 0) + tensor.byte_offset
    return Imported(address, DeviceId(kind, index), dtype, shape, strides, capsule)


def _capsule(array: Any, stream: int | None) -> object:
    """Ask for DLPack 1.0, which read-only arrays need; exporters older than it do not know the argument."""
    try:
        return array.__dlpack__(stream=stream, max_version=(1, 0))
    except TypeError:
        return array.__dlpack__(stream=stream)


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides in elements of a contiguous array."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
