"""Does the code keep its structure? One rule each, proved by machine, with a check that the proof can fail.

The core imports no backend. Operators name no library, use only names that all namespaces have, and have the
signature of the ONNX schema; overrides have that of their lowering. Files are short and say what they answer.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import onnx
import pytest

import ep
import ep.ops
from ep.namespace import EXTRAS
from ep.registry import OPS, REQUIRED, Lowering, OpKey, OpRegistry

CORE = Path(ep.__file__).parent
ROOT = CORE.parent
BACKENDS = Path(importlib.import_module("ep.backends").__file__ or "").parent
SOURCES = sorted([*CORE.rglob("*.py"), *BACKENDS.rglob("*.py")])
LIBRARIES = {"numpy": None, "jax": "jax", "mlx": "mlx.core"}
LIMIT = 400  # lines of a file


def ids(paths: list[Path]) -> list[str]:
    return [str(p.relative_to(ROOT if p.is_relative_to(ROOT) else BACKENDS.parent)) for p in paths]


# The core imports no backend.

FOREIGN = {"jax", "jaxlib", "mlx", "backends"}


def imports(source: str) -> set[str]:
    """Top-level names of what a file imports anywhere in it, `ep.backends` as itself."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {n if n.startswith("ep.backends") else n.partition(".")[0] for n in names}


def backends_imported(source: str) -> set[str]:
    return {n for n in imports(source) if n in ("jax", "jaxlib", "mlx", "backends") or n.startswith("ep.backends")}


@pytest.mark.parametrize("path", core := sorted(CORE.rglob("*.py")), ids=ids(core))
def test_the_core_imports_no_backend(path):
    assert backends_imported(path.read_text(encoding="utf-8")) == set()


@pytest.mark.parametrize(
    "line", ["import jax.numpy", "from mlx import core", "from ep import backends", "import backends"]
)
def test_an_import_of_a_backend_is_seen(line):
    assert backends_imported(f"def f():\n    {line}\n")


# Operators name no library.

LIBRARY = re.compile(r"\b(jax|jnp|lax|xla|mlx|mx|metal|torch)\b", re.IGNORECASE)


@pytest.mark.parametrize("path", operators := sorted((CORE / "ops").glob("*.py")), ids=ids(operators))
def test_operators_name_no_library(path):
    assert LIBRARY.findall(path.read_text(encoding="utf-8")) == []


def test_a_named_library_is_seen():
    assert LIBRARY.findall("y = jnp.exp(x)  # MLX max") == ["jnp", "MLX"]


# Every name of `xp` that operators use exists in all the namespaces.


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)):
        return f"{before}.{node.attr}"
    return "xp" if isinstance(node, ast.Name) and node.id == "xp" else ""


def names_written(source: str) -> set[str]:
    """`exp` for `xp.exp`, `fft.fft` for `xp.fft.fft`."""
    return {
        dotted(node)[3:] for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute) and dotted(node)
    }


def names_in_tables(fn: Any) -> Iterator[str]:
    """Names that a lowering looks up with `getattr(xp, name)`, where `name` comes from the row of a table."""
    if isinstance(fn, FunctionType):
        for variable, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            value = cell.cell_contents
            yield from [value] if variable == "name" and isinstance(value, str) else names_in_tables(value)


def missing(namespace: ModuleType, names: set[str]) -> set[str]:
    def lacks(name: str) -> bool:
        found: Any = namespace
        for part in name.split("."):
            found = getattr(found, part, None)
        return found is None

    return {name for name in names if lacks(name)}


def namespace(library: str) -> ModuleType:
    if library == "numpy":
        return importlib.import_module("ep.host_namespace")
    pytest.importorskip(LIBRARIES[library])
    importlib.import_module(f"ep.backends.{library}")
    return importlib.import_module(f"ep.backends.{library}.namespace")


def names_used() -> set[str]:
    used = {name for path in operators for name in names_written(path.read_text(encoding="utf-8"))}
    return used | {name for lowering in OPS for name in names_in_tables(lowering.fn)}


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_namespace_has_every_name_that_operators_use(library):
    assert missing(namespace(library), names_used()) == set()


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_namespace_fulfils_the_contract(library):
    assert missing(namespace(library), set(EXTRAS)) == set()


def test_a_missing_name_is_seen():
    used = names_written("def f(xp, x):\n    return xp.fft.fft(xp.einsummm(x))")
    assert missing(namespace("numpy"), used) == {"einsummm"}
    assert {"abs", "argmax"} <= {name for lowering in OPS for name in names_in_tables(lowering.fn)}


# A lowering's signature is the ONNX schema.

SCHEMAS = onnx.defs.get_all_schemas_with_history()
OF_ONNXRUNTIME = {  # it puts them into ONNX's domain
    *("DynamicSlice", "SimplifiedLayerNormalization"),
    *("Affine", "Crop", "ImageScaler", "ParametricSoftplus", "Scale", "ScaledTanh"),
}
BEFORE_ONNX = {  # and has these since opset 1
    OpKey("", name, 1) for name in ("LayerNormalization", "MeanVarianceNormalization", "ThresholdedRelu")
}
MISSPELT = {
    ("GRU", "direction"): "forward",
    ("LSTM", "direction"): "forward",
    ("RNN", "direction"): "forward",
}


def plain(value: Any) -> Any:
    """A default as lowerings write it: text for bytes, tuples for lists; an empty list is an absent one."""
    if isinstance(value, list | tuple):
        return tuple(map(plain, value)) or None
    if isinstance(value, float):
        return round(value, 6)
    return value.decode() if isinstance(value, bytes) else value


