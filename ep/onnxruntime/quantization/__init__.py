"""What of onnxruntime's quantization can clients import? Its constants and interfaces; quantizing itself is refused.

Quantized models run here. To make one, use the genuine package once, on any machine.
"""

from __future__ import annotations

import abc
from enum import Enum
from typing import Any, NoReturn

from ep.onnxruntime.options import failure_of
from ep.onnxruntime.quantization.calibrate import CalibraterBase, CalibrationMethod, create_calibrator


class QuantType(Enum):
    """Element types of quantized tensors."""

    QInt8 = 0
    QUInt8 = 1
    QFLOAT8E4M3FN = 2
    QInt16 = 3
    QUInt16 = 4
    QInt4 = 5
    QUInt4 = 6

    def __str__(self) -> str:
        return self.name

    @staticmethod
    def from_string(t: str) -> QuantType:
        """The member of a name; `ValueError` if there is none."""
        try:
            return QuantType[t]
        except KeyError:
            raise ValueError(t) from None


class QuantFormat(Enum):
    """How quantized models are written."""

    QOperator = 0
    QDQ = 1

    def __str__(self) -> str:
        return self.name

    @staticmethod
    def from_string(format: str) -> QuantFormat:
        """The member of a name; `ValueError` if there is none."""
        try:
            return QuantFormat[format]
        except KeyError:
            raise ValueError(format) from None


class QuantizationMode(Enum):
    """Which operators quantized models use."""

    IntegerOps = 0
    QLinearOps = 1


class CalibrationDataReader(abc.ABC):
    """An interface that clients implement: `get_next` gives the feeds of the next run, or `None`."""

    @abc.abstractmethod
    def get_next(self) -> dict[str, Any] | None:
        """The next feeds."""


def _refuse(name: str) -> NoReturn:
    instead = "quantize the model where the genuine onnxruntime is installed; it runs here."
    raise failure_of(f"onnxruntime.quantization.{name}", instead)


def quantize_dynamic(*arguments: Any, **keywords: Any) -> NoReturn:
    """Unsupported: quantize the model where the genuine onnxruntime is installed; it runs here."""
    _refuse("quantize_dynamic")


def quantize_static(*arguments: Any, **keywords: Any) -> NoReturn:
    """Unsupported: quantize the model where the genuine onnxruntime is installed; it runs here."""
    _refuse("quantize_static")


def quantize(*arguments: Any, **keywords: Any) -> NoReturn:
    """Unsupported: quantize the model where the genuine onnxruntime is installed; it runs here."""
    _refuse("quantize")


__all__ = [
    "CalibraterBase",
    "CalibrationDataReader",
    "CalibrationMethod",
    "QuantFormat",
    "QuantType",
    "QuantizationMode",
    "create_calibrator",
    "quantize",
    "quantize_dynamic",
    "quantize_static",
]
