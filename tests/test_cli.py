"""Does the command line answer, in words and in JSON, and are its exit codes and errors honest?"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import parser

from ep import cli, discovery
from ep.discovery import Report
from ep.errors import BackendUnavailable

OK, FAILED, USAGE, UNAVAILABLE = 0, 1, 2, 3


def write(path: Path, body: str, header: str = 'ir_version: 10, opset_import: ["": 21]') -> str:
    onnx.save(parser.parse_model(f"<{header}> {body}"), path)
    return str(path)


@pytest.fixture
def model(tmp_path: Path) -> str:
    return write(
        tmp_path / "double.onnx",
        "g (float[batch, 3] x, int64[batch] ids) => (float[batch, 3] y, int64[batch] same)"
        "{ y = Add(x, x)\n same = Identity(ids) }",
    )


@pytest.fixture
def ep(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs one command in this process: its exit code, what it printed, and its errors."""

    def run(*arguments: str) -> tuple[int, str, str]:
        try:
            code = cli.main(arguments)
        except SystemExit as stop:
            code = stop.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


# ep run


def test_run_prints_outputs_and_times(ep, model):
    code, out, _ = ep("run", model, "--device", "host", "--repeat", "2")
    assert code == OK
    assert all(word in out for word in ("double.onnx", "float32[1, 3]", "random", "first run", "of 2 runs"))


def test_run_reads_files(ep, model, tmp_path):
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.save(tmp_path / "x.npy", x)
    np.savez(tmp_path / "both.npz", ids=np.array([7, 8]), other=x)
    inputs = ("--input", f"x={tmp_path}/x.npy", "--input", f"ids={tmp_path}/both.npz")
    code, out, _ = ep("run", model, "--device", "host", *inputs, "--save", f"{tmp_path}/y.npz", "--json")
    assert code == OK
    result = json.loads(out)
    assert result["outputs"]["y"] == {
        "type": "float32[2, 3]", "first": [0, 2, 4, 6, 8, 10], "min": 0, "max": 10, "mean": 5
    }  # fmt: skip
    assert result["inputs"]["x"]["source"].endswith("x.npy")
    with np.load(tmp_path / "y.npz") as saved:
        np.testing.assert_array_equal(saved["y"], 2 * x)
        np.testing.assert_array_equal(saved["same"], [7, 8])


def test_run_makes_random_indices_that_exist(ep, tmp_path):
    """Of 99 zeros and ones, one would be a one, and the dimension has only one element."""
    body = "g (float[a, b] x, int64[99] i, int64[9, 2] j) => (float[99, b] y, float[9] z)"
    path = write(tmp_path / "m.onnx", f"{body} {{ y = Gather(x, i)\n z = GatherND(x, j) }}")
    assert ep("run", path, "--device", "host")[0] == OK
    assert ep("run", path, "--device", "host", "--dim", "a=2")[0] == OK


def test_run_makes_random_inputs_of_the_sizes_asked_for(ep, model):
    code, out, _ = ep("run", model, "--device", "host", "--dim", "batch=5", "--json")
    result = json.loads(out)
    assert code == OK and result["inputs"]["x"]["type"] == "float32[5, 3]"
    assert result["seconds"]["warm_runs"] == 0
    again = json.loads(ep("run", model, "--device", "host", "--dim", "batch=5", "--json")[1])
    assert again["outputs"] == result["outputs"]
    assert json.loads(ep("run", model, "--seed", "1", "--device", "host", "--json")[1])["outputs"] != again["outputs"]


@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", "double", "int8", "uint8", "int32", "bool", "string", "complex64"]
)
def test_run_makes_random_inputs_of_every_kind(ep, tmp_path, dtype):
    path = write(tmp_path / "m.onnx", f"g ({dtype}[2, ?] x) => ({dtype}[2, ?] y) {{ y = Identity(x) }}")
    assert ep("run", path, "--device", "host")[0] == OK
    code, out, err = ep("run", path, "--device", "host", "--json")
    assert code == OK, err
    assert json.loads(out)["outputs"]["y"]["type"].endswith("[2, 1]")


