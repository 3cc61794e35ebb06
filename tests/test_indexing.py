"""Do operators that index, cut, pad and reshape follow the specification in its corners, on every device?

Expected values are NumPy formulas or written by hand; where onnxruntime departs from the specification, a
comment says so.
"""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import ep

INT_MAX, INT_MIN = np.iinfo(np.int64).max, np.iinfo(np.int64).min
CUBE = np.arange(2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4)


def ints(*values: int) -> np.ndarray:
    return np.asarray(values, np.int64)


def floats(*values: Any) -> np.ndarray:
    return np.asarray(values, np.float32)


def run(
    device: str,
    op: str,
    *inputs: np.ndarray | None,
    opset: int = 21,
    domain: str = "",
    outputs: int = 1,
    **attributes: Any,
) -> Any:
    """The outputs of a model with one node: inputs are fed, none is constant."""
    names = ["" if x is None else f"x{i}" for i, x in enumerate(inputs)]
    feeds = {name: x for name, x in zip(names, inputs, strict=True) if x is not None}
    results = [f"y{i}" for i in range(outputs)]
    graph = helper.make_graph(
        [helper.make_node(op, names, results, domain=domain, **attributes)],
        op,
        [helper.make_tensor_value_info(name, element_type(x), x.shape) for name, x in feeds.items()],
        [onnx.ValueInfoProto(name=name) for name in results],
    )
    opsets = [helper.make_opsetid("", opset)] + ([helper.make_opsetid(domain, 1)] if domain else [])
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ep.HostFallbackWarning)
        results = ep.load(model, device, options={"compile": "off"}).run(None, feeds)
    return results[0] if outputs == 1 else results


def element_type(x: np.ndarray) -> int:
    return onnx.TensorProto.STRING if x.dtype == object else helper.np_dtype_to_tensor_dtype(x.dtype)


def equal(got: np.ndarray, want: Any) -> None:
    want = np.asarray(want)
    assert got.shape == want.shape and got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)


# Gather


@pytest.mark.parametrize("indices", [ints(-1, 0), np.int64(-3), np.zeros((0, 2), np.int64), np.array([[1]], np.int32)])
def test_gather_counts_from_the_back_and_keeps_the_rank_of_the_indices(device, indices):
    equal(run(device, "Gather", CUBE, np.asarray(indices), axis=-2), np.take(CUBE, indices, axis=1))


def test_one_string_is_gathered_as_text(device):
    words = np.asarray(["a", "bc"], object)
    got = run(device, "Gather", words, np.asarray(-1))
    assert got.dtype == object and got.shape == () and got.item() == "bc"


def test_gather_elements_reads_a_corner_instead_of_broadcasting(device):
    data = np.arange(6, dtype=np.float32).reshape(2, 3)
    equal(run(device, "GatherElements", data, ints(-1, 0).reshape(1, 2), axis=0), [floats(3, 1)])
    with pytest.raises(ep.InvalidInput, match="exceed data"):
        run(device, "GatherElements", floats([1, 2]), ints([0, 0], [1, 1]), axis=1)


@pytest.mark.parametrize("batch_dims", [0, 1, 2])
def test_gather_nd(device, batch_dims):
    data = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)
    tail = 2
    indices = np.stack([np.arange(-1, 2) % n - n for n in data.shape[batch_dims : batch_dims + tail]], -1) + np.zeros(
        (*data.shape[:batch_dims], 1, 1), np.int64
    )
    want = np.empty((*data.shape[:batch_dims], 3, *data.shape[batch_dims + tail :]), np.float32)
    for where in np.ndindex(*indices.shape[:-1]):
        want[where] = data[where[:batch_dims]][tuple(indices[where])]
    equal(run(device, "GatherND", data, indices, batch_dims=batch_dims), want)


# Scatter

REDUCTIONS = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.int64])
def test_scatter_elements_reduces_duplicates(device, reduction, dtype):
    data = np.arange(1, 7, dtype=dtype).reshape(2, 3)
    indices = ints([0, -1, 2, 0], [1, 1, 1, -3])
    updates = np.arange(2, 10, dtype=dtype).reshape(2, 4)
    want = data.copy()
    REDUCTIONS[reduction].at(want, (np.arange(2)[:, None], indices), updates)
    equal(run(device, "ScatterElements", data, indices, updates, axis=1, reduction=reduction), want)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", [np.float32, np.int64])
def test_scatter_nd_reduces_duplicate_slices(device, reduction, dtype):
    data = np.arange(1, 13, dtype=dtype).reshape(4, 3)
    indices = ints([1], [-1], [1])
    updates = np.arange(9, dtype=dtype).reshape(3, 3)
    want = data.copy()
    REDUCTIONS[reduction].at(want, indices[:, 0], updates)
    equal(run(device, "ScatterND", data, indices, updates, reduction=reduction), want)


