"""Do `ep compile` and `ep cache` do what they say, in words and in JSON, with honest exit codes?"""

import json

import numpy as np
import onnx
import pytest
from conftest import parse, require

import ep
from ep import cli
from ep.context_commands import shape, signatures

TEXT = "g (float[n, 4] x, float[n, 4] z) => (float[n, 4] y) { s = Add(x, z) y = Tanh(s) }"


@pytest.fixture
def model(tmp_path, monkeypatch):
    require("jax")
    monkeypatch.setenv("EP_CONTEXT_CACHE", str(tmp_path / "cache"))
    onnx.save(parse(TEXT), tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def run(capsys, *arguments):
    code = cli.main(list(map(str, arguments)))
    return code, capsys.readouterr()


def test_a_model_is_compiled_for_each_signature(model, capsys):
    shapes = ["--shape", "x:2x4", "--shape", "z:2x4"]
    code, printed = run(capsys, "compile", model, "--device", "jax", "--json", *shapes)
    told = json.loads(printed.out)
    assert code == 0 and told["model"] == str(model.parent / "model_ctx.onnx")
    assert (told["signatures"], told["functions"], told["partitions"], told["compiled"]) == (1, 1, 1, 1)
    more = ["--shape", "x:3x4", "--embed", "-o", model.parent / "e.onnx"]
    code, printed = run(capsys, "compile", model, "--device", "jax", *shapes, *more)
    words = " ".join(printed.out.split())
    assert code == 0 and "2 compiled functions for 2 signatures" in words
    assert "1 compiled and 1 found in the cache" in words and not (model.parent / "e.epctx").exists()
    session = ep.load(model.parent / "e.onnx", "jax", options={"trust_native": True})
    code, printed = run(capsys, "run", model.parent / "e.onnx", "--device", "jax", "--dim", "n=2", "--trust-native")
    assert code == 0 and printed.err == ""
    assert "(0 functions compiled, 1 found stored)" in " ".join(printed.out.split())
    for rows in (2, 3):
        x = np.ones((rows, 4), np.float32)
        np.testing.assert_allclose(session.run(None, {"x": x, "z": x})[0], np.tanh(2 * x), rtol=1e-5)
    assert (session.counters.loaded, session.counters.misses) == (2, 0)


def test_dynamic_shapes_must_be_given(model, capsys):
    code, printed = run(capsys, "compile", model, "--device", "jax")
    assert code == 2 and "--shape NAME:1x128" in printed.err.replace("\n", " ")
    code, printed = run(capsys, "compile", model, "--device", "jax", "--portable-only")
    assert code == 0 and "0 compiled functions" in printed.out.replace("\n", " ")


def test_a_folder_that_does_not_exist_is_known_before_anything_is_compiled(model, capsys, monkeypatch):
    monkeypatch.setattr("ep.session.InferenceSession.warmup", lambda *a, **k: pytest.fail("it compiled first"))
    target = model.parent / "no" / "ctx.onnx"
    code, printed = run(capsys, "compile", model, "--device", "jax", "--shape", "n:2", "-o", target)
    assert code == 2 and "does not exist" in printed.err and "Fix: create it" in printed.err
    with pytest.raises(ep.InvalidInput, match="does not exist"):
        ep.load(model, "jax").save_context(target)


@pytest.mark.filterwarnings("default::ep.ContextNotice")
def test_code_that_does_not_fit_is_told_without_a_line_of_python(model, capsys, monkeypatch):
    run(capsys, "compile", model, "--device", "jax", "--shape", "n:2")
    target = model.parent / "model_ctx.onnx"
    monkeypatch.setattr("ep.identity.code_identity", lambda: "9.9-elsewhere")
    code, printed = run(capsys, "run", target, "--device", "jax", "--dim", "n=2", "--trust-native")
    assert code == 0 and printed.err.startswith("note: the compiled code of EPContext node")
    assert ".py" not in printed.err


def test_the_cache_is_listed_summed_up_and_cleared(model, capsys):
    run(capsys, "compile", model, "--device", "jax", "--shape", "n:2")
    code, printed = run(capsys, "cache", "list", "--json")
    told = json.loads(printed.out)
    assert code == 0 and told["entries"] == 1 and told["list"][0]["source"] == "ep.jax"
    assert told["directory"] == str(model.parent / "cache") and 0 < told["bytes"] <= told["limit_bytes"]
    assert ": 1 entry," in run(capsys, "cache", "stats")[1].out
    assert "ep.jax" in run(capsys, "cache", "list")[1].out
    assert ": 1 entry removed" in run(capsys, "cache", "clear")[1].out.replace("\n", " ")
    assert json.loads(run(capsys, "cache", "stats", "--json")[1].out)["entries"] == 0


def test_a_cache_that_is_off_is_told(monkeypatch, capsys):
    monkeypatch.setenv("EP_CONTEXT_CACHE", "off")
    code, printed = run(capsys, "cache", "stats")
    assert code == 2 and "EP_CONTEXT_CACHE" in printed.err


def test_shapes_on_the_command_line():
    assert shape("input:0:1x128") == ("input:0", (1, 128)) and shape("s:") == ("s", ())
    given = [("a", (1,)), ("b", (2,)), ("a", (3,)), ("a", (4,))]
    assert signatures(given) == [{"a": (1,), "b": (2,)}, {"a": (3,)}, {"a": (4,)}]


@pytest.mark.parametrize("text", ["x", "x:1x", "x:ax2", ":1", "x:-1"])
def test_wrong_shapes_are_refused(text, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["compile", "m.onnx", "--shape", text])
    assert left.value.code == 2 and "is not of the form NAME:1x128" in capsys.readouterr().err
