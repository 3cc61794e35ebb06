"""Do If, Loop, Scan and sequences do what the specification says, eagerly and compiled, on every device?"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from conftest import parse, require

import ep
from ep.errors import InvalidInput
from ep.ops.control_flow import FEW, MANY, loop, scan
from ep.program import Untraceable

RAMP = np.arange(3, dtype=np.float32)
NUMBERS = np.random.default_rng(0)


@pytest.fixture(params=["on", "off"], ids=["compiled", "eager"])
def load(device: str, request: pytest.FixtureRequest) -> Any:
    """A model's text to its session."""

    def session(text: str, opset: int = 21) -> ep.InferenceSession:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ep.HostFallbackWarning)
            return ep.load(parse(text, f'"": {opset}'), device, options={"compile": request.param})

    return session


def check(session: ep.InferenceSession, wanted: list[Any], **feeds: Any) -> None:
    got = session.run(None, {name: np.asarray(value) for name, value in feeds.items()})
    for g, w in zip(got, wanted, strict=True):
        w = np.asarray(w)
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        np.testing.assert_allclose(g, w, rtol=1e-6)


# Loop

COUNTED = """
agraph (float[n] x, int64 trips) => (float[n] y, float[t, n] rows)
<bool go = {1}>
{ y, rows = Loop (trips, go, x)
    <body = each (int64 i, bool c, float[n] s) => (bool c_out, float[n] s_out, float[n] row) {
      c_out = Identity(c)  f = CastLike(i, s)  s_out = Add(s, f)  row = Mul(s_out, s_out) }> }
"""


@pytest.mark.parametrize("condition", ["go", ""])
def test_counted_loop_with_scan_outputs(load, condition):
    session = load(COUNTED.replace("go, x", f"{condition}, x"))
    for trips in (0, 1, FEW, FEW + 1, MANY + 1, 2):
        states = RAMP + np.cumsum(np.arange(trips, dtype=np.float32))[:, None]
        final = states[-1] if trips else RAMP
        check(session, [final, (states**2).reshape(trips, 3).astype(np.float32)], x=RAMP, trips=trips)


def test_without_a_condition_the_body_cannot_stop_a_counted_loop(load):
    session = load("""
        agraph (float x) => (float y)
        <int64 trips = {6}>
        { y = Loop (trips, , x) <body = each (int64 i, bool c, float s) => (bool stop, float s_out)
          <bool stop = {0}> { s_out = Add(s, s) }> }
    """)
    check(session, [np.float32(64)], x=np.float32(1))


def doubled(x: float, trips: float = np.inf) -> list[np.float32]:
    """The states of the loop above, the first included."""
    states = [np.float32(x)]
    while len(states) <= trips and (len(states) == 1 or states[-1] < 100):
        states.append(states[-1] * 2)
    return states


def test_the_condition_of_a_loop_is_computed(load):
    session = load("""
        agraph (float x) => (float y)
        <bool go = {1}, float limit = {100}>
        { y = Loop (, go, x) <body = each (int64 i, bool c, float s) => (bool c_out, float s_out) {
            s_out = Add(s, s)  c_out = Less(s_out, limit) }> }
    """)
    for x in (1, 3, 1000):
        check(session, [doubled(x)[-1]], x=np.float32(x))


def test_a_counted_loop_stops_early(load):
    session = load("""
        agraph (float x, int64 trips, bool go) => (float y)
        <float limit = {100}>
        { y = Loop (trips, go, x) <body = each (int64 i, bool c, float s) => (bool c_out, float s_out) {
            s_out = Add(s, s)  c_out = Less(s_out, limit) }> }
    """)
    for x, trips in ((1, 0), (1, 3), (1, 50), (1000, 3), (1000, 50), (1, np.iinfo(np.int64).max)):
        check(session, [doubled(x, trips)[-1]], x=np.float32(x), trips=np.int64(trips), go=True)
    check(session, [np.float32(1)], x=np.float32(1), trips=np.int64(3), go=False)


