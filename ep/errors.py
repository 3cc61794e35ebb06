"""What can go wrong, and what is the user told? Each kind writes its own what / why / fix text.

Catch five: `UnsupportedModel`, `InvalidModel`, `InvalidInput`, `BackendUnavailable`, `ExecutionError`.
Each narrower kind is a subclass of the one that a user would catch for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


class EpError(Exception):
    """Base of all errors of this package: `what` failed, `why`, and how to `fix` it (both may be empty).

    `at` says in which node it was raised, if it was in one.
    """

    at = ""

    def __init__(self, what: str, *, why: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what, self.why, self.fix = what, why, fix

    def __str__(self) -> str:
        rest = (("Why", self.why), ("Fix", self.fix))
        what = f"{self.at}: {self.what}" if self.at else self.what
        return "\n".join([what, *(f"{label}: {text}" for label, text in rest if text)])

    def __reduce__(self) -> tuple[Any, ...]:
        # The default rebuilds from positional arguments only; an error must survive a process pool whole.
        return _rebuild, (type(self), self.args), self.__dict__


def _rebuild(cls: type[EpError], args: tuple[Any, ...]) -> EpError:
    return cls.__new__(cls, *args)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the closest of the known names, or "" where none is close."""
    import difflib

    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def names(items: Iterable[Any], empty: str = "none") -> str:
    """Return the items quoted and joined, for error texts."""
    return ", ".join(repr(str(item)) for item in items) or empty


def counted(number: int, noun: str) -> str:
    """Return "1 node", "2 nodes"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _problem_list(verb: str, model_name: str, problems: Sequence[str]) -> str:
    return "\n".join(
        [f"{model_name} {verb}: {counted(len(problems), 'problem')}.", *(f"  {problem}" for problem in problems)]
    )


# The five that users catch.


class UnsupportedModel(EpError):
    """A valid model that this runtime, or the chosen device, cannot run."""

    @staticmethod
    def from_problems(model_name: str, problems: Sequence[str], *, why: str = "", fix: str = "") -> UnsupportedModel:
        """Return one error that lists every problem of the model."""
        return UnsupportedModel(_problem_list("is not supported", model_name, problems), why=why, fix=fix)


class InvalidModel(EpError):
    """A model file that breaks the ONNX specification or is damaged."""

    @staticmethod
    def from_problems(model_name: str, problems: Sequence[str], *, why: str = "", fix: str = "") -> InvalidModel:
        """Return one error that lists every problem of the model."""
        return InvalidModel(_problem_list("is not a valid model", model_name, problems), why=why, fix=fix)


class InvalidInput(EpError):
    """An argument, feed or option that the caller has to change."""


class BackendUnavailable(EpError):
    """A provider that is not installed, or does not work on this machine."""


class ExecutionError(EpError):
    """A failure while allocating, copying, compiling or running."""


# Models.


class NoEpForOp(UnsupportedModel):
    """No provider runs an operator; `reasons` maps each provider asked to its refusal."""

    def __init__(self, op: str, reasons: Mapping[str, str], *, node: str = "") -> None:
        self.op, self.reasons, self.node = op, dict(reasons), node
        refusals = "".join(f"\n  {ep}: {reason}" for ep, reason in reasons.items())
        super().__init__(
            f"no provider runs {op}{f' (node {node!r})' if node else ''}.",
            why=f"each provider declined:{refusals}" if refusals else "no provider is registered.",
            fix="register a provider that supports it, or export the model without this operator.",
        )


class NoEpForContextSource(UnsupportedModel):
    """An EPContext node names a `source` that no registered provider accepts."""

    def __init__(self, source: str, known: Iterable[str]) -> None:
        self.source, self.known = source, tuple(known)
        super().__init__(
            f"no provider accepts EPContext nodes with source={source!r}.",
            why=f"the registered providers accept: {names(self.known)}.{did_you_mean(source, self.known)}",
            fix="load the model on the provider that compiled it, or load the original model.",
        )


class UnsupportedContext(UnsupportedModel):
    """A provider was asked to save or load a compiled context but has no compile step, or the model has nothing."""

    def __init__(self, ep: str, why: str = "", what: str = "") -> None:
        self.ep = ep
        super().__init__(
            what or f"provider {ep!r} can neither save nor load a compiled context.",
            why=why or "it has no compiled form that can be stored.",
            fix="use the original model" + ("." if what else " with this provider."),
        )

    @classmethod
    def of_model(cls, ep: str, name: str, why: str) -> UnsupportedContext:
        """The error for a model of which nothing can be stored."""
        return cls(ep, why, f"nothing of {name} can be stored as a compiled function.")


# Arguments.


class UnknownOption(InvalidInput):
    """A provider option, or the namespace of one, that nobody reads."""

    def __init__(self, key: str, known: Iterable[str]) -> None:
        self.key, self.known = key, tuple(sorted(set(known)))
        super().__init__(
            f"unknown option {key!r}.",
            why=f"the known options are: {names(self.known)}.{did_you_mean(key, self.known)}",
            fix="correct the name, or remove the option.",
        )


class IndexOutOfRange(InvalidInput):
    """An index beyond what it indexes: the `index` found, the least (`low`) and the greatest (`high`) one allowed.

    `where` it was found and the `bound` that it breaks are told in words; `at` names the node that reads it.
    """

    def __init__(self, index: int, low: int, high: int, *, where: str, bound: str, fix: str) -> None:
        self.index, self.low, self.high = index, low, high
        allowed = f"indices go from {low} to {high}" if low <= high else "there is nothing to index"
        super().__init__(f"index {index} {where} is out of range.", why=f"{bound}: {allowed}.", fix=fix)


class InvalidAlignment(InvalidInput):
    """An alignment that is not a power of two, or an address that does not keep the promised one."""

    def __init__(self, alignment: int, address: int | None = None) -> None:
        self.alignment, self.address = alignment, address
        if address is None:
            super().__init__(
                f"alignment {alignment} is not a power of two.", fix="pass 1, 2, 4, …; 64 suits all devices."
            )
        else:
            super().__init__(
                f"address {address:#x} is not aligned to {alignment} bytes.",
                why=f"it lies {address % alignment} bytes past a multiple of {alignment}.",
                fix="pass the alignment that the memory really has, or copy the data to aligned memory.",
            )


class InvalidTensorView(InvalidInput):
    """A dtype, shape and strides that do not fit the buffer they describe."""

    def __init__(self, why: str, *, fix: str = "correct the shape, strides, offset or dtype.") -> None:
        super().__init__("invalid tensor view.", why=why, fix=fix)


class DuplicateContextSource(InvalidInput):
    """Two providers claim the same EPContext `source`."""

    def __init__(self, source: str, first: str, second: str) -> None:
        self.source, self.first, self.second = source, first, second
        super().__init__(
            f"EPContext source {source!r} is claimed by both {first!r} and {second!r}.",
            why="a compiled context must lead to exactly one provider.",
            fix="register only one of the two providers, or change the source key of one.",
        )


# Providers.


class EpLoadFailed(BackendUnavailable):
    """A provider was found, but importing or creating it failed."""

    def __init__(self, ep: str, why: str, *, fix: str = "") -> None:
        self.ep = ep
        super().__init__(
            f"provider {ep!r} could not be loaded.",
            why=why,
            fix=fix or "run `ep doctor` to see what works here.",
        )


class NotInitialised(ExecutionError):
    """A provider was used before `initialize` or after `shutdown`."""

    def __init__(self, ep: str, action: str) -> None:
        self.ep, self.action = ep, action
        super().__init__(
            f"provider {ep!r} cannot {action}.",
            why="it is not initialised, or was shut down.",
            fix="call provider.initialize(EpConfig()) first.",
        )


# Running.


class KernelFailed(ExecutionError):
    """A node failed while running; raised `from` the library's own error."""

    def __init__(self, op: str, why: str, *, node: str = "", ep: str = "", fix: str = "") -> None:
        self.op, self.node, self.ep = op, node, ep
        where = f" (node {node!r})" if node else ""
        super().__init__(f"{op}{where} failed{f' on {ep!r}' if ep else ''}.", why=why, fix=fix)


