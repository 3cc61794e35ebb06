"""What must a backend do to run nodes? `ExecutionProvider`, and the small types that its methods speak.

This is the Python form of the Rust contract of the same name: each method keeps its meaning, facts are
properties, `Result` is an exception, and a buffer taken by value is consumed.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from ep.buffer import DeviceBuffer
from ep.context import EpContext
from ep.device import DeviceId, DeviceType
from ep.errors import InvalidInput, UnknownOption, UnsupportedContext
from ep.kernel import Kernel, KernelMatch
from ep.tensor import NodeId, Shape, TensorLayout, TensorView

if TYPE_CHECKING:
    from concurrent.futures import Future

    import onnx_ir as ir

    from ep.program import Step

HOST = "host"  # name of the provider behind all others, which is NumPy
Dtypes = Sequence["np.dtype[Any] | None"]  # one for each value; None where it is not known


class ExecutionProvider(ABC):
    """A backend: it owns a device's memory, says which nodes it runs, and runs them.

    Every method may be called from any thread.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of the provider in lower case, such as "jax"; also the namespace of its options."""

    @property
    @abstractmethod
    def device_type(self) -> DeviceType:
        """The kind of its device."""

    @property
    @abstractmethod
    def device_id(self) -> DeviceId:
        """Its device."""

    @abstractmethod
    def initialize(self, config: EpConfig) -> None:
        """Take the device's resources and read the options.

        Raises:
            UnknownOption: the configuration names an option of this provider that does not exist.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """Finish pending work and release the device's resources, the memory of leaked buffers included."""

    @abstractmethod
    def supports_op(
        self,
        op: Step | ir.Node,
        shapes: Sequence[Shape] = (),
        layouts: Sequence[TensorLayout] = (),
        *,
        dtypes: tuple[Dtypes, Dtypes] | None = None,
    ) -> KernelMatch:
        """Say whether this provider runs `op` on inputs of these shapes and layouts, and at what cost.

        `op` is a node of a graph, or a step of a program; shapes and layouts are empty where nobody knows
        them. `dtypes` of the inputs and of the outputs are those of the node's values if not given.
        """

    @abstractmethod
    def get_kernel(self, op: Step | ir.Node, shapes: Sequence[tuple[int, ...]], opset: int) -> Kernel:
        """Return the kernel of `op` for concrete input shapes, with the meaning it has in the given opset."""

    @abstractmethod
    def allocate(self, size: int, alignment: int) -> DeviceBuffer:
        """Allocate `size` bytes, not initialised, whose address is a multiple of `alignment`.

        Raises:
            OutOfMemory: the device does not have that much.
            InvalidAlignment: `alignment` is not a power of two.
        """

    @abstractmethod
    def deallocate(self, buffer: DeviceBuffer) -> None:
        """Consume a buffer, and free its memory unless it is borrowed.

        Raises:
            DoubleFree: the buffer was already consumed.
            ForeignProvider: another provider allocated it; the buffer stays alive.
        """

    @abstractmethod
    def copy(self, src: DeviceBuffer, dst: DeviceBuffer, size: int) -> None:
        """Copy the first `size` bytes from `src` to `dst`, on any devices; on return they are there.

        Raises:
            InvalidInput: `size` exceeds one of the buffers.
            ReadOnlyBuffer: `dst` is borrowed.
        """

    @abstractmethod
    def copy_async(self, src: DeviceBuffer, dst: DeviceBuffer, size: int) -> Fence:
        """Start a copy; until the fence is passed, `src` must not be written nor `dst` be used."""

    @abstractmethod
    def sync(self) -> None:
        """Wait until all work that was started on this provider is done; raise what failed."""

    # Beyond the Rust contract: whole subgraphs, and the border to the library's own arrays.

    @abstractmethod
    def compile(self, partition: Partition) -> Callable[..., tuple[Any, ...]]:
        """Return one function for a subgraph, from its inputs to its outputs, on the provider's arrays."""

    @abstractmethod
    def from_view(self, view: TensorView) -> Transfer:
        """Return the provider's array of a view: without copying if it can, and otherwise the reason."""

    @abstractmethod
    def to_view(self, array: Any) -> TensorView:
        """Return a view of one of the provider's arrays, without copying; it keeps the array alive."""

    # Optional.

    def as_ort_plugin(self) -> OrtPluginExport | None:
        """Return how onnxruntime can load this provider as a plugin, or None."""
        return None

    def custom_passes(self) -> Sequence[OptimizerPass]:
        """Return passes over the graph for this provider, to run after the general ones."""
        return ()

    def claim_nodes(self, graph: ir.Graph) -> Sequence[NodeId]:
        """Return the nodes that this provider runs whatever the cost model says."""
        return ()

    def context_source_keys(self) -> Sequence[str]:
        """Return the `source` values of the EPContext nodes that `load_context` restores."""
        return ()

    def save_context(self) -> EpContext:
        """Return the last subgraph that was compiled, in the form that `load_context` restores.

        Raises:
            UnsupportedContext: this provider has no compiled form.
        """
        raise UnsupportedContext(self.name)

    def load_context(self, ctx: EpContext) -> Callable[..., tuple[Any, ...]]:
        """Return the function of a saved context without compiling it again.

        Raises:
            UnsupportedContext: this provider has no compiled form, or another device made this one.
            InvalidModel: the context is damaged.
        """
        raise UnsupportedContext(self.name)


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """A subgraph to compile: steps in order, and the keys of the values that enter and leave it.

    Arrays for `inputs` are arguments of the compiled function; `constants` are small host values that it may
    keep. Steps whose `id` is in `on_host` are bookkeeping that runs on the host while tracing.
    """

    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    steps: tuple[Step, ...]
    constants: Mapping[Any, np.ndarray] = field(default_factory=dict)
    on_host: frozenset[int] = frozenset()


