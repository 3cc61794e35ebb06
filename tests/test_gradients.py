"""Does Gradient give the derivatives that finite differences of the same model give?"""

from __future__ import annotations

import numpy as np
import pytest
from conftest import parse

import ep

OPSETS = '"": 17, "ai.onnx.preview.training": 1'
GRADIENT = "ai.onnx.preview.training.Gradient"
RNG = np.random.default_rng(5)


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def differences(text: str, feeds: dict[str, np.ndarray], name: str) -> np.ndarray:
    """Central differences of the sum of a model's output, by onnx's reference implementation in float64."""
    from onnx.reference import ReferenceEvaluator

    run = ReferenceEvaluator(parse(text.replace("float[", "double["), '"": 17')).run
    wide = {n: x.astype(np.float64) for n, x in feeds.items()}
    result = np.zeros(wide[name].shape)
    for place in np.ndindex(result.shape):
        sums = []
        for h in (1e-5, -1e-5):
            moved = wide[name].copy()
            moved[place] += h
            sums.append(run(None, wide | {name: moved})[0].sum())
        result[place] = (sums[0] - sums[1]) / 2e-5
    return result


def graph(body: str, inputs: str, wanted: str = "float[a, b] y") -> str:
    return f"g ({inputs}) => ({wanted}) {{ {body} }}"


SMOOTH = {  # body, inputs, names of the differentiated ones, shapes
    "product": ("y = MatMul (x, w)", "float[a, k] x, float[k, b] w", {"x": (2, 3), "w": (3, 4)}),
    "softmax": ("h = Mul (x, x)  y = Softmax <axis = 1> (h)", "float[a, b] x", {"x": (2, 4)}),
    "gates": ("s = Sigmoid (x)  t = Tanh (w)  h = Mul (s, t)  y = Exp (h)", "float[a, b] x, float[a, b] w",
              {"x": (2, 3), "w": (2, 3)}),
    "normalization": ("m = ReduceMean <axes = [1]> (x)  d = Sub (x, m)  q = Mul (d, d)  "
                      "v = ReduceMean <axes = [1]> (q)  r = Sqrt (v)  y = Div (d, r)  ",
                      "float[a, b] x", {"x": (3, 4)}),
    "convolution": ("h = Conv (x, w)  y = Tanh (h)", "float[1, 2, 5, 5] x, float[3, 2, 3, 3] w",
                    {"x": (1, 2, 5, 5), "w": (3, 2, 3, 3)}),
}  # fmt: skip


@pytest.mark.parametrize("name", SMOOTH)
def test_derivatives_of_smooth_functions(device, name):
    body, inputs, shapes = SMOOTH[name]
    rank = max(map(len, shapes.values()))
    dims = ", ".join("abcd"[:rank])
    weight = f"float[{dims}] c"
    text = graph(body.replace("y =", "p =") + " y = Mul (p, c)", f"{inputs}, {weight}", f"float[{dims}] y")
    feeds = {n: floats(*shape) for n, shape in shapes.items()}
    feeds["c"] = floats(*run_shape(body, feeds))  # without weights, the sum of a softmax would be constant
    names = list(shapes)
    quoted = ", ".join(f'"{n}"' for n in names)
    outputs = ", ".join(f"float[] d_{n}" for n in names).replace("float[]", "float")
    model = parse_loose(
        text.replace(" }", "")
        + f' {", ".join("d_" + n for n in names)} = {GRADIENT} <xs = [{quoted}], zs = ["c"], y = "y"> '
        f"({', '.join(names)}, c) }}",
        text, outputs,
    )  # fmt: skip
    results = ep.load(model, device).run([f"d_{n}" for n in names], feeds)
    for n, got in zip(names, results, strict=True):
        want = differences(text, feeds, n)
        assert got.shape == want.shape and got.dtype == np.float32
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())


