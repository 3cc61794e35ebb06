"""Support vector machines of ai.onnx.ml: SVMClassifier with its pairwise probabilities, and SVMRegressor."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from ep.errors import InvalidModel
from ep.ops.ml_scores import class_labels, labels_at, one_vote_scores, rows_of, string_labels, transformed
from ep.ops.tables import once_per_node
from ep.registry import op

ML = "ai.onnx.ml"
DIFFERENCES = 1 << 24  # distances to support vectors are taken of differences up to this many, else of products


@op("SVMRegressor", domain=ML)
def svm_regressor(
    xp, x, *, coefficients=(), kernel_params=(), kernel_type="LINEAR", n_supports=0, one_class=0,
    post_transform="NONE", rho=(), support_vectors=(),
):  # fmt: skip
    x = xp.astype(rows_of(xp, x), np.float32)
    if n_supports:
        x = _kernel(xp, x, _matrix(support_vectors, n_supports), kernel_type, kernel_params)
    scores = xp.matmul(x, xp.asarray(_matrix(coefficients, 1).T)) + float(rho[0])
    if one_class:
        return xp.astype(xp.where(scores > 0, 1, -1), np.float32)
    return transformed(xp, scores, post_transform)


@op("SVMClassifier", domain=ML, host_only=string_labels)
def svm_classifier(
    xp, x, *, classlabels_ints=None, classlabels_strings=None, coefficients=(), kernel_params=(),
    kernel_type="LINEAR", post_transform="NONE", prob_a=(), prob_b=(), rho=(), support_vectors=(),
    vectors_per_class=(),
):  # fmt: skip
    labels = class_labels(classlabels_ints, classlabels_strings)
    x = xp.astype(rows_of(xp, x), np.float32)
    if not sum(vectors_per_class):
        scores = xp.matmul(x, xp.asarray(_matrix(coefficients, len(labels)).T)) + float(rho[0])
        return labels_at(xp, xp.argmax(scores, axis=1), labels), transformed(xp, scores, post_transform)
    pairs = _pairs(coefficients, vectors_per_class, rho)
    kernels = _kernel(xp, x, _matrix(support_vectors, sum(vectors_per_class)), kernel_type, kernel_params)
    margins = xp.matmul(kernels, xp.asarray(pairs.coefficients)) + xp.asarray(pairs.rho)
    won = xp.astype(margins > 0, np.float32)
    votes = xp.matmul(won, xp.asarray(pairs.first)) + xp.matmul(1 - won, xp.asarray(pairs.second))
    index = xp.argmax(votes, axis=1)
    if prob_a:
        scores = transformed(xp, _probabilities(xp, margins, prob_a, prob_b, pairs), post_transform)
    elif len(labels) == 2:
        scores = one_vote_scores(xp, margins, post_transform, positive=False)
    else:
        scores = transformed(xp, margins, post_transform)
    return labels_at(xp, index, labels), scores


def _matrix(values: Any, rows: int) -> np.ndarray:
    if not len(values) or len(values) % rows:
        raise InvalidModel(f"{len(values)} values of a support vector machine cannot form {rows} rows.")
    return np.asarray(values, np.float32).reshape(rows, -1)


def _kernel(xp: Any, x: Any, vectors: np.ndarray, kernel_type: str, params: Any) -> Any:
    """The kernel of each row with each support vector: [rows, vectors]."""
    gamma, coef0, degree = (*params, 0.0, 0.0, 0.0)[:3]
    if kernel_type == "RBF":
        return xp.exp(-gamma * _squared_distances(xp, x, vectors))
    products = xp.matmul(x, xp.asarray(np.ascontiguousarray(vectors.T)))
    if kernel_type == "LINEAR":
        return products
    products = gamma * products + coef0
    if kernel_type == "SIGMOID":
        return xp.tanh(products)
    if kernel_type != "POLY":
        raise InvalidModel(f"kernel_type '{kernel_type}' does not exist.", fix="use LINEAR, POLY, RBF or SIGMOID.")
    if degree not in range(1, 9):
        return xp.power(products, degree)
    power = products
    for _ in range(int(degree) - 1):  # a power of a negative number by a float exponent is NaN on some devices
        power = power * products
    return power


def _squared_distances(xp: Any, x: Any, vectors: np.ndarray) -> Any:
    if x.shape[0] * vectors.size <= DIFFERENCES:
        difference = xp.expand_dims(x, 1) - xp.asarray(vectors)
        return xp.sum(difference * difference, axis=2)
    center = vectors.mean(axis=0)  # distances keep more digits near the origin
    x, vectors = x - xp.asarray(center), vectors - center
    norms = xp.sum(x * x, axis=1, keepdims=True) + xp.asarray((vectors * vectors).sum(axis=1))
    return xp.maximum(norms - 2 * xp.matmul(x, xp.asarray(np.ascontiguousarray(vectors.T))), 0)


@dataclass(frozen=True, eq=False)
class Pairs:
    """The classifiers between each two classes i < j as matrices over the pairs."""

    coefficients: np.ndarray  # [vectors, pairs]
    rho: np.ndarray
    first: np.ndarray  # [pairs, classes], one-hot i
    second: np.ndarray  # [pairs, classes], one-hot j


@once_per_node
def _pairs(coefficients: Any, vectors_per_class: tuple[int, ...], rho: Any) -> Pairs:
    classes, vectors = len(vectors_per_class), sum(vectors_per_class)
    dual = _matrix(coefficients, classes - 1)
    owner = np.repeat(np.arange(classes), vectors_per_class)
    pairs = list(combinations(range(classes), 2))
    if dual.shape[1] != vectors or len(rho) < len(pairs):
        raise InvalidModel(
            f"an SVMClassifier of {classes} classes and {vectors} support vectors has coefficients of shape "
            f"{list(dual.shape)} and {len(rho)} values rho; {len(pairs)} are needed."
        )
    columns = [np.where(owner == i, dual[j - 1], np.where(owner == j, dual[i], 0)) for i, j in pairs]
    first, second = np.array(pairs).T
    one_hot = np.eye(classes, dtype=np.float32)
    offsets = np.asarray(rho[: len(pairs)], np.float32)
    return Pairs(np.stack(columns, axis=1).astype(np.float32), offsets, one_hot[first], one_hot[second])


def _probabilities(xp: Any, margins: Any, prob_a: Any, prob_b: Any, pairs: Pairs) -> Any:
    """Class probabilities from pairwise ones: the second method of Wu, Lin and Weng (2004), as in libsvm.

    It stops early, at 0.005 / classes, and so must everyone who wants the same digits.
    """
    count, classes = pairs.first.shape
    a, b = np.asarray(prob_a[:count], np.float32), np.asarray(prob_b[:count], np.float32)
    r = xp.sigmoid(-(margins * xp.asarray(a) + xp.asarray(b)))
    r = xp.expand_dims(xp.minimum(xp.maximum(r, 1e-7), 1 - 1e-7), -1)  # [rows, pairs, 1]: i wins against j
    first, second = pairs.first, pairs.second
    squares = xp.sum(xp.asarray(second) * (r * r) + xp.asarray(first) * ((1 - r) * (1 - r)), axis=1)
    sides = (first[:, :, None] * second[:, None, :] + second[:, :, None] * first[:, None, :]).reshape(count, -1)
    cross = xp.matmul(-(r * (1 - r))[..., 0], xp.asarray(sides))
    eye = xp.asarray(np.eye(classes, dtype=np.float32))
    q = xp.reshape(cross, (-1, classes, classes)) + xp.expand_dims(squares, 1) * eye
    return _fixed_point(xp, q, classes)


def _fixed_point(xp: Any, q: Any, classes: int) -> Any:
    """Gauss-Seidel steps on each row's [classes, classes] system until its residual is small, at most 100."""
    start = xp.full((q.shape[0], classes), 1 / classes, dtype=np.float32)

    def state(p: Any) -> tuple[Any, Any, Any]:
        qp = xp.sum(q * xp.expand_dims(p, 1), axis=2)
        pqp = xp.sum(p * qp, axis=1, keepdims=True)
        return qp, pqp, xp.max(xp.abs(qp - pqp), axis=1, keepdims=True) >= 0.005 / classes

    def unfinished(carry: Any) -> Any:
        step, active, _ = carry
        return (step < 100) & xp.any(active)

    def sweep(carry: Any) -> Any:
        step, active, old = carry
        p = old
        qp, pqp, _ = state(p)
        for t in range(classes):
            diagonal = q[:, t, t : t + 1]
            diff = (pqp - qp[:, t : t + 1]) / diagonal
            p = (p + diff * xp.asarray(np.eye(classes, dtype=np.float32)[t])) / (1 + diff)
            pqp = (pqp + diff * (diff * diagonal + 2 * qp[:, t : t + 1])) / ((1 + diff) * (1 + diff))
            qp = (qp + diff * q[:, t, :]) / (1 + diff)
        p = xp.where(active, p, old)
        return step + 1, active & state(p)[2], p

    first = (xp.asarray(np.asarray(0, np.int32)), state(start)[2], start)
    return xp.while_loop(unfinished, sweep, first)[2]
