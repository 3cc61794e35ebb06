"""When and where is a context model written? On request, or at load when onnxruntime's session options ask for it."""

from __future__ import annotations

import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any

from ep.context_cache import ContextNotice
from ep.context_options import ENABLE, FILE_PATH, ContextOptions
from ep.context_reader import CONTEXTS
from ep.context_writer import Saved, Source, write_model
from ep.errors import InvalidInput
from ep.stored_plan import for_context
from ep.targets import check_target

__all__ = ["Saved", "at_load", "save", "target_of"]


def save(session: Any, path: str | os.PathLike[str] | None, *, embed: bool, portable_only: bool) -> Saved:
    """As `InferenceSession.save_context`."""
    source, target = source_of(session), target_of(session, path)
    return write_model(source, target, embed=embed, portable_only=portable_only)


def target_of(session: Any, path: str | os.PathLike[str] | None) -> Path:
    """Where the context model will be: a path that may be written.

    Raises:
        InvalidInput: its folder does not exist, or it is a file that the session reads.
    """
    return check_target(default_path(session) if path is None else path, source_of(session).files)


def source_of(session: Any) -> Source:
    """What a context model of a session is made from."""
    opened = session._opened
    return Source(
        session.name,
        opened.model,
        opened.graph.dtypes,
        [runnable.group for runnable in opened.executable.runnables],
        session._providers,
        session._library,
        session._store,
        partial(for_context, opened, session._configured),
    )


def default_path(session: Any) -> Path:
    """`<stem>_ctx.onnx` beside the model."""
    if session._store.directory is None:
        raise InvalidInput(
            "the context model has no path.",
            why="the model was not loaded from a file.",
            fix=f"pass a path (or the option '{FILE_PATH}').",
        )
    return session._store.directory / f"{Path(session.name).stem}_ctx.onnx"


def at_load(session: Any, options: ContextOptions) -> None:
    """Write the context model that session options ask for; what has static shapes is compiled first.

    Raises:
        InvalidInput: the file exists, or the model is a context model already, as in onnxruntime.
    """
    path = Path(options.path) if options.path else default_path(session)
    if path.exists():
        raise InvalidInput(
            f"the context model '{path}' exists already.",
            why=f"option '{ENABLE}' writes a new one, and never replaces a file.",
            fix=f"remove it, choose another '{FILE_PATH}', or load it instead of the original.",
        )
    if session._opened.model.graph.meta[CONTEXTS]:
        raise InvalidInput(
            f"{session.name} is a context model already.",
            why=f"option '{ENABLE}' makes one from an original model.",
            fix=f"load it without '{ENABLE}'.",
        )
    static = all(i.kind == "tensor" and all(isinstance(d, int) for d in i.shape or (None,)) for i in session.inputs)
    if static:
        session.warmup()
    else:
        warnings.warn(
            f"{path.name} holds the graph of {session.name} and no compiled code: its inputs have dynamic shapes. "
            "Call session.warmup(shapes), then session.save_context(path), to store code for some of them.",
            ContextNotice,
            stacklevel=5,
        )
    save(session, path, embed=options.embed, portable_only=False)
