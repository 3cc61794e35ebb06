"""How fast is a second start? `ep.load` and the first run in fresh processes: cold, from the cache, from a context.

    python benchmarks/context.py [--device jax mlx] [--rounds 3] [--out benchmarks/context.md]

Every figure is the median of fresh processes that alternate. Libraries are imported before the clock starts; what that
takes is told apart. `compile` is the part of a start that stored code replaces: from the first question for a function
until it is called for the first time and computes. onnxruntime's column is session creation and first run. Files are
in the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from timing import machine

HERE = Path(__file__).parent
CORPUS = Path(os.environ.get("EP_CORPUS", HERE.parents[1] / "shared" / "corpus"))
BUILT = ("encoder", "decoder")
MODELS = (*BUILT, "ocr_ppocrv6_rec_tiny", "gen_sd_unet_small", "sec_credsweeper_lstm_loop")
WAYS = ("cold", "cache", "trusted")  # and onnxruntime
CONTEXT = "context.onnx"


# One process: one start.


def start(folder: Path, device: str, way: str) -> dict[str, Any]:
    """Seconds of one start, and what it counted."""
    before = time.perf_counter()
    run_first = opener(device)
    imported = time.perf_counter() - before
    with np.load(folder / "feeds.npz") as file:
        feeds = {name: file[name] for name in file.files}
    loaded = time.perf_counter()
    run, facts = run_first(folder / (CONTEXT if way == "trusted" else "model.onnx"), way)
    began = time.perf_counter()
    results = run(feeds)
    done = time.perf_counter()
    warm = []
    for _ in range(5):
        again = time.perf_counter()
        run(feeds)
        warm.append(time.perf_counter() - again)
    digest = sum(float(np.nansum(np.abs(r.astype(np.float64)))) for r in results if r.dtype.kind in "fiub")
    times = {"import": imported, "load": began - loaded, "first": done - began, "warm": median(warm)}
    return times | facts() | {"digest": digest}


def opener(device: str) -> Callable[[Path, str], tuple[Callable[[Any], list[Any]], Callable[[], dict[str, Any]]]]:
    """Imports all that a start needs, and returns what loads a model."""
    if device == "onnxruntime":
        import onnxruntime

        def open_there(path: Path, way: str) -> Any:
            options = onnxruntime.SessionOptions()
            options.log_severity_level = 3
            session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
            return (lambda feeds: session.run(None, feeds)), dict

        return open_there
    import warnings

    import onnx
    import onnx_ir.passes.common  # noqa: F401

    import ep
    import ep.library
    import ep.ops
    import ep.planned
    from ep.discovery import provider
    from ep.identity import code_identity

    warnings.simplefilter("ignore", ep.HostFallbackWarning)
    provider(device), provider("host")
    onnx.ModelProto.FromString(b"")
    onnx.defs.has("Add")  # registers all schemas
    code_identity()
    spent = [0.0]

    def timed(function: Any) -> Any:
        def run(*arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                spent[0] += time.perf_counter() - began

        return run

    ep.library.Library.first = timed(ep.library.Library.first)  # type: ignore[method-assign]
    ep.planned.PlannedGroup._first = timed(ep.planned.PlannedGroup._first)  # type: ignore[method-assign]

    def open_here(path: Path, way: str) -> Any:
        options: dict[str, Any] = {"trust_native": True} if way == "trusted" else {}
        options["context.cache"] = str(path.parent / f"cache_{device}") if way == "cache" else "off"
        session = ep.load(path, device, options=options)
        counted = session.counters
        return (
            lambda feeds: session.run(None, feeds),
            lambda: {"compile": spent[0], "loaded": counted.loaded, "misses": counted.misses},
        )

    return open_here


# All processes.


def spawn(*job: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, __file__, "--worker", *job], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(job)}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def prepare(name: str, folder: Path) -> None:
    """The model and its feeds in a folder of their own."""
    import onnx

    if name in BUILT:
        import encoders

        onnx.save(getattr(encoders, name)(), folder / "model.onnx")
        np.savez(folder / "feeds.npz", **made_feeds(name))
        return
    (folder / "model.onnx").write_bytes((CORPUS / name / "model.onnx").read_bytes())
    case = json.loads((CORPUS / name / "meta.json").read_text())["cases"][0]["k"]
    (folder / "feeds.npz").write_bytes((CORPUS / name / f"inputs_{case}.npz").read_bytes())


def made_feeds(name: str) -> Mapping[str, np.ndarray]:
    rng = np.random.default_rng(0)
    if name == "encoder":
        ids = rng.integers(0, 30_000, (1, 128))
        return {"ids": ids, "mask": np.ones_like(ids)}
    past = {f"past_{k}{i}": rng.standard_normal((1, 8, 64, 64)).astype(np.float32) for i in range(12) for k in "kv"}
    return {"ids": np.array([[7]]), **past}


def store(folder: Path, device: str) -> int:
    """Fill the cache and write the context model, in a process of its own; the bytes of the container."""
    code = (
        "import sys, json, numpy as np, warnings, ep, ep.library; from pathlib import Path;"
        "warnings.simplefilter('ignore'); ep.library.WORTH = ep.library.GAIN = 0; f = Path(sys.argv[1]);"
        "s = ep.load(f / 'model.onnx', sys.argv[2], options={'context.cache': str(f / ('cache_' + sys.argv[2]))});"
        "s.run(None, dict(np.load(f / 'feeds.npz')));"
        f"print(json.dumps(s.save_context(f / '{CONTEXT}').blob_bytes))"
    )
    done = subprocess.run([sys.executable, "-c", code, folder, device], capture_output=True, text=True, check=True)
    return int(done.stdout)


def measure(name: str, device: str, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        prepare(name, folder)
        size = store(folder, device)
        found: dict[str, list[dict[str, Any]]] = {}
        for _ in range(rounds):
            for way in WAYS:
                found.setdefault(way, []).append(spawn(place, device, way))
            found.setdefault("onnxruntime", []).append(spawn(place, "onnxruntime", "cold"))
    result = {way: {key: median(r[key] for r in runs) for key in runs[0]} for way, runs in found.items()}
    for way in WAYS[1:]:
        assert result[way]["misses"] == 0 and result[way]["digest"] == result["cold"]["digest"], (name, device, way)
    return result | {"bytes": size}


def row(name: str, device: str, found: Mapping[str, Any]) -> list[str]:
    cold, other = found["cold"], found["onnxruntime"]

    def whole(way: str) -> float:
        return found[way]["load"] + found[way]["first"]

    def compiling(way: str) -> float:
        return found[way]["compile"]

    ort = other["load"] + other["first"]
    seconds = [cold["import"], *map(whole, WAYS)]
    figures = [*map("{:.2f}".format, seconds), f"{whole('cold') / whole('trusted'):.1f}"]
    figures += [f"{1e3 * compiling('cold'):.0f}", f"{1e3 * compiling('trusted'):.0f}"]
    figures += [f"{compiling('cold') / compiling('trusted'):.1f}", f"{ort:.2f}", f"{whole('trusted') / ort:.1f}"]
    return [name, device, *figures, f"{found['bytes'] / 2**20:.2f}"]


HEADER = ("model", "device", "import s", "cold s", "cache s", "context s", "cold/context")
HEADER += ("compile ms", "load code ms", "ratio", "onnxruntime s", "context/onnxruntime", "container MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", nargs="+", default=["jax", "mlx"])
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=3, help="fresh processes per figure")
    parser.add_argument("--out", type=Path, help="a file for the table, in Markdown")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        folder, device, way = options.worker
        print("\n" + json.dumps(start(Path(folder), device, way)))
        return
    lines = [f"| {' | '.join(HEADER)} |", "|---" * len(HEADER) + "|"]
    print(*lines, sep="\n", flush=True)
    for name in options.models:
        for device in options.device:
            lines.append(f"| {' | '.join(row(name, device, measure(name, device, options.rounds)))} |")
            print(lines[-1], flush=True)
    if options.out:
        options.out.write_text(f"{machine()}\n\n" + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
