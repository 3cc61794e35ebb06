"""Where are onnxruntime's small example models? Made when they are asked for, into a folder of this user."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

_EXAMPLES = {
    "sigmoid.onnx": '<ir_version: 3, opset_import: ["": 9]> sigmoid (float[3,4,5] x) => (float[3,4,5] y) '
    "{ y = Sigmoid (x) }",
    "mul_1.onnx": '<ir_version: 3, opset_import: ["": 7]> mul (float[3,2] X) => (float[3,2] Y) '
    "{ W = Constant <value = float[3,2] {1, 2, 3, 4, 5, 6}> ()\n Y = Mul (X, W) }",
}


def get_example(name: str) -> str:
    """The path of an example model: `sigmoid.onnx` or `mul_1.onnx`.

    Raises:
        FileNotFoundError: there is no example of this name.
    """
    if name not in _EXAMPLES:
        raise FileNotFoundError(f"Unable to find example '{name}'")
    import onnx
    from onnx import parser

    folder = Path(tempfile.gettempdir()) / f"ep-onnxruntime-examples-{os.getuid() if hasattr(os, 'getuid') else 0}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid not in (os.getuid() if hasattr(os, "getuid") else 0, 0):
        folder = Path(tempfile.mkdtemp(prefix="ep-onnxruntime-examples-"))
    path = folder / name
    if not path.exists():
        onnx.save(parser.parse_model(_EXAMPLES[name]), path)
    return str(path)
