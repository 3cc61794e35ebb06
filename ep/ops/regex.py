"""Which strings a regular expression matches: an automaton whose states are made when a text first needs them.

The time is linear in the text for every pattern, and of all matches at a place the longest counts, as in RE2.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from typing import Any

from ep.errors import InvalidModel
from ep.ops.regex_syntax import Assertion, Chars, Choice, Node, Ranges, Repeat, Sequence, parse

MOST_STATES = 4096  # known states are forgotten beyond this many
LARGEST_PROGRAM = 100_000
START, NEWLINE, WORD, OTHER = range(4)  # what stands before a place


@lru_cache(maxsize=256)
def compiled(pattern: str) -> Regex:
    """The automaton of a pattern in RE2's syntax."""
    return Regex(pattern)


class Regex:
    """An automaton for one pattern.

    A state is a set of instructions with what stands before it. The empty steps between instructions are taken
    when the next character is known, since assertions depend on both.
    """

    def __init__(self, pattern: str) -> None:
        self._program: list[tuple[str, Any, Any]] = [("match", None, None)]
        start = self._add(parse(pattern), 0)
        self._start = frozenset([start])
        self._known: dict[tuple[frozenset[int], int], dict[str, Any]] = {}

    def full_match(self, text: str) -> bool:
        """Whether the pattern matches the text as a whole."""
        state = (self._start, START)
        for char in text:
            state = self._step(state, char)[0]
            if not state[0]:
                return False
        return self._step(state, "")[1]

    def search(self, text: str, start: int = 0) -> tuple[int, int] | None:
        """The leftmost match from `start` on that is not empty, and of those the longest."""
        for begin in range(start, len(text)):
            end = self._longest(text, begin)
            if end > begin:
                return begin, end
        return None

    def _longest(self, text: str, begin: int) -> int:
        state, end = (self._start, _kind(text[begin - 1 : begin])), -1
        for at in range(begin, len(text)):
            state, matched = self._step(state, text[at])
            if matched:
                end = at
            if not state[0]:
                return end
        return len(text) if self._step(state, "")[1] else end

    def _step(self, state: tuple[frozenset[int], int], char: str) -> tuple[tuple[frozenset[int], int], bool]:
        """The state after a character ("" is the end of the text), and whether a match ends before it."""
        steps = self._known.get(state)
        if steps is None:
            if len(self._known) >= MOST_STATES:
                self._known.clear()
            steps = self._known[state] = {}
        found = steps.get(char)
        if found is None:
            found = steps[char] = self._computed(*state, char)
        return found

    def _computed(self, instructions: frozenset[int], before: int, char: str) -> Any:
        reached = self._closure(instructions, _places(before, char))
        code = ord(char) if char else -1
        after = frozenset(
            target
            for kind, ranges, target in (self._program[i] for i in reached)
            if kind == "chars" and _within(ranges, code)
        )
        return (after, _kind(char)), 0 in reached

    def _closure(self, instructions: frozenset[int], places: frozenset[str]) -> set[int]:
        """All instructions that empty steps lead to at a place of these kinds."""
        reached, waiting = set(instructions), list(instructions)
        while waiting:
            kind, argument, target = self._program[waiting.pop()]
            if kind == "split":
                targets = argument
            elif kind == "assert" and argument in places:
                targets = (target,)
            else:
                continue
            waiting += [t for t in targets if t not in reached]
            reached.update(targets)
        return reached

    # From the tree to instructions, from the end to the start

    def _emit(self, kind: str, argument: Any, target: Any = None) -> int:
        if len(self._program) >= LARGEST_PROGRAM:
            raise InvalidModel("a regular expression is too large: its repetitions multiply.")
        self._program.append((kind, argument, target))
        return len(self._program) - 1

    def _add(self, node: Node, then: int) -> int:
        """Adds the instructions that match `node` and go on at `then`; returns the first."""
        if isinstance(node, Chars):
            return self._emit("chars", node.ranges, then)
        if isinstance(node, Assertion):
            return self._emit("assert", node.place, then)
        if isinstance(node, Choice):
            return self._emit("split", tuple(self._add(branch, then) for branch in node.branches))
        if isinstance(node, Sequence):
            for part in reversed(node.parts):
                then = self._add(part, then)
            return then
        return self._add_repeat(node, then)

    def _add_repeat(self, node: Repeat, then: int) -> int:
        if node.most is None:
            loop = self._emit("split", (then,))
            self._program[loop] = ("split", (self._add(node.part, loop), then), None)
            then = loop
        else:
            end = then
            for _ in range(node.most - node.least):
                then = self._emit("split", (self._add(node.part, then), end))
        for _ in range(node.least):
            then = self._add(node.part, then)
        return then


def _within(ranges: Ranges, code: int) -> bool:
    place = bisect_right(ranges, (code, 0x110000)) - 1
    return place >= 0 and code <= ranges[place][1]


def _kind(char: str) -> int:
    if not char:
        return START
    return NEWLINE if char == "\n" else WORD if _is_word(char) else OTHER


def _is_word(char: str) -> bool:
    return char == "_" or (char.isascii() and char.isalnum())


@lru_cache(maxsize=1024)
def _places(before: int, char: str) -> frozenset[str]:
    """Which assertions hold between what stands before and a character, or the end of the text."""
    boundary = (before == WORD) != _is_word(char) if char else before == WORD
    facts = {
        "text_start": before == START,
        "text_end": not char,
        "line_start": before in (START, NEWLINE),
        "line_end": not char or char == "\n",
        "boundary": boundary,
        "inside": not boundary,
    }
    return frozenset(place for place, holds in facts.items() if holds)
