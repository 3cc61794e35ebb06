"""How is a context written as bytes? A container: a checked header, then sections of graph and code.

    0    8 bytes   magic
    8    uint32    version of this format, 1
    12   uint32    bytes of the header
    16   uint64    bytes of the whole container
    24   32 bytes  SHA-256 of the header
    56   header    JSON, UTF-8: what `Container` holds, without graphs and code
    …    sections  graphs and code, each at the next multiple of 64, zeros before it

All numbers are little-endian. The header lists the sections with length and SHA-256, in their order; where one
begins follows from the lengths before it. Reading checks every length, hash, name and type, and that nothing is left
over; it runs nothing. Nothing in a container is a pickle. `docs/context.md` explains it at length.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ep.errors import InvalidModel

MAGIC = b"\x89EPC\r\n\x1a\n"  # a transfer as text, or through 7 bits, changes it
VERSION = 1
ALIGNMENT = 64
_PREFIX = struct.Struct("<8sIIQ32s")
_MOST_HEADER = 1 << 28  # bytes
_MOST_DIMENSION = 1 << 62
DTYPES = frozenset(
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128 bfloat16 "
    "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn "
    "int4 uint4 int2 uint2".split()
)
GRAPH, CODE = "onnx", "code"  # kinds of sections

Spec = tuple[tuple[int, ...], str]  # shape and dtype name
Data = bytes | memoryview


@dataclass(frozen=True, slots=True)
class Boundary:
    """A value that enters or leaves a partition: its true dtype, and its shape where the model declares one."""

    dtype: str
    shape: tuple[int | None, ...] | None = None
    packed: bool = False  # it crosses as the bytes of its elements, in a uint8 tensor


@dataclass(frozen=True, slots=True)
class Partition:
    """A subgraph that one EPContext node stands for: an ONNX model without weights, which are inputs of it."""

    name: str
    inputs: tuple[Boundary, ...]
    outputs: tuple[Boundary, ...]
    graph: Data


@dataclass(frozen=True, slots=True)
class Code:
    """A compiled function under the key of all that it depends on: `ep.identity.function_key`.

    One without arguments is a plan (`ep.stored_plan`): which functions a model calls, with what.
    """

    key: str
    arguments: tuple[Spec, ...]
    code: Data


@dataclass(frozen=True, slots=True)
class Cut:
    """What compiling found instead of code: the step of the group that cannot be traced."""

    key: str
    step: int


@dataclass(frozen=True, slots=True)
class Container:
    """What one blob holds: partitions, which run on any provider, and code for one device."""

    source: str  # such as "ep.jax"
    version: str  # of the library that made the code
    fingerprint: str  # what the code depends on beside its key
    partitions: tuple[Partition, ...] = ()
    codes: tuple[Code, ...] = ()
    cuts: tuple[Cut, ...] = ()

    @property
    def functions(self) -> tuple[Code, ...]:
        """The compiled functions, without the plans that say how to call them."""
        return tuple(code for code in self.codes if code.arguments)

    def entries(self) -> Iterator[Code | Cut]:
        """All that is found by a key."""
        yield from self.codes
        yield from self.cuts


def pack(container: Container) -> bytes:
    """Return the bytes of a container."""
    sections = [(GRAPH, p.graph) for p in container.partitions] + [(CODE, c.code) for c in container.codes]
    header = {
        "source": container.source,
        "version": container.version,
        "fingerprint": container.fingerprint,
        "partitions": [
            {"name": p.name, "inputs": list(map(_written, p.inputs)), "outputs": list(map(_written, p.outputs))}
            for p in container.partitions
        ],
        "codes": [{"key": c.key, "arguments": [[list(s), d] for s, d in c.arguments]} for c in container.codes],
        "cuts": [{"key": c.key, "step": c.step} for c in container.cuts],
        "sections": [{"kind": k, "length": len(d), "sha256": hashlib.sha256(d).hexdigest()} for k, d in sections],
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    parts, end = [text], _PREFIX.size + len(text)
    for _, data in sections:
        parts += [bytes(-end % ALIGNMENT), bytes(data)]
        end += -end % ALIGNMENT + len(data)
    return _PREFIX.pack(MAGIC, VERSION, len(text), end, hashlib.sha256(text).digest()) + b"".join(parts)


def _written(boundary: Boundary) -> list[Any]:
    shape = None if boundary.shape is None else list(boundary.shape)
    return [boundary.dtype, shape, boundary.packed]


def unpack(data: Data, name: str = "a context") -> Container:
    """Return the container of these bytes; its graphs and code are views of them.

    Raises:
        InvalidModel: the bytes are not a container, are damaged, or were written by another version.
    """
    try:
        view = memoryview(data)
        text, sections_end = _header(view)
        return _Reader(json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse)).read(view, sections_end)
    except (_Damaged, ValueError, RecursionError) as cause:
        raise damaged(name, str(cause)) from cause


def peek(path: Path) -> tuple[str, str]:
    """Source and fingerprint of the container in a file, from its header alone.

    Raises:
        OSError: the file cannot be read.
        InvalidModel: the header is damaged, or is of no container.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(_PREFIX.size)
        try:
            length, digest = _prefix(start, size)
            header = json.loads(_checked(file.read(length), digest))
            return str(header["source"]), str(header["fingerprint"])
        except (_Damaged, ValueError, RecursionError, KeyError, TypeError) as cause:
            raise damaged(f"'{path.name}'", str(cause)) from cause


