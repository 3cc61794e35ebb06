"""Do programs that import onnxruntime get `ep.onnxruntime`, one module under both names, and can that be undone?"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ep.onnxruntime.__main__ import LINE, PTH, main, startup

MODEL = """
from onnx import parser
model = parser.parse_model('<ir_version: 8, opset_import: ["": 17]> g (float[N] x) => (float[N] y) { y = Add(x, x) }')
"""
RUN = f"""
import sys
import numpy as np
import onnxruntime
{MODEL}
session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
print([session.run(None, {{"x": np.ones(2, np.float32)}})[0].tolist(), onnxruntime.__ep__, sys.argv[1:]])
"""


def python(*arguments: str, cwd: Path | None = None, **environment: str) -> str:
    """What a fresh interpreter prints."""
    env = {name: value for name, value in os.environ.items() if name != "EP_ONNXRUNTIME"}
    env |= {"EP_ONNXRUNTIME_DEVICE": "host"} | environment  # NumPy starts quickly
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=env, cwd=cwd, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def answer(*arguments: str, **keywords) -> list:
    return ast.literal_eval(python(*arguments, **keywords).splitlines()[-1])


def facts(before: str, *expressions: str, **environment: str) -> list:
    return answer("-c", f"{before}\nprint([{', '.join(expressions)}])", **environment)


INSTALL = "import ep.onnxruntime_alias as alias; alias.install()\n"


def test_one_module_under_both_names():
    code = (
        "import sys, onnxruntime as one, ep.onnxruntime as other\n"
        "import onnxruntime.capi.onnxruntime_pybind11_state as c, ep.onnxruntime.capi.onnxruntime_pybind11_state as d\n"
        "from onnxruntime.transformers.io_binding_helper import TypeHelper\n"
        "from onnxruntime.capi._pybind_state import Fail\n"
        "import onnxruntime.backend\n"
    )
    assert facts(
        INSTALL + code,
        "one is other, c is d, one.capi is other.capi, Fail is d.Fail",
        "one.__name__, one.__spec__.name, c.__spec__.name, one.__ep__, one.__version__",
        "one.__file__ == sys.modules['ep'].__file__.replace('__init__', 'onnxruntime/__init__')",
        "TypeHelper.ort_type_to_numpy_type('tensor(float)').__name__",
    ) == [True, True, True, True, "ep.onnxruntime", "ep.onnxruntime", "ep.onnxruntime.capi.onnxruntime_pybind11_state",
          True, "1.32.0", True, "float32"]  # fmt: skip


def test_find_spec_and_the_version_answer():
    code = "import importlib.util as u, importlib.metadata as m\n"
    found = facts(
        INSTALL + code + "import sys",
        "u.find_spec('onnxruntime').origin.replace('\\\\', '/').endswith('ep/onnxruntime/__init__.py')",
        "u.find_spec('onnxruntime.capi') is not None, u.find_spec('onnxruntime.training')",
        "m.version('onnxruntime'), m.metadata('onnxruntime')['Summary'].split()[-1]",
    )
    assert found == [True, True, None, "1.32.0", "ep-runtime"]


def test_tools_that_write_models_are_refused_in_words():
    code = INSTALL + (
        "from onnxruntime.quantization import QuantType, quantize_dynamic\n"
        "from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as Refused\n"
        "said = []\n"
        "try: from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference\n"
        "except ImportError as error: said.append(str(error))\n"
        "try: from onnxruntime.transformers.optimizer import optimize_model\n"
        "except ImportError as error: said.append(str(error))\n"
        "try: quantize_dynamic('a', 'b')\n"
        "except Refused as error: said.append(str(error))\n"
    )
    tools, optimizer, quantize = facts(code, "*said")
    assert tools.startswith("onnxruntime.tools makes or rewrites models, which ep does not do")
    assert optimizer.startswith("onnxruntime.transformers.optimizer makes or rewrites models")
    assert "ep does not support onnxruntime.quantization.quantize_dynamic" in quantize


def test_nothing_is_loaded_before_a_program_asks():
    heavy = "{'numpy', 'onnx', 'jax', 'mlx', 'ep.onnxruntime', 'onnxruntime'} & set(sys.modules)"
    assert facts(f"{INSTALL}import sys", f"len({heavy})") == [0]
    assert facts(f"{INSTALL}import sys, onnxruntime", "{'onnx', 'jax', 'mlx'} & set(sys.modules) or None") == [None]


def test_it_can_be_undone():
    code = (
        f"{INSTALL}import os, sys, onnxruntime as ours\n"
        "inside = os.environ['EP_ONNXRUNTIME'], alias.installed()\n"
        "alias.uninstall()\n"
        "import importlib.util as u\n"
    )
    assert facts(
        code, "inside, alias.installed(), 'onnxruntime' in sys.modules, os.environ.get('EP_ONNXRUNTIME')",
        "os.environ.get('PYTHONPATH'), 'ep/onnxruntime' in str(u.find_spec('onnxruntime'))",
    ) == [("1", True), False, False, None, os.environ.get("PYTHONPATH"), False]  # fmt: skip


def test_the_genuine_module_is_not_replaced_behind_its_users():
    pytest.importorskip("onnxruntime")
    code = f"import onnxruntime\ntry:\n    {INSTALL}except RuntimeError as error: said = str(error)\n"
    (said,) = facts(code, "said")
    assert said.startswith("the genuine onnxruntime is imported already, from ")


def test_scripts_modules_and_commands_run_unchanged(tmp_path):
    (tmp_path / "program.py").write_text(RUN)
    for how in (["program.py"], ["-m", "program"], ["-c", RUN]):
        assert answer("-m", "ep.onnxruntime", *how, "a", "--b", cwd=tmp_path) == [[2.0, 2.0], True, ["a", "--b"]]


def test_a_device_is_chosen_outside_the_program():
    show = "print([session._sess._session.providers[0]])"
    for device in ("host", "jax", "mlx"):
        pytest.importorskip({"host": "numpy"}.get(device, device))
        expected = [device]
        assert answer("-m", "ep.onnxruntime", "--device", device, "-c", f"{RUN}\n{show}") == expected


def test_children_are_covered(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.mine = 7")
    (tmp_path / "program.py").write_text(
        "import multiprocessing, subprocess, sys\n"
        "def work(_):\n"
        "    import onnxruntime\n"
        "    return onnxruntime.__ep__, mine\n"
        "if __name__ == '__main__':\n"
        "    code = 'import onnxruntime; print(onnxruntime.__ep__)'\n"
        "    said = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True).stdout.strip()\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print([pool.map(work, [0]), said])\n"
    )
    where = str(tmp_path)
    found = answer("-m", "ep.onnxruntime", "program.py", cwd=tmp_path, PYTHONPATH=where)
    assert found == [[(True, 7)], "True"]


def test_the_environment_variable_acts_once_ep_is_imported():
    assert answer("-c", f"import ep\n{RUN}", EP_ONNXRUNTIME="1")[1] is True
    assert facts("import ep, sys", "'ep.onnxruntime_alias' in sys.modules") == [False]
    pytest.importorskip("onnxruntime")
    late = "import warnings, onnxruntime\nwith warnings.catch_warnings(record=True) as said: import ep"
    (message,) = facts(late, "str(said[0].message)", EP_ONNXRUNTIME="1")
    assert message.startswith("EP_ONNXRUNTIME=1 has no effect: the genuine onnxruntime was imported before")


def test_the_start_up_file_is_written_and_removed(tmp_path, capsys):
    assert startup("status", tmp_path) == 1
    assert startup("on", tmp_path) == 0 and (tmp_path / PTH).read_text() == LINE
    code = f"import site; site.addsitedir({str(tmp_path)!r})\nimport sys\n"
    there = "'ep.onnxruntime_alias' in sys.modules and sys.modules['ep.onnxruntime_alias'].installed()"
    assert facts(code, there, EP_ONNXRUNTIME="1") == [True] and facts(code, there) == [False]
    assert startup("off", tmp_path) == 0 and not (tmp_path / PTH).exists()
    assert "not there" in capsys.readouterr().out


def test_the_pytest_plugin(tmp_path):
    (tmp_path / "test_it.py").write_text("import onnxruntime\ndef test(): assert onnxruntime.__ep__\n")
    printed = python(
        "-m", "pytest", "-p", "ep.onnxruntime.pytest_plugin", "-p", "no:cacheprovider", "test_it.py", cwd=tmp_path
    )
    assert "1 passed" in printed and "onnxruntime: ORT Build Info: ep-runtime" in printed


@pytest.mark.parametrize(
    ("arguments", "words"), [(["--device", "foo", "-c", "0"], "unknown device 'foo'"), (["absent.py"], "'absent.py'")]
)
def test_wrong_arguments_of_the_command(capsys, arguments, words):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2 and words in capsys.readouterr().err
