"""Losses over class scores: NegativeLogLikelihoodLoss and SoftmaxCrossEntropyLoss."""

from __future__ import annotations

from typing import Any

import numpy as np

from ep.errors import InvalidInput
from ep.ops.limits import classes
from ep.ops.precision import wide
from ep.registry import op


@op("NegativeLogLikelihoodLoss", since=12)
def negative_log_likelihood_loss(
    xp, x, target: classes("x", 1, "ignore_index"), weight=None, *, ignore_index=None, reduction="mean"
):
    return xp.astype(_loss(xp, wide(xp, x), target, weight, ignore_index, reduction), xp.dtype_of(x))


@op("SoftmaxCrossEntropyLoss", since=12, out=(0, 0))
def softmax_cross_entropy_loss(
    xp, scores, labels: classes("scores", 1, "ignore_index"), weights=None, *, ignore_index=None, reduction="mean"
):
    inner = wide(xp, scores)
    shifted = inner - xp.max(inner, axis=1, keepdims=True)  # first, or large scores leave few digits
    log_prob = shifted - xp.log(xp.sum(xp.exp(shifted), axis=1, keepdims=True))
    loss = _loss(xp, log_prob, labels, weights, ignore_index, reduction)
    return xp.astype(loss, xp.dtype_of(scores)), xp.astype(log_prob, xp.dtype_of(scores))


def _loss(xp: Any, log_prob: Any, target: Any, weight: Any, ignore_index: int | None, reduction: str) -> Any:
    """Minus the weighted log-probability [N, C, …] of the target class [N, …], reduced."""
    ignored = None if ignore_index is None else target == ignore_index
    # an ignored target may lie outside the classes, where nothing can be read
    target = xp.astype(target if ignored is None else xp.where(ignored, 0, target), np.int32)
    chosen = xp.take_along_axis(log_prob, xp.expand_dims(target, 1), axis=1)
    chosen = xp.reshape(chosen, target.shape)
    if weight is None:
        share = xp.ones(target.shape, dtype=xp.dtype_of(log_prob))
    else:
        share = xp.take(xp.astype(weight, xp.dtype_of(log_prob)), target, axis=0)
    if ignored is not None:
        share = xp.where(ignored, 0, share)
        chosen = xp.where(ignored, 0, chosen)
    losses = -chosen * share
    if reduction == "none":
        return losses
    if reduction not in ("sum", "mean"):
        raise InvalidInput(f"reduction {reduction!r} is unknown.", fix="use none, sum or mean.")
    total = xp.sum(losses)
    return total if reduction == "sum" else total / xp.sum(share)
