"""Which shapes do a model's values have for given inputs? A run of the lowerings without data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ep.backend import Backend
from ep.errors import EpError
from ep.program import Runner, Step, Untraceable
from ep.registry import Host, ShapeOf

SMALL = 1 << 16  # elements of a value that is computed rather than traced


@dataclass(frozen=True, slots=True)
class Abstract:
    """What is known of an array without having it."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=object)) * self.dtype.itemsize

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=object))


Values = dict[Any, Any]  # value → array, `Abstract`, list of these, or None where nothing is known


def abstract_run(steps: Sequence[Step], env: Values, backend: Backend, declared: Mapping[Any, Abstract]) -> None:
    """Adds to `env` what each step gives: arrays where they are small and follow from constants and shapes.

    `declared` are the types that the model declares of values; they serve where a step cannot be traced, because it
    reads data that only a run would give.
    """
    import ep.host_namespace as host

    host_runner, runner = Runner(host, host), Runner(backend.xp, host, backend.overrides)
    for step in steps:
        outputs = [v for v in step.outputs if v is not None]
        if any(env.get(v, 0) is None for v in step.reads()):
            found = None
        elif _is_small(step, env):
            found = _computed(step, env, host_runner)
        else:
            found = _traced(step, env, runner, backend)
        for index, value in enumerate(outputs):
            known = found[index] if found is not None and index < len(found) else None
            env[value] = declared.get(value) if known is None else known


def _is_small(step: Step, env: Values) -> bool:
    """Whether the step's results follow from small arrays and from shapes."""
    sizes = 0
    for index, value in enumerate(step.inputs):
        if value is None or step.lowering.role(index) is ShapeOf:
            continue
        if not isinstance(env[value], np.ndarray):
            return False
        sizes += env[value].size
    return sizes <= SMALL and not step.bodies and not step.lowering.random


def _computed(step: Step, env: Values, runner: Runner) -> list[Any] | None:
    local = {v: env[v] for v in step.reads()}
    try:
        with np.errstate(all="ignore"):
            runner.evaluate([step], local)
    except EpError:
        return None
    found = [local.get(v) for v in step.outputs if v is not None]
    return [_settled(value) for value in found]


def _settled(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.size > SMALL:
        return Abstract(value.shape, value.dtype)
    return value


def _traced(step: Step, env: Values, runner: Runner, backend: Backend) -> list[Any] | None:
    if backend.abstract is None:
        return None
    fixed = {v for i, v in enumerate(step.inputs) if v is not None and step.lowering.role(i) is Host}
    reads = dict.fromkeys(step.reads())
    if any(not isinstance(env[v], np.ndarray) for v in fixed):
        return None  # contents that decide a shape, and that only a run would give
    arrays = [v for v in reads if v not in fixed and _is_data(env[v])]
    if any(env[v].dtype.kind == "O" for v in arrays):
        return None
    constant = {v: env[v] for v in reads if v not in arrays}

    def function(*values: Any) -> tuple[Any, ...]:
        local = constant | dict(zip(arrays, values, strict=True))
        runner.evaluate([step], local)
        asarray = backend.xp.asarray
        found = [local.get(v) for v in step.outputs if v is not None]
        return tuple(asarray(f) if isinstance(f, np.ndarray | np.generic) else f for f in found)

    try:
        with backend.scope(), np.errstate(all="ignore"):
            results = backend.abstract(function, [(env[v].shape, env[v].dtype) for v in arrays])
    except (EpError, Untraceable, TypeError, ValueError, RuntimeError, IndexError):
        return None
    return [_described(result, backend) for result in results]


def _is_data(value: Any) -> bool:
    """Whether a value is an argument of a trace: what is not known, or too large to be part of it."""
    return isinstance(value, Abstract) or (isinstance(value, np.ndarray) and value.size > 16)


def _described(result: Any, backend: Backend) -> Any:
    if isinstance(result, list):
        return [_described(item, backend) for item in result]
    if not hasattr(result, "shape"):
        return None
    return Abstract(tuple(result.shape), np.dtype(backend.xp.dtype_of(result)))
