"""Where does compiled code wait for the next process? In the user's cache: one checked container per function.

Files are named by the key of what they hold, written beside and moved into place, so that processes that share the
directory see whole entries or none. What was not used for longest goes when the cache is full.
"""

from __future__ import annotations

import os
import stat
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ep.container import Code, Container, Cut, pack, unpack
from ep.errors import InvalidInput, InvalidModel

VARIABLE = "EP_CONTEXT_CACHE"  # what "auto" means: a path, or "off"
LIMIT = 2 << 30  # bytes of all entries together
SUFFIX = ".epctx"
LAYOUT = "v1"
_STALE = 3600.0  # seconds after which a temporary file is left over from a process that ended
_TOUCH = 60.0  # seconds between two marks that an entry was used


class ContextNotice(UserWarning):
    """Stored code was not used, or could not be stored; the text says why. Results are not affected."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of the cache: its key, bytes, and when it was last used (seconds since the epoch)."""

    key: str
    path: Path
    size: int
    used: float


def default_directory() -> Path:
    """The user's cache directory, as the platform wants it.

    Raises:
        RuntimeError: the user has no home, as in some containers.
    """
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "ep-runtime"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "ep-runtime" / "Cache"
    base = os.environ.get("XDG_CACHE_HOME", "")  # one that is not absolute does not count
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "ep-runtime"


def open_cache(setting: str = "auto") -> Cache | None:
    """The cache of an option `context.cache`: "auto", a path, or "off" (None).

    Raises:
        InvalidInput: the directory belongs to another user, or others may write to it.
    """
    if setting == "auto":
        setting = os.environ.get(VARIABLE, "")
    if setting == "off":
        return None
    try:
        return Cache(Path(setting).expanduser() if setting else default_directory())
    except RuntimeError as error:  # no home
        refused = InvalidInput(
            "the cache has no directory.", why=str(error), fix=f"set {VARIABLE} to a path, or 'off'."
        )
    except InvalidInput as error:
        refused = error
    if setting:
        raise refused
    _notify(f"compiled code is not kept: {refused}")  # nobody asked for it
    return None


def _notify(text: str) -> None:
    warnings.warn(text, ContextNotice, stacklevel=3)


class Cache:
    """One directory of stored functions. Nothing is created before something is stored."""

    def __init__(self, directory: Path, limit: int = LIMIT) -> None:
        self.directory, self.limit = directory, limit
        self._unswept = limit  # bytes written since the last sweep; the first write sweeps
        self._writable = True
        self._refuse_foreign()

    def _refuse_foreign(self) -> None:
        """Code is run from here, so that nobody else may put it there."""
        if not hasattr(os, "getuid"):
            return
        try:
            facts = self.directory.stat()
        except OSError:
            return  # it does not exist yet
        if not stat.S_ISDIR(facts.st_mode):
            raise InvalidInput(f"'{self.directory}' is no directory.", fix="name a directory for the cache.")
        if not _private(facts):
            raise InvalidInput(
                f"the cache directory '{self.directory}' is not safe.",
                why="it belongs to another user, or others may write to it; compiled code is run from there.",
                fix="chmod 700 it, or name another: options={'context.cache': PATH}.",
            )

    def path(self, key: str) -> Path:
        return self.directory / LAYOUT / key[:2] / (key + SUFFIX)

    def __contains__(self, key: str) -> bool:
        return self.path(key).exists()

    def get(self, key: str) -> Code | Cut | None:
        """What is stored under a key; an entry that is damaged is discarded with a notice."""
        path = self.path(key)
        try:
            data = path.read_bytes()
            facts = path.stat()
        except OSError:
            return None
        if hasattr(os, "getuid") and not _private(facts):
            return None  # it is not of this user
        if time.time() - facts.st_mtime > _TOUCH:
            with suppress(OSError):  # of a directory that is only read
                os.utime(path)
        try:
            found = next((entry for entry in unpack(data).entries() if entry.key == key), None)
            why = "it holds another function."
        except InvalidModel as error:
            found, why = None, error.why
        if found is None:
            self._discard(path, why)
        return found

    def _discard(self, path: Path, why: str) -> None:
        warnings.warn(f"discarded the damaged entry {path.name} of the cache: {why}", ContextNotice, stacklevel=2)
        path.unlink(missing_ok=True)

    def put(self, key: str, container: Container) -> None:
        """Store a container with one function; where that fails, the first time with a notice."""
        data, path = pack(container), self.path(key)
        if not self._writable:
            return
        try:
            self._write(path, data)
        except OSError as error:
            self._writable = False
            warnings.warn(
                f"compiled code cannot be kept in '{self.directory}': {error.strerror or error}. Each start compiles "
                "again. Pass options={'context.cache': PATH} to keep it elsewhere, or 'off'.",
                ContextNotice,
                stacklevel=2,
            )
            return
        self._unswept += len(data)
        if self._unswept >= self.limit // 64:
            self.sweep()

    def _write(self, path: Path, data: bytes) -> None:
        self.directory.parent.mkdir(parents=True, exist_ok=True)
        for folder in (self.directory, path.parent.parent, path.parent):  # private, whatever the umask
            folder.mkdir(mode=0o700, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    def __iter__(self) -> Iterator[Entry]:
        """All entries; those that another process removes meanwhile are left out."""
        for path in self._files():
            if path.suffix == SUFFIX and (facts := _facts(path)) is not None:
                yield Entry(path.stem, path, facts.st_size, facts.st_mtime)

    def _files(self) -> Iterator[Path]:
        root = self.directory / LAYOUT
        for folder in _listed(root):
            yield from _listed(folder)

    def sweep(self) -> int:
        """Remove what was not used for longest until the rest is within the limit; the number of entries removed."""
        self._unswept = 0
        for path in self._files():
            if path.suffix == ".tmp" and (facts := _facts(path)) and time.time() - facts.st_mtime > _STALE:
                path.unlink(missing_ok=True)
        entries = sorted(self, key=lambda entry: entry.used)
        total, removed = sum(entry.size for entry in entries), 0
        for entry in entries:
            if total <= self.limit:
                break
            entry.path.unlink(missing_ok=True)
            total, removed = total - entry.size, removed + 1
        return removed

    def remove(self, entries: Iterable[Entry]) -> None:
        """Remove these entries."""
        for entry in entries:
            entry.path.unlink(missing_ok=True)


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _private(facts: os.stat_result) -> bool:
    """Whether this user or root has it, and nobody else may write to it."""
    return facts.st_uid in (0, os.getuid()) and not facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _facts(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None
