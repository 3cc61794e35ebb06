"""Which weights does a packed model hold a second time, in the dtype that a provider multiplies them in?

JAX's CPU multiplies float16 and bfloat16 fastest as float32, and makes such copies at the first run. A model packed
for it (`ep pack --for jax`) has them in its data files, so that they are borrowed as well. Its metadata say where they
are, and of which data they are made: if a weight lies elsewhere now, it was changed, and the copy is not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ep import model_metadata
from ep.data_files import Later, Piece
from ep.places import Place, Stored
from ep.safetensors import WIDE

if TYPE_CHECKING:
    import onnx

    from ep.weights import WeightStore

KEY = "ep.wide_weights"  # in a model's metadata: name → [its location, its offset, the copy's location, offset, length]


def wanted(source: Any, weights: Any, provider: str) -> set[str]:
    """Names of the weights that a provider would multiply in a wider dtype."""
    import warnings

    from ep.device_weights import WIDENED
    from ep.session import HostFallbackWarning, load

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HostFallbackWarning)
        session = load(source, provider, weights=weights)
    return {weight.name for weight in session.weights if weight.why == WIDENED}


def piece(half: Piece, dtype: np.dtype) -> Piece:
    """The copy of a tensor of halves: float32, made when it is written."""
    assert isinstance(half.data, memoryview)
    data = half.data
    make = Later(2 * len(data), lambda: np.frombuffer(data, dtype).astype(np.float32).data.cast("B"))
    return Piece(f"{WIDE}{half.name}", "FLOAT", half.shape, make, reserved=True)


def write(proto: onnx.ModelProto, places: Mapping[str, tuple[str, int, str, int, int]]) -> None:
    """Says in a model's metadata where the copies are; none if there are none."""
    model_metadata.write(proto, KEY, places)


def read(proto: onnx.ModelProto, store: WeightStore) -> None:
    """Tells the store of the copies that a model says it has.

    Raises:
        InvalidModel: the metadata are damaged.
    """

    def take(places: Any) -> None:
        for tensor in proto.graph.initializer:
            if tensor.name in places:
                location, offset, wide_location, wide_offset, length = places[tensor.name]
                place = Place(f"{WIDE}{tensor.name}", str(wide_location), int(wide_offset), int(length))
                copy = Stored(place, np.dtype(np.float32), tuple(tensor.dims))
                store.add_wide(str(location), int(offset), copy)

    model_metadata.read(proto, KEY, take)
