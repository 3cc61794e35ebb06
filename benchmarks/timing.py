"""How is a call timed fairly beside others? In alternating, settled blocks.

onnxruntime's workers spin for tens of milliseconds after a run and take a core from whoever runs next, so single
alternating calls mislead. A block sleeps until they rest, warms the caller up, and only then counts.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from statistics import median
from typing import Any

SETTLE = 0.045  # seconds of sleep before a block
WARM_CALLS = 3
BLOCK = (0.020, 0.120)  # seconds of a block: at least, at most (one call may take longer)
ENOUGH_CALLS = 5  # a block ends after this many, once it has lasted its least time


def block(call: Callable[[], Any]) -> float:
    """Median seconds of one call in one settled block."""
    time.sleep(SETTLE)
    for _ in range(WARM_CALLS):
        call()
    times: list[float] = []
    started = time.perf_counter()
    while True:
        before = time.perf_counter()
        call()
        now = time.perf_counter()
        times.append(now - before)
        if now - started > BLOCK[1] or (now - started > BLOCK[0] and len(times) >= ENOUGH_CALLS):
            return median(times)


def compare(calls: Mapping[str, Callable[[], Any]], rounds: int, budget: float) -> dict[str, float]:
    """Median of the block medians of each call, in alternating blocks: `rounds` of them, or fewer (at least two)
    when `budget` seconds are over."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    started = time.perf_counter()
    for index in range(rounds):
        if index >= 2 and time.perf_counter() - started > budget:
            break
        for name, call in calls.items():
            found[name].append(block(call))
    return {name: median(times) for name, times in found.items()}


def thread_settings(threads: int) -> dict[str, str]:
    """Environment under which XLA, OpenBLAS and OpenMP start so many threads."""
    names = ("PJRT_NPROC", "NPROC", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
    return dict.fromkeys(names, str(threads))


def pin(threads: int) -> None:
    """Keeps this process on so many cores, where the system can; call it before any library starts threads."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])


def machine(packages: Iterable[str] = ("jax", "mlx", "onnxruntime", "numpy")) -> str:
    """One line about processor, system and versions; nothing that identifies the machine."""
    versions = []
    for package in packages:
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            versions.append(f"no {package}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    system = f"{platform.system()} {platform.machine()}"
    return f"{processor()}, {cores} cores, {system}, Python {platform.python_version()}, {', '.join(versions)}"


def processor() -> str:
    """The processor's model, as the system calls it."""
    try:
        with open("/proc/cpuinfo") as info:
            for line in info:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
