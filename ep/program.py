"""How a list of nodes is evaluated: the only loop over nodes, for every namespace, eager or traced."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ep.errors import EpError, ExecutionError
from ep.indices import check_step
from ep.registry import Host, HostIfCheap, Lowering, Overrides, ShapeOf


class Untraceable(Exception):
    """A lowering needs a value that does not exist while tracing; the planner cuts the graph at `step`."""

    step: Step | None = None


class TooLong(Exception):
    """Steps on the host took more time than they were given."""


@dataclass(frozen=True, slots=True)
class Step:
    """One node, ready to run: the `Node` of the provider interface.

    Values are hashable keys of the environment, attributes are Python values, dtypes are NumPy's
    (`object` for strings, `None` where the model does not tell).
    """

    name: str
    lowering: Lowering
    opset: int
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    attributes: dict[str, Any]
    bodies: dict[str, Any]  # `ep.bodies.InlineBody`, or a compiled one with the same methods
    input_dtypes: tuple[np.dtype | None, ...] = ()
    output_dtypes: tuple[np.dtype | None, ...] = ()

    @property
    def op(self) -> str:
        return f"{self.lowering.key.domain or 'ai.onnx'}::{self.lowering.key.op_type}"

    def reads(self) -> Iterable[Any]:
        """Every value the step needs: its inputs and what its bodies capture."""
        yield from (v for v in self.inputs if v is not None)
        for body in self.bodies.values():
            yield from body.captures


@dataclass(frozen=True, slots=True)
class Runner:
    """Where steps run: the device namespace, the host namespace, and which steps are bookkeeping of the host."""

    xp: Any
    host: Any
    overrides: Overrides | None = None
    on_host: frozenset[int] = frozenset()  # id() of steps that run with the host namespace
    until: float = math.inf  # on `time.perf_counter`: no step starts after it
    contents: Mapping[Any, np.ndarray] = field(default_factory=dict)  # of constants that come as arguments
    looks: bool = False  # whether indices are checked that are on the device, too: for debugging, it waits for them

    def evaluate(self, steps: Sequence[Step], env: dict[Any, Any]) -> None:
        """Runs the steps in order, reading and writing `env` (value → array, list of arrays, or None)."""
        with np.errstate(all="ignore"):  # overflow and NaN are results like others, on the host too
            for step in steps:
                if self.until < math.inf and time.perf_counter() > self.until:
                    raise TooLong
                self._run(step, env)

    def _run(self, step: Step, env: dict[Any, Any]) -> None:
        at_host = id(step) in self.on_host
        xp = self.host if at_host else self.xp
        try:
            if step.lowering.indices and not (xp is self.host and all(i.checks for _, i in step.lowering.indices)):
                self._check(step, env)
            results = self._call(step, xp, env)
        except EpError as error:
            error.at = error.at or located(step)
            raise
        except TooLong:  # of a body
            raise
        except Untraceable as signal:
            signal.step = step  # the outermost step wins: that is the one which a plan can cut
            raise
        except Exception as cause:
            self._check(step, env)
            raise explain(step, cause, [env.get(v) for v in step.inputs]) from cause
        if not isinstance(results, tuple) and (len(step.outputs) == 1 or not isinstance(results, list)):
            results = (results,)  # a list is a sequence, or several outputs
        if len(results) < len(step.outputs) and any(v is not None for v in step.outputs[len(results) :]):
            many = TypeError(f"its lowering returned {len(results)} outputs; the node names {len(step.outputs)}.")
            raise explain(step, many, [env.get(v) for v in step.inputs])
        if xp is self.host:
            results = _narrowed(results, step.output_dtypes)
        for value, result in zip(step.outputs, results, strict=False):
            if value is not None:
                env[value] = np.asarray(result) if isinstance(result, np.generic) else result

    def _call(self, step: Step, xp: Any, env: dict[Any, Any]) -> Any:
        lowering = step.lowering
        arguments = [
            None if value is None else self._argument(env[value], lowering.role(i), xp)
            for i, value in enumerate(step.inputs)
        ]
        keywords = step.attributes
        if step.bodies:
            keywords = keywords | {name: body.bind(env, self) for name, body in step.bodies.items()}
        native = self.overrides.get(lowering.key) if self.overrides is not None and xp is self.xp else None
        if native is not None:
            result = native(xp, *arguments, **keywords)
            if result is not NotImplemented:
                return result
        return lowering.fn(xp, *arguments, **keywords)

    def _check(self, step: Step, env: dict[Any, Any]) -> None:
        """Refuses indices of a node that are beyond what they index; only those that the host has are looked at."""
        try:
            check_step(step, lambda value: getattr(env[value], "shape", None), lambda value: self._known(value, env))
        except EpError as error:
            error.at = error.at or located(step)
            raise

    def _known(self, value: Any, env: dict[Any, Any]) -> np.ndarray | None:
        """The contents of a value where the host has them, or may wait for them."""
        array = env[value]
        if isinstance(array, np.ndarray):
            return array
        if value in self.contents:
            return self.contents[value]
        try:
            return to_host(array, self.xp) if self.looks and not isinstance(array, list) else None
        except Untraceable:
            return None

    def _argument(self, value: Any, role: Any, xp: Any) -> Any:
        if role is ShapeOf or (role is HostIfCheap and xp is not self.host):
            return value
        if role is Host:
            return to_host(value, self.xp)
        if isinstance(value, list):
            return [self._argument(item, role, xp) for item in value]
        if xp is self.host:
            return to_host(value, self.xp)
        return xp.asarray(value) if isinstance(value, np.ndarray | np.generic) else value


WIDER = (np.dtype(np.float32), np.dtype(np.float64))


def _narrowed(results: Sequence[Any], dtypes: Sequence[np.dtype | None]) -> Sequence[Any]:
    """Results in bfloat16 and its like where the node says so: NumPy widens those beside a Python float."""
    if all(dtype is None or dtype.isbuiltin == 1 for dtype in dtypes):
        return results
    return [
        r.astype(d) if d is not None and d.isbuiltin == 2 and getattr(r, "dtype", d) in WIDER else r
        for r, d in zip(results, dtypes, strict=False)
    ]


def walk(steps: Iterable[Step]) -> Iterator[Step]:
    """Every step, with those inside bodies."""
    for step in steps:
        yield step
        for body in step.bodies.values():
            yield from walk(body.steps)


def to_host(value: Any, xp: Any) -> Any:
    """The value as NumPy holds it (object arrays for strings, lists for sequences)."""
    if value is None or isinstance(value, np.ndarray):
        return value
    if isinstance(value, list):
        return [to_host(item, xp) for item in value]
    if isinstance(value, dict):
        return value
    if isinstance(value, np.generic):
        return np.asarray(value)
    return xp.to_numpy(value)


def located(step: Step) -> str:
    """Which node a step is, in an error."""
    return f"node '{step.name}' ({step.op}, opset {step.opset})"


def explain(step: Step, cause: Exception, arguments: Sequence[Any]) -> ExecutionError:
    """An `ExecutionError` that names node, operator, opset and the inputs' shapes and dtypes."""
    inputs = ", ".join(describe(a) for a in arguments)
    return ExecutionError(
        f"{located(step)} failed on inputs ({inputs}).",
        why=f"{type(cause).__name__}: {cause}",
        fix="check the shapes and dtypes above against the operator's specification; "
        "if they are valid, this is a defect of ep: please report the node.",
    )


def describe(value: Any) -> str:
    """`float32[2,3]` for an array, and something as short for every other value."""
    if value is None:
        return "-"
    if isinstance(value, list):
        return f"[{', '.join(describe(item) for item in value)}]"
    if not hasattr(value, "shape"):
        return type(value).__name__
    dtype = str(value.dtype).removeprefix("mlx.core.")
    return f"{dtype}[{','.join(map(str, value.shape))}]"
