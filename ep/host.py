"""What is the host provider? NumPy as a `Backend` value: the last resort."""

from __future__ import annotations

import contextlib
import platform
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from ep.backend import Backend
from ep.device import DeviceId
from ep.errors import BackendUnavailable
from ep.memory import HostMemory
from ep.provider import HOST

if TYPE_CHECKING:
    from ep.array_provider import ArrayProvider

_EXTENDED = (
    *("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("float4_e2m1fn", "int4", "uint4", "int2", "uint2"),
)


def provider(device: str | None = None) -> ArrayProvider:
    """Return the provider of the host.

    Raises:
        BackendUnavailable: another device than the host is asked for.
    """
    from ep.array_provider import ArrayProvider

    if device not in (None, "host", "cpu", "cpu:0"):
        raise BackendUnavailable(f"NumPy has no device {device!r}.", why="it runs on the CPU.", fix="use 'host'.")
    return ArrayProvider(_backend())


def _backend() -> Backend:
    import ep.host_namespace as namespace

    return Backend(
        name=HOST,
        version=np.__version__,
        device=DeviceId.cpu(),
        fingerprint=f"numpy {np.__version__} / {platform.machine()}",
        xp=namespace,
        dtypes=frozenset(
            {*map(np.dtype, "?bBhHiIqQefdFDO"), *(np.dtype(getattr(ml_dtypes, name)) for name in _EXTENDED)}
        ),
        memory=HostMemory(),
        scope=contextlib.nullcontext,
        asarray=np.array,
        borrow=lambda arrays: [(array, None) for array in arrays],
        obstacle=lambda array: None,
        to_numpy=np.asarray,
        compile=lambda function: function,
        takes_numpy=True,
        is_array=lambda value: isinstance(value, np.ndarray),
        start=lambda arrays: None,  # NumPy computes at once
        block=lambda arrays: None,
        synchronize=lambda: None,
        is_host=True,
        traces_loops=True,
    )
