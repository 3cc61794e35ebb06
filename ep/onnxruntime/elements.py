"""Which element types are there? ONNX's number, the name within `tensor(…)`, and NumPy's dtype of each."""

from __future__ import annotations

import operator
from typing import Any

import ml_dtypes
import numpy as np

NAMES: dict[int, str] = dict(
    enumerate(
        "float uint8 int8 uint16 int16 int32 int64 string bool float16 double uint32 uint64 complex64 complex128 "
        "bfloat16 float8e4m3fn float8e4m3fnuz float8e5m2 float8e5m2fnuz uint4 int4 float4e2m1 float8e8m0 uint2 "
        "int2".split(),
        start=1,
    )
)
_EXTENDED = {
    **{f"float8{kind.replace('_', '')}": f"float8_{kind}" for kind in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz")},
    **{"bfloat16": "bfloat16", "float8e8m0": "float8_e8m0fnu", "float4e2m1": "float4_e2m1fn"},
    **{f"{sign}int{bits}": f"{sign}int{bits}" for sign in ("", "u") for bits in (4, 2)},
}
STRING = 8


def _dtype(name: str) -> np.dtype[Any]:
    if name in _EXTENDED:
        return np.dtype(getattr(ml_dtypes, _EXTENDED[name]))
    return np.dtype({"string": "O", "float": "float32", "double": "float64"}.get(name, name))


DTYPES: dict[int, np.dtype[Any]] = {number: _dtype(name) for number, name in NAMES.items()}
NUMBERS: dict[np.dtype[Any], int] = {dtype: number for number, dtype in DTYPES.items()}


def number_of(dtype: np.dtype[Any]) -> int:
    """ONNX's number of a dtype; strings of NumPy's own kinds count as strings."""
    if dtype.kind in "OUS":
        return STRING
    found = NUMBERS.get(dtype if dtype.isnative else dtype.newbyteorder("="))
    if found is None:
        raise RuntimeError(f"Numpy_type {dtype.num} can't be converted to MLDataType.")
    return found


def tensor_type(dtype: np.dtype[Any]) -> str:
    """`tensor(float)` for float32."""
    return f"tensor({NAMES[number_of(dtype)]})"


def element_dtype(element_type: Any) -> np.dtype[Any]:
    """The dtype that an `element_type` argument means: a NumPy dtype, class or name, or ONNX's number.

    Raises:
        RuntimeError: it is none of these, or strings.
    """
    try:
        dtype = DTYPES[operator.index(element_type)]
    except TypeError:
        dtype = np.dtype(element_type)
    except KeyError:
        raise RuntimeError(f"ONNX has no element type {element_type}.") from None
    if dtype.kind in "OUS":
        raise RuntimeError("Creation of OrtValues is currently only supported from non-string numpy arrays")
    number_of(dtype)
    return dtype
