"""Where do the windows of convolution and pooling lie: kernel, strides, dilations and padding of every axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Ints = Sequence[int] | None


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows over axes of the given `size`; `extra` is what ceil_mode reads beyond the padding on the right."""

    size: tuple[int, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[tuple[int, int], ...]
    out: tuple[int, ...]
    extra: tuple[int, ...]

    @property
    def is_padded(self) -> bool:
        return any(lo or hi for lo, hi in self.borders)

    @property
    def borders(self) -> list[tuple[int, int]]:
        """The padding that is really read: the right side grows in ceil_mode."""
        return [(lo, hi + extra) for (lo, hi), extra in zip(self.pads, self.extra, strict=True)]

    def padded(self, xp: Any, x: Any, value: Any) -> Any:
        """`x` [N, C, *size] with `value` around it."""
        if not self.is_padded:
            return x
        return xp.pad(x, [(0, 0), (0, 0), *self.borders], constant_values=value)


def place(
    size: Sequence[int],
    kernel: Sequence[int],
    strides: Ints = None,
    dilations: Ints = None,
    pads: Ints = None,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
) -> Windows:
    """The windows that ONNX attributes describe; `pads` are ignored when `auto_pad` decides."""
    rank = len(size)
    kernel, strides, dilations = per_axis(kernel, rank), per_axis(strides, rank), per_axis(dilations, rank)
    sides, outs, extras = [], [], []
    for n, k, s, d, explicit in zip(size, kernel, strides, dilations, sides_of(pads, rank), strict=True):
        span = (k - 1) * d + 1
        lo, hi = _side(n, span, s, explicit, auto_pad)
        room = n + lo + hi
        out = (room - span + (s - 1 if ceil_mode else 0)) // s + 1
        if ceil_mode and (out - 1) * s >= n + lo:
            out -= 1  # a window that would start in the right padding is dropped
        if out < 0 or (out == 0 and room > 0 and n > 0):
            raise ValueError(f"a window of {span} elements does not fit into {n} elements padded by {lo} and {hi}")
        sides.append((lo, hi))
        outs.append(max(out, 0))
        extras.append(max(0, (out - 1) * s + span - room) if out > 0 else 0)
    return Windows(tuple(size), kernel, strides, dilations, tuple(sides), tuple(outs), tuple(extras))


def _side(n: int, span: int, stride: int, explicit: tuple[int, int], auto_pad: str) -> tuple[int, int]:
    if auto_pad in ("NOTSET", ""):
        return explicit
    if auto_pad == "VALID":
        return 0, 0
    total = max(0, (-(-n // stride) - 1) * stride + span - n)
    return split_padding(total, auto_pad)


def split_padding(total: int, auto_pad: str) -> tuple[int, int]:
    """Both halves of the padding; an odd element goes to the end (SAME_UPPER) or the beginning (SAME_LOWER)."""
    if auto_pad not in ("SAME_UPPER", "SAME_LOWER"):
        raise ValueError(f"auto_pad is {auto_pad!r}; it must be NOTSET, SAME_UPPER, SAME_LOWER or VALID")
    small = total // 2
    return (small, total - small) if auto_pad == "SAME_UPPER" else (total - small, small)


def per_axis(values: Ints, rank: int) -> tuple[int, ...]:
    """One value per spatial axis; ones when the attribute is absent."""
    if values is None or len(values) == 0:
        return (1,) * rank
    if len(values) != rank:
        raise ValueError(f"{tuple(values)} has {len(values)} values, but the input has {rank} spatial axes")
    if min(values, default=1) < 1:
        raise ValueError(f"{tuple(values)} are no kernel, strides or dilations: these are 1 or more")
    return tuple(values)


def sides_of(pads: Ints, rank: int) -> list[tuple[int, int]]:
    """ONNX `pads` (all beginnings, then all ends) as pairs."""
    if pads is None or len(pads) == 0:
        return [(0, 0)] * rank
    if len(pads) != 2 * rank:
        raise ValueError(f"pads {tuple(pads)} has {len(pads)} values; {rank} spatial axes need {2 * rank}")
    if min(pads) < 0:
        raise ValueError(f"pads {tuple(pads)} take something away, which only the operator Pad does")
    return list(zip(pads[:rank], pads[rank:], strict=True))
