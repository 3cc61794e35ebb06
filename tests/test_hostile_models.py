"""What happens with models that are damaged, or made to do harm? An error of ours, soon, and with all that is wrong."""

from __future__ import annotations

import random
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

import ep
from ep.errors import EpError, InvalidModel, UnsupportedModel

OPSETS = '"": 21, "f": 1'
MODELS = [
    "g (float[n,3] x) => (float[n,2] y) <float[3,2] w = {1,2,3,4,5,6}> { h = MatMul(x, w) y = Softmax<axis=-1>(h) }",
    """g (float[n] x, int64 k) => (float[n] y, float[t,n] ys) {
        y, ys = Loop(k, , x) <body = b (int64 i, bool c, float[n] s) => (bool c, float[n] s2, float[n] o) {
            z = Cast<to=1>(i) s2 = Add(s, z) o = Mul(s2, x) }> }""",
    """g (float[n] x) => (float y) { z = Constant<value = float {0}>() m = ReduceSum<keepdims=0>(x) c = Greater(m, z)
        y = If (c) <then_branch = a () => (float p) { p = Add(m, z) },
            else_branch = e () => (float q) { q = Neg(m) }> }""",
    """g (float[2] s0, float[t,2] xs) => (float[2] s, float[t,2] ys) {
        s, ys = Scan<num_scan_inputs=1, body = b (float[2] a, float[2] x) => (float[2] a2, float[2] y) {
            a2 = Add(a, x) y = Mul(a2, x) }>(s0, xs) }""",
    """g (float[n] x) => (float[n] y) { a = f.square<k: float = 2.0>(x) y = f.twice(a) }
       <domain: "f", opset_import: ["": 21, "f": 1]>
       square<k>(p) => (q) { c = Constant<value_float: float = @k>() m = Mul(p, p) q = Mul(m, c) }
       <domain: "f", opset_import: ["": 21, "f": 1]>
       twice(p) => (q) { r = f.square<k: float = 1.0>(p) q = Add(r, p) }""",
    """g (float[3,2] x, int64 i) => (float[k,2] y) {
        s = SplitToSequence<axis=0>(x) e = SequenceAt(s, i) t = SequenceInsert(s, e)
        y = ConcatFromSequence<axis=0>(t) }""",
    """g (float[2,3] x, int64[2] s, string[n] w) => (float[a,b] y, float[1,1,h,v] r, string[n] l) {
        y = Reshape(x, s) c = Constant<value_ints=[1,1,2,3]>() z = Reshape(x, c)
        f = Constant<value_floats=[1.,1.,2.,2.]>()
        r = Resize<mode="linear">(z, , f) l = StringNormalizer<case_change_action="LOWER">(w) }""",
]  # fmt: skip
NUMBERS = [0, 1, -1, 2, 3, 16, 100, 2**31 - 1, -(2**31), 2**31, 2**63 - 1, -(2**63), 2**40]


def model(text: str, opsets: str = OPSETS) -> onnx.ModelProto:
    return parser.parse_model(f"<ir_version: 10, opset_import: [{opsets}]> {text}")


def node_model(*nodes: Any, **more: Any) -> onnx.ModelProto:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "xy")
    graph = helper.make_graph(nodes, "g", [x], [y], **more)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def refused(source: Any, *facts: str, kind: type[EpError] = InvalidModel) -> str:
    """Loading raises this kind of error, with these facts."""
    with pytest.raises(EpError) as caught:
        ep.load(source, "host")
    text = str(caught.value)
    assert isinstance(caught.value, kind), text
    assert [fact for fact in facts if fact not in text] == [], text
    return text


# Mutations.


def damaged_bytes(rng: random.Random, content: bytes) -> bytes:
    made = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 8])):
        at, kind = rng.randrange(len(made)), rng.random()
        if kind < 0.5:
            made[at] = rng.randrange(256)
        elif kind < 0.7:
            del made[at : at + rng.choice([1, 2, 20])]
        elif kind < 0.9:
            other = rng.randrange(len(made))
            made[at:at] = made[other : other + rng.choice([1, 5, 50])]
        else:
            del made[max(at, 1) :]
    return bytes(made)


