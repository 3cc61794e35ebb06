"""Are weights found where they lie, without copies, and are lying files refused?"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import ep
from ep.errors import InvalidInput, InvalidModel
from ep.loader import load_model
from ep.safetensors import DTYPES, parse
from ep.wire import IN_FILE, skeleton

SIZE = 600  # elements: large enough to be mapped, in every dtype


def matrix(seed: int, rows: int = SIZE, columns: int = 4, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(dtype)


def product(*weights: TensorProto, inputs: tuple[Any, ...] = (), name: str = "w") -> onnx.ModelProto:
    """y = x · w, with these initializers."""
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", name], ["y"], name="product")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", SIZE]), *inputs],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])],
        list(weights),
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def outside(name: str, array: np.ndarray, location: str, **place: int) -> TensorProto:
    """A tensor whose data lie in another file."""
    tensor = TensorProto(name=name, dims=array.shape, data_type=helper.np_dtype_to_tensor_dtype(array.dtype))
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, **place}.items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> Path:
    from safetensors.numpy import save_file

    save_file(tensors, path)
    return path


def runs(source: Any, w: np.ndarray, **arguments: Any) -> None:
    """The model of `product` gives x · w."""
    x = matrix(9, 2, SIZE)
    (y,) = ep.load(source, "host", **arguments).run(None, {"x": x})
    np.testing.assert_allclose(y, x @ w, rtol=1e-5, atol=1e-4)


# The model file itself.

STORED = [
    *(("raw", n) for n in ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "bool", "int64", "complex64")),
    *(("raw", n) for n in ("float8_e4m3fn", "float8_e5m2", "int4", "uint4", "float4_e2m1fn")),
    *(("numbers", n) for n in ("float32", "float64", "int32", "int64", "float16", "complex64", "bool", "uint64")),
]


@pytest.mark.parametrize(("form", "name"), STORED, ids=lambda v: v)
def test_every_way_to_store_numbers_in_a_model_file(tmp_path, form, name):
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    array = np.arange(2 * SIZE * 4).reshape(SIZE, 8).astype(np.float64).__mod__(7).astype(dtype)
    code = helper.np_dtype_to_tensor_dtype(dtype)
    if form == "raw":
        tensor = numpy_helper.from_array(array, "w")
    else:
        tensor = helper.make_tensor("w", code, array.shape, array.ravel())
    path = tmp_path / "m.onnx"
    onnx.save(product(tensor), path)
    model, store, _ = load_model(path)
    read = store.array(model.graph.initializers["w"].const_value)
    assert read.dtype == dtype and read.tobytes() == array.tobytes()
    as_stored = form == "raw" or name in ("float32", "float64", "complex64")
    if as_stored and not name.endswith(("int4", "e2m1fn")):  # those are unpacked
        file, offset = store.origin(read)
        assert file == "m.onnx" and path.read_bytes()[offset:].startswith(array.tobytes())
        assert not read.flags.writeable
    assert len(skeleton(path.read_bytes())) < 1000 or not as_stored


def nested() -> onnx.ModelProto:
    """Large tensors everywhere: initializer, Constant, in a branch, in a function, and a small one of each."""
    big, small = matrix(1), np.ones(4, np.float32)
    branch = [
        helper.make_graph(
            [helper.make_node("MatMul", ["x", "wb"], ["yb"])],
            name,
            [],
            [helper.make_tensor_value_info("yb", TensorProto.FLOAT, None)],
            [numpy_helper.from_array(big * scale, "wb")],
        )
        for name, scale in (("then", 1), ("else", -1))
    ]
    nodes = [
        helper.make_node("If", ["c"], ["h"], then_branch=branch[0], else_branch=branch[1]),
        helper.make_node("Constant", [], ["k"], value=numpy_helper.from_array(big[:, :4], "")),
        helper.make_node("MatMul", ["x", "k"], ["xk"]),
        helper.make_node("F", ["x"], ["f"], domain="d"),
        helper.make_node("Sum", ["h", "xk", "f", "s", "b"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, SIZE]),
            helper.make_tensor_value_info("c", TensorProto.BOOL, []),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, 4])],
        [numpy_helper.from_array(small, "s"), numpy_helper.from_array(matrix(2, 4, 4), "b")],
    )
    inner = [
        helper.make_node("Constant", [], ["k"], value=numpy_helper.from_array(big * 2, "")),
        helper.make_node("MatMul", ["x", "k"], ["y"]),
    ]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("d", 1)]
    function = helper.make_function("d", "F", ["x"], ["y"], inner, opsets[:1])
    return helper.make_model(graph, opset_imports=opsets, ir_version=10, functions=[function])


def test_tensors_are_found_in_branches_constants_and_functions(tmp_path, accelerator):
    path, model = tmp_path / "m.onnx", nested()
    onnx.save(model, path)
    proto = onnx.ModelProto.FromString(skeleton(path.read_bytes()))
    places = str(proto).count('key: "location"')
    assert places == 4 and proto.ByteSize() < 5000
    x, big = matrix(3, 4, SIZE), matrix(1)
    feeds = {"x": x, "c": np.array(False)}
    expected = x @ big * (-1 + 1 + 2) + 1 + matrix(2, 4, 4)
    (y,) = ep.load(path, accelerator).run(None, feeds)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-3)


def test_a_skeleton_differs_in_nothing_but_the_data(tmp_path):
    content = nested().SerializeToString()
    proto, whole = onnx.ModelProto.FromString(skeleton(content)), nested()
    fill_in(proto, content)
    assert proto == whole


def fill_in(message: Any, content: bytes) -> None:
    """Puts the data back, in every TensorProto of a message."""
    if isinstance(message, TensorProto) and message.data_location == TensorProto.EXTERNAL:
        place = {entry.key: entry.value for entry in message.external_data}
        assert place["location"] == IN_FILE
        message.raw_data = content[int(place["offset"]) :][: int(place["length"])]
        message.ClearField("external_data")
        message.ClearField("data_location")
    for field, value in message.ListFields():
        if field.message_type is not None:
            for item in value if hasattr(value, "__len__") else [value]:
                fill_in(item, content)


def test_bytes_are_not_copied():
    content = product(numpy_helper.from_array(matrix(1), "w")).SerializeToString()
    model, store, _ = load_model(content)
    array = store.array(model.graph.initializers["w"].const_value)
    start = np.frombuffer(content, np.uint8).ctypes.data
    assert start <= array.ctypes.data < start + len(content)
    runs(content, matrix(1))


def test_raw_data_of_the_wrong_size():
    tensor = numpy_helper.from_array(matrix(1), "w")
    for data in (tensor.raw_data[:-4], tensor.raw_data + b"\0", tensor.raw_data[:8], b""):
        wrong = TensorProto()
        wrong.CopyFrom(tensor)
        wrong.raw_data = data
        with pytest.raises(InvalidModel, match="'w'"):
            ep.load(product(wrong).SerializeToString(), "host")


# External data.


def external(tmp_path: Path, location: str = "w.bin", **place: int) -> Path:
    (tmp_path / "w.bin").write_bytes(matrix(1).tobytes())
    path = tmp_path / "m.onnx"
    onnx.save(product(outside("w", matrix(1), location, **place)), path)
    return path


def test_external_data_are_borrowed(tmp_path):
    path = external(tmp_path)
    model, store, _ = load_model(path)
    tensor = model.graph.initializers["w"].const_value
    buffer, array = store.buffer(tensor), store.array(tensor)
    assert buffer.is_borrowed and buffer.as_ptr() == array.ctypes.data and len(buffer) == array.nbytes
    assert buffer.alignment >= 4096 and store.origin(array) == ("w.bin", 0)
    del model, store, tensor, buffer  # the array keeps the map alive
    np.testing.assert_array_equal(array, matrix(1))
    runs(path, matrix(1))


@pytest.mark.parametrize(
    ("location", "place"),
    [
        ("../w.bin", {}),
        ("/etc/passwd", {}),
        ("sub/../../w.bin", {}),
        ("link", {}),
        ("circle", {}),
        ("nul\0", {}),
        ("w.bin", {"offset": 8}),
        ("w.bin", {"offset": 1 << 70}),
        ("w.bin", {"offset": -4}),
        ("w.bin", {"length": 4}),
        ("missing.bin", {}),
        ("pipe", {}),
        (".", {}),
        ("", {}),
    ],
)
def test_external_data_that_are_not_there(tmp_path, location, place):
    secret = tmp_path / "secret.bin"
    secret.write_bytes(matrix(1).tobytes())
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "link").symlink_to(secret)
    (folder / "circle").symlink_to("circle")
    os.mkfifo(folder / "pipe")
    with pytest.raises(InvalidModel, match="'w'") as caught:
        ep.load(external(folder, location, **place), "host")
    assert caught.value.fix


def test_a_model_that_is_a_link_has_its_data_beside_its_target(tmp_path):
    """The cache of a model hub: both are links into a folder of blobs."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    external(blobs, "m.data").rename(blobs / "1")
    (blobs / "w.bin").rename(blobs / "2")
    (snapshot / "m.onnx").symlink_to(blobs / "1")
    (snapshot / "m.data").symlink_to(blobs / "2")
    runs(snapshot / "m.onnx", matrix(1))


