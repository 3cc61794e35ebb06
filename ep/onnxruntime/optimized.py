"""What does `optimized_model_filepath` write? The model after its graph was simplified, still plain ONNX."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import Any

from ep.onnxruntime import enums
from ep.onnxruntime.errors import InvalidArgument
from ep.onnxruntime.options import SessionOptions

_EXTERNAL = "session.optimized_model_external_initializers"


def write(source: Any, options: SessionOptions) -> None:
    """Writes the model, with its weights inside, or beside it where the options name a file (or it exceeds 2 GiB)."""
    path = options.optimized_model_filepath
    model = simplified(source, options.graph_optimization_level)
    name = options._entries.get(f"{_EXTERNAL}_file_name")
    least = int(options._entries.get(f"{_EXTERNAL}_min_size_in_bytes", "1024"))
    large = bool(name) or model.ByteSize() >= 2**31 - 1
    try:
        save(model, Path(path), name or f"{Path(path).name}.data" if large else None, least)
    except OSError as cause:
        raise InvalidArgument(f"SystemError : {cause.errno} ({path}: {cause.strerror})") from cause


def save(model: Any, path: Path, location: str | None, threshold: int) -> None:
    """Writes a model, with weights from `threshold` bytes on in the file `location` beside it if that is given.

    Files take the place of old ones when they are complete: a session may still read those, the model's own included.

    Raises:
        OSError: they cannot be written.
    """
    import onnx

    with tempfile.TemporaryDirectory(prefix=".ep-save-", dir=path.parent) as folder:
        whole = Path(os.path.abspath(folder)) / "model" / path.name
        whole.parent.mkdir()
        if location is None:
            onnx.save(model, whole)
        else:
            data = Path(os.path.abspath(whole.parent / location))
            if not data.is_relative_to(whole.parent):  # where the model could not read it, either
                raise OSError(errno.EINVAL, f"'{location}' lies outside of the model's folder")
            data.parent.mkdir(parents=True, exist_ok=True)
            for tensor in model.graph.initializer:
                if not tensor.HasField("raw_data") and tensor.data_type != onnx.TensorProto.STRING:
                    array = onnx.numpy_helper.to_array(tensor)  # onnx moves raw data only
                    tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
            onnx.save(model, whole, save_as_external_data=True, location=location, size_threshold=threshold)
            if data.exists():  # some weight is that large
                target = path.parent / data.relative_to(whole.parent)
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(data, target)
        os.replace(whole, path)


def simplified(source: Any, level: Any) -> Any:
    """The whole model as protobuf, without nodes that only pass on their input, or whose results nobody uses."""
    proto = whole(source)
    if level == enums.GraphOptimizationLevel.ORT_DISABLE_ALL:
        return proto
    import onnx_ir as ir
    from onnx_ir.passes import common

    model = ir.serde.deserialize_model(proto)
    for rewrite in (common.IdentityEliminationPass(), common.RemoveUnusedNodesPass()):
        model = rewrite(model).model
    return ir.serde.serialize_model(model)


def whole(source: Any) -> Any:
    """A model with all its data, from a path, bytes or protobuf."""
    import onnx

    if isinstance(source, bytes):
        return onnx.ModelProto.FromString(source)
    if isinstance(source, onnx.ModelProto):
        return source
    return onnx.load(source)
