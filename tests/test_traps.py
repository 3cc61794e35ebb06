"""A hundred small cases where runtimes are known to go wrong, worked out by hand from the specification.

Each row of `CASES` is (what it shows, operator, inputs, attributes, expected outputs); `None` skips an input, or an
output that is not looked at. The opset is 22 unless the attributes name another under `opset`.
"""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from conftest import parse
from nodes import run_node

import ep

INF, NAN = math.inf, math.nan
MAX, MIN = np.iinfo(np.int64).max, np.iinfo(np.int64).min
Row = tuple[str, str, list[Any], dict[str, Any], list[Any]]


def f(*values: Any) -> np.ndarray:
    return np.array(values, np.float32)


def i(*values: Any) -> np.ndarray:
    return np.array(values, np.int64)


def s(*values: Any) -> np.ndarray:
    return np.array(values, object)


def typed(dtype: Any, *values: Any) -> np.ndarray:
    return np.array(values).astype(dtype)


def u8(*values: Any) -> np.ndarray:
    return np.array(values, np.uint8)


def i8(*values: Any) -> np.ndarray:
    return np.array(values, np.int8)


def i32(*values: Any) -> np.ndarray:
    return np.array(values, np.int32)


def row(*values: Any) -> np.ndarray:
    """A signal [1, 1, n]."""
    return f([values])


SQUARE = f([1, 2], [3, 4])

POOLING: list[Row] = [
    ("ceil_mode keeps the last window", "MaxPool", [row(1, 2, 3, 4, 5)],
     {"kernel_shape": [2], "strides": [2], "ceil_mode": 1}, [row(2, 4, 5)]),
    ("ceil_mode drops a window that would start in the padding", "MaxPool", [row(1, 2, 3)],
     {"kernel_shape": [1], "strides": [2], "pads": [0, 1], "ceil_mode": 1}, [row(1, 3)]),
    ("what lies outside does not count", "AveragePool", [row(1, 2, 3, 4, 5)],
     {"kernel_shape": [2], "strides": [2], "ceil_mode": 1}, [row(1.5, 3.5, 5)]),
    ("padding counts, what lies beyond it does not", "AveragePool", [row(1, 2, 3, 4)],
     {"kernel_shape": [3], "strides": [2], "pads": [1, 1], "ceil_mode": 1, "count_include_pad": 1}, [row(1, 3, 2)]),
    ("padding does not count", "AveragePool", [row(2, 4)], {"kernel_shape": [2], "pads": [1, 1]}, [row(2, 3, 4)]),
    ("padding is no zero for a maximum", "MaxPool", [row(-5, -3)], {"kernel_shape": [2], "pads": [1, 1]},
     [row(-5, -3, -3)]),
    ("dilated windows", "MaxPool", [row(1, 5, 2, 4, 3, 0)], {"kernel_shape": [2], "dilations": [2]}, [row(2, 5, 3, 4)]),
    ("SAME_UPPER pads the end", "MaxPool", [row(1, 2, 3, 4)], {"kernel_shape": [2], "auto_pad": "SAME_UPPER"},
     [row(2, 3, 4, 4)]),
    ("SAME_LOWER pads the beginning", "MaxPool", [row(1, 2, 3, 4)], {"kernel_shape": [2], "auto_pad": "SAME_LOWER"},
     [row(1, 2, 3, 4)]),
    ("the first of equal maxima", "MaxPool", [row(5, 5, 1)], {"kernel_shape": [2]}, [row(5, 5), i([[0, 1]])]),
    ("indices by columns", "MaxPool", [f([[[1, 4], [3, 2]]])], {"kernel_shape": [2, 2], "storage_order": 1},
     [f([[[4]]]), i([[[2]]])]),
    ("unsigned bytes", "MaxPool", [u8([[200, 100, 50]])], {"kernel_shape": [2]}, [u8([[200, 100]])]),
    ("the norm of a window", "LpPool", [row(3, 4, 0)], {"kernel_shape": [2], "p": 2}, [row(5, 4)]),
    ("back to where the maxima were", "MaxUnpool", [f([[[5]]]), i([[[3]]])],
     {"kernel_shape": [2, 2], "strides": [2, 2]},
     [f([[[0, 0], [0, 5]]])]),
    ("even kernels, SAME_LOWER", "Conv", [row(1, 2, 3), row(1, 1)], {"auto_pad": "SAME_LOWER"}, [row(1, 3, 5)]),
    ("even kernels, SAME_UPPER", "Conv", [row(1, 2, 3), row(1, 1)], {"auto_pad": "SAME_UPPER"}, [row(3, 5, 3)]),
    ("uneven padding of dilated kernels", "Conv", [row(1, 2, 3), row(1, 1)], {"dilations": [2], "pads": [0, 2]},
     [row(4, 2, 3)]),
    ("groups", "Conv", [f([[1, 2], [3, 4]]), f([[10]], [[100]])], {"group": 2}, [f([[10, 20], [300, 400]])]),
    ("zeros at the end", "ConvTranspose", [row(1, 2), row(1, 1)], {"strides": [2], "output_padding": [1]},
     [row(1, 1, 2, 2, 0)]),
    ("a given size cuts the beginning", "ConvTranspose", [row(1, 2), row(1, 1)], {"strides": [2], "output_shape": [3]},
     [row(1, 2, 2)]),
    ("a given size with SAME_UPPER cuts the end", "ConvTranspose", [row(1, 2), row(1, 1)],
     {"strides": [2], "output_shape": [3], "auto_pad": "SAME_UPPER"}, [row(1, 1, 2)]),
    ("dilated kernels spread", "ConvTranspose", [row(1, 2), row(1, 10)], {"dilations": [2]}, [row(1, 2, 10, 20)]),
]  # fmt: skip

