"""Run ONNX models with MLX on Apple silicon, and with JAX/XLA on CUDA and the CPU.

>>> import ep
>>> session = ep.load("model.onnx")                     # the best device of this machine
>>> outputs = session.run(None, {"x": x})               # a list of NumPy arrays
>>> outputs = session(x=x)                              # by name, still on the device
>>> print(session.plan)                                 # where each node runs, and why

How it works, from the user to the array library; each file opens with the question that it answers:

- `ep/session.py`: `load` a model, `run` it. `ep/feeds.py` checks what is fed.
- `ep/loader.py`, `ep/passes.py`, `ep/binding.py`: a file becomes a list of steps, each bound to its lowering.
- `ep/ops/`: the operators. A *lowering* is a function with the signature of the ONNX operator; its first
  argument `xp` is an array namespace. Each is written once and serves NumPy, JAX and MLX.
- `ep/placement.py`, `ep/partition.py`, `ep/compile.py`: which provider runs which step, in groups that are
  compiled once for each signature of shapes and dtypes.
- `ep/library.py`: where a compiled function comes from: a context model (`ep/context_reader.py`, written by
  `ep/context_writer.py`), the user's cache (`ep/context_cache.py`), or the compiler.
- `ep/planned.py`: a model that runs by stored code alone, without its graph (`ep/opened.py` is one with it).
- `ep/provider.py`: the contract of a provider. `ep/array_provider.py` fulfils it for any array library that
  is described by a `Backend` value: `ep/host.py` (NumPy), `ep.backends.jax`, `ep.backends.mlx`.

To add an operator, write its lowering into the file of its family in `ep/ops/`, and nothing else::

    @op("HardSwish", since=14)
    def hard_swish(xp, x):
        return x * xp.clip(x / 6 + 0.5, 0, 1)

Errors say what failed, why, and how to fix it. Catch `UnsupportedModel`, `InvalidModel`, `InvalidInput`,
`BackendUnavailable` or `ExecutionError`, or `EpError` for all of them.

Importing `ep` imports no array library: names are looked up when they are first used.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

_PUBLIC: dict[str, tuple[str, ...]] = {  # module -> names; `__init__.pyi` says the same to type checkers
    # run a model
    "ep.session": ("load", "InferenceSession", "HostFallbackWarning"),
    "ep.results": ("Outputs",),
    "ep.plan": ("Plan",),
    "ep.memory_estimate": ("estimate", "Estimate"),
    "ep.packing": ("pack", "Packed"),
    "ep.weight_report": ("Weight", "WeightTable", "WeightTotals"),
    "ep.feeds": ("ValueInfo",),
    "ep.errors": (
        "EpError",
        "UnsupportedModel",
        "InvalidModel",
        "InvalidInput",
        "BackendUnavailable",
        "ExecutionError",
    ),
    # write an operator
    "ep.registry": ("op", "Host", "ShapeOf", "Index", "Body", "Lowering", "OpKey", "OpRegistry", "OPS", "Overrides"),
    # write a provider
    "ep.provider": (
        "ExecutionProvider",
        "EpConfig",
        "EpId",
        "Fence",
        "OptimizerPass",
        "OrtPluginExport",
        "Partition",
        "Transfer",
    ),
    "ep.array_provider": ("ArrayProvider",),
    "ep.backend": ("Backend",),
    "ep.kernel": ("Kernel", "KernelMatch", "Cost"),
    "ep.discovery": ("EpRegistry",),
    "ep.context": ("EpContext", "EpContextRegistry"),
    "ep.context_cache": ("ContextNotice",),
    # hold memory and tensors
    "ep.device": ("DeviceType", "DeviceId"),
    "ep.buffer": ("DeviceBuffer",),
    "ep.tensor": ("TensorView", "TensorLayout", "Shape", "NodeId"),
}
_HOME = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = [*_HOME, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
    elif name == "__version__":
        from importlib.metadata import version

        value = version("ep-runtime")
    else:
        raise AttributeError(f"module 'ep' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if os.environ.get("EP_ONNXRUNTIME") == "1":  # `import onnxruntime` then means `ep.onnxruntime`
    import_module("ep.onnxruntime_alias").install_if_asked()
