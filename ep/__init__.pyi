"""What `ep.__init__` exports, for type checkers."""

from ep.array_provider import ArrayProvider as ArrayProvider
from ep.backend import Backend as Backend
from ep.buffer import DeviceBuffer as DeviceBuffer
from ep.context import (
    EpContext as EpContext,
)
from ep.context import (
    EpContextRegistry as EpContextRegistry,
)
from ep.context_cache import (
    ContextNotice as ContextNotice,
)
from ep.device import (
    DeviceId as DeviceId,
)
from ep.device import (
    DeviceType as DeviceType,
)
from ep.discovery import EpRegistry as EpRegistry
from ep.errors import (
    BackendUnavailable as BackendUnavailable,
)
from ep.errors import (
    EpError as EpError,
)
from ep.errors import (
    ExecutionError as ExecutionError,
)
from ep.errors import (
    InvalidInput as InvalidInput,
)
from ep.errors import (
    InvalidModel as InvalidModel,
)
from ep.errors import (
    UnsupportedModel as UnsupportedModel,
)
from ep.feeds import ValueInfo as ValueInfo
from ep.kernel import (
    Cost as Cost,
)
from ep.kernel import (
    Kernel as Kernel,
)
from ep.kernel import (
    KernelMatch as KernelMatch,
)
from ep.memory_estimate import (
    Estimate as Estimate,
)
from ep.memory_estimate import (
    estimate as estimate,
)
from ep.packing import (
    Packed as Packed,
)
from ep.packing import (
    pack as pack,
)
from ep.plan import Plan as Plan
from ep.provider import (
    EpConfig as EpConfig,
)
from ep.provider import (
    EpId as EpId,
)
from ep.provider import (
    ExecutionProvider as ExecutionProvider,
)
from ep.provider import (
    Fence as Fence,
)
from ep.provider import (
    OptimizerPass as OptimizerPass,
)
from ep.provider import (
    OrtPluginExport as OrtPluginExport,
)
from ep.provider import (
    Partition as Partition,
)
from ep.provider import (
    Transfer as Transfer,
)
from ep.registry import (
    OPS as OPS,
)
from ep.registry import (
    Body as Body,
)
from ep.registry import (
    Host as Host,
)
from ep.registry import (
    Index as Index,
)
from ep.registry import (
    Lowering as Lowering,
)
from ep.registry import (
    OpKey as OpKey,
)
from ep.registry import (
    OpRegistry as OpRegistry,
)
from ep.registry import (
    Overrides as Overrides,
)
from ep.registry import (
    ShapeOf as ShapeOf,
)
from ep.registry import (
    op as op,
)
from ep.results import (
    Outputs as Outputs,
)
from ep.session import (
    HostFallbackWarning as HostFallbackWarning,
)
from ep.session import (
    InferenceSession as InferenceSession,
)
from ep.session import (
    load as load,
)
from ep.tensor import (
    NodeId as NodeId,
)
from ep.tensor import (
    Shape as Shape,
)
from ep.tensor import (
    TensorLayout as TensorLayout,
)
from ep.tensor import (
    TensorView as TensorView,
)
from ep.weight_report import (
    Weight as Weight,
)
from ep.weight_report import (
    WeightTable as WeightTable,
)
from ep.weight_report import (
    WeightTotals as WeightTotals,
)

__version__: str
