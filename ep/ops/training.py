"""One step of an optimiser, of ai.onnx.preview.training: Adagrad, Adam and Momentum.

The inputs after rate and update count are all tensors, then all their gradients, then all of each state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ep.errors import InvalidInput, InvalidModel
from ep.registry import op

TRAINING = "ai.onnx.preview.training"


def _each(step: Callable[..., tuple[Any, ...]], inputs: tuple[Any, ...], kinds: int) -> tuple[Any, ...]:
    """The step applied to each tensor with its gradient and states, results in the order of the outputs."""
    if len(inputs) % kinds:
        raise InvalidInput(f"{len(inputs)} tensors cannot be divided among {kinds} kinds.")
    count = len(inputs) // kinds
    rows = [step(*inputs[i::count]) for i in range(count)]
    return tuple(row[j] for j in range(kinds - 1) for row in rows)


def _number(xp: Any, value: Any, x: Any) -> Any:
    """Rate or update count as a scalar of the dtype of x: exporters write scalars as [] and as [1]."""
    return xp.astype(xp.reshape(value, ()), xp.dtype_of(x))


@op("Adagrad", domain=TRAINING)
def adagrad(xp, r, t, *inputs, decay_factor=0.0, epsilon=1e-6, norm_coefficient=0.0):
    def step(x, g, h):
        rate = _number(xp, r, x) / (1 + _number(xp, t, x) * decay_factor)
        g = norm_coefficient * x + g
        h = h + g * g
        return x - rate * g / (xp.sqrt(h) + epsilon), h

    return _each(step, inputs, 3)


@op("Adam", domain=TRAINING)
def adam(
    xp, r, t, *inputs, alpha=0.9, beta=0.999, epsilon=1e-6, norm_coefficient=0.0, norm_coefficient_post=0.0
):  # fmt: skip
    def step(x, g, v, h):
        rate, count = _number(xp, r, x), _number(xp, t, x)
        g = norm_coefficient * x + g
        v = alpha * v + (1 - alpha) * g
        h = beta * h + (1 - beta) * (g * g)
        shrink = [1 - xp.exp(count * float(np.log(a))) if a else xp.ones_like(count) for a in (alpha, beta)]
        adjusted = rate * xp.sqrt(shrink[1]) / xp.where(count > 0, shrink[0], 1)
        x = x - xp.where(count > 0, adjusted, rate) * v / (xp.sqrt(h) + epsilon)
        return (1 - norm_coefficient_post) * x, v, h

    return _each(step, inputs, 4)


@op("Momentum", domain=TRAINING)
def momentum(xp, r, t, *inputs, alpha, beta, mode, norm_coefficient):
    if mode not in ("standard", "nesterov"):
        raise InvalidModel(f"Momentum knows no mode '{mode}'.", fix="use 'standard' or 'nesterov'.")

    def step(x, g, v):
        rate = _number(xp, r, x)
        g = norm_coefficient * x + g
        weight = xp.astype(xp.where(_number(xp, t, x) > 0, beta, 1.0), xp.dtype_of(x))
        v = alpha * v + weight * g
        return x - rate * (g + alpha * v if mode == "nesterov" else v), v

    return _each(step, inputs, 3)
