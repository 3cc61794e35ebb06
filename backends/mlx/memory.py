"""Where do MLX buffers live? In unified memory, which the host reads and writes through a pointer."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np

from ep.backends.mlx.dtypes import mlx_dtype
from ep.buffer import Storage, host_bytes
from ep.memory import ArrayStorage, aligned, available_on_host, slack

PAGE = mmap.PAGESIZE  # Metal maps whole pages; one that holds a byte of ours may be read to its end
_ROW = 1 << 20
_MAX_DIM = (1 << 31) - 1


class MlxMemory:
    """The memory of MLX."""

    def allocate(self, size: int, align: int) -> Storage:
        capacity = slack(size, align)
        rows = math.ceil(capacity / _ROW)
        array = mx.zeros((capacity,) if capacity <= _MAX_DIM else (rows, _ROW), mx.uint8)
        mx.eval(array)
        return ArrayStorage(aligned(_window(array).reshape(-1), size, align))

    def available(self) -> int | None:
        """Return what is left of the memory that Metal recommends; MLX on the CPU takes the host's."""
        recommended = mx.device_info().get("max_recommended_working_set_size")
        if recommended is None:
            return available_on_host()
        return max(0, int(recommended) - mx.get_active_memory())


def borrow(arrays: Sequence[np.ndarray]) -> list[tuple[mx.array, str | None]]:
    """Return MLX arrays over the memory of NumPy arrays, or copies with the reasons why they are.

    The caller promises that the memory does not change any more. MLX keeps what it borrows alive.
    """
    return list(map(_borrowed, arrays))


def _borrowed(array: np.ndarray) -> tuple[mx.array, str | None]:
    reason = obstacle(array)
    if reason is None:
        try:
            return _wrap(array), None
        except ValueError as cause:  # Metal refused the pages
            reason = str(cause)
    return copy(array), reason


def obstacle(array: np.ndarray) -> str | None:
    """Return why an array cannot be borrowed; None where Metal is asked to."""
    if not mx.metal.is_available():
        return "MLX shares host memory only on Metal"
    if not array.size:
        return None
    if not array.flags.c_contiguous:
        return "its elements are not in row-major order"
    if array.ctypes.data % max(4, array.itemsize):
        return f"its address is not a multiple of {max(4, array.itemsize)}"
    return None


def _wrap(array: np.ndarray) -> mx.array:
    """Wrap the pages around the data, and slice: neither the wrap nor the slice copies."""
    if not array.size:
        return copy(array)
    address = array.ctypes.data
    start = address // PAGE * PAGE
    length = math.ceil((address + array.nbytes - start) / PAGE) * PAGE
    pages = host_bytes(start, length, array, read_only=True)
    unit = 1 if length <= _MAX_DIM else 8  # a dimension has 31 bits
    if (address - start) % unit or array.nbytes % unit:
        raise ValueError(f"a tensor of more than 2 GiB must start and end at a multiple of {unit} bytes")
    whole = mx.asarray(pages.view(f"u{unit}"), copy=False)
    first = (address - start) // unit
    data = whole[first : first + array.nbytes // unit]
    return data.view(mlx_dtype(array.dtype)).reshape(array.shape)


def copy(array: np.ndarray) -> mx.array:
    """Return a copy in MLX's memory, of the same dtype."""
    array = np.asarray(array, order="C")  # MLX refuses negative strides
    if array.dtype == ml_dtypes.bfloat16:
        return mx.array(array.view(np.uint16)).view(mx.bfloat16)
    return mx.array(array, mlx_dtype(array.dtype))


def view(array: mx.array) -> np.ndarray:
    """Return a read-only NumPy view of an MLX array; it waits for the array and keeps it alive."""
    mx.eval(array)
    is_bf16 = array.dtype == mx.bfloat16
    result = _window(array.view(mx.uint16)).view(ml_dtypes.bfloat16) if is_bf16 else _window(array)
    result.flags.writeable = False
    return result


def _window(array: Any) -> np.ndarray:
    """Return the array's own memory; MLX exports it as a buffer, though its type stubs do not say so."""
    return np.asarray(memoryview(array))
