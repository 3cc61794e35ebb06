"""Tree ensembles of ai.onnx.ml: TreeEnsembleClassifier, TreeEnsembleRegressor and TreeEnsemble."""

from __future__ import annotations

from typing import Any

import numpy as np

from ep.ops.ml_forest import aggregate
from ep.ops.ml_scores import (
    TRANSFORMS,
    class_labels,
    labels_at,
    one_vote_scores,
    rows_of,
    string_labels,
    transformed,
)
from ep.ops.ml_tree_attributes import forest_of_nodes, forest_of_splits
from ep.ops.tables import once_per_node
from ep.registry import op

ML = "ai.onnx.ml"


@op("TreeEnsembleRegressor", domain=ML)
def tree_ensemble_regressor(
    xp, x, *, aggregate_function="SUM", base_values=None, base_values_as_tensor=None, n_targets=None,
    nodes_falsenodeids=(), nodes_featureids=(), nodes_hitrates=None, nodes_hitrates_as_tensor=None,
    nodes_missing_value_tracks_true=(), nodes_modes=(), nodes_nodeids=(), nodes_treeids=(), nodes_truenodeids=(),
    nodes_values=None, nodes_values_as_tensor=None, post_transform="NONE", target_ids=(), target_nodeids=(),
    target_treeids=(), target_weights=None, target_weights_as_tensor=None,
):  # fmt: skip
    x = rows_of(xp, x)
    thresholds = nodes_values if nodes_values_as_tensor is None else nodes_values_as_tensor
    weights = target_weights if target_weights_as_tensor is None else target_weights_as_tensor
    base = _base(base_values if base_values_as_tensor is None else base_values_as_tensor)
    forest = forest_of_nodes(
        nodes_treeids, nodes_nodeids, nodes_featureids, nodes_modes, thresholds, nodes_truenodeids,
        nodes_falsenodeids, nodes_missing_value_tracks_true, target_treeids, target_nodeids, target_ids, weights,
        n_targets, aggregate_function, xp.dtype_of(x),
    )  # fmt: skip
    scores = aggregate(xp, forest, x, base)
    return xp.astype(transformed(xp, scores, post_transform), np.float32)


@op("TreeEnsembleClassifier", domain=ML, host_only=string_labels)
def tree_ensemble_classifier(
    xp, x, *, base_values=None, base_values_as_tensor=None, class_ids=(), class_nodeids=(), class_treeids=(),
    class_weights=None, class_weights_as_tensor=None, classlabels_int64s=None, classlabels_strings=None,
    nodes_falsenodeids=(), nodes_featureids=(), nodes_hitrates=None, nodes_hitrates_as_tensor=None,
    nodes_missing_value_tracks_true=(), nodes_modes=(), nodes_nodeids=(), nodes_treeids=(), nodes_truenodeids=(),
    nodes_values=None, nodes_values_as_tensor=None, post_transform="NONE",
):  # fmt: skip
    x = rows_of(xp, x)
    labels = class_labels(classlabels_int64s, classlabels_strings)
    thresholds = nodes_values if nodes_values_as_tensor is None else nodes_values_as_tensor
    weights = class_weights if class_weights_as_tensor is None else class_weights_as_tensor
    base = _base(base_values if base_values_as_tensor is None else base_values_as_tensor)
    forest = forest_of_nodes(
        nodes_treeids, nodes_nodeids, nodes_featureids, nodes_modes, thresholds, nodes_truenodeids,
        nodes_falsenodeids, nodes_missing_value_tracks_true, class_treeids, class_nodeids, class_ids, weights,
        len(labels), "SUM", xp.dtype_of(x),
    )  # fmt: skip
    index, scores = _classified(xp, aggregate(xp, forest, x), base, post_transform, *_voted(class_ids, weights))
    return labels_at(xp, index, labels), xp.astype(scores, np.float32)


def _classified(
    xp: Any, scores: Any, base: np.ndarray | None, post_transform: str, voted: frozenset[int], positive: bool
) -> tuple[Any, Any]:
    """Class indices [N] and scores. A two-class forest may vote for one class only, with at most one base value."""
    classes, extra = scores.shape[1], 0 if base is None else len(base)
    if extra:
        padded = np.pad(base, (0, max(0, classes - extra)))[:classes]
        scores = scores + xp.asarray(padded.astype(xp.dtype_of(scores)))
    limit = 0.5 if positive else 0.0
    if classes > 2 or len(voted) > 1 or extra > 1:
        return xp.argmax(scores, axis=1), transformed(xp, scores, post_transform)
    if classes == 1:
        return xp.astype(scores[:, 0] > 0, np.int64), transformed(xp, scores, post_transform)
    chosen = xp.astype(scores[:, max(voted, default=0)] > limit, np.int64)
    if 1 in voted:
        return chosen, transformed(xp, scores, post_transform)
    return chosen, one_vote_scores(xp, scores[:, :1], post_transform, positive)


@op("TreeEnsemble", domain=ML, since=5)
def tree_ensemble(
    xp, x, *, aggregate_function=1, leaf_targetids, leaf_weights, membership_values=None, n_targets=None,
    nodes_falseleafs, nodes_falsenodeids, nodes_featureids, nodes_hitrates=None,
    nodes_missing_value_tracks_true=None, nodes_modes, nodes_splits, nodes_trueleafs, nodes_truenodeids,
    post_transform=0, tree_roots,
):  # fmt: skip
    dtype, x = xp.dtype_of(x), rows_of(xp, x)
    forest = forest_of_splits(
        tree_roots, nodes_featureids, nodes_modes, nodes_splits, nodes_truenodeids, nodes_trueleafs,
        nodes_falsenodeids, nodes_falseleafs, nodes_missing_value_tracks_true, membership_values, leaf_targetids,
        leaf_weights, n_targets, aggregate_function, xp.dtype_of(x),
    )  # fmt: skip
    return xp.astype(transformed(xp, aggregate(xp, forest, x), TRANSFORMS[post_transform]), dtype)


def _base(values: Any) -> np.ndarray | None:
    return None if values is None or len(values) == 0 else np.asarray(values)


@once_per_node
def _voted(ids: tuple[int, ...], weights: Any) -> tuple[frozenset[int], bool]:
    """The classes that get votes, and whether all votes are positive."""
    return frozenset(ids), bool(np.min(weights, initial=0) >= 0)
