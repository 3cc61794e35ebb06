"""How is a file read without copying it? One read-only map per file and process, shared by all who read it."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from ep.errors import InvalidModel
from ep.memory import aligned, slack

COPY_ALIGNMENT = 64  # of copies: JAX adopts host memory from this alignment on
_CHUNK = 1 << 24

Content = Any  # a buffer: `mmap.mmap`, `bytes`, or an array of bytes
_open_maps: WeakValueDictionary[tuple[int, ...], mmap.mmap] = WeakValueDictionary()
_lock = threading.Lock()


def read_only(path: Path, *, copy: bool = False) -> Content:
    """The bytes of a file, mapped. Who opens it again while it is in use, unchanged, gets the same map.

    With `copy`, they are read into memory of this process, and later changes of the file do not matter.

    Raises:
        OSError: the file is missing or cannot be read.
    """
    if not path.is_file() and path.exists():
        raise OSError(errno.EINVAL, "it is not a file")  # opening a pipe would wait for ever
    with path.open("rb") as file:
        facts = os.fstat(file.fileno())
        if facts.st_size == 0:
            return b""
        if copy:
            return _copied(file, facts.st_size)
        key = (facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns)
        with _lock:
            found = _open_maps.get(key)
            if found is None:
                found = _open_maps[key] = mmap.mmap(file.fileno(), facts.st_size, access=mmap.ACCESS_READ)
            return found


def _copied(file: Any, size: int) -> np.ndarray:
    content = aligned(np.empty(slack(size, COPY_ALIGNMENT), np.uint8), size, COPY_ALIGNMENT)
    view, filled = content.data, 0
    while filled < size:
        count = file.readinto(view[filled : filled + _CHUNK])
        if not count:
            raise OSError(errno.EIO, f"it ended after {filled} of {size} bytes")
        filled += count
    content.flags.writeable = False
    return content


def check_whole(content: Content, name: str) -> None:
    """Raises `InvalidModel` if the file behind a map has become shorter: reading the rest would end the process.

    This is asked before data are first read. A file that is cut later still is the user's to avoid: write a new
    file and rename it over the old one, which leaves the map as it was, or load with `options={"weights": "copy"}`.
    """
    if isinstance(content, mmap.mmap) and content.size() < len(content):
        raise InvalidModel(
            f"the data file '{name}' has become shorter since the model was loaded.",
            why=f"it had {len(content)} bytes, and has {content.size()}.",
            fix="load the model again; replace data files by renaming new ones over them, not by writing into them.",
        )


def drop_pages(content: Content, offset: int, nbytes: int) -> None:
    """Gives the whole pages in a range of a map back to the system: it reads them from the file when asked again."""
    first, last = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE, (offset + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if isinstance(content, mmap.mmap) and first < last and hasattr(mmap, "MADV_DONTNEED"):
        content.madvise(mmap.MADV_DONTNEED, first, last - first)


def address(content: Content) -> int:
    """Where the bytes lie in memory."""
    return int(np.frombuffer(content, np.uint8).ctypes.data) if len(content) else 0
