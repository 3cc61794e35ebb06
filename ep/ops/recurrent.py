"""Recurrent layers: RNN, GRU and LSTM as one scan for both directions, after one product for all inputs of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ep.errors import InvalidInput
from ep.ops.precision import is_float, wide
from ep.registry import op

Activation = Callable[[Any], Any]

# name: (function of xp, x, alpha, beta; default alpha; default beta); None: the function has no such parameter
ACTIVATIONS: dict[str, tuple[Callable[..., Any], float | None, float | None]] = {
    "relu": (lambda xp, x, a, b: xp.maximum(x, 0), None, None),
    "tanh": (lambda xp, x, a, b: xp.tanh(x), None, None),
    "sigmoid": (lambda xp, x, a, b: xp.sigmoid(x), None, None),
    "softsign": (lambda xp, x, a, b: x / (1 + xp.abs(x)), None, None),
    "softplus": (lambda xp, x, a, b: xp.logaddexp(x, xp.zeros_like(x)), None, None),
    "affine": (lambda xp, x, a, b: a * x + b, 1.0, 0.0),
    "scaledtanh": (lambda xp, x, a, b: a * xp.tanh(b * x), 1.0, 1.0),
    "hardsigmoid": (lambda xp, x, a, b: xp.clip(a * x + b, 0, 1), 0.2, 0.5),
    "leakyrelu": (lambda xp, x, a, b: xp.where(x >= 0, x, a * x), 0.01, None),
    "thresholdedrelu": (lambda xp, x, a, b: xp.where(x >= a, x, 0), 1.0, None),
    "elu": (lambda xp, x, a, b: xp.where(x >= 0, x, a * xp.expm1(xp.minimum(x, 0))), 1.0, None),
}

# for each direction whether it runs backwards
DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}


@dataclass(frozen=True, slots=True)
class Layer:
    """The attributes that all recurrent layers share; `defaults` are the activations of one direction."""

    defaults: tuple[str, ...]
    activations: Sequence[str] | None
    activation_alpha: Sequence[float] | None
    activation_beta: Sequence[float] | None
    clip: float | None
    direction: str
    layout: int
    hidden_size: int | None = None

    @property
    def reverses(self) -> tuple[bool, ...]:
        if self.direction in DIRECTIONS:
            return DIRECTIONS[self.direction]
        raise InvalidInput(f"direction {self.direction!r} is unknown.", fix="use forward, reverse or bidirectional.")

    def chosen(self) -> list[tuple[Chosen, ...]]:
        """The activations of each direction; alphas and betas go in order to those functions that have them."""
        count, each = len(self.reverses), len(self.defaults)
        names = (self.activations or self.defaults * count)[: count * each]
        if len(names) < count * each:
            raise InvalidInput(f"{len(names)} activations are given.", fix=f"give {count * each}.")
        alpha, beta = iter(self.activation_alpha or ()), iter(self.activation_beta or ())
        # onnxruntime and OpenVINO clip what enters the gates, not the cell that enters LSTM's third function
        limits = [None if i % each == 2 else self.clip for i in range(count * each)]
        flat = []
        for name, limit in zip(names, limits, strict=True):
            if name.lower() not in ACTIVATIONS:
                raise InvalidInput(f"activation {name!r} is unknown.", fix=f"use one of {', '.join(ACTIVATIONS)}.")
            _, a, b = ACTIVATIONS[name.lower()]
            a = a if a is None else next(alpha, a)
            b = b if b is None else next(beta, b)
            flat.append(Chosen(name.lower(), a, b, limit))
        return [tuple(flat[i * each : (i + 1) * each]) for i in range(count)]


@dataclass(frozen=True, slots=True)
class Chosen:
    """An activation, its parameters, and what its argument is clipped to."""

    name: str
    alpha: float | None
    beta: float | None
    limit: float | None

    def function(self, xp: Any) -> Activation:
        function, a, b, limit = ACTIVATIONS[self.name][0], self.alpha, self.beta, self.limit
        if limit is None:
            return lambda x: function(xp, x, a, b)
        return lambda x: function(xp, xp.clip(x, -limit, limit), a, b)


Step = Callable[[tuple[Any, ...], Any], tuple[Any, ...]]  # (states, projected input) → states; the first is Y
Cell = Callable[..., tuple[Activation, Step]]  # (xp, activations, *weights) → the projection of inputs, and the step

# Numbers of a direction's hidden state up to which both directions take their steps together. In code for the CPU, one
# loop with products in batches takes 0.5 to 1 of the time of two, and compiles in two thirds. The products of larger
# states are slower in batches, and two loops run at the same time.
SMALL = 64


def run_layer(
    xp: Any, layer: Layer, cell: Cell, x: Any, weights: Sequence[Any], sequence_lens: Any, initial: Sequence[Any],
    *, batched: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    """Y, then the last value of every state. `cell` is that of one direction; if `batched`, its step also takes states
    and weights with an axis of directions in front."""
    dtype = xp.dtype_of(x)
    x, *initial = (wide(xp, v) for v in (x, *initial))
    weights = [v if v is None or not is_float(xp.dtype_of(v)) else wide(xp, v) for v in weights]
    _check(layer, weights, initial)
    if layer.layout:
        x = xp.swapaxes(x, 0, 1)
        initial = [v if v is None else xp.swapaxes(v, 0, 1) for v in initial]
    hidden = min(weights[1].shape[1:])  # the other side is as wide as all gates; which one is which differs
    zero = xp.zeros((len(layer.reverses), x.shape[1], hidden), dtype=xp.dtype_of(x))
    states = tuple(zero if v is None else v for v in initial)
    chosen = layer.chosen()
    functions = [[activation.function(xp) for activation in own] for own in chosen]
    cells = [cell(xp, own, *(v if v is None else v[d] for v in weights)) for d, own in enumerate(functions)]
    alive = None if sequence_lens is None or x.shape[0] == 0 else _alive(xp, sequence_lens, x.shape[0])
    if batched and len(set(chosen)) < len(chosen) and x.shape[1] * hidden <= SMALL:
        _, step = cell(xp, functions[0], *(v if v is None or v.ndim > 2 else v[:, None] for v in weights))
        inputs = xp.stack([project(v) for (project, _), v in zip(cells, (x, x[::-1]), strict=True)], axis=1)
        alive = None if alive is None else xp.stack([alive, alive[::-1]], axis=1)
        y, *last = _run(xp, inputs, step, states, alive, False)
        y = xp.stack([y[:, 0], y[::-1, 1]], axis=1)
    else:
        outputs = [
            _run(xp, project(x), step, tuple(v[d] for v in states), alive, reverse)
            for d, ((project, step), reverse) in enumerate(zip(cells, layer.reverses, strict=True))
        ]
        places = (1, *(0 for _ in initial))  # where the axis of the directions goes
        y, *last = (xp.stack(parts, axis=i) for i, parts in zip(places, zip(*outputs, strict=True), strict=True))
    if layer.layout:
        y, last = xp.transpose(y, (2, 0, 1, 3)), [xp.swapaxes(v, 0, 1) for v in last]
    return tuple(xp.astype(v, dtype) for v in (y, *last))


def _check(layer: Layer, weights: Sequence[Any], initial: Sequence[Any]) -> None:
    """Refuses arrays of other directions or sizes than the attributes name: no library notices all of these."""
    count, hidden = len(layer.reverses), min(weights[1].shape[1:])
    if layer.hidden_size not in (None, hidden):
        raise InvalidInput(f"hidden_size is {layer.hidden_size}, but the weights R are {list(weights[1].shape)}.")
    found = [v.shape[0] for v in weights if v is not None] + [v.shape[layer.layout] for v in initial if v is not None]
    if any(n != count for n in found):
        raise InvalidInput(
            f"direction {layer.direction!r} needs {count} of every weight and initial state, but there are {found}."
        )


def _alive(xp: Any, lengths: Any, steps: int) -> Any:
    """[T, B, 1]: whether a sequence has not ended yet."""
    clock = xp.reshape(xp.arange(steps, dtype=np.int32), (steps, 1, 1))
    return clock < xp.reshape(xp.astype(lengths, np.int32), (1, -1, 1))


def _run(xp: Any, inputs: Any, step: Step, states: tuple[Any, ...], alive: Any, reverse: bool) -> tuple[Any, ...]:
    """Y [T, B, H] and the last states; a sequence that has ended keeps its states and gives zeros.

    Backwards, the steps beyond a sequence's end come first and are skipped, so it starts at its own end.
    """
    if inputs.shape[0] == 0:
        return xp.zeros((0, *states[0].shape), dtype=xp.dtype_of(inputs)), *states

    def whole(carry: tuple[Any, ...], xs: tuple[Any, ...]) -> tuple[Any, Any]:
        carry = step(carry, xs[0])
        return carry, (carry[0],)

    def ragged(carry: tuple[Any, ...], xs: tuple[Any, ...]) -> tuple[Any, Any]:
        alive = xs[1]
        new = step(carry, xs[0])
        carry = tuple(xp.where(alive, now, old) for now, old in zip(new, carry, strict=True))
        return carry, (xp.where(alive, carry[0], 0),)

    if alive is None:
        carry, (y,) = xp.scan(whole, states, (inputs,), reverse=reverse)
    else:
        carry, (y,) = xp.scan(ragged, states, (inputs, alive), reverse=reverse)
    return y, *carry


def biases(b: Any) -> tuple[Any, Any]:
    """Wb and Rb."""
    half = b.shape[-1] // 2
    return b[..., :half], b[..., half:]


def projection(xp: Any, w: Any, bias: Any) -> Activation:
    """What W and the biases make of the inputs of all steps."""
    return lambda x: xp.matmul(x, xp.transpose(w)) if bias is None else xp.matmul(x, xp.transpose(w)) + bias


def _gates(x: Any, count: int) -> list[Any]:
    size = x.shape[-1] // count
    return [x[..., i * size : (i + 1) * size] for i in range(count)]


def rnn_cell(xp: Any, functions: Sequence[Activation], w: Any, r: Any, b: Any) -> tuple[Activation, Step]:
    (f,) = functions
    across = xp.swapaxes(r, -1, -2)

    def step(states: Any, xw: Any) -> tuple[Any, ...]:
        return (f(xw + xp.matmul(states[0], across)),)

    return projection(xp, w, None if b is None else sum(biases(b))), step


def gru_cell(
    xp: Any, functions: Sequence[Activation], w: Any, r: Any, b: Any, *, linear_before_reset: int
) -> tuple[Activation, Step]:
    f, g = functions
    size = r.shape[-1]
    wb, rb = (None, None) if b is None else biases(b)
    across = xp.swapaxes(r, -1, -2)
    if linear_before_reset:

        def step(states: Any, xw: Any) -> tuple[Any, ...]:
            hr = xp.matmul(states[0], across)
            hr = hr if rb is None else hr + rb
            z, reset = _gates(f(xw[..., : 2 * size] + hr[..., : 2 * size]), 2)
            new = g(xw[..., 2 * size :] + reset * hr[..., 2 * size :])
            return (new + z * (states[0] - new),)

        return projection(xp, w, wb), step

    gates, candidate = across[..., : 2 * size], across[..., 2 * size :]

    def step(states: Any, xw: Any) -> tuple[Any, ...]:
        z, reset = _gates(f(xw[..., : 2 * size] + xp.matmul(states[0], gates)), 2)
        new = g(xw[..., 2 * size :] + xp.matmul(reset * states[0], candidate))
        return (new + z * (states[0] - new),)

    return projection(xp, w, None if b is None else wb + rb), step


def lstm_cell(
    xp: Any, functions: Sequence[Activation], w: Any, r: Any, b: Any, p: Any, *, input_forget: int
) -> tuple[Activation, Step]:
    across = xp.swapaxes(r, -1, -2)
    step = lstm_step(functions, lambda h: xp.matmul(h, across), p, input_forget)
    return projection(xp, w, None if b is None else sum(biases(b))), step


def lstm_step(functions: Sequence[Activation], recurrent: Activation, p: Any, input_forget: int) -> Step:
    """One step of an LSTM; `recurrent` is the product of the hidden state and its weights."""
    f, g, h = functions
    pi, po, pf = (0, 0, 0) if p is None else _gates(p, 3)

    def step(states: Any, xw: Any) -> tuple[Any, ...]:
        cell = states[1]
        gates = xw + recurrent(states[0])
        if p is None:
            i, o, forget = _gates(f(gates[..., : 3 * cell.shape[-1]]), 3)
        else:
            i, o, forget = _gates(gates, 4)[:3]
            i, forget = f(i + pi * cell), f(forget + pf * cell)
        forget = 1 - i if input_forget else forget
        cell = forget * cell + i * g(gates[..., 3 * cell.shape[-1] :])
        o = o if p is None else f(o + po * cell)
        return o * h(cell), cell

    return step


@op("RNN")
def rnn(
    xp, x, w, r, b=None, sequence_lens=None, initial_h=None, *, activation_alpha=None, activation_beta=None,
    activations=("Tanh", "Tanh"), clip=None, direction="forward", hidden_size=None, layout=0,
    output_sequence=0,
):  # fmt: skip
    layer = Layer(("Tanh",), activations, activation_alpha, activation_beta, clip, direction, layout, hidden_size)
    return run_layer(xp, layer, rnn_cell, x, (w, r, b), sequence_lens, (initial_h,), batched=True)


@op("GRU")
def gru(
    xp, x, w, r, b=None, sequence_lens=None, initial_h=None, *, activation_alpha=None, activation_beta=None,
    activations=None, clip=None, direction="forward", hidden_size=None, layout=0, linear_before_reset=0,
    output_sequence=0,
):  # fmt: skip
    layer = Layer(
        ("Sigmoid", "Tanh"), activations, activation_alpha, activation_beta, clip, direction, layout, hidden_size
    )
    cell = partial(gru_cell, linear_before_reset=linear_before_reset)
    return run_layer(xp, layer, cell, x, (w, r, b), sequence_lens, (initial_h,), batched=True)


@op("LSTM")
def lstm(
    xp, x, w, r, b=None, sequence_lens=None, initial_h=None, initial_c=None, p=None, *, activation_alpha=None,
    activation_beta=None, activations=None, clip=None, direction="forward", hidden_size=None, input_forget=0,
    layout=0, output_sequence=0,
):  # fmt: skip
    layer = Layer(
        ("Sigmoid", "Tanh", "Tanh"),
        activations,
        activation_alpha,
        activation_beta,
        clip,
        direction,
        layout,
        hidden_size,
    )
    cell = partial(lstm_cell, input_forget=input_forget)
    return run_layer(xp, layer, cell, x, (w, r, b, p), sequence_lens, (initial_h, initial_c), batched=True)
