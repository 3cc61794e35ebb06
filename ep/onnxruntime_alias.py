"""How do programs that import onnxruntime get this runtime without a change? One module object under both names.

`install()` answers `import onnxruntime`, and every submodule, with `ep.onnxruntime`; `find_spec`, the version of the
distribution, and Python processes that this one starts know it too. `uninstall()` takes all of it back. Nothing is
imported before a program asks: this file needs the standard library only, since it also runs when Python starts.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterable, Sequence
from importlib import metadata
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

ALIAS, OURS = "onnxruntime", "ep.onnxruntime"
SWITCH, DEVICE = "EP_ONNXRUNTIME", "EP_ONNXRUNTIME_DEVICE"
STARTUP = Path(__file__).parent / "onnxruntime" / "startup"  # holds a sitecustomize.py for processes started later
_TOOLS = ("quantization", "tools", "transformers")  # the parts of onnxruntime that work on model files
_KEPT = ("__spec__", "__loader__", "__package__", "__path__", "__file__")


def install(device: str | None = None, *, children: bool = True) -> None:
    """Lets `import onnxruntime` mean this runtime, from now on.

    `device` is what `CPUExecutionProvider` stands for, as `ep.load` names devices. With `children`, Python processes
    started by this one do the same: the environment variables `EP_ONNXRUNTIME` and `PYTHONPATH` tell them.

    Raises:
        RuntimeError: the genuine onnxruntime was imported before, and code may hold on to it.
        InvalidInput: there is no such device.
    """
    if device is not None:
        from ep.devices import parsed

        parsed(device)
    genuine = sys.modules.get(ALIAS)
    if genuine is not None and genuine.__name__ != OURS:
        raise RuntimeError(
            f"the genuine onnxruntime is imported already, from {getattr(genuine, '__file__', None)}. "
            "Call ep.onnxruntime.install() before anything imports onnxruntime, for instance by "
            "`python -m ep.onnxruntime script.py`."
        )
    if device is not None:
        _Finder.saved.setdefault(DEVICE, os.environ.get(DEVICE))
        os.environ[DEVICE] = device
    if children:
        _tell_children()
    if not installed():
        sys.meta_path.insert(0, _FINDER)


def uninstall() -> None:
    """Lets `import onnxruntime` mean again what it did; modules that hold on to ours keep it."""
    if installed():
        sys.meta_path.remove(_FINDER)
    for name in [n for n in sys.modules if n == ALIAS or n.startswith(f"{ALIAS}.")]:
        if sys.modules[name].__name__.startswith(OURS):
            del sys.modules[name]
    for variable, before in _Finder.saved.items():
        if before is None:
            os.environ.pop(variable, None)
        else:
            os.environ[variable] = before
    _Finder.saved.clear()


def installed() -> bool:
    """Whether `import onnxruntime` means this runtime."""
    return _FINDER in sys.meta_path


def install_if_asked() -> None:
    """What `import ep`, and the start of Python, do: install if the environment says `EP_ONNXRUNTIME=1`."""
    if os.environ.get(SWITCH) == "1" and not installed():
        genuine = sys.modules.get(ALIAS)
        if genuine is None or genuine.__name__ == OURS:
            install(children=False)
        else:
            warnings.warn(
                f"{SWITCH}=1 has no effect: the genuine onnxruntime was imported before ep was. "
                "`python -m ep.onnxruntime --startup on` lets it act when Python starts.",
                stacklevel=3,
            )


def _tell_children() -> None:
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    told = {SWITCH: "1", "PYTHONPATH": os.pathsep.join([str(STARTUP), *(p for p in paths if p != str(STARTUP))])}
    for variable, value in told.items():
        _Finder.saved.setdefault(variable, os.environ.get(variable))
        os.environ[variable] = value


class _Finder(metadata.DistributionFinder):
    """Finds our modules under onnxruntime's names, and its distribution."""

    saved: dict[str, str | None] = {}  # environment variables before `install`

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        if name != ALIAS and not name.startswith(f"{ALIAS}."):
            return None
        ours = importlib.util.find_spec(OURS + name.removeprefix(ALIAS))
        if ours is None:
            return ModuleSpec(name, _Refusal()) if name.split(".")[1] in _TOOLS else None
        spec = ModuleSpec(name, _Loader(ours.name), origin=ours.origin)
        spec.submodule_search_locations = ours.submodule_search_locations
        spec.has_location = ours.has_location
        return spec

    def find_distributions(self, context: Any = metadata.DistributionFinder.Context()) -> Iterable[Any]:  # noqa: B008
        """The distribution `onnxruntime`, for tools that ask for its version."""
        return [_Distribution()] if context.name is None or _same(context.name, ALIAS) else []


class _Refusal(Loader):
    """Says at import that a part of onnxruntime is not here, and what to do."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        raise ImportError(
            f"{spec.name} makes or rewrites models, which ep does not do: it runs them. "
            "Run this step where the genuine onnxruntime is installed and not replaced by ep.onnxruntime.",
            name=spec.name,
        )

    def exec_module(self, module: ModuleType) -> None:
        """Never called: there is no module."""


class _Loader(Loader):
    """Gives the module that is there already, and leaves its attributes as they are."""

    def __init__(self, ours: str) -> None:
        self._ours = ours
        self._kept: dict[str, Any] = {}

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._ours)
        self._kept = {name: vars(module)[name] for name in _KEPT if name in vars(module)}
        return module

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(self._kept)


class _Distribution(metadata.Distribution):
    """What `importlib.metadata` says of onnxruntime: the version of its API, and who answers."""

    def read_text(self, filename: str) -> str | None:
        from ep.onnxruntime.environment import API_VERSION

        if filename != "METADATA":
            return "ep-runtime\n" if filename == "INSTALLER" else None
        summary = "the Python API of onnxruntime, answered by ep-runtime"
        return f"Metadata-Version: 2.1\nName: {ALIAS}\nVersion: {API_VERSION}\nSummary: {summary}\n"

    def locate_file(self, path: Any) -> Any:
        return Path(__file__).parent.parent / path


def _same(one: str, other: str) -> bool:
    return one.lower().replace("_", "-") == other


_FINDER = _Finder()
