"""Which official node tests pass on a namespace, without the planner: `tools/node.py --xp jax gelu`."""

from __future__ import annotations

import argparse
import contextlib
import re
import traceback
import warnings

import numpy as np
import onnx
from onnx.backend.test.case.node import collect_testcases

import ep.ops  # noqa: F401 - registers the lowerings
from ep.loader import load_model
from ep.passes import prepare
from ep.program import Runner, to_host


def namespace(name):
    import ep.host_namespace as host

    if name == "numpy":
        return host, contextlib.nullcontext
    if name == "jax":
        import jax

        import ep.backends.jax.namespace as xp

        @contextlib.contextmanager
        def scope():
            with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
                yield

        return xp, scope
    import ep.backends.mlx  # noqa: F401 - OpenBLAS before mlx.core
    import ep.backends.mlx.namespace as xp

    return xp, contextlib.nullcontext


def overrides(name, use):
    if not use or name == "numpy":
        return None
    import importlib

    return importlib.import_module(f"ep.backends.{name}.overrides").OVERRIDES


def from_proto(data):
    from onnx import numpy_helper as nh

    if isinstance(data, onnx.TensorProto):
        a = nh.to_array(data)
        if data.data_type == onnx.TensorProto.STRING:
            a = np.array([s.decode() if isinstance(s, bytes) else s for s in a.ravel()], object).reshape(a.shape)
        return a
    if isinstance(data, onnx.SequenceProto):
        return [from_proto(x) for x in nh.to_list(data)]
    if isinstance(data, list):
        return [from_proto(x) for x in data]
    if isinstance(data, np.ndarray) and data.dtype.kind in "SU":
        return data.astype(object)
    return data if data is None or isinstance(data, np.ndarray) else np.asarray(data)


def run(case, xp, scope, over):
    import ep.host_namespace as host

    model, store, name = load_model(case.model)
    bound = prepare(model, store, name)
    results = []
    for inputs, expected in case.data_sets:
        with scope():
            runner = Runner(xp, host, over)

            def enter(v):
                if isinstance(v, list):
                    return [enter(x) for x in v]
                if not isinstance(v, np.ndarray) or v.dtype == object:
                    return v
                try:
                    return xp.asarray(v)
                except (TypeError, ValueError):  # a dtype that the device lacks stays on the host
                    return v

            env = bound.constants | {k: enter(from_proto(v)) for k, v in zip(bound.inputs, inputs, strict=False)}
            for step in bound.steps:
                if step.lowering.host_reason(step.attributes):
                    Runner(host, host)._run(step, _Hosted(env, xp))
                else:
                    runner._run(step, env)
            results.append(([to_host(env[v], xp) for v in bound.outputs], [from_proto(e) for e in expected]))
    return results


class _Hosted(dict):
    """An environment whose reads come from the host."""

    def __init__(self, env, xp):
        super().__init__(env)
        self.env, self.xp = env, xp

    def __getitem__(self, key):
        return to_host(self.env[key], self.xp)

    def __setitem__(self, key, value):
        self.env[key] = value


def close(got, want, rtol, atol):
    if isinstance(want, list):
        return (
            isinstance(got, list)
            and len(got) == len(want)
            and all(map(lambda g, w: close(g, w, rtol, atol), got, want))
        )
    if want is None or got is None:
        return got is None and want is None
    if tuple(got.shape) != tuple(want.shape):
        raise AssertionError(f"shape {got.shape} != {want.shape}")
    if got.dtype != want.dtype and want.dtype != object:
        raise AssertionError(f"dtype {got.dtype} != {want.dtype}")
    if want.dtype == object or want.dtype.kind in "bSU":
        return bool((got == want).all())
    kind = want.dtype.kind
    if kind in "iu" or want.dtype.name.startswith(("int", "uint")):
        return bool((got.astype(np.int64) == want.astype(np.int64)).all())
    if kind not in "fc":
        got, want = got.astype(np.float32), want.astype(np.float32)
        rtol = max(rtol, 1e-2)
    elif want.dtype == np.float16:
        rtol, atol = max(rtol, 2e-3), max(atol, 1e-3)
    np.testing.assert_allclose(got, want, rtol=rtol, atol=atol)
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pattern", nargs="?", default="")
    parser.add_argument("--xp", default="numpy", choices=["numpy", "jax", "mlx"])
    parser.add_argument("--overrides", action="store_true", help="use the backend's native kernels")
    parser.add_argument("-v", action="store_true", help="print tracebacks")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    xp, scope = namespace(args.xp)
    over = overrides(args.xp, args.overrides)
    passed = failed = 0
    for case in collect_testcases(None):
        if not re.search(args.pattern, case.name):
            continue
        try:
            for got, want in run(case, xp, scope, over):
                for g, w in zip(got, want, strict=True):
                    assert close(g, w, case.rtol or 1e-3, case.atol or 1e-5), "values differ"
            passed += 1
        except Exception as error:  # noqa: BLE001 - a report of every failure is the purpose
            failed += 1
            print(f"FAIL {case.name}: {type(error).__name__}: {str(error).strip()[:300]}".replace("\n", " | "))
            if args.v:
                traceback.print_exc()
    print(f"{args.xp}: {passed} passed, {failed} failed")


if __name__ == "__main__":
    main()
