"""In what does `ep.onnxruntime` answer otherwise than onnxruntime, on purpose, and where can that be seen?

One row per subject; the table of docs/onnxruntime.md is made of these. Each observation is run on both modules and must
differ, so that a row goes when the difference does. Observations are named as the compatibility probe (`group.key`)
names them where it has them; the others are "-".
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import ml_dtypes
import numpy as np
from onnx import TensorProto
from onnxruntime_modules import CPU, DOUBLE, TWO, X, content, load, value
from onnxruntime_observations import (
    Observation,
    attribute,
    backend,
    bfloat16_value,
    bound,
    element,
    external,
    failed,
    metadata,
    optimized,
    passed,
    profiled,
    providers,
    ran,
    random_twice,
    saved_for_itself,
    sequence,
    sequence_value,
    sparse,
    tool,
    unnamed,
    updated,
)


class Difference(NamedTuple):
    """What differs, both answers, the reason, and where it is observed."""

    subject: str
    theirs: str
    here: str
    why: str
    seen: dict[str, Observation]

    def row(self) -> str:
        """A line of the table."""
        places = ", ".join(f"`{name}`" for name in self.seen if not name.startswith("-"))
        return f"| {self.subject} | {self.theirs} | {self.here} | {self.why} | {places} |\n"


CUDA = "CUDAExecutionProvider"
ONE_TWO = np.array([1, 2])
WRONG_ROWS = np.zeros((5, 3), np.float32)

DIFFERENCES = [
    Difference(
        "provider names: lists, warnings, `get_ep_devices`",
        "`AzureExecutionProvider`, `CPUExecutionProvider`",
        "ours",
        "they name what runs here; Azure's are calls over the network",
        {
            "module_info.available": lambda ort: ort.get_available_providers(),
            "module_info.all": lambda ort: ort.get_all_providers(),
            "module_info.ep_devices": lambda ort: [device.ep_name for device in ort.get_ep_devices()],
            "providers_forms.cuda_cpu": providers(CUDA, *CPU),
            "providers_forms.cuda_only": providers(CUDA),
            "providers_forms.cuda_opts": providers((CUDA, {"device_id": 0}), *CPU),
            "providers_forms.unknown": providers("FooExecutionProvider"),
            "providers_forms.unknown_cpu": providers("FooExecutionProvider", *CPU),
            "providers_forms.as_str": lambda ort: ort.InferenceSession(content(DOUBLE), providers=CPU[0]),
            "providers_forms.azure": providers("AzureExecutionProvider", *CPU),
            "providers_forms.coreml": providers("CoreMLExecutionProvider", *CPU),
            "providers_forms.enable_fallback0": providers("FooExecutionProvider", enable_fallback=0),
            "providers_forms.all_avail": lambda ort: providers(*ort.get_available_providers())(ort),
            "providers_forms.set_unknown": lambda ort: load(ort, DOUBLE).set_providers([CUDA]),
            "client_idioms.cuda_opts": providers((CUDA, {"device_id": 0}), (CPU[0], {})),
        },
    ),
    Difference(
        "bfloat16, float8, int4, int2, complex numbers",
        "refused as NumPy arrays, or no kernel",
        "fed and returned as `ml_dtypes` arrays",
        "more models run",
        {
            "dtypes.BFLOAT16": passed(TensorProto.BFLOAT16, element(ml_dtypes.bfloat16)),
            "dtypes.COMPLEX64": passed(TensorProto.COMPLEX64, element(np.complex64)),
            "dtypes.FLOAT8E4M3FN": passed(TensorProto.FLOAT8E4M3FN, element(ml_dtypes.float8_e4m3fn)),
            "dtypes.FLOAT8E5M2": passed(TensorProto.FLOAT8E5M2, element(ml_dtypes.float8_e5m2)),
            "dtypes.INT4": passed(TensorProto.INT4, element(ml_dtypes.int4)),
            "dtypes.UINT4": passed(TensorProto.UINT4, element(ml_dtypes.uint4)),
            "dtypes.UINT2": passed(TensorProto.UINT2, element(ml_dtypes.uint2), 25),
            "ortvalue.shape_and_type.complex64": lambda ort: ort.OrtValue.ortvalue_from_shape_and_type(
                [2], np.complex64
            ).data_type(),
            "ortvalue.onnx_type": bfloat16_value,
        },
    ),
    Difference(
        "operators without a kernel for a type",
        "`NotImplemented`",
        "run",
        "the array libraries have them",
        {
            "load_errors.kernel_missing": lambda ort: len(
                load(ort, "g (bfloat16[1] x) => (bfloat16[1] y) { y = Add(x, x) }").get_inputs()
            )
        },
    ),
    Difference(
        "messages that name a C++ file and its check",
        "`/onnxruntime_src/…:46 … was false. …`",
        "the sentence without it",
        "there is no such file",
        {
            "module_info.sev_bad": lambda ort: ort.set_default_logger_severity(9),
            "load_errors.opset_too_new": lambda ort: ort.InferenceSession(
                content(DOUBLE, opsets='"": 99'), providers=CPU
            ),
            "load_errors.ir_too_new": lambda ort: ort.InferenceSession(content(DOUBLE, ir=99), providers=CPU),
            "load_errors.missing_output": ran("g (float[N] x) => (float[N] y) { z = Abs(x) }", x=X[0]),
            "load_errors.external_missing": functools.partial(external, from_bytes=False),
            "load_errors.external_from_bytes": functools.partial(external, from_bytes=True),
            "iobinding.wrong_out_shape": functools.partial(bound, target=WRONG_ROWS),
            "nontensor_io.seq_in_baddtype": sequence([X[0].astype(float)]),
            "nontensor_io.seq_ov": sequence_value,
            "misc_objects.sparse_ov": sparse,
        },
    ),
    Difference(
        "what a failed node says after `Status Message:`",
        "the C++ check",
        "the node, its opset, its inputs' shapes, and why",
        "it says more, and its words are those of the library that ran it",
        {
            "input_errors.sym_mismatch3": ran(TWO, a=np.zeros((3, 3), np.float32), b=X),
            "runtime_errors.reshape": failed("Reshape(x, s)", "float[N] x, int64[K] s", x=X[0], s=ONE_TWO),
            "runtime_errors.matmul": failed("MatMul(x, z)", "float[N, K] x, float[A, B] z", x=X, z=X),
            "runtime_errors.broadcast": failed("Add(x, z)", "float[N] x, float[M] z", x=X[0], z=X[0, :2]),
            "runtime_errors.concat": failed(
                "Concat <axis = 0> (x, z)", "float[N, K] x, float[A, B] z", x=X, z=X[:, :2]
            ),
            "nontensor_io.seq_in_empty": sequence([]),
        },
    ),
    Difference("names of nodes without one", "empty", "`Add_0`", "profiles and plans show the same", {"-": unnamed}),
    Difference(
        "`None` for an input, or a missing input of a bound run",
        "the node that came to it first, and the C++ check",
        "the first node of the file that reads it",
        "inputs are checked before nodes run",
        {
            "input_errors.none_val": ran(TWO, a=None, b=X),
            "iobinding.clear": functools.partial(bound, clear=True),
            "iobinding.missing_input": functools.partial(bound, unbound="b"),
        },
    ),
    Difference(
        "an index outside a tensor, computed by the model",
        "`InvalidArgument`",
        "an element of the tensor; refused if it is fed from the host, constant, or computed there",
        "no device tells, and asking would take time in every run",
        {
            "-": ran(
                "g (float[N] x, int64[K] i) => (float[K] y) { j = Add(i, i)\n y = Gather(x, j) }", x=X[0], i=ONE_TWO + 4
            )
        },
    ),
    Difference(
        "an index outside a tensor that is refused: which error",
        "`InvalidArgument` or `Fail`, in the words of each operator",
        "`InvalidArgument`, in those of `Gather`",
        "one check serves all operators",
        {"-": failed("GatherElements(x, i)", "float[N] x, int64[K] i", x=X[0], i=ONE_TWO + 4)},
    ),
    Difference(
        "`OrtValue.update_inplace` with another dtype",
        "copies too few or too many bytes",
        "refused unless both have as many bytes",
        "the result would be garbage",
        {"ortvalue.update_baddtype": updated},
    ),
    Difference(
        "`copy_tensors` between values of the host",
        "refused",
        "copies",
        "nothing forbids it",
        {"ortvalue.copy_tensors": lambda ort: ort.copy_tensors([value(ort, X)], [value(ort, X + 1)])},
    ),
    Difference(
        "`custom_metadata_map`",
        "in the order of a hash table",
        "in the order of the file",
        "a hash table of C++ is not there to imitate; as dictionaries both are equal",
        {"metadata.full": metadata},
    ),
    Difference(
        "dimensions of outputs that follow from folded constants",
        "known",
        "the model's own names for them",
        "shapes are inferred before folding",
        {
            "-": lambda ort: (
                load(ort, "g (float[N] x) => (float[a] y) <int64[1] p = {2}> { s = Mul(p, p)\n y = Reshape(x, s) }")
                .get_outputs()[0]
                .shape
            )
        },
    ),
    Difference(
        "results' `flags.owndata`",
        "False",
        "True",
        "the array owns its memory, with no C++ object behind it",
        {"output_props.own": lambda ort: load(ort, DOUBLE).run(None, {"x": X})[0].flags.owndata},
    ),
    Difference(
        "`optimized_model_filepath`",
        "imports every operator set",
        "those of the model",
        "other tools refuse sets that they do not know",
        {"session_options.optimized_model": optimized},
    ),
    Difference(
        "profiles",
        "times inside the run, memory of the arena, threads",
        "every node by itself, no memory, no threads",
        "compiled code has no nodes, and there is no arena",
        {"profiling.node_args": profiled},
    ),
    Difference(
        "dictionaries fed through `backend.prepare(…).run`",
        "`Fail`, with NumPy's words",
        "`RuntimeError`",
        "it is no tensor, which is what `run` says of all others",
        {"backend_api.run_dict": backend},
    ),
    Difference(
        "Python's own messages about the classes (no such attribute, no setter, not subscriptable)",
        "name the C++ class",
        "name the class",
        "Python writes them",
        {
            "node_args.set_attr": attribute("", "name"),
            "session_options.unknown_attr": attribute("SessionOptions", "foo"),
            "session_options.get_unknown": lambda ort: ort.SessionOptions().foo,
            "enums.getitem": lambda ort: ort.GraphOptimizationLevel["ORT_ENABLE_ALL"],
        },
    ),
    Difference(
        "big-endian and `S` arrays",
        "misread",
        "read",
        "the result would be garbage",
        {"input_layouts.bigendian": ran(DOUBLE, x=X.astype(">f4"))},
    ),
    Difference(
        "random operators, `set_seed`",
        "repeat after a seed",
        "differ at every run unless the node has a seed",
        "the libraries have other generators, and no state of the process",
        {"-": random_twice},
    ),
    Difference(
        "`.ort` models, custom operator libraries, training",
        "supported by some builds",
        "refused",
        "they are native to onnxruntime",
        {"-": saved_for_itself},
    ),
    Difference(
        "`onnxruntime.quantization`, `.transformers`, `.tools`",
        "tools that write models",
        "constants, and `TypeHelper`, which clients need to run; the rest is an `ImportError` that says so",
        "quantize where the genuine package is",
        {"-": tool},
    ),
    Difference(
        "`RunOptions.terminate`",
        "also stops a running run",
        "refuses the next",
        "compiled code cannot be stopped",
        {},  # which run it stops is a matter of time
    ),
]
