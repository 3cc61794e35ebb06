"""Are strings normalised, split, matched, tokenized and counted as the specifications of ONNX and RE2 say?

Expected values are worked out by hand. Where onnxruntime departs from the specification, a comment says so.
"""

from __future__ import annotations

import locale as process_locale
import time
from typing import Any

import numpy as np
import pytest
from nodes import run_node

import ep
from ep.ops.regex import compiled


def texts(*values: str) -> np.ndarray:
    return np.asarray(values, object)


def text(op: str, x: np.ndarray, **attributes: Any) -> Any:
    """Strings never leave the host, so one device tells for all."""
    return run_node("host", op, x, **attributes)


# Joining and splitting


def test_concatenation_broadcasts():
    got = run_node("host", "StringConcat", texts("a", "b").reshape(2, 1), texts("x", "", "é"))
    assert got.tolist() == [["ax", "a", "aé"], ["bx", "b", "bé"]]


def test_concatenation_of_scalars_is_a_scalar():
    got = run_node("host", "StringConcat", np.asarray("a", object), np.asarray("b", object))
    assert got.shape == () and got.item() == "ab"


@pytest.mark.parametrize(
    ("attributes", "want", "counts"),
    [
        ({}, [["a", "b"], ["c", ""], ["", ""]], [2, 1, 0]),
        ({"delimiter": ""}, [["a", "b"], ["c", ""], ["", ""]], [2, 1, 0]),
        ({"delimiter": " "}, [["", "a", "", "b"], ["c", "", "", ""], ["", "", "", ""]], [4, 1, 1]),
        ({"delimiter": " ", "maxsplit": 1}, [["", "a  b"], ["c", ""], ["", ""]], [2, 1, 1]),
        ({"maxsplit": 0}, [["a  b"], ["c"], [""]], [1, 1, 0]),
    ],
)
def test_splitting(attributes, want, counts):
    """Onnxruntime counts no substring in an empty string, although a delimiter is given."""
    got, number = text("StringSplit", texts(" a  b", "c", ""), outputs=2, **attributes)
    assert got.tolist() == want and number.tolist() == counts and number.dtype == np.int64


def test_whitespace_around_the_rest_is_removed():
    got, _ = text("StringSplit", texts(" x  y z \t"), maxsplit=1, outputs=2)
    assert got.tolist() == [["x", "y z"]]


# StringNormalizer


@pytest.mark.parametrize(
    ("action", "locale", "want"),
    [
        ("LOWER", "en_US", ["straße", "σασ", "i", "i"]),  # one character for one character, as C's locales do
        ("UPPER", "en_US", ["STRASSE".replace("SS", "ß"), "ΣΑΣ", "İ", "I"]),
        ("LOWER", "tr_TR.UTF-8", ["straße", "σασ", "i", "ı"]),
        ("UPPER", "az-AZ", ["STRAßE", "ΣΑΣ", "İ", "I"]),
        ("LOWER", "C", ["straße", "ΣΑΣ", "İ", "i"]),
        ("NONE", "de_DE", ["Straße", "ΣΑΣ", "İ", "I"]),
    ],
)
def test_case_follows_the_locale_of_the_node(action, locale, want):
    before = process_locale.setlocale(process_locale.LC_CTYPE)
    got = text("StringNormalizer", texts("Straße", "ΣΑΣ", "İ", "I"), case_change_action=action, locale=locale)
    assert got.tolist() == want
    assert process_locale.setlocale(process_locale.LC_CTYPE) == before


@pytest.mark.parametrize(("sensitive", "want"), [(0, ["TUESDAY"]), (1, ["MONDAY", "TUESDAY"])])
def test_stop_words_are_compared_before_the_case_changes(sensitive, want):
    got = text(
        "StringNormalizer", texts("Monday", "monday", "tuesday"), case_change_action="UPPER",
        stopwords=["monday"], is_case_sensitive=sensitive,
    )  # fmt: skip
    assert got.tolist() == want


@pytest.mark.parametrize(("shape", "want"), [((2,), [""]), ((1, 2), [[""]])])
def test_if_all_words_are_dropped_an_empty_one_is_left(shape, want):
    got = text("StringNormalizer", texts("a", "A").reshape(shape), stopwords=["a"])
    assert got.tolist() == want


