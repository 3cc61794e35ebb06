"""Categories, labels and maps of ai.onnx.ml: encoders look keys up, vectorizers lay features side by side."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ep.errors import InvalidInput, InvalidModel
from ep.ops.limits import along
from ep.ops.lookup import place
from ep.ops.tables import once_per_node
from ep.registry import op

ML = "ai.onnx.ml"


def _strings(*names: str) -> Any:
    """The `host_only` rule of an operator that reads or returns strings if one of these attributes holds some."""

    def reason(attributes: dict[str, Any]) -> str:
        held = (attributes.get(name) for name in names)
        is_text = any(
            v.dtype == object if isinstance(v, np.ndarray) else bool(v) and isinstance(v[0], str)
            for v in held
            if v is not None
        )
        return "it maps strings" if is_text else ""

    return reason


# Keys to values


@op("LabelEncoder", domain=ML, host_only="it maps strings")
def label_encoder_1(xp, x, *, classes_strings=(), default_int64=-1, default_string="_Unused"):
    if x.dtype == object:
        return _encoded(xp, x, _positions(classes_strings, default_int64))
    known = (x >= 0) & (x < len(classes_strings))
    names = np.array([*classes_strings, default_string], object)
    return names[np.where(known, x, len(classes_strings))]


def _value_dtype(attributes: dict[str, Any]) -> str:
    """The dtype of what a LabelEncoder returns, which its schema leaves open."""
    kinds = {"values_strings": "string", "values_int64s": "int64", "values_floats": "float"}
    tensor = attributes.get("values_tensor")
    named = next((kind for name, kind in kinds.items() if attributes.get(name)), "")
    return named or ("" if tensor is None else "string" if tensor.dtype.kind == "O" else tensor.dtype.name)


@op("LabelEncoder", domain=ML, since=2, host_only=_strings("keys_strings", "values_strings"), out=(_value_dtype,))
def label_encoder_2(
    xp, x, *, default_float=-0.0, default_int64=-1, default_string="_Unused", keys_floats=None, keys_int64s=None,
    keys_strings=None, values_floats=None, values_int64s=None, values_strings=None,
):  # fmt: skip
    """The first of equal keys counts, as in onnxruntime; from version 4 on the last does."""
    encoding = _encoding(
        keys_floats, keys_int64s, keys_strings, None, values_floats, values_int64s, values_strings, None,
        default_float, default_int64, default_string, None, True,
    )  # fmt: skip
    return _encoded(xp, x, encoding)


@op(
    "LabelEncoder",
    domain=ML,
    since=4,
    host_only=_strings("keys_strings", "values_strings", "keys_tensor", "values_tensor"),
    out=(_value_dtype,),
)
def label_encoder(
    xp, x, *, default_float=-0.0, default_int64=-1, default_string="_Unused", default_tensor=None,
    keys_floats=None, keys_int64s=None, keys_strings=None, keys_tensor=None, values_floats=None,
    values_int64s=None, values_strings=None, values_tensor=None,
):  # fmt: skip
    encoding = _encoding(
        keys_floats, keys_int64s, keys_strings, keys_tensor, values_floats, values_int64s, values_strings,
        values_tensor, default_float, default_int64, default_string, default_tensor, False,
    )  # fmt: skip
    return _encoded(xp, x, encoding)


@op("CategoryMapper", domain=ML, host_only="it maps strings")
def category_mapper(
    xp, x, *, cats_int64s=(), cats_strings=(), default_int64=-1, default_string="_Unused"
):  # fmt: skip
    to_integers, to_strings = _categories(cats_int64s, cats_strings, default_int64, default_string)
    return _encoded(xp, x, to_integers if x.dtype == object else to_strings)


@dataclass(frozen=True, eq=False)
class Encoding:
    """Values by keys; `at_nan` is that of NaN, which equals nothing and so is no key."""

    values: dict[Any, Any]
    at_nan: list[Any]
    default: Any
    dtype: np.dtype

    @staticmethod
    def of(keys: Any, values: Any, default: Any, dtype: Any, first: bool = False) -> Encoding:
        keys, values = list(keys), list(values)
        if len(keys) != len(values):
            raise InvalidModel(f"an encoder has {len(keys)} keys and {len(values)} values.")
        pairs = list(zip(keys, values, strict=True))
        pairs = pairs[::-1] if first else pairs  # of equal keys, a dictionary keeps the last
        at_nan = [value for key, value in pairs if key != key][-1:]
        return Encoding({k: v for k, v in pairs if k == k}, at_nan, default, np.dtype(dtype))

    @cached_property
    def keys(self) -> np.ndarray:
        """The keys in order."""
        return np.array(sorted(self.values))

    @cached_property
    def table(self) -> np.ndarray:
        """The default and the values of the keys in order."""
        return _array([self.default, *(self.values[key] for key in sorted(self.values))], self.dtype)


@once_per_node
def _positions(classes: Any, default: Any) -> Encoding:
    return Encoding.of(classes, range(len(classes)), default, np.int64)


@once_per_node
def _categories(integers: Any, strings: Any, default: int, default_string: str) -> tuple[Encoding, Encoding]:
    to_integers = Encoding.of(strings, integers, default, np.int64)
    return to_integers, Encoding.of(integers, strings, default_string, object)


@once_per_node
def _encoding(
    key_floats: Any, key_ints: Any, key_strings: Any, key_tensor: Any, floats: Any, ints: Any, strings: Any,
    tensor: Any, default_float: float, default_int: int, default_string: str, default_tensor: Any, first: bool,
) -> Encoding:  # fmt: skip
    tensor_dtype = np.dtype(np.float32) if tensor is None else tensor.dtype
    unused = {"O": "_Unused", "f": -0.0}.get(tensor_dtype.kind, -1)
    choices = [
        (floats, default_float, np.float32), (ints, default_int, np.int64), (strings, default_string, object),
        (tensor, unused, tensor_dtype),
    ]  # fmt: skip
    keys = [k for k in (key_floats, key_ints, key_strings, key_tensor) if k is not None and len(k)]
    given = [c for c in choices if c[0] is not None and len(c[0])]
    if len(keys) != 1 or len(given) != 1:
        raise InvalidModel(
            f"LabelEncoder has {len(keys)} attributes keys_* and {len(given)} attributes values_*.",
            why="it needs exactly one of each.",
        )
    ((values, default, dtype),) = given
    default = default if default_tensor is None else default_tensor.reshape(-1)[0]
    return Encoding.of(keys[0], values, default, dtype, first)


def _encoded(xp: Any, x: Any, encoding: Encoding) -> Any:
    """Each element's value by its key, or the default."""
    key_dtype, dtype = xp.dtype_of(x), encoding.dtype
    if key_dtype.kind == "O" or (dtype.kind == "O" and key_dtype.kind == "i"):
        get, default = encoding.values.get, encoding.default
        return _array([get(key, default) for key in x.reshape(-1).tolist()], dtype).reshape(x.shape)
    row = place(xp, x, encoding.keys.astype(key_dtype))
    if dtype.kind == "O":  # on the host
        y = encoding.table[np.asarray(row)]
        return np.where(np.isnan(x), _array(encoding.at_nan, dtype), y) if encoding.at_nan else y
    y = xp.take(xp.asarray(encoding.table), row, axis=0)
    return xp.where(xp.isnan(x), xp.asarray(_array(encoding.at_nan, dtype)), y) if encoding.at_nan else y