def test_a_computed_condition_decides_the_length_of_scan_outputs(load):
    session = load("""
        agraph (float x) => (float y, float[t] rows)
        <bool go = {1}, float limit = {100}>
        { y, rows = Loop (, go, x)
          <body = each (int64 i, bool c, float s) => (bool c_out, float s_out, float row) {
            s_out = Add(s, s)  c_out = Less(s_out, limit)  row = Neg(s) }> }
    """)
    for x in (1, 1000):
        *before, last = doubled(x)
        check(session, [last, -np.asarray(before)], x=np.float32(x))


def test_a_loop_whose_state_grows(load):
    session = load("""
        agraph (float[n] x, int64 trips) => (float[m] y)
        <bool go = {1}>
        { y = Loop (trips, go, x) <body = each (int64 i, bool c, float[k] s) => (bool c_out, float[l] s_out) {
            c_out = Identity(c)  s_out = Concat<axis = 0>(s, x) }> }
    """)
    for trips in (0, 2, FEW + 2):
        check(session, [np.tile(RAMP, trips + 1)], x=RAMP, trips=trips)


ROWS = """
agraph (float[n, 3] x) => (float[3] y)
<bool go = {1}, int64[1] one = {1}, int64[1] axis = {0}, int64 first = {0}, float[3] none = {0, 0, 0}>
{ shape = Shape(x)  n = Gather(shape, first)
  y = Loop (n, go, none) <body = each (int64 i, bool c, float[3] s) => (bool c_out, float[3] s_out) {
    c_out = Identity(c)  begin = Unsqueeze(i, axis)  end = Add(begin, one)
    row = Slice(x, begin, end, axis)  flat = Squeeze(row, axis)  s_out = Add(s, flat) }> }
"""


def test_the_counter_of_a_loop_decides_a_slice(load):
    session = load(ROWS)
    for rows in (0, 1, FEW + 1):
        x = NUMBERS.integers(0, 9, (rows, 3)).astype(np.float32)
        check(session, [x.sum(0)], x=x)


def test_a_short_loop_whose_counter_decides_a_slice_is_compiled_with_its_neighbours():
    require("jax")
    session = ep.load(parse(ROWS), "jax")
    assert "step by step" not in str(session.plan)
    for rows in (FEW + 1, MANY + 1):  # too many to unroll: it is cut, and stepped
        x = NUMBERS.integers(0, 9, (rows, 3)).astype(np.float32)
        check(session, [x.sum(0)], x=x)
        assert ("step by step" in str(session.plan)) is (rows > MANY)


def test_a_long_loop_that_looks_at_its_counter_stays_a_loop():
    """A condition that only the counter decides is computed inside: it does not unroll the loop."""
    require("jax")
    session = ep.load(
        parse("""
        agraph (float[n] x) => (float[n] y)
        <int64 trips = {1000}, int64 first = {0}, bool go = {1}>
        { y = Loop (trips, go, x) <body = each (int64 i, bool c, float[n] s) => (bool c_out, float[n] s_out) {
            c_out = Identity(c)  begins = Equal(i, first)
            s_out = If (begins) <then_branch = t () => (float[n] p) { p = Neg(s) },
                                 else_branch = e () => (float[n] q) { q = Add(s, x) }> }> }
    """),
        "jax",
    )
    check(session, [998 * RAMP], x=RAMP)
    assert "step by step" not in str(session.plan)


def test_loops_nest_and_read_the_outer_scopes(load):
    session = load("""
        agraph (float[n] x, int64 trips) => (float[n] y)
        <bool go = {1}>
        { y = Loop (trips, go, x)
          <body = outer (int64 i, bool c, float[n] s) => (bool c_out, float[n] s_out) {
            c_out = Identity(c)
            s_out = Loop (i, c, s)
            <body = inner (int64 j, bool d, float[n] t) => (bool d_out, float[n] t_out) {
              d_out = Identity(d)  f = CastLike(i, t)  g = Mul(f, x)  t_out = Add(t, g) }> }> }
    """)
    for trips in (0, 1, 3):
        check(session, [RAMP + RAMP * sum(i * i for i in range(trips))], x=RAMP, trips=trips)


