"""Sequences of tokens: how often n-grams occur (TfIdfVectorizer), and hashes of tokens (MurmurHash3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ep.errors import InvalidInput, InvalidModel
from ep.ops.lookup import place
from ep.ops.tables import once_per_node
from ep.registry import op


@dataclass(frozen=True, eq=False)
class Grams:
    """A trie of n-grams as sorted keys per level; a node is a number from 1 on, and 0 means unknown.

    Node p and token t of one level lead to the node of the next whose key is p · (tokens + 1) + t.
    """

    tokens: Sequence[Any]  # distinct, sorted; a dictionary token → number if they are strings
    levels: tuple[np.ndarray, ...]  # sorted keys of the nodes after 1, 2, … tokens
    column: tuple[np.ndarray, ...]  # per level: node → number of its n-gram, or the count of all n-grams
    indexes: np.ndarray  # number of an n-gram → column of the output
    weights: np.ndarray | None

    @property
    def width(self) -> int:
        return int(self.indexes.max()) + 1


def _reads_strings(attributes: dict[str, Any]) -> str:
    return "it counts strings" if attributes.get("pool_strings") else ""


@op("TfIdfVectorizer", since=9, host_only=_reads_strings)
def tf_idf_vectorizer(
    xp, x, *, max_gram_length, max_skip_count, min_gram_length, mode, ngram_counts, ngram_indexes,
    pool_int64s=None, pool_strings=None, weights=None,
):  # fmt: skip
    if mode not in ("TF", "IDF", "TFIDF") or x.ndim > 2:
        raise InvalidInput(
            f"TfIdfVectorizer of mode '{mode}' cannot take a tensor of shape {list(x.shape)}.",
            why="modes are TF, IDF and TFIDF, inputs [C] or [N, C].",
        )
    pool = pool_strings or pool_int64s or ()
    grams = _grams(pool, ngram_counts, ngram_indexes, weights, min_gram_length, max_gram_length)
    rows = xp.reshape(x, (1, -1)) if x.ndim < 2 else x
    counts = _counts(xp, _numbered(xp, rows, grams.tokens), grams, max_skip_count)
    if mode != "TF":
        factors = np.ones(len(grams.indexes)) if grams.weights is None else grams.weights
        counts = (xp.minimum(counts, 1) if mode == "IDF" else counts) * xp.asarray(factors.astype(np.float32))
    y = _columns(xp, counts, grams)
    return y if x.ndim == 2 else xp.reshape(y, (-1,))


@once_per_node
def _grams(pool: Any, starts: Any, indexes: Any, weights: Any, least: int, most: int) -> Grams:
    ends = [*starts[1:], len(pool)]
    grams: dict[tuple[Any, ...], int] = {}
    number = 0
    for n, (start, end) in enumerate(zip(starts, ends, strict=True), 1):
        for at in range(start, end - n + 1, n):
            if least <= n <= most:
                grams[tuple(pool[at : at + n])] = number
            number += 1
    if number != len(indexes) or (weights and len(weights) != number):
        raise InvalidModel(
            f"TfIdfVectorizer has {number} n-grams, {len(indexes)} indexes and {len(weights or ())} weights."
        )
    tokens = sorted({token for gram in grams for token in gram})
    numbers = {token: i for i, token in enumerate(tokens, 1)}
    levels, columns, nodes = [], [], {(): 0}
    for n in range(1, max(map(len, grams), default=0) + 1):
        prefixes = {gram[:n] for gram in grams if len(gram) >= n}
        keys = {nodes[p[:-1]] * (len(tokens) + 1) + numbers[p[-1]]: p for p in prefixes}
        ordered = sorted(keys)
        nodes = {keys[key]: i for i, key in enumerate(ordered, 1)}
        levels.append(np.array(ordered, np.int64))
        columns.append(np.array([number, *(grams.get(keys[key], number) for key in ordered)], np.int32))
    names: Any = numbers if tokens and isinstance(tokens[0], str) else np.array(tokens, np.int64)
    factors = np.array(weights, np.float32) if weights else None
    return Grams(names, tuple(levels), tuple(columns), np.array(indexes, np.int64), factors)


def _numbered(xp: Any, rows: Any, tokens: Any) -> Any:
    """The number of each token, 0 for unknown ones."""
    if isinstance(tokens, dict):
        numbers = [tokens.get(token, 0) for token in rows.reshape(-1).tolist()]
        return np.array(numbers, np.int64).reshape(rows.shape)
    return xp.astype(place(xp, xp.astype(rows, np.int64), tokens), np.int64)


def _counts(xp: Any, numbers: Any, grams: Grams, skips: int) -> Any:
    """How often each n-gram occurs in each row: [rows, n-grams]."""
    rows, length = numbers.shape
    total = len(grams.indexes)
    found = []
    for skip in range(1, skips + 2):
        node, reach = None, length
        for n, (keys, column) in enumerate(zip(grams.levels, grams.column, strict=True), 1):
            reach = length - skip * (n - 1)
            if reach <= 0:
                break
            token = numbers[:, length - reach :]
            key = token if node is None else node[:, :reach] * (_vocabulary(grams) + 1) + token
            node = xp.astype(place(xp, xp.where(token == 0, 0, key), keys), np.int64)
            if n > 1 or skip == 1:  # skipping between the tokens of one token is no other way
                found.append(xp.take(xp.asarray(column), node, axis=0))
    if not found:
        return xp.zeros((rows, total), dtype=np.float32)
    columns = xp.concatenate(found, axis=1)
    row = np.broadcast_to(np.arange(rows, dtype=np.int32)[:, None], columns.shape)
    empty = xp.zeros((rows, total + 1), dtype=np.float32)
    ones = xp.ones(columns.shape, dtype=np.float32)
    return xp.scatter(empty, (xp.asarray(np.ascontiguousarray(row)), columns), ones, "add")[:, :total]


def _vocabulary(grams: Grams) -> int:
    return len(grams.tokens)


def _columns(xp: Any, counts: Any, grams: Grams) -> Any:
    """The counts at their columns of the output; n-grams that share one are added."""
    indexes, width = grams.indexes, grams.width
    if len(indexes) == width and len(np.unique(indexes)) == width:
        return xp.take(counts, xp.asarray(np.argsort(indexes)), axis=1)
    empty = xp.zeros((counts.shape[0], width), dtype=np.float32)
    return xp.scatter(empty, (slice(None), xp.asarray(indexes)), counts, "add")


# Hashes


def _hash_dtype(attributes: dict[str, Any]) -> str:
    return "uint32" if attributes.get("positive", 1) else "int32"


@op("MurmurHash3", domain="com.microsoft", out=(_hash_dtype,))
def murmur_hash3(xp, x, *, positive=1, seed=0):
    """MurmurHash3_x86_32 of each element's bytes, or of each string in UTF-8."""
    dtype = xp.dtype_of(x)
    if np.dtype(dtype).kind == "O":
        h = _hash_strings(xp, x.reshape(-1).tolist(), seed)
    else:
        flat = xp.reshape(x, (-1,))
        if dtype.itemsize == 4:
            words = [xp.bitcast(flat, np.uint32)]
        else:
            whole = xp.bitcast(flat, np.uint64)
            words = [xp.astype(whole & 0xFFFFFFFF, np.uint32), xp.astype(whole >> 32, np.uint32)]
        h = _murmur(xp, words, None, 4 * len(words), seed)
    h = xp.reshape(h, x.shape)
    return h if positive else xp.bitcast(h, np.int32)


