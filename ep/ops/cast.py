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
OF_ML_DTYPES = 2  # in `dtype.isbuiltin`


def _makes_strings(attributes: dict[str, Any]) -> str:
    return "strings are made on the host" if attributes.get("to") in (STRING_CODE, "STRING") else ""


@op("Cast", since=24, host_only=_makes_strings, keeps=True)
def cast(xp, x, *, to, saturate=1, round_mode="up"):
    return cast_to(xp, x, onnx_dtype(to), bool(saturate), round_mode)


@op("Cast", since=19, host_only=_makes_strings, keeps=True)
def cast_19(xp, x, *, to, saturate=1):
    """Until opset 24 infinity became NaN in the two types without infinities and negative zero."""
    dtype = onnx_dtype(to)
    if dtype.name.endswith("fnuz") and saturate:
        x = xp.where(xp.isinf(x), np.nan, x)
    return cast_to(xp, x, dtype, bool(saturate))


@op("Cast", since=6, host_only=_makes_strings, keeps=True)
def cast_6(xp, x, *, to):
    return cast_to(xp, x, onnx_dtype(to))


@op("Cast", host_only=_makes_strings, keeps=True)
def cast_1(xp, x, *, to):
    """The type was named by a string then."""
    import onnx

    return cast_to(xp, x, onnx_dtype(onnx.TensorProto.DataType.Value(to)))


@op("CastLike", since=24, keeps=True)
def cast_like(xp, x, target_type: ShapeOf, *, saturate=1, round_mode="up"):
    return cast_to(xp, x, xp.dtype_of(target_type), bool(saturate), round_mode)


@op("CastLike", since=19, keeps=True)
def cast_like_19(xp, x, target_type: ShapeOf, *, saturate=1):
    return cast_like(xp, x, target_type, saturate=saturate)


@op("CastLike", since=15, keeps=True)
def cast_like_15(xp, x, target_type: ShapeOf):
    return cast_like(xp, x, target_type)


def cast_to(xp: Any, x: Any, dtype: np.dtype, saturate: bool = True, round_mode: str = "up") -> Any:
    """x in another dtype by the rules of the Cast operator."""
    source = xp.dtype_of(x)
    if source == dtype:
        return x
    if source == STRING:
        return xp.asarray(_from_strings(x, dtype))
    if dtype == STRING:
        return _to_strings(x)
    if is_narrow(source):  # libraries convert these to few other dtypes, but exactly to those two
        x = xp.astype(x, np.float32 if is_float(source) else np.int32)
    if dtype.kind == "b":
        return x != 0
    if not is_narrow(dtype):
        return xp.astype(x, dtype)
    if dtype == E8M0:
        return _to_e8m0(xp, xp.astype(x, np.float32), saturate, round_mode)
    return _to_narrow_float(xp, x, dtype, saturate) if is_float(dtype) else _to_narrow_int(xp, x, dtype)


def is_narrow(dtype: np.dtype) -> bool:
    """Whether it is a dtype of 8 bits or fewer that only ml_dtypes has."""
    return dtype.isbuiltin == OF_ML_DTYPES and dtype.itemsize == 1


def _to_narrow_float(xp: Any, x: Any, dtype: np.dtype, saturate: bool) -> Any:
    """Types of 4 and 6 bits have no codes for what is out of range, so they always saturate."""
    if not is_float(xp.dtype_of(x)):
        x = xp.astype(x, np.float32)
    if saturate or not dtype.name.startswith("float8"):
        top = float(ml_dtypes.finfo(dtype).max)
        x = xp.clip(x, -top, top)
    return xp.astype(x, dtype)


def _to_narrow_int(xp: Any, x: Any, dtype: np.dtype) -> Any:
    """The lowest bits of the integer, with two's complement sign."""
    bits = ml_dtypes.iinfo(dtype).bits
    x = xp.bitwise_and(xp.astype(x, np.int32), (1 << bits) - 1)
    if ml_dtypes.iinfo(dtype).min < 0:
        half = 1 << (bits - 1)
        x = xp.bitwise_xor(x, half) - half
    return xp.astype(x, dtype)


def _to_e8m0(xp: Any, x: Any, saturate: bool, round_mode: str) -> Any:
    """The exponent of x, a float32, as a byte: 255 is NaN, 0 the smallest power of two (or zero)."""
    bits = xp.bitwise_and(xp.bitcast(x, np.int32), 0x7FFFFFFF)  # the type has no sign
    carry = {"up": 0x7FFFFF, "nearest": 0x400000, "down": 0}[round_mode]
    code = xp.right_shift(bits + carry, 23) if carry else xp.right_shift(bits, 23)
    out_of_range = xp.logical_or(bits >= 0x7F800000, xp.logical_or(bits < 0x400000, code > 254))
    code = xp.minimum(code, 254) if saturate else xp.where(out_of_range, 255, code)
    code = xp.where(xp.isnan(x), 255, code)
    return xp.bitcast(xp.astype(code, np.uint8), E8M0)


# Strings, on the host


def _from_strings(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    try:
        values = [_number(text, is_float(dtype)) for text in x.reshape(-1)]
    except ValueError as cause:
        raise InvalidInput(
            f"a string is no number: {cause}.", fix=f"give only numbers to a Cast to {dtype}."
        ) from cause
    exact = np.float64 if is_float(dtype) else object
    return np.asarray(values, exact).astype(dtype).reshape(x.shape)


def _number(text: str, is_float: bool) -> float | int:
    if is_float:
        return float(text)
    try:
        return int(text)
    except ValueError:
        return int(float(text))


def _to_strings(x: np.ndarray) -> np.ndarray:
    """The shortest decimal text that reads back as the same number."""
    result = np.empty(x.shape, object)
    wide = x.astype(np.float32) if x.dtype.isbuiltin == OF_ML_DTYPES else x
    result.reshape(-1)[:] = [_text(value) for value in wide.reshape(-1)]
    return result


def _text(value: Any) -> str:
    if isinstance(value, np.floating) and not np.isfinite(value):
        return "NaN" if np.isnan(value) else "INF" if value > 0 else "-INF"
    return str(int(value)) if isinstance(value, np.bool_) else str(value)


# Bits


@op("BitCast", since=26)
def bit_cast(xp, x, *, to):
    source, dtype = xp.dtype_of(x), onnx_dtype(to)
    if width(source) != width(dtype):
        raise InvalidInput(f"a BitCast from {source} to {dtype} changes the width of elements.")
    return x if source == dtype else xp.bitcast(x, dtype)


def width(dtype: np.dtype) -> int:
    """Bits of an element."""
    if not is_narrow(dtype):
        return 8 * dtype.itemsize
    return ml_dtypes.finfo(dtype).bits if is_float(dtype) else ml_dtypes.iinfo(dtype).bits
