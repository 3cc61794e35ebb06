"""How does code written for onnxruntime run on this runtime? `import ep.onnxruntime as onnxruntime`, or `install`.

Names, arguments, answers and errors are those of onnxruntime 1.32; the execution providers are ours. See
docs/onnxruntime.md for what each name does here, and for how to run programs that import onnxruntime unchanged.

Importing this loads neither MLX nor JAX nor onnx; making a session does.
"""

from ep.onnxruntime import capi
from ep.onnxruntime.adapters import AdapterFormat, LoraAdapter
from ep.onnxruntime.assignment import OrtEpAssignedNode, OrtEpAssignedSubgraph
from ep.onnxruntime.capi import onnxruntime_validation
from ep.onnxruntime.compiler import ModelCompiler, OrtEpContextData
from ep.onnxruntime.devices import (
    OrtArenaCfg,
    OrtDevice,
    OrtEpDevice,
    OrtHardwareDevice,
    OrtMemoryInfo,
    OrtSyncStream,
    get_ep_devices,
)
from ep.onnxruntime.enums import (
    ExecutionMode,
    ExecutionOrder,
    GraphOptimizationLevel,
    ModelPackageWriteMode,
    OrtAllocatorType,
    OrtCompileApiFlags,
    OrtDeviceMemoryType,
    OrtDeviceVendorId,
    OrtExecutionProviderDevicePolicy,
    OrtHardwareDeviceType,
    OrtMemoryInfoDeviceType,
    OrtMemType,
    OrtSparseFormat,
)
from ep.onnxruntime.environment import (
    API_VERSION,
    create_and_register_allocator,
    create_and_register_allocator_v2,
    disable_telemetry_events,
    enable_telemetry_events,
    get_build_info,
    get_version_string,
    has_collective_ops,
    preload_dlls,
    print_debug_info,
    register_execution_provider_library,
    set_global_thread_pool_sizes,
    set_seed,
    unregister_execution_provider_library,
)
from ep.onnxruntime.iobinding import IOBinding, SessionIOBinding
from ep.onnxruntime.messages import (
    set_default_logger_callback,
    set_default_logger_severity,
    set_default_logger_verbosity,
)
from ep.onnxruntime.model import ModelMetadata, NodeArg
from ep.onnxruntime.options import RunOptions, SessionOptions
from ep.onnxruntime.ortvalue import OrtValue, copy_tensors
from ep.onnxruntime.packages import (
    ModelPackage,
    ModelPackageComponentContext,
    ModelPackageContext,
    ModelPackageOptions,
    OrtEpContextDataBuffer,
    OrtExternalInitializerInfo,
)
from ep.onnxruntime.providers import get_all_providers, get_available_providers, get_device
from ep.onnxruntime.session import InferenceSession
from ep.onnxruntime.sparse import SparseTensor
from ep.onnxruntime_alias import install, installed, uninstall

__version__ = version = API_VERSION
__author__ = "ep-runtime"
__ep__ = True  # the marker: this is ep's module, under whatever name it was imported
package_name = "onnxruntime"
cuda_version = ""
import_capi_exception = None

__all__ = [
    "AdapterFormat",
    "ExecutionMode",
    "ExecutionOrder",
    "GraphOptimizationLevel",
    "IOBinding",
    "InferenceSession",
    "LoraAdapter",
    "ModelCompiler",
    "ModelMetadata",
    "ModelPackage",
    "ModelPackageComponentContext",
    "ModelPackageContext",
    "ModelPackageOptions",
    "ModelPackageWriteMode",
    "NodeArg",
    "OrtAllocatorType",
    "OrtArenaCfg",
    "OrtCompileApiFlags",
    "OrtDevice",
    "OrtDeviceMemoryType",
    "OrtDeviceVendorId",
    "OrtEpAssignedNode",
    "OrtEpAssignedSubgraph",
    "OrtEpContextData",
    "OrtEpContextDataBuffer",
    "OrtEpDevice",
    "OrtExecutionProviderDevicePolicy",
    "OrtExternalInitializerInfo",
    "OrtHardwareDevice",
    "OrtHardwareDeviceType",
    "OrtMemType",
    "OrtMemoryInfo",
    "OrtMemoryInfoDeviceType",
    "OrtSparseFormat",
    "OrtSyncStream",
    "OrtValue",
    "RunOptions",
    "SessionIOBinding",
    "SessionOptions",
    "SparseTensor",
    "capi",
    "copy_tensors",
    "create_and_register_allocator",
    "create_and_register_allocator_v2",
    "cuda_version",
    "disable_telemetry_events",
    "enable_telemetry_events",
    "get_all_providers",
    "get_available_providers",
    "get_build_info",
    "get_device",
    "get_ep_devices",
    "get_version_string",
    "has_collective_ops",
    "import_capi_exception",
    "install",
    "installed",
    "onnxruntime_validation",
    "package_name",
    "preload_dlls",
    "print_debug_info",
    "register_execution_provider_library",
    "set_default_logger_callback",
    "set_default_logger_severity",
    "set_default_logger_verbosity",
    "set_global_thread_pool_sizes",
    "set_seed",
    "uninstall",
    "unregister_execution_provider_library",
    "version",
]