def damaged_fields(rng: random.Random, content: bytes) -> bytes:
    proto = onnx.ModelProto.FromString(content)
    for _ in range(rng.choice([1, 1, 2, 4])):
        messages: list[Any] = []
        collect(proto, messages)
        message = rng.choice(messages)
        field = rng.choice([f for f, _ in message.ListFields()] or list(message.DESCRIPTOR.fields))
        damage(rng, message, field, messages)
    return proto.SerializeToString()


def collect(message: Any, into: list[Any]) -> None:
    into.append(message)
    for field, value in message.ListFields():
        if field.type == field.TYPE_MESSAGE:
            for inner in value if field.is_repeated else [value]:
                collect(inner, into)


def damage(rng: random.Random, message: Any, field: Any, messages: list[Any]) -> None:
    values = getattr(message, field.name)
    if rng.random() < 0.15:
        message.ClearField(field.name)
    elif field.type == field.TYPE_MESSAGE and field.is_repeated:
        if len(values) and rng.random() < 0.5:
            del values[rng.randrange(len(values))]
        elif len(values):
            values.add().CopyFrom(rng.choice(values))
    elif field.type == field.TYPE_MESSAGE:
        copy = type(values).FromString(
            rng.choice([m for m in messages if m.DESCRIPTOR is values.DESCRIPTOR] or [values]).SerializeToString()
        )
        values.CopyFrom(copy)
    else:
        value = scalar(rng, field)
        if not field.is_repeated:
            setattr(message, field.name, value)
        elif len(values):
            values[rng.randrange(len(values))] = value
        else:
            values.append(value)


def scalar(rng: random.Random, field: Any) -> Any:
    if field.type == field.TYPE_STRING:
        return rng.choice(["", "x", "y", "s", "Add", "If", "Loop", "nowhere", "f", "com.microsoft"])
    if field.type == field.TYPE_BYTES:
        return rng.choice([b"", b"\xff", b"abcd"])
    if field.type == field.TYPE_ENUM:
        return rng.choice([v.number for v in field.enum_type.values])
    if field.type in (field.TYPE_FLOAT, field.TYPE_DOUBLE):
        return rng.choice([0.0, -1.0, float("nan"), 1e30])
    if field.name in ("data_type", "elem_type"):
        return rng.randrange(30)
    small = field.type in (field.TYPE_INT32,)
    return rng.choice([n for n in NUMBERS if not small or abs(n) < 2**31])


@pytest.mark.parametrize("damaged", [damaged_bytes, damaged_fields])
@pytest.mark.parametrize("text", MODELS, ids=["softmax", "loop", "if", "scan", "function", "sequence", "reshape"])
def test_a_damaged_model_is_loaded_or_refused_in_our_words(text, damaged):
    content = model(text).SerializeToString()
    ep.load(content, "host")
    started = time.perf_counter()
    for seed in range(60):
        try:
            ep.load(damaged(random.Random(seed), content), "host").plan  # noqa: B018
        except EpError as error:
            assert error.fix, str(error)
    assert time.perf_counter() - started < 60  # no single one hangs


# What a mutation seldom finds.


def test_everything_that_is_wrong_comes_in_one_error(tmp_path):
    external = helper.make_tensor("w", TensorProto.FLOAT, [1], [1.0])
    external.ClearField("float_data")
    external.data_location = TensorProto.EXTERNAL
    external.external_data.add(key="location", value="absent.data")
    made = node_model(
        helper.make_node("Relu", ["x"], ["a"], name="first", slope=0.5),
        helper.make_node("LeakyRelu", ["a"], ["b"], name="second", alpha="steep"),
        helper.make_node("Frobnicate", ["b"], ["c"], name="third"),
        helper.make_node("Abs", ["nowhere"], ["c"], name="fourth"),
        helper.make_node("Add", ["c", "w"], ["y"], name="fifth"),
        initializer=[external, helper.make_tensor("", TensorProto.FLOAT, [], [1.0])],
    )
    made.graph.input.append(made.graph.input[0])
    (tmp_path / "m.onnx").write_bytes(made.SerializeToString())
    text = refused(tmp_path / "m.onnx", "two inputs named 'x'", "no name", "'slope'", "'alpha'", "'nowhere'", "'c'")
    assert "Frobnicate" in text
    assert "'absent.data'" in text


