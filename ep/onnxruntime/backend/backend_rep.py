"""What does `prepare` return? A session with the one method that onnx's tools call."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx.backend.base import BackendRep

from ep.onnxruntime.options import RunOptions

_OPTIONS = ("log_severity_level", "log_verbosity_level", "logid")


class OnnxRuntimeBackendRep(BackendRep):
    """A model, ready to run."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def run(self, inputs: Any, **kwargs: Any) -> list[Any]:  # type: ignore[override]
        """Runs the model on arrays in the order of its inputs: a list of them, or a single one."""
        options = RunOptions()
        for name, value in kwargs.items():
            if name in _OPTIONS:
                setattr(options, name, value)
        declared = self._session.get_inputs()
        if isinstance(inputs, list | tuple):
            feed = {value.name: array for value, array in zip(declared, inputs, strict=False)}
        elif len(declared) == 1:
            feed = {declared[0].name: inputs if isinstance(inputs, dict) else np.asarray(inputs)}
        else:
            raise RuntimeError(f"Model expect {len(declared)} inputs")
        return self._session.run(None, feed, options)
