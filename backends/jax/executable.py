"""How is a compiled JAX function stored? As XLA's own serialized executable; it loads without compiling.

Loading one runs code that it contains: only load files that you trust as much as a program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jaxlib import xla_client

from ep.backend import Code, Function, NotStorable, Specs


def ahead(device: Any, fn: Function, specs: Specs) -> tuple[Function, Code]:
    """Compile a function for arguments of these shapes and dtypes: it, and what gives XLA's executable of it."""
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in specs]
    # Unused arguments stay, or the stored executable would take fewer than the function.
    compiled = jax.jit(fn, keep_unused=True).lower(*arguments).compile()

    def code() -> bytes:
        refuse(compiled)
        try:
            return bytes(device.client.serialize_executable(compiled.runtime_executable()))
        except jax.errors.JaxRuntimeError as cause:  # some sorts, for example
            raise NotStorable(f"XLA cannot serialize it: {cause}") from cause

    return compiled, code


def refuse(compiled: Any) -> None:
    """Raise `NotStorable` for what an executable alone does not hold."""
    results = jax.tree_util.tree_structure((0,) * compiled.out_tree.num_leaves)
    if compiled.out_tree != results:
        raise NotStorable("its results are not all tensors")
    if getattr(getattr(compiled, "_params", None), "const_args", ()):
        raise NotStorable("JAX keeps constants of it outside the executable")
    call = getattr(getattr(compiled, "_executable", None), "unsafe_call", None)
    if getattr(call, "has_host_callbacks", False):
        raise NotStorable("it calls back into Python")


def deserialize(device: Any, data: bytes, fn: Function | None) -> Callable[..., tuple[Any, ...]]:
    """Return the function of an executable, which runs in every thread."""
    del fn
    loaded = device.client.deserialize_executable(data, xla_client.DeviceList((device,)), None)

    def run(*arrays: Any) -> tuple[Any, ...]:
        placed = [array if isinstance(array, jax.Array) else jax.device_put(array, device) for array in arrays]
        results = loaded.execute_sharded(placed)
        return tuple(shards[0] for shards in results.disassemble_into_single_device_arrays())

    return _dispatched(device, loaded, run)


def _dispatched(device: Any, loaded: Any, run: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """The function behind the dispatch of `jax.jit`, in C++: measured, 2 to 3 times less per call than `run`.

    It has no public name. Where a version of JAX lacks it, or takes other arguments, `run` does the same.
    """
    try:
        from jax._src import tree_util
        from jax._src.interpreters import pxla
        from jaxlib import _jax

        sharding = jax.sharding.SingleDeviceSharding(device)

        def first(*arrays: Any) -> Any:
            results = run(*arrays)
            inputs, outputs = [sharding] * len(arrays), [sharding] * len(results)
            how = pxla.MeshExecutableFastpathData(
                loaded,
                tree_util.tree_structure((0,) * len(results)),
                inputs,
                outputs,
                [result.aval for result in results],
                [False] * len(results),
                [True] * len(arrays),
                [None] * len(arrays),
                [],
            )
            return results, how, False

        return _jax.pjit(
            "ep", None, first, [], [], pxla.JitGlobalCppCacheKeys(), tree_util.dispatch_registry, pxla.cc_shard_arg
        )
    except (ImportError, AttributeError, TypeError):
        return run


def abstract(fn: Function, specs: Specs) -> Any:
    """Return what a function gives for arguments of these shapes and dtypes, without data."""
    return jax.eval_shape(fn, *(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in specs))
