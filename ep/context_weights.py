"""Where do the weights of a context model lie? Where the original's do, if that is beside; else in a file of its own.

That file is aligned, so that a device can borrow it. Only a model that is to be one file takes weights in, as long as
it stays below protobuf's limit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ep import stored_results
from ep.data_files import DataFile, Piece, plan_files
from ep.named_weights import refer
from ep.outline import write_extras
from ep.packing import tensor_data
from ep.places import Place
from ep.proto_graphs import graphs
from ep.safetensors import KEPT
from ep.wire import IN_FILE

if TYPE_CHECKING:
    import onnx

    from ep.stored_plan import Kept
    from ep.weights import WeightStore

MOST_INLINE = 1 << 30  # bytes of weights in the model file; a protobuf file ends at 2 GiB


def place(
    proto: onnx.ModelProto,
    store: WeightStore,
    path: Path,
    one_file: bool,
    extras: Mapping[str, np.ndarray],
    kept: Sequence[Kept],
) -> list[DataFile]:
    """Let every external initializer be found from the model file `path`; the files to write for that.

    `extras` are weights to write beside them. So is what is `kept` of weights that are written, too: who changes
    weights in a file that other models share does not know of it.
    """
    moved, inline = [], 0
    more = [_piece(name, array) for name, array in extras.items()]
    taken = {
        _file(location, store).resolve() for location in _locations(proto)
    }  # this model or the original reads them
    for tensor in _external(proto):
        location = next(entry.value for entry in tensor.external_data if entry.key == "location")
        if location == IN_FILE:
            dtype, shape, data = tensor_data(tensor, store)
            inline += len(data)
            if one_file and inline <= MOST_INLINE:
                _inline(tensor, data)
            else:
                moved.append((tensor, Piece(tensor.name, dtype, shape, data)))
        elif not _reachable(tensor, location, store, path):
            moved.append((tensor, Piece(tensor.name, *tensor_data(tensor, store))))
    target = path
    while target.with_suffix(".data").resolve() in taken:
        target = target.with_stem(f"{target.stem}_")
    written = {piece.name: piece for piece in (*(piece for _, piece in moved), *more)}
    results = [
        (_piece(f"{KEPT}{number}", each.array), each)
        for number, each in enumerate(kept)
        if all(name in written for name, _ in each.sources)
    ]
    pieces = [*(piece for _, piece in moved), *more, *(piece for piece, _ in results)]
    files = plan_files(target, "external", pieces, None) if pieces else []
    places = {id(piece): (file.name, offset) for file in files for piece, offset in file.places}
    for tensor, piece in moved:
        refer(tensor, *places[id(piece)], len(piece.data))
    write_extras(proto, (Place(piece.name, *places[id(piece)], len(piece.data)) for piece in more))
    rows = []
    for piece, each in results:
        starts = [(places[id(written[name])], offset) for name, offset in each.sources]
        rows.append((each.digest, [(file, start + off) for (file, start), off in starts], piece, places[id(piece)]))
    stored_results.add(proto, rows)
    return files


def _piece(name: str, array: np.ndarray) -> Piece:
    import onnx_ir as ir

    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return Piece(name, ir.DataType.from_numpy(array.dtype).name, array.shape, flat.data, reserved=True)


def inline_attributes(proto: onnx.ModelProto, store: WeightStore) -> None:
    """Bring tensors of attributes back into the graph, which has to travel without the original's file."""
    import onnx

    for graph in graphs(proto.graph):
        for node in graph.node:
            for attribute in node.attribute:
                for tensor in (*([attribute.t] if attribute.HasField("t") else ()), *attribute.tensors):
                    if tensor.data_location == onnx.TensorProto.EXTERNAL:
                        _inline(tensor, tensor_data(tensor, store)[2])


def as_bytes(tensor: onnx.TensorProto, twin: onnx.TensorProto, name: str) -> None:
    """Make `twin` the uint8 tensor of the bytes of a tensor; it shares external data."""
    import onnx
    import onnx_ir as ir

    nbytes = (math.prod(tensor.dims) * ir.DataType(tensor.data_type).bitwidth + 7) // 8
    twin.CopyFrom(tensor)
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        _inline(twin, ir.serde.deserialize_tensor(tensor).tobytes())
    twin.name, twin.data_type = name, onnx.TensorProto.UINT8
    twin.ClearField("dims")
    twin.dims.append(nbytes)


def _external(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    import onnx

    for graph in graphs(proto.graph):
        yield from (t for t in graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL)


def _locations(proto: onnx.ModelProto) -> set[str]:
    return {entry.value for tensor in _external(proto) for entry in tensor.external_data if entry.key == "location"}


def _file(location: str, store: WeightStore) -> Path:
    return Path(location[1:]) if location.startswith("\0") else (store.directory or Path()) / location


def _inline(tensor: onnx.TensorProto, data: bytes | memoryview) -> None:
    for field in set(tensor.DESCRIPTOR.fields_by_name) - {"name", "data_type", "dims"}:
        tensor.ClearField(field)  # the location too: a tensor that has one is not mapped when the file is read
    tensor.raw_data = bytes(data)


def _reachable(tensor: onnx.TensorProto, location: str, store: WeightStore, path: Path) -> bool:
    """Whether the file lies beside or below the new model; the tensor then refers to it from there."""
    base = path.parent.resolve()
    file = _file(location, store)
    if not file.resolve().is_relative_to(base):
        return False
    for entry in tensor.external_data:
        if entry.key == "location":
            entry.value = file.resolve().relative_to(base).as_posix()
    return True
