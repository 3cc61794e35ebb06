"""What must a stored executable tell about itself? Its arguments, results and constants; not all that was compiled.

XLA's CPU code is an executable in steps, machine code, and the module that it was compiled from. Loading builds that
module again, analyses, prints and prices it: five sixths of the time, measured, and nothing of it is run. Here most of
it is left out. What the loader asks for stays: parameters, constants, what gives the results, and the fusions that
XLA's kernel library builds anew from their bodies. Whatever these read is replaced by a call of the same name and
shape, that is never made: the steps are those of the whole module.

The messages are those of XLA's `hlo.proto` and `cpu/executable.proto`, by their field numbers; what is not named here
is passed on as it is. Where they are not as described, the executable stays whole.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

# They define no buffers of their own, but show or join those of others: they stay, and so does what they call.
_VIEWS = frozenset(
    (
        *("tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "optimization-barrier"),
        *("async-start", "async-update", "async-done"),
    )
)
_LEAVES = frozenset(("parameter", "constant"))
_KERNEL = "kCustom"  # the kind of fusions that are built from their bodies

# Message → {field: (number, type)}; a type that is followed by * is repeated.
_MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "Executable": {"result": (1, "Result")},
    "Result": {"module": (1, "Configured"), "assignment": (2, "Assignment")},
    "Configured": {"module": (1, "Module")},
    "Module": {
        "computations": (3, "Computation*"),
        "entry": (6, "int64"),
        "schedule": (7, "bytes"),
        "stack_frames": (17, "bytes"),
    },
    "Computation": {"instructions": (2, "Instruction*"), "id": (5, "int64"), "root": (6, "int64")},
    "Instruction": {
        "name": (1, "string"),
        "opcode": (2, "string"),
        "shape": (3, "bytes"),
        "metadata": (7, "bytes"),
        "fusion_kind": (11, "string"),
        "tuple_index": (13, "int64"),
        "target": (28, "string"),
        "id": (35, "int64"),
        "operands": (36, "int64*"),
        "after": (37, "int64*"),
        "calls": (38, "int64*"),
    },
    "Assignment": {
        "buffers": (1, "Buffer*"),
        "aliases": (2, "bytes*"),
        "allocations": (3, "Allocation*"),
        "traces": (4, "bytes*"),
        "peaks": (5, "bytes*"),
    },
    "Buffer": {"id": (1, "int64"), "defined": (3, "Position")},
    "Position": {"index": (3, "int64*"), "instruction": (4, "int64")},
    "Allocation": {"assigned": (9, "Assigned*"), "is_constant": (12, "bool")},
    "Assigned": {"buffer": (1, "int64")},
}


class _Unknown(Exception):
    """The executable is not of the form that is known here."""


def slim(data: bytes) -> bytes | None:
    """A serialized CPU executable without what only describes it; `None` where it is not as expected."""
    try:
        length, at = _varint(data)
        executable = _message("Executable").FromString(data[at + length :])
        _reduce(executable.result)
    except (DecodeError, IndexError, KeyError, _Unknown):
        return None
    return data[: at + length] + executable.SerializeToString()


def _reduce(result: Any) -> None:
    module, assignment = result.module.module, result.assignment
    computations = {c.id: c for c in module.computations}
    entry = computations[module.entry]
    positions = {b.id: (b.defined.instruction, tuple(b.defined.index)) for b in assignment.buffers}
    constants = {positions[a.assigned[0].buffer][0] for a in assignment.allocations if a.is_constant}
    whole, stubs = _needed(entry, computations, constants, set(positions.values()))
    kept = [i if i.id in whole else _stub(i) for i in entry.instructions if i.id in whole | stubs]
    called = _called(kept, computations)
    _replace(entry.instructions, kept)
    _replace(module.computations, [c for c in module.computations if c.id in called or c.id == module.entry])
    module.ClearField("schedule")
    module.ClearField("stack_frames")
    for instruction in entry.instructions:
        instruction.ClearField("after")
    for computation in module.computations:
        for instruction in computation.instructions:
            instruction.ClearField("metadata")
    there = {i.id for c in module.computations for i in c.instructions}
    buffers = {number for number, (instruction, _) in positions.items() if instruction in there}
    _replace(assignment.buffers, [b for b in assignment.buffers if b.id in buffers])
    for allocation in assignment.allocations:
        _replace(allocation.assigned, [a for a in allocation.assigned if a.buffer in buffers])
    for field in ("aliases", "traces", "peaks"):
        assignment.ClearField(field)


def _needed(
    entry: Any, computations: dict[int, Any], constants: set[int], positions: set[Any]
) -> tuple[set[int], set[int]]:
    """The instructions that stay as they are, and those of which the shape is enough."""
    by_id = {i.id: i for i in entry.instructions}
    whole: set[int] = set()
    stubs: set[int] = set()

    @functools.cache
    def holds(number: int) -> bool:
        """Whether a computation contains what has to stay."""
        return any(wanted(i) for i in computations[number].instructions)

    def wanted(i: Any) -> bool:
        return i.id in constants or i.fusion_kind == _KERNEL or (i.opcode != "fusion" and any(map(holds, i.calls)))

    waiting = [i for i in entry.instructions if i.opcode == "parameter" or wanted(i)]
    waiting.append(by_id[entry.root])
    results = _results(by_id, entry.root)
    while waiting:
        i = waiting.pop()
        if i.id in whole:
            continue
        if not (i.opcode in _VIEWS | _LEAVES or wanted(i)):  # a result, or what something reads
            stubs.add(i.id)
            continue
        whole.add(i.id)
        waiting += [by_id[o] for o in i.operands]
    if any(number in stubs and (number, index) not in positions for number, index in results):
        raise _Unknown  # a result has no buffer that the loader could find
    return whole, stubs - whole


def _results(by_id: dict[int, Any], root: int) -> Iterable[tuple[int, tuple[int, ...]]]:
    """Where results are defined, as far as views lead: an instruction, and the index within a tuple."""
    waiting: list[tuple[int, tuple[int, ...]]] = [(root, ())]
    while waiting:
        number, index = waiting.pop()
        i = by_id[number]
        if i.opcode == "get-tuple-element":
            waiting.append((i.operands[0], (i.tuple_index, *index)))
        elif i.opcode == "tuple" and not index:
            waiting += [(o, ()) for o in i.operands]
        elif i.opcode == "tuple":
            waiting.append((i.operands[index[0]], index[1:]))
        elif i.opcode == "bitcast":
            waiting.append((i.operands[0], index))
        else:
            yield number, index


def _stub(instruction: Any) -> Any:
    return type(instruction)(
        name=instruction.name,
        opcode="custom-call",
        target="left out",
        shape=instruction.shape,
        id=instruction.id,
    )


def _called(instructions: Iterable[Any], computations: dict[int, Any]) -> set[int]:
    """All computations that instructions call, and those that these call."""
    called: set[int] = set()
    waiting = [number for i in instructions for number in i.calls]
    while waiting:
        number = waiting.pop()
        if number not in called:
            called.add(number)
            waiting += [inner for i in computations[number].instructions for inner in i.calls]
    return called


def _replace(field: Any, messages: Iterable[Any]) -> None:
    """Let a repeated field hold these messages, which may be its own."""
    copies = [type(m).FromString(m.SerializeToString()) for m in messages]
    del field[:]
    field.extend(copies)


def _varint(data: bytes) -> tuple[int, int]:
    """A number in front of data, and where it ends."""
    value = 0
    for at, byte in enumerate(data[:10]):
        value |= (byte & 127) << 7 * at
        if byte < 128:
            return value, at + 1
    raise _Unknown


@functools.cache
def _message(name: str) -> Any:
    pool = descriptor_pool.DescriptorPool()
    field = descriptor_pb2.FieldDescriptorProto
    types = {"int64": field.TYPE_INT64, "bytes": field.TYPE_BYTES, "string": field.TYPE_STRING, "bool": field.TYPE_BOOL}
    file = descriptor_pb2.FileDescriptorProto(name="slim.proto", package="ep.slim", syntax="proto3")
    for message, fields in _MESSAGES.items():
        made = file.message_type.add(name=message)
        for label, (number, kind) in fields.items():
            base = kind.rstrip("*")
            repeated = field.LABEL_REPEATED if base != kind else field.LABEL_OPTIONAL
            entry = made.field.add(name=label, number=number, label=repeated)
            if base in types:
                entry.type = types[base]
            else:
                entry.type, entry.type_name = field.TYPE_MESSAGE, f".ep.slim.{base}"
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"ep.slim.{name}"))
