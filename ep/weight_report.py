"""Which weights are borrowed, which are copies, and why? `session.weights`, for people and machines."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, overload

import numpy as np

from ep.buffer import DeviceBuffer
from ep.device import DeviceId
from ep.errors import counted
from ep.provider import HOST

SHOWN = 30  # weights in a table, the largest first; `to_dict` has all of them
COMPUTED = "computed when the model was loaded (`ep pack` stores the result)"
PARSED = "stored in the model file as numbers that must be parsed (`ep pack` stores them as they are used)"


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A constant that groups take as an argument. `array` is what the host sees, `device_array` the provider's.

    `why` says why it is a copy and is empty if it is borrowed. Until the first run that needs the weight,
    `device_array` is `None`, nothing was read, and `why` is what will happen.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    provider: str
    source: str  # file and offset
    why: str
    array: np.ndarray
    device_array: Any = None

    @property
    def is_borrowed(self) -> bool:
        """Whether the device reads the file's own memory."""
        return not self.why

    def buffer(self) -> DeviceBuffer:
        """The bytes that the host sees, as a borrowed buffer that keeps them alive."""
        start = self.array.ctypes.data
        align = start & -start
        return DeviceBuffer.from_borrowed_parts(start, DeviceId.cpu(), self.nbytes, align, owner=self.array)

    def to_dict(self) -> dict[str, Any]:
        """The facts as plain data, ready for JSON."""
        hidden = ("array", "device_array")
        facts = {key: getattr(self, key) for key in self.__slots__ if key not in hidden}
        return facts | {"borrowed": self.is_borrowed, "on_device": self.device_array is not None}


