"""Is a damaged context model ever run? Mutates its file, its container and its nodes, and looks at what a load does.

    python benchmarks/mutations.py [--count 10000] [--device jax mlx] [--seed 0]

Each mutation must be refused with an error of ours, or change nothing: the same answer. Four kinds, in turn: bytes of
the container; fields of its header, with hashes and lengths made right again, so that the checks behind them are met;
attributes of the nodes; bytes of a graph in it, with hashes made right: that may be another model and its answer counts
for nothing, but it must be refused or run. Batches run in processes of their own, so that a crash is seen and counted.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

BATCH = 500
KINDS = ("bytes", "header", "node", "graph")
TEXT = """<ir_version: 10, opset_import: ["": 21]>
g (float[n, 8] x) => (float[m] y, float[n, 64] z) <float[1] one = {1.0}> {
    h = MatMul(x, w)
    z = Add(h, one)
    r = Relu(z)
    at = NonZero(r)
    flat = Reshape(r, minus)
    row = Gather(at, zero)
    picked = Gather(flat, row)
    y = Exp(picked)
}"""


def make(folder: Path, device: str) -> dict[str, np.ndarray]:
    """A context model with two partitions and code for two shapes, and its right answers."""
    import onnx
    from onnx import numpy_helper

    import ep

    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model(TEXT)
    weights = {"w": rng.standard_normal((8, 64)).astype(np.float32), "minus": np.array([-1]), "zero": np.array(0)}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    onnx.save(model, folder / "model.onnx")
    session = ep.load(folder / "model.onnx", device, options={"context.cache": "off"})
    x = rng.standard_normal((3, 8)).astype(np.float32)
    answers = {f"y{rows}": session.run(None, {"x": x[:rows]})[0] for rows in (2, 3)}
    session.save_context(folder / "c.onnx")
    return {"x": x} | answers


class Mutator:
    """One context model, and random changes of it."""

    def __init__(self, folder: Path, seed: int) -> None:
        import onnx

        self.folder, self.rng = folder, np.random.default_rng(seed)
        self.blob = (folder / "c.epctx").read_bytes()
        self.model = onnx.load(folder / "c.onnx", load_external_data=False)

    def apply(self, number: int) -> str:
        """Write a changed model; the kind of the change."""
        kind = KINDS[number % len(KINDS)]
        blob, model = self.blob, copy.deepcopy(self.model)
        if kind == "bytes":
            blob = self.bytes(blob)
        elif kind == "node":
            self.node(model)
        else:
            blob = self.forged(blob, kind == "header")
            for node in model.graph.node:  # the node's own hash and size would give it away at once
                kept = [a for a in node.attribute if a.name not in ("notes", "max_size")]
                node.ClearField("attribute")
                node.attribute.extend(kept)
        (self.folder / "c.epctx").write_bytes(blob)
        (self.folder / "m.onnx").write_bytes(model.SerializeToString())
        return kind

    def bytes(self, blob: bytes) -> bytes:
        rng, changed = self.rng, bytearray(blob)
        a, b = sorted(int(v) for v in rng.integers(0, len(blob) + 1, 2))
        b = min(b, a + int(rng.integers(1, 200))) if rng.random() < 0.7 else b
        how = int(rng.integers(6))
        if how == 0:
            changed[a % len(blob)] ^= 1 << int(rng.integers(8))
        elif how == 1:
            del changed[a:b]
        elif how == 2:
            changed[a:a] = rng.bytes(max(b - a, 1))
        elif how == 3:
            changed[a:b] = bytes(b - a)
        elif how == 4:
            changed[a:b] = changed[a:b][::-1]
        else:
            changed = changed[: int(rng.integers(len(blob)))]
        return bytes(changed)

    def forged(self, blob: bytes, edit_header: bool) -> bytes:
        """The container with fields of its header changed, or bytes of a graph, and everything else made right."""
        from ep.container import _PREFIX, ALIGNMENT, MAGIC

        length = _PREFIX.unpack_from(blob)[2]
        header, at = json.loads(blob[_PREFIX.size : _PREFIX.size + length]), _PREFIX.size + length
        sections = []
        for section in header["sections"]:
            at += -at % ALIGNMENT
            sections.append(blob[at : at + section["length"]])
            at += section["length"]
        if edit_header:
            for _ in range(int(self.rng.integers(1, 4))):
                self.edit(header)
        else:
            number = int(self.rng.integers(len(header["partitions"])))
            data = sections[number] = self.bytes(sections[number])
            header["sections"][number] |= {"length": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        text = json.dumps(header).encode()
        parts, end = [text], _PREFIX.size + len(text)
        for data in sections:
            parts += [bytes(-end % ALIGNMENT), data]
            end += -end % ALIGNMENT + len(data)
        return _PREFIX.pack(MAGIC, 1, len(text), end, hashlib.sha256(text).digest()) + b"".join(parts)

    def edit(self, tree: Any) -> None:
        """Change something anywhere in a tree of lists and objects."""
        rng = self.rng
        while True:
            keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
            if not keys:
                return
            key = keys[int(rng.integers(len(keys)))]
            inner = tree[key]
            if isinstance(inner, dict | list) and inner and rng.random() < 0.8:
                tree = inner
                continue
            other = keys[int(rng.integers(len(keys)))]
            how = int(rng.integers(5))
            if how == 0:
                tree.pop(key)
            elif how == 1:
                tree[key], tree[other] = tree[other], tree[key]
            elif how == 2 and isinstance(tree, list):
                tree.append(copy.deepcopy(inner))
            else:
                tree[key] = self.value(inner)
            return

    def value(self, old: Any) -> Any:
        choices: list[Any] = [None, True, -1, 0, 1, 1 << 62, 1 << 70, 0.5, "", "x", [], {}, "float32", "../x", "\0"]
        if isinstance(old, str) and old:
            at = int(self.rng.integers(len(old)))
            choices += [old[:at], old[:at] + "f" + old[at + 1 :]] * 5
        if isinstance(old, int):
            choices += [old + 1, old - 1] * 5
        return choices[int(self.rng.integers(len(choices)))]

    def node(self, model: Any) -> None:
        from onnx import helper

        rng = self.rng
        nodes = [node for node in model.graph.node if node.op_type == "EPContext"]
        node = nodes[int(rng.integers(len(nodes)))]
        index = int(rng.integers(len(node.attribute)))
        attribute, how = node.attribute[index], int(rng.integers(6))
        if how == 0:
            del node.attribute[index]
        elif how == 1:
            node.attribute.add().CopyFrom(attribute)
        elif how == 2:
            old = helper.get_attribute_value(attribute)
            new = self.value(old.decode() if isinstance(old, bytes) else old)
            fits = isinstance(new, str | float) or (isinstance(new, int) and abs(new) < 1 << 63)
            made = helper.make_attribute(attribute.name, new if fits else str(new))
            attribute.CopyFrom(made)
        elif how == 3:
            names = node.input if rng.random() < 0.5 else node.output
            a, b = (int(v) for v in rng.integers(len(names), size=2))
            names[a], names[b] = names[b], names[a]
        elif how == 4:
            model.graph.node.add().CopyFrom(node)
        else:
            model.graph.node.remove(node)


def batch(folder: Path, device: str, start: int, count: int, seed: int) -> dict[str, Any]:
    """What became of these mutations: refused, same answer, or wrong (with the number of each)."""
    import ep
    from ep.devices import resolve

    warnings.simplefilter("ignore")
    right = dict(np.load(folder / "right.npz"))
    mutator, seen, wrong = Mutator(folder, seed + start), Counter(), []
    providers = resolve(device, {})
    for number in range(start, start + count):
        kind = mutator.apply(number)
        options = {"context.cache": "off", "trust_native": kind != "graph" and number % 10 != 0}
        try:
            session = ep.load(folder / "m.onnx", options=options, providers=providers)
            for rows in (2, 3):
                got = session.run(["y"], {"x": right["x"][:rows]})[0]
                if got.tobytes() != right[f"y{rows}"].tobytes() and kind != "graph":
                    raise AssertionError(f"{kind}: another answer")
            seen[f"{kind}: {'runs' if kind == 'graph' else 'same answer'}"] += 1
        except ep.EpError:
            seen[f"{kind}: refused"] += 1
        except Exception as error:  # noqa: BLE001 - that is what is looked for
            wrong.append(f"{number} {kind}: {type(error).__name__}: {str(error)[:200]}")
    return {"seen": dict(seen), "wrong": wrong}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000, help="mutations, spread over the devices")
    parser.add_argument("--device", nargs="+", default=["jax", "mlx"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worker", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        folder, device, *numbers = options.worker
        print("\n" + json.dumps(batch(Path(folder), device, *map(int, numbers))))
        return
    seen, wrong, started = Counter[str](), [], time.perf_counter()
    for device in options.device:
        with tempfile.TemporaryDirectory() as place:
            warnings.simplefilter("ignore")
            np.savez(Path(place) / "right.npz", **make(Path(place), device))
            original = (Path(place) / "c.epctx").read_bytes()
            for start in range(0, options.count // len(options.device), BATCH):
                (Path(place) / "c.epctx").write_bytes(original)
                job = [place, device, str(start), str(BATCH), str(options.seed)]
                done = subprocess.run([sys.executable, __file__, "--worker", *job], capture_output=True, text=True)
                if done.returncode:
                    wrong.append(f"{device} {start}: crash, exit code {done.returncode}: {done.stderr[-300:]}")
                    continue
                result = json.loads(done.stdout.strip().splitlines()[-1])
                seen.update(result["seen"])
                wrong += [f"{device} {text}" for text in result["wrong"]]
                print(f"{device} {start + BATCH}: {dict(seen)}, wrong {len(wrong)}", file=sys.stderr, flush=True)
    for what, count in sorted(seen.items()):
        print(f"{count:7} {what}")
    print(f"{len(wrong):7} crashes, wrong answers and foreign errors, in {time.perf_counter() - started:.0f} s")
    print(*wrong[:20], sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
