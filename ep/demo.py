"""Does it work on something real? Google's file-type model (magika) on the files of this project.

The model and its description are read from the installed package `magika`; none of its code runs.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ep.errors import BackendUnavailable, EpError, InvalidInput
from ep.provider import HOST

RUNS, MOST_SECONDS = 30, 2.0  # warm runs, and when to stop before that
SETTLE = 0.05  # seconds: a library's worker threads spin that long after a run, and take the core of the next


@dataclass(frozen=True)
class Prediction:
    """What the model says of one file."""

    file: str
    type: str
    score: float


@dataclass(frozen=True)
class Timing:
    """One runtime on the batch: seconds to load, for the first run and (median) for warm runs; agreement."""

    runtime: str
    device: str
    nodes: str
    load: float
    first: float
    median: float
    difference: float  # largest difference of a score from the reference's


@dataclass(frozen=True)
class Demo:
    """The predictions of the best provider, times of all, and what could not take part."""

    model: str
    predictions: tuple[Prediction, ...]
    timings: tuple[Timing, ...]
    reference: str  # the runtime that scores are compared with
    absent: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """The demo as plain data, ready for JSON."""
        return asdict(self)

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.table import Table

        yield f"{self.model}: what type is each of these {len(self.predictions)} files?"
        answers = Table("file", "type", "score")
        for p in self.predictions:
            answers.add_row(p.file, p.type, f"{p.score:.1%}")
        yield answers
        times = Table(
            "runtime",
            "device",
            "nodes",
            "load",
            "first run",
            "warm run",
            f"scores differ from {self.reference}'s by",
        )
        for t in self.timings:
            seconds = (f"{t.load * 1e3:.0f} ms", f"{t.first * 1e3:.0f} ms", f"{t.median * 1e3:.2f} ms")
            times.add_row(t.runtime, t.device, t.nodes, *seconds, f"{t.difference:.1e}")
        yield times
        for name, why in self.absent.items():
            yield f"{name} did not take part: {why}"


def run_demo(files: Sequence[str] = ()) -> Demo:
    """Runs the model on the files, or on this project's, with every provider and with onnxruntime."""
    directory = _model_directory()
    config = json.loads((directory / "config.min.json").read_text(encoding="utf-8"))
    paths = [Path(f) for f in files] or project_files()
    batch = np.stack([features(path, config) for path in paths])
    runs: list[tuple[Timing, np.ndarray]] = []
    absent: dict[str, str] = {}
    for name, start in _runtimes(directory / "model.onnx").items():
        try:
            runs.append(_time(name, start, batch))
        except EpError as error:
            absent[name] = error.what
    scores = runs[0][1]
    labels = config["target_labels_space"]
    predictions = tuple(
        Prediction(_shown(path), labels[int(row.argmax())], float(row.max()))
        for path, row in zip(paths, scores, strict=True)
    )
    reference, expected = runs[-1]
    timings = tuple(_compared(timing, other, expected) for timing, other in runs)
    return Demo(f"magika {directory.name}", predictions, timings, reference.runtime, absent)


def _model_directory() -> Path:
    """Where the magika package keeps its newest model; the package itself is not imported."""
    spec = importlib.util.find_spec("magika")
    found = [] if spec is None or spec.origin is None else Path(spec.origin).parent.glob("models/*/model.onnx")
    models = sorted(path.parent for path in found)
    if not models:
        raise BackendUnavailable(
            "the demo's model is not installed.",
            why="the package 'magika', which contains it, is missing or has no models.",
            fix='pip install "ep-runtime[demo]"',
        )
    return models[-1]


def project_files() -> list[Path]:
    """Files of many kinds: those of the checkout, or of the installed package, and the demo's own model."""
    package = Path(__file__).parent
    named = ("README.md", "Makefile", "LICENSE", "pyproject.toml", ".gitignore", ".ci/run")
    chosen = [package.parent / name for name in named] if (package.parent / "pyproject.toml").exists() else []
    chosen += sorted((package.parent / "notebooks").glob("*.ipynb"))[:1]
    chosen += [package / "session.py", *sorted(package.glob("__pycache__/session.*.pyc"))[:1]]
    directory = _model_directory()
    chosen += [directory / "model.onnx", directory / "config.min.json"]
    return [path for path in chosen if path.exists() and path.stat().st_size > 64]


