"""Sinking transposes changes where a traced JAX function stores its channels, and never what it computes."""

from __future__ import annotations

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy

from ep.backends.jax.layout import sink_transposes  # noqa: E402

X = np.random.default_rng(0).normal(size=(2, 3, 5, 4)).astype(np.float32)
BIAS = np.arange(3, dtype=np.float32)


def first(y):
    return jnp.moveaxis(y, -1, 1)


def last(x):
    return jnp.moveaxis(x, 1, -1)


def image(y):
    """Something that must be computed channels last."""
    return first(jnp.matmul(last(y), jnp.eye(y.shape[1])[:, ::-1]))


def repeat(y):
    wide = jnp.broadcast_to(y[:, :, :, None, :, None], (*y.shape[:3], 2, y.shape[3], 3))
    return wide.reshape(*y.shape[:2], 2 * y.shape[2], 3 * y.shape[3])


BETWEEN = {
    "bias": lambda y: y + BIAS[:, None, None],
    "relu": jax.nn.relu,
    "clip": lambda y: jnp.clip(y, -1, 1),
    "select": lambda y: jnp.where(y > 0, y, BIAS[:, None, None] * y),
    "residual": lambda y: y + X,
    "own square": lambda y: y * y,
    "pad": lambda y: jnp.pad(y, [(0, 0), (1, 2), (2, 0), (0, 1)], constant_values=7),
    "slice": lambda y: y[:, 1:, ::2, 1:3],
    "concatenate channels": lambda y: jnp.concatenate([y, 2 * y], axis=1),
    "concatenate rows": lambda y: jnp.concatenate([y, X], axis=2),
    "mean over the image": lambda y: y * jnp.mean(y, axis=(2, 3), keepdims=True),
    "maximum over channels": lambda y: y - jnp.max(y, axis=1, keepdims=True),
    "sum over rows": lambda y: jnp.sum(y, axis=2),
    "repeat": repeat,
    "halves": lambda y: y.astype(jnp.float16) + 1,
}


def transposes(function):
    """Elements that a traced function transposes in images."""
    closed = jax.make_jaxpr(function)(X)

    def count(jaxpr):
        total = 0
        for equation in jaxpr.eqns:
            if equation.primitive.name == "transpose" and equation.outvars[0].aval.ndim > 2:
                total += equation.outvars[0].aval.size
            inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
            total += count(inner.jaxpr) if inner is not None else 0
        return total

    return count(closed.jaxpr)


@pytest.mark.parametrize("name", BETWEEN)
def test_between_two_images_nothing_changes_and_less_is_moved(name):
    def function(x):
        y = BETWEEN[name](image(x))
        return image(y) if y.ndim == 4 else y, BETWEEN[name](x)

    expected = jax.jit(function)(X)
    got = jax.jit(sink_transposes(function))(X)
    for a, b in zip(expected, got, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_allclose(np.asarray(b), np.asarray(a), rtol=1e-6, atol=1e-6)
    chain = lambda x: image(BETWEEN[name](image(x))) if BETWEEN[name](x).ndim == 4 else BETWEEN[name](image(x))  # noqa: E731
    assert transposes(sink_transposes(chain)) < transposes(chain)


def test_other_axes_are_left_alone():
    def function(x):
        y = jnp.transpose(x, (0, 2, 1, 3)) * 2
        y = jnp.concatenate([y, y], axis=2)
        return jnp.transpose(y, (3, 0, 1, 2)), jnp.argmax(first(last(x) + 1), axis=1), jnp.sum(first(x), axis=0)

    for a, b in zip(function(X), jax.jit(sink_transposes(function))(X), strict=True):
        np.testing.assert_allclose(np.asarray(b), np.asarray(a), rtol=1e-6)


def test_loops_branches_and_constants_inside():
    def function(x, y):
        def body(carry, row):
            return first(last(carry) + row), jnp.sum(carry)

        carry, sums = jax.lax.scan(body, image(x), jnp.arange(3.0))
        picked = jax.lax.cond(y > 0, lambda a: a, lambda a: -a, first(last(carry)))
        return {"a": [picked + 1, None], "b": sums, "c": np.float32(3) + y, "x": x}

    expected = jax.jit(function)(X, np.float32(2))
    got = jax.jit(sink_transposes(function))(X, np.float32(2))
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(np.asarray(b), np.asarray(a), rtol=1e-6)
