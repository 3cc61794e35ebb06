"""An LSTM whose input is joined by what an attention over a memory found last (AttnLSTM of onnxruntime)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ep.ops.precision import wide
from ep.ops.recurrent import Activation, Layer, Step, biases, lstm_step, projection, run_layer
from ep.registry import op


@op("AttnLSTM", domain="com.microsoft", out=(0, 0, 0))
def attn_lstm(
    xp, X, W, R, B=None, sequence_lens=None, initial_h=None, initial_c=None, P=None, QW=None, MW=None, V=None,
    M=None, memory_seq_lens=None, AW=None, *, activation_alpha=None, activation_beta=None, activations=None,
    clip=None, direction="forward", hidden_size=None, input_forget=0,
):  # fmt: skip
    layer = Layer(("Sigmoid", "Tanh", "Tanh"), activations, activation_alpha, activation_beta, clip, direction, 0)
    memory = wide(xp, M)
    alive = None
    if memory_seq_lens is not None:
        clock = xp.arange(memory.shape[1], dtype=np.int32)
        alive = clock < xp.reshape(xp.astype(memory_seq_lens, np.int32), (-1, 1))
        memory = xp.where(alive[..., None], memory, 0)

    def cell(
        xp: Any, functions: Sequence[Activation], w: Any, r: Any, b: Any, p: Any, qw: Any, mw: Any, v: Any, aw: Any
    ) -> tuple[Activation, Step]:
        size = X.shape[-1]
        across, inward = xp.transpose(r), xp.transpose(w[:, size:])
        keys = xp.matmul(memory, mw)

        def attend(hidden: Any) -> Any:
            scores = xp.sum(v * xp.tanh(keys + xp.matmul(hidden, qw)[:, None]), axis=-1)
            scores = scores if alive is None else xp.where(alive, scores, -np.inf)
            context = xp.matmul(xp.softmax(scores, axis=-1)[:, None], memory)[:, 0]
            return context if aw is None else xp.matmul(xp.concatenate([hidden, context], axis=-1), aw)

        def step(states: Any, xw: Any) -> tuple[Any, ...]:
            hidden, memory_cell, attention = states
            recurrent = xp.matmul(hidden, across) + xp.matmul(attention, inward)
            hidden, memory_cell = lstm_step(functions, lambda _: recurrent, p, input_forget)((hidden, memory_cell), xw)
            return hidden, memory_cell, attend(hidden)

        return projection(xp, w[:, :size], None if b is None else sum(biases(b))), step

    found = xp.zeros((W.shape[0], X.shape[1], M.shape[2] if AW is None else AW.shape[2]), dtype=xp.dtype_of(X))
    weights = (W, R, B, P, QW, MW, V, AW)
    return run_layer(xp, layer, cell, X, weights, sequence_lens, (initial_h, initial_c, found))[:3]
