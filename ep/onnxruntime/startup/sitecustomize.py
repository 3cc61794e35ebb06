"""What does a Python process do first that was started by one with the alias? The same, then the user's own file."""

import importlib.machinery
import importlib.util
import os
import sys


def _users_own() -> None:
    """Runs the sitecustomize.py that this one hides, if there is one."""
    here = os.path.dirname(os.path.abspath(__file__))
    others = [path for path in sys.path if os.path.abspath(path or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _install() -> None:
    try:
        from ep.onnxruntime_alias import install_if_asked
    except ImportError:  # another Python, without this project
        return
    install_if_asked()


_install()
_users_own()