def is_container(data: Data) -> bool:
    """Whether the bytes begin as a container does."""
    return bytes(data[: len(MAGIC)]) == MAGIC


def damaged(name: str, why: str) -> InvalidModel:
    """The error for bytes that are no context."""
    return InvalidModel(
        f"{name} cannot be read as a stored context.",
        why=why,
        fix="copy the file again; if it is complete, make the context again from the original model "
        "(ep compile MODEL -o MODEL_ctx.onnx), with the same version of ep-runtime that loads it.",
    )


class _Damaged(Exception):
    """Something in the bytes is not as it must be."""


def _require(condition: bool, why: str) -> None:
    if not condition:
        raise _Damaged(why)


def _header(view: memoryview) -> tuple[str, int]:
    """The text of the header, and where it ends."""
    length, digest = _prefix(view[: _PREFIX.size], len(view))
    end = _PREFIX.size + length
    return _checked(bytes(view[_PREFIX.size : end]), digest), end


def _prefix(start: Data, size: int) -> tuple[int, bytes]:
    """Length and hash of the header of a container of so many bytes."""
    _require(len(start) >= _PREFIX.size, f"it has {size} bytes, fewer than the {_PREFIX.size} of its prefix.")
    magic, version, length, total, digest = _PREFIX.unpack_from(start)
    _require(magic == MAGIC, f"it begins with {bytes(magic)!r} instead of {MAGIC!r}.")
    _require(version == VERSION, f"it is of version {version} of the format; this ep-runtime reads version {VERSION}.")
    _require(total == size, f"it has {size} bytes and says that it has {total}.")
    fits = length <= _MOST_HEADER and _PREFIX.size + length <= total
    _require(fits, f"its header of {length} bytes does not fit into it.")
    return length, digest


def _checked(header: bytes, digest: bytes) -> str:
    _require(hashlib.sha256(header).digest() == digest, "the header differs from its SHA-256.")
    return header.decode("utf-8")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    _require(len(found) == len(pairs), "an object of the header names a field twice.")
    return found


def _refuse(constant: str) -> Any:
    raise _Damaged(f"the header holds {constant}.")


