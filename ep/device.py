"""Which device is meant? The kinds of device, their names, and their numbers in DLPack."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from ep.errors import InvalidInput, did_you_mean

# Canonical name -> DLPack device number (None: DLPack has none). The memory of mlx is exported as host
# memory: kDLMetal would promise an MTLBuffer where we hold an address that the host can read.
_DLPACK = {
    "cpu": 1,
    "cuda": 2,
    "rocm": 10,
    "coreml": None,
    "mlx": 1,
    "webgpu": 15,
    "qnn": None,
    "openvino": None,
}
_ALIASES = {"metal": "mlx"}
_CUSTOM = re.compile(r"custom\((0|[1-9]\d*)\)")


@dataclass(frozen=True, slots=True)
class DeviceType:
    """A kind of device, equal by its canonical name: `DeviceType("cuda")` is `DeviceType.CUDA`.

    Raises:
        InvalidInput: the name is neither in the table nor of the form "custom(n)".
    """

    name: str

    CPU: ClassVar[DeviceType]
    CUDA: ClassVar[DeviceType]
    ROCM: ClassVar[DeviceType]
    COREML: ClassVar[DeviceType]
    MLX: ClassVar[DeviceType]
    WEBGPU: ClassVar[DeviceType]
    QNN: ClassVar[DeviceType]
    OPENVINO: ClassVar[DeviceType]

    def __post_init__(self) -> None:
        if self.name not in _DLPACK and not _CUSTOM.fullmatch(self.name):
            raise InvalidInput(
                f"unknown device type {self.name!r}.",
                why=f"the device types are {', '.join(_DLPACK)} and custom(n).",
                fix=f"use one of these names.{did_you_mean(self.name, [*_DLPACK, *_ALIASES])}",
            )

    @classmethod
    def custom(cls, n: int) -> DeviceType:
        """Return the kind numbered n, for devices that have no name here."""
        return cls(f"custom({n})")

    @classmethod
    def parse(cls, text: str) -> DeviceType:
        """Read a name as users write it: case and blanks around it do not matter, "metal" means mlx."""
        name = text.strip().lower()
        return cls(_ALIASES.get(name, name))

    @property
    def is_host_accessible(self) -> bool:
        """Whether the host may read the device's memory through a pointer."""
        return self.name in ("cpu", "mlx")

    @property
    def dlpack(self) -> int | None:
        """The number of this kind in DLPack, or None where DLPack has none."""
        return _DLPACK.get(self.name)

    def __str__(self) -> str:
        return self.name


for _name in _DLPACK:
    setattr(DeviceType, _name.upper(), DeviceType(_name))


@dataclass(frozen=True, slots=True)
class DeviceId:
    """One device: its kind and its index among the devices of that kind, written "cuda:0".

    Raises:
        InvalidInput: the index is negative.
    """

    type: DeviceType
    index: int = 0

    def __post_init__(self) -> None:
        if self.index < 0:
            raise InvalidInput(f"device index {self.index} is negative.", fix="count devices from 0.")

    @classmethod
    def cpu(cls) -> DeviceId:
        """Return the host."""
        return cls(DeviceType.CPU)

    @classmethod
    def parse(cls, text: str) -> DeviceId:
        """Read "cuda:1", or "cuda" for index 0."""
        kind, colon, index = text.partition(":")
        if colon and not re.fullmatch(r"\d+", index.strip()):
            raise InvalidInput(
                f"{text!r} is not a device.",
                why=f"{index!r} is not an index.",
                fix='write the kind and the index, such as "cuda:0".',
            )
        return cls(DeviceType.parse(kind), int(index or 0))

    @property
    def is_host_accessible(self) -> bool:
        """Whether the host may read this device's memory through a pointer."""
        return self.type.is_host_accessible

    def __str__(self) -> str:
        return f"{self.type}:{self.index}"
