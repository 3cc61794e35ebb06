"""Does `ep pack` write models whose every weight can be borrowed, and that are the same models to everybody?"""

from __future__ import annotations

import errno
import json
import os
import zlib
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import ep
from ep import packing
from ep.cli import main
from ep.errors import InvalidInput, InvalidModel, UnsupportedModel
from ep.loader import load_model
from ep.packing import pack
from ep.safetensors import FILLER, parse

DTYPES = (
    *("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64"),
    *("uint64", "bool", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "int4", "uint4"),
    *("float4_e2m1fn", "int2", "uint2", "float8_e8m0fnu"),
)
FORMATS = pytest.mark.parametrize("format", packing.FORMATS)


def numbers(name: str, count: int = 3001) -> np.ndarray:
    """More than 1 KiB of every dtype, of a size that no alignment divides."""
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    values = np.random.default_rng(zlib.crc32(name.encode())).integers(0, 2, (count * 4,)).astype(np.float32)
    return values.astype(dtype)[: count * 4]


def all_dtypes() -> onnx.ModelProto:
    """A model that returns a weight of each dtype, and two that are stored as numbers."""
    tensors = [numpy_helper.from_array(numbers(name), name) for name in DTYPES]
    tensors.append(helper.make_tensor("typed", TensorProto.FLOAT16, (600,), numbers("float16")[:600]))
    tensors.append(helper.make_tensor("typed64", TensorProto.INT64, (600,), numbers("int64")[:600]))
    tensors.append(helper.make_tensor("text", TensorProto.STRING, (300,), [b"abcdefgh"] * 300))
    tensors.append(numpy_helper.from_array(np.zeros((0, 7), np.float32), "empty"))
    nodes = [helper.make_node("Identity", [t.name], [f"{t.name}_out"]) for t in tensors]
    outputs = [helper.make_tensor_value_info(f"{t.name}_out", t.data_type, t.dims) for t in tensors]
    graph = helper.make_graph(nodes, "g", [], outputs, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)], ir_version=13)


def contents(source: Any) -> dict[str, tuple[str, bytes]]:
    """Name → dtype and bytes of every initializer, as the loader reads them."""
    model, store, _ = load_model(source)
    arrays = {name: store.array(value.const_value) for name, value in model.graph.initializers.items()}
    return {name: (a.dtype.name, str(a.tolist()).encode() if a.dtype.kind == "O" else a.tobytes()) for name, a in
            arrays.items()}  # fmt: skip


@FORMATS
@pytest.mark.parametrize("shard_bytes", [None, 20_000])
def test_every_dtype_survives_bit_for_bit(tmp_path, format, shard_bytes):
    onnx.save(all_dtypes(), tmp_path / "m.onnx")
    packed = pack(tmp_path / "m.onnx", tmp_path / "p.onnx", format=format, shard_bytes=shard_bytes)
    assert contents(tmp_path / "p.onnx") == contents(tmp_path / "m.onnx")
    assert packed.tensors == len(DTYPES) + 2 and (tmp_path / "p.onnx").stat().st_size < 20_000
    assert (len(packed.files) > 5) == (shard_bytes is not None)
    onnx.checker.check_model(str(tmp_path / "p.onnx"))
    (tmp_path / "again").mkdir()
    again = pack(tmp_path / "p.onnx", tmp_path / "again", format=format, shard_bytes=shard_bytes)
    assert again == packed and contents(tmp_path / "again" / "p.onnx") == contents(tmp_path / "m.onnx")


def test_safetensors_files_keep_the_rules_and_are_aligned(tmp_path):
    from safetensors import safe_open

    onnx.save(all_dtypes(), tmp_path / "m.onnx")
    pack(tmp_path / "m.onnx", tmp_path / "p.onnx", shard_bytes=50_000)
    files = sorted(tmp_path.glob("p-*.safetensors"))
    found = {}
    for file in files:
        with safe_open(file, "np") as theirs:
            names = {name for name in theirs.keys() if not name.startswith(FILLER)}
        entries = parse(file.read_bytes(), file.name)
        assert names == entries.keys()
        assert min(entry.offset for entry in entries.values()) % 16384 == 0
        assert all(entry.offset % 64 == 0 for entry in entries.values())
        found |= dict.fromkeys(names, file.name)
    assert found.keys() == {*DTYPES, "typed", "typed64"}
    index = json.loads((tmp_path / "p.safetensors.index.json").read_text())
    assert index["weight_map"] == found
    declared = onnx.load(tmp_path / "m.onnx")  # by name, too: packed 4-bit numbers are bytes in the file
    for tensor in declared.graph.initializer:
        if tensor.name in found:
            for field in ("raw_data", "int32_data", "int64_data"):
                tensor.ClearField(field)
            tensor.data_location = TensorProto.EXTERNAL
            tensor.external_data.add(key="location", value="gone")
    model, store, _ = load_model(declared, tmp_path / "p.safetensors.index.json")
    wanted = contents(tmp_path / "m.onnx")
    for name in found:
        assert store.array(model.graph.initializers[name].const_value).tobytes() == wanted[name][1], name


