"""How long did each node take? A run node by node, and the JSON that trace viewers open.

Compiled code is one call, in which no node can be timed. A session with `enable_profiling` therefore runs every node
by itself and waits for it: the sum is larger than what a run takes without profiling, the proportions tell.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from ep.onnxruntime.elements import NAMES, number_of


class Profile:
    """Events of one session, written when profiling ends."""

    def __init__(self, prefix: str) -> None:
        self.start_ns = time.time_ns()
        self._clock = time.perf_counter_ns()
        self._lock = threading.Lock()
        self._events: list[dict[str, Any]] = []
        stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S_%f")[:-3]
        self.path = f"{prefix}_{stamp}.json"
        self._open = True

    def now(self) -> int:
        """Nanoseconds since profiling began."""
        return time.perf_counter_ns() - self._clock

    def add(self, category: str, name: str, started: int, **arguments: Any) -> None:
        """Records what began at `started` and ends now."""
        event = {
            "cat": category,
            "pid": os.getpid(),
            "tid": threading.get_ident() % (1 << 31),
            "dur": (self.now() - started) // 1000,
            "ts": started // 1000,
            "ph": "X",
            "name": name,
            "args": arguments,
        }
        with self._lock:
            if self._open:
                self._events.append(event)

    def end(self) -> str:
        """Writes the file, once, and returns its name."""
        with self._lock:
            if not self._open:
                return ""
            self._open = False
            lines = ",\n".join(json.dumps(event) for event in self._events)
        Path(self.path).write_text(f"[\n{lines}\n]\n", encoding="utf-8")
        return self.path


def run(session: Any, feeds: Mapping[str, Any], profile: Profile, provider_name: str) -> list[Any]:
    """What `session.evaluate` returns, with an event for each node."""
    from ep.program import Runner
    from ep.provider import HOST

    opened = session._opened
    executable, graph, check = opened.executable, opened.graph, opened.feeds
    backend, host = session._backend, executable.context.host
    started = profile.now()
    device = Runner(backend.xp, host, backend.overrides)
    env = check.entered(feeds, backend)
    env |= {value: np.asarray(array) for value, array in executable.constants.items()}
    for index, step in enumerate(executable.steps):
        at_host = executable.placements[id(step)].provider == HOST
        runner = Runner(host, backend.xp, None) if at_host else device
        node_started = profile.now()
        if at_host:
            _fetch(step, env, backend)
        with np.errstate(all="ignore"):
            runner.evaluate([step], env)
        outputs = [env[value] for value in step.outputs if value is not None]
        backend.block([output for output in outputs if backend.is_array(output)])
        inputs = [env[value] for value in step.inputs if value is not None]
        profile.add("Node", f"{step.name}_kernel_time", node_started, **_arguments(
            step, index, inputs, outputs, "CPUExecutionProvider" if at_host else provider_name))  # fmt: skip
    results = [env[value] for value in graph.outputs]
    profile.add("Session", "SequentialExecutor::Execute", started)
    profile.add("Session", "model_run", started)
    return results


def _fetch(step: Any, env: dict[Any, Any], backend: Any) -> None:
    """Brings what a node on the host reads to the host."""
    from ep.program import to_host

    for value in step.reads():
        env[value] = to_host(env[value], backend.xp)


def _arguments(step: Any, index: int, inputs: list[Any], outputs: list[Any], provider: str) -> dict[str, Any]:
    size = sum(getattr(output, "nbytes", 0) for output in outputs)
    return {
        "op_name": step.lowering.key.op_type,
        "provider": provider,
        "node_index": str(index),
        "input_type_shape": [_described(value) for value in inputs],
        "output_type_shape": [_described(value) for value in outputs],
        "output_size": str(size),
        "activation_size": str(sum(getattr(value, "nbytes", 0) for value in inputs)),
        "parameter_size": "0",
    }


def _described(value: Any) -> dict[str, Any]:
    """`{"float": [2, 3]}` for a tensor."""
    if not hasattr(value, "shape"):
        return {type(value).__name__: [len(value)] if isinstance(value, list) else []}
    name = str(value.dtype).removeprefix("mlx.core.")
    try:
        return {NAMES[number_of(np.dtype(name))]: list(value.shape)}
    except (TypeError, RuntimeError):
        return {name: list(value.shape)}
