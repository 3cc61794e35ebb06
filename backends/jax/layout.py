"""Channels stay last between convolutions: transposes sink through a traced function until they meet their inverse.

XLA's CPU compiler moves a transpose through elementwise operations, but not through padding, slices, joins and
reductions, and then copies whole images. Here such operations run on the transposed array, with their axes renamed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal

Function = Callable[..., tuple[Any, ...]]


def sink_transposes(function: Function) -> Function:
    """The same function with channels-last arrays wherever that saves a transpose."""

    def run(*arguments: Any) -> tuple[Any, ...]:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
        structure = jax.tree.structure(shapes)
        leaves = [_Value(x) for x in jax.tree.leaves(arguments)]
        return jax.tree.unflatten(structure, [v.plain() for v in _evaluate(closed, leaves)])

    return run


@dataclass(eq=False, slots=True)
class _Value:
    """An array; or its transpose with axis 1 last, or a smaller array to be broadcast, until somebody needs it."""

    array: Any
    last: bool = False  # axis 1 lies last in `array`
    spread: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # shape and dimensions of a broadcast to come
    made: Any = None  # what it stands for, once computed

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what it stands for."""
        if self.spread is not None:
            return self.spread[0]
        shape = np.shape(self.array)
        return (shape[0], shape[-1], *shape[1:-1]) if self.last else shape

    def plain(self) -> Any:
        """What it stands for."""
        if self.spread is None and not self.last:
            return self.array
        if self.made is None and self.spread is not None:
            self.made = lax.broadcast_in_dim(self.array, *self.spread)
        elif self.made is None:
            self.made = lax.transpose(self.array, _first(self.array.ndim))
        return self.made

    def channels_last(self) -> Any:
        """What it stands for with axis 1 moved to the end; scalars stay."""
        if self.last or not self.shape:
            return self.array
        if self.spread is None:
            return lax.transpose(self.array, _last(len(self.shape)))
        shape, dims = self.spread
        order = _last(len(shape))
        places = [order.index(d) for d in dims]
        turn = sorted(range(len(places)), key=places.__getitem__)
        small = lax.transpose(self.array, turn) if turn != list(range(len(turn))) else self.array
        return lax.broadcast_in_dim(small, [shape[d] for d in order], sorted(places))


def _last(rank: int) -> tuple[int, ...]:
    """The permutation that moves axis 1 to the end."""
    return (0, *range(2, rank), 1)


def _first(rank: int) -> tuple[int, ...]:
    """Its inverse."""
    return (0, rank - 1, *range(1, rank - 1))


def _evaluate(closed: ClosedJaxpr, arguments: Sequence[_Value]) -> list[_Value]:
    jaxpr = closed.jaxpr
    env = dict(zip(jaxpr.constvars, map(_Value, closed.consts), strict=True))
    env.update(zip(jaxpr.invars, arguments, strict=True))

    def read(atom: Any) -> _Value:
        return _Value(atom.val) if isinstance(atom, Literal) else env[atom]

    for equation in jaxpr.eqns:
        values = [read(atom) for atom in equation.invars]
        results = _apply(equation, values) or map(_Value, bind(equation, [v.plain() for v in values]))
        env.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def bind(equation: Any, arrays: Sequence[Any], params: dict[str, Any] | None = None) -> Sequence[Any]:
    """What the equation says, as JAX itself evaluates it; with other parameters, if any are given."""
    primitive = equation.primitive
    bound = primitive.get_bind_params(params or equation.params)
    functions, params = bound if isinstance(bound, tuple) else ((), bound)  # a tuple before JAX 0.10
    with equation.ctx.manager:
        results = primitive.bind(*functions, *arrays, **params)
    return results if primitive.multiple_results else [results]


def _apply(equation: Any, values: list[_Value]) -> list[_Value] | None:
    """The results by a rule; `None` where there is none, or it declines."""
    primitive, params = equation.primitive, equation.params
    inner = params.get(_CALLS.get(primitive.name, ""))
    if inner is not None:
        return _evaluate(inner, values)
    rule = _RULES.get(primitive.name)
    if rule is None and primitive.name in _ELEMENTWISE:
        rule = _elementwise
    result = None if rule is None else rule(equation, values)
    return None if result is None else [result]


_CALLS = {"jit": "jaxpr", "custom_jvp_call": "call_jaxpr", "closed_call": "call_jaxpr"}


# Rules. Each takes an equation and its values, and may decline.


