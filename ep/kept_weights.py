"""What would compiled code keep of a model's weights, for inputs of some shapes? Found by tracing; no weight is read.

Compiled code of JAX on the CPU computes once what depends on weights alone: a matrix in the order in which XLA
multiplies, a kernel in the form that a convolution takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np

from ep.abstract_run import Abstract
from ep.compile import Executable
from ep.compiled_group import CompiledGroup, Context, Counters
from ep.device_weights import DeviceWeights
from ep.errors import EpError
from ep.placement import Placer
from ep.program import Untraceable
from ep.provider import HOST
from ep.variants import copied


@dataclass(frozen=True)
class Foreseen:
    """An array that code would keep, the weights that it is computed of as the host has them, and the stored result."""

    item: Any
    hosts: tuple[np.ndarray, ...]
    values: tuple[Any, ...]
    stored: np.ndarray | None
    compute: Callable[[], np.ndarray]  # it, from the weights

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return prod(self.item.shape) * np.dtype(self.item.dtype).itemsize


def foresee(
    steps: Sequence[Any],
    graph: Any,
    env: Mapping[Any, Any],
    constants: dict[Any, np.ndarray],
    providers: Sequence[Any],
    weights: DeviceWeights,
) -> tuple[list[Foreseen], set[Any]]:
    """What the code of a graph would keep, each once, and the weights that it then does not read any more.

    `env` has every value of a run, as `abstract_run` leaves it. Groups of which something is not known are left out,
    and so are those that turn out not to be compiled whole.
    """
    import ep.host_namespace as host

    backend = providers[0].backend
    if backend.keeps is None:
        return [], set()
    backends = {provider.name: provider.backend for provider in providers}
    placer = Placer([p for p in providers if p.name != HOST], graph.dtypes)
    owners = {name: weights if b is backend else DeviceWeights(b, weights.store) for name, b in backends.items()}
    found: dict[Any, Foreseen] = {}
    read: set[Any] = set()
    sources: set[Any] = set()
    with backend.scope():
        context = Context(placer, backends, host, owners, Counters())
        executable = Executable(steps, graph.inputs, graph.outputs, constants, context)
        for _, runnable in executable.every():
            values = runnable.group.weights
            kept = _kept(runnable, env) if isinstance(runnable, CompiledGroup) and values else None
            if kept is None:
                read.update(values)
                continue
            read.update(values[i] for i in kept.plan.raw)
            for each in _items(kept, runnable):
                sources.update(each.values)
                found.setdefault((each.item.digest, *(a.ctypes.data for a in each.hosts)), each)
    return list(found.values()), sources - read


def _kept(runnable: CompiledGroup, env: Mapping[Any, Any]) -> Any:
    group, backend = runnable.group, runnable.backend
    specs = _specs(runnable, env)
    if specs is None or backend.keeps is None:
        return None
    pending = runnable.weights.arguments(group.weights, runnable.all_constants, group.factors)
    contents = [copied(env[v]) for v in group.host_inputs]
    try:
        every = [*specs, *((p.shape, p.dtype) for p in pending)]
        return backend.keeps(lambda *values: runnable.trace(contents, values), every, len(pending))
    except (EpError, Untraceable, TypeError, ValueError, RuntimeError, IndexError):
        return None  # a run would cut it, or fail


def _items(kept: Any, runnable: CompiledGroup) -> Iterator[Foreseen]:
    values, weights = runnable.group.weights, runnable.weights
    pending = weights.arguments(values, runnable.all_constants, runnable.group.factors)

    def compute(place: int) -> np.ndarray:
        with weights.backend.scope():
            sources = [pending[i] for i in kept.plan.items[place].sources]
            result = weights.backend.to_numpy(kept.item(place, weights.once(sources)))
        for source in sources:
            source.rest()
        return result

    for place, item in enumerate(kept.plan.items):
        hosts = tuple(pending[i].host for i in item.sources)
        stored = weights.store.kept(item.digest, hosts)
        yield Foreseen(item, hosts, tuple(values[i] for i in item.sources), stored, partial(compute, place))


def _specs(runnable: CompiledGroup, env: Mapping[Any, Any]) -> list[Any] | None:
    """Shapes and dtypes of a group's arguments; `None` where one of them, or a value that must be known, is not."""
    group = runnable.group
    arguments = [env.get(v) for v in group.inputs]
    if not all(isinstance(a, np.ndarray | Abstract) for a in arguments):
        return None
    if not all(isinstance(env.get(v), np.ndarray) for v in group.host_inputs):
        return None
    seed = [((), np.dtype(np.uint32))] * runnable.random
    return [*((tuple(a.shape), a.dtype) for a in arguments if a is not None), *seed]
