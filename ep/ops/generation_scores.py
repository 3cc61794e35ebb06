"""How are next-token scores changed, and sequences kept, while a model generates text? On the host, with NumPy.

The rules are those of BeamSearch, GreedySearch and Sampling of onnxruntime, which follow Hugging Face's
`generate` (https://huggingface.co/docs/transformers/internal/generation_utils). A token that is ruled out gets
the lowest finite number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ep.ops.axes import scalar

LOWEST = float(np.finfo(np.float32).min)


@dataclass(frozen=True)
class Rules:
    """What changes the scores [rows, vocabulary] of each step."""

    eos: int
    min_length: int = 0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    vocab_mask: np.ndarray | None = None
    prefix_vocab_mask: np.ndarray | None = None  # [batch, vocabulary], for the first step
    temperature: float = 1.0
    presence_mask: np.ndarray | None = None
    presence_penalty: float = 0.0

    def apply(self, scores: np.ndarray, sequences: np.ndarray, is_first: bool) -> np.ndarray:
        """The scores after all rules; `sequences` [rows, length] are the tokens so far."""
        scores = np.array(scores, np.float32)
        if self.repetition_penalty != 1:
            self._penalize(scores, sequences)
        if 0 < self.no_repeat_ngram_size <= sequences.shape[1]:
            self._forbid_repeats(scores, sequences)
        if self.vocab_mask is not None:
            scores[:, self.vocab_mask == 0] = LOWEST
        if self.prefix_vocab_mask is not None and is_first:
            beams = len(scores) // len(self.prefix_vocab_mask)
            scores[np.repeat(self.prefix_vocab_mask, beams, axis=0) == 0] = LOWEST
        if sequences.shape[1] < self.min_length:
            scores[:, self.eos] = LOWEST
        if self.temperature > 0:
            scores /= np.float32(self.temperature)
        if self.presence_mask is not None:
            scores -= np.float32(self.presence_penalty) * self.presence_mask
        return scores

    def _penalize(self, scores: np.ndarray, sequences: np.ndarray) -> None:
        penalty = np.float32(self.repetition_penalty)
        for row, sequence in zip(scores, sequences, strict=True):
            seen = np.unique(sequence)
            row[seen] = np.where(row[seen] < 0, row[seen] * penalty, row[seen] / penalty)

    def _forbid_repeats(self, scores: np.ndarray, sequences: np.ndarray) -> None:
        n = self.no_repeat_ngram_size
        for row, sequence in zip(scores, sequences, strict=True):
            grams = np.lib.stride_tricks.sliding_window_view(sequence, n)
            same = (grams[:, : n - 1] == sequence[len(sequence) - n + 1 :]).all(axis=1)
            row[grams[same, n - 1]] = LOWEST


@dataclass
class Hypotheses:
    """The best finished sequences of one batch entry, at most `beams` of them, the best first."""

    beams: int
    length_penalty: float
    early_stopping: bool
    done: bool = False
    found: list[tuple[float, np.ndarray]] = field(default_factory=list)

    def _score(self, log_probability: float, length: int) -> float:
        return float(np.float32(log_probability) / np.float32(length) ** np.float32(self.length_penalty))

    def add(self, sequence: np.ndarray, log_probability: float) -> None:
        score = self._score(log_probability, len(sequence))
        if len(self.found) < self.beams or score > self.found[-1][0]:
            self.found.append((score, np.array(sequence)))
            self.found.sort(key=lambda item: -item[0])
            del self.found[self.beams :]

    def settle(self, best: float, length: int) -> None:
        """Decides whether no unfinished sequence can become better than those found."""
        if len(self.found) == self.beams:
            self.done = self.early_stopping or self.found[-1][0] >= self._score(best, length)


@dataclass
class Beams:
    """Beam search over all batch entries: `sequences` [batch * beams, length] and their summed scores."""

    sequences: np.ndarray
    beams: int
    eos: int
    pad: int
    hypotheses: list[Hypotheses]
    scores: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.scores = np.zeros((len(self.hypotheses), self.beams), np.float32)
        self.scores[:, 1:] = -1e9  # all beams begin alike: only the first may go on
        self.scores = self.scores.reshape(-1)

    @property
    def done(self) -> bool:
        return all(h.done for h in self.hypotheses)

    def advance(self, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Takes the scores [batch * beams, vocabulary] of a step; which rows go on, and with which tokens."""
        vocabulary = scores.shape[1]
        flat = scores.reshape(len(self.hypotheses), -1)
        best = np.argsort(-flat, axis=1, kind="stable")[:, : 2 * self.beams]
        rows, tokens, sums = (np.zeros(len(self.scores), t) for t in (np.int32, np.int32, np.float32))
        for entry, hypotheses in enumerate(self.hypotheses):
            here = slice(entry * self.beams, (entry + 1) * self.beams)
            if hypotheses.done:
                tokens[here] = self.pad
                continue
            chosen = self._choose(entry, flat[entry], best[entry], vocabulary)
            rows[here], tokens[here], sums[here] = zip(*chosen, strict=True)
            hypotheses.settle(float(flat[entry].max()), self.sequences.shape[1])
        self.scores = sums
        self.sequences = np.concatenate([self.sequences[rows], tokens[:, None]], axis=1)
        return rows, tokens

    def _choose(
        self, entry: int, scores: np.ndarray, best: np.ndarray, vocabulary: int
    ) -> list[tuple[int, int, np.float32]]:
        chosen: list[tuple[int, int, np.float32]] = []
        for rank, place in enumerate(best):
            row, token = entry * self.beams + int(place) // vocabulary, int(place) % vocabulary
            if token != self.eos:
                chosen.append((row, token, scores[place]))
            elif rank < self.beams:
                self.hypotheses[entry].add(self.sequences[row], float(scores[place]))
            if len(chosen) == self.beams:
                break
        return chosen

    def finished(self, count: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """The `count` best sequences of each entry [batch, count, length], padded, and their scores."""
        sequences = np.full((len(self.hypotheses), count, length), self.pad, np.int32)
        scores = np.zeros((len(self.hypotheses), count), np.float32)
        for entry, hypotheses in enumerate(self.hypotheses):
            if not hypotheses.done:
                for row in range(entry * self.beams, (entry + 1) * self.beams):
                    hypotheses.add(self.sequences[row], float(self.scores[row]))
            for i, (score, sequence) in enumerate(hypotheses.found[:count]):
                sequences[entry, i, : len(sequence)] = sequence
                scores[entry, i] = score
        return sequences, scores


def log_softmax(x: np.ndarray) -> np.ndarray:
    shifted = x - x.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def nucleus(scores: np.ndarray, top_p: float, least: int, filter_value: float, custom: bool) -> np.ndarray:
    """The scores with all but the most probable tokens, whose probabilities sum up to `top_p`, set to `filter_value`.

    `custom` keeps, beside the most probable token, those before which the sum does not exceed `top_p`; else at
    least `least` tokens stay.
    """
    order = np.argsort(-scores if custom else scores, axis=-1, kind="stable")
    total = np.cumsum(softmax(np.take_along_axis(scores, order, axis=-1)), axis=-1)
    if custom:
        out = np.zeros(scores.shape, bool)
        out[:, 1:] = total[:, :-1] > top_p
    else:
        out = total <= 1 - top_p
        out[:, max(scores.shape[1] - least, 1) :] = False
    filtered = np.array(scores)
    np.put_along_axis(filtered, order, np.where(out, filter_value, np.take_along_axis(scores, order, -1)), axis=-1)
    return filtered


def number(value: np.ndarray | None, default: float) -> float:
    """What an optional input of one element says."""
    return default if value is None else float(scalar(value))


def count(value: np.ndarray | None, default: int) -> int:
    return default if value is None else int(scalar(value))


def repeated(values: Sequence[np.ndarray], times: int) -> list[np.ndarray]:
    return [np.repeat(v, times, axis=0) for v in values]
