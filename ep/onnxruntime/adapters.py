"""How are the parameters of a LoRA adapter read from a file, and written? In onnxruntime's format.

The format is FlatBuffers with the identifier `TORT`: a table (format version, adapter version, model version,
parameters), and per parameter a table (name, dims, ONNX element type, raw bytes).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ep.onnxruntime.elements import DTYPES
from ep.onnxruntime.ortvalue import OrtValue
from ep.onnxruntime.pybind import COLLECTION, STATE, unpicklable
from ep.onnxruntime.values import COrtValue

IDENTIFIER = b"TORT"
FORMAT_VERSION = 1


class LoraAdapter:
    """Parameters that `RunOptions.add_active_adapter` feeds to the inputs of their names."""

    __module__ = STATE
    __reduce_ex__ = unpicklable

    def __init__(self) -> None:
        self._parameters: dict[str, COrtValue] = {}

    def Load(self, path: str) -> None:
        """Reads the parameters from a file."""
        _, _, parameters = read(path)
        self._parameters = {name: COrtValue(array) for name, array in parameters.items()}


class AdapterFormat:
    """An adapter file: its versions and its parameters."""

    __module__ = COLLECTION

    def __init__(self, adapter: Any = None) -> None:
        self._versions = [0, 0]
        self._parameters: dict[str, OrtValue] = {}
        if adapter is not None:
            self._versions = list(adapter._versions)
            self._parameters = dict(adapter._parameters)

    @staticmethod
    def read_adapter(file_path: str | os.PathLike[str]) -> AdapterFormat:
        """Reads a file."""
        made = AdapterFormat()
        adapter, model, parameters = read(file_path)
        made._versions = [adapter, model]
        made._parameters = {name: OrtValue.ortvalue_from_numpy(array) for name, array in parameters.items()}
        return made

    def export_adapter(self, file_path: str | os.PathLike[str]) -> None:
        """Writes a file."""
        arrays = {name: value._get_c_value()._view() for name, value in self._parameters.items()}
        Path(file_path).write_bytes(encode(self._versions[0], self._versions[1], arrays))

    def get_format_version(self) -> int:
        """The version of the file format."""
        return FORMAT_VERSION

    def set_adapter_version(self, adapter_version: int) -> None:
        """Sets the adapter's own version."""
        self._versions[0] = adapter_version

    def get_adapter_version(self) -> int:
        """The adapter's own version."""
        return self._versions[0]

    def set_model_version(self, model_version: int) -> None:
        """Sets the version of the model that it belongs to."""
        self._versions[1] = model_version

    def get_model_version(self) -> int:
        """The version of the model that it belongs to."""
        return self._versions[1]

    format_version = property(get_format_version, doc="The version of the file format.")
    adapter_version = property(get_adapter_version, set_adapter_version, doc="The adapter's own version.")
    model_version = property(get_model_version, set_model_version, doc="The version of the model it belongs to.")

    def set_parameters(self, params: dict[str, OrtValue]) -> None:
        """Sets the parameters, by the names of the inputs that take them."""
        self._parameters = dict(params)

    def get_parameters(self) -> dict[str, OrtValue]:
        """The parameters, by the names of the inputs that take them."""
        return dict(self._parameters)

    parameters = property(get_parameters, set_parameters, doc="The parameters.")


