"""What holds a tensor between runs? `OrtValue`: an array of the user's, or one that stays on the device.

A result of a session stays in the array library until the host asks for it: `numpy()` then moves it to memory that
the user may write, once, and from there on that memory is the value. A value made from a NumPy array *is* that array.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ep.onnxruntime.devices import COrtDevice, OrtDevice
from ep.onnxruntime.elements import DTYPES, NAMES, NUMBERS, element_dtype, number_of
from ep.onnxruntime.pybind import STATE, unpicklable

_NOT_TENSOR = "Only OrtValues that are Tensors are convertible to Numpy objects\n"
_NO_DEVICE = (
    "Can't allocate memory on the device using this package of OnnxRuntime. "
    "Please use the appropriate package of OnnxRuntime for your hardware to use this feature."
)
_NO_STRINGS = "Creation of OrtValues is currently only supported from non-string numpy arrays"


class COrtValue:
    """A tensor, a sequence, a map, a sparse tensor, or nothing."""

    __module__, __qualname__ = STATE, "OrtValue"
    __slots__ = ("_held", "_provider", "_type", "__weakref__")
    __reduce_ex__ = unpicklable

    def __init__(self, held: Any, provider: Any = None, declared: str = "") -> None:
        """`held` is an array of `provider`'s library, or a value of the host's; `declared` is its type if given."""
        self._held, self._provider, self._type = held, provider, declared

    # Making one.

    @staticmethod
    def ortvalue_from_numpy(array: Any, device: Any = None) -> COrtValue:
        """A value over the memory of a C-contiguous array; others are copied into that order."""
        if not isinstance(array, np.ndarray) or array.dtype.kind in "OUS":
            raise RuntimeError(_NO_STRINGS)
        number_of(array.dtype)
        native = array.astype(array.dtype.newbyteorder("=")) if not array.dtype.isnative else array
        host = native if native.flags.c_contiguous else np.array(native, order="C")
        return COrtValue(host) if _is_cpu(device) else COrtValue(*_on_gpu(host))

    @staticmethod
    def ortvalue_from_numpy_with_onnx_type(array: np.ndarray, onnx_element_type: int) -> COrtValue:
        """A value over the bytes of an array, read as another type of the same width."""
        dtype = DTYPES[int(onnx_element_type)]
        host = np.ascontiguousarray(array)
        if host.itemsize != dtype.itemsize:
            raise RuntimeError(f"{host.dtype.name} and {NAMES[int(onnx_element_type)]} have elements of other widths")
        return COrtValue(host.view(dtype))

    @staticmethod
    def ortvalue_from_shape_and_type(shape: Sequence[int], element_type: Any, device: Any = None) -> COrtValue:
        """A value of uninitialised memory."""
        host = np.zeros([int(size) for size in shape], element_dtype(element_type))
        return COrtValue(host) if _is_cpu(device) else COrtValue(*_on_gpu(host))

    ortvalue_from_shape_and_onnx_type = ortvalue_from_shape_and_type

    @staticmethod
    def ortvalue_from_shape_and_type_for_memory_info(
        shape: Sequence[int], element_type: Any, memory_info: Any
    ) -> COrtValue:
        """A value of uninitialised memory of the host."""
        del memory_info
        return COrtValue.ortvalue_from_shape_and_type(shape, element_type)

    ortvalue_from_shape_and_onnx_type_for_memory_info = ortvalue_from_shape_and_type_for_memory_info

    @staticmethod
    def ort_value_from_sparse_tensor(sparse: Any) -> COrtValue:
        """A value that holds a `SparseTensor`."""
        return COrtValue(sparse)

    @staticmethod
    def from_dlpack(data: Any) -> COrtValue:
        """A value over the memory of an array that speaks DLPack, or of a capsule; read-only memory is copied."""
        from ep.tensor import TensorView

        capsule = type(data).__name__ == "PyCapsule"
        source = _Exported(data) if capsule else data
        try:
            host = np.from_dlpack(source)
        except (TypeError, BufferError, RuntimeError, AttributeError):  # a dtype that NumPy lacks, or another device
            host = TensorView.from_dlpack(source).numpy()
        if capsule and not host.flags.writeable:  # capsules without a version cannot say that they are read-only
            host = _writable(host)
        usable = host.flags.c_contiguous and host.flags.writeable
        return COrtValue(host if usable else np.array(host, order="C"))

    # Asking it.

    def has_value(self) -> bool:
        """Whether this is anything but an empty optional."""
        return self._held is not None

    def is_tensor(self) -> bool:
        """Whether this is a dense tensor."""
        return isinstance(self._held, np.ndarray) or self._on_device()

    def is_sparse_tensor(self) -> bool:
        """Whether this is a sparse tensor."""
        return hasattr(self._held, "dense_shape")

    def is_tensor_sequence(self) -> bool:
        """Whether this is a sequence of tensors."""
        return isinstance(self._held, list) and not (self._held and isinstance(self._held[0], dict))

    def _on_device(self) -> bool:
        return self._provider is not None and self._provider.backend.is_array(self._held)

    def _dtype(self) -> np.dtype[Any]:
        if self._on_device():
            return self._provider.backend.xp.dtype_of(self._held)
        return self._held.dtype

    def element_type(self) -> int:
        """ONNX's number of the element type."""
        if self.is_tensor():
            return number_of(self._dtype())
        if self.is_tensor_sequence() and self._held:
            return COrtValue(self._held[0], self._provider).element_type()
        raise RuntimeError("Only OrtValues that are Tensors are currently supported\n")

    def data_type(self) -> str:
        """`tensor(float)`, `seq(tensor(float))`, …"""
        if self.is_sparse_tensor():
            return self._held.data_type()
        if self.is_tensor():
            return f"tensor({NAMES[self.element_type()]})"
        return self._type or "unknown"

    def shape(self) -> list[int]:
        """The shape of a tensor."""
        if self.is_sparse_tensor():
            return list(self._held.dense_shape())
        if not self.is_tensor():
            raise RuntimeError("Only OrtValues that are Tensors/SpareTensors are currently supported\n")
        return list(self._held.shape)

    def tensor_size_in_bytes(self) -> int:
        """The number of bytes of all elements."""
        dtype = self._dtype()
        return int(np.prod(self.shape(), dtype=np.int64)) * dtype.itemsize

    def device_name(self) -> str:
        """`cpu`, also for the memory that Apple's GPU shares with it, or `cuda`."""
        if not self._on_device() or self._provider.device_type.is_host_accessible:
            return "cpu"
        return "cuda"

    def data_ptr(self) -> int:
        """The address of the first element, on the device where the value lies."""
        if self._on_device():
            return self._provider.to_view(self._held).buffer.as_ptr()
        return self._host().ctypes.data

    # Reading and writing it.

    def _host(self) -> np.ndarray:
        """The tensor in memory that the user may write; moves it there, once, if it is on the device."""
        if self._on_device():
            with self._provider.backend.scope():
                self._held = np.array(self._provider.backend.to_numpy(self._held))
        if not isinstance(self._held, np.ndarray):
            raise RuntimeError(_NOT_TENSOR)
        return self._held

    def numpy(self) -> np.ndarray:
        """The tensor as a writable array; later runs see what is written."""
        return readable(self._host())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.numpy(), dtype=dtype, copy=copy)

    def __dlpack_device__(self) -> tuple[int, int]:
        if self._on_device() and not self._provider.device_type.is_host_accessible:
            return self._provider.to_view(self._held).__dlpack_device__()
        return 1, 0

    def __dlpack__(self, *, stream: Any = None, **keywords: Any) -> Any:
        if self.__dlpack_device__() != (1, 0):
            return self._provider.to_view(self._held).__dlpack__(stream=stream, **keywords)
        from ep.tensor import TensorView

        host = self._host()
        return (host if host.dtype.kind != "V" else TensorView.from_array(host)).__dlpack__(**keywords)

    to_dlpack = __dlpack__

    def update_inplace(self, data: Any) -> None:
        """Copies the bytes of an array of the same size into the value."""
        source = data._host() if isinstance(data, COrtValue) else np.ascontiguousarray(data)
        if source.nbytes != self.tensor_size_in_bytes():
            raise RuntimeError("The input size of numpy arrays does not match the size of the OrtValue.")
        if self._on_device() and not self._provider.device_type.is_host_accessible:
            fresh = source.view(np.uint8).reshape(-1).view(self._dtype()).reshape(self._held.shape)
            with self._provider.backend.scope():
                self._held = self._provider.backend.asarray(fresh)
            return
        target = self._host()
        target.reshape(-1).view(np.uint8)[:] = source.reshape(-1).view(np.uint8)

    def as_sparse_tensor(self) -> Any:
        """The sparse tensor that it holds."""
        if not self.is_sparse_tensor():
            raise RuntimeError("This OrtValue does not contain SparseTensor. Check data_type() value.\n")
        return self._held

    # Between runs.

    def _feed(self, provider: Any) -> Any:
        """What a run on `provider` takes: its own array as it is, or a host array, which the run must not keep."""
        if self._on_device() and (self._provider.name, self._provider.device_id) != (provider.name, provider.device_id):
            return self._host()
        return self._held

    def _receive(self, result: COrtValue) -> None:
        """Takes over a run's result: into the memory that it has on the host, or as the device's new array."""
        if isinstance(self._held, np.ndarray):
            np.copyto(self._held, result._view(), casting="no")
        else:
            self._held, self._provider = result._held, result._provider

    def _view(self) -> np.ndarray:
        """The tensor as an array to read at once, without moving the value."""
        if not self._on_device():
            return self._held
        with self._provider.backend.scope():
            return self._provider.backend.to_numpy(self._held)


