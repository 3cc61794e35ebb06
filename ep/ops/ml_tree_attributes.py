"""How ONNX writes trees down in attributes: by tree and node numbers (versions 1, 3), or as splits and leaves (5)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ep.errors import InvalidModel
from ep.ops.ml_forest import EQUAL, GREATER, LESS, Forest, Trees, Votes, grow, plant
from ep.ops.tables import once_per_node

MODES_5 = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ", "BRANCH_MEMBER")
FUNCTIONS_5 = ("AVERAGE", "SUM", "MIN", "MAX")


@once_per_node
def forest_of_nodes(
    tree_ids: Any, node_ids: Any, features: Any, modes: Any, thresholds: Any, true_ids: Any, false_ids: Any,
    nan_true: Any, vote_trees: Any, vote_nodes: Any, vote_targets: Any, weights: Any, targets: int | None,
    function: str, dtype: np.dtype,
) -> Forest:  # fmt: skip
    """The forest of versions 1 and 3; a root is a node that is no child."""
    thresholds, weights = _wide(thresholds, dtype), _wide(weights, dtype)
    lengths = {len(a) for a in (tree_ids, node_ids, features, modes, thresholds, true_ids, false_ids)}
    if len(lengths) > 1 or lengths == {0}:
        raise InvalidModel(f"the nodes_* attributes of a tree ensemble have the lengths {sorted(lengths)}.")
    index = {key: i for i, key in enumerate(zip(tree_ids, node_ids, strict=True))}
    if len(index) < len(tree_ids):
        raise InvalidModel("a tree ensemble has two nodes of one number in one tree.")
    inner = np.array([mode != "LEAF" for mode in modes])
    true, false = _positions(index, tree_ids, true_ids, inner), _positions(index, tree_ids, false_ids, inner)
    trees = grow(features, modes, thresholds, true, false, _padded(nan_true, len(modes)))
    is_root = np.ones(len(modes), bool)
    is_root[np.concatenate([true[inner], false[inner]])] = False
    voters = _positions(index, vote_trees, vote_nodes, np.ones(len(vote_nodes), bool))
    votes = Votes(voters, np.asarray(vote_targets, np.int64), weights)
    targets = max(vote_targets, default=0) + 1 if targets is None else targets
    return plant(replace(trees, roots=np.flatnonzero(is_root)), votes, targets, function)


def _wide(values: Any, dtype: np.dtype) -> np.ndarray:
    """Attribute values in the input's dtype, or in float64 if they are a tensor of that."""
    keeps = isinstance(values, np.ndarray) and values.dtype == np.float64
    return np.asarray(() if values is None else values, np.float64 if keeps else dtype)


def _padded(flags: Any, length: int) -> np.ndarray:
    flags = np.asarray(() if flags is None else flags, bool)
    return np.pad(flags, (0, length - len(flags)))


def _positions(index: dict[tuple[int, int], int], trees: Any, nodes: Any, wanted: np.ndarray) -> np.ndarray:
    """Where the wanted nodes, named by tree and number, stand in the attributes; 0 for the others."""
    keys = zip(trees, nodes, wanted.tolist(), strict=True)
    try:
        return np.array([index[tree, node] if w else 0 for tree, node, w in keys], np.int64)
    except KeyError as error:
        tree, node = error.args[0]
        raise InvalidModel(f"tree {tree} of a tree ensemble refers to its node {node}, which it lacks.") from None


@once_per_node
def forest_of_splits(
    roots: Any, features: Any, modes: np.ndarray, thresholds: np.ndarray, true_ids: Any, true_leaf: Any,
    false_ids: Any, false_leaf: Any, nan_true: Any, members: Any, leaf_targets: Any, weights: np.ndarray,
    targets: int | None, function: int, dtype: np.dtype,
) -> Forest:  # fmt: skip
    """The forest of version 5: inner nodes, then leaves, then the search trees that replace sets of members."""
    inner, leaves = len(modes), len(leaf_targets)
    lengths = {len(a) for a in (features, modes, thresholds, true_ids, true_leaf, false_ids, false_leaf)}
    if len(lengths) > 1 or len(weights) != leaves:
        raise InvalidModel(
            f"the nodes_* attributes of a tree ensemble have the lengths {sorted(lengths)}, "
            f"its leaf_* attributes {sorted({leaves, len(weights)})}."
        )
    true = np.asarray(true_ids) + inner * np.asarray(true_leaf, bool)
    false = np.asarray(false_ids) + inner * np.asarray(false_leaf, bool)
    if not (0 <= min(true.min(), false.min()) <= max(true.max(), false.max()) < inner + leaves):
        raise InvalidModel(f"a tree ensemble of {inner} nodes and {leaves} leaves refers to one that it lacks.")
    names = [MODES_5[m] for m in modes.tolist()] + ["LEAF"] * leaves
    trees = grow(
        _padded_ints(features, leaves), ["BRANCH_EQ" if n == MODES_5[6] else n for n in names],
        np.pad(thresholds.astype(dtype), (0, leaves)), np.pad(true, (0, leaves)), np.pad(false, (0, leaves)),
        _padded(nan_true, inner + leaves),
    )  # fmt: skip
    trees = _with_members(replace(trees, roots=np.asarray(roots)), np.asarray(modes) == 6, members)
    votes = Votes(inner + np.arange(leaves), np.asarray(leaf_targets), weights.astype(dtype))
    targets = max(leaf_targets, default=0) + 1 if targets is None else targets
    return plant(trees, votes, targets, FUNCTIONS_5[function])


def _padded_ints(values: Any, extra: int) -> np.ndarray:
    return np.pad(np.asarray(values, np.int64), (0, extra))


def _with_members(trees: Trees, is_member: np.ndarray, values: np.ndarray | None) -> Trees:
    """Each set-membership node as a binary search for its members, which are delimited by NaN."""
    nodes = np.flatnonzero(is_member)
    if not len(nodes):
        return trees
    values = np.asarray(() if values is None else values, trees.threshold.dtype).reshape(-1)
    ends = np.flatnonzero(np.isnan(values))
    sets = [np.unique(s[~np.isnan(s)]) for s in np.split(values, ends)]
    if len(sets) < len(nodes):
        raise InvalidModel(f"membership_values holds {len(sets)} sets for {len(nodes)} BRANCH_MEMBER nodes.")
    child, threshold, feature = trees.child.tolist(), trees.threshold.tolist(), trees.feature.tolist()

    def search(node: int | None, members: np.ndarray, outcome: list[int]) -> int:
        if not len(members):
            return outcome[LESS]
        if node is None:
            node = len(child)
            child.append(list(outcome))
            feature.append(feature_id)
            threshold.append(0.0)
        middle = len(members) // 2
        threshold[node] = members[middle]
        child[node][LESS] = search(None, members[:middle], outcome)
        child[node][GREATER] = search(None, members[middle + 1 :], outcome)
        return node

    for node, members in zip(nodes.tolist(), sets, strict=False):
        feature_id = feature[node]
        outcome = list(child[node])  # of an EQ node: EQUAL leads to the true child, LESS and GREATER to the other
        if len(members):
            search(node, members, outcome)
        else:
            child[node][EQUAL] = outcome[LESS]
    leaf = np.pad(trees.leaf, (0, len(child) - len(trees.leaf)))
    return Trees(np.array(feature), np.array(threshold, trees.threshold.dtype), np.array(child), leaf, trees.roots)
