"""Does every notebook run from its first cell to its last, and is it stored without outputs?"""

from __future__ import annotations

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="the notebook extra is not installed")
nbclient = pytest.importorskip("nbclient", reason="the notebook extra is not installed")
pytest.importorskip("ipykernel", reason="the notebook extra is not installed")
pytest.importorskip("matplotlib", reason="the notebook extra is not installed")

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
SECONDS = 300  # for one cell, on a busy machine


def run(path: Path, folder: Path) -> list[dict[str, object]]:
    """Executes a notebook with a kernel of this Python, and returns the outputs of all its cells."""
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=SECONDS, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    client.execute()
    return [output for cell in notebook.cells for output in cell.get("outputs", ())]


@pytest.mark.filterwarnings("default")  # of the notebook libraries, which are not ours
@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_a_notebook_runs(path, tmp_path):
    outputs = run(path, tmp_path)
    kinds = {kind for output in outputs for kind in output.get("data", ())}
    assert kinds >= {"image/png", "text/html"}, "a notebook shows a picture and the plan as a table"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_a_notebook_is_stored_clean_and_ends_in_an_assertion(path):
    cells = nbformat.read(path, as_version=4).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)
    assert "assert" in code[-1].source


@pytest.mark.filterwarnings("default")
def test_a_failing_cell_is_seen(tmp_path):
    broken = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("assert 1 == 2")])
    nbformat.write(broken, tmp_path / "broken.ipynb")
    with pytest.raises(nbclient.exceptions.CellExecutionError):
        run(tmp_path / "broken.ipynb", tmp_path)
