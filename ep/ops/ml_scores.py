"""How the scores of a classifier or regressor of ai.onnx.ml become its outputs: post transforms and labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ep.errors import InvalidModel

TRANSFORMS = (
    "NONE",
    "SOFTMAX",
    "LOGISTIC",
    "SOFTMAX_ZERO",
    "PROBIT",
)  # in the order of TreeEnsemble's numbers


def transformed(xp: Any, scores: Any, post_transform: str) -> Any:
    """The scores [N, E] of each row after the post transform."""
    if post_transform == "NONE":
        return scores
    if post_transform == "LOGISTIC":
        return xp.sigmoid(scores)
    if post_transform == "SOFTMAX":
        return xp.softmax(scores, axis=-1)
    if post_transform == "SOFTMAX_ZERO":
        return _softmax_zero(xp, scores)
    if post_transform == "PROBIT":
        return _probit(xp, scores)
    raise InvalidModel(f"post_transform '{post_transform}' does not exist.", fix=f"use one of {', '.join(TRANSFORMS)}.")


def _softmax_zero(xp: Any, scores: Any) -> Any:
    """Softmax over the scores that are not zero; a zero stays zero."""
    counted = xp.abs(scores) > 1e-7
    e = xp.where(counted, xp.exp(scores - xp.max(scores, axis=-1, keepdims=True)), 0)
    total = xp.sum(e, axis=-1, keepdims=True)
    return e / xp.where(total == 0, 1, total)


def _probit(xp: Any, scores: Any) -> Any:
    """√2·erf⁻¹(2p − 1) by Winitzki's formula, which onnxruntime and the reference evaluator share."""
    x = 2 * scores - 1
    log = xp.log((1 - x) * (1 + x))
    half = 2 / (np.pi * 0.147) + log / 2
    return 2**0.5 * xp.sign(x) * xp.sqrt(xp.sqrt(half * half - log / 0.147) - half)


def one_vote_scores(xp: Any, score: Any, post_transform: str, positive: bool) -> Any:
    """Scores [N, 2] of a two-class model that computes a single score [N, 1].

    A probability p stands for [1 − p, p], a margin s for [−s, s]; which of both it is the operators leave to
    convention: a logistic is taken of a margin, and weights that are all positive sum to a probability.
    """
    other = 1 - score if positive and post_transform != "LOGISTIC" else -score
    return transformed(xp, xp.concatenate([other, score], axis=-1), post_transform)


def rows_of(xp: Any, x: Any) -> Any:
    """The input of a model as [rows, features] of float64, if it is that, or float32."""
    dtype = np.float64 if xp.dtype_of(x) == np.float64 else np.float32
    return xp.astype(xp.reshape(x, (1, -1)) if x.ndim == 1 else x, dtype)


def labels_at(xp: Any, index: Any, labels: Sequence[int] | Sequence[str]) -> Any:
    """The labels that the class indices name; strings only on the host.

    A model of a single integer label knows it and 0.
    """
    if len(labels) == 1:
        labels = labels * 2 if isinstance(labels[0], str) else (0, *labels)
    names = label_array(labels)
    if names.dtype == object:
        return names[np.asarray(index)]
    if np.array_equal(names, np.arange(len(names))):
        return xp.astype(index, np.int64)
    return xp.take(xp.asarray(names), index, axis=0)


def label_array(labels: Sequence[int] | Sequence[str]) -> np.ndarray:
    """int64 array, or object array of strings."""
    return np.array(labels, dtype=object if isinstance(labels[0], str) else np.int64)


def class_labels(ints: Sequence[int] | None, strings: Sequence[str] | None) -> tuple[int, ...] | tuple[str, ...]:
    """The labels of a classifier, which has either integers or strings."""
    if bool(ints) == bool(strings):
        raise InvalidModel(
            f"a classifier has {len(ints or ())} integer and {len(strings or ())} string labels.",
            why="exactly one of its two attributes for class labels must be given.",
        )
    return tuple(ints or strings)


def string_labels(attributes: dict[str, Any]) -> str:
    """The `host_only` reason of an operator whose output are the strings of `classlabels_strings`."""
    return "its labels are strings" if attributes.get("classlabels_strings") else ""
