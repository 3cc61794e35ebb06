"""Operators that read or write elements at computed positions: Gather, Scatter, TopK, OneHot, …"""

from __future__ import annotations

import math

import numpy as np

from ep.errors import InvalidInput
from ep.ops.axes import axis_of, one_of, scalar
from ep.ops.limits import along, coordinates, starts
from ep.registry import Host, op

# Gather


@op("Gather", since=1, picks=True)
def gather(xp, data, indices: along("data"), *, axis=0):
    return xp.take(data, indices, axis=axis_of(axis, data.ndim))


@op("GatherElements", since=11)
def gather_elements(xp, data, indices: along("data"), *, axis=0):
    axis = axis_of(axis, data.ndim)
    _check_covered("GatherElements", data, indices, axis)
    return xp.take_along_axis(_corner(data, indices.shape, axis), indices, axis=axis)


@op("GatherND", since=12)
def gather_nd(xp, data, indices: coordinates("data", "indices", "batch_dims"), *, batch_dims=0):
    """Batch and indexed axes become one, whose places are counted row by row."""
    b, k = batch_dims, indices.shape[-1]
    if b + k > data.ndim:
        raise InvalidInput(
            f"GatherND indices of {k} components and {b} batch axes need more than {data.ndim} data axes."
        )
    if tuple(data.shape[:b]) != tuple(indices.shape[:b]):
        raise InvalidInput(
            f"GatherND data {list(data.shape)} and indices {list(indices.shape)} differ in the first {b} axes."
        )
    places = _places(xp, indices, data.shape[b : b + k])
    if b:
        batch = xp.arange(math.prod(data.shape[:b]), dtype=np.int64) * math.prod(data.shape[b : b + k])
        places = places + xp.reshape(batch, data.shape[:b] + (1,) * (places.ndim - b))
    rows = xp.reshape(data, (math.prod(data.shape[: b + k]), *data.shape[b + k :]))
    return xp.take(rows, places, axis=0)


@op("GatherND", since=11)
def gather_nd_11(xp, data, indices: coordinates("data", "indices")):
    return gather_nd(xp, data, indices)


def _places(xp, indices, sizes: tuple[int, ...]):
    """Index tuples along the last axis as places in an array of these sizes, negative ones from the back."""
    places = xp.zeros(indices.shape[:-1], dtype=np.int64)
    for i, size in enumerate(sizes):
        places = places * size + _inside(xp, indices[..., i], size)
    return places


def _inside(xp, indices, size: int):
    """As `_wrapped`; an index outside is an error where the host knows it."""
    if isinstance(indices, np.ndarray) and indices.size and not -size <= indices.min() <= indices.max() < size:
        raise IndexError(f"an index from {indices.min()} to {indices.max()} is outside of {size} elements")
    return _wrapped(xp, indices, size)


def _wrapped(xp, indices, size: int):
    indices = xp.astype(indices, np.int64)
    return xp.where(indices < 0, indices + size, indices)


def _corner(data, shape: tuple[int, ...], axis: int):
    """The part of data that indices of this shape can reach; whole along the axis."""
    if all(n == m for i, (n, m) in enumerate(zip(data.shape, shape, strict=True)) if i != axis):
        return data
    return data[tuple(slice(None) if i == axis else slice(n) for i, n in enumerate(shape))]


def _check_covered(name: str, data, indices, axis: int) -> None:
    """Libraries broadcast, the spec does not: a shorter data axis is an error."""
    pairs = zip(indices.shape, data.shape, strict=True)
    if any(n > m for i, (n, m) in enumerate(pairs) if i != axis):
        raise InvalidInput(
            f"{name} indices of shape {list(indices.shape)} exceed data of shape {list(data.shape)}.",
            why=f"only axis {axis} may be longer in indices than in data.",
        )


# Scatter


@op("ScatterElements", since=16)
def scatter_elements(xp, data, indices: along("data"), updates, *, axis=0, reduction="none"):
    """Data, indices and updates become flat, so that one index array is enough."""
    axis = axis_of(axis, data.ndim)
    _check_covered("ScatterElements", data, indices, axis)
    if tuple(indices.shape) != tuple(updates.shape):
        raise InvalidInput(
            f"ScatterElements indices have shape {list(indices.shape)}, but updates {list(updates.shape)}."
        )
    strides = [math.prod(data.shape[i + 1 :]) for i in range(data.ndim)]
    places = _inside(xp, indices, data.shape[axis]) * strides[axis]
    for i, n in enumerate(indices.shape):
        if i != axis:
            steps = xp.arange(n, dtype=np.int64) * strides[i]
            places = places + xp.reshape(steps, (-1,) + (1,) * (data.ndim - 1 - i))
    flat = xp.scatter(xp.reshape(data, (-1,)), (xp.reshape(places, (-1,)),), xp.reshape(updates, (-1,)), reduction)
    return xp.reshape(flat, data.shape)


@op("ScatterElements", since=11)
@op("Scatter", since=9)
def scatter_elements_11(xp, data, indices: along("data"), updates, *, axis=0):
    return scatter_elements(xp, data, indices, updates, axis=axis)


