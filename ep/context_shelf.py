"""Which of the compiled code that a model brought may a session use, and what is the user told of the rest?

Code is used on the device and with the versions that made it, and only if the user trusts the file. Its graph is used
in every other case, and compiled here.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from ep.container import Code, Container, Cut
from ep.context import EpContextRegistry
from ep.context_cache import ContextNotice
from ep.context_options import TRUST
from ep.context_reader import Brought
from ep.errors import NoEpForContextSource
from ep.identity import differences, fingerprint
from ep.library import Library


def registry_of(providers: Sequence[Any]) -> EpContextRegistry:
    """The sources that these providers accept."""
    registry = EpContextRegistry()
    for provider in providers:
        registry.register(provider)
    return registry


def shelve(
    library: Library, brought: Sequence[Brought], registry: EpContextRegistry, trust: bool, ahead: bool = False
) -> None:
    """Put code that may be used on the library's shelf; tell at once what cannot serve, and later what might have.

    `ahead` begins to load it, so that this goes on while the session is made.
    """
    shelf: dict[str, Code | Cut] = {}
    usable: list[tuple[Any, Sequence[Code]]] = []
    withheld: dict[str, str] = {}
    for one in brought:
        provider, why = _maker(one.container, registry)
        if why:
            if one.container.codes:
                warnings.warn(
                    f"the compiled code of {one.name} was not used: {why}. Its graph is compiled here instead. To "
                    "start faster, make the context again on this machine.",
                    ContextNotice,
                    stacklevel=4,
                )
            continue
        shelf |= {cut.key: cut for cut in one.container.cuts}
        if trust:
            shelf |= {code.key: code for code in one.container.codes if code.key not in shelf}
            usable.append((provider.backend, one.container.functions))
        else:
            for code in one.container.functions:
                withheld[code.key] = (
                    f"the compiled code of {one.name} was not used: code from a file can do whatever a program can. "
                    f"Its graph is compiled instead. If you trust the file, pass options={{'{TRUST}': True}}."
                )
    library.shelf, library.withheld = shelf, withheld
    if ahead:
        for backend, codes in usable:
            library.load_ahead(backend, codes)


def _maker(container: Container, registry: EpContextRegistry) -> tuple[Any, str]:
    """The provider that made a container, and why its code does not fit here, or ""."""
    try:
        provider: Any = registry.find(container.source)
    except NoEpForContextSource:
        return None, f"'{container.source}' made it, and this session has {', '.join(registry) or 'no such provider'}"
    differing = differences(container.fingerprint, fingerprint(provider.backend))
    return provider, "it was made for " + ", ".join(differing) if differing else ""
