"""What does the module tell of itself and of the process? Versions, build, threads, seeds, plugins, telemetry."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from typing import Any

from ep.onnxruntime.devices import get_ep_devices
from ep.onnxruntime.errors import Fail, failure
from ep.onnxruntime.providers import get_available_providers
from ep.onnxruntime.pybind import INT, integer, text

API_VERSION = "1.32.0"


def get_version_string() -> str:
    """The version of onnxruntime whose Python API this is."""
    return API_VERSION


def get_build_info() -> str:
    """What this is in truth: ep-runtime, with its version."""
    from importlib.metadata import version

    return f"ORT Build Info: ep-runtime {version('ep-runtime')}, the Python API of onnxruntime {API_VERSION}"


def has_collective_ops() -> bool:
    """False: there are no collective operators."""
    return False


def set_seed(seed: int) -> None:
    """No effect: random operators without a `seed` attribute give other numbers at every run."""
    integer(seed, "set_seed", f"(arg0: {INT}) -> None", seed)


def enable_telemetry_events() -> None:
    """No effect: nothing is reported anywhere."""


def disable_telemetry_events() -> None:
    """No effect: nothing is reported anywhere."""


def set_global_thread_pool_sizes(intra_op_num_threads: int = 0, inter_op_num_threads: int = 0) -> None:
    """No effect: the array library manages threads."""
    sizes = (intra_op_num_threads, inter_op_num_threads)
    signature = f"(intra_op_num_threads: {INT} = 0, inter_op_num_threads: {INT} = 0) -> None"
    for size in sizes:
        integer(size, "set_global_thread_pool_sizes", signature, *sizes)


def create_and_register_allocator(memory_info: Any, arena_cfg: Any) -> None:
    """No effect: the array library manages memory."""


def create_and_register_allocator_v2(provider_type: str, memory_info: Any, options: Any, arena_cfg: Any) -> None:
    """No effect: the array library manages memory."""


def register_execution_provider_library(registration_name: str, path: str) -> None:
    """Unsupported: native providers are built for onnxruntime; ep finds providers by entry points (`ep.providers`)."""
    for given in (registration_name, path):
        text(given, "register_execution_provider_library", "(arg0: str, arg1: str) -> None", registration_name, path)
    try:
        ctypes.CDLL(path)
    except OSError as cause:
        raise failure(Fail, f"Failed to load library {path} with error: {cause}") from cause
    raise failure(
        Fail,
        f"Failed to load library {path}: {registration_name} is a native provider of onnxruntime's C interface, which "
        "ep does not have; ep finds providers by the entry points of the group 'ep.providers'.",
    )


def unregister_execution_provider_library(registration_name: str) -> None:
    """Unsupported: no native provider can be registered."""
    text(registration_name, "unregister_execution_provider_library", "(arg0: str) -> None", registration_name)
    raise failure(Fail, f"Execution provider library: {registration_name} was not registered.")


def preload_dlls(cuda: bool = True, cudnn: bool = True, msvc: bool = True, directory: str | None = None) -> None:
    """No effect: JAX and MLX find their own libraries."""


def print_debug_info() -> None:
    """Prints versions, providers and devices."""
    print(f"{get_build_info()}\nPython {sys.version.split()[0]} on {platform.platform()}, {os.cpu_count()} CPUs")
    print(f"providers: {', '.join(get_available_providers())}")
    for device in get_ep_devices():
        print(f"  {device.ep_name}: {device.device.type} {device.device.vendor}")
