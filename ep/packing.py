"""How is a model stored so that a device can borrow every weight? `pack`: aligned data beside a small model file."""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ep import stored_results, wide_weights
from ep.constant_nodes import fold_in, tensors_of
from ep.context_reader import is_context
from ep.data_files import DataFile, Later, Piece, plan_files
from ep.dtypes import onnx_dtype
from ep.errors import InvalidInput, InvalidModel, counted
from ep.loader import read_proto
from ep.named_weights import refer
from ep.proto_graphs import walk
from ep.targets import check_target
from ep.wire import LARGE

if TYPE_CHECKING:
    import onnx

FORMATS = ("safetensors", "external")
_CHUNK = 1 << 24
Progress = Callable[[int, int], None]  # bytes written, bytes in all


@dataclass(frozen=True, slots=True)
class Packed:
    """What `pack` wrote: the model, its data files, and how many tensors share data with another one."""

    model: str
    files: tuple[str, ...]
    tensors: int
    shared: int
    folded: int  # constants that are stored as computed
    nbytes: int

    def to_dict(self) -> dict[str, Any]:
        """The facts as plain data, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        extra = [f"{self.shared} shared"] * bool(self.shared) + [f"{self.folded} computed"] * bool(self.folded)
        note = f" ({', '.join(extra)})" if extra else ""
        if not self.files:
            return f"{self.model}: no tensor is large enough for a data file{note}"
        tensors = counted(self.tensors, "tensor")
        return f"{self.model}: {tensors}{note}, {self.nbytes / 2**20:.1f} MiB in {', '.join(self.files)}"


def pack(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    format: str = "safetensors",
    weights: Any = None,
    provider: str = "",
    fold: bool = True,
    shapes: Mapping[str, Any] | None = None,
    shard_bytes: int | None = None,
    progress: Progress | None = None,
) -> Packed:
    """Writes a model again with every large tensor aligned in a file beside it, ready to be mapped and borrowed.

    `out` is the path of the new model (or a folder for it); its data get the same name, with the suffix
    `.safetensors` or `.data`. Any ONNX runtime can load the result: safetensors files are referred to by ranges.
    Tensors of the same contents are stored once. With `fold`, what `load` would compute from constants each time is
    stored instead of its computation. With a `provider` ("jax" or "mlx"), weights that it would convert at the first
    run are stored converted, too, for it alone: what it wants may depend on the `shapes` of inputs, which are those of
    `ep.estimate`. More than `shard_bytes` of data are spread over several files.
    `weights` are as in `load`. The new files take the place of old ones when they are complete; nothing is changed
    before.

    Raises:
        InvalidModel: the model, or a data file, is damaged or missing.
        InvalidInput: the target cannot be written, has no room, or would replace a file of the original; or the
            model is a context model.
    """
    if format not in FORMATS:
        raise InvalidInput(f"unknown format '{format}'.", fix=f"use {' or '.join(map(repr, FORMATS))}.")
    proto, store, name = read_proto(model, weights)
    if any(map(is_context, walk(proto.graph))):
        raise InvalidInput(
            f"{name} is a context model, and packing it would part it from its compiled code.",
            fix="pack the model that it was made from, and compile what was packed.",
        )
    target = check_target(Path(out) / name if Path(out).is_dir() else out, [model, *store.files])
    folded = fold_in(proto, model, weights) if fold else 0
    found = [
        (tensor, Piece(tensor.name, *tensor_data(tensor, store))) for tensor in tensors_of(proto) if _moves(tensor)
    ]
    results, unread = stored_results.wanted(model, weights, provider, shapes or {}) if provider else ([], set())
    copied = wide_weights.wanted(model, weights, provider) - unread if provider else set()
    named = Counter(tensor.name for tensor, _ in found)
    wide = {
        tensor.name: wide_weights.piece(piece, onnx_dtype(tensor.data_type))
        for tensor, piece in found
        if tensor.name in copied and named[tensor.name] == 1
    }
    known = [r for r in results if all(named[value.name] == 1 for value in r.values)]
    kept = [stored_results.piece(number, result) for number, result in enumerate(known)]
    unique, owner = _once([piece for _, piece in found])
    files = plan_files(target, format, [*unique, *wide.values(), *kept], shard_bytes)
    places = {id(piece): (file.name, offset) for file in files for piece, offset in file.places}
    for (tensor, piece), first in zip(found, owner, strict=True):
        refer(tensor, *places[id(first)], len(piece.data))
    sources = {piece.name: places[id(first)] for (_, piece), first in zip(found, owner, strict=True)}
    copies = {name: (*sources[name], *places[id(copy)], len(copy.data)) for name, copy in wide.items()}
    wide_weights.write(proto, copies)
    stored_results.write(
        proto,
        (
            (result, [sources[value.name] for value in result.values], places[id(piece)], piece)
            for result, piece in zip(known, kept, strict=True)
        ),
    )
    write(target, proto, files, store.files, progress)
    names = tuple(file.name for file in files)
    nbytes = sum(len(piece.data) for piece in (*unique, *wide.values(), *kept))
    return Packed(target.name, names, len(found), len(found) - len(unique), folded, nbytes)


def _moves(tensor: onnx.TensorProto) -> bool:
    """Whether a tensor goes to a data file: what is small stays in the model, unless it lies outside already."""
    import onnx_ir as ir

    if tensor.data_type not in {int(known) for known in ir.DataType}:
        raise InvalidModel(f"tensor '{tensor.name}' has the unknown type {tensor.data_type}.", fix="export it again.")
    dtype = ir.DataType(tensor.data_type)
    if tensor.data_location == tensor.EXTERNAL or dtype in (ir.DataType.STRING, ir.DataType.UNDEFINED):
        return tensor.data_location == tensor.EXTERNAL
    return math.prod(tensor.dims) * dtype.bitwidth // 8 >= LARGE


def tensor_data(tensor: onnx.TensorProto, store: Any) -> tuple[str, tuple[int, ...], memoryview]:
    """Type, shape and little-endian bytes of a tensor, as they are in memory; 4-bit numbers stay packed."""
    import onnx_ir as ir

    read = ir.serde.deserialize_tensor(tensor)
    if isinstance(read, ir.ExternalTensor):
        buffer = store.buffer(read)
        data = buffer.storage("read").read(len(buffer)).data
    else:
        store.array(read)  # refuses data of the wrong size
        data = memoryview(read.tobytes())
    return read.dtype.name, tuple(tensor.dims), data


def _once(pieces: Sequence[Piece]) -> tuple[list[Piece], list[Piece]]:
    """The pieces of different contents, and for every piece the one that holds its contents."""
    alike = Counter(map(_look, pieces))
    first: dict[Any, Piece] = {}
    unique, owner = [], []
    for piece in pieces:
        look = _look(piece)
        kept = first.setdefault(id(piece) if alike[look] == 1 else (look, _digest(piece.data)), piece)
        owner.append(kept)
        if kept is piece:
            unique.append(piece)
    return unique, owner


def _look(piece: Piece) -> tuple[int, bytes]:
    """What differs between most tensors, and is cheap: only those that look alike are read whole."""
    assert isinstance(piece.data, memoryview)
    return len(piece.data), bytes(piece.data[:256])


def _digest(data: memoryview | Later) -> bytes:
    assert isinstance(data, memoryview)
    return hashlib.blake2b(data, digest_size=32).digest()


# Writing.


def write(
    target: Path,
    proto: onnx.ModelProto,
    files: Sequence[DataFile],
    sources: Iterable[Path],
    progress: Progress | None = None,
) -> None:
    """Writes everything beside the target, then renames: the data first, the model that refers to them last.

    Raises:
        InvalidInput: it cannot be written, has no room, or would replace one of the `sources`.
    """
    for name in (*(file.name for file in files), target.name):
        check_target(target.with_name(name), sources)
    content = proto.SerializeToString()
    total = sum(file.nbytes for file in files) + len(content)
    room = shutil.disk_usage(target.parent).free
    if room < total:
        raise InvalidInput(
            f"there is no room for '{target}'.",
            why=f"it needs {total} bytes, and {room} are free.",
            fix="free some space, or choose a target on another disk.",
        )
    chunks = [*((file.name, _chunks(file)) for file in files), (target.name, iter([content]))]
    try:
        with tempfile.TemporaryDirectory(prefix=".ep-pack-", dir=target.parent) as folder:
            done = 0
            for name, parts in chunks:
                with (Path(folder) / name).open("wb") as out:
                    for part in parts:
                        out.write(part)
                        done += len(part)
                        if progress is not None:
                            progress(done, total)
                    out.flush()
                    os.fsync(out.fileno())
            for name, _ in chunks:
                (Path(folder) / name).replace(target.parent / name)
    except OSError as error:
        raise InvalidInput(
            f"'{target}' cannot be written.",
            why=error.strerror or str(error),
            fix="free some space, or choose another target; nothing that was there is lost.",
        ) from error


def _chunks(file: DataFile) -> Iterator[bytes | memoryview]:
    for part in file.parts():
        view = memoryview(part)
        for start in range(0, len(view), _CHUNK):
            yield view[start : start + _CHUNK]
