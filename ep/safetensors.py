"""What does a safetensors file hold, and where? Its header, checked before anything is believed."""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from ep.errors import InvalidModel
from ep.mapping import Content

# Tensors whose names start so are none of a model's: `ep pack` writes them, and readers by name leave them out.
FILLER = "__ep_filler_"  # padding
WIDE, KEPT = "__ep_wide_", "__ep_kept_"  # weights once more, in the dtype and in the form that a provider computes with
PLAN = "__ep_plan_"  # weights that were computed when the model was loaded
RESERVED = (FILLER, WIDE, KEPT, PLAN)
MOST_DIMS = 64  # as many as NumPy has
MOST_HEADER = 100_000_000  # bytes, a rule of the format
_LENGTH = struct.Struct("<Q")

# Bits of an element, and the ONNX data types (by their names in onnx_ir) that are stored so.
DTYPES: dict[str, tuple[int, tuple[str, ...]]] = {
    "BOOL": (8, ("BOOL",)),
    "U8": (8, ("UINT8",)),
    "I8": (8, ("INT8",)),
    "F8_E4M3": (8, ("FLOAT8E4M3FN",)),
    "F8_E4M3FNUZ": (8, ("FLOAT8E4M3FNUZ",)),
    "F8_E5M2": (8, ("FLOAT8E5M2",)),
    "F8_E5M2FNUZ": (8, ("FLOAT8E5M2FNUZ",)),
    "F8_E8M0": (8, ("FLOAT8E8M0",)),
    "F4": (4, ("FLOAT4E2M1",)),
    "F6_E2M3": (6, ("FLOAT6E2M3",)),
    "F6_E3M2": (6, ("FLOAT6E3M2",)),
    "I16": (16, ("INT16",)),
    "U16": (16, ("UINT16",)),
    "F16": (16, ("FLOAT16",)),
    "BF16": (16, ("BFLOAT16",)),
    "I32": (32, ("INT32",)),
    "U32": (32, ("UINT32",)),
    "F32": (32, ("FLOAT",)),
    "I64": (64, ("INT64",)),
    "U64": (64, ("UINT64",)),
    "F64": (64, ("DOUBLE",)),
    "C64": (64, ("COMPLEX64",)),
}
# Types without a name in the format are stored packed, as bytes: the model says what they are.
AS_BYTES = ("INT4", "UINT4", "INT2", "UINT2", "FLOAT4E2M1", "FLOAT6E2M3", "FLOAT6E3M2", "COMPLEX128")


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor: its dtype in the format's words, its shape, and where its bytes lie in the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def parse(content: Content, name: str) -> dict[str, Entry]:
    """Tensor name → entry of a whole file; reserved names are left out.

    Raises:
        InvalidModel: the header is damaged, lies about the file, or breaks a rule of the format.
    """
    problem, entries = _parse(content)
    if problem:
        raise InvalidModel(
            f"'{name}' is not a valid safetensors file.",
            why=problem,
            fix="copy or download the file again, or write it again with the safetensors library.",
        )
    return {key: entry for key, entry in entries.items() if not key.startswith(RESERVED)}


def _parse(content: Content) -> tuple[str, dict[str, Entry]]:
    """What is wrong, or nothing; and the tensors."""
    total = len(content)
    if total < _LENGTH.size:
        return f"it has {total} bytes; the header alone needs {_LENGTH.size}.", {}
    (length,) = _LENGTH.unpack(bytes(memoryview(content)[: _LENGTH.size]))
    start = _LENGTH.size + length
    if length > MOST_HEADER or start > total:
        return f"the header is said to have {length} bytes; the file has {total}, and {MOST_HEADER} are allowed.", {}
    try:
        header = json.loads(bytes(memoryview(content)[_LENGTH.size : start]), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        return f"the header is not valid JSON: {error}", {}
    if not isinstance(header, dict):
        return "the header is not a JSON object.", {}
    entries: dict[str, Entry] = {}
    for key, fields in header.items():
        if key == "__metadata__":
            continue
        made = _entry(fields, start, total)
        if isinstance(made, str):
            return f"tensor '{key[:200]}' {made}", {}
        entries[key] = made
    return _layout(entries, start, total), entries


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        (name, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the name {name[:200]!r} appears more than once")
    return found


def _entry(fields: Any, start: int, total: int) -> Entry | str:
    """The entry, or what is wrong with it."""
    if not isinstance(fields, dict):
        return "is not described by an object."
    dtype, shape, span = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        return f"has the unknown dtype {str(dtype)[:40]!r}."
    if not _naturals(shape) or len(shape) > MOST_DIMS or not _naturals(span) or len(span) != 2:
        return "has a shape or offsets that are not lists of whole numbers from 0 on."
    bits = DTYPES[dtype][0] * math.prod(shape)
    begin, end = span
    if begin > end or end > total - start:
        return f"lies at {begin}:{end}, outside the {total - start} bytes of data."
    if bits % 8 or bits // 8 != end - begin:
        return f"has {end - begin} bytes, and {dtype}{shape} needs {bits / 8:g}."
    return Entry(dtype, tuple(shape), start + begin, end - begin)


def _naturals(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 1 << 63 for v in value)


def _layout(entries: Mapping[str, Entry], start: int, total: int) -> str:
    """The format allows neither overlaps nor holes."""
    at = start
    for key, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if entry.offset != at:
            what = "overlaps the tensor before it" if entry.offset < at else "leaves a hole before it"
            return f"tensor '{key[:200]}' {what}: it starts at {entry.offset - start}, expected {at - start}."
        at += entry.nbytes
    return "" if at == total else f"the last {total - at} bytes belong to no tensor."


def shards(index: Path) -> dict[str, tuple[str, ...]]:
    """File name → the tensors that a `….safetensors.index.json` promises in it.

    Raises:
        InvalidModel: the index is damaged, or names files outside its folder.
    """
    try:
        weight_map = json.loads(index.read_bytes(), object_pairs_hook=_unique)["weight_map"]
        files: dict[str, list[str]] = {}
        for tensor, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file or file in ("", ".", "..") or "\0" in file:
                raise ValueError(f"it names the file {file!r}, which is not beside it")
            files.setdefault(file, []).append(tensor)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidModel(
            f"the index '{index.name}' cannot be read.",
            why=getattr(error, "strerror", None) or f"{type(error).__name__}: {error}",
            fix="copy the index and its shards again, all into one folder.",
        ) from error
    return {file: tuple(tensors) for file, tensors in files.items()}
