"""Which operators does onnxruntime's quantizer know? None here, because it is not here; the tables are empty."""

from typing import Any

IntegerOpsRegistry: dict[str, Any] = {}
QDQRegistry: dict[str, Any] = {}
QLinearOpsRegistry: dict[str, Any] = {}