PADDING: list[Row] = [
    ("reflection does not repeat the border", "Pad", [f(1, 2, 3), i(2, 2)],
     {"mode": "reflect"}, [f(3, 2, 1, 2, 3, 2, 1)]),
    ("reflection goes on beyond the axis", "Pad", [f(1, 2, 3), i(3, 3)], {"mode": "reflect"},
     [f(2, 3, 2, 1, 2, 3, 2, 1, 2)]),
    ("wrapping goes on beyond the axis", "Pad", [f(1, 2, 3), i(4, 1)], {"mode": "wrap"}, [f(3, 1, 2, 3, 1, 2, 3, 1)]),
    ("negative padding cuts", "Pad", [f(1, 2, 3, 4), i(-1, 1), f(9).reshape(())], {}, [f(2, 3, 4, 9)]),
    ("only the axes that are named", "Pad", [SQUARE, i(1, 0), None, i(-1)], {}, [f([0, 1, 2], [0, 3, 4])]),
    ("the border goes on", "Pad", [f(1, 2), i(2, 0)], {"mode": "edge"}, [f(1, 1, 1, 2)]),
]  # fmt: skip


def image(*values: Any) -> np.ndarray:
    return f([[values]])


def sized(*values: int) -> list[Any]:
    return [None, None, i(1, 1, 1, *values)]


RESIZE: list[Row] = [
    ("asymmetric, floor", "Resize", [image(1, 2), None, f(1, 1, 1, 2)],
     {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}, [image(1, 1, 2, 2)]),
    ("halves go down by default", "Resize", [image(1, 2, 3, 4), *sized(2)], {}, [image(1, 3)]),
    ("halves go up on request", "Resize", [image(1, 2, 3, 4), *sized(2)], {"nearest_mode": "round_prefer_ceil"},
     [image(2, 4)]),
    ("corners meet corners", "Resize", [image(0, 3), *sized(4)],
     {"mode": "linear", "coordinate_transformation_mode": "align_corners"}, [image(0, 1, 2, 3)]),
    ("half pixels stop at the border", "Resize", [image(0, 4), *sized(4)], {"mode": "linear"}, [image(0, 1, 3, 4)]),
    ("asymmetric lines", "Resize", [image(0, 4), *sized(4)],
     {"mode": "linear", "coordinate_transformation_mode": "asymmetric"}, [image(0, 2, 4, 4)]),
    ("one pixel is the middle", "Resize", [image(1, 2, 3, 4), *sized(1)], {"mode": "linear"}, [image(2.5)]),
    ("one pixel is the first for PyTorch", "Resize", [image(1, 2, 3, 4), *sized(1)],
     {"mode": "linear", "coordinate_transformation_mode": "pytorch_half_pixel"}, [image(1)]),
    ("a crop that leaves the image", "Resize", [image(1, 2, 3, 4), f(0, 0, 0, 0, 1, 1, 1, 2), None, i(1, 1, 1, 3)],
     {"mode": "linear", "coordinate_transformation_mode": "tf_crop_and_resize", "extrapolation_value": 9.0},
     [image(1, 4, 9)]),
    ("shrinking blurs, and the border goes on", "Resize", [image(0, 0, 7, 7), *sized(2)],
     {"mode": "linear", "antialias": 1}, [image(0.875, 6.125)]),
    ("not larger than asked", "Resize", [image(1, 2), None, None, i(4, 4)],
     {"axes": [2, 3], "keep_aspect_ratio_policy": "not_larger"}, [f([[[1, 1, 2, 2], [1, 1, 2, 2]]])]),
    ("one axis", "Resize", [image(1, 2), None, f(2)], {"axes": [3]}, [image(1, 1, 2, 2)]),
    ("cubic weights at quarters", "Resize", [image(0, 0, 64, 0, 0), None, f(1, 1, 1, 2)],
     {"mode": "cubic", "cubic_coeff_a": -0.5, "exclude_outside": 0},
     [image(0, -1.5, -4.5, 14.5, 55.5, 55.5, 14.5, -4.5, -1.5, 0)]),
]  # fmt: skip

