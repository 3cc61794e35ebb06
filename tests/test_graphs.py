"""Do whole graphs mean what the specification says: subgraphs, loops, functions, several domains and opsets?

The expected values are derived by hand from the graphs.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import onnx
import pytest
from conftest import parse

import ep

RAMP = np.arange(6, dtype=np.float32)
MODES = {"compiled": "on", "eager": "off"}


@pytest.fixture(params=list(MODES))
def mode(request: pytest.FixtureRequest) -> str:
    return request.param


def load(model: Any, device: str, mode: str) -> ep.InferenceSession:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ep.HostFallbackWarning)
        return ep.load(model, device, options={"compile": MODES[mode]})


# Order.


@pytest.mark.parametrize("inside", [False, True], ids=["main", "branch"])
def test_nodes_may_come_in_any_order(device: str, mode: str, inside: bool) -> None:
    """Exporters write such files, though the specification wants nodes sorted."""
    body = "double = Add(x, x)\ny = Neg(double)"
    if inside:
        body = f"y = If (yes) <then_branch = t () => (float[n] r) {{ {body.replace('y =', 'r =')} }}, "
        body += "else_branch = e () => (float[n] r) { r = Identity(x) }>"
    model = parse(f"agraph (float[n] x, bool yes) => (float[n] y) {{ {body} }}")
    graph = model.graph.node[0].attribute[0].g if inside else model.graph
    first, second = graph.node
    swapped = [onnx.NodeProto.FromString(node.SerializeToString()) for node in (second, first)]
    del graph.node[:]
    graph.node.extend(swapped)
    (got,) = load(model, device, mode).run(None, {"x": RAMP, "yes": np.array(True)})
    np.testing.assert_array_equal(got, -2 * RAMP)


# If.


def test_if_follows_a_condition_computed_on_the_device(device: str, mode: str) -> None:
    """The branches give different shapes, which no single trace can hold."""
    model = parse("""
        agraph (float[n] x) => (float[m] y)
        <float zero = {0.0}, int64[1] first = {0}, int64[1] two = {2}>
        {
            total = ReduceSum<keepdims=0>(x)
            positive = Greater(total, zero)
            z = If (positive) <
                then_branch = one () => (float[a] head) { head = Slice(x, first, two) },
                else_branch = other () => (float[b] twice) { twice = Concat<axis=0>(x, x) }
            >
            y = Neg(z)
        }
    """)
    session = load(model, device, mode)
    for _ in range(2):
        np.testing.assert_array_equal(session.run(None, {"x": RAMP})[0], -RAMP[:2])
        np.testing.assert_array_equal(session.run(None, {"x": -RAMP})[0], np.tile(RAMP, 2))


def test_if_follows_a_fed_condition(device: str, mode: str) -> None:
    model = parse("""
        agraph (bool c, float[n] x) => (float[n] y)
        {
            y = If (c) <
                then_branch = one () => (float[n] p) { p = Exp(x) },
                else_branch = other () => (float[n] q) { q = Identity(x) }
            >
        }
    """)
    session = load(model, device, mode)
    for condition, want in ((True, np.exp(RAMP)), (False, RAMP), (True, np.exp(RAMP))):
        (y,) = session.run(None, {"c": np.array(condition), "x": RAMP})
        np.testing.assert_allclose(y, want, rtol=1e-6)


def test_only_the_chosen_branch_runs(device: str, mode: str) -> None:
    """The other branch would fail: it reshapes 6 elements to 4."""
    model = parse("""
        agraph (bool c, float[n] x) => (float[m] y)
        <int64[1] six = {6}, int64[1] four = {4}>
        {
            y = If (c) <
                then_branch = one () => (float[p] a) { a = Reshape(x, six) },
                else_branch = other () => (float[q] b) { b = Reshape(x, four) }
            >
        }
    """)
    session = load(model, device, mode)
    np.testing.assert_array_equal(session.run(None, {"c": np.array(True), "x": RAMP})[0], RAMP)
    with pytest.raises(ep.ExecutionError, match="Reshape"):
        session.run(None, {"c": np.array(False), "x": RAMP})


def test_a_branch_that_a_computed_condition_leaves_out_never_fails(device: str, mode: str) -> None:
    model = parse(
        """
        agraph (float[n] x, float limit) => (float[m] y, float[n] z)
        <int64[1] six = {6}, int64[1] four = {4}, int64 three = {3}>
        {
            most = ReduceMax <keepdims = 0> (x)
            small = Less (most, limit)
            y = If (small) <
                then_branch = one () => (float[p] a) { a = Reshape(x, six) },
                else_branch = other () => (float[q] b) { b = Reshape(x, four) }
            >
            z = Loop (three, small, x) <
                body = never (int64 i, bool going, float[n] v) => (bool more, float[n] w)
                { w = Reshape(v, four)  t = ReduceMax <keepdims = 0> (w)  more = Less(t, limit) }
            >
        }
    """
    )
    session = load(model, device, mode)
    four = np.arange(4, dtype=np.float32)
    y, z = session.run(None, {"x": four, "limit": np.float32(-1)})
    np.testing.assert_array_equal(y, four)
    np.testing.assert_array_equal(z, four)
    with pytest.raises(ep.ExecutionError, match="Reshape"):
        session.run(None, {"x": four, "limit": np.float32(100)})
    six = np.arange(6, dtype=np.float32)
    with pytest.raises(ep.ExecutionError, match="Reshape"):
        session.run(None, {"x": six, "limit": np.float32(-1)})


# Loop.

POWERS = """
    agraph (int64 most, float limit) => (float last, float[k] all)
    <float one = {1.0}, float two = {2.0}, bool yes = {1}>
    {
        last, all = Loop (most, yes, one) <
            body = doubling (int64 i, bool going, float v) => (bool more, float w, float kept)
            { w = Mul(v, two)  more = Less(w, limit)  kept = Identity(v) }
        >
    }
