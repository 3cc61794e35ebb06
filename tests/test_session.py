"""Does a session keep its promises about feeds, results, threads and the compile cache, on every device?"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from conftest import parse

import ep
import ep.compiled_group

PLUS_ONE = """
agraph (float[n] x) => (float[n] y)
<float one = {1.0}> { y = Add(x, one) }
"""
RAMP = np.arange(6, dtype=np.float32)


# Results belong to the caller.


def test_results_are_fresh_and_writable(device: str) -> None:
    """Passed-through feeds, constants and twins of an output are copies as well."""
    model = parse("""
        agraph (float[n] x) => (float[n] y, float[n] same, float[n] twin, float[2] fixed)
        <float one = {1.0}, float[2] weight = {3.0, 4.0}>
        { y = Add(x, one)  twin = Identity(y)  same = Identity(x)  fixed = Identity(weight) }
    """)
    session = ep.load(model, device)
    x = RAMP.copy()
    for _ in range(2):
        results = session.run(None, {"x": x})
        y, same, twin, fixed = results
        np.testing.assert_array_equal(y, RAMP + 1)
        np.testing.assert_array_equal(twin, RAMP + 1)
        np.testing.assert_array_equal(same, RAMP)
        np.testing.assert_array_equal(fixed, [3, 4])
        for result in results:
            assert type(result) is np.ndarray and result.flags.writeable
            result[...] = -1
        assert not any(np.shares_memory(a, b) for a in results for b in (x, *results) if a is not b)
        np.testing.assert_array_equal(x, RAMP)


def test_outputs_by_name_and_order(device: str) -> None:
    model = parse("agraph (float[n] x) => (float[n] a, float[n] b) { a = Neg(x) b = Abs(x) }")
    session = ep.load(model, device)
    b, a = session.run(["b", "a"], {"x": -RAMP})
    np.testing.assert_array_equal(a, RAMP)
    np.testing.assert_array_equal(b, RAMP)
    assert list(session(x=RAMP)) == ["a", "b"]
    with pytest.raises(ep.InvalidInput, match="no output 'c'"):
        session.run(["c"], {"x": RAMP})


def test_writes_to_a_feed_after_run_change_nothing(device: str) -> None:
    model = parse("agraph (float[n] x) => (float[n] y, float[n] same) { y = Neg(x) same = Identity(x) }")
    x = RAMP.copy()
    y, same = ep.load(model, device).run(None, {"x": x})
    x[...] = 99
    np.testing.assert_array_equal(y, -RAMP)
    np.testing.assert_array_equal(same, RAMP)


@pytest.mark.parametrize("size", [1, 16, 1 << 20])
def test_writes_to_a_feed_during_an_asynchronous_call_change_nothing(device: str, size: int) -> None:
    """The call returns before the device is done; the caller may reuse the buffer at once, as streams do."""
    model = parse("""
        agraph (float[n] x, float[n] z) => (float[n] y, float[n] same)
        { a = Sin(x) b = Sin(a) c = Sin(b) d = Sin(c) y = Add(d, z) same = Identity(x) }
    """)
    session = ep.load(model, device)
    x, z = np.full(size, 0.5, np.float32), np.full(size, 2, np.float32)
    want = session.run(None, {"x": x, "z": z})
    for _ in range(5):
        x[...], z[...] = 0.5, 2
        results = session(x=x, z=z)
        x[...], z[...] = np.nan, np.nan
        np.testing.assert_array_equal(np.asarray(results["y"]), want[0])
        np.testing.assert_array_equal(np.asarray(results["same"]), want[1])


ALIASES = """
agraph (float[n] x, int64[1] from) => (float[n] y, float[n] z, float[m] flat, float[4] c, float[4] d, float[k] part)
<float[4] w = {0, 1, 2, 3}, int64[1] all = {-1}, int64[1] end = {4}>
{ y = Identity(x)  z = Identity(x)  flat = Reshape(x, all)  c = Identity(w)  d = Identity(w)
  part = Slice(w, from, end) }
