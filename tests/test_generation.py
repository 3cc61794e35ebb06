"""Do the generation operators of onnxruntime's domain write what onnxruntime writes, on small random models?"""

from __future__ import annotations

import warnings
from typing import Any

import generators
import numpy as np
import pytest

import ep

END, PAD, START = 2, 0, 1
GPT = {"eos_token_id": END, "pad_token_id": PAD, "model_type": 0}
PROMPT, PADDED = [[3, 4, 5], [6, 7, 8]], [[0, 4, 5], [6, 7, 8]]


def ids(values: Any) -> np.ndarray:
    return np.asarray(values, np.int32)


def numbers(*values: float) -> np.ndarray:
    return np.asarray(values, np.float32)


def agree(device: str, op: str, inputs: dict[str, Any], outputs: int = 1, **attributes: Any) -> list[np.ndarray]:
    """The results of a device, after comparing them with onnxruntime's."""
    ort = pytest.importorskip("onnxruntime")
    model = generators.model(op, inputs, outputs, **attributes)
    feeds = {name: x for name, x in inputs.items() if x is not None}
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    want = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"]).run(None, feeds)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ep.HostFallbackWarning)
        got = ep.load(model, device).run(None, feeds)
    for g, w in zip(got, want, strict=True):
        if w is not None:
            assert g.dtype == w.dtype
            np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-4)
    return got


def greedy(**given: Any) -> dict[str, Any]:
    names = ("min_length", "repetition_penalty", "vocab_mask", "prefix_vocab_mask", "attention_mask")
    return {"input_ids": ids(PROMPT), "max_length": ids([8]), **{n: given.get(n) for n in names}} | given


def beams(width: int, returned: int, penalty: float = 1.0, **given: Any) -> dict[str, Any]:
    return {
        "input_ids": ids(PROMPT), "max_length": ids([8]), "min_length": ids([0]), "num_beams": ids([width]),
        "num_return_sequences": ids([returned]), "length_penalty": numbers(penalty),
    } | given  # fmt: skip


def test_greedy_search(device):
    (tokens,) = agree(device, "GreedySearch", greedy(), decoder=generators.gpt(), **GPT)
    assert tokens.shape == (2, 8) and (tokens[:, :3] == PROMPT).all()


GREEDY = {
    "padding on the left": (greedy(input_ids=ids(PADDED)), {}),
    "a repetition penalty": (greedy(repetition_penalty=numbers(1.5), min_length=ids([6])), {}),
    "no repeated pairs": (greedy(max_length=ids([10])), {"no_repeat_ngram_size": 2}),
    "masks": (
        greedy(
            vocab_mask=ids([1] * 6 + [0] * 2 + [1] * 5),
            prefix_vocab_mask=ids([[1] * 5 + [0] * 8, [0] * 5 + [1] * 8]),
            attention_mask=ids([[0, 1, 1], [1, 1, 1]]),
        ),
        {},
    ),
}


@pytest.mark.parametrize("name", GREEDY)
def test_rules_of_greedy_search(name):
    inputs, attributes = GREEDY[name]
    agree("host", "GreedySearch", inputs, decoder=generators.gpt(0), **GPT, **attributes)


def test_an_end_leaves_padding():
    """onnxruntime does not write what lies behind the end of all sequences."""
    always = greedy(vocab_mask=ids([0, 0, 1] + [0] * 10))
    model = generators.model("GreedySearch", always, 1, decoder=generators.gpt(), **GPT)
    feeds = {name: x for name, x in always.items() if x is not None}
    (tokens,) = ep.load(model, "host").run(None, feeds)
    assert tokens.tolist() == [[*row, 0, 0, 0, 0, 0] for row in PROMPT]


def test_beam_search(device):
    inputs = beams(3, 2, repetition_penalty=numbers(1.2))
    tokens, scores, steps = agree(device, "BeamSearch", inputs, 3, decoder=generators.gpt(), **GPT)
    assert tokens.shape == (2, 2, 8) and steps.shape == (5, 2, 3, generators.WORDS)
    assert (scores[:, 0] >= scores[:, 1]).all()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("early", [0, 1])
