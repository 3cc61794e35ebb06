"""Does each provider say rightly which nodes it runs, and run them, one by one and compiled together?"""

import dataclasses
import threading

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from arrays import PROVIDERS, enter, leave, node

from ep import discovery
from ep.errors import ExecutionError, InvalidModel, NoEpForOp, UnsupportedModel
from ep.kernel import Cost, Kernel, KernelMatch
from ep.node import alone
from ep.provider import Partition
from ep.tensor import Shape


@pytest.fixture(params=PROVIDERS)
def provider(request):
    made = discovery.provider(request.param)
    yield made
    made.shutdown()


class TestNodes:
    def test_supported_nodes_have_a_cost(self, provider):
        match = provider.supports_op(node("Add", ["a", "b"]), [Shape((100, 10)), Shape((100, 10))])
        assert match and match.supported and match.cost.bytes_moved >= 8000 and match.cost.total_us > 0
        assert provider.supports_op(node("Add", ["a", "b"]), [Shape(("n",)), Shape((1,))])

    def test_refusals_say_why(self, provider):
        match = provider.supports_op(node("NoSuchOp", ["a"]))
        assert not match and "ai.onnx::NoSuchOp has no lowering" in match.reason
        double = provider.supports_op(node("Add", ["a", "b"], dtype=ir.DataType.DOUBLE))
        assert double.supported == (provider.name != "mlx")
        if not double:
            assert double.reason == "mlx does not hold float64 on mlx:0"
        strings = provider.supports_op(node("Identity", ["a"], dtype=ir.DataType.STRING))
        assert strings.supported == (provider.name == "host")
        assert strings or "strings" in strings.reason

    def test_operators_of_the_host_stay_there(self, provider):
        match = provider.supports_op(node("NonMaxSuppression", ["boxes", "scores"]))
        assert match.supported == (provider.name == "host")
        assert match or match.reason == "how many boxes it selects depends on their values"

    def test_dtypes_may_be_given(self, provider):
        """The planner knows more than the file declares."""
        match = provider.supports_op(node("Add", ["a", "b"]), dtypes=([np.dtype(object)] * 2, [None]))
        assert match.supported == (provider.name == "host")

    @pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.int64])
    def test_a_kernel_runs_one_node(self, provider, dtype):
        kernel = provider.get_kernel(node("Add", ["a", "b"]), [(2, 3), (3,)], 14)
        a, b = np.arange(6).reshape(2, 3).astype(dtype), np.ones(3, dtype)
        assert isinstance(kernel, Kernel)
        (result,) = leave(provider, kernel(*enter(provider, a, b)))
        np.testing.assert_array_equal(result, a + b, strict=True)

    def test_one_value_may_be_two_inputs_and_inputs_may_be_omitted(self, provider):
        x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT))
        square = ir.Node("", "Mul", [x, x], outputs=[ir.Value(name="y")])
        (array,) = enter(provider, np.arange(3, dtype=np.float32))
        (result,) = leave(provider, provider.get_kernel(square, [(3,), (3,)], 14)(array, array))
        np.testing.assert_array_equal(result, [0, 1, 4])
        clip = provider.get_kernel(node("Clip", ["x", None, "hi"]), [(3,), (), ()], 13)
        (result,) = leave(provider, clip(array, None, *enter(provider, np.float32(1))))
        np.testing.assert_array_equal(result, [0, 1, 1])

    def test_the_opset_selects_the_meaning(self, provider):
        softmax = node("Softmax", ["x"], [ir.AttrInt64("axis", 1)])
        x = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
        old, new = (
            leave(provider, provider.get_kernel(softmax, [x.shape], opset)(*enter(provider, x)))[0]
            for opset in (12, 13)
        )
        np.testing.assert_allclose(old.reshape(2, 6).sum(-1), 1, rtol=1e-5)
        np.testing.assert_allclose(new.sum(1), 1, rtol=1e-5)

    def test_a_step_is_bound_again_for_another_opset(self):
        step = alone(node("Softmax", ["x"]), 13)
        assert alone(step, 12).lowering.key.since_version < step.lowering.key.since_version == 13
        assert (alone(step, 12).opset, step.opset) == (12, 13)

    def test_contents_that_shape_the_result_are_read_from_the_device(self, provider):
        reshape = node("Reshape", ["x", "shape"])
        x, shape = enter(provider, np.arange(6, dtype=np.float32), np.array([3, -1]))
        (result,) = provider.get_kernel(reshape, [(6,), (2,)], 14)(x, shape)
        assert result.shape == (3, 2)

    def test_nodes_without_a_kernel_are_refused(self, provider):
        with pytest.raises(NoEpForOp, match=f"{provider.name}: ai.onnx::NoSuchOp has no lowering"):
            provider.get_kernel(node("NoSuchOp", ["x"]), [(1,)], 14)
        with pytest.raises(UnsupportedModel, match="no lowering for opset 3"):
            provider.get_kernel(node("Gelu", ["x"]), [(1,)], 3)
        with pytest.raises(InvalidModel, match="unknown attribute 'colour'"):
            provider.get_kernel(node("Relu", ["x"], [ir.AttrInt64("colour", 1)]), [(1,)], 14)

    def test_a_failing_kernel_names_its_node(self, provider):
        kernel = provider.get_kernel(node("MatMul", ["a", "b"]), [(2, 3), (2, 3)], 13)
        with pytest.raises(ExecutionError, match="MatMul_0"):
            kernel(*enter(provider, np.ones((2, 3), np.float32), np.ones((2, 3), np.float32)))

    def test_a_node_that_needs_its_surroundings_is_refused(self):
        outer = ir.Value(name="outer", type=ir.TensorType(ir.DataType.FLOAT))
        inner = ir.Node("", "Identity", [outer], outputs=[ir.Value(name="i")])
        branch = ir.Graph([], inner.outputs, nodes=[inner], opset_imports={"": 16})
        attributes = [ir.AttrGraph("then_branch", branch), ir.AttrGraph("else_branch", branch)]
        with pytest.raises((UnsupportedModel, InvalidModel), match="outer|around"):
            alone(node("If", ["cond"], attributes), 16)


