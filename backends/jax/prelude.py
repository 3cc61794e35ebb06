"""What of a function depends on its weights alone? It is computed once, before the first call.

Weights are arguments, so XLA turns a kernel or a transposed matrix into its own layout in every call: up to half the
time of a small convolutional or recurrent net. As constants they would not be turned, but be part of the stored code.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from ep.backends.jax.kept import Item, Part
from ep.backends.jax.layout import bind

BATCH = 64 << 20  # bytes of weights that are taken at a time, or an eighth of them: they are copies where not aligned
SPARE = 32 << 20  # bytes by which what is kept may exceed the weights that it stands for: 8-bit ones are widened
SHARE = 0.25  # of the machine's memory: models whose weights would take more stay as they are in their files
MOST = 8  # times the size of its weights, as 4 bits have in 32; what is larger is repeated rather than computed
VIEWS = frozenset(("reshape", "squeeze", "expand_dims"))  # XLA does them for nothing

Kept = tuple[Any, tuple[int, ...] | None]  # a value of the function, and the order of axes that a product wants


@dataclass(frozen=True)
class Split:
    """A function as `codes`, from weights to what is kept, and `main`, from arguments, `raw` weights and all that."""

    main: Any
    raw: tuple[int, ...]  # the weights that main takes as they are
    items: tuple[Item, ...]
    parts: tuple[Part, ...]
    codes: tuple[Any, ...]


def split(closed: ClosedJaxpr, structure: Any, weights: int, *, apart: bool = False) -> Split | None:
    """Split a function whose last `weights` inputs are the same in every call; `None` if that saves nothing.

    With `apart`, each array that is kept has a part of its own.
    """
    jaxpr = closed.jaxpr
    count = len(jaxpr.invars) - weights
    arguments, constants = jaxpr.invars[:count], jaxpr.invars[count:]
    cones = _cones(jaxpr, constants)
    made_by = {v: equation for equation in jaxpr.eqns for v in equation.outvars}
    spare, kept = SPARE, []
    for value, order in _frontier(jaxpr, cones, made_by):
        size = sum(_bytes(constants[i]) for i in cones[value])
        more = _bytes(value) - size
        if more <= 0 or (more <= spare and _bytes(value) <= MOST * size):
            spare -= max(more, 0)
            kept.append((value, order))
    if not kept or sum(_bytes(value) for value, _ in kept) > _memory() * SHARE:
        return None
    later = _needed(jaxpr, [v for v in jaxpr.outvars if not isinstance(v, Literal)], kept)
    raw = [i for i, w in enumerate(constants) if w in later.reads]
    consts = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    contents = {v: _content(array) for v, array in consts.items()}
    items = tuple(_item((v, order), sorted(cones[v]), constants, made_by, contents) for v, order in kept)

    def code(part: Part) -> Any:
        results = [kept[i] for i in part.items]
        needed = _needed(jaxpr, [value for value, _ in results], ())

        def run(*arrays: Any) -> tuple[Any, ...]:
            env = consts | dict(zip([constants[i] for i in part.sources], arrays, strict=True))
            _evaluate(needed.equations, env, {})
            return tuple(env[v] if order is None else lax.transpose(env[v], order) for v, order in results)

        return run

    def main(*arrays: Any) -> Any:
        own = [*arguments, *(constants[i] for i in raw)]
        env = consts | dict(zip(own, arrays[: len(own)], strict=True))
        turned = dict(zip(kept, arrays[len(own) :], strict=True))
        env.update((value, array) for (value, order), array in turned.items() if order is None)
        _evaluate(later.equations, env, turned)
        leaves = [v.val if isinstance(v, Literal) else env[v] for v in jaxpr.outvars]
        return jax.tree.unflatten(structure, leaves)

    parts, firsts = _parts(items, [_bytes(w) for w in constants], apart)
    return Split(main, tuple(raw), items, parts, tuple(map(code, firsts)))


def _parts(items: Sequence[Item], sizes: Sequence[int], apart: bool) -> tuple[tuple[Part, ...], list[Part]]:
    """The items in batches, and one batch for each code: those that compute the same of other weights share it."""
    needs = [sum(sizes[i] for i in item.sources) for item in items]
    most = max(BATCH, sum(needs) // 8)
    batches: list[list[int]] = []
    size = 0
    for place, need in enumerate(needs):
        if apart or not batches or size + need > most:
            batches.append([])
            size = 0
        batches[-1].append(place)
        size += need
    parts: list[Part] = []
    codes: dict[Any, tuple[int, Part]] = {}
    for batch in batches:
        sources = tuple(dict.fromkeys(i for place in batch for i in items[place].sources))
        look = tuple((items[p].digest, tuple(map(sources.index, items[p].sources))) for p in batch)
        number = codes.setdefault(look, (len(codes), Part(len(codes), tuple(batch), sources)))[0]
        parts.append(Part(number, tuple(batch), sources))
    return tuple(parts), [part for _, part in codes.values()]


def _cones(jaxpr: Any, constants: Sequence[Any]) -> dict[Any, frozenset[int]]:
    """Of each value that depends on nothing else: the numbers of the weights that it is computed from."""
    cones: dict[Any, frozenset[int]] = {w: frozenset((i,)) for i, w in enumerate(constants)}
    cones.update((v, frozenset()) for v in jaxpr.constvars)
    for equation in jaxpr.eqns:
        reads = [v for v in equation.invars if not isinstance(v, Literal)]
        if not equation.effects and all(v in cones for v in reads):
            cone = frozenset().union(*(cones[v] for v in reads))
            cones.update((v, cone) for v in equation.outvars)
    return cones


def _frontier(jaxpr: Any, cones: dict[Any, frozenset[int]], made_by: dict[Any, Any]) -> list[Kept]:
    """What the rest of the function reads of such values, but for weights themselves: in order, once each."""
    found: dict[Kept, None] = {}
    needed = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    for equation in reversed(jaxpr.eqns):
        if all(v in cones for v in equation.outvars) or not (needed.intersection(equation.outvars) or equation.effects):
            continue
        for number, value in enumerate(equation.invars):
            if isinstance(value, Literal):
                continue
            needed.add(value)
            order = _wanted(equation, number)
            if order is None:
                value = _behind_views(value, made_by)
            if cones.get(value) and (order is not None or value in made_by):
                found[value, order] = None
    return list(found)[::-1]


def _behind_views(value: Any, made_by: dict[Any, Any]) -> Any:
    """What a value shows in another shape, or repeats: XLA does both without a copy."""
    while value in made_by and made_by[value].primitive.name in (*VIEWS, "broadcast_in_dim"):
        shown = made_by[value].invars[0]
        if isinstance(shown, Literal):
            break
        value = shown
    return value


def _wanted(equation: Any, operand: int) -> tuple[int, ...] | None:
    """The order of axes in which XLA multiplies an operand without turning it; `None`: the one that it has."""
    if equation.primitive.name != "dot_general":
        return None
    contracted, batch = (tuple(axes[operand]) for axes in equation.params["dimension_numbers"])
    shape = equation.invars[operand].aval.shape
    free = tuple(axis for axis in range(len(shape)) if axis not in (*contracted, *batch))
    order = (*batch, *contracted, *free) if operand else (*batch, *free, *contracted)
    moved = [axis for axis in order if shape[axis] != 1]
    return order if moved != sorted(moved) else None


def _memory() -> int:
    """Bytes of this machine's memory, or of a small one's where the system does not tell."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 8 << 30


