"""What has to be known of a model to run it by stored code alone? Its groups: what each reads, and which code it is.

A plan is made of a session whose groups are all compiled by one provider. It is valid for one outline of a model
(`ep.outline`), which says everything but the data of large weights. Of these, most are arguments, and a plan says where
they lie; what was computed of the others when the model was loaded is in the plan, or in compiled code, and so is a
hash of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ep import indices
from ep.backend import Backend
from ep.compiled_group import CompiledGroup
from ep.errors import InvalidModel
from ep.feeds import ValueInfo
from ep.identity import Unstorable, fingerprint, group_digest
from ep.opened import Opened
from ep.outline import Outline, outline
from ep.partition import EMBEDDED_BYTES, Group
from ep.places import Overlap, Place, Tensors, Weight
from ep.plan import describe_plan
from ep.program import walk
from ep.safetensors import PLAN
from ep.weights import WeightStore

if TYPE_CHECKING:
    import onnx

VERSION = 1
MOST_HASHED = 32 << 20  # bytes of weights that are hashed at each start, at about 1 GB/s
MOST_COMPUTED = 32 << 20  # bytes of weights that a plan brings, because they were computed
MOST_KEPT = 64 << 20  # bytes of what code computes of weights and keeps, that a context model brings
_ALIGNMENT = 64


class Damaged(Exception):
    """A plan is not what this version writes."""


@dataclass(frozen=True, slots=True)
class Part:
    """A compiled group: values by number, its identity, and what errors call it."""

    identity: str
    inputs: tuple[int, ...]
    host_inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    weights: tuple[int, ...]  # numbers of the plan's weights
    factors: tuple[int, ...]  # those among them that are read by nothing but products
    is_random: bool
    steps: int
    first: str
    last: str


@dataclass(frozen=True, slots=True)
class Limits:
    """Within what an input's elements must lie, after casts: they are indices."""

    source: int
    casts: tuple[str, ...]
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class StoredPlan:
    """Inputs and outputs as the session shows them, the values that they are, and the groups between.

    Limits depend on the shapes of some inputs; `limits` has those that were found.
    """

    inputs: tuple[ValueInfo, ...]
    outputs: tuple[ValueInfo, ...]
    input_values: tuple[int, ...]
    output_values: tuple[int, ...]
    weights: tuple[Weight, ...]
    parts: tuple[Part, ...]
    limited_by: tuple[int, ...]  # inputs whose shapes decide limits
    limits: tuple[tuple[tuple[tuple[int, ...] | None, ...], tuple[Limits, ...]], ...]
    hashed: tuple[str, ...]  # tensors whose contents decided anything
    digest: str  # SHA-256 of these
    data: np.ndarray  # bytes of computed weights


def plan_key(of: Outline, backend: Backend, options: Mapping[str, str]) -> str:
    """The key of a plan in a cache or in a context: all that a plan depends on, but for the data of weights."""
    text = json.dumps([VERSION, of.digest, fingerprint(backend), sorted(options.items())])
    return hashlib.sha256(text.encode()).hexdigest()


def contents_digest(names: Iterable[str], places: Mapping[str, Place], store: WeightStore) -> str:
    """SHA-256 of the data of these tensors."""
    digest = hashlib.sha256()
    for name in names:
        digest.update(store.content(places[name]).data)
    return digest.hexdigest()


# Making.


@dataclass(frozen=True, slots=True)
class Kept:
    """What code computed of weights and keeps: how, as a digest; of what, as tensors and offsets; and the result."""

    digest: str
    sources: tuple[tuple[str, int], ...]
    array: np.ndarray


@dataclass(frozen=True, slots=True)
class ForContext:
    """A plan for a context model, its key there, and what is to lie in its data file.

    `extras` are weights by name, `kept` what code computed of weights.
    """

    key: str
    plan: bytes
    extras: Mapping[str, np.ndarray]
    kept: Sequence[Kept]


def for_cache(opened: Opened, of: Outline) -> bytes | None:
    """The plan of a model; `None` where it takes more than stored code to run it."""
    maker = _maker(opened, of)
    return None if maker is None else maker.plan(bytearray())


def for_context(
    opened: Opened,
    options: Mapping[str, str],
    proto: onnx.ModelProto,
    stands_for: Iterable[bytes | memoryview],
    has_data_file: bool,
) -> ForContext | None:
    """The plan of a context model that is being written; `None` as above. Extras need a data file.

    `stands_for` as in `outline`.
    """
    of = outline(proto, stands_for)
    maker = None if of is None else _maker(opened, of)
    if of is None or maker is None:
        return None
    plan = maker.plan(None)
    if plan is None or (maker.extras and not has_data_file):
        return None
    key, kept = plan_key(of, opened.backend, options), maker.kept() if has_data_file else ()
    return ForContext(key, plan, maker.extras, kept)


