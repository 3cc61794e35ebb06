"""Which global settings of JAX, made by the user's program, reach compiled code, and which must not reach a session?

A session computes what its model says, whatever the program around it asks of JAX: in `scope`, products are in full
width on the CPU, shapes broadcast, and functions compile. Other settings stay as they are; those that change what is
compiled, or which random numbers a seed gives, are part of the name under which code is stored.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import jax

_config: Any = jax.config  # noqa: TID251  (it is only read here)

# With JAX's defaults. Of what JAX compiles anew for, these reach code that a session compiles.
REACHING: dict[str, Any] = {
    "jax_default_matmul_precision": None,
    "jax_allow_f16_reductions": True,
    "jax_softmax_custom_jvp": False,
    "jax_default_prng_impl": "threefry2x32",
    "jax_threefry_partitionable": True,
    "jax_threefry_gpu_kernel_lowering": False,
    "jax_random_seed_offset": 0,
    "jax_high_dynamic_range_gumbel": False,
    "jax_error_checking_behavior_nan": "ignore",
    "jax_error_checking_behavior_divide": "ignore",
    "jax_error_checking_behavior_oob": "ignore",
    "jax_check_static_indices": False,
    "jax_explicit_x64_dtypes": "WARN",
    "jax_use_simplified_jaxpr_constants": False,
    "jax_embedded_constants_max_bytes": 32,
    "eager_constant_folding": False,
    "jax_use_direct_linearize": True,
    "jax_scan3": False,
    "jax_remat3": False,
    "jax_custom_vjp3": False,
    "jax_use_emit_pipeline_primitive": False,
    "jax_ragged_dot_use_gpu_pallas_triton_lowering": False,
    "jax_pallas_use_mosaic_gpu": True,
    "jax_pallas_enable_debug_checks": False,
    "jax_use_shardy_partitioner": True,
    "jax_use_magma": "auto",
    # What XLA is told beside the program.
    "jax_disable_most_optimizations": False,
    "jax_compiler_enable_remat_pass": True,
    "jax_optimization_level": "UNKNOWN",
    "jax_exec_time_optimization_effort": 0.0,
    "jax_memory_fitting_level": "O2",
    "jax_memory_fitting_effort": 0.0,
    "jax_enable_pgle": False,
    "jax_pgle_profiling_runs": 3,
    "jax_xla_profile_version": 0,
}


_known = [name for name in REACHING if hasattr(_config, name)]  # by this version of JAX
_read = operator.attrgetter(*_known)


def changed() -> str:
    """The settings that are not JAX's defaults, as "name=value, …", or "default"."""
    return _described(_read(_config))


@functools.cache
def _described(held: tuple[Any, ...]) -> str:
    values = {name: str(getattr(value, "name", value)) for name, value in zip(_known, held, strict=True)}
    found = [f"{name}={value}" for name, value in values.items() if value != str(REACHING[name])]
    return ", ".join(found).replace(" / ", " /") or "default"


def scope(device: Any) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """What enters the scope in which arrays keep 64 bits and are made on `device`, and the user's settings rest."""
    on_cpu, leads = device.platform == "cpu", device == jax.devices()[0]

    def enter() -> contextlib.AbstractContextManager[Any]:
        if (
            not leads
            or _config.jax_default_device is not None
            or _config.jax_numpy_rank_promotion != "allow"
            or _config.jax_disable_jit
            or (on_cpu and _config.jax_default_matmul_precision is not None)
        ):
            return _all(device, on_cpu)
        return jax.enable_x64(True)  # naming the default device, and the rest, costs 15 µs per call

    return enter


@contextlib.contextmanager
def _all(device: Any, on_cpu: bool) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.enable_x64(True))
        stack.enter_context(jax.default_device(device))
        stack.enter_context(jax.numpy_rank_promotion("allow"))
        stack.enter_context(jax.disable_jit(False))
        if on_cpu:  # elsewhere the option `precision` decides
            stack.enter_context(jax.default_matmul_precision(None))
        yield