def test_json_is_strict_whatever_the_numbers_are(ep, tmp_path):
    path = write(tmp_path / "m.onnx", "g (float[3] x) => (float[3] y) { y = Identity(x) }")
    np.save(tmp_path / "x.npy", np.array([np.nan, np.inf, 1], np.float32))
    code, out, _ = ep("run", path, "--device", "host", "--input", f"x={tmp_path}/x.npy", "--json")
    assert code == OK
    strict = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert strict["outputs"]["y"]["first"] == ["nan", "inf", 1]


def test_names_are_not_markup(ep, tmp_path):
    path = write(tmp_path / "m.onnx", "g (float[bold] x) => (float[bold] y) { y = Relu(x) }")
    model = onnx.load(path)
    model.graph.node[0].name = "[red]:smile:"
    onnx.save(model, path)
    assert "x: float32[bold]" in ep("inspect", path)[1]
    assert "[red]:smile:" in ep("run", path, "--device", "host", "--plan")[1]


def test_run_shows_the_plan(ep, model):
    code, out, _ = ep("run", model, "--device", "host", "--plan")
    assert code == OK and "ai.onnx::Add" in out
    for shown in (out, ep("run", model, "--device", "host")[1]):
        assert " ".join(shown.split()).count("double.onnx: ") == 1
    code, out, _ = ep("run", model, "--device", "host", "--plan", "--json")
    assert code == OK and json.loads(out)["plan"]["nodes"][0]["op"].startswith("ai.onnx::")


@pytest.mark.parametrize(
    ("arguments", "code", "facts"),
    [
        (["--input", "z=random"], USAGE, ["names no input", "'x', 'ids'"]),
        (["--input", "x"], USAGE, ["names no file"]),
        (["--input", "x={dir}/words.txt"], USAGE, ["words.txt", "neither an .npy nor an .npz file"]),
        (["--input", "x={dir}/absent.npy"], USAGE, ["absent.npy", "No such file"]),
        (["--input", "x={dir}/objects.npy"], USAGE, ["objects.npy", "without Python objects"]),
        (["--input", "x={dir}/two.npz"], USAGE, ["holds no array 'x'", "'a', 'b'"]),
        (["--input", "x={dir}/wide.npy"], USAGE, ["'x' has dtype float64", "float32"]),
        (["--dim", "bach=2"], USAGE, ["--dim bach", "Did you mean 'batch'?"]),
        (["--dim", "batch"], USAGE, ["NAME=N"]),
        (["--dim", "batch=1", "--dim", "batch=2"], USAGE, ["'batch' is given twice"]),
        (["--dim", "batch=99999999999999"], USAGE, ["a random input 'x'", "bytes are available", "--dim"]),
        (["--input", "x=random", "--input", "x=random"], USAGE, ["'x=random' gives 'x' again"]),
        (["--input", "x="], USAGE, ["'x=' names no file"]),
        (["--input", "x={dir}"], USAGE, ["Is a directory"]),
        (["--input", "x={dir}/cut.npy"], USAGE, ["cut.npy", "cannot be read"]),
        (["--repeat", "-1"], USAGE, ["--repeat"]),
        (["--device", "jux"], USAGE, ["unknown device", "'jax'"]),
        (["--device", "tpu"], UNAVAILABLE, ["tpu"]),
        (["--save", "{dir}/no/such/folder.npz"], USAGE, ["no/such", "does not exist"]),
        (["--save", "{dir}"], USAGE, ["is a folder"]),
        (["--save", "{dir}/double.onnx"], USAGE, ["double.onnx", "would replace", "original"]),
        (["--save", "{dir}/words.txt"], USAGE, ["words.txt", "no .npz file"]),
        (["--input", "x={dir}/wide.npy", "--save", "{dir}/wide.npy"], USAGE, ["wide.npy", "would replace"]),
        (["--option", "compile"], USAGE, ["NAME=VALUE"]),
        (["--option", "compile=of"], USAGE, ["option 'compile' is 'of'", "'on' or 'off'"]),
        (["--option", "compile=off", "--option", "compile=on"], USAGE, ["compile is given twice"]),
        (["--option", "nope=1"], USAGE, ["unknown option 'nope'"]),
    ],
)
def test_run_with_wrong_arguments(ep, model, tmp_path, arguments, code, facts):
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    np.save(tmp_path / "wide.npy", np.zeros((1, 3)))
    (tmp_path / "words.txt").write_text("1 2 3")
    (tmp_path / "cut.npy").write_bytes((tmp_path / "wide.npy").read_bytes()[:-5])
    np.savez(tmp_path / "two.npz", a=np.zeros(1), b=np.zeros(1))
    arguments = [a.replace("{dir}", str(tmp_path)) for a in arguments]
    result, out, err = ep("run", model, *([] if "--device" in arguments else ["--device", "host"]), *arguments)
    assert result == code, err
    assert [fact for fact in facts if fact not in err] == [], err
    assert "Traceback" not in err and out == ""


