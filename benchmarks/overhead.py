"""What does `session.run` cost above the array library's own call? Microseconds per call, warm.

    python benchmarks/overhead.py [--rounds 15]

Each line runs one small model: through `ep` on one provider, through the bare library (`jax.jit` or `mx.compile` of
the same expression, from a NumPy input to a fresh NumPy output), and through onnxruntime.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from rich.console import Console
from rich.table import Table
from timing import compare, machine

import ep

SIZE = 512  # elements; 2 KiB, so that weights enter the compiled function as arguments
MOST_ABOVE_BARE = 30.0  # µs: the aim


def model(weights: int) -> onnx.ModelProto:
    """x + 1, or x plus so many weights."""
    arrays = [np.full(SIZE, i, np.float32) for i in range(weights)]
    nodes, last = [], "x"
    for i in range(weights):
        nodes.append(helper.make_node("Add", [last, f"w{i}"], [f"s{i}"]))
        last = f"s{i}"
    nodes.append(helper.make_node("Relu", [last], ["y"]))
    shape = ["n"]
    graph = helper.make_graph(
        nodes,
        f"{weights}_weights",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(array, f"w{i}") for i, array in enumerate(arrays)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def expression(maximum: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """The same model as a Python function of arrays."""

    def run(x: Any, *weights: Any) -> Any:
        for w in weights:
            x = x + w
        return maximum(x, 0.0)

    return run


def bare_jax(weights: int, x: np.ndarray) -> Callable[[], np.ndarray]:
    import jax
    import jax.numpy as jnp

    function = jax.jit(expression(jnp.maximum))
    arrays = [jnp.full(SIZE, float(i), jnp.float32) for i in range(weights)]
    return lambda: np.array(function(x, *arrays))


def bare_mlx(weights: int, x: np.ndarray) -> Callable[[], np.ndarray]:
    import mlx.core as mx

    function = mx.compile(expression(mx.maximum))
    arrays = [mx.full(SIZE, float(i), mx.float32) for i in range(weights)]
    mx.eval(arrays)
    return lambda: np.array(function(mx.array(x), *arrays))


def bare_onnxruntime(proto: onnx.ModelProto, x: np.ndarray) -> Callable[[], Any]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return lambda: session.run(None, {"x": x})


def measure(weights: int, rounds: int) -> dict[str, float]:
    x = np.linspace(-1, 1, SIZE, dtype=np.float32)
    proto = model(weights)
    calls: dict[str, Callable[[], Any]] = {}
    for name, bare in (("jax", bare_jax), ("mlx", bare_mlx)):
        if importlib.util.find_spec(name) is None:
            continue
        session = ep.load(proto, name)
        calls[f"ep {name}"] = lambda session=session: session.run(None, {"x": x})
        calls[f"bare {name}"] = bare(weights, x)
        np.testing.assert_allclose(calls[f"ep {name}"]()[0], calls[f"bare {name}"](), rtol=1e-5)
    if importlib.util.find_spec("onnxruntime") is not None:
        calls["onnxruntime"] = bare_onnxruntime(proto, x)
    return {name: 1e6 * seconds for name, seconds in compare(calls, rounds, budget=120).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="alternating blocks per call")
    rounds = parser.parse_args().rounds
    table = Table("model", "provider", "session.run µs", "bare µs", "above bare µs", "onnxruntime µs", title=machine())
    found = {weights: measure(weights, rounds) for weights in (0, 200)}
    for weights, times in found.items():
        for name in ("jax", "mlx"):
            if f"ep {name}" in times:
                ours, bare = times[f"ep {name}"], times[f"bare {name}"]
                other = times.get("onnxruntime", float("nan"))
                colour = "green" if ours - bare <= MOST_ABOVE_BARE else "red"
                above = f"[{colour}]{ours - bare:.1f}[/]"
                table.add_row(f"{weights} weights", name, f"{ours:.1f}", f"{bare:.1f}", above, f"{other:.1f}")
    console = Console()
    console.print(table)
    for name in ("jax", "mlx"):
        if f"ep {name}" in found[0]:
            ours, bare = ((found[200][f"{who} {name}"] - found[0][f"{who} {name}"]) / 200 for who in ("ep", "bare"))
            console.print(f"{name}: a weight costs {ours:.2f} µs through session.run, {bare:.2f} µs in the bare call")


if __name__ == "__main__":
    main()