def default(schema: Any, name: str) -> Any:
    attribute = schema.attributes[name]
    if attribute.required:
        return REQUIRED
    if not attribute.default_value.type:
        return None
    return MISSPELT.get((schema.name, name), plain(onnx.helper.get_attribute_value(attribute.default_value)))


def served(lowering: Lowering) -> list[Any]:
    """The schemas of all versions that a lowering serves, up to the next lowering of the operator."""
    key = lowering.key
    newer = [o.key.since_version for o in OPS if (o.key.domain, o.key.op_type) == (key.domain, key.op_type)]
    end = min((v for v in newer if v > key.since_version), default=10**6)
    every = [s for s in SCHEMAS if (s.domain, s.name) == (key.domain, key.op_type)]
    versions = [s for s in every if key.since_version <= s.since_version < end]
    versions = [s for s in versions if not s.deprecated or s.since_version == key.since_version]
    return sorted(versions, key=lambda schema: schema.since_version)


def wanted(schemas: list[Any]) -> dict[str, Any]:
    """The signature for all these versions: an attribute or input that some of them lack is optional."""
    attributes = {name: default(schema, name) for schema in schemas for name in schema.attributes}
    always = set.intersection(*(set(schema.attributes) for schema in schemas))
    kinds = [[i.option.name for i in schema.inputs] for schema in schemas]
    return {
        "attributes": {n: None if d is REQUIRED and n not in always else d for n, d in attributes.items()},
        "graphs": {n for s in schemas for n, a in s.attributes.items() if a.type.name == "GRAPH"},
        "inputs": max(map(len, kinds)),
        "required inputs": min(kind.count("Single") for kind in kinds),
        "variadic": any("Variadic" in kind for kind in kinds),
    }


def actual(lowering: Lowering) -> dict[str, Any]:
    return {
        "attributes": {name: plain(value) for name, value in lowering.attributes.items()},
        "graphs": lowering.bodies,
        "inputs": len(lowering.inputs),
        "required inputs": lowering.required_inputs,
        "variadic": lowering.variadic,
    }


def deviations(lowering: Lowering, schemas: list[Any]) -> list[str]:
    have, want = actual(lowering), wanted(schemas)
    return [f"{what}: {have[what]} instead of {want[what]}" for what in want if have[what] != want[what]]


standard = [lowering for lowering in OPS if lowering.key.domain in ("", "ai.onnx.ml")]


@pytest.mark.parametrize("lowering", standard, ids=lambda lowering: str(lowering.key))
def test_a_lowering_has_the_signature_of_the_schema(lowering):
    if lowering.key.op_type in OF_ONNXRUNTIME or lowering.key in BEFORE_ONNX:
        return
    schemas = served(lowering)
    assert schemas and schemas[0].since_version == lowering.key.since_version
    assert deviations(lowering, schemas) == []


def test_a_wrong_signature_is_seen():
    registry = OpRegistry()
    registry.op("Gemm", since=13)(lambda xp, a, b, *, alpha=1.0, beta=0.5, transA=0: None)
    (wrong,) = registry
    seen = deviations(wrong, [onnx.defs.get_schema("Gemm", 13, "")])
    assert [d.partition(":")[0] for d in seen] == ["attributes", "inputs"]


# An override has the signature of the lowering that it overrides.


def shape_of(fn: Any) -> list[tuple[str, Any, Any]]:
    """What a caller must know: the order of the inputs, the names and defaults of keywords."""
    parameters = inspect.signature(fn).parameters.values()
    return [
        (p.name if p.kind is p.KEYWORD_ONLY else "", p.kind if p.kind is p.VAR_POSITIONAL else "", p.default)
        for p in parameters
    ]


def overrides() -> Iterator[tuple[Any, Any]]:
    for library in ("jax", "mlx"):
        try:
            module = importlib.import_module(f"ep.backends.{library}.overrides")
        except ModuleNotFoundError:
            continue
        yield from module.OVERRIDES.items()


@pytest.mark.parametrize(("key", "fn"), found := list(overrides()), ids=[str(key) for key, _ in found])
def test_an_override_has_the_signature_of_its_lowering(key, fn):
    lowering = OPS.find(key.domain, key.op_type, key.since_version)
    assert lowering is not None and lowering.key == key
    assert shape_of(fn) == shape_of(lowering.fn)


def test_a_different_override_is_seen():
    assert shape_of(lambda xp, x, *, axis=-1: None) == shape_of(lambda xp, y, *, axis=-1: None)
    assert shape_of(lambda xp, x, *, axis=-1: None) != shape_of(lambda xp, x, *, axis=1: None)


# Files are short, and open with what they answer.


def complaints(source: str) -> list[str]:
    lines = source.count("\n")
    missing_text = [] if not source.strip() or ast.get_docstring(ast.parse(source)) else ["it has no docstring"]
    return missing_text + ([f"it has {lines} lines, more than {LIMIT}"] if lines > LIMIT else [])


@pytest.mark.parametrize("path", SOURCES, ids=ids(SOURCES))
def test_a_file_is_short_and_says_what_it_answers(path):
    assert complaints(path.read_text(encoding="utf-8")) == []


def test_a_long_or_silent_file_is_seen():
    assert len(complaints("x = 1\n" * (LIMIT + 1))) == 2


# These tests themselves are short.


def long_tests(module: ModuleType) -> list[str]:
    named = [(n, f) for n, f in vars(module).items() if n.startswith("test_") and isinstance(f, FunctionType)]
    return [name for name, fn in named if len(inspect.getsource(fn).splitlines()) >= 30]


def test_the_tests_of_the_architecture_are_short():
    assert long_tests(importlib.import_module(__name__)) == []
