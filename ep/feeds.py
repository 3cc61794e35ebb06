"""Are the feeds what the model asks for? Names, dtypes, ranks, dimensions, all in one error; and then indices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ep.errors import InvalidInput, did_you_mean
from ep.weights import strings


@dataclass(frozen=True, slots=True)
class ValueInfo:
    """An input or output: its name, element dtype (`object` for strings, `None` if the model does not say),
    shape (ints, symbolic names, `None` for unknown; `None` as a whole if even the rank is unknown), and
    whether it is a tensor, a sequence, an optional or a map."""

    name: str
    dtype: np.dtype | None
    shape: tuple[int | str | None, ...] | None
    kind: str = "tensor"

    @staticmethod
    def of(value: Any, dtype: np.dtype | None) -> ValueInfo:
        """From an `onnx_ir.Value`."""
        kind = "tensor"
        declared = type(value.type).__name__
        for name in ("Sequence", "Optional"):
            if declared.startswith(name):
                kind = name.lower()
        shape = None if value.shape is None else tuple(_dim(d) for d in value.shape)
        return ValueInfo(value.name, dtype, shape, kind)

    def __str__(self) -> str:
        dims = "?" if self.shape is None else ", ".join("?" if d is None else str(d) for d in self.shape)
        dtype = "unknown" if self.dtype is None else "string" if self.dtype.kind == "O" else self.dtype.name
        return f"{self.name}: {dtype}[{dims}]" + ("" if self.kind == "tensor" else f" ({self.kind})")


def _dim(dim: Any) -> int | str | None:
    """A size or a name; exporters also write -1, "" and "?" where they know nothing."""
    if isinstance(dim, int):
        return dim if dim >= 0 else None
    name = getattr(dim, "value", None)
    return None if name in ("", "?") else name


class FeedCheck:
    """Checks feeds against a model's inputs and enters them into an environment."""

    def __init__(
        self,
        model: str,
        inputs: Sequence[ValueInfo],
        overridable: Sequence[ValueInfo],
        values: Mapping[str, Any],
        defaults: Mapping[Any, np.ndarray],
        indices: Any,
    ) -> None:
        """`values` are the keys of the environment by the names of inputs; `defaults` go under those not fed.

        `indices` checks the values of an environment (`ep.fed_indices.FedIndices`).
        """
        self.model = model
        self.values = values
        self.specs = tuple((i.name, self.values[i.name], i, _plain(i)) for i in inputs)
        self.optional = {o.name: o for o in overridable}
        self.defaults = dict(defaults)
        self.count = len(inputs)
        self.indices = indices

    def check(self, feeds: Any, backend: Any, private: bool) -> dict[Any, Any]:
        """Value → array. With `private`, the arrays are copies that later writes to a feed do not reach.

        Otherwise the caller waits for results, so that indices in arrays of the device are waited for, too.
        """
        if type(feeds) is not dict and not isinstance(feeds, Mapping):
            raise InvalidInput(
                f"the feeds are a {type(feeds).__name__}, not a mapping from input names to arrays.",
                why="the model's inputs are " + ("; ".join(str(i) for _, _, i, _ in self.specs) or "none") + ".",
                fix="write {" + ", ".join(f"'{name}': …" for name, *_ in self.specs) + "}.",
            )
        env = dict(self.defaults)
        dims: dict[str, tuple[int, str]] = {}
        problems: list[str] = []
        for name, value, info, plain in self.specs:
            if name not in feeds:
                if info.kind == "optional":
                    env[value] = None
                else:
                    problems.append(f"'{name}' is missing: the model needs {info}")
                continue
            array = feeds[name]
            if plain is not None and type(array) is np.ndarray and array.dtype == plain[0]:
                shape = array.shape
                if len(shape) == len(plain[1]):
                    ok = True
                    for size, want in zip(shape, plain[1], strict=True):
                        if want is not None and size != want:
                            ok = type(want) is str and dims.setdefault(want, (size, name))[0] == size
                            if not ok:
                                break
                    if ok:
                        env[value] = array.copy() if private else array
                        continue
            env[value] = self._enter(array, info, backend, private, dims, problems)
        if len(feeds) > self.count or problems:
            self._extra(feeds, env, backend, private, dims, problems)
        if problems:
            raise InvalidInput(
                f"the feeds do not fit {self.model}: " + "".join(f"\n  {p}" for p in problems),
                why="the model's inputs are " + "; ".join(str(i) for _, _, i, _ in self.specs) + ".",
                fix="feed these names with arrays of these dtypes and shapes (use .astype to change a dtype).",
            )
        self.indices.check(env, backend, waits=not private)
        return env

    def highest(self, arrays: Mapping[str, Any], backend: Any) -> dict[str, int]:
        """Name of each input that indexes → the greatest index that feeds of these shapes allow."""
        env = self.defaults | {self.values[name]: array for name, array in arrays.items()}
        return self.indices.highest(env, backend)

    def entered(self, arrays: Mapping[str, Any], backend: Any) -> dict[Any, Any]:
        """Value → array, of feeds that the caller has checked but for the indices that they hold."""
        env = self.defaults | {self.values[name]: array for name, array in arrays.items()}
        self.indices.check(env, backend)
        return env

    def _extra(self, feeds: Any, env: Any, backend: Any, private: bool, dims: Any, problems: list[str]) -> None:
        known = {name for name, *_ in self.specs}
        for name in feeds:
            if name in self.optional:
                info = self.optional[name]
                env[self.values[name]] = self._enter(feeds[name], info, backend, private, dims, problems)
            elif name not in known:
                hint = did_you_mean(name, known)
                problems.append(f"'{name}' is not an input of the model.{hint}")

    def _enter(self, value: Any, info: ValueInfo, backend: Any, private: bool, dims: dict, problems: list[str]) -> Any:
        if info.kind == "sequence":
            if not isinstance(value, list | tuple):
                problems.append(f"'{info.name}' is a sequence: feed a list of arrays, not {type(value).__name__}")
                return None
            return [self._array(v, info, backend, private, None, problems) for v in value]
        if info.kind == "optional" and (value is None or isinstance(value, list | tuple)):
            return None if value is None else [self._array(v, info, backend, private, None, problems) for v in value]
        return self._array(value, info, backend, private, dims, problems)

    def _array(
        self, value: Any, info: ValueInfo, backend: Any, private: bool, dims: dict | None, problems: list[str]
    ) -> Any:
        array = as_array(value, info, backend)
        if isinstance(array, str):
            problems.append(array)
            return None
        dtype = backend.xp.dtype_of(array) if not isinstance(array, np.ndarray) else array.dtype
        if info.dtype is not None and dtype != info.dtype:
            problems.append(f"'{info.name}' has dtype {dtype.name}; the model needs {_name(info.dtype)}")
        elif info.shape is not None and dims is not None:
            problems += check_shape(info, tuple(array.shape), dims)
        return array.copy() if private and isinstance(array, np.ndarray) else array


