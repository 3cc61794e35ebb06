"""Can onnx's own tools drive `ep`? Through `ep.onnx_backend`, and through `onnxruntime.backend` as it is there."""

from __future__ import annotations

import importlib
import os
import unittest

import numpy as np
import onnx
import onnx.backend.base
import onnx.backend.test
import pytest
from onnx import helper, parser

import ep.onnx_backend as backend

MODEL = parser.parse_model('<ir_version: 8, opset_import: ["": 17]> g (float[N] x) => (float[N] y) { y = Add(x, x) }')
X = np.arange(3, dtype=np.float32)


@pytest.mark.parametrize("module", ["onnxruntime.backend", "ep.onnxruntime.backend"])
@pytest.mark.filterwarnings("ignore:onnx.version is deprecated")
def test_models_are_prepared_and_run(module, tmp_path):
    both = pytest.importorskip(module)
    onnx.save(MODEL, tmp_path / "m.onnx")
    for model in (MODEL, MODEL.SerializeToString(), str(tmp_path / "m.onnx")):
        prepared = both.prepare(model, "CPU")
        for inputs in ([X], X):
            np.testing.assert_equal(prepared.run(inputs), [X + X])
    np.testing.assert_equal(both.run(MODEL, [X]), [X + X])
    assert both.supports_device("CPU") and not both.supports_device("FPGA") and both.is_compatible(MODEL)
    with pytest.raises(RuntimeError, match="Incompatible device"):
        both.prepare(MODEL, "FPGA")


def test_it_is_a_backend_of_onnx():
    assert issubclass(backend.Backend, onnx.backend.base.Backend)
    assert isinstance(backend.prepare(MODEL), onnx.backend.base.BackendRep)
    (y,) = backend.run_node(helper.make_node("Add", ["a", "b"], ["c"]), [X, X])
    np.testing.assert_equal(y, X + X)


def test_devices_are_our_providers(accelerator):
    name = accelerator.upper()
    assert backend.supports_device(name) and backend.supports_device(f"{name}:0")
    prepared = backend.prepare(MODEL, name)
    assert prepared._session.get_providers()[0] == f"{name}ExecutionProvider"
    np.testing.assert_equal(prepared.run([X]), [X + X])


@pytest.mark.skipif(os.environ.get("EP_FULL") != "1", reason="onnx builds all its cases first: EP_FULL=1 runs this")
@pytest.mark.filterwarnings("ignore")
def test_onnx_runs_its_own_cases():
    cases = onnx.backend.test.BackendTest(backend, __name__)
    for name in (
        "test_relu",
        "test_gemm_default_zero_bias",
        "test_softmax_axis_1",
        "test_if_cpu",
        "test_unique_sorted",
    ):
        cases.include(f"^{name}")
    suite = unittest.TestLoader().loadTestsFromTestCase(cases.test_cases["OnnxBackendNodeModelTest"])
    result = unittest.TestResult()
    suite.run(result)
    assert result.testsRun > 5 and not result.errors and not result.failures, [*result.errors, *result.failures][:1]


def test_both_names_are_one_implementation():
    ours = importlib.import_module("ep.onnxruntime.backend")
    assert backend.prepare == ours.prepare and backend.Backend is ours.OnnxRuntimeBackend