class OrtValueVector(list[COrtValue]):
    """A list of values, as `IOBinding.get_outputs_as_ortvaluevector` gives it."""

    __module__ = STATE

    def push_back(self, value: Any) -> None:
        """Appends a value, or an array that speaks DLPack."""
        self.append(value if isinstance(value, COrtValue) else COrtValue.from_dlpack(value))

    def push_back_batch(self, tensors: Any, pointers: Any, element_types: Any, shapes: Any, devices: Any) -> None:
        """Appends values over memory that `tensors` keep alive."""
        from ep.onnxruntime.iobinding import at_address

        del tensors
        for pointer, element_type, shape, device in zip(pointers, element_types, shapes, devices, strict=True):
            self.append(at_address(device, element_type, shape, pointer))

    def reserve(self, size: int) -> None:
        """No effect: lists grow by themselves."""

    def shrink_to_fit(self) -> None:
        """No effect: lists grow by themselves."""

    def element_type_at(self, index: int) -> int:
        """ONNX's number of one value's element type."""
        return self[index].element_type()

    def bool_tensor_indices(self) -> list[int]:
        """Positions of the boolean tensors."""
        return [i for i, value in enumerate(self) if value.element_type() == NUMBERS[np.dtype(bool)]]

    def dlpack_at(self, index: int) -> Any:
        """One value as a DLPack capsule."""
        return self[index].__dlpack__()

    def to_dlpacks(self, to_tensor: Any) -> list[Any]:
        """All values as DLPack capsules, each passed to `to_tensor` if there is one."""
        capsules: Iterator[Any] = (value.__dlpack__() for value in self)
        return list(capsules) if to_tensor is None else [to_tensor(capsule) for capsule in capsules]


