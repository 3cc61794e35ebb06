"""Can a user see where each node runs and why: the plan, its warning, and the strict mode?"""

from __future__ import annotations

import io
import json
import warnings
from typing import Any

import numpy as np
import pytest
from conftest import parse
from rich.console import Console

import ep

HOST = "host"

# StringNormalizer exists on the host only; Identity of its result would be dropped, so it is an output itself.
STRINGS = """
    agraph (string[2] words, float[n] x) => (string[m] upper, float[n] y)
    {
        [shout] upper = StringNormalizer<case_change_action = "UPPER">(words)
        [flip] y = Neg(x)
    }
"""
CUT = """
    agraph (float[n] x) => (float[m, 1] y)
    {
        [before] p = Relu(x)
        [where] w = NonZero(p)
        [turn] t = Transpose<perm = [1, 0]>(w)
        [pick] g = GatherND(p, t)
        [after] s = Mul(g, g)
        [column] y = Unsqueeze(s, axis)
    }
"""


def quietly(model: Any, device: str, **options: Any) -> ep.InferenceSession:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ep.HostFallbackWarning)
        return ep.load(model, device, **options)


def test_one_partition_when_the_device_takes_all(accelerator: str) -> None:
    model = parse("agraph (float[n] x) => (float[n] y) { [one] a = Neg(x)  [two] y = Exp(a) }")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = ep.load(model, accelerator, strict=True).plan
    assert [(n.node, n.op.partition("-")[0], n.provider) for n in plan.nodes] == [
        ("one", "ai.onnx::Neg", accelerator),
        ("two", "ai.onnx::Exp", accelerator),
    ]
    (partition,) = plan.partitions
    assert (partition.provider, partition.nodes, partition.how) == (accelerator, 2, "compiled")
    assert (partition.inputs, partition.outputs) == (("x",), ("y",))
    assert plan.fallbacks == () and plan.counts() == {accelerator: 2}


def test_a_shape_that_data_decide_cuts_the_graph(accelerator: str) -> None:
    """Before the cut one compiled partition; after it another, whose inputs include what crossed."""
    model = parse(
        CUT.replace("s, axis", "s, one").replace("{\n        [before]", "<int64[1] one = {1}>\n    {\n        [before]")
    )
    session = quietly(model, accelerator)
    (y,) = session.run(None, {"x": np.array([0, 2, -1, 3], np.float32)})
    np.testing.assert_array_equal(y, [[4], [9]])
    plan = session.plan
    where = {n.node: n.provider for n in plan.nodes}
    assert where["before"] == where["pick"] == where["after"] == accelerator
    compiled = [p for p in plan.partitions if p.provider == accelerator and p.how == "compiled"]
    assert len(plan.partitions) >= 2 and len(compiled) >= 2
    first, last = compiled[0], compiled[-1]
    assert first.inputs == ("x",) and "p" in first.outputs
    assert last.outputs == ("y",) and {"p"} < {*last.inputs, *last.host_inputs}
    assert sum(p.nodes for p in plan.partitions) == len(plan.nodes) == 6


def test_the_warning_counts_and_names_and_says_why(accelerator: str) -> None:
    with pytest.warns(ep.HostFallbackWarning) as caught:
        session = ep.load(parse(STRINGS), accelerator)
    (warning,) = caught
    text = str(warning.message)
    assert text.startswith("1 of 2 nodes of agraph run on the host: 'shout' (ai.onnx::StringNormalizer-10): ")
    (fallback,) = session.plan.fallbacks
    assert fallback.reason and fallback.reason in text and text.endswith("(session.plan lists all)")
    assert warning.filename == __file__  # it points at the caller's line
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        upper, y = session.run(None, {"words": ["a", "b"], "x": np.ones(2, np.float32)})
        session.run(None, {"words": ["c", "d"], "x": np.ones(3, np.float32)})
    assert list(upper) == ["A", "B"]
    np.testing.assert_array_equal(y, [-1, -1])
    assert session.plan.counts() == {HOST: 1, accelerator: 1}


def test_the_host_device_does_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        session = ep.load(parse(STRINGS), "host", strict=True)
    assert session.plan.fallbacks == () and session.plan.counts() == {HOST: 2}


def test_strict_refuses_and_names_every_fallback(accelerator: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ep.UnsupportedModel) as caught:
            ep.load(parse(STRINGS), accelerator, strict=True)
    text = str(caught.value)
    assert text.startswith("1 of 2 nodes of agraph would run on the host:\n  'shout' (ai.onnx::StringNormalizer-10): ")
    assert "flip" not in text and "Why: " in text and "Fix: " in text


def test_an_unknown_operator_is_refused_on_every_device(device: str) -> None:
    model = parse("agraph (float[n] x) => (float[n] y) { [odd] y = acme.Frobnicate(x) }", '"": 21, "acme": 1')
    with pytest.raises(ep.UnsupportedModel) as caught:
        ep.load(model, device)
    assert "acme::Frobnicate" in str(caught.value) and "'odd'" in str(caught.value)


def test_plan_in_every_form(accelerator: str) -> None:
    model = parse(STRINGS)
    model.graph.node[1].name = "flip<b>&"
    plan = quietly(model, accelerator).plan
    assert str(plan) == repr(plan) and "2 nodes" in str(plan) and "shout" in str(plan)

    console = Console(file=io.StringIO(), width=200)
    console.print(plan)
    page = plan._repr_html_()
    for text in (console.file.getvalue(), page):
        for word in (accelerator, HOST, "StringNormalizer", "shout"):
            assert word in text
    assert "flip<b>&" in console.file.getvalue()
    assert "flip&lt;b&gt;&amp;" in page and "flip<b>" not in page

    data = json.loads(json.dumps(plan.to_dict()))
    assert {n["node"]: n["provider"] for n in data["nodes"]} == {"shout": HOST, "flip<b>&": accelerator}
    assert data["providers"][0] == accelerator and len(data["partitions"]) == len(plan.partitions)


def test_plan_shows_what_control_flow_does(accelerator: str) -> None:
    """A branch that the device's own values decide runs step by step; the nodes of its bodies are listed too."""
    model = parse("""
        agraph (float[n] x) => (float[m] y)
        <float zero = {0.0}, int64[1] first = {0}, int64[1] two = {2}>
        {
            [sum] total = ReduceSum<keepdims=0>(x)
            [sign] positive = Greater(total, zero)
            [choose] y = If (positive) <
                then_branch = one () => (float[a] h) { [head] h = Slice(x, first, two) },
                else_branch = other () => (float[b] t) { [twice] t = Concat<axis=0>(x, x) }
            >
        }
    """)
    session = quietly(model, accelerator)
    session.run(None, {"x": np.ones(3, np.float32)})
    plan = session.plan
    assert {n.node for n in plan.nodes} == {"sum", "sign", "choose", "head", "twice"}
    assert "step by step" in {p.how for p in plan.partitions}
