"""What lies in a buffer? `TensorView`: a dtype, a shape and strides over a `DeviceBuffer`, checked once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ep import dlpack
from ep.buffer import DeviceBuffer, check_alignment, host_bytes
from ep.device import DeviceId
from ep.errors import InvalidInput, InvalidTensorView

Dim = int | str | None
_MAX_BYTES = 2**63 - 1


@dataclass(frozen=True, slots=True, order=True)
class NodeId:
    """The place of a node in its graph, counted from 0 in the order of the file."""

    index: int


class Shape(tuple[Dim, ...]):
    """Dimensions, each a size, a symbolic name, or None for unknown; a name has one value per run.

    Raises:
        InvalidInput: a dimension is negative, or is neither an integer, a string nor None.
    """

    __slots__ = ()

    def __new__(cls, dims: Iterable[Dim] = ()) -> Shape:
        return super().__new__(cls, map(_dim, dims))

    @property
    def is_static(self) -> bool:
        """Whether every dimension is a size."""
        return self.size is not None

    @property
    def size(self) -> int | None:
        """The number of elements, or None while a dimension is not a size."""
        sizes = [dim for dim in self if isinstance(dim, int)]
        return math.prod(sizes) if len(sizes) == len(self) else None

    def bind(self, sizes: Mapping[str, int]) -> Shape:
        """Replace the names that have a value."""
        return Shape(sizes.get(dim, dim) if isinstance(dim, str) else dim for dim in self)

    def match(self, shape: tuple[int, ...], sizes: Mapping[str, int] | None = None) -> dict[str, int]:
        """Return `sizes` plus the values that a concrete shape gives to the names.

        Raises:
            InvalidInput: the rank or a size differs, or a name would get a second value.
        """
        found = dict(sizes or {})
        if len(shape) != len(self):
            raise self._mismatch(shape, f"it has {len(shape)} dimensions instead of {len(self)}.")
        for axis, (dim, size) in enumerate(zip(self, shape, strict=True)):
            expected = found.setdefault(dim, size) if isinstance(dim, str) else dim
            if expected is not None and expected != size:
                name = f" ({dim!r} has that value elsewhere)" if isinstance(dim, str) else ""
                raise self._mismatch(shape, f"dimension {axis} is {size} instead of {expected}{name}.")
        return found

    def _mismatch(self, shape: tuple[int, ...], why: str) -> InvalidInput:
        what = f"shape {shape} does not fit {self}."
        return InvalidInput(what, why=why, fix=f"pass an array shaped {self}.")

    def __str__(self) -> str:
        return f"[{', '.join('?' if dim is None else str(dim) for dim in self)}]"


def _dim(dim: Any) -> Dim:
    if dim is None or isinstance(dim, str):
        return dim
    try:
        size = dim.__index__()
    except AttributeError:
        raise InvalidInput(f"{dim!r} is not a dimension.", fix="use an integer, a name or None.") from None
    if size < 0:
        raise InvalidInput(f"dimension {size} is negative.", fix="use None for an unknown dimension.")
    return int(size)


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """How elements lie in memory: strides in elements (None: row-major), a format, an alignment in bytes."""

    strides: tuple[int, ...] | None = None
    format: str = "contiguous"  # or "channels_last", or a name that one provider gives a meaning
    alignment: int = 1

    def __post_init__(self) -> None:
        check_alignment(self.alignment)

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements follow each other in row-major order."""
        return self.strides is None and self.format == "contiguous"


