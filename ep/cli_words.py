"""How does an error read to who runs a command? With the command's flags in the place of Python's arguments."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any

from ep.errors import InvalidInput

OPTION = "--option"


def add_option(command: argparse.ArgumentParser) -> None:
    """Let a command take the options of `ep.load`."""
    text = "an option of ep.load, such as precision=fast or context.cache=off"
    command.add_argument(OPTION, action="append", default=[], type=_option, metavar="NAME=VALUE", help=text)


def _option(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=VALUE")
    return name, value


def given(options: argparse.Namespace) -> dict[str, Any]:
    """The options for `ep.load`; those with a flag of their own are in there.

    Raises:
        InvalidInput: an option comes twice.
    """
    found: dict[str, Any] = {}
    for name, value in options.option:
        if name in found:
            raise InvalidInput(f"{OPTION} {name} is given twice.", fix="give it once.")
        found[name] = value
    if getattr(options, "trust_native", False):
        found["trust_native"] = True
    return found


def translator(command: argparse.ArgumentParser) -> Callable[[str], str]:
    """What puts flags of this command where a text has Python's arguments; others stay."""
    usage = " ".join(command.format_usage().split())
    flags = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", usage))

    def option(found: re.Match[str]) -> str:
        name, value = found["name"], found["value"].strip("'")
        if name == "context.cache" and "--directory" in flags:
            return f"--directory {value}"
        if name == "trust_native" and "--trust-native" in flags:
            return "--trust-native"
        return f"{OPTION} {name}={value}" if OPTION in flags else found[0]

    def shape(found: re.Match[str]) -> str:
        sizes = re.findall(r"\d+", found["sizes"])
        return f"--shape {found['name']}:{'x'.join(sizes)}" if "--shape" in flags else found[0]

    def flag(name: str) -> Callable[[re.Match[str]], str]:
        known = name in usage if " FILE" in name else name.split()[0] in flags
        return lambda found: name.format(*found.groups()) if known else found[0]

    spellings: tuple[tuple[str, Callable[[re.Match[str]], str]], ...] = (
        (r"options=\{'(?P<name>[\w.]+)': (?P<value>[^}]+)\}", option),
        (r"\{'(?P<name>[^']+)': \(?(?P<sizes>[\d, ]+)\)?\}", shape),
        (r"\bstrict=True", flag("--strict")),
        (r"\bdevice='([\w:]+)'", flag("--device {0}")),
        (r"\bep\.load\(…, weights=…\)", flag("--weights FILE")),
        (r"\bsession\.plan\b", flag("--plan")),
        (r"\bfold=False, --no-fold", flag("--no-fold")),
    )

    def translate(text: str) -> str:
        for pattern, spell in spellings:
            text = re.sub(pattern, spell, text)
        return text

    return translate