@op("ScatterND", since=16)
def scatter_nd(xp, data, indices: coordinates("data", "indices"), updates, *, reduction="none"):
    k = indices.shape[-1]
    wanted = (*indices.shape[:-1], *data.shape[k:])
    if k > data.ndim or tuple(updates.shape) != wanted:
        raise InvalidInput(
            f"ScatterND updates have shape {list(updates.shape)}, but data {list(data.shape)} with "
            f"indices {list(indices.shape)} needs {list(wanted)}."
        )
    places = xp.reshape(_places(xp, indices, data.shape[:k]), (-1,))
    rows = xp.reshape(data, (math.prod(data.shape[:k]), *data.shape[k:]))
    updates = xp.reshape(updates, (places.shape[0], *data.shape[k:]))
    return xp.reshape(xp.scatter(rows, (places,), updates, reduction), data.shape)


@op("ScatterND", since=11)
def scatter_nd_11(xp, data, indices: coordinates("data", "indices"), updates):
    return scatter_nd(xp, data, indices, updates)


@op("TensorScatter", since=24)
def tensor_scatter(
    xp, past_cache, update, write_indices: starts("past_cache", "update") = None, *, axis=-2, mode="linear"
):
    one_of("mode", mode, "linear", "circular")
    axis = axis_of(axis, past_cache.ndim)
    batch, length = update.shape[0], update.shape[axis]
    if write_indices is None and mode == "linear":
        return xp.slice_update(past_cache, update, (0,) * past_cache.ndim)
    if batch == 1 and mode == "linear":
        start = xp.reshape(write_indices, ())
        return xp.slice_update(past_cache, update, [start if i == axis else 0 for i in range(update.ndim)])
    steps = xp.arange(length, dtype=np.int64)[None, :]
    starts = 0 if write_indices is None else xp.reshape(xp.astype(write_indices, np.int64), (batch, 1))
    places = (steps + starts) % past_cache.shape[axis] if mode == "circular" else steps + starts
    places = xp.broadcast_to(places, (batch, length))
    rows = xp.arange(batch, dtype=np.int64)[:, None]
    index = (rows, *[slice(None)] * (axis - 1), places)
    return xp.scatter(past_cache, index, xp.moveaxis(update, axis, 1), "none")


# Order and search


@op("TopK", since=11)
def top_k(xp, x, k: Host, *, axis=-1, largest=1, sorted=1):
    return _top_k(xp, x, int(scalar(k)), axis, bool(largest))


@op("TopK", since=10)
def top_k_10(xp, x, k: Host, *, axis=-1):
    return _top_k(xp, x, int(scalar(k)), axis, True)


@op("TopK", since=1)
def top_k_1(xp, x, *, k, axis=-1):
    return _top_k(xp, x, k, axis, True)


def _top_k(xp, x, k: int, axis: int, largest: bool):
    axis = axis_of(axis, x.ndim)
    if not 0 <= k <= x.shape[axis]:
        raise InvalidInput(
            f"TopK cannot take {k} of the {x.shape[axis]} elements along axis {axis}.",
            fix=f"give a k from 0 to {x.shape[axis]}.",
        )
    return xp.topk(x, k, axis=axis, largest=largest)


@op("OneHot", since=11)
def one_hot(xp, indices, depth: Host, values, *, axis=-1):
    depth = int(scalar(depth))
    if not 0 < depth < 1 << 40:
        raise InvalidInput(f"the depth of OneHot is {depth}.")
    axis = axis_of(axis, indices.ndim + 1)
    classes = xp.reshape(xp.arange(depth, dtype=np.int64), (-1,) + (1,) * (indices.ndim - axis))
    hot = xp.expand_dims(_wrapped(xp, indices, depth), axis) == classes
    return xp.where(hot, values[1:], values[:1])


@op("OneHot", since=9)
def one_hot_9(xp, indices, depth: Host, values, *, axis=-1):
    """Negative indices name no class before opset 11."""
    indices = xp.astype(indices, np.int64)
    none = int(scalar(depth))
    return one_hot(xp, xp.where(indices < 0, none, indices), depth, values, axis=axis)


@op("NonZero", since=9, host_only="the number of elements that it finds depends on data")
def non_zero(xp, x):
    return np.argwhere(x).T.astype(np.int64)


@op("Unique", since=11, host_only="the number of elements that it finds depends on data")
def unique(xp, x, *, axis=None, sorted=1):
    x = xp.reshape(x, (-1,)) if axis is None else x
    axis = axis_of(axis or 0, x.ndim)
    _, first, inverse, counts = np.unique(
        _sortable(x), return_index=True, return_inverse=True, return_counts=True, axis=axis
    )
    inverse = np.ravel(inverse)
    if not sorted:
        order = np.argsort(first)
        inverse = np.argsort(order)[inverse]
        first, counts = first[order], counts[order]
    return np.take(x, first, axis=axis), *(a.astype(np.int64) for a in (first, inverse, counts))


def _sortable(x: np.ndarray) -> np.ndarray:
    """NumPy finds unique rows only in dtypes of its own."""
    if x.dtype.kind == "O":
        return x.astype(str)
    return x if x.dtype.isbuiltin == 1 else x.astype(np.float32)
