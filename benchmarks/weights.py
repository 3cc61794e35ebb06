"""How much memory and time do weights cost? Each measurement in a process of its own, private and mapped memory apart.

    python benchmarks/weights.py            # all tables, a few minutes, 8 GiB of disk in the temporary folder
    python benchmarks/weights.py --only memory

- memory: a model of 384 MiB of weights as aligned external data, as safetensors and as one file; then one whose weights
  XLA wants in another layout, as safetensors, as one file, and packed with `--for jax`. `RssAnon` is private memory,
  `RssFile` are mapped pages, which the system can drop. Growth is counted from after the imports and after the run of a
  tiny model, so that what a library needs anyway is not counted.
- start: seconds from `load` to the first output in a fresh process, of an encoder of 90 MB and of a convolutional net
  of 200 MB, without and with compiled code of an earlier process.
- large: models of 2.25 GiB are loaded, run and packed, one of them with weights that XLA wants in another layout; the
  most memory of the process against the model's size.

Linux only: it reads /proc.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from timing import machine

MIB = 1 << 20
SIDE = 2048  # of the square matrices of the memory table: 16 MiB each
COUNT = 24
RUNTIMES = ("ep jax", "ep mlx", "onnxruntime", "onnxruntime, prepacking off", "jaxonnxruntime")
# In the last three, every matrix is to be turned before it is multiplied, as exporters write linear layers.
FILES = ("external", "safetensors", "one file", "turned", "turned, one file", "turned, for jax")


# Models.


def save(path: Path, nodes: list[Any], weights: dict[str, Any], inputs: list[Any], output: str, outside: bool) -> None:
    """Writes a model; `weights` are shapes, filled with small random numbers, one after the other."""
    from onnx import TensorProto, helper

    tensors = []
    generator = np.random.default_rng(0)
    with (path.with_suffix(".bin") if outside else Path(os.devnull)).open("wb") as data:
        for name, shape in weights.items():
            values = generator.standard_normal(shape, np.float32)
            values *= np.float32(1 / np.sqrt(max(1, np.prod(shape[1:]) if len(shape) > 2 else shape[0])))
            tensor = TensorProto(name=name, dims=shape, data_type=TensorProto.FLOAT)
            if outside:
                tensor.data_location = TensorProto.EXTERNAL
                place = {"location": path.with_suffix(".bin").name, "offset": data.tell(), "length": values.nbytes}
                for key, value in place.items():
                    tensor.external_data.add(key=key, value=str(value))
                data.write(values)
            else:
                tensor.raw_data = values.tobytes()
            tensors.append(tensor)
    outputs = [helper.make_tensor_value_info(output, TensorProto.FLOAT, None)]
    graph = helper.make_graph(nodes, path.stem, inputs, outputs, tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    path.write_bytes(model.SerializeToString())


def chain(path: Path, side: int, count: int, *, outside: bool, turned: bool = False) -> None:
    """Products with square matrices, one after the other; with `turned`, with their transposes."""
    from onnx import TensorProto, helper

    values = ["x", *(f"h{i}" for i in range(count))]
    kind = {"op_type": "Gemm", "transB": 1} if turned else {"op_type": "MatMul"}
    nodes = [helper.make_node(inputs=[values[i], f"w{i}"], outputs=[values[i + 1]], **kind) for i in range(count)]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, side])]
    save(path, nodes, {f"w{i}": (side, side) for i in range(count)}, inputs, values[-1], outside)


def encoder(path: Path) -> None:
    """Six layers of a sentence encoder, 384 wide, with 12 heads and a vocabulary of 30,522: 90 MB."""
    from onnx import TensorProto, helper

    width, heads, inner, length = 384, 12, 1536, 64
    nodes, weights = [], {"table": (30522, width)}
    node = helper.make_node

    def linear(x: str, name: str, inside: int, outside: int) -> str:
        weights.update({f"{name}.w": (inside, outside), f"{name}.b": (outside,)})
        nodes.extend([node("MatMul", [x, f"{name}.w"], [f"{name}.m"]), node("Add", [f"{name}.m", f"{name}.b"], [name])])
        return name

    def norm(x: str, name: str) -> str:
        weights.update({f"{name}.g": (width,), f"{name}.b": (width,)})
        nodes.append(node("LayerNormalization", [x, f"{name}.g", f"{name}.b"], [name], axis=-1))
        return name

    def constant(name: str, values: list[int]) -> str:
        nodes.append(node("Constant", [], [name], value_ints=values))
        return name

    split, joined = constant("split", [0, length, heads, width // heads]), constant("joined", [0, length, width])
    nodes.append(node("Gather", ["table", "ids"], ["h"]))
    x = "h"
    for i in range(6):
        parts = {}
        for part, order in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])):
            y = linear(x, f"{part}{i}", width, width)
            nodes.append(node("Reshape", [y, split], [f"{y}.r"]))
            nodes.append(node("Transpose", [f"{y}.r"], [f"{y}.t"], perm=order))
            parts[part] = f"{y}.t"
        nodes.append(node("MatMul", [parts["q"], parts["k"]], [f"s{i}"]))
        nodes.append(node("Softmax", [f"s{i}"], [f"p{i}"], axis=-1))
        nodes.append(node("MatMul", [f"p{i}", parts["v"]], [f"a{i}"]))
        nodes.append(node("Transpose", [f"a{i}"], [f"at{i}"], perm=[0, 2, 1, 3]))
        nodes.append(node("Reshape", [f"at{i}", joined], [f"ar{i}"]))
        nodes.append(node("Add", [linear(f"ar{i}", f"o{i}", width, width), x], [f"r{i}"]))
        x = norm(f"r{i}", f"n{i}")
        nodes.append(node("Gelu", [linear(x, f"u{i}", width, inner)], [f"g{i}"]))
        nodes.append(node("Add", [linear(f"g{i}", f"d{i}", inner, width), x], [f"f{i}"]))
        x = norm(f"f{i}", f"m{i}")
    inputs = [helper.make_tensor_value_info("ids", TensorProto.INT64, [1, length])]
    save(path, nodes, weights, inputs, x, False)


def convolutional(path: Path) -> None:
    """A residual net of bottlenecks with 3, 4, 28 and 3 blocks on 224 × 224 pixels: 200 MB."""
    from onnx import TensorProto, helper

    nodes: list[Any] = []
    weights: dict[str, Any] = {}

    def conv(x: str, name: str, inside: int, outside: int, size: int, stride: int = 1, relu: bool = True) -> str:
        weights.update({f"{name}.w": (outside, inside, size, size), f"{name}.b": (outside,)})
        fields = {"kernel_shape": [size] * 2, "strides": [stride] * 2, "pads": [size // 2] * 4}
        nodes.append(helper.make_node("Conv", [x, f"{name}.w", f"{name}.b"], [name], **fields))
        if not relu:
            return name
        nodes.append(helper.make_node("Relu", [name], [f"{name}.r"]))
        return f"{name}.r"

    x, inside = conv("x", "stem", 3, 64, 7, 2), 64
    nodes.append(helper.make_node("MaxPool", [x], ["pool"], kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4))
    x = "pool"
    for stage, (blocks, middle) in enumerate(((3, 64), (4, 128), (28, 256), (3, 512))):
        for block in range(blocks):
            name, outside = f"s{stage}b{block}", 4 * middle
            stride = 2 if stage and not block else 1
            shortcut = x if block else conv(x, f"{name}.p", inside, outside, 1, stride, relu=False)
            y = conv(conv(x, f"{name}.1", inside, middle, 1), f"{name}.2", middle, middle, 3, stride)
            y = conv(y, f"{name}.3", middle, outside, 1, relu=False)
            nodes.append(helper.make_node("Mul", [y, "small"], [f"{name}.s"]))
            nodes.append(helper.make_node("Add", [f"{name}.s", shortcut], [name]))
            nodes.append(helper.make_node("Relu", [name], [f"{name}.r"]))
            x, inside = f"{name}.r", outside
    weights["small"] = (1,)
    nodes.append(helper.make_node("GlobalAveragePool", [x], ["mean"]))
    nodes.append(helper.make_node("Flatten", ["mean"], ["flat"]))
    weights["head"] = (inside, 1000)
    nodes.append(helper.make_node("MatMul", ["flat", "head"], ["y"]))
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 224, 224])]
    save(path, nodes, weights, inputs, "y", False)


# Runtimes, inside a child.


def opener(runtime: str, options: dict[str, str]) -> Callable[[str], Callable[[dict[str, Any]], Any]]:
    """Path → session → run, for one runtime, with its libraries imported."""
    if runtime.startswith("ep "):
        import onnx_ir.passes.common  # noqa: F401 - what the first load would import otherwise

        import ep.ops
        import ep.session
        from ep.discovery import provider

        provider(runtime.split()[1]).shutdown()

        def open_ep(path: str) -> Any:
            session = ep.load(path, runtime.split()[1], options=options)
            sessions.append(session)
            return lambda feeds: session.run(None, feeds)

        return open_ep
    if runtime.startswith("onnxruntime"):
        import onnxruntime

        settings = onnxruntime.SessionOptions()
        if "off" in runtime:
            settings.add_session_config_entry("session.disable_prepacking", "1")

        def open_ort(path: str) -> Any:
            session = onnxruntime.InferenceSession(path, settings, providers=["CPUExecutionProvider"])
            return lambda feeds: session.run(None, feeds)

        return open_ort
    import jax
    import jaxonnxruntime.backend
    import onnx

    def open_other(path: str) -> Any:
        prepared = jaxonnxruntime.backend.Backend.prepare(onnx.load(path))
        return lambda feeds: jax.block_until_ready(prepared.run(list(feeds.values())))

    return open_other


sessions: list[Any] = []


def resident() -> dict[str, int]:
    """Private and mapped bytes of this process, and the most that it ever had."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {key: int(lines[key].split()[0]) * 1024 for key in ("RssAnon", "RssFile", "VmHWM")}


