"""What does `optimized_model_filepath` write? The model after its graph was simplified, still plain ONNX."""

from __future__ import annotations

from typing import Any

from ep.onnxruntime import enums
from ep.onnxruntime.errors import InvalidArgument
from ep.onnxruntime.options import SessionOptions

_EXTERNAL = "session.optimized_model_external_initializers"


def write(source: Any, options: SessionOptions) -> None:
    """Writes the model, with its weights inside, or beside it where the options name a file (or it exceeds 2 GiB)."""
    import onnx

    path = options.optimized_model_filepath
    model = simplified(source, options.graph_optimization_level)
    name = options._entries.get(f"{_EXTERNAL}_file_name")
    least = int(options._entries.get(f"{_EXTERNAL}_min_size_in_bytes", "1024"))
    large = bool(name) or model.ByteSize() >= 2**31 - 1
    try:
        onnx.save(model, path, save_as_external_data=large, location=name, size_threshold=least)
    except OSError as cause:
        raise InvalidArgument(f"SystemError : {cause.errno} ({path}: {cause.strerror})") from cause


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
