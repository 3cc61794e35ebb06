"""Who owns device memory? `DeviceBuffer`: one owner, freed once, by the provider that allocated it.

A provider's `allocate` makes a buffer, and its `deallocate` consumes it. Dropping a buffer instead leaks the
memory, because only the provider knows how to free it: the leak is counted (`leaks`) and warned of, and
never freed twice. Buffers move between threads and may be read by several at once.
"""

from __future__ import annotations

import ctypes
import threading
import warnings
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ep.device import DeviceId
from ep.errors import InvalidAlignment, InvalidInput, NullPointer, ReadOnlyBuffer, UseAfterFree

Bytes = npt.NDArray[np.uint8]


class Storage(Protocol):
    """The bytes behind a buffer. A library whose arrays are immutable may move them when they are written."""

    def pointer(self) -> int:
        """Return the present address: valid until the next `write`, and as long as this object lives."""
        ...

    def mut_pointer(self) -> int:
        """Return the address for writing; raise `ReadOnlyBuffer` with the reason where there is none."""
        ...

    def read(self, size: int) -> Bytes:
        """Return the first `size` bytes on the host, as a view where the host can reach them."""
        ...

    def write(self, data: Bytes) -> None:
        """Replace the first `len(data)` bytes; on return `data` may be reused."""
        ...


class DeviceBuffer:
    """The sole handle of one allocation: `len(buffer)` bytes on a device, aligned as promised.

    Once `deallocate` or `into_raw` has consumed it, every use raises `UseAfterFree`.
    """

    def __init__(self, storage: Storage, device: DeviceId, size: int, align: int, *, borrowed: bool) -> None:
        """Wrap storage. Providers call this; other code has `from_raw_parts` and `from_borrowed_parts`.

        Raises:
            InvalidInput: the size is negative.
            InvalidAlignment: `align` is not a power of two, or the address does not keep it.
            NullPointer: the address is null.
        """
        self._consumed_by = "a failed constructor"  # nothing to leak until the arguments are checked
        self._lock = threading.Lock()
        check_size(size)
        check_alignment(align)
        address = storage.pointer()
        if not address:
            raise NullPointer
        if address % align:
            raise InvalidAlignment(align, address)
        self._storage, self._device, self._size, self._align = storage, device, size, align
        self._borrowed = borrowed
        self._consumed_by = ""

    @classmethod
    def from_raw_parts(cls, ptr: int | None, device: DeviceId, size: int, align: int) -> DeviceBuffer:
        """Wrap an allocation in an owning handle.

        The caller promises that `ptr` starts `size` bytes on `device` which no other buffer names, and that
        they are freed once: by returning this handle to the provider that allocated them, or by freeing the
        pointer that `into_raw` returns.
        """
        return cls(_Memory(ptr or 0, device), device, size, align, borrowed=False)

    @classmethod
    def from_borrowed_parts(
        cls, ptr: int | None, device: DeviceId, size: int, align: int, *, owner: object = None
    ) -> DeviceBuffer:
        """Wrap memory that belongs to `owner`, such as a memory-mapped file; the buffer keeps `owner` alive.

        The memory is never written or freed through the buffer. Without an `owner`, the caller promises that
        the memory outlives every use of the buffer.
        """
        return cls(_Memory(ptr or 0, device, owner, read_only=True), device, size, align, borrowed=True)

    @property
    def device(self) -> DeviceId:
        """The device that holds the memory."""
        self.storage("ask the device of")
        return self._device

    @property
    def alignment(self) -> int:
        """The alignment in bytes that the address keeps."""
        self.storage("ask the alignment of")
        return self._align

    @property
    def is_borrowed(self) -> bool:
        """Whether the memory belongs to someone else, so that nobody may write or free it through this."""
        self.storage("ask the owner of")
        return self._borrowed

    @property
    def is_empty(self) -> bool:
        """Whether the size is zero. An empty buffer has an address and must be deallocated as any other."""
        return len(self) == 0

    @property
    def is_live(self) -> bool:
        """Whether nothing has consumed this buffer yet."""
        return not self._consumed_by

    def __len__(self) -> int:
        """The size in bytes."""
        self.storage("ask the size of")
        return self._size

    def __bool__(self) -> bool:
        return True  # an empty buffer is still a buffer

    def as_ptr(self) -> int:
        """Return the address for reading; only a host-accessible device lets the host follow it."""
        return self.storage("read").pointer()

    def as_mut_ptr(self) -> int:
        """Return the address for writing. Python cannot check that you are the only writer; you must be.

        Raises:
            ReadOnlyBuffer: the buffer is borrowed, or the library's arrays are immutable.
        """
        return self.storage("write").mut_pointer()

    def into_raw(self) -> int:
        """Consume the buffer and return its address, without freeing anything.

        The caller takes over the duty to free an owned allocation, and must not free a borrowed one.
        """
        return self.consume("into_raw", "take the pointer of").pointer()

    def storage(self, action: str) -> Storage:
        """Return the live storage, for providers; `action` is a verb for the error text."""
        if self._consumed_by:
            raise UseAfterFree(f"{action} the buffer", self._consumed_by)
        return self._storage

    def consume(self, by: str, action: str) -> Storage:
        """End the buffer's life and return its storage, for providers; of two threads, one succeeds."""
        with self._lock:
            storage = self.storage(action)
            self._consumed_by = by
            del self._storage  # a consumed handle must not keep the memory alive
        return storage

    @property
    def consumed_by(self) -> str:
        """What consumed the buffer; empty while it is live."""
        return self._consumed_by

    def __repr__(self) -> str:
        if self._consumed_by:
            return f"<DeviceBuffer consumed by {self._consumed_by}>"
        kind = "borrowed" if self._borrowed else "owned"
        return f"<DeviceBuffer {self._size} bytes on {self._device}, align {self._align}, {kind}>"

    def __del__(self) -> None:
        if not self._consumed_by and not self._borrowed:
            _leaked.append(self._size)
            text = f"{self!r} was dropped without deallocate: leaked"
            warnings.warn(text, ResourceWarning, stacklevel=2, source=self)


