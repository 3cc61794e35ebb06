"""Token ids of onnxruntime's own domain: word embeddings from characters, aggressive decoding, hashed n-grams."""

from __future__ import annotations

from typing import Any

import numpy as np

from ep.errors import InvalidInput
from ep.ops.axes import scalar
from ep.ops.limits import along
from ep.registry import op

MS = "com.microsoft"


@op("WordConvEmbedding", domain=MS, out=(1,))
def word_conv_embedding(
    xp, sequence: along("c", 0, wraps=False), w, b, c, *,
    char_embedding_size=None, conv_window_size=None, embedding_size=None,
):  # fmt: skip
    """Words [N, L] of character ids (0 pads) → [N, M]: a convolution over characters, tanh, the largest window.

    A word that begins with 0 is empty; its embedding is 0.
    """
    size, window = w.shape[0], w.shape[2]
    count = sequence.shape[1] - window + 1
    if count < 1:
        raise InvalidInput(f"words of {sequence.shape[1]} characters are shorter than the window of {window}.")
    characters = xp.take(c, sequence, axis=0)
    windows = xp.concatenate([characters[:, i : i + count] for i in range(window)], axis=2)
    activated = xp.tanh(xp.matmul(windows, xp.swapaxes(xp.reshape(w, (size, -1)), 0, 1)) + b)
    length = xp.sum(xp.astype(sequence > 0, np.int32), axis=1, keepdims=True)
    counted = xp.asarray(np.arange(count, dtype=np.int32)) < xp.maximum(length - window + 1, 1)
    best = xp.max(xp.where(xp.expand_dims(counted, 2), activated, -np.inf), axis=1)
    return xp.where(sequence[:, :1] > 0, best, 0)


@op("BifurcationDetector", domain=MS, out=(0, 0), host_only="the number of tokens that it accepts depends on data")
def bifurcation_detector(
    xp, src_tokens, cur_tokens, prev_suffix_match_idx, pred_tokens=None, *, max_ngram_size=3, min_ngram_size=1
):
    """Accepts predicted tokens up to the first that differs from the source; finds where the source goes on."""
    tokens = cur_tokens
    if pred_tokens is not None:
        rest = src_tokens[int(scalar(prev_suffix_match_idx)) :]
        if len(pred_tokens) != len(rest) + 1:
            raise InvalidInput(f"{len(pred_tokens)} predicted tokens do not match {len(rest)} source tokens + 1.")
        differs = np.flatnonzero(pred_tokens[:-1] != rest)
        tokens = np.concatenate([cur_tokens, pred_tokens[: (differs[0] if len(differs) else len(rest)) + 1]])
    match = -1
    for n in range(min_ngram_size, min(max_ngram_size, len(tokens)) + 1):
        places = _occurrences(src_tokens, tokens[-n:])
        if not len(places):
            break
        match = int(places[0]) + n
        if match >= len(src_tokens):
            break
        if len(places) > 1:
            match = -1
    return tokens, np.full(prev_suffix_match_idx.shape, match, np.int64)


def _occurrences(tokens: np.ndarray, gram: np.ndarray) -> np.ndarray:
    if len(gram) > len(tokens):
        return np.zeros(0, np.int64)
    return np.flatnonzero((np.lib.stride_tricks.sliding_window_view(tokens, len(gram)) == gram).all(axis=1))


# Hashed n-grams


@op("NGramHashMapping", domain=MS)
def n_gram_hash_mapping(
    xp, input_ids, multipliers, vocab_sizes, past_ids=None, head_offsets=None, eos_token_id=None,
    segment_ids=None, *, max_ngram_size, n_head_per_ngram, pad_id, reset_on_eos=0,
):  # fmt: skip
    (rows, length), history = input_ids.shape, max_ngram_size - 1
    fill = _fill(xp, input_ids, eos_token_id, pad_id)
    past = xp.broadcast_to(fill, (rows, history)) if past_ids is None else past_ids
    ids = xp.concatenate([past, input_ids], axis=1)
    shifted = [ids[:, history - k : history - k + length] for k in range(max_ngram_size)]
    segments = [None]
    if segment_ids is not None:
        padded = xp.concatenate([xp.broadcast_to(segment_ids[:, :1], (rows, history)), segment_ids], axis=1)
        segments = [padded[:, history - k : history - k + length] for k in range(max_ngram_size)]
    eos = eos_token_id if reset_on_eos else None
    hashes = _hashes(xp, _reset(xp, shifted, segments, fill, eos), multipliers, vocab_sizes, n_head_per_ngram)
    return _offset(hashes, head_offsets), ids[:, length:]


