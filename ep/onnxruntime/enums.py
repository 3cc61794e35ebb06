"""Which named constants does onnxruntime's API have? Those of version 1.32, with their numbers."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from ep.onnxruntime.pybind import COLLECTION, enumeration

GraphOptimizationLevel: Any = enumeration(
    "GraphOptimizationLevel",
    "No effect: a graph is always optimised, which never changes its results.",
    ORT_DISABLE_ALL=0,
    ORT_ENABLE_BASIC=1,
    ORT_ENABLE_EXTENDED=2,
    ORT_ENABLE_LAYOUT=3,
    ORT_ENABLE_ALL=99,
)
ExecutionMode: Any = enumeration(
    "ExecutionMode", "No effect: the array library schedules the work.", ORT_SEQUENTIAL=0, ORT_PARALLEL=1
)
ExecutionOrder: Any = enumeration(
    "ExecutionOrder",
    "No effect: the array library schedules the work.",
    equals_int=False,
    DEFAULT=0,
    PRIORITY_BASED=1,
    MEMORY_EFFICIENT=2,
)
OrtAllocatorType: Any = enumeration(
    "OrtAllocatorType",
    "Kinds of allocators; kept by `OrtMemoryInfo`.",
    INVALID=-1,
    ORT_DEVICE_ALLOCATOR=0,
    ORT_ARENA_ALLOCATOR=1,
)
OrtMemType: Any = enumeration(
    "OrtMemType", "Kinds of memory; kept by `OrtMemoryInfo`.", CPU_INPUT=-2, CPU_OUTPUT=-1, CPU=-1, DEFAULT=0
)
OrtDeviceMemoryType: Any = enumeration(
    "OrtDeviceMemoryType", "Kinds of memory of a device; kept by `OrtMemoryInfo`.", DEFAULT=0, HOST_ACCESSIBLE=5
)
OrtMemoryInfoDeviceType: Any = enumeration(
    "OrtMemoryInfoDeviceType", "Kinds of devices that memory belongs to.", CPU=0, GPU=1, NPU=3, FPGA=2
)
OrtHardwareDeviceType: Any = enumeration("OrtHardwareDeviceType", "Kinds of processors.", CPU=0, GPU=1, NPU=2)
OrtExecutionProviderDevicePolicy: Any = enumeration(
    "OrtExecutionProviderDevicePolicy",
    "What `SessionOptions.set_provider_selection_policy` prefers: the CPU, or this machine's best device.",
    DEFAULT=0,
    PREFER_CPU=1,
    PREFER_NPU=2,
    PREFER_GPU=3,
    MAX_PERFORMANCE=4,
    MAX_EFFICIENCY=5,
    MIN_OVERALL_POWER=6,
)
OrtSparseFormat: Any = enumeration(
    "OrtSparseFormat",
    "How a `SparseTensor` keeps its indices.",
    ORT_SPARSE_UNDEFINED=0,
    ORT_SPARSE_COO=1,
    ORT_SPARSE_CSRC=2,
    ORT_SPARSE_BLOCK_SPARSE=4,
)
OrtCompileApiFlags: Any = enumeration(
    "OrtCompileApiFlags",
    "When `ModelCompiler` refuses to write.",
    flags=True,
    NONE=0,
    ERROR_IF_NO_NODES_COMPILED=1,
    ERROR_IF_OUTPUT_FILE_EXISTS=2,
)
OrtCompiledModelCompatibility: Any = enumeration(
    "OrtCompiledModelCompatibility",
    "Whether a compiled model fits a device.",
    EP_NOT_APPLICABLE=0,
    EP_SUPPORTED_OPTIMAL=1,
    EP_SUPPORTED_PREFER_RECOMPILATION=2,
    EP_UNSUPPORTED=3,
)
OrtDeviceEpIncompatibilityReason: Any = enumeration(
    "OrtDeviceEpIncompatibilityReason",
    "Why a provider does not fit a device.",
    flags=True,
    NONE=0,
    DRIVER_INCOMPATIBLE=1,
    DEVICE_INCOMPATIBLE=2,
    MISSING_DEPENDENCY=4,
    UNKNOWN=-(2**31),
)
ModelPackageWriteMode: Any = enumeration(
    "ModelPackageWriteMode", "Unsupported, as `ModelPackage` is.", PRESERVE=0, DENSE=1
)
ArenaExtendStrategy: Any = enumeration(
    "ArenaExtendStrategy", "No effect: there is no arena.", equals_int=False, kNextPowerOfTwo=0, kSameAsRequested=1
)


class OrtDeviceVendorId(IntEnum):
    """PCI numbers of vendors; kept by `OrtDevice`."""

    NONE = 0x0000
    AMD = 0x1002
    NVIDIA = 0x10DE
    ARM = 0x13B5
    MICROSOFT = 0x1414
    HUAWEI = 0x19E5
    QUALCOMM = 0x5143
    INTEL = 0x8086


OrtDeviceVendorId.__module__ = COLLECTION
