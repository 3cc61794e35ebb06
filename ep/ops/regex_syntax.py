"""How a regular expression in RE2's syntax becomes a tree of character sets, sequences and repetitions.

Groups only group and laziness is ignored: what is built here decides full matches and longest matches.
"""

from __future__ import annotations

import sys
import unicodedata
from dataclasses import dataclass
from functools import lru_cache
from typing import NoReturn

from ep.errors import InvalidModel

Ranges = tuple[tuple[int, int], ...]  # of code points, both ends included, in order

LAST = sys.maxunicode
DIGIT: Ranges = ((48, 57),)
WORD: Ranges = ((48, 57), (65, 90), (95, 95), (97, 122))
PERL: dict[str, Ranges] = {"d": DIGIT, "w": WORD, "s": ((9, 10), (12, 13), (32, 32))}
POSIX: dict[str, Ranges] = {
    "alnum": ((48, 57), (65, 90), (97, 122)),
    "alpha": ((65, 90), (97, 122)),
    "ascii": ((0, 127),),
    "blank": ((9, 9), (32, 32)),
    "cntrl": ((0, 31), (127, 127)),
    "digit": DIGIT,
    "graph": ((33, 126),),
    "lower": ((97, 122),),
    "print": ((32, 126),),
    "punct": ((33, 47), (58, 64), (91, 96), (123, 126)),
    "space": ((9, 13), (32, 32)),
    "upper": ((65, 90),),
    "word": WORD,
    "xdigit": ((48, 57), (65, 70), (97, 102)),
}
CONTROLS = {"a": 7, "f": 12, "t": 9, "n": 10, "r": 13, "v": 11}
LONGEST_REPEAT = 1000  # RE2's limit


@dataclass(frozen=True)
class Chars:
    """One character out of a set."""

    ranges: Ranges


@dataclass(frozen=True)
class Assertion:
    """An empty match at a place: `text_start`, `text_end`, `line_start`, `line_end`, `boundary`, `inside`."""

    place: str


