"""Which of a model's tensors does `ep.load(…, weights=…)` replace? Those that a safetensors file names."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ep.errors import InvalidInput, InvalidModel, did_you_mean
from ep.safetensors import AS_BYTES, DTYPES, Entry, parse, shards
from ep.weights import WeightStore

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir

Weights = Any  # str | os.PathLike, or several of them


def attach(proto: onnx.ModelProto, store: WeightStore, weights: Weights, name: str) -> None:
    """Gives the initializers, and the inputs, that the files name, the data of these files.

    An input that gets data is no input any more. Tensors that the model does not know are left alone, but one at
    least must fit.

    Raises:
        InvalidModel: a file is damaged, or a tensor has another shape or dtype than the model says.
    """
    found = _collect(store, weights)
    graph = proto.graph
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    inputs = {value.name: value for value in graph.input if value.name not in initializers}
    problems = []
    for tensor in initializers.keys() & found.keys():
        problems += _assign(initializers[tensor], *found[tensor])
    for tensor in [value for value in inputs if value in found]:
        declared, problem = _declared(inputs[tensor], found[tensor][1])
        problems += problem or _assign(declared, *found[tensor])
        graph.initializer.append(declared)
        graph.input.remove(inputs[tensor])
    if problems:
        raise InvalidModel.from_problems(
            name, problems, why="the weights are not those of this model.", fix="use the weights it was exported with."
        )
    known = initializers.keys() | inputs.keys()
    if found and not known & found.keys():
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
    paths = [weights] if isinstance(weights, str | os.PathLike) else weights
    if not isinstance(paths, Iterable) or not all(isinstance(item, str | os.PathLike) for item in paths):
        raise InvalidInput(f"weights must be a path or a list of paths, not {weights!r}.", fix="name the files.")
    for item in paths:
        path = Path(item)
        if path.suffix == ".json":
            yield from ((path.parent / file, tensors) for file, tensors in shards(path).items())
        else:
            yield path, ()


def _assign(tensor: onnx.TensorProto, location: str, entry: Entry) -> list[str]:
    """Lets a tensor refer to the file; returns what is wrong, if anything is."""
    import onnx_ir as ir

    known = tensor.data_type in {int(dtype) for dtype in ir.DataType}
    dtype = ir.DataType(tensor.data_type if known else 0)
    problem = _mismatch(dtype, tuple(tensor.dims), entry)
    if problem:
        return [f"'{tensor.name}' is {problem}"]
    refer(tensor, location, entry.offset, entry.nbytes)
    return []


def refer(tensor: onnx.TensorProto, location: str, offset: int, length: int) -> None:
    """Lets a tensor have its data in a range of a file."""
    for field in ("raw_data", "float_data", "double_data", "int32_data", "int64_data", "uint64_data", "external_data"):
        tensor.ClearField(field)
    tensor.data_location = tensor.EXTERNAL
    for key, value in {"location": location, "offset": offset, "length": length}.items():
        tensor.external_data.add(key=key, value=str(value))


def _declared(value: onnx.ValueInfoProto, entry: Entry) -> tuple[onnx.TensorProto, list[str]]:
    """An initializer without data for an input; dimensions that the model does not know are the file's."""
    import onnx

    declared = value.type.tensor_type
    tensor = onnx.TensorProto(name=value.name, data_type=declared.elem_type)
    dims = declared.shape.dim if declared.HasField("shape") else [None] * len(entry.shape)
    fits = len(dims) == len(entry.shape)
    if fits:
        tensor.dims.extend(
            d.dim_value if d is not None and d.HasField("dim_value") else size
            for d, size in zip(dims, entry.shape, strict=True)
        )
    return tensor, [] if fits else [f"'{value.name}' has {len(entry.shape)} dimensions in the file, not {len(dims)}"]


def _mismatch(dtype: ir.DataType, shape: tuple[int, ...], entry: Entry) -> str | None:
    packed = entry.dtype in ("U8", "I8") and dtype.name in AS_BYTES
    fits = packed or (dtype.name in DTYPES[entry.dtype][1] and shape == entry.shape)
    if fits and entry.nbytes == (math.prod(shape) * dtype.bitwidth + 7) // 8:
        return None
    return f"{entry.dtype}{list(entry.shape)} in the file, and {dtype.name}{list(shape)} in the model"


def _names(weights: Weights) -> str:
    items = [weights] if isinstance(weights, str | os.PathLike) else weights
    return ", ".join(f"'{Path(item).name}'" for item in items)