@dataclass(frozen=True, slots=True)
class WeightTotals:
    """Counts and bytes of the weights of a session; `compiled_in` are constants too small to be arguments.

    `kept_bytes` is what compiled code holds besides: weights in the layout and dtype that it computes in. Of these,
    `kept_borrowed_bytes` lie in files, where `ep pack --for` stored them.
    """

    count: int
    nbytes: int
    borrowed: int
    borrowed_bytes: int
    compiled_in: int
    kept_bytes: int = 0
    kept_borrowed_bytes: int = 0

    def __str__(self) -> str:
        if not self.count:
            inside = counted(self.compiled_in, "small constant")
            return f"no weights ({inside} compiled in)" if self.compiled_in else "no weights"
        copied = self.count - self.borrowed
        share = 100 if not copied else min(99, 100 * self.borrowed_bytes // self.nbytes) if self.nbytes else 0
        text = f"{counted(self.count, 'weight')}, {self.nbytes / 2**20:.1f} MiB: {share} % borrowed"
        text += f", {copied} copied" if copied else ""
        if not self.kept_bytes:
            return text
        own = self.kept_bytes - self.kept_borrowed_bytes
        how = f", {own / 2**20:.1f} MiB of it copies" if own and self.kept_borrowed_bytes else ", copies" * bool(own)
        return text + f"; {self.kept_bytes / 2**20:.1f} MiB as compiled code computes{how or ', borrowed'}"


class WeightTable(Sequence[Weight]):
    """The weights of a session, by position or by name. Prints itself as a table."""

    def __init__(self, model: str, weights: Sequence[Weight], compiled_in: int, kept: Sequence[Any] = ()) -> None:
        self._model, self._weights, self._compiled_in = model, tuple(weights), compiled_in
        self._kept = tuple((each.array.nbytes, each.is_borrowed) for each in kept)

    @overload
    def __getitem__(self, key: int | str) -> Weight: ...
    @overload
    def __getitem__(self, key: slice) -> Sequence[Weight]: ...
    def __getitem__(self, key: int | str | slice) -> Weight | Sequence[Weight]:
        if not isinstance(key, str):
            return self._weights[key]
        for weight in self._weights:
            if weight.name == key:
                return weight
        raise KeyError(key)

    def __len__(self) -> int:
        return len(self._weights)

    @property
    def totals(self) -> WeightTotals:
        """How many there are, and how many of them are borrowed."""
        borrowed = [w for w in self if w.is_borrowed]
        return WeightTotals(
            count=len(self),
            nbytes=sum(w.nbytes for w in self),
            borrowed=len(borrowed),
            borrowed_bytes=sum(w.nbytes for w in borrowed),
            compiled_in=self._compiled_in,
            kept_bytes=sum(nbytes for nbytes, _ in self._kept),
            kept_borrowed_bytes=sum(nbytes for nbytes, is_borrowed in self._kept if is_borrowed),
        )

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data, ready for JSON."""
        return {"totals": asdict(self.totals), "weights": [w.to_dict() for w in self]}

    def __str__(self) -> str:
        return f"{self._model}: {self.totals}"

    __repr__ = __str__

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.table import Table
        from rich.text import Text

        if not self:
            yield Text(str(self))
            return
        table = Table(*_HEADER, title=str(self), title_justify="left")
        for row in self._rows():
            table.add_row(*map(Text, row))  # names are not markup
        yield table

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{h}</th>" for h in _HEADER)
        rows = ["<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in self._rows()]
        return f"<p><b>{html.escape(str(self))}</b></p><table><tr>{head}</tr>{''.join(rows)}</table>"

    def _rows(self) -> Iterator[tuple[str, ...]]:
        largest = sorted(self, key=lambda w: -w.nbytes)
        for w in largest[:SHOWN]:
            state = "borrowed" if w.is_borrowed else f"copied: {w.why}"
            type_ = f"{w.dtype}[{', '.join(map(str, w.shape))}]"
            yield w.name, type_, f"{w.nbytes / 2**20:.2f} MiB", w.source, w.provider, state
        if len(largest) > SHOWN:
            rest = largest[SHOWN:]
            yield f"… {len(rest)} more", "", f"{sum(w.nbytes for w in rest) / 2**20:.2f} MiB", "", "", ""


_HEADER = ("weight", "type", "size", "where it lies", "provider", "on the device")


def describe_weights(model: str, executable: Any, context: Any) -> WeightTable:
    """The weights of an executable and of its bodies; nothing is read."""
    found: dict[tuple[Any, str], Weight] = {}
    compiled_in: set[Any] = set()
    kept: dict[int, Any] = {}
    for owner, runnable in executable.every():
        group = runnable.group
        compiled_in.update(group.constants)
        kept.update((id(each), each) for each in _kept(runnable))
        for value in group.weights:
            if (value, group.provider) not in found:
                is_factor = value in group.factors
                found[value, group.provider] = _weight(value, owner.constants, group.provider, is_factor, context)
    return WeightTable(model, list(found.values()), len(compiled_in), list(kept.values()))


def _kept(runnable: Any) -> Iterator[Any]:
    """What the compiled functions of a group keep, also where it is split because its shapes grow."""
    for function in list(getattr(runnable, "cache", {}).values()):
        yield from getattr(function, "kept", ())
    for split in list(getattr(runnable, "growing", {}).values()):
        for _, inner in split.every():
            yield from _kept(inner)


def _weight(value: Any, constants: Mapping[Any, np.ndarray], provider: str, is_factor: bool, context: Any) -> Weight:
    weights, array = context.weights[provider], constants[value]
    placed = weights.find(value, array.dtype, is_factor)
    origin = weights.store.origin(array)
    if origin is None:
        why = PARSED if value.const_value is not None else COMPUTED
    elif placed is not None:
        why = placed.why or ""
    else:
        why = weights.obstacle(array, is_factor) or ""
    source = "memory" if origin is None else f"{origin[0]} at {origin[1]}"
    on_device = array if provider == HOST else None if placed is None else placed.array
    return Weight(
        value.name or "?", array.dtype.name, array.shape, array.nbytes, provider, source, why, array, on_device
    )