INDEXING: list[Row] = [
    ("negative indices", "Gather", [f(10, 20, 30), i(-1, 0)], {}, [f(30, 10)]),
    ("a scalar index drops the axis", "Gather", [SQUARE, np.array(1)], {"axis": -1}, [f(2, 4)]),
    ("batches of tuples", "GatherND", [SQUARE, i([1], [0])], {"batch_dims": 1}, [f(2, 3)]),
    ("negative tuples", "GatherND", [SQUARE, i([-1, -2])], {}, [f(3)]),
    ("negative elements", "GatherElements", [SQUARE, i([0, -1])], {"axis": -1}, [f([1, 2])]),
    ("from the end to the beginning", "Slice", [f(1, 2, 3, 4), i(MAX), i(MIN), i(0), i(-1)], {}, [f(4, 3, 2, 1)]),
    ("backwards by two", "Slice", [f(1, 2, 3, 4), i(-1), i(-5), i(0), i(-2)], {}, [f(4, 2)]),
    ("beyond the end", "Slice", [f(1, 2, 3, 4), i(1), i(MAX)], {}, [f(2, 3, 4)]),
    ("an end before the start", "Slice", [f(1, 2, 3, 4), i(3), i(1)], {}, [f()]),
    ("a start before the beginning", "Slice", [f(1, 2, 3, 4), i(-9), i(9), i(-1), i(3)], {}, [f(1, 4)]),
    ("backwards to INT64_MAX is nothing", "Slice", [f(1, 2, 3), i(-1), i(MAX), i(0), i(-1)], {}, [f()]),
    ("sums at equal indices", "ScatterElements", [f(1, 1, 1), i(1, 1), f(2, 3)], {"reduction": "add"}, [f(1, 6, 1)]),
    ("the largest at equal indices", "ScatterElements", [f(1, 1, 1), i(0, 0), f(5, 2)],
     {"reduction": "max"}, [f(5, 1, 1)]),
    ("the smallest at a negative index", "ScatterND", [f(5, 5, 5), i([-1]), f(2)], {"reduction": "min"}, [f(5, 5, 2)]),
    ("products of 64-bit integers", "ScatterND", [i(2, 3), i([0], [0]), i(5, 7)], {"reduction": "mul"}, [i(70, 3)]),
    ("indices count from the end", "OneHot", [i(-1, 3), i(3), f(0, 1)], {}, [f([0, 0, 1], [0, 0, 0])]),
    ("the new axis first", "OneHot", [i(0, 1), i(3), f(0, 1)], {"axis": 0}, [f([1, 0], [0, 1], [0, 0])]),
    ("a condition shorter than the axis", "Compress", [f(1, 2, 3), np.array([False, True])], {"axis": 0}, [f(2)]),
    ("below the diagonal", "Trilu", [f([1, 2], [3, 4], [5, 6]), np.array(-1)],
     {"upper": 1}, [f([1, 2], [3, 4], [0, 6])]),
    ("each its own length", "ReverseSequence", [f([1, 2], [3, 4], [5, 6]), i(2, 1)], {"time_axis": 0, "batch_axis": 1},
     [f([3, 2], [1, 4], [5, 6])]),
    ("depth first", "DepthToSpace", [np.arange(8, dtype=np.float32).reshape(1, 8, 1, 1)],
     {"blocksize": 2, "mode": "DCR"},
     [f([[[0, 2], [4, 6]], [[1, 3], [5, 7]]])]),
    ("columns and rows first", "DepthToSpace", [np.arange(8, dtype=np.float32).reshape(1, 8, 1, 1)],
     {"blocksize": 2, "mode": "CRD"}, [f([[[0, 1], [2, 3]], [[4, 5], [6, 7]]])]),
    ("sizes of nothing are kept", "Reshape", [np.zeros((0, 3), np.float32), i(3, 0)], {"allowzero": 1},
     [np.zeros((3, 0), np.float32)]),
    ("parts that do not divide the axis", "Split", [f(1, 2, 3, 4, 5)], {"num_outputs": 3}, [f(1, 2), f(3, 4), f(5)]),
]  # fmt: skip

