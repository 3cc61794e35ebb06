"""Operators that run subgraphs: If, Loop and Scan. Bodies are callables from arrays to a tuple of arrays.

A loop is a Python loop: eagerly that is all there is, and in a trace it is unrolled. Where the library
compiles loops (`xp.rolled_loops()`), longer ones become `xp.scan`, and those whose condition is computed on
the device `xp.while_loop`. What fits none of them raises `Untraceable`: the planner runs the loop eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import count
from typing import Any

import numpy as np

from ep.errors import EpError, InvalidInput
from ep.ops.axes import axis_of, ints, scalar
from ep.program import Untraceable
from ep.registry import Body, CountedBody, Else, Host, HostIfCheap, Outputs, Then, op
from ep.seeds import are_derived, varied

FEW = 4  # iterations that are cheaper unrolled than compiled as a loop
MANY = 64  # iterations that a library with compiled loops must not unroll: compile time would explode
TRUE = np.asarray(True)

Arrays = tuple[Any, ...]
State = tuple[Any, ...]  # arrays, lists of arrays, or None


@op("If", since=1)
def if_(xp, cond: HostIfCheap, *, then_branch: Then, else_branch: Else):
    if not isinstance(cond, np.ndarray):
        return tuple(_maybe_run(xp, xp.cond, xp.reshape(cond, ()), then_branch, else_branch))
    return tuple((then_branch if scalar(cond) else else_branch)())


def _maybe_run(xp, run: Callable[..., Any], *arguments: Any) -> Any:
    """Calls `run`. A trace runs bodies too that the condition would leave out: that one fails there decides nothing."""
    try:
        return run(*arguments)
    except EpError as error:
        if not xp.rolled_loops():
            raise
        raise Untraceable("a body that perhaps does not run fails on these shapes") from error


# Loop


@op("Loop", since=1)
def loop(xp, M: Host = None, cond: HostIfCheap = None, *v_initial: HostIfCheap, body: CountedBody, outputs: Outputs):
    """Without `cond` and with `M`, the condition that the body returns is ignored: the spec's for loop."""
    trips = None if M is None else int(scalar(M))
    tested = cond is not None or trips is None
    computed = cond is not None and not isinstance(cond, np.ndarray)
    if computed and xp.rolled_loops():
        return _maybe_run(xp, _while_loop, xp, trips, v_initial, body, cond)
    if (trips is not None and trips <= 0) or (cond is not None and not _truth(xp, cond)):
        first = (np.asarray(0, np.int64), TRUE, *v_initial)
        return *v_initial, *_no_rows(xp, body, first, 1 + len(v_initial), outputs - len(v_initial))
    if tested:
        count_trips = getattr(body, "trips", lambda *_: None)  # a plain function does not know
        known = count_trips(trips, v_initial)
        trips, tested = (known, False) if known is not None else (trips, tested)
    run = _rolled_loop if xp.rolled_loops() else _stepped_loop
    return run(xp, trips, tested, v_initial, body)


def _stepped_loop(xp, trips: int | None, tested: bool, state: State, body: Callable[..., Arrays], most: int = 0):
    rows = []
    for i in range(trips) if trips is not None else count():
        if most and (i == most or (not tested and trips > most)):
            raise Untraceable(f"a loop of more than {most} iterations cannot be compiled as one")
        keep, *results = body(np.asarray(i, np.int64), TRUE, *state)
        state, row = tuple(results[: len(state)]), results[len(state) :]
        rows.append(row)
        if tested and i + 1 != trips and not _truth(xp, keep):
            break
    return *state, *_stacked(xp, rows)


def _rolled_loop(xp, trips: int | None, tested: bool, state: State, body: Callable[..., Arrays]):
    """The first form that the body fits: a scan, unrolled, a while loop."""
    if trips is not None and trips > FEW and _all_arrays(state):
        try:
            return _counted_loop(xp, trips, tested, state, body)
        except Untraceable:  # the body reads its counter or its condition, or its state changes shape
            pass
    try:
        return _stepped_loop(xp, trips, tested, state, body, MANY)
    except Untraceable:
        if not _all_arrays(state):
            raise
    return _while_loop(xp, trips, state, body)


