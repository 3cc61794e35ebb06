"""How fast are real models on JAX and on MLX, beside onnxruntime on the CPU?

    python benchmarks/corpus.py [--models 'vad_*'] [--threads 1 2] [--quick]
        [--resume measured.json] [--out benchmarks/results.md]

The corpus is a folder of models with stored inputs (`EP_CORPUS`, default `../shared/corpus`). Each model and
thread count has its own process, in which the runtimes alternate in settled blocks (`timing.py`); first-run time and
peak memory are measured in a fresh process per runtime. Writes a table and, beside it, a picture of the ratios.
"""

from __future__ import annotations

import argparse
import csv
import fnmatch
import json
import math
import os
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from timing import compare, machine, pin, thread_settings

HERE = Path(__file__).parent
CORPUS = Path(os.environ.get("EP_CORPUS", HERE.parents[1] / "shared" / "corpus"))
OURS = ("jax", "mlx")
RUNTIMES = ("onnxruntime", *OURS)
TINY = 0.1  # ms of onnxruntime below which a ratio says nothing: such models are judged by what a call costs
SLOW = 2.0  # ratio above which the table gives a reason
TIMEOUT = 300  # seconds for one process

# Why a model is slower than twice onnxruntime: (models, device, reason), first match wins.
REASONS: tuple[tuple[str, str, str], ...] = (
    ("*", "mlx", "MLX's CPU backend fuses nothing, runs most operations on one thread, and lowerings run at each call"),
    ("cls_mobilenetv2_qlinear", "*", "8-bit products are computed exactly in float32; onnxruntime's are 8-bit"),
    ("*int8*", "*", "8-bit products are computed exactly in float32 or int32; onnxruntime's are 8-bit"),
    ("llm_*int4", "*", "XLA unpacks 4-bit weights into memory for every product"),
    ("llm_*", "*", "under 2 ms: XLA's start of many small operations"),
    ("gen_sd_unet_small", "*", "XLA's softmax over 4096 × 4096 scores takes most of the time"),
    ("ml_atspm_phase*", "*", "all trees of a segment are walked to its depth, with XLA's gathers"),
    ("mos_aecmos*", "*", "XLA's small operations scale badly to two threads"),
    ("misc_scripted*", "*", "under 1 ms: each turn of the loop is started by itself"),
    ("vid_conv3d*", "*", "XLA's convolutions with few channels, of three axes as stacked planes"),
    ("m*_dnsmos*", "*", "XLA's convolutions with few channels, and transposes of large images"),
    ("ocr_*", "*", "XLA's convolutions with few channels; its small operations scale badly to two threads"),
    ("face_*", "*", "XLA's small operations scale badly to two threads"),
    ("vad_*", "*", "under 1 ms: XLA's start of many small operations"),
    ("wake_*", "*", "under 1 ms: XLA's start of many small operations"),
    ("text_*", "*", "XLA's small operations scale badly to two threads"),
    *(
        (glob, "jax", "under 1 ms: XLA's start of each operation")
        for glob in ("sk_*", "ml_*", "xgb_*", "lgbm_*", "ts_*")
    ),
)


# One process: one model, one thread count.


def session_of(runtime: str, path: Path, threads: int) -> Callable[[Mapping[str, Any]], list[Any]]:
    """A function from feeds to outputs."""
    if runtime == "onnxruntime":
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = threads, 3
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    else:
        import ep

        warnings.simplefilter("ignore", ep.HostFallbackWarning)
        session = ep.load(path, runtime)
    return lambda feeds: session.run(None, feeds)


def feeds_of(folder: Path) -> dict[str, np.ndarray]:
    """The stored case that takes onnxruntime longest."""
    stored = json.loads((folder / "meta.json").read_text())["cases"]
    case = max(stored, key=lambda c: c["ort_run_ms"])["k"]
    with np.load(folder / f"inputs_{case}.npz") as file:
        return {k: file[k].astype(object) if file[k].dtype.kind == "U" else file[k] for k in file.files}


