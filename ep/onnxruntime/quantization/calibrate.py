"""How are ranges for quantization found? By the genuine package; its constants can be imported here."""

from __future__ import annotations

from enum import Enum
from typing import Any, NoReturn

from ep.onnxruntime.options import failure_of


class CalibrationMethod(Enum):
    """Ways to find ranges."""

    MinMax = 0
    Entropy = 1
    Percentile = 2
    Distribution = 3


class CalibraterBase:
    """Unsupported: calibrate the model where the genuine onnxruntime is installed."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        create_calibrator()


def create_calibrator(*arguments: Any, **keywords: Any) -> NoReturn:
    """Unsupported: calibrate the model where the genuine onnxruntime is installed."""
    raise failure_of("onnxruntime.quantization.calibrate", "calibrate the model where the genuine one is installed.")