def _counted_loop(xp, trips: int, tested: bool, state: State, body: Callable[..., Arrays]):
    def step(carry: State, _: Arrays) -> tuple[State, Arrays]:
        i, *state = carry
        with varied(xp.astype(i, np.uint32)):
            keep, *results = body(i, TRUE, *state)
        if tested and not (isinstance(keep, np.ndarray) and keep.all()):
            raise Untraceable("the loop's condition is computed")
        state, row = _advance(xp, state, results)
        return (i + 1, *state), row

    (_, *state), columns = xp.scan(step, _counted(xp, state), (), length=trips)
    return *state, *columns


def _while_loop(xp, trips: int | None, state: State, body: Callable[..., Arrays], first: Any = TRUE):
    def go(carry: State) -> Any:
        i, keep, *_ = carry
        return keep if trips is None else xp.logical_and(keep, i < trips)

    def step(carry: State) -> State:
        i, _, *state = carry
        with varied(xp.astype(i, np.uint32)):
            keep, *results = body(i, TRUE, *state)
        state, row = _advance(xp, state, results)
        if row:
            raise Untraceable("how often the loop runs, and so the shape of its scan outputs, is computed")
        return i + 1, xp.reshape(xp.asarray(keep), ()), *state

    if not _all_arrays(state):
        raise Untraceable("the loop's state is not a tensor")
    i, *state = _counted(xp, state)
    return tuple(xp.while_loop(go, step, (i, xp.reshape(xp.asarray(first), ()), *state)))[2:]


def _counted(xp, state: State) -> Arrays:
    return tuple(map(xp.asarray, (np.asarray(0, np.int64), *state)))


def _advance(xp, carry: Sequence[Any], results: Sequence[Any]) -> tuple[State, Arrays]:
    """New state and scan outputs; a compiled loop needs the state to keep shapes and dtypes."""
    state, row = results[: len(carry)], tuple(map(xp.asarray, results[len(carry) :]))
    if not _all_arrays(state):
        raise Untraceable("the loop's state is not a tensor")
    state = tuple(map(xp.asarray, state))
    for old, new in zip(carry, state, strict=True):
        if tuple(old.shape) != tuple(new.shape) or xp.dtype_of(old) != xp.dtype_of(new):
            raise Untraceable(f"the loop's state changes from {old.shape} to {new.shape}")
    return state, row


def _all_arrays(state: Sequence[Any]) -> bool:
    return all(hasattr(value, "shape") for value in state)


def _truth(xp, keep: Any) -> bool:
    return bool(scalar(keep if isinstance(keep, np.ndarray) else xp.to_numpy(keep)))


def _stacked(xp, rows: Sequence[Sequence[Any]]) -> Arrays:
    return tuple(xp.stack([xp.asarray(x) for x in column]) for column in zip(*rows, strict=True))


def _no_rows(xp, body: Callable[..., Arrays], arguments: Sequence[Any], skip: int, count: int) -> Arrays:
    """Scan outputs of a loop that does not run: none of the elements that its body would give.

    The body tells their shapes, unless it fails for want of an element; then its declared types do, in which
    unknown dimensions count as 0.
    """
    if count == 0:
        return ()
    try:
        rows = [(xp.dtype_of(row), row.shape) for row in map(xp.asarray, body(*arguments)[skip:])]
    except EpError:
        rows = getattr(body, "declared", (None,) * (skip + count))[skip:]
        if None in rows:
            raise
    return tuple(xp.zeros((0, *(n or 0 for n in shape)), dtype=dtype) for dtype, shape in rows)


# Scan