def _array(values: list[Any], dtype: Any) -> np.ndarray:
    result = np.empty(len(values), dtype)
    result[:] = values
    return result


# One-hot


def _one_hot_on_host(attributes: dict[str, Any]) -> str:
    if attributes.get("cats_strings"):
        return "it maps strings"
    return "" if attributes.get("zeros", 1) else "it fails on categories that it does not know"


@op("OneHotEncoder", domain=ML, host_only=_one_hot_on_host)
def one_hot_encoder(xp, x, *, cats_int64s=None, cats_strings=None, zeros=1):
    """The last of equal categories counts, as in onnxruntime."""
    if bool(cats_int64s) == bool(cats_strings):
        raise InvalidModel("OneHotEncoder needs exactly one of cats_int64s and cats_strings.")
    if cats_strings:
        table, rows = _one_hot_rows(cats_strings)
        last = len(rows) - 1
        row = np.array([table.get(key, last) for key in x.reshape(-1).tolist()], np.int64)
        y = rows[row].reshape(*x.shape, last)
    else:
        keys = xp.asarray(_shadowed(cats_int64s))
        y = xp.astype(xp.expand_dims(xp.astype(x, np.int64), -1) == keys[0], np.float32)
        y = y * xp.astype(keys[1], np.float32)
    if not zeros and not y.any(axis=-1).all():
        unknown = x[~y.any(axis=-1)].reshape(-1)[0]
        raise InvalidInput(f"OneHotEncoder does not know the category {unknown!r}, and its zeros attribute is 0.")
    return y