@pytest.mark.parametrize(
    ("node", "fact"),
    [
        (helper.make_node("LeakyRelu", ["x"], ["y"], alpha="steep"), "'alpha' of type STRING, which must be FLOAT"),
        (helper.make_node("Concat", ["x"], ["y"], axis=0.5), "'axis' of type FLOAT, which must be INT"),
        (helper.make_node("Transpose", ["x"], ["y"], perm=1), "'perm' of type INT, which must be INTS"),
        (helper.make_node("Cast", ["x"], ["y"], to=99), "names a type that does not exist"),
        (helper.make_node("Identity", ["x"], []), "has no output"),
        (helper.make_node("", ["x"], ["y"]), "names no operator"),
        (helper.make_node("Relu", ["x"], ["y", "z"]), "has 2 outputs; at most 1"),
    ],
    ids=["string", "float", "int", "type", "output", "operator", "outputs"],
)
def test_a_node_that_breaks_its_schema(node, fact):
    refused(node_model(node), fact)


def test_an_attribute_that_is_given_twice():
    node = helper.make_node("Softmax", ["x"], ["y"], axis=0)
    node.attribute.add(name="axis", type=onnx.AttributeProto.INT, i=1)
    refused(node_model(node), "attribute 'axis' twice")


def test_two_dtypes_where_the_operator_wants_one():
    made = model("g (float[n] x, int64[n] k) => (float[n] y) { y = Add(x, k) }")
    refused(made, "int64 as input 'B'", "float32 as 'A'")


def test_a_node_that_produces_a_weight():
    weight = helper.make_tensor("y", TensorProto.FLOAT, [1], [1.0])
    refused(node_model(helper.make_node("Relu", ["x"], ["y"]), initializer=[weight]), "'y', which has another producer")


BODY = "body = b (int64 i, bool c, float[n] s) => (bool c, float[n] s2) { s2 = Add(s, s) }"


@pytest.mark.parametrize(
    ("body", "facts"),
    [
        (f"y = Loop(k, , x, x) <{BODY}>", ["'body' of 3 inputs", "gives it 4"]),
        (f"y, z = Loop(k, , x) <{BODY}>", ["'body' of 2 outputs", "expects 3"]),
        (
            "c = Cast<to=9>(k) y = If (c) <then_branch = a (float p) => (float q) { q = Neg(p) }, "
            "else_branch = e () => (float u, float v) { u = Neg(x) v = Abs(x) }>",
            ["'then_branch' of 1 inputs", "'else_branch' of 2 outputs"],
        ),
        (
            "y = Scan<num_scan_inputs=1, body = b (float[n] p) => (float[n] q) { q = Neg(p) }>(x, x, x)",
            ["'body' of 1 inputs", "gives it 3"],
        ),
    ],
    ids=["inputs", "outputs", "branches", "scan"],
)
def test_bodies_that_do_not_fit_their_node(body, facts):
    refused(model(f"g (float[n] x, int64 k) => (float[n] y) {{ {body} }}"), *facts)


FUNCTION = '<domain: "f", opset_import: ["": 21, "f": 1]>'


@pytest.mark.parametrize("field", ["name", "op_type", "domain", "input", "output"])
def test_a_name_that_is_no_text(field):
    node = helper.make_node("Relu", ["x"], ["y"])
    model = helper.make_model(helper.make_graph([node], "g", [], []))
    written = model.graph.node[0]
    if field in ("input", "output"):
        getattr(written, field)[0] = "QQQQ"
    else:
        setattr(written, field, "QQQQ")
    with pytest.raises(InvalidModel, match=r"has a name that is not text: b'\\xff\\xfe\\xfd\\xfc'"):
        ep.load(model.SerializeToString().replace(b"QQQQ", b"\xff\xfe\xfd\xfc"), "host")


def test_functions_that_call_each_other_for_ever():
    made = model(f"""g (float[n] x) => (float[n] y) {{ y = f.ping(x) }}
        {FUNCTION} ping(p) => (q) {{ q = f.pong(p) }} {FUNCTION} pong(p) => (q) {{ q = f.ping(p) }}""")
    refused(made, "f::ping → f::pong → f::ping", "Loop or Scan")


def test_functions_that_multiply_their_calls():
    levels = "".join(f"{FUNCTION} f{i}(p) => (q) {{ a = f.f{i + 1}(p) q = f.f{i + 1}(a) }} " for i in range(40))
    made = model(f"g (float[n] x) => (float[n] y) {{ y = f.f0(x) }} {levels} {FUNCTION} f40(p) => (q) {{ q = Neg(p) }}")
    refused(made, f"{2**40:,} nodes")