def read(path: str | os.PathLike[str]) -> tuple[int, int, dict[str, np.ndarray]]:
    """Adapter version, model version and parameters of a file.

    Raises:
        RuntimeError: it is not there, no adapter, or damaged.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as cause:
        raise RuntimeError(f"The adapter file {path} cannot be read: {cause.strerror}") from cause
    try:
        return _decode(content)
    except (struct.error, IndexError, ValueError, KeyError) as cause:
        message = f"The buffer does not appear to be a valid lora parameter format\n{path}: {cause}"
        raise RuntimeError(message) from cause


def _decode(content: bytes) -> tuple[int, int, dict[str, np.ndarray]]:
    if content[4:8] != IDENTIFIER:
        raise ValueError(f"its identifier is {content[4:8]!r}")
    root = _follow(content, 0)
    version, adapter, model = (_scalar(content, root, field) for field in range(3))
    if version != FORMAT_VERSION:
        raise ValueError(f"its format version is {version}")
    parameters = {}
    for at in _vector(content, root, 3, "I"):
        table = at
        name = bytes(_vector(content, table, 0, "B")).decode()
        dims, number = tuple(_vector(content, table, 1, "q")), _scalar(content, table, 2)
        raw = bytes(_vector(content, table, 3, "B"))
        parameters[name] = np.frombuffer(bytearray(raw), DTYPES[number]).reshape(dims)
    return adapter, model, parameters


def _follow(content: bytes, at: int) -> int:
    return at + struct.unpack_from("<I", content, at)[0]


def _slot(content: bytes, table: int, field: int) -> int | None:
    """Where a field of a table lies, or `None` where the table leaves it out."""
    vtable = table - struct.unpack_from("<i", content, table)[0]
    if 4 + 2 * field >= struct.unpack_from("<H", content, vtable)[0]:
        return None
    offset = struct.unpack_from("<H", content, vtable + 4 + 2 * field)[0]
    return table + offset if offset else None


def _scalar(content: bytes, table: int, field: int) -> int:
    slot = _slot(content, table, field)
    return 0 if slot is None else struct.unpack_from("<i", content, slot)[0]


def _vector(content: bytes, table: int, field: int, code: str) -> list[int]:
    """The items of a vector; those of `I` are positions of tables."""
    slot = _slot(content, table, field)
    if slot is None:
        return []
    start = _follow(content, slot)
    count = struct.unpack_from("<I", content, start)[0]
    items = struct.unpack_from(f"<{count}{code}", content, start + 4)
    return [start + 4 + 4 * i + item for i, item in enumerate(items)] if code == "I" else list(items)


def encode(adapter: int, model: int, parameters: Mapping[str, np.ndarray]) -> bytes:
    """A file's bytes: forward references only, every part aligned to 8 bytes."""
    body = bytearray(struct.pack("<I4s", 0, IDENTIFIER))
    root = _table(body, [("i", FORMAT_VERSION), ("i", adapter), ("i", model), ("ref", None)])
    struct.pack_into("<I", body, 0, root)
    listed = _append(body, root + 16, struct.pack("<I", len(parameters)) + bytes(4 * len(parameters)), 0)
    numbers = {dtype: number for number, dtype in DTYPES.items()}
    for index, (name, array) in enumerate(parameters.items()):
        fields = [("ref", None), ("ref", None), ("i", numbers[array.dtype]), ("ref", None)]
        table = _table(body, fields)
        struct.pack_into("<I", body, listed + 4 + 4 * index, table - (listed + 4 + 4 * index))
        text = name.encode()
        _append(body, table + 4, struct.pack("<I", len(text)) + text + b"\0", 0)
        _append(body, table + 8, struct.pack(f"<I{array.ndim}q", array.ndim, *array.shape), 4)
        _append(body, table + 16, struct.pack("<I", array.nbytes) + np.ascontiguousarray(array).tobytes(), 4)
    return bytes(body)


def _table(body: bytearray, fields: list[tuple[str, int | None]]) -> int:
    """Appends a table of four-byte fields behind its vtable; references are filled in later."""
    body += bytes(-len(body) % 8)
    vtable = len(body)
    body += struct.pack(f"<{2 + len(fields)}H", 4 + 2 * len(fields), 4 + 4 * len(fields),
                        *(4 + 4 * i for i in range(len(fields))))  # fmt: skip
    body += bytes(-len(body) % 8)
    table = len(body)
    body += struct.pack("<i", table - vtable)
    for _, value in fields:
        body += struct.pack("<I", 0 if value is None else value & 0xFFFFFFFF)
    return table


def _append(body: bytearray, reference: int, data: bytes, lead: int) -> int:
    """Appends data so that what follows its length is aligned (`lead` bytes past 8), and points a reference at it."""
    body += bytes((lead - len(body)) % 8)
    at = len(body)
    body += data
    struct.pack_into("<I", body, reference, at - reference)
    return at
