"""The long form of the differential sweep: `python benchmarks/sweep.py [--seed N] [--count N] [--ops Add,Conv]`.

Every operator of `tests/sweep_cases.py`, opset and dtype, on the host, MLX, JAX (every Nth case) and onnxruntime.
Prints disagreements that `docs/decisions.md` does not explain, and counts.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import sweeping


def main() -> int:
    """Run the sweep; the exit code is 1 if anything is not explained."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=20, help="cases per operator, opset and dtype")
    parser.add_argument("--ops", default="", help="comma-separated; all by default")
    parser.add_argument("--devices", default="mlx,jax")
    parser.add_argument("--jax", type=int, default=4, help="JAX compiles each case: it takes every Nth")
    args = parser.parse_args()
    started, total, bad = time.perf_counter(), 0, 0
    for op in args.ops.split(",") if args.ops else sorted(sweeping.MAKERS):
        tally = sweeping.sweep([op], args.seed, args.count, args.devices.split(","), True, args.jax)
        total += sum(tally.compared.values())
        bad += len(tally.unexplained)
        explained = "".join(f", {n} {key}" for key, n in tally.explained.items())
        print(f"{op}: {dict(tally.compared)}{explained}, {len(tally.unexplained)} unexplained", flush=True)
        for line in tally.unexplained[:6]:
            print("  ", line, flush=True)
    print(f"seed {args.seed}: {total} comparisons, {bad} unexplained, {time.perf_counter() - started:.0f} s")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