def child_memory(runtime: str, path: str, tiny: str) -> dict[str, Any]:
    """Growth of memory by a session, its first run, and a second session with its run."""
    open_ = opener(runtime, {"context.cache": "off"} if runtime.startswith("ep") else {})
    feeds = {"x": np.ones((1, SIDE), np.float32)}
    open_(tiny)({"x": np.ones((1, 8), np.float32)})
    start = resident()
    kept, points = [], {}
    began = time.perf_counter()
    kept.append(open_(path))
    points["seconds"] = time.perf_counter() - began
    stages: dict[str, Callable[[], Any]] = {"load": lambda: None, "run": lambda: kept[0](feeds)}
    stages["second"] = lambda: (kept.append(open_(path)), kept[1](feeds))
    for name, act in stages.items():
        act()
        now = resident()
        points[name] = {key: now[key] - start[key] for key in ("RssAnon", "RssFile")}
    if runtime.startswith("ep"):
        points["borrowed"] = str(sessions[-1].weights.totals)
    return points


def child_start(runtime: str, path: str, cache: str) -> dict[str, Any]:
    """Seconds of the imports, and from `load` to the first output."""
    began = time.perf_counter()
    open_ = opener(runtime, {"context.cache": cache} if runtime.startswith("ep") else {})
    if runtime == "ep jax":
        import jax

        jax.devices()
    imported = time.perf_counter()
    shape, dtype = ((1, 64), np.int64) if "encoder" in path else ((1, 3, 224, 224), np.float32)
    name = "ids" if "encoder" in path else "x"
    feeds = {name: np.ones(shape, dtype)}
    opened = time.perf_counter()
    session = open_(path)
    loaded = time.perf_counter()
    session(feeds)
    done = time.perf_counter()
    return {"imports": imported - began, "load": loaded - opened, "run": done - loaded}


