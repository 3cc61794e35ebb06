"""Which providers work on this machine, and why do the others not? Behind `ep doctor`."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from ep.errors import EpError
from ep.provider import HOST

PACKAGES = ("ep-runtime", "numpy", "onnx", "onnx-ir", "mlx", "jax", "jaxlib", "onnxruntime")


@dataclass(frozen=True)
class Checkup:
    """One provider: the device and version found, or the problem, and what to know about it."""

    name: str
    device: str = ""  # the one that is used unless another is asked for
    devices: tuple[str, ...] = ()  # names that can be asked for: cpu, gpu
    version: str = ""
    seconds: float | None = None  # to compile and run a small model
    problem: dict[str, str] = field(default_factory=dict)  # what, why, fix
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Diagnosis:
    """All providers, with the machine and the versions that they stand on."""

    machine: str
    python: str
    packages: dict[str, str]
    auto: str  # the providers that device="auto" means
    cpu: str  # and device="cpu"
    providers: tuple[Checkup, ...]

    @property
    def works(self) -> bool:
        """Whether a provider other than the host works."""
        return any(not p.problem for p in self.providers if p.name != HOST)

    def to_dict(self) -> dict[str, Any]:
        """The diagnosis as plain data, ready for JSON."""
        return asdict(self) | {"works": self.works}

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.table import Table
        from rich.text import Text

        yield Text(f"{self.machine}, Python {self.python}")
        yield Text(", ".join(f"{name} {version}" for name, version in self.packages.items()))
        table = Table("provider", "works", "device", "has", "version", "first model")
        for p in self.providers:
            time_taken = "-" if p.seconds is None else f"{p.seconds:.2f} s"
            works = Text("no", "bold red") if p.problem else Text("yes", "bold green")
            table.add_row(p.name, works, p.device, ", ".join(p.devices), p.version, time_taken)
        yield table
        yield Text(f'device="auto" means {self.auto}; device="cpu" means {self.cpu}.')
        for p in self.providers:
            for note in p.notes:
                yield Text.assemble((f"{p.name}: ", "bold"), note)
            if p.problem:
                lines = [
                    p.problem["what"],
                    *(f"  {k}: {p.problem[k]}" for k in ("why", "fix") if p.problem[k]),
                ]
                yield Text.assemble((f"{p.name}: ", "bold red"), "\n".join(lines))
        if not self.works:
            yield Text("Only NumPy works here: install ep-runtime[mlx] or ep-runtime[jax].", "bold red")


def examine() -> Diagnosis:
    """Tries every installed provider on a small model."""

    from ep.discovery import survey

    machine = f"{platform.system()} {platform.release()} {platform.machine()}"
    providers = tuple(map(_check, survey()))
    return Diagnosis(machine, sys.version.split()[0], _versions(), _meaning("auto"), _meaning("cpu"), providers)


def _check(report: Any) -> Checkup:
    if report.problem is not None:
        return Checkup(report.name, problem=_facts(report.problem))
    found = Checkup(report.name, report.device, _devices(report.name), report.version, notes=report.notes)
    try:
        return replace(found, seconds=_try(report.name))
    except EpError as error:
        return replace(found, problem=_facts(error))


def _devices(name: str) -> tuple[str, ...]:
    from ep.discovery import provider

    def has(kind: str) -> bool:
        try:
            provider(name, kind).shutdown()
        except EpError:
            return False
        return True

    return tuple(kind for kind in ("cpu", "gpu") if has(kind))


def _try(name: str) -> float:
    """Seconds to compile and run a matrix product; raises an `EpError` unless the answer is right."""
    from onnx import parser

    from ep.discovery import provider
    from ep.errors import ExecutionError
    from ep.session import load

    model = parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[n, n] x) => (float[n, n] y) { y = MatMul(x, x) }'
    )
    x = np.arange(16, dtype=np.float32).reshape(4, 4)
    session = load(model, providers=[provider(name)])
    started = time.perf_counter()
    (y,) = session.run(None, {"x": x})
    seconds = time.perf_counter() - started
    if not np.allclose(y, x @ x):
        raise ExecutionError(
            f"{name} computed a wrong matrix product.",
            why=f"the largest difference is {np.abs(y - x @ x).max():.3g}.",
            fix="report this with the output of `ep doctor --json`, and use another provider.",
        )
    return seconds


def _facts(error: EpError) -> dict[str, str]:
    return {"kind": type(error).__name__, "what": error.what, "why": error.why, "fix": error.fix}


def _meaning(device: str) -> str:
    from ep.devices import resolve

    try:
        return ", then ".join(f"{p.name} ({p.device_id})" for p in resolve(device, {}))
    except EpError as error:
        return f"nothing: {error.what}"


def _versions() -> dict[str, str]:
    from importlib import metadata

    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
