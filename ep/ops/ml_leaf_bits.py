"""Which leaf each row reaches, by looking at all nodes of all trees at once: for trees of up to 64 leaves.

A node rules out the leaves below the children that it does not choose. Each leaf of a tree has a bit, and after all
nodes have spoken, the only leaf that nobody ruled out is the one that a walk from the root would reach.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

MOST_LEAVES = 64


@dataclass(frozen=True, eq=False)
class LeafBits:
    """Tables over nodes and trees; trees with fewer nodes have nodes that rule out nothing."""

    feature: np.ndarray  # [nodes, trees]
    threshold: np.ndarray  # [nodes, trees, 1]
    ruled_out: np.ndarray  # [children, nodes, trees, 1]: bits of the leaves that choosing this child rules out
    all: np.ndarray  # [trees, 1]: the bits of a tree's leaves
    leaf: np.ndarray  # [trees · leaves]: number of the leaf

    @property
    def nodes(self) -> int:
        """The inner nodes of the largest tree."""
        return self.feature.shape[0]


def leaf_bits(
    feature: np.ndarray, threshold: np.ndarray, child: np.ndarray, roots: np.ndarray, leaves: int
) -> LeafBits | None:
    """The tables of trees whose nodes from `leaves` on are inner ones; `None` if a tree is too large or no tree."""
    trees = [_tree(child, int(root), leaves) for root in roots]
    if not trees or None in trees:
        return None
    nodes, width = max(1, *(len(t[0]) for t in trees)), max(len(t[1]) for t in trees)
    bits = np.uint32 if width <= 32 and threshold.dtype.itemsize <= 4 else np.uint64
    shape = (nodes, len(trees))
    features, thresholds = np.zeros(shape, np.uint32), np.zeros((*shape, 1), threshold.dtype)
    ruled_out, numbers = np.zeros((child.shape[1], *shape, 1), bits), np.zeros((len(trees), width), np.uint32)
    for t, (masks, order) in enumerate(trees):
        inner = list(masks)
        features[: len(inner), t], thresholds[: len(inner), t, 0] = feature[inner], threshold[inner]
        ruled_out[:, : len(inner), t, 0] = np.array(list(masks.values()), bits).reshape(-1, child.shape[1]).T
        numbers[t, : len(order)] = order
    whole = np.array([[(1 << len(order)) - 1] for _, order in trees], bits)
    return LeafBits(features, thresholds, ruled_out, whole, numbers.reshape(-1))


def _tree(child: np.ndarray, root: int, leaves: int) -> tuple[dict[int, list[int]], list[int]] | None:
    """Inner node → what each child rules out, and the leaves in the order of their bits."""
    masks: dict[int, list[int]] = {}
    order: list[int] = []

    def visit(node: int) -> int:
        if node < leaves:
            order.append(node)
            return 1 << len(order) - 1
        masks[node] = []
        children = child[node].tolist()
        below = {c: visit(c) for c in dict.fromkeys(children) if c not in masks and len(order) < MOST_LEAVES}
        if len(below) < len(set(children)):
            raise _NoTree
        every = sum(below.values())
        masks[node] = [every & ~below[c] for c in children]
        return every

    try:
        visit(root)
    except _NoTree:
        return None
    return (masks, order) if len(set(order)) == len(order) else None


class _NoTree(Exception):
    """A node has two parents, or the tree has more leaves than bits."""


def reached(xp: Any, bits: LeafBits, x: Any, choose: Callable[[Any, Any, list[Any]], Any]) -> Any:
    """The leaf [trees, rows] that each row reaches; `choose` picks by value and threshold among children."""
    trees, rows = bits.feature.shape[1], x.shape[0]
    values = xp.take(xp.swapaxes(x, 0, 1), xp.asarray(bits.feature.reshape(-1)), axis=0)
    values = xp.reshape(values, (bits.nodes, trees, rows))
    out = choose(values, xp.asarray(bits.threshold), [xp.asarray(masks) for masks in bits.ruled_out])
    left = xp.any_bits(xp.broadcast_to(out, values.shape), 0) ^ xp.asarray(bits.all)
    exponent = xp.bitcast(xp.astype(left, np.float32), np.uint32) >> 23  # of a power of two, with a bias of 127
    first = np.arange(trees, dtype=np.uint32)[:, None] * (len(bits.leaf) // trees)
    return xp.take(xp.asarray(bits.leaf), xp.asarray(first) + (exponent - 127), axis=0)
