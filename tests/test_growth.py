"""Do shapes that grow with every call, as caches of attention do, cost few compilations, and give the right answers?"""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from conftest import parse, require

import ep
import ep.variants
from ep.variants import NOT_ALONE, Past, Variants, continues, longer

F32 = np.dtype(np.float32)
NUMBERS = np.random.default_rng(0)
SIZE = 20
WEIGHTS = {name: NUMBERS.normal(size=(SIZE, SIZE)).astype(np.float32) / 4 for name in "qkvo"}
MATRICES = [
    f"float[{SIZE}, {SIZE}] w{name} = {{{', '.join(f'{w:.9g}' for w in weights.ravel())}}}"
    for name, weights in WEIGHTS.items()
]
ATTENTION = f"""
agraph (float[b, n, {SIZE}] x, float[b, m, {SIZE}] past_k, float[b, m, {SIZE}] past_v)
    => (float[b, n, {SIZE}] y, float[b, t, {SIZE}] keys,
    float[b, t, {SIZE}] values) <{", ".join(MATRICES)}, int64[1] size = {{{SIZE}}}> {{
    q = MatMul(x, wq)
    k = MatMul(x, wk)
    v = MatMul(x, wv)
    keys = Concat<axis = 1>(past_k, k)
    values = Concat<axis = 1>(past_v, v)
    turned = Transpose<perm = [0, 2, 1]>(keys)
    scores = MatMul(q, turned)
    weights = Softmax<axis = -1>(scores)
    mixed = MatMul(weights, values)
    rows = Shape<start = 0, end = 1>(past_k)
    length = Shape<start = 1, end = 2>(x)
    shape = Concat<axis = 0>(rows, length, size)
    same = Reshape(mixed, shape)
    out = MatMul(same, wo)
    y = Tanh(out)
}}
"""


def attention(x, k, v):
    q, k, v = x @ WEIGHTS["q"], np.concatenate([k, x @ WEIGHTS["k"]], 1), np.concatenate([v, x @ WEIGHTS["v"]], 1)
    scores = q @ k.transpose(0, 2, 1)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.tanh(weights / weights.sum(-1, keepdims=True) @ v @ WEIGHTS["o"]), k, v


def generate(session, prompt, tokens, batch=2):
    """Feeds what comes out back in; checks every call."""
    x = NUMBERS.normal(size=(batch, prompt, SIZE)).astype(np.float32)
    k = v = np.zeros((batch, 0, SIZE), np.float32)
    for _ in range(tokens):
        results = session.run(None, {"x": x, "past_k": k, "past_v": v})
        for result, expected in zip(results, attention(x, k, v), strict=True):
            assert result.dtype == np.float32
            np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)
        x, k, v = results[0][:, -1:], *results[1:]


@pytest.fixture
def load(device):
    return lambda: ep.load(parse(ATTENTION), device, options={"context.cache": "off"})


def test_every_length_gives_the_right_answer(load):
    session = load()
    for prompt, tokens in ((5, 8), (3, 8), (4, 3)):
        generate(session, prompt, tokens)


def test_growing_lengths_are_not_compiled_one_by_one(accelerator, monkeypatch):
    monkeypatch.setattr(Variants, "_due", lambda self, key: False)  # compiling costs more than it does for this model
    session = ep.load(parse(ATTENTION), accelerator, options={"context.cache": "off"})
    generate(session, 5, 5)
    compiled = session.counters.misses
    generate(session, 5, 12)
    assert session.counters.misses == compiled
    generate(session, 40, 10)
    assert session.counters.misses == compiled + 1, "the prompt, which differs in another axis, is compiled"


def test_lengths_that_return_after_many_others_are_not_compiled(accelerator, monkeypatch):
    """A program that generates again from the same prompt, after calls of other batches."""
    monkeypatch.setattr(Variants, "_due", lambda self, key: False)
    session = ep.load(parse(ATTENTION), accelerator, options={"context.cache": "off"})
    for batch in (2, 3):
        generate(session, 5, ep.variants.REMEMBERED + 4, batch)
    compiled = session.counters.misses
    generate(session, 5, ep.variants.REMEMBERED + 4)
    assert session.counters.misses == compiled


def test_what_does_not_grow_stays_compiled():
    session = ep.load(parse(ATTENTION), "jax", options={"context.cache": "off"})
    generate(session, 5, 6)
    (group,) = session._opened.executable.runnables
    (executable,) = group.growing.values()
    compiled = [step.op for part in executable.groups if part.kind == "jax" for step in part.steps]
    assert compiled.count("ai.onnx::MatMul") == 4 and "ai.onnx::Tanh" in compiled, compiled
    assert not {"ai.onnx::Softmax", "ai.onnx::Shape"} & set(compiled)


def test_a_length_that_stays_is_compiled():
    session = ep.load(parse(ATTENTION), "jax", options={"context.cache": "off"})
    generate(session, 5, 6)
    x, past = np.ones((2, 1, SIZE), np.float32), np.ones((2, 50, SIZE), np.float32)
    seen = []
    for _ in range(5):
        session.run(None, {"x": x, "past_k": past, "past_v": past})
        seen.append((session.counters.misses, session.counters.eager))
    assert seen[-1] == seen[-2] != seen[0], seen


