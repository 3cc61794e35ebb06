"""What does a model give for some inputs, where does it run, and how long does it take? Behind `ep run`."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ep.errors import InvalidInput, counted
from ep.inputs import RANDOM, feeds
from ep.plan import Plan
from ep.session import load

SHOWN = 6  # leading elements of an output that are printed


@dataclass(frozen=True)
class Trial:
    """One model, run on some inputs: what came out, where it ran, and seconds for each phase."""

    model: str
    providers: tuple[str, ...]
    plan: Plan
    inputs: Mapping[str, Any]
    sources: Mapping[str, str]
    outputs: Mapping[str, Any]
    load_seconds: float
    first_seconds: float
    repeats: tuple[float, ...]
    compiled: int  # functions that the first run compiled
    loaded: int  # and those that it found stored, in the cache or the model's context

    def save(self, path: str) -> None:
        """Writes the outputs that are arrays of numbers or text to an .npz file."""
        arrays = {name: _plain(value) for name, value in self.outputs.items()}
        held = {name: a for name, a in arrays.items() if a is not None}
        if len(held) < len(arrays):
            raise InvalidInput(
                f"{', '.join(repr(n) for n in arrays if n not in held)} cannot be saved to {path!r}.",
                why="an .npz file holds arrays, not sequences or maps.",
                fix="use --json without --save.",
            )
        try:
            with Path(path).open("wb") as file:
                np.savez(file, allow_pickle=False, **held)
        except OSError as error:
            raise InvalidInput(
                f"{path!r} cannot be written.", why=error.strerror or str(error), fix="choose another file."
            ) from error

    def to_dict(self, *, with_plan: bool = False) -> dict[str, Any]:
        """The trial as plain data, ready for JSON: shapes and summaries, not whole outputs."""
        described = {
            "model": self.model,
            "providers": list(self.providers),
            "nodes": self.plan.counts(),
            "inputs": {n: _describe(v) | {"source": self.sources[n]} for n, v in self.inputs.items()},
            "outputs": {n: _describe(v) for n, v in self.outputs.items()},
            "seconds": {
                "load": self.load_seconds,
                "first_run": self.first_seconds,
                "warm_median": statistics.median(self.repeats) if self.repeats else None,
                "warm_best": min(self.repeats, default=None),
                "warm_runs": len(self.repeats),
            },
            "functions": {"compiled": self.compiled, "loaded": self.loaded},
        }
        return described | ({"plan": self.plan.to_dict()} if with_plan else {})

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.text import Text

        yield Text(str(self.plan))
        yield from self.results()

    def with_plan(self) -> Any:
        """The tables of the plan in the place of its summary, to be printed."""
        from rich.console import Group

        return Group(self.plan, *self.results())

    def results(self) -> Iterator[Any]:
        """What went in, what came out, and the times, to be printed."""
        from rich.table import Table
        from rich.text import Text

        table = Table("", "name", "type", "values")
        for name, value in self.inputs.items():
            table.add_row(*map(Text, ("input", name, _type(value), self.sources[name])))
        for name, value in self.outputs.items():
            table.add_row(*map(Text, ("output", name, _type(value), _values(value))))
        yield table
        times = f"load {self.load_seconds:.3f} s, first run {self.first_seconds:.3f} s"
        if self.compiled or self.loaded:
            times += f" ({counted(self.compiled, 'function')} compiled, {self.loaded} found stored)"
        if self.repeats:
            middle, best = statistics.median(self.repeats) * 1e3, min(self.repeats) * 1e3
            times += f", then median {middle:.3f} ms, best {best:.3f} ms of {len(self.repeats)} runs"
        yield times


def try_model(
    source: Any,
    device: str,
    *,
    weights: Any = None,
    strict: bool = False,
    options: Mapping[str, Any] | None = None,
    given: Sequence[str] = (),
    dims: Mapping[str, int] | None = None,
    seed: int = 0,
    repeat: int = 0,
) -> Trial:
    """Loads a model, runs it once, then `repeat` times more."""
    started = time.perf_counter()
    session = load(source, device, weights=weights, strict=strict, options=options)
    loaded = time.perf_counter()
    inputs, sources = feeds(session.inputs, given, dims or {}, seed)
    if RANDOM in sources.values():
        with session._backend.scope():
            limits = session._opened.feeds.highest(inputs, session._backend)
        for name, most in limits.items():
            if sources.get(name) == RANDOM:  # 0 or 1, which may be one too many
                inputs[name] = np.minimum(inputs[name], max(most, 0))
    first, outputs = _timed(session, inputs)
    compiled, found = session.counters.misses, session.counters.loaded
    repeats = tuple(_timed(session, inputs)[0] for _ in range(repeat))
    named = dict(zip((o.name for o in session.outputs), outputs, strict=True))
    return Trial(
        session.name,
        session.providers,
        session.plan,
        inputs,
        sources,
        named,
        loaded - started,
        first,
        repeats,
        compiled,
        found,
    )


def _timed(session: Any, inputs: Mapping[str, Any]) -> tuple[float, list[Any]]:
    started = time.perf_counter()
    outputs = session.run(None, inputs)
    return time.perf_counter() - started, outputs


def _plain(value: Any) -> np.ndarray | None:
    if not isinstance(value, np.ndarray):
        return None
    return value.astype(str) if value.dtype.kind == "O" else value


def _type(value: Any) -> str:
    if isinstance(value, list):
        return f"sequence of {len(value)}"
    if not isinstance(value, np.ndarray):
        return type(value).__name__
    dtype = "string" if value.dtype.kind == "O" else value.dtype.name
    return f"{dtype}[{', '.join(map(str, value.shape))}]"


def _values(value: Any) -> str:
    if not isinstance(value, np.ndarray):
        return "" if value is None else repr(value)[:80]
    shown = (f"{v:.5g}" if isinstance(v, float) else str(v) for v in _first(value))
    return " ".join(shown) + (" …" if value.size > SHOWN else "")


def _describe(value: Any) -> dict[str, Any]:
    """Type, first elements and, for real numbers, the range."""
    if not isinstance(value, np.ndarray):
        return {"type": _type(value), "value": value}
    facts: dict[str, Any] = {"type": _type(value), "first": [_finite(v) for v in _first(value)]}
    if value.size and value.dtype.kind not in "Oc":
        wide = value.astype(np.float64)
        facts |= {"min": _finite(wide.min()), "max": _finite(wide.max()), "mean": _finite(wide.mean())}
    return facts


def _first(value: np.ndarray) -> list[bool | int | float | str]:
    """The first elements as Python values."""
    leading = value.ravel()[:SHOWN]
    if value.dtype.kind in "Oc":
        return [str(v) for v in leading]
    return (leading if value.dtype.kind in "biuf" else leading.astype(np.float64)).tolist()


def _finite(value: Any) -> Any:
    """JSON has neither infinities nor NaN: they become text."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