def warm(folder: Path, threads: int, rounds: int) -> dict[str, Any]:
    """Runtime → warm milliseconds, or the error of one that fails."""
    feeds, found, calls = feeds_of(folder), {}, {}
    for runtime in RUNTIMES:
        try:
            run = session_of(runtime, folder / "model.onnx", threads)
            run(feeds)
            calls[runtime] = lambda run=run: run(feeds)
        except Exception as error:  # noqa: BLE001 - one that fails must not hide the others
            found[runtime] = first_line(error)
    times = compare(calls, rounds, budget=8.0 * rounds)
    return found | {name: 1e3 * seconds for name, seconds in times.items()}


def first(folder: Path, threads: int, runtime: str) -> dict[str, Any]:
    """Milliseconds to load and to run for the first time, and how far memory peaked above the imports."""
    feeds = feeds_of(folder)
    __import__(runtime if runtime == "onnxruntime" else f"ep.backends.{runtime}")
    before = peak_memory()
    started = time.perf_counter()
    try:
        run = session_of(runtime, folder / "model.onnx", threads)
        loaded = time.perf_counter()
        run(feeds)
    except Exception as error:  # noqa: BLE001
        return {"error": first_line(error)}
    done = time.perf_counter()
    return {"load": 1e3 * (loaded - started), "run": 1e3 * (done - loaded), "memory": peak_memory() - before}


def peak_memory() -> float:
    """MiB that this process held at most."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:160]


def worker(job: dict[str, Any]) -> None:
    pin(job["threads"])
    kind, folder = job["kind"], CORPUS / job["model"]
    if kind == "warm":
        result = warm(folder, job["threads"], job["rounds"])
    else:
        result = first(folder, job["threads"], kind)
    print("\n" + json.dumps(result))


# All processes.


def spawn(job: dict[str, Any]) -> dict[str, Any]:
    """Runs a job in its own process; a crash becomes an error of the result."""
    settings = os.environ | thread_settings(job["threads"]) | {"EP_CORPUS": str(CORPUS), "EP_CONTEXT_CACHE": "off"}
    if (CORPUS / "locale").is_dir():
        settings.setdefault("LOCPATH", str(CORPUS / "locale"))  # onnxruntime's StringNormalizer wants en_US
    command = [sys.executable, __file__, "--worker", json.dumps(job)]
    try:
        done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return {"error": f"no result after {TIMEOUT} s"}
    if done.returncode:
        return {"error": f"exit code {done.returncode}: {done.stderr.strip()[-160:]}"}
    return json.loads(done.stdout.strip().splitlines()[-1])


def measure(models: list[str], threads: list[int], rounds: int, saved: Path | None) -> dict[str, dict[str, Any]]:
    """Model → thread count (as text) or "first jax" → what the process reported. `saved` is kept up to date, and
    what it already holds is not measured again."""
    jobs = [{"model": m, "kind": "warm", "threads": t, "rounds": rounds} for m in models for t in threads]
    jobs += [{"model": m, "kind": r, "threads": max(threads)} for m in models for r in RUNTIMES]
    jobs.sort(key=lambda job: models.index(job["model"]))
    found: dict[str, dict[str, Any]] = {model: {} for model in models}
    if saved is not None and saved.exists():
        found |= {m: r for m, r in json.loads(saved.read_text()).items() if m in found}
    columns = TextColumn("{task.description:40}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(jobs))
        for job in jobs:
            progress.update(task, description=f"{job['model']} {job['kind']} ×{job['threads']}")
            key = str(job["threads"]) if job["kind"] == "warm" else f"first {job['kind']}"
            if key not in found[job["model"]]:
                found[job["model"]][key] = spawn(job)
                if saved is not None:
                    saved.write_text(json.dumps(found))
            progress.advance(task)
    return found


# What is written.


def ratio(times: Mapping[str, Any], device: str) -> float | None:
    """Our time over onnxruntime's, where both ran."""
    ours, other = times.get(device), times.get("onnxruntime")
    return ours / other if isinstance(ours, float) and isinstance(other, float) else None


