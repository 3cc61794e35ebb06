"""Which execution provider, and so which library and device, does a session run on?

Ours are `MLXExecutionProvider` and `JAXExecutionProvider`. `CPUExecutionProvider`, which is always there, stands for
this machine's default: the device in the environment variable `EP_ONNXRUNTIME_DEVICE` (as `ep.load` names devices),
or the one given to `install`; without either, MLX on Apple silicon and the CPU through JAX elsewhere.
"""

from __future__ import annotations

import os
import platform
import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from ep.errors import BackendUnavailable, EpError, InvalidInput, UnknownOption
from ep.onnxruntime.errors import InvalidArgument, failure
from ep.onnxruntime.messages import log

MLX, JAX, CPU = "MLXExecutionProvider", "JAXExecutionProvider", "CPUExecutionProvider"
DEVICE = "EP_ONNXRUNTIME_DEVICE"
OWN = {MLX: "mlx", JAX: "jax"}
_GPU = ("CUDAExecutionProvider", "TensorrtExecutionProvider", "MIGraphXExecutionProvider")
_APPLE = ("CoreMLExecutionProvider", "WebGpuExecutionProvider")
KNOWN = (
    *("TensorrtExecutionProvider", "CUDAExecutionProvider", "MIGraphXExecutionProvider", "OpenVINOExecutionProvider"),
    *("DnnlExecutionProvider", "VitisAIExecutionProvider", "QNNExecutionProvider", "NnapiExecutionProvider"),
    *("VSINPUExecutionProvider", "JsExecutionProvider", "CoreMLExecutionProvider", "DmlExecutionProvider"),
    *("RknpuExecutionProvider", "WebNNExecutionProvider", "WebGpuExecutionProvider", "XnnpackExecutionProvider"),
    *("CANNExecutionProvider", "AzureExecutionProvider"),
)
_mapped: set[str] = set()  # foreign providers whose replacement was said


def get_available_providers() -> list[str]:
    """Names of the providers that are installed here, the best first; `ep doctor` says whether they work."""
    order = (MLX, JAX) if apple() else (JAX, MLX)
    return [name for name in order if find_spec(OWN[name])] + [CPU]


def get_all_providers() -> list[str]:
    """Names of our providers and of those of onnxruntime: the latter are known, and not available."""
    return [MLX, JAX, *KNOWN, CPU]


def apple() -> bool:
    """Whether this is a Mac with Apple silicon."""
    return sys.platform == "darwin" and platform.machine() == "arm64"


def default_device() -> str:
    """The device that `CPUExecutionProvider` stands for.

    Raises:
        InvalidInput: the environment variable names no device.
    """
    from ep.devices import parsed

    asked = os.environ.get(DEVICE)
    if not asked:
        return "mlx" if apple() and find_spec("mlx") else "cpu"
    try:
        parsed(asked)
    except InvalidInput as error:
        what = f"the environment variable {DEVICE} is '{asked}': {error.what}"
        raise InvalidInput(what, why=error.why, fix="change the variable, or unset it.") from error
    return asked


def explained(error: EpError, name: str) -> EpError:
    """The error of a device that is not here; one that the environment variable asks for says so."""
    asked = os.environ.get(DEVICE)
    if asked and name == CPU and isinstance(error, BackendUnavailable):
        error.why = f"{error.why} The environment variable {DEVICE} asks for '{asked}'.".strip()
    return error


def get_device() -> str:
    """`GPU` where JAX can use CUDA, else `CPU`."""
    return "GPU" if _cuda() else "CPU"


def _cuda() -> bool:
    return any(find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))


def nearest(name: str) -> str | None:
    """The provider of ours that drives the hardware which a foreign provider stands for, if it is here."""
    if name in _GPU and _cuda():
        return JAX
    return MLX if name in _APPLE and apple() and find_spec("mlx") else None


def check_addable(name: str) -> None:
    """Raises what onnxruntime says of a provider that `SessionOptions.add_provider` cannot add."""
    if name in get_available_providers() or nearest(name):
        return
    if name not in (*KNOWN, *OWN):
        raise RuntimeError(f"Unknown Provider Type: {name}")
    raise failure(
        InvalidArgument,
        f"Failed to add provider of type '{name}' to SessionOptions. Provider configuration is not supported.",
    )


def normalize(
    providers: Sequence[Any] | None, provider_options: Sequence[Mapping[Any, Any]] | None
) -> list[tuple[str, dict[str, str]]]:
    """The providers that are asked for; those that are not here are left out, with a warning.

    Raises:
        ValueError: the arguments do not have the form of names, or of names with options.
        RuntimeError: there is no provider of this name anywhere.
    """
    available = get_available_providers()
    found = checked([_replaced(*pair) for pair in pairs(providers, provider_options)], available)
    for name in found:
        if name not in (*available, *KNOWN, *OWN):
            raise RuntimeError(f"Unknown Provider Type: {name}")
    return [(name, options) for name, options in found.items() if name in available]


