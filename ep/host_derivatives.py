"""How does the host differentiate, where NumPy cannot? By central differences in float64, extrapolated once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ep.errors import ExecutionError

STEP = 1e-3  # relative; the error of one extrapolation is its fourth power, and rounding adds 1e-13
TRUST = 1e-5  # what two steps of different size may differ by, relative to the largest derivative


def derivatives(f: Callable[..., Any], xs: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """The derivatives of the sum of f(*xs) by each x.

    Raises:
        ExecutionError: the steps disagree: f has a kink here, or rounds inside to less than float64.
    """
    wide = [np.array(x, np.float64) for x in xs]
    return tuple(_by_one(f, wide, i).astype(x.dtype) for i, x in enumerate(xs))


def _by_one(f: Callable[..., Any], xs: list[np.ndarray], which: int) -> np.ndarray:
    coarse, fine = (np.zeros(xs[which].shape, np.float64) for _ in range(2))
    for place in np.ndindex(xs[which].shape):
        step = STEP * max(1.0, abs(float(xs[which][place])))
        coarse[place], fine[place] = (_difference(f, xs, which, place, h) for h in (step, step / 2))
    better = (4 * fine - coarse) / 3
    largest = float(np.abs(better).max(initial=1.0))
    if not (np.abs(fine - coarse) <= TRUST * largest).all():
        raise ExecutionError(
            "the host cannot differentiate this function here.",
            why="it estimates derivatives by differences, and two step sizes disagree: there is a kink, or it rounds.",
            fix="use device='jax' or device='mlx', which differentiate exactly.",
        )
    return better


def _difference(f: Callable[..., Any], xs: list[np.ndarray], which: int, place: tuple[int, ...], h: float) -> float:
    sums = []
    for sign in (1, -1):
        moved = [x.copy() if i == which else x for i, x in enumerate(xs)]
        moved[which][place] += sign * h
        sums.append(float(np.sum(np.asarray(f(*moved), np.float64))))
    return (sums[0] - sums[1]) / (2 * h)
