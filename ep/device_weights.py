"""How do constants get to a device? Borrowed where the library can, copied once where not; one copy per process."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from ep.backend import Backend
from ep.memory import trim
from ep.weights import WeightStore

LARGE = 16 << 20  # bytes of weights that are worth asking the C library to give back what it holds for later
WIDENED = "it is only multiplied, and the library is faster at that in a wider dtype (`ep pack --for jax` stores it so)"


@dataclass(frozen=True, eq=False)
class Placed:
    """A constant on a device, and why it is a copy; `None`: it is not. `host` is what it was made of."""

    array: Any
    why: str | None
    host: np.ndarray


# What was made of mapped files, for other sessions on the same files. A `Placed` keeps its map alive, so that the
# address in its key means the same data for as long as it is found here.
_shared: WeakValueDictionary[tuple[Any, ...], Placed] = WeakValueDictionary()


@dataclass(frozen=True, eq=False, slots=True)
class Pending:
    """A constant that compiled code takes: what it will be on the device, and what gives it there."""

    owner: DeviceWeights
    value: Any
    constants: MutableMapping[Any, np.ndarray]
    is_factor: bool

    @property
    def host(self) -> np.ndarray:
        """What the host has of it."""
        return self.constants[self.value]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.host.shape

    @property
    def dtype(self) -> np.dtype:
        """Its dtype on the device."""
        dtype = self.host.dtype
        return self.owner.widened(dtype) or dtype if self.is_factor else dtype

    def array(self) -> Any:
        """Its array on the device, which stays there."""
        return self.owner.get([self.value], self.constants, [self.value] * self.is_factor)[0]

    def rest(self) -> None:
        """Says that nobody is going to read it: the system may have its pages."""
        self.owner.store.rest(self.host)


class DeviceWeights:
    """Constants on one provider's device: each gets there once, when a group first needs it."""

    def __init__(self, backend: Backend, store: WeightStore) -> None:
        self.backend, self.store = backend, store
        self._placed: dict[tuple[Any, bool], Placed] = {}  # (value, whether widened)
        self._widened: dict[np.dtype, np.dtype | None] = {}
        self._lock = threading.Lock()

    def get(
        self, values: Sequence[Any], constants: MutableMapping[Any, np.ndarray], factors: Collection[Any] = ()
    ) -> list[Any]:
        """The arrays of these values, of `factors` in the dtype that products are fastest with.

        Call it inside the backend's scope.
        """
        keys = [(v, v in factors and self.widens(constants[v].dtype)) for v in values]
        with self._lock:
            missing = [key for key in dict.fromkeys(keys) if key not in self._placed]
            if missing:
                self.store.check_whole()
                self._place(missing, constants)
            return [self._placed[key].array for key in keys]

    def find(self, value: Any, dtype: np.dtype, is_factor: bool) -> Placed | None:
        """What a group got for a value, if it got it already."""
        return self._placed.get((value, is_factor and self.widens(dtype)))

    def arguments(
        self, values: Sequence[Any], constants: MutableMapping[Any, np.ndarray], factors: Collection[Any]
    ) -> list[Any]:
        """These values for compiled code: what gives them, where it computes something of them once, else arrays."""
        if self.backend.keeps is None:
            return self.get(values, constants, factors)
        self.store.check_whole()
        return [Pending(self, value, constants, value in factors) for value in values]

    def once(self, several: Sequence[Pending]) -> list[Any]:
        """Arrays for a computation that is done once: those that are there, others go with the caller."""
        wanted = [(pending.host, pending.is_factor and self.widens(pending.host.dtype)) for pending in several]
        found = [
            self._placed.get((pending.value, wide)) or _shared.get(self._key(host, wide))
            for pending, (host, wide) in zip(several, wanted, strict=True)
        ]
        if None in found:
            self.store.check_whole()
        made = iter(self._several([each for each, placed in zip(wanted, found, strict=True) if placed is None]))
        return [(placed or next(made)).array for placed in found]

    def stored(self, wanted: Sequence[tuple[Any, Sequence[np.ndarray]]]) -> list[tuple[Any, bool] | None]:
        """What the model brings of what code keeps: an array of each item, and whether it is borrowed."""
        found = [self.store.kept(item.digest, hosts) for item, hosts in wanted]
        fit = [
            array if array is not None and array.shape == item.shape and array.dtype.name == item.dtype else None
            for array, (item, _) in zip(found, wanted, strict=True)
        ]
        placed = iter(self.backend.borrow([array for array in fit if array is not None]))
        pairs = (None if array is None else next(placed) for array in fit)
        return [None if pair is None else (pair[0], pair[1] is None) for pair in pairs]

    def widens(self, dtype: np.dtype) -> bool:
        """Whether the library multiplies arrays of a dtype faster in a wider one."""
        return self.widened(dtype) is not None

    def widened(self, dtype: np.dtype) -> np.dtype | None:
        """The wider dtype in which the library multiplies arrays of a dtype faster."""
        if dtype not in self._widened:
            with self.backend.scope():
                probe = self.backend.borrow([np.zeros(1, dtype)])[0][0] if dtype in self.backend.dtypes else None
                wide = probe if probe is None else self.backend.factor(probe)
                self._widened[dtype] = None if wide is probe else np.dtype(self.backend.xp.dtype_of(wide))
        return self._widened[dtype]

    def release(self, values: Sequence[Any], constants: Mapping[Any, np.ndarray], factors: Collection[Any]) -> None:
        """Forgets the copies among the arrays of these values that can be made again from a file.

        The system gets their memory back, and that of copies that nobody kept.
        """
        with self._lock:
            for value in values:
                key = (value, value in factors and self.widens(constants[value].dtype))
                placed = self._placed.get(key)
                if placed is not None and placed.why is not None and self._mapped(placed.host):
                    del self._placed[key]
        if sum(constants[value].nbytes for value in values) >= LARGE:
            trim()

    def adopt(self, other: DeviceWeights, values: Mapping[Any, Any]) -> None:
        """Takes over the arrays of another's values, each by the name that it has here."""
        with other._lock:
            placed = {(values[v], wide): array for (v, wide), array in other._placed.items() if v in values}
        with self._lock:
            self._placed |= placed

    def drop(self) -> None:
        """Forgets the arrays; they are made again when a group needs them."""
        with self._lock:
            self._placed.clear()

    def _place(self, keys: Sequence[tuple[Any, bool]], constants: MutableMapping[Any, np.ndarray]) -> None:
        mapped = [(value, wide) for value, wide in keys if self._mapped(constants[value])]
        made = dict(zip(mapped, self._shared([(constants[value], wide) for value, wide in mapped]), strict=True))
        self.backend.block([placed.array for placed in made.values()])
        self._placed |= made
        for value, wide in keys:  # computed or parsed, so in this process's memory: one by one, not all twice
            if (value, wide) not in self._placed:
                (placed,) = self._several([(constants[value], wide)])
                self.backend.block([placed.array])
                placed = placed if placed.why is None else self._only_on_device(placed)
                self._placed[value, wide], constants[value] = placed, placed.host

    def _several(self, arrays: Sequence[tuple[np.ndarray, bool]]) -> list[Placed]:
        """Arrays of the host on the device, some of them widened."""
        stored = [self.store.wide(host) if wide else None for host, wide in arrays]
        lent = [host if found is None else found for (host, _), found in zip(arrays, stored, strict=True)]
        made = []
        for (host, wide), found, (array, why) in zip(arrays, stored, self.backend.borrow(lent), strict=True):
            widened = wide and found is None
            made.append(Placed(self.backend.factor(array) if widened else array, WIDENED if widened else why, host))
        return made

    def obstacle(self, host: np.ndarray, is_factor: bool) -> str | None:
        """Why a group will get a copy of an array; `None` if it will not."""
        stored = host
        if is_factor and self.widens(host.dtype):
            found = self.store.wide(host)
            if found is None:
                return WIDENED
            stored = found
        return self.backend.obstacle(stored)

    def _mapped(self, host: np.ndarray) -> bool:
        return self.store.origin(host) is not None

    def _shared(self, arrays: Sequence[tuple[np.ndarray, bool]]) -> list[Placed]:
        keys = [self._key(host, wide) for host, wide in arrays]
        found = dict(zip(keys, map(_shared.get, keys), strict=True))
        missing = {key: each for key, each in zip(keys, arrays, strict=True) if found[key] is None}
        made = dict(zip(missing, self._several(list(missing.values())), strict=True))
        _shared.update(made)
        return [found[key] or made[key] for key in keys]

    def _key(self, host: np.ndarray, wide: bool) -> tuple[Any, ...]:
        backend = self.backend
        where = (backend.name, str(backend.device), backend.fingerprint, wide)
        return *where, host.ctypes.data, host.dtype, host.shape, host.strides

    def _only_on_device(self, placed: Placed) -> Placed:
        """Lets go of host memory that was copied, where the host can read the copy just as well."""
        if not self.backend.device.is_host_accessible:
            return placed
        host, view = placed.host, self.backend.to_numpy(placed.array)
        same = view.dtype == host.dtype and view.shape == host.shape and not view.flags.owndata
        return Placed(placed.array, placed.why, view) if same else placed
