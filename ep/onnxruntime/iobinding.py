"""How do inputs and outputs stay where they are between runs? Bound once, then run as often as wanted.

An output that is bound by name alone stays on the device; `get_outputs` gives it as an `OrtValue` that the next run
takes without moving it. An output that is bound to memory of the user's is written into that memory.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ep.onnxruntime.devices import COrtDevice, OrtDevice
from ep.onnxruntime.elements import element_dtype
from ep.onnxruntime.errors import Fail, InvalidArgument, failure, in_node
from ep.onnxruntime.ortvalue import OrtValue
from ep.onnxruntime.pybind import COLLECTION, STATE, unpicklable
from ep.onnxruntime.values import COrtValue, OrtValueVector, readable


class SessionIOBinding:
    """Values bound to a session's inputs and outputs, by name."""

    __module__ = STATE
    __reduce_ex__ = unpicklable

    def __init__(self, session: Any) -> None:
        self._session = session
        self._inputs: dict[str, COrtValue] = {}
        self._targets: dict[str, COrtValue | COrtDevice] = {}
        self._results: list[COrtValue] = []

    def bind_input(self, name: str, *arguments: Any) -> None:
        """An array, or (device, element type, shape, address)."""
        self._check(name)
        if len(arguments) == 1:
            (array,) = arguments
            if not isinstance(array, np.ndarray):
                raise RuntimeError("Unable to create OrtValue from the given python object")
            if array.dtype.kind in "OUS":
                raise RuntimeError("Only binding non-string Tensors is currently supported")
            self._inputs[name] = COrtValue.ortvalue_from_numpy(array)
        else:
            self._inputs[name] = at_address(*arguments)

    def bind_ortvalue_input(self, name: str, value: COrtValue) -> None:
        """A value."""
        self._check(name)
        self._inputs[name] = value

    def _check(self, name: str) -> None:
        if name not in self._session._feeds.known:
            raise RuntimeError(f"Failed to find NodeArg with name: {name} in the def list")

    def bind_output(self, name: str, device: COrtDevice, *arguments: Any) -> None:
        """The device where the result should be, or memory there: (element type, shape, address)."""
        self._targets[name] = at_address(device, *arguments) if arguments else device

    def bind_ortvalue_output(self, name: str, value: COrtValue) -> None:
        """The value that takes the result."""
        self._targets[name] = value

    def synchronize_inputs(self) -> None:
        """No effect: inputs are read when the session runs."""

    def synchronize_outputs(self) -> None:
        """No effect: results are complete when a run returns."""

    def clear_binding_inputs(self) -> None:
        """Forgets the inputs."""
        self._inputs = {}

    def clear_binding_outputs(self) -> None:
        """Forgets the outputs."""
        self._targets, self._results = {}, []

    def get_outputs(self) -> OrtValueVector:
        """The results of the last run, in the order in which outputs were bound."""
        return OrtValueVector(self._results)

    def copy_outputs_to_cpu(self) -> list[Any]:
        """The results as arrays of the caller's own."""
        return [readable(np.array(result._view())) if result.is_tensor() else result._held for result in self._results]

    def _run(self, session: Any, options: Any) -> None:
        if not self._targets:
            raise failure(InvalidArgument, "At least one output should be requested.")
        for name in self._targets:
            if name not in session._names:
                raise failure(InvalidArgument, f"Invalid output name: {name}")
        feed = self._inputs
        results = session.run_with_ort_values(feed, list(self._targets), options)
        self._results = [
            placed(session, name, target, result)
            for (name, target), result in zip(self._targets.items(), results, strict=True)
        ]


def placed(session: Any, name: str, target: COrtValue | COrtDevice, result: COrtValue) -> COrtValue:
    """A result where it was asked for: in bound memory, or on a device."""
    if isinstance(target, COrtDevice):
        if target.device_type() == COrtDevice.cpu() and result.device_name() != "cpu" and result.is_tensor():
            result.numpy()  # moves it
        return result
    if result.is_tensor() and target.shape() != result.shape():
        raise failure(Fail, _wrong_shape(session, name, target.shape(), result.shape()))
    if target.is_tensor() and target.element_type() != result.element_type():
        raise failure(
            InvalidArgument,
            f"Unexpected output data type. Actual: ({target.data_type()}) , expected: ({result.data_type()})",
        )
    target._receive(result)
    return target


def _wrong_shape(session: Any, name: str, asked: Sequence[int], made: Sequence[int]) -> str:
    """Onnxruntime's message, in which the node that made an output refuses the memory given for it."""
    node = next((node for node in session._opened.proto.graph.node if name in node.output), None)
    op, label = ("", "") if node is None else (node.op_type, node.name)
    bound, computed = (",".join(map(str, shape)) for shape in (asked, made))
    refusal = failure(
        InvalidArgument,
        f"The output OrtValue provided for output '{name}' of node '{label}' ({op}) has shape {{{bound}}} but the "
        f"computed output shape for this run is {{{computed}}}. When calling Run() with pre-allocated output OrtValues "
        "on a model with dynamic output shapes, either supply unallocated output OrtValues or ensure the pre-allocated "
        "shapes match the expected output shapes for each run.\n",
    )
    return in_node(op, label, str(refusal))


