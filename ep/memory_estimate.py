"""Does a model fit into memory? `ep.estimate`: weights, activations and caches, without reading a weight."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ep.abstract_run import Abstract, Values, abstract_run
from ep.backend import Backend
from ep.device_weights import DeviceWeights
from ep.errors import InvalidInput, did_you_mean
from ep.feeds import ValueInfo
from ep.kept_weights import foresee
from ep.partition import read_otherwise
from ep.passes import bind, foldable, pays, remove_unused
from ep.program import walk
from ep.summary import size

_PAST = re.compile(r"past|cache", re.IGNORECASE)
_PRESENT = re.compile(r"present|cache", re.IGNORECASE)
WIDE_BYTES = 4  # of an element that a library multiplies in a wider dtype: float32
_VIEWS = ("Reshape", "Flatten", "Squeeze", "Unsqueeze")  # compilers give their results no memory of their own
Shapes = Mapping[str, Any]  # input name → shape, or symbolic dimension → size


@dataclass(frozen=True)
class Estimate:
    """Bytes that a run takes on a device. `unknown` counts results whose size only a run would tell, and texts."""

    model: str
    device: str
    weights: int
    copied: int  # of the weights: what the device cannot borrow
    kept: int  # of the weights: what compiled code reads instead of them, in the layout and dtype that it computes in
    activations: int  # at the node where most results are alive at once
    peak_node: str
    cache: int  # key-value caches that go in and come out
    assumed: dict[str, int]  # dimensions that were not given
    unknown: int
    available: int | None

    @property
    def total(self) -> int:
        """Bytes in all."""
        return self.weights + self.activations + self.cache

    @property
    def fits(self) -> bool | None:
        """Whether the device has that much now; `None` where it does not say."""
        return None if self.available is None else self.total <= self.available

    def to_dict(self) -> dict[str, Any]:
        """The estimate as plain data, ready for JSON."""
        return asdict(self) | {"total": self.total, "fits": self.fits}

    def verdict(self) -> str:
        """Whether it fits, and why."""
        if self.available is None:
            return f"{self.device} does not say how much memory it has"
        parts = {"weights": self.weights, "activations": self.activations, "caches": self.cache}
        most = max(parts, key=lambda key: parts[key])
        if self.fits:
            return f"fits: {size(self.available)} are available on {self.device}"
        return (
            f"does not fit, because {size(self.total)} are needed and {size(self.available)} are available on "
            f"{self.device}; {most} take most of it, {size(parts[most])}"
        )

    def __str__(self) -> str:
        lines = [
            f"{self.model}: {size(self.total)}, {self.verdict()}",
            f"  weights      {size(self.weights)}"
            + (f", {size(self.copied)} copied" if self.copied else ", borrowed")
            + (f", {size(self.kept)} as compiled code computes" if self.kept else ""),
            f"  activations  {size(self.activations)}" + (f" at '{self.peak_node}'" if self.peak_node else ""),
            f"  caches       {size(self.cache)}",
        ]
        if self.assumed:
            lines.append("  assumed      " + ", ".join(f"{name}={n}" for name, n in self.assumed.items()))
        if self.unknown:
            lines.append(
                f"  unknown      {self.unknown} results are of unknown size (strings, or what depends on data)"
            )
        return "\n".join(lines)

    __repr__ = __str__


def estimate(source: Any, shapes: Shapes | None = None, *, device: str = "auto", weights: Any = None) -> Estimate:
    """What a run of a model takes, for inputs of these shapes, against what the device has; no weight is read.

    `shapes` maps inputs to shapes (`{"x": (1, 3, 224, 224)}`), or symbolic dimensions to sizes (`{"batch": 8}`);
    dimensions that are not given are 1. Each result counts from its node to its last reader, views not at all: a
    compiler that fuses nodes takes less, a kernel that needs room to work takes more.

    Raises:
        InvalidModel, UnsupportedModel, BackendUnavailable: as `load` does.
        InvalidInput: the shapes are not those of the model's inputs.
    """
    from ep.devices import resolve
    from ep.loader import load_model

    if shapes is not None and not isinstance(shapes, Mapping):
        raise InvalidInput(f"the shapes are {shapes!r}, not a mapping.", fix="write {'input': (1, 3)} or {'batch': 8}.")
    providers = resolve(device, {})
    backend = providers[0].backend
    model, store, name = load_model(source, weights)
    graph = remove_unused(bind(model, store, name))
    env, assumed = values_of(graph, shapes or {}, backend)
    computed, stored = _computed_at_load(graph, env)
    cache = _caches(graph)
    activations, peak_node = _peak(graph, env, cache | computed)
    constant = {*graph.constants, *computed}
    owner = DeviceWeights(backend, store)
    steps = [step for step in graph.steps if not computed.intersection(step.outputs)]
    kept, unread = foresee(steps, graph, env, graph.constants | _stand_ins(env, computed), providers, owner)
    held, copied = _held(graph, env, computed, stored, owner, unread)
    instead = sum(each.nbytes for each in kept)
    borrowed = sum(each.nbytes for each in kept if each.stored is not None and not owner.obstacle(each.stored, False))
    return Estimate(
        name,
        f"{backend.name} ({backend.device})",
        held + instead,
        copied + instead - borrowed,
        instead,
        activations,
        peak_node,
        sum(nbytes(env[v]) for v in cache),
        assumed,
        sum(env[v] is None for step in graph.steps for v in step.outputs if v is not None and v not in constant),
        backend.memory.available(),
    )


def values_of(graph: Any, shapes: Shapes, backend: Backend) -> tuple[Values, dict[str, int]]:
    """What is known of every value of a bound graph for inputs of these shapes, and the sizes that were assumed.

    Raises:
        InvalidInput: the shapes are not those of the model's inputs.
    """
    dims = _dims(graph, shapes)
    env: Values = dict(graph.constants) | dict(graph.defaults)
    env |= {v: _typed(v, graph.dtypes.get(v), dims.sizes) for v in graph.inputs}
    declared = {v: t for step in graph.steps for v in step.outputs if v is not None
                if (t := _typed(v, graph.dtypes.get(v), dims.sizes, default=None)) is not None}  # fmt: skip
    abstract_run(graph.steps, env, backend, declared)
    return env, dims.assumed


def nbytes(value: Any) -> int:
    """Bytes of an array or of the arrays in a list; none where nothing is known."""
    if isinstance(value, list):
        return sum(map(nbytes, value))
    if isinstance(value, Abstract | np.ndarray):
        return value.nbytes
    return 0


# Shapes of the inputs.


@dataclass
class _Dims:
    sizes: dict[Any, int]  # name, or (input, axis) for dimensions without one
    assumed: dict[str, int]


def _dims(graph: Any, shapes: Shapes) -> _Dims:
    infos = {v.name: ValueInfo.of(v, graph.dtypes.get(v)) for v in graph.inputs}
    names = {d for info in infos.values() for d in info.shape or () if isinstance(d, str)}
    sizes: dict[Any, int] = {}
    for key, given in shapes.items():
        if key not in infos and key not in names:
            raise InvalidInput(
                f"the model has neither an input nor a dimension '{key}'.{did_you_mean(key, [*infos, *names])}",
                why="its inputs are " + "; ".join(map(str, infos.values())) + ".",
                fix="name inputs with shapes, or symbolic dimensions with sizes.",
            )
        pairs = [(key, given)] if key not in infos else _match(infos[key], given)
        for dim, number in pairs:
            if type(number) is not int or number < 0 or sizes.setdefault(dim, number) != number:
                raise InvalidInput(
                    f"dimension '{dim}' cannot be {number!r}.",
                    why=f"it is {sizes[dim]} elsewhere." if dim in sizes else "a size is a whole number from 0 on.",
                    fix="give each dimension one size.",
                )
    assumed = {name: 1 for name in sorted(names) if name not in sizes}
    return _Dims(sizes | assumed, assumed)


def _match(info: ValueInfo, shape: Any) -> Iterator[tuple[Any, int]]:
    """The dimensions that a shape of an input decides."""
    wanted = info.shape
    sizes = tuple(shape) if isinstance(shape, Sequence) and not isinstance(shape, str) else None
    fits = sizes is not None and (wanted is None or len(wanted) == len(sizes))
    if not fits or any(isinstance(w, int) and w != s for w, s in zip(wanted or (), sizes or (), strict=False)):
        raise InvalidInput(f"{shape!r} is no shape of the input {info}.", fix="give one size per dimension.")
    assert sizes is not None
    for axis, number in enumerate(sizes):
        dim = wanted[axis] if wanted is not None else None
        if not isinstance(dim, int):
            yield (dim or (info.name, axis)), number


def _typed(value: Any, dtype: Any, sizes: Mapping[Any, int], default: int | None = 1) -> Abstract | None:
    """Shape and dtype of a value by its declaration; dimensions that are nowhere given have the default size."""
    info = ValueInfo.of(value, dtype)
    if info.kind != "tensor" or dtype is None or info.shape is None:
        return None
    shape = []
    for axis, dim in enumerate(info.shape):
        known = dim if isinstance(dim, int) else sizes.get(dim or (value.name, axis), default)
        if known is None:
            return None
        shape.append(known)
    return Abstract(tuple(shape), dtype)


# What lives, and when.


def _stand_ins(env: Values, values: Iterable[Any]) -> dict[Any, np.ndarray]:
    """Arrays of the shapes and dtypes of values; where their contents are not known, they take no memory."""
    return {
        v: known if isinstance(known, np.ndarray) else np.broadcast_to(np.zeros((), known.dtype), known.shape)
        for v in values
        if isinstance(known := env[v], np.ndarray | Abstract)
    }


def _held(
    graph: Any, env: Values, computed: set[Any], stored: set[Any], weights: DeviceWeights, unread: set[Any]
) -> tuple[int, int]:
    """Bytes of the weights on the device, and of those that it does not borrow. Strings are no weights.

    Those in `unread` do not stay.
    """
    read = {v for step in graph.steps if not computed.intersection(step.outputs) for v in step.reads()}
    read = (read | set(graph.outputs)) - unread
    factors = (read | stored) - read_otherwise(graph.steps)
    inside = [body for step in walk(graph.steps) for body in step.bodies.values()]
    arrays = {(v, a.ctypes.data): a for v, a in graph.constants.items() if v in read}
    arrays |= {(None, a.ctypes.data): a for body in inside for a in _inside(body)}
    sizes = {}  # by address: what several weights share counts once
    for (value, address), array in arrays.items():
        if array.dtype.kind != "O":
            wide = value in factors and weights.widens(array.dtype)
            count = array.size * WIDE_BYTES if wide else array.nbytes
            sizes[address] = count, count if weights.obstacle(array, wide) else 0
    staying = stored - unread
    made = [env[v] for v in staying]
    widened = [isinstance(env[v], Abstract) and v in factors and weights.widens(env[v].dtype) for v in staying]
    copies = sum(a.size * WIDE_BYTES if wide else nbytes(a) for a, wide in zip(made, widened, strict=True))
    return sum(count for count, _ in sizes.values()) + copies, sum(copy for _, copy in sizes.values()) + copies


def _inside(body: Any) -> Iterator[np.ndarray]:
    """Constants of a body, and those of its nodes."""
    yield from body.constants.values()
    yield from (a for inner in body.steps for a in inner.attributes.values() if isinstance(a, np.ndarray))


def _computed_at_load(graph: Any, env: Values) -> tuple[set[Any], set[Any]]:
    """Results that `load` computes from constants alone, and those of them that stay as weights: others read them."""
    constant = dict(graph.constants)
    made: set[Any] = set()
    for step in graph.steps:
        outputs = {v: env[v] for v in step.outputs if v is not None}
        read, written = sum(nbytes(env[v]) for v in step.reads()), sum(map(nbytes, outputs.values()))
        if not step.bodies and foldable(step, constant) and pays(step, read, written):
            constant |= outputs
            made |= outputs.keys()
    needed = {v for step in graph.steps for v in step.reads() if not made.intersection(step.outputs)}
    return made, made & (needed | set(graph.outputs))


def _caches(graph: Any) -> set[Any]:
    """Inputs and outputs that are, by their names, key-value caches."""
    inputs = {v for v in graph.inputs if _PAST.search(v.name or "")}
    named = zip(graph.outputs, graph.declared_outputs, strict=True)
    outputs = {value for value, declared in named if _PRESENT.search(declared.name or "")}
    return inputs | outputs if inputs and outputs else set()


def _peak(graph: Any, env: Values, apart: set[Any]) -> tuple[int, str]:
    """Most bytes of results that are alive at once, and the node where; those in `apart` are counted elsewhere."""
    owners: dict[Any, Any] = {}  # view → what it is a view of
    readers: Counter[Any] = Counter()
    for step in graph.steps:
        if step.lowering.key.op_type in _VIEWS and step.inputs[0] is not None:
            owners[step.outputs[0]] = owners.get(step.inputs[0], step.inputs[0])
        readers.update(_owned(step.reads(), owners))
    readers.update(_owned(graph.outputs, owners))
    alive = {v: nbytes(env[v]) for v in graph.inputs if v not in apart}
    live = peak = sum(alive.values())
    where = ""
    for step in graph.steps:
        for value in step.outputs:
            if value is not None and value not in owners and value not in apart and value not in graph.constants:
                alive[value] = nbytes(env[value])
                live += alive[value]
        if live > peak:
            peak, where = live, step.name
        done = _owned(step.reads(), owners)
        readers.subtract(done)
        unread = [v for v in step.outputs if v is not None and v not in owners and not readers[v]]
        for value in (*dict.fromkeys(done), *unread):
            if readers[value] <= 0 and value in alive and value not in graph.inputs:
                live -= alive.pop(value)
    return peak, where


def _owned(values: Iterable[Any], owners: Mapping[Any, Any]) -> list[Any]:
    return [owners.get(v, v) for v in values]
