"""Which provider restores a compiled model? `EpContext`, and the registry of the sources providers accept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ep.errors import DuplicateContextSource, NoEpForContextSource
from ep.tensor import NodeId

if TYPE_CHECKING:
    from ep.provider import ExecutionProvider


@dataclass(frozen=True, slots=True)
class EpContext:
    """A compiled subgraph in runtime form; in a file it is a `com.microsoft::EPContext` node.

    `data` belongs to the provider. `device_fingerprint` names hardware and versions that `data` needs.
    """

    ep_name: str
    ep_version: str
    data: bytes
    covered_nodes: tuple[NodeId, ...] = ()
    device_fingerprint: str = ""


class EpContextRegistry:
    """Providers by the `source` attribute of the EPContext nodes that they accept."""

    def __init__(self) -> None:
        self._providers: dict[str, ExecutionProvider] = {}

    def register(self, provider: ExecutionProvider) -> None:
        """Add the keys that the provider names; all of them, or none.

        Raises:
            DuplicateContextSource: another provider, or the same one twice, claims a key.
        """
        added: dict[str, ExecutionProvider] = {}
        for source in provider.context_source_keys():
            holder = self._providers.get(source) or added.get(source)
            if holder is not None:
                raise DuplicateContextSource(source, holder.name, provider.name)
            added[source] = provider
        self._providers |= added

    def find(self, source: str) -> ExecutionProvider:
        """Return the provider that accepts a source.

        Raises:
            NoEpForContextSource: there is none.
        """
        try:
            return self._providers[source]
        except KeyError:
            raise NoEpForContextSource(source, self._providers) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._providers)

    def __len__(self) -> int:
        return len(self._providers)
