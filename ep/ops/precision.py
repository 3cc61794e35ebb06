"""In which dtype is accumulated: sums of float16 and bfloat16 lose digits, so they are taken in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import numpy as np


def wide_dtype(dtype: Any) -> np.dtype:
    """float64 for float64, else float32."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def exact_dtype(dtype: Any) -> np.dtype:
    """As `wide_dtype`, but float64 for integers of 32 and 64 bits, which float32 does not hold."""
    is_long = np.dtype(dtype).kind in "iu" and np.dtype(dtype).itemsize >= 4
    return np.dtype(np.float64) if is_long else wide_dtype(dtype)


def exactly(attributes: dict[str, Any], dtypes: Sequence[Any]) -> np.dtype | None:
    """The dtype inside of operators that compute integers in `exact_dtype`; nearest pixels are not computed."""
    if attributes.get("mode") in ("nearest", b"nearest"):
        return None
    return None if not dtypes or dtypes[0] is None or dtypes[0].hasobject else exact_dtype(dtypes[0])


def wide(xp: Any, x: Any) -> Any:
    """The floating-point array `x` in the dtype in which it is accumulated; `None` stays `None`."""
    return None if x is None else xp.astype(x, wide_dtype(xp.dtype_of(x)))


def is_float(dtype: np.dtype) -> bool:
    """Whether a dtype is a floating-point one, those of ml_dtypes included."""
    return dtype.kind == "f" or dtype.name.startswith(("bfloat", "float"))


def saturated(xp: Any, x: Any, dtype: np.dtype) -> Any:
    """The floating-point x as another dtype; integers stop at the ends of their range."""
    if dtype.kind not in "iu":
        return xp.astype(x, dtype)
    inner, end = xp.dtype_of(x).type, np.iinfo(dtype).max
    largest = inner(end)
    if int(largest) > end:  # the largest number of both dtypes
        largest = np.nextafter(largest, inner(0))
    y = xp.astype(xp.clip(x, float(np.iinfo(dtype).min), float(largest)), dtype)
    return y if int(largest) == end else xp.where(x > float(largest), xp.full((), end, dtype=dtype), y)


def in_exact(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The lowering of one input computed in `exact_dtype`, with the result in the dtype of the input."""

    @wraps(fn)
    def lowering(xp, x, **attributes):
        dtype = xp.dtype_of(x)
        return saturated(xp, fn(xp, xp.astype(x, exact_dtype(dtype)), **attributes), dtype)

    return lowering


def in_wide(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The lowering computed in `wide_dtype`, with the result in the dtype of the first input."""

    @wraps(fn)
    def lowering(xp, x, *others, **attributes):
        y = fn(xp, wide(xp, x), *(wide(xp, other) for other in others), **attributes)
        return xp.astype(y, xp.dtype_of(x))

    return lowering
