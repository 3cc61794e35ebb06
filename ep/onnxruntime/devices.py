"""Which devices and which memory does onnxruntime's API name? Descriptions only: they hold nothing."""

from __future__ import annotations

import functools
import platform
from typing import Any

from ep.onnxruntime import enums
from ep.onnxruntime.pybind import COLLECTION, STATE, anything, unpicklable

TYPES = {"cpu": 0, "cuda": 1, "gpu": 1, "webgpu": 1, "dml": 1, "fpga": 2, "npu": 3, "cann": 3}
VENDORS = {
    "cuda": enums.OrtDeviceVendorId.NVIDIA,
    "dml": enums.OrtDeviceVendorId.MICROSOFT,
    "cann": enums.OrtDeviceVendorId.HUAWEI,
}


def device_number(name: str) -> int:
    """The number of a kind of device; names are those of `OrtDevice.make`."""
    if name.lower() not in TYPES:
        raise Exception(f"Unsupported device type: {name}")
    return TYPES[name.lower()]


class COrtDevice:
    """A kind of device, which one of them, and whose."""

    __module__, __qualname__ = STATE, "OrtDevice"
    __slots__ = ("_type", "_memory", "_vendor", "_id", "__weakref__")

    def __init__(self, device_type: int, mem_type: int, *numbers: int) -> None:
        """The kind of device, the kind of memory, the vendor (which may be left out), and which device it is."""
        self._type, self._memory, self._vendor, self._id = device_type, mem_type, *(0, *numbers)[-2:]

    def device_id(self) -> int:
        """Which device of its kind."""
        return self._id

    def device_type(self) -> int:
        """The number of the kind."""
        return self._type

    def mem_type(self) -> int:
        """0: the device's usual memory."""
        return self._memory

    def vendor_id(self) -> int:
        """The PCI number of the vendor; 0 if it does not matter."""
        return self._vendor

    @staticmethod
    def cpu() -> int:
        """The number of CPUs."""
        return 0

    @staticmethod
    def cuda() -> int:
        """The number of GPUs."""
        return 1

    gpu = dml = webgpu = cuda

    @staticmethod
    def npu() -> int:
        """The number of NPUs."""
        return 3

    cann = npu

    @staticmethod
    def fpga() -> int:
        """The number of FPGAs."""
        return 2

    @staticmethod
    def default_memory() -> int:
        """The number of a device's usual memory."""
        return 0


class OrtDevice:
    """A device by name and index, such as `OrtDevice.make("cpu", 0)`."""

    __module__ = COLLECTION

    def __init__(self, c_ort_device: COrtDevice) -> None:
        if not isinstance(c_ort_device, COrtDevice):
            raise ValueError(f"`Provided object` needs to be of type `{STATE}.OrtDevice`")
        self._ort_device = c_ort_device

    def _get_c_device(self) -> COrtDevice:
        return self._ort_device

    @staticmethod
    def make(ort_device_name: str, device_id: int, vendor_id: Any = -1) -> OrtDevice:
        """The device of this name; an unknown name raises a plain `Exception`, as in onnxruntime."""
        kind = device_number(ort_device_name)
        vendor = VENDORS.get(ort_device_name.lower(), enums.OrtDeviceVendorId.NONE) if vendor_id < 0 else vendor_id
        return OrtDevice(COrtDevice(kind, 0, int(vendor), device_id))

    def device_id(self) -> int:
        """Which device of its kind."""
        return self._ort_device.device_id()

    def device_type(self) -> int:
        """The number of the kind of device."""
        return self._ort_device.device_type()

    def device_vendor_id(self) -> int:
        """The PCI number of the vendor."""
        return self._ort_device.vendor_id()

    def device_mem_type(self) -> int:
        """0: the device's usual memory."""
        return self._ort_device.mem_type()


class OrtMemoryInfo:
    """A description of memory: its name, device and kind."""

    __module__ = STATE
    __reduce_ex__ = unpicklable

    name = anything("The name that the user gave it.")
    allocator_type = anything("An `OrtAllocatorType`; no effect.")
    device_id = anything("Which device of its kind.")
    mem_type = anything("An `OrtMemType`.")
    device_mem_type = anything("An `OrtDeviceMemoryType`.")
    device_vendor_id = anything("The PCI number of the vendor.")

    def __init__(self, name: str, allocator_type: Any, device_id: int, mem_type: Any) -> None:
        self._values: dict[str, Any] = {}
        self.name, self.allocator_type, self.device_id, self.mem_type = name, allocator_type, device_id, mem_type
        self.device_mem_type = enums.OrtDeviceMemoryType.DEFAULT
        self.device_vendor_id = 0

    @staticmethod
    def create_v2(
        name: str,
        device_type: Any,
        vendor_id: int,
        device_id: int,
        device_mem_type: Any,
        alignment: int,
        allocator_type: Any,
    ) -> OrtMemoryInfo:
        """A description with a vendor and a kind of device memory."""
        del device_type, alignment
        made = OrtMemoryInfo(name, allocator_type, device_id, enums.OrtMemType.DEFAULT)
        made.device_mem_type, made.device_vendor_id = device_mem_type, vendor_id
        return made