@dataclass(frozen=True, slots=True, eq=False)
class TensorView:
    """An array in a buffer: `shape` elements of `dtype`, `strides` and `offset` counted in elements.

    Views read; whoever owns the buffer writes it, through the provider's `copy`. A view of a borrowed buffer
    is read-only in every form that it takes. `strides=None` means row-major; the field then holds its value.

    Raises:
        InvalidTensorView: the elements do not fit the buffer, are not aligned, overflow, or have no fixed
            size in native byte order.
        UseAfterFree: the buffer was consumed (here, and at every later use).
    """

    buffer: DeviceBuffer
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...] = field(default=None)  # type: ignore[arg-type]
    offset: int = 0

    def __post_init__(self) -> None:
        shape = tuple(int(dim) for dim in self.shape)
        strides = dlpack.row_major(shape) if self.strides is None else tuple(map(int, self.strides))
        for name, value in (("dtype", np.dtype(self.dtype)), ("shape", shape), ("strides", strides)):
            object.__setattr__(self, name, value)
        _check_dtype(self.dtype)
        _check_extent(self)

    @classmethod
    def from_array(cls, array: np.ndarray, *, device: DeviceId | None = None) -> TensorView:
        """Borrow the memory of a NumPy array, whatever its strides; the view keeps the array alive.

        `device` names the owner of the memory where that is not the host proper (unified memory).
        """
        _check_dtype(array.dtype)
        if any(stride % array.itemsize for stride in array.strides):
            raise InvalidTensorView(
                f"byte strides {array.strides} are not multiples of the item size {array.itemsize}.",
                fix="pass np.ascontiguousarray(array).",
            )
        steps = tuple(stride // array.itemsize for stride in array.strides)
        address, device = array.ctypes.data, device or DeviceId.cpu()
        return cls._borrow(address, device, array.dtype, array.shape, steps, array)

    @classmethod
    def from_dlpack(cls, array: Any) -> TensorView:
        """Borrow the memory of any array that exports DLPack, on any device; the view keeps it alive."""
        found = dlpack.read(array)
        return cls._borrow(found.address, found.device, found.dtype, found.shape, found.strides, found.owner)

    @classmethod
    def _borrow(
        cls,
        address: int,
        device: DeviceId,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        owner: object,
    ) -> TensorView:
        """Wrap the smallest range that holds all elements; negative strides reach below `address`."""
        low, high = _extent(shape, strides)
        start = address + low * dtype.itemsize or dtype.alignment  # an empty array may have no address
        size = (high - low) * dtype.itemsize
        buffer = DeviceBuffer.from_borrowed_parts(start, device, size, start & -start, owner=owner)
        return cls(buffer, dtype, shape, strides, -low)

    @property
    def device(self) -> DeviceId:
        """The device that holds the elements."""
        return self.buffer.device

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The number of bytes of all elements, without the gaps between them."""
        return self.size * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements follow each other in row-major order."""
        pairs = zip(self.shape, self.strides, dlpack.row_major(self.shape), strict=True)
        return not self.size or all(dim == 1 or stride == wanted for dim, stride, wanted in pairs)

    @property
    def layout(self) -> TensorLayout:
        """The layout of the elements."""
        if self.is_contiguous:
            return TensorLayout(alignment=self.buffer.alignment)
        return TensorLayout(self.strides, "custom", self.buffer.alignment)

    def numpy(self) -> np.ndarray:
        """Return the elements as a NumPy array: without copying where the host can reach the memory.

        The array keeps the memory alive. It is read-only if the buffer is borrowed or cannot be written.
        """
        data = self.buffer.storage("read").read(len(self.buffer))
        array = self._over(data)
        if self.buffer.is_borrowed:
            array.flags.writeable = False
        return array

    def _over(self, data: np.ndarray) -> np.ndarray:
        """Lay the view over the bytes of its buffer."""
        size = self.dtype.itemsize
        steps = tuple(stride * size for stride in self.strides)
        return np.ndarray(self.shape, self.dtype, data if self.size else None, self.offset * size, steps)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False and not self.device.is_host_accessible:
            raise ValueError(f"reading a view on {self.device} needs a copy, and copy=False forbids it.")
        return np.array(self.numpy(), dtype=dtype, copy=copy)

    def __dlpack_device__(self) -> tuple[int, int]:
        number = self.device.type.dlpack
        if number is None:
            raise InvalidTensorView(f"DLPack has no device {self.device}.", fix="pass np.asarray(view).")
        return number, 0 if self.device.is_host_accessible else self.device.index

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        """Export the elements; without a copy, a read-only view needs a consumer that knows DLPack 1.0."""
        del stream  # buffers are complete between calls of their provider
        host = (1, 0)
        target = self.__dlpack_device__() if dl_device is None else (int(dl_device[0]), dl_device[1])
        if target not in (self.__dlpack_device__(), host):
            raise BufferError(f"a view on {self.device} cannot be exported to DLPack device {target}.")
        if copy or target != self.__dlpack_device__():
            if copy is False:
                raise BufferError(f"moving a view from {self.device} to the host needs a copy.")
            return dlpack.export(np.array(self.numpy()), DeviceId.cpu(), max_version)
        return dlpack.export(self._described(), self.device, max_version)

    def _described(self) -> np.ndarray:
        """Return an array with the view's address, also where the host must not follow it."""
        if self.device.is_host_accessible:
            return self.numpy()
        storage = self.buffer.storage("read")
        data = host_bytes(storage.pointer(), len(self.buffer), storage, read_only=self.buffer.is_borrowed)
        return self._over(data)

    def __repr__(self) -> str:
        return f"<TensorView {self.dtype.name}{list(self.shape)} on {self.device}>"


def _check_dtype(dtype: np.dtype[Any]) -> None:
    if dtype.hasobject or dtype.kind in "SUMm" or dtype.type is np.void:
        raise InvalidTensorView(
            f"dtype {dtype} is not numeric.", fix="keep strings and objects in NumPy arrays on the host."
        )
    if not dtype.isnative:
        raise InvalidTensorView(
            f"dtype {dtype} is not in the byte order of this machine.",
            fix="convert it first: array.astype(array.dtype.newbyteorder('=')).",
        )


def _check_extent(view: TensorView) -> None:
    shape, strides, itemsize = view.shape, view.strides, view.dtype.itemsize
    if len(shape) != len(strides):
        raise InvalidTensorView(f"{len(shape)} dimensions {shape} have {len(strides)} strides {strides}.")
    if min(shape, default=0) < 0 or view.offset < 0:
        raise InvalidTensorView(f"shape {shape} or offset {view.offset} is negative.")
    low, high = _extent(shape, strides)
    first, last = (view.offset + low) * itemsize, (view.offset + high) * itemsize
    if max(abs(first), abs(last), math.prod(shape) * itemsize) > _MAX_BYTES:
        raise InvalidTensorView(f"shape {shape} with strides {strides} overflows 63 bits of bytes.")
    if first < 0 or last > len(view.buffer):
        raise InvalidTensorView(
            f"{view.dtype.name}{list(shape)} with strides {strides} and offset {view.offset} spans bytes "
            f"{first} to {last} of a buffer of {len(view.buffer)} bytes."
        )
    misfit = (view.buffer.as_ptr() + view.offset * itemsize) % view.dtype.alignment
    if misfit:
        raise InvalidTensorView(
            f"the first element lies {misfit} bytes past a multiple of {view.dtype.alignment}, "
            f"the alignment of {view.dtype.name}.",
            fix="copy the data to aligned memory.",
        )


def _extent(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, int]:
    """Return the range [low, high) of element positions that are touched, relative to the first element."""
    if 0 in shape:
        return 0, 0
    reach = [(dim - 1) * stride for dim, stride in zip(shape, strides, strict=True)]
    return sum(step for step in reach if step < 0), 1 + sum(step for step in reach if step > 0)
