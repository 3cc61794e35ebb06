"""What does `ep cache` do? It lists the compiled code that waits for the next process, or removes some or all."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ep.container import peek
from ep.context_cache import VARIABLE, Entry, open_cache
from ep.errors import EpError, InvalidInput, InvalidModel
from ep.identity import differences, fingerprint
from ep.summary import size as byte_size

CACHE = "the compiled functions that wait for the next process, and the plans that say how models call them"
SHOWN = 20  # entries, unless --limit says otherwise
# What differs between processes of one machine and installation: other programs may still use the code.
PER_PROCESS = ("settings", "precision", "XLA_FLAGS", "threads", "target")
_SECONDS = {"m": 60, "h": 3600, "d": 86400, "w": 604800}


def add_command(commands: Any, command: Any, show: Any) -> None:
    """Register the command; `command` makes a parser, `show` prints an object or its `to_dict()`."""
    look = command(commands, "cache", lambda options: show(look_at_cache(options), options), CACHE)
    look.add_argument(
        "action", choices=("list", "stats", "clear"), help="show the entries, sum them up, or remove all that are meant"
    )
    stale = "only entries that this machine and installation have no use for any more"
    look.add_argument("--stale", action="store_true", help=stale)
    age = "only entries that were not used for so long: 90m, 12h, 30d or 8w"
    look.add_argument("--older-than", type=_age, metavar="AGE", help=age)
    look.add_argument("--dry-run", action="store_true", help="with clear: show what would go, and remove nothing")
    look.add_argument("--sort", choices=("used", "size"), default="used", help="what comes first (default: used last)")
    most = f"entries that are shown (default {SHOWN}; 0: all)"
    look.add_argument("--limit", type=_limit, default=SHOWN, metavar="N", help=most)
    look.add_argument("--directory", default="auto", help="a cache other than the user's")


def _age(text: str) -> tuple[int, str]:
    """Seconds, and the text itself."""
    found = re.fullmatch(r"([0-9]{1,6})([mhdw])", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not an age, such as 90m, 12h, 30d or 8w")
    return int(found[1]) * _SECONDS[found[2]], text


def _limit(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not 0 or a positive number")
    return int(text)


@dataclass(frozen=True, slots=True)
class CacheReport:
    """Entries of a cache: those that were meant, of which some are shown, and whether they are gone.

    `facts` are the source and the fingerprint of each entry that is shown, or why it is stale: printed once for all
    entries that have the same.
    """

    directory: Path
    action: str
    limit: int
    meant: str  # which entries: "stale", "not used for 30d", or ""
    entries: tuple[Entry, ...]
    facts: tuple[tuple[str, str], ...]
    others: int  # entries that were not meant
    is_gone: bool

    def to_dict(self) -> dict[str, Any]:
        """The facts as plain data, ready for JSON."""
        total = sum(entry.size for entry in self.entries)
        found: dict[str, Any] = {"directory": str(self.directory), "limit_bytes": self.limit}
        found |= {"entries": len(self.entries), "bytes": total}
        if self.action == "clear":
            found |= {"removed": len(self.entries) if self.is_gone else 0, "left": self.others}
        if self.action != "stats":
            found["list"] = [
                {"key": e.key, "bytes": e.size, "used": e.used, "source": source, "fingerprint": made_for}
                for e, (source, made_for) in zip(self.entries, self.facts, strict=False)
            ]
        return found

    def __str__(self) -> str:
        number, total = len(self.entries), byte_size(sum(entry.size for entry in self.entries))
        meant = f" {self.meant}" if self.meant else ""
        first = f"{self.directory}: {_entries(number)}{meant}, {total}"
        if self.action == "clear":
            first += f" {'removed' if self.is_gone else 'would be removed'}; {_entries(self.others)} left"
        else:
            first += f"{f', of {number + self.others}' if self.meant else f' of at most {byte_size(self.limit)}'}"
        lines, made_for = [first], {fact: number for number, fact in enumerate(dict.fromkeys(self.facts), 1)}
        for e, fact in zip(self.entries, self.facts, strict=False):
            used = time.strftime("%Y-%m-%d %H:%M", time.localtime(e.used))
            lines.append(f"  {e.key[:12]}  {byte_size(e.size):>10}  {used}  [{made_for[fact]}]")
        hidden = number - len(self.facts)
        if hidden and self.facts:
            lines.append(f"  … {hidden} more (--limit 0 shows all)")
        lines += [f"[{number}] {source}: {text}" for (source, text), number in made_for.items()]
        return "\n".join(lines)


def _entries(number: int) -> str:
    return f"{number} {'entry' if number == 1 else 'entries'}"


def look_at_cache(options: argparse.Namespace) -> CacheReport:
    """List, sum up or clear a cache.

    Raises:
        InvalidInput: the cache is off, or a flag does not go with the action.
    """
    cache = open_cache(options.directory)
    if cache is None:
        raise InvalidInput(
            "the cache is off.",
            why=f"the environment variable {VARIABLE} says so, or the user's directory cannot be used.",
            fix="pass --directory PATH, or change the variable.",
        )
    clears = options.action == "clear"
    if options.dry_run and not clears:
        raise InvalidInput("--dry-run goes with clear.", fix="leave it out: nothing else removes entries.")
    order: Callable[[Entry], float] = (lambda e: -e.size) if options.sort == "size" else (lambda e: -e.used)
    everything = sorted(cache, key=order)
    meant, which = everything, []
    if options.stale:
        which.append("stale")
        reasons = _reasons(meant)
        meant = [entry for entry in meant if reasons[entry.key]]
    if options.older_than is not None:
        seconds, text = options.older_than
        which.append(f"not used for {text}")
        meant = [entry for entry in meant if time.time() - entry.used > seconds]
    shows = options.action == "list" or options.dry_run or (clears and which)
    shown = meant[: options.limit or None] if shows else []
    facts = tuple((_facts(e)[0], reasons[e.key]) if options.stale else _facts(e) for e in shown)
    gone = clears and not options.dry_run
    if gone:
        cache.remove(meant)
    left = len(everything) - len(meant)
    return CacheReport(
        cache.directory, options.action, cache.limit, " and ".join(which), tuple(meant), facts, left, gone
    )


def _facts(entry: Entry) -> tuple[str, str]:
    """Source and fingerprint of an entry, or what is wrong with it."""
    try:
        return peek(entry.path)
    except OSError as error:
        return "gone", str(error.strerror or error)
    except InvalidModel as error:
        return "damaged", error.why


def _reasons(entries: Sequence[Entry]) -> dict[str, str]:
    """Key → why nothing here will ever use an entry, or ""."""
    here: dict[str, list[str] | str] = {}
    found = {}
    for entry in entries:
        source, made_for = _facts(entry)
        if source in ("gone", "damaged"):
            found[entry.key] = made_for
            continue
        if source not in here:
            here[source] = _fingerprints(source.removeprefix("ep."))
        ours = here[source]
        found[entry.key] = ours if isinstance(ours, str) else _difference(made_for, ours)
    return found


def _fingerprints(provider_name: str) -> list[str] | str:
    """What code for the devices of a provider depends on now, or why it does not work."""
    from ep.discovery import provider

    found, problem = [], ""
    for device in (None, "cpu", "gpu"):
        try:
            made: Any = provider(provider_name, device)
        except EpError as error:
            problem = problem or error.what
            continue
        found.append(fingerprint(made.backend))
        made.shutdown()
    return found or problem


def _difference(made_for: str, here: Sequence[str]) -> str:
    """In words, what differs from the closest of the fingerprints, but for what differs between processes."""
    found = [
        [text for text in differences(made_for, ours) if text.partition(" ")[0] not in PER_PROCESS] for ours in here
    ]
    closest: list[str] = min(found, key=len)
    return ", ".join(closest)
