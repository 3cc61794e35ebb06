"""Do damaged model files, headers and offsets lead to clear errors only? Many mutations, in child processes.

    python benchmarks/fuzz_weights.py --mutations 20000

Each mutation damages one file of a model: the protobuf with its weights inside, a protobuf that refers to external
data, a safetensors file, or an index of shards; then the model is loaded and every byte of its weights is read.
Allowed are a result, `EpError`, and nothing else: another exception is a defect, and so is the end of the child.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import struct
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ep.errors import EpError
from ep.loader import load_model
from ep.packing import pack
from ep.passes import prepare

ROWS = 40
BATCH = 1000  # mutations of one child
EDGES = (0, 1, 2, 7, 8, 63, 64, 127, 128, 255, 1 << 15, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32)
EDGES += ((1 << 53) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64, 1 << 70, -1, -8, -(1 << 63))
WORDS = (
    "..",
    "../w.data",
    "/etc/hostname",
    "",
    ".",
    "\0",
    "\0model",
    "a" * 5000,
    "é",
    "CON",
    "p.safetensors",
    "w.data",
)


def write_models(folder: Path) -> list[tuple[str, str, Any]]:
    """(file to damage, model to load, its `weights`) for each kind of file."""
    generator = np.random.default_rng(0)
    weights = {n: generator.standard_normal((ROWS, ROWS)).astype(np.float32) for n in ("a", "b", "c")}
    nodes = [
        helper.make_node("Constant", [], ["k"], value=numpy_helper.from_array(weights["c"] + 1, "k")),
        helper.make_node("MatMul", ["x", "a"], ["xa"]),
        helper.make_node("MatMul", ["xa", "b"], ["xb"]),
        helper.make_node("MatMul", ["xb", "k"], ["xk"]),
        helper.make_node("Add", ["xk", "c"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [ROWS, ROWS])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [ROWS, ROWS])],
        [numpy_helper.from_array(a, n) for n, a in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(model, folder / "m.onnx")
    pack(folder / "m.onnx", folder / "w.onnx", format="external")
    pack(folder / "m.onnx", folder / "p.onnx", shard_bytes=10_000)
    pack(folder / "m.onnx", folder / "s.onnx")
    turned = helper.make_node("Gemm", ["x", "a"], ["xa"], transB=1)  # JAX wants that weight in another layout
    model.graph.node[1].CopyFrom(turned)
    onnx.save(model, folder / "t.onnx")
    pack(folder / "t.onnx", folder / "k.onnx", provider="jax")
    index = "p.safetensors.index.json"
    return [
        ("m.onnx", "m.onnx", None),
        ("w.onnx", "w.onnx", None),
        ("w.data", "w.onnx", None),
        ("s.safetensors", "m.onnx", "s.safetensors"),
        ("s.onnx", "s.onnx", None),
        ("k.onnx", "k.onnx", None),
        (index, "m.onnx", index),
    ]


def mutate(content: bytes, kind: str, dice: random.Random) -> bytes:
    """The bytes with one to three damages; text that describes data is damaged by its meaning, too."""
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        if kind.endswith((".safetensors", ".json")) and dice.random() < 0.7:
            content = _json(content, kind, dice)
        elif kind.endswith(".onnx") and dice.random() < 0.5:
            content = _entries(content, dice)
        else:
            content = _bytes(content, dice)
    return content


def _bytes(content: bytes, dice: random.Random) -> bytes:
    if not content:
        return b"\0"
    at = dice.randrange(min(len(content), dice.choice((16, 400, len(content)))))
    end = min(len(content), at + dice.choice((1, 2, 8, 100)))
    return {
        0: lambda: content[:at] + bytes([content[at] ^ 1 << dice.randrange(8)]) + content[at + 1 :],
        1: lambda: content[:at] + dice.randbytes(end - at) + content[end:],
        2: lambda: content[:at] + content[end:],
        3: lambda: content[:at] + dice.randbytes(end - at) + content[at:],
        4: lambda: content[:at],
        5: lambda: content[:at] + b"\xff" * (end - at) + content[end:],
        6: lambda: content + content[at:end],
    }[dice.randrange(7)]()


def _json(content: bytes, kind: str, dice: random.Random) -> bytes:
    """A header or an index with one value replaced, one key gone, or the length of the header wrong."""
    is_header = kind.endswith(".safetensors")
    if is_header and dice.random() < 0.2:
        return struct.pack("<Q", dice.choice(EDGES) % (1 << 64)) + content[8:]
    try:
        length = int.from_bytes(content[:8], "little") if is_header else len(content)
        start = 8 if is_header else 0
        tree = json.loads(content[start : start + length])
        root: Any = {"": tree}
        holder: Any = root
        key: Any = ""
        while isinstance(holder[key], dict | list) and holder[key] and dice.random() < 0.9:
            holder = holder[key]
            key = dice.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        if dice.random() < 0.15 and isinstance(holder, dict):
            del holder[key]
        else:
            holder[key] = _value(holder[key], dice)
        text = json.dumps(root.get("", {})).encode()
    except (ValueError, KeyError, IndexError, RecursionError, TypeError):
        return _bytes(content, dice)
    return struct.pack("<Q", len(text)) + text + content[8 + length :] if is_header else text


def _value(old: Any, dice: random.Random) -> Any:
    near = [old + dice.choice((-64, -1, 1, 64))] if type(old) is int else []
    kinds = ("F32", "F16", "U8", "F4", "I64", "X", "C64", "BF16")
    others = [None, [], {}, 1.5, True, math.nan, [0, dice.choice(EDGES)]]
    return dice.choice([*near, *near, dice.choice(EDGES), dice.choice(kinds), dice.choice(WORDS), *others])


def _entries(content: bytes, dice: random.Random) -> bytes:
    """A model of which a tensor has another place, shape or type."""
    try:
        model = onnx.ModelProto.FromString(content)
    except Exception:  # noqa: BLE001 - it was damaged before
        return _bytes(content, dice)
    if model.metadata_props and dice.random() < 0.5:
        entry = dice.choice(model.metadata_props)
        text = entry.value if isinstance(entry.value, bytes) else entry.value.encode()  # bytes: damaged before
        entry.value = _json(text, ".json", dice).decode("utf-8", "replace")
        return bytes(model.SerializeToString())
    tensors = list(model.graph.initializer) + [n.attribute[0].t for n in model.graph.node if n.op_type == "Constant"]
    if not tensors:
        return _bytes(content, dice)
    tensor = dice.choice(tensors)
    what = dice.randrange(5)
    if what == 0 and tensor.dims:
        tensor.dims[dice.randrange(len(tensor.dims))] = max(-(1 << 63), min(dice.choice(EDGES), (1 << 63) - 1))
    elif what == 1:
        tensor.data_type = dice.randrange(-1, 40)
    elif what == 2:
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key=dice.choice(("location", "offset", "length", "x")), value=dice.choice(WORDS))
    elif tensor.external_data:
        entry = dice.choice(tensor.external_data)
        entry.value = dice.choice((str(dice.choice(EDGES)), dice.choice(WORDS), "1e3", "０", " 64", "0x40"))
    else:
        tensor.raw_data = tensor.raw_data[: dice.randrange(len(tensor.raw_data) + 1)] if tensor.raw_data else b"\1"
    return model.SerializeToString()


def attempt(model: Path, weights: Path | None) -> str:
    """Loads a model and reads every weight: "fine", or the kind of error."""
    try:
        loaded, store, name = load_model(model, weights)
        graph = prepare(loaded, store, name)
        for array in graph.constants.values():
            origin = store.origin(array)
            if origin is not None and array.size:
                (source,) = (s for s in store.sources if s.start <= array.ctypes.data < s.stop)
                assert array.ctypes.data + array.nbytes <= source.stop, "an array reaches past the end of its file"
            array.tobytes()
        for (digest, *_), result in store.results.items():
            found = result.of(store.content(result.place))
            assert store.origin(found) is not None or not found.size, digest
            found.tobytes()
        return "fine"
    except EpError as error:
        assert error.what and str(error)
        return type(error).__name__


def run(first: int, count: int) -> Counter[str]:
    """What mutations `first` to `first + count` led to; neither a result nor an `EpError` is a DEFECT."""
    seen: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as text, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = Path(text)
        cases = write_models(folder)
        contents = {name: (folder / name).read_bytes() for name, _, _ in cases}
        for number in range(first, first + count):
            dice = random.Random(number)
            name, model, weights = cases[number % len(cases)]
            (folder / "next").write_bytes(mutate(contents[name], name, dice))
            (folder / "next").replace(folder / name)
            try:
                seen[f"{name}: {attempt(folder / model, weights and folder / weights)}"] += 1
            except Exception as defect:  # noqa: BLE001 - that is what is looked for
                where = traceback.extract_tb(defect.__traceback__)[-1]
                text = f"{type(defect).__name__}: {defect} ({Path(where.filename).name}:{where.lineno})"
                seen[f"{name}: DEFECT {text[:300]}, mutation {number}"] += 1
            (folder / name).unlink()
            (folder / name).write_bytes(contents[name])
    return seen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(run(options.first, options.mutations)))
        return 0
    seen: Counter[str] = Counter()
    end = options.first + options.mutations
    for first in range(options.first, end, BATCH):
        count = min(BATCH, end - first)
        command = [sys.executable, __file__, "--child", "--first", str(first), "--mutations", str(count)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(f"mutations {first} to {first + count}: exit code {done.returncode}\n{done.stderr[-3000:]}")
            return 1
        seen.update(json.loads(done.stdout))
        print(f"{first + count - options.first} mutations", file=sys.stderr, flush=True)
    for key, number in sorted(seen.items()):
        print(f"{number:7} {key}")
    if any("DEFECT" in key for key in seen):
        return 1
    print(f"{seen.total()} mutations: no crash, nothing read outside, errors all of our own kinds")
    return 0


if __name__ == "__main__":
    sys.exit(main())
