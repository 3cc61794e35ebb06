"""Strings: normalising, splitting, joining, matching and tokenizing them; all of it runs on the host."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from ep.errors import InvalidInput, InvalidModel
from ep.ops.regex import compiled
from ep.ops.tables import once_per_node
from ep.registry import op

TEXT = "it handles strings"


def string_array(values: list[str], shape: tuple[int, ...]) -> np.ndarray:
    """An object array of strings with this shape."""
    result = np.empty(len(values), object)
    result[:] = values
    return result.reshape(shape)


@op("StringConcat", since=20, host_only=TEXT)
def string_concat(xp, x, y):
    return np.asarray(x + y, object)


@op("StringSplit", since=20, host_only=TEXT)
def string_split(xp, x, *, delimiter=None, maxsplit=None):
    most = -1 if maxsplit is None else maxsplit
    if delimiter:
        rows = [s.split(delimiter, most) for s in x.reshape(-1).tolist()]
    else:
        rows = [s.strip().split(None, most) for s in x.reshape(-1).tolist()]
    counts = np.array([len(row) for row in rows], np.int64).reshape(x.shape)
    return _padded(rows, x.shape, ""), counts


def _padded(rows: list[list[str]], shape: tuple[int, ...], fill: str) -> np.ndarray:
    """The rows as [*shape, longest row]."""
    width = max(map(len, rows), default=0)
    flat = [s for row in rows for s in (*row, *[fill] * (width - len(row)))]
    return string_array(flat, (*shape, width))


@op("RegexFullMatch", since=20, host_only=TEXT)
def regex_full_match(xp, x, *, pattern=None):
    if pattern is None:
        raise InvalidModel("RegexFullMatch has no pattern.", fix="set its attribute 'pattern'.")
    matches = compiled(pattern).full_match
    return np.array([matches(s) for s in x.reshape(-1).tolist()], bool).reshape(x.shape)


# StringNormalizer


@op("StringNormalizer", since=10, host_only=TEXT)
def string_normalizer(xp, x, *, case_change_action="NONE", is_case_sensitive=0, locale=None, stopwords=()):
    if x.ndim not in (1, 2) or (x.ndim == 2 and x.shape[0] != 1):
        raise InvalidInput(
            f"StringNormalizer cannot take a tensor of shape {list(x.shape)}.", why="it takes [C] or [1, C]."
        )
    if case_change_action not in ("NONE", "LOWER", "UPPER"):
        raise InvalidModel(f"case_change_action '{case_change_action}' is neither LOWER, UPPER nor NONE.")
    action = _case(case_change_action, locale or "en_US")
    words = x.reshape(-1).tolist()
    if stopwords:
        key = _case("NONE", "") if is_case_sensitive else _case("LOWER", locale or "en_US")
        stops = _stops(stopwords, key)
        words = [word for word in words if key(word) not in stops] or [""]
    return string_array([action(word) for word in words], (-1,) if x.ndim == 1 else (1, -1))


@once_per_node
def _stops(stopwords: tuple[str, ...], key: Callable[[str], str]) -> frozenset[str]:
    return frozenset(map(key, stopwords))


@lru_cache(maxsize=16)
def _case(action: str, locale: str) -> Callable[[str], str]:
    """A change of case as a function, by Unicode's simple mapping: one character for one character.

    That is what C's locales do; the process's own locale is neither read nor changed.
    """
    if action == "NONE":
        return str
    language = locale.replace("-", "_").split("_")[0].split(".")[0].lower()
    if language in ("c", "posix") and "utf" not in locale.lower():
        special = {code: code for code in range(128, 0x110000)}
    elif language in ("tr", "az"):
        special = {ord("I"): "ı", ord("İ"): "i"} if action == "LOWER" else {ord("i"): "İ", ord("ı"): "I"}
    else:
        special = {}
    table = _Simple(special, str.lower if action == "LOWER" else str.upper)
    if special:
        return lambda s: s.translate(table)
    whole = str.lower if action == "LOWER" else str.upper
    return lambda s: whole(s) if s.isascii() else s.translate(table)


class _Simple(dict):
    """Code point → character of the other case, filled as characters come."""

    def __init__(self, special: dict[int, Any], whole: Callable[[str], str]) -> None:
        super().__init__(special)
        self.whole = whole

    def __missing__(self, code: int) -> str:
        char = chr(code)
        changed = self.whole(char)
        if len(changed) > 1:  # the full mapping; the simple one is its first letter, the title case or nothing
            title = char.title()
            changed = changed[0] if self.whole is str.lower else title if len(title) == 1 else char
        self[code] = changed
        return changed


# Tokenizer


@op("Tokenizer", domain="com.microsoft", host_only=TEXT)
def tokenizer(xp, x, *, mark, mincharnum, pad_value, separators=None, tokenexp=None):
    if bool(separators) == bool(tokenexp):
        raise InvalidModel("Tokenizer needs exactly one of its attributes 'separators' and 'tokenexp'.")
    if x.ndim not in (1, 2):
        raise InvalidInput(f"Tokenizer takes [C] or [N, C], not a tensor of shape {list(x.shape)}.")
    if x.size == 0:
        return x
    characters = tokenexp == "." or separators == ("",)
    if characters and mincharnum > 1:
        raise InvalidModel(f"Tokenizer makes characters of strings, but mincharnum is {mincharnum}.")
    cut = list if characters else _matches(tokenexp) if tokenexp else _between(separators)
    rows = [[t for t in cut(s) if len(t) >= mincharnum] for s in x.reshape(-1).tolist()]
    if mark and any(rows):
        rows = [["\x02", *row, "\x03"] for row in rows]
    return _padded(rows, x.shape, pad_value)


def _matches(pattern: str) -> Callable[[str], list[str]]:
    search = compiled(pattern).search

    def cut(text: str) -> list[str]:
        tokens, found = [], search(text)
        while found:
            tokens.append(text[slice(*found)])
            found = search(text, found[1])
        return tokens

    return cut


def _between(separators: tuple[str, ...]) -> Callable[[str], list[str]]:
    if not all(separators):
        raise InvalidModel(
            "Tokenizer has an empty separator among others.", why='only a single one, [""], means characters.'
        )

    def cut(text: str) -> list[str]:
        parts = [text]
        for separator in separators:
            parts = [piece for part in parts for piece in _split(part, separator) if piece]
        return parts

    return cut


def _split(text: str, pattern: str) -> list[str]:
    search, pieces, start = compiled(pattern).search, [], 0
    found = search(text)
    while found:
        pieces.append(text[start : found[0]])
        start = found[1]
        found = search(text, start)
    return [*pieces, text[start:]]
