"""Operators of onnxruntime's own domain that move, cut, index or compare: ExpandDims, Pad, Unique, …"""

from __future__ import annotations

import math

import numpy as np

from ep.errors import InvalidInput
from ep.ops.axes import axis_of, scalar
from ep.ops.indexing import gather, gather_nd, unique
from ep.ops.limits import along, coordinates
from ep.ops.movement import pad, slice_, trilu
from ep.registry import Host, op

MS = "com.microsoft"


@op("ExpandDims", domain=MS, keeps=True)
def expand_dims(xp, x, axis: Host):
    return xp.expand_dims(x, axis=axis_of(int(scalar(axis)), x.ndim + 1))


@op("GatherND", domain=MS)
def gather_nd_microsoft(xp, data, indices: coordinates("data", "indices")):
    return gather_nd(xp, data, indices)


@op("TorchEmbedding", domain=MS)
def torch_embedding(xp, weight, indices: along("weight", 0), padding_idx=None, scale_grad_by_freq=None):
    return gather(xp, weight, indices)  # the other inputs only concern gradients


@op("Pad", domain=MS)
def pad_microsoft(xp, data, pads: Host, value=None, *, mode="constant"):
    return pad(xp, data, pads, value, mode=mode)


@op("Trilu", domain=MS)
def trilu_microsoft(xp, x, k=None, *, upper=1):
    return trilu(xp, x, k, upper=upper)


@op(
    "Unique",
    domain=MS,
    out=(0, "int64", "int64"),
    host_only="the number of elements that it finds depends on data",
)
def unique_microsoft(xp, x):
    values, _, places, counts = unique(xp, x, sorted=0)
    return values, places, counts


@op("DynamicSlice", since=1)
def dynamic_slice(xp, data, starts: Host, ends: Host, axes: Host = None):
    return slice_(xp, data, starts, ends, axes)


@op("UnfoldTensor", domain=MS)
def unfold_tensor(xp, x, *, size, dim=-1, step=1):
    """The windows of an axis, their elements along a new last axis."""
    dim = axis_of(dim, x.ndim)
    starts = np.arange(0, x.shape[dim] - size + 1, step)
    windows = xp.take(x, xp.asarray(starts[:, None] + np.arange(size)), axis=dim)
    return xp.moveaxis(windows, dim + 1, -1)


@op("NGramRepeatBlock", domain=MS, out=(1,))
def n_gram_repeat_block(xp, input_ids, scores, *, ngram_size):
    """-inf for every token that followed an earlier occurrence of the last `ngram_size - 1` tokens."""
    batch, length = input_ids.shape
    places = length - ngram_size + 1
    if places <= 0:
        return scores
    repeated = xp.ones((batch, places), dtype=np.bool_)
    for j in range(ngram_size - 1):
        last = input_ids[:, places + j : places + j + 1]
        repeated = xp.logical_and(repeated, input_ids[:, j : j + places] == last)
    bans = xp.astype(xp.where(repeated, -math.inf, math.inf), xp.dtype_of(scores))
    rows = xp.arange(batch, dtype=np.int64)[:, None]
    return xp.scatter(scores, (rows, input_ids[:, ngram_size - 1 :]), bans, "min")


@op("CDist", domain=MS)
def cdist(xp, a, b, *, metric="sqeuclidean"):
    """Distances by the norms of the rows and one product, in float32 at least, as onnxruntime does."""
    if metric not in ("sqeuclidean", "euclidean"):
        raise InvalidInput(f"CDist has no metric '{metric}'.", fix="use 'sqeuclidean' or 'euclidean'.")
    rows = xp.sum(a * a, axis=1, keepdims=True)
    columns = xp.reshape(xp.sum(b * b, axis=1), (1, -1))
    squares = xp.maximum(rows + columns - 2 * xp.matmul(a, xp.swapaxes(b, 0, 1)), 0)
    return xp.sqrt(squares) if metric == "euclidean" else squares


@op(
    "DynamicTimeWarping",
    domain=MS,
    out=("int32",),
    host_only="the length of the path that it finds depends on data",
)
def dynamic_time_warping(xp, cost):
    """The cheapest monotonic path from corner to corner; costs are summed diagonal by diagonal."""
    cost = np.asarray(cost, np.float64).reshape(cost.shape[-2:])
    m, n = cost.shape
    total = np.full((m + 1, n + 1), np.inf)
    total[0, 0] = 0
    for diagonal in range(m + n - 1):
        i = np.arange(max(0, diagonal - n + 1), min(m, diagonal + 1))
        j = diagonal - i
        before = np.minimum(np.minimum(total[i, j], total[i, j + 1]), total[i + 1, j])
        total[i + 1, j + 1] = cost[i, j] + before
    return _trace_back(total)


def _trace_back(total: np.ndarray) -> np.ndarray:
    i, j = total.shape[0] - 1, total.shape[1] - 1
    path = [(i - 1, j - 1)]
    while i > 1 or j > 1:
        moves = ((i - 1, j - 1), (i - 1, j), (i, j - 1))
        i, j = min(moves, key=lambda move: total[move])
        path.append((i - 1, j - 1))
    return np.asarray(path[::-1], np.int32).T
