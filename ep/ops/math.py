"""Arithmetic, trigonometry, comparison, logic and bits, element by element."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np

from ep.errors import InvalidInput
from ep.ops.axes import one_of
from ep.ops.legacy import with_broadcast, with_consumed_inputs
from ep.ops.precision import in_wide, is_float, wide, wide_dtype
from ep.registry import op


def of_one(name: str) -> Callable[..., Any]:
    """A lowering that is one function of the namespace, of one array."""

    def lowering(xp, x):
        return getattr(xp, name)(x)

    return lowering


def of_two(name: str) -> Callable[..., Any]:
    """A lowering that is one function of the namespace, of two arrays."""

    def lowering(xp, a, b):
        return getattr(xp, name)(a, b)

    return lowering


def since_opset_1(op_type: str, fn: Callable[..., Any]) -> None:
    """Registers a lowering for opset 6, where `consumed_inputs` went away, and for opset 1."""
    op(op_type, since=6)(fn)
    op(op_type, since=1)(with_consumed_inputs(fn))


def with_legacy_broadcast(op_type: str, fn: Callable[..., Any], consumes: bool = False) -> None:
    """Registers a lowering for opset 7, where NumPy's broadcasting came, and for the opsets before."""
    op(op_type, since=7)(fn)
    old = with_broadcast(fn)
    if consumes:
        since_opset_1(op_type, old)
    else:
        op(op_type, since=1)(old)


# One array: ONNX name → name in the namespace

FROM_1 = {
    **{"Abs": "abs", "Ceil": "ceil", "Exp": "exp", "Floor": "floor", "Log": "log"},
    **{"Neg": "negative", "Sigmoid": "sigmoid", "Sqrt": "sqrt", "Tanh": "tanh"},
}
LATER = {
    **{("Sin", 7): "sin", ("Cos", 7): "cos", ("Tan", 7): "tan"},
    **{("Asin", 7): "arcsin", ("Acos", 7): "arccos", ("Atan", 7): "arctan"},
    **{("Sinh", 9): "sinh", ("Cosh", 9): "cosh"},
    **{("Asinh", 9): "arcsinh", ("Acosh", 9): "arccosh", ("Atanh", 9): "arctanh"},
    **{("Not", 1): "logical_not", ("Sign", 9): "sign", ("Round", 11): "round"},
    ("BitwiseNot", 18): "bitwise_invert",
}

for _op, _name in FROM_1.items():
    since_opset_1(_op, of_one(_name))
for (_op, _since), _name in LATER.items():
    op(_op, since=_since)(of_one(_name))


def reciprocal(xp, x):
    return 1 / x


since_opset_1("Reciprocal", reciprocal)


@op("Erf", since=9)
def erf(xp, x):
    if is_float(xp.dtype_of(x)):
        return xp.erf(x)
    return in_wide(erf)(xp, x)  # integers, which the schema allows


@op("IsNaN", since=9)
def is_nan(xp, x):
    return xp.isnan(_at_least_16_bits(xp, x))


@op("IsInf", since=10)
def is_inf(xp, x, *, detect_negative=1, detect_positive=1):
    x = _at_least_16_bits(xp, x)
    if detect_negative and detect_positive:
        return xp.isinf(x)
    if detect_positive or detect_negative:
        return x == (float("inf") if detect_positive else float("-inf"))
    return xp.zeros(x.shape, dtype=np.bool_)


def _at_least_16_bits(xp: Any, x: Any) -> Any:
    return xp.astype(x, np.float32) if xp.dtype_of(x).itemsize == 1 else x


# Two arrays: ONNX name → name in the namespace

for _op, _name in {"Add": "add", "Sub": "subtract", "Mul": "multiply"}.items():
    with_legacy_broadcast(_op, of_two(_name), consumes=True)
for _op, _name in {
    **{"And": "logical_and", "Or": "logical_or", "Xor": "logical_xor"},
    **{"Equal": "equal", "Greater": "greater", "Less": "less"},
}.items():
    with_legacy_broadcast(_op, of_two(_name))
for (_op, _since), _name in {
    **{("GreaterOrEqual", 12): "greater_equal", ("LessOrEqual", 12): "less_equal"},
    **{("BitwiseAnd", 18): "bitwise_and", ("BitwiseOr", 18): "bitwise_or", ("BitwiseXor", 18): "bitwise_xor"},
}.items():
    op(_op, since=_since)(of_two(_name))