class TestCompile:
    def partition(self):
        step = alone(node("Sub", ["a", "b"]), 14)
        first = dataclasses.replace(step, name="first", inputs=("x", "y"), outputs=("d",))
        second = dataclasses.replace(step, name="second", inputs=("d", "c"), outputs=("e",))
        return Partition(("x", "y"), ("e", "d", "c"), (first, second), {"c": np.float32([1, 1])})

    def test_a_partition_becomes_one_function(self, provider):
        run = provider.compile(self.partition())
        for scale in (1, 2):
            x, y = np.float32([5, 7]) * scale, np.float32([1, 2])
            e, d, c = leave(provider, run(*enter(provider, x, y)))
            np.testing.assert_array_equal(d, x - y, strict=True)
            np.testing.assert_array_equal(e, x - y - 1, strict=True)
            np.testing.assert_array_equal(c, np.float32([1, 1]), strict=True)

    def test_from_many_threads(self, provider):
        run = provider.compile(self.partition())
        failures = []

        def work(n):
            x = np.full(2, n, np.float32)
            for _ in range(20):
                e, *_ = leave(provider, run(*enter(provider, x, np.zeros(2, np.float32))))
                if e.tolist() != [n - 1, n - 1]:
                    failures.append((n, e))

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures

    def test_compiling_sets_nothing_globally(self):
        import jax

        provider = discovery.provider("jax")
        run = provider.compile(self.partition())
        run(*enter(provider, np.ones(2, np.float32), np.ones(2, np.float32)))
        assert jax.numpy.asarray([1]).dtype == np.int32


class TestMatches:
    def test_a_match_has_a_cost_or_a_reason(self):
        assert KernelMatch(Cost()).supported and not KernelMatch.declined("no").supported
        for facts in ({}, {"cost": Cost(), "reason": "no"}):
            with pytest.raises(AssertionError):
                KernelMatch(**facts)

    def test_computing_overlaps_with_memory(self):
        cost = Cost(compute_us=3, memory_us=5, transfer_us=7, launch_us=1, bytes_moved=10)
        assert cost.total_us == 13
        assert (cost + cost).total_us == 26 and (cost + cost).bytes_moved == 20
