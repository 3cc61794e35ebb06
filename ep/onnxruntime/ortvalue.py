"""How do users hold a value? `onnxruntime.OrtValue`, around the value itself of `ep/onnxruntime/values.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ep.onnxruntime.devices import OrtDevice
from ep.onnxruntime.pybind import COLLECTION, STATE
from ep.onnxruntime.sparse import SparseTensor
from ep.onnxruntime.values import COrtValue


class OrtValue:
    """A tensor that sessions take and give without copying it: over a NumPy array, or on the device.

    >>> value = OrtValue.ortvalue_from_numpy(np.zeros(3, np.float32))
    >>> value.shape(), value.data_type()
    ([3], 'tensor(float)')
    """

    __module__ = COLLECTION

    def __init__(self, ortvalue: COrtValue, numpy_obj: np.ndarray | None = None, session: Any = None) -> None:
        if not isinstance(ortvalue, COrtValue):
            raise ValueError(f"`Provided ortvalue` needs to be of type `{STATE}.OrtValue`")
        self._ortvalue, self._numpy_obj, self._session = ortvalue, numpy_obj, session

    def _get_c_value(self) -> COrtValue:
        return self._ortvalue

    @property
    def _is_webgpu_buffer(self) -> bool:
        """False: there is no WebGPU here."""
        return False

    @classmethod
    def ortvalue_from_numpy(
        cls, numpy_obj: np.ndarray, /, device_type: str = "cpu", device_id: int = 0, vendor_id: int = -1
    ) -> OrtValue:
        """A value over an array's memory, or a copy of it on a GPU. Strings are refused.

        Raises:
            RuntimeError: it is no array, or an array of strings, or the device is not here.
        """
        device = OrtDevice.make(device_type, device_id, vendor_id)
        return cls(COrtValue.ortvalue_from_numpy(numpy_obj, device), numpy_obj)

    @classmethod
    def ortvalue_from_numpy_with_onnx_type(cls, data: np.ndarray, /, onnx_element_type: int) -> OrtValue:
        """A value over an array's bytes, read as another type of the same width, such as bfloat16."""
        return cls(COrtValue.ortvalue_from_numpy_with_onnx_type(data, onnx_element_type), data)

    @classmethod
    def ortvalue_from_shape_and_type(
        cls,
        shape: Sequence[int],
        element_type: Any,
        device_type: str = "cpu",
        device_id: int = 0,
        vendor_id: int = -1,
        memory_info: Any = None,
    ) -> OrtValue:
        """A value of this shape and type, whose contents do not matter."""
        del memory_info
        device = OrtDevice.make(device_type, device_id, vendor_id)
        return cls(COrtValue.ortvalue_from_shape_and_type(shape, element_type, device))

    @classmethod
    def ort_value_from_sparse_tensor(cls, sparse_tensor: SparseTensor) -> OrtValue:
        """A value that holds a sparse tensor."""
        return cls(COrtValue.ort_value_from_sparse_tensor(sparse_tensor))

    @classmethod
    def from_dlpack(cls, data: Any, /) -> OrtValue:
        """A value over the memory of any array that speaks DLPack."""
        return cls(COrtValue.from_dlpack(data))

    def as_sparse_tensor(self) -> SparseTensor:
        """The sparse tensor that it holds."""
        return self._ortvalue.as_sparse_tensor()

    def data_ptr(self) -> int:
        """The address of the first element."""
        return self._ortvalue.data_ptr()

    def device_name(self) -> str:
        """`cpu` or `cuda`."""
        return self._ortvalue.device_name()

    def shape(self) -> Sequence[int]:
        """The shape, as a list."""
        return self._ortvalue.shape()

    def data_type(self) -> str:
        """`tensor(float)`, `seq(tensor(float))`, …"""
        return self._ortvalue.data_type()

    def element_type(self) -> int:
        """ONNX's number of the element type."""
        return self._ortvalue.element_type()

    def tensor_size_in_bytes(self) -> int:
        """The number of bytes of all elements."""
        return self._ortvalue.tensor_size_in_bytes()

    def has_value(self) -> bool:
        """Whether this is anything but an empty optional."""
        return self._ortvalue.has_value()

    def is_tensor(self) -> bool:
        """Whether this is a dense tensor."""
        return self._ortvalue.is_tensor()

    def is_sparse_tensor(self) -> bool:
        """Whether this is a sparse tensor."""
        return self._ortvalue.is_sparse_tensor()

    def is_tensor_sequence(self) -> bool:
        """Whether this is a sequence of tensors."""
        return self._ortvalue.is_tensor_sequence()

    def numpy(self) -> np.ndarray:
        """The tensor as a writable array; a result of a session leaves the device, once."""
        return self._ortvalue.numpy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self._ortvalue.__array__(dtype, copy)

    def __dlpack__(self, *, stream: Any = None, **keywords: Any) -> Any:
        return self._ortvalue.__dlpack__(stream=stream, **keywords)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._ortvalue.__dlpack_device__()

    def update_inplace(self, data: Any) -> None:
        """Copies an array of the same number of bytes into the value; its dtype is not looked at."""
        self._ortvalue.update_inplace(data._get_c_value() if isinstance(data, OrtValue) else data)


def copy_tensors(src: Sequence[OrtValue], dst: Sequence[OrtValue], stream: Any = None) -> None:
    """Copies tensors into tensors of the same sizes."""
    del stream
    if len(src) != len(dst):
        raise RuntimeError("Expecting the same number of source and destination tensors")
    for source, target in zip(src, dst, strict=True):
        target.update_inplace(source)