"""


@pytest.mark.parametrize("kind", ["numpy", "own"])
def test_a_write_reaches_one_result_and_nothing_else(device: str, kind: str) -> None:
    """Feeds, constants and results are each on their own, though the graph only passes them on."""
    session = load_quietly(parse(ALIASES), device)
    start, ramp = np.zeros(1, np.int64), np.arange(4, dtype=np.float32)
    for name in session(x=ramp, **{"from": start}):
        x = ramp.copy()
        if kind == "own" and device == "mlx":
            import mlx.core as mx

            x = mx.array(x)
        outputs = session(x=x, **{"from": start})
        x[1] = 50
        writable = device != "jax" or isinstance(outputs[name], np.ndarray)
        if writable:
            outputs[name][0] = 99
        for other in outputs:
            wanted = [99 if writable and other == name else 0, 1, 2, 3]
            np.testing.assert_array_equal(np.asarray(outputs[other]), wanted, err_msg=f"{name} {other}")
        assert float(x[0]) == 0
        for again in session.run(None, {"x": ramp, "from": start}):
            np.testing.assert_array_equal(again, ramp)


@pytest.mark.parametrize("dtype", ["int64", "uint64", "float64"])
def test_64_bit_results_keep_their_width(device: str, dtype: str) -> None:
    big = np.array([2**40 + 1, 2**53 - 1], dtype)
    kind = {"int64": "int64", "uint64": "uint64", "float64": "double"}[dtype]
    model = parse(f"agraph ({kind}[n] x) => ({kind}[n] y) {{ y = Max(x, x, x) }}")
    session = load_quietly(model, device)  # MLX leaves float64 to the host
    (y,) = session.run(None, {"x": big})
    assert y.dtype == dtype
    np.testing.assert_array_equal(y, big)
    result = np.asarray(session(x=big)["y"])
    assert result.dtype == dtype
    np.testing.assert_array_equal(result, big)
    np.testing.assert_array_equal(result * 2, big * 2)


# What may be fed.


class OnlyArray:
    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.array(self._array, dtype=dtype)


class OnlyDlpack:
    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()


def read_only(array: np.ndarray) -> np.ndarray:
    array = array.copy()
    array.flags.writeable = False
    return array


FOREIGN = {
    "__array__": OnlyArray,
    "dlpack": OnlyDlpack,
    "list": np.ndarray.tolist,
    "read-only": read_only,
    "strided": lambda a: np.repeat(a, 2)[::2],
    "reversed": lambda a: a[::-1].copy()[::-1],
    "big-endian": lambda a: a.astype(">f4"),
    "unaligned": lambda a: np.frombuffer(b"\0" + a.tobytes(), np.uint8)[1:].view(np.float32),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_foreign_arrays(device: str, kind: str) -> None:
    session = ep.load(parse(PLUS_ONE), device)
    feed = FOREIGN[kind](RAMP)
    np.testing.assert_array_equal(session.run(None, {"x": feed})[0], RAMP + 1)
    np.testing.assert_array_equal(np.asarray(session(x=feed)["y"]), RAMP + 1)


@pytest.mark.parametrize("library", ["jax", "mlx"])
@pytest.mark.parametrize("dtype", ["float32", "int32", "bfloat16", "float16"])
def test_arrays_of_the_libraries(device: str, library: str, dtype: str) -> None:
    """Also those of the other library, which may sit on another device."""
    asarray = {"jax": "jax.numpy", "mlx": "mlx.core"}[library]
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    if library == "mlx":
        importlib.import_module("ep.backends.mlx")  # loads its BLAS before mlx.core
    module = importlib.import_module(asarray)
    feed = module.array([1.0, 2.0, 3.0]).astype(getattr(module, dtype))
    kind = {"float32": "float"}.get(dtype, dtype)
    model = parse(f"agraph ({kind}[n] x) => ({kind}[n] y) {{ y = Mul(x, x) }}")
    (y,) = ep.load(model, device).run(None, {"x": feed})
    assert y.dtype == np.dtype(getattr(ml_dtypes, dtype, dtype))
    np.testing.assert_array_equal(y.astype(np.float32), [1, 4, 9])


def test_results_feed_the_next_call(device: str) -> None:
    """A state can stay on the device between calls."""
    session = ep.load(parse(PLUS_ONE), device)
    state: Any = RAMP
    for _ in range(3):
        state = session(x=state)["y"]
    np.testing.assert_array_equal(np.asarray(state), RAMP + 3)


def test_wide_results_feed_the_next_call(device: str) -> None:
    session = ep.load(parse("agraph (int64[n] x) => (int64[n] y) { y = Add(x, x) }"), device)
    state: Any = np.array([2**33])
    for _ in range(3):
        state = session(x=state)["y"]
    np.testing.assert_array_equal(np.asarray(state), [2**36])


def test_wrong_feeds_are_all_reported(device: str) -> None:
    model = parse("""
        agraph (float[n] first, float[n] second, int64[2] third) => (float[n] y)
        { f = Cast<to=1>(third) s = ReduceSum<keepdims=0>(f) t = Add(first, second) y = Add(t, s) }
    """)
    session = ep.load(model, device)
    good = {"first": RAMP, "second": RAMP, "third": np.array([1, 2])}
    np.testing.assert_array_equal(session.run(None, good)[0], 2 * RAMP + 3)
    bad = {
        "missing": {"first": RAMP, "third": np.array([1, 2])},
        "'secnd' is not an input of the model. Did you mean 'second'": good | {"secnd": RAMP},
        "'first' has dtype float64": good | {"first": RAMP.astype(np.float64)},
        "'first' has rank 2": good | {"first": RAMP[None]},
        "'third' has 3 at axis 0": good | {"third": np.array([1, 2, 3])},
        "dimension 'n' is 6 in 'first'": good | {"second": RAMP[:4]},
    }
    for text, feeds in bad.items():
        with pytest.raises(ep.InvalidInput) as caught:
            session.run(None, feeds)
        assert text in str(caught.value)
    with pytest.raises(ep.InvalidInput) as caught:
        session.run(None, {"first": RAMP[None], "third": np.zeros(2, np.float32)})
    for text in ("'first' has rank", "'second' is missing", "'third' has dtype float32"):
        assert text in str(caught.value)


def test_symbolic_dimensions_are_free_between_calls(device: str) -> None:
    model = parse("agraph (float[n, m] x, float[m] w) => (float[n, m] y) { y = Mul(x, w) }")
    session = ep.load(model, device)
    assert [(i.name, i.shape) for i in session.inputs] == [("x", ("n", "m")), ("w", ("m",))]
    for n, m in ((2, 3), (5, 1), (1, 7)):
        x = np.ones((n, m), np.float32)
        (y,) = session.run(None, {"x": x, "w": np.full(m, 2, np.float32)})
        np.testing.assert_array_equal(y, 2 * x)


def test_empty_inputs(device: str) -> None:
    model = parse("""
        agraph (float[n] x) => (float[n] y, float total, float[m] more)
        <float[1] w = {5.0}>
        { y = Exp(x)  total = ReduceSum<keepdims=0>(x)  more = Concat<axis=0>(x, w) }
    """)
    session = ep.load(model, device)
    y, total, more = session.run(None, {"x": np.zeros(0, np.float32)})
    assert y.shape == (0,) and y.dtype == np.float32
    assert type(total) is np.ndarray and total.shape == () and total == 0
    np.testing.assert_array_equal(more, [5])


def test_rank_zero(device: str) -> None:
    model = parse("agraph (float x, int64 k) => (float y, int64 j) { y = Neg(x) j = Add(k, k) }")
    session = ep.load(model, device)
    for x, k in ((np.float32(2), 3), (np.array(2, np.float32), np.int64(3)), (2.0, np.array(3))):
        y, j = session.run(None, {"x": x, "k": k})
        assert (type(y), y.shape, y.dtype, y.item()) == (np.ndarray, (), np.float32, -2)
        assert (type(j), j.shape, j.dtype, j.item()) == (np.ndarray, (), np.int64, 6)


def test_sequences(device: str) -> None:
    model = parse("""
        agraph (seq(float[n]) items, float[n] x) => (seq(float[n]) longer, float[m] joined, int64 count)
        {
            longer = SequenceInsert(items, x)
            joined = ConcatFromSequence<axis=0>(longer)
            count = SequenceLength(items)
        }
    """)
    session = load_quietly(model, device)
    items = [RAMP[:2].copy(), RAMP[2:3].copy()]
    for _ in range(2):
        longer, joined, count = session.run(None, {"items": items, "x": RAMP[3:]})
        assert isinstance(longer, list) and count == 2
        for got, want in zip(longer, (RAMP[:2], RAMP[2:3], RAMP[3:]), strict=True):
            np.testing.assert_array_equal(got, want)
            got[...] = -1  # neither the feeds nor the joined output see this
        np.testing.assert_array_equal(joined, RAMP)
        np.testing.assert_array_equal(items[0], RAMP[:2])


def test_strings(device: str) -> None:
    model = parse(
        "agraph (string[n] x, string[n] z) => (bool[n] same, string[n] y) { same = Equal(x, z) y = Identity(x) }"
    )
    session = load_quietly(model, device)
    x = np.array(["a", "bé", ""], object)
    for feed in (x, ["a", "bé", ""], np.array(["a", "bé", ""]), x.astype("T"), np.char.encode(x.astype("U"), "utf-8")):
        same, y = session.run(None, {"x": feed, "z": np.array(["a", "b", ""], object)})
        np.testing.assert_array_equal(same, [True, False, True])
        assert y.dtype == object and list(y) == list(x) and y is not x
    assert [len(result) for result in session.run(None, {"x": [], "z": []})] == [0, 0]
    with pytest.raises(ep.InvalidInput, match="the model needs strings"):
        session.run(None, {"x": np.array([1, 2, 3]), "z": x})


def load_quietly(model: Any, device: str) -> ep.InferenceSession:
    """For models of which some node may have to run on the host."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ep.HostFallbackWarning)
        return ep.load(model, device)


