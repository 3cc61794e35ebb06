"""Which device are graphs built for? MLX's default one, or Metal as far as it can be simulated elsewhere.

With `EP_MLX_TARGET=metal` in the environment everything is placed and lowered as on Apple silicon, though it
then runs on the CPU: so any machine can show which kernels Metal would be asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from ep.registry import OpKey


def on_gpu() -> bool:
    """Whether graphs are built for a GPU, a real or a simulated one."""
    return os.environ.get("EP_MLX_TARGET") == "metal" or mx.default_device().type == mx.gpu


def on_cpu_stream(function: Callable[..., Any], *arrays: Any) -> Any:
    """Return `function(*arrays)`, computed on the CPU wherever the rest runs: what no GPU of MLX does."""
    with mx.stream(mx.cpu):
        return function(*arrays)


def remark(key: OpKey, attributes: dict[str, Any], dtypes: Sequence[Any]) -> str:
    """Why a node runs on the CPU stream though it is MLX's, or an empty string."""
    if not on_gpu():
        return ""
    if key.op_type in ("Det", "Inverse"):
        return "on MLX's CPU stream: no GPU of MLX factorises matrices"
    reduces = attributes.get("reduction", "none") not in ("none", b"none")
    if reduces and key.op_type.startswith("Scatter") and dtypes[0] is not None and dtypes[0].itemsize == 8:
        return f"on MLX's CPU stream: GPUs of MLX do not combine {dtypes[0].name} in a scatter"
    return ""
