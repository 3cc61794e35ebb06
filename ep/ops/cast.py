"""Conversions between element types: Cast, CastLike, BitCast."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from ep.dtypes import STRING, onnx_dtype
from ep.errors import InvalidInput
from ep.ops.precision import is_float
from ep.registry import ShapeOf, op

E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
STRING_CODE = 8


def _makes_strings(attributes: dict[str, Any]) -> str:
    return "strings are made on the host" if attributes.get("to") in (STRING_CODE, "STRING") else ""


@op("Cast", since=24, host_only=_makes_strings)
def cast(xp, x, *, to, saturate=1, round_mode="up"):
    return cast_to(xp, x, onnx_dtype(to), bool(saturate), round_mode)


@op("Cast", since=19, host_only=_makes_strings)
def cast_19(xp, x, *, to, saturate=1):
    """Until opset 24 infinity saturated only where the type has no other use for its code."""
    dtype = onnx_dtype(to)
    if dtype.name.endswith("fnuz") and saturate:
        return xp.where(xp.isinf(x), xp.astype(xp.astype(x, np.float32) * np.nan, dtype), cast_to(xp, x, dtype))
    return cast_to(xp, x, dtype, bool(saturate))


@op("Cast", since=6, host_only=_makes_strings)
def cast_6(xp, x, *, to):
    return cast_to(xp, x, onnx_dtype(to))


@op("Cast", host_only=_makes_strings)
def cast_1(xp, x, *, to):
    """The type was named by a string then."""
    import onnx

    return cast_to(xp, x, onnx_dtype(onnx.TensorProto.DataType.Value(to)))