def test_offsets_beyond_4_gib(tmp_path):
    """In files with holes, which take no room on the disk."""
    far, w = (4 << 30) + 4096, matrix(1)
    with (tmp_path / "w.bin").open("wb") as file:
        file.seek(far)
        file.write(w.tobytes())
    onnx.save(product(outside("w", w, "w.bin", offset=far, length=w.nbytes)), tmp_path / "m.onnx")
    runs(tmp_path / "m.onnx", w)
    first = header({"hole": entry("U8", [far], 0, far), "w": entry("F32", list(w.shape), far, far + w.nbytes)})
    with (tmp_path / "w.safetensors").open("wb") as file:
        file.write(first)
        file.seek(len(first) + far)
        file.write(w.tobytes())
    runs(product(outside("w", w, "gone")).SerializeToString(), w, weights=tmp_path / "w.safetensors")


def test_a_file_that_becomes_shorter_is_noticed_before_it_is_read(tmp_path, accelerator):
    session = ep.load(external(tmp_path), accelerator)
    os.truncate(tmp_path / "w.bin", 100)
    with pytest.raises(InvalidModel, match="shorter"):
        session.run(None, {"x": matrix(9, 2, SIZE)})


def test_copies_outlive_their_file(tmp_path):
    path = external(tmp_path)
    session = ep.load(path, "host", options={"weights": "copy"})
    os.truncate(tmp_path / "w.bin", 100)
    os.truncate(path, 10)
    x = matrix(9, 2, SIZE)
    np.testing.assert_allclose(session.run(None, {"x": x})[0], x @ matrix(1), rtol=1e-5, atol=1e-4)
    with pytest.raises(InvalidInput, match="'map' or 'copy'"):
        ep.load(path, options={"weights": "lazy"})


