"""Does each real model give the same answers from its context, in a fresh process, embedded and beside?

    python benchmarks/context_corpus.py [--models 'vad_*'] [--device jax mlx]

For every model of the corpus (`EP_CORPUS`): one process runs two stored cases and writes both forms of the context
model; another one loads each with trust, where nothing may be compiled, and without, where its graph is. onnx's checker
must accept the files, and onnxruntime refuse them for want of the provider alone. Answers must be equal to the bit.
A process takes some models after each other, because starting one takes longer than most models.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
CORPUS = Path(os.environ.get("EP_CORPUS", HERE.parents[1] / "shared" / "corpus"))
FORMS = ("embedded", "beside")
TOGETHER = 10  # models for one process


def cases(model: str) -> list[dict[str, Any]]:
    folder, found = CORPUS / model, []
    for case in json.loads((folder / "meta.json").read_text())["cases"][:2]:
        with np.load(folder / f"inputs_{case['k']}.npz") as file:
            found.append({k: file[k].astype(object) if file[k].dtype.kind == "U" else file[k] for k in file.files})
    return found


def digest(value: Any) -> str:
    """A hash of outputs: arrays to the bit, sequences and maps by their elements."""
    if isinstance(value, list):
        return hashlib.sha256("".join(map(digest, value)).encode()).hexdigest()
    if isinstance(value, np.ndarray) and value.dtype != object:
        return hashlib.sha256(f"{value.dtype}{value.shape}".encode() + value.tobytes()).hexdigest()
    return hashlib.sha256(repr(value.tolist() if isinstance(value, np.ndarray) else value).encode()).hexdigest()


def make(folder: Path, model: str, device: str) -> dict[str, Any]:
    import ep

    session = ep.load(CORPUS / model / "model.onnx", device)
    answers = [digest(session.run(None, feeds)) for feeds in cases(model)]
    try:
        saved = [session.save_context(folder / f"{form}.onnx", embed=form == "embedded") for form in FORMS]
    except ep.UnsupportedModel as error:
        return {"refused": error.why}
    left_out = sorted(set(saved[0].left_out))
    facts = {"answers": answers, "functions": saved[0].functions, "bytes": saved[0].blob_bytes, "left_out": left_out}
    return facts | {"uncompiled": session.counters.eager}


def use(folder: Path, model: str, device: str) -> dict[str, Any]:
    import onnx

    import ep

    found: dict[str, Any] = {}
    for form in FORMS:
        path = folder / f"{form}.onnx"
        onnx.checker.check_model(str(path))
        found[f"{form} onnxruntime"] = onnxruntime_says(path)
        for trust in (True, False):
            session = ep.load(path, device, options={"trust_native": trust})
            answers = [digest(session.run(None, feeds)) for feeds in cases(model)]
            counters = session.counters
            found[f"{form} {'code' if trust else 'graph'}"] = [answers, counters.loaded, counters.misses]
    return found


def onnxruntime_says(path: Path) -> str:
    """ "" if it lacks nothing but the provider."""
    import onnxruntime

    try:
        onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    except Exception as error:  # noqa: BLE001 - its classes differ between versions
        return "" if "EPContext" in str(error) else str(error)[:200]
    return "it runs the model"


def problems(made: dict[str, Any], used: dict[str, Any]) -> list[str]:
    wrong = []
    for form in FORMS:
        for way in ("code", "graph"):
            answers, loaded, misses = used[f"{form} {way}"]
            if answers != made["answers"]:
                wrong.append(f"{form} {way}: other answers")
            # A function that did not pay in the first process may pay in the second: that depends on measured times.
            if way == "code" and misses and not made["left_out"] and not made["uncompiled"]:
                wrong.append(f"{form}: {misses} compiled, {loaded} loaded")
        if used[f"{form} onnxruntime"]:
            wrong.append(f"{form} onnxruntime: {used[f'{form} onnxruntime']}")
    return wrong


def spawn(step: str, folder: str, models: list[str], device: str) -> dict[str, Any]:
    """Model → what a process said of it; those that it did not reach have an error."""
    command = [sys.executable, __file__, "--worker", step, folder, ",".join(models), device]
    settings = os.environ | {"EP_CONTEXT_CACHE": "off", "LOCPATH": str(CORPUS / "locale")}
    done = subprocess.run(command, capture_output=True, text=True, env=settings, check=False)
    found = {}
    for line in done.stdout.splitlines():
        if line.startswith('{"model"'):
            entry = json.loads(line)
            found[entry["model"]] = entry["found"]
    error = {"error": f"{step}: exit code {done.returncode}: {done.stderr.strip()[-300:]}"}
    return {model: found.get(model, error) for model in models}


def work(step: str, folder: Path, models: list[str], device: str) -> None:
    for model in models:
        (folder / model).mkdir(exist_ok=True)
        try:
            found = {"make": make, "use": use}[step](folder / model, model, device)
        except Exception as error:  # noqa: BLE001 - one model must not hide the others
            found = {"error": f"{step}: {type(error).__name__}: {str(error)[:300]}"}
        print("\n" + json.dumps({"model": model, "found": found}), flush=True)


def judge(made: dict[str, Any], used: dict[str, Any]) -> tuple[str, bool]:
    """A line about one model, and whether all is well."""
    if "refused" in made:
        return f"no context: {made['refused']}", True
    failed = made if "error" in made else used if "error" in used else None
    wrong = [failed["error"]] if failed else problems(made, used)
    facts = [f"{made.get('functions')} functions, {made.get('bytes', 0) / 2**10:.0f} KiB"]
    return "; ".join(wrong or [*facts, *made["left_out"]]), not wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="*", help="a pattern")
    parser.add_argument("--device", nargs="+", default=["jax", "mlx"])
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.worker:
        step, folder, models, device = options.worker
        work(step, Path(folder), models.split(","), device)
        return
    failed = 0
    names = fnmatch.filter(sorted(path.parent.name for path in CORPUS.glob("*/model.onnx")), options.models)
    for device in options.device:
        for start in range(0, len(names), TOGETHER):
            models = names[start : start + TOGETHER]
            with tempfile.TemporaryDirectory() as folder:
                made = spawn("make", folder, models, device)
                kept = [model for model in models if "answers" in made[model]]
                used = spawn("use", folder, kept, device) if kept else {}
            for model in models:
                text, fine = judge(made[model], used.get(model, {}))
                failed += not fine
                print(f"{'ok  ' if fine else 'FAIL'} {device:4} {model:36} {text}", flush=True)
    print(f"{failed} failed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
