"""Does MLX borrow as Metal demands: whole pages, cut to the data without copying?

Metal shares memory and Linux does not, so here a copy stands in for what would be shared.
"""

import mmap

import numpy as np
import pytest
from arrays import dtype_of, sample

from ep import discovery
from ep.tensor import TensorView


@pytest.fixture
def wrapped(monkeypatch):
    """What MLX was asked to wrap."""
    import mlx.core as mx

    from ep.backends.mlx import memory

    asked = []

    def asarray(array, *, copy):
        assert copy is False
        asked.append(array)
        return mx.array(array)

    monkeypatch.setattr(memory.mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(memory.mx, "asarray", asarray)
    return asked


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int64", "bool"])
@pytest.mark.parametrize("offset", [0, 8, mmap.PAGESIZE, mmap.PAGESIZE - 8])
def test_whole_pages_are_wrapped_and_the_data_sliced(wrapped, name, offset):
    provider = discovery.provider("mlx")
    file = mmap.mmap(-1, 4 * mmap.PAGESIZE)
    count = 1000
    array = np.frombuffer(file, dtype_of(name), count, offset)
    np.frombuffer(file, dtype_of(name), count, offset)[:] = sample(name, (count,))
    theirs, reason = provider.from_view(TensorView.from_array(array))
    assert reason is None and provider.to_view(theirs).numpy().tobytes() == array.tobytes()
    (pages,) = wrapped
    assert pages.ctypes.data % mmap.PAGESIZE == 0 and pages.nbytes % mmap.PAGESIZE == 0
    assert 0 <= array.ctypes.data - pages.ctypes.data <= pages.nbytes - array.nbytes


def test_misaligned_data_are_copied_with_the_reason(wrapped):
    provider = discovery.provider("mlx")
    array = np.zeros(64, np.uint8)[2:42].view(np.float16)
    theirs, reason = provider.from_view(TensorView.from_array(array))
    assert not wrapped and "not a multiple of 4" in reason
    assert provider.to_view(theirs).numpy().tobytes() == array.tobytes()