def test_a_future_opset_inside_a_function():
    made = model(f"g (float[n] x) => (float[n] y) {{ y = f.h(x) }} {FUNCTION} h(p) => (q) {{ q = Neg(p) }}")
    made.functions[0].opset_import[0].version = 999
    refused(made, "opset 999", kind=UnsupportedModel)


@pytest.mark.parametrize("version", [0, -1, 1 << 40])
def test_an_opset_that_cannot_be(version):
    made = model(MODELS[0])
    made.opset_import[0].version = version
    refused(made, f"imports version {version}")


def test_sparse_tensors_read_no_files(tmp_path, monkeypatch):
    secret = tmp_path / "secret.data"
    secret.write_bytes(b"12345678")
    monkeypatch.chdir(tmp_path)
    values = helper.make_tensor("w", TensorProto.FLOAT, [2], [1.0, 2.0])
    values.ClearField("float_data")
    values.data_location = TensorProto.EXTERNAL
    values.external_data.add(key="location", value="secret.data")
    sparse = helper.make_sparse_tensor(values, helper.make_tensor("i", TensorProto.INT64, [2], [0, 1]), [4])
    made = node_model(helper.make_node("Add", ["x", "w"], ["y"]), sparse_initializer=[sparse])
    refused(made, "'w'", "another file")


def test_a_sparse_tensor_that_would_fill_the_memory():
    values = helper.make_tensor("w", TensorProto.FLOAT, [1], [1.0])
    sparse = helper.make_sparse_tensor(values, helper.make_tensor("i", TensorProto.INT64, [1], [0]), [1 << 40])
    refused(node_model(helper.make_node("Add", ["x", "w"], ["y"]), sparse_initializer=[sparse]), "'w'", "become dense")


@pytest.mark.parametrize(
    "body",
    [
        "s = Constant<value_ints=[536870912]>() y = ConstantOfShape(s)",
        "s = Constant<value_ints=[536870912]>() x = Constant<value_floats=[1.0]>() y = Expand(x, s)",
        "s = Constant<value_ints=[536870912]>() x = Constant<value_floats=[1.0]>() y = Tile(x, s)",
        "p = Constant<value_ints=[0, 536870912]>() x = Constant<value_floats=[1.0]>() y = Pad(x, p)",
    ],
    ids=["ConstantOfShape", "Expand", "Tile", "Pad"],
)
def test_loading_computes_no_huge_constants(body):
    tracemalloc.start()
    try:
        ep.load(model(f"g () => (float[n] y) {{ {body} }}"), "host")
        assert tracemalloc.get_traced_memory()[1] < 1 << 30  # NumPy tells it of its arrays
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("head", ["Loop(k, , k)", "Loop(, t, k)"], ids=["long", "endless"])
def test_loading_runs_no_long_loops(head):
    ep.load(
        model(f"""g () => (int64 y) {{ k = Constant<value_int=9000000000>() t = Constant<value = bool {{1}}>()
            y = {head} <body = b (int64 i, bool c, int64 s) => (bool c2, int64 s2) {{
                c2 = Identity(c) s2 = Add(s, i) }}> }}"""),
        "host",
    )


def test_short_loops_over_constants_are_folded():
    session = ep.load(
        model("""g () => (int64 y) { k = Constant<value_int=5>() z = Constant<value_int=0>()
            y = Loop(k, , z) <body = b (int64 i, bool c, int64 s) => (bool c, int64 s2) { s2 = Add(s, i) }> }"""),
        "host",
    )
    assert session.run(None, {})[0] == 10
    assert len(session.plan.nodes) == 0


def test_a_weight_that_is_not_there_is_told_once_for_all(tmp_path: Path):
    made = node_model(
        helper.make_node("Add", ["x", "v"], ["a"]),
        helper.make_node("Add", ["a", "w"], ["y"]),
        initializer=[numpy_helper.from_array(np.ones(400, np.float32), name) for name in "vw"],
    )
    onnx.save(made, tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    (tmp_path / "m.data").unlink()
    refused(tmp_path / "m.onnx", "2 problems", "'v'", "'w'", "m.data", "No such file")
