"""Do the examples of README and CONTRIBUTING run as they are written, and does what they name exist?"""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import numpy as np
import pytest

import ep

ROOT = Path(__file__).parent.parent
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/context.md", "docs/onnxruntime.md")

if not (ROOT / "README.md").exists():
    pytest.skip("the tests run without the repository around them", allow_module_level=True)


def code(document: str) -> str:
    """All Python blocks of a document, in order, as one program."""
    text = (ROOT / document).read_text(encoding="utf-8")
    return "\n".join(re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE))


def promised(program: str) -> list[str]:
    """What the comments behind `print(...)` say that it prints."""
    return re.findall(r"^print\(.*\)  # (.*)$", program, re.MULTILINE)


def printed(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", program],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_readme_runs_as_written():
    program = code("README.md")
    output, lines = printed(program), promised(program)
    assert len(lines) >= 3
    assert [line for line in lines if line not in output] == [], output


def test_adding_an_operator_works_as_written():
    program = code("CONTRIBUTING.md")
    assert "@op(" in program and "assert_allclose" in program
    printed(program)


def test_the_operator_in_the_package_docstring_works():
    example = re.search(r"    @op.*?\n\n", ep.__doc__ or "", re.DOTALL)
    assert example is not None
    registry, x = ep.OpRegistry(), np.array([-4, -1, 0, 2, 5], np.float32)
    exec(textwrap.dedent(example[0]), {"op": registry.op})
    (lowering,) = registry
    np.testing.assert_allclose(lowering.fn(np, x), x * np.clip(x / 6 + 0.5, 0, 1))


def test_a_wrong_example_is_seen():
    with pytest.raises(AssertionError):
        printed("import ep; ep.lod('m.onnx')")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_that_a_document_names_exist(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    named = re.findall(r"[`(]((?:ep|backends|tests|notebooks|benchmarks)/[\w./]*\w)[`)]", text)
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_commands_that_the_readme_names_exist():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(re.findall(r"`make (\w+)`", text)) <= set(targets)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {e for group in re.findall(r'"\.\[([\w,]+)\]"', text) for e in group.split(",")}
    assert extras and extras <= set(project["optional-dependencies"])
