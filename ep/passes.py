"""Which rewrites every model goes through: one ordered tuple, graph to graph, before and after binding."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ep.binding import Binder, BoundGraph, captures
from ep.bodies import InlineBody
from ep.errors import EpError, InvalidModel, UnsupportedModel
from ep.gradients import INTERNAL, outline_gradients
from ep.packed_constants import fuse_dequantization
from ep.partition import EMBEDDED_BYTES
from ep.program import Runner, Step
from ep.registry import OPS, ShapeOf, normal_domain
from ep.string_labels import INTEGER_LABELS, split_string_labels
from ep.structure import understood
from ep.weights import WeightStore

if TYPE_CHECKING:
    import onnx_ir as ir

FOLD_BYTES = 1 << 24  # a constant larger than this is kept as computation when its sources are smaller
FOLD_TRIPS = 1000  # a loop that may run more often is kept
MOST_SHOWN = 8  # damaged tensors that one error names
NEWEST_OPSET = {"": 28, "ai.onnx.ml": 6, "ai.onnx.preview.training": 1}


def prepare(model: ir.Model, store: WeightStore, name: str) -> BoundGraph:
    """The model as a folded `BoundGraph`; raises one error with all problems of the model."""
    bound = bind(model, store, name)
    with understood(name):
        fold(bound)
    return remove_unused(bound)


def bind(model: ir.Model, store: WeightStore, name: str) -> BoundGraph:
    """As `prepare`, but nothing is computed, and no weight is read."""
    import ep.ops  # noqa: F401 - registers the lowerings

    check_opsets(model, name)
    binder = Binder(model, store)
    with understood(name, binder.problems):
        inline_functions(model)
        find_internal(model, binder)
        nodes = list(model.graph.all_nodes())
        for concerns, rewrite in PASSES:
            if any(map(concerns, nodes)):
                rewrite(model)
                nodes = list(model.graph.all_nodes())
        bound = binder.bind(model.graph)
    refuse(binder, name)
    fuse_dequantization(bound)
    return bound


def check_opsets(model: ir.Model, name: str) -> None:
    """Refuses operator sets from the future: their semantics are unknown."""
    every = [model.graph.opset_imports, *(function.opset_imports for function in model.functions.values())]
    newer = [
        f"opset {version} of domain '{domain or 'ai.onnx'}' (newest known: {NEWEST_OPSET[normal_domain(domain)]})"
        for domain, version in dict.fromkeys(item for imports in every for item in imports.items())
        if version > NEWEST_OPSET.get(normal_domain(domain), version)
    ]
    if newer:
        raise UnsupportedModel(
            f"{name} uses {', '.join(newer)}.",
            why="operators may have changed there in ways that this version does not know.",
            fix="upgrade ep-runtime, or convert the model with onnx.version_converter.",
        )


def refuse(binder: Binder, name: str) -> None:
    """Raises what binding found, all of it in one error."""
    if binder.damaged and not binder.problems and len(binder.damaged) == 1:
        raise binder.damaged[0]
    missing = [
        f"{op}  {len(nodes)} node{'s' if len(nodes) > 1 else ''}: {', '.join(map(repr, nodes[:3]))}"
        + (", …" if len(nodes) > 3 else "")
        for op, nodes in sorted(binder.unsupported.items())
    ]
    damaged = [f"{error.what} ({error.why})" for error in binder.damaged[:MOST_SHOWN]]
    if len(binder.damaged) > MOST_SHOWN:
        damaged.append(f"… and {len(binder.damaged) - MOST_SHOWN} more tensors")
    if binder.problems or damaged:
        raise InvalidModel.from_problems(
            name,
            [*binder.problems, *damaged, *(f"no lowering: {line}" for line in missing)],
            why="it breaks the ONNX specification." if binder.problems else "its data cannot be read.",
            fix=binder.damaged[0].fix if not binder.problems else "export the model again.",
        )
    if any(line.startswith("com.microsoft.nchwc::") for line in missing):
        raise UnsupportedModel.from_problems(
            name,
            missing,
            why="onnxruntime saved it with all its optimizations: weights lie as its kernels want them on one machine.",
            fix="load the original model, or save the optimized one at the level ORT_ENABLE_EXTENDED.",
        )
    if missing:
        raise UnsupportedModel.from_problems(
            name,
            missing,
            why="these operators have neither a lowering in ep.ops nor an ONNX function body to inline.",
            fix='export the model without them, or add a lowering: @op("Name", domain="…") in ep/ops.',
        )


# Before binding: onnx_ir graphs.


def inline_functions(model: ir.Model) -> None:
    """Model-local functions, and ONNX function bodies of operators that have no lowering."""
    from onnx_ir.passes.common import InlinePass

    for _ in range(8):  # a body may use operators that again have only a body
        add_function_bodies(model)
        if not model.functions:
            return
        for function in model.functions.values():
            pin_versions(function, model.graph.opset_imports)
        InlinePass()(model)


def pin_versions(function: ir.Function, opsets: dict[str, int]) -> None:
    """Lets the nodes of a function keep the opsets of the function where those of the model differ."""
    for node in function.all_nodes():
        own = function.opset_imports.get(node.domain)
        if node.version is None and own != opsets.get(node.domain, own):
            node.version = own
    function.opset_imports.update({d: opsets.setdefault(d, v) for d, v in function.opset_imports.items()})


def add_function_bodies(model: ir.Model) -> None:
    import onnx_ir as ir

    for node in model.graph.all_nodes():
        opset = node.version if node.version is not None else model.graph.opset_imports.get(node.domain, 0)
        if node.op_identifier() in model.functions or OPS.find(node.domain, node.op_type, opset):
            continue
        body = function_body(node, opset)
        if body is not None:
            function = ir.serde.deserialize_function(body)
            model.functions[function.identifier()] = function


def function_body(node: ir.Node, opset: int) -> Any:
    """The `FunctionProto` that defines an operator, or `None`."""
    import onnx

    if not onnx.defs.has(node.op_type, opset, node.domain):
        return None
    schema: Any = onnx.defs.get_schema(node.op_type, opset, node.domain)
    versions = [v for v in schema.function_opset_versions if v <= opset]
    return schema.get_function_with_opset_version(max(versions)) if versions else None


def find_internal(model: ir.Model, binder: Binder) -> None:
    """Operators that passes make are none that a model may use: nothing checks their attributes."""
    if INTERNAL in model.graph.opset_imports:
        for node in model.graph.all_nodes():
            if node.domain == INTERNAL:
                binder.unsupported.setdefault(f"{INTERNAL}::{node.op_type}", []).append(node.name or "")


def lift_initializers(model: ir.Model) -> None:
    """Weights of branches and bodies become weights of the main graph: shared, and arguments when compiled."""
    from onnx_ir.passes.common import LiftSubgraphInitializersToMainGraphPass

    LiftSubgraphInitializersToMainGraphPass()(model)


def drop_dropout(model: ir.Model) -> None:
    """Dropout at inference, its mask unused, passes its input through."""
    for node in list(model.graph.all_nodes()):
        if node.op_type != "Dropout" or node.domain or any(v.uses() for v in node.outputs[1:]):
            continue
        training = node.inputs[2] if len(node.inputs) > 2 else None
        legacy = model.graph.opset_imports.get("", 1) < 7
        outputs_used = any(v.is_graph_output() for v in node.outputs)
        graph, ready = node.graph, not legacy and training is None and not outputs_used
        if ready and graph is not None and node.inputs[0] is not None:
            node.outputs[0].replace_all_uses_with(node.inputs[0])
            graph.remove(node, safe=True)


# Which nodes a rewrite is about, and the rewrite. Most models have none of them, and each rewrite walks all nodes.
PASSES: tuple[tuple[Callable[[ir.Node], bool], Callable[[ir.Model], None]], ...] = (
    (lambda node: node.op_type == "Gradient", outline_gradients),
    (lambda node: node.op_type in INTEGER_LABELS, split_string_labels),
    (lambda node: any(a.type.name in ("GRAPH", "GRAPHS") for a in node.attributes.values()), lift_initializers),
    (lambda node: node.op_type == "Dropout", drop_dropout),
)


# After binding: constants.


def fold(graph: BoundGraph) -> None:
    """Evaluates every node whose inputs are all constant, with the host namespace."""
    graph.steps[:] = fold_steps(graph.steps, graph.constants, graph.baked)


def fold_steps(steps: list[Step] | tuple[Step, ...], constants: dict[Any, Any], baked: set[int]) -> list[Step]:
    import ep.host_namespace as host

    runner, kept = Runner(host, host), []
    for step in steps:
        if foldable(step, constants) and affordable(step, constants) and evaluate_constant(step, constants, runner):
            baked |= contents_read(step, constants)
            continue
        for name, body in step.bodies.items():
            step.bodies[name] = fold_body(body, constants, baked)
        kept.append(step)
    return kept


def contents_read(step: Step, constants: dict[Any, Any]) -> set[int]:
    """Where constants lie that decided results of a step: not one that gave its shape, or that the results show.

    Results that are views show the first input. Another input of the same memory decided which part of it they show,
    and so may anything that a branch or a body reads.
    """
    results = [constants[v] for v in step.outputs if v is not None]
    inputs = {v: i for i, v in reversed(list(enumerate(step.inputs)))}

    def decided(value: Any) -> bool:
        number = inputs.get(value)
        if step.bodies or number is None:
            return True
        if step.lowering.role(number) is ShapeOf and step.inputs.count(value) == 1:
            return False
        shown = number == 0 and step.inputs.count(value) == 1
        return not (shown and all(np.may_share_memory(constants[value], result) for result in results))

    return {np.asarray(constants[v]).ctypes.data for v in step.reads() if decided(v)}


def foldable(step: Step, constants: dict[Any, Any]) -> bool:
    reads = tuple(step.reads())
    unpacking = step.op == "ep::Unpack"  # what it makes takes more memory, and no device holds it better
    known = not unpacking and all(v in constants for v in reads)
    return known and not step.lowering.random


def affordable(step: Step, constants: dict[Any, Any]) -> bool:
    """Whether a few numbers do not ask for a huge result, or for a loop that takes long or never ends."""
    values = [None if v is None else constants[v] for v in step.inputs]
    if any(body.inputs for body in step.bodies.values()):  # a loop; branches have no inputs
        limit = values[0] if values else None
        return limit is not None and (limit.size != 1 or limit.dtype.kind not in "iu" or limit.item() <= FOLD_TRIPS)
    size = RESULT_SIZE.get(step.lowering.key.op_type)
    if size is None or step.lowering.key.domain:
        return True
    try:
        return size(*values) * 8 <= FOLD_BYTES
    except (TypeError, ValueError, ArithmeticError):  # not what the operator takes: it fails on it, quickly
        return True


def _product(dims: Any) -> float:
    return float(np.prod(np.asarray(dims, np.float64)))


# Operators whose results may be far larger than what they read → elements of the result.
RESULT_SIZE: dict[str, Callable[..., float]] = {
    "ConstantOfShape": _product,
    "Expand": lambda x, shape: x.size * _product(shape),
    "Tile": lambda x, repeats, *_: x.size * _product(repeats),
    "Range": lambda start, limit, delta: float((limit - start) / delta),
    "OneHot": lambda indices, depth, values: indices.size * float(depth.item()),
    **dict.fromkeys(("HannWindow", "HammingWindow", "BlackmanWindow"), lambda size: float(size.item())),
    "Resize": lambda x, roi=None, scales=None, sizes=None: (
        _product(sizes) if sizes is not None else x.size * _product(scales)
    ),
    "Pad": lambda x, pads, *_: max(x.size, 1) * _product(1.0 + np.abs(np.asarray(pads, np.float64))),
}


def evaluate_constant(step: Step, constants: dict[Any, Any], runner: Runner) -> bool:
    """Whether the node's outputs became constants; a node that fails is left to fail at run time, if it runs."""
    env = {v: constants[v] for v in step.reads()}
    read = [getattr(a, "nbytes", 0) for a in env.values()]
    try:
        runner.evaluate([step], env)
    except EpError:
        return False
    results = {v: env[v] for v in step.outputs if v is not None}
    if not all(isinstance(r, np.ndarray | np.generic) for r in results.values()):
        return False
    if not pays(step, sum(read), sum(np.asarray(r).nbytes for r in results.values())):
        return False
    for value, result in results.items():
        constants[value] = array = np.asarray(result)
        array.flags.writeable = False  # results of runs may be views of it
    return True


