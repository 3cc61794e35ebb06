"""Does every provider fulfil the contract of `ExecutionProvider`: life cycle, memory, copies, fences?"""

import dataclasses
import functools
import inspect
import threading

import numpy as np
import pytest
from arrays import PROVIDERS, Minimal, borrowed, content, node
from conftest import parse

import ep
from ep import discovery
from ep.array_provider import ArrayProvider
from ep.buffer import DeviceBuffer
from ep.context import EpContext
from ep.device import DeviceId, DeviceType
from ep.errors import ExecutionError, InvalidInput, NotInitialised, UnknownOption, UnsupportedContext
from ep.provider import EpConfig, ExecutionProvider, Fence, OrtPluginExport, Partition
from ep.tensor import TensorView


@pytest.fixture(params=PROVIDERS)
def provider(request):
    made = discovery.provider(request.param)
    yield made
    made.shutdown()


class Broken:
    """Storage that fails when it is read, but not before `started`."""

    def __init__(self, started=None):
        self.started = started

    def pointer(self):
        return 64

    def read(self, size):
        if self.started is not None:
            self.started.wait(10)
        raise ExecutionError("the cable broke.")


class TestContract:
    def test_the_seed_methods_are_all_there(self):
        required = set(
            "name device_type device_id initialize shutdown supports_op get_kernel allocate deallocate copy "
            "copy_async sync".split()
        )
        optional = set("as_ort_plugin custom_passes claim_nodes context_source_keys save_context load_context".split())
        public = {name for name in vars(ExecutionProvider) if not name.startswith("_")}
        assert required <= ExecutionProvider.__abstractmethods__
        assert optional == public - ExecutionProvider.__abstractmethods__

    def test_a_method_less_is_no_provider(self):
        partial = type("Partial", (Minimal,), {"sync": ExecutionProvider.sync})
        with pytest.raises(TypeError, match="sync"):
            partial()

    def test_defaults(self):
        provider = Minimal()
        assert provider.as_ort_plugin() is None
        assert list(provider.custom_passes()) == list(provider.claim_nodes(None)) == []
        assert list(provider.context_source_keys()) == []
        for use in (provider.save_context, lambda: provider.load_context(EpContext("x", "1", b""))):
            with pytest.raises(UnsupportedContext, match="'minimal'"):
                use()

    def test_array_providers_have_the_signatures_of_the_contract(self):
        for name in ExecutionProvider.__abstractmethods__:
            ours, theirs = getattr(ArrayProvider, name), getattr(ExecutionProvider, name)
            if not isinstance(ours, property):
                assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters)

    def test_facts(self, provider):
        assert isinstance(provider, ArrayProvider)
        assert provider.device_id.type == provider.device_type and provider.name in PROVIDERS
        assert (provider.device_type == DeviceType.MLX) == (provider.name == "mlx")
        assert OrtPluginExport("RegisterEp").register_symbol == "RegisterEp"


