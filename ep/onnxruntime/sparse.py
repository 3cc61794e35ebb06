"""How does onnxruntime's API hold a sparse tensor? Values, indices and the shape that they stand for.

Models take and give dense tensors only: sparse initializers become dense when they are loaded.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ep.onnxruntime import enums
from ep.onnxruntime.elements import NAMES, number_of
from ep.onnxruntime.pybind import COLLECTION, STATE, unpicklable

_FORMATS = {1: "COO", 2: "CSR(C)", 4: "BlockSparse"}


class _View:
    """Indices of a sparse tensor."""

    __module__ = STATE
    __reduce_ex__ = unpicklable

    def __init__(self, **indices: np.ndarray) -> None:
        self._indices = indices


class SparseCooView(_View):
    """The coordinates of the values."""

    __module__ = STATE

    def indices(self) -> np.ndarray:
        """Positions in the flattened tensor, or rows of coordinates."""
        return self._indices["indices"]


class SparseCsrView(_View):
    """The compressed rows of the values."""

    __module__ = STATE

    def inner(self) -> np.ndarray:
        """The column of each value."""
        return self._indices["inner"]

    def outer(self) -> np.ndarray:
        """Where each row begins."""
        return self._indices["outer"]


class SparseBlockSparseView(_View):
    """The blocks of the values."""

    __module__ = STATE

    def indices(self) -> np.ndarray:
        """The coordinates of each block."""
        return self._indices["indices"]


class CSparseTensor:
    """Values, indices and dense shape."""

    __module__, __qualname__ = STATE, "SparseTensor"
    __reduce_ex__ = unpicklable

    def __init__(self, form: Any, dense_shape: Any, values: np.ndarray, **indices: np.ndarray) -> None:
        self._form, self._values = form, _read_only(values)
        self._shape = np.asarray(dense_shape, np.int64)
        self._indices = {name: _read_only(np.asarray(array)) for name, array in indices.items()}

    @staticmethod
    def sparse_coo_from_numpy(dense_shape: Any, values: np.ndarray, coo_indices: Any, ort_device: Any) -> CSparseTensor:
        """From values and their positions."""
        del ort_device
        return CSparseTensor(enums.OrtSparseFormat.ORT_SPARSE_COO, dense_shape, values, indices=coo_indices)

    @staticmethod
    def sparse_csr_from_numpy(
        dense_shape: Any, values: np.ndarray, inner_indices: Any, outer_indices: Any, ort_device: Any
    ) -> CSparseTensor:
        """From values, their columns, and where rows begin."""
        del ort_device
        rows, count = int(dense_shape[0]), len(outer_indices)
        if count not in (0, rows + 1):
            raise RuntimeError(f"Outer index count must be rows + 1 or zero. Got: {count} rows: {rows}")
        form = enums.OrtSparseFormat.ORT_SPARSE_CSRC
        return CSparseTensor(form, dense_shape, values, inner=inner_indices, outer=outer_indices)

    @staticmethod
    def blocksparse_from_numpy(
        dense_shape: Any, values: np.ndarray, block_indices: Any, ort_device: Any
    ) -> CSparseTensor:
        """From blocks and their coordinates."""
        del ort_device
        form = enums.OrtSparseFormat.ORT_SPARSE_BLOCK_SPARSE
        return CSparseTensor(form, dense_shape, values, indices=block_indices)

    def values(self) -> np.ndarray:
        """The values."""
        return self._values

    def dense_shape(self) -> list[int]:
        """The shape."""
        return self._shape.tolist()

    def format(self) -> Any:
        """An `OrtSparseFormat`."""
        return self._form

    def data_type(self) -> str:
        """`sparse_tensor(float)`."""
        return f"sparse_tensor({NAMES[number_of(self._values.dtype)]})"

    def device_name(self) -> str:
        """`cpu`."""
        return "cpu"

    def _view(self, form: Any, view: type[_View]) -> Any:
        if self._form != form:
            raise RuntimeError(f"This sparse tensor does not contain {_FORMATS[int(form)]} format\n")
        return view(**self._indices)

    def get_coo_data(self) -> SparseCooView:
        """The coordinates."""
        return self._view(enums.OrtSparseFormat.ORT_SPARSE_COO, SparseCooView)

    def get_csrc_data(self) -> SparseCsrView:
        """The compressed rows."""
        return self._view(enums.OrtSparseFormat.ORT_SPARSE_CSRC, SparseCsrView)

    def get_blocksparse_data(self) -> SparseBlockSparseView:
        """The blocks."""
        return self._view(enums.OrtSparseFormat.ORT_SPARSE_BLOCK_SPARSE, SparseBlockSparseView)

    def to_cuda(self, ort_device: Any) -> CSparseTensor:
        """Unsupported: sparse tensors stay on the host."""
        raise RuntimeError("Cuda is not available in this build: sparse tensors stay on the host in ep.")


def _read_only(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.flags.writeable = False
    return view


class SparseTensor:
    """A sparse tensor, such as `SparseTensor.sparse_coo_from_numpy` makes it."""

    __module__ = COLLECTION

    def __init__(self, sparse_tensor: CSparseTensor) -> None:
        if not isinstance(sparse_tensor, CSparseTensor):
            raise ValueError(f"`Provided object` needs to be of type `{STATE}.SparseTensor`")
        self._tensor = sparse_tensor

    def _get_c_tensor(self) -> CSparseTensor:
        return self._tensor

    @classmethod
    def sparse_coo_from_numpy(
        cls, dense_shape: Any, values: np.ndarray, coo_indices: Any, ort_device: Any
    ) -> SparseTensor:
        """From values and their positions: flat ones, or rows of coordinates."""
        return cls(CSparseTensor.sparse_coo_from_numpy(dense_shape, values, coo_indices, ort_device))

    @classmethod
    def sparse_csr_from_numpy(
        cls, dense_shape: Any, values: np.ndarray, inner_indices: Any, outer_indices: Any, ort_device: Any
    ) -> SparseTensor:
        """From values, their columns, and where rows begin."""
        made = CSparseTensor.sparse_csr_from_numpy(dense_shape, values, inner_indices, outer_indices, ort_device)
        return cls(made)

    def values(self) -> np.ndarray:
        """The values."""
        return self._tensor.values()

    def as_coo_view(self) -> SparseCooView:
        """The coordinates."""
        return self._tensor.get_coo_data()

    def as_csrc_view(self) -> SparseCsrView:
        """The compressed rows."""
        return self._tensor.get_csrc_data()

    def as_blocksparse_view(self) -> SparseBlockSparseView:
        """The blocks."""
        return self._tensor.get_blocksparse_data()

    def to_cuda(self, ort_device: Any) -> SparseTensor:
        """Unsupported: sparse tensors stay on the host."""
        return SparseTensor(self._tensor.to_cuda(ort_device))

    def format(self) -> Any:
        """An `OrtSparseFormat`."""
        return self._tensor.format()

    def dense_shape(self) -> list[int]:
        """The shape."""
        return self._tensor.dense_shape()

    def data_type(self) -> str:
        """`sparse_tensor(float)`."""
        return self._tensor.data_type()

    def device_name(self) -> str:
        """`cpu`."""
        return self._tensor.device_name()
