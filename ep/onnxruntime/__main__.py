"""How does a program that imports onnxruntime run here unchanged? `python -m ep.onnxruntime script.py …`.

`--startup on` writes a file into site-packages that lets every Python of this environment look for the variable
`EP_ONNXRUNTIME=1` when it starts; `--startup off` removes it.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from ep.errors import InvalidInput
from ep.onnxruntime_alias import SWITCH, install

PTH = "ep_onnxruntime.pth"
LINE = (
    f"import os; os.environ.get({SWITCH!r}) == '1' and "
    "__import__('ep.onnxruntime_alias', fromlist=['install_if_asked']).install_if_asked()\n"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a script, a module or a command with `onnxruntime` standing for this runtime; or changes the start-up."""
    parser = argparse.ArgumentParser(prog="python -m ep.onnxruntime", description=__doc__)
    parser.add_argument("--device", help="what CPUExecutionProvider stands for: mlx, jax, cpu, gpu, cuda:0 or host")
    parser.add_argument("--startup", choices=("on", "off", "status"), help=f"write or remove {PTH}, or look for it")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="run a module, with its arguments")
    what.add_argument("-c", dest="command", nargs=argparse.REMAINDER, help="run a command, with its arguments")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="run a script, with its arguments")
    options = parser.parse_args(arguments)
    if options.startup:
        return startup(options.startup)
    program = options.module or options.command or options.script
    if not program:
        parser.print_help()
        return 2
    if options.script and not Path(program[0]).exists():
        parser.error(f"there is no script '{program[0]}'.")
    try:
        install(options.device)
    except InvalidInput as error:
        parser.error(f"argument --device: {error}")
    sys.argv = ["-m" if options.module else "-c" if options.command else program[0], *program[1:]]
    if options.module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
    elif options.command:
        sys.path.insert(0, "")
        exec(compile(program[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.path.insert(0, str(Path(program[0]).resolve().parent))
        runpy.run_path(program[0], run_name="__main__")
    return 0


def startup(action: str, folder: Path | None = None) -> int:
    """Writes or removes the start-up file, and says where it is; exit code 1 if `status` finds none."""
    path = (folder or Path(sysconfig.get_path("purelib"))) / PTH
    try:
        if action == "on":
            path.write_text(LINE, encoding="utf-8")
        elif action == "off":
            path.unlink(missing_ok=True)
    except OSError as error:
        print(f"{path} cannot be changed: {error.strerror or error}. Use a virtual environment.", file=sys.stderr)
        return 1
    there = path.exists()
    print(f"{path}: {f'there; {SWITCH}=1 makes onnxruntime mean ep.onnxruntime' if there else 'not there'}")
    return 0 if action != "status" or there else 1


if __name__ == "__main__":
    sys.exit(main())
