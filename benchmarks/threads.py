"""Do threads on one session cost throughput? Blocks of one thread and of eight alternate; the median ratio counts.

    python benchmarks/threads.py model.onnx [--provider JAXExecutionProvider] [--runs 400] [--blocks 15] [--dim N=1]

Both kinds of blocks make the same number of runs of `ep.onnxruntime`; every result is compared with the first one's.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from timing import machine

import ep.onnxruntime as ort
from ep.inputs import feeds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--provider", default="CPUExecutionProvider")
    parser.add_argument("--runs", type=int, default=400, help="runs of one block")
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--dim", action="append", default=[], help="NAME=SIZE of a symbolic dimension")
    options = parser.parse_args()
    session = ort.InferenceSession(options.model, providers=[options.provider])
    sizes = {name: int(size) for name, _, size in (dim.partition("=") for dim in options.dim)}
    fed, _ = feeds(session._sess._session.inputs, [], sizes)
    expected = session.run(None, fed)
    wrong: list[int] = []

    def work(runs: int) -> None:
        for _ in range(runs):
            if not all(same(a, b) for a, b in zip(session.run(None, fed), expected, strict=True)):
                wrong.append(1)

    one = lambda: work(options.runs)  # noqa: E731
    many = lambda: spread(work, options.runs, options.threads)  # noqa: E731
    timed(one), timed(many)
    pairs = [(timed(one), timed(many)) for _ in range(options.blocks)]
    ratio = statistics.median(alone / together for alone, together in pairs)
    per_run = statistics.median(alone for alone, _ in pairs) / options.runs * 1e6
    print(machine())
    print(f"{options.model}: one thread {per_run:.0f} µs per run")
    print(f"{options.threads} threads: {ratio:.3f} of its throughput")
    print(f"wrong results: {len(wrong)} of {2 * (options.blocks + 1) * options.runs}")


def spread(work: Callable[[int], Any], runs: int, count: int) -> None:
    """The same number of runs, by `count` threads."""
    threads = [threading.Thread(target=work, args=(runs // count,)) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def timed(block: Callable[[], Any]) -> float:
    """Seconds that a block takes."""
    started = time.perf_counter()
    block()
    return time.perf_counter() - started


def same(one: Any, other: Any) -> bool:
    """Whether two results are equal, NaN where NaN is."""
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
    return one == other


if __name__ == "__main__":
    main()