def child_large(path: str, out: str, provider: str) -> dict[str, Any]:
    """The most memory of a process that loads and runs a model; or, given a target, packs it."""
    opener("ep jax", {})
    import ep

    start = resident()["RssAnon"]
    began = time.perf_counter()
    if out:
        ep.pack(path, out, provider=provider)
    else:
        session = ep.load(path, "jax", options={"context.cache": "off"})
        session.run(None, {"x": np.ones((1, 8192), np.float32)})
    now = resident()
    return {"seconds": time.perf_counter() - began, **now, "RssAnon": now["RssAnon"] - start}


# Tables.


def child(kind: str, *arguments: str) -> Any:
    """What a measurement gives, or why it gave nothing."""
    command = [sys.executable, __file__, "--child", json.dumps([kind, *arguments])]
    done = subprocess.run(command, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1]) if not done.returncode else done.stderr.strip()[-200:]


def memory(folder: Path) -> Iterator[str]:
    """The rows of the memory table."""
    from ep.packing import pack

    chain(folder / "tiny.onnx", 8, 2, outside=False)
    chain(folder / "one file.onnx", SIDE, COUNT, outside=False)
    pack(folder / "one file.onnx", folder / "external.onnx", format="external")
    pack(folder / "one file.onnx", folder / "safetensors.onnx", format="safetensors")
    chain(folder / "turned, one file.onnx", SIDE, COUNT, outside=False, turned=True)
    pack(folder / "turned, one file.onnx", folder / "turned.onnx")
    pack(folder / "turned, one file.onnx", folder / "turned, for jax.onnx", provider="jax")
    size = COUNT * SIDE * SIDE * 4
    yield f"Weights: {size / MIB:.0f} MiB. Growth in MiB of private (and mapped) memory, and in % of the weights.\n"
    yield "| file | runtime | load s | load | first run | second session | weights |\n|---|---|---|---|---|---|---|"
    for file in FILES:
        for runtime in RUNTIMES:
            if importlib.util.find_spec(runtime.partition(",")[0].split()[0]) is None:
                yield f"| {file} | {runtime} | not installed | | | | |"
                continue
            found = child("memory", runtime, str(folder / f"{file}.onnx"), str(folder / "tiny.onnx"))
            if isinstance(found, str):
                yield f"| {file} | {runtime} | failed: {found} | | | | |"
                continue
            cells = [_growth(found[stage], size) for stage in ("load", "run")]
            second = {key: found["second"][key] - found["run"][key] for key in found["run"]}
            cells.append("+" + _growth(second, size))
            yield f"| {file} | {runtime} | {found['seconds']:.3f} | {' | '.join(cells)} | {found.get('borrowed', '')} |"


