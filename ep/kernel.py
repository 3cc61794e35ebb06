"""Can a provider run a node, what does that cost, and what runs it? `KernelMatch`, `Cost`, `Kernel`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ep.tensor import TensorLayout


@dataclass(frozen=True, slots=True)
class Cost:
    """An estimate of running a node: microseconds by cause, and the bytes that it moves."""

    compute_us: float = 0.0
    memory_us: float = 0.0
    transfer_us: float = 0.0
    launch_us: float = 0.0
    bytes_moved: int = 0

    @property
    def total_us(self) -> float:
        """The time of the node. Computing and reading memory overlap, so only the longer of them counts."""
        return max(self.compute_us, self.memory_us) + self.transfer_us + self.launch_us

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.compute_us + other.compute_us,
            self.memory_us + other.memory_us,
            self.transfer_us + other.transfer_us,
            self.launch_us + other.launch_us,
            self.bytes_moved + other.bytes_moved,
        )


@dataclass(frozen=True, slots=True)
class KernelMatch:
    """A provider's answer about a node: a cost, with the layouts it wants and gives, or a reason to decline.

    `KernelMatch(cost)` accepts, `KernelMatch.declined(reason)` declines; empty layouts mean row-major. The
    reason is in words that a user can act on, and so is the `remark` of a provider that accepts.
    """

    cost: Cost | None = None
    input_layouts: tuple[TensorLayout, ...] = ()
    output_layouts: tuple[TensorLayout, ...] = ()
    reason: str = ""
    remark: str = ""

    def __post_init__(self) -> None:
        assert (self.cost is None) == bool(self.reason), "a match has either a cost or a reason"

    @classmethod
    def declined(cls, reason: str) -> KernelMatch:
        """Return the answer of a provider that does not run the node."""
        return cls(reason=reason)

    @property
    def supported(self) -> bool:
        """Whether the provider runs the node."""
        return self.cost is not None

    def __bool__(self) -> bool:
        return self.supported


@dataclass(frozen=True, slots=True)
class Kernel:
    """What runs one node: called with its inputs on the provider's arrays (None where omitted).

    It returns a tuple with every output. `flops` is an estimate, None where nobody knows.
    """

    run: Callable[..., tuple[Any, ...]]
    name: str = ""
    flops: int | None = None
    accepts_strided: bool = True
    output_layout: TensorLayout = TensorLayout()

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        return self.run(*inputs)