# Threads.


def test_threads_share_a_session(device: str) -> None:
    """Eight threads, starting together on a cold session, each with shapes of its own and of others."""
    model = parse("""
        agraph (float[n, 8] x) => (float[n, 8] y)
        { t = Transpose<perm=[1, 0]>(x)  g = MatMul(x, t)  s = Softmax<axis=-1>(g)  y = MatMul(s, x) }
    """)
    session = ep.load(model, device)
    feeds = {n: np.linspace(-1, 1, 8 * n, dtype=np.float32).reshape(n, 8) for n in (1, 2, 3, 5, 8)}
    reference = ep.load(model, device)
    want = {n: reference.run(None, {"x": x})[0] for n, x in feeds.items()}
    barrier = threading.Barrier(8)

    def work(number: int) -> None:
        barrier.wait()
        for turn in range(15):
            n = list(feeds)[(number + turn) % len(feeds)]
            if turn % 2:
                got = np.asarray(session(x=feeds[n])["y"])
            else:
                got = session.run(None, {"x": feeds[n]})[0]
            np.testing.assert_array_equal(got, want[n])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


def test_results_cross_threads(device: str) -> None:
    """An array that one thread gets unread from a call can be read by another."""
    session = ep.load(parse(PLUS_ONE), device)
    with ThreadPoolExecutor(1) as pool:
        results = pool.submit(lambda: session(x=RAMP)).result()
    np.testing.assert_array_equal(np.asarray(results["y"]), RAMP + 1)
    np.testing.assert_array_equal(session.run(None, {"x": results["y"]})[0], RAMP + 2)