def at_address(device: Any, element_type: Any, shape: Sequence[int], address: int) -> COrtValue:
    """A value over memory that somebody else keeps alive, such as a torch tensor's."""
    dtype, sizes = element_dtype(element_type), tuple(int(size) for size in shape)
    if isinstance(device, OrtDevice):
        device = device._get_c_device()
    if device.device_type() != COrtDevice.cpu():
        return _on_gpu(device, dtype, sizes, address)
    size = math.prod(sizes) * dtype.itemsize
    if not size:
        return COrtValue(np.zeros(sizes, dtype))
    memory: Any = (ctypes.c_char * size).from_address(int(address))
    return COrtValue(np.frombuffer(memory, np.uint8).view(dtype).reshape(sizes))


def _on_gpu(device: COrtDevice, dtype: Any, shape: tuple[int, ...], address: int) -> COrtValue:
    """The memory on a GPU, or a copy that is made there."""
    from ep.buffer import DeviceBuffer
    from ep.device import DeviceId, DeviceType
    from ep.discovery import provider
    from ep.errors import EpError
    from ep.tensor import TensorView

    try:
        gpu: Any = provider("jax", f"cuda:{device.device_id()}")
    except EpError as cause:
        raise RuntimeError(f"device memory cannot be bound: {cause}") from cause
    size = math.prod(shape) * dtype.itemsize
    where = DeviceId(DeviceType("cuda"), device.device_id())
    buffer = DeviceBuffer.from_borrowed_parts(address, where, size, address & -address, owner=None)
    return COrtValue(gpu.from_view(TensorView(buffer, dtype, shape)).array, gpu)


class IOBinding:
    """What `InferenceSession.io_binding` returns: inputs and outputs by name, for `run_with_iobinding`."""

    __module__ = COLLECTION

    def __init__(self, session: Any) -> None:
        self._session = session
        self._iobinding = SessionIOBinding(session._sess)

    def bind_cpu_input(self, name: str, arr_on_cpu: np.ndarray) -> None:
        """Binds an array; it is read when the session runs."""
        self._iobinding.bind_input(name, arr_on_cpu)

    def bind_input(
        self, name: str, device_type: str, device_id: int, element_type: Any, shape: Sequence[int], buffer_ptr: int
    ) -> None:
        """Binds memory at an address; it is read when the session runs, and must live until then."""
        device = OrtDevice.make(device_type, device_id)._get_c_device()
        self._iobinding.bind_input(name, device, element_type, shape, buffer_ptr)

    def bind_ortvalue_input(self, name: str, ortvalue: OrtValue) -> None:
        """Binds a value."""
        self._iobinding.bind_ortvalue_input(name, ortvalue._get_c_value())

    def synchronize_inputs(self) -> None:
        """No effect: inputs are read when the session runs."""

    def bind_output(
        self,
        name: str,
        device_type: str = "cpu",
        device_id: int = 0,
        element_type: Any = None,
        shape: Sequence[int] | None = None,
        buffer_ptr: int | None = None,
    ) -> None:
        """Asks for an output, on a device; with an address, each run writes it into the memory there."""
        device = OrtDevice.make(device_type, device_id)._get_c_device()
        if buffer_ptr is None:
            self._iobinding.bind_output(name, device)
        elif element_type is None or shape is None:
            raise ValueError("`element_type` and `shape` are to be provided if pre-allocated memory is provided")
        else:
            self._iobinding.bind_output(name, device, element_type, shape, buffer_ptr)

    def bind_ortvalue_output(self, name: str, ortvalue: OrtValue) -> None:
        """Asks for an output, into this value."""
        self._iobinding.bind_ortvalue_output(name, ortvalue._get_c_value())

    def synchronize_outputs(self) -> None:
        """No effect: results are complete when a run returns."""

    def get_outputs(self) -> list[OrtValue]:
        """The results of the last run, in the order in which outputs were bound; they stay on the device."""
        return [OrtValue(value) for value in self._iobinding.get_outputs()]

    def get_outputs_as_ortvaluevector(self) -> OrtValueVector:
        """The same as a vector of the values themselves."""
        return self._iobinding.get_outputs()

    def copy_outputs_to_cpu(self) -> list[Any]:
        """The results of the last run as arrays."""
        return self._iobinding.copy_outputs_to_cpu()

    def clear_binding_inputs(self) -> None:
        """Forgets the inputs."""
        self._iobinding.clear_binding_inputs()

    def clear_binding_outputs(self) -> None:
        """Forgets the outputs."""
        self._iobinding.clear_binding_outputs()