def pays(step: Step, read: int, written: int) -> bool:
    """Whether to keep what a step makes of constants, by the bytes that it reads and writes."""
    held = sum(a.nbytes for a in step.attributes.values() if isinstance(a, np.ndarray))  # a Constant has its value
    return written <= max(FOLD_BYTES, read + held)


def fold_body(body: InlineBody, outer: dict[Any, Any], baked: set[int]) -> InlineBody:
    """The body with constants folded. Large ones move to the graph around it, whose weights are arguments."""
    known = {v: outer[v] for v in body.captures if v in outer} | body.constants
    steps = fold_steps(body.steps, known, baked)
    read = {v for step in steps for v in step.reads()} | set(body.outputs)
    own = {v: a for v, a in known.items() if v in read and v not in outer}
    large = {v: a for v, a in own.items() if a.nbytes > EMBEDDED_BYTES and a.dtype.kind != "O"}
    outer.update(large)
    own = {v: a for v, a in own.items() if v not in large}
    return InlineBody(
        body.name, body.inputs, body.outputs, tuple(steps), captures(steps, (*body.inputs, *own), body.outputs), own,
        body.declared,
    )  # fmt: skip


def remove_unused(graph: BoundGraph) -> BoundGraph:
    """Drops nodes and constants that no output needs."""
    needed, kept = set(graph.outputs), []
    for step in reversed(graph.steps):
        if any(v in needed for v in step.outputs):
            kept.append(step)
            needed.update(step.reads())
    graph.steps[:] = kept[::-1]
    graph.constants = {v: a for v, a in graph.constants.items() if v in needed}
    return graph


__all__ = ["PASSES", "bind", "prepare"]
