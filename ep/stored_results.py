"""What of a packed model's weights is stored as compiled code computes it? Results, with the places of their sources.

Compiled code of JAX on the CPU reads some weights in another form, which it computes at the first run and keeps. A
model packed for it (`ep pack --for jax`) has these forms in its data files, so that they are borrowed as well. Its
metadata say how each is computed, as a digest, and of which data: if those lie elsewhere now, or other code runs, it
is not used.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ep import model_metadata
from ep.data_files import Later, Piece
from ep.places import Place, Stored, numpy_type
from ep.safetensors import KEPT

if TYPE_CHECKING:
    import onnx

    from ep.kept_weights import Foreseen
    from ep.weights import WeightStore

# In a model's metadata: a list of [digest, [location, offset] of each source, type, shape, location, offset, length].
KEY = "ep.kept_weights"
Start = tuple[str, int]  # location and offset


def wanted(source: Any, weights: Any, provider: str, shapes: Mapping[str, Any]) -> tuple[list[Foreseen], set[str]]:
    """What code for inputs of these shapes would keep, and the names of the weights that it then does not read.

    Nothing, where the shapes do not suit the model.
    """
    from ep.device_weights import DeviceWeights
    from ep.devices import resolve
    from ep.kept_weights import foresee
    from ep.loader import load_model
    from ep.memory_estimate import values_of
    from ep.passes import prepare

    providers = resolve(provider, {})
    model, store, name = load_model(source, weights)
    graph = prepare(model, store, name)
    env, _ = values_of(graph, shapes, providers[0].backend)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        owner = DeviceWeights(providers[0].backend, store)
        found, unread = foresee(graph.steps, graph, env, graph.constants, providers, owner)
    return found, {value.name for value in unread}


def piece(number: int, result: Foreseen) -> Piece:
    """A result as a tensor to write; it is computed then."""
    import onnx_ir as ir

    def make() -> memoryview:
        return np.asarray(result.compute(), order="C").reshape(-1).view(np.uint8).data

    dtype = ir.DataType.from_numpy(np.dtype(result.item.dtype)).name
    return Piece(f"{KEPT}{number}", dtype, result.item.shape, Later(result.nbytes, make), reserved=True)


def write(proto: onnx.ModelProto, results: Iterable[tuple[Foreseen, Sequence[Start], Start, Piece]]) -> None:
    """Says in a model's metadata where the results are, and of what; nothing if there are none."""
    rows = [_row(r.item.digest, sources, piece, place) for r, sources, place, piece in results]
    model_metadata.write(proto, KEY, rows)


def add(proto: onnx.ModelProto, results: Iterable[tuple[str, Sequence[Start], Piece, Start]]) -> None:
    """Says of more results, by the digests of how they are computed."""
    rows: list[Any] = []
    model_metadata.read(proto, KEY, rows.extend)
    model_metadata.write(proto, KEY, [*rows, *(_row(*result) for result in results)])


def _row(digest: str, sources: Sequence[Start], piece: Piece, place: Start) -> list[Any]:
    return [digest, [list(p) for p in sources], piece.dtype, list(piece.shape), *place, len(piece.data)]


def read(proto: onnx.ModelProto, store: WeightStore) -> None:
    """Tells the store of the results that a model says it has.

    Raises:
        InvalidModel: the metadata are damaged.
    """

    def take(rows: Any) -> None:
        for digest, sources, dtype, shape, location, offset, length in rows:
            place = Place(f"{KEPT}{digest}"[:40], str(location), int(offset), int(length))
            result = Stored(place, numpy_type(str(dtype)), tuple(map(int, shape)))
            store.add_kept(str(digest), [(str(file), int(start)) for file, start in sources], result)

    model_metadata.read(proto, KEY, take)
