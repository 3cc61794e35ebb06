"""Where do messages go? To stderr in onnxruntime's form, or to the callback that the user set."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from ep.onnxruntime.pybind import INT, integer

SEVERITIES = "VIWEF"
Callback = Callable[[int, str, str, str, str], None]


class _Logger:
    """The default logger of the process."""

    severity = 2
    callback: Callback | None = None


def log(severity: int, message: str, *, least: int = -1, logid: str = "") -> None:
    """Emits a message: 0 verbose, 1 info, 2 warning, 3 error, 4 fatal."""
    if severity < (_Logger.severity if least < 0 else least):
        return
    callback = _Logger.callback
    if callback is not None:
        try:
            callback(severity, "onnxruntime", logid, "ep", message)
            return
        except Exception as error:  # noqa: BLE001 - the user's function may fail in any way; the message is not lost
            failed = SimpleNamespace(
                exc_type=type(error), exc_value=error, exc_traceback=error.__traceback__, err_msg=None, object=callback
            )
            sys.unraisablehook(failed)
    now = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime())
    print(f"{now} [{SEVERITIES[severity]}:onnxruntime:{logid}, ep] {message}", file=sys.stderr)


def set_default_logger_severity(severity: int) -> None:
    """The least severity that is logged: 0 verbose, 1 info, 2 warning (the default), 3 error, 4 fatal."""
    _Logger.severity = _checked(severity)


def set_default_logger_verbosity(verbosity: int) -> None:
    """No effect: there are no verbose messages."""
    integer(verbosity, "set_default_logger_verbosity", f"(arg0: {INT}) -> None", verbosity)


def set_default_logger_callback(callback: Any, severity: int = 2) -> None:
    """Sends messages to `callback(severity, category, logid, location, message)`; `None` restores stderr."""
    _checked(severity)
    if callback is None:
        _Logger.callback = None
        return
    if not callable(callback):
        raise RuntimeError("callback must be a callable\n")
    _Logger.callback, _Logger.severity = callback, severity


def _checked(severity: int) -> int:
    number = integer(severity, "set_default_logger_severity", f"(arg0: {INT}) -> None", severity)
    if not 0 <= number <= 4:
        raise RuntimeError("Invalid logging severity. 0:Verbose, 1:Info, 2:Warning, 3:Error, 4:Fatal\n")
    return number