@dataclass(frozen=True)
class Sequence:
    """One part after the other; nothing, if there are none."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Choice:
    """Any one of the branches."""

    branches: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat:
    """From `least` to `most` times the same; `most` is `None` where there is no limit."""

    part: Node
    least: int
    most: int | None


Node = Chars | Assertion | Sequence | Choice | Repeat


def parse(pattern: str) -> Node:
    """The tree of a pattern; `InvalidModel` says where it is none, or uses what is not supported."""
    parser = _Parser(pattern)
    node = parser.choice(frozenset())
    if parser.at < len(pattern):
        parser.refuse("it closes a group that is not open")
    return node


class _Parser:
    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.at = 0

    def refuse(self, why: str) -> NoReturn:
        raise InvalidModel(
            f"the regular expression {self.pattern!r} is not valid at position {self.at}: {why}.",
            why="ONNX defines regular expressions by RE2's syntax (https://github.com/google/re2/wiki/Syntax).",
        )

    def take(self, text: str) -> bool:
        """Whether the text comes next; it is consumed."""
        if not self.pattern.startswith(text, self.at):
            return False
        self.at += len(text)
        return True

    def next(self) -> str:
        if self.at == len(self.pattern):
            self.refuse("it ends early")
        self.at += 1
        return self.pattern[self.at - 1]

    def until(self, end: str) -> str:
        stop = self.pattern.find(end, self.at)
        if stop < 0:
            self.refuse(f"{end!r} is missing")
        text = self.pattern[self.at : stop]
        self.at = stop + len(end)
        return text

    # Structure

    def choice(self, flags: frozenset[str]) -> Node:
        branches, parts = [], []
        while self.at < len(self.pattern) and self.pattern[self.at] != ")":
            if self.take("|"):
                branches.append(Sequence(tuple(parts)))
                parts = []
            elif self.count() is not None:
                self.refuse("a repetition has nothing to repeat")
            elif self.take("(?"):
                group = self.group(flags)
                if isinstance(group, frozenset):
                    flags = group
                else:
                    parts.append(self.repeated(group))
            else:
                parts += self.atoms(flags)
        branches.append(Sequence(tuple(parts)))
        return Choice(tuple(branches)) if len(branches) > 1 else branches[0]

    def group(self, flags: frozenset[str]) -> Node | frozenset[str]:
        """What follows "(?": the node of a group, or the flags that hold from here on."""
        if self.take("P<") or (not self.pattern.startswith(("<=", "<!"), self.at) and self.take("<")):
            name = self.until(">")
            if not name.isidentifier():
                self.refuse(f"{name!r} is no name of a group")
            return self.closed(flags)
        on = True
        while True:
            flag = self.next()
            if flag == ":":
                return self.closed(flags)
            if flag == ")":
                return flags
            if flag == "-" and on:
                on = False
            elif flag in "imsU":
                flags = flags | {flag} if on else flags - {flag}
            else:
                self.refuse(f"RE2 has no group (?{flag}")

    def closed(self, flags: frozenset[str]) -> Node:
        node = self.choice(flags)
        if not self.take(")"):
            self.refuse("a group is not closed")
        return node

    def atoms(self, flags: frozenset[str]) -> list[Node]:
        if self.take("\\Q"):
            stop = self.pattern.find("\\E", self.at)
            text = self.pattern[self.at : stop if stop >= 0 else None]
            self.at = len(self.pattern) if stop < 0 else stop + 2
            nodes: list[Node] = [Chars(_literal(ord(c), flags)) for c in text]
            return nodes[:-1] + [self.repeated(node) for node in nodes[-1:]]
        return [self.repeated(self.atom(flags))]

    def atom(self, flags: frozenset[str]) -> Node:
        char = self.next()
        if char == "(":
            return self.closed(flags)
        if char == "[":
            return Chars(self.char_class(flags))
        if char == ".":
            return Chars(((0, LAST),) if "s" in flags else ((0, 9), (11, LAST)))
        if char == "^":
            return Assertion("line_start" if "m" in flags else "text_start")
        if char == "$":
            return Assertion("line_end" if "m" in flags else "text_end")
        if char == "\\":
            return self.escape(flags)
        return Chars(_literal(ord(char), flags))

    def repeated(self, node: Node) -> Node:
        count = self.count()
        if count is None:
            return node
        self.take("?")
        if self.count() is not None:
            self.refuse("a repetition is repeated")
        return Repeat(node, *count)

    def count(self) -> tuple[int, int | None] | None:
        for text, count in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self.take(text):
                return count
        stop = self.pattern.find("}", self.at)
        if not self.pattern.startswith("{", self.at) or stop < 0:
            return None
        least, comma, most = self.pattern[self.at + 1 : stop].partition(",")
        if not least.isdecimal() or not (most.isdecimal() or not most):
            return None  # a brace that is no repetition stands for itself
        self.at = stop + 1
        low, high = int(least), int(most) if most else None if comma else int(least)
        if max(low, high or 0) > LONGEST_REPEAT or (high is not None and high < low):
            self.refuse(f"{{{least}{comma}{most}}} is no repetition, or one of more than {LONGEST_REPEAT} times")
        return low, high

    # Characters

    def escape(self, flags: frozenset[str]) -> Node:
        char = self.next()
        places = {"A": "text_start", "z": "text_end", "b": "boundary", "B": "inside"}
        if char in places:
            return Assertion(places[char])
        self.at -= 1
        ranges = self.set_escape()
        return Chars(_literal(self.char_escape(), flags) if ranges is None else _folded(ranges, flags))

    def set_escape(self) -> Ranges | None:
        """The set that the escape after a backslash names, or `None` if it is one character."""
        char = self.pattern[self.at : self.at + 1]
        if char and char in "dwsDWS":
            self.at += 1
            return PERL[char] if char.islower() else _inverse(PERL[char.lower()])
        if not char or char not in "pP":
            return None
        self.at += 1
        name = self.until("}") if self.take("{") else self.next()
        negative = (char == "P") != name.startswith("^")
        ranges = _category(name.removeprefix("^"))
        if not ranges:
            self.refuse(f"the Unicode class {name!r} is not supported; general categories such as Lu are")
        return _inverse(ranges) if negative else ranges

    def char_escape(self) -> int:
        char = self.next()
        if char in CONTROLS:
            return CONTROLS[char]
        if char == "x":
            digits = self.until("}") if self.take("{") else self.next() + self.next()
            return self.number(digits, 16)
        following = self.pattern[self.at : self.at + 2]
        if char in "01234567" and (char == "0" or following[:1] in tuple("01234567")):
            digits = char
            while len(digits) < 3 and self.at < len(self.pattern) and self.pattern[self.at] in "01234567":
                digits += self.next()
            return self.number(digits, 8)
        if char.isalnum() or not char.isascii():
            self.refuse(f"RE2 has no escape \\{char}")
        return ord(char)

    def number(self, digits: str, base: int) -> int:
        try:
            value = int(digits, base)
        except ValueError:
            value = -1
        if not 0 <= value <= LAST:
            self.refuse(f"{digits!r} is the number of no character")
        return value

    def char_class(self, flags: frozenset[str]) -> Ranges:
        negative, first, found = self.take("^"), True, []
        while first or not self.take("]"):
            first = False
            if self.take("[:"):
                found += self.posix()
                continue
            if self.pattern.startswith("\\", self.at):
                self.at += 1
                ranges = self.set_escape()
                if ranges is not None:
                    found += ranges
                    continue
                self.at -= 1
            low = self.class_char()
            high = low
            if self.pattern.startswith("-", self.at) and not self.pattern.startswith("-]", self.at):
                self.at += 1
                high = self.class_char()
            if high < low:
                self.refuse(f"the range {chr(low)!r} to {chr(high)!r} is empty")
            found.append((low, high))
        ranges = _folded(_merged(found), flags)
        return _inverse(ranges) if negative else ranges

    def class_char(self) -> int:
        return self.char_escape() if self.take("\\") else ord(self.next())

    def posix(self) -> Ranges:
        name = self.until(":]")
        ranges = POSIX.get(name.removeprefix("^"))
        if ranges is None:
            self.refuse(f"there is no class [:{name}:]")
        return _inverse(ranges) if name.startswith("^") else ranges


def _merged(ranges: list[tuple[int, int]]) -> Ranges:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(merged)


def _inverse(ranges: Ranges) -> Ranges:
    ends = [-1, *(end for r in ranges for end in r), LAST + 1]
    gaps = zip(ends[::2], ends[1::2], strict=True)
    return tuple((low + 1, high - 1) for low, high in gaps if high - low > 1)


def _literal(code: int, flags: frozenset[str]) -> Ranges:
    return _folded(((code, code),), flags)


def _folded(ranges: Ranges, flags: frozenset[str]) -> Ranges:
    """With the flag i: also all characters that differ from one of these in case only."""
    if "i" not in flags:
        return ranges
    more = [
        (other, other)
        for code, others in _orbits().items()
        if any(low <= code <= high for low, high in ranges)
        for other in others
    ]
    return _merged([*ranges, *more])


@lru_cache(maxsize=1)
def _orbits() -> dict[int, list[int]]:
    """Character → all characters of the same simple case folding."""
    groups: dict[str, list[int]] = {}
    for code in range(0x1E944):  # the last character with case
        char = chr(code)
        lower, upper = char.lower(), char.upper()
        if lower != char or upper != char:
            key = upper.lower() if len(upper) == 1 else lower
            groups.setdefault(key, []).append(code)
    return {code: group for group in groups.values() for code in group if len(group) > 1}


@lru_cache(maxsize=64)
def _category(name: str) -> Ranges:
    """The characters of a general category (Lu) or a group of them (L); none if there is no such category."""
    codes = [code for code in range(LAST + 1) if unicodedata.category(chr(code)).startswith(name)]
    return _merged([(code, code) for code in codes]) if len(name) <= 2 else ()