class _Reader:
    """Reads a header field by field; whatever is missing, left over or of another type is damage."""

    def __init__(self, header: Any) -> None:
        self.header = header

    def read(self, view: memoryview, end: int) -> Container:
        header = fields(
            self.header, source=str, version=str, fingerprint=str, partitions=list, codes=list, cuts=list, sections=list
        )
        partitions = [fields(p, name=str, inputs=list, outputs=list) for p in header["partitions"]]
        codes = [fields(c, key=str, arguments=list) for c in header["codes"]]
        cuts = [fields(c, key=str, step=int) for c in header["cuts"]]
        kinds = [GRAPH] * len(partitions) + [CODE] * len(codes)
        sections = list(self._sections(view, end, header["sections"], kinds))
        keys = [key(entry["key"]) for entry in (*codes, *cuts)]
        distinct("key of a function", keys)
        distinct("partition", [p["name"] for p in partitions])
        _require(all(cut["step"] >= 0 for cut in cuts), "a step has a negative number.")
        graphs, code = sections[: len(partitions)], sections[len(partitions) :]
        return Container(
            header["source"],
            header["version"],
            header["fingerprint"],
            tuple(
                Partition(p["name"], tuple(map(boundary, p["inputs"])), tuple(map(boundary, p["outputs"])), graph)
                for p, graph in zip(partitions, graphs, strict=True)
            ),
            tuple(Code(c["key"], tuple(map(spec, c["arguments"])), data) for c, data in zip(codes, code, strict=True)),
            tuple(Cut(cut["key"], cut["step"]) for cut in cuts),
        )

    def _sections(
        self, view: memoryview, end: int, listed: Sequence[Any], kinds: Sequence[str]
    ) -> Iterator[memoryview]:
        _require(len(listed) == len(kinds), f"it lists {len(listed)} sections and needs {len(kinds)}.")
        for index, (entry, kind) in enumerate(zip(listed, kinds, strict=True)):
            section = fields(entry, kind=str, length=int, sha256=str)
            _require(section["kind"] == kind, f"section {index} is of kind {section['kind']!r}, not {kind!r}.")
            start = end + -end % ALIGNMENT
            _require(not any(view[end:start]), f"the bytes before section {index} are not zero.")
            end = start + section["length"]
            _require(
                section["length"] >= 0 and end <= len(view),
                f"section {index} ends at byte {end}; the container has {len(view)}.",
            )
            _require(
                hashlib.sha256(view[start:end]).hexdigest() == section["sha256"],
                f"section {index} ({kind}) differs from its SHA-256.",
            )
            yield view[start:end]
        _require(end == len(view), f"{len(view) - end} bytes are left over at its end.")


def fields(entry: Any, **types: type) -> dict[str, Any]:
    """The entry, which must be an object with exactly these fields."""
    _require(isinstance(entry, dict), f"the header has {type(entry).__name__} where an object belongs.")
    _require(entry.keys() == types.keys(), f"an object of the header has fields {sorted(entry)}, not {sorted(types)}.")
    for name, kind in types.items():
        _require(type(entry[name]) is kind, f"field {name!r} of the header is {type(entry[name]).__name__}.")
    return entry


def key(text: str) -> str:
    _require(re.fullmatch("[0-9a-f]{64}", text) is not None, f"{text[:80]!r} is not a key of a function.")
    return text


def distinct(what: str, items: Sequence[str]) -> None:
    twice = next((item for item in items if items.count(item) > 1), None) if len(set(items)) < len(items) else None
    _require(twice is None, f"the {what} {twice!r} occurs twice.")


def dtype(name: Any) -> str:
    _require(isinstance(name, str) and name in DTYPES, f"{str(name)[:80]!r} is not a dtype.")
    return name


def dimension(size: Any, unknown: bool) -> int | None:
    if size is None and unknown:
        return None
    _require(type(size) is int and 0 <= size < _MOST_DIMENSION, f"{str(size)[:80]!r} is not a dimension.")
    return size


def shape(listed: Any, unknown: bool) -> tuple[Any, ...]:
    _require(isinstance(listed, list), "a shape is not a list.")
    return tuple(dimension(size, unknown) for size in listed)


def spec(entry: Any) -> Spec:
    _require(isinstance(entry, list) and len(entry) == 2, "an argument is not a pair of shape and dtype.")
    return shape(entry[0], unknown=False), dtype(entry[1])


def boundary(entry: Any) -> Boundary:
    _require(isinstance(entry, list) and len(entry) == 3, "a boundary is not a triple of dtype, shape and packing.")
    kind, dims, packed = entry
    _require(type(packed) is bool, "packing is not true or false.")
    return Boundary(dtype(kind), None if dims is None else shape(dims, unknown=True), packed)
