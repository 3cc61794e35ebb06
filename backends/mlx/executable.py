"""How is a compiled MLX function stored? As an exported graph (.mlxfn): kilobytes, read in milliseconds."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

from ep.backend import Function, Specs
from ep.backends.mlx.dtypes import mlx_dtype


def serialize(fn: Function, specs: Specs) -> bytes:
    """Trace a function for arguments of these shapes and dtypes, and return MLX's exported graph."""
    arguments = [mx.zeros(shape, mlx_dtype(dtype)) for shape, dtype in specs]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "function.mlxfn"
        mx.export_function(str(path), fn, *arguments)
        return path.read_bytes()


def deserialize(data: bytes, *, fuse: bool) -> Callable[..., tuple[Any, ...]]:
    """Return the function of an exported graph; `fuse` its kernels, which pays only on a GPU."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "function.mlxfn"
        path.write_bytes(data)
        imported: Any = mx.import_function(str(path))
    function = mx.compile(imported) if fuse else imported
    return lambda *arrays: tuple(function(*arrays))
