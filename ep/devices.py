"""Which providers does `device="…"` mean on this machine?"""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from typing import Any

from ep import context_options
from ep.errors import BackendUnavailable, InvalidInput, did_you_mean
from ep.provider import HOST

CHOICES = {  # of the session's own options, the default first
    "compile": ("on", "off"),
    "precision": ("highest", "fast"),
    "weights": ("map", "copy"),
}
OWN = (*CHOICES, *context_options.KEYS)
KINDS = ("auto", "mlx", "jax", "cpu", "gpu", "cuda", "tpu", "host")
WITHIN = {"mlx": ("cpu", "gpu"), "jax": ("cpu", "gpu", "cuda", "rocm", "tpu")}  # what a library's devices are called


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """The session's own options and those of providers (`"jax.…"`), as strings."""
    if not isinstance(options, Mapping) or not all(isinstance(key, str) for key in options):
        raise InvalidInput(
            f"options must be a mapping from names to values, not {options!r}.",
            fix="write options={'compile': 'off'}, for example.",
        )
    own = {k: str(v) for k, v in options.items() if k in OWN or "." not in k}
    configured = {k: str(v) for k, v in options.items() if k not in own}
    for key, value in own.items():
        if key not in OWN:
            raise InvalidInput(
                f"unknown option '{key}'.{did_you_mean(key, OWN)}",
                why=f"a session's own options are {', '.join(OWN)}; those of providers are 'provider.option'.",
                fix="remove the option, or give it its provider's namespace.",
            )
        if value not in CHOICES.get(key, (value,)):
            raise InvalidInput(f"option '{key}' is '{value}'.", fix=f"use {' or '.join(map(repr, CHOICES[key]))}.")
    if "precision" in own:
        configured = {f"{name}.precision": own["precision"] for name in ("jax", "mlx", HOST)} | configured
    return own, configured


def resolve(device: str, options: Mapping[str, str]) -> list[Any]:
    """The chosen provider, initialised, and the host behind it as last resort.

    Raises:
        InvalidInput: no such device name.
        BackendUnavailable: the device or its library is not here; the message says what was looked for.
    """
    from ep.discovery import provider

    kind, rest = parsed(device)
    chosen = _first(kind, rest, options)
    host = provider(HOST, None, options)
    return [chosen] if chosen.name == host.name else [chosen, host]


def parsed(device: Any) -> tuple[str, str]:
    """The kind of a device and what follows it: an index or, for a library, the name of a device of its own.

    Raises:
        InvalidInput: no such device name.
    """
    if not isinstance(device, str):
        raise InvalidInput(
            f"device must be a name, not {device!r}.", fix=f"use one of {', '.join(map(repr, KINDS))}, or leave it out."
        )
    kind, separator, rest = device.partition(":")
    kind = "mlx" if kind == "metal" else kind
    own, _, index = rest.partition(":") if rest.partition(":")[0] in WITHIN.get(kind, ()) else ("", "", rest)
    indexed = index.isdecimal() and (not int(index) or kind not in ("auto", "host"))
    if kind not in KINDS or not (indexed or (not index and (own or not separator))) or device.endswith(":"):
        hint = "" if kind in KINDS else did_you_mean(kind, KINDS)
        raise InvalidInput(
            f"unknown device '{device}'.{hint}",
            why=f"devices are {', '.join(KINDS)}, some with an index, such as 'cuda:0'; 'jax:cpu' and 'mlx:cpu' are "
            "devices of one library.",
            fix="use one of these names.",
        )
    return kind, rest


def _first(kind: str, rest: str, options: Mapping[str, str]) -> Any:
    from ep.discovery import provider

    device = f"{kind}:{rest}" if rest else kind
    looked: list[str] = []
    for name, where in _candidates(kind, rest):
        try:
            return provider(name, where, options)
        except BackendUnavailable as error:
            if kind in ("mlx", "jax", "cuda", "tpu", "host"):
                raise
            looked.append(f"{name}{f' ({where})' if where else ''}: {error.what} {error.why}")
    raise BackendUnavailable(
        f"no device for '{device}' on this machine.",
        why="looked for " + "; ".join(looked),
        fix="run `ep doctor` to see what works here, or use device='cpu'.",
    )


def _candidates(kind: str, index: str) -> list[tuple[str, str | None]]:
    """(provider, device within it) in order of preference; without an index, the library chooses."""
    if index.partition(":")[0] in WITHIN.get(kind, ()):
        return [(kind, index)]
    device = f"{kind}:{index}" if index else kind
    apple = sys.platform == "darwin" and platform.machine() == "arm64"
    table: dict[str, list[tuple[str, str | None]]] = {
        "auto": [
            *([("mlx", None)] if apple else []),
            ("jax", "gpu"),
            ("jax", None),
            ("mlx", None),
            (HOST, None),
        ],
        "mlx": [("mlx", device)],
        "jax": [("jax", device)],
        "cpu": [("jax", device), *([] if index and int(index) else [(HOST, None)])],
        "gpu": [("mlx", device), ("jax", device)],
        "cuda": [("jax", device)],
        "tpu": [("jax", device)],
        "host": [(HOST, None)],
    }
    return table[kind]