INTEGERS: list[Row] = [
    ("quotients go to zero", "Div", [i32(-7, 7), i32(2, -2)], {}, [i32(-3, -3)]),
    ("unsigned quotients", "Div", [u8(200), u8(7)], {}, [u8(28)]),
    ("the sign of the divisor", "Mod", [i32(-7, 7, -7), i32(3, -3, -3)], {}, [i32(2, -2, -1)]),
    ("the sign of the dividend", "Mod", [i32(-7, 7, -7), i32(3, -3, -3)], {"fmod": 1}, [i32(-1, 1, -1)]),
    ("remainders of floats", "Mod", [f(-5.5, 5.5), f(2, -2)], {"fmod": 1}, [f(-1.5, 1.5)]),
    ("unsigned remainders", "Mod", [u8(200), u8(7)], {}, [u8(4)]),
    ("negative bases", "Pow", [i32(-2, -2), i32(3, 2)], {}, [i32(-8, 4)]),
    ("the dtype of the base", "Pow", [i32(4, 9), f(0.5, 0.5)], {}, [i32(2, 3)]),
    ("negative exponents", "Pow", [f(2, 4), i32(-1, -2)], {}, [f(0.5, 0.0625)]),
    ("sums wrap", "Add", [u8(250), u8(10)], {"opset": 14}, [u8(4)]),
    ("differences wrap", "Sub", [u8(1), u8(2)], {"opset": 14}, [u8(255)]),
    ("products wrap", "Mul", [i8(100), i8(2)], {"opset": 14}, [i8(-56)]),
    ("the least has no opposite", "Neg", [i8(-128, 5)], {}, [i8(-128, -5)]),
    ("the last bit", "BitShift", [u8(255, 1), u8(7, 0)], {"direction": "RIGHT"}, [u8(1, 1)]),
    ("digits are cut off", "Cast", [f(-1.9, 1.9)], {"to": 6}, [i32(-1, 1)]),
    ("only zeros are false", "Cast", [f(0, -0.0, NAN, 0.1)], {"to": 9}, [np.array([False, False, True, True])]),
    ("narrow integers wrap", "Cast", [i32(257, -1)], {"to": 2}, [u8(1, 255)]),
    ("eight-bit floats saturate", "Cast", [f(1000, -1000)], {"to": 17}, [typed(ml_dtypes.float8_e4m3fn, 448, -448)]),
    ("halves go to the even neighbour", "Round", [f(0.5, 1.5, 2.5, -1.5)], {}, [f(0, 2, 2, -2)]),
]  # fmt: skip

ORDER: list[Row] = [
    ("the first of equals", "TopK", [f(2, 1, 2, 0), i(2)], {}, [f(2, 2), i(0, 2)]),
    ("the smallest", "TopK", [f(2, 1, 2, 0), i(3)], {"largest": 0}, [f(0, 1, 2), i(3, 1, 0)]),
    ("unsigned order", "TopK", [u8(0, 255, 128), i(2)], {}, [u8(255, 128), i(1, 2)]),
    ("signed order of the ends", "TopK", [i8(-128, 127, 0), i(3)], {}, [i8(127, 0, -128), i(1, 2, 0)]),
    ("columns", "TopK", [f([1, 4], [3, 2]), i(1)], {"axis": -2}, [f([3, 4]), i([1, 0])]),
    ("the first largest", "ArgMax", [f(3, 1, 3)], {"axis": 0, "keepdims": 0}, [np.array(0)]),
    ("the last largest", "ArgMax", [f(3, 1, 3)], {"axis": 0, "keepdims": 0, "select_last_index": 1}, [np.array(2)]),
    ("the smallest byte", "ArgMin", [u8(255, 0, 0)], {"axis": 0, "keepdims": 1}, [i(1)]),
    ("sorted, with what they came from", "Unique", [f(2, 1, 1, 3)],
     {}, [f(1, 2, 3), i(1, 0, 3), i(1, 0, 0, 2), i(2, 1, 1)]),
    ("in the order of the first", "Unique", [f(2, 1, 1, 3)],
     {"sorted": 0}, [f(2, 1, 3), i(0, 1, 3), i(0, 1, 1, 2), i(1, 2, 1)]),
    ("whole rows", "Unique", [f([1, 0], [1, 0], [0, 1])],
     {"axis": 0}, [f([0, 1], [1, 0]), i(2, 0), i(1, 1, 0), i(1, 2)]),
]  # fmt: skip

