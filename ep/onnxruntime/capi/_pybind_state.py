"""The names of `onnxruntime_pybind11_state`, as onnxruntime's own Python code imports them."""

from ep.onnxruntime.capi.onnxruntime_pybind11_state import *  # noqa: F403
from ep.onnxruntime.capi.onnxruntime_pybind11_state import __all__  # noqa: F401
