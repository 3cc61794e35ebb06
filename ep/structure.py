"""Is a protobuf well formed? What `onnx_ir` would refuse one by one, or drop without a word, is listed at once.

Each problem is also mended in the protobuf, so that the rest of the model can still be checked and everything that
is wrong with it comes in one error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from ep.errors import EpError, ExecutionError, InvalidModel

if TYPE_CHECKING:
    import onnx

PROBLEMS = "ep.problems"  # key in `model.graph.meta`: what `mend` found
MOST_NODES = 1_000_000  # after functions are inlined: calls of calls multiply
MOST_DENSE = 1 << 30  # bytes that a sparse tensor may become
_FIELD = {1: "f", 2: "i", 3: "s", 4: "t", 5: "g", 6: "floats", 7: "ints", 8: "strings", 9: "tensors", 10: "graphs",
          11: "sparse_tensor", 12: "sparse_tensors", 13: "tp", 14: "type_protos"}  # fmt: skip
_MESSAGES = frozenset({"t", "g", "sparse_tensor", "tp"})
_Key = tuple[str, str, str]  # domain, name, overload of a function


@contextmanager
def understood(model: str, problems: Sequence[str] = ()) -> Iterator[None]:
    """Turns whatever a library raises about a model into `InvalidModel`, after the problems found before.

    Nobody can list what `onnx`, `onnx_ir` and a lowering's constants raise on damaged models; no user sees it bare.
    """
    try:
        yield
    except EpError:
        raise
    except MemoryError as error:
        raise ExecutionError(
            f"{model} needs more memory than there is to be loaded.", why=str(error), fix="free memory."
        ) from error
    except Exception as error:
        raise InvalidModel.from_problems(
            model,
            [*problems, _root_cause(error)],
            why="it breaks the ONNX specification.",
            fix="export the model again; if onnx.checker.check_model accepts it, please report it.",
        ) from error


def _root_cause(error: BaseException) -> str:
    """What went wrong first; `onnx_ir` fails once more where it reports what `onnx` says of external data."""
    while cause := error.__cause__ or (None if error.__suppress_context__ else error.__context__):
        error = cause
    return f"{type(error).__name__}: {error}"


def mend(proto: onnx.ModelProto, name: str) -> list[str]:
    """What is malformed in the model, one line each; it is taken out of `proto`. Sparse tensors become dense.

    Raises:
        InvalidModel: its functions call each other without end.
    """
    found = _Mender()
    found.graph(proto.graph)
    found.opsets(proto.opset_import, "the model")
    seen: set[_Key] = set()
    for function in proto.functions:
        where = f"function '{function.name}'"
        if (key := _key(function)) in seen:
            found.problems.append(f"{where} of domain '{function.domain}' is defined twice")
        seen.add(key)
        found.opsets(function.opset_import, where)
        found.function(function, where)
    _check_calls(proto, name)
    return found.problems


class _Mender:
    def __init__(self) -> None:
        import onnx

        self.problems: list[str] = []
        self.data_types = set(onnx.TensorProto.DataType.values()) - {0}
        self.sparse = {11, 12}

    def opsets(self, imports: Any, who: str) -> None:
        for entry in imports:
            if not 0 < entry.version < 1 << 31:
                self.problems.append(f"{who} imports version {entry.version} of domain '{entry.domain}'")
                entry.version = 1

    def function(self, function: onnx.FunctionProto, where: str) -> None:
        known = set(function.input)
        self.nodes(function.node, where, known, inside_function=True)
        reads = dict.fromkeys(name for node in function.node for name in node.input if name and name not in known)
        self.problems += [f"{where} reads '{name}', which nothing produces" for name in reads]
        for node in function.node if reads else ():
            node.input[:] = [function.input[0] if n in reads and function.input else n for n in node.input]
        for position, name in enumerate(function.output):
            if name not in known:
                self.problems.append(f"{where} returns '{name}', which nothing produces")
                function.output[position] = function.node[0].output[0] if function.node else function.input[0]

    def graph(self, graph: onnx.GraphProto, inside_function: bool = False) -> None:
        where = f"graph '{graph.name}'"
        for value in chain(graph.input, graph.output, graph.value_info):
            if not self._known(value.type):
                self.problems.append(f"value '{value.name}' of {where} has an unknown element type")
                value.ClearField("type")
        produced = self._inputs(graph, where)
        produced |= self._initializers(graph, where)
        self.nodes(graph.node, where, produced, inside_function)
        for value in graph.output:
            if value.name not in produced:
                self.problems.append(f"{where} returns '{value.name}', which nothing produces")
                value.ClearField("type")
                value.name = next(iter(produced), "")

    def _inputs(self, graph: onnx.GraphProto, where: str) -> set[str]:
        kept: dict[str, onnx.ValueInfoProto] = {}
        for value in graph.input:
            if not value.name:
                self.problems.append(f"an input of {where} has no name")
            elif value.name in kept:
                self.problems.append(f"{where} has two inputs named '{value.name}'")
            else:
                kept[value.name] = value
        if len(kept) < len(graph.input):
            _replace(graph.input, list(kept.values()))
        return set(kept)

    def _initializers(self, graph: onnx.GraphProto, where: str) -> set[str]:
        from onnx import numpy_helper

        for sparse in graph.sparse_initializer:
            if (dense := self._dense(sparse, f"sparse initializer '{sparse.values.name}'")) is not None:
                graph.initializer.append(numpy_helper.from_array(dense, sparse.values.name))
        del graph.sparse_initializer[:]
        kept: dict[str, onnx.TensorProto] = {}
        for tensor in graph.initializer:
            what = f"initializer '{tensor.name}' of {where}"
            if not tensor.name:
                self.problems.append(f"an initializer of {where} has no name")
            elif tensor.name in kept:
                self.problems.append(f"{what} is defined twice")
            elif self._tensor(tensor, what):
                kept[tensor.name] = tensor
        if len(kept) < len(graph.initializer):
            _replace(graph.initializer, list(kept.values()))
        return set(kept)

    def nodes(self, nodes: Any, where: str, produced: set[str], inside_function: bool = False) -> None:
        """`produced` are names that exist before the nodes; each node adds its own, once."""
        for index, node in enumerate(nodes):
            what = f"node '{node.name or f'{node.op_type}_{index}'}' of {where}"
            _check_text(node, what)
            if not node.op_type:
                self.problems.append(f"{what} names no operator")
                node.op_type = "?"
            for position, name in enumerate(node.output):
                if name and name in produced:
                    self.problems.append(f"{what} produces '{name}', which has another producer")
                    node.output[position] = f"{name}\0{index}"
                produced.add(name)
            if node.attribute:
                self._attributes(node, what, inside_function)
                self.problems += [f"{what} {problem}" for problem in _body_problems(node)]

    def _attributes(self, node: onnx.NodeProto, what: str, inside_function: bool) -> None:
        kept: dict[str, Any] = {}
        for attribute in node.attribute:
            name = attribute.name
            if name in kept:
                self.problems.append(f"{what} has the attribute '{name}' twice")
            elif reason := self._attribute(attribute, what, inside_function):
                self.problems.append(f"{what} has the attribute '{name}', {reason}")
            else:
                kept[name] = attribute
        if len(kept) < len(node.attribute):
            _replace(node.attribute, list(kept.values()))

    def _attribute(self, attribute: onnx.AttributeProto, what: str, inside_function: bool) -> str:
        """What is wrong with an attribute, or `""`."""
        import onnx

        if not attribute.name:
            return "which has no name"
        if attribute.ref_attr_name:
            return "" if inside_function else f"which refers to '{attribute.ref_attr_name}' outside of a function"
        if not attribute.type:  # IR version 1 had no types
            given = [code for code, field in _FIELD.items() if _present(attribute, field)]
            attribute.type = given[0] if len(given) == 1 else 0  # type: ignore[assignment]
        field = _FIELD.get(attribute.type)
        if field is None:
            return "which says neither its type nor one value"
        if field in _MESSAGES and not attribute.HasField(field):
            return f"of type {onnx.AttributeProto.AttributeType.Name(attribute.type)}, without a value"
        if attribute.type in self.sparse:
            return self._sparse_attribute(attribute)
        return self._content(attribute, field, f"attribute '{attribute.name}' of {what}", inside_function)

    def _content(self, attribute: Any, field: str, what: str, inside_function: bool) -> str:
        if field in ("s", "strings"):
            wrong = not all(map(_is_text, [attribute.s] if field == "s" else attribute.strings))
            return "which is not UTF-8" if wrong else ""
        if field in ("t", "tensors"):
            tensors = [attribute.t] if field == "t" else attribute.tensors
            damaged = [t for t in tensors if not self._tensor(t, what)]
            return "whose tensor is damaged" if damaged else ""
        if field in ("tp", "type_protos"):
            types = [attribute.tp] if field == "tp" else attribute.type_protos
            return "" if all(map(self._known, types)) else "which is an unknown type"
        if field in ("g", "graphs"):
            for graph in [attribute.g] if field == "g" else attribute.graphs:
                self.graph(graph, inside_function)
        return ""

    def _sparse_attribute(self, attribute: Any) -> str:
        from onnx import numpy_helper

        if attribute.type == 12:
            return "a list of sparse tensors, which no operator takes"
        dense = self._dense(attribute.sparse_tensor, f"attribute '{attribute.name}'")
        if dense is None:
            return "whose sparse tensor is damaged"
        attribute.Clear()
        attribute.name, attribute.type = "value", 4
        attribute.t.CopyFrom(numpy_helper.from_array(dense))
        return ""

    def _tensor(self, tensor: onnx.TensorProto, what: str) -> bool:
        if tensor.data_type not in self.data_types:
            self.problems.append(f"{what} has the unknown element type {tensor.data_type}")
        elif min(tensor.dims, default=0) < 0:
            self.problems.append(f"{what} has the shape {list(tensor.dims)}")
        elif tensor.data_location == 1 and not any(e.key == "location" and e.value for e in tensor.external_data):
            self.problems.append(f"{what} lies in another file, but does not say in which")
        else:
            return True
        return False

    def _known(self, value_type: onnx.TypeProto) -> bool:
        kind = value_type.WhichOneof("value")
        if kind in ("tensor_type", "sparse_tensor_type"):
            code = getattr(value_type, kind).elem_type
            return code == 0 or code in self.data_types
        if kind in ("sequence_type", "optional_type"):
            inner = getattr(value_type, kind)
            return inner.HasField("elem_type") and self._known(inner.elem_type)
        if kind == "map_type":
            return value_type.map_type.key_type in self.data_types and self._known(value_type.map_type.value_type)
        return True

    def _dense(self, sparse: onnx.SparseTensorProto, what: str) -> np.ndarray | None:
        """The array of a sparse tensor; `None` after its problem was noted."""
        if not (self._tensor(sparse.values, f"the values of {what}") and self._tensor(sparse.indices, what)):
            return None
        try:
            return dense(sparse)
        except (ValueError, TypeError, IndexError, OverflowError) as error:
            self.problems.append(f"{what} cannot be read: {error}")
            return None


def dense(sparse: onnx.SparseTensorProto) -> np.ndarray:
    """The array that a sparse tensor stands for.

    Raises:
        ValueError: its indices, values and shape do not fit each other.
    """
    from onnx import numpy_helper

    if sparse.values.data_location or sparse.indices.data_location:
        raise ValueError("its data lie in another file, which only dense tensors may do")
    values, indices = numpy_helper.to_array(sparse.values), numpy_helper.to_array(sparse.indices)
    shape = tuple(sparse.dims)
    size = math.prod(shape)
    if min(shape, default=0) < 0 or size * values.itemsize > MOST_DENSE:
        raise ValueError(f"its shape is {list(shape)}; sparse tensors become dense, up to {MOST_DENSE:,} bytes")
    linear = indices
    if indices.ndim == 2 and indices.shape[1] == len(shape):
        linear = np.ravel_multi_index(tuple(indices.T), shape, mode="raise") if size else indices[:, 0]
    if (
        values.ndim != 1
        or linear.shape != values.shape
        or (len(linear) and not 0 <= linear.min() <= linear.max() < size)
    ):
        raise ValueError(f"{values.shape} values at {indices.shape} indices, some outside its shape {list(shape)}")
    array = np.zeros(size, values.dtype)
    array[linear] = values
    return array.reshape(shape)


def _check_text(node: onnx.NodeProto, what: str) -> None:
    """Refuses names that are no UTF-8: protobuf hands them out as bytes, and nothing here expects that."""
    texts = [node.op_type, node.domain, node.name, *node.input, *node.output, *(a.name for a in node.attribute)]
    try:
        "".join(texts)
    except TypeError:
        damaged = next(text for text in texts if isinstance(text, bytes))
        raise InvalidModel(
            f"{what} has a name that is not text: {damaged[:40]!r}.",
            why="names in ONNX are UTF-8.",
            fix="copy or export the model again; the file may be damaged.",
        ) from None


def _body_problems(node: onnx.NodeProto) -> Iterator[str]:
    """How many values enter and leave the bodies of If, Loop and Scan, where that cannot be."""
    if node.op_type not in ("If", "Loop", "Scan") or node.domain not in ("", "ai.onnx"):
        return
    scanned = next((a.i for a in node.attribute if a.name == "num_scan_inputs"), 0)
    state = {"If": 0, "Loop": max(len(node.input) - 2, 0), "Scan": len(node.input) - scanned}[node.op_type]
    enter, leave, least = {
        "If": ((0,), len(node.output), 0),
        "Loop": ((state + 2,), len(node.output) + 1, state + 1),
        # Scan-8 has one more input: the lengths of the sequences
        "Scan": ((len(node.input), len(node.input) - 1), len(node.output), state - 1),
    }[node.op_type]
    for attribute in node.attribute:
        if attribute.type == 5 and attribute.name in ("then_branch", "else_branch", "body"):
            inputs, outputs = len(attribute.g.input), len(attribute.g.output)
            if inputs not in enter:
                yield f"has a '{attribute.name}' of {inputs} inputs, but gives it {enter[0]}"
            if outputs != leave or outputs < least:
                yield f"has a '{attribute.name}' of {outputs} outputs, but expects {max(leave, least)}"


def _check_calls(proto: onnx.ModelProto, name: str) -> None:
    """Refuses functions that call themselves, or each other so often that the model would have no end."""
    bodies = {_key(function): list(_calls(function.node)) for function in proto.functions}
    sizes: dict[_Key, int] = {}

    def size(key: _Key, open_: tuple[_Key, ...]) -> int:
        if key in open_:
            chain_ = " → ".join(f"{domain}::{name}" for domain, name, _ in (*open_[open_.index(key) :], key))
            raise InvalidModel(
                f"function '{key[1]}' of {name} calls itself.",
                why=chain_,
                fix="ONNX has no recursion: use Loop or Scan.",
            )
        if key not in sizes:
            sizes[key] = sum(size(k, (*open_, key)) if k in bodies else 1 for k in bodies[key])
        return sizes[key]

    try:
        total = sum(size(k, ()) if k in bodies else 1 for k in _calls(proto.graph.node)) if bodies else 0
    except RecursionError as error:
        raise InvalidModel(
            f"the functions of {name} are nested too deeply.",
            why=f"there are {len(bodies)}.",
            fix="inline some of them.",
        ) from error
    if total > MOST_NODES:
        raise InvalidModel(
            f"{name} has {total:,} nodes when its functions are inlined; at most {MOST_NODES:,} are supported.",
            why="functions call functions, each several times.",
            fix="export the model with fewer levels of functions.",
        )


def _calls(nodes: Any) -> Iterator[_Key]:
    for node in nodes:
        yield _domain(node.domain), node.op_type, node.overload
        for attribute in node.attribute:
            for graph in chain([attribute.g] if attribute.HasField("g") else (), attribute.graphs):
                yield from _calls(graph.node)


def _key(function: onnx.FunctionProto) -> _Key:
    return _domain(function.domain), function.name, function.overload


def _domain(domain: str) -> str:
    return "" if domain == "ai.onnx" else domain


def _present(attribute: Any, field: str) -> bool:
    return attribute.HasField(field) if field in {"f", "i", "s", *_MESSAGES} else bool(getattr(attribute, field))


def _is_text(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def _replace(field: Any, kept: list[Any]) -> None:
    copies = [type(item).FromString(item.SerializeToString()) for item in kept]
    del field[:]
    field.extend(copies)
