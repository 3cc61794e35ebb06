"""Which MLX dtype is which NumPy dtype."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np

DTYPES: dict[np.dtype, mx.Dtype] = {
    np.dtype(ml_dtypes.bfloat16): mx.bfloat16,
    np.dtype(np.bool_): mx.bool_,
} | {
    np.dtype(name): getattr(mx, name)
    for name in (
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64"),
    )
}
NUMPY_DTYPES: dict[mx.Dtype, np.dtype] = {theirs: ours for ours, theirs in DTYPES.items()}
HALVES = frozenset({mx.float16, mx.bfloat16})
INTEGERS = frozenset(t for t in NUMPY_DTYPES if mx.issubdtype(t, mx.integer) or t == mx.bool_)


def mlx_dtype(dtype: Any) -> mx.Dtype:
    """MLX's name of a NumPy dtype; MLX has no complex128, no float8 and nothing narrower than a byte."""
    if isinstance(dtype, mx.Dtype):
        return dtype
    try:
        return DTYPES[np.dtype(dtype)]
    except KeyError:
        raise TypeError(f"MLX has no dtype {np.dtype(dtype)}") from None