def test_a_sequence_is_the_state_of_a_loop(load):
    session = load("""
        agraph (float[n] x, int64 trips) => (float[m] y)
        <bool go = {1}>
        { start = SequenceConstruct(x)
          all = Loop (trips, go, start)
            <body = each (int64 i, bool c, seq(float[n]) s) => (bool c_out, seq(float[n]) s_out) {
              c_out = Identity(c)  last = SequenceAt(s, i)  twice = Add(last, last)
              s_out = SequenceInsert(s, twice) }>
          y = ConcatFromSequence<axis = 0>(all) }
    """)
    for trips in (0, 2):
        check(session, [np.concatenate([RAMP * 2**i for i in range(trips + 1)])], x=RAMP, trips=trips)


# If


def test_branches_of_different_shapes(load):
    session = load("""
        agraph (float[n] x, bool twice) => (float[m] y)
        { y = If (twice) <then_branch = a () => (float[k] p) { p = Concat<axis = 0>(x, x) },
                          else_branch = b () => (float[n] q) { q = Neg(x) }> }
    """)
    check(session, [np.tile(RAMP, 2)], x=RAMP, twice=True)
    check(session, [-RAMP], x=RAMP, twice=False)


def test_a_computed_condition_chooses_a_branch_and_the_other_never_runs(load):
    """The division by zero of the branch not taken would be an error on the host."""
    session = load("""
        agraph (int32[n] x) => (int32[n] y)
        <int32 zero = {0}>
        { least = ReduceMin<keepdims = 0>(x)  safe = Greater(least, zero)
          y = If (safe) <then_branch = a () => (int32[n] p) { p = Div(x, x) },
                         else_branch = b () => (int32[n] q) { q = Neg(x) }> }
    """)
    check(session, [np.ones(2, np.int32)], x=np.asarray([2, 5], np.int32))
    check(session, [np.asarray([0, -5], np.int32)], x=np.asarray([0, 5], np.int32))


# Scan


def test_scan_along_other_axes_and_backwards(load):
    session = load("""
        agraph (float[2] s, float[3, t, 2] x) => (float[2] s_out, float[2, t] rows)
        <int64[1] axis = {0}>
        { s_out, rows = Scan <num_scan_inputs = 1, scan_input_axes = [1], scan_input_directions = [1],
            scan_output_axes = [-1], scan_output_directions = [1],
            body = each (float[2] a, float[3, 2] e) => (float[2] a_out, float[2] row) {
              m = ReduceSum<keepdims = 0>(e, axis)  a_out = Add(a, m)  row = Identity(a_out) }> (s, x) }
    """)
    for length in (0, 1, FEW + 3):
        x, s = NUMBERS.integers(0, 9, (3, length, 2)).astype(np.float32), np.ones(2, np.float32)
        states = s + np.cumsum(x.sum(0)[::-1], axis=0, dtype=np.float32)
        check(session, [states[-1] if length else s, states[::-1].T], s=s, x=x)


def test_scan_maps_without_state(load):
    session = load("""
        agraph (float[t, 2] x, float[t, 2] w) => (float[t, 2] products, float[t] sums)
        { products, sums = Scan <num_scan_inputs = 2,
            body = each (float[2] a, float[2] b) => (float[2] p, float s) {
              p = Mul(a, b)  s = ReduceSum<keepdims = 0>(p) }> (x, w) }
    """)
    for length in (1, FEW + 3):
        x, w = NUMBERS.integers(0, 9, (2, length, 2)).astype(np.float32)
        check(session, [x * w, (x * w).sum(1)], x=x, w=w)