def features(path: Path, config: dict[str, Any]) -> np.ndarray:
    """The first and last bytes of a file without blanks around them, as magika's configuration asks."""
    block, begin, end = config["block_size"], config["beg_size"], config["end_size"]
    try:
        with path.open("rb") as file:
            head = file.read(block).lstrip()[:begin]
            file.seek(max(0, path.stat().st_size - block))
            tail = file.read(block).rstrip()[-end:]
    except OSError as error:
        raise InvalidInput(f"'{path}' cannot be read.", why=error.strerror or str(error)) from error
    if len(head.rstrip()) < config["min_file_size_for_dl"]:
        raise InvalidInput(f"'{path}' is too short for the model.", fix="choose files of 8 bytes or more.")
    row = np.full(begin + end, config["padding_token"], np.int32)
    row[: len(head)] = np.frombuffer(head, np.uint8)
    row[begin + end - len(tail) :] = np.frombuffer(tail, np.uint8)
    return row


Run = Callable[[np.ndarray], np.ndarray]


def _runtimes(model: Path) -> dict[str, Callable[[], tuple[Run, str, str]]]:
    """Name → function that loads the model and returns how to run it, its device, and where its nodes run."""
    from ep.devices import resolve
    from ep.discovery import entry_points

    best = resolve("auto", {})[0].name
    names = sorted(entry_points(), key=lambda name: (name != best, name == HOST, name))
    ours = {f"ep on {name}": lambda name=name: _ours(model, name) for name in names}
    return ours | {"onnxruntime": lambda: _onnxruntime(model)}


def _ours(model: Path, name: str) -> tuple[Run, str, str]:
    from ep.discovery import provider
    from ep.session import load

    chosen = provider(name)
    session = load(model, providers=[chosen, *([] if name == HOST else [provider(HOST)])])
    nodes = ", ".join(f"{count} on {where}" for where, count in session.plan.counts().items())
    return lambda batch: session.run(None, {"bytes": batch})[0], str(chosen.device_id), nodes


def _onnxruntime(model: Path) -> tuple[Run, str, str]:
    try:
        import onnxruntime
    except ImportError as error:
        raise BackendUnavailable("it is not installed.") from error
    session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    return lambda batch: session.run(None, {"bytes": batch})[0], "cpu", "its own"


def _time(name: str, start: Callable[[], tuple[Run, str, str]], batch: np.ndarray) -> tuple[Timing, np.ndarray]:
    began = time.perf_counter()
    run, device, nodes = start()
    loaded = time.perf_counter()
    scores = run(batch)
    first = time.perf_counter()
    time.sleep(SETTLE)
    warm: list[float] = []
    while len(warm) < RUNS and sum(warm) < MOST_SECONDS:
        warm.append(_seconds(run, batch))
    median = statistics.median(warm)
    return Timing(name, device, nodes, loaded - began, first - loaded, median, 0.0), scores


def _seconds(run: Run, batch: np.ndarray) -> float:
    began = time.perf_counter()
    run(batch)
    return time.perf_counter() - began


def _compared(timing: Timing, scores: np.ndarray, reference: np.ndarray) -> Timing:
    return Timing(**{**asdict(timing), "difference": float(np.abs(scores - reference).max())})


def _shown(path: Path) -> str:
    """The path from here, from the checkout or from the installed packages: whatever is shortest."""
    bases = (Path.cwd(), Path(__file__).parent.parent, _model_directory().parents[2])
    inside = [str(path.resolve().relative_to(b)) for b in bases if path.resolve().is_relative_to(b)]
    return min(inside, key=len, default=str(path))
