"""How is a compiled JAX function stored? As XLA's own serialized executable; it loads without compiling.

Loading one runs code that it contains: only load files that you trust as much as a program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jaxlib import xla_client

from ep.backend import Function, Specs


def serialize(device: Any, fn: Function, specs: Specs) -> bytes:
    """Compile a function for arguments of these shapes and dtypes, and return XLA's executable."""
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in specs]
    # Unused arguments stay, or the stored executable would take fewer than the function.
    compiled = jax.jit(fn, keep_unused=True).lower(*arguments).compile()
    return bytes(device.client.serialize_executable(compiled.runtime_executable()))


def deserialize(device: Any, data: bytes) -> Callable[..., tuple[Any, ...]]:
    """Return the function of an executable."""
    loaded = device.client.deserialize_executable(data, xla_client.DeviceList((device,)), None)

    def run(*arrays: Any) -> tuple[Any, ...]:
        results = loaded.execute_sharded([jax.numpy.asarray(array) for array in arrays])
        return tuple(shards[0] for shards in results.disassemble_into_single_device_arrays())

    return run
