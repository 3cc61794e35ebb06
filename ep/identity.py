"""When may stored code stand in for compiled code? When the same key comes out of all that compiling would read.

A key is the SHA-256 of a group of steps (operators, attributes, wiring, small constants; of weights only shapes and
dtypes, because they are arguments, unless they are indices, which compiling checks), of the arguments' shapes and
dtypes, of the host values that are compiled in, and of the fingerprint: hardware, library and its settings, and this
package's own source. Names of nodes and values do not count.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ep import indices
from ep.backend import Backend, Specs

_NUMBER = struct.Struct("<q")
_FLOAT = struct.Struct("<d")


class Unstorable(Exception):
    """Compiled code depends on something that has no identity; it then serves this process alone."""


def fingerprint(backend: Backend) -> str:
    """What code of this backend depends on, as "name value / name value / …"."""
    return f"{backend.needs()} / ep {code_identity()}"


def differences(stored: str, here: str) -> list[str]:
    """In words, which parts of two fingerprints differ."""
    theirs, ours = (dict(part.strip().partition(" ")[::2] for part in text.split(" / ")) for text in (stored, here))
    return [
        f"{name} {theirs.get(name, 'not named')} instead of {ours.get(name, 'none')}"
        for name in dict.fromkeys([*theirs, *ours])
        if theirs.get(name) != ours.get(name)
    ]


@functools.cache
def code_identity() -> str:
    """Version and a hash of the source of `ep` and its backends: a changed lowering makes stored code stale."""
    from importlib import metadata

    import ep

    digest = hashlib.sha256()
    record = (metadata.distribution("ep-runtime").read_text("RECORD") or "").splitlines()
    listed = sorted(line for line in record if line.startswith("ep/") and ".py,sha256=" in line)
    if listed:  # an installed wheel lists the hashes of its files
        return f"{ep.__version__}-{hashlib.sha256(repr(listed).encode()).hexdigest()[:12]}"
    spec = importlib.util.find_spec("ep.backends")
    folders = [Path(ep.__file__).parent, *map(Path, (spec and spec.submodule_search_locations) or ())]
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes() + b"\0")
    return f"{ep.__version__}-{digest.hexdigest()[:12]}"


name_of = functools.cache(lambda dtype: dtype.name)  # NumPy composes it anew each time


def function_key(group: str, fingerprint: str, specs: Specs, host: Sequence[Any]) -> str:
    """The key of one compiled function: hexadecimal SHA-256."""
    digest = _Digest()
    digest.add((group, fingerprint, [(shape, name_of(dtype)) for shape, dtype in specs], list(host)))
    return digest.hexdigest()


def group_digest(group: Any, constants: Mapping[Any, np.ndarray], backend: Backend) -> str:
    """The identity of a group of steps (`ep.partition.Group`) on a backend.

    Raises:
        Unstorable: the group uses an operator of another package, or an attribute without a plain value.
    """
    digest = _Digest()
    graph = _Graph(backend, group.on_host)
    digest.add(backend.name)
    for values in (group.inputs, group.host_inputs, group.weights, group.constants):
        digest.add(graph.numbers(values))
    digest.add([(constants[v].shape, constants[v].dtype.name) for v in group.weights])
    digest.add([constants[v] for v in group.constants])
    tables = indices.tables(group.steps)  # of which tracing checks the contents
    digest.add([constants[v] if v in tables else None for v in group.weights])
    digest.add(graph.steps(group.steps))
    digest.add(graph.numbers(group.outputs))
    return digest.hexdigest()


class _Graph:
    """Steps as nested plain values; a value of the graph is the number of its first appearance."""

    def __init__(self, backend: Backend, on_host: frozenset[int]) -> None:
        self.backend, self.on_host = backend, on_host
        self._number: dict[Any, int] = {}

    def numbers(self, values: Iterable[Any]) -> list[int | None]:
        return [None if v is None else self._number.setdefault(v, len(self._number)) for v in values]

    def steps(self, steps: Iterable[Any]) -> list[Any]:
        return [self._step(step) for step in steps]

    def _step(self, step: Any) -> Any:
        lowering = step.lowering
        native = self.backend.overrides.get(lowering.key) if self.backend.overrides is not None else None
        for function in (lowering.fn, native):
            module = getattr(function, "__module__", "") or ""
            if function is not None and not module.startswith("ep."):
                raise Unstorable(f"{lowering.key} is implemented in {module}, whose source is not known here.")
        return (
            str(lowering.key), id(step) in self.on_host, self.numbers(step.inputs),
            sorted(step.attributes.items()), [(name, self._body(body)) for name, body in sorted(step.bodies.items())],
            self.numbers(step.outputs),
        )  # fmt: skip

    def _body(self, body: Any) -> Any:
        return (
            self.numbers(body.captures), self.numbers(body.inputs), self.numbers(body.constants),
            list(body.constants.values()), self.steps(body.steps), self.numbers(body.outputs),
            [None if d is None else (d[0].name, d[1]) for d in body.declared],
        )  # fmt: skip


class _Digest:
    """SHA-256 of nested plain values; each says its type and length, so that no two values read alike."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def hexdigest(self) -> str:
        return self._hash.hexdigest()

    def add(self, value: Any) -> None:
        if isinstance(value, list | tuple):
            self._put(b"l", len(value))
            for item in value:
                self.add(item)
        elif isinstance(value, np.ndarray | np.generic):
            self._array(np.asarray(value))
        elif value is None or isinstance(value, bool):
            self._hash.update(repr(value).encode())
        elif isinstance(value, int):
            self._bytes(b"i", str(value).encode())
        elif isinstance(value, float):
            self._hash.update(b"f" + _FLOAT.pack(value))
        elif isinstance(value, str):
            self._bytes(b"s", value.encode("utf-8", "surrogatepass"))
        elif isinstance(value, bytes):
            self._bytes(b"b", value)
        else:
            raise Unstorable(f"a {type(value).__name__} has no identity.")

    def _array(self, array: np.ndarray) -> None:
        self._put(b"a", array.ndim)
        self.add(array.shape)
        if array.dtype.hasobject:
            self.add(array.ravel().tolist())
        else:
            self._bytes(b"d", array.dtype.name.encode())
            self._bytes(b"r", np.ascontiguousarray(array).tobytes())

    def _put(self, kind: bytes, number: int) -> None:
        self._hash.update(kind + _NUMBER.pack(number))

    def _bytes(self, kind: bytes, data: bytes) -> None:
        self._put(kind, len(data))
        self._hash.update(data)