def test_run_a_model_that_cannot_run(ep, tmp_path):
    path = write(tmp_path / "m.onnx", "g (float[n] x) => (float[n] y) { y = Frobnicate(x) }")
    code, out, err = ep("run", path)
    assert (code, out) == (FAILED, "") and "UnsupportedModel" in err and "Frobnicate" in err and "Fix: " in err
    code, out, err = ep("run", path, "--json")
    assert (code, err) == (FAILED, "")
    assert json.loads(out)["error"]["kind"] == "UnsupportedModel"


def test_run_fails_in_a_node(ep, tmp_path):
    path = write(tmp_path / "m.onnx", "g (float[n] x, float[m] y) => (float[k] z) { z = MatMul(x, y) }")
    code, _, err = ep("run", path, "--dim", "n=2", "--dim", "m=3", "--device", "host")
    assert code == FAILED and "MatMul" in err and "float32[2], float32[3]" in err


# ep inspect


def test_inspect_says_what_is_in_a_model(ep, model):
    code, out, _ = ep("inspect", model)
    assert code == OK
    assert all(text in out for text in ("x: float32[batch, 3]", "same: int64[batch]", "ai.onnx 21", "Add 1", "cpu:0"))


def test_inspect_says_what_a_provider_does_not_take_and_why(ep, tmp_path):
    path = write(
        tmp_path / "m.onnx",
        "g (string[n] s, float[n] x) => (bool[n] t, float[n] y)"
        "{ t = Equal(s, s)\n c = Constant <value: tensor = float[1] {2.0}> ()\n y = Mul(x, c) }",
    )
    code, out, _ = ep("inspect", path, "--json")
    summary = json.loads(out)
    assert code == OK and summary["operators"] == {"Equal": 1, "Constant": 1, "Mul": 1}
    assert (summary["weights"], summary["weight_bytes"]) == (1, 4)
    reports = {r["name"]: r for r in summary["providers"]}
    assert reports["host"]["taken"] == reports["host"]["total"] == 2
    for report in reports.values():
        if report["name"] != "host" and not report["unavailable"]:
            (refusal,) = report["refusals"]
            assert refusal["op"].startswith("ai.onnx::Equal") and refusal["reason"] and report["taken"] == 1


def test_inspect_shows_the_plan_of_the_device_that_is_asked_for(ep, tmp_path, accelerator):
    path = write(
        tmp_path / "m.onnx", "g (string[n] s, float[n] x) => (bool[n] t, float[n] y) { t = Equal(s, s)\n y = Abs(x) }"
    )
    code, out, err = ep("inspect", path, "--device", accelerator)
    assert code == OK and err == "" and "first choice" in out and "does not hold strings" in out
    assert f"available on {accelerator}" in out
    plan = json.loads(ep("inspect", path, "--device", accelerator, "--json")[1])["plan"]
    placed = {node["op"].partition("-")[0]: node["provider"] for node in plan["nodes"]}
    assert placed["ai.onnx::Abs"] == accelerator != placed["ai.onnx::Equal"]
    assert json.loads(ep("inspect", path, "--json")[1])["plan"] is None
    plan = json.loads(ep("inspect", path, "--device", "host", "--json")[1])["plan"]
    assert len(plan["providers"]) == 1 and plan["fallbacks"] == []