def checked(given: Sequence[tuple[str, Mapping[Any, Any]]], available: Sequence[str]) -> dict[str, dict[str, str]]:
    """Options by name, as strings; warns of names that are not available, and of those that come twice."""
    found: dict[str, dict[str, str]] = {}
    for name, options in given:
        if name not in available:
            shown = ", ".join(available)
            warnings.warn(
                f"Specified provider '{name}' is not in available provider names.Available providers: '{shown}'",
                stacklevel=6,
            )
        if name in found:
            warnings.warn(f"Duplicate provider '{name}' encountered, ignoring.", stacklevel=6)
        else:
            found[name] = {str(key): str(value) for key, value in options.items()}
    return found


def pairs(providers: Any, provider_options: Any) -> list[tuple[str, Mapping[Any, Any]]]:
    """(name, options) of every form in which providers may be given."""
    if providers is None:
        return []
    if not isinstance(providers, Sequence):
        raise ValueError("'providers' should be a sequence.")
    if provider_options is not None:
        if not isinstance(provider_options, Sequence):
            raise ValueError("'provider_options' should be a sequence.")
        if len(providers) != len(provider_options):
            raise ValueError("'providers' and 'provider_options' should be the same length if both are given.")
        if not all(isinstance(name, str) for name in providers):
            raise ValueError("Only string values for 'providers' are supported if 'provider_options' is given.")
        if not all(isinstance(options, dict) for options in provider_options):
            raise ValueError("'provider_options' values must be dicts.")
        return list(zip(providers, provider_options, strict=True))
    return [_pair(provider) for provider in providers]


def _pair(provider: Any) -> tuple[str, Mapping[Any, Any]]:
    if isinstance(provider, str):
        return provider, {}
    if isinstance(provider, tuple) and len(provider) == 2:
        name, options = provider
        if isinstance(name, str) and isinstance(options, dict):
            return name, options
    raise ValueError("'providers' values must be either strings or (string, dict) tuples.")


def _replaced(name: str, options: Mapping[Any, Any]) -> tuple[str, Mapping[Any, Any]]:
    """The provider itself, or the one of ours that takes its place, which is said once."""
    ours = nearest(name)
    if ours is None:
        return name, options
    if name not in _mapped:
        _mapped.add(name)
        log(2, f"{name} is not part of ep: {ours} runs this session on the same hardware.")
    return ours, {key: value for key, value in options.items() if key == "device_id"}  # others mean nothing to ours


def choose(
    chosen: Sequence[tuple[str, Mapping[str, str]]], entries: Mapping[str, str] = MappingProxyType({})
) -> tuple[str, dict[str, str]]:
    """Device and options for `ep.load` of the first provider; `entries` are those of the session's configuration.

    Raises:
        InvalidInput: an option is unknown, or names no device.
    """
    from ep.array_provider import OPTIONS
    from ep.devices import OWN as KEYS

    name, given = chosen[0]
    settings = {key: value for key, value in entries.items() if key in KEYS}
    if name == CPU:
        return default_device(), settings
    options = dict(given)
    library, number = OWN[name], options.pop("device_id", "0")
    device = options.pop("device", None)
    for key in options:
        if key not in (*KEYS, *OPTIONS) and "." not in key:
            raise UnknownOption(key, ("device", "device_id", *KEYS, *OPTIONS))
    own = {key if key in KEYS or "." in key else f"{library}.{key}": value for key, value in options.items()}
    return _within(name, library, device, number), settings | own


def _within(name: str, library: str, device: str | None, number: str) -> str:
    """The device of a provider's options, which is one of its library."""
    from ep.devices import WITHIN, parsed

    known = WITHIN[library]
    if not number.isdecimal():
        raise InvalidInput(f"option 'device_id' of {name} is '{number}'.", fix="use a number, such as 0.")
    if device is None:
        return library if number == "0" else f"{library}:{'cuda:' if library == 'jax' else ''}{number}"
    if device == library:
        return device
    if device.partition(":")[0] not in known:
        raise InvalidInput(
            f"option 'device' of {name} is '{device}'.",
            why=f"its devices are {', '.join(known)}{' (an index may follow, as in cuda:1)' * (library == 'jax')}.",
            fix="use one of these names, or leave the option out.",
        )
    return ":".join((library, *parsed(f"{library}:{device}")[1:]))
