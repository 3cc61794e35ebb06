"""How do tests make providers, nodes and buffers, and bring arrays into a provider and out again?"""

import ml_dtypes
import numpy as np
import onnx_ir as ir

from ep.buffer import DeviceBuffer
from ep.device import DeviceId, DeviceType
from ep.kernel import KernelMatch
from ep.provider import ExecutionProvider
from ep.tensor import TensorView

PROVIDERS = ("host", "jax", "mlx")


def dtype_of(name):
    """The NumPy dtype of a name, also of those that NumPy itself does not have."""
    return np.dtype(getattr(ml_dtypes, name, name))


def sample(name, shape=(3, 4)):
    """0, 1, 2, … as an array of the named dtype."""
    return np.arange(np.prod(shape), dtype=np.int64).reshape(shape).astype(dtype_of(name))


def borrowed(array):
    """A buffer over the memory of a NumPy array."""
    return DeviceBuffer.from_borrowed_parts(array.ctypes.data, DeviceId.cpu(), array.nbytes, 1, owner=array)


def content(buffer):
    """The bytes of a buffer."""
    return buffer.storage("read").read(len(buffer)).tobytes()


def enter(provider, *arrays):
    """NumPy arrays as arrays of the provider."""
    return [provider.from_view(TensorView.from_array(np.asarray(array))).array for array in arrays]


def leave(provider, results):
    """Arrays of the provider as NumPy arrays."""
    return [np.array(provider.to_view(result)) for result in results]


def node(op_type, inputs, attributes=(), dtype=ir.DataType.FLOAT):
    """A node of no graph, with one output; an input named None is omitted."""
    type_ = ir.TensorType(dtype)
    values = [None if name is None else ir.Value(name=name, type=type_) for name in inputs]
    outputs = [ir.Value(name="y", type=type_)]
    return ir.Node("", op_type, values, attributes, outputs=outputs, name=f"{op_type}_0")


class Minimal(ExecutionProvider):
    """Only what a provider must have."""

    name, device_type, device_id = "minimal", DeviceType.custom(1), DeviceId(DeviceType.custom(1))

    def initialize(self, config):
        config.of(self.name, ("depth",))

    def shutdown(self): ...

    def supports_op(self, op, shapes=(), layouts=(), *, dtypes=None):
        return KernelMatch.declined("it runs nothing")

    def get_kernel(self, op, shapes, opset): ...
    def allocate(self, size, alignment): ...
    def deallocate(self, buffer): ...
    def copy(self, src, dst, size): ...
    def copy_async(self, src, dst, size): ...
    def sync(self): ...
    def compile(self, partition): ...
    def from_view(self, view): ...
    def to_view(self, array): ...
