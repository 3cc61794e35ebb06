"""Where do stored data lie? A range of a file that belongs to a model, and the array that it is."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


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