def branching() -> onnx.ModelProto:
    """Weights in a branch, in a Constant and behind nodes that can be computed in advance; the same one thrice."""
    w = np.random.default_rng(3).standard_normal((40, 40)).astype(np.float32)
    then = helper.make_graph(
        [
            helper.make_node("Constant", [], ["k"], value=numpy_helper.from_array(w, "")),
            helper.make_node("Transpose", ["k"], ["kt"]),
            helper.make_node("MatMul", ["x", "kt"], ["a"]),
        ],
        "then",
        [],
        [helper.make_tensor_value_info("a", TensorProto.FLOAT, None)],
    )
    other = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w2"], ["b"])],
        "else",
        [],
        [helper.make_tensor_value_info("b", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(w, "w2")],
    )
    nodes = [
        helper.make_node("If", ["c"], ["h"], then_branch=then, else_branch=other),
        helper.make_node("Transpose", ["w"], ["wt"]),
        helper.make_node("MatMul", ["h", "wt"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 40]),
            helper.make_tensor_value_info("c", TensorProto.BOOL, []),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(w, "w"), numpy_helper.from_array(w[0], "small")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@FORMATS
@pytest.mark.parametrize("fold", [True, False])
def test_other_runtimes_see_the_same_model(tmp_path, format, fold, accelerator):
    onnx.save(branching(), tmp_path / "m.onnx")
    packed = pack(tmp_path / "m.onnx", tmp_path / "p.onnx", format=format, fold=fold)
    # Without folding, w, k and w2 are the same data; with it, w and k are stored transposed.
    assert (packed.tensors, packed.shared, packed.folded) == ((3, 1, 2) if fold else (3, 2, 0))
    assert ("Transpose" in str(onnx.load(tmp_path / "p.onnx", load_external_data=False))) != fold
    x = np.random.default_rng(4).standard_normal((2, 40)).astype(np.float32)
    for c in (True, False):
        feeds = {"x": x, "c": np.array(c)}
        theirs = [onnxruntime.InferenceSession(tmp_path / f"{name}.onnx").run(None, feeds)[0] for name in "mp"]
        np.testing.assert_array_equal(*theirs)
        ours = [ep.load(tmp_path / f"{name}.onnx", accelerator).run(None, feeds)[0] for name in "mp"]
        np.testing.assert_array_equal(*ours)
        np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-5, atol=1e-5)


@FORMATS
def test_every_weight_of_a_packed_model_is_borrowed(tmp_path, format):
    pytest.importorskip("jax")
    onnx.save(branching(), tmp_path / "m.onnx")
    pack(tmp_path / "m.onnx", tmp_path / "p.onnx", format=format)
    session = ep.load(tmp_path / "p.onnx", "jax")
    session.run(None, {"x": np.ones((2, 40), np.float32), "c": np.array(True)})
    weights = session.weights
    assert weights.totals.borrowed == len(weights) == 3 and "100 % borrowed" in str(session.plan)
    for weight in weights:
        assert weight.array.ctypes.data % 64 == 0
        assert weight.device_array.unsafe_buffer_pointer() == weight.array.ctypes.data


# Targets.


