"""Do trees, linear models, support vector machines and encoders give the scores and labels that they should?

Expected values are worked out by hand. Where onnxruntime departs from the specification, a comment says so.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from nodes import run_node
from onnx import numpy_helper

import ep

ML = "ai.onnx.ml"
NAN = float("nan")


def ml(device: str, op: str, *inputs: Any, version: int = 3, **attributes: Any) -> Any:
    return run_node(device, op, *inputs, domain=ML, version=version, **attributes)


def rows(*values: Any, dtype: Any = np.float32) -> np.ndarray:
    return np.asarray(values, dtype)


def texts(*values: str) -> np.ndarray:
    return np.asarray(values, object)


def near(got: np.ndarray, want: Any, tolerance: float = 1e-5) -> None:
    assert got.shape == np.shape(want)
    np.testing.assert_allclose(got, np.asarray(want), rtol=tolerance, atol=tolerance)


# Trees: a stump on one feature, whose true leaf is node 1 and whose false leaf is node 2


def stump(mode: str = "BRANCH_LEQ", threshold: float = 0.5, tree: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "nodes_treeids": [tree] * 3, "nodes_nodeids": [0, 1, 2], "nodes_featureids": [0, 0, 0],
        "nodes_modes": [mode, "LEAF", "LEAF"], "nodes_values": [threshold, 0.0, 0.0],
        "nodes_truenodeids": [1, 0, 0], "nodes_falsenodeids": [2, 0, 0], **more,
    }  # fmt: skip


def forest(*trees: dict[str, Any]) -> dict[str, Any]:
    return {name: [v for tree in trees for v in tree[name]] for name in trees[0]}


def regressor(targets: int = 1, **more: Any) -> dict[str, Any]:
    """Votes 10 for the true leaf and 20 for the false one."""
    votes = {
        "target_treeids": [0, 0], "target_nodeids": [1, 2], "target_ids": [0, targets - 1],
        "target_weights": [10.0, 20.0], "n_targets": targets,
    }  # fmt: skip
    return votes | more


@pytest.mark.parametrize(
    ("mode", "want"),
    [
        ("BRANCH_LEQ", [10, 10, 20]), ("BRANCH_LT", [10, 20, 20]), ("BRANCH_GTE", [20, 10, 10]),
        ("BRANCH_GT", [20, 20, 10]), ("BRANCH_EQ", [20, 10, 20]), ("BRANCH_NEQ", [10, 20, 10]),
    ],
)  # fmt: skip
def test_each_mode_decides_below_at_and_above_the_threshold(device, mode, want):
    got = ml(device, "TreeEnsembleRegressor", rows([0], [0.5], [1]), **stump(mode), **regressor())
    near(got[:, 0], want)


@pytest.mark.parametrize(("tracks", "want"), [(None, 20), ([0, 0, 0], 20), ([1, 0, 0], 10)])
@pytest.mark.parametrize("mode", ["BRANCH_LEQ", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ"])
def test_a_missing_value_takes_the_branch_that_the_node_names(device, mode, tracks, want):
    """Onnxruntime sends NaN to the true branch of BRANCH_NEQ even if the node tracks false."""
    more = {} if tracks is None else {"nodes_missing_value_tracks_true": tracks}
    got = ml(device, "TreeEnsembleRegressor", rows([NAN]), **stump(mode, **more), **regressor())
    assert got.item() == want


def test_thresholds_are_compared_in_the_precision_of_the_input(device):
    """0.1 as float32 is larger than 0.1 as float64, which is not rounded to it."""
    tree = stump("BRANCH_LT", np.float32(0.1).item())
    assert ml(device, "TreeEnsembleRegressor", rows([0.1]), **tree, **regressor(), version=1).item() == 20
    double = ml(device, "TreeEnsembleRegressor", rows([0.1], dtype=np.float64), **tree, **regressor())
    assert double.item() == 10 and double.dtype == np.float32


@pytest.mark.parametrize(("function", "want"), [("SUM", 8.0), ("AVERAGE", 3.0), ("MIN", -1.0), ("MAX", 6.5)])
def test_base_values_are_added_after_aggregation(device, function, want):
    """Two trees vote 6 and -1.5; SUM 4.5, AVERAGE 2.25, MIN -1.5 and MAX 6 before the base value."""
    base = want - {"SUM": 4.5, "AVERAGE": 2.25, "MIN": -1.5, "MAX": 6.0}[function]
    votes = {"target_treeids": [0, 1], "target_nodeids": [1, 2], "target_ids": [0, 0], "n_targets": 1}
    got = ml(
        device, "TreeEnsembleRegressor", rows([0.25]), **forest(stump(), stump(threshold=0.0, tree=1)), **votes,
        target_weights=[6.0, -1.5], aggregate_function=function, base_values=[base],
    )  # fmt: skip
    near(got, [[want]])


@pytest.mark.parametrize("function", ["MIN", "MAX"])
def test_targets_without_a_vote_are_zero(device, function):
    """The true leaf votes for target 0 only, the false one for target 1 only."""
    votes = regressor(2, aggregate_function=function, target_weights=[-3.0, 4.0])
    near(ml(device, "TreeEnsembleRegressor", rows([0], [1]), **stump(), **votes), [[-3, 0], [0, 4]])


def test_a_base_value_counts_for_a_target_without_votes(device):
    """Onnxruntime drops it."""
    got = ml(device, "TreeEnsembleRegressor", rows([0]), **stump(), **regressor(2), base_values=[0.5, 0.25])
    near(got, [[10.5, 0.25]])


def test_trees_that_vote_for_one_target_each(device):
    """Trees 0 and 2 vote for target 0, trees 1 and 3 for target 1."""
    trees = forest(*(stump(threshold=float(t), tree=t) for t in range(4)))
    votes = {
        "target_treeids": [t for t in range(4) for _ in "ab"], "target_nodeids": [1, 2] * 4,
        "target_ids": [0, 0, 1, 1] * 2, "target_weights": [1.0, 2, 4, 8, 16, 32, 64, 128], "n_targets": 2,
    }  # fmt: skip
    got = ml(device, "TreeEnsembleRegressor", rows([-1], [0.5], [1.5], [9]), **trees, **votes)
    near(got, [[17, 68], [18, 68], [18, 72], [34, 136]])


def test_nodes_may_come_in_any_order(device):
    """The root is the node that is no child, wherever it stands."""
    shuffled = {name: [values[i] for i in (2, 0, 1)] for name, values in stump().items()}
    near(ml(device, "TreeEnsembleRegressor", rows([0], [1]), **shuffled, **regressor()), [[10], [20]])


def test_a_tree_may_be_a_single_leaf(device):
    leaf = {name: values[-1:] if name == "nodes_modes" else [0] for name, values in stump().items()}
    leaf["nodes_values"] = [0.0]
    votes = {"target_treeids": [0], "target_nodeids": [0], "target_ids": [0], "target_weights": [7.0]}
    near(ml(device, "TreeEnsembleRegressor", rows([0], [1]), **leaf, **votes, n_targets=1), [[7], [7]])


@pytest.mark.parametrize("leaves", [5, 40, 70])
def test_long_thin_trees(device, leaves):
    """A chain: node i asks x ≤ i, and answers i on its true side. From 65 leaves on, a row walks down."""
    n = leaves - 1
    tree = {
        "nodes_treeids": [0] * (2 * n + 1), "nodes_nodeids": list(range(2 * n + 1)),
        "nodes_featureids": [0] * (2 * n + 1), "nodes_modes": ["BRANCH_LEQ"] * n + ["LEAF"] * (n + 1),
        "nodes_values": [float(i) for i in range(n)] + [0.0] * (n + 1),
        "nodes_truenodeids": list(range(n, 2 * n)) + [0] * (n + 1),
        "nodes_falsenodeids": [*range(1, n), 2 * n] + [0] * (n + 1),
    }  # fmt: skip
    votes = {
        "target_treeids": [0] * (n + 1), "target_nodeids": list(range(n, 2 * n + 1)),
        "target_ids": [0] * (n + 1), "target_weights": [float(i) for i in range(n + 1)], "n_targets": 1,
    }  # fmt: skip
    x = np.linspace(-1, leaves + 1, 33, dtype=np.float32)[:, None]
    for compile_ in ("off", "on"):
        got = ml(device, "TreeEnsembleRegressor", x, **tree, **votes, compile=compile_)
        near(got, np.clip(np.ceil(x), 0, n))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nodes_truenodeids": [7, 0, 0]}, "tree 0 of a tree ensemble refers to its node 7, which it lacks"),
        ({"nodes_nodeids": [0, 1, 1]}, "two nodes of one number in one tree"),
        ({"nodes_modes": ["BRANCH_IN", "LEAF", "LEAF"]}, "the unknown mode 'BRANCH_IN'"),
        ({"nodes_values": [0.5]}, "have the lengths"),
        ({"nodes_featureids": [4, 0, 0]}, "the trees read 5 features, but the input has 1"),
    ],
)
def test_trees_that_are_none_are_refused(change, message):
    with pytest.raises(ep.EpError, match=message):
        ml("host", "TreeEnsembleRegressor", rows([0]), **(stump() | change), **regressor())


# Classifiers of trees


def votes_for(ids: list[int], nodes: list[int], weights: list[float], **more: Any) -> dict[str, Any]:
    return {"class_ids": ids, "class_nodeids": nodes, "class_treeids": [0] * len(ids), "class_weights": weights} | more


def test_the_label_is_the_class_with_the_largest_score(device):
    """Onnxruntime answers 1, as if it were a label, whenever class 1 of two has a positive score."""
    votes = votes_for([0, 1, 0, 1], [1, 1, 2, 2], [0.9, 0.1, 0.2, 0.8], classlabels_int64s=[10, 20])
    label, scores = ml(device, "TreeEnsembleClassifier", rows([0], [1]), **stump(), **votes, outputs=2)
    assert label.tolist() == [10, 20] and label.dtype == np.int64
    near(scores, [[0.9, 0.1], [0.2, 0.8]])


def test_both_classes_get_their_base_value(device):
    """Onnxruntime gives the sum of the first score and the second base value, and its negative."""
    votes = votes_for([0, 1, 0, 1], [1, 1, 2, 2], [0.9, 0.1, 0.2, 0.8], classlabels_int64s=[0, 1])
    got = ml(device, "TreeEnsembleClassifier", rows([0], [1]), **stump(), **votes, base_values=[1.0, 2.0], outputs=2)
    assert got[0].tolist() == [1, 1]
    near(got[1], [[1.9, 2.1], [1.2, 2.8]])


@pytest.mark.parametrize(
    ("weights", "post_transform", "label", "scores"),
    [
        ([0.3, 0.7], "NONE", [5, 6], [[0.7, 0.3], [0.3, 0.7]]),  # probabilities: half decides
        ([-0.3, 0.7], "NONE", [5, 6], [[0.3, -0.3], [-0.7, 0.7]]),  # margins: the sign decides
        ([-1.0, 1.0], "LOGISTIC", [5, 6], [[0.7310586, 0.2689414], [0.2689414, 0.7310586]]),
    ],
)
def test_votes_for_one_of_two_classes_stand_for_both(device, weights, post_transform, label, scores):
    votes = votes_for([0, 0], [1, 2], weights, classlabels_int64s=[5, 6], post_transform=post_transform)
    got = ml(device, "TreeEnsembleClassifier", rows([0], [1]), **stump(), **votes, outputs=2)
    assert got[0].tolist() == label
    near(got[1], scores)


def test_string_labels_come_from_the_host_and_scores_from_the_device(device):
    votes = votes_for([0, 1, 2], [1, 2, 2], [1.0, 3.0, 2.0], classlabels_strings=["no", "maybe", "yes"])
    label, scores = ml(device, "TreeEnsembleClassifier", rows([0], [1]), **stump(), **votes, outputs=2)
    assert label.tolist() == ["no", "maybe"] and label.dtype == object
    near(scores, [[1, 0, 0], [0, 3, 2]])


def test_softmax_zero_leaves_out_scores_of_zero(device):
    votes = votes_for(
        [0, 1, 2], [1, 1, 2], [1.0, 2.0, 3.0], classlabels_int64s=[0, 1, 2], post_transform="SOFTMAX_ZERO"
    )
    _, scores = ml(device, "TreeEnsembleClassifier", rows([0], [1]), **stump(), **votes, outputs=2)
    near(scores, [[0.2689414, 0.7310586, 0], [0, 0, 1]])


# TreeEnsemble, version 5: one node whose branches are the leaves 0 and 1


def splits(mode: int, dtype: Any = np.float32, **more: Any) -> dict[str, Any]:
    return {
        "tree_roots": [0], "nodes_featureids": [0], "nodes_truenodeids": [0], "nodes_falsenodeids": [1],
        "nodes_modes": numpy_helper.from_array(np.array([mode], np.uint8)), "nodes_trueleafs": [1],
        "nodes_splits": numpy_helper.from_array(np.array([0.5], dtype)), "nodes_falseleafs": [1],
        "leaf_targetids": [0, 0], "leaf_weights": numpy_helper.from_array(np.array([10, 20], dtype)),
        "n_targets": 1, **more,
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_splits_keep_the_dtype_of_the_input(device, dtype):
    got = ml(device, "TreeEnsemble", rows([0], [0.5], [1], dtype=dtype), **splits(0, dtype), version=5)
    assert got.dtype == dtype and got[:, 0].tolist() == [10, 10, 20]


@pytest.mark.parametrize("tracks", [0, 1])
def test_members_of_a_set_take_the_true_branch(device, tracks):
    members = numpy_helper.from_array(np.array([7, -2, 3, 0.5, 1, NAN], np.float32))
    x = np.array([[v] for v in (-3, -2, 0.5, 0.75, 1, 2, 3, 7, 8, NAN)], np.float32)
    more = {"membership_values": members, "nodes_missing_value_tracks_true": [tracks]}
    got = ml(device, "TreeEnsemble", x, **splits(6, **more), version=5)
    want = [20, 10, 10, 20, 10, 20, 10, 10, 20, 10 if tracks else 20]
    assert got[:, 0].tolist() == want


# Linear models and support vector machines


def test_a_linear_classifier_takes_the_largest_of_its_scores(device):
    model = {"coefficients": [1.0, 0.0, 0.0, 1.0, -1.0, -1.0], "intercepts": [0.0, 0.5, 3.0]}
    label, scores = ml(
        device, "LinearClassifier", rows([1, 2], [-1, -1]), **model, classlabels_strings=list("abc"), outputs=2
    )
    near(scores, [[1, 2.5, 0], [-1, -0.5, 5]])
    assert label.tolist() == ["b", "c"]


@pytest.mark.parametrize(
    ("post_transform", "scores"),
    [("NONE", [[-1, 2], [2, -1]]), ("LOGISTIC", [[0.1192029, 0.8807971], [0.7310586, 0.2689414]])],
)
def test_one_score_stands_for_two_classes(device, post_transform, scores):
    label, got = ml(
        device, "LinearClassifier", rows([2], [-1]), coefficients=[1.0], intercepts=[0.0],
        classlabels_ints=[4, 9], post_transform=post_transform, outputs=2,
    )  # fmt: skip
    assert label.tolist() == [9, 4]
    near(got, scores)


def test_a_single_target_is_transformed_too(device):
    """Onnxruntime ignores LOGISTIC for a single target; the specification knows no such exception."""
    got = ml(device, "LinearRegressor", rows([0], [1]), coefficients=[1.0], post_transform="LOGISTIC")
    near(got, [[0.5], [0.7310586]])


@pytest.mark.parametrize(
    ("norm", "want"), [("MAX", [[1, -2], [-1, 1], [0, 0]]), ("L1", [[1 / 3, -2 / 3], [-0.5, 0.5], [0, 0]])]
)
def test_normalizer_keeps_signs_and_rows_of_zeros(device, norm, want):
    near(ml(device, "Normalizer", rows([1, -2], [-3, 3], [0, 0]), norm=norm), want)


def test_imputer_replaces_nan_per_column(device):
    got = ml(device, "Imputer", rows([NAN, 1], [2, NAN]), imputed_value_floats=[8.0, 9.0], replaced_value_float=NAN)
    near(got, [[8, 1], [2, 9]])


@pytest.mark.parametrize(
    ("kernel", "want"),
    [
        ("LINEAR", lambda x: x),
        ("POLY", lambda x: ((x + 1) ** 3 - (1 - x) ** 3) / 2),
        ("RBF", lambda x: (np.exp(-((x - 1) ** 2)) - np.exp(-((x + 1) ** 2))) / 2),
        ("SIGMOID", lambda x: (np.tanh(x + 1) - np.tanh(1 - x)) / 2),
    ],
)
def test_kernels_of_a_regressor(device, kernel, want):
    """Support vectors 1 and -1 with weights ½ and -½, γ and coef0 1, degree 3."""
    x = np.linspace(-2, 2, 5, dtype=np.float32)
    got = ml(
        device, "SVMRegressor", x[:, None], kernel_type=kernel, support_vectors=[1.0, -1.0], n_supports=2,
        coefficients=[0.5, -0.5], rho=[0.0], kernel_params=[1.0, 1.0, 3.0],
    )  # fmt: skip
    near(got[:, 0], want(x.astype(np.float64)))


def test_pairs_of_classes_vote(device):
    """Three classes with one support vector each; every pair is decided by the kernel of its two vectors."""
    label, scores = ml(
        device, "SVMClassifier", rows([3, 0, 0], [0, 0, 2]), kernel_type="LINEAR", kernel_params=[0.0, 0.0, 0.0],
        support_vectors=[1.0, 0, 0, 0, 1, 0, 0, 0, 1], vectors_per_class=[1, 1, 1], rho=[0.0, 0.0, 0.0],
        coefficients=[1.0, -1.0, -1.0, 1.0, 1.0, -1.0], classlabels_ints=[7, 8, 9], outputs=2,
    )  # fmt: skip
    near(scores, [[3, 3, 0], [0, -2, -2]])  # of 7 against 8, 7 against 9, 8 against 9
    assert label.tolist() == [7, 9]


def test_probabilities_of_equal_pairs_are_equal(device):
    _, scores = ml(
        device, "SVMClassifier", rows([0, 0, 0]), kernel_type="LINEAR", kernel_params=[0.0, 0.0, 0.0],
        support_vectors=[1.0, 0, 0, 0, 1, 0, 0, 0, 1], vectors_per_class=[1, 1, 1], rho=[0.0, 0.0, 0.0],
        coefficients=[1.0] * 6, classlabels_ints=[7, 8, 9], prob_a=[-1.0] * 3, prob_b=[0.0] * 3, outputs=2,
    )  # fmt: skip
    near(scores, [[1 / 3] * 3])


# Encoders


@pytest.mark.parametrize(("version", "want"), [(2, [10, 12, -1]), (4, [11, 12, -1])])
def test_of_equal_keys_the_first_counts_and_from_version_4_on_the_last(device, version, want):
    got = ml(
        device, "LabelEncoder", rows(1, 2, 3, dtype=np.int64), keys_int64s=[1, 1, 2],
        values_int64s=[10, 11, 12], version=version,
    )  # fmt: skip
    assert got.tolist() == want


def test_nan_is_a_key(device):
    """Onnxruntime does not find it before version 4, although the specification says that it may be mapped."""
    got = ml(
        device, "LabelEncoder", rows(NAN, 0, -0.0, 5), keys_floats=[0.0, NAN], values_int64s=[1, 2],
        default_int64=-7, version=2,
    )  # fmt: skip
    assert got.tolist() == [2, 1, 1, -7]


def test_many_keys_are_searched(device):
    keys = np.random.default_rng(0).permutation(3000)[:1000]
    got = ml(
        device, "LabelEncoder", np.arange(3000).reshape(60, 50), keys_int64s=keys.tolist(),
        values_floats=[float(k) / 2 for k in keys], default_float=-1.0, version=2,
    )  # fmt: skip
    known = np.isin(np.arange(3000), keys)
    near(got, np.where(known, np.arange(3000) / 2, -1).reshape(60, 50))


@pytest.mark.parametrize("x", [texts("Amy", "Dori"), rows(5, 0, dtype=np.int64)], ids=["strings", "integers"])
def test_category_mapper_maps_both_ways(device, x):
    got = ml(device, "CategoryMapper", x, cats_strings=["Amy", "Sally"], cats_int64s=[5, 6])
    assert got.tolist() == ([5, -1] if x.dtype == object else ["Amy", "_Unused"])


def test_one_hot_of_unknown_categories_is_zero_or_refused(device):
    x = texts("b", "z").reshape(2, 1)
    near(ml(device, "OneHotEncoder", x, cats_strings=["a", "b"]), [[[0, 1]], [[0, 0]]])
    with pytest.raises(ep.EpError, match="does not know the category 'z'"):
        ml(device, "OneHotEncoder", x, cats_strings=["a", "b"], zeros=0)


def test_one_hot_truncates_numbers_and_the_last_of_equal_categories_counts(device):
    got = ml(device, "OneHotEncoder", rows([1.7, -2.2]), cats_int64s=[1, -2, 1])
    near(got, [[[0, 0, 1], [0, 1, 0]]])


def test_features_are_cut_and_filled_to_their_sizes(device):
    got = ml(device, "FeatureVectorizer", rows([1, 2], [3, 4]), rows([5, 6], [7, 8]), inputdimensions=[3, 1])
    near(got, [[1, 2, 0, 5], [3, 4, 0, 7]])


def test_extracted_features_of_a_vector_are_a_row(device):
    got = ml(device, "ArrayFeatureExtractor", rows(1, 2, 3), rows(2, 0, dtype=np.int64))
    near(got, [[3, 1]])


def test_zip_map_makes_a_map_of_each_row(device):
    got = ml(device, "ZipMap", rows([0.25, 0.75]), classlabels_strings=["a", "b"])
    assert got == [{"a": 0.25, "b": 0.75}]