def run_shape(body: str, feeds: dict[str, np.ndarray]) -> tuple[int, ...]:
    """The shape of the body's y."""
    from onnx.reference import ReferenceEvaluator

    inputs = ", ".join(f"float[{', '.join(map(str, x.shape))}] {n}" for n, x in feeds.items())
    rank = max(x.ndim for x in feeds.values())
    text = graph(body, inputs, f"float[{', '.join('abcd'[:rank])}] y")
    return ReferenceEvaluator(parse(text, '"": 17')).run(None, feeds)[0].shape


def parse_loose(text: str, plain: str, outputs: str):
    """The model with the derivatives as further outputs; onnx cannot infer their shapes."""
    import onnx

    head, rest = text.split("=>", 1)
    closing = rest.index(")")
    text = f"{head}=> {rest[:closing]}, {outputs}{rest[closing:]}"
    return onnx.parser.parse_model(f"<ir_version: 8, opset_import: [{OPSETS}]>\n{text}")


def model(text: str, opsets: str = OPSETS):
    import onnx

    return onnx.parser.parse_model(f"<ir_version: 8, opset_import: [{opsets}]>\n{text}")


def test_second_derivatives(accelerator):
    """x³: 3x² and, by a Gradient of the Gradient, 6x."""
    cubic = model(f"""g (float[n] x) => (float[n] y, float[n] d, float[n] dd) {{
        q = Mul (x, x)
        y = Mul (q, x)
        d = {GRADIENT} <xs = ["x"], y = "y"> (x)
        dd = {GRADIENT} <xs = ["x"], y = "d"> (x)
    }}""")
    x = np.array([-2, 0.5, 3], np.float32)
    _, d, dd = ep.load(cubic, accelerator).run(None, {"x": x})
    np.testing.assert_allclose(d, 3 * x**2, rtol=1e-5)
    np.testing.assert_allclose(dd, 6 * x, rtol=1e-5)


def test_at_another_point_and_by_an_intermediate_value(device):
    """By h of h² · w, at values of the node's own inputs."""
    text = f"""g (float[n] x, float[n] w, float[n] h1) => (float[n] y, float[n] dh) {{
        h = Exp (x)
        q = Mul (h, h)
        y = Mul (q, w)
        dh = {GRADIENT} <xs = ["h"], zs = ["w"], y = "y"> (h1, w)
    }}"""
    x, w, h1 = floats(3), floats(3), floats(3)
    _, dh = ep.load(model(text), device).run(None, {"x": x, "w": w, "h1": h1})
    np.testing.assert_allclose(dh, 2 * h1 * w, rtol=1e-4)


def test_weights_and_constants_inside(device):
    text = f"""g (float[2] x) => (float[2] y, float[2] d) <float[2] w = {{3, 5}}> {{
        two = Constant <value_float = 2.0> ()
        h = Mul (x, two)
        q = Mul (h, h)
        y = Mul (q, w)
        d = {GRADIENT} <xs = ["x"], y = "y"> (x)
    }}"""
    _, d = ep.load(model(text), device).run(None, {"x": np.array([1, -2], np.float32)})
    np.testing.assert_allclose(d, [24, -80], rtol=1e-5)


def test_a_kink_is_refused_on_the_host():
    text = f"""g (float[1] x) => (float[1] y, float[1] d) {{
        y = Abs (x)
        d = {GRADIENT} <xs = ["x"], y = "y"> (x)
    }}"""
    with pytest.raises(ep.ExecutionError, match="cannot differentiate"):
        ep.load(model(text), "host").run(None, {"x": np.array([1e-4], np.float32)})


def test_what_else_it_depends_on_is_named():
    text = f"""g (float[1] x, float[1] w) => (float[1] y, float[1] d) {{
        y = Mul (x, w)
        d = {GRADIENT} <xs = ["x"], y = "y"> (x)
    }}"""
    with pytest.raises(ep.InvalidModel, match="'y' is not a function of 'x' alone"):
        ep.load(model(text), "host")
