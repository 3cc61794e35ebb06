"""Where does a model file keep its large tensors? A scan of protobuf's wire format, without parsing them.

Protobuf would copy every tensor, some of them twice. `skeleton` writes the model again without the data of its
large tensors: each becomes external data of the location `IN_FILE`, which is the model file itself. Only what must
be understood for that is read; everything else is passed on as it is, for protobuf to judge.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

IN_FILE = "\0model"  # no file can have this name
LARGE = 1024  # bytes of tensor data that are worth mapping; `ep.partition` compiles in what is smaller
MOST_DEPTH = 50  # of graphs in graphs; what lies deeper is left to protobuf

# Message → {field number: message}, for the fields through which tensors are reached.
_FIELDS: dict[str, dict[int, str]] = {
    "model": {7: "graph", 25: "function"},
    "graph": {1: "node", 5: "tensor"},
    "function": {7: "node"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph"},
}
_DATA_TYPE, _RAW, _EXTERNAL, _LOCATION = 2, 9, 13, 14  # fields of TensorProto
# Numbers that protobuf packs exactly as they lie in memory: field → the data types of which this holds.
_PACKED = {4: (1, 14), 10: (11, 15)}  # float_data: FLOAT, COMPLEX64; double_data: DOUBLE, COMPLEX128
_OTHER_DATA = (5, 6, 7, 11, _EXTERNAL, _LOCATION)  # int32_data, string_data, int64_data, uint64_data, and elsewhere


class Malformed(Exception):
    """The bytes are not what this scan understands; protobuf has to say what they are."""


def skeleton(content: Any) -> bytes:
    """The model in `content` (any buffer of bytes) without its large tensors, as bytes for protobuf."""
    view = memoryview(content)
    try:
        pieces = _rewrite(view, 0, len(view), "model", 0)
    except (Malformed, IndexError):
        pieces = None
    return bytes(view) if pieces is None else b"".join(pieces)


def _rewrite(view: memoryview, start: int, end: int, kind: str, depth: int) -> list[Any] | None:
    """The message in `view[start:end]` as pieces, or `None` where it stays as it is."""
    if depth > MOST_DEPTH:
        return None
    if kind == "tensor":
        return _without_data(view, start, end)
    children = _FIELDS[kind]
    pieces: list[Any] = []
    copied = start
    for _, tag_end, number, wire, first, stop in _fields(view, start, end):
        if stop - first < LARGE or wire != 2 or number not in children:
            continue
        child = children[number]
        inner = _rewrite(view, first, stop, child, depth + (child == "graph"))
        if inner is not None:
            pieces += [view[copied:tag_end], _varint(sum(map(len, inner))), *inner]
            copied = stop
    return [*pieces, view[copied:end]] if pieces else None


def _without_data(view: memoryview, start: int, end: int) -> list[Any] | None:
    """A TensorProto whose data, if it has large data of one kind, is replaced by where it lies."""
    data_type, found = 0, []
    for position, tag_end, number, wire, first, stop in _fields(view, start, end):
        if number == _DATA_TYPE and wire == 0:
            data_type = _number(view, tag_end)[0]
        elif number == _RAW or number in _PACKED:
            found.append((number, wire, position, first, stop))
        elif number in _OTHER_DATA:
            return None
    if len(found) != 1:
        return None
    number, wire, position, first, stop = found[0]
    if wire != 2 or stop - first < LARGE or data_type not in _PACKED.get(number, (data_type,)):
        return None
    entries = _LOCATED + _entry(b"offset", first) + _entry(b"length", stop - first)
    return [view[start:position], entries, view[stop:end]]


def _entry(key: bytes, value: int | str) -> bytes:
    """One of a tensor's `external_data`."""
    return _field(_EXTERNAL, _field(1, key) + _field(2, str(value).encode()))


def _field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(content)) + content


def _fields(view: memoryview, position: int, end: int) -> Iterator[tuple[int, int, int, int, int, int]]:
    """(start, end of its tag, number, wire type, start of its content, end) of each field; most varints are a byte."""
    while position < end:
        start = position
        tag = view[position]
        position += 1
        if tag > 127:
            tag, position = _number(view, start)
        tag_end, wire = position, tag & 7
        if wire == 2:
            length = view[position]
            position += 1
            if length > 127:
                length, position = _number(view, tag_end)
            first, position = position, position + length
        elif wire == 0:
            first, position = position, _number(view, position)[1]
        elif wire in (1, 5):
            first, position = position, position + (8 if wire == 1 else 4)
        else:
            raise Malformed
        if position > end:
            raise Malformed
        yield start, tag_end, tag >> 3, wire, first, position


def _number(view: memoryview, position: int) -> tuple[int, int]:
    """A varint and the position after it."""
    byte = view[position]
    if byte < 128:
        return byte, position + 1
    value, shift = byte & 127, 7
    while byte >= 128:
        position += 1
        byte = view[position]
        value |= (byte & 127) << shift
        shift += 7
        if shift > 70:
            raise Malformed
    return value, position + 1


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


_LOCATED = bytes([_LOCATION << 3, 1]) + _entry(b"location", IN_FILE)