@pytest.mark.parametrize(("device", "code"), [("jux", USAGE), ("tpu", UNAVAILABLE)])
def test_inspect_refuses_a_device_that_is_not_there(ep, model, device, code):
    assert ep("inspect", model, "--device", device)[0] == code
    assert ep("inspect", model, "--device", device, "--weights")[0] == code


# What errors call things


@pytest.mark.parametrize(
    ("command", "text", "shown"),
    [
        ("run", "pass options={'trust_native': True}.", "pass --trust-native."),
        ("compile", "pass options={'trust_native': True}.", "pass --option trust_native=True."),
        ("run", "run it with options={'compile': 'off'} to learn", "run it with --option compile=off to learn"),
        ("cache", "name another: options={'context.cache': PATH}.", "name another: --directory PATH."),
        ("compile", "name another: options={'context.cache': PATH}.", "name another: --option context.cache=PATH."),
        ("run", "load it without strict=True, or use device='cpu'.", "load it without --strict, or use --device cpu."),
        ("compile", "strict=True refuses.", "strict=True refuses."),
        ("compile", "such as {'x y': (1, 3)}, or {'n': 1}.", "such as --shape x y:1x3, or --shape n:1."),
        ("run", "such as {'x y': (1, 3)}.", "such as {'x y': (1, 3)}."),
        ("run", "name the file: ep.load(…, weights=…).", "name the file: --weights FILE."),
        ("inspect", "name the file: ep.load(…, weights=…).", "name the file: ep.load(…, weights=…)."),
        ("run", "(session.plan lists all)", "(--plan lists all)"),
        ("pack", "without folding: fold=False, --no-fold.", "without folding: --no-fold."),
    ],
)
def test_errors_name_the_flags_of_the_command(command, text, shown):
    filler = {"compile": ["m"], "run": ["m"], "inspect": ["m"], "pack": ["m", "p"], "cache": ["stats"]}[command]
    options = cli.parser().parse_args([command, *filler])
    assert cli.cli_words.translator(options.parser)(text) == shown


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_an_error_of_a_run_names_flags(ep, model, monkeypatch, form):
    from ep.errors import ExecutionError

    def fail(*_, **__):
        raise ExecutionError("it failed.", why="strict=True.", fix="run it with options={'compile': 'off'}.")

    monkeypatch.setattr("ep.trial.load", fail)
    code, out, err = ep("run", model, *form)
    assert code == FAILED and "--option compile=off" in out + err and "--strict" in out + err


def test_inspect_a_model_that_nothing_can_run(ep, tmp_path):
    path = write(tmp_path / "m.onnx", "g (float[n] x) => (float[n] y) { y = Frobnicate(x) }")
    code, out, _ = ep("inspect", path)
    assert code == FAILED and "x: float32[n]" in out and "Frobnicate" in out
    assert "Frobnicate" in json.loads(ep("inspect", path, "--json")[1])["problems"]


@pytest.mark.parametrize("command", [["run"], ["inspect"], ["compile"], ["pack", "{dir}/p.onnx"]], ids=lambda c: c[0])
@pytest.mark.parametrize(
    ("content", "facts"),
    [
        (None, ["No such file", "Did you mean 'double.onnx'", "Fix: check the path"]),
        ("folder", ["it is not a file"]),
        (b"", ["the file is empty"]),
        (b"hello", ["is not an ONNX model", "5 bytes"]),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", ["pointer of Git LFS", "git lfs pull"]),
        (b"PK\x03\x04\x14\x00", ["zip archive", "torch.onnx.export"]),
        (b"<!DOCTYPE html><html>", ["page with which a server answers", "download"]),
        (b'{"a": 1}', ["JSON"]),
        ("cut", ["is not an ONNX model", "complete"]),
    ],
    ids=lambda value: str(value)[:20] if value is None or isinstance(value, str | bytes) else "",
)
def test_a_file_that_is_no_model(ep, model, tmp_path, command, content, facts):
    path = tmp_path / "dubble.onnx"
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(Path(model).read_bytes()[:60] if content == "cut" else content)
    code, out, err = ep(command[0], str(path), *(part.replace("{dir}", str(tmp_path)) for part in command[1:]))
    assert code == FAILED and out == "" and err.startswith("InvalidModel: ")
    assert all(fact in err for fact in facts), err