# safetensors.


def test_named_weights_replace_initializers_and_become_of_inputs(tmp_path):
    weights = write_safetensors(tmp_path / "w.safetensors", {"w": matrix(1), "unused": matrix(2)})
    inner = product(numpy_helper.from_array(matrix(5), "w")).SerializeToString()
    runs(inner, matrix(1), weights=weights)
    declared = helper.make_tensor_value_info("w", TensorProto.FLOAT, [SIZE, 4])
    as_input = product(inputs=(declared,)).SerializeToString()
    runs(as_input, matrix(1), weights=str(weights))
    assert [i.name for i in ep.load(as_input, "host", weights=weights).inputs] == ["x"]
    elsewhere = product(outside("w", matrix(1), "nowhere.bin")).SerializeToString()
    runs(elsewhere, matrix(1), weights=[weights])


def test_onnx_safetensors_convention(tmp_path):
    """External data may lie in a safetensors file: an offset after its header."""
    write_safetensors(tmp_path / "m.safetensors", {"a": matrix(2), "w": matrix(1)})
    entry = parse((tmp_path / "m.safetensors").read_bytes(), "m")["w"]
    place = {"offset": entry.offset, "length": entry.nbytes}
    onnx.save(product(outside("w", matrix(1), "m.safetensors", **place)), tmp_path / "m.onnx")
    runs(tmp_path / "m.onnx", matrix(1))


def test_shards(tmp_path):
    first, second = write_safetensors(tmp_path / "1.safetensors", {"a": matrix(2)}), tmp_path / "2.safetensors"
    write_safetensors(second, {"w": matrix(1)})
    index = tmp_path / "m.safetensors.index.json"
    weight_map = {"a": first.name, "w": second.name}
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    model = product(outside("w", matrix(1), "nowhere.bin")).SerializeToString()
    runs(model, matrix(1), weights=index)
    for wrong in ({"w": first.name}, {"w": "../2.safetensors"}, {"w": 1}, {"w": "none.safetensors"}, ["w"]):
        index.write_text(json.dumps({"weight_map": wrong}))
        with pytest.raises(InvalidModel):
            ep.load(model, "host", weights=index)


