"""How is a model compiled before it is needed? It runs once per signature, on arrays of the shapes asked for."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import numpy as np

from ep.compiled_group import COMPILE_ALL
from ep.errors import ExecutionError, InvalidInput, did_you_mean
from ep.feeds import ValueInfo
from ep.memory import check_room

Shapes = Mapping[str, Any]  # name of an input → shape or array, or name of a dimension → size
Progress = Callable[[int, int], None]  # signatures done, signatures in all


def feeds_for(inputs: Sequence[ValueInfo], given: Shapes) -> dict[str, Any]:
    """Feeds of these shapes: arrays are taken as they are, all others are zeros (empty strings, False).

    Raises:
        InvalidInput: a name is unknown, a shape does not fit, or a dimension has no size.
    """
    if not isinstance(given, Mapping):
        raise InvalidInput(
            f"the shapes are {given!r}, not a mapping from inputs or dimensions.",
            why="the model's inputs are " + "; ".join(map(str, inputs)) + ".",
            fix="write {'input': (1, 3)} or {'dimension': 1}, or a list of such.",
        )
    infos = {info.name: info for info in inputs}
    dims = {d for info in inputs for d in info.shape or () if isinstance(d, str)}
    unknown = [name for name in given if name not in infos and name not in dims]
    if unknown:
        raise InvalidInput(
            f"the shapes name '{unknown[0]}', which is no input and no dimension.{did_you_mean(unknown[0], infos)}",
            why="the model's inputs are " + "; ".join(map(str, inputs)) + ".",
            fix="name an input with its shape, or a dimension with its size.",
        )
    sizes = {name: _size(name, given[name]) for name in given if name in dims and name not in infos}
    for name, value in given.items():
        if name in infos:
            _learn(infos[name], _shape(infos[name], value), sizes)
    needed = [info for info in inputs if info.kind != "optional" or info.name in given]
    return {info.name: _feed(info, given.get(info.name), sizes) for info in needed}


def _shape(info: ValueInfo, given: Any) -> tuple[int, ...]:
    shape = getattr(given, "shape", given)
    if not isinstance(shape, tuple | list) or not all(isinstance(size, int | np.integer) for size in shape):
        raise InvalidInput(
            f"'{info.name}' is given as {given!r}.", why=f"the model declares {info}.", fix="give its shape, a tuple."
        )
    return tuple(map(int, shape))


def _size(name: str, given: Any) -> int:
    """The size of a dimension, also as the shape with this one dimension."""
    size = given[0] if isinstance(given, tuple | list) and len(given) == 1 else given
    if not isinstance(size, int | np.integer):
        raise InvalidInput(f"dimension '{name}' is given as {given!r}.", fix="give its size, an integer.")
    return int(size)


def _learn(info: ValueInfo, shape: tuple[int, ...], sizes: dict[str, int]) -> None:
    """The sizes of symbolic dimensions that a given shape implies."""
    if info.shape is None:
        return
    fits = len(shape) == len(info.shape)
    if not fits or any(isinstance(d, int) and d != size for d, size in zip(info.shape, shape, strict=True)):
        raise InvalidInput(
            f"'{info.name}' is given with shape {list(shape)}.",
            why=f"the model declares {info}.",
            fix="give a size for each of its dimensions, that of the model where it has one.",
        )
    for dim, size in zip(info.shape, shape, strict=True):
        if isinstance(dim, str) and sizes.setdefault(dim, size) != size:
            raise InvalidInput(
                f"dimension '{dim}' is both {sizes[dim]} and {size}.",
                why=f"'{info.name}' is given with shape {list(shape)}, and the model declares {info}.",
                fix="give each dimension one size.",
            )


def _feed(info: ValueInfo, given: Any, sizes: Mapping[str, int]) -> Any:
    if given is not None and hasattr(given, "shape"):
        return given
    shape = given if given is not None else info.shape
    if shape is None or info.dtype is None:
        raise InvalidInput(
            f"input '{info.name}' has no shape or dtype to warm up with.",
            why=f"the model declares only {info}.",
            fix=f"pass an array for it: session.warmup({{'{info.name}': array}}).",
        )
    known = [sizes.get(d) if isinstance(d, str) else d for d in shape]
    if None in known:
        missing = next(d for d, size in zip(shape, known, strict=True) if size is None)
        raise InvalidInput(
            f"input '{info.name}' has the dimension '{missing or '?'}' of no known size.",
            why=f"the model declares {info}.",
            fix=f"give its shape, such as {{'{info.name}': {tuple(1 if k is None else k for k in known)}}}"
            + (f", or the size: {{'{missing}': 1}}." if missing else "."),
        )
    check_room(f"input '{info.name}' of shape {known}", math.prod(int(k or 0) for k in known) * info.dtype.itemsize)
    array = np.zeros([int(k or 0) for k in known], info.dtype)
    array = np.full(array.shape, "", object) if info.dtype.kind == "O" else array
    return [array] if info.kind == "sequence" else array


def warm_up(session: Any, shapes: Sequence[Shapes], progress: Progress | None, parallel: bool) -> None:
    """Run a session once on each of these shapes, several at a time where that compiles faster."""
    work = [feeds_for(session.inputs, each) for each in shapes]  # all are checked before any runs
    workers = min(len(work), len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    report = progress or (lambda done, total: None)
    report(0, len(work))
    if not parallel or workers < 2:
        for done, feeds in enumerate(work, 1):
            _run(session, feeds)
            report(done, len(work))
        return
    with ThreadPoolExecutor(workers, "ep-compile") as pool:
        futures = [pool.submit(_run, session, feeds) for feeds in work]
        for done, future in enumerate(as_completed(futures), 1):
            future.result()
            report(done, len(work))


def _run(session: Any, feeds: Mapping[str, Any]) -> None:
    before = COMPILE_ALL.set(True)
    try:
        session.run(None, feeds)
    except ExecutionError as error:
        raise ExecutionError(
            f"warming up with inputs { ({name: getattr(v, 'shape', '-') for name, v in feeds.items()}) } failed.",
            why=str(error),
            fix="pass arrays with contents that the model takes: session.warmup({'name': array}).",
        ) from error
    finally:
        COMPILE_ALL.reset(before)
