"""Is what a new file is made from safe from being replaced by it, whatever it is called, in every command?"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from conftest import parse, require

import ep
from ep import cli
from ep.errors import InvalidInput
from ep.targets import check_target


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model whose weight lies in `m.data`, seen under other names as well."""
    model = parse("g (float[2, 64] x, float[64, 64] w) => (float[2, 64] y) { y = MatMul(x, w) }")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.eye(64, dtype=np.float32), "w"))
    del model.graph.input[1]
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    (tmp_path / "link.onnx").symlink_to("m.onnx")
    (tmp_path / "below").mkdir()
    os.link(tmp_path / "m.onnx", tmp_path / "hard.onnx")
    return tmp_path


NAMES = ("m.onnx", "below/../m.onnx", "link.onnx", "hard.onnx", "m.data")


def compile_(source: str, target: str) -> Any:
    return cli.main(["compile", source, "-o", target, "--device", "jax"])


def pack(source: str, target: str) -> Any:
    return cli.main(["pack", source, target, "--format", "external"])


def run(source: str, target: str) -> Any:
    return cli.main(["run", source, "--save", target, "--device", "host"])


@pytest.mark.parametrize("command", [compile_, pack, run])
@pytest.mark.parametrize("source", ["m.onnx", "link.onnx"])
@pytest.mark.parametrize("target", NAMES)
def test_no_command_replaces_what_it_reads(folder, capsys, monkeypatch, command, source, target):
    require("jax")
    monkeypatch.chdir(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    monkeypatch.setattr("ep.session.InferenceSession.run", lambda *a, **k: pytest.fail("it worked first"))
    assert command(source, target) == 2
    told = " ".join(capsys.readouterr().err.split())
    known = target != "m.data" or command is not run  # which data a model reads is known when it is loaded
    why = "would replace a file that it is made from" if known else "is there, and is no .npz file"
    assert f"'{target}' {why}" in told and "Fix: choose another target" in told
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


def test_a_folder_with_the_model_is_no_place_for_the_packed_one(folder, capsys):
    assert pack(str(folder / "m.onnx"), str(folder)) == 2
    with pytest.raises(InvalidInput, match="would replace"):  # m.data, by the data of the packed model
        ep.pack(folder / "m.onnx", folder / "m.other", format="external")


def test_a_context_model_does_not_replace_what_its_session_reads(folder, accelerator):
    session = ep.load(folder / "m.onnx", accelerator)
    for name in NAMES:
        with pytest.raises(InvalidInput, match="would replace"):
            session.save_context(folder / name)
    made = session.save_context()
    again = ep.load(made.model, accelerator)
    for target in (made.model, made.model.with_suffix(".bin")):  # the second one's code would be called the same
        with pytest.raises(InvalidInput, match="would replace"):
            again.save_context(target)
    x = np.ones((2, 64), np.float32)
    for model in (made.model, again.save_context(folder / "again.onnx").model):
        np.testing.assert_array_equal(ep.load(model, accelerator).run(None, {"x": x})[0], x)


def test_targets_that_cannot_be_written(tmp_path, monkeypatch):
    for target, words in ((tmp_path / "no" / "x", "does not exist"), (tmp_path, "is a folder"), ("a\0b", "no path")):
        with pytest.raises(InvalidInput, match=words):
            check_target(target)
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)  # who runs the tests may write everywhere
    with pytest.raises(InvalidInput, match="cannot be written to"):
        check_target(tmp_path / "new")
    monkeypatch.undo()
    assert check_target(tmp_path / "new", [tmp_path / "absent"]) == tmp_path / "new"
