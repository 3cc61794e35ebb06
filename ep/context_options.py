"""What did the user ask of stored code? The options of `ep.load` about contexts, and onnxruntime's by their names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ep.errors import InvalidInput

CACHE, TRUST = "context.cache", "trust_native"
ENABLE, FILE_PATH, EMBED = "ep.context_enable", "ep.context_file_path", "ep.context_embed_mode"
KEYS = (CACHE, TRUST, ENABLE, FILE_PATH, EMBED)
_FLAGS = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}


@dataclass(frozen=True, slots=True)
class ContextOptions:
    """`cache` is "auto", a path or "off"; `write` asks for a context model at load, at `path` or beside the model."""

    cache: str = "auto"
    trust_native: bool = False
    write: bool = False
    path: str = ""
    embed: bool = False

    @staticmethod
    def of(options: Mapping[str, str]) -> ContextOptions:
        """From a session's own options.

        Raises:
            InvalidInput: a flag is neither on nor off.
        """
        return ContextOptions(
            options.get(CACHE, "auto") or "auto",
            flag(options, TRUST),
            flag(options, ENABLE),
            options.get(FILE_PATH, ""),
            flag(options, EMBED),
        )


def flag(options: Mapping[str, str], key: str) -> bool:
    """The value of an option that is on or off (off where it is not given)."""
    text = options.get(key, "0")
    if text.lower() not in _FLAGS:
        raise InvalidInput(f"option '{key}' is '{text}'.", fix="use True or False (1 or 0, on or off).")
    return _FLAGS[text.lower()]
