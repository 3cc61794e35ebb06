"""What is the MLX provider? MLX as a `Backend` value: Metal on Apple silicon, CPU or CUDA on Linux."""

from __future__ import annotations

import contextlib
import functools
import platform
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ep.device import DeviceId, DeviceType
from ep.errors import BackendUnavailable

if TYPE_CHECKING:
    from ep.array_provider import ArrayProvider
    from ep.backend import Backend


def provider(device: str | None = None) -> ArrayProvider:
    """Return the provider of a device ("cpu" or "gpu"), or of the one that MLX prefers.

    Raises:
        BackendUnavailable: MLX has no such device.
    """
    from ep.array_provider import ArrayProvider
    from ep.backends.mlx import blas

    note = blas.preload()  # before mlx.core is imported
    return ArrayProvider(_backend(_find(device), note))


def _find(wanted: str | None) -> Any:
    import mlx.core as mx

    default = mx.default_device()
    kind, _, index = (wanted or "").partition(":")
    if int(index or 0):
        raise BackendUnavailable(
            f"MLX has no device {wanted!r}.",
            why="ep runs MLX on its first device.",
            fix=f"leave out the index {index}.",
        )
    if kind in ("", "mlx", str(default.type).rpartition(".")[2]):
        return default
    if kind == "cpu":
        return mx.Device(mx.cpu)
    raise BackendUnavailable(
        f"MLX has no device {wanted!r}.",
        why=f"its default device here is {default}.",
        fix="choose another device; MLX runs on the GPU of Apple silicon, or through mlx[cuda] on Linux.",
    )


def _backend(device: Any, note: str) -> Backend:
    from importlib import metadata

    import mlx.core as mx

    from ep.backend import Backend
    from ep.backends.mlx import executable, namespace, overrides, target
    from ep.backends.mlx.dtypes import DTYPES
    from ep.backends.mlx.memory import MlxMemory, borrow, copy, obstacle, view

    version, on_cpu = metadata.version("mlx"), device == mx.cpu
    compile_ = _trace_only if on_cpu else mx.compile
    return Backend(
        name="mlx",
        version=version,
        device=DeviceId(DeviceType.MLX),
        fingerprint=_fingerprint(version, device),
        xp=namespace,
        # Metal has no float64, and MLX's on the CPU is single precision inside exp, sin, erf and others.
        dtypes=frozenset(DTYPES) - {np.dtype(np.float64)},
        memory=MlxMemory(),
        scope=_scope(device),
        asarray=copy,
        borrow=borrow,
        obstacle=obstacle,
        to_numpy=view,
        compile=compile_,
        abstract=executable.abstract,
        is_array=lambda value: isinstance(value, mx.array),
        start=lambda arrays: mx.async_eval(*arrays),
        block=lambda arrays: mx.eval(*arrays),
        synchronize=mx.synchronize,
        overrides=overrides.OVERRIDES,
        remark=target.remark,
        ahead=functools.partial(executable.ahead, compile_),
        deserialize=functools.partial(executable.deserialize, compile_, not on_cpu),
        checks_stored=True,
        handle=lambda array: array.view(array.dtype),  # a[0] = 1 makes `a` another array, and leaves the data
        launch_us=0.5,
        bytes_per_us=10_000.0 if on_cpu else 100_000.0,
        notes=(note,) if note else (),
    )


def _fingerprint(version: str, device: Any) -> str:
    """Name what an exported graph depends on; the lowerings ask for which device they trace."""
    from ep.backends.mlx.target import on_gpu

    target = "gpu" if on_gpu() else "cpu"
    return f"mlx {version} / device {device} / machine {platform.machine()} / target {target}"


def _trace_only(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile for MLX's CPU: traced, so that a graph is cut where Metal's is, but never fused.

    MLX builds each fused CPU kernel with the system's C++ compiler, for seconds, where there is one at all.
    """
    import mlx.core as mx

    traced = False

    def run(*arrays: Any) -> Any:
        nonlocal traced
        if not traced:
            mx.compile(function)(*arrays)  # raises what tracing raises; the lazy result is never computed
            traced = True
        return function(*arrays)

    return run


def _scope(device: Any) -> Any:
    """Return the scope in which MLX computes on `device`."""
    import mlx.core as mx

    if device == mx.default_device():
        return contextlib.nullcontext
    return functools.partial(mx.stream, device)
