"""How do constants get to a device? Borrowed where the library can, copied once where not; one copy per process."""

from __future__ import annotations

import threading
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from ep.backend import Backend
from ep.weights import WeightStore


@dataclass(frozen=True, eq=False)
class Placed:
    """A constant on a device, and why it is a copy; `None`: it is not. `host` is what it was made of."""

    array: Any
    why: str | None
    host: np.ndarray


# What was made of mapped files, for other sessions on the same files. A `Placed` keeps its map alive, so that the
# address in its key means the same data for as long as it is found here.
_shared: WeakValueDictionary[tuple[Any, ...], Placed] = WeakValueDictionary()


class DeviceWeights:
    """Constants on one provider's device: each gets there once, when a group first needs it."""

    def __init__(self, backend: Backend, store: WeightStore) -> None:
        self.backend, self.store = backend, store
        self.placed: dict[Any, Placed] = {}
        self._lock = threading.Lock()

    def get(self, values: Sequence[Any], constants: MutableMapping[Any, np.ndarray]) -> list[Any]:
        """The arrays of these values; call it inside the backend's scope."""
        with self._lock:
            missing = [v for v in values if v not in self.placed]
            if missing:
                self.store.check_whole()
                self._place(missing, constants)
            return [self.placed[v].array for v in values]

    def drop(self) -> None:
        """Forgets the arrays; they are made again when a group needs them."""
        with self._lock:
            self.placed.clear()

    def _place(self, values: Iterable[Any], constants: MutableMapping[Any, np.ndarray]) -> None:
        made = {
            value: self._shared(constants[value]) for value in dict.fromkeys(values) if self._mapped(constants[value])
        }
        self.backend.block([placed.array for placed in made.values()])
        self.placed |= made
        for value in values:  # computed or parsed, so in this process's memory: one after the other, not all twice
            if value not in self.placed:
                placed = Placed(*self.backend.borrow(constants[value]), constants[value])
                self.backend.block([placed.array])
                self.placed[value] = placed if placed.why is None else self._only_on_device(placed)
                constants[value] = self.placed[value].host

    def _mapped(self, host: np.ndarray) -> bool:
        return self.store.origin(host) is not None

    def _shared(self, host: np.ndarray) -> Placed:
        backend = self.backend
        where = (backend.name, str(backend.device), backend.fingerprint)
        key = (*where, host.ctypes.data, host.dtype, host.shape, host.strides)
        placed = _shared.get(key)
        if placed is None:
            placed = _shared[key] = Placed(*backend.borrow(host), host)
        return placed

    def _only_on_device(self, placed: Placed) -> Placed:
        """Lets go of host memory that was copied, where the host can read the copy just as well."""
        if not self.backend.device.is_host_accessible:
            return placed
        host, view = placed.host, self.backend.to_numpy(placed.array)
        same = view.dtype == host.dtype and view.shape == host.shape and not view.flags.owndata
        return Placed(placed.array, placed.why, view) if same else placed