@once_per_node
def _one_hot_rows(categories: tuple[str, ...]) -> tuple[dict[str, int], np.ndarray]:
    """Category → row, and the rows; the last one, of zeros, is that of unknown categories."""
    table = {category: i for i, category in enumerate(categories)}
    return table, np.eye(len(categories) + 1, len(categories), dtype=np.float32)


@once_per_node
def _shadowed(categories: tuple[int, ...]) -> np.ndarray:
    """The categories, and below each 1, or 0 if an equal one follows."""
    last = {category: i for i, category in enumerate(categories)}
    return np.array([categories, [last[c] == i for i, c in enumerate(categories)]], np.int64)


# Features side by side


@op("ArrayFeatureExtractor", domain=ML)
def array_feature_extractor(xp, x, indices: along("x", -1, wraps=False)):
    """A vector counts as one row: [F] gives [1, n]."""
    y = xp.take(x, xp.reshape(indices, (-1,)), axis=-1)
    return xp.reshape(y, (1, -1)) if x.ndim == 1 else y


@op("FeatureVectorizer", domain=ML)
def feature_vectorizer(xp, *inputs, inputdimensions=()):
    """Each input as float32 [N, C], cut or filled with zeros to its size in `inputdimensions`."""
    columns = []
    for x, size in zip(inputs, inputdimensions or [x.shape[-1] for x in inputs], strict=True):
        x = xp.astype(xp.reshape(x, (1, -1)) if x.ndim == 1 else x, np.float32)[:, :size]
        missing = size - x.shape[1]
        columns.append(xp.pad(x, [(0, 0), (0, missing)]) if missing else x)
    return xp.concatenate(columns, axis=1)


# Maps

MAPS = "it handles maps"


@op("DictVectorizer", domain=ML, host_only=MAPS)
def dict_vectorizer(xp, x, *, int64_vocabulary=None, string_vocabulary=None):
    """The map's values in the order of the vocabulary, [1, n]; a list of maps gives a row for each."""
    vocabulary = int64_vocabulary or string_vocabulary or ()
    maps = x if isinstance(x, list) else [x]
    value = next((v for row in maps for v in row.values()), 0.0)
    dtype, missing = (object, "") if isinstance(value, str) else (_dtype_of_number(value), 0)
    return np.array([[row.get(key, missing) for key in vocabulary] for row in maps], dtype)


def _dtype_of_number(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.dtype
    return np.int64 if isinstance(value, int) else np.float32


@op("CastMap", domain=ML, host_only=MAPS)
def cast_map(xp, x, *, cast_to="TO_FLOAT", map_form="DENSE", max_map=1):
    """The map's values in the order of its keys, or each at the column that its key names: [1, n]."""
    casts = {"TO_FLOAT": (float, np.float32), "TO_INT64": (_integer, np.int64), "TO_STRING": (_text, object)}
    if cast_to not in casts or map_form not in ("DENSE", "SPARSE"):
        raise InvalidModel(f"CastMap knows neither cast_to '{cast_to}' nor map_form '{map_form}'.")
    cast, dtype = casts[cast_to]
    if map_form == "DENSE":
        return _array([cast(x[key]) for key in sorted(x)], dtype).reshape(1, -1)
    row = [cast(0)] * max_map
    for key, value in x.items():
        if 0 <= key < max_map:
            row[key] = cast(value)
    return _array(row, dtype).reshape(1, -1)


def _integer(value: Any) -> int:
    return int(float(value)) if isinstance(value, str) else int(value)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "0" if value == 0 and isinstance(value, int) else f"{value:f}"


@op("ZipMap", domain=ML, host_only=MAPS)
def zip_map(xp, x, *, classlabels_int64s=None, classlabels_strings=None):
    keys = classlabels_int64s or classlabels_strings or ()
    rows = x.reshape(-1, len(keys)) if keys else x
    if x.shape[-1] != len(keys):
        raise InvalidInput(f"ZipMap has {len(keys)} keys, but its input has {x.shape[-1]} columns.")
    return [dict(zip(keys, row, strict=True)) for row in rows.tolist()]
