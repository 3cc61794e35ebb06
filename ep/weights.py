"""Where weights come from: one read-only map per file, one borrowed view per tensor."""

from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np

from ep.errors import InvalidModel


class WeightStore:
    """Maps each external data file once and hands out read-only NumPy views into the map.

    Files outside `directory` are refused (absolute paths, `..`, links that lead out), as are ranges past the
    end of a file. A view keeps its map alive; nothing is read before a view is.
    """

    def __init__(self, directory: str | os.PathLike[str] | None) -> None:
        self._directory = None if directory is None else Path(directory).resolve()
        self._maps: dict[Path, mmap.mmap | bytes] = {}
        self._lock = threading.Lock()

    def array(self, tensor: Any) -> np.ndarray:
        """NumPy array of an `onnx_ir` tensor: a view where the bytes allow it, `str` objects for strings."""
        import onnx_ir as ir

        if isinstance(tensor, ir.ExternalTensor):
            return self._external(tensor)
        if tensor.dtype == ir.DataType.STRING:
            return strings(tensor.numpy())
        return tensor.numpy()

    def _external(self, tensor: Any) -> np.ndarray:
        import onnx_ir as ir

        shape = tuple(int(d) for d in tensor.shape)
        offset, size = tensor.offset or 0, tensor.size
        nbytes = (size * tensor.dtype.bitwidth + 7) // 8
        content = self._map(tensor.location, tensor.name)
        if offset < 0 or offset + nbytes > len(content) or (tensor.length or nbytes) != nbytes:
            raise InvalidModel(
                f"initializer '{tensor.name}' does not fit its external data file '{tensor.location}'.",
                why=f"{tensor.dtype.name}{list(shape)} needs {nbytes} bytes at offset {offset}; the file has "
                f"{len(content)} bytes and the model says length={tensor.length}.",
                fix="copy the data file again, or export the model again; it may be truncated.",
            )
        if tensor.dtype.bitwidth < 8:
            packed = np.frombuffer(content, np.uint8, count=nbytes, offset=offset)
            return ir.PackedTensor(packed, tensor.dtype, shape=tensor.shape, name=tensor.name).numpy()
        return np.frombuffer(content, tensor.dtype.numpy(), count=size, offset=offset).reshape(shape)

    def _map(self, location: str, name: str | None) -> mmap.mmap | bytes:
        path = self._inside(location, name)
        with self._lock:
            if path not in self._maps:
                self._maps[path] = self._open(path, location, name)
            return self._maps[path]

    def _inside(self, location: str, name: str | None) -> Path:
        if self._directory is None:
            raise InvalidModel(
                f"initializer '{name}' lies in the external file '{location}', but the model has no directory.",
                why="a model given as bytes or as a ModelProto does not say where its data files are.",
                fix="load the model by its path.",
            )
        path = (self._directory / location).resolve()
        if Path(location).is_absolute() or not path.is_relative_to(self._directory):
            raise InvalidModel(
                f"initializer '{name}' points outside the model's directory: '{location}'.",
                why="external data must lie beside or below the model file; reading elsewhere is unsafe.",
                fix="move the data file next to the model and export again with a relative location.",
            )
        return path

    @staticmethod
    def _open(path: Path, location: str, name: str | None) -> mmap.mmap | bytes:
        try:
            with path.open("rb") as file:
                if os.fstat(file.fileno()).st_size == 0:
                    return b""
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise InvalidModel(
                f"external data file '{location}' of initializer '{name}' cannot be read.",
                why=str(error.strerror or error),
                fix="keep the model's data files beside the model under the names that it was saved with.",
            ) from error


def strings(array: np.ndarray) -> np.ndarray:
    """Object array of `str` from an array of bytes or `str` objects."""
    flat = [s.decode("utf-8", "surrogateescape") if isinstance(s, bytes) else str(s) for s in array.ravel()]
    result = np.empty(len(flat), dtype=object)
    result[:] = flat
    return result.reshape(array.shape)