def test_scan_takes_inputs_of_one_length(load):
    session = load("""
        agraph (float[t, 2] x, float[u, 2] w) => (float[t, 2] products)
        { products = Scan <num_scan_inputs = 2,
            body = each (float[2] a, float[2] b) => (float[2] p) { p = Mul(a, b) }> (x, w) }
    """)
    with pytest.raises(ep.EpError, match="lengths"):
        session.run(None, {"x": np.ones((3, 2), np.float32), "w": np.ones((2, 2), np.float32)})


def test_scan_8_stops_at_the_length_of_each_sequence(load):
    session = load(
        """
        agraph (int64[b] lengths, float[b, 2] s, float[b, t, 2] x) => (float[b, 2] s_out, float[b, t, 2] rows)
        { s_out, rows = Scan <num_scan_inputs = 1, directions = [1],
            body = each (float[2] a, float[2] e) => (float[2] a_out, float[2] row) {
              a_out = Add(a, e)  row = Identity(a_out) }> (lengths, s, x) }
        """,
        opset=8,
    )
    x, s = NUMBERS.integers(0, 9, (2, 3, 2)).astype(np.float32), np.ones((2, 2), np.float32)
    rows = np.zeros((2, 3, 2), np.float32)
    rows[0] = s[0] + np.cumsum(x[0, ::-1], axis=0)
    rows[1, :2] = s[1] + np.cumsum(x[1, 1::-1], axis=0)  # the last row lies behind the end
    check(session, [np.stack([rows[0, 2], rows[1, 1]]), rows], lengths=np.asarray([3, 2]), s=s, x=x)


# Sequences and optionals


def test_sequences_are_edited_by_position(load):
    session = load("""
        agraph (float[n] x, int64 at) => (float[m] y, int64 length)
        { z = Neg(x)  s = SequenceConstruct(x, z)  t = SequenceInsert(s, z, at)  u = SequenceErase(t)
          length = SequenceLength(u)  y = ConcatFromSequence<axis = 0>(u) }
    """)
    check(session, [np.concatenate([-RAMP, RAMP]), np.int64(2)], x=RAMP, at=-2)
    check(session, [np.concatenate([RAMP, -RAMP]), np.int64(2)], x=RAMP, at=2)
    with pytest.raises(InvalidInput, match="position 3 does not exist in a sequence of 2 tensors"):
        session.run(None, {"x": RAMP, "at": np.asarray(3)})


def test_split_to_sequence(load):
    session = load("""
        agraph (float[n] x) => (float[m] last, float one)
        <int64 two = {2}, int64 end = {-1}, int64[2] sizes = {1, 4}>
        { s = SplitToSequence(x, two)  last = SequenceAt(s, end)
          t = SplitToSequence<keepdims = 0>(x)  one = SequenceAt(t, end) }
    """)
    x = np.arange(5, dtype=np.float32)
    check(session, [x[4:], x[4]], x=x)


def test_an_empty_optional_is_asked_before_it_is_read(load):
    """Before it is known, it is an error to take the element: the branch that would is not run."""
    session = load("""
        agraph (float[n] x) => (float[n] y, bool some)
        { full = Optional(x)  some = OptionalHasElement(full)
          y = If (some) <then_branch = a () => (float[n] p) { p = OptionalGetElement(full) },
                         else_branch = b () => (float[n] q) { q = Neg(x) }> }
    """)
    check(session, [RAMP, np.bool_(True)], x=RAMP)


# What a library with compiled loops is given


def traced(function: Any, *arrays: np.ndarray) -> str:
    jax = pytest.importorskip("jax")
    with jax.enable_x64(True):
        return str(jax.make_jaxpr(function)(*arrays))


def each(i: Any, c: Any, s: Any) -> tuple[Any, ...]:
    return np.asarray(True), s + 1


