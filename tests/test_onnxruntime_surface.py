"""Has `ep.onnxruntime` every public name of the installed onnxruntime, with its signature? The table of
docs/onnxruntime.md is made here: `EP_WRITE_DOCS=1 pytest tests/test_onnxruntime_surface.py` writes it."""

from __future__ import annotations

import importlib
import inspect
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

DOCS = Path(__file__).parents[1] / "docs" / "onnxruntime.md"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"
MODULES = ["", ".backend", ".datasets", ".capi.onnxruntime_inference_collection", ".capi.onnxruntime_validation"]
NATIVE = ".capi.onnxruntime_pybind11_state"
pytestmark = pytest.mark.filterwarnings("ignore:onnx.version is deprecated")  # the genuine backend imports it
GONE = object()
# Native names that are absent, with the reason; importing them is an ImportError.
ABSENT = {
    **{f"quantize_matmul_{kind}": "makes quantized models" for kind in ("2bits", "4bits", "8bits", "bnb4")},
    **{f"quantize_qdq_matmul_{kind}": "makes quantized models" for kind in ("2bits", "4bits")},
    "pack_fp4_weights_for_cuda_moe_gemm": "makes quantized models",
    "get_all_operator_schema": "documents onnxruntime's own operators",
    "get_all_opkernel_def": "documents onnxruntime's own kernels",
    "get_registered_ep_kernel_defs": "documents onnxruntime's own kernels",
    "opkernel": "documents onnxruntime's own kernels",
    "schemadef": "documents onnxruntime's own operators",
    "SessionObjectInitializer": "internal to onnxruntime's Python code",
    "get_session_initializer": "internal to onnxruntime's Python code",
    "get_compatibility_info_from_model": "about compiled models of native providers",
    "get_compatibility_info_from_model_bytes": "about compiled models of native providers",
    "get_model_compatibility_for_ep_devices": "about compiled models of native providers",
    "get_hardware_device_ep_incompatibility_details": "about native providers",
}


@pytest.fixture(scope="module")
def theirs() -> ModuleType:
    return pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")


def public(owner: Any) -> list[str]:
    """Names of a module or a class; of a module without those of other modules that it merely imports."""
    names = [name for name in dir(owner) if not name.startswith("_")]
    if isinstance(owner, ModuleType):
        own = owner.__name__.partition(".")[0]
        names = [name for name in names if not foreign(getattr(owner, name), own)]
    return names


def foreign(value: Any, own: str) -> bool:
    home = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", own)
    return isinstance(home, str) and home.partition(".")[0] not in (own, "builtins", "ep")


def pairs(module: str) -> Iterator[tuple[str, Any, Any]]:
    """(name, theirs, ours) of everything in a module, members of classes too; `GONE` for what ours lacks."""
    one, other = (importlib.import_module(f"{root}{module}") for root in ("onnxruntime", "ep.onnxruntime"))
    for name in public(one):
        genuine, own = getattr(one, name), getattr(other, name, GONE)
        yield name, genuine, own
        if isinstance(genuine, type) and not issubclass(genuine, BaseException) and own is not GONE:
            for member in public(genuine):
                if not (issubclass(genuine, int) and hasattr(int, member)):
                    yield f"{name}.{member}", getattr(genuine, member), inspect.getattr_static(own, member, GONE)


@pytest.mark.parametrize("module", [*MODULES, NATIVE])
def test_no_name_is_missing(theirs, module):
    missing = {name for name, _, own in pairs(module) if own is GONE}
    known = set(ABSENT) if module == NATIVE else {"GetInitializerLocationFunc", "GetInitializerLocationWrapperFunc",
        "get_vendor_id_for_device_type", "make_get_initializer_location_func_wrapper"}  # fmt: skip
    assert missing - known == set()
    assert module != NATIVE or missing == known


def parameters(function: Any) -> list[tuple[str, Any]] | None:
    """(name, default) of every parameter but the first `self`; of native functions as their docstrings give them."""
    if isinstance(function, staticmethod | classmethod):
        function = function.__func__
    try:
        found = inspect.signature(function)
    except (TypeError, ValueError):
        return native_parameters(function)
    if "kwargs" in found.parameters and "args" in found.parameters:  # pybind11's functions
        return native_parameters(function)
    return [(p.name, p.default) for p in found.parameters.values() if p.name not in ("self", "cls")]


