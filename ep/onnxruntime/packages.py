"""What of onnxruntime's API has no counterpart here? Its model packages; the names exist and say so."""

from __future__ import annotations

from typing import Any, NoReturn

from ep.onnxruntime.options import failure_of
from ep.onnxruntime.pybind import STATE

_WHAT = "Unsupported: packages of compiled models are onnxruntime's own."


def _refuse(self: Any = None, *arguments: Any, **keywords: Any) -> NoReturn:
    raise failure_of("model packages", "load the model file inside the package by its path.")


_refuse.__doc__ = _WHAT


def _unsupported(name: str, *methods: str) -> Any:
    """A class that cannot be made, with all the methods that onnxruntime's has."""
    body = {"__module__": STATE, "__doc__": _WHAT, "__init__": _refuse}
    return type(name, (), body | {method: staticmethod(_refuse) for method in methods})


ModelPackage: Any = _unsupported(
    "ModelPackage",
    *("add_shared_asset", "close", "commit", "compute_directory_hash", "get_component_json", "get_info"),
    *("get_variant_json", "open", "prune", "remove_component", "remove_shared_asset", "remove_variant"),
    *("remove_variant_executor_info", "resolve_asset_uri", "resolve_string_ref", "set_additional_metadata_json"),
    *("set_component_external", "set_component_inline", "set_layout", "set_metadata", "set_variant"),
    *("set_variant_executor_info_external", "set_variant_executor_info_inline"),
)
ModelPackageContext: Any = _unsupported(
    "ModelPackageContext",
    *("get_component_count", "get_component_names", "get_schema_version", "get_variant_count", "get_variant_ep_name"),
    *("get_variant_names", "resolve_string_ref", "select_component"),
)
ModelPackageComponentContext: Any = _unsupported(
    "ModelPackageComponentContext",
    *("create_session", "get_selected_variant_folder_path", "get_selected_variant_name"),
)
ModelPackageOptions: Any = _unsupported("ModelPackageOptions")
OrtEpContextDataBuffer: Any = _unsupported(
    "OrtEpContextDataBuffer", "allocate", "is_allocated", "max_size", "size", "write"
)


class OrtExternalInitializerInfo:
    """Where an initializer lies in a file; `ModelCompiler` does not ask for it."""

    __module__ = STATE

    def __init__(self, filepath: str, file_offset: int, byte_size: int) -> None:
        self._where = filepath, file_offset, byte_size

    filepath = property(lambda self: self._where[0], doc="The file's path, relative to the model.")
    file_offset = property(lambda self: self._where[1], doc="Where the data begin.")
    byte_size = property(lambda self: self._where[2], doc="How many bytes they are.")