class OutOfMemory(ExecutionError):
    """An allocation larger than what the device can give; `available` is None where it is not known."""

    def __init__(self, requested: int, available: int | None, device: str) -> None:
        self.requested, self.available, self.device = requested, available, device
        have = "an unknown number of bytes is" if available is None else f"{available:,} bytes are"
        super().__init__(
            f"out of memory on {device}: {requested:,} bytes requested.",
            why=f"{have} available.",
            fix="free buffers, use a smaller batch or model, or raise the provider's memory_limit option.",
        )


# Buffers used against their contract.


class BufferMisuse(ExecutionError):
    """Base of the errors that break the ownership contract of `DeviceBuffer`."""


class UseAfterFree(BufferMisuse):
    """A buffer was used after `deallocate` or `into_raw` consumed it."""

    def __init__(self, action: str, consumed_by: str) -> None:
        self.action, self.consumed_by = action, consumed_by
        super().__init__(
            f"cannot {action}: the buffer no longer exists.",
            why=f"{consumed_by} consumed it.",
            fix="finish every use of a buffer before giving it away.",
        )


class DoubleFree(BufferMisuse):
    """A buffer was given to `deallocate` after something had already consumed it."""

    def __init__(self, consumed_by: str) -> None:
        self.consumed_by = consumed_by
        super().__init__(
            "cannot deallocate: the buffer was already given away.",
            why=f"{consumed_by} consumed it.",
            fix="pair each allocate with exactly one deallocate.",
        )


class ForeignProvider(BufferMisuse):
    """A buffer was given to a provider that did not allocate it."""

    def __init__(self, ep: str, device: str) -> None:
        self.ep, self.device = ep, device
        super().__init__(
            f"provider {ep!r} cannot deallocate this buffer on {device}.",
            why="only the provider instance that allocated a buffer may free it.",
            fix="deallocate it with the provider whose allocate returned it.",
        )


class NullPointer(BufferMisuse):
    """A buffer was built from the null pointer."""

    def __init__(self) -> None:
        super().__init__(
            "a DeviceBuffer cannot start at the null pointer.",
            why="the null pointer names no allocation.",
            fix="pass the address of the allocation; an empty one still has an address.",
        )


class ReadOnlyBuffer(BufferMisuse, BufferError):
    """A writable pointer was asked of memory that must not be written (`BufferError`, as DLPack wants)."""

    def __init__(self, why: str, *, fix: str = "copy the data into a buffer of your own.") -> None:
        super().__init__("this buffer cannot be written.", why=why, fix=fix)