def native_parameters(function: Any) -> list[tuple[str, Any]] | None:
    """From the first line of a docstring, if it describes one function and not several."""
    first = re.match(r"\w+\((.*)\) -> ", function.__doc__ or "")
    if first is None:
        return None
    arguments = [a for a in re.split(r", (?=\w+: )", first[1]) if a and not a.startswith("self")]
    return [(a.partition(":")[0], a.rpartition(" = ")[2] if " = " in a else inspect.Parameter.empty) for a in arguments]


def comparable(module: str) -> Iterator[tuple[str, Any, Any]]:
    for name, genuine, own in pairs(module):
        unsupported = (inspect.getdoc(own) or "").startswith("Unsupported: packages")
        if own is not GONE and not isinstance(genuine, type) and callable(genuine) and not unsupported:
            yield name, parameters(genuine), parameters(own)


@pytest.mark.parametrize("module", ["", ".backend", ".datasets"])
def test_signatures_are_the_same(theirs, module):
    compared = 0
    for name, genuine, own in comparable(module):
        if genuine is None or own is None:
            continue
        compared += 1
        if all(key.startswith("arg") for key, _ in genuine):  # native functions that do not name their parameters
            assert len(own) == len(genuine) or own[-1:] == [("arguments", inspect.Parameter.empty)], name
        else:
            assert [key for key, _ in own] == [key for key, _ in genuine], name
            empty = inspect.Parameter.empty
            assert [default is empty for _, default in own] == [default is empty for _, default in genuine], name
    assert compared > {"": 120, ".backend": 3, ".datasets": 0}[module]


def test_enumerations_have_the_same_members(theirs):
    compared = 0
    for name, genuine, own in pairs(NATIVE):
        if hasattr(genuine, "__members__"):
            compared += 1
            assert {k: int(v) for k, v in genuine.__members__.items()} == {
                k: int(v) for k, v in own.__members__.items()
            }, name
    assert compared >= 15


# The table.


def described(own: Any) -> tuple[str, str]:
    """What a name does here, from its docstring: the kind of effect, and the first sentence."""
    doc = (inspect.getdoc(own) or "").partition("\n")[0]
    if isinstance(own, str | int | type(None)):
        return "present", f"`{own!r}`"
    if doc.startswith("No effect: "):
        return "no effect", doc.removeprefix("No effect: ")
    if doc.startswith("No effect"):
        return "no effect", ""
    if doc.startswith("Unsupported"):
        return "unsupported", doc.partition(": ")[2]
    return "effect", doc


def rows() -> Iterator[str]:
    yield "| name | here | what it does, or why not |\n|---|---|---|\n"
    for module in ("", NATIVE):
        known = set(public(importlib.import_module("onnxruntime"))) if module else set()
        for name, genuine, own in pairs(module):
            if name.partition(".")[0] in known or (isinstance(genuine, ModuleType) and not module):
                continue
            if isinstance(own, type) and hasattr(own, "__members__"):
                kind, text = described(own)
                members = ", ".join(own.__members__)
                yield f"| `{shown(module, name)}` | {kind} | {clean(text)} ({members}) |\n"
            elif hasattr(genuine, "__members__") or is_member(name, genuine, known, module):
                continue
            elif own is GONE:
                yield f"| `{shown(module, name)}` | absent | {ABSENT[name]} |\n"
            else:
                kind, text = described(own)
                yield f"| `{shown(module, name)}` | {kind} | {clean(text)} |\n"


def is_member(name: str, genuine: Any, known: set[str], module: str) -> bool:
    """Whether this is a member of an enumeration, whose row lists them all."""
    owner, dot, _ = name.partition(".")
    return bool(dot) and hasattr(getattr(importlib.import_module(f"onnxruntime{module}"), owner), "__members__")


def shown(module: str, name: str) -> str:
    return f"capi.{name}" if module else name


def clean(text: str) -> str:
    return text.replace("|", "\\|").rstrip(".")


def test_the_table_of_the_documentation_is_current(theirs):
    before, _, rest = DOCS.read_text(encoding="utf-8").partition(BEGIN)
    written, _, after = rest.partition(END)
    table = "".join(rows())
    if os.environ.get("EP_WRITE_DOCS") == "1":
        DOCS.write_text(before + BEGIN + table + END + after, encoding="utf-8")
    else:
        assert written == table, "run EP_WRITE_DOCS=1 pytest tests/test_onnxruntime_surface.py"


def test_every_row_says_something(theirs):
    empty = [row for row in rows() if re.search(r"\| (effect|unsupported|absent) \|  \|", row)]
    assert empty == []
