"""Which providers are there? Entry points of the group `ep.providers`, and a registry of those in use.

A provider's package is imported only when the provider is asked for.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ep.errors import BackendUnavailable, EpError, EpLoadFailed, InvalidInput, NoEpForOp, did_you_mean, names
from ep.kernel import KernelMatch
from ep.provider import HOST, Dtypes, EpConfig, EpId, ExecutionProvider
from ep.tensor import Shape, TensorLayout

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    import onnx_ir as ir

    from ep.program import Step

GROUP = "ep.providers"
CPU = "cpu"


@functools.cache
def entry_points() -> Mapping[str, EntryPoint]:
    """Return the entry points of all providers by name: the host's, which comes with the core, then the installed."""
    from importlib import metadata

    host = metadata.EntryPoint(HOST, "ep.host:provider", GROUP)
    found = {entry.name: entry for entry in metadata.entry_points(group=GROUP) if entry.value != host.value}
    return {HOST: host, **dict(sorted(found.items()))}


def provider(name: str, device: str | None = None, options: Mapping[str, str] | None = None) -> ExecutionProvider:
    """Return an initialised provider, on one device of it, or on the one that its library prefers.

    The host's may also be called "cpu", which is its device.

    Raises:
        InvalidInput: no installed package has a provider of this name; or a wrong option.
        BackendUnavailable: its library is not installed, does not work, or has no such device.
    """
    known = entry_points()
    if CPU not in known:  # then it means the host, whose device it is
        name = HOST if name == CPU else name
        options = {re.sub(f"^{CPU}\\.", f"{HOST}.", key): value for key, value in (options or {}).items()}
    if name not in known:
        raise InvalidInput(
            f"unknown provider {name!r}.{did_you_mean(name, known)}",
            why=f"the installed providers are {names(known)}.",
            fix=f"use one of these, or install a package that has an entry point {name!r} in {GROUP!r}.",
        )
    config = EpConfig(options or {})
    config.check_namespaces(tuple(known))
    made = _make(known[name], device)
    made.initialize(config)
    return made


def _make(entry: EntryPoint, device: str | None) -> ExecutionProvider:
    try:
        factory = entry.load()
        made = factory() if device is None else factory(device)
    except EpError:
        raise
    except ImportError as cause:
        raise _not_installed(entry, cause) from cause
    except Exception as cause:  # a third party's package may fail in any way
        raise EpLoadFailed(entry.name, f"{type(cause).__name__}: {cause}") from cause
    if not isinstance(made, ExecutionProvider):
        raise EpLoadFailed(entry.name, f"{entry.value} returned a {type(made).__name__}, not a provider.")
    return made


def _not_installed(entry: EntryPoint, cause: ImportError) -> BackendUnavailable:
    """Name what to install: the extra of the provider's distribution if it has one of the provider's name."""
    missing = (cause.name or "").partition(".")[0]
    dist = entry.dist
    extras = [] if dist is None else dist.metadata.get_all("Provides-Extra") or []
    package = f"{dist.name}[{entry.name}]" if dist is not None and entry.name in extras else missing
    if not missing or not isinstance(cause, ModuleNotFoundError):
        fix = f'reinstall it: pip install --force-reinstall "{package}".' if package else ""
        return EpLoadFailed(entry.name, f"{type(cause).__name__}: {cause}", fix=fix)
    return BackendUnavailable(
        f"provider {entry.name!r} is not installed.",
        why=f"there is no module {missing!r}.",
        fix=f'pip install "{package}"',
    )


@dataclass(frozen=True, slots=True)
class Report:
    """What `ep doctor` says of one provider: its device and version, or the problem; and notes."""

    name: str
    device: str = ""
    version: str = ""
    problem: EpError | None = None
    notes: tuple[str, ...] = ()

    @property
    def works(self) -> bool:
        """Whether the provider can be used."""
        return self.problem is None


def survey() -> list[Report]:
    """Try every installed provider, and report what works and why the others do not."""
    return [_try(name) for name in entry_points()]


def _try(name: str) -> Report:
    try:
        made = provider(name)
    except EpError as problem:
        return Report(name, problem=problem)
    made.shutdown()
    backend: Any = getattr(made, "backend", None)  # another class of provider need not have one
    version, notes = getattr(backend, "version", ""), getattr(backend, "notes", ())
    return Report(name, str(made.device_id), version, notes=notes)


class EpRegistry:
    """The providers in use, numbered as they come, and asked in order of priority (larger first)."""

    def __init__(self) -> None:
        self._providers: list[ExecutionProvider] = []
        self._priorities: list[int] = []

    def register(self, provider: ExecutionProvider, *, priority: int = 0) -> EpId:
        """Add a provider and return its number; of equal priorities, the one that came first leads.

        Raises:
            InvalidInput: there is a provider of this name already.
        """
        if any(provider.name == other.name for other in self._providers):
            raise InvalidInput(
                f"provider {provider.name!r} is registered already.",
                why="options and placements name providers, so names must be unique.",
                fix="give the second provider another name.",
            )
        self._providers.append(provider)
        self._priorities.append(priority)
        return EpId(len(self._providers) - 1)

    def __getitem__(self, ep: EpId) -> ExecutionProvider:
        if not 0 <= ep.index < len(self._providers):
            raise InvalidInput(
                f"there is no provider number {ep.index}.",
                why=f"{len(self)} providers are registered.",
                fix="use the EpId that register returned.",
            )
        return self._providers[ep.index]

    def find(self, name: str) -> EpId | None:
        """Return the number of the provider of this name, or None."""
        return next((ep for ep in self if self[ep].name == name), None)

    def __iter__(self) -> Iterator[EpId]:
        """The providers in the order in which they are asked."""
        order = sorted(range(len(self)), key=lambda index: -self._priorities[index])
        return map(EpId, order)

    def __len__(self) -> int:
        return len(self._providers)

    def matches(
        self,
        op: Step | ir.Node,
        shapes: Sequence[Shape] = (),
        layouts: Sequence[TensorLayout] = (),
        *,
        dtypes: tuple[Dtypes, Dtypes] | None = None,
    ) -> dict[EpId, KernelMatch]:
        """Ask every provider about a node, in order."""
        return {ep: self[ep].supports_op(op, shapes, layouts, dtypes=dtypes) for ep in self}

    def candidates(
        self,
        op: Step | ir.Node,
        shapes: Sequence[Shape] = (),
        layouts: Sequence[TensorLayout] = (),
        *,
        dtypes: tuple[Dtypes, Dtypes] | None = None,
    ) -> list[tuple[EpId, KernelMatch]]:
        """Return the providers that run a node, in order.

        Raises:
            NoEpForOp: none does; the error has the reason of each.
        """
        from ep.node import op_name

        matches = self.matches(op, shapes, layouts, dtypes=dtypes)
        found = [(ep, match) for ep, match in matches.items() if match]
        if not found:
            reasons = {self[ep].name: match.reason for ep, match in matches.items()}
            raise NoEpForOp(op_name(op), reasons, node=op.name or "")
        return found
