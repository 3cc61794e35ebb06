"""Where does `ep run` get a model's inputs from? Files of arrays, or random values of their types."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ep.errors import InvalidInput, did_you_mean
from ep.feeds import ValueInfo
from ep.memory import check_room

RANDOM = "random"


def feeds(
    infos: Sequence[ValueInfo], given: Sequence[str], dims: Mapping[str, int], seed: int = 0
) -> tuple[dict[str, Any], dict[str, str]]:
    """The feeds, and where each comes from; inputs that are not `given` as `name=source` are random."""
    sources = parse(given, [info.name for info in infos])
    check_dims(dims, infos)
    rng = np.random.default_rng(seed)
    values: dict[str, Any] = {}
    for info in infos:
        source = sources.setdefault(info.name, RANDOM)
        if source == RANDOM and info.kind == "optional":
            sources[info.name] = "omitted"
        elif source == RANDOM:
            values[info.name] = random_value(info, dims, rng)
        else:
            values[info.name] = read(info.name, source)
    return values, sources


def parse(given: Sequence[str], known: Sequence[str]) -> dict[str, str]:
    """`name=source` arguments as a mapping; input names may themselves contain `=`."""
    sources: dict[str, str] = {}
    for argument in given:
        name = max((k for k in known if argument.startswith(f"{k}=")), key=len, default=None)
        if name is None:
            guess, equals, _ = argument.partition("=")
            raise InvalidInput(
                f"--input {argument!r} names no input of the model.{did_you_mean(guess, known)}"
                if equals
                else f"--input {argument!r} names no file.",
                why=f"its inputs are {', '.join(map(repr, known)) or 'none'}.",
                fix="write --input NAME=FILE.npy, NAME=FILE.npz or NAME=random.",
            )
        if name in sources or not argument[len(name) + 1 :]:
            wrong = f"gives {name!r} again" if name in sources else "names no file"
            raise InvalidInput(
                f"--input {argument!r} {wrong}.",
                fix="write --input NAME=FILE.npy, NAME=FILE.npz or NAME=random, once for each input.",
            )
        sources[name] = argument[len(name) + 1 :]
    return sources


def check_dims(dims: Mapping[str, int], infos: Sequence[ValueInfo]) -> None:
    """Refuses sizes for dimensions that no input has."""
    known = dict.fromkeys(d for info in infos for d in info.shape or () if isinstance(d, str))
    unknown = [name for name in dims if name not in known]
    if unknown:
        raise InvalidInput(
            f"--dim {unknown[0]} names no dimension of the model.{did_you_mean(unknown[0], known)}",
            why=f"the symbolic dimensions of its inputs are {', '.join(map(repr, known)) or 'none'}.",
            fix="correct the name, or leave it out.",
        )


def read(name: str, source: str) -> np.ndarray:
    """The array of an .npy file, or the one called `name` (or the only one) of an .npz; never a pickle."""
    try:
        loaded = np.load(Path(source), allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return loaded
        with loaded:
            return loaded[_member(name, source, loaded.files)]
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise InvalidInput(
            f"{source!r} cannot be read for input {name!r}.",
            why=getattr(error, "strerror", None) or _obstacle(source) or str(error),
            fix="check the path."
            if isinstance(error, FileNotFoundError)
            else "pass an .npy or .npz file that numpy.save or numpy.savez wrote, without Python objects.",
        ) from error


def _obstacle(source: str) -> str:
    """Why NumPy cannot read a file of another format: it takes every such file for a pickle, and says so."""
    with Path(source).open("rb") as file:
        start = file.read(6)
    return "" if start.startswith((b"\x93NUMPY", b"PK")) else "it is neither an .npy nor an .npz file."


def _member(name: str, source: str, members: Sequence[str]) -> str:
    if name in members:
        return name
    if len(members) == 1:
        return members[0]
    raise InvalidInput(
        f"{source!r} holds no array {name!r}.{did_you_mean(name, members)}",
        why=f"it holds {', '.join(map(repr, members)) or 'nothing'}.",
        fix="save the array under the input's name, or alone in its file.",
    )


def random_value(info: ValueInfo, dims: Mapping[str, int], rng: np.random.Generator) -> Any:
    """A random array of the input's dtype and shape; a dimension that nobody knows has size 1."""
    if info.dtype is None or info.shape is None:
        raise InvalidInput(
            f"no random value can be made for input {info.name!r}.",
            why=f"the model declares only {info}.",
            fix=f"pass --input {info.name}=FILE.npy.",
        )
    shape = tuple(d if isinstance(d, int) else dims.get(d or "", 1) for d in info.shape)
    made = f"a random input '{info.name}' of shape {list(shape)}"
    fix = "choose smaller sizes with --dim, or pass --input NAME=FILE.npy."
    check_room(made, 8 * math.prod(shape), fix)  # it is made of doubles
    try:
        array = _random_array(info.dtype, shape, rng)
    except (MemoryError, ValueError) as error:  # NumPy says "too big" in either way
        raise InvalidInput(
            f"no random value can be made for input {info.name!r} of shape {list(shape)}.",
            why=str(error),
            fix=fix,
        ) from error
    return [array] if info.kind == "sequence" else array


def _random_array(dtype: np.dtype[Any], shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Standard normal floats, bytes over their whole range; 0 or 1 for other integers: many are ids."""
    if dtype.kind == "O":
        return rng.choice(np.array(["alpha", "beta", "gamma"], dtype=object), shape)
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(bool)
    if dtype.kind in "iu":
        return rng.integers(0, 256 if dtype == np.uint8 else 2, shape, dtype=np.int64).astype(dtype)
    real = rng.standard_normal(shape)
    return (real + 1j * rng.standard_normal(shape) if dtype.kind == "c" else real).astype(dtype)