class _Exported:
    """A capsule in the hands of those who ask an array for one."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, **keywords: Any) -> Any:
        return self._capsule


def _writable(array: np.ndarray) -> np.ndarray:
    """A writable array over the same memory, which it keeps alive."""

    class Memory:
        owner = array
        __array_interface__ = array.__array_interface__ | {"data": (array.ctypes.data, False)}

    return np.asarray(Memory())


def readable(array: np.ndarray) -> np.ndarray:
    """The array as NumPy users can read it: 8-bit floats as their bytes, as onnxruntime gives them."""
    return array.view(np.uint8) if array.dtype.name.startswith("float8") else array


def _is_cpu(device: Any) -> bool:
    if isinstance(device, OrtDevice):
        device = device._get_c_device()
    return device is None or device.device_type() == COrtDevice.cpu()


def _on_gpu(host: np.ndarray) -> tuple[Any, Any]:
    """An array on JAX's GPU, with its provider."""
    from ep.discovery import provider
    from ep.errors import EpError

    try:
        gpu = provider("jax", "gpu")
    except EpError as cause:
        raise RuntimeError(_NO_DEVICE) from cause
    with gpu.backend.scope():  # type: ignore[attr-defined]
        return gpu.backend.asarray(host), gpu  # type: ignore[attr-defined]