def cpu_memory() -> OrtMemoryInfo:
    """The description of the host's memory, which inputs and outputs of every session have."""
    return OrtMemoryInfo("Cpu", enums.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, enums.OrtMemType.DEFAULT)


class OrtArenaCfg:
    """No effect: there is no arena to configure."""

    __module__ = STATE
    _FIELDS = ("max_mem", "arena_extend_strategy", "initial_chunk_size_bytes", "max_dead_bytes_per_chunk")

    _MORE = ("initial_growth_chunk_size_bytes", "max_power_of_two_extend_bytes")

    max_mem = anything("No effect.")
    arena_extend_strategy = anything("No effect.")
    initial_chunk_size_bytes = anything("No effect.")
    max_dead_bytes_per_chunk = anything("No effect.")
    initial_growth_chunk_size_bytes = anything("No effect.")
    max_power_of_two_extend_bytes = anything("No effect.")

    def __init__(self, *arguments: Any) -> None:
        """Four numbers, or one dictionary of them."""
        self._values: dict[str, Any] = {}
        given = arguments[0] if len(arguments) == 1 else dict(zip(self._FIELDS, arguments, strict=True))
        for name in (*self._FIELDS, *self._MORE):
            setattr(self, name, given.get(name, -1))
        for name in given:
            if name not in (*self._FIELDS, *self._MORE):
                raise RuntimeError(f"Invalid OrtArenaCfg option: {name}\n")
            setattr(self, name, given[name])


class OrtHardwareDevice:
    """A processor of this machine."""

    __module__ = STATE

    def __init__(self, kind: Any, vendor: str) -> None:
        self._kind, self._vendor = kind, vendor

    type = property(lambda self: self._kind, doc="An `OrtHardwareDeviceType`.")
    vendor = property(lambda self: self._vendor, doc="Who made it.")
    vendor_id = property(lambda self: 0, doc="0: not asked for.")
    device_id = property(lambda self: 0, doc="0: not asked for.")
    metadata = property(lambda self: {}, doc="Empty.")


class OrtEpDevice:
    """A provider on a processor; `SessionOptions.add_provider_for_devices` takes it."""

    __module__ = STATE

    def __init__(self, ep_name: str, kind: Any) -> None:
        self._name, self._device = ep_name, OrtHardwareDevice(kind, platform.processor() or platform.machine())

    ep_name = property(lambda self: self._name, doc="The provider's name.")
    ep_vendor = property(lambda self: "ep-runtime", doc="`ep-runtime`.")
    ep_metadata = property(lambda self: {"version": _version()}, doc="The version of ep-runtime.")
    ep_options = property(lambda self: {}, doc="Empty.")
    device = property(lambda self: self._device, doc="The `OrtHardwareDevice`.")

    def memory_info(self, kind: Any) -> OrtMemoryInfo:
        """The host's memory."""
        del kind
        return cpu_memory()

    def create_sync_stream(self) -> OrtSyncStream:
        """Unsupported: the array library has its own streams."""
        from ep.onnxruntime.options import failure_of

        raise failure_of("OrtEpDevice.create_sync_stream", "results are complete when a run returns.")


class OrtSyncStream:
    """Unsupported: the array library has its own streams."""

    __module__ = STATE

    def get_handle(self) -> int:
        """Unsupported: the array library has its own streams."""
        from ep.onnxruntime.options import failure_of

        raise failure_of("OrtSyncStream", "results are complete when a run returns.")


def _version() -> str:
    from importlib.metadata import version

    return version("ep-runtime")


@functools.cache
def _devices() -> tuple[OrtEpDevice, ...]:
    from ep.onnxruntime.providers import CPU, get_available_providers, get_device

    types = enums.OrtHardwareDeviceType
    kinds = {CPU: types.CPU, "MLXExecutionProvider": types.GPU}
    jax = types.GPU if get_device() == "GPU" else types.CPU
    return tuple(OrtEpDevice(name, kinds.get(name, jax)) for name in reversed(get_available_providers()))


def get_ep_devices() -> list[OrtEpDevice]:
    """The available providers with their processors, the CPU's first."""
    return list(_devices())


def get_hardware_devices() -> list[OrtHardwareDevice]:
    """The processors of `get_ep_devices`."""
    return [device.device for device in get_ep_devices()]
