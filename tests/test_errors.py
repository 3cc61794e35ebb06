"""Do errors say what failed, why, and what to do, and are they caught by the five classes that users know?"""

import copy
import subprocess
import sys

import numpy as np
import pytest

import ep
from ep import errors
from ep.errors import ExecutionError
from ep.program import Runner, Step

USER_FACING = (
    errors.UnsupportedModel,
    errors.InvalidModel,
    errors.InvalidInput,
    errors.BackendUnavailable,
    errors.ExecutionError,
)

SAMPLES = [
    errors.UnsupportedModel("m.onnx is not supported.", why="w", fix="f"),
    errors.InvalidModel("m.onnx is damaged.", why="w", fix="f"),
    errors.InvalidInput("bad feed.", why="w", fix="f"),
    errors.BackendUnavailable("no mlx.", why="w", fix="f"),
    errors.ExecutionError("failed.", why="w", fix="f"),
    errors.NoEpForOp("ai.onnx::Foo-1", {"mlx": "it has no such kernel"}, node="a/b"),
    errors.NoEpForContextSource("ep.jx", ["ep.jax", "ep.mlx"]),
    errors.UnsupportedContext("cpu"),
    errors.UnknownOption("mlx.memory_limt", ["mlx.memory_limit"]),
    errors.IndexOutOfRange(5, -3, 2, where="at [1] of input 'ids'", bound="'w' has shape [3]", fix="f."),
    errors.InvalidAlignment(3),
    errors.InvalidAlignment(64, 0x1010),
    errors.InvalidTensorView("it spans 8 bytes of 4."),
    errors.DuplicateContextSource("QNN", "a", "b"),
    errors.EpLoadFailed("qnn", "OSError: no such library"),
    errors.NotInitialised("jax", "allocate memory"),
    errors.KernelFailed("ai.onnx::Conv", "shapes differ", node="c1", ep="mlx", fix="check the weights."),
    errors.OutOfMemory(8_000_000_000, 1000, "cuda:0"),
    errors.UseAfterFree("read the buffer", "deallocate"),
    errors.DoubleFree("deallocate"),
    errors.ForeignProvider("mlx", "cpu:0"),
    errors.NullPointer(),
    errors.ReadOnlyBuffer("it is borrowed."),
]
ids = [type(error).__name__ for error in SAMPLES]


def test_every_kind_has_a_sample():
    kinds = {k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, errors.EpError)}
    assert kinds - {type(error) for error in SAMPLES} == {errors.EpError, errors.BufferMisuse}


@pytest.mark.parametrize("error", SAMPLES, ids=ids)
def test_every_kind_says_what_why_and_fix(error):
    what, *rest = str(error).splitlines()
    assert what == error.what and what.endswith(".")
    assert any(line.startswith("Fix: ") for line in rest)
    assert error.why == "" or f"Why: {error.why.splitlines()[0]}" in rest
    assert isinstance(error, USER_FACING)


@pytest.mark.parametrize("error", SAMPLES, ids=ids)
def test_errors_are_rebuilt_whole(error):
    """By the protocol that also carries them out of a process pool."""
    twin = copy.copy(error)
    assert type(twin) is type(error) and str(twin) == str(error) and vars(twin) == vars(error)


def test_text_without_why_or_fix_is_the_what_alone():
    assert str(errors.EpError("it failed.")) == "it failed."


def test_texts_carry_the_facts():
    assert str(errors.OutOfMemory(8_000_000_000, None, "cuda:0")) == (
        "out of memory on cuda:0: 8,000,000,000 bytes requested.\n"
        "Why: an unknown number of bytes is available.\n"
        "Fix: free buffers, use a smaller batch or model, or raise the provider's memory_limit option."
    )
    assert "1,000 bytes are available" in str(errors.OutOfMemory(2000, 1000, "cpu:0"))
    assert "it lies 16 bytes past a multiple of 64." in str(errors.InvalidAlignment(64, 0x1010))
    assert "  mlx: it has no such kernel" in str(errors.NoEpForOp("Foo", {"mlx": "it has no such kernel"}))
    assert "Did you mean 'ep.jax'?" in str(errors.NoEpForContextSource("ep.jx", ["ep.jax"]))
    assert "Did you mean" not in str(errors.UnknownOption("zzz", ["mlx.memory_limit"]))


@pytest.mark.parametrize("kind", [errors.UnsupportedModel, errors.InvalidModel])
def test_all_problems_of_a_model_are_in_one_error(kind):
    error = kind.from_problems("m.onnx", ["node 'a' …", "node 'b' …"], why="w.", fix="f.")
    assert type(error) is kind
    what, first, second, *rest = str(error).splitlines()
    assert "m.onnx" in what and "2 problems" in what
    assert [first, second, *rest] == ["  node 'a' …", "  node 'b' …", "Why: w.", "Fix: f."]
    assert "1 problem." in kind.from_problems("m.onnx", ["x"]).what


def test_read_only_is_also_the_error_that_dlpack_consumers_expect():
    assert isinstance(errors.ReadOnlyBuffer("x"), BufferError)


def test_errors_import_no_library():
    code = "import sys, ep.errors; print(sorted({'onnx', 'onnx_ir', 'jax', 'mlx'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_a_lowering_that_returns_too_few_outputs():
    registry = ep.OpRegistry()

    @registry.op("One", domain="com.example")
    def one(xp, x):
        return x

    (lowering,) = registry
    env = {"x": np.arange(2.0)}
    Runner(np, np).evaluate([Step("n", lowering, 1, ("x",), ("y", None), {}, {})], env)
    np.testing.assert_array_equal(env["y"], [0, 1])
    with pytest.raises(ExecutionError, match="returned 1 outputs; the node names 2"):
        Runner(np, np).evaluate([Step("n", lowering, 1, ("x",), ("y", "z"), {}, {})], env)
