"""Which of a model's tensors does `ep.load(…, weights=…)` replace? Those that a safetensors file names."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ep.errors import InvalidModel, did_you_mean
from ep.safetensors import AS_BYTES, DTYPES, Entry, parse, shards
from ep.weights import WeightStore

if TYPE_CHECKING:
    import onnx_ir as ir

Weights = Any  # str | os.PathLike, or several of them


def attach(model: ir.Model, store: WeightStore, weights: Weights, name: str) -> None:
    """Gives the initializers, and the inputs, that the files name, the data of these files.

    An input that gets data is no input any more. Tensors that the model does not know are left alone, but one at
    least must fit.

    Raises:
        InvalidModel: a file is damaged, or a tensor has another shape or dtype than the model says.
    """
    found = _collect(store, weights)
    known = {v.name or "": v for v in (*model.graph.inputs, *model.graph.initializers.values())}
    problems = []
    for tensor, (location, entry) in found.items():
        value = known.get(tensor)
        if value is not None:
            problems += _assign(model.graph, value, location, entry)
    if problems:
        raise InvalidModel.from_problems(
            name, problems, why="the weights are not those of this model.", fix="use the weights it was exported with."
        )
    if found and not known.keys() & found.keys():
        first = next(iter(found))
        raise InvalidModel(
            f"none of the {len(found)} tensors of {_names(weights)} is a weight of {name}.",
            why=f"the first is '{first}', and the model has no such initializer or input."
            + did_you_mean(first, list(known)[:10_000]),
            fix="use the weights that the model was exported with; tensors are matched by their names.",
        )


def _collect(store: WeightStore, weights: Weights) -> dict[str, tuple[str, Entry]]:
    found: dict[str, tuple[str, Entry]] = {}
    for path, promised in _files(weights):
        location, content = store.add(path)
        entries = parse(content, path.name)
        missing = [tensor for tensor in promised if tensor not in entries]
        twice = [tensor for tensor in entries if tensor in found]
        if missing or twice:
            raise InvalidModel(
                f"'{path.name}' does not hold the tensors that it should.",
                why=f"{len(missing)} of the index are missing and {len(twice)} are in another file too: "
                + ", ".join(map(repr, (missing + twice)[:3])),
                fix="copy the index and all of its shards again.",
            )
        found |= {tensor: (location, entry) for tensor, entry in entries.items()}
    return found


def _files(weights: Weights) -> Iterator[tuple[Path, Iterable[str]]]:
    for item in [weights] if isinstance(weights, str | os.PathLike) else weights:
        path = Path(item)
        if path.suffix == ".json":
            yield from ((path.parent / file, tensors) for file, tensors in shards(path).items())
        else:
            yield path, ()


def _assign(graph: ir.Graph, value: ir.Value, location: str, entry: Entry) -> list[str]:
    """What is wrong, if anything is."""
    import onnx_ir as ir

    declared = value.const_value
    dtype = value.dtype if declared is None else declared.dtype
    shape = _static(value.shape) if declared is None else tuple(declared.shape.numpy())
    if shape is None:
        shape = entry.shape
    problem = None if dtype is None else _mismatch(dtype, shape, entry)
    if dtype is None or problem:
        return [f"'{value.name}' is {problem or f'{entry.dtype} in the file, and has no dtype in the model'}"]
    value.const_value = ir.ExternalTensor(
        location, entry.offset, entry.nbytes, dtype, shape=ir.Shape(shape), name=value.name or ""
    )
    if declared is None:
        graph.inputs.remove(value)
        graph.register_initializer(value)
    return []


def _static(shape: Any) -> tuple[int, ...] | None:
    sizes = () if shape is None else tuple(shape)
    return None if shape is None or not all(isinstance(d, int) for d in sizes) else sizes


def _mismatch(dtype: ir.DataType, shape: tuple[int, ...], entry: Entry) -> str | None:
    packed = entry.dtype in ("U8", "I8") and dtype.name in AS_BYTES
    same_bytes = entry.nbytes == (math.prod(shape) * dtype.bitwidth + 7) // 8
    fits = same_bytes if packed else dtype.name in DTYPES[entry.dtype][1] and shape == entry.shape
    if fits:
        return None
    return f"{entry.dtype}{list(entry.shape)} in the file, and {dtype.name}{list(shape)} in the model"


def _names(weights: Weights) -> str:
    items = [weights] if isinstance(weights, str | os.PathLike) else weights
    return ", ".join(f"'{Path(item).name}'" for item in items)
