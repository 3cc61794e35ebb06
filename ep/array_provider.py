"""How does an array library become an execution provider? `ArrayProvider`, the same for all libraries."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, final

import numpy as np

from ep import node, stored
from ep.backend import Backend, Specs
from ep.buffer import DeviceBuffer, Storage, check_alignment, check_size
from ep.context import EpContext
from ep.device import DeviceId, DeviceType
from ep.errors import (
    DoubleFree,
    ExecutionError,
    ForeignProvider,
    InvalidInput,
    NoEpForOp,
    NotInitialised,
    OutOfMemory,
    ReadOnlyBuffer,
    UnsupportedContext,
    UseAfterFree,
)
from ep.kernel import Cost, Kernel, KernelMatch
from ep.program import Runner, Step
from ep.provider import Dtypes, EpConfig, ExecutionProvider, Fence, Partition, Transfer
from ep.tensor import Shape, TensorLayout, TensorView

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

    import onnx_ir as ir


OPTIONS = ("memory_limit", "precision")
PRECISIONS = ("highest", "fast")


@final
class ArrayProvider(ExecutionProvider):
    """The provider of a `Backend`.

    Its options are `memory_limit`, the most bytes its buffers may take, and `precision`: "highest" (the default)
    multiplies float32 in full width, "fast" as the library likes best (TF32 or bfloat16 on some devices).
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._lock = threading.Lock()
        self._ready = False
        self._limit: int | None = None
        self._owned: dict[int, tuple[Storage, int]] = {}  # id(storage) -> storage and size; leaks stay in it
        self._pool: ThreadPoolExecutor | None = None
        self._pending: list[Future[Any]] = []
        self._last: _Compiled | None = None

    @property
    def name(self) -> str:
        return self.backend.name

    @property
    def device_type(self) -> DeviceType:
        return self.backend.device.type

    @property
    def device_id(self) -> DeviceId:
        return self.backend.device

    def initialize(self, config: EpConfig) -> None:
        options = config.of(self.name, OPTIONS)
        limit = options.get("memory_limit")
        if limit is not None and not limit.isdecimal():
            raise InvalidInput(
                f"{self.name}.memory_limit is {limit!r}, which is not a number of bytes.",
                fix='pass digits, such as "8000000000".',
            )
        precision = options.get("precision", PRECISIONS[0])
        if precision not in PRECISIONS:
            raise InvalidInput(f"{self.name}.precision is {precision!r}.", fix="use 'highest' or 'fast'.")
        if precision == "highest" and self.backend.precise is not None and not self._ready:
            scope, fingerprint = _both(self.backend.scope, self.backend.precise), self.backend.fingerprint
            self.backend = replace(self.backend, scope=scope, fingerprint=f"{fingerprint} / precision {precision}")
        self._limit = None if limit is None else int(limit)
        self._ready = True

    def shutdown(self) -> None:
        try:
            self.sync()
        finally:
            with self._lock:
                pool, self._pool, self._ready, self._last = self._pool, None, False, None
                self._owned.clear()
            if pool is not None:
                pool.shutdown()

    # Memory.

    def allocate(self, size: int, alignment: int) -> DeviceBuffer:
        self._require("allocate memory")
        check_size(size)
        check_alignment(alignment)
        with self._lock:  # two allocations must not both take the last bytes below the limit
            available = self._available()
            if available is not None and size > available:
                raise OutOfMemory(size, available, str(self.device_id))
            try:
                storage = self.backend.memory.allocate(size, alignment)
            except MemoryError as cause:
                raise OutOfMemory(size, available, str(self.device_id)) from cause
            buffer = DeviceBuffer(storage, self.device_id, size, alignment, borrowed=False)
            self._owned[id(storage)] = storage, size
        return buffer

    def _available(self) -> int | None:
        free = self.backend.memory.available()
        if self._limit is None:
            return free
        left = max(0, self._limit - sum(size for _, size in self._owned.values()))
        return left if free is None else min(left, free)

    def deallocate(self, buffer: DeviceBuffer) -> None:
        try:
            if not buffer.is_borrowed:
                self._require("deallocate a buffer")
                self._release(buffer)
            else:
                buffer.consume("deallocate", "deallocate")
        except UseAfterFree as cause:
            raise DoubleFree(cause.consumed_by) from None

    def _release(self, buffer: DeviceBuffer) -> None:
        with self._lock:
            key = self._key(buffer)
            buffer.consume("deallocate", "deallocate")
            del self._owned[key]

    def _key(self, buffer: DeviceBuffer) -> int:
        """Find a buffer among the owned, by its storage, or by its address if it was rebuilt from one."""
        storage = buffer.storage("deallocate")
        if id(storage) in self._owned:
            return id(storage)
        if buffer.device == self.device_id:
            address = storage.pointer()
            for key, (candidate, _) in self._owned.items():
                if candidate.pointer() == address:
                    return key
        raise ForeignProvider(self.name, str(buffer.device))

    def copy(self, src: DeviceBuffer, dst: DeviceBuffer, size: int) -> None:
        self._require("copy a buffer")
        source, target = _copyable(src, dst, size)
        target.write(source.read(size))

    def copy_async(self, src: DeviceBuffer, dst: DeviceBuffer, size: int) -> Fence:
        self._require("copy a buffer")
        source, target = _copyable(src, dst, size)  # held by the task, whatever becomes of the buffers
        with self._lock:
            future = self._worker().submit(lambda: target.write(source.read(size)))
            self._pending = [f for f in self._pending if not f.done() or f.exception()] + [future]
        return Fence(future)

    def _worker(self) -> ThreadPoolExecutor:
        """Return the one thread that copies, so that copies keep their order."""
        from concurrent.futures import ThreadPoolExecutor

        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, f"ep-{self.name}-copy")
        return self._pool

    def sync(self) -> None:
        self._require("wait for its work")
        with self._lock:
            pending, self._pending = self._pending, []
        for future in pending:
            future.result()
        self.backend.synchronize()

    # Arrays.

    def from_view(self, view: TensorView) -> Transfer:
        self._check_dtype(view.dtype)
        with self.backend.scope():
            if not view.buffer.is_borrowed:
                return Transfer(self.backend.asarray(view.numpy()), "its buffer can still be written")
            ((array, reason),) = self.backend.borrow([view.numpy()])
        if not view.device.is_host_accessible:
            reason = f"its data were on {view.device}"
        return Transfer(array, reason)

    def _check_dtype(self, dtype: np.dtype[Any]) -> None:
        if dtype not in self.backend.dtypes:
            held = ", ".join(sorted(known.name for known in self.backend.dtypes))
            raise InvalidInput(
                f"{self.name} does not hold {dtype.name} on {self.device_id}.",
                why=f"it holds {held}.",
                fix="convert the data to one of these dtypes, or use the host provider.",
            )

    def to_view(self, array: Any) -> TensorView:
        if not self.device_type.is_host_accessible:
            self.backend.block([array])
            return TensorView.from_dlpack(array)
        with self.backend.scope():
            return TensorView.from_array(self.backend.to_numpy(array), device=self.device_id)

    # Nodes.

    def supports_op(
        self,
        op: Step | ir.Node,
        shapes: Sequence[Shape] = (),
        layouts: Sequence[TensorLayout] = (),
        *,
        dtypes: tuple[Dtypes, Dtypes] | None = None,
    ) -> KernelMatch:
        lowering = node.lowering_of(op)
        if lowering is None:
            return KernelMatch.declined(f"{node.op_name(op)} has no lowering in ep.ops")
        reason = lowering.host_reason(node.attributes_of(op))
        if reason and not self.backend.is_host:
            return KernelMatch.declined(reason)
        inputs, outputs = dtypes or (node.dtypes_of(op.inputs), node.dtypes_of(op.outputs))
        for dtype in (*inputs, *outputs, node.inner_dtype(op, lowering, inputs)):
            if dtype is not None and dtype not in self.backend.dtypes:
                kind = "strings" if dtype.hasobject else dtype.name
                return KernelMatch.declined(f"{self.name} does not hold {kind} on {self.device_id}")
        remark = self.backend.remark(lowering.key, node.attributes_of(op), inputs) if self.backend.remark else ""
        return KernelMatch(self._cost(shapes, inputs), remark=remark)

    def _cost(self, shapes: Sequence[Shape], dtypes: Dtypes) -> Cost:
        """Estimate a memory-bound operation that reads its inputs and writes as much again."""
        pairs = zip(shapes, dtypes, strict=False)
        read = sum((shape.size or 0) * dtype.itemsize for shape, dtype in pairs if dtype is not None)
        moved, backend = 2 * read, self.backend
        return Cost(memory_us=moved / backend.bytes_per_us, launch_us=backend.launch_us, bytes_moved=moved)

    def get_kernel(self, op: Step | ir.Node, shapes: Sequence[tuple[int, ...]], opset: int) -> Kernel:
        self._require("make a kernel")
        del shapes  # the libraries specialise on shapes themselves
        match = self.supports_op(op)
        if not match:
            raise NoEpForOp(node.op_name(op), {self.name: match.reason}, node=op.name or "")
        step = node.alone(op, opset)
        runner = self._runner(frozenset())

        def run(*inputs: Any) -> tuple[Any, ...]:
            env = dict(enumerate(inputs))
            with self.backend.scope():
                runner.evaluate((step,), env)
            return tuple(self.backend.enter(env[key]) for key in step.outputs)

        return Kernel(run, str(step.lowering.key))

    def _runner(self, on_host: frozenset[int]) -> Runner:
        import ep.host_namespace as host

        return Runner(self.backend.xp, host, self.backend.overrides, on_host)

    # Compiled subgraphs.

    def compile(self, partition: Partition) -> Callable[..., tuple[Any, ...]]:
        self._require("compile")
        runner = self._runner(partition.on_host)

        def run(*arrays: Any) -> tuple[Any, ...]:
            env = {**partition.constants, **dict(zip(partition.inputs, arrays, strict=True))}
            runner.evaluate(partition.steps, env)
            return tuple(self.backend.enter(env[value]) for value in partition.outputs)

        compiled = self._last = _Compiled(self.backend, run)
        return compiled

    def context_source_keys(self) -> Sequence[str]:
        return (f"ep.{self.name}",) if self.backend.ahead else ()

    def save_context(self) -> EpContext:
        backend, last = self.backend, self._last
        if backend.ahead is None:
            raise UnsupportedContext(self.name)
        if last is None or last.specs is None:
            raise ExecutionError(
                f"provider {self.name!r} has no compiled subgraph to save.",
                why="a subgraph is compiled when it first runs, for the shapes that it then sees.",
                fix="compile a partition and call the function once before saving.",
            )
        with backend.scope():
            data = stored.store(backend, last.fn, last.specs)
        return EpContext(self.name, backend.version, data, device_fingerprint=backend.needs())

    def load_context(self, ctx: EpContext) -> Callable[..., tuple[Any, ...]]:
        backend = self.backend
        if backend.deserialize is None:
            raise UnsupportedContext(self.name)
        for what, theirs, ours in (
            ("provider", ctx.ep_name, self.name),
            ("hardware, versions or settings", ctx.device_fingerprint, backend.needs()),
        ):
            if theirs != ours:
                raise UnsupportedContext(self.name, f"other {what} compiled it: {theirs!r}; here: {ours!r}.")
        with backend.scope():
            return _scoped(backend, stored.load(backend, ctx.data))

    def release(self, value: Any) -> Any:
        """Return a result in the form that user code may compute with.

        Arrays that the library would narrow outside its scope leave as a `TensorView`, others as they are.
        """
        if isinstance(value, list):
            return [self.release(item) for item in value]
        if not self.backend.is_array(value) or self.backend.xp.dtype_of(value) not in self.backend.narrows:
            return value
        return self.to_view(value)

    def _require(self, action: str) -> None:
        if not self._ready:
            raise NotInitialised(self.name, action)

    def __repr__(self) -> str:
        return f"<ArrayProvider {self.name} {self.backend.version} on {self.device_id}>"


