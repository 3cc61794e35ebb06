"""Do real models give the answers that onnxruntime stored for them, on JAX and on MLX?

The corpus is a folder outside this repository (`EP_CORPUS`, default `../shared/corpus`): per model `model.onnx`,
`meta.json`, and `inputs_k.npz` with `outputs_k.npz` per case. By default the first case of each model runs;
`EP_FULL=1` runs all. Language models also decode greedily, feeding their own key-value cache back.
"""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ep

CORPUS = Path(os.environ.get("EP_CORPUS", Path(__file__).parents[2] / "shared" / "corpus"))
FULL = os.environ.get("EP_FULL") == "1"
LIBRARIES = {"jax": "jax", "mlx": "mlx.core"}
CHAIN_STEPS = None if FULL else 4  # each step of a growing cache is a new shape, hence a compilation

if not (CORPUS / "index.csv").exists():
    pytest.skip(
        "the corpus of real models is not here (it may not be redistributed): set EP_CORPUS to its folder",
        allow_module_level=True,
    )


@dataclass(frozen=True)
class Tolerance:
    """How close is right, by what the weights are. Errors are relative to the largest value of an output.

    `elementwise` models must satisfy |error| ≤ absolute · largest + relative · |value| everywhere. Models with
    half-precision or quantized arithmetic round differently in each runtime, and one flipped rounding moves single
    elements: there, the direction of the output must agree (`cosine`) and no element may be off by `outlier`.
    """

    relative: float
    absolute: float
    cosine: float
    elementwise: bool
    noise: float = 0.0  # what onnxruntime itself moves between its optimisation levels

    @property
    def outlier(self) -> float:
        return max(0.15, 3 * self.noise)

    @property
    def outlier_small(self) -> float:
        """For outputs of less than 16 elements, where a cosine says little."""
        return max(0.05, 2 * self.noise)


CLASSES = {
    "fp32": Tolerance(1e-3, 1e-4, 0.99999, elementwise=True),
    "fp16": Tolerance(1e-2, 5e-3, 0.9995, elementwise=False),
    "bf16": Tolerance(1e-2, 5e-3, 0.9995, elementwise=False),
    "quantized": Tolerance(2e-2, 2e-2, 0.999, elementwise=False),
}


def tolerance(meta: dict[str, Any]) -> Tolerance:
    """The class of a model, widened by the noise of its reference."""
    base = CLASSES.get(meta.get("quant", "fp32"), CLASSES["quantized"])
    values = vars(base) | (meta.get("tol") or {})
    measured = meta.get("ort_noise_opt_vs_noopt") or {}
    noise = min(measured.get("rel", 0.0), measured.get("abs", 0.0) / 1e-2)
    if 0 < noise < 0.5:
        values["noise"] = noise
        values["absolute"] = max(values["absolute"], 4 * noise)
        values["cosine"] = min(values["cosine"], 1 - 4 * (1 - measured.get("cos", 1.0)))
    return Tolerance(**values)


# Models and runs.


def models(wanted: Callable[[dict[str, Any]], bool] = lambda meta: True) -> list[Any]:
    """Parameters (device, name) of the models in the index whose description is `wanted`."""
    with (CORPUS / "index.csv").open() as index:
        names = [row["name"] for row in csv.DictReader(index)]
    names = [name for name in names if (CORPUS / name / "meta.json").exists() and wanted(describe(name))]
    return [pytest.param(device, name, id=f"{device}-{name}") for name in names for device in LIBRARIES]


def describe(name: str) -> dict[str, Any]:
    return json.loads((CORPUS / name / "meta.json").read_text())


def load(device: str, name: str) -> ep.InferenceSession:
    if importlib.util.find_spec(LIBRARIES[device].split(".")[0]) is None:
        pytest.skip(f"{LIBRARIES[device]} is not installed: pip install 'ep-runtime[{device}]'")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ep.HostFallbackWarning)
        return ep.load(CORPUS / name / "model.onnx", device)


def stored(name: str, kind: str, case: int) -> dict[str, Any] | None:
    path = CORPUS / name / f"{kind}_{case}.npz"
    if not path.exists():
        return None
    with np.load(path) as file:
        return {key: file[key].astype(object) if file[key].dtype.kind == "U" else file[key] for key in file.files}