def test_stored_lengths_are_used(tmp_path):
    def load():
        return ep.load(parse(ATTENTION), "jax", options={"context.cache": str(tmp_path)})

    x, past = np.ones((2, 1, SIZE), np.float32), np.ones((2, 50, SIZE), np.float32)
    feeds = {"x": x, "past_k": past, "past_v": past}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ep.library.WORTH", 0.0)
        first = load()
        expected = first.run(None, feeds)
    second = load()
    generate(second, 5, 6)
    loaded = second.counters.loaded
    for result, same in zip(second.run(None, feeds), expected, strict=True):
        assert result.tobytes() == same.tobytes()
    assert second.counters.loaded == loaded + 1


def test_threads_generate_together(device):
    session = ep.load(parse(ATTENTION), device, options={"context.cache": "off"})
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(generate, session, prompt, 8) for prompt in (3, 3, 4, 6)]:
            done.result()


# The rule.


def past(*sizes, results=()):
    return Past(shapes(*sizes), (), shapes(*results))


def shapes(*sizes):
    return tuple((size, F32) for size in sizes)


def test_an_arithmetic_progression():
    first, second, third = (shapes((1, 4), (2, n, 8)) for n in (16, 17, 18))
    assert continues(first, second, third)
    assert not continues(first, third, second) and not continues(third, second, first)
    assert not continues(first, second, shapes((1, 4), (2, 19, 8)))
    assert not continues(first, second, shapes((2, 4), (2, 18, 8)))
    assert longer(first, second) == {(1, 1)}
    assert longer(first, shapes((1, 4), (2, 8))) == NOT_ALONE == longer(first, (first[0], None))


def test_sizes_that_follow_each_other_are_no_growth_without_feedback():
    variants = Variants(threading.Event())
    for n in range(1, 6):
        assert variants.grown(n, shapes((n, 4))) is None
        variants.bought(past((n, 4), results=[(n, 7)]), 1.0)


def test_a_result_that_returns_is_growth():
    feedback = threading.Event()
    variants, other = Variants(feedback), Variants(feedback)
    for n in (1, 2):
        assert other.grown(n, shapes((n, 9))) is None
        other.bought(past((n, 9)), 1.0)
    variants.bought(past((1, 3), (5, 4), results=[(6, 4)]), 1.0)
    assert variants.grown("shrinks", shapes((0, 3), (6, 4))) is None
    assert variants.grown("grows", shapes((1, 3), (6, 4)))[0] == {(1, 0)}
    assert variants.grown("longer", shapes((1, 3), (70, 4))), "the axis is known to grow"
    assert variants.grown("another", shapes((2, 3), (70, 4))) is None
    assert other.grown(3, shapes((3, 9))), "a group beside it grows in progression"


def test_rent_is_paid_until_it_reaches_the_price():
    variants = Variants(threading.Event())
    variants.bought(past((1,), results=[(2,)]), 1.0)
    rents = 0
    while variants.grown("here", shapes((2,))) is not None:
        variants.rented("here", past((2,)), 0.3)
        variants.rented("elsewhere", past((9,)), 0.3)  # so that it does not come in a row
        rents += 1
    assert rents == 3, "0.9 s of rent and 0.3 s to come are more than 1 s"


def test_what_comes_in_a_row_is_compiled():
    variants = Variants(threading.Event())
    variants.bought(past((1,), results=[(2,)]), 1.0)
    for _ in range(2):
        assert variants.grown("here", shapes((2,)))
        variants.rented("here", past((2,)), 0.001)
    assert variants.grown("here", shapes((2,))) is None


# Shapes by the hundred.

SHAPES = "agraph (float[n] x) => (float[n] y) { a = Exp(x)  b = Add(a, x)  y = Softmax<axis = 0>(b) }"


def shapes_session(monkeypatch):
    require("jax")
    monkeypatch.setattr(ep.variants, "MAX_SHAPES", 2)
    return ep.load(parse(SHAPES), "jax", options={"context.cache": "off"})


def softmax(n):
    x = np.linspace(-1, 1, n, dtype=np.float32)
    z = np.exp(np.exp(x.astype(np.float64)) + x)
    return x, z / z.sum()


def test_one_more_of_many_shapes_runs_on_the_host_until_it_returns(monkeypatch):
    session = shapes_session(monkeypatch)
    monkeypatch.setattr(ep.variants.Variants, "price", 1e9)  # so that only coming back tells
    for n, misses, eager in ((3, 1, 0), (4, 2, 0), (5, 2, 1), (6, 2, 2), (3, 2, 2), (6, 2, 3), (6, 3, 3), (6, 3, 3)):
        x, wanted = softmax(n)
        np.testing.assert_allclose(session.run(None, {"x": x})[0], wanted, rtol=1e-5)
        assert (session.counters.misses, session.counters.eager) == (misses, eager), n


def test_a_shape_that_takes_long_on_the_host_is_compiled(monkeypatch):
    session = shapes_session(monkeypatch)
    monkeypatch.setattr(ep.variants.Variants, "price", 0.0)
    monkeypatch.setattr(ep.variants.Variants, "_due", lambda self, key: False)
    for n in (3, 4, 5, 6):
        x, wanted = softmax(n)
        np.testing.assert_allclose(session.run(None, {"x": x})[0], wanted, rtol=1e-5)
    assert (session.counters.misses, session.counters.eager) == (4, 0)


def test_warming_up_compiles_however_many_shapes(monkeypatch):
    session = shapes_session(monkeypatch)
    session.warmup([{"n": n} for n in range(3, 8)])
    assert (session.counters.misses, session.counters.eager) == (5, 0)
    session.run(None, {"x": softmax(9)[0]})
    assert session.counters.eager == 1
