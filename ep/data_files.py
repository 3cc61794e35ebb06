"""What do the data files of a packed model look like? Aligned tensors, raw or within the rules of safetensors."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ep.safetensors import DTYPES, FILLER, RESERVED

ALIGNMENT = 64  # of every tensor: what JAX adopts on the CPU
PAGE = 1 << 14  # where data start: a page of Apple silicon, and four of most other processors
_NAMES = {onnx_name: name for name, (_, onnx_names) in DTYPES.items() for onnx_name in onnx_names}


@dataclass(frozen=True, slots=True, eq=False)
class Later:
    """Bytes that are made when they are written, so that only one tensor of them is in memory."""

    nbytes: int
    make: Callable[[], memoryview]

    def __len__(self) -> int:
        return self.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A tensor to write: its name, type in ONNX's words, shape and bytes; `reserved` names are none of a model."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview | Later
    reserved: bool = False


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file to write: what precedes the data, and where in the file each tensor starts."""

    name: str
    head: bytes
    places: tuple[tuple[Piece, int], ...]

    @property
    def nbytes(self) -> int:
        return self.places[-1][1] + len(self.places[-1][0].data) if self.places else len(self.head)

    def parts(self) -> Iterator[bytes | memoryview]:
        """The contents, in order."""
        at = len(self.head)
        yield self.head
        for piece, offset in self.places:
            yield bytes(offset - at)
            yield piece.data.make() if isinstance(piece.data, Later) else piece.data
            at = offset + len(piece.data)


def plan_files(target: Path, format: str, pieces: Sequence[Piece], shard_bytes: int | None) -> list[DataFile]:
    """The files that hold these tensors, beside the target: none if there are no tensors."""
    groups = _shards(pieces, shard_bytes)
    files = []
    for index, group in enumerate(groups, 1):
        part = f"-{index:05}-of-{len(groups):05}" if len(groups) > 1 else ""
        if format == "external":
            files.append(DataFile(f"{target.stem}{part}.data", b"", _places(group, 0)))
        else:
            files.append(_safetensors(f"{target.stem}{part}.safetensors", group))
    if format == "safetensors" and len(files) > 1:
        files.append(_index(target, files))
    return files


def _shards(pieces: Sequence[Piece], most: int | None) -> list[list[Piece]]:
    groups: list[list[Piece]] = []
    size = 0
    for piece in pieces:
        if not groups or (most is not None and size + len(piece.data) > most):
            groups.append([])
            size = 0
        groups[-1].append(piece)
        size += len(piece.data) + ALIGNMENT
    return groups


def _places(pieces: Sequence[Piece], start: int) -> tuple[tuple[Piece, int], ...]:
    places, at = [], start
    for piece in pieces:
        at += -at % ALIGNMENT
        places.append((piece, at))
        at += len(piece.data)
    return tuple(places)


def _safetensors(name: str, pieces: Sequence[Piece]) -> DataFile:
    """The format allows no holes: fillers, tensors of a reserved name, take the room between the tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "onnx", "filler": FILLER}}
    at = 0
    for index, (piece, offset) in enumerate(_places(pieces, 0)):
        if offset > at:
            header[f"{FILLER}{index}"] = {"dtype": "U8", "shape": [offset - at], "data_offsets": [at, offset]}
        at = offset + len(piece.data)
        dtype, shape = _type(piece)
        key = piece.name if piece.reserved else _free(piece.name or "constant", header)
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, at]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % PAGE)
    return DataFile(name, struct.pack("<Q", len(text)) + text, _places(pieces, 8 + len(text)))


def _free(name: str, taken: dict[str, Any]) -> str:
    """The name, or one like it: subgraphs may repeat names, and some are reserved."""
    wanted = f"_{name}" if name.startswith(RESERVED) else name
    count = 1
    while wanted in taken:
        count += 1
        wanted = f"{name}#{count}"
    return wanted


def _type(piece: Piece) -> tuple[str, list[int]]:
    """Type and shape in the format's words; types that it does not have are bytes, and the model knows better."""
    if piece.dtype in _NAMES and not piece.dtype.startswith(("FLOAT4", "FLOAT6")):
        return _NAMES[piece.dtype], list(piece.shape)
    return "U8", [len(piece.data)]


def _index(target: Path, files: Sequence[DataFile]) -> DataFile:
    """The usual index of shards, for other readers of safetensors; the model itself does not need it."""
    weight_map: dict[str, str] = {}
    for file in files:
        header = json.loads(file.head[8:])
        weight_map |= {key: file.name for key in header if key != "__metadata__" and not key.startswith(RESERVED)}
    total = sum(file.nbytes - len(file.head) for file in files)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return DataFile(f"{target.stem}.safetensors.index.json", json.dumps(index, indent=1).encode(), ())
