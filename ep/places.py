"""Where do stored data lie? A range of a file that belongs to a model, and the array that it is or shows."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ep.weights import WeightStore


@dataclass(frozen=True, slots=True)
class Place:
    """The data of a tensor: a location that the model's `WeightStore` knows, from which byte on, and how many."""

    name: str
    location: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Stored:
    """An array in row-major order, at a place."""

    place: Place
    dtype: np.dtype
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        wanted = math.prod(self.shape) * self.dtype.itemsize
        if self.place.length != wanted or min(self.shape, default=0) < 0:
            raise ValueError(f"'{self.place.name}' is said to have {self.place.length} bytes, and needs {wanted}")

    def of(self, data: np.ndarray) -> np.ndarray:
        """The array, given the bytes at its place."""
        return data.view(self.dtype).reshape(self.shape)


def numpy_type(name: str) -> np.dtype:
    """The dtype of ONNX's name for one of whole bytes."""
    return np.dtype({"FLOAT": "float32", "DOUBLE": "float64"}.get(name, name.lower()))


@dataclass(frozen=True, slots=True)
class Weight:
    """An array: a view of a tensor's data, or of an extra's; where it names none, of what the plan itself brings."""

    tensor: str
    offset: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def of(self, data: np.ndarray) -> np.ndarray:
        """The array, given the bytes of the tensor."""
        dtype = np.dtype(self.dtype)
        if dtype.hasobject:
            raise ValueError("bytes are no Python objects")
        array = np.ndarray(self.shape, dtype, data.data, self.offset, self.strides)
        array.flags.writeable = False
        return array


class Overlap(Exception):
    """An array may be of either of two tensors."""


class Tensors:
    """Which tensor does an array show?"""

    def __init__(self, places: Mapping[str, Place], store: WeightStore) -> None:
        """Raises `Overlap` for tensors that share some of their data."""
        spans = ((store.content(place), name) for name, place in places.items())
        self.spans = sorted((c.ctypes.data, c.ctypes.data + c.nbytes, name) for c, name in spans if c.nbytes)
        self.starts = [start for start, _, _ in self.spans]
        if any(start < end for (start, *_), (_, end, _) in zip(self.spans[1:], self.spans, strict=False)):
            raise Overlap

    def at(self, address: int) -> str:
        """The name of the tensor at an address, or ""."""
        start, stop, name = self.spans[max(0, bisect_right(self.starts, address) - 1)] if self.spans else (0, 0, "")
        return name if start <= address < stop else ""

    def find(self, array: np.ndarray) -> Weight | None:
        """The array as a view of a tensor."""
        address = array.ctypes.data
        name = self.at(address)
        if not name or not array.size or min(array.strides, default=0) < 0:
            return None
        start, stop, _ = self.spans[bisect_right(self.starts, address) - 1]
        last = address + array.itemsize + sum((n - 1) * s for n, s in zip(array.shape, array.strides, strict=True))
        if last > stop:
            return None
        return Weight(name, address - start, array.dtype.name, array.shape, array.strides)