@pytest.mark.parametrize(("device", "name"), models())
def test_stored_answers(device: str, name: str) -> None:
    meta = describe(name)
    session = load(device, name)
    problems = []
    for case in [c["k"] for c in meta["cases"]][: None if FULL else 1]:
        results = run(session, stored(name, "inputs", case))
        found = [
            differences(results, reference, meta, case)
            for reference in (stored(name, "outputs", case), stored(name, "altoutputs", case))
            if reference is not None
        ]
        if all(found):  # none of the references is met
            problems += [f"case {case}: {problem}" for problem in found[0]]
    assert not problems, "\n".join(problems)


def run(session: ep.InferenceSession, feeds: Any) -> dict[str, Any]:
    """Outputs under the names that the stored files use: sequences element by element, maps as JSON."""
    named: dict[str, Any] = {}
    for output, value in zip(session.outputs, session.run(None, feeds), strict=True):
        if isinstance(value, list) and value and isinstance(value[0], dict):
            named["__seqmap__" + output.name] = value
        elif isinstance(value, list):
            named["__seqlen__" + output.name] = np.array(len(value))
            named.update({f"__seq__{output.name}__{i}": item for i, item in enumerate(value)})
        else:
            named[output.name] = value
    return named


# Comparison.


def differences(results: dict[str, Any], reference: dict[str, Any], meta: dict[str, Any], case: int) -> list[str]:
    allowed = tolerance(meta)
    valid = (meta.get("present_valid") or {}).get(str(case))
    problems = []
    for name, want in reference.items():
        if name in (meta.get("skip_outputs") or ()):
            continue
        got = results.get(name)
        if got is None:
            problems.append(f"{name} is missing")
            continue
        if valid is not None and name.startswith("present") and got.shape == want.shape:
            got, want = got[:, :, :valid], want[:, :, :valid]  # later rows of the cache are undefined
        problem = maps_differ(got, want) if name.startswith("__seqmap__") else differ(got, want, allowed)
        if problem:
            problems.append(f"{name}: {problem}")
    return problems


def maps_differ(got: list[dict[Any, float]], want: Any) -> str:
    """Class probabilities, as a list of maps."""
    expected = json.loads(str(want))
    if len(got) != len(expected):
        return f"{len(got)} maps, not {len(expected)}"
    for g, e in zip(got, expected, strict=True):
        named = {str(key): float(value) for key, value in g.items()}
        if named.keys() != e.keys():
            return f"keys {sorted(named)[:4]}, not {sorted(e)[:4]}"
        worst = max(abs(named[key] - e[key]) for key in e)
        if worst > 1e-3:
            return f"probabilities off by {worst:.2e}"
    return ""


def differ(got: np.ndarray, want: np.ndarray, allowed: Tolerance) -> str:
    """What is wrong with an output, or an empty string."""
    if got.shape != want.shape:
        return f"shape {got.shape}, not {want.shape}"
    if want.dtype.kind in "OU":
        wrong = np.count_nonzero(got.astype(str) != want.astype(str))
        return f"{wrong} of {want.size} strings differ" if wrong else ""
    if got.dtype != want.dtype:
        return f"dtype {got.dtype}, not {want.dtype}"
    if want.dtype.kind in "iub":
        return integers_differ(got, want, allowed)
    return floats_differ(got.astype(np.float64).ravel(), want.astype(np.float64).ravel(), allowed)


def integers_differ(got: np.ndarray, want: np.ndarray, allowed: Tolerance) -> str:
    off = np.abs(got.astype(np.float64) - want.astype(np.float64))
    one_step = not allowed.elementwise and want.dtype == np.uint8  # a quantized pixel may round the other way
    wrong = np.count_nonzero(off > (1 if one_step else 0))
    return f"{wrong} of {want.size} integers differ, by up to {off.max():g}" if wrong else ""