class TestLifecycle:
    def test_nothing_works_before_initialize_or_after_shutdown(self, provider):
        buffer = provider.allocate(4, 4)
        uses = {
            "allocate memory": lambda p: p.allocate(4, 4),
            "deallocate a buffer": lambda p: p.deallocate(buffer),
            "copy a buffer": lambda p: p.copy(buffer, buffer, 1),
            "wait for its work": lambda p: p.sync(),
            "make a kernel": lambda p: p.get_kernel(node("Relu", ["x"]), [(1,)], 14),
            "compile": lambda p: p.compile(Partition((), (), ())),
        }
        fresh = ArrayProvider(provider.backend)
        for action, use in uses.items():
            with pytest.raises(NotInitialised, match=f"'{provider.name}' cannot {action}"):
                use(fresh)
        fresh.initialize(EpConfig())
        fresh.shutdown()
        with pytest.raises(NotInitialised):
            fresh.allocate(4, 4)
        provider.deallocate(buffer)

    def test_shutdown_waits_for_copies(self):
        provider = discovery.provider("host")
        source, target = np.ones(1 << 24, np.uint8), provider.allocate(1 << 24, 64)
        fence = provider.copy_async(borrowed(source), target, 1 << 24)
        provider.shutdown()
        assert fence.done() and target.storage("read").read(1 << 24).all()
        target.into_raw()

    def test_shutdown_tells_of_a_failed_copy_and_ends_all_the_same(self, provider):
        fresh = ArrayProvider(provider.backend)
        fresh.initialize(EpConfig())
        buffer = fresh.allocate(4, 4)
        fence = fresh.copy_async(DeviceBuffer(Broken(), DeviceId.cpu(), 4, 1, borrowed=True), buffer, 4)
        with pytest.raises(ExecutionError, match="cable"):
            fence.wait(10)
        with pytest.raises(ExecutionError, match="cable"):
            fresh.shutdown()
        with pytest.raises(NotInitialised):
            fresh.allocate(4, 4)
        buffer.into_raw()

    def test_options_of_others_are_ignored_and_unknown_ones_refused(self, provider):
        name = provider.name
        fresh = ArrayProvider(provider.backend)
        fresh.initialize(EpConfig({"other.depth": "1", f"{name}.memory_limit": "100"}))
        with pytest.raises(UnknownOption, match=f"Did you mean '{name}.memory_limit'"):
            fresh.initialize(EpConfig({f"{name}.memory_limt": "100"}))
        with pytest.raises(InvalidInput, match="not a number of bytes"):
            fresh.initialize(EpConfig({f"{name}.memory_limit": "1GB"}))

    @pytest.mark.parametrize("key", ["depth", ".depth", "mlx."])
    def test_options_need_a_namespace(self, key):
        with pytest.raises(InvalidInput, match="no namespace"):
            EpConfig({key: "1"})


class TestCopies:
    @pytest.mark.parametrize("there", PROVIDERS)
    @pytest.mark.parametrize("method", ["copy", "copy_async"])
    def test_between_all_devices(self, provider, there, method):
        """Whichever of the two providers copies."""
        other = discovery.provider(there)
        data = np.arange(5000, dtype=np.uint32).view(np.uint8)
        first, second = provider.allocate(data.nbytes, 64), other.allocate(data.nbytes, 256)
        for copier in (provider, other):
            provider.copy(borrowed(data), first, data.nbytes)
            fence = getattr(copier, method)(first, second, data.nbytes)
            if fence is not None:
                fence.wait(10)
            assert content(second) == data.tobytes()
            data = data[::-1].copy()
        provider.deallocate(first)
        other.deallocate(second)
        other.shutdown()

    @pytest.mark.parametrize("size", [0, 1, 9, 10])
    def test_only_the_first_bytes_change(self, provider, size):
        buffer = provider.allocate(10, 8)
        provider.copy(borrowed(np.full(10, 1, np.uint8)), buffer, 10)
        provider.copy(borrowed(np.full(16, 2, np.uint8)), buffer, size)
        assert content(buffer) == bytes([2] * size + [1] * (10 - size))
        provider.deallocate(buffer)

    @pytest.mark.parametrize(("source", "target", "text"), [(4, 8, "source has 4"), (8, 4, "target has 4")])
    def test_sizes_are_checked(self, provider, source, target, text):
        a, b = provider.allocate(source, 1), provider.allocate(target, 1)
        for copy in (provider.copy, provider.copy_async):
            with pytest.raises(InvalidInput, match=text):
                copy(a, b, 5)
            with pytest.raises(InvalidInput, match="negative"):
                copy(a, b, -1)
        provider.deallocate(a)
        provider.deallocate(b)

    def test_a_buffer_may_be_copied_onto_itself(self, provider):
        buffer = provider.allocate(4, 4)
        provider.copy(borrowed(np.arange(4, dtype=np.uint8)), buffer, 4)
        provider.copy(buffer, buffer, 3)
        assert content(buffer) == bytes(range(4))
        provider.deallocate(buffer)

    def test_later_writes_to_the_source_do_not_show(self, provider):
        memory = np.zeros(4096 + 64, np.uint8)
        data = memory[-memory.ctypes.data % 64 :][:4096]  # aligned, so that a library might adopt it
        for size in (4096, 100):
            buffer = provider.allocate(4096, 64)
            data[:] = 1
            provider.copy(borrowed(data), buffer, size)
            data[:] = 2
            assert content(buffer)[:size] == bytes([1]) * size
            provider.deallocate(buffer)

    def test_writable_pointers_exist_except_in_jax(self, provider):
        buffer = provider.allocate(8, 8)
        if provider.name == "jax":
            with pytest.raises(BufferError, match="JAX arrays are immutable"):
                buffer.as_mut_ptr()
        else:
            assert buffer.as_mut_ptr() == buffer.as_ptr()
            TensorView(buffer, np.int64, ()).numpy()[...] = 5
            assert content(buffer)[0] == 5
        provider.deallocate(buffer)

    def test_asynchronous_copies_keep_their_order_and_survive_the_free(self, provider):
        target = provider.allocate(1 << 20, 64)
        fences = []
        for n in range(8):
            source = provider.allocate(1 << 20, 64)
            provider.copy(borrowed(np.full(1 << 20, n, np.uint8)), source, 1 << 20)
            fences.append(provider.copy_async(source, target, 1 << 20))
            provider.deallocate(source)
        provider.sync()
        assert all(fence.done() for fence in fences)
        assert content(target) == bytes([7]) * (1 << 20)
        assert len({fence.id for fence in fences}) == 8
        provider.deallocate(target)


