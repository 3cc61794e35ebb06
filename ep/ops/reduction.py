"""Reductions over axes, positions of extremes, and running sums and products."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from ep.ops.axes import at, axes_of, axis_of, ints, scalar
from ep.ops.precision import exactly, in_exact, in_wide, is_float
from ep.registry import Host, op

# Reductions over `axes`, a tuple of non-negative ints; all keep the dtype


def total(xp, x, *, axes, keepdims):
    return xp.sum(x, axis=axes, keepdims=keepdims)


def product(xp, x, *, axes, keepdims):
    return xp.prod(x, axis=axes, keepdims=keepdims)


def average(xp, x, *, axes, keepdims):
    """The mean of integers is truncated."""
    dtype = xp.dtype_of(x)
    if is_float(dtype):
        return xp.mean(x, axis=axes, keepdims=keepdims)
    exact = np.dtype(np.uint64 if dtype.kind == "u" else np.int64)
    sums = xp.sum(xp.astype(x, exact), axis=axes, keepdims=keepdims)
    quotient = xp.floor_divide(xp.abs(sums), max(1, math.prod(x.shape[i] for i in axes)))
    return xp.astype(quotient if exact.kind == "u" else xp.where(sums < 0, -quotient, quotient), dtype)


def largest(xp, x, *, axes, keepdims):
    if x.size == 0:
        return _of_nothing(xp, x, axes, keepdims, lowest=True)
    return xp.max(x, axis=axes, keepdims=keepdims)


def smallest(xp, x, *, axes, keepdims):
    if x.size == 0:
        return _of_nothing(xp, x, axes, keepdims, lowest=False)
    return xp.min(x, axis=axes, keepdims=keepdims)


def _of_nothing(xp: Any, x: Any, axes: tuple[int, ...], keepdims: bool, lowest: bool) -> Any:
    dtype = xp.dtype_of(x)
    if is_float(dtype):
        value: Any = -math.inf if lowest else math.inf
    elif dtype.kind == "b":
        value = not lowest
    else:
        limits = ml_dtypes.iinfo(dtype)
        value = int(limits.min if lowest else limits.max)
    shape = [1 if i in axes else n for i, n in enumerate(x.shape) if keepdims or i not in axes]
    return xp.full(tuple(shape), value, dtype=dtype)


def sum_of_squares(xp, x, *, axes, keepdims):
    if is_float(xp.dtype_of(x)):
        return in_wide(_sum_of_squares)(xp, x, axes=axes, keepdims=keepdims)
    return _sum_of_squares(xp, x, axes=axes, keepdims=keepdims)


def _sum_of_squares(xp, x, *, axes, keepdims):
    return xp.sum(x * x, axis=axes, keepdims=keepdims)


def l1_norm(xp, x, *, axes, keepdims):
    return xp.sum(xp.abs(x), axis=axes, keepdims=keepdims)


@in_exact
def l2_norm(xp, x, *, axes, keepdims):
    return xp.sqrt(_sum_of_squares(xp, x, axes=axes, keepdims=keepdims))


@in_exact
def log_sum(xp, x, *, axes, keepdims):
    return xp.log(xp.sum(x, axis=axes, keepdims=keepdims))


@in_exact
def log_sum_exp(xp, x, *, axes, keepdims):
    if not axes:
        return x
    if x.size == 0:
        return _of_nothing(xp, x, axes, keepdims, lowest=True)
    return xp.logsumexp(x, axis=axes, keepdims=keepdims)


# ONNX name → function, and the opset that made `axes` an input
REDUCTIONS: dict[str, tuple[Callable[..., Any], int]] = {
    **{"ReduceSum": (total, 13), "ReduceProd": (product, 18), "ReduceMean": (average, 18)},
    **{"ReduceMax": (largest, 18), "ReduceMin": (smallest, 18)},
    **{"ReduceL1": (l1_norm, 18), "ReduceL2": (l2_norm, 18), "ReduceSumSquare": (sum_of_squares, 18)},
    **{"ReduceLogSum": (log_sum, 18), "ReduceLogSumExp": (log_sum_exp, 18)},
}


IN_EXACT = (l2_norm, log_sum, log_sum_exp)


def with_axes_input(fn: Callable[..., Any]) -> Callable[..., Any]:
    def lowering(xp, data, axes: Host = None, *, keepdims=1, noop_with_empty_axes=0):
        chosen = () if axes is None else ints(axes)
        if not chosen and noop_with_empty_axes:
            return fn(xp, data, axes=(), keepdims=True)
        return fn(xp, data, axes=_all_or(chosen, data.ndim), keepdims=bool(keepdims))

    return lowering


def with_axes_attribute(fn: Callable[..., Any]) -> Callable[..., Any]:
    def lowering(xp, data, *, axes=None, keepdims=1):
        return fn(xp, data, axes=_all_or(axes or (), data.ndim), keepdims=bool(keepdims))

    return lowering


def _all_or(axes: tuple[int, ...], rank: int) -> tuple[int, ...]:
    return axes_of(axes, rank) if axes else tuple(range(rank))


for _op, (_fn, _since) in REDUCTIONS.items():
    _inside: Any = exactly if _fn in IN_EXACT else ""
    op(_op, since=_since, inside=_inside)(with_axes_input(_fn))
    op(_op, inside=_inside)(with_axes_attribute(_fn))


# Positions


def position(name: str) -> Callable[..., Any]:
    def lowering(xp, data, *, axis=0, keepdims=1, select_last_index=0):
        axis = axis_of(axis, data.ndim)
        find = getattr(xp, name)
        if not select_last_index:
            return find(data, axis=axis, keepdims=bool(keepdims))
        return data.shape[axis] - 1 - find(xp.flip(data, axis=axis), axis=axis, keepdims=bool(keepdims))

    return lowering


def first_position(name: str) -> Callable[..., Any]:
    def lowering(xp, data, *, axis=0, keepdims=1):
        return position(name)(xp, data, axis=axis, keepdims=keepdims)

    return lowering


for _op, _name in {"ArgMax": "argmax", "ArgMin": "argmin"}.items():
    op(_op, since=12)(position(_name))
    op(_op)(first_position(_name))


# Running sums and products


def running(name: str, neutral: int) -> Callable[..., Any]:
    def lowering(xp, x, axis: Host, *, exclusive=0, reverse=0):
        axis = axis_of(scalar(axis), x.ndim)
        if reverse:
            x = xp.flip(x, axis=axis)
        if exclusive and x.shape[axis]:
            x = x[at(axis, slice(0, x.shape[axis] - 1))]
            x = xp.pad(x, [(int(i == axis), 0) for i in range(x.ndim)], constant_values=neutral)
        y = getattr(xp, name)(x, axis=axis)
        return xp.flip(y, axis=axis) if reverse else y

    return lowering


op("CumSum", since=11)(running("cumsum", 0))
op("CumProd", since=26)(running("cumprod", 1))
