"""Operators on sequences and optionals: a sequence is a list of arrays, an empty optional is `None`."""

from __future__ import annotations

import math

import numpy as np

from ep.errors import InvalidInput
from ep.ops.axes import axis_of, ints, scalar
from ep.ops.movement import cut
from ep.registry import Body, Host, Outputs, ShapeOf, op

# Sequences


@op("SequenceEmpty", since=11)
def sequence_empty(xp, *, dtype=None):
    return []


@op("SequenceConstruct", since=11, out=(0,))
def sequence_construct(xp, *inputs):
    return list(inputs)


@op("SequenceLength", since=11)
def sequence_length(xp, sequence: ShapeOf):
    return np.asarray(len(sequence), np.int64)


@op("SequenceAt", since=11, out=(0,))
def sequence_at(xp, sequence, position: Host):
    return sequence[_position(position, len(sequence), len(sequence) - 1)]


@op("SequenceInsert", since=11)
def sequence_insert(xp, sequence, tensor, position: Host = None):
    n = len(sequence)
    i = n if position is None else _position(position, n, n)
    return [*sequence[:i], tensor, *sequence[i:]]


@op("SequenceErase", since=11)
def sequence_erase(xp, sequence, position: Host = None):
    n = len(sequence)
    i = _position(-1 if position is None else position, n, n - 1)
    return sequence[:i] + sequence[i + 1 :]


def _position(position, length: int, last: int) -> int:
    position = int(scalar(position))
    if -length <= position <= last:
        return position + length if position < 0 else position
    raise InvalidInput(
        f"position {position} does not exist in a sequence of {length} tensors.",
        why=f"positions from {-length} to {last} are allowed.",
    )


@op("SequenceMap", since=17)
def sequence_map(xp, sequence, *additional_inputs, body: Body, outputs: Outputs):
    inputs = (sequence, *additional_inputs)
    if any(isinstance(x, list) and len(x) != len(sequence) for x in inputs):
        lengths = [len(x) for x in inputs if isinstance(x, list)]
        raise InvalidInput(f"SequenceMap needs sequences of one length, but they have {lengths}.")
    rows = [body(*(x[i] if isinstance(x, list) else x for x in inputs)) for i in range(len(sequence))]
    return tuple([row[j] for row in rows] for j in range(outputs))


@op("SplitToSequence", since=11, out=(0,))
def split_to_sequence(xp, x, split: Host = None, *, axis=0, keepdims=1):
    axis = axis_of(axis, x.ndim)
    n = x.shape[axis]
    if split is None:
        parts = cut(xp, x, axis, (1,) * n)
        return [part if keepdims else xp.squeeze(part, axis=axis) for part in parts]
    if split.ndim == 0:
        size = int(split)
        split = [min(size, n - i * size) for i in range(math.ceil(n / size))]
    return list(cut(xp, x, axis, ints(split)))


@op("ConcatFromSequence", since=11, out=(0,))
def concat_from_sequence(xp, sequence, *, axis, new_axis=0):
    if not sequence:
        raise InvalidInput("ConcatFromSequence was given an empty sequence.", fix="give it one tensor or more.")
    if new_axis:
        return xp.stack(sequence, axis=axis_of(axis, sequence[0].ndim + 1))
    return xp.concatenate(sequence, axis=axis_of(axis, sequence[0].ndim))


# Optionals


@op("Optional", since=15, out=(0,))
def optional(xp, x=None, *, type=None):
    return x


@op("OptionalGetElement", since=15, out=(0,))
def optional_get_element(xp, x):
    if x is None:
        raise InvalidInput("OptionalGetElement was given an empty optional.", fix="ask OptionalHasElement first.")
    return x


@op("OptionalHasElement", since=15)
def optional_has_element(xp, x: ShapeOf = None):
    return np.asarray(x is not None)
