"""Where do JAX buffers live? In immutable arrays of bytes, which a write replaces."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from ep.buffer import Bytes, Storage
from ep.errors import InvalidInput, ReadOnlyBuffer
from ep.memory import aligned, available_on_host, slack

CPU_ALIGNMENT = 64  # XLA adopts host memory from this alignment on
PACKED = ("int4", "uint4", "int2", "uint2", "float4_e2m1fn")  # XLA packs two or four of them into a byte
GPU_ALIGNMENT = 256  # of every allocation of XLA on a GPU


class JaxMemory:
    """The memory of one JAX device."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def allocate(self, size: int, align: int) -> Storage:
        if self._device.platform != "cpu" and align > GPU_ALIGNMENT:
            raise InvalidInput(
                f"alignment {align} is larger than what JAX gives on {self._device} ({GPU_ALIGNMENT}).",
                fix=f"ask for {GPU_ALIGNMENT} or less.",
            )
        try:
            return _JaxStorage(max(size, 1), align, self._device)
        except jax.errors.JaxRuntimeError as cause:
            if "RESOURCE_EXHAUSTED" in str(cause):
                raise MemoryError(str(cause)) from cause
            raise

    def available(self) -> int | None:
        stats = self._device.memory_stats()
        if stats is None or "bytes_limit" not in stats:
            return available_on_host() if self._device.platform == "cpu" else None
        return int(stats["bytes_limit"] - stats["bytes_in_use"])


def borrow(device: Any, arrays: Sequence[np.ndarray]) -> list[tuple[jax.Array, str | None]]:
    """Return JAX arrays over the memory of NumPy arrays, or copies with the reasons why they are.

    The caller promises that the memory does not change any more. JAX keeps what it borrows alive.
    """
    plain = [array for array in arrays if array.dtype.name not in PACKED]
    placed = iter(jax.device_put(plain, device, may_alias=True) if plain else ())  # one call: each costs 0.1 ms
    # Packed ones, placed on a named device, have not the layout that compiled code takes.
    results = [jax.numpy.asarray(a) if a.dtype.name in PACKED else next(placed) for a in arrays]
    return [(result, _reason(device, array, result)) for array, result in zip(arrays, results, strict=True)]


def _reason(device: Any, array: np.ndarray, result: jax.Array) -> str | None:
    """Why a JAX array has a copy of an array, or None."""
    if array.size and array.dtype.name not in PACKED and device.platform == "cpu":
        if result.unsafe_buffer_pointer() == array.ctypes.data:
            return None
        return obstacle(device, array) or f"JAX copied {array.dtype.name} all the same"
    return obstacle(device, array)


def obstacle(device: Any, array: np.ndarray) -> str | None:
    """Return why an array cannot be borrowed, or None."""
    if not array.size:
        return None
    if device.platform != "cpu":
        return f"{device} has memory of its own"
    if not array.flags.c_contiguous:
        return "its elements are not in row-major order"
    if array.dtype.name in PACKED:
        return f"JAX keeps {array.dtype.name} in a form of its own"
    if array.ctypes.data % CPU_ALIGNMENT:
        return f"its address is not a multiple of {CPU_ALIGNMENT}"
    return None


class _JaxStorage:
    """An array of `size` bytes at an aligned address; each write makes it another array."""

    def __init__(self, size: int, align: int, device: Any) -> None:
        self._align, self._device = align, device
        self._array = self._put(np.zeros(size, np.uint8))

    def pointer(self) -> int:
        return self._array.unsafe_buffer_pointer()

    def mut_pointer(self) -> int:
        raise ReadOnlyBuffer(
            "JAX arrays are immutable: other arrays may share this memory.",
            fix="write it with provider.copy.",
        )

    def read(self, size: int) -> Bytes:
        return np.asarray(self._array)[:size]

    def write(self, data: Bytes) -> None:
        if data.nbytes == self._array.nbytes:
            self._array = self._put(data)
        elif data.nbytes:
            updated = _overwrite(self._array, jax.device_put(data, self._device))
            updated.block_until_ready()  # JAX may read `data` until then
            kept = updated.unsafe_buffer_pointer() % self._align == 0
            self._array = updated if kept else self._put(np.asarray(updated))

    def _put(self, data: Bytes) -> jax.Array:
        """Copy bytes to the device. On the CPU, JAX adopts the copy, so that any alignment can be had."""
        align = max(self._align, CPU_ALIGNMENT)
        own = aligned(np.empty(slack(data.nbytes, align), np.uint8), data.nbytes, align)
        own[:] = data
        array: jax.Array = jax.device_put(own, self._device, may_alias=True)
        return array.block_until_ready()


@functools.partial(jax.jit, donate_argnums=0)
def _overwrite(array: jax.Array, start: jax.Array) -> jax.Array:
    """Replace the first bytes; in place where nothing else holds the array."""
    return lax.dynamic_update_slice(array, start, (0,))
