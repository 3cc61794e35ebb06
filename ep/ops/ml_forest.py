"""How the trees of an ensemble lie in memory, and which leaf each row of the input reaches in each tree.

A node compares a feature with its threshold; each of the four outcomes (less, equal, greater, NaN) has a child.
So every mode of ONNX, missing values and set membership are data in one table, and all trees of all rows go down
one level per step. A leaf is its own child.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ep.errors import InvalidInput, InvalidModel
from ep.ops.ml_leaf_bits import LeafBits, leaf_bits, reached

LESS, EQUAL, GREATER, NAN = range(4)
COMPARE = {  # predicates that are false for NaN, by the outcomes for which they are true
    (LESS,): lambda v, t: v < t,
    (EQUAL,): lambda v, t: v == t,
    (GREATER,): lambda v, t: v > t,
    (LESS, EQUAL): lambda v, t: v <= t,
    (EQUAL, GREATER): lambda v, t: v >= t,
    (LESS, GREATER): lambda v, t: (v < t) | (v > t),
    (LESS, EQUAL, GREATER): lambda v, t: v == v,
}
MODES = {
    "BRANCH_LEQ": (LESS, EQUAL),
    "BRANCH_LT": (LESS,),
    "BRANCH_GTE": (EQUAL, GREATER),
    "BRANCH_GT": (GREATER,),
    "BRANCH_EQ": (EQUAL,),
    "BRANCH_NEQ": (LESS, GREATER),
}
COMBINE = {"SUM": np.add, "AVERAGE": np.add, "MIN": np.minimum, "MAX": np.maximum}
MOST_CELLS = 1 << 24  # nodes times trees times rows that are looked at at once
NO_VOTE = {"SUM": 0.0, "AVERAGE": 0.0, "MIN": np.inf, "MAX": -np.inf}


@dataclass(frozen=True, eq=False)
class Trees:
    """All trees as parallel arrays over their nodes; `child` is [nodes, 4], one per outcome."""

    feature: np.ndarray
    threshold: np.ndarray
    child: np.ndarray
    leaf: np.ndarray
    roots: np.ndarray


@dataclass(frozen=True, eq=False)
class Votes:
    """The weights that leaves give to targets, as parallel arrays."""

    node: np.ndarray
    target: np.ndarray
    weight: np.ndarray


@dataclass(frozen=True, eq=False)
class Forest:
    """Tables for `aggregate`. Leaves are numbered first, so that the number of a leaf indexes `weights`."""

    table: np.ndarray  # [nodes, 3 + branches]: feature, bits of the threshold, child for NaN, other children
    branches: tuple[tuple[int, ...], ...]  # the outcomes that lead to each of the other children
    dtype: np.dtype  # in which features and thresholds are compared
    roots: np.ndarray  # [targets, trees that vote for it], or [1, trees] when a tree votes for several targets
    depth: np.ndarray  # [targets · trees] in the order of the roots: the most steps down to a leaf
    weights: np.ndarray  # [leaves, 1], or [leaves, targets] when a tree votes for several targets
    function: str  # how the votes of all trees become one score: SUM, AVERAGE, MIN or MAX

    @property
    def trees(self) -> int:
        return self.roots.size

    @cached_property
    def bits(self) -> LeafBits | None:
        """The tables for looking at all nodes at once, where the trees are small enough."""
        threshold = self.table[:, 1].copy().view(self.dtype)
        child = self.table[:, 2:].astype(np.int64)
        return leaf_bits(self.table[:, 0], threshold, child, self.roots.reshape(-1), len(self.weights))


def grow(feature: Any, mode: Any, threshold: np.ndarray, true: Any, false: Any, nan_true: Any) -> Trees:
    """Trees without roots from one mode, threshold and pair of children per node; mode LEAF ends a tree."""
    true, false, mode = np.asarray(true, np.int64), np.asarray(false, np.int64), np.asarray(mode)
    leaf = mode == "LEAF"
    child = np.repeat(false[:, None], 4, axis=1)
    for name, outcomes in MODES.items():
        rows = np.flatnonzero(mode == name)
        child[np.ix_(rows, outcomes)] = true[rows, None]
    child[:, NAN] = np.where(np.asarray(nan_true, bool), true, false)
    child[leaf] = np.flatnonzero(leaf)[:, None]
    unknown = set(mode.tolist()) - {*MODES, "LEAF"}
    if unknown:
        raise InvalidModel(f"tree nodes have the unknown mode {sorted(unknown)[0]!r}.", fix=f"use {list(MODES)}.")
    return Trees(np.asarray(feature, np.int64), threshold, child, leaf, np.zeros(0, np.int64))


def plant(trees: Trees, votes: Votes, targets: int, function: str) -> Forest:
    """The tables of a forest: leaves renumbered to the front, children that never differ merged."""
    if function not in COMBINE:
        raise InvalidModel(f"aggregate_function '{function}' does not exist.", fix=f"use one of {list(COMBINE)}.")
    order = np.argsort(~trees.leaf, kind="stable")
    place = np.argsort(order)
    at_leaf = trees.leaf[votes.node]
    votes = Votes(place[votes.node[at_leaf]], votes.target[at_leaf], votes.weight[at_leaf])
    child, leaves = place[trees.child[order]], int(trees.leaf.sum())
    tree, leaf, depth = _reach(child, place[trees.roots], leaves)
    order_of_trees = _by_target(tree, leaf, len(trees.roots), votes, targets)
    roots, depth = place[trees.roots][order_of_trees], depth[order_of_trees.reshape(-1)]
    weights = np.full((leaves, 1 if len(roots) == targets else targets), NO_VOTE[function], votes.weight.dtype)
    COMBINE[function].at(weights, (votes.node, votes.target if weights.shape[1] > 1 else 0), votes.weight)
    bits = np.ascontiguousarray(trees.threshold[order]).view(f"u{trees.threshold.itemsize}")
    branches = _branches(child)
    columns = [trees.feature[order], bits, child[:, NAN], *(child[:, b[0]] for b in branches)]
    table = np.stack([column.astype(bits.dtype) for column in columns], axis=1)
    return Forest(table, branches, trees.threshold.dtype, roots, depth, weights, function)


def _branches(child: np.ndarray) -> tuple[tuple[int, ...], ...]:
    """The outcomes other than NaN, grouped by equal children; those that go where NaN goes are left out."""
    groups: list[list[int]] = [[NAN]]
    for outcome in (LESS, EQUAL, GREATER):
        for group in groups:
            if np.array_equal(child[:, group[0]], child[:, outcome]):
                group.append(outcome)
                break
        else:
            groups.append([outcome])
    return tuple(map(tuple, groups[1:]))


def _reach(child: np.ndarray, roots: np.ndarray, leaves: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pairs of a tree and a leaf that it can reach, and each tree's largest number of steps down to a leaf."""
    nodes = len(child)
    pairs, reached, depth = np.arange(len(roots)) * nodes + roots, [], np.zeros(len(roots), np.int64)
    while True:
        tree, node = np.divmod(pairs, nodes)
        reached.append(pairs[node < leaves])
        inner = node >= leaves
        if not inner.any():
            break
        pairs = np.unique(tree[inner, None] * nodes + child[node[inner]])
        depth[tree[inner]] += 1
        if depth.max() > nodes:
            raise InvalidModel("a tree of the ensemble has a cycle: a node is below itself.")
    tree, leaf = np.divmod(np.concatenate(reached), nodes)
    return tree, leaf, depth


