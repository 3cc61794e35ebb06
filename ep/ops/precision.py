"""In which dtype is accumulated: sums of float16 and bfloat16 lose digits, so they are taken in float32."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np


def wide_dtype(dtype: Any) -> np.dtype:
    """float64 for float64, else float32."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def wide(xp: Any, x: Any) -> Any:
    """The floating-point array `x` in the dtype in which it is accumulated; `None` stays `None`."""
    return None if x is None else xp.astype(x, wide_dtype(xp.dtype_of(x)))


def is_float(dtype: np.dtype) -> bool:
    """Whether a dtype is a floating-point one, those of ml_dtypes included."""
    return dtype.kind == "f" or dtype.name.startswith(("bfloat", "float"))


def in_wide(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The lowering computed in `wide_dtype`, with the result in the dtype of the first input."""

    @wraps(fn)
    def lowering(xp, x, *others, **attributes):
        y = fn(xp, wide(xp, x), *(wide(xp, other) for other in others), **attributes)
        return xp.astype(y, xp.dtype_of(x))

    return lowering