def div(xp, a, b):
    """Integers are divided as in C: rounded toward zero."""
    dtype = xp.dtype_of(a)
    if is_float(dtype):
        return xp.divide(a, b)
    quotient = xp.floor_divide(a, b)
    if dtype.kind == "u":
        return quotient
    inexact = quotient * b != a
    return quotient + xp.astype(xp.logical_and(inexact, (a < 0) != (b < 0)), dtype)


with_legacy_broadcast("Div", div, consumes=True)


@op("Mod", since=10)
def mod(xp, a, b, *, fmod=0):
    if not fmod:
        return xp.remainder(a, b)
    if is_float(xp.dtype_of(a)):
        return xp.fmod(a, b)
    floored = xp.remainder(a, b)
    other_sign = xp.logical_and(floored != 0, (a < 0) != (b < 0))
    return xp.where(other_sign, floored - b, floored)


@op("BitShift", since=11)
def bit_shift(xp, a, b, *, direction):
    """Shifts by the width or more, and negative ones, leave copies of the sign, or zeros (opset 28)."""
    one_of("direction", direction, "LEFT", "RIGHT")
    if direction == "LEFT":
        return xp.left_shift(a, _shift_count(xp, a, b))
    return xp.right_shift(a, _shift_count(xp, a, b))


def _shift_count(xp: Any, a: Any, b: Any) -> Any:
    dtype = xp.dtype_of(a)
    return b if dtype.kind == "u" else xp.where(b < 0, 8 * dtype.itemsize, b)


def power(xp, a, b):
    """The result has the type of the base; a fractional power of an integer is truncated."""
    base, exponent = xp.dtype_of(a), xp.dtype_of(b)
    if is_float(base):
        if base == exponent and base.itemsize > 2:
            return xp.power(a, b)
        return xp.astype(xp.power(wide(xp, a), xp.astype(b, wide_dtype(base))), base)
    if is_float(exponent):
        return xp.astype(xp.power(xp.astype(a, wide_dtype(exponent)), wide(xp, b)), base)
    common = base if base == exponent else np.dtype(np.int64)
    return xp.astype(_integer_power(xp, xp.astype(a, common), xp.astype(b, common)), base)


def _integer_power(xp: Any, a: Any, b: Any) -> Any:
    if xp.dtype_of(b).kind == "u":
        return xp.power(a, b)
    odd = xp.bitwise_and(b, 1) == 1
    of_inverse = xp.where(a == 1, 1, xp.where(a == -1, xp.where(odd, -1, 1), 0))  # 1 / a, truncated
    return xp.where(b < 0, xp.astype(of_inverse, xp.dtype_of(a)), xp.power(a, xp.maximum(b, 0)))


with_legacy_broadcast("Pow", power)


# Any number of arrays


def sum_(xp, *data):
    return reduce(xp.add, data)


def mean(xp, *data):
    total = reduce(xp.add, (wide(xp, x) for x in data))
    return xp.astype(total / len(data), xp.dtype_of(data[0]))


def max_(xp, *data):
    return reduce(xp.maximum, data)


def min_(xp, *data):
    return reduce(xp.minimum, data)


for _op, _fn in {"Sum": sum_, "Mean": mean, "Max": max_, "Min": min_}.items():
    since_opset_1(_op, _fn)


# Choice


@op("Where", since=9)
def where(xp, condition, x, y):
    return xp.where(condition, x, y)


@op("Clip", since=11)
def clip(xp, x, low=None, high=None):
    """Where low > high the result is high."""
    for name, bound in (("min", low), ("max", high)):
        if bound is not None and bound.size != 1:
            raise InvalidInput(f"{name} has the shape {list(bound.shape)}; it must be a scalar.")
    x = x if low is None else xp.maximum(x, low)
    return x if high is None else xp.minimum(x, high)


LARGEST = 3.4028234663852886e38


@op("Clip", since=6)
def clip_6(xp, x, *, min=-LARGEST, max=LARGEST):
    dtype = xp.dtype_of(x)
    low = xp.asarray(np.asarray(min, dtype)) if min > -LARGEST else None
    high = xp.asarray(np.asarray(max, dtype)) if max < LARGEST else None
    return clip(xp, x, low, high)


@op("Clip")
def clip_1(xp, x, *, consumed_inputs=None, min=None, max=None):
    return clip_6(xp, x, min=-LARGEST if min is None else min, max=LARGEST if max is None else max)