class TestFences:
    def test_the_default_fence_has_been_passed(self):
        fence = Fence()
        assert fence.done() and fence.wait() is None

    def test_failures_reach_wait_and_sync(self, provider):
        started = threading.Event()
        source = DeviceBuffer(Broken(started), DeviceId.cpu(), 4, 1, borrowed=True)
        target = provider.allocate(4, 4)
        fence = provider.copy_async(source, target, 4)
        assert not fence.done()
        with pytest.raises(TimeoutError):
            fence.wait(0.01)
        started.set()
        with pytest.raises(ExecutionError, match="cable"):
            fence.wait(10)
        provider.copy_async(borrowed(np.ones(4, np.uint8)), target, 4).wait(10)
        with pytest.raises(ExecutionError, match="cable"):
            provider.sync()
        provider.sync()  # told once
        provider.deallocate(target)


class TestPrecision:
    @pytest.mark.parametrize(("options", "expected"), [({}, "HIGHEST"), ({"jax.precision": "fast"}, "None")])
    def test_products_are_in_full_width_unless_fast_ones_are_asked_for(self, options, expected):
        jax = pytest.importorskip("jax")
        backend = dataclasses.replace(
            discovery.provider("jax").backend, precise=functools.partial(jax.default_matmul_precision, "highest")
        )
        made = ArrayProvider(backend)
        made.initialize(EpConfig(options))
        x = np.ones((2, 2), np.float32)
        with made.backend.scope():
            jaxpr = jax.make_jaxpr(made.backend.xp.matmul)(x, x)
        (product,) = [e for e in jaxpr.eqns if e.primitive.name == "dot_general"]
        assert expected in str(product.params["precision"])

    @pytest.mark.parametrize("mode", ["on", "off"])
    def test_what_a_program_asks_of_all_of_jax_does_not_reach_a_session(self, mode):
        jax = pytest.importorskip("jax")
        model = parse("g (float[n, m] x, float[m] b) => (float[n, k] y) { z = MatMul(x, x)\n y = Add(z, b) }")
        x = np.arange(4, dtype=np.float32).reshape(2, 2)
        session = ep.load(model, "jax", options={"compile": mode})
        with jax.numpy_rank_promotion("raise"), jax.disable_jit(True), jax.default_matmul_precision("bfloat16"):
            (y,) = session.run(None, {"x": x, "b": x[0]})
            assert jax.config.jax_numpy_rank_promotion == "raise", "and the program keeps its settings"
            with discovery.provider("jax", "cpu").backend.scope():
                jaxpr = jax.make_jaxpr(discovery.provider("jax", "cpu").backend.xp.matmul)(x, x)
        np.testing.assert_array_equal(y, x @ x + x[0])
        (product,) = [e for e in jaxpr.eqns if e.primitive.name == "dot_general"]
        assert product.params["precision"] is None

    def test_other_words_are_refused(self):
        with pytest.raises(InvalidInput, match="sloppy"):
            discovery.provider("jax", None, {"jax.precision": "sloppy"})
