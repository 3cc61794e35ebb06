"""DynamicQuantizeLSTM: an LSTM with 8-bit weights that quantizes its inputs once and its hidden state at every step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from ep.ops.contrib_quantization import dynamic_quantize_matmul, scaled
from ep.ops.quantization import dynamic_quantize_linear, integer_factor
from ep.ops.recurrent import Activation, Layer, Step, lstm_step, run_layer
from ep.registry import op


@op("DynamicQuantizeLSTM", domain="com.microsoft")
def dynamic_quantize_lstm(
    xp, X, W, R, B, sequence_lens, initial_h, initial_c, P, W_scale, W_zero_point, R_scale, R_zero_point, *,
    activation_alpha=None, activation_beta=None, activations=None, clip=None, direction="forward",
    hidden_size=None, input_forget=0,
):  # fmt: skip
    layer = Layer(("Sigmoid", "Tanh", "Tanh"), activations, activation_alpha, activation_beta, clip, direction, 0)
    cell = partial(_cell, input_forget=input_forget)
    weights = (W, R, B, P, W_scale, W_zero_point, R_scale, R_zero_point)
    return run_layer(xp, layer, cell, X, weights, sequence_lens, (initial_h, initial_c))


def _cell(
    xp: Any, functions: Sequence[Activation], w: Any, r: Any, b: Any, p: Any,
    w_scale: Any, w_zero: Any, r_scale: Any, r_zero: Any, *, input_forget: int,
) -> tuple[Activation, Step]:  # fmt: skip
    """Weights [input, 4 * hidden] lie across those of LSTM. The whole sequence shares one scale."""
    half = 0 if b is None else b.shape[0] // 2
    bias = None if b is None else b[:half] + b[half:]
    by_r = integer_factor(xp, r, r_zero)

    def recurrent(h: Any) -> Any:
        h, h_scale, h_zero = dynamic_quantize_linear(xp, h)
        return scaled(xp, by_r(h, h_zero), h_scale, r_scale)

    def project(x: Any) -> Any:
        return dynamic_quantize_matmul(xp, x, w, w_scale, w_zero, bias)

    return project, lstm_step(functions, recurrent, p, input_forget)
