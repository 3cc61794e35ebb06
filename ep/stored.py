"""What does the data of an `EpContext` hold? A container with the code of one function, and its arguments.

Stored code is fixed to shapes and dtypes, but that of XLA accepts any bytes of the right number: they are checked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ep.backend import Backend, NotStorable, Specs
from ep.container import Code, Container, Spec, damaged, pack, unpack
from ep.errors import InvalidInput, UnsupportedContext
from ep.identity import function_key
from ep.library import specs_of, written


def store(backend: Backend, fn: Callable[..., Any], specs: Specs) -> bytes:
    """Compile a function for these arguments, and return the data of a context.

    Raises:
        UnsupportedContext: the library cannot store this function.
    """
    assert backend.ahead is not None
    try:
        code = backend.ahead(fn, specs, 0)[1]()
    except NotStorable as why:
        raise UnsupportedContext(backend.name, f"{why}.") from why
    needs = backend.needs()
    key = function_key("", needs, specs, ())
    held = Code(key, written(specs), code)
    return pack(Container(f"ep.{backend.name}", backend.version, needs, codes=(held,)))


def load(backend: Backend, data: bytes) -> Callable[..., tuple[Any, ...]]:
    """Return the function of a context; it refuses other arguments than those it was compiled for.

    Raises:
        InvalidModel: the data are damaged.
        UnsupportedContext: they hold no code.
    """
    held = unpack(data)
    if len(held.codes) != 1:
        raise UnsupportedContext(backend.name, f"the context holds {len(held.codes)} functions; one is needed.")
    wanted = held.codes[0].arguments
    assert backend.deserialize is not None
    try:
        function = backend.deserialize(bytes(held.codes[0].code), None)
    except (RuntimeError, ValueError) as cause:
        raise damaged("a context", f"{type(cause).__name__}: {cause}") from cause

    def run(*arrays: Any) -> tuple[Any, ...]:
        check(backend, wanted, arrays)
        return tuple(function(*arrays))

    return run


def check(backend: Backend, wanted: Sequence[Spec], arrays: Sequence[Any]) -> None:
    """Raise `InvalidInput` unless the arrays have these shapes and dtypes."""
    given = written(specs_of(backend, arrays) or ())
    if given != tuple(wanted):
        raise InvalidInput(
            f"the stored function does not take ({_describe(given)}).",
            why=f"it was compiled for ({_describe(wanted)}).",
            fix="pass arguments of these shapes and dtypes, or load the original model.",
        )


def _describe(arguments: Sequence[Spec]) -> str:
    return ", ".join(f"{name}{list(shape)}" for shape, name in arguments)
