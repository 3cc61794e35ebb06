"""Does each EPContext source lead to exactly one provider, and does a saved context run again?"""

import dataclasses

import numpy as np
import onnx_ir as ir
import pytest
from arrays import PROVIDERS, enter, leave

from ep import discovery
from ep.context import EpContext, EpContextRegistry
from ep.errors import (
    DuplicateContextSource,
    ExecutionError,
    InvalidInput,
    InvalidModel,
    NoEpForContextSource,
    UnsupportedContext,
)
from ep.node import alone
from ep.provider import Partition
from ep.tensor import NodeId


class Stub:
    """A provider as the registry sees it."""

    def __init__(self, name, *keys):
        self.name, self._keys = name, keys

    def context_source_keys(self):
        return self._keys


class TestRegistry:
    def test_each_source_finds_its_provider(self):
        registry, first, second = EpContextRegistry(), Stub("a", "QNN", "QNN2"), Stub("b", "TensorRT")
        registry.register(first)
        registry.register(second)
        assert [registry.find(s) for s in ("QNN", "QNN2", "TensorRT")] == [first, first, second]
        assert list(registry) == ["QNN", "QNN2", "TensorRT"] and len(registry) == 3

    def test_providers_without_sources_take_no_part(self):
        registry = EpContextRegistry()
        registry.register(Stub("cpu"))
        assert len(registry) == 0
        with pytest.raises(NoEpForContextSource, match="accept: none"):
            registry.find("QNN")

    def test_unknown_sources_are_refused_with_the_known_ones(self):
        registry = EpContextRegistry()
        registry.register(Stub("a", "ep.jax"))
        with pytest.raises(NoEpForContextSource, match="Did you mean 'ep.jax'"):
            registry.find("ep.jx")

    def test_a_duplicate_is_refused_and_registers_nothing(self):
        registry, first = EpContextRegistry(), Stub("a", "QNN")
        registry.register(first)
        with pytest.raises(DuplicateContextSource, match="'QNN' is claimed by both 'a' and 'b'"):
            registry.register(Stub("b", "other", "QNN"))
        assert registry.find("QNN") is first
        with pytest.raises(NoEpForContextSource):
            registry.find("other")
        with pytest.raises(DuplicateContextSource):
            registry.register(first)

    def test_one_provider_with_one_key_twice(self):
        with pytest.raises(DuplicateContextSource):
            EpContextRegistry().register(Stub("a", "QNN", "QNN"))


def test_contexts_are_values():
    context = EpContext("jax", "1", b"x", (NodeId(1),), "cpu")
    assert context == EpContext("jax", "1", b"x", (NodeId(1),), "cpu")
    with pytest.raises(dataclasses.FrozenInstanceError):
        context.data = b""


@pytest.fixture(params=["jax", "mlx"])
def provider(request):
    made = discovery.provider(request.param)
    yield made
    made.shutdown()


def add_twice():
    """x, y, unused -> x + y, y."""
    a, b, c = (ir.Value(name=name) for name in "abc")
    node = ir.Node("", "Add", [a, b], outputs=[c], name="sum")
    step = dataclasses.replace(alone(node, 14), inputs=("x", "y"), outputs=("sum",))
    return Partition(("x", "y", "unused"), ("sum", "y"), (step,))


class TestProviders:
    @pytest.mark.parametrize("dtype", [np.float32, np.int64])
    def test_a_saved_context_runs_without_compiling(self, provider, dtype):
        compiled = provider.compile(add_twice())
        given = enter(provider, np.arange(4, dtype=dtype), np.ones(4, dtype), np.zeros(1, dtype))
        expected = leave(provider, compiled(*given))
        context = provider.save_context()
        assert (context.ep_name, context.ep_version) == (provider.name, provider.backend.version)
        assert 0 < len(context.data) < 100_000 and context.device_fingerprint
        fresh = discovery.provider(provider.name)
        restored = leave(fresh, fresh.load_context(context)(*given))
        np.testing.assert_array_equal(restored, expected, strict=True)
        np.testing.assert_array_equal(restored[0], np.arange(4, dtype=dtype) + 1, strict=True)
        fresh.shutdown()

    def test_nothing_compiled_is_told(self, provider):
        with pytest.raises(ExecutionError, match="no compiled subgraph"):
            provider.save_context()
        provider.compile(add_twice())
        with pytest.raises(ExecutionError, match="when it first runs"):
            provider.save_context()

    def test_contexts_of_others_are_refused(self, provider):
        provider.compile(add_twice())(*enter(provider, *[np.ones(2, np.float32)] * 3))
        context = provider.save_context()
        for change in ({"ep_name": "qnn"}, {"device_fingerprint": "another machine"}):
            with pytest.raises(UnsupportedContext, match="other .* compiled it"):
                provider.load_context(dataclasses.replace(context, **change))

    @pytest.mark.parametrize(
        "wrong",
        [[((3, 2), "f4")] * 3, [((2, 3), "i4")] * 3, [((6,), "f4")] * 3, [((2, 3), "f4")] * 2, []],
    )
    def test_other_arguments_are_refused(self, provider, wrong):
        """XLA itself would take other shapes and dtypes of the same number of bytes."""
        provider.compile(add_twice())(*enter(provider, *[np.ones((2, 3), np.float32)] * 3))
        restored = provider.load_context(provider.save_context())
        with pytest.raises(InvalidInput, match=r"compiled for \(float32\[2, 3\], float32\[2, 3\], float32"):
            restored(*enter(provider, *[np.ones(shape, dtype) for shape, dtype in wrong]))

    @pytest.mark.parametrize("cut", [0, 3, 10, 200])
    def test_damaged_contexts_are_refused(self, provider, cut):
        provider.compile(add_twice())(*enter(provider, *[np.ones(2, np.float32)] * 3))
        context = provider.save_context()
        with pytest.raises(InvalidModel, match="cannot be read"):
            provider.load_context(dataclasses.replace(context, data=context.data[:cut]))

    def test_source_keys_are_unique_among_the_providers(self):
        registry = EpContextRegistry()
        for name in PROVIDERS:
            registry.register(discovery.provider(name))
        assert list(registry) == ["ep.jax", "ep.mlx"]

    def test_the_host_has_no_context(self):
        host = discovery.provider("host")
        for use in (host.save_context, lambda: host.load_context(EpContext("host", "1", b""))):
            with pytest.raises(UnsupportedContext, match="'host'"):
                use()
