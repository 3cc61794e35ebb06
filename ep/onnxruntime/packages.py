"""What of onnxruntime's API has no counterpart here? Its model packages; the names exist and say so."""

from __future__ import annotations

from typing import Any

from ep.onnxruntime.options import failure_of
from ep.onnxruntime.pybind import STATE

_INSTEAD = "load the model file inside the package by its path."


class ModelPackage:
    """Unsupported: packages of compiled models are onnxruntime's own."""

    __module__ = STATE

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        raise failure_of(type(self).__name__, _INSTEAD)

    @staticmethod
    def open(package_root: str, *arguments: Any, **keywords: Any) -> ModelPackage:
        """Unsupported: packages of compiled models are onnxruntime's own."""
        raise failure_of("ModelPackage", _INSTEAD)


class ModelPackageContext(ModelPackage):
    """Unsupported: packages of compiled models are onnxruntime's own."""

    __module__ = STATE


class ModelPackageComponentContext(ModelPackage):
    """Unsupported: packages of compiled models are onnxruntime's own."""

    __module__ = STATE


class ModelPackageOptions(ModelPackage):
    """Unsupported: packages of compiled models are onnxruntime's own."""

    __module__ = STATE


class OrtExternalInitializerInfo:
    """Where an initializer lies in a file; `ModelCompiler` does not ask for it."""

    __module__ = STATE

    def __init__(self, filepath: str, file_offset: int, byte_size: int) -> None:
        self._where = filepath, file_offset, byte_size

    filepath = property(lambda self: self._where[0], doc="The file's path, relative to the model.")
    file_offset = property(lambda self: self._where[1], doc="Where the data begin.")
    byte_size = property(lambda self: self._where[2], doc="How many bytes they are.")


class OrtEpContextData:
    """Unsupported: `ModelCompiler` writes no EPContext data."""

    __module__ = STATE


class OrtEpContextDataBuffer:
    """Unsupported: compiled models are read from files."""

    __module__ = STATE
