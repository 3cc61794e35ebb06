"""Does this installation fit the machine? Onnxruntime asks so when it is imported; here `ep doctor` answers."""

from ep.onnxruntime.environment import API_VERSION


def check_distro_info() -> None:
    """No effect: there is no native library to fit the system."""


def get_package_name_and_version_info() -> tuple[str, str, str]:
    """(`onnxruntime`, the version of its API, no version of CUDA)."""
    return "onnxruntime", API_VERSION, ""


def check_training_module() -> tuple[bool, str, str, str]:
    """(False, …): there is no training module."""
    return False, "onnxruntime", API_VERSION, ""
