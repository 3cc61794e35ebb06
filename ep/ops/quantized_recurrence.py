"""DynamicQuantizeLSTM: an LSTM with 8-bit weights that quantizes its inputs once and its hidden state at every step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from ep.ops.contrib_quantization import dynamic_matmul
from ep.ops.recurrent import Activation, Layer, Step, lstm_step, run_layer
from ep.registry import op


@op("DynamicQuantizeLSTM", domain="com.microsoft")
def dynamic_quantize_lstm(
    xp, X, W, R, B, sequence_lens, initial_h, initial_c, P, W_scale, W_zero_point, R_scale, R_zero_point, *,
    activation_alpha=None, activation_beta=None, activations=None, clip=None, direction="forward",
    hidden_size=None, input_forget=0,
):  # fmt: skip
    layer = Layer(
        ("Sigmoid", "Tanh", "Tanh"), activations, activation_alpha, activation_beta, clip, direction, 0
    )
    cell = partial(_cell, input_forget=input_forget)
    weights = (W, xp.swapaxes(R, 1, 2), B, P, W_scale, W_zero_point, R_scale, R_zero_point)
    return run_layer(xp, layer, cell, X, weights, sequence_lens, (initial_h, initial_c))


def _cell(
    xp: Any, functions: Sequence[Activation], x: Any, w: Any, r: Any, b: Any, p: Any,
    w_scale: Any, w_zero: Any, r_scale: Any, r_zero: Any, *, input_forget: int,
) -> tuple[Any, Step]:  # fmt: skip
    """Weights [input, 4 * hidden] lie across those of LSTM. The whole sequence shares one scale."""
    across = xp.transpose(r)
    half = 0 if b is None else b.shape[0] // 2
    bias = None if b is None else b[:half] + b[half:]
    step = lstm_step(functions, lambda h: dynamic_matmul(xp, h, across, r_scale, r_zero), p, input_forget)
    return dynamic_matmul(xp, x, w, w_scale, w_zero, bias), step