EMPTY = np.zeros((2, 0), np.float32)
SUMS: list[Row] = [
    ("the sum of nothing", "ReduceSum", [EMPTY, i(1)], {"keepdims": 0}, [f(0, 0)]),
    ("the product of nothing", "ReduceProd", [EMPTY, i(1)], {"keepdims": 0}, [f(1, 1)]),
    ("the largest of nothing", "ReduceMax", [EMPTY, i(1)], {"keepdims": 0}, [f(-INF, -INF)]),
    ("the smallest of nothing", "ReduceMin", [EMPTY, i(-1)], {"keepdims": 1}, [f([INF], [INF])]),
    ("the logarithm of nothing", "ReduceLogSum", [EMPTY, i(1)], {"keepdims": 0}, [f(-INF, -INF)]),
    ("no axes, no sum", "ReduceSum", [SQUARE], {"noop_with_empty_axes": 1}, [SQUARE]),
    ("no axes, all axes", "ReduceSum", [SQUARE], {"keepdims": 0}, [f(10).reshape(())]),
    ("the largest of small integers", "ReduceMax", [i8([-5, -3]), i(1)], {"keepdims": 0}, [i8(-3)]),
    ("large exponents", "ReduceLogSumExp", [f([1000, 1000]), i(1)], {"keepdims": 0}, [f(1000 + math.log(2))]),
    ("without the element itself", "CumSum", [f(1, 2, 3), np.array(0)], {"exclusive": 1}, [f(0, 1, 3)]),
    ("from the end", "CumSum", [f(1, 2, 3), np.array(0)], {"reverse": 1}, [f(6, 5, 3)]),
    ("both", "CumSum", [f(1, 2, 3), np.array(-1)], {"exclusive": 1, "reverse": 1}, [f(5, 3, 0)]),
    ("a trace", "Einsum", [SQUARE], {"equation": "ii->"}, [f(5).reshape(())]),
    ("a diagonal", "Einsum", [SQUARE], {"equation": "ii->i"}, [f(1, 4)]),
    ("letters in order", "Einsum", [SQUARE], {"equation": "ba"}, [f([1, 3], [2, 4])]),
    ("scalars", "Einsum", [f(2).reshape(()), f(3).reshape(())], {"equation": ",->"}, [f(6).reshape(())]),
    ("the rest in front", "Einsum", [f([[1, 2]])], {"equation": "...ij->...ji"}, [f([[1], [2]])]),
    ("infinite logits", "Softmax", [f(-INF, 0, 0)], {}, [f(0, 0.5, 0.5)]),
    ("rows before opset 13", "Softmax", [f([[0, 0], [0, 0]])],
     {"axis": 1, "opset": 11}, [f([[0.25, 0.25], [0.25, 0.25]])]),
]  # fmt: skip

