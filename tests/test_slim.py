"""Does a stored executable without its description compute the same bits as the whole one?"""

from __future__ import annotations

import numpy as np
import pytest

jax = pytest.importorskip("jax")

from jax import lax  # noqa: E402
from jax import numpy as jnp  # noqa: E402
from jaxlib import xla_client  # noqa: E402

from ep.backends.jax import executable  # noqa: E402
from ep.backends.jax.slim import slim  # noqa: E402

X = np.linspace(-2, 2, 4 * 64, dtype=np.float32).reshape(4, 64)
W = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
IMAGE = np.random.default_rng(1).standard_normal((1, 16, 16, 8)).astype(np.float32)
KERNEL = np.random.default_rng(2).standard_normal((3, 3, 8, 8)).astype(np.float32)
TABLE = np.random.default_rng(3).standard_normal((300,)).astype(np.float32)


def layers(x, w):
    for _ in range(6):
        x = jnp.tanh(x @ w) / jnp.sqrt(1 + jnp.sum(x * x, -1, keepdims=True))
    return (x,)


def convolutions(x, k):
    for _ in range(3):
        x = jnp.maximum(lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")), 0)
    return x, x.mean((1, 2)), x.max((1, 2))


def loop(x, w):
    def body(state, row):
        state = jnp.tanh(state @ w + row)
        return state, state.sum()

    last, sums = lax.scan(body, x[0], x)
    return last, sums, x


def condition(x, w):
    first = lax.cond(x.sum() > 0, lambda: x @ w, lambda: x - 1)
    return first, lax.while_loop(lambda s: s[0] < 5, lambda s: (s[0] + 1, s[1] @ w), (0, x))[1]


def constants(x, w):
    return x[:, :3] + TABLE[:3], jnp.asarray(TABLE), jnp.float32(3), w


def nothing_new(x, w):
    return w, x, x.reshape(64, 4), x.T, (x[:2], w)[0]


def sorts(x, w):
    order = jnp.argsort(x, axis=1)
    return jnp.take_along_axis(x, order, 1), order, lax.top_k(x, 3)[0], jnp.cumsum(w, 0)


def updates(x, w):
    changed = w.at[1, 2].set(5.0).at[3].add(x[0])
    return changed, lax.dynamic_update_slice(w, x, (2, 0)), jnp.where(x > 0, x, 0).sum(), jnp.fft.rfft(x).real


PAIRS = [(f, X, W) for f in (layers, loop, condition, constants, nothing_new, sorts, updates)]
PAIRS += [(convolutions, IMAGE, KERNEL)]


def compiled(fn, *arrays):
    device = jax.devices("cpu")[0]
    found = executable._compile(device, fn, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays])
    return device, bytes(device.client.serialize_executable(found.runtime_executable()))


def run(device, data, *arrays):
    loaded = device.client.deserialize_executable(data, xla_client.DeviceList((device,)), None)
    results = loaded.execute_sharded([jax.device_put(a, device) for a in arrays])
    return [np.asarray(r[0]) for r in results.disassemble_into_single_device_arrays()]


@pytest.mark.parametrize(("fn", "x", "w"), PAIRS, ids=lambda p: getattr(p, "__name__", ""))
def test_results_are_those_of_the_whole_executable(fn, x, w):
    device, whole = compiled(fn, x, w)
    less = slim(whole)
    assert less is not None and len(less) < len(whole)
    for ours, theirs in zip(run(device, less, x, w), run(device, whole, x, w), strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape and ours.tobytes() == theirs.tobytes()
    assert slim(less) is not None  # and it is of the same form


def test_what_is_no_such_executable_stays_as_it_is():
    _, whole = compiled(layers, X, W)
    assert slim(b"") is None and slim(b"\xff" * 100) is None and slim(b"\0" + b"text that is none" * 9) is None
    for length in range(0, len(whole), max(1, len(whole) // 50)):
        slim(whole[:length])  # none raises


def test_an_executable_that_xla_refuses_is_stored_whole(monkeypatch):
    device, whole = compiled(layers, X, W)
    made = executable._compile(device, layers, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (X, W)])
    assert len(executable._serialized(device, made)) < len(whole)
    monkeypatch.setattr(executable, "slim", lambda data: data[: len(data) // 2])
    assert run(device, executable._serialized(device, made), X, W)[0].shape == X.shape