def _growth(stage: dict[str, int], size: int) -> str:
    return f"{stage['RssAnon'] / MIB:.0f} ({stage['RssFile'] / MIB:.0f}), {100 * stage['RssAnon'] / size:.0f} %"


def start(folder: Path) -> Iterator[str]:
    """The rows of the table of start times, medians of three processes."""
    from ep.packing import pack

    encoder(folder / "encoder.onnx")
    convolutional(folder / "cnn.onnx")
    for name in ("encoder", "cnn"):
        pack(folder / f"{name}.onnx", folder / f"packed {name}.onnx", provider="jax")
    yield "Seconds of the first `load` and run in a fresh process; medians of three.\n"
    yield "| model | runtime | imports | load | first run | load + run |\n|---|---|---|---|---|---|"
    for name in ("encoder", "cnn"):
        size = (folder / f"{name}.onnx").stat().st_size / 1e6
        for runtime in ("onnxruntime", "ep jax", "ep mlx"):
            for file, cache in _ways(folder, name, runtime):
                how = "" if runtime == "onnxruntime" else ", packed" * (file != name) + f", {cache[0]}"
                seen = [child("start", runtime, str(folder / f"{file}.onnx"), cache[1]) for _ in range(3 + cache[2])]
                if any(isinstance(one, str) for one in seen):
                    yield f"| {name} | {runtime}{how} | failed: {seen[-1]} | | | |"
                    continue
                a, b, c = (float(np.median([one[k] for one in seen[cache[2] :]])) for k in ("imports", "load", "run"))
                yield f"| {name}, {size:.0f} MB | {runtime}{how} | {a:.2f} | {b:.3f} | {c:.3f} | {b + c:.3f} |"


def _ways(folder: Path, name: str, runtime: str) -> Iterator[tuple[str, tuple[str, str, int]]]:
    """(file, (words, cache, processes that only fill it)) to measure."""
    if runtime == "onnxruntime":
        yield name, ("", "off", 0)
        return
    for file in (name, f"packed {name}"):
        yield file, ("nothing compiled yet", "off", 0)
        yield file, ("compiled before", str(folder / "cache"), 1)


def large(folder: Path) -> Iterator[str]:
    """The rows of the table of models beyond 2 GiB."""
    yield "Memory in MiB, and in % of the model.\n"
    yield "| model | what | seconds | most resident memory | private memory added |\n|---|---|---|---|---|"
    for name, provider in (("large", ""), ("large turned", "jax")):
        chain(folder / "model.onnx", 8192, 9, outside=True, turned=bool(provider))
        size = (folder / "model.bin").stat().st_size
        label, packed = f"{name}, {size / MIB:.0f} MiB", str(folder / "packed.onnx")
        how = f" --for {provider}" if provider else ""
        yield _large_row(f"{label} | load and run", child("large", str(folder / "model.onnx"), "", ""), size)
        yield _large_row(f"{label} | pack{how}", child("large", str(folder / "model.onnx"), packed, provider), size)
        (folder / "model.bin").unlink()
        yield _large_row(f"{label} | load and run what was packed", child("large", packed, "", ""), size)
        list(map(Path.unlink, folder.iterdir()))


def _large_row(what: str, found: Any, size: int) -> str:
    if isinstance(found, str):
        return f"| {what} | failed: {found} | | |"
    cells = (f"{found[key] / MIB:.0f}, {100 * found[key] / size:.0f} %" for key in ("VmHWM", "RssAnon"))
    return f"| {what} | {found['seconds']:.1f} | {' | '.join(cells)} |"


TABLES = {"memory": memory, "start": start, "large": large}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=TABLES, action="append", help="this table; may be repeated")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        kind, *arguments = json.loads(options.child)
        warnings.simplefilter("ignore")
        print(json.dumps({"memory": child_memory, "start": child_start, "large": child_large}[kind](*arguments)))
        return 0
    print(f"{machine()}\n")
    for name in options.only or TABLES:
        with tempfile.TemporaryDirectory() as folder:
            for line in TABLES[name](Path(folder)):
                print(line, flush=True)
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