def test_scatter_without_updates_changes_nothing(device):
    empty = np.zeros((0, 2), np.int64)
    equal(run(device, "ScatterND", CUBE, empty, np.zeros((0, 4), np.float32)), CUBE)
    equal(run(device, "ScatterElements", CUBE[0], empty, np.zeros((0, 2), np.float32)), CUBE[0])


def test_scatter_writes_bools(device):
    got = run(device, "ScatterElements", np.zeros(3, bool), ints(-1), np.ones(1, bool))
    equal(got, [False, False, True])


def test_tensor_scatter_writes_each_sample_at_its_own_place(device):
    past, update = np.zeros((2, 1, 4, 1), np.float32), floats(1, 2, 3, 4).reshape(2, 1, 2, 1)
    linear = run(device, "TensorScatter", past, update, ints(0, 2), opset=24)
    equal(linear[..., 0], floats([[1, 2, 0, 0]], [[0, 0, 3, 4]]))
    circular = run(device, "TensorScatter", past, update, ints(3, 6), opset=24, mode="circular")
    equal(circular[..., 0], floats([[2, 0, 0, 1]], [[0, 0, 3, 4]]))
    one = run(device, "TensorScatter", past[:1], update[:1], ints(1), opset=24)
    equal(one[..., 0], floats([[0, 1, 2, 0]]))


# Search


def test_one_hot_of_classes_that_do_not_exist_is_off(device):
    indices = floats(-4, -3, -1, 0, 2, 3)
    want = [[0, 0, 0], [1, 0, 0], [0, 0, 1], [1, 0, 0], [0, 0, 1], [0, 0, 0]]
    equal(run(device, "OneHot", indices, ints(3), floats(0, 1)), floats(*want))
    equal(run(device, "OneHot", indices, ints(3), floats(0, 1), axis=0), floats(*want).T)
    old = floats(*want)
    old[1:3] = 0  # before opset 11 negative indices name no class
    equal(run(device, "OneHot", indices, ints(3), floats(0, 1), opset=9), old)


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.uint8])
def test_top_k_prefers_the_lower_index_among_equals(device, dtype):
    x = np.asarray([[1, 3, 3, 0], [2, 2, 2, 2]], dtype)
    values, indices = run(device, "TopK", x, ints(3), outputs=2)
    equal(values, np.asarray([[3, 3, 1], [2, 2, 2]], dtype))
    equal(indices, ints([1, 2, 0], [0, 1, 2]))
    values, indices = run(device, "TopK", x, ints(2), outputs=2, largest=0)
    equal(indices, ints([3, 0], [0, 1]))
    assert run(device, "TopK", x, ints(0), outputs=2)[0].shape == (2, 0)
    with pytest.raises(ep.InvalidInput, match="cannot take 5 of the 4"):
        run(device, "TopK", x, ints(5), outputs=2)


def test_non_zero_of_a_scalar_has_no_row(device):
    assert run(device, "NonZero", np.float32(2)).shape == (0, 1)
    assert run(device, "NonZero", np.float32(0)).shape == (0, 0)


def test_unique_in_order_of_appearance(device):
    rows = floats([2, 1], [0, 3], [2, 1], [0, 3], [9, 9])
    y, first, inverse, counts = run(device, "Unique", rows, outputs=4, axis=0, sorted=0)
    equal(y, rows[[0, 1, 4]])
    for got, want in ((first, [0, 1, 4]), (inverse, [0, 1, 0, 1, 2]), (counts, [2, 2, 1])):
        equal(got, ints(*want))
    words = np.asarray(["b", "a", "b"], object)
    assert run(device, "Unique", words, outputs=4)[0].tolist() == ["a", "b"]


# Slice

SPANS = [
    *[(1, 3, 1), (3, 1, 1), (5, 9, 2), (4, 0, -3), (2, 2, -1), (-2, INT_MAX, 1), (-1, INT_MIN, -2)],
    *[(INT_MAX, INT_MIN, -1), (0, INT_MAX, INT_MAX), (-1, INT_MIN, INT_MIN)],
]


@pytest.mark.parametrize("span", SPANS, ids=str)
def test_slice_clamps_like_numpy(device, span):
    x = np.arange(5, dtype=np.float32)
    start, end, step = span
    want = x[start:end:step]
    equal(run(device, "Slice", x, *map(ints, (start, end)), ints(0), ints(step)), want)


def test_slice_backwards_from_before_the_begin_starts_at_the_begin(device):
    """The spec clamps the start to [0, n-1] for negative steps; Python would give nothing."""
    x = floats(5, 6, 7)
    equal(run(device, "Slice", x, ints(-9), ints(INT_MIN), ints(0), ints(-1)), floats(5))