def _by_target(tree: np.ndarray, leaf: np.ndarray, trees: int, votes: Votes, targets: int) -> np.ndarray:
    """Numbers of the trees as [targets, trees] if each votes for one target and all targets have as many trees,
    else as [1, trees]."""
    lowest, highest = np.full(len(leaf), targets), np.full(len(leaf), -1)
    of_leaf = np.full((2, int(leaf.max(initial=-1)) + 1), [[targets], [-1]])
    np.minimum.at(of_leaf[0], votes.node, votes.target)
    np.maximum.at(of_leaf[1], votes.node, votes.target)
    lowest, highest = np.full(trees, targets), np.full(trees, -1)
    np.minimum.at(lowest, tree, of_leaf[0, leaf])
    np.maximum.at(highest, tree, of_leaf[1, leaf])
    counts = np.bincount(lowest[highest >= 0], minlength=targets)
    if not np.array_equal(lowest, highest) or len(set(counts.tolist())) > 1:
        return np.arange(trees)[None]
    return np.argsort(lowest, kind="stable").reshape(targets, -1)


def aggregate(xp: Any, forest: Forest, x: Any, base: np.ndarray | None = None) -> Any:
    """Scores [rows, targets]: the votes of the reached leaves, combined over all trees, plus base values."""
    needed = int(forest.table[:, 0].max(initial=0)) + 1
    if x.shape[1] < needed:
        raise InvalidInput(f"the trees read {needed} features, but the input has {x.shape[1]}.")
    x = xp.astype(x, forest.dtype)
    leaves = _leaves_by_bits(xp, forest, x) if _by_bits(xp, forest, x.shape[0]) else _leaves(xp, forest, x)
    votes = xp.take(xp.asarray(forest.weights), leaves, axis=0)
    votes = xp.reshape(votes, (*forest.roots.shape, *votes.shape[1:]))
    if forest.function in ("SUM", "AVERAGE"):
        scores = xp.sum(votes, axis=1)
    else:
        scores = (xp.min if forest.function == "MIN" else xp.max)(votes, axis=1)
        scores = xp.where(xp.isinf(scores), 0, scores)
    scores = scores[0] if len(forest.roots) == 1 else xp.swapaxes(scores[..., 0], 0, 1)
    if forest.function == "AVERAGE":
        scores = scores / forest.trees
    return scores if base is None else scores + xp.asarray(base.astype(forest.weights.dtype))


