"""What tests share: the devices, models written as text, and the closing table of the official ONNX cases."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import sys
from collections import Counter, defaultdict
from types import ModuleType
from typing import Any

import onnx
import pytest

os.environ["EP_CONTEXT_CACHE"] = "off"  # tests of the cache name a directory of their own; none writes to the user's

LIBRARIES = {"jax": "jax", "mlx": "mlx", "host": "numpy"}  # device → what must be installed


def require(device: str) -> None:
    """Skips the test where the device's library is not installed (one that is broken must fail)."""
    if importlib.util.find_spec(LIBRARIES[device]) is None:
        pytest.skip(f"{LIBRARIES[device]} is not installed: pip install 'ep-runtime[{device}]'")


@pytest.fixture(params=["jax", "mlx", "host"])
def device(request: pytest.FixtureRequest) -> str:
    """Each device in turn."""
    require(request.param)
    return request.param


@pytest.fixture(params=["jax", "mlx"])
def accelerator(request: pytest.FixtureRequest) -> str:
    """Each device that compiles."""
    require(request.param)
    return request.param


@pytest.fixture(params=["onnxruntime", "ep.onnxruntime"], scope="module")
def ort(request: pytest.FixtureRequest) -> ModuleType:
    """The genuine onnxruntime, then ours."""
    return pytest.importorskip(request.param, reason="onnxruntime is not installed")


@pytest.fixture(scope="module")
def native(ort: ModuleType) -> ModuleType:
    """Where both keep their exceptions."""
    return importlib.import_module(f"{ort.__name__}.capi.onnxruntime_pybind11_state")


def parse(text: str, opsets: str = '"": 21') -> onnx.ModelProto:
    """A checked model from ONNX's textual form of a graph (and functions after it)."""
    model = onnx.parser.parse_model(f"<ir_version: 10, opset_import: [{opsets}]>\n{text}")
    onnx.checker.check_model(model)
    return model


_finished = 0  # tests of this process


def pytest_runtest_teardown() -> None:
    """Compiled code of thousands of models would fill the memory: JAX forgets it now and then."""
    global _finished
    _finished += 1
    if _finished % 500 == 0 and "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
        gc.collect()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Counts cases of `test_node_suite.py` by the properties they recorded, which xdist carries over."""
    counts = suite_counts(terminalreporter.stats)
    if not counts:
        return
    terminalreporter.section("official ONNX cases")
    for (device, mode, suite, size), seen in sorted(counts.items()):
        terminalreporter.write_line(f"{device:5}{mode:9}{suite:18}{describe(seen, size)}")


def suite_counts(stats: dict[str, list[Any]]) -> dict[tuple[str, str, str, int], Counter[str]]:
    """(device, mode, suite, its size) → outcomes: "device", "host", "folded" for those passed, else pytest's."""
    counts: dict[tuple[str, str, str, int], Counter[str]] = defaultdict(Counter)
    for outcome in ("passed", "failed", "xfailed", "xpassed"):
        for report in stats.get(outcome, ()):
            properties = dict(getattr(report, "user_properties", ()))
            if "case" in properties and (report.when == "call" or outcome == "failed"):
                where = properties["where"] if outcome == "passed" else outcome
                counts[tuple(properties["case"])][where] += 1
    return counts


def describe(seen: Counter[str], size: int) -> str:
    """`N passed of 1884: D on device, H with host nodes`, and what else happened."""
    passed = seen["device"] + seen["host"] + seen["folded"]
    text = f"{passed} passed of {size}: {seen['device']} on device, {seen['host']} with host nodes"
    rest = {"folded": "folded at load", "xfailed": "expected failures", "failed": "FAILED", "xpassed": "XPASSED"}
    text += "".join(f", {seen[key]} {label}" for key, label in rest.items() if seen[key])
    left = size - sum(seen.values())
    return text + (f", {left} not selected" if left else "")