def test_inspect_takes_sizes_of_dimensions_alone(ep, model):
    for name in ("x", "bach"):
        code, _, err = ep("inspect", model, "--dim", f"{name}=3")
        assert code == USAGE and f"--dim {name} names no dimension" in err and "'batch'" in err


def test_no_command_at_all_gets_the_help(ep):
    code, _, err = ep()
    assert code == USAGE and all(command in err for command in ("run", "inspect", "pack", "compile", "doctor"))


# ep doctor


def test_doctor_runs_a_model_on_every_provider(ep):
    code, out, _ = ep("doctor", "--json")
    report = json.loads(out)
    found = {p["name"]: p for p in report["providers"]}
    assert found["host"]["problem"] == {} and found["host"]["seconds"] > 0
    assert code == (OK if report["works"] else UNAVAILABLE)
    assert report["auto"].endswith("host (cpu:0)") and report["packages"]["numpy"]


def test_doctor_says_why_a_provider_does_not_work(ep, monkeypatch):
    problem = BackendUnavailable("provider 'mlx' is not installed.", why="no module 'mlx'.", fix="install it.")
    monkeypatch.setattr(discovery, "survey", lambda: [Report("host", "cpu:0", "2.0"), Report("mlx", problem=problem)])
    code, out, _ = ep("doctor")
    assert code == UNAVAILABLE
    assert all(text in out for text in ("not installed", "no module 'mlx'", "install it.", "Only NumPy works here"))


# ep demo

needs_magika = pytest.mark.skipif(importlib.util.find_spec("magika") is None, reason="magika is not installed")


@needs_magika
def test_demo_tells_file_types_like_magika_itself(ep, tmp_path):
    from magika import Magika

    files = {
        "a.py": "import os\n\n\ndef main():\n    print(os.getcwd())\n" * 3,
        "a.json": '{"a": [1, 2, 3], "b": null}',
    }
    files |= {
        "a.html": "<!doctype html><html><body><p>Hello</p></body></html>",
        "a.csv": "a,b,c\n1,2,3\n4,5,6\n" * 400,
    }
    paths = [tmp_path / name for name in files]
    for path in paths:
        path.write_text(f"\n {files[path.name]} \n\n", encoding="utf-8")
    code, out, _ = ep("demo", *map(str, paths), "--json")
    report = json.loads(out)
    assert code == OK and len(report["timings"]) >= 2
    assert max(timing["difference"] for timing in report["timings"]) < 1e-3
    magika = Magika()
    for path, said in zip(paths, report["predictions"], strict=True):
        expected = magika.identify_path(path).prediction
        assert said["type"] == expected.dl.label and said["score"] == pytest.approx(expected.score, abs=1e-3)


def test_demo_without_its_model(ep, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, err = ep("demo")
    assert code == UNAVAILABLE and "magika" in err and "ep-runtime[demo]" in err


# The program


@pytest.mark.parametrize("arguments", [[], ["frobnicate"], ["run"], ["run", "m.onnx", "--frob"]])
def test_wrong_usage(ep, arguments):
    code, _, err = ep(*arguments)
    assert code == USAGE and "usage: ep" in err


def test_version_and_help(ep):
    assert ep("--version")[:2] == (OK, f"ep-runtime {importlib.import_module('ep').__version__}\n")
    code, out, _ = ep("--help")
    assert code == OK and all(command in out for command in ("run", "inspect", "doctor", "demo"))


def test_the_installed_program_passes_its_exit_code_on(tmp_path):
    program = Path(sys.executable).with_name("ep")
    done = subprocess.run(
        [program, "inspect", "absent.onnx"], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == FAILED and done.stderr.startswith("InvalidModel: ")