def test_a_matrix_of_several_rows_is_refused():
    with pytest.raises(ep.EpError, match=r"cannot take a tensor of shape \[2, 1\]"):
        text("StringNormalizer", texts("a", "b").reshape(2, 1))


# Regular expressions


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        (r"a|ab", ["a", "ab"], ["abc", ""]),
        (r"[^@]+@\w+\.(com|org)", ["a@b.com"], ["a@b.net", "@b.com", "a@b.com "]),
        (r"a$", ["a"], ["a\n"]),  # `$` is the very end
        (r"a.b", ["a\u2028b"], ["a\nb"]),
        (r"(?s)a.b", ["a\nb"], []),
        (r"(?m)^a$\n^b$", ["a\nb"], ["ab"]),
        (r"a(?i)b|c", ["ab", "aB", "C"], ["Ab", "ac"]),  # flags hold to the end of the group
        (r"(a(?i)b)c", ["aBc"], ["aBC"]),
        (r"(?i)straße\x{17f}k", ["STRAßES\u212a"], ["STRASSEsk"]),
        (r"\w\d\s", ["é1 ".replace("é", "e")], ["é1 ", "a\u06611", "a1\v"]),  # classes are those of ASCII
        (r"\bfoo\b.*\Bar", ["foo bar"], ["foobar", "foo ar"]),
        (r"[[:alpha:][:^ascii:]]+", ["aé"], ["a1"]),
        (r"[]a-]+", ["a]-"], ["b"]),
        (r"\pL\p{Lu}\P{L}[\p{Nd}_]", ["éÉ1٣", "aB._"], ["aa11"]),
        (r"a{,2}", ["a{,2}"], ["aa"]),  # a brace that is no repetition stands for itself
        (r"(ab){2,3}?", ["abab", "ababab"], ["ab", "abababab"]),
        (r"\Qa.b\E+", ["a.bb"], ["a.ba.b", "aXb"]),
        (r"\x61\141\n", ["aa\n"], ["aan"]),
        (r"(?P<year>\d{4})-(?<month>\d\d)", ["2024-01"], ["24-01"]),
        (r"", [""], ["a"]),
        (r"(|a)*", ["", "aa"], ["b"]),
    ],
)
def test_full_matches(pattern, yes, no):
    got = text("RegexFullMatch", texts(*yes, *no), pattern=pattern)
    assert got.dtype == np.bool_ and got.tolist() == [True] * len(yes) + [False] * len(no)


@pytest.mark.parametrize(
    "pattern",
    ["(", "a)", "[a", "*a", "a**", "a++", "a{1001}", "a{2,1}", r"(a)\1", "(?=a)", "(?<!a)b", r"\Z", "[z-a]",
     "[[:foo:]]", r"\p{Klingon}", "(?x)a", r"\x{110000}", "a{2}{3}"],
)  # fmt: skip
def test_what_re2_does_not_know_is_refused(pattern):
    with pytest.raises(ep.EpError, match=r"regular expression .* is not valid at position \d"):
        text("RegexFullMatch", texts("a"), pattern=pattern)


def test_matching_takes_linear_time():
    """A matcher that backtracks would try 2³⁰ ways."""
    start = time.perf_counter()
    assert not compiled("(a+)+$").full_match("a" * 30 + "b")
    assert not compiled("(a?){30}a{30}b").full_match("a" * 60)
    assert time.perf_counter() - start < 5


# Tokenizer


def tokenize(x: np.ndarray, **attributes: Any) -> Any:
    attributes = {"mark": 0, "mincharnum": 1, "pad_value": "#"} | attributes
    return text("Tokenizer", x, domain="com.microsoft", **attributes)


