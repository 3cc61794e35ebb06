"""Does `ep.onnxruntime` differ from onnxruntime where docs/onnxruntime.md says so? The table there is made here:
`EP_WRITE_DOCS=1 pytest tests/test_onnxruntime_differences.py` writes it."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from types import ModuleType

import pytest
from onnxruntime_differences import DIFFERENCES
from onnxruntime_observations import observed

DOCS = Path(__file__).parents[1] / "docs" / "onnxruntime.md"
BEGIN, END = "<!-- differences: begin -->\n", "<!-- differences: end -->\n"
HEAD = "| subject | onnxruntime | here | why | observed as |\n|---|---|---|---|---|\n"
SEEN = {(d.subject, name): see for d in DIFFERENCES for name, see in d.seen.items()}


@pytest.fixture(scope="module")
def theirs() -> ModuleType:
    return pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")


@pytest.mark.parametrize(("subject", "name"), SEEN, ids=lambda text: text if "." in text and " " not in text else "-")
def test_the_difference_is_there(theirs, subject, name):
    ours = importlib.import_module("ep.onnxruntime")
    see = SEEN[subject, name]
    assert observed(see, theirs) != observed(see, ours), f"onnxruntime answers the same: remove '{name}'"


def test_every_difference_has_a_reason_and_is_observed():
    assert [d.subject for d in DIFFERENCES if not all((d.subject, d.theirs, d.here, d.why))] == []
    assert [d.subject for d in DIFFERENCES if not d.seen] == ["`RunOptions.terminate`"]
    names = [name for d in DIFFERENCES for name in d.seen if name != "-"]
    assert len(names) == len(set(names))


def test_the_table_of_the_documentation_is_current():
    before, _, rest = DOCS.read_text(encoding="utf-8").partition(BEGIN)
    written, _, after = rest.partition(END)
    table = HEAD + "".join(difference.row() for difference in DIFFERENCES)
    if os.environ.get("EP_WRITE_DOCS") == "1":
        DOCS.write_text(before + BEGIN + table + END + after, encoding="utf-8")
    else:
        assert written == table, "run EP_WRITE_DOCS=1 pytest tests/test_onnxruntime_differences.py"