# The compile cache.


def test_one_compilation_per_signature(accelerator: str) -> None:
    session = ep.load(parse(PLUS_ONE), accelerator)
    seen = []
    for n in (3, 3, 4, 3, 4):
        session.run(None, {"x": RAMP[:n]})
        seen.append((session.counters.misses, session.counters.hits))
    assert seen == [(1, 0), (1, 1), (2, 1), (2, 2), (2, 3)]
    seconds = session.counters.compile_seconds
    assert seconds > 0
    session.run(None, {"x": RAMP[:3]})
    assert session.counters.compile_seconds == seconds


def test_contents_that_decide_shapes_are_part_of_the_signature(accelerator: str) -> None:
    model = parse("agraph (float[n] x, int64[2] shape) => (float[a, b] y) { z = Neg(x) y = Reshape(z, shape) }")
    session = ep.load(model, accelerator)
    for shape, signatures in (([2, 3], 1), ([3, 2], 2), ([2, 3], 2), ([-1, 2], 3)):
        (y,) = session.run(None, {"x": RAMP, "shape": np.array(shape)})
        np.testing.assert_array_equal(y, -RAMP.reshape(shape))
        assert session.counters.misses + session.counters.eager == signatures  # some do not pay being compiled


def test_rarely_used_signatures_are_dropped(accelerator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ep.compiled_group, "MAX_SIGNATURES", 2)
    session = ep.load(parse(PLUS_ONE), accelerator)
    for n, misses in (
        (1, 1),
        (2, 2),
        (1, 2),
        (3, 3),
        (1, 3),
        (2, 4),
    ):  # 3 displaces 2, not 1, which was used since
        np.testing.assert_array_equal(session.run(None, {"x": RAMP[:n]})[0], RAMP[:n] + 1)
        assert session.counters.misses == misses, n