def test_weights_of_another_model(tmp_path):
    model = product(numpy_helper.from_array(matrix(5), "w")).SerializeToString()
    for tensors, fact in (
        ({"w": matrix(1, 8)}, "F32[8, 4] in the file, and FLOAT[600, 4]"),
        ({"w": matrix(1).astype(np.float16)}, "F16"),
        ({"v": matrix(1)}, "no such initializer"),
    ):
        with pytest.raises(InvalidModel) as caught:
            ep.load(model, "host", weights=write_safetensors(tmp_path / "w.safetensors", tensors))
        assert fact in str(caught.value), str(caught.value)
    with pytest.raises(InvalidModel, match="cannot be read"):
        ep.load(model, "host", weights=tmp_path / "none.safetensors")


def header(fields: Any, data: int = 0, length: int | None = None) -> bytes:
    text = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + bytes(data)


def entry(dtype: str, shape: Any, *offsets: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


SCALAR = entry("F32", [], 0, 4)
HOSTILE = {
    "empty": b"",
    "short": b"1234567",
    "length past the end": header({}, length=100),
    "length beyond any file": header({}, length=(1 << 64) - 1),
    "no JSON": header(b"{"),
    "deep": header(b'{"a":' + b"[" * 200_000),
    "no object": header([]),
    "no text": header(b"\xff\xfe{}"),
    "duplicate": header(b'{"a":%b,"a":%b}' % ((json.dumps(SCALAR).encode(),) * 2), 4),
    "duplicate key": header(b'{"a":{"dtype":"F32","dtype":"F32","shape":[],"data_offsets":[0,4]}}', 4),
    "unknown dtype": header({"a": entry("F33", [], 0, 4)}, 4),
    "dtype is a list": header({"a": {**SCALAR, "dtype": ["F32"]}}, 4),
    "no shape": header({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, 4),
    "negative": header({"a": entry("F32", [-1, -1], 0, 4)}, 4),
    "float shape": header({"a": entry("F32", [1.0], 0, 4)}, 4),
    "bool shape": header({"a": entry("F32", [True], 0, 4)}, 4),
    "many dims": header({"a": entry("F32", [1] * 65, 0, 4)}, 4),
    "huge": header({"a": entry("F32", [1 << 62, 1 << 62], 0, 4)}, 4),
    "three offsets": header({"a": entry("F32", [], 0, 4, 4)}, 4),
    "backwards": header({"a": entry("F32", [], 4, 0)}, 4),
    "past the end": header({"a": entry("F32", [2], 0, 8)}, 4),
    "wrong size": header({"a": entry("F32", [2], 0, 4)}, 4),
    "half a byte": header({"a": entry("F4", [1], 0, 1)}, 1),
    "overlap": header({"a": SCALAR, "b": entry("F32", [], 2, 6)}, 6),
    "alias": header({"a": SCALAR, "b": SCALAR}, 4),
    "hole": header({"a": SCALAR, "b": entry("F32", [], 8, 12)}, 12),
    "rest": header({"a": SCALAR}, 5),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_headers_are_refused(content):
    with pytest.raises(InvalidModel, match="is not a valid safetensors file"):
        parse(content, "w.safetensors")


def test_every_dtype_of_the_format_is_where_the_library_finds_it():
    from safetensors import deserialize

    fields, at = {}, 0
    for dtype, (bits, _) in DTYPES.items():
        for shape in ([2, 8], [0, 3]):
            nbytes = math.prod(shape) * bits // 8
            fields[f"{dtype}{shape}"] = entry(dtype, shape, at, at + nbytes)
            at += nbytes
    content = header(fields) + np.random.default_rng(0).bytes(at)
    found = parse(content, "m")
    theirs = dict(deserialize(content))
    assert theirs.keys() == found.keys()
    for name, one in found.items():
        assert theirs[name]["dtype"] == one.dtype and tuple(theirs[name]["shape"]) == one.shape
        assert bytes(theirs[name]["data"]) == content[one.offset :][: one.nbytes]


def test_a_hundred_thousand_tensors():
    fields = {f"t{i}": entry("F32", [], 4 * i, 4 * i + 4) for i in range(100_000)}
    assert len(parse(header(fields, 400_000), "m")) == 100_000


def test_mutations_lead_to_results_or_to_errors_of_our_own():
    """A short form of `benchmarks/fuzz_weights.py`, which has thousands."""
    spec = importlib.util.spec_from_file_location(
        "fuzz_weights", Path(__file__).parents[1] / "benchmarks/fuzz_weights.py"
    )
    fuzz = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fuzz)
    seen = fuzz.run(first=0, count=300)
    assert seen.total() == 300 and [key for key in seen if "DEFECT" in key] == []
    assert sum(n for key, n in seen.items() if key.endswith("fine")) > 20
    assert sum(n for key, n in seen.items() if key.endswith("InvalidModel")) > 100
