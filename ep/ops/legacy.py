"""What did opsets 1 to 6 say with attributes that opset 7 dropped: buffers to overwrite, and broadcasting?"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from ep.ops.axes import axis_of


def with_consumed_inputs(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The lowering with opset 1's `consumed_inputs`, which names buffers to reuse and changes no value."""

    def lowering(xp, *inputs, consumed_inputs=None, **attributes):
        return fn(xp, *inputs, **attributes)

    signature = inspect.signature(fn, eval_str=True)
    extra = inspect.Parameter("consumed_inputs", inspect.Parameter.KEYWORD_ONLY, default=None)
    lowering.__signature__ = signature.replace(parameters=[*signature.parameters.values(), extra])
    return lowering


def with_broadcast(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The lowering of two inputs with explicit broadcasting: `axis` says where b's axes start among a's."""

    def lowering(xp, a, b, *, axis=None, broadcast=0):
        return fn(xp, a, aligned(xp, a, b, axis) if broadcast else b)

    return lowering


def aligned(xp: Any, a: Any, b: Any, axis: int | None) -> Any:
    """b with the trailing axes of length 1 that let it broadcast against a."""
    if axis is None or b.ndim == 0:
        return b
    return xp.reshape(b, (*b.shape, *(1,) * (a.ndim - axis_of(axis, a.ndim) - b.ndim)))