def test_eager_sessions_compile_nothing(accelerator: str) -> None:
    session = ep.load(parse(PLUS_ONE), accelerator, options={"compile": "off"})
    np.testing.assert_array_equal(session.run(None, {"x": RAMP})[0], RAMP + 1)
    assert session.counters.misses == session.counters.hits == 0


# Where a model comes from.


def test_sources(device: str, tmp_path: Path) -> None:
    proto = parse(PLUS_ONE)
    path = tmp_path / "plus_one.onnx"
    onnx.save(proto, path)
    before = proto.SerializeToString()
    for source in (proto, path, str(path), path.read_bytes(), bytearray(path.read_bytes())):
        session = ep.load(source, device)
        np.testing.assert_array_equal(session.run(None, {"x": RAMP})[0], RAMP + 1)
    assert proto.SerializeToString() == before  # loading leaves the caller's proto as it was
    assert "plus_one" in ep.load(path, device).name


def external_model(folder: Path) -> Path:
    """y = x + weight, the weight in a file beside the model, 1 MiB."""
    weight = np.arange(1 << 18, dtype=np.float32)
    proto = parse("agraph (float[262144] x, float[262144] w) => (float[262144] y) { y = Add(x, w) }")
    del proto.graph.input[1]
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    onnx.save(proto, folder / "m.onnx", save_as_external_data=True, location="weights.bin", size_threshold=1024)
    return folder / "m.onnx"


def test_external_data(device: str, tmp_path: Path) -> None:
    session = ep.load(external_model(tmp_path), device)
    x = np.ones(1 << 18, np.float32)
    np.testing.assert_array_equal(session.run(None, {"x": x})[0], np.arange(1 << 18) + 1)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps, which only Linux has")
def test_external_data_is_mapped_not_read(device: str, tmp_path: Path) -> None:
    session = ep.load(external_model(tmp_path), device)
    maps = Path("/proc/self/maps").read_text()
    assert str(tmp_path / "weights.bin") in maps
    del session


def test_missing_external_data(device: str, tmp_path: Path) -> None:
    path = external_model(tmp_path)
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(ep.InvalidModel, match="weights.bin"):
        ep.load(path, device)


# Overridable initializers.