def _hash_strings(xp: Any, strings: list[str], seed: int) -> np.ndarray:
    keys = [s.encode("utf-8", "surrogateescape") for s in strings]
    lengths = np.array([len(key) for key in keys], np.int64)
    hashes = np.empty(len(keys), np.uint32)
    for length in np.unique(lengths):
        same = np.flatnonzero(lengths == length)
        padded = b"".join(keys[i] + bytes(-length % 4) for i in same)
        words = np.frombuffer(padded, "<u4").reshape(len(same), -1).astype(np.uint32).T
        whole, tail = words[: length // 4], words[length // 4 :]
        hashes[same] = _murmur(xp, list(whole), tail[0] if len(tail) else None, int(length), seed, len(same))
    return hashes


def _murmur(xp: Any, words: list[Any], tail: Any, length: int, seed: int, count: int | None = None) -> Any:
    h = xp.full((words[0].shape[0] if count is None else count,), seed & 0xFFFFFFFF, dtype=np.uint32)
    for word in words:
        h = _rotated(xp, h ^ _mixed(xp, word), 13) * 5 + 0xE6546B64
    if tail is not None:
        h = h ^ _mixed(xp, tail)
    h = h ^ length
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


def _mixed(xp: Any, word: Any) -> Any:
    return _rotated(xp, word * 0xCC9E2D51, 15) * 0x1B873593


def _rotated(xp: Any, x: Any, bits: int) -> Any:
    return (x << bits) | (x >> (32 - bits))