class _Compiled:
    """A compiled function, with the shapes and dtypes of its first call, which `save_context` needs."""

    def __init__(self, backend: Backend, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self._backend, self._run = backend, _scoped(backend, backend.compile(fn))
        self.specs: Specs | None = None

    def __call__(self, *arrays: Any) -> tuple[Any, ...]:
        if self.specs is None:
            dtype_of = self._backend.xp.dtype_of
            self.specs = [(tuple(array.shape), dtype_of(array)) for array in arrays]
        return self._run(*arrays)


def _scoped(backend: Backend, function: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    def run(*arrays: Any) -> tuple[Any, ...]:
        with backend.scope():
            return tuple(function(*arrays))

    return run


def _both(first: Callable[[], Any], second: Callable[[], Any]) -> Callable[[], Any]:
    """Return what enters two scopes at once."""

    @contextlib.contextmanager
    def scope() -> Iterator[None]:
        with first(), second():
            yield

    return scope


def _copyable(src: DeviceBuffer, dst: DeviceBuffer, size: int) -> tuple[Storage, Storage]:
    """Return the storage of both ends of a copy, after all checks."""
    check_size(size)
    for buffer, end in ((src, "source"), (dst, "target")):
        if size > len(buffer):
            raise InvalidInput(
                f"cannot copy {size} bytes: the {end} has {len(buffer)}.",
                fix="copy at most the smaller size.",
            )
    if dst.is_borrowed:
        raise ReadOnlyBuffer("the target of the copy is borrowed.")
    return src.storage("read"), dst.storage("write")