@op("VarlenNGramHashMapping", domain=MS, out=(0, 0, "int32", 0))
def varlen_n_gram_hash_mapping(
    xp, input_ids, multipliers, vocab_sizes, cumulative_sequence_length, past_ids=None, head_offsets=None,
    eos_token_id=None, segment_ids=None, past_segment_ids=None, capture_count=None, *, max_ngram_size,
    n_head_per_ngram, pad_id, reset_on_eos=0, state_update_capacity=0,
):  # fmt: skip
    """The tokens of all requests one after the other; each has its own past."""
    history, requests = max_ngram_size - 1, cumulative_sequence_length.shape[0] - 1
    starts, ends = cumulative_sequence_length[:-1], cumulative_sequence_length[1:]
    fill = _fill(xp, input_ids, eos_token_id, pad_id)
    past = xp.broadcast_to(fill, (requests, history)) if past_ids is None else past_ids
    token = xp.asarray(np.arange(input_ids.shape[0], dtype=np.int32))
    request = xp.sum(xp.astype(xp.expand_dims(token, 1) >= ends, np.int32), axis=1)

    def before(k: Any, at: Any, owner: Any, values: Any, earlier: Any) -> Any:
        """What stands k places before a token of a request: in the request, or else in its past."""
        place = at - k - xp.take(starts, owner, axis=0)
        inside = xp.take(values, xp.maximum(at - k, 0), axis=0)
        flat = xp.reshape(earlier, (-1,))
        outside = xp.take(flat, owner * history + xp.clip(place + history, 0, history - 1), axis=0)
        return xp.where(place >= 0, inside, outside)

    shifted = [before(k, token, request, input_ids, past) for k in range(max_ngram_size)]
    segments: list[Any] = [None]
    known = past_segment_ids
    if segment_ids is not None:
        if known is None:  # nothing is known of the past: it counts as the first segment of the request
            known = xp.broadcast_to(xp.expand_dims(xp.take(segment_ids, starts, axis=0), 1), (requests, history))
        segments = [before(k, token, request, segment_ids, known) for k in range(max_ngram_size)]
    eos = eos_token_id if reset_on_eos else None
    hashes = _hashes(xp, _reset(xp, shifted, segments, fill, eos), multipliers, vocab_sizes, n_head_per_ngram)
    owner = xp.asarray(np.arange(requests, dtype=np.int32))
    back = range(history - 1, -1, -1)
    present = xp.stack([before(k, ends - 1, owner, input_ids, past) for k in back], axis=1)
    present_segments = None
    if segment_ids is not None:
        present_segments = xp.stack([before(k, ends - 1, owner, segment_ids, known) for k in back], axis=1)
    states = []
    for slot in range(state_update_capacity):
        kept = xp.expand_dims((slot < capture_count) & (starts + slot < ends), 1)
        at = xp.minimum(starts + slot, ends - 1)
        state = xp.stack([before(k, at, owner, input_ids, past) for k in back], axis=1)
        states.append(xp.where(kept, state, pad_id))
    return _offset(hashes, head_offsets), present, present_segments, xp.stack(states, axis=1) if states else None


def _fill(xp: Any, ids: Any, eos: Any, pad_id: int) -> Any:
    """What stands before the beginning of a text."""
    if eos is None:
        return xp.asarray(np.asarray([pad_id], xp.dtype_of(ids)))
    return xp.reshape(eos, (1,))


def _reset(xp: Any, shifted: list[Any], segments: list[Any], fill: Any, eos: Any) -> list[Any]:
    """The shifted ids, replaced by the fill from an end of text or a change of segment backwards."""
    result, cut = [shifted[0]], xp.zeros(shifted[0].shape, dtype=np.bool_)
    for k in range(1, len(shifted)):
        if eos is not None:
            cut = cut | (shifted[k] == xp.reshape(eos, (1,)))
        if segments[0] is not None:
            cut = cut | (segments[k] != segments[k - 1])
        result.append(xp.where(cut, fill, shifted[k]))
    return result


def _hashes(xp: Any, shifted: list[Any], multipliers: Any, sizes: Any, heads: int) -> Any:
    """[…, orders · heads]: products of ids and multipliers, joined by exclusive or, modulo each head's size."""
    mix, columns = shifted[0] * multipliers[0], []
    for k in range(1, len(shifted)):
        mix = mix ^ (shifted[k] * multipliers[k])
        columns.append(xp.remainder(xp.expand_dims(mix, -1), sizes[(k - 1) * heads : k * heads]))
    return xp.concatenate(columns, axis=-1)


def _offset(hashes: Any, offsets: Any) -> Any:
    return hashes if offsets is None else hashes + offsets
