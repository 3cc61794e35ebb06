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

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # Run a model.
    from ep.session import HostFallbackWarning, InferenceSession, Outputs, load  # isort: skip
    from ep.feeds import ValueInfo  # isort: skip
    from ep.plan import Plan  # isort: skip
    from ep.errors import BackendUnavailable, EpError, ExecutionError, InvalidInput, InvalidModel  # isort: skip
    from ep.errors import UnsupportedModel  # isort: skip

    # Write an operator.
    from ep.registry import OPS, Body, Host, Lowering, OpKey, OpRegistry, Overrides, ShapeOf, op  # isort: skip

    # Write a provider.
    from ep.provider import EpConfig, EpId, ExecutionProvider, Fence, OptimizerPass, OrtPluginExport  # isort: skip
    from ep.provider import Partition, Transfer  # isort: skip
    from ep.array_provider import ArrayProvider  # isort: skip
    from ep.backend import Backend  # isort: skip
    from ep.discovery import EpRegistry  # isort: skip
    from ep.kernel import Cost, Kernel, KernelMatch  # isort: skip
    from ep.context import EpContext, EpContextRegistry  # isort: skip

    # Hold memory and tensors.
    from ep.device import DeviceId, DeviceType  # isort: skip
    from ep.buffer import DeviceBuffer  # isort: skip
    from ep.tensor import NodeId, Shape, TensorLayout, TensorView  # isort: skip