def test_initializers_with_an_input_are_defaults(device: str) -> None:
    model = parse("agraph (float[n] x, float[1] w) => (float[n] y) <float[1] w = {10.0}> { y = Add(x, w) }")
    session = ep.load(model, device)
    assert [i.name for i in session.inputs] == ["x"] and [o.name for o in session.overridable] == ["w"]
    for extra, offset in (({}, 10), ({"w": np.array([1], np.float32)}, 1), ({}, 10)):
        np.testing.assert_array_equal(session.run(None, {"x": RAMP, **extra})[0], RAMP + offset)
        np.testing.assert_array_equal(np.asarray(session(x=RAMP, **extra)["y"]), RAMP + offset)
    with pytest.raises(ep.InvalidInput, match="'w' has dtype int64"):
        session.run(None, {"x": RAMP, "w": np.array([1])})


def test_threads_that_come_together_compile_once(accelerator: str) -> None:
    session = ep.load(parse("agraph (float[n] x) => (float[n] y) { z = Exp(x) y = Sin(z) }"), accelerator)
    barrier = threading.Barrier(8)

    def run(size: int) -> np.ndarray:
        barrier.wait()
        return session.run(None, {"x": np.zeros(size, np.float32)})[0]

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(run, [3, 4] * 4))
    for result in results:
        np.testing.assert_allclose(result, np.sin(np.ones_like(result)), rtol=1e-6)
    assert session.counters.misses == 2


def test_what_a_lowering_refuses_names_the_node(device: str) -> None:
    model = parse('agraph (float[2,3] x) => (float[a,b] y) { z = Neg(x) y = Einsum <equation = "ij,jk->ik"> (z) }')
    model.graph.node[1].name = "product"
    with pytest.raises(ep.InvalidInput, match=r"^node 'product' \(ai.onnx::Einsum, opset 21\): equation 'ij,jk->ik'"):
        ep.load(model, device).run(None, {"x": np.ones((2, 3), np.float32)})


# Mistakes of those who see a session for the first time.


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (lambda s: s.run({"x": RAMP}), ["session.run(None, {'name': array})"]),
        (lambda s: s.run(RAMP), ["the output names are a ndarray", "session({'name': array})"]),
        (lambda s: s.run(None), ["the feeds are a NoneType", "{'x': …}"]),
        (lambda s: s.run(None, RAMP), ["the feeds are a ndarray", "{'x': …}"]),
        (lambda s: s.run("y", {"x": RAMP}), ["write ['y']"]),
        (lambda s: s.run(["z"], {"x": RAMP}), ["has no output 'z'", "'y'"]),
        (lambda s: s.warmup(3), ["the shapes are 3", "x: float32[n]"]),
        (lambda s: s.warmup(["n"]), ["the shapes are 'n'"]),
        (lambda s: s.warmup({"x": 3}), ["'x' is given as 3", "a tuple"]),
        (lambda s: s.warmup({"x": ("n",)}), ["'x' is given as ('n',)"]),
        (lambda s: ep.estimate(parse(PLUS_ONE), 3, device="host"), ["the shapes are 3"]),
    ],
)
def test_what_is_passed_in_a_wrong_form_is_told(use, words) -> None:
    with pytest.raises(ep.InvalidInput) as error:
        use(ep.load(parse(PLUS_ONE), "host"))
    assert all(word in str(error.value) for word in words), str(error.value)


def test_no_output_names_mean_all() -> None:
    session = ep.load(parse(PLUS_ONE), "host")
    for names in (None, [], ()):
        np.testing.assert_array_equal(session.run(names, {"x": RAMP})[0], RAMP + 1)


def test_results_tell_what_they_are(device: str) -> None:
    model = parse("""
        g (float[n] x, string[n] s) => (float[n] y, string[n] t, seq(float[n]) q)
        { y = Neg(x)  t = Identity(s)  q = SequenceConstruct(x, y) }
    """)
    outputs = ep.load(model, device)(x=RAMP, s=np.array(["a"] * 6, object))
    assert repr(outputs) == "Outputs(y: float32[6], t: string[6], q: sequence of 2)"