def test_slice_of_nothing(device):
    empty = np.zeros((0, 3), np.float32)
    equal(
        run(device, "Slice", empty, ints(-1, 1), ints(INT_MIN, INT_MAX), ints(0, -1), ints(-1, 1)),
        empty[:, 1:],
    )
    equal(run(device, "Slice", CUBE, starts=[1], ends=[2**31 - 1], axes=[2], opset=9), CUBE[:, :, 1:])


# Pad


@pytest.mark.parametrize("mode", ["constant", "edge", "reflect", "wrap"])
@pytest.mark.parametrize("widths", [(1, 2), (2, 2), (3, 5), (7, 0)], ids=str)
def test_pads_may_be_wider_than_the_axis(device, mode, widths):
    x = floats([1, 2, 3], [4, 5, 6])
    got = run(device, "Pad", x, ints(*widths), None, ints(-1), mode=mode)
    equal(got, np.pad(x, [(0, 0), widths], mode=mode))


def test_negative_pads_cut_first(device):
    x = floats(1, 2, 3, 4)
    equal(run(device, "Pad", x, ints(-1, 2)), floats(2, 3, 4, 0, 0))
    equal(run(device, "Pad", x, ints(-1, 2), mode="edge"), floats(2, 3, 4, 4, 4))
    equal(run(device, "Pad", x, ints(2, -2), mode="reflect"), floats(1, 2, 1, 2))
    equal(run(device, "Pad", x, ints(-6, 3), floats(9).reshape(())), floats(9))  # cuts into the other pad
    with pytest.raises(ep.InvalidInput, match="remove 1 more than the 4 elements"):
        run(device, "Pad", x, ints(-3, -2))
    with pytest.raises(ep.InvalidInput, match="no element to pad with"):
        run(device, "Pad", x[:0], ints(1, 0), mode="edge")


@pytest.mark.parametrize(("dtype", "value"), [(np.int64, 7), (np.bool_, True), (np.float16, 0.5)])
def test_pad_keeps_the_dtype_of_its_value(device, dtype, value):
    x = np.zeros((1, 2), dtype)
    want = np.pad(x, [(1, 0), (0, 1)], constant_values=value)
    equal(run(device, "Pad", x, ints(1, 0, 0, 1), np.asarray(value, dtype)), want)


def test_center_crop_pad_puts_the_odd_element_at_the_end(device):
    x = floats([1, 2, 3, 4], [5, 6, 7, 8])
    got = run(device, "CenterCropPad", x, ints(5, 1))
    equal(got, floats([0], [2], [6], [0], [0]))


# Split, Reshape and what else depends on a shape


def test_split_uneven(device):
    x = np.arange(7, dtype=np.float32)
    parts = run(device, "Split", x, outputs=3, num_outputs=3)
    assert [p.tolist() for p in parts] == [[0, 1, 2], [3, 4, 5], [6]]
    with pytest.raises(ep.InvalidInput, match="5 elements cannot be split into 4 parts"):
        run(device, "Split", x[:5], outputs=4, num_outputs=4)
    with pytest.raises(ep.InvalidInput, match="7 elements cannot be split into 2 equal parts"):
        run(device, "Split", x, outputs=2, opset=13)
    with pytest.raises(ep.InvalidInput, match=r"sizes \[3, 3\] do not split axis 0"):
        run(device, "Split", x, ints(3, 3), outputs=2)
    assert [p.size for p in run(device, "Split", x, outputs=3, split=[0, 6, 1], opset=2)] == [0, 6, 1]


@pytest.mark.parametrize(
    ("shape", "target", "allowzero", "want"),
    [
        ((2, 3, 4), (0, -1), 0, (2, 12)),
        ((0, 3), (0, -1), 0, (0, 3)),  # onnxruntime refuses to divide nothing
        ((0, 3), (3, 0), 1, (3, 0)),
        ((2, 3), (-1,), 0, (6,)),
        ((1, 1), (), 0, ()),
        ((0,), (0, 5), 1, (0, 5)),
    ],
)
def test_reshape(device, shape, target, allowzero, want):
    x = np.zeros(shape, np.float32)
    assert run(device, "Reshape", x, ints(*target), allowzero=allowzero).shape == want


@pytest.mark.parametrize(
    ("shape", "target", "allowzero", "message"),
    [
        ((2, 3), (4, -1), 0, r"\[2, 3\] cannot be reshaped to \[4, -1\]"),
        ((0, 3), (0, -1), 1, "no unique distribution"),
        ((2,), (2, 0), 0, "which the input does not have"),
    ],
)
def test_reshape_refuses(device, shape, target, allowzero, message):
    with pytest.raises(ep.InvalidInput, match=message):
        run(device, "Reshape", np.zeros(shape, np.float32), ints(*target), allowzero=allowzero)