"""


@pytest.mark.parametrize(
    ("most", "limit", "last", "kept"),
    [
        (3, 1e9, 8, [1, 2, 4]),  # the count ends it
        (10, 5, 8, [1, 2, 4]),  # the condition ends it: 8 is the first that is not less than 5
        (1, 0, 2, [1]),  # one trip always runs when the first condition holds
        (0, 1e9, 1, []),  # no trip: the initial value, and an empty scan output
    ],
)
def test_loop_ends_by_count_or_condition(
    device: str, mode: str, most: int, limit: float, last: float, kept: list[float]
) -> None:
    session = load(parse(POWERS), device, mode)
    got_last, got_kept = session.run(None, {"most": np.array(most), "limit": np.float32(limit)})
    assert got_last.shape == () and got_last == last
    assert got_kept.dtype == np.float32 and got_kept.shape == (len(kept),)
    np.testing.assert_array_equal(got_kept, kept)


def test_loop_trip_count_from_data(device: str, mode: str) -> None:
    """The largest element says how often; each trip appends its number, so the carried shape grows."""
    model = parse("""
        agraph (float[n] x) => (float[m] y)
        <bool yes = {1}, int64[1] whole = {-1}>
        {
            largest = ReduceMax<keepdims=0>(x)
            count = Cast<to=7>(largest)
            empty = Slice(x, whole, whole)
            y = Loop (count, yes, empty) <
                body = grow (int64 i, bool going, float[a] v) => (bool more, float[b] w)
                { f = Cast<to=1>(i)  g = Reshape(f, whole)  w = Concat<axis=0>(v, g)  more = Identity(going) }
            >
        }
    """)
    session = load(model, device, mode)
    for count in (3, 5, 0, 3):
        (y,) = session.run(None, {"x": np.array([0, count, -1], np.float32)})
        np.testing.assert_array_equal(y, np.arange(count))


def test_nested_bodies_capture_outer_values(device: str, mode: str) -> None:
    """A Loop whose body holds an If whose branches hold values of the feed, of a weight and of both bodies.

    Trip i adds weight · x when i is even, and subtracts the carried value's own negative (doubles it) when odd:
    0 → 10x → 20x → 30x, for three trips and a weight of 10.
    """
    model = parse("""
        agraph (float[n] x, int64 trips) => (float[n] y)
        <float ten = {10.0}, float zero = {0.0}, bool yes = {1}, int64 two = {2}, int64 none = {0}>
        {
            scaled = Mul(x, ten)
            start = Mul(x, zero)
            y = Loop (trips, yes, start) <
                body = outer (int64 i, bool going, float[n] v) => (bool more, float[n] w)
                {
                    rest = Mod(i, two)
                    even = Equal(rest, none)
                    minus = Neg(v)
                    w = If (even) <
                        then_branch = adds () => (float[n] a) { a = Add(v, scaled) },
                        else_branch = doubles () => (float[n] b) { b = Sub(v, minus) }
                    >
                    more = Identity(going)
                }
            >
        }
    """)
    session = load(model, device, mode)
    for trips, factor in ((0, 0), (1, 10), (2, 20), (3, 30), (4, 60)):
        (y,) = session.run(None, {"x": RAMP, "trips": np.array(trips)})
        np.testing.assert_array_equal(y, factor * RAMP)


def test_loop_carries_sequences(device: str, mode: str) -> None:
    model = parse("""
        agraph (float[n] x, int64 trips) => (seq(float[n]) parts, float[m] joined)
        <bool yes = {1}>
        {
            empty = SequenceEmpty<dtype=1>()
            parts = Loop (trips, yes, empty) <
                body = collect (int64 i, bool going, seq(float[n]) s) => (bool more, seq(float[n]) t)
                { f = Cast<to=1>(i)  v = Add(x, f)  t = SequenceInsert(s, v)  more = Identity(going) }
            >
            joined = ConcatFromSequence<axis=0>(parts)
        }
    """)
    parts, joined = load(model, device, mode).run(None, {"x": RAMP, "trips": np.array(2)})
    assert len(parts) == 2
    np.testing.assert_array_equal(parts[1], RAMP + 1)
    np.testing.assert_array_equal(joined, np.concatenate([RAMP, RAMP + 1]))


def test_scan_threads_a_state_and_stacks_outputs(device: str, mode: str) -> None:
    model = parse("""
        agraph (float[2] start, float[t, 2] rows) => (float[2] total, float[t, 2] running)
        {
            total, running = Scan<num_scan_inputs = 1,
                body = step (float[2] s, float[2] row) => (float[2] next, float[2] out)
                { next = Add(s, row)  out = Identity(next) }
            >(start, rows)
        }
    """)
    session = load(model, device, mode)
    rows = np.array([[1, 2], [3, 4], [5, 6]], np.float32)
    total, running = session.run(None, {"start": np.array([10, 20], np.float32), "rows": rows})
    np.testing.assert_array_equal(total, [19, 32])
    np.testing.assert_array_equal(running, [[11, 22], [14, 26], [19, 32]])


# Functions, domains, opsets.


def test_model_local_functions_nest_and_take_attributes(device: str, mode: str) -> None:
    model = parse(
        """
        agraph (float[n] x) => (float[n] y) { a = local.twice<by=3.0>(x)  y = local.twice<by=-1.0>(a) }
        <domain: "local", opset_import: ["": 21, "local": 1]>
        twice <by> (v) => (r) { s = local.scale<factor: float = @by>(v)  r = Add(s, v) }
        <domain: "local", opset_import: ["": 21]>
        scale <factor> (v) => (r) { f = Constant<value_float: float = @factor>()  r = Mul(v, f) }
        """,
        '"": 21, "local": 1',
    )
    session = load(model, device, mode)
    np.testing.assert_array_equal(session.run(None, {"x": RAMP + 1})[0], np.zeros(6))  # (1 + 3) · (1 - 1)
    model.graph.node[1].attribute[0].f = 2.0
    np.testing.assert_array_equal(load(model, device, mode).run(None, {"x": RAMP})[0], 12 * RAMP)


def test_function_of_another_compatible_opset(device: str, mode: str) -> None:
    model = parse(
        """
        agraph (float[n] x) => (float[n] y) { y = local.positive(x) }
        <domain: "local", opset_import: ["": 18]> positive (v) => (r) { r = Relu(v) }
        """,
        '"": 21, "local": 1',
    )
    np.testing.assert_array_equal(load(model, device, mode).run(None, {"x": RAMP - 2})[0], [0, 0, 0, 1, 2, 3])


def test_several_domains_in_one_model(device: str, mode: str) -> None:
    """Scaler: (x - 1) · 2; then com.microsoft's Gelu, exact at 0; then ONNX's own Gelu of opset 20."""
    model = parse(
        """
        agraph (float[1, 3] x) => (float[1, 3] y)
        {
            s = ai.onnx.ml.Scaler<offset = [1.0], scale = [2.0]>(x)
            g = com.microsoft.Gelu(s)
            y = Gelu(g)
        }
        """,
        '"": 20, "ai.onnx.ml": 3, "com.microsoft": 1',
    )
    (y,) = load(model, device, mode).run(None, {"x": np.array([[1, 21, -19]], np.float32)})
    np.testing.assert_allclose(y, [[0, 40, 0]], atol=1e-6)


def test_the_opset_decides_the_meaning(device: str, mode: str) -> None:
    """Softmax of opset 11 normalises over all axes from `axis` on, that of opset 13 over `axis` alone."""
    text = "agraph (float[2, 2, 2] x) => (float[2, 2, 2] y) { y = Softmax<axis=1>(x) }"
    x = np.zeros((2, 2, 2), np.float32)
    for opset, share in ((11, 0.25), (13, 0.5)):
        (y,) = load(parse(text, f'"": {opset}'), device, mode).run(None, {"x": x})
        np.testing.assert_array_equal(y, np.full((2, 2, 2), share))


# Shapes that only data decide.


def test_nonzero_in_the_middle(device: str, mode: str) -> None:
    model = parse("""
        agraph (float[n] x) => (float[m] y, int64[1, k] where)
        {
            p = Relu(x)
            where = NonZero(p)
            t = Squeeze(where)
            g = Gather(p, t)
            y = Mul(g, g)
        }
    """)
    session = load(model, device, mode)
    for x, y, where in (
        ([0, 2, -1, 3], [4, 9], [[1, 3]]),
        ([5, -5, 0, 0], [25], [[0]]),
        ([-1, -2, -3, 0], [], np.zeros((1, 0))),
    ):
        if len(y) == 1:
            continue  # Squeeze would drop the only element's axis as well
        got_y, got_where = session.run(None, {"x": np.array(x, np.float32)})
        np.testing.assert_array_equal(got_y, y)
        np.testing.assert_array_equal(got_where, where)
        assert got_where.dtype == np.int64


def test_shape_arithmetic(device: str, mode: str) -> None:
    """As exporters write `x.view(x.size(0) // 2, -1)`."""
    model = parse("""
        agraph (float[n, m] x) => (float[a, b] y)
        <int64 zero = {0}, int64 two = {2}, int64[1] rest = {-1}, int64[1] axis = {0}>
        {
            z = Neg(x)
            shape = Shape(z)
            rows = Gather<axis=0>(shape, zero)
            half = Div(rows, two)
            first = Unsqueeze(half, axis)
            target = Concat<axis=0>(first, rest)
            y = Reshape(z, target)
        }
    """)
    session = load(model, device, mode)
    for n, m in ((4, 3), (6, 1), (4, 3)):
        x = np.arange(n * m, dtype=np.float32).reshape(n, m)
        np.testing.assert_array_equal(session.run(None, {"x": x})[0], -x.reshape(n // 2, -1))


# Weights of half precision.


def half_model(w: np.ndarray, v: np.ndarray) -> onnx.ModelProto:
    graph = onnx.parser.parse_graph("""
        agraph (float16[n,32] x, int64[2] rows) => (float16[n,32] y, float16[2,32] picked, float16[n,32] z)
        {
            y = MatMul(x, w)
            picked = Gather(v, rows)
            z = Gemm<transB=1>(x, v)
        }
    """)
    graph.initializer.extend([onnx.numpy_helper.from_array(w, "w"), onnx.numpy_helper.from_array(v, "v")])
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)


def test_products_with_half_weights_round_once(device: str, mode: str) -> None:
    """`v` is also gathered from, so that it must stay what it is; `w` may be held wider."""
    rng = np.random.default_rng(0)
    x, w, v = (rng.normal(size=(3 if i == 0 else 32, 32)).astype(np.float16) for i in range(3))
    session = load(half_model(w, v), device, mode)
    for _ in range(2):
        y, picked, z = session.run(None, {"x": x, "rows": np.array([31, 0])})
        np.testing.assert_array_equal(picked, v[[31, 0]])
        for got, factor in ((y, w), (z, v.T)):
            exact = x.astype(np.float64) @ factor.astype(np.float64)
            assert got.dtype == np.float16
            # Half a unit in the last place of float16, and the sum's own error in float32.
            assert np.all(np.abs(got.astype(np.float64) - exact) <= 0.5001 * np.spacing(exact.astype(np.float16)))


def test_only_weights_that_are_multiplied_may_be_held_wider() -> None:
    zeros = np.zeros((32, 32), np.float16)
    (group,) = (
        runnable.group for runnable in load(half_model(zeros, zeros), "jax", "compiled")._opened.executable.runnables
    )
    assert {v.name for v in group.weights} == {"w", "v"}
    assert {v.name for v in group.factors} == {"w"}


# Host values that keep changing.


def test_positions_that_change_at_every_call_stay_right_and_are_not_all_compiled(accelerator: str) -> None:
    model = parse("""
        agraph (float[n] x, int64[1] at, float[2] w) => (float[2] y, float[n] z)
        <int64[1] two = {2}>
        {
            end = Add(at, two)
            piece = Slice(x, at, end)
            y = Mul(piece, w)
            z = Neg(x)
        }
    """)
    session = load(model, accelerator, "compiled")
    x, w = np.arange(100, dtype=np.float32), np.array([2, -1], np.float32)
    for position in [*range(60), *range(60)]:
        y, z = session.run(None, {"x": x, "at": np.array([position]), "w": w})
        np.testing.assert_array_equal(y, [2 * position, -position - 1])
        np.testing.assert_array_equal(z, -x)
        assert y.flags.writeable and z.flags.owndata
    assert session.counters.misses <= 16 + 2 and session.counters.eager > 0  # with what reads no position
