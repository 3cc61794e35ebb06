"""Which BLAS does MLX use on Linux? A fast one, if it is loaded before `mlx.core`.

The Linux wheels link a reference BLAS (8 GFLOP/s). Its symbols give way to those of an OpenBLAS that is in
the process already (77 GFLOP/s and more on two cores); after the import of `mlx.core` nothing helps.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import sysconfig
from pathlib import Path

_NAME = "libopenblas.so.0"


@functools.cache
def preload() -> str:
    """Load OpenBLAS for MLX; return "" on success and elsewhere than on Linux, or why MLX will be slow."""
    if sys.platform != "linux" or _is_loaded():
        return ""
    if "mlx.core" in sys.modules:
        return "MLX uses its slow reference BLAS: mlx.core was imported before ep could load OpenBLAS."
    if any(map(_load, _candidates())):
        return ""
    return (
        f"MLX uses its slow reference BLAS: there is no {_NAME}. "
        "Install it with: pip install cmeel-openblas, or: apt install libopenblas0."
    )


def _is_loaded() -> bool:
    """Whether some OpenBLAS already answers for the whole process."""
    return hasattr(ctypes.CDLL(None), "openblas_get_config")


def _candidates() -> list[str]:
    """Names to try: the system's library, then that of the cmeel-openblas wheel."""
    folders = {sysconfig.get_path("platlib"), sysconfig.get_path("purelib")}
    return [_NAME, *(str(Path(folder) / "cmeel.prefix" / "lib" / _NAME) for folder in sorted(folders))]


def _load(name: str) -> bool:
    try:
        ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return False
    return True
