"""What the test run prints at its end: where the official cases ran, per provider and mode."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Counts cases of `test_node_suite.py` by the properties they recorded, which xdist carries over."""
    counts = suite_counts(terminalreporter.stats)
    if not counts:
        return
    terminalreporter.section("official ONNX cases")
    for (device, mode, suite), seen in sorted(counts.items()):
        terminalreporter.write_line(f"{device:5}{mode:9}{suite:18}{describe(seen)}")


def suite_counts(stats: dict[str, list[Any]]) -> dict[tuple[str, str, str], Counter[str]]:
    """(device, mode, suite) → outcomes: "device", "host" or "folded" for those passed, else pytest's own word."""
    counts: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    for outcome in ("passed", "failed", "xfailed", "xpassed"):
        for report in stats.get(outcome, ()):
            properties = dict(getattr(report, "user_properties", ()))
            if "case" in properties and (report.when == "call" or outcome == "failed"):
                counts[tuple(properties["case"])][properties["where"] if outcome == "passed" else outcome] += 1
    return counts


def describe(seen: Counter[str]) -> str:
    """`N passed of M: D on device, H with host nodes`, and what else happened."""
    passed = seen["device"] + seen["host"] + seen["folded"]
    text = f"{passed} passed of {sum(seen.values())}: {seen['device']} on device, {seen['host']} with host nodes"
    rest = {"folded": "folded at load", "xfailed": "expected failures", "failed": "FAILED", "xpassed": "XPASSED"}
    return text + "".join(f", {seen[key]} {label}" for key, label in rest.items() if seen[key])
