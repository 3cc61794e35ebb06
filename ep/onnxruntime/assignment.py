"""Which provider runs which nodes? The plan of `ep`, in the objects of onnxruntime's API."""

from __future__ import annotations

from typing import Any

from ep.onnxruntime.providers import CPU
from ep.onnxruntime.pybind import STATE


class OrtEpAssignedNode:
    """A node: its name, domain and operator."""

    __module__ = STATE

    def __init__(self, name: str, domain: str, op_type: str) -> None:
        self._name, self._domain, self._op_type = name, domain, op_type

    name = property(lambda self: self._name, doc="The node's name.")
    domain = property(lambda self: self._domain, doc="The operator's domain.")
    op_type = property(lambda self: self._op_type, doc="The operator.")


class OrtEpAssignedSubgraph:
    """Nodes that one provider runs."""

    __module__ = STATE

    def __init__(self, ep_name: str, nodes: list[OrtEpAssignedNode]) -> None:
        self._ep_name, self._nodes = ep_name, nodes

    ep_name = property(lambda self: self._ep_name, doc="The provider's name.")

    def get_nodes(self) -> list[OrtEpAssignedNode]:
        """The nodes."""
        return list(self._nodes)


def assignment(session: Any, first: str) -> list[OrtEpAssignedSubgraph]:
    """One entry per node of `CPUExecutionProvider`, as in onnxruntime, and one for all nodes of each other provider."""
    found: dict[Any, tuple[str, list[OrtEpAssignedNode]]] = {}
    leader = session.providers[0]
    for index, node in enumerate(session.plan.nodes):
        domain, _, op_type = node.op.rpartition("::")
        op_type = op_type.rpartition("-")[0] or op_type
        name = first if node.provider == leader else CPU
        assigned = OrtEpAssignedNode(node.node, "" if domain == "ai.onnx" else domain, op_type)
        found.setdefault(index if name == CPU else name, (name, []))[1].append(assigned)
    return [OrtEpAssignedSubgraph(name, nodes) for name, nodes in found.values()]