def _maker(opened: Opened, of: Outline) -> _Maker | None:
    backend, runnables = opened.backend, opened.executable.runnables
    if opened.graph.defaults or not all(isinstance(r, CompiledGroup) and r.backend is backend for r in runnables):
        return None
    if describe_plan("", opened.providers, opened.executable).fallbacks:
        return None  # each session tells of them
    try:
        return _Maker(opened, of)
    except (InvalidModel, Overlap, Unstorable):  # no data of what nothing reads, or an operator of another package
        return None


class _Maker:
    """Numbers values and weights."""

    def __init__(self, opened: Opened, of: Outline) -> None:
        self.opened, self.of = opened, of
        self.values: dict[Any, int] = {}
        self.weights: dict[Any, tuple[int, Weight]] = {}  # where an array lies, and what it is → its number
        self.extras: dict[str, np.ndarray] = {}
        self.tensors = Tensors(of.places, opened.store)
        graph = opened.graph
        self.inputs = self._numbers(graph.inputs)
        self.parts = tuple(self._part(runnable) for runnable in opened.executable.runnables)
        self.outputs = self._numbers(graph.outputs)
        self.limits = opened.feeds.indices.plain()

    def _numbers(self, values: Iterable[Any]) -> tuple[int, ...]:
        return tuple(self.values.setdefault(v, len(self.values)) for v in values)

    def _part(self, runnable: CompiledGroup) -> Part:
        group, constants = runnable.group, self.opened.graph.constants
        return Part(
            runnable.identity or group_digest(group, constants, self.opened.backend),
            self._numbers(group.inputs),
            self._numbers(group.host_inputs),
            self._numbers(group.outputs),
            tuple(self._weight(constants[v]) for v in group.weights),
            tuple(self._weight(constants[v]) for v in group.weights if v in group.factors),
            runnable.random,
            len(group.steps),
            group.steps[0].name,
            group.steps[-1].name,
        )

    def _weight(self, array: np.ndarray) -> int:
        key = _key(array)
        if key not in self.weights:
            self.weights[key] = len(self.weights), self.tensors.find(array) or self._extra(array)
        return self.weights[key][0]

    def _extra(self, array: np.ndarray) -> Weight:
        packed = np.asarray(array, order="C")  # which, unlike `ascontiguousarray`, leaves a scalar one
        name = f"{PLAN}{len(self.extras)}"
        self.extras[name] = packed
        return Weight(name, 0, packed.dtype.name, packed.shape, packed.strides)

    def kept(self) -> list[Kept]:
        """What code keeps, unless it is much."""
        functions = [f for runnable in self.opened.executable.runnables for f in list(runnable.cache.values())]
        every = {id(each): each for f in functions for each in getattr(f, "kept", ()) if not each.is_borrowed}
        if sum(each.array.nbytes for each in every.values()) > MOST_KEPT:
            return []
        weights = {key: weight for key, (_, weight) in self.weights.items()}
        found = []
        for each in every.values():
            sources = [weights.get(_key(host)) for host in each.hosts]
            if None not in sources:
                places = tuple((source.tensor, source.offset) for source in sources if source is not None)
                found.append(Kept(each.digest, places, self.opened.backend.to_numpy(each.array)))
        return found

    def plan(self, data: bytearray | None) -> bytes | None:
        """The plan, with the extras as its own data, or without; `None` if there are too many, or it does not do."""
        known = {*self.inputs, *(v for part in self.parts for v in part.outputs)}
        read = {v for part in self.parts for v in (*part.inputs, *part.host_inputs)}
        computed = sum(array.nbytes for array in self.extras.values())
        if not known.issuperset((*self.outputs, *read)) or computed > MOST_COMPUTED or self.limits is None:
            return None  # an output is a constant, the weights are too large, or indices take more than two limits
        weights = tuple(weight for _, weight in self.weights.values())
        if data is not None:
            weights = tuple(self._moved(weight, data) if weight.tensor in self.extras else weight for weight in weights)
        decided = {*self.opened.graph.baked, *(array.ctypes.data for array in self._looked_at())}
        viewed = {weight.tensor for weight in weights} - set(map(self.tensors.at, decided))
        hashed = tuple(sorted(self.of.places.keys() - viewed))
        if sum(self.of.places[name].length for name in hashed) > MOST_HASHED:
            return None
        digest = contents_digest(hashed, self.of.places, self.opened.store)
        decisive, found = self.limits
        limits = tuple(
            (
                key,
                tuple(
                    Limits(self.values[v], tuple(d.name for d in casts), *map(int, ends)) for v, casts, *ends in rows
                ),
            )
            for key, rows in found.items()
        )
        plan = StoredPlan(
            self.opened.inputs, self.opened.output_infos, self.inputs, self.outputs, weights, self.parts,
            self._numbers(decisive), limits, hashed, digest, np.zeros(0),
        )  # fmt: skip
        head = json.dumps(asdict(plan) | {"version": VERSION, "data": len(data or b"")}, default=_dtype_name).encode()
        return len(head).to_bytes(8, "little") + head + bytes(data or b"")

    def _looked_at(self) -> Iterator[np.ndarray]:
        """Constants that compiled code holds, those that might have been such, and those that compiling checks."""
        constants = self.opened.graph.constants
        for runnable in self.opened.executable.runnables:
            group, tables = runnable.group, indices.tables(runnable.group.steps)
            yield from (constants[v] for v in group.constants)
            yield from (constants[v] for v in group.weights if v in tables or constants[v].nbytes <= EMBEDDED_BYTES)
            for step in walk(group.steps):
                for body in step.bodies.values():
                    yield from body.constants.values()

    def _moved(self, weight: Weight, data: bytearray) -> Weight:
        data.extend(bytes(-len(data) % _ALIGNMENT))
        start = len(data)
        data.extend(self.extras[weight.tensor].tobytes())
        return replace(weight, tensor="", offset=start)


