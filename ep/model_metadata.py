"""How does a packed model say what else its data files hold? One JSON value under one key of its metadata."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ep.errors import InvalidModel

if TYPE_CHECKING:
    import onnx


def write(proto: onnx.ModelProto, key: str, value: Any) -> None:
    """Puts a value in the place of the one that a model has under this key; an empty one only takes that away."""
    for entry in [entry for entry in proto.metadata_props if entry.key == key]:
        proto.metadata_props.remove(entry)
    if value:
        proto.metadata_props.add(key=key, value=json.dumps(value, separators=(",", ":")))


def read(proto: onnx.ModelProto, key: str, take: Callable[[Any], None]) -> None:
    """Calls `take` with the value that a model has under this key, if it has one.

    Raises:
        InvalidModel: it is no JSON, or `take` cannot read it.
    """
    text = next((entry.value for entry in proto.metadata_props if entry.key == key), None)
    if text is None:
        return
    try:
        take(json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        raise InvalidModel(
            f"the model's metadata '{key}' are damaged.",
            why=f"{type(error).__name__}: {error}",
            fix="pack the model again, or remove this entry of its metadata.",
        ) from error