QUANTIZATION: list[Row] = [
    ("halves go to the even neighbour", "QuantizeLinear", [f(0.5, 1.5, 2.5, -1.5), f(1).reshape(()), i8(0).reshape(())],
     {},
     [i8(0, 2, 2, -2)]),
    ("bytes saturate", "QuantizeLinear", [f(300, -5, 7), f(1).reshape(()), u8(0).reshape(())], {}, [u8(255, 0, 7)]),
    ("the zero point comes after rounding", "QuantizeLinear",
     [f(0.5, 1.5, -200), f(1).reshape(()), u8(127).reshape(())], {},
     [u8(127, 129, 0)]),
    ("a scale for each row", "QuantizeLinear", [f([2, 2], [4, 4]), f(1, 2), i8(0, 1)],
     {"axis": 0}, [i8([2, 2], [3, 3])]),
    ("four bits saturate", "QuantizeLinear", [f(-9, 7.6, 3), f(1).reshape(()), typed(ml_dtypes.int4, 0).reshape(())],
     {},
     [typed(ml_dtypes.int4, -8, 7, 3)]),
    ("the zero point is subtracted as an integer", "DequantizeLinear",
     [i8(-128, 127), f(0.5).reshape(()), i8(-128).reshape(())], {},
     [f(0, 127.5)]),
    ("blocks", "DequantizeLinear", [i8(1, 2, 3, 4), f(1, 10)], {"axis": 0, "block_size": 2}, [f(1, 2, 30, 40)]),
    ("the range contains zero", "DynamicQuantizeLinear", [f(0, 255, 51)],
     {}, [u8(0, 255, 51), f(1).reshape(()), u8(0).reshape(())]),
    ("its zero point is rounded to even", "DynamicQuantizeLinear", [f(-0.5, 0, 254.5)], {},
     [u8(0, 0, 254), f(1).reshape(()), u8(0).reshape(())]),
    ("products of what differs from zero", "MatMulInteger", [u8([1, 2]), i8([3], [4]), u8(1).reshape(())],
     {}, [i32([4])]),
    ("large products are exact", "MatMulInteger", [u8([255, 255, 255]), i8([127], [127], [-128])], {}, [i32([32130])]),
]  # fmt: skip


def heads(*values: Any) -> np.ndarray:
    """[1, heads, length, 1]."""
    return f(values)[..., None]


ATTENTION: list[Row] = [
    ("heads share keys in groups", "Attention", [heads([0], [0], [0], [0]), heads([1], [1]), heads([10], [20])],
     {"opset": 23}, [heads([10], [10], [20], [20])]),
    ("causal: no look ahead", "Attention", [heads([0, 0]), heads([1, 1]), heads([2, 4])], {"is_causal": 1, "opset": 23},
     [heads([2, 3])]),
    ("causal: all of the past", "Attention", [heads([0]), heads([1]), heads([4]), None, heads([1]), heads([2])],
     {"is_causal": 1, "opset": 23}, [heads([3])]),
    ("true means seen", "Attention", [heads([0]), heads([1, 1, 1]), heads([2, 4, 90]), np.array([[True, True, False]])],
     {"opset": 23}, [heads([3])]),
    ("the cap comes before the mask", "Attention", [heads([1]), heads([1, 1]), heads([2, 4]), f([0, -INF])],
     {"softcap": 1.0, "opset": 23}, [heads([2])]),
    ("the cap bends the logits", "Attention", [heads([2]), heads([1, 0]), heads([1, 0])],
     {"softcap": 1.0, "scale": 1.0, "opset": 23},
     [heads([1 / (1 + math.exp(-math.tanh(2)))])]),
]  # fmt: skip


def steps(*values: float) -> np.ndarray:
    """A sequence [length, 1, 1]."""
    return f(*values).reshape(-1, 1, 1)


ONE = f([[1]])
RELU = {"hidden_size": 1, "activations": ["Relu"]}
RECURRENCE: list[Row] = [
    ("forwards", "RNN", [steps(1, 2, 3), ONE, ONE], RELU, [steps(1, 3, 6).reshape(3, 1, 1, 1), f([[6]])]),
    ("backwards", "RNN", [steps(1, 2, 3), ONE, ONE], RELU | {"direction": "reverse"},
     [steps(6, 5, 3).reshape(3, 1, 1, 1), f([[6]])]),
    ("after its end a sequence is zero", "RNN", [steps(1, 2, 3), ONE, ONE, None, i32(2)], RELU,
     [steps(1, 3, 0).reshape(3, 1, 1, 1), f([[3]])]),
    ("backwards from its own end", "RNN", [steps(1, 2, 3), ONE, ONE, None, i32(2)], RELU | {"direction": "reverse"},
     [steps(3, 2, 0).reshape(3, 1, 1, 1), f([[3]])]),
    ("clipped before the activation", "RNN", [steps(1, 5), ONE, ONE], RELU | {"clip": 2.0},
     [steps(1, 2).reshape(2, 1, 1, 1), f([[2]])]),
    ("gates: input, output, forget, cell", "LSTM",
     [steps(0), np.zeros((1, 4, 1), np.float32), np.zeros((1, 4, 1), np.float32), f([99, 99, -99, 0.5, 0, 0, 0, 0]),
      None, None, f([[7]])],
     {"hidden_size": 1}, [None, f([[math.tanh(math.tanh(0.5))]]), f([[math.tanh(0.5)]])]),
    ("a closed update gate keeps nothing", "GRU",
     [steps(0), np.zeros((1, 3, 1), np.float32), np.zeros((1, 3, 1), np.float32), f([-99, 0, 0.5, 0, 0, 0])],
     {"hidden_size": 1}, [None, f([[math.tanh(0.5)]])]),
]  # fmt: skip


