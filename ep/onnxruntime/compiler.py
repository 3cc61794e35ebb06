"""What does `ModelCompiler` write? The model, whole or with its weights beside it, for a later `InferenceSession`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ep.onnxruntime import enums
from ep.onnxruntime.core import CInferenceSession
from ep.onnxruntime.errors import Fail, failure
from ep.onnxruntime.optimized import simplified
from ep.onnxruntime.options import SessionOptions, failure_of
from ep.onnxruntime.pybind import COLLECTION, STATE, incompatible


class ModelCompiler:
    """Checks a model and writes it again; code is compiled when a session first runs, for the shapes that come."""

    __module__ = COLLECTION

    def __init__(
        self,
        sess_options: SessionOptions,
        input_model_path_or_bytes: str | os.PathLike[str] | bytes,
        embed_compiled_data_into_model: bool = False,
        external_initializers_file_path: str | os.PathLike[str] | None = None,
        external_initializers_size_threshold: int = 1024,
        flags: int = enums.OrtCompileApiFlags.NONE,
        graph_optimization_level: Any = enums.GraphOptimizationLevel.ORT_DISABLE_ALL,
        get_initializer_location_func: Callable[..., Any] | None = None,
    ) -> None:
        """Takes a path or bytes; `external_initializers_file_path` moves weights to a file beside the output."""
        del embed_compiled_data_into_model
        if isinstance(input_model_path_or_bytes, str | os.PathLike):
            self._source: Any = os.fspath(input_model_path_or_bytes)
        elif isinstance(input_model_path_or_bytes, bytes):
            self._source = input_model_path_or_bytes
        else:
            raise TypeError(f"Unable to load from type '{type(input_model_path_or_bytes)}'")
        if get_initializer_location_func is not None:
            raise failure_of("ModelCompiler(get_initializer_location_func=…)", "use external_initializers_file_path.")
        self._external, self._threshold = external_initializers_file_path, external_initializers_size_threshold
        self._flags, self._level = int(flags), graph_optimization_level
        is_path = isinstance(self._source, str)
        CInferenceSession(sess_options, self._source if is_path else None, None if is_path else self._source)

    def compile_to_bytes(self) -> bytes:
        """The model as bytes."""
        return self._model().SerializeToString()

    def compile_to_file(self, output_model_path: str | None = None) -> None:
        """Writes the model; without a path, beside the input, with `_ctx` before the extension."""
        import onnx

        if output_model_path is None:
            if not isinstance(self._source, str):
                raise failure(Fail, "An output path is needed for a model that is given as bytes.")
            stem, extension = os.path.splitext(self._source)
            output_model_path = f"{stem}_ctx{extension}"
        path = Path(output_model_path)
        if self._flags & int(enums.OrtCompileApiFlags.ERROR_IF_OUTPUT_FILE_EXISTS) and path.exists():
            raise failure(Fail, f"Output model file already exists: {path}")
        if self._external is None:
            onnx.save(self._model(), path)
        else:
            location = os.path.relpath(self._external, path.parent) if os.path.isabs(self._external) else self._external
            onnx.save(
                self._model(),
                path,
                save_as_external_data=True,
                location=os.fspath(location),
                size_threshold=self._threshold,
            )

    def compile_to_stream(self, write_function: Callable[[bytes], None]) -> None:
        """Passes the bytes of the model to a function."""
        if not callable(write_function):
            signature = f"(self: {STATE}.ModelCompiler, arg0: collections.abc.Callable[[bytes], None]) -> None"
            raise incompatible("compile_to_stream", signature, self, write_function)
        write_function(self.compile_to_bytes())

    def _model(self) -> Any:
        if self._flags & int(enums.OrtCompileApiFlags.ERROR_IF_NO_NODES_COMPILED):
            raise failure(Fail, "No nodes were compiled: ep compiles when a session first runs.")
        return simplified(self._source, self._level)

    def set_ep_context_binary_information(self, output_directory: str | os.PathLike[str], model_name: str) -> None:
        """No effect: no EPContext files are written."""

    def set_ep_context_data_write_func(self, write_func: Callable[[str, Any], None]) -> None:
        """No effect: no EPContext data are written."""

    def clear_ep_context_data_write_func(self) -> None:
        """No effect: no EPContext data are written."""