def _bytes(value: Any) -> int:
    return prod(value.aval.shape) * value.aval.dtype.itemsize


@dataclass(frozen=True)
class _Part:
    equations: list[Any]
    reads: set[Any]


def _needed(jaxpr: Any, wanted: Iterable[Any], kept: Sequence[Kept]) -> _Part:
    """The equations behind values, and all that these read; what is kept is there already."""
    given = set(kept)
    reads = {v for v in wanted if (v, None) not in given}
    equations = []
    for equation in reversed(jaxpr.eqns):
        if reads.intersection(equation.outvars) or equation.effects:
            equations.append(equation)
            for number, value in enumerate(equation.invars):
                if not isinstance(value, Literal) and not {(value, None), (value, _wanted(equation, number))} & given:
                    reads.add(value)
    return _Part(equations[::-1], reads)


def _evaluate(equations: Iterable[Any], env: dict[Any, Any], turned: dict[Kept, Any]) -> None:
    for equation in equations:
        values, sides = [], []
        for number, value in enumerate(equation.invars):
            order = None if isinstance(value, Literal) else _wanted(equation, number)
            there = order is not None and (value, order) in turned
            sides.append(order if there else None)
            values.append(value.val if isinstance(value, Literal) else turned[value, order] if there else env[value])
        params = _turned(equation.params, sides) if any(sides) else None
        env.update(zip(equation.outvars, bind(equation, values, params), strict=True))


def _turned(params: dict[str, Any], orders: Sequence[tuple[int, ...] | None]) -> dict[str, Any]:
    """The parameters of a product whose operands have their axes in these orders."""
    contracted, batch = ([list(axes) for axes in pair] for pair in params["dimension_numbers"])
    for operand, order in enumerate(orders):
        if order is not None:
            for axes in (contracted, batch):
                axes[operand] = [order.index(axis) for axis in axes[operand]]
    return params | {"dimension_numbers": (tuple(map(tuple, contracted)), tuple(map(tuple, batch)))}


def _item(
    kept: Kept, sources: list[int], constants: Sequence[Any], made_by: dict[Any, Any], contents: dict[Any, str]
) -> Item:
    """What is kept, with a digest of how it is computed that is the same in every function that does."""
    value, order = kept
    names = contents | {constants[n]: f"weight {i} {constants[n].aval}" for i, n in enumerate(sources)}

    def name(v: Any) -> str:
        if isinstance(v, Literal):
            return f"{v.val!r} {v.aval}"
        if v not in names:
            equation = made_by[v]
            what = uuid.uuid4().hex if any(map(_is_function, equation.params.values())) else str(equation.params)
            reads = ", ".join(map(name, equation.invars))
            text = f"{equation.primitive}[{what}]({reads}).{list(equation.outvars).index(v)}"
            names[v] = hashlib.sha256(text.encode()).hexdigest()
        return names[v]

    shape = value.aval.shape if order is None else tuple(value.aval.shape[axis] for axis in order)
    digest = hashlib.sha256(f"{name(value)} {order}".encode()).hexdigest()
    return Item(digest, tuple(sources), shape, value.aval.dtype.name)


def _content(array: Any) -> str:
    array = np.asarray(array)
    return f"{array.dtype}{array.shape}{hashlib.sha256(array.tobytes()).hexdigest()}"


def _is_function(parameter: Any) -> bool:
    if isinstance(parameter, tuple | list):
        return any(map(_is_function, parameter))
    return isinstance(parameter, ClosedJaxpr | Jaxpr) or callable(parameter)
