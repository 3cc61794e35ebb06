"""What does the data of a saved context hold? The arguments that the function takes, then the library's code.

Stored code is fixed to shapes and dtypes, but that of XLA accepts any bytes of the right number.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from typing import Any

from ep.backend import Backend, Specs
from ep.errors import InvalidInput, InvalidModel

_LENGTH = struct.Struct("<I")
Arguments = list[tuple[tuple[int, ...], str]]  # shape and dtype name of each


def pack(specs: Specs, code: bytes) -> bytes:
    """Return the data of a context."""
    header = json.dumps([[shape, dtype.name] for shape, dtype in specs]).encode()
    return _LENGTH.pack(len(header)) + header + code


def unpack(data: bytes) -> tuple[Arguments, bytes]:
    """Return the arguments and the code of a context.

    Raises:
        InvalidModel: the data are damaged.
    """
    try:
        end = _LENGTH.size + _LENGTH.unpack_from(data)[0]
        header = json.loads(data[_LENGTH.size : end])
        return [(tuple(map(int, shape)), str(name)) for shape, name in header], data[end:]
    except (struct.error, ValueError, TypeError) as cause:
        raise damaged(cause) from cause


def load(backend: Backend, data: bytes) -> Callable[..., tuple[Any, ...]]:
    """Return the function of a context; it refuses other arguments than those it was compiled for.

    Raises:
        InvalidModel: the data are damaged.
    """
    wanted, code = unpack(data)
    assert backend.deserialize is not None
    try:
        function = backend.deserialize(code)
    except (RuntimeError, ValueError) as cause:
        raise damaged(cause) from cause

    def run(*arrays: Any) -> tuple[Any, ...]:
        check(backend, wanted, arrays)
        return tuple(function(*arrays))

    return run


def check(backend: Backend, wanted: Arguments, arrays: Sequence[Any]) -> None:
    """Raise `InvalidInput` unless the arrays have these shapes and dtypes."""
    dtype_of = backend.xp.dtype_of
    given = [(tuple(array.shape), dtype_of(array).name) for array in arrays]
    if given != wanted:
        raise InvalidInput(
            f"the stored function does not take ({_describe(given)}).",
            why=f"it was compiled for ({_describe(wanted)}).",
            fix="pass arguments of these shapes and dtypes, or load the original model.",
        )


def _describe(arguments: Arguments) -> str:
    return ", ".join(f"{name}{list(shape)}" for shape, name in arguments)


def damaged(cause: Exception) -> InvalidModel:
    """Return the error for data that are no context."""
    return InvalidModel(
        "a stored context cannot be read.",
        why=f"{type(cause).__name__}: {cause}",
        fix="the file is damaged, or another version wrote it: save the context again.",
    )