@dataclass(frozen=True, slots=True)
class Leaks:
    """Owned buffers of this process that were dropped without `deallocate`, and their bytes."""

    count: int
    nbytes: int


_leaked: list[int] = []  # append is atomic, so __del__ needs no lock (it may run while one is held)


def leaks() -> Leaks:
    """Return what has leaked so far."""
    sizes = tuple(_leaked)
    return Leaks(len(sizes), sum(sizes))


def check_size(size: int) -> None:
    """Raise `InvalidInput` for a negative number of bytes."""
    if size < 0:
        raise InvalidInput(f"a size of {size} bytes is negative.", fix="pass the number of bytes, 0 or more.")


def check_alignment(align: int) -> None:
    """Raise `InvalidAlignment` unless `align` is a power of two."""
    if align < 1 or align & (align - 1):
        raise InvalidAlignment(align)


def host_bytes(address: int, size: int, owner: object, *, read_only: bool) -> Bytes:
    """Return the bytes at a host address as an array that keeps `owner` alive."""
    if not size:
        return np.empty(0, np.uint8)
    return np.asarray(_Exporter(address, size, owner, read_only))


class _Exporter:
    """What NumPy asks for memory; the array keeps this object, and this object the owner."""

    def __init__(self, address: int, size: int, owner: object, read_only: bool) -> None:
        self._owner = owner
        self.__array_interface__: dict[str, Any] = {
            "data": (address, read_only),
            "shape": (size,),
            "typestr": "|u1",
            "version": 3,
        }


class _Memory:
    """Memory known only by its address: what the raw and borrowed constructors wrap."""

    def __init__(self, address: int, device: DeviceId, owner: object = None, *, read_only: bool = False) -> None:
        self._address, self._device, self._owner, self._read_only = address, device, owner, read_only

    def pointer(self) -> int:
        return self._address

    def mut_pointer(self) -> int:
        if self._read_only:
            raise ReadOnlyBuffer("it is borrowed: the memory belongs to someone else, such as a mapped file.")
        return self._address

    def read(self, size: int) -> Bytes:
        self._check_host("read")
        return host_bytes(self._address, size, self, read_only=True)

    def write(self, data: Bytes) -> None:
        self._check_host("write")
        ctypes.memmove(self.mut_pointer(), data.ctypes.data, data.nbytes)

    def _check_host(self, action: str) -> None:
        if not self._device.is_host_accessible:
            raise InvalidInput(
                f"the host cannot {action} a raw pointer on {self._device}.",
                why="only the provider that allocated device memory can follow its address.",
                fix="copy from a buffer that the device's provider allocated.",
            )
