"""What may be fed to `run`? Onnxruntime's rules: which Python values become which tensors, and which are refused.

Arrays of any layout are taken as they are and never cast. Lists become arrays of the declared type. Symbolic
dimensions may have different sizes in different inputs: broadcasting decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ep.onnxruntime.elements import NAMES, number_of, tensor_type
from ep.onnxruntime.errors import Fail, InvalidArgument, failure, in_node
from ep.onnxruntime.model import Dims, dims_of, element_of, is_string, overridable, type_string
from ep.onnxruntime.pybind import STATE, incompatible
from ep.onnxruntime.values import COrtValue

if TYPE_CHECKING:
    import onnx

SIGNATURE = (
    f"(self: {STATE}.InferenceSession, arg0: collections.abc.Sequence[str], "
    f"arg1: collections.abc.Mapping[str, object], arg2: {STATE}.RunOptions) -> list"
)
_FIX = "Please fix either the inputs/outputs or the model."


@dataclass(frozen=True, slots=True)
class Declared:
    """An input as the model declares it; `fixed` has the sizes that a feed must have, by axis."""

    name: str
    type: str
    dtype: np.dtype[Any] | None  # of the elements; `None` for maps
    dims: Dims | None
    fixed: tuple[tuple[int, int], ...]
    rank: int  # -1: unknown
    kind: str  # tensor, seq, map or optional

    @staticmethod
    def of(value: onnx.ValueInfoProto) -> Declared:
        """From the model file."""
        kind, dims = type_string(value.type), dims_of(value.type)
        fixed = tuple((axis, size) for axis, size in enumerate(dims or ()) if isinstance(size, int))
        rank = -1 if dims is None else len(dims)
        return Declared(value.name, kind, element_of(value.type), dims, fixed, rank, kind.partition("(")[0])


class Feeds:
    """The inputs of a model, which turn what users feed into what `ep` runs on."""

    def __init__(self, proto: onnx.ModelProto, provider: Any) -> None:
        given = {tensor.name for tensor in proto.graph.initializer}
        replaceable = overridable(proto) if proto.ir_version >= 4 else set()
        self.provider = provider
        declared = [Declared.of(value) for value in proto.graph.input]
        self.inputs = [spec for spec in declared if spec.name not in given and spec.name not in replaceable]
        self.overridable = [spec for spec in declared if spec.name in replaceable]
        self.known = {spec.name: spec for spec in (*self.inputs, *self.overridable)}
        self.required = tuple(spec.name for spec in self.inputs if spec.kind != "optional")
        self.required_set = frozenset(self.required)
        self._optional = tuple(spec.name for spec in self.inputs if spec.kind == "optional")
        reads = [(name, (node.op_type, node.name)) for node in proto.graph.node for name in node.input]
        self._readers = {name: node for name, node in reversed(reads) if name in self.required_set}
        self._plain = {name: spec for name, spec in self.known.items() if spec.kind == "tensor" and spec.rank >= 0}

    def check_names(self, feed: Mapping[str, Any]) -> None:
        """`ValueError` if an input is missing."""
        missing = [name for name in self.required if name not in feed]
        if missing:
            raise ValueError(f"Required inputs ({missing}) are missing from input feed ({list(feed)}).")

    def enter(self, feed: Mapping[str, Any]) -> dict[str, Any]:
        """Arrays, lists, dictionaries and `None`, by name, that fit the model.

        Raises:
            InvalidArgument: a name, type, rank or size does not fit.
            RuntimeError, TypeError: a value is no tensor at all.
        """
        entered: dict[str, Any] = {}
        for name, value in feed.items():
            spec = self._plain.get(name)
            if spec is None or type(value) is not np.ndarray or value.dtype != spec.dtype or value.ndim != spec.rank:
                entered[name] = self._convert(name, value)
                continue
            shape = value.shape
            for axis, size in spec.fixed:
                if shape[axis] != size:
                    raise wrong_shape(spec, shape)
            entered[name] = value if not is_string(spec.dtype) else as_strings(value)
        for name in self.required:
            if entered.get(name) is None:
                raise failure(Fail, self._missing(name))
        for name in self._optional:
            entered.setdefault(name, None)
        return entered

    def _missing(self, name: str) -> str:
        """An input that is `None`, or not bound: the first node that reads it would say so."""
        op, node = self._readers.get(name, ("", ""))
        return in_node(op, node, f"Missing Input: {name}") if op else f"Missing Input: {name}"

    def _convert(self, name: str, value: Any) -> Any:
        if not isinstance(name, str):
            raise incompatible("run", SIGNATURE, name)
        spec = self.known.get(name)
        if spec is None:
            raise failure(InvalidArgument, f"Invalid input name: {name}")
        value = getattr(value, "_ortvalue", value)  # the OrtValue that users hold
        if isinstance(value, COrtValue):
            value = value._feed(self.provider)
        if value is None:
            return None
        if spec.kind == "map":
            return self._map(spec, value)
        if spec.kind == "seq" or (spec.kind == "optional" and spec.type.startswith("optional(seq")):
            return self._sequence(spec, value)
        return self._tensor(spec, value)

    def _map(self, spec: Declared, value: Any) -> Any:
        if not isinstance(value, dict):
            raise failure(
                InvalidArgument, f"input with name: '{spec.name}' expected to be of type: 1 but received a tensor"
            )
        return value

    def _sequence(self, spec: Declared, value: Any) -> list[Any]:
        if isinstance(value, np.ndarray):
            raise failure(
                InvalidArgument, f"input with name: '{spec.name}' expected to be of type: 3 but received a tensor"
            )
        if not isinstance(value, list):
            first = type(value[0]) if isinstance(value, tuple) and value else type(value)
            raise RuntimeError(f"Iterable of {first} should be given as array for input '{spec.name}'.")
        items = []
        for item in value:
            if isinstance(item, dict):
                items.append(item)
                continue
            array = self._array(spec, item)
            if self._dtype(array) != spec.dtype:
                raise RuntimeError("TensorSeq: tensor to be added has a different data type.\n")
            items.append(array)
        return items

    def _tensor(self, spec: Declared, value: Any) -> Any:
        array = self._array(spec, value)
        dtype = self._dtype(array)
        if dtype != spec.dtype:
            expected = f"tensor({NAMES[number_of(spec.dtype)]})" if spec.dtype is not None else spec.type
            raise failure(
                InvalidArgument,
                f"Unexpected input data type. Actual: ({tensor_type(dtype)}) , expected: ({expected})",
            )
        check_shape(spec, tuple(array.shape))
        return array

    def _dtype(self, array: Any) -> np.dtype[Any]:
        return array.dtype if isinstance(array, np.ndarray) else self.provider.backend.xp.dtype_of(array)

    def _array(self, spec: Declared, value: Any) -> Any:
        """An array of the device's library as it is, or a NumPy array."""
        if isinstance(value, np.ndarray):
            return normal(np.asarray(value))
        if self.provider.backend.is_array(value):
            return value
        if isinstance(value, list):
            return _from_list(value, spec)
        if isinstance(value, bool | int | float | complex | np.generic):
            raise RuntimeError(f"Unable to handle object of type {type(value)}")
        raise RuntimeError(f"Input must be a list of dictionaries or a single numpy array for input '{spec.name}'.")


