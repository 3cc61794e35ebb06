"""Is `import ep` quick and without array libraries, and does using it leave the user's process as it was?"""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

import ep

HEAVY = {"jax", "jaxlib", "mlx", "onnx", "onnx_ir"}
MOST_SECONDS = 0.2

LOADED = "import sys; print(sorted({name.partition('.')[0] for name in sys.modules}))"
TIMED = "import time; start = time.process_time(); import ep; print(time.process_time() - start)"


def python(code: str) -> str:
    """What a fresh interpreter prints; processor time and imports there are its own."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def heavy_modules(code: str) -> set[str]:
    return HEAVY & set(ast.literal_eval(python(f"{code}; {LOADED}")))


def test_importing_loads_no_library():
    assert heavy_modules("import ep") == set()


def test_importing_the_command_line_loads_no_library():
    assert heavy_modules("import ep.cli; ep.cli.parser()") == set()


def test_the_proof_can_fail():
    assert heavy_modules("import ep; ep.load; import onnx_ir") >= {"onnx_ir"}


def test_importing_is_quick():
    assert min(float(python(TIMED)) for _ in range(3)) <= MOST_SECONDS


def test_only_the_library_asked_for_is_loaded():
    code = "import ep; from ep.discovery import provider; provider('host')"
    assert heavy_modules(code) & {"jax", "mlx"} == set()


# What is public.


@pytest.mark.parametrize("name", sorted(set(ep.__all__) - {"__version__", "OPS"}))
def test_public_names_exist_and_are_documented(name):
    assert getattr(ep, name).__doc__


def test_the_stub_for_type_checkers_lists_the_same_names():
    tree = ast.parse(Path(ep.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    listed = {(a.asname, node.module) for node in tree.body if isinstance(node, ast.ImportFrom) for a in node.names}
    assert listed == {(name, module) for module, names in ep._PUBLIC.items() for name in names}


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        ep.nope  # noqa: B018


# The user's process.

SNAPSHOT = """
import json, locale, os, random, sys, warnings
import numpy as np

def snapshot():
    state = {
        "errstate": np.geterr(),
        "printoptions": str(np.get_printoptions()),
        "numpy random": str(np.random.get_state()),
        "python random": str(random.getstate()),
        "environment": dict(os.environ),
        "path": list(sys.path),
        "warnings": str(warnings.filters),
        "locale": locale.setlocale(locale.LC_ALL),
    }
    if "jax" in sys.modules:
        import jax
        state["jax"] = {name: str(value) for name, value in jax.config.values.items()}
    if "mlx.core" in sys.modules:
        import mlx.core as mx
        state["mlx"] = [str(mx.default_device()), str(mx.default_stream(mx.default_device()))]
    return state
"""
RUN = """
from onnx import parser
text = '''<ir_version: 10, opset_import: ["": 21]>
g (float[n] x, int64[n] i) => (float[n] y, int64[n] j, float[n] r) {
    y = Log(x)
    j = Mul(i, i)
    r = RandomUniformLike(x)
}'''
import ep
session = ep.load(parser.parse_model(text), device=DEVICE)
feeds = {"x": np.array([-1, 0], np.float32), "i": np.array([2**40, 3], np.int64)}
session.run(None, feeds)
session(**feeds)["j"]
"""
DIFFERENCE = """
after = snapshot()
print(json.dumps([key for key in before if before[key] != after.get(key)]))
"""
LIBRARIES = {
    "host": "",
    "jax": "import jax; jax.devices()",
    "mlx": "import ep.backends.mlx.blas as b; b.preload(); import mlx.core",
}


def changed(library: str, work: str) -> list[str]:
    """What differs after `work`; our dependencies (sympy adds a warnings filter) are imported before."""
    code = "\n".join([LIBRARIES[library], SNAPSHOT, "import onnx_ir", "before = snapshot()", work, DIFFERENCE])
    return json.loads(python(code).splitlines()[-1])


@pytest.mark.parametrize("library", LIBRARIES)
def test_importing_and_running_change_no_global_state(library):
    if library != "host" and importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    assert changed(library, RUN.replace("DEVICE", repr(library))) == []


@pytest.mark.parametrize(
    ("library", "work", "seen"),
    [
        ("host", "np.seterr(divide='ignore'); os.environ['A'] = '1'", ["errstate", "environment"]),
        ("jax", "jax.config.update('jax_enable_x64', True)", ["jax"]),
    ],
)
def test_the_snapshot_sees_a_change(library, work, seen):
    if library != "host" and importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    assert changed(library, work) == seen
