"""Where do the bytes of a provider's buffers come from? The `Memory` contract, and the host's memory."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Protocol

import numpy as np

from ep.buffer import Bytes, Storage
from ep.errors import InvalidInput


class Memory(Protocol):
    """One device's allocator."""

    def allocate(self, size: int, align: int) -> Storage:
        """Return storage of at least `size` bytes whose address keeps `align`; raise `MemoryError`."""
        ...

    def available(self) -> int | None:
        """Return the bytes that can still be allocated, or None where the device does not say."""
        ...


class ArrayStorage:
    """Storage over a one-dimensional, writable byte array of the host; it keeps the array alive."""

    def __init__(self, data: Bytes) -> None:
        self._data = data

    def pointer(self) -> int:
        return int(self._data.ctypes.data)

    def mut_pointer(self) -> int:
        return self.pointer()

    def read(self, size: int) -> Bytes:
        return self._data[:size]

    def write(self, data: Bytes) -> None:
        # memmove, because source and target may overlap; both are contiguous.
        ctypes.memmove(self.pointer(), data.ctypes.data, data.nbytes)


class HostMemory:
    """The memory of NumPy."""

    def allocate(self, size: int, align: int) -> Storage:
        return ArrayStorage(aligned(np.empty(slack(size, align), np.uint8), size, align))

    def available(self) -> int | None:
        return available_on_host()


def slack(size: int, align: int) -> int:
    """Return how many bytes to allocate so that `size` of them can start at any alignment; never zero."""
    return size + align


def aligned(data: Bytes, size: int, align: int) -> Bytes:
    """Return the `size` bytes of `data` from its first aligned address; needs `slack(size, align)` bytes."""
    start = -data.ctypes.data % align
    return data[start : start + max(size, 1)]  # an empty slice would lose its address


def trim() -> None:
    """Give memory that was freed back to the system, where the C library keeps some of it for later (glibc)."""
    give = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if give is not None:
        give(0)


def check_room(what: str, nbytes: int, fix: str = "choose smaller sizes.") -> None:
    """Raises `InvalidInput` for what is larger than the host's memory: a system that overcommits would end the process.

    `what` names it, for the message; `fix` is what to do.
    """
    available = available_on_host()
    if available is not None and nbytes > available:
        raise InvalidInput(f"{what} takes {nbytes:,} bytes.", why=f"{available:,} bytes are available.", fix=fix)


def available_on_host() -> int | None:
    """Return the bytes of memory that the host can still give; all of its memory where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        names = os.sysconf_names if hasattr(os, "sysconf_names") else {}
        if "SC_PHYS_PAGES" not in names:
            return None
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