def floats_differ(got: np.ndarray, want: np.ndarray, allowed: Tolerance) -> str:
    if not np.array_equal(np.isnan(got), np.isnan(want)):
        return f"{np.isnan(got).sum()} NaNs, not {np.isnan(want).sum()}, or in other places"
    infinite = np.isinf(want)
    if not np.array_equal(np.isinf(got), infinite) or not np.array_equal(got[infinite], want[infinite]):
        return "infinities in other places"
    finite = np.isfinite(want)
    got, want = got[finite], want[finite]
    if want.size == 0:
        return ""
    largest = max(float(np.abs(want).max()), 1e-2)
    error = np.abs(got - want)
    worst = float(error.max()) / largest
    if allowed.elementwise:
        wrong = np.count_nonzero(error > allowed.absolute * largest + allowed.relative * np.abs(want))
        return f"{wrong} of {want.size} values differ, by up to {worst:.2e} of the largest" if wrong else ""
    if want.size < 16:
        return f"off by {worst:.2e} of the largest value" if worst > allowed.outlier_small else ""
    length = float(np.linalg.norm(got) * np.linalg.norm(want))
    cosine = float(got @ want) / length if length else float(not error.any())
    if cosine < allowed.cosine or worst > allowed.outlier:
        return f"cosine {cosine:.6f}, off by up to {worst:.2e} of the largest value"
    return ""


# Greedy decoding.


@pytest.mark.parametrize(("device", "name"), models(lambda meta: bool(meta.get("greedy") and meta.get("chain"))))
def test_greedy_chain(device: str, name: str) -> None:
    """The model continues a prompt with the reference's tokens, on its own cache, up to a tie of two tokens."""
    meta = describe(name)
    session = load(device, name)
    want = meta["greedy"]["tokens"][:CHAIN_STEPS]
    margins = meta["greedy"]["margins"]
    got, largest = decode(session, meta, want)
    step = len(got) - 1
    if got[step] != want[step]:
        tie = 4 * tolerance(meta).absolute * largest
        assert margins[step] <= tie, f"token {step} is {got[-1]}, not {want[step]} (margin {margins[step]})"


def decode(session: ep.InferenceSession, meta: dict[str, Any], want: list[int]) -> tuple[list[int], float]:
    """Decodes until the tokens leave `want`: the tokens, and the largest logit of the last step."""
    first = stored(meta["name"], "inputs", 0) or {}
    tokens = np.array([meta["greedy"]["prompt_ids"]], np.int64)
    total = tokens.shape[1]
    cache = {name: first[name] for name in meta["chain"].values()}  # empty, or zeros of a window
    got: list[int] = []
    for right in want:
        own = {
            "input_ids": tokens,
            "attention_mask": np.ones((1, total), np.int64),
            "position_ids": np.arange(total - tokens.shape[1], total, dtype=np.int64)[None],
        }
        feeds = {i.name: own.get(i.name, cache.get(i.name, first.get(i.name))) for i in session.inputs}
        results = dict(zip((o.name for o in session.outputs), session.run(None, feeds), strict=True))
        logits = results["logits"][0, -1].astype(np.float32)
        got.append(int(logits.argmax()))
        if got[-1] != right:
            break
        cache = {target: results[source] for source, target in meta["chain"].items()}
        tokens, total = np.array([[right]], np.int64), total + 1
    return got, float(np.abs(logits).max())


# The comparison itself must notice errors.


def test_comparison_notices_errors() -> None:
    want = np.linspace(-3, 5, 64, dtype=np.float32)
    exact, soft = CLASSES["fp32"], CLASSES["quantized"]
    assert not differ(want, want, exact)
    assert differ(want + 1e-2, want, exact) and not differ(want + 1e-2, want, soft)
    assert differ(-want, want, soft) and differ(np.where(want == 5, 0, want), want, soft)
    assert differ(want.astype(np.float64), want, exact) and differ(want[None], want, exact)
    assert differ(np.where(want == 5, np.nan, want), want, soft)
    assert differ(np.where(want == 5, np.inf, want), want, soft)
    integers = np.array([1, 200], np.uint8)
    assert differ(integers + 1, integers, exact) and not differ(integers + 1, integers, soft)
    assert differ(np.array(["a"], object), np.array(["b"], object), soft)
    assert maps_differ([{"a": 0.5}], '[{"a": 0.6}]') and not maps_differ([{"a": 0.5}], '[{"a": 0.5}]')