def grid(*xs: float) -> np.ndarray:
    """Points (x, 0)."""
    return f([[[x, 0] for x in xs]])


LINE = image(1, 2, 3, 4)
BOXES = f([[0, 0, 1, 1], [0, 0.1, 1, 1.1], [2, 2, 1, 1]])  # the last one is written from its far corner
NMS = [BOXES, f([[0.9, 0.8, 0.7]]), i(3), f(0.5), f(0.0)]
IMAGES: list[Row] = [
    ("corners", "GridSample", [LINE, grid(-1, 0, 1)], {"align_corners": 1}, [image(1, 2.5, 4)]),
    ("zeros beyond the border", "GridSample", [LINE, grid(1.5)], {"align_corners": 1}, [image(1)]),
    ("the border goes on", "GridSample", [LINE, grid(1.5)], {"align_corners": 1, "padding_mode": "border"}, [image(4)]),
    ("mirrored at the corner", "GridSample", [LINE, grid(1.5)],
     {"align_corners": 1, "padding_mode": "reflection"}, [image(3.25)]),
    ("pixels are areas", "GridSample", [LINE, grid(-0.75, 0)], {}, [image(1, 2.5)]),
    ("overlaps go, corners may be swapped", "NonMaxSuppression", NMS, {}, [i([0, 0, 0], [0, 0, 2])]),
    ("as many as asked for", "NonMaxSuppression", [*NMS[:2], i(1), *NMS[3:]], {}, [i([0, 0, 0])]),
    ("none without a number", "NonMaxSuppression", NMS[:2], {}, [np.zeros((0, 3), np.int64)]),
    ("scores must exceed the threshold", "NonMaxSuppression", [*NMS[:4], f(0.7)], {}, [i([0, 0, 0])]),
    ("half of a real spectrum", "DFT", [f(1, 2, 3, 4).reshape(1, 4, 1), None, np.array(1)], {"onesided": 1},
     [f([[10, 0], [-2, 2], [-2, 0]])]),
    ("there and back", "DFT", [f([[10, 0], [-2, 2], [-2, 0], [-2, -2]]), None, np.array(1)], {"inverse": 1},
     [f([[1, 0], [2, 0], [3, 0], [4, 0]])]),
]  # fmt: skip

TEXT: list[Row] = [
    ("each with each", "StringConcat", [s(["a"], ["b"]), s("x", "y")], {}, [s(["ax", "ay"], ["bx", "by"])]),
    ("runs of blanks", "StringSplit", [s(" a  b ", "")], {}, [s(["a", "b"], ["", ""]), i(2, 0)]),
    ("every comma", "StringSplit", [s("a,,b")], {"delimiter": ","}, [s(["a", "", "b"]), i(3)]),
    ("the rest stays whole", "StringSplit", [s("a b c")], {"maxsplit": 1}, [s(["a", "b c"]), i(2)]),
    ("the whole string", "RegexFullMatch", [s("abc", "abcd")], {"pattern": "a.c"}, [np.array([True, False])]),
    ("stop words of any case", "StringNormalizer", [s("The", "cat")],
     {"stopwords": ["the"], "is_case_sensitive": 0, "case_change_action": "UPPER"}, [s("CAT")]),
]  # fmt: skip

CASES = [
    *POOLING, *PADDING, *RESIZE, *INDEXING, *INTEGERS, *ORDER, *SUMS, *QUANTIZATION, *ATTENTION, *RECURRENCE,
    *IMAGES, *TEXT,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=[f"{op}-{what.replace(' ', '_')}" for what, op, *_ in CASES])
