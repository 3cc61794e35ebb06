"""May a file be written there? Its folder must exist, and it must not be one that is being read."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from ep.errors import InvalidInput

Name = str | os.PathLike[str]


def check_target(target: Name, sources: Iterable[Name] = ()) -> Path:
    """The path of a file to be written, before the work is done; `sources` are the files that it comes from.

    Links and relative paths do not hide a source.

    Raises:
        InvalidInput: the folder does not exist, the path is a folder, or the file is one of the sources.
    """
    path = Path(target)
    if "\0" in str(path):
        raise InvalidInput(f"{str(path)!r} is no path.", why="it has a NUL in it.", fix="choose another target.")
    if not path.parent.is_dir():
        raise InvalidInput(f"the folder '{path.parent}' does not exist.", fix="create it, or choose another target.")
    if not os.access(path.parent, os.W_OK):
        raise InvalidInput(f"the folder '{path.parent}' cannot be written to.", fix="choose another target.")
    if path.is_dir():
        raise InvalidInput(f"'{path}' is a folder.", fix="name a file in it.")
    source = next((source for source in sources if _same(path, source)), None)
    if source is not None:
        raise InvalidInput(
            f"'{path}' would replace a file that it is made from.",
            why=f"it is the same file as '{source}'."
            if os.fspath(source) != str(path)
            else "the original would be lost.",
            fix="choose another target.",
        )
    return path


def check_replaced(path: Path) -> None:
    """Raises `InvalidInput` where an .npz file would replace a file of another kind: a wrong name was typed."""
    try:
        with path.open("rb") as file:
            start = file.read(2)
    except OSError:  # it is not there, or whoever writes will say why not
        return
    if start not in (b"", b"PK"):
        raise InvalidInput(f"'{path}' is there, and is no .npz file.", fix="choose another target, or remove it.")


def _same(path: Path, source: Name) -> bool:
    try:
        return os.path.samefile(path, source)
    except OSError:  # one of them is not there
        return False