def test_a_failure_leaves_everything_as_it_was(tmp_path, monkeypatch):
    onnx.save(branching(), tmp_path / "m.onnx")
    pack(tmp_path / "m.onnx", tmp_path / "p.onnx")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(packing.os, "fsync", full)
    with pytest.raises(InvalidInput, match="cannot be written") as caught:
        pack(tmp_path / "m.onnx", tmp_path / "p.onnx", fold=False)
    assert "space" in caught.value.why and "nothing that was there is lost" in caught.value.fix
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_no_room_is_known_before_anything_is_written(tmp_path, monkeypatch):
    onnx.save(branching(), tmp_path / "m.onnx")
    monkeypatch.setattr(packing.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(InvalidInput, match="no room"):
        pack(tmp_path / "m.onnx", tmp_path / "p.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]


def test_wrong_arguments(tmp_path):
    onnx.save(branching(), tmp_path / "m.onnx")
    for arguments in ({"out": tmp_path / "none" / "p.onnx"}, {"out": tmp_path / "p.onnx", "format": "zip"}):
        with pytest.raises(InvalidInput):
            pack(tmp_path / "m.onnx", **arguments)
    with pytest.raises(InvalidModel):
        pack(tmp_path / "none.onnx", tmp_path / "p.onnx")


def test_a_model_that_does_not_run_here_can_be_packed_unfolded(tmp_path):
    model = branching()
    model.graph.node.append(helper.make_node("Frobnicate", ["x"], ["z"], domain="com.example"))
    model.opset_import.append(helper.make_opsetid("com.example", 1))
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(UnsupportedModel, match="Frobnicate") as caught:
        pack(tmp_path / "m.onnx", tmp_path / "p.onnx")
    assert "--no-fold" in caught.value.fix
    assert pack(tmp_path / "m.onnx", tmp_path / "p.onnx", fold=False).tensors == 3


def test_weights_that_lie_elsewhere_are_packed(tmp_path):
    from safetensors.numpy import save_file

    onnx.save(branching(), tmp_path / "m.onnx")
    other = np.eye(40, dtype=np.float32)
    save_file({"w": other}, tmp_path / "other.safetensors")
    pack(tmp_path / "m.onnx", tmp_path / "p.onnx", weights=tmp_path / "other.safetensors", fold=False)
    model, store, _ = load_model(tmp_path / "p.onnx")
    np.testing.assert_array_equal(store.array(model.graph.initializers["w"].const_value), other)
    arguments = ["--weights", str(tmp_path / "other.safetensors"), "--device", "host", "--json"]
    assert main(["run", str(tmp_path / "m.onnx"), *arguments]) == 0
    assert main(["run", str(tmp_path / "m.onnx"), "--weights", str(tmp_path / "none.safetensors")]) == 1


def test_names_that_are_reserved_or_repeated(tmp_path):
    data = [np.full(300, i, np.float32) for i in range(3)]
    names = (f"{FILLER}1", "__metadata__", "w")
    tensors = [numpy_helper.from_array(a, n) for a, n in zip(data, names, strict=True)]
    body = helper.make_graph(
        [helper.make_node("Identity", ["w"], ["b"])],
        "body",
        [],
        [helper.make_tensor_value_info("b", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(data[0] + 7, "w")],
    )
    nodes = [helper.make_node("Sum", list(names), ["s"])]
    nodes.append(helper.make_node("If", ["c"], ["y"], then_branch=body, else_branch=body))
    outputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in ("s", "y")]
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("c", TensorProto.BOOL, [])], outputs, tensors)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)]), tmp_path / "m.onnx")
    pack(tmp_path / "m.onnx", tmp_path / "p.onnx", fold=False)
    assert contents(tmp_path / "p.onnx") == contents(tmp_path / "m.onnx")
    assert len(parse((tmp_path / "p.safetensors").read_bytes(), "p")) == 4


def test_from_the_command_line(tmp_path, capsys):
    onnx.save(branching(), tmp_path / "m.onnx")
    arguments = ["pack", str(tmp_path / "m.onnx"), str(tmp_path / "p.onnx"), "--format", "external", "--shard", "4KiB"]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["files"] == ["p-00001-of-00002.data", "p-00002-of-00002.data"] and found["nbytes"] == 12800
    assert main(arguments) == 0
    assert "p.onnx: 3 tensors (1 shared, 2 computed)" in capsys.readouterr().out
    small = '<ir_version: 10, opset_import: ["": 21]> g (float[n] x) => (float[n] y) { y = Relu(x) }'
    onnx.save(onnx.parser.parse_model(small), tmp_path / "small.onnx")
    assert main(["pack", str(tmp_path / "small.onnx"), str(tmp_path / "p.onnx")]) == 0
    out, err = capsys.readouterr()
    assert "p.onnx: no tensor is large enough for a data file" in out and not err
    with pytest.raises(SystemExit):
        main([*arguments, "--shard", "lots"])
    assert main(["pack", str(tmp_path / "none.onnx"), str(tmp_path)]) == 1
