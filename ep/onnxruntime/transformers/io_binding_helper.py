"""Which dtypes of NumPy and of torch does a type such as `tensor(float)` stand for?"""

from __future__ import annotations

from typing import Any

import numpy as np

from ep.onnxruntime.elements import DTYPES, NAMES

_NUMPY = {f"tensor({name})": DTYPES[number] for number, name in NAMES.items() if DTYPES[number].kind in "fiubc"}
_TORCH = {"float": "float32", "double": "float64", "float8e4m3fn": "float8_e4m3fn", "float8e5m2": "float8_e5m2",
          "float8e4m3fnuz": "float8_e4m3fnuz", "float8e5m2fnuz": "float8_e5m2fnuz"}  # fmt: skip


class TypeHelper:
    """Translations between the type names of `NodeArg` and dtypes."""

    @staticmethod
    def get_input_type(ort_session: Any, name: str) -> str:
        """The type of an input; `ValueError` if there is none of this name."""
        return _type_of(ort_session.get_inputs(), name, "input")

    @staticmethod
    def get_output_type(ort_session: Any, name: str) -> str:
        """The type of an output; `ValueError` if there is none of this name."""
        return _type_of(ort_session.get_outputs(), name, "output")

    @staticmethod
    def ort_type_to_numpy_type(ort_type: str) -> Any:
        """NumPy's scalar type of a tensor type; `ValueError` where it has none."""
        if ort_type not in _NUMPY:
            raise ValueError(f"{ort_type} not found in map")
        return bool if ort_type == "tensor(bool)" else _NUMPY[ort_type].type

    @staticmethod
    def ort_type_to_torch_type(ort_type: str) -> Any:
        """Torch's dtype of a tensor type; `ValueError` where it has none."""
        import torch

        name = ort_type.removeprefix("tensor(").removesuffix(")")
        found = getattr(torch, _TORCH.get(name, name), None)
        if not ort_type.startswith("tensor(") or not isinstance(found, torch.dtype):
            raise ValueError(f"{ort_type} not found in map")
        return found

    @staticmethod
    def numpy_type_to_torch_type(numpy_type: Any) -> Any:
        """Torch's dtype of NumPy's; `ValueError` where it has none."""
        import torch

        found = getattr(torch, np.dtype(numpy_type).name, None)
        if not isinstance(found, torch.dtype):
            raise ValueError(f"{numpy_type} not found in map")
        return found

    @staticmethod
    def torch_type_to_numpy_type(torch_type: Any) -> Any:
        """NumPy's scalar type of torch's; `ValueError` where it has none."""
        name = str(torch_type).removeprefix("torch.")
        try:
            return bool if name == "bool" else np.dtype(name).type
        except TypeError:
            raise ValueError(f"{torch_type} not found in map") from None

    @staticmethod
    def get_io_numpy_type_map(ort_session: Any) -> dict[str, Any]:
        """Names of inputs and outputs with NumPy's types."""
        values = (*ort_session.get_inputs(), *ort_session.get_outputs())
        return {value.name: TypeHelper.ort_type_to_numpy_type(value.type) for value in values}


def _type_of(values: Any, name: str, kind: str) -> str:
    for value in values:
        if value.name == name:
            return value.type
    raise ValueError(f"{kind} name {name} not found")
