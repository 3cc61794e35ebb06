"""How is a compiled JAX function stored? As XLA's own serialized executable; it loads without compiling.

Loading one runs code that it contains: only load files that you trust as much as a program.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import jaxpr_as_fun, subjaxprs
from jaxlib import xla_client

from ep.backend import Code, Function, NotStorable, Specs
from ep.backends.jax.kept import Plan, WithKept, is_joined, join, parted
from ep.backends.jax.prelude import Split, split
from ep.backends.jax.slim import slim


def ahead(device: Any, fn: Function, specs: Specs, weights: int = 0) -> tuple[Function, Code]:
    """Compile a function for arguments of these shapes and dtypes: it, and what gives XLA's executable of it.

    The last `weights` arguments are the same in every call. On the CPU, what depends on them alone is computed once.
    """
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in specs]
    parts = None
    if weights and device.platform == "cpu":
        closed, structure = jax.make_jaxpr(fn, return_shape=True)(*arguments)
        structure = jax.tree.structure(structure)
        parts = split(closed, structure, weights)
        whole = jaxpr_as_fun(closed)
        fn = lambda *arrays: jax.tree.unflatten(structure, whole(*arrays))  # noqa: E731  (tracing took a while)
    if parts is None:
        compiled = _compile(device, fn, arguments)
        return compiled, lambda: _serialized(device, compiled)
    constants = arguments[len(arguments) - weights :]
    raw = [constants[i] for i in parts.raw]
    kept = [jax.ShapeDtypeStruct(item.shape, item.dtype) for item in parts.items]
    later = _compile(device, parts.main, [*arguments[: len(arguments) - weights], *raw, *kept])
    plan = Plan(weights, parts.raw, parts.items, parts.parts)
    codes = _codes(device, parts, constants)
    function = WithKept(plan, codes, later, device)
    return function, lambda: join(plan, [_serialized(device, code()) for code in codes], _serialized(device, later))


def keeps(device: Any, fn: Function, specs: Specs, weights: int) -> WithKept | None:
    """What `ahead` would keep, if anything: a function that cannot be called, but tells it, and computes it."""
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in specs]
    closed, structure = jax.make_jaxpr(fn, return_shape=True)(*arguments)
    parts = split(closed, jax.tree.structure(structure), weights, apart=True)
    if parts is None:
        return None
    codes = _codes(device, parts, arguments[len(arguments) - weights :])
    return WithKept(Plan(weights, parts.raw, parts.items, parts.parts), codes, lambda *_: (), device)


def _codes(device: Any, parts: Split, constants: Sequence[Any]) -> list[Callable[[], Any]]:
    """Of each code of a split function what compiles it, unless another function with the same code did lately."""
    made: list[Callable[[], Any]] = []
    for number, code in enumerate(parts.codes):
        part = next(part for part in parts.parts if part.code == number)
        items = [parts.items[place] for place in part.items]
        name = device, tuple((item.digest, tuple(map(part.sources.index, item.sources))) for item in items)
        compile_it = functools.partial(_compile, device, code, [constants[i] for i in part.sources], ONCE)
        made.append(functools.partial(_recent, name, compile_it))
    return made


MOST_RECENT = 8  # codes that are kept for functions of other shapes, which each need them to be stored
_made_lately: OrderedDict[Any, Any] = OrderedDict()
_lock = threading.Lock()


def _recent(name: Any, make: Callable[[], Any]) -> Any:
    """What was made under this name before, or is made now. Names hold the digests of all that a code computes."""
    with _lock:
        found = _made_lately.pop(name, None)
    found = make() if found is None else found
    with _lock:
        _made_lately[name] = found
        while len(_made_lately) > MOST_RECENT:
            _made_lately.popitem(last=False)
    return found


_YNN = "LIBRARY_FUSION_TYPE_"
ON_CPU = {
    # XLA's library of CPU kernels drops NaN in what it fuses with reductions: products and convolutions are enough of
    # it, and measured as fast.
    "xla_cpu_experimental_ynn_fusion_type": f"{_YNN}DOT,{_YNN}INDIVIDUAL_DOT,{_YNN}INDIVIDUAL_CONVOLUTION",
}
# Compiles language models up to four times faster, and what comes out is as fast (measured on 60 models), but for
# convolutions: XLA writes loops for some of them, which took up to a third longer.
WITHOUT_CONVOLUTIONS = ON_CPU | {"xla_backend_optimization_level": 2}
# For code that runs once: it compiles 10 times faster.
ONCE = ON_CPU | {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}


def _compile(device: Any, fn: Function, arguments: Any, options: Any = None) -> Any:
    # Unused arguments stay, or the stored executable would take fewer than the function.
    traced = jax.jit(fn, keep_unused=True).trace(*arguments)
    lowered = traced.lower()
    if options is None and device.platform == "cpu":
        options = ON_CPU if _convolves(traced.jaxpr.jaxpr) else WITHOUT_CONVOLUTIONS
    try:
        return lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError:
        if options is None:
            raise
        return lowered.compile()  # an option that this version does not have


def _convolves(jaxpr: Any) -> bool:
    own = any(equation.primitive is jax.lax.conv_general_dilated_p for equation in jaxpr.eqns)
    return own or any(map(_convolves, subjaxprs(jaxpr)))


def _serialized(device: Any, compiled: Any) -> bytes:
    refuse(compiled)
    try:
        data = bytes(device.client.serialize_executable(compiled.runtime_executable()))
    except jax.errors.JaxRuntimeError as cause:  # some sorts, for example
        raise NotStorable(f"XLA cannot serialize it: {cause}") from cause
    less = slim(data) if device.platform == "cpu" else None
    if less is None:
        return data
    try:
        _executable(device, less)
    except jax.errors.JaxRuntimeError:  # this version of XLA asks for more
        return data
    return less


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
    if is_joined(data):
        plan, codes, later = parted(data)
        made = [functools.partial(_loaded, device, code) for code in codes]
        return WithKept(plan, made, _loaded(device, later), device)
    return _loaded(device, data)


def _executable(device: Any, data: bytes) -> Any:
    """The executable on this device, whichever of its kind it was compiled on."""
    options = None
    if len(device.client.local_devices()) > 1:
        options = xla_client.CompileOptions()
        options.device_assignment = xla_client.DeviceAssignment.create(np.array([[device.id]]))
    return device.client.deserialize_executable(data, xla_client.DeviceList((device,)), options)


def _loaded(device: Any, data: bytes) -> Callable[..., tuple[Any, ...]]:
    loaded = _executable(device, data)

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
