"""Linear models of ai.onnx.ml and what prepares their inputs: Scaler, Normalizer, Imputer, Binarizer."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ep.errors import InvalidInput, InvalidModel
from ep.ops.ml_scores import class_labels, labels_at, one_vote_scores, rows_of, string_labels, transformed
from ep.registry import op

ML = "ai.onnx.ml"


@op("LinearClassifier", domain=ML, host_only=string_labels)
def linear_classifier(
    xp, x, *, classlabels_ints=None, classlabels_strings=None, coefficients, intercepts=None, multi_class=0,
    post_transform="NONE",
):  # fmt: skip
    labels = class_labels(classlabels_ints, classlabels_strings)
    scores = _affine(xp, rows_of(xp, x), coefficients, intercepts)
    if scores.shape[1] > 1:
        index, scores = xp.argmax(scores, axis=1), transformed(xp, scores, post_transform)
    else:
        index = xp.astype(scores[:, 0] > 0, np.int64)
        scores = (
            one_vote_scores(xp, scores, post_transform, positive=True)
            if len(labels) == 2
            else transformed(xp, scores, post_transform)
        )
    return labels_at(xp, index, labels), xp.astype(scores, np.float32)


@op("LinearRegressor", domain=ML)
def linear_regressor(xp, x, *, coefficients=(), intercepts=None, post_transform="NONE", targets=1):
    x = rows_of(xp, x)
    if len(coefficients) != targets * x.shape[1]:
        raise InvalidInput(
            f"LinearRegressor has {len(coefficients)} coefficients; {targets} targets of {x.shape[1]} features "
            f"need {targets * x.shape[1]}."
        )
    scores = _affine(xp, x, coefficients, intercepts)
    return xp.astype(transformed(xp, scores, post_transform), np.float32)


def _affine(xp: Any, x: Any, coefficients: Any, intercepts: Any) -> Any:
    """x · Wᵀ + b, the weights of each output contiguous in `coefficients`."""
    features, dtype = x.shape[1], xp.dtype_of(x)
    if features == 0 or len(coefficients) % features:
        raise InvalidInput(f"{len(coefficients)} coefficients cannot be weights of {features} input features.")
    weights = np.asarray(coefficients, dtype).reshape(-1, features)
    if intercepts and len(intercepts) != len(weights):
        raise InvalidModel(f"a linear model has {len(intercepts)} intercepts for {len(weights)} outputs.")
    scores = xp.matmul(x, xp.asarray(np.ascontiguousarray(weights.T)))
    return scores + xp.asarray(np.asarray(intercepts, dtype)) if intercepts else scores


@op("Scaler", domain=ML)
def scaler(xp, x, *, offset=None, scale=None):
    dtype = np.float64 if xp.dtype_of(x) == np.float64 else np.float32
    x = xp.astype(x, dtype)
    x = x - xp.asarray(np.asarray(offset, dtype)) if offset else x
    x = x * xp.asarray(np.asarray(scale, dtype)) if scale else x
    return xp.astype(x, np.float32)


@op("Normalizer", domain=ML)
def normalizer(xp, x, *, norm="MAX"):
    """Signs survive and L1 sums magnitudes, as in all implementations; the text of the spec drops both."""
    x = xp.astype(x, np.float64 if xp.dtype_of(x) == np.float64 else np.float32)
    axis = min(1, x.ndim - 1)
    if norm == "MAX":
        divisor = xp.max(x, axis=axis, keepdims=True)
    elif norm == "L1":
        divisor = xp.sum(xp.abs(x), axis=axis, keepdims=True)
    elif norm == "L2":
        divisor = xp.sqrt(xp.sum(x * x, axis=axis, keepdims=True))
    else:
        raise InvalidModel(f"norm '{norm}' of Normalizer does not exist.", fix="use 'MAX', 'L1' or 'L2'.")
    return xp.astype(x / xp.where(divisor == 0, 1, divisor), np.float32)


@op("Imputer", domain=ML)
def imputer(
    xp, x, *, imputed_value_floats=None, imputed_value_int64s=None, replaced_value_float=0.0,
    replaced_value_int64=0,
):  # fmt: skip
    dtype = xp.dtype_of(x)
    integers = dtype.kind == "i"
    values = imputed_value_int64s if integers else imputed_value_floats
    replaced = replaced_value_int64 if integers else replaced_value_float
    if not values or len(values) not in (1, x.shape[-1]):
        raise InvalidModel(
            f"Imputer has {len(values or ())} values of the input's kind for {x.shape[-1]} features.",
            fix="give one value, or one per feature.",
        )
    hit = xp.isnan(x) if math.isnan(replaced) else x == replaced
    return xp.where(hit, xp.asarray(np.asarray(values, dtype)), x)


@op("Binarizer", domain=ML)
def binarizer(xp, x, *, threshold=0.0):
    dtype = xp.dtype_of(x)
    return xp.astype(x > (math.floor(threshold) if dtype.kind == "i" else threshold), dtype)
