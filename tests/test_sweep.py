"""Do random nodes give the same on every provider and on onnxruntime, but for what `docs/decisions.md` explains?

The long form, with more cases and seeds, is `benchmarks/sweep.py`.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
import sweep_cases
import sweeping
from conftest import require

SEED = 11
DECISIONS = Path(__file__).parents[1] / "docs" / "decisions.md"


@pytest.mark.parametrize("op", sorted(sweep_cases.MAKERS))
def test_random_nodes(op: str) -> None:
    """One case per opset and dtype; JAX, which compiles each, takes every tenth."""
    require("mlx")
    require("jax")
    has_oracle = importlib.util.find_spec("onnxruntime") is not None
    tally = sweeping.sweep([op], SEED, 1, ["mlx", "jax"], has_oracle, every=10)
    assert not tally.unexplained, "\n".join(tally.unexplained)
    assert tally.compared["mlx"] > tally.refused


def test_reasons_are_written_down() -> None:
    keys = set(re.findall(r"^\| `([a-z0-9-]+)` \|", DECISIONS.read_text(encoding="utf-8"), re.MULTILINE))
    assert keys == {reason.key for reason in sweeping.EXPLAINED}


def test_the_sweep_notices_differences() -> None:
    case = sweep_cases.Case("Abs", 13, [np.zeros(3, np.float32)])
    x = np.array([1, np.nan, -0.0], np.float32)
    assert not sweeping.differs(case, [x], [x.copy()])
    assert sweeping.differs(case, [x], [x + np.float32(1e-5)])
    assert sweeping.differs(case, [x], [np.nan_to_num(x)])
    assert sweeping.differs(case, [x], [x.astype(np.float64)])
    assert sweeping.differs(case, [x], [x[:2]])
    assert sweeping.differs(case, [x], "Fail: no") and not sweeping.differs(case, "InvalidInput: no", "Fail: no")
