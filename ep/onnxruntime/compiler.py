"""What does `ModelCompiler` write? A context model, where its options ask for a provider that compiles; else the model.

`MLXExecutionProvider` and `JAXExecutionProvider` compile; what `CPUExecutionProvider` stands for does so only when a
session runs, as onnxruntime's does not at all. Shapes must be static, by the model or by dimensions that the options
fix, for code to be stored: otherwise the context model holds graphs.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ep.context_options import EMBED, ENABLE, FILE_PATH
from ep.errors import UnsupportedContext
from ep.onnxruntime import enums
from ep.onnxruntime.core import CInferenceSession
from ep.onnxruntime.errors import Fail, InvalidArgument, failure
from ep.onnxruntime.messages import log
from ep.onnxruntime.optimized import save, simplified
from ep.onnxruntime.options import SessionOptions, failure_of
from ep.onnxruntime.providers import CPU, normalize
from ep.onnxruntime.pybind import COLLECTION, STATE, incompatible


class OrtEpContextData:
    """Compiled data that `ModelCompiler` passes to a function instead of writing a file."""

    __module__ = STATE

    def __init__(self, data: bytes) -> None:
        self._data = data

    size = property(lambda self: len(self._data), doc="How many bytes there are.")

    def read(self, offset: int = 0, length: int | None = None) -> bytes:
        """The bytes from `offset` on, or so many of them."""
        return self._data[offset:] if length is None else self._data[offset : offset + length]


@dataclass(frozen=True, slots=True)
class _Made:
    """A model with all its weights, and what its EPContext nodes have in files: bytes by name."""

    proto: Any
    blobs: dict[str, bytes] = field(default_factory=dict)


class ModelCompiler:
    """Writes a model whose nodes are compiled for the provider of the session options, as `ep compile` does."""

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
        if isinstance(input_model_path_or_bytes, str | os.PathLike):
            self._source: Any = os.fspath(input_model_path_or_bytes)
        elif isinstance(input_model_path_or_bytes, bytes):
            self._source = input_model_path_or_bytes
        else:
            raise TypeError(f"Unable to load from type '{type(input_model_path_or_bytes)}'")
        if get_initializer_location_func is not None:
            raise failure_of("ModelCompiler(get_initializer_location_func=…)", "use external_initializers_file_path.")
        if not isinstance(sess_options, SessionOptions):
            raise TypeError(f"sess_options is a {type(sess_options).__name__}, not SessionOptions")
        self._options, self._embed = sess_options._copy(), bool(embed_compiled_data_into_model)
        self._external, self._threshold = external_initializers_file_path, external_initializers_size_threshold
        self._flags, self._level = int(flags), graph_optimization_level
        self._binaries: tuple[Path, str] | None = None
        self._write: Callable[[str, OrtEpContextData], None] | None = None

    def compile_to_bytes(self) -> bytes:
        """The model as bytes; compiled data are in it, unless it was said where else they go."""
        elsewhere = self._write is not None or self._binaries is not None
        made = self._made("model", self._embed or not elsewhere)
        self._place(made, None)
        return made.proto.SerializeToString()

    def compile_to_file(self, output_model_path: str | None = None) -> None:
        """Writes the model; without a path, beside the input, with `_ctx` before the extension."""
        if output_model_path is None:
            if not isinstance(self._source, str):
                raise failure(Fail, "An output path is needed for a model that is given as bytes.")
            stem, extension = os.path.splitext(self._source)
            output_model_path = f"{stem}_ctx{extension}"
        path = Path(output_model_path)
        if self._has(enums.OrtCompileApiFlags.ERROR_IF_OUTPUT_FILE_EXISTS) and path.exists():
            raise failure(
                Fail,
                f"Failed to generate EP context model since the file '\"{path}\"' exists already. Please remove the EP "
                "context model if you want to re-generate it.",
            )
        if not path.parent.is_dir():
            raise failure(InvalidArgument, f'open file "{path}" failed: No such file or directory')
        made = self._made(path.stem, self._embed)
        self._place(made, path.parent)
        location = None
        if self._external is not None:
            absolute = os.path.isabs(self._external)
            location = os.fspath(os.path.relpath(self._external, path.parent) if absolute else self._external)
        try:
            save(made.proto, path, location, self._threshold)
        except OSError as cause:
            raise failure(InvalidArgument, f'open file "{path}" failed: {cause.strerror or cause}') from cause

    def compile_to_stream(self, write_function: Callable[[bytes], None]) -> None:
        """Passes the bytes of the model to a function."""
        if not callable(write_function):
            signature = f"(self: {STATE}.ModelCompiler, arg0: collections.abc.Callable[[bytes], None]) -> None"
            raise incompatible("compile_to_stream", signature, self, write_function)
        write_function(self.compile_to_bytes())

    def set_ep_context_binary_information(self, output_directory: str | os.PathLike[str], model_name: str) -> None:
        """Where compiled data go that are not embedded, and what their file is called: `<model_name>.epctx`."""
        folder = Path(os.fspath(output_directory))
        if not folder.is_dir():
            raise failure(InvalidArgument, "output_dir is not a valid directory.")
        if not model_name:
            raise failure(InvalidArgument, "model_name is empty.")
        self._binaries = folder, Path(model_name).stem

    def set_ep_context_data_write_func(self, write_func: Callable[[str, Any], None]) -> None:
        """Lets a function take compiled data that are not embedded, by the name that the model has for them."""
        if not callable(write_func):
            kind = "collections.abc.Callable[[str, onnxruntime.capi.onnxruntime_pybind11_state.OrtEpContextData], None]"
            signature = f"(self: {STATE}.ModelCompiler, write_func: {kind}) -> None"
            raise incompatible("set_ep_context_data_write_func", signature, self, write_func)
        self._write = write_func

    def clear_ep_context_data_write_func(self) -> None:
        """Lets compiled data go to files again."""
        self._write = None

    def _has(self, flag: Any) -> bool:
        return bool(self._flags & int(flag))

    def _made(self, stem: str, embed: bool) -> _Made:
        """The model that is to be written, whole."""
        if isinstance(self._source, str) and not os.path.exists(self._source):
            raise failure(InvalidArgument, f'Input model path does not exist: "{self._source}"')
        session = self._session()
        made = None if session is None else _context(session, self._binaries[1] if self._binaries else stem, embed)
        if made is None and self._has(enums.OrtCompileApiFlags.ERROR_IF_NO_NODES_COMPILED):
            raise failure(
                Fail,
                "Unable to compile any nodes. Check that the session EPs support compilation and can execute at least "
                "one subgraph in the model.",
            )
        return made or _Made(simplified(self._source, self._level))

    def _session(self) -> Any:
        """The session of `ep` on the provider that the options name, warm where shapes are known; `None`: the CPU."""
        options = self._options._copy()
        for key in (ENABLE, FILE_PATH, EMBED):  # this is how sessions are asked for what is done here
            options._entries.pop(key, None)
        options.optimized_model_filepath = ""
        chosen = normalize(list(options._providers), None)
        is_path = isinstance(self._source, str)
        core = CInferenceSession(options, self._source if is_path else None, None if is_path else self._source)
        if not chosen or chosen[0][0] == CPU:
            return None
        core.initialize_session([name for name, _ in chosen], [given for _, given in chosen])
        session = core._session
        shapes = {v.name: tuple(v.shape) for v in core.inputs_meta if v.type.startswith("tensor")}
        sizes = [size for shape in shapes.values() for size in shape]
        if len(shapes) == len(core.inputs_meta) and all(isinstance(size, int) for size in sizes):
            session.warmup(shapes)
        else:
            log(2, f"{session.name} has dynamic shapes: the compiled model holds its graph and no code. Fix them with "
                   "SessionOptions.add_free_dimension_override_by_name.")  # fmt: skip
        return session

    def _place(self, made: _Made, folder: Path | None) -> None:
        """Brings compiled data that are not in the model to where they belong."""
        for name, data in made.blobs.items():
            if self._write is not None:
                self._write(name, OrtEpContextData(data))
            else:
                target = (self._binaries[0] if self._binaries else folder or Path()) / name
                beside = target.with_name(f".{name}.tmp")
                beside.write_bytes(data)
                os.replace(beside, target)


def _context(session: Any, stem: str, embed: bool) -> _Made | None:
    """The context model of a session; `None` where nothing of it can be compiled."""
    import onnx

    with tempfile.TemporaryDirectory(prefix="ep-compile-") as folder:
        try:
            saved = session.save_context(Path(folder) / f"{stem}.onnx", embed=embed)
        except UnsupportedContext:
            return None
        return _Made(onnx.load(saved.model), {blob.name: blob.read_bytes() for blob in saved.blobs})
