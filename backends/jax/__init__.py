"""What is the JAX provider? JAX as a `Backend` value: XLA on CUDA, ROCm, TPU and the CPU."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from ep.device import DeviceId, DeviceType
from ep.errors import BackendUnavailable

if TYPE_CHECKING:
    from ep.array_provider import ArrayProvider
    from ep.backend import Backend

_NATIVE = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
_EXTENDED = (
    *("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("float4_e2m1fn", "int4", "uint4", "int2", "uint2"),
)
_WIDE = frozenset(map(np.dtype, ("int64", "uint64", "float64", "complex128")))


def provider(device: str | None = None) -> ArrayProvider:
    """Return the provider of a device ("cpu", "gpu", "cuda:1"), or of the one that JAX prefers.

    Raises:
        BackendUnavailable: JAX has no such device.
    """
    from ep.array_provider import ArrayProvider

    return ArrayProvider(_backend(_find(device)))


def _find(wanted: str | None) -> Any:
    import jax

    kind, _, index = (wanted or "").partition(":")
    try:
        return jax.devices(None if kind in ("", "jax") else kind)[int(index or 0)]
    except (RuntimeError, IndexError) as cause:
        raise BackendUnavailable(
            f"JAX has no device {wanted!r}.",
            why=f"it has {', '.join(map(str, jax.devices()))}.",
            fix='choose another device, or install JAX for your hardware: pip install "jax[cuda13]".',
        ) from cause


def _backend(device: Any) -> Backend:
    import jax

    from ep.backend import Backend
    from ep.backends.jax import executable, namespace, settings
    from ep.backends.jax.layout import sink_transposes
    from ep.backends.jax.memory import JaxMemory, borrow, obstacle

    on_cpu = device.platform == "cpu"
    rewrite = sink_transposes if on_cpu else lambda function: function
    return Backend(
        name="jax",
        version=jax.__version__,
        device=_device_id(device),
        fingerprint=_fingerprint(device),
        xp=namespace,
        dtypes=frozenset(map(np.dtype, _NATIVE)) | {np.dtype(getattr(ml_dtypes, name)) for name in _EXTENDED},
        memory=JaxMemory(device),
        scope=settings.scope(device),
        settings=settings.changed,
        asarray=namespace.asarray,
        borrow=functools.partial(borrow, device),
        obstacle=functools.partial(obstacle, device),
        to_numpy=namespace.to_numpy,
        compile=lambda function: jax.jit(rewrite(function)),
        abstract=executable.abstract,
        is_array=lambda value: isinstance(value, jax.Array),
        peek=_peek if on_cpu else lambda array: None,
        start=lambda arrays: None,  # JAX starts by itself
        block=jax.block_until_ready,
        synchronize=_synchronize,
        ahead=lambda function, specs, weights: executable.ahead(device, rewrite(function), specs, weights),
        keeps=(lambda function, specs, weights: executable.keeps(device, rewrite(function), specs, weights))
        if on_cpu
        else None,
        deserialize=functools.partial(executable.deserialize, device),
        factor=_widened if on_cpu else lambda array: array,
        compiles_in_threads=True,
        loads_in_threads=True,
        narrows=_WIDE,
        takes_numpy=True,
        compiles_nodes=True,
        traces_loops=True,
        precise=None if on_cpu else functools.partial(jax.default_matmul_precision, "highest"),
        launch_us=27.0 if on_cpu else 10.0,
        bytes_per_us=10_000.0 if on_cpu else 1_000_000.0,
    )


def _peek(array: Any) -> np.ndarray | None:
    """An array that is computed already, of the CPU's memory; a traced one is not."""
    import jax

    ready = isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer) and array.is_ready()  # type: ignore[attr-defined]
    return np.asarray(array) if ready else None


def _widened(array: Any) -> Any:
    """Float16 and bfloat16 as float32: XLA's CPU compiler would convert them for every product."""
    return array.astype(np.float32) if array.dtype in (np.float16, ml_dtypes.bfloat16) else array


def _device_id(device: Any) -> DeviceId:
    kind = device.platform
    if kind == "gpu":
        kind = "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"
    known = kind in ("cpu", "cuda", "rocm")
    return DeviceId(DeviceType(kind) if known else DeviceType.custom(0), device.local_hardware_id or 0)


def _fingerprint(device: Any) -> str:
    """Name what an executable depends on; on the CPU, XLA uses every instruction that the machine has."""
    import jaxlib

    facts = {
        "jaxlib": jaxlib.__version__,
        "platform": device.platform,
        "device": device.device_kind,
        "machine": platform.machine(),
        "instructions": _cpu_features()
        if device.platform == "cpu"
        else device.client.platform_version.replace("\n", " "),
        "XLA_FLAGS": hashlib.sha256(os.environ.get("XLA_FLAGS", "").encode()).hexdigest()[:12],
    }
    if device.platform == "cpu":
        facts["threads"] = _threads()
    return " / ".join(f"{name} {value}" for name, value in facts.items())


def _threads() -> str:
    """How many threads XLA divides loops for, when it compiles for the CPU."""
    for name in ("PJRT_NPROC", "NPROC"):
        if os.environ.get(name):
            return os.environ[name]
    return str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def _cpu_features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return _apple_processor() or platform.processor()
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return hashlib.sha256(features.encode()).hexdigest()[:12]


def _apple_processor() -> str:
    """Such as "Apple M1": later ones have instructions that it lacks. Of all of them, `platform` only says "arm"."""
    import ctypes

    name, size = ctypes.create_string_buffer(256), ctypes.c_size_t(256)
    try:
        failed = ctypes.CDLL(None).sysctlbyname(b"machdep.cpu.brand_string", name, ctypes.byref(size), None, 0)
    except (AttributeError, OSError, TypeError):  # not on macOS
        return ""
    return "" if failed else name.value.decode(errors="replace").replace(" / ", " ")


def _synchronize() -> None:
    import jax

    jax.block_until_ready([array for array in jax.live_arrays() if not array.is_deleted()])
