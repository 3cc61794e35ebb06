"""Which exceptions does onnxruntime raise, and which of them says what an error of `ep` says?"""

from __future__ import annotations

import re
from typing import Any

from ep.errors import EpError, IndexOutOfRange, InvalidInput, InvalidModel, UnsupportedModel
from ep.onnxruntime.pybind import STATE

PREFIX = "[ONNXRuntimeError] : "


def _status(name: str, code: int, label: str, doc: str) -> Any:
    """An exception class of one status code; all of them are direct subclasses of `Exception`, as onnxruntime's."""
    body = {"__module__": STATE, "__doc__": doc, "code": code, "label": label, "__reduce__": _reduce}
    return type(name, (Exception,), body)


def _reduce(self: Any) -> Any:
    return rebuild, (type(self).__name__, self.args)


def rebuild(name: str, arguments: tuple[Any, ...]) -> Exception:
    """The exception again, for unpickling under whatever name this package was imported."""
    return globals()[name](*arguments)


Fail: Any = _status("Fail", 1, "FAIL", "A node failed, or the model breaks a rule of its types.")
InvalidArgument: Any = _status("InvalidArgument", 2, "INVALID_ARGUMENT", "A feed or a name does not fit the model.")
NoSuchFile: Any = _status("NoSuchFile", 3, "NO_SUCHFILE", "The model file is not there.")
NoModel: Any = _status("NoModel", 4, "NO_MODEL", "Never raised here.")
EngineError: Any = _status("EngineError", 5, "ENGINE_ERROR", "Never raised here.")
RuntimeException: Any = _status(
    "RuntimeException", 6, "RUNTIME_EXCEPTION", "Never raised here (nor by 1.32 for nodes)."
)
InvalidProtobuf: Any = _status("InvalidProtobuf", 7, "INVALID_PROTOBUF", "The model file cannot be parsed.")
ModelLoaded: Any = _status("ModelLoaded", 8, "MODEL_LOADED", "Never raised here.")
NotImplemented_: Any = _status("NotImplemented", 9, "NOT_IMPLEMENTED", "An operator, or a function, is not supported.")
InvalidGraph: Any = _status("InvalidGraph", 10, "INVALID_GRAPH", "The model breaks the ONNX specification.")
EPFail: Any = _status("EPFail", 11, "EP_FAIL", "A provider is not available.")
ModelLoadCanceled: Any = _status("ModelLoadCanceled", 12, "MODEL_LOAD_CANCELED", "Loading was cancelled.")
ModelRequiresCompilation: Any = _status("ModelRequiresCompilation", 13, "MODEL_REQUIRES_COMPILATION", "Never raised.")
NotFound: Any = _status("NotFound", 14, "NOT_FOUND", "Never raised here.")
DeviceReset: Any = _status("DeviceReset", 15, "DEVICE_RESET", "Never raised here.")
NotImplemented = NotImplemented_

NAMES = (
    *("Fail", "InvalidArgument", "NoSuchFile", "NoModel", "EngineError", "RuntimeException", "InvalidProtobuf"),
    *("ModelLoaded", "NotImplemented", "InvalidGraph", "EPFail", "ModelLoadCanceled", "ModelRequiresCompilation"),
    *("NotFound", "DeviceReset"),
)


def failure(kind: Any, message: str) -> Exception:
    """An exception with the text that onnxruntime gives to this status."""
    return kind(f"{PREFIX}{kind.code} : {kind.label} : {message}")


def bare(error: Exception) -> str:
    """The message of an exception without the prefix of its status."""
    return re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", str(error))


_NODE = re.compile(r"node '(?P<name>.*?)' \((?:[\w.]*::)?(?P<op>\w+), opset")


def while_running(error: EpError) -> Exception:
    """What a failed run raises: the node where it is known, and the whole text of the error."""
    kind = InvalidArgument if isinstance(error, InvalidInput) else Fail
    found = _NODE.search(str(error))
    reason = str(error)
    if isinstance(error, IndexOutOfRange):
        limits = f"[{error.low},{error.high}]"
        reason = f"indices element out of data bounds, idx={error.index} must be within the inclusive range {limits}"
    return failure(kind, reason if found is None else in_node(found["op"], found["name"], reason))


def in_node(op: str, name: str, reason: str) -> str:
    """What onnxruntime says of a node that failed."""
    return f"Non-zero status code returned while running {op} node. Name:'{name}' Status Message: {reason}"


def while_loading(error: EpError, where: str) -> Exception:
    """What a failed load raises; `where` is what onnxruntime says before the reason for models from files."""
    if isinstance(error, UnsupportedModel):
        return failure(NotImplemented_, f"{where}Could not find an implementation: {error}")
    if isinstance(error, InvalidModel) and "external" in str(error):
        return failure(Fail, f"External data path validation failed for initializer: {error}")
    if isinstance(error, InvalidModel):
        return failure(InvalidGraph, f"{where}This is an invalid model. {error}")
    return failure(EPFail, f"{where}{error}")
