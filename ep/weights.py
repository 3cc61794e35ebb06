"""Where do weights come from? One read-only map per file, and one borrowed `DeviceBuffer` per tensor."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ep.buffer import DeviceBuffer
from ep.device import DeviceId
from ep.errors import InvalidModel
from ep.mapping import Content, address, check_whole, drop_pages, read_only
from ep.wire import IN_FILE, LARGE

_MISSING = (
    "keep the model's data files beside the model under the names that it was saved with, or name the file that has "
    "them: ep.load(…, weights=…)."
)
_NO_BYTES = np.zeros(0, np.uint8)
_MOST_ALIGNMENT = 1 << 14  # an alignment that is promised of a borrowed buffer; a page of Apple silicon


@dataclass(frozen=True, slots=True)
class Source:
    """A file that holds weights: its name for messages, its bytes, and where they lie in memory."""

    name: str
    content: Content
    start: int
    stop: int

    @classmethod
    def of(cls, name: str, content: Content) -> Source:
        start = address(content)
        return cls(name, content, start, start + len(content))


class WeightStore:
    """Hands out borrowed memory of the files that hold a model's weights; nothing is read before it is used.

    External data must lie in or below one of the model's `directories`: absolute paths, `..` and links that lead
    out are refused, as are ranges past the end of a file. `own` is the model `file` itself, as bytes or as a map.
    Arrays and buffers keep their map alive. With `copy`, files are read into memory instead.
    """

    def __init__(
        self,
        directories: tuple[Path, ...] = (),
        *,
        own: Content = None,
        name: str = "model",
        file: Path | None = None,
        copy: bool = False,
    ) -> None:
        self._directories, self._copy = directories, copy
        self._file = None if file is None else Path(os.path.abspath(file))
        self._paths: dict[str, Path] = {}  # location → where it leads, looked at once
        self._sources: dict[str | Path, Source] = {} if own is None else {IN_FILE: Source.of(name, own)}
        self._wide: dict[tuple[str, int], Any] = {}  # location and offset of a tensor → its copy in a wider dtype
        self.results: dict[tuple[Any, ...], Any] = {}  # how something is computed, and of which places → its result
        self._lock = threading.Lock()

    @property
    def directory(self) -> Path | None:
        """Where external data lie, or `None` for a model without a file."""
        return self._directories[0] if self._directories else None

    @property
    def directories(self) -> tuple[Path, ...]:
        """Where files that belong to the model may lie."""
        return self._directories

    @property
    def sources(self) -> tuple[Source, ...]:
        """The files that were opened so far."""
        return tuple(self._sources.values())

    @property
    def files(self) -> tuple[Path, ...]:
        """Paths of the model and of the files with its weights that were opened so far."""
        data = (Path(str(key).removeprefix("\0")) for key in self._sources if key != IN_FILE)
        return (*([self._file] if self._file else ()), *data)

    def add(self, path: Path) -> tuple[str, Content]:
        """Opens a file that the user named; returns the location under which tensors refer to it, and its bytes."""
        location = f"\0{os.path.abspath(path)}"
        what = f"the weights file '{path}' cannot be read."
        return location, self._open(location, path, str(path), what, "check the path.").content

    def array(self, tensor: Any) -> np.ndarray:
        """NumPy array of an `onnx_ir` tensor: a view where the bytes allow it, `str` objects for strings.

        Raises:
            InvalidModel: the data do not fit the tensor's shape and dtype, or are not there.
        """
        import onnx_ir as ir

        try:
            if isinstance(tensor, ir.ExternalTensor):
                return self._external(tensor)
            array = tensor.numpy()
            return strings(array) if tensor.dtype == ir.DataType.STRING else array
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, AssertionError) as error:
            raise InvalidModel(
                f"the data of tensor '{tensor.name}' do not fit its type {_describe(tensor)}.",
                why=f"{type(error).__name__}: {error}",
                fix="export the model again.",
            ) from error

    def buffer(self, tensor: Any) -> DeviceBuffer:
        """The bytes of an external `onnx_ir` tensor in the file's own memory; the buffer keeps the map alive.

        Raises:
            InvalidModel: the file is missing, or the tensor does not fit into it.
        """
        shape = tensor.shape.numpy()
        nbytes = (math.prod(shape) * tensor.dtype.bitwidth + 7) // 8
        source, offset, length = self._source(tensor), tensor.offset or 0, tensor.length or nbytes
        size = source.stop - source.start
        if offset < 0 or offset + nbytes > size or length != nbytes or min(shape, default=0) < 0:
            raise InvalidModel(
                f"initializer '{tensor.name}' does not fit its external data file '{source.name}'.",
                why=f"{_describe(tensor)} needs {nbytes} bytes at offset {offset}; the file has {size} bytes and the "
                f"model says length={tensor.length}.",
                fix="copy the data file again, or export the model again; it may be truncated.",
            )
        start = (source.start or _MOST_ALIGNMENT) + offset  # an empty file has no address, and none is needed
        align = min(start & -start, _MOST_ALIGNMENT)
        return DeviceBuffer.from_borrowed_parts(start, DeviceId.cpu(), nbytes, align, owner=source.content)

    def content(self, place: Any) -> np.ndarray:
        """The bytes of a place in a file (an `ep.places.Place`), in the file's own memory.

        Raises:
            InvalidModel: the file is missing, or ends before.
        """
        source = self._source(place)
        size = source.stop - source.start
        if not 0 <= place.offset <= place.offset + place.length <= size:
            raise InvalidModel(
                f"'{place.name}' does not fit into the file '{source.name}'.",
                why=f"it is the {place.length} bytes at offset {place.offset}; the file has {size} bytes.",
                fix="copy the data file again, or export the model again; it may be truncated.",
            )
        return np.frombuffer(source.content, np.uint8, place.length, place.offset) if place.length else _NO_BYTES

    def packed(self, tensor: Any) -> np.ndarray | None:
        """The bytes of an external tensor of packed integers; `None` of others, which `array` is for."""
        import onnx_ir as ir

        if not isinstance(tensor, ir.ExternalTensor) or tensor.dtype.name not in ("INT4", "UINT4", "INT2", "UINT2"):
            return None
        buffer = self.buffer(tensor)
        return buffer.storage("read").read(len(buffer)) if len(buffer) >= LARGE else None

    def _external(self, tensor: Any) -> np.ndarray:
        import onnx_ir as ir

        buffer = self.buffer(tensor)
        content = buffer.storage("read").read(len(buffer))
        if tensor.dtype.bitwidth < 8:
            return ir.PackedTensor(content, tensor.dtype, shape=tensor.shape, name=tensor.name).numpy()
        return content.view(tensor.dtype.numpy()).reshape(tuple(tensor.shape.numpy()))

    def origin(self, array: np.ndarray) -> tuple[str, int] | None:
        """File name and offset of an array, or of what it is a view of; `None` if it has memory of its own."""
        low = array.ctypes.data
        return next(((s.name, low - s.start) for s in self.sources if s.start <= low < s.stop), None)

    def add_wide(self, location: str, offset: int, copy: Any) -> None:
        """Says that the tensor at a place of a file is stored once more (an `ep.places.Stored`)."""
        self._wide[location, offset] = copy

    def wide(self, array: np.ndarray) -> np.ndarray | None:
        """The stored copy of an array in a wider dtype, or `None`.

        Raises:
            InvalidModel: the copy does not lie where the model says.
        """
        origin = self.origin(array) if self._wide else None
        copy = None if origin is None else self._wide.get(origin)
        found = None if copy is None else copy.of(self.content(copy.place))
        return found if found is not None and found.shape == array.shape and array.flags.c_contiguous else None

    def add_kept(self, digest: str, sources: Iterable[Any], result: Any) -> None:
        """Says that what is computed of tensors at these places is stored (an `ep.places.Stored`)."""
        self.results[digest, *sources] = result

    def kept(self, digest: str, arrays: Iterable[np.ndarray]) -> np.ndarray | None:
        """The stored result of a computation of these arrays, or `None`.

        Raises:
            InvalidModel: it does not lie where the model says.
        """
        found = self.results.get((digest, *map(self.origin, arrays))) if self.results else None
        return None if found is None else found.of(self.content(found.place))

    def rest(self, array: np.ndarray) -> None:
        """Lets the system take the pages of an array that is not read for now; later reads bring them back."""
        low = array.ctypes.data
        for source in self.sources:
            if source.start <= low < source.stop:
                drop_pages(source.content, low - source.start, array.nbytes)

    def check_whole(self) -> None:
        """Raises `InvalidModel` if a file has become shorter since it was opened."""
        for source in self.sources:
            check_whole(source.content, source.name)

    def _source(self, tensor: Any) -> Source:
        location = str(tensor.location)
        if location in self._sources:
            return self._sources[location]
        path = self._paths.get(location) or self._inside(location, tensor.name)
        self._paths[location] = path
        return self._open(path, path, location, f"external data file '{location}' of '{tensor.name}' cannot be read.")

    def _inside(self, location: str, name: str | None) -> Path:
        if not self._directories:
            raise InvalidModel(
                f"initializer '{name}' lies in the external file '{location}', but the model has no directory.",
                why="a model given as bytes or as a ModelProto does not say where its data files are.",
                fix="load the model by its path.",
            )
        path = _resolved(self._directories[0], location)
        if path is None or Path(location).is_absolute() or not any(map(path.is_relative_to, self._directories)):
            raise InvalidModel(
                f"initializer '{name}' points outside the model's directory: '{location}'.",
                why="external data must lie beside or below the model file; reading elsewhere is unsafe.",
                fix="move the data file next to the model and export again with a relative location.",
            )
        return path

    def _open(self, key: str | Path, path: Path, name: str, what: str, fix: str = _MISSING) -> Source:
        with self._lock:
            if key not in self._sources:
                try:
                    self._sources[key] = Source.of(name, read_only(path, copy=self._copy))
                except OSError as error:
                    raise InvalidModel(what, why=str(error.strerror or error), fix=fix) from error
            return self._sources[key]


def _resolved(directory: Path, location: str) -> Path | None:
    try:
        return None if "\0" in location else (directory / location).resolve()
    except (OSError, RuntimeError):  # links in a circle
        return None


def directories(path: Path) -> tuple[Path, ...]:
    """Where the external data of a model file may lie: beside it, and beside the file that it is a link to."""
    return tuple(dict.fromkeys((path.parent.resolve(), path.resolve().parent)))


def _describe(tensor: Any) -> str:
    return f"{tensor.dtype.name}[{', '.join(map(str, tensor.shape))}]"


def strings(array: np.ndarray) -> np.ndarray:
    """Object array of `str` from an array of bytes or `str` objects."""
    flat = [s.decode("utf-8", "surrogateescape") if isinstance(s, bytes) else str(s) for s in array.ravel()]
    result = np.empty(len(flat), dtype=object)
    result[:] = flat
    return result.reshape(array.shape)
