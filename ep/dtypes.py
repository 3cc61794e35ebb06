"""Which dtypes a node's outputs have, from the ONNX schema and the lowering's `out`, without running anything."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from ep.registry import Lowering, Rule

STRING = np.dtype(object)

_NAMES: dict[str, np.dtype] = {
    "float": np.dtype(np.float32), "double": np.dtype(np.float64), "string": STRING,
    **{n: np.dtype(n) for n in ("bool", "float16", "complex64", "complex128")},
    **{f"{u}int{bits}": np.dtype(f"{u}int{bits}") for u in ("", "u") for bits in (8, 16, 32, 64)},
    **{
        n.replace("_", ""): np.dtype(getattr(ml_dtypes, n))
        for n in ("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
                  "float8_e8m0fnu", "float4_e2m1fn", "int4", "uint4", "int2", "uint2")
        if hasattr(ml_dtypes, n)
    },
}  # fmt: skip
_NAMES["float8e8m0"] = _NAMES["float8e8m0fnu"]
_NAMES["float4e2m1"] = _NAMES["float4e2m1fn"]


def onnx_dtype(code: int) -> np.dtype:
    """NumPy dtype of an `onnx.TensorProto.DataType` number; strings are `object`."""
    import onnx_ir as ir

    code = ir.DataType(code)
    return STRING if code == ir.DataType.STRING else np.dtype(code.numpy())


def value_dtype(value: Any) -> np.dtype | None:
    """Declared element dtype of an `onnx_ir.Value` (of its elements for sequences and optionals), or `None`."""
    declared = value.type
    while declared is not None and not hasattr(declared, "dtype"):
        declared = getattr(declared, "elem_type", None)
    if declared is None or int(declared.dtype) == 0:
        return None
    return onnx_dtype(int(declared.dtype))


def output_dtypes(
    lowering: Lowering, attributes: dict[str, Any], inputs: Sequence[np.dtype | None], count: int, opset: int
) -> tuple[np.dtype | None, ...]:
    """Dtype of each of `count` outputs; `None` where neither schema nor lowering tells."""
    if lowering.out:
        rules = lowering.out + lowering.out[-1:] * (count - len(lowering.out))
        return tuple(_by_rule(rule, attributes, inputs) for rule in rules[:count])
    schema = schema_of(lowering.key.domain, lowering.key.op_type, opset)
    if schema is None:
        return (inputs[0] if inputs else None,) * count
    bound = _bindings(schema, inputs)
    formal = list(schema.outputs)
    formal += formal[-1:] * (count - len(formal)) if formal else []
    constraints = {c.type_param_str: c.allowed_type_strs for c in schema.type_constraints}
    return tuple(_by_schema(o.type_str, bound, constraints, attributes) for o in formal[:count])


def conflict(lowering: Lowering, inputs: Sequence[np.dtype | None], opset: int) -> str:
    """Two inputs of different dtypes that the ONNX schema wants to be equal, in words; or `""`."""
    formal = _type_parameters(lowering.key.domain, lowering.key.op_type, opset)
    bound: dict[str, tuple[np.dtype, str]] = {}
    for index, dtype in enumerate(inputs if formal else ()):
        parameter, name = formal[min(index, len(formal) - 1)]
        if dtype is None or not parameter:
            continue
        first, other = bound.setdefault(parameter, (dtype, name))
        if first != dtype:
            return f"has {_word(dtype)} as input '{name}', but {_word(first)} as '{other}': they must be equal"
    return ""


@cache
def _type_parameters(domain: str, op_type: str, opset: int) -> tuple[tuple[str, str], ...]:
    """Type parameter and name of each formal input; the parameter is `""` where not all inputs have to share it."""
    schema = schema_of(domain, op_type, opset)
    if schema is None:
        return ()
    tensors = {
        c.type_param_str for c in schema.type_constraints if all(t.startswith("tensor(") for t in c.allowed_type_strs)
    }
    return tuple((i.type_str if i.is_homogeneous and i.type_str in tensors else "", i.name) for i in schema.inputs)


def _word(dtype: np.dtype) -> str:
    return "string" if dtype == STRING else dtype.name


def named_by(attribute: str, otherwise: int | str) -> Rule:
    """The rule of an output whose dtype an attribute names; without that, the one of an input, or a certain one."""
    return lambda attributes: attribute if attributes.get(attribute) else otherwise


def _by_rule(rule: Rule, attributes: dict[str, Any], inputs: Sequence[np.dtype | None]) -> np.dtype | None:
    if callable(rule):
        rule = rule(attributes)
    if isinstance(rule, int):
        return inputs[rule] if rule < len(inputs) else None
    if rule in attributes:
        return onnx_dtype(attributes[rule])
    return _NAMES.get(rule) or (np.dtype(rule) if rule in ("float32", "float64") else None)


@cache
def schema_of(domain: str, op_type: str, opset: int) -> Any:
    """The `onnx.defs.OpSchema` of an operator at an opset, or `None`."""
    import onnx

    return onnx.defs.get_schema(op_type, opset, domain) if onnx.defs.has(op_type, opset, domain) else None


def _bindings(schema: Any, inputs: Sequence[np.dtype | None]) -> dict[str, np.dtype]:
    bound: dict[str, np.dtype] = {}
    formal = list(schema.inputs)
    for index, dtype in enumerate(inputs):
        parameter = formal[min(index, len(formal) - 1)] if formal else None
        if parameter is not None and dtype is not None and parameter.is_homogeneous:
            bound.setdefault(parameter.type_str, dtype)
    return bound


def _by_schema(
    type_str: str, bound: dict[str, np.dtype], constraints: dict[str, Any], attributes: dict[str, Any]
) -> np.dtype | None:
    if type_str in bound:
        return bound[type_str]
    for name in ("to", "dtype", "output_dtype"):
        if attributes.get(name):
            return onnx_dtype(attributes[name])
    value = attributes.get("value")
    if isinstance(value, np.ndarray):
        return value.dtype
    allowed = constraints.get(type_str, (type_str,))
    elements = {_element(t) for t in allowed}
    return elements.pop() if len(elements) == 1 else None


def _element(type_str: str) -> np.dtype | None:
    """`tensor(float)`, `seq(tensor(float))`, `optional(…)` → float32; maps → `None`."""
    while "(" in type_str:
        if type_str.startswith("map"):
            return None
        type_str = type_str[type_str.index("(") + 1 : -1]
    return _NAMES.get(type_str)