def ratios(found: Mapping[str, Any], threads: int, device: str, tiny: bool = True) -> list[float]:
    values = []
    for result in found.values():
        times = result[str(threads)]
        value = ratio(times, device)
        if value is not None and (tiny or times["onnxruntime"] >= TINY):
            values.append(value)
    return values


def reason(model: str, device: str) -> str:
    return next((why for glob, on, why in REASONS if on in (device, "*") and fnmatch.fnmatch(model, glob)), "")


def cell(value: Any, digits: int = 2) -> str:
    if isinstance(value, str):
        return "failed"
    return "–" if value is None else f"{value:,.{digits}f}"


def rows(found: Mapping[str, Any], threads: list[int]) -> tuple[list[str], list[list[str]]]:
    """The table: per thread count the warm times and ratios, then first runs, memory and reasons."""
    header = ["model"]
    for t in threads:
        header += [f"ort ms ×{t}", f"jax ms ×{t}", "ratio", f"mlx ms ×{t}", "ratio"]
    header += ["first run ms ort / jax / mlx", "peak MiB ort / jax / mlx", "above 2×, because"]
    table = []
    for model, result in found.items():
        row = [model]
        for t in threads:
            times = result[str(t)]
            row.append(cell(times.get("onnxruntime"), 3))
            for device in OURS:
                value = ratio(times, device)
                tiny = value is not None and times["onnxruntime"] < TINY
                row += [cell(times.get(device, times.get("error")), 3), cell(value) + ("†" if tiny else "")]
        firsts = [result.get(f"first {runtime}", {}) for runtime in RUNTIMES]
        row.append(" / ".join(cell(f["load"] + f["run"] if "load" in f else None, 0) for f in firsts))
        row.append(" / ".join(cell(f.get("memory"), 0) for f in firsts))
        row.append(explanation(model, result, threads))
        table.append(row)
    return header, table


def explanation(model: str, result: Mapping[str, Any], threads: list[int]) -> str:
    texts = []
    for device in OURS:
        errors = {
            e for t in threads for e in [result[str(t)].get(device, result[str(t)].get("error"))] if isinstance(e, str)
        }
        slow = [v for t in threads for v in [ratio(result[str(t)], device)] if v is not None and v > SLOW]
        if errors:
            texts.append(f"{device}: {errors.pop()}")
        elif slow:
            texts.append(f"{device}: {reason(model, device) or 'not explained yet'}")
    return "; ".join(texts)


def means(found: Mapping[str, Any], threads: list[int]) -> list[str]:
    lines = []
    for t in threads:
        for device in OURS:
            values, large = ratios(found, t, device), ratios(found, t, device, tiny=False)
            if large:
                lines.append(
                    f"- {device}, {t} thread{'s' * (t > 1)}: geometric mean **{geometric_mean(large):.2f}×** over"
                    f" {len(large)} models of {TINY} ms and more ({geometric_mean(values):.2f}× over all {len(values)})"
                )
    return lines


def markdown(found: Mapping[str, Any], threads: list[int], picture: str) -> str:
    header, table = rows(found, threads)
    align = ["---"] + ["---:"] * (len(header) - 2) + ["---"]
    lines = [
        "# Corpus: ep on JAX and MLX beside onnxruntime",
        "",
        f"Written by `benchmarks/corpus.py` on: {machine()}.",
        "Warm milliseconds are medians of alternating, settled blocks; ratios are ours over onnxruntime's (less is"
        " better). Each model runs its slowest stored case, from NumPy inputs to NumPy outputs. First run: load and one"
        " run in a fresh process, compilation included. Peak: memory above the imports, at the first run.",
        f"† under {TINY} ms in onnxruntime: judged by the overhead of a call (`benchmarks/overhead.py`), not by ratio.",
        "",
        *means(found, threads),
        "",
        f"![Ratios]({picture})",
        "",
        *("| " + " | ".join(cells) + " |" for cells in (header, align, *table)),
    ]
    return "\n".join(lines) + "\n"


