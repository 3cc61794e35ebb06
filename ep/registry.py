"""Which lowering implements an operator: `@op`, `Host`, `OpKey` and `OpRegistry`.

A lowering is a plain function whose signature is the ONNX schema::

    @op("Gemm", since=7)
    def gemm(xp, a, b, c=None, *, alpha=1.0, beta=1.0, transA=0, transB=0): ...

`xp` is the array namespace, inputs are positional (`None` when omitted), attributes are keyword-only with
ONNX names and defaults. Annotations say what the planner must know; nothing else does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


class Host:
    """Annotates an input whose *contents* decide shapes or Python control flow: it arrives as a NumPy array."""


class HostIfCheap:
    """Annotates an input that arrives as a NumPy array where the host has it anyway, else as a device array."""


class ShapeOf:
    """Annotates an input of which only shape and dtype are read, never its contents."""


class Factor:
    """Annotates an input that is only multiplied by another one, and that may come wider than that one: where the
    library multiplies halves as float32, a constant is converted once and not at every call."""


Shapes = Mapping[str, tuple[int, ...]]  # of a node's inputs, by their names in the lowering; what is unknown is absent


@dataclass(frozen=True)
class Index:
    """Annotates an input of indices into the input `of`: those beyond their limits are refused, never clamped.

    `limits` gives the least and the greatest index, from attributes and from the shapes of `of` and of the inputs that
    `also` names: two numbers, or where indices are `tuples` along the last axis, two for each of their components. A
    `LookupError` says that there is no limit, or that a shape would have to be known. What equals the attribute
    `spared` may lie anywhere. What NumPy `checks` by itself is looked at on the host only once a node has failed.
    """

    of: str
    limits: Callable[[Shapes, Mapping[str, Any]], tuple[Any, Any]]
    also: tuple[str, ...] = ()
    tuples: bool = False
    spared: str = ""
    checks: bool = False


class Outputs:
    """Annotates a keyword that receives the number of outputs the node names (Split, Loop, …)."""


class Body:
    """Annotates a graph attribute: it arrives as a callable from arrays to a tuple of arrays."""


class Then(Body):
    """As `Body`, of a branch that runs where the first input of the node is true, and nowhere else."""


class Else(Body):
    """As `Body`, of a branch that runs where the first input of the node is false."""


class CountedBody:
    """As `Body`, of a loop that gives it the number of the iteration first, as a NumPy array where it is unrolled."""


Rule = int | str | Callable[[dict[str, Any]], int | str]  # of an output's dtype: see `Lowering.out`
REQUIRED: Any = inspect.Parameter.empty


@dataclass(frozen=True, slots=True)
class OpKey:
    """One version of one operator; the domain `ai.onnx` is spelled `""`."""

    domain: str
    op_type: str
    since_version: int

    def __str__(self) -> str:
        return f"{self.domain or 'ai.onnx'}::{self.op_type}-{self.since_version}"


@dataclass(frozen=True)
class Lowering:
    """A lowering with what its signature tells the planner.

    `host_only` is the reason why the operator runs on the host (`""`: it runs anywhere), or a function from
    the node's attributes to that reason. `random` operators are never folded. `out` gives output dtypes
    where the ONNX schema cannot: for each output the index of the input whose dtype it shares, the name of a
    dtype attribute, a dtype name, or a function from the node's attributes to one of these. `inside` is the
    attribute that names the element type of the computation, where that may differ from all inputs, or a function
    from the attributes and the inputs' dtypes to it. An `alias`
    returns its first input, whatever it is, so that no step is needed. What `keeps` elements returns those of its first
    input, all of them and no others, in another shape, order or dtype; what `picks` returns some of them.
    """

    key: OpKey
    fn: Callable[..., Any]
    host_only: str | Callable[[dict[str, Any]], str] = ""
    random: bool = False
    out: tuple[Rule, ...] = ()
    inside: str | Callable[[dict[str, Any], Sequence[Any]], Any] = ""
    alias: bool = False
    keeps: bool = False
    picks: bool = False
    inputs: tuple[str, ...] = field(init=False)
    required_inputs: int = field(init=False)
    variadic: bool = field(init=False)
    attributes: dict[str, Any] = field(init=False)
    outputs_keyword: str | None = field(init=False)
    bodies: frozenset[str] = field(init=False)
    branches: dict[str, bool] = field(init=False)  # the bodies that run where the first input is true, or false
    counted: frozenset[str] = field(init=False)
    indices: tuple[tuple[int, Index], ...] = field(init=False)  # the inputs that hold indices
    _roles: tuple[Any, ...] = field(init=False)

    def __post_init__(self) -> None:
        parameters = _parameters(self.key, self.fn)
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.POSITIONAL_ONLY)]
        rest = [p for p in parameters if p.kind is p.VAR_POSITIONAL]
        keywords = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
        facts = {
            "inputs": tuple(p.name for p in positional + rest),
            "required_inputs": sum(p.default is REQUIRED for p in positional),
            "variadic": bool(rest),
            "attributes": {p.name: p.default for p in keywords if p.annotation is not Outputs},
            "outputs_keyword": next((p.name for p in keywords if p.annotation is Outputs), None),
            "bodies": frozenset(p.name for p in keywords if p.annotation in (Body, Then, Else, CountedBody)),
            "branches": {p.name: p.annotation is Then for p in keywords if p.annotation in (Then, Else)},
            "counted": frozenset(p.name for p in keywords if p.annotation is CountedBody),
            "indices": tuple((i, p.annotation) for i, p in enumerate(positional) if isinstance(p.annotation, Index)),
            "_roles": tuple(p.annotation for p in positional + rest),
        }
        for name, value in facts.items():
            object.__setattr__(self, name, value)

    def host_reason(self, attributes: dict[str, Any]) -> str:
        """Why a node with these attributes must run on the host, or `""`."""
        return self.host_only(attributes) if callable(self.host_only) else self.host_only

    def role(self, index: int) -> Any:
        """`Host`, `HostIfCheap`, `ShapeOf` or something else for input `index`; a variadic tail shares one role."""
        roles = self._roles
        if index < len(roles):
            return roles[index]
        return roles[-1] if self.variadic else None


class OpRegistry:
    """Lowerings by domain, operator and version: the newest `since_version` not above the opset is found."""

    def __init__(self) -> None:
        self._versions: dict[tuple[str, str], dict[int, Lowering]] = {}

    def op(
        self,
        op_type: str,
        *,
        since: int = 1,
        domain: str = "",
        host_only: str | Callable[[dict[str, Any]], str] = "",
        random: bool = False,
        out: tuple[Rule, ...] = (),
        inside: str | Callable[[dict[str, Any], Sequence[Any]], Any] = "",
        alias: bool = False,
        keeps: bool = False,
        picks: bool = False,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorator that registers a lowering and returns the function unchanged."""

        def register(fn: Callable[..., Any]) -> Callable[..., Any]:
            _store_defaults(fn)
            key = OpKey(normal_domain(domain), op_type, since)
            self.add(Lowering(key, fn, host_only, random, out, inside, alias, keeps, picks))
            return fn

        return register

    def add(self, lowering: Lowering) -> None:
        """Registers a lowering; a second one for the same key is refused with `ValueError`."""
        key = lowering.key
        versions = self._versions.setdefault((key.domain, key.op_type), {})
        if key.since_version in versions:
            raise ValueError(f"{key} is already registered by {versions[key.since_version].fn.__qualname__}")
        versions[key.since_version] = lowering

    def find(self, domain: str, op_type: str, opset: int) -> Lowering | None:
        """The lowering with the newest `since_version` ≤ `opset`, or `None`."""
        versions = self._versions.get((normal_domain(domain), op_type), {})
        usable = [since for since in versions if since <= opset]
        return versions[max(usable)] if usable else None

    def __iter__(self) -> Iterator[Lowering]:
        for versions in self._versions.values():
            yield from versions.values()

    def __len__(self) -> int:
        return sum(map(len, self._versions.values()))


