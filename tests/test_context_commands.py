"""Do `ep compile` and `ep cache` do what they say, in words and in JSON, with honest exit codes?"""

import json
import os
import time

import numpy as np
import onnx
import pytest
from conftest import parse, require

import ep
from ep import cli, discovery
from ep.container import Code, Container
from ep.context_cache import Cache
from ep.context_commands import shape, signatures
from ep.identity import fingerprint

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
    assert code == 0 and told["entries"] == 2, "the function, and the plan of the model"
    assert told["list"][0]["source"] == "ep.jax"
    assert told["directory"] == str(model.parent / "cache") and 0 < told["bytes"] <= told["limit_bytes"]
    assert ": 2 entries," in run(capsys, "cache", "stats")[1].out
    assert "ep.jax" in run(capsys, "cache", "list")[1].out
    cleared = run(capsys, "cache", "clear")[1].out.replace("\n", " ")
    assert ": 2 entries, " in cleared and " removed; 0 entries left" in cleared
    assert json.loads(run(capsys, "cache", "stats", "--json")[1].out)["entries"] == 0


@pytest.fixture
def filled(tmp_path):
    """A cache of 25 entries, the later ones larger and used an hour later; what made them is that of a later test."""
    cache = Cache(tmp_path / "filled")
    for number in range(25):
        put(cache, number, "ep.jax", "jaxlib 0.0.1 / ep 0.0.1", 1000 + number)
        os.utime(cache.path(key(number)), (NOW - 3600 * (24.5 - number),) * 2)
    return cache


NOW = time.time()


def key(number):
    return f"{number << 248:064x}"


def put(cache, number, source, fingerprint, size=10):
    cache.put(key(number), Container(source, "1", fingerprint, codes=(Code(key(number), (), b"c" * size),)))


def keys(cache):
    return {entry.key for entry in cache}


def ask(capsys, cache, *arguments):
    code, printed = run(capsys, "cache", *arguments, "--directory", cache.directory)
    assert code == 0, printed.err
    return " ".join(printed.out.split())


def test_a_long_list_ends_and_begins_with_what_was_used_last(filled, capsys):
    text = ask(capsys, filled, "list")
    assert "25 entries" in text and "… 5 more (--limit 0 shows all)" in text
    shown = json.loads(ask(capsys, filled, "list", "--json", "--limit", "3"))
    assert [e["key"] for e in shown["list"]] == [key(24), key(23), key(22)] and shown["entries"] == 25
    assert text.index(key(24)[:12]) < text.index(key(23)[:12]) and text.count("jaxlib 0.0.1") == 1
    put(filled, 30, "ep.jax", "x", 5000)
    os.utime(filled.path(key(30)), (NOW - 10**6,) * 2)
    largest = json.loads(ask(capsys, filled, "list", "--json", "--limit", "1", "--sort", "size"))["list"]
    assert [e["key"] for e in largest] == [key(30)]
    assert len(json.loads(ask(capsys, filled, "list", "--json", "--limit", "0"))["list"]) == 26


def test_old_entries_go_and_a_dry_run_says_which(filled, capsys):
    text = ask(capsys, filled, "clear", "--older-than", "10h", "--dry-run")  # 0 to 14
    assert "15 entries not used for 10h" in text and "would be removed; 10 entries left" in text
    assert len(keys(filled)) == 25
    told = json.loads(ask(capsys, filled, "clear", "--older-than", "10h", "--json"))
    assert (told["removed"], told["left"]) == (15, 10) and len(told["list"]) == 15
    assert keys(filled) == {key(number) for number in range(15, 25)}
    assert ask(capsys, filled, "clear", "--dry-run").count("would be removed") == 1 and len(keys(filled)) == 10


def test_stale_entries_go_and_those_of_other_programs_stay(tmp_path, capsys, accelerator):
    """What differs from process to process only, such as XLA_FLAGS, makes nothing stale."""
    here = fingerprint(discovery.provider(accelerator).backend)
    source, cache = f"ep.{accelerator}", Cache(tmp_path / "stale")
    put(cache, 1, source, here)
    put(cache, 2, source, f"{here} / XLA_FLAGS 0123 / settings jax_default_prng_impl=rbg / precision fast / threads 96")
    put(cache, 3, source, here.rpartition(" / ep ")[0] + " / ep 0.0.1-other")
    put(cache, 4, source, here.replace("machine ", "machine not_"))
    put(cache, 5, "ep.nobody", here)
    put(cache, 6, source, here)
    cache.path(key(6)).write_bytes(cache.path(key(6)).read_bytes()[:-1])
    text = ask(capsys, cache, "clear", "--stale", "--dry-run")
    assert "4 entries stale" in text and "2 entries left" in text and len(keys(cache)) == 6
    assert all(why in text for why in ("ep 0.0.1-other instead of", "machine not_", "'nobody'", "damaged: it has"))
    assert "4 entries stale" in ask(capsys, cache, "list", "--stale")
    assert "4 entries stale" in ask(capsys, cache, "clear", "--stale")
    assert keys(cache) == {key(1), key(2)}
    assert "0 entries stale" in ask(capsys, cache, "clear", "--stale")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["clear", "--older-than", "10"], "is not an age"),
        (["clear", "--older-than", "1y"], "30d"),
        (["list", "--limit", "-1"], "--limit"),
        (["list", "--dry-run"], "--dry-run goes with clear"),
        (["empty"], "choose from"),
    ],
)
def test_wrong_arguments_of_the_cache(capsys, tmp_path, arguments, words):
    try:
        code = cli.main(["cache", *arguments, "--directory", str(tmp_path / "c")])
    except SystemExit as stop:
        code = stop.code
    assert code == 2 and words in capsys.readouterr().err


def test_a_cache_that_is_off_is_told(monkeypatch, capsys):
    monkeypatch.setenv("EP_CONTEXT_CACHE", "off")
    code, printed = run(capsys, "cache", "stats")
    assert code == 2 and "EP_CONTEXT_CACHE" in printed.err


def test_shapes_on_the_command_line():
    assert shape("input:0:1x128") == ("input:0", (1, 128)) and shape("s:") == ("s", ())
    given = [("a", (1,)), ("b", (2,)), ("a", (3,)), ("a", (4,))]
    assert signatures(given) == [{"a": (1,), "b": (2,)}, {"a": (3,)}, {"a": (4,)}]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["x:2x5"], ["'x' is given with shape [2, 5]", "x: float32[n, 4]"]),
        (["x:2"], ["'x' is given with shape [2]"]),
        (["y:2x4"], ["'y', which is no input"]),
        (["n:2x3"], ["dimension 'n' is given as (2, 3)"]),
        (["x:2x4", "z:3x4"], ["dimension 'n' is both 2 and 3"]),
        (["n:99999999999999"], ["bytes are available", "smaller sizes"]),
    ],
)
def test_shapes_that_the_model_does_not_take(model, capsys, given, words):
    shapes = [argument for text in given for argument in ("--shape", text)]
    code, printed = run(capsys, "compile", model, "--device", "jax", *shapes)
    told = " ".join(printed.err.split())
    assert code == 2 and all(word in told for word in words), told


def test_a_cache_that_is_a_file(model, capsys):
    code, printed = run(capsys, "cache", "list", "--directory", model)
    assert code == 2 and "is no directory" in printed.err


@pytest.mark.parametrize("text", ["x", "x:1x", "x:ax2", ":1", "x:-1"])
def test_wrong_shapes_are_refused(text, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["compile", "m.onnx", "--shape", text])
    assert left.value.code == 2 and "is not of the form NAME:1x128" in capsys.readouterr().err