def test_an_axis_that_does_not_exist_is_refused(device):
    with pytest.raises(ep.InvalidInput, match="axis 3 does not exist in a tensor of rank 3"):
        run(device, "Concat", CUBE, CUBE, axis=3)
    with pytest.raises(ep.InvalidInput, match="name an axis twice"):
        run(device, "Unsqueeze", CUBE, ints(0, -5))


def test_scalars_have_shapes_too(device):
    x = np.float32(3)
    equal(run(device, "Shape", x), np.zeros(0, np.int64))
    equal(run(device, "Size", x), np.int64(1))
    equal(run(device, "Flatten", x, axis=0), floats([3]))
    equal(run(device, "Unsqueeze", x, ints(0, 1)), floats([3]))
    equal(run(device, "Expand", x, ints(2, 0)), np.zeros((2, 0), np.float32))


# Blocks


@pytest.mark.parametrize(
    ("strides", "dilations"), [((1, 1, 1), (1, 1, 1)), ((2, 1, 3), (1, 2, 1)), ((1, 3, 2), (2, 1, 1))]
)
def test_col2im_adds_overlapping_blocks(device, strides, dilations):
    """In three dimensions onnxruntime ignores the dilations."""
    image, block, pads = (5, 4, 6), (2, 2, 3), (1, 0, 0, 0, 1, 2)
    padded = [n + pads[i] + pads[3 + i] for i, n in enumerate(image)]
    grid = [(n - (k - 1) * d - 1) // s + 1 for n, k, s, d in zip(padded, block, strides, dilations, strict=True)]
    columns = np.random.default_rng(0).integers(0, 9, (1, 2, *block, *grid)).astype(np.float32)
    want = np.zeros((1, 2, *padded), np.float32)
    for k, g in itertools.product(np.ndindex(*block), np.ndindex(*grid)):
        place = tuple(g[i] * strides[i] + k[i] * dilations[i] for i in range(3))
        want[(0, slice(None), *place)] += columns[(0, slice(None), *k, *g)]
    want = want[:, :, 1:6, 0:4, 0:6]
    x = columns.reshape(1, 2 * 12, -1)
    got = run(device, "Col2Im", x, ints(*image), ints(*block), strides=strides, dilations=dilations, pads=pads)
    equal(got, want)


@pytest.mark.parametrize("mode", ["DCR", "CRD"])
def test_space_to_depth_undoes_depth_to_space(device, mode):
    x = np.arange(2 * 8 * 3 * 2, dtype=np.float32).reshape(2, 8, 3, 2)
    y = run(device, "DepthToSpace", x, blocksize=2, mode=mode, opset=28)
    equal(run(device, "SpaceToDepth", y, blocksize=2, mode=mode, opset=28), x)
    with pytest.raises(ep.InvalidInput, match="8 channels cannot be divided into blocks of 9"):
        run(device, "DepthToSpace", x, blocksize=3)


# onnxruntime's own


def test_operators_of_onnxruntime(device):
    domain = "com.microsoft"
    equal(run(device, "ExpandDims", CUBE, np.asarray(-1, np.int32), domain=domain), CUBE[..., None])
    equal(run(device, "Pad", floats(1), ints(1, 0).reshape(1, 2), floats(7), domain=domain), floats(7, 1))
    equal(run(device, "UnfoldTensor", floats(1, 2, 3, 4), domain=domain, size=2, step=2), floats([1, 2], [3, 4]))
    y, places, counts = run(device, "Unique", floats(2, 1, 2), domain=domain, outputs=3)
    assert (y.tolist(), places.tolist(), counts.tolist()) == ([2, 1], [0, 1, 0], [2, 1])
    cost = floats([1, 9, 9], [1, 9, 9], [9, 1, 1])
    equal(
        run(device, "DynamicTimeWarping", cost, domain=domain),
        np.asarray([[0, 1, 2, 2], [0, 0, 1, 2]], np.int32),
    )
    a, b = floats([0, 0], [3, 4]), floats([3, 4])
    equal(run(device, "CDist", a, b, domain=domain, metric="euclidean"), floats([5], [0]))


@pytest.mark.parametrize(("size", "banned"), [(1, [0, 1, 2]), (2, [0, 1]), (3, [1]), (4, []), (9, [])])
def test_n_grams_do_not_repeat(device, size, banned):
    """The last token 2 was followed by 0 and 1, the last two tokens 0 2 by 1."""
    tokens, scores = ints([2, 0, 2, 1, 0, 2]), np.ones((1, 4), np.float32)
    got = run(device, "NGramRepeatBlock", tokens, scores, domain="com.microsoft", ngram_size=size)
    scores[0, banned] = -np.inf
    equal(got, scores)