def _parameters(key: OpKey, fn: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a lowering after `xp`, which must be its first: inputs would go astray otherwise."""
    parameters = list(inspect.signature(fn, eval_str=True).parameters.values())
    first = parameters[0] if parameters else None
    if first is None or first.name != "xp" or first.kind not in (first.POSITIONAL_OR_KEYWORD, first.POSITIONAL_ONLY):
        raise ValueError(
            f"{key} cannot be registered: the first parameter of {fn.__qualname__} must be 'xp'; "
            f"{'it has none' if first is None else f'it is {first.name!r}'}.\n"
            "Why: a lowering is called with the array namespace first, then with the inputs of the node.\n"
            f"Fix: write def {fn.__name__}(xp, …)."
        )
    return parameters[1:]


def _store_defaults(fn: Callable[..., Any]) -> None:
    """Rounds the defaults of float attributes as a model would store them: as float32, and 0.01 is not one."""
    fn = inspect.unwrap(fn)
    defaults = (fn.__kwdefaults__ or {}).items()
    fn.__kwdefaults__ = {name: float(np.float32(v)) if type(v) is float else v for name, v in defaults}


def normal_domain(domain: str) -> str:
    """`ai.onnx` and `""` name the same domain; this returns `""` for both."""
    return "" if domain == "ai.onnx" else domain


OPS = OpRegistry()
op = OPS.op


class Overrides:
    """A backend's native kernels, each for one lowering; an override declines with `NotImplemented`."""

    def __init__(self) -> None:
        self._functions: dict[OpKey, Callable[..., Any]] = {}

    def op(self, op_type: str, *, since: int = 1, domain: str = "") -> Callable[..., Any]:
        """Decorator like `@op`; `since` is that of the lowering which is overridden."""

        def register(fn: Callable[..., Any]) -> Callable[..., Any]:
            _store_defaults(fn)
            key = OpKey(normal_domain(domain), op_type, since)
            _parameters(key, fn)
            self._functions[key] = fn
            return fn

        return register

    def get(self, key: OpKey) -> Callable[..., Any] | None:
        return self._functions.get(key)

    def items(self) -> Iterator[tuple[OpKey, Callable[..., Any]]]:
        yield from self._functions.items()
