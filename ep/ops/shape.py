"""Operators that read or change a shape but no element: Shape, Reshape, Transpose, Expand, …"""

from __future__ import annotations

import math

import numpy as np

from ep.errors import InvalidInput
from ep.ops.axes import axes_of, axis_of, ints, scalar
from ep.registry import Host, ShapeOf, op


@op("Shape", since=15)
def shape(xp, data: ShapeOf, *, start=0, end=None):
    return np.asarray(data.shape[start:end], np.int64)


@op("Shape", since=1)
def shape_1(xp, data: ShapeOf):
    return shape(xp, data)


@op("Size", since=1)
def size(xp, data: ShapeOf):
    return np.asarray(math.prod(data.shape), np.int64)


@op("Identity", since=1, alias=True, keeps=True)
def identity(xp, x):
    return x


@op("Reshape", since=14, keeps=True)
def reshape(xp, data, shape: Host, *, allowzero=0):
    return xp.reshape(data, _target(tuple(data.shape), ints(shape), bool(allowzero)))


@op("Reshape", since=5, keeps=True)
def reshape_5(xp, data, shape: Host):
    return reshape(xp, data, shape)


@op("Reshape", since=1, keeps=True)
def reshape_1(xp, data, *, consumed_inputs=None, shape=None):
    return reshape(xp, data, shape or ())


def _target(old: tuple[int, ...], new: tuple[int, ...], allowzero: bool) -> tuple[int, ...]:
    """A 0 copies a dimension, -1 takes what is left: also beside a copied 0, where NumPy would not divide."""
    copied = {i for i, n in enumerate(new) if n == 0 and not allowzero}
    if any(i >= len(old) for i in copied):
        raise _mismatch(old, new, "a 0 copies the dimension of the same axis, which the input does not have.")
    if min(new, default=0) < -1:
        raise _mismatch(old, new, "a size is 0, -1 or positive.")
    fixed = math.prod(n for i, n in enumerate(new) if i not in copied and n != -1)
    left = math.prod(n for i, n in enumerate(old) if i not in copied)
    if -1 in new and (fixed == 0 or left % fixed or new.count(-1) > 1):
        raise _mismatch(old, new, f"{left} elements have no unique distribution over one -1 and {fixed}.")
    return tuple(old[i] if i in copied else left // fixed if n == -1 else n for i, n in enumerate(new))


def _mismatch(old: tuple[int, ...], new: tuple[int, ...], why: str) -> InvalidInput:
    return InvalidInput(
        f"a tensor of shape {list(old)} cannot be reshaped to {list(new)}.",
        why=why,
        fix="correct the shape that the node is given, or the shape of the input.",
    )


@op("Flatten", since=1, keeps=True)
def flatten(xp, x, *, axis=1):
    split = axis if axis == x.ndim else axis_of(axis, x.ndim)
    return xp.reshape(x, (math.prod(x.shape[:split]), math.prod(x.shape[split:])))


@op("Squeeze", since=13, keeps=True)
def squeeze(xp, data, axes: Host = None):
    if axes is None:
        gone = tuple(i for i, n in enumerate(data.shape) if n == 1)
    else:
        gone = axes_of(ints(axes), data.ndim)
    return xp.squeeze(data, axis=gone) if gone else data


@op("Squeeze", since=1, keeps=True)
def squeeze_1(xp, data, *, axes=None):
    return squeeze(xp, data, axes)


@op("Unsqueeze", since=13, keeps=True)
def unsqueeze(xp, data, axes: Host):
    axes = ints(axes)
    new = axes_of(axes, data.ndim + len(axes))
    return xp.expand_dims(data, axis=tuple(sorted(new))) if new else data


@op("Unsqueeze", since=1, keeps=True)
def unsqueeze_1(xp, data, *, axes):
    return unsqueeze(xp, data, axes)


@op("Transpose", since=1, keeps=True)
def transpose(xp, data, *, perm=None):
    if perm and sorted(perm) != list(range(data.ndim)):
        raise InvalidInput(f"perm {list(perm)} does not name each axis of a tensor of rank {data.ndim} once.")
    return xp.transpose(data, tuple(perm) if perm else tuple(range(data.ndim))[::-1])


@op("Expand", since=8, keeps=True)
def expand(xp, x, shape: Host):
    return xp.broadcast_to(x, np.broadcast_shapes(tuple(x.shape), ints(shape)))


@op("Tile", since=6)
def tile(xp, x, repeats: Host):
    return xp.tile(x, ints(repeats))


@op("Tile", since=1)
def tile_1(xp, x, tiles: Host, axis: Host):
    repeats = [1] * x.ndim
    repeats[axis_of(int(scalar(axis)), x.ndim)] = int(scalar(tiles))
    return xp.tile(x, tuple(repeats))


# How [N, C, H, W] is seen while blocks move: the axes of the channel's two block factors and of the depth.
_DEPTH_TO_SPACE = {"DCR": (0, 3, 4, 1, 5, 2), "CRD": (0, 1, 4, 2, 5, 3)}
_SPACE_TO_DEPTH = {"DCR": (0, 3, 5, 1, 2, 4), "CRD": (0, 1, 3, 5, 2, 4)}


@op("DepthToSpace", since=11)
def depth_to_space(xp, x, *, blocksize, mode="DCR"):
    n, c, h, w = x.shape
    depth = _blocks(c, blocksize**2, "channels")
    split = (blocksize, blocksize, depth) if mode == "DCR" else (depth, blocksize, blocksize)
    x = xp.transpose(xp.reshape(x, (n, *split, h, w)), _DEPTH_TO_SPACE[mode])
    return xp.reshape(x, (n, depth, h * blocksize, w * blocksize))


@op("DepthToSpace", since=1)
def depth_to_space_1(xp, x, *, blocksize):
    return depth_to_space(xp, x, blocksize=blocksize)


@op("SpaceToDepth", since=28)
def space_to_depth(xp, x, *, blocksize, mode="DCR"):
    n, c, h, w = x.shape
    rows, columns = _blocks(h, blocksize, "rows"), _blocks(w, blocksize, "columns")
    x = xp.reshape(x, (n, c, rows, blocksize, columns, blocksize))
    return xp.reshape(xp.transpose(x, _SPACE_TO_DEPTH[mode]), (n, c * blocksize**2, rows, columns))


@op("SpaceToDepth", since=1)
def space_to_depth_1(xp, x, *, blocksize):
    return space_to_depth(xp, x, blocksize=blocksize)


def _blocks(count: int, block: int, what: str) -> int:
    if count % block:
        raise InvalidInput(f"{count} {what} cannot be divided into blocks of {block}.")
    return count // block