@op("Scan", since=9)
def scan(
    xp,
    *initial_state_and_scan_inputs,
    num_scan_inputs,
    body: Body,
    outputs: Outputs,
    scan_input_axes=None,
    scan_input_directions=None,
    scan_output_axes=None,
    scan_output_directions=None,
):
    n = len(initial_state_and_scan_inputs) - num_scan_inputs
    state, inputs = initial_state_and_scan_inputs[:n], initial_state_and_scan_inputs[n:]
    axes, directions = scan_input_axes or (0,) * len(inputs), scan_input_directions or (0,) * len(inputs)
    inputs = [xp.moveaxis(x, axis_of(axis, x.ndim), 0) for x, axis in zip(inputs, axes, strict=True)]
    inputs = [_directed(x, direction) for x, direction in zip(inputs, directions, strict=True)]
    state, rows = _scan(xp, body, state, inputs, outputs - n)
    axes, directions = scan_output_axes or (0,) * len(rows), scan_output_directions or (0,) * len(rows)
    rows = [_directed(y, direction) for y, direction in zip(rows, directions, strict=True)]
    return *state, *(xp.moveaxis(y, 0, axis_of(axis, y.ndim)) for y, axis in zip(rows, axes, strict=True))


@op("Scan", since=8)
def scan_8(
    xp,
    sequence_lens: Host = None,
    *initial_state_and_scan_inputs,
    num_scan_inputs,
    body: Body,
    outputs: Outputs,
    directions=None,
):
    """Each element of the batch is scanned for itself; outputs behind its length are zeros."""
    n = len(initial_state_and_scan_inputs) - num_scan_inputs
    batch, longest = initial_state_and_scan_inputs[-1].shape[:2]
    if batch == 0:
        raise InvalidInput("Scan-8 was given an empty batch.", fix="give it one sequence or more.")
    lengths = (longest,) * batch if sequence_lens is None else ints(sequence_lens)
    results = []
    for i, length in enumerate(lengths):
        element = [x[i, ...] for x in initial_state_and_scan_inputs]
        inputs = [x[:length] for x in element[n:]]
        inputs = [_directed(x, d) for x, d in zip(inputs, directions or (0,) * num_scan_inputs, strict=True)]
        state, rows = _scan(xp, body, tuple(element[:n]), inputs, outputs - n)
        short = longest - length
        results.append((*state, *(xp.pad(y, [(0, short)] + [(0, 0)] * (y.ndim - 1)) for y in rows)))
    return _stacked(xp, results)


def _directed(x: Any, direction: int) -> Any:
    return x[::-1] if direction else x


def _scan(xp, body: Callable[..., Arrays], state: State, inputs: Sequence[Any], count: int) -> tuple[State, Arrays]:
    """Final state and stacked outputs of a scan along axis 0 of all inputs."""
    length = inputs[0].shape[0]
    if any(x.shape[0] != length for x in inputs):
        raise InvalidInput(f"the inputs that Scan takes apart have the lengths {[x.shape[0] for x in inputs]}.")
    if length == 0:
        first = [xp.zeros(x.shape[1:], dtype=xp.dtype_of(x)) for x in inputs]
        return state, _no_rows(xp, body, (*state, *first), len(state), count)

    counted = are_derived()  # random operators need to know the iteration

    def step(carry: State, x: Arrays) -> tuple[State, Arrays]:
        with varied(x[-1]) if counted else nullcontext():
            return _advance(xp, carry, body(*carry, *x[: len(inputs)]))

    if xp.rolled_loops() and length > FEW:
        positions = (xp.asarray(np.arange(length, dtype=np.uint32)),) if counted else ()
        try:
            return xp.scan(step, tuple(state), (*inputs, *positions))
        except Untraceable:  # the state changes shape
            if length > MANY:
                raise
    rows = []
    for i in range(length):
        results = body(*state, *(x[i, ...] for x in inputs))
        rows.append(results[len(state) :])
        state = tuple(results[: len(state)])
    return state, _stacked(xp, rows)