def test_trap(device: str, case: Row) -> None:
    _, op, inputs, attributes, expected = case
    attributes = dict(attributes)
    opset = attributes.pop("opset", 22)
    got = (
        run_node(device, op, *inputs, opset=opset, outputs=max(len(expected), 2), **attributes)
        if len(expected) > 1
        else [run_node(device, op, *inputs, opset=opset, **attributes)]
    )
    for g, e in zip(got, expected, strict=True):
        if e is None:
            continue
        assert g.dtype == e.dtype and g.shape == e.shape, f"{g.dtype}{g.shape}, not {e.dtype}{e.shape}"
        if e.dtype == np.float32:
            np.testing.assert_allclose(g, e, rtol=1e-5, atol=1e-5)
        else:
            assert (g == e).all(), f"{g} is not {e}"


ONES = np.ones((1, 2, 4, 4), np.float32)
WEIGHTS = [np.ones((1, 8, 3), np.float32), np.ones((1, 8, 2), np.float32)]

# Nodes that contradict themselves, of which some library makes something nevertheless.
REFUSED: list[tuple[str, list[Any], dict[str, Any], int]] = [
    ("Reshape", [f(1, 2, 3, 4, 5, 6), i(-2, 3)], {}, 1),
    ("Transpose", [SQUARE], {"perm": [-1, 0]}, 1),
    ("Range", [np.array(0), np.array(MAX), np.array(1)], {}, 1),
    ("OneHot", [i(1), i(-1), f(0, 1)], {}, 1),
    ("Split", [f(1, 2, 3, 4, 5)], {"num_outputs": 3}, 2),
    ("GatherND", [f([1], [2], [3]), i([0])], {"batch_dims": 1}, 1),
    ("Conv", [ONES, ONES[:, :, :2, :2]], {"pads": [-1, 0, 0, 0]}, 1),
    ("Conv", [ONES, ONES[:, :, :0, :2]], {}, 1),
    ("ConvTranspose", [ONES, ONES[:, :, :2, :2].swapaxes(0, 1)], {"output_padding": [1, 0]}, 1),
    ("Resize", [ONES, None, f(1, 1, 2, 2), i(1, 2, 8, 8)], {}, 1),
    ("DFT", [ONES[:1, 0, :, :3], None, np.array(1)], {}, 1),
    ("RotaryEmbedding", [ONES[..., :3], ONES[:, 0, :, :1], ONES[:, 0, :, :1]], {}, 1),
    ("BitShift", [u8(1), u8(1)], {"direction": "UP"}, 1),
    ("LSTM", [ONES[0, :, :1, :3], *WEIGHTS], {"hidden_size": 2, "direction": "bidirectional"}, 1),
    ("LSTM", [ONES[0, :, :1, :3], *WEIGHTS], {"hidden_size": 3}, 1),
    ("Gelu", [SQUARE], {"approximate": "erf"}, 1),
    ("RoiAlign", [ONES, f([0, 0, 2, 2]), i(0)], {"coordinate_transformation_mode": "half"}, 1),
    ("TensorScatter", [ONES, ONES[:, :, :2], i(1)], {"mode": "ring"}, 1),
]


@pytest.mark.parametrize("case", REFUSED, ids=[f"{op}-{n}" for n, (op, *_) in enumerate(REFUSED)])
def test_a_contradiction_is_refused(device: str, case: Any) -> None:
    op, inputs, attributes, outputs = case
    with pytest.raises(ep.EpError, match=op):
        run_node(device, op, *inputs, opset=24, outputs=outputs, **attributes)


def test_writes_stay_inside(accelerator: str) -> None:
    """An index that is computed is not seen before the run on a device; nothing behind the cache is written, though."""
    nodes = "j = Neg(i)\n y = TensorScatter(c, u, j)"
    text = f"g (float[1, 3, 2] c, float[1, 2, 2] u, int64[1] i) => (float[1, 3, 2] y) {{ {nodes} }}"
    session = ep.load(parse(text, '"": 24'), accelerator)
    for index in (MAX, MIN, 5, 1 << 32):
        feeds = {"c": np.zeros((1, 3, 2), np.float32), "u": np.ones((1, 2, 2), np.float32), "i": i(index)}
        (got,) = session.run(None, feeds)
        assert got.sum() in (0, 4)


def test_there_are_enough() -> None:
    assert len(CASES) >= 100 and len({(what, op) for what, op, *_ in CASES}) == len(CASES)