def _transpose(equation: Any, values: list[_Value]) -> _Value | None:
    (value,), order = values, tuple(equation.params["permutation"])
    rank = len(order)
    if rank < 3 or value.spread is not None:
        return None
    if value.last:
        return _Value(value.array) if order == _last(rank) else None
    return _Value(value.array, last=True) if order == _first(rank) else None


def _broadcast(equation: Any, values: list[_Value]) -> _Value | None:
    (value, *rest), params = values, equation.params
    if rest or len(params["shape"]) < 3 or params["sharding"] is not None:
        return None
    shape, dims = tuple(params["shape"]), tuple(params["broadcast_dimensions"])
    if value.last and dims[:2] == (0, 1) and shape[:2] == value.shape[:2]:  # images grow
        order = _last(len(shape))
        places = [order.index(dims[axis]) for axis in _last(len(dims))]
        return _Value(lax.broadcast_in_dim(value.array, [shape[axis] for axis in order], places), last=True)
    return _Value(value.plain(), spread=(shape, dims))


def _reshape(equation: Any, values: list[_Value]) -> _Value | None:
    (value, *rest), params = values, equation.params
    shape = params["new_sizes"]
    if rest or not value.last or len(shape) < 3 or shape[:2] != value.shape[:2] or params["dimensions"] is not None:
        return None
    return _Value(lax.reshape(value.array, (shape[0], *shape[2:], shape[1])), last=True)


def _elementwise(equation: Any, values: list[_Value]) -> _Value | None:
    if not _mostly_last(values):
        return None
    return _Value(equation.primitive.bind(*(v.channels_last() for v in values), **equation.params), last=True)


def _concatenate(equation: Any, values: list[_Value]) -> _Value | None:
    if not _mostly_last(values):
        return None
    axis = _last(len(values[0].shape)).index(equation.params["dimension"])
    return _Value(lax.concatenate([v.channels_last() for v in values], axis), last=True)


def _mostly_last(values: list[_Value]) -> bool:
    """Whether fewer elements have to be moved to get all channels last than to get none."""
    if not any(v.last for v in values):
        return False
    sizes = [(v.last, int(np.prod(v.shape))) for v in values if v.spread is None]
    return 2 * sum(size for last, size in sizes if last) >= sum(size for _, size in sizes) > 0


def _pad(equation: Any, values: list[_Value]) -> _Value | None:
    value, filler = values
    if not value.last:
        return None
    config = equation.params["padding_config"]
    return _Value(lax.pad(value.array, filler.plain(), [config[i] for i in _last(len(config))]), last=True)


def _slice(equation: Any, values: list[_Value]) -> _Value | None:
    (value,), params = values, equation.params
    if not value.last:
        return None
    order = _last(len(value.shape))
    starts, limits, strides = (
        [sizes[i] for i in order]
        for sizes in (params["start_indices"], params["limit_indices"], params["strides"] or (1,) * len(order))
    )
    return _Value(lax.slice(value.array, starts, limits, strides), last=True)


def _reduce(equation: Any, values: list[_Value]) -> _Value | None:
    (value,), params = values, equation.params
    axes = params["axes"]
    if not value.last or 0 in axes:
        return None
    rank = len(value.shape)
    places = tuple(sorted(_last(rank).index(axis) for axis in axes))
    result = equation.primitive.bind(value.array, **params | {"axes": places})
    return _Value(result, last=1 not in axes and result.ndim >= 3)


_RULES: dict[str, Callable[[Any, list[_Value]], _Value | None]] = {
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "concatenate": _concatenate,
    "pad": _pad,
    "slice": _slice,
    "reduce_sum": _reduce,
    "reduce_max": _reduce,
    "reduce_min": _reduce,
}

_ELEMENTWISE = frozenset(
    (
        *("abs", "acos", "acosh", "add", "and", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil", "clamp"),
        *("convert_element_type", "cos", "cosh", "div", "eq", "erf", "erfc", "erf_inv", "exp", "exp2", "expm1"),
        *("floor", "ge", "gt", "integer_pow", "is_finite", "le", "log", "log1p", "logistic", "lt", "max", "min"),
        *("mul", "ne", "neg", "nextafter", "not", "or", "pow", "rem", "round", "rsqrt", "select_n", "sign", "sin"),
        *("sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor"),
        *("shift_left", "shift_right_arithmetic", "shift_right_logical", "population_count", "clz"),
    )
)
