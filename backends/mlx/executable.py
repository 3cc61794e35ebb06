"""How is a compiled MLX function stored? As an exported graph (.mlxfn): kilobytes, read in milliseconds."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

from ep.backend import Code, Function, NotStorable, Specs
from ep.backends.mlx.dtypes import mlx_dtype
from ep.backends.mlx.namespace import reads
from ep.errors import EpError, ExecutionError
from ep.program import Untraceable


def ahead(
    compile_: Callable[[Function], Function], fn: Function, specs: Specs, weights: int = 0
) -> tuple[Function, Code]:
    """A function for arguments of these shapes and dtypes, and what gives MLX's exported graph of it."""
    return compile_(fn), lambda: export(fn, specs)


def export(fn: Function, specs: Specs) -> bytes:
    """Trace a function, and return MLX's exported graph of it.

    Raises:
        NotStorable: some primitives refuse to be exported. So does a trace in which an array is read: constants
            that were computed keep their strides, which MLX's file does not hold (seen in mlx 0.32.4).
    """
    arguments = [mx.zeros(shape, mlx_dtype(dtype)) for shape, dtype in specs]
    before = getattr(reads, "count", 0)
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "function.mlxfn"
            mx.export_function(str(path), fn, *arguments)
            data = path.read_bytes()
    except (EpError, Untraceable):
        raise
    except (RuntimeError, ValueError, TypeError) as cause:
        raise NotStorable(f"MLX cannot export it: {cause}") from cause
    if getattr(reads, "count", 0) != before:
        raise NotStorable("a constant is computed while it is traced, which MLX may export wrongly")
    return data


def deserialize(
    compile_: Callable[[Function], Function], fuse: bool, data: bytes, fn: Function | None
) -> Callable[..., tuple[Any, ...]]:
    """Return the function of an exported graph; `fuse` its kernels, which pays only on a GPU.

    MLX gives every operation of an imported graph the first stream that it made, which only the thread that made it
    may use: measured, mlx 0.32.4. Other threads run `fn`, the function that the graph was exported from.
    """
    own = threading.local()  # the constants of an imported graph belong to the thread that imports it
    function = imported(data, fuse)  # what is damaged is told now
    if _has_first_stream():
        own.function = function
    other = None if fn is None else compile_(fn)

    def run(*arrays: Any) -> tuple[Any, ...]:
        function = getattr(own, "function", None)
        if function is None:
            function = own.function = imported(data, fuse) if _has_first_stream() else other
            if function is None:
                raise ExecutionError(
                    "MLX runs a stored function only in the thread that first used MLX.",
                    why="it gives an imported graph the stream of that thread.",
                    fix="call it there, or load the original model.",
                )
        return tuple(function(*arrays))

    return run


def imported(data: bytes, fuse: bool) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "function.mlxfn"
        path.write_bytes(data)
        function: Any = mx.import_function(str(path))
    return mx.compile(function) if fuse else function


def _has_first_stream() -> bool:
    return str(mx.default_stream(mx.default_device())).endswith(", 0)")


def abstract(fn: Function, specs: Specs) -> Any:
    """Return what a function gives for arguments of these shapes and dtypes; nothing lazy is ever computed."""
    found: list[Any] = []

    def traced(*arrays: mx.array) -> list[mx.array]:
        found[:] = fn(*arrays)
        return [result for result in found if isinstance(result, mx.array)]

    mx.compile(traced)(*(mx.zeros(shape, mlx_dtype(dtype)) for shape, dtype in specs))
    return found