def svg(found: Mapping[str, Any], threads: int) -> str:
    """Bars of the ratios on a logarithmic scale, one pair for each model, without any plotting library."""
    left, width, step, low, high = 260, 620, 22, 0.125, 32.0
    colours = {"jax": "#4c78a8", "mlx": "#e45756"}

    def x(value: float) -> float:
        return left + width * math.log(min(max(value, low), high) / low) / math.log(high / low)

    shown = {m: r[str(threads)] for m, r in found.items()}
    height = 60 + step * len(shown)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 60}" height="{height}" '
        'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="16" font-size="13">time / onnxruntime, {threads} threads (left of 1: faster)</text>',
    ]
    for i, (device, colour) in enumerate(colours.items()):
        parts.append(f'<rect x="{left + 120 * i + 180}" y="7" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{left + 120 * i + 195}" y="16">{device}</text>')
    for tick in (0.125, 0.25, 0.5, 1, 2, 4, 8, 16, 32):
        stroke = "#333" if tick == 1 else "#ddd"
        parts.append(f'<line x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="40" y2="{height - 10}" stroke="{stroke}"/>')
        parts.append(f'<text x="{x(tick):.1f}" y="36" text-anchor="middle">{tick:g}×</text>')
    for i, (model, times) in enumerate(shown.items()):
        y = 46 + step * i
        faint = ' fill-opacity="0.35"' if isinstance(o := times.get("onnxruntime"), float) and o < TINY else ""
        parts.append(f'<text x="{left - 8}" y="{y + 12}" text-anchor="end">{model}</text>')
        for j, (device, colour) in enumerate(colours.items()):
            value = ratio(times, device)
            if value is not None:
                start, end = sorted((x(1), x(value)))
                parts.append(
                    f'<rect x="{start:.1f}" y="{y + 8 * j}" width="{max(end - start, 1):.1f}" height="7" '
                    f'fill="{colour}"{faint}><title>{model} {device} {value:.2f}×</title></rect>'
                )
    return "\n".join([*parts, "</svg>"]) + "\n"


def show(found: Mapping[str, Any], threads: list[int]) -> None:
    header, table = rows(found, threads)
    console = Console()
    printed = Table(*header)
    for row in table:
        printed.add_row(*row)
    console.print(printed)
    for line in means(found, threads):
        console.print(re.sub(r"\*\*", "", line))


def names(globs: Iterable[str]) -> list[str]:
    with (CORPUS / "index.csv").open() as index:
        listed = [row["name"] for row in csv.DictReader(index)]
    return [n for n in listed if (CORPUS / n / "meta.json").exists() and any(fnmatch.fnmatch(n, g) for g in globs)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["*"], help="names or globs")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--quick", action="store_true", help="two blocks per runtime instead of seven")
    parser.add_argument("--out", type=Path, help="where to write; default results.md here for a full run, else nowhere")
    parser.add_argument("--resume", type=Path, help="a JSON file of what was measured, to go on after an interruption")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker(json.loads(options.worker))
    if not (CORPUS / "index.csv").exists():
        sys.exit("The corpus of models is not here: set EP_CORPUS to its folder.")
    found = measure(names(options.models), options.threads, 2 if options.quick else 7, options.resume)
    show(found, options.threads)
    out = options.out or (HERE / "results.md" if options.models == ["*"] and not options.quick else None)
    if out is not None:
        picture = out.with_suffix(".svg")
        out.write_text(markdown(found, options.threads, picture.name))
        picture.write_text(svg(found, max(options.threads)))


if __name__ == "__main__":
    main()