def normal(array: np.ndarray) -> np.ndarray:
    """The array in this machine's byte order, strings as `str` objects."""
    if array.dtype.kind in "OUS" or array.dtype.type is np.void:
        return as_strings(array)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def as_strings(array: np.ndarray) -> np.ndarray:
    """An object array of `str`: of objects what `str` makes of them, of bytes (dtypes S and V) their text."""
    made = np.empty(array.size, object)
    if array.dtype.type is np.void:
        array = array.view(f"S{array.dtype.itemsize}")
    if array.dtype.kind == "S":
        made[:] = [item.decode("utf-8", "surrogateescape") for item in array.flat]
    else:
        made[:] = [item if type(item) is str else str(item) for item in array.flat]
    return made.reshape(array.shape)


def _from_list(value: list[Any], spec: Declared) -> np.ndarray:
    try:
        if is_string(spec.dtype):
            return as_strings(np.asarray(value, object))
        if np.asarray(value).dtype.kind in "OUS":
            raise ValueError("text or objects among numbers")
        return np.asarray(value, spec.dtype)
    except (ValueError, TypeError, OverflowError) as cause:
        raise RuntimeError("Could not create tensor from given input list") from cause


def check_shape(spec: Declared, shape: tuple[int, ...]) -> None:
    """`InvalidArgument` for a wrong rank, or a wrong size on an axis whose size the model fixes."""
    if spec.rank < 0:
        return
    if len(shape) != spec.rank:
        raise failure(
            InvalidArgument,
            f"Invalid rank for input: {spec.name} Got: {len(shape)} Expected: {spec.rank} {_FIX}",
        )
    if any(shape[axis] != size for axis, size in spec.fixed):
        raise wrong_shape(spec, shape)


def wrong_shape(spec: Declared, shape: tuple[int, ...]) -> Exception:
    """The exception that lists every axis of a wrong size."""
    lines = "".join(
        f" index: {axis} Got: {shape[axis]} Expected: {size}\n" for axis, size in spec.fixed if shape[axis] != size
    )
    return failure(
        InvalidArgument,
        f"Got invalid dimensions for input: {spec.name} for the following indices\n{lines} {_FIX}",
    )