def test_long_loops_are_compiled_as_loops_and_short_ones_unrolled():
    xp = pytest.importorskip("ep.backends.jax.namespace")

    def run(trips: int) -> str:
        return traced(lambda x: loop(xp, np.asarray(trips), None, x, body=each, outputs=1), RAMP)

    assert "scan" in run(10**6) and "scan" not in run(FEW)
    step = lambda s, x: (s + x, s)  # noqa: E731
    assert "scan" in traced(
        lambda s, x: scan(xp, s, x, num_scan_inputs=1, body=step, outputs=2), RAMP[0], RAMP.repeat(9)
    )


def test_a_computed_condition_is_compiled_as_a_while_loop():
    xp = pytest.importorskip("ep.backends.jax.namespace")

    def body(i: Any, c: Any, s: Any) -> tuple[Any, ...]:
        return xp.sum(s, axis=0) < 100, s * 2

    assert "while" in traced(lambda x: loop(xp, None, np.asarray(True), x, body=body, outputs=1), RAMP)
    with pytest.raises(Untraceable, match="scan outputs"):
        rows = lambda i, c, s: (*body(i, c, s), s)  # noqa: E731
        traced(lambda x: loop(xp, None, np.asarray(True), x, body=rows, outputs=2), RAMP)


def test_a_long_loop_that_must_be_unrolled_is_cut():
    xp = pytest.importorskip("ep.backends.jax.namespace")
    grow = lambda i, c, s: (c, xp.concatenate([s, s[:1]]))  # noqa: E731
    with pytest.raises(Untraceable, match="state changes from"):
        traced(lambda x: loop(xp, np.asarray(MANY + 1), None, x, body=grow, outputs=1), RAMP)


def test_a_loop_over_nothing_takes_shapes_from_the_declared_types():
    import ep.host_namespace as xp

    def body(i: Any, c: Any) -> tuple[Any, ...]:
        raise InvalidInput("there is no element 0.")

    with pytest.raises(InvalidInput, match="no element 0"):
        loop(xp, np.asarray(0), None, body=body, outputs=1)
    body.declared = ((np.dtype(bool), ()), (np.dtype(np.int32), (2, None)))  # type: ignore[attr-defined]
    (rows,) = loop(xp, np.asarray(0), None, body=body, outputs=1)
    assert rows.shape == (0, 2, 0) and rows.dtype == np.int32


# Random numbers


def test_each_iteration_has_random_numbers_of_its_own(load):
    session = load("""
        agraph (float[n] x, int64 trips) => (float[t] counted, float[n] scanned, float[p, q] nested, float last)
        <float zero = {0}, float limit = {5}, bool go = {1}> {
        counted = Loop (trips, go) <body = a (int64 i, bool c) => (bool c, float r) { r = RandomUniformLike(zero) }>
        scanned = Scan <num_scan_inputs = 1, body = b (float v) => (float w) {
            r = RandomUniformLike(v)  w = Add(r, v) }> (x)
        nested = Loop (trips, go) <body = d (int64 i, bool c) => (bool c, float[q] row) {
            row = Loop (trips, go) <body = e (int64 j, bool k) => (bool k, float r) {
                r = RandomUniformLike(zero) }> }>
        last = Loop (, go, zero) <body = f (int64 i, bool c, float s) => (bool more, float t) {
            r = RandomUniformLike(zero)  t = Add(s, r)  more = Less(t, limit) }> }""")
    numbers = [session.run(None, {"x": np.zeros(9, np.float32), "trips": np.asarray(9, np.int64)}) for _ in range(2)]
    drawn = np.concatenate([a.ravel() for results in numbers for a in results[:3]])
    assert len(drawn) == 2 * (9 + 9 + 81)
    assert len(np.unique(drawn)) > len(drawn) - 3  # float32 has 2**23 numbers between 0 and 1
    assert abs(drawn.mean() - 0.5) < 0.1
    assert all(5 <= results[3] < 6 for results in numbers)