def _plain(info: ValueInfo) -> tuple[np.dtype, tuple[int | str | None, ...]] | None:
    """Dtype and shape for the fast path, or `None` where a feed needs more care."""
    if info.kind != "tensor" or info.dtype is None or info.shape is None or info.dtype.kind == "O":
        return None
    return info.dtype, info.shape


def as_array(value: Any, info: ValueInfo, backend: Any) -> Any:
    """A NumPy array, or an array of the backend as it is; a `str` says what is wrong with the feed."""
    if info.dtype is not None and info.dtype.kind == "O":
        array = np.asarray(value)
        empty = not array.size and isinstance(value, list | tuple)  # which NumPy takes for floats
        if array.dtype.kind not in "OUST" and not empty:
            return f"'{info.name}' has dtype {array.dtype.name}; the model needs strings"
        return strings(array.astype(object))
    if isinstance(value, np.ndarray):
        return value if value.dtype.isnative else value.astype(value.dtype.newbyteorder("="))
    if backend.is_array(value):
        return value
    if isinstance(value, bool | int | float | complex | list | tuple | np.generic):
        return _from_python(value, info)
    for convert in (np.from_dlpack, _by_dlpack, np.asarray):
        try:
            array = convert(value)
        except (TypeError, AttributeError, BufferError, ValueError, RuntimeError, LookupError, ArithmeticError):
            continue
        if array.dtype.kind != "O":
            return array
    return f"'{info.name}' is a {type(value).__name__}, which gives neither DLPack nor __array__"


def _by_dlpack(value: Any) -> np.ndarray:
    """Also the dtypes that NumPy does not know, such as bfloat16."""
    from ep.tensor import TensorView

    return TensorView.from_dlpack(value).numpy()


def _from_python(value: Any, info: ValueInfo) -> Any:
    try:
        array = np.asarray(value)
    except ValueError as error:
        return f"'{info.name}' is a ragged list: {error}"
    if info.dtype is None or array.dtype == info.dtype:
        return array
    if array.dtype.kind in "biuf" and isinstance(value, list | tuple | bool | int | float):
        with np.errstate(all="ignore"):
            exact = array.astype(info.dtype)
        floating = info.dtype.kind not in "biu"
        if floating or (array.dtype.kind in "biu" and (exact.astype(array.dtype) == array).all()):
            return exact
    return array


def check_shape(info: ValueInfo, shape: tuple[int, ...], dims: dict[str, tuple[int, str]]) -> list[str]:
    """Problems of one shape; a symbolic dimension has one value per run."""
    assert info.shape is not None
    if len(shape) != len(info.shape):
        return [f"'{info.name}' has rank {len(shape)} (shape {list(shape)}); the model needs {info}"]
    problems = []
    for axis, (size, want) in enumerate(zip(shape, info.shape, strict=True)):
        if isinstance(want, int) and size != want:
            problems.append(f"'{info.name}' has {size} at axis {axis}; the model needs {info}")
        elif isinstance(want, str):
            first, who = dims.setdefault(want, (size, info.name))
            if first != size:
                problems.append(
                    f"'{info.name}' has {size} at axis {axis}, but dimension '{want}' is {first} in '{who}'"
                )
    return problems


def _name(dtype: np.dtype) -> str:
    return "string" if dtype.kind == "O" else dtype.name
