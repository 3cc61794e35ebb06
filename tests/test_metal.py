"""Is what the MLX provider gives to Metal legal there? Traced for a simulated Metal target, on any machine."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sweep_cases
import sweeping
from conftest import parse, require
from nodes import run_node
from test_node_suite import cases

import ep
from ep import discovery
from ep.array_provider import ArrayProvider
from ep.provider import EpConfig

require("mlx")

import metal  # noqa: E402
import mlx.core as mx  # noqa: E402

CORPUS = Path(os.environ.get("EP_CORPUS", Path(__file__).parents[2] / "shared" / "corpus"))


class Simulated:
    """Providers that trace every group for Metal and note what it would refuse."""

    def __init__(self) -> None:
        self.refused: list[str] = []
        backend = dataclasses.replace(discovery.provider("mlx").backend, compile=self._compile)
        provider = ArrayProvider(backend)
        provider.initialize(EpConfig())
        self.providers = [provider, discovery.provider("host")]

    def _compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arrays: Any) -> Any:
            try:
                self.refused += metal.refusals(function, *arrays)
            except ValueError as error:
                if "[eval]" not in str(error):  # a value is read while tracing: the plan cuts the graph there
                    raise
            with pytest.MonkeyPatch.context() as patch:  # what suits Metal is slow here
                patch.delenv("EP_MLX_TARGET")
                return function(*arrays)

        return run

    def load(self, model: Any) -> ep.InferenceSession:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ep.HostFallbackWarning)
            return ep.load(model, providers=self.providers)


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[Simulated]:
    monkeypatch.setenv("EP_MLX_TARGET", "metal")
    yield Simulated()


# The checker itself must notice what it is for.

X, I64 = mx.zeros((4, 4)), mx.zeros((4,), mx.int64)
ILLEGAL: dict[str, tuple[Callable[..., Any], list[Any]]] = {
    "there is no float64": (lambda a: a.astype(mx.float64) + 1, [X]),
    "no kernel for bool": (mx.sort, [X == 0]),
    "no kernel for int64": (lambda a: a.at[mx.array([1])].add(1), [I64]),
    "no kernel for complex64": (mx.argmax, [mx.zeros((4,), mx.complex64)]),
    "too many index arrays": (lambda a, i: a[(i,) * 12], [mx.zeros((2,) * 12), mx.array([0])]),
    "runs it on the CPU only": (lambda a: mx.linalg.inv(a, stream=mx.cpu), [mx.eye(4)]),
    "length 1 is wrong": (mx.fft.rfft, [mx.zeros((3, 1))]),
    "a long sum in half precision": (mx.sum, [mx.zeros((512,), mx.float16)]),
    "halves summed as halves": (lambda a: mx.softmax(a, -1), [mx.zeros((4, 4), mx.float16)]),
    "nothing to sort": (mx.sort, [mx.zeros((0, 3))]),
    "nothing to scan": (mx.cumsum, [mx.zeros((0,))]),
    "BitwiseInvert": (lambda a: ~a, [X == 0]),
    "rms_norm": (lambda a: mx.fast.rms_norm(a, None, 1e-5), [mx.zeros((0, 4))]),
    "nothing to multiply": (mx.quantized_matmul, [mx.zeros((0, 64)), *mx.quantize(mx.ones((64, 64)))]),
}


@pytest.mark.parametrize("reason", ILLEGAL)
def test_checker_notices(reason: str) -> None:
    function, arrays = ILLEGAL[reason]
    assert any(reason in line for line in metal.refusals(function, *arrays))


def test_checker_lets_legal_graphs_pass() -> None:
    assert metal.refusals(lambda a: mx.maximum(a @ a, 0) + 1, X) == []
    assert metal.refusals(lambda a: [mx.fast.rms_norm(a[0], None, 1e-5), ~a[1]], [X, I64]) == []
    assert metal.refusals(lambda a, b: mx.slice_update(a, b, mx.array([1]), (0,)), I64, mx.zeros((1,), mx.int64)) == []


# Every official case, every model of the corpus.


def test_official_cases(simulated: Simulated) -> None:
    """No case of the node suite gives Metal what it refuses."""
    found: dict[str, list[str]] = {}
    for name, case in cases().items():
        if case.suite != "node":
            continue
        simulated.refused.clear()
        model = case.model()
        session = simulated.load(model)
        for feeds, _ in case.data(model):
            session.run(None, feeds)
            break
        if simulated.refused:
            found[name] = list(simulated.refused)
    assert not found


def test_random_nodes(simulated: Simulated) -> None:
    """Nor do random nodes of every dtype, of the newest version of each operator."""
    found: list[str] = []
    for op in sweep_cases.MAKERS:
        newest = sweep_cases.opsets(op, sweeping.NEWEST)[-1]
        for opset, _, case in sweeping.cases(op, 5, 1):
            if opset == newest:
                simulated.refused.clear()
                model, feeds = sweeping.as_model(case)
                with contextlib.suppress(ep.ExecutionError):  # whether the answer is right, test_sweep.py says
                    simulated.load(model).run(None, feeds)
                found += [f"{case}: {line}" for line in simulated.refused]
    assert not found, "\n".join(found)


def corpus() -> list[str]:
    index = CORPUS / "index.csv"
    if not index.exists():
        return []
    with index.open() as rows:
        return [row["name"] for row in csv.DictReader(rows)]


@pytest.mark.skipif(not corpus(), reason="the corpus of real models is not here (it may not be redistributed)")
@pytest.mark.parametrize("name", corpus())
def test_real_models(simulated: Simulated, name: str) -> None:
    with np.load(CORPUS / name / "inputs_0.npz") as file:
        feeds = {key: file[key].astype(object) if file[key].dtype.kind == "U" else file[key] for key in file.files}
    simulated.load(CORPUS / name / "model.onnx").run(None, feeds)
    assert not simulated.refused


# What Metal lacks goes elsewhere, and the plan says why.


def placements(simulated: Simulated, text: str, opsets: str = '"": 22') -> dict[str, tuple[str, str]]:
    nodes = simulated.load(parse(text, opsets)).plan.nodes
    return {n.op.split("::")[1].split("-")[0]: (n.provider, n.reason) for n in nodes}


def test_plan_names_the_cpu_stream(simulated: Simulated) -> None:
    plan = placements(
        simulated,
        """g (float[3, 3] x, int64[4] y, int64[2] i, int64[2] u) => (float d, int64[4] z) {
            d = Det (x)
            z = ScatterElements <axis: int = 0, reduction: string = "add"> (y, i, u)
        }""",
    )
    assert plan["Det"] == ("mlx", "on MLX's CPU stream: no GPU of MLX factorises matrices")
    assert plan["ScatterElements"][0] == "mlx" and "int64" in plan["ScatterElements"][1]


def test_plan_sends_wide_arithmetic_to_the_host(simulated: Simulated) -> None:
    plan = placements(
        simulated,
        """g (float[1, 2, 3, 4] q) => (float[1, 2, 3, 4] y) {
            y = Attention <softmax_precision: int = 11> (q, q, q)
        }""",
        '"": 23',
    )
    assert plan["Attention"][0] == "host" and "float64" in plan["Attention"][1]


def test_values_on_the_simulated_target(simulated: Simulated) -> None:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((2, 3, 3)).astype(np.float32)
    np.testing.assert_allclose(run_node("mlx", "Det", x), np.linalg.det(x), rtol=1e-4)
    y, i, u = np.arange(4), np.array([1, 1]), np.array([10, 20])
    assert run_node("mlx", "ScatterElements", y, i, u, axis=0, reduction="add").tolist() == [0, 31, 2, 3]
