"""Which opset can all nodes of a graph share? A pass may leave nodes that keep the opset of what they were made from.

A file has one opset for each domain, so that such nodes need one at which every operator means what it means now.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx_ir as ir


def shared_opsets(graph: ir.Graph) -> tuple[dict[str, int], str]:
    """Domain → opset for a file, and which operator stands in the way of one, or ""."""
    import onnx

    def meaning(op_type: str, domain: str, opset: int) -> Any:
        known = onnx.defs.has(op_type, opset, domain)
        return onnx.defs.get_schema(op_type, opset, domain).since_version if known else None

    opsets = dict(graph.opset_imports)
    used: dict[str, set[tuple[str, int]]] = defaultdict(set)
    for node in graph.all_nodes():
        used[node.domain].add((node.op_type, node.version if node.version is not None else opsets.get(node.domain, 1)))
    for domain, pairs in used.items():
        wanted = dict.fromkeys([opsets.get(domain, 1), *sorted({version for _, version in pairs}, reverse=True)])
        wrong: list[str] = []
        for opset in wanted:
            clash = [op for op, own in sorted(pairs) if meaning(op, domain, own) != meaning(op, domain, opset)]
            if not clash:
                opsets[domain] = opset
                break
            wrong += clash
        else:
            return opsets, f"{wrong[0]} is used in two versions of domain '{domain or 'ai.onnx'}'"
    return opsets, ""