def _chosen(xp: Any, forest: Forest, value: Any, threshold: Any, children: list[Any]) -> Any:
    """The child for NaN, or another one where the comparison says so."""
    chosen = children[0]
    for outcomes, child in zip(forest.branches, children[1:], strict=True):
        chosen = xp.where(COMPARE[outcomes](value, threshold), child, chosen)
    return chosen


SEGMENTS = 4  # of a walk, each with fewer trees than the one before


def _leaves(xp: Any, forest: Forest, x: Any) -> Any:
    """The leaf [trees, rows] that each row reaches, walking down from the roots; shallow trees leave early."""
    rows = x.shape[0]
    flat, table = xp.reshape(xp.swapaxes(x, 0, 1), (-1,)), xp.asarray(forest.table)
    row = xp.asarray(np.arange(rows, dtype=np.uint32))

    def down(carry: tuple[Any], _: Any) -> tuple[tuple[Any], tuple[()]]:
        node = xp.take(table, carry[0], axis=0)
        value = xp.take(flat, row + xp.astype(node[..., 0], np.uint32) * rows, axis=0)
        threshold = xp.bitcast(node[..., 1], forest.dtype)
        children = [node[..., column] for column in range(2, node.shape[-1])]
        return (xp.astype(_chosen(xp, forest, value, threshold, children), np.uint32),), ()

    order = np.argsort(-forest.depth, kind="stable")
    depth = forest.depth[order]
    roots = forest.roots.reshape(-1)[order].astype(np.uint32)
    nodes = xp.asarray(np.broadcast_to(roots[:, None], (len(roots), rows)))
    arrived, done = [], 0
    for level in sorted({int(depth[len(depth) * i // SEGMENTS]) for i in range(SEGMENTS)} if len(depth) else ()):
        going = int((depth > done).sum())
        arrived.append(nodes[going:])
        nodes = xp.scan(down, (nodes[:going],), (), length=level - done)[0][0] if level > done else nodes[:going]
        done = level
    leaves = xp.concatenate([nodes, *reversed(arrived)], axis=0)
    return xp.take(leaves, xp.asarray(np.argsort(order)), axis=0)


def _by_bits(xp: Any, forest: Forest, rows: int) -> bool:
    """Whether to look at all nodes at once: it saves the steps, and costs work on nodes that are not passed.

    Where steps are compiled as a loop, they are cheap: one costs as much as looking at two or three nodes
    (measured on a CPU: walks of 8 steps through 17 nodes of float32 take 229 µs instead of 111, walks of 7
    through 14 nodes of float64 810 instead of 1130).
    """
    if forest.bits is None or forest.bits.nodes * forest.trees * rows > MOST_CELLS:
        return False
    worth = (2.3 if forest.dtype.itemsize <= 4 else 1.7) * forest.depth.mean()
    return not xp.rolled_loops() or (rows * forest.trees >= 256 and forest.bits.nodes <= worth)


def _leaves_by_bits(xp: Any, forest: Forest, x: Any) -> Any:
    return reached(xp, forest.bits, x, lambda *chosen: _chosen(xp, forest, *chosen))
