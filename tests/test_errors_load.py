"""What is a user told when a model cannot be loaded, or feeds do not fit? Facts of each text are pinned."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, parser

import ep
from ep.errors import BackendUnavailable, EpError, InvalidInput, InvalidModel, UnsupportedModel

F32 = TensorProto.FLOAT


def text(body: str, header: str = 'ir_version: 10, opset_import: ["": 21]') -> onnx.ModelProto:
    return parser.parse_model(f"<{header}> {body}")


def graph(*nodes: Any, outputs: tuple[str, ...] = ("y",), opset: int = 21) -> onnx.ModelProto:
    """A model of these nodes on an input x, checked by nobody."""
    made = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", F32, ["n"])],
        [helper.make_tensor_value_info(name, F32, None) for name in outputs],
    )
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def fails(kind: type[EpError], source: Any, *facts: str, **arguments: Any) -> EpError:
    """Loading raises exactly this kind of error, which says what to do and contains these facts."""
    with pytest.raises(EpError) as caught:
        ep.load(source, arguments.pop("device", "host"), **arguments)
    error = caught.value
    assert isinstance(error, kind), f"{type(error).__name__}: {error}"
    assert error.fix, str(error)
    assert [fact for fact in facts if fact not in str(error)] == [], str(error)
    return error


# Feeds.

ADD = text("g (float[n, 3] a, float[n, 3] b) => (float[n, 3] c) { c = Add(a, b) }")
TWO = np.zeros((2, 3), np.float32)


@pytest.fixture(scope="module")
def session() -> ep.InferenceSession:
    return ep.load(ADD, "host")


@pytest.mark.parametrize(
    ("feeds", "facts"),
    [
        ({"a": TWO}, ["'b' is missing", "float32[n, 3]"]),
        ({"a": TWO, "b": TWO, "bb": TWO}, ["'bb' is not an input", "Did you mean 'b'?"]),
        ({"a": TWO, "b": TWO.astype(np.float64)}, ["'b' has dtype float64", "needs float32"]),
        ({"a": TWO, "b": TWO.astype(np.int32)}, ["'b' has dtype int32", ".astype"]),
        ({"a": TWO, "b": TWO[0]}, ["'b' has rank 1", "float32[n, 3]"]),
        ({"a": TWO, "b": TWO[:, :2]}, ["'b' has 2 at axis 1"]),
        ({"a": TWO, "b": TWO[:1]}, ["dimension 'n' is 2 in 'a'", "'b' has 1 at axis 0"]),
        ({"a": TWO, "b": object()}, ["'b' is a object", "__array__"]),
        ({"a": TWO, "b": [[1, 2, 3], [4]]}, ["'b' is a ragged list"]),
    ],
    ids=["missing", "extra", "float64", "int32", "rank", "size", "symbol", "object", "ragged"],
)
def test_feeds_that_do_not_fit(session, feeds, facts):
    with pytest.raises(InvalidInput) as caught:
        session.run(None, feeds)
    assert [fact for fact in facts if fact not in str(caught.value)] == [], str(caught.value)
    assert caught.value.fix


def test_all_problems_of_the_feeds_come_in_one_error(session):
    with pytest.raises(InvalidInput) as caught:
        session.run(None, {"a": TWO[0], "c": TWO})
    assert all(f"'{name}'" in str(caught.value) for name in "abc")


class Broken:
    """A feed whose own code fails."""

    def __dlpack__(self, **_: Any) -> Any:
        raise KeyError("broken")

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


@pytest.mark.parametrize(
    ("feeds", "facts"),
    [
        ([TWO, TWO], ["are a list, not a mapping", "'a': …"]),
        (None, ["are a NoneType", "float32[n, 3]"]),
        ({"a": TWO, "b": TWO, 0: TWO}, ["'0' is not an input"]),
        ({"a": TWO, "b": Broken()}, ["'b' is a Broken"]),
    ],
    ids=["list", "none", "number", "broken"],
)
def test_feeds_of_the_wrong_kind(session, feeds, facts):
    with pytest.raises(InvalidInput) as caught:
        session.run(None, feeds)
    assert [fact for fact in facts if fact not in str(caught.value)] == [], str(caught.value)


def test_feeds_by_position_are_no_mapping(session):
    with pytest.raises(InvalidInput, match="are a ndarray"):
        session(TWO)


def test_output_names_are_a_list(session):
    with pytest.raises(InvalidInput, match="not a list"):
        session.run("c", {"a": TWO, "b": TWO})


def test_an_unknown_output(session):
    with pytest.raises(InvalidInput, match="no output 'd'"):
        session.run(["d"], {"a": TWO, "b": TWO})


# Operators.


def test_an_unknown_operator():
    fails(UnsupportedModel, graph(helper.make_node("Frobnicate", ["x"], ["y"], name="f")), "Frobnicate", "'f'")


def test_an_unknown_domain():
    model = graph(helper.make_node("Relu", ["x"], ["y"], name="f", domain="com.example"))
    fails(InvalidModel, model, "'com.example'", "'f'", "does not import")
    model.opset_import.append(helper.make_opsetid("com.example", 1))
    fails(UnsupportedModel, model, "com.example::Relu", "'f'", "@op(")


@pytest.mark.parametrize("op", ["Unpack", "DequantizePacked", "Gradient"])
def test_operators_of_passes_are_none_of_a_model(op):
    model = graph(helper.make_node(op, ["x"], ["y"], name="f", domain="ep", dtype="__loader__", shape=[2]))
    model.opset_import.append(helper.make_opsetid("ep", 1))
    fails(EpError, model, f"ep::{op}", "'f'")


def test_an_unknown_attribute():
    model = graph(helper.make_node("Relu", ["x"], ["y"], name="f", slope=0.5))
    fails(InvalidModel, model, "'f'", "unknown attribute 'slope'")


def test_a_missing_attribute():
    fails(
        InvalidModel,
        graph(helper.make_node("Cast", ["x"], ["y"], name="f")),
        "'f'",
        "required attribute 'to'",
    )


def test_too_many_and_too_few_inputs():
    fails(InvalidModel, graph(helper.make_node("Relu", ["x", "x"], ["y"])), "has 2 inputs", "at most 1")
    fails(InvalidModel, graph(helper.make_node("Add", ["x"], ["y"])), "lacks the required input 'b'")


def test_a_future_opset():
    fails(UnsupportedModel, graph(helper.make_node("Relu", ["x"], ["y"]), opset=9999), "opset 9999", "upgrade")


def test_an_operator_newer_than_its_opset():
    fails(UnsupportedModel, graph(helper.make_node("Gelu", ["x"], ["y"]), opset=13), "Gelu-13")


def test_all_problems_of_a_model_come_in_one_error():
    nodes = [
        helper.make_node("Frobnicate", ["x"], ["a"], name="first"),
        helper.make_node("Frobnicate", ["a"], ["b"], name="second"),
        helper.make_node("Gronk", ["b"], ["y"], name="third"),
    ]
    fails(
        UnsupportedModel,
        graph(*nodes),
        "2 problems",
        "Frobnicate",
        "2 nodes: 'first', 'second'",
        "Gronk",
        "'third'",
    )


def test_all_invalid_nodes_come_in_one_error():
    nodes = [
        helper.make_node("Relu", ["x"], ["a"], name="first", slope=0.5),
        helper.make_node("Relu", ["nowhere"], ["b"], name="second"),
        helper.make_node("Add", ["a", "b", "b"], ["y"], name="third"),
    ]
    fails(InvalidModel, graph(*nodes), "'first'", "'slope'", "'second'", "'nowhere'", "'third'", "3 inputs")


# Graphs.


def test_a_cycle():
    nodes = [
        helper.make_node("Add", ["x", "b"], ["a"], name="one"),
        helper.make_node("Relu", ["a"], ["b"], name="two"),
    ]
    fails(InvalidModel, graph(*nodes, outputs=("b",)), "has a cycle: 'two' → 'one' → 'two'", "none can run first")
    itself = helper.make_node("Add", ["x", "y"], ["y"])
    fails(InvalidModel, graph(itself), "graph 'g' has a cycle: 'Add_0' → 'Add_0'")
    fails(
        InvalidModel, graph(itself, helper.make_node("Relu", ["nowhere"], ["z"])), "2 problems", "'nowhere'", "'Add_0'"
    )


def test_a_long_cycle_in_a_body():
    """A value that the body needs may come from around it; here it is the result of its own node."""
    ring = [helper.make_node("Relu", [f"v{i}"], [f"v{(i + 1) % 99}"], name=f"n{i}") for i in range(99)]
    out = helper.make_tensor_value_info("v0", F32, [64])
    branches = {name: helper.make_graph(ring, name, [], [out]) for name in ("then_branch", "else_branch")}
    fails(InvalidModel, graph(helper.make_node("If", ["x"], ["y"], **branches)), "_branch' has a cycle: ", "… 92 more")
    for name, body in branches.items():
        del body.node[:]
        body.node.append(helper.make_node("Relu", ["y"], ["v0"], name=name))
    fails(InvalidModel, graph(helper.make_node("If", ["x"], ["y"], name="if", **branches)), "'if' → 'if'")


def test_nodes_in_any_order():
    nodes = [helper.make_node("Relu", ["a"], ["y"]), helper.make_node("Neg", ["x"], ["a"])]
    (y,) = ep.load(graph(*nodes), "host").run(None, {"x": np.full(64, -2, np.float32)})
    assert (y == 2).all()


@pytest.fixture
def quiet(capfd, caplog):
    """What the libraries below say of a model, in the log or to the console, is nothing for users to read."""
    yield
    assert not caplog.records and capfd.readouterr() == ("", "")


def test_a_dangling_input(quiet):
    fails(InvalidModel, graph(helper.make_node("Relu", ["nowhere"], ["y"], name="f")), "'f'", "'nowhere'")
    then = helper.make_graph([helper.make_node("Relu", ["gone"], ["z"], name="inner")], "t", [], [])
    then.output.append(helper.make_tensor_value_info("z", F32, [64]))
    nodes = [helper.make_node("If", ["x"], ["y"], then_branch=then, else_branch=then)]
    fails(InvalidModel, graph(*nodes, helper.make_node("Abs", ["nowhere"], ["a"])), "'inner'", "'gone'", "'Abs_1'")


def test_a_dangling_input_of_a_function(quiet):
    domain = helper.make_opsetid("own", 1)
    add = helper.make_node("Add", ["u", "gone"], ["v"])
    model = graph(helper.make_node("F", ["x"], ["y"], domain="own"))
    model.opset_import.append(domain)
    model.functions.append(helper.make_function("own", "F", ["u"], ["v"], [add], model.opset_import))
    fails(InvalidModel, model, "1 problem", "function 'F' reads 'gone', which nothing produces")


def test_a_dangling_output(quiet):
    fails(InvalidModel, graph(helper.make_node("Relu", ["x"], ["a"])), "'y'")
    fails(
        InvalidModel, graph(helper.make_node("Relu", ["x"], ["y"]), outputs=("y", "b", "c")), "'b'", "'c'", "2 problems"
    )


def test_a_value_with_two_producers():
    fails(
        InvalidModel,
        graph(helper.make_node("Relu", ["x"], ["y"]), helper.make_node("Abs", ["x"], ["y"])),
        "'y'",
    )


# Files.


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A model with its weights in a second file."""
    weights = helper.make_tensor("w", F32, [64], np.arange(64, dtype=np.float32).tobytes(), raw=True)
    model = graph(helper.make_node("Add", ["x", "w"], ["y"]))
    model.graph.initializer.append(weights)
    onnx.external_data_helper.convert_model_to_external_data(model, location="m.data", size_threshold=0)
    onnx.save(model, tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


def test_the_model_is_sound(path):
    (y,) = ep.load(path, "host").run(None, {"x": np.zeros(64, np.float32)})
    assert y[63] == 63


def test_a_missing_file(tmp_path):
    fails(InvalidModel, tmp_path / "absent.onnx", "absent.onnx", "No such file")


@pytest.mark.parametrize("kept", [0.0, 0.5, 0.9])
def test_a_truncated_file(tmp_path, kept):
    content = text("g (float[n] x) => (float[n] y) { y = Relu(x) }").SerializeToString()
    (tmp_path / "m.onnx").write_bytes(content[: int(len(content) * kept)])
    fails(InvalidModel, tmp_path / "m.onnx", "m.onnx", "complete")


def test_something_that_is_no_model(tmp_path):
    (tmp_path / "m.onnx").write_text("version 1\noid sha256:0\nsize 12\n", encoding="utf-8")
    fails(InvalidModel, tmp_path / "m.onnx", "m.onnx")


def test_missing_external_data(path):
    path.with_name("m.data").unlink()
    fails(InvalidModel, path, "'m.data'", "'w'", "No such file")


def test_truncated_external_data(path):
    os.truncate(path.with_name("m.data"), 100)
    fails(InvalidModel, path, "'m.data'", "'w'", "256 bytes", "100 bytes")


@pytest.mark.parametrize("location", ["../secret.data", "a/../../secret.data", "{absolute}", "link.data"])
def test_external_data_outside_the_folder(path, location):
    folder = path.parent / "inner"
    folder.mkdir()
    secret = path.parent / "secret.data"
    path.with_name("m.data").rename(secret)
    (folder / "link.data").symlink_to(secret)
    model = onnx.load(path, load_external_data=False)
    for entry in model.graph.initializer[0].external_data:
        if entry.key == "location":
            entry.value = location.format(absolute=secret)
    onnx.save(model, folder / "m.onnx")
    fails(InvalidModel, folder / "m.onnx", "'w'", "outside")


def test_external_data_of_a_model_without_a_folder(path):
    fails(InvalidModel, path.read_bytes(), "'m.data'", "load the model by its path")


# Providers.


def test_an_unknown_device():
    fails(InvalidInput, ADD, "'jux'", "Did you mean 'jax'?", device="jux")


def test_a_device_that_is_not_here():
    fails(BackendUnavailable, ADD, "tpu", device="tpu")


def test_a_provider_that_is_not_installed(monkeypatch):
    from importlib.metadata import EntryPoint

    from ep import discovery

    entry = EntryPoint("jax", "library_that_is_not_here:provider", discovery.GROUP)
    known = dict(discovery.entry_points()) | {"jax": entry}
    monkeypatch.setattr(discovery, "entry_points", lambda: known)
    fails(
        BackendUnavailable,
        ADD,
        "'jax' is not installed",
        "library_that_is_not_here",
        "pip install",
        device="jax",
    )


@pytest.mark.parametrize("device", ["mlx:3", "cpu:7", "jax:9"])
def test_an_index_that_no_device_has(device):
    pytest.importorskip({"mlx": "mlx.core"}.get(device.partition(":")[0], "jax"))
    fails(BackendUnavailable, ADD, device, device=device)


@pytest.mark.parametrize("device", ["auto:1", "host:1", "cuda:", "cuda:x", None, 3])
def test_a_device_that_is_no_name(device):
    fails(InvalidInput, ADD, "device", device=device)


@pytest.mark.parametrize(
    "arguments",
    [{"options": "off"}, {"options": {3: "off"}}, {"weights": 5}, {"providers": []}, {"providers": ["jax"]}],
)
def test_arguments_of_the_wrong_type(arguments):
    fails(InvalidInput, ADD, str(next(iter(arguments))), **arguments)


@pytest.mark.parametrize("library", ["jax", "mlx"])
def test_a_session_inside_a_function_that_a_library_traces(library):
    """The library's own error is the cause, and what the user reads is ours."""
    x = np.ones((2, 3), np.float32)
    if library == "jax":
        jax = pytest.importorskip("jax")
        trace, x = jax.jit, jax.numpy.asarray(x)
    else:
        mx = pytest.importorskip("mlx.core")
        trace, x = mx.compile, mx.array(x)
    session = ep.load(ADD, library)
    for run in (lambda a: session.run(None, {"a": a, "b": a})[0], lambda a: session(a=a, b=a)["c"]):
        with pytest.raises(ep.ExecutionError):
            trace(run)(x)


def test_an_unknown_option():
    fails(InvalidInput, ADD, "'complie'", "Did you mean 'compile'?", options={"complie": "off"})


@pytest.mark.parametrize("level", ["BASIC", "ALL"])
def test_files_that_onnxruntime_saved_for_itself_are_named(tmp_path, level):
    """Its own format, and the operators of one processor that its highest level of optimization writes."""
    ort = pytest.importorskip("onnxruntime")
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, f"ORT_ENABLE_{level}")
    path = tmp_path / ("m.ort" if level == "BASIC" else "m.onnx")
    options.optimized_model_filepath = str(path)
    w = np.ones((16, 16, 3, 3), np.float32)
    model = text("g (float[1, 16, 8, 8] x) => (float[1, 16, 6, 6] y) { y = Conv(x, w) }")
    model.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    if level == "BASIC":
        fails(InvalidModel, path, "onnxruntime's own format (.ort)", "the .onnx file")
    elif "nchwc" in {node.domain.rpartition(".")[2] for node in onnx.load(path).graph.node}:  # not on every processor
        fails(UnsupportedModel, path, "com.microsoft.nchwc::Conv", "on one machine", "ORT_ENABLE_EXTENDED")