@pytest.mark.parametrize(
    ("strings", "attributes", "want"),
    [
        (["I love", "Hi"], {"separators": [" "]}, [["I", "love"], ["Hi", "#"]]),
        (["I love", "Hi"], {"separators": [" "], "mark": 1}, [["\2", "I", "love", "\3"], ["\2", "Hi", "\3", "#"]]),
        (["aXbYYcc"], {"separators": ["X", "Y+"]}, [["a", "b", "cc"]]),
        (["aXbYYcc"], {"separators": ["[XY]"], "mincharnum": 2}, [["cc"]]),
        (["hé", ""], {"separators": [""]}, [["h", "é"], ["#", "#"]]),
        (["h\n"], {"tokenexp": "."}, [["h", "\n"]]),
        (["abcd"], {"tokenexp": "ab|abc"}, [["abc"]]),  # the longest match counts
        (["a1b22"], {"tokenexp": r"\d*"}, [["1", "22"]]),  # empty matches do not
        (["one two"], {"tokenexp": r"\b\w"}, [["o", "t"]]),
        (["  "], {"separators": [" "], "mark": 1}, [[]]),
    ],
)
def test_tokens(strings, attributes, want):
    assert tokenize(texts(*strings), **attributes).tolist() == want


def test_tokens_of_nothing():
    assert tokenize(np.zeros((2, 0), object), separators=[" "]).shape == (2, 0)


# Counts and hashes


def counts(device: str, x: np.ndarray, **attributes: Any) -> Any:
    standard = {"mode": "TF", "min_gram_length": 1, "max_gram_length": 2, "max_skip_count": 0}
    return run_node(device, "TfIdfVectorizer", x, **(standard | attributes))


POOL = {"ngram_counts": [0, 2], "ngram_indexes": [1, 0, 2], "pool_int64s": [5, 6, 5, 6]}  # 5; 6; 5 6


def test_n_grams_are_counted_at_their_columns(device):
    x = np.array([[5, 6, 5, 6], [6, 5, 7, 6]], np.int32)
    assert counts(device, x, **POOL).tolist() == [[2, 2, 2], [2, 1, 0]]


def test_skips_find_n_grams_with_gaps_and_count_single_tokens_once(device):
    got = counts(device, np.array([6, 5, 7, 6], np.int64), max_skip_count=1, **POOL)
    assert got.tolist() == [2, 1, 1]


@pytest.mark.parametrize(("mode", "want"), [("IDF", [0.5, 0, 0.125]), ("TFIDF", [1, 0, 0.125])])
def test_a_weight_belongs_to_an_n_gram_not_to_a_column(device, mode, want):
    pool = {"ngram_counts": [0], "ngram_indexes": [2, 0, 1], "pool_int64s": [10, 11, 12]}
    got = counts(
        device, np.array([11, 10, 11], np.int64), mode=mode, max_gram_length=1, weights=[0.125, 0.5, 2.0], **pool
    )
    assert got.tolist() == want


def test_strings_are_counted_on_the_host(device):
    pool = {"ngram_counts": [0, 1], "ngram_indexes": [0, 1], "pool_strings": ["a", "a", "b"]}
    assert counts(device, texts("a", "b", "a", "b"), **pool).tolist() == [2, 2]


def test_nothing_to_count(device):
    assert counts(device, np.zeros((2, 0), np.int64), **POOL).tolist() == [[0, 0, 0]] * 2


@pytest.mark.parametrize(
    ("key", "seed", "want"),
    [
        (texts("", "test", "aaaa"), 0x9747B28C, [0xEBB6C228, 0x704B81DC, 0x5A97808A]),
        (texts("The quick brown fox jumps over the lazy dog"), 0x9747B28C, [0x2FA826CD]),
        (np.array([0], np.int32), 0, [0x2362F9DE]),
        (texts("abcdefg", "é"), 7, [3679949161, 312290774]),  # from here on: what onnxruntime gives
        (np.array([1, -3], np.int32), 7, [3775148407, 1422880352]),
        (np.array([1, -3], np.int64), 7, [3458117768, 1705015668]),
        (np.array([1.5, -2], np.float32), 7, [1325237653, 4287096674]),
        (np.array([1.5, -2], np.float64), 7, [1353323163, 2349510344]),
    ],
)
def test_hashes_are_those_of_the_published_test_vectors(device, key, seed, want):
    got = run_node(device, "MurmurHash3", key, domain="com.microsoft", seed=seed)
    assert got.dtype == np.uint32 and got.tolist() == want
    signed = run_node(device, "MurmurHash3", key, domain="com.microsoft", seed=seed, positive=0)
    assert signed.dtype == np.int32 and signed.view(np.uint32).tolist() == want
