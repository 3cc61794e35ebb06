"""Does `ep.onnxruntime` answer like onnxruntime, as far as it goes?"""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, parser

import ep.onnxruntime as ours

theirs = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

CPU = ["CPUExecutionProvider"]


def parsed(text: str) -> onnx.ModelProto:
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["": 17, "ai.onnx.ml": 3]> {text}')
    model.producer_name, model.domain, model.doc_string = "tests", "com.example", "a model"
    helper.set_model_props(model, {"language": "en"})
    return model


MODELS = {
    "tensors": "g (float[n, 2] x, float16[?] h, int64 i) => (float[n, 2] y, float16[?] k, int64 j)"
    "{ y = Relu(x)\n k = Abs(h)\n j = Abs(i) }",
    "strings": "g (string[n] s) => (string[n] t) { t = Concat <axis = 0> (s) }",
    "sequence": "g (seq(float[n]) s) => (seq(float[n]) t) { t = Identity(s) }",
    "maps": "g (float[n, 2] x) => (seq(map(int64, float)) y)"
    "{ y = ai.onnx.ml.ZipMap <classlabels_int64s = [3, 5]> (x) }",
}
FEEDS = {
    "tensors": {"x": np.array([[-1, 2]], np.float32), "h": np.array([-1], np.float16), "i": np.array(-3)},
    "strings": {"s": np.array(["a", "ä"], object)},
    "sequence": {"s": [np.ones(2, np.float32), np.zeros(1, np.float32)]},
    "maps": {"x": np.array([[0.25, 0.75], [1, 0]], np.float32)},
}
pytestmark = pytest.mark.filterwarnings("ignore::ep.HostFallbackWarning")


@pytest.fixture(params=MODELS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def test_inputs_and_outputs_are_described_alike(kind):
    content = parsed(MODELS[kind]).SerializeToString()
    described = []
    for module in (theirs, ours):
        session = module.InferenceSession(content, providers=CPU)
        arguments = [*session.get_inputs(), *session.get_outputs()]
        described.append([(a.name, a.type, a.shape) for a in arguments])
    assert described[0] == described[1]


def test_results_are_alike(kind):
    content = parsed(MODELS[kind]).SerializeToString()
    expected, got = (m.InferenceSession(content, providers=CPU).run(None, FEEDS[kind]) for m in (theirs, ours))
    assert len(got) == len(expected)
    for ours_, theirs_ in zip(got, expected, strict=True):
        assert type(ours_) is type(theirs_)
        np.testing.assert_equal(ours_, theirs_)


@pytest.mark.parametrize("versioned", [False, True])
def test_metadata_is_alike(versioned, tmp_path):
    model = parsed(MODELS["tensors"])
    if versioned:
        model.model_version = 7
    onnx.save(model, tmp_path / "m.onnx")
    names = ("producer_name", "graph_name", "graph_description", "description", "domain", "version")
    metas = [m.InferenceSession(tmp_path / "m.onnx", providers=CPU).get_modelmeta() for m in (theirs, ours)]
    for name in (*names, "custom_metadata_map"):
        assert getattr(metas[1], name) == getattr(metas[0], name), name


def test_providers_in_every_form():
    content = parsed(MODELS["tensors"]).SerializeToString()
    for providers in (None, CPU, [("CPUExecutionProvider", {"arena": "1"})], ["JAXExecutionProvider"]):
        session = ours.InferenceSession(content, ours.SessionOptions(), providers)
        assert session.get_providers()[-1] == "CPUExecutionProvider"
        assert session.get_providers()[0] in ours.get_available_providers()
    with pytest.warns(UserWarning, match="'FooExecutionProvider' is not in available provider names"):
        assert ours.InferenceSession(content, providers=["FooExecutionProvider"]).get_providers() == CPU


def test_options_are_accepted_and_wrong_ones_refused():
    options = ours.SessionOptions()
    values = {n: v for n in dir(theirs.SessionOptions()) if not callable(v := getattr(theirs.SessionOptions(), n))}
    for name in (name for name in values if not name.startswith("_")):
        setattr(options, name, getattr(options, name))
    options.intra_op_num_threads = 2
    options.graph_optimization_level = ours.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"
    with pytest.raises(AttributeError):
        options.intra_op_threads = 2