def test_ends_of_beams(seed, early):
    inputs = beams(2, 1, 0.5, input_ids=ids(PADDED), min_length=ids([5]), max_length=ids([9]))
    attributes = {"early_stopping": early, "no_repeat_ngram_size": 3}
    agree("host", "BeamSearch", inputs, 2, decoder=generators.gpt(seed), **GPT, **attributes)


def test_beam_search_of_encoder_and_decoder(device):
    """The second source ends in padding, which counts as text there."""
    inputs = beams(3, 2, input_ids=ids([[3, 4, 5, 6], [7, 8, 0, 0]]), max_length=ids([7]))
    attributes = GPT | {"model_type": 1, "decoder_start_token_id": START}
    graphs = {"encoder": generators.encoder(), "decoder": generators.t5_decoder()}
    agree(device, "BeamSearch", inputs, 2, **attributes, **graphs)


def test_beam_search_of_sounds(device):
    sound = np.random.default_rng(0).standard_normal((2, generators.WIDTH, 6)).astype(np.float32)
    names = ("repetition_penalty", "vocab_mask", "prefix_vocab_mask", "attention_mask")
    inputs = beams(2, 1, input_ids=sound) | dict.fromkeys(names) | {"decoder_input_ids": ids([[1, 3], [1, 4]])}
    attributes = GPT | {"model_type": 2, "decoder_start_token_id": START}
    graphs = {"encoder": generators.whisper_encoder(), "decoder": generators.whisper_decoder()}
    agree(device, "WhisperBeamSearch", inputs, 2, **attributes, **graphs)


def test_timestamps_are_refused():
    sound = np.zeros((1, generators.WIDTH, 4), np.float32)
    names = ("repetition_penalty", "vocab_mask", "prefix_vocab_mask", "attention_mask", "decoder_input_ids")
    inputs = beams(2, 1, input_ids=sound) | dict.fromkeys(names) | {"logits_processor": ids([1])}
    graphs = {"encoder": generators.whisper_encoder(), "decoder": generators.whisper_decoder()}
    model = generators.model("WhisperBeamSearch", inputs, 1, **GPT | {"model_type": 2}, **graphs)
    feeds = {name: x for name, x in inputs.items() if x is not None}
    with pytest.raises(ep.UnsupportedModel, match="logits_processor"):
        ep.load(model, "host").run(None, feeds)


def sample(seed: int | None, **attributes: Any) -> list[np.ndarray]:
    inputs = greedy(presence_mask=None, seed=None if seed is None else ids([seed]), max_length=ids([12]))
    model = generators.model("Sampling", inputs, 2, decoder=generators.gpt(1), **GPT, **attributes)
    return ep.load(model, "host").run(None, {n: x for n, x in inputs.items() if x is not None})


def test_sampling_of_the_likeliest_is_greedy(device):
    inputs = greedy(presence_mask=None, seed=ids([5]))
    agree(device, "Sampling", inputs, 1, decoder=generators.gpt(1), **GPT, top_p=0.01, min_tokens_to_keep=1)


def test_seeds_of_sampling():
    wide = {"top_p": 1.0, "temperature": 20.0, "min_tokens_to_keep": 1}
    first, again, other = (sample(seed, **wide)[0] for seed in (1, 1, 2))
    assert (first == again).all() and (first != other).any()
    assert len({sample(None, **wide)[0].tobytes() for _ in range(4)}) > 1


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, 1), (0.75, 2), (0.94, 3)])
@pytest.mark.parametrize("custom", [0, 1])
def test_which_tokens_sampling_keeps(top_p, kept, custom):
    """Probabilities 0.6, 0.2, 0.15 and 0.05: the fewest of the likeliest that reach top_p."""
    from ep.ops.generation_scores import nucleus

    scores = np.log([[0.2, 0.6, 0.05, 0.15]]).astype(np.float32)
    filtered = nucleus(scores, top_p, 1, -1e20, bool(custom))
    assert np.flatnonzero(filtered[0] > -1e19).tolist() == sorted([1, 0, 3, 2][:kept])