class Transfer(NamedTuple):
    """An array of a provider, and why its data had to be copied; None if they are borrowed."""

    array: Any
    copied_because: str | None


@dataclass(frozen=True, slots=True, order=True)
class EpId:
    """The number of a provider in its `EpRegistry`."""

    index: int


@dataclass(frozen=True, slots=True)
class EpConfig:
    """Options by namespaced name, such as {"mlx.memory_limit": "8000000000"}; the namespace is a provider."""

    options: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key in self.options:
            if not all(key.partition(".")):
                raise InvalidInput(
                    f"option {key!r} has no namespace.",
                    why="options are addressed to one provider.",
                    fix='write "provider.option", such as "mlx.memory_limit".',
                )

    def of(self, namespace: str, known: Sequence[str]) -> dict[str, str]:
        """Return the options of one provider, by their names without the namespace.

        Raises:
            UnknownOption: one of them is not known.
        """
        prefix = f"{namespace}."
        own = (key for key in self.options if key.startswith(prefix))
        mine = {key.removeprefix(prefix): self.options[key] for key in own}
        for name in mine.keys() - set(known):
            raise UnknownOption(prefix + name, [prefix + option for option in known])
        return mine

    def check_namespaces(self, known: Sequence[str]) -> None:
        """Raise `UnknownOption` for an option that is addressed to none of the known providers."""
        for key in self.options:
            namespace, _, name = key.partition(".")
            if namespace not in known:
                raise UnknownOption(key, [f"{provider}.{name}" for provider in known])


_fence_ids = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Fence:
    """A point in a provider's asynchronous work. The default fence has been passed already."""

    future: Future[Any] | None = None
    id: int = field(default_factory=lambda: next(_fence_ids))

    def done(self) -> bool:
        """Whether the work before the fence has ended, well or not."""
        return self.future is None or self.future.done()

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the work before the fence; raise what failed, or `TimeoutError` when time is up."""
        if self.future is not None:
            self.future.result(timeout)


class OptimizerPass(Protocol):
    """A change of the graph for one provider."""

    @property
    def name(self) -> str:
        """The name of the pass in traces."""
        ...

    def __call__(self, model: ir.Model) -> ir.Model:
        """Return the changed model; it may be the same object."""
        ...


@dataclass(frozen=True, slots=True)
class OrtPluginExport:
    """How onnxruntime loads a provider as a plugin: the symbol of its registration function."""

    register_symbol: str = ""
