"""Whole generation loops of onnxruntime: GreedySearch, Sampling, BeamSearch and WhisperBeamSearch.

Their subgraphs are a decoder with a growing cache (as GPT-2), or an encoder and a decoder (as T5 and Whisper).
The subgraphs run on the device; the choice of tokens is bookkeeping of the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ep.errors import InvalidModel, UnsupportedModel
from ep.ops.axes import scalar
from ep.ops.generation_scores import Beams, Hypotheses, Rules, count, log_softmax, nucleus, number, softmax
from ep.registry import Body, Host, Outputs, op
from ep.seeds import seed_of

MS = "com.microsoft"
Graph = Callable[..., tuple[Any, ...]]
GPT, T5, WHISPER = range(3)


class Decoder:
    """A decoder of tokens, positions, mask and one cache [2, rows, heads, length, size] per layer."""

    def __init__(
        self, xp: Any, graph: Graph, first: Graph | None, ids: np.ndarray, mask: np.ndarray | None, pad: int
    ) -> None:
        """Without a mask, padding is hidden; positions count the tokens that are not padding in any case."""
        real = ids != pad
        self.xp, self.graph, self.mask = xp, graph, (real if mask is None else mask).astype(np.int32)
        positions = np.where(real, np.cumsum(real, axis=1) - 1, 0).astype(np.int32)
        self.next = real.sum(axis=1, dtype=np.int32)
        caches = [self._empty(kind, len(ids)) for kind in parameters(graph)[3:]]
        logits, *self.caches = (first or graph)(ids, positions, self.mask, *caches)
        self.logits = last_logits(xp, logits)

    def _empty(self, kind: Any, rows: int) -> Any:
        if kind is None or len(kind[1]) != 5 or kind[1][2] is None or kind[1][4] is None:
            raise InvalidModel(
                "a cache of the decoder subgraph has no known number of heads and size.",
                why="a past input must be declared as [2, batch, heads, length, size], heads and size as numbers.",
                fix="declare the shape of the past inputs.",
            )
        return self.xp.zeros((2, rows, kind[1][2], 0, kind[1][4]), dtype=kind[0])

    def step(self, tokens: np.ndarray, rows: np.ndarray | None = None) -> None:
        """Runs the next tokens [rows]; `rows` says which of the previous rows each goes on from."""
        if rows is not None:
            where = self.xp.asarray(rows)
            self.caches = [chosen(self.xp, cache, where, axis=1) for cache in self.caches]
        self.mask = np.concatenate([self.mask, np.ones((len(tokens), 1), np.int32)], axis=1)
        logits, *self.caches = self.graph(tokens[:, None], self.next[:, None], self.mask, *self.caches)
        self.next = self.next + np.int32(1)
        self.logits = last_logits(self.xp, logits)


class EncoderDecoder:
    """An encoder whose results every step of the decoder reads: caches of cross attention, perhaps hidden states.

    An encoder that takes the decoder's first tokens also runs the decoder's first step (three inputs for T5, two for
    Whisper); the other kind gives nothing but the caches of cross attention.
    """

    def __init__(
        self,
        xp: Any,
        encoder: Graph,
        decoder: Graph,
        source: Any,
        mask: np.ndarray | None,
        start: np.ndarray,
        beams: int,
    ) -> None:
        self.xp, self.decoder, self.sequence = xp, decoder, np.repeat(start, beams, axis=0)
        mask_inputs = [] if mask is None else [mask]
        begins = len(parameters(encoder)) == 2 + len(mask_inputs)
        results = list(encoder(source, *mask_inputs, *([start] if begins else [])))
        self.whole = self._takes_whole_sequence()
        layers = len(outputs_of(decoder)) // 2
        own = len(parameters(decoder)) - 1 - len(mask_inputs) - 4 * layers  # 1 if the decoder reads hidden states
        if begins:
            logits, hidden, *caches = results
            self.own, cross = caches[: 2 * layers], caches[2 * layers :]
            fixed = [hidden][:own]
        else:
            kinds = parameters(decoder)[1 + len(mask_inputs) :][: 2 * layers]
            logits, cross, fixed = None, results, []
            self.own = [self._empty(kind, len(start)) for kind in kinds]
        rows = xp.asarray(np.repeat(np.arange(len(start)), beams))
        self.own, self.cross, fixed = ([chosen(xp, x, rows) for x in group] for group in (self.own, cross, fixed))
        self.fixed = [*(np.repeat(m, beams, axis=0) for m in mask_inputs), *fixed]
        if logits is None:
            self._run(self.sequence)
        else:
            self.logits = np.repeat(last_logits(xp, logits), beams, axis=0)

    def _takes_whole_sequence(self) -> bool:
        kind = parameters(self.decoder)[0]
        return kind is not None and kind[1][1] != 1

    def _empty(self, kind: Any, rows: int) -> Any:
        if kind is None or len(kind[1]) != 4 or kind[1][1] is None or kind[1][3] is None:
            raise InvalidModel(
                "a cache of the decoder subgraph has no known number of heads and size.",
                why="a past input must be declared as [batch, heads, length, size], heads and size as numbers.",
                fix="declare the shape of the past inputs.",
            )
        return self.xp.zeros((rows, kind[1][1], 0, kind[1][3]), dtype=kind[0])

    def step(self, tokens: np.ndarray, rows: np.ndarray | None = None) -> None:
        if rows is not None:
            where = self.xp.asarray(rows)
            self.own = [chosen(self.xp, cache, where) for cache in self.own]
            self.sequence = self.sequence[rows]
        self.sequence = np.concatenate([self.sequence, tokens[:, None]], axis=1)
        self._run(self.sequence if self.whole else tokens[:, None])

    def _run(self, ids: np.ndarray) -> None:
        logits, *results = self.decoder(ids, *self.fixed, *self.own, *self.cross)
        self.own = results[: len(self.own)]
        self.logits = last_logits(self.xp, logits)


def parameters(graph: Graph) -> tuple[Any, ...]:
    """Declared dtype and shape of each input of a subgraph."""
    return getattr(graph, "parameters", ())


def outputs_of(graph: Graph) -> tuple[Any, ...]:
    return getattr(graph, "declared", ())


def chosen(xp: Any, cache: Any, rows: Any, axis: int = 0) -> Any:
    """Rows of a cache, which a subgraph may have left on the host."""
    return xp.take(xp.asarray(cache), rows, axis=axis)


def last_logits(xp: Any, logits: Any) -> np.ndarray:
    """float32 [rows, vocabulary] of the last position, on the host."""
    return np.asarray(xp.to_numpy(logits[:, -1]), np.float32)


def encoder_mask(ids: np.ndarray, given: np.ndarray | None, pad: int) -> np.ndarray:
    """Hides the padding on the left; on the right, a token like padding may be the end of the text."""
    return np.asarray(np.cumsum(ids != pad, axis=1) > 0 if given is None else given, np.int32)


def only_decoder(operator: str, model_type: int, encoder: Any) -> None:
    if model_type != GPT or encoder is not None:
        raise UnsupportedModel(
            f"{operator} with model_type {model_type}.",
            why="it is specified for models that are only a decoder.",
            fix="use BeamSearch with num_beams 1 for encoders and decoders.",
        )


# Greedy search and sampling


def _generate(
    decoder: Decoder, ids: np.ndarray, longest: int, eos: int, pad: int, rules: Rules,
    choose: Callable[[np.ndarray], np.ndarray],
) -> np.ndarray:  # fmt: skip
    """[batch, longest] tokens: those given, and what is chosen until every row has met its end."""
    sequences = np.asarray(ids, np.int32)
    ended = np.zeros(len(sequences), bool)
    is_first = True
    while sequences.shape[1] < longest:
        tokens = choose(rules.apply(decoder.logits, sequences, is_first)).astype(np.int32)
        ended |= tokens == eos
        tokens = np.where(ended, np.int32(pad), tokens)
        sequences = np.concatenate([sequences, tokens[:, None]], axis=1)
        if ended.all():
            break
        if sequences.shape[1] < longest:
            decoder.step(tokens)
        is_first = False
    missing = longest - sequences.shape[1]
    return np.pad(sequences, ((0, 0), (0, missing)), constant_values=pad)


@op("GreedySearch", domain=MS, out=("int32",))
def greedy_search(
    xp, input_ids: Host, max_length: Host, min_length: Host = None, repetition_penalty: Host = None,
    vocab_mask: Host = None, prefix_vocab_mask: Host = None, attention_mask: Host = None, *,
    decoder: Body, decoder_start_token_id=-1, encoder: Body = None, eos_token_id, init_decoder: Body = None,
    model_type=0, no_repeat_ngram_size=0, pad_token_id, vocab_size=-1,
):  # fmt: skip
    only_decoder("GreedySearch", model_type, encoder)
    rules = Rules(
        eos_token_id, count(min_length, 0), number(repetition_penalty, 1.0), no_repeat_ngram_size, vocab_mask,
        prefix_vocab_mask,
    )  # fmt: skip
    model = Decoder(xp, decoder, init_decoder, input_ids, attention_mask, pad_token_id)
    longest = int(scalar(max_length))
    return _generate(
        model, input_ids, longest, eos_token_id, pad_token_id, rules, lambda scores: scores.argmax(axis=-1)
    )


@op("Sampling", domain=MS, random=True, out=("int32", "float32"))
def sampling(
    xp, input_ids: Host, max_length: Host, min_length: Host = None, repetition_penalty: Host = None,
    vocab_mask: Host = None, prefix_vocab_mask: Host = None, attention_mask: Host = None, presence_mask: Host = None,
    seed: Host = None, *,
    custom=0, decoder: Body, decoder_start_token_id=-1, encoder: Body = None, eos_token_id, filter_value=-1e20,
    init_decoder: Body = None, min_tokens_to_keep=0, model_type=0, no_repeat_ngram_size=0, pad_token_id,
    presence_penalty=0.0, temperature=1.0, top_p=0.0, vocab_size=-1,
):  # fmt: skip
    only_decoder("Sampling", model_type, encoder)
    rules = Rules(
        eos_token_id, count(min_length, 0), number(repetition_penalty, 1.0), no_repeat_ngram_size, vocab_mask,
        prefix_vocab_mask, temperature, presence_mask, presence_penalty,
    )  # fmt: skip
    generator = np.random.default_rng(int(scalar(seed)) if seed is not None else int(seed_of(None)))
    filtered = None

    def choose(scores: np.ndarray) -> np.ndarray:
        nonlocal filtered
        filtered = nucleus(scores, top_p, min_tokens_to_keep, filter_value, bool(custom))
        return np.array([generator.choice(len(p), p=p / p.sum()) for p in softmax(filtered.astype(np.float64))])

    model = Decoder(xp, decoder, init_decoder, input_ids, attention_mask, pad_token_id)
    sequences = _generate(model, input_ids, int(scalar(max_length)), eos_token_id, pad_token_id, rules, choose)
    return sequences, filtered


# Beam search


def _search(
    model: Decoder | EncoderDecoder, start: np.ndarray, beams: Beams, longest: int, rules: Rules
) -> list[np.ndarray]:
    """Runs the beams to their end; the scores of each step."""
    steps: list[np.ndarray] = []
    while beams.sequences.shape[1] < longest:
        scores = rules.apply(log_softmax(model.logits), beams.sequences, not steps)
        scores = scores + beams.scores[:, None]
        steps.append(scores)
        rows, tokens = beams.advance(scores)
        if beams.done:
            break
        if beams.sequences.shape[1] < longest:
            model.step(tokens, rows)
    return steps


def _results(
    beams: Beams, steps: Sequence[np.ndarray], returned: int, longest: int, start: int, outputs: int
) -> tuple[Any, ...]:
    sequences, sums = beams.finished(returned, longest)
    if outputs < 3:
        return sequences, sums, None
    batch, width = len(beams.hypotheses), steps[0].shape[1]
    scores = np.zeros((longest - start, batch, beams.beams, width), np.float32)
    for i, step in enumerate(steps):
        scores[i] = step.reshape(scores.shape[1:])
    return sequences, sums, scores


@op("BeamSearch", domain=MS, out=("int32", "float32", "float32"))
def beam_search(
    xp, input_ids: Host, max_length: Host, min_length: Host = None, num_beams: Host = None,
    num_return_sequences: Host = None, length_penalty: Host = None, repetition_penalty: Host = None,
    vocab_mask: Host = None, prefix_vocab_mask: Host = None, attention_mask: Host = None,
    decoder_input_ids: Host = None, logits_processor: Host = None, *,
    decoder: Body, decoder_start_token_id=-1, early_stopping=0, encoder: Body = None, eos_token_id,
    init_decoder: Body = None, model_type=0, no_repeat_ngram_size=0, pad_token_id, vocab_size=-1,
    outputs: Outputs = 1,
):  # fmt: skip
    width, longest = int(scalar(num_beams)), int(scalar(max_length))
    rules = Rules(
        eos_token_id, count(min_length, 0), number(repetition_penalty, 1.0), no_repeat_ngram_size, vocab_mask,
        prefix_vocab_mask,
    )  # fmt: skip
    model: Decoder | EncoderDecoder
    if model_type == GPT:
        start = np.asarray(input_ids, np.int32)
        ids, mask = (x if x is None else np.repeat(x, width, axis=0) for x in (start, attention_mask))
        model = Decoder(xp, decoder, init_decoder, ids, mask, pad_token_id)
    elif model_type == T5 and encoder is not None:
        start = _start(decoder_input_ids, decoder_start_token_id, len(input_ids))
        mask = encoder_mask(input_ids, attention_mask, pad_token_id)
        model = EncoderDecoder(xp, encoder, decoder, np.asarray(input_ids, np.int32), mask, start, width)
    else:
        raise UnsupportedModel(
            f"BeamSearch with model_type {model_type}.",
            why="0 is a decoder (GPT-2), 1 an encoder with a decoder (T5); Whisper has WhisperBeamSearch.",
            fix="export the model with one of these.",
        )
    beams = _beams(start, width, eos_token_id, pad_token_id, number(length_penalty, 1.0), early_stopping)
    steps = _search(model, start, beams, longest, rules)
    return _results(beams, steps, count(num_return_sequences, 1), longest, start.shape[1], outputs)


@op("WhisperBeamSearch", domain=MS, out=("int32", "float32", "float32", "float32", "float32"))
def whisper_beam_search(
    xp, input_ids, max_length: Host, min_length: Host = None, num_beams: Host = None,
    num_return_sequences: Host = None, length_penalty: Host = None, repetition_penalty: Host = None,
    vocab_mask: Host = None, prefix_vocab_mask: Host = None, attention_mask: Host = None,
    decoder_input_ids: Host = None, logits_processor: Host = None, cross_qk_layer_head: Host = None,
    extra_decoding_ids: Host = None, temperature: Host = None, *,
    beginning_timestamp_token_id=-1, decoder: Body, decoder_output_cross_qk=0, decoder_start_token_id=-1,
    early_stopping=0, encoder: Body = None, eos_token_id, init_decoder: Body = None, model_type=2,
    no_repeat_ngram_size=0, no_speech_token_id=-1, no_timestamps_token_id=-1, pad_token_id,
    start_of_lm_token_id=-1, transcribe_token_id=-1, translate_token_id=-1, vocab_size=-1, outputs: Outputs = 1,
):  # fmt: skip
    unknown = {
        "decoder_output_cross_qk": decoder_output_cross_qk,
        "logits_processor": count(logits_processor, 0),
        "extra_decoding_ids": extra_decoding_ids is not None,
        "no_speech_probs": outputs > 4,
        "a missing encoder": encoder is None,
    }
    if any(unknown.values()):
        raise UnsupportedModel(
            f"WhisperBeamSearch with {', '.join(name for name, used in unknown.items() if used)}.",
            why="timestamps, cross attention maps and silence are computed by rules of one runtime's CUDA kernels.",
            fix="export the model without them.",
        )
    width, longest = int(scalar(num_beams)), int(scalar(max_length))
    rules = Rules(
        eos_token_id, count(min_length, 0), number(repetition_penalty, 1.0), no_repeat_ngram_size, vocab_mask,
        prefix_vocab_mask, number(temperature, 1.0),
    )  # fmt: skip
    start = _start(decoder_input_ids, decoder_start_token_id, input_ids.shape[0])
    model = EncoderDecoder(xp, encoder, decoder, input_ids, None, start, width)
    beams = _beams(start, width, eos_token_id, pad_token_id, number(length_penalty, 1.0), early_stopping)
    steps = _search(model, start, beams, longest, rules)
    results = _results(beams, steps, count(num_return_sequences, 1), longest, start.shape[1], outputs)
    return *results, None, None


def _start(given: np.ndarray | None, token: int, batch: int) -> np.ndarray:
    """The tokens [batch, length] from which a decoder begins."""
    return np.full((batch, 1), token, np.int32) if given is None else np.asarray(given, np.int32)


def _beams(start: np.ndarray, width: int, eos: int, pad: int, length_penalty: float, early_stopping: int) -> Beams:
    hypotheses = [Hypotheses(width, length_penalty, bool(early_stopping)) for _ in start]
    return Beams(np.repeat(start, width, axis=0), width, eos, pad, hypotheses)