def _key(array: np.ndarray) -> Any:
    return array.ctypes.data, array.dtype, array.shape, array.strides


def _dtype_name(dtype: Any) -> str:
    return np.dtype(dtype).name


# Reading.


def read(content: Any) -> StoredPlan:
    """The plan in these bytes.

    Raises:
        Damaged: they are no plan.
    """
    view = memoryview(content)
    end = 8 + int.from_bytes(view[:8], "little")
    try:
        found = json.loads(bytes(view[8:end]))
        if found["version"] != VERSION or found["data"] != len(view) - end:
            raise Damaged
        plan = StoredPlan(
            tuple(map(_info, found["inputs"])),
            tuple(map(_info, found["outputs"])),
            _numbers(found["input_values"]),
            _numbers(found["output_values"]),
            tuple(map(_weight, found["weights"])),
            tuple(map(_part, found["parts"])),
            _numbers(found["limited_by"]),
            tuple((tuple(map(_shape, key)), tuple(map(_limits, rows))) for key, rows in found["limits"]),
            tuple(found["hashed"]),
            str(found["digest"]),
            np.frombuffer(view[end:], np.uint8),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as cause:
        raise Damaged from cause
    known = set(plan.input_values)
    ordered = True
    for part in plan.parts:
        ordered &= known.issuperset((*part.inputs, *part.host_inputs))
        ordered &= all(0 <= number < len(plan.weights) for number in (*part.weights, *part.factors))
        known.update(part.outputs)
    limited = {*plan.limited_by, *(limits.source for _, rows in plan.limits for limits in rows)}
    ordered &= limited.issubset(plan.input_values)
    counts = len(plan.inputs) == len(plan.input_values) and len(plan.outputs) == len(plan.output_values)
    if not (ordered and counts and known.issuperset(plan.output_values)):
        raise Damaged
    return plan


def _info(entry: Any) -> ValueInfo:
    dtype, shape = entry["dtype"], entry["shape"]
    return ValueInfo(
        entry["name"],
        None if dtype is None else np.dtype(dtype),
        None if shape is None else tuple(shape),
        entry["kind"],
    )


def _weight(w: Any) -> Weight:
    return Weight(w["tensor"], int(w["offset"]), str(w["dtype"]), _numbers(w["shape"]), _numbers(w["strides"]))


def _shape(entry: Any) -> tuple[int, ...] | None:
    return None if entry is None else _numbers(entry)


def _limits(entry: Any) -> Limits:
    return Limits(int(entry["source"]), tuple(map(str, entry["casts"])), int(entry["low"]), int(entry["high"]))


def _part(entry: Any) -> Part:
    numbers = ("inputs", "host_inputs", "outputs", "weights", "factors")
    return Part(**entry | {name: _numbers(entry[name]) for name in numbers})


def _numbers(values: Sequence[Any]) -> tuple[int, ...]:
    return tuple(map(int, values))


def group_of(part: Part, provider: str) -> Group:
    """The group of a part, without its steps: its values, and its weights, are numbers."""
    borders = part.inputs, part.host_inputs, part.weights
    return Group(provider, provider, [], *borders, frozenset(part.factors), (), part.outputs)
