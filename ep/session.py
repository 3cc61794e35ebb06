"""What a user holds: `load` a model, `run` it on feeds, ask where it runs."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from ep import context_saving
from ep.compiled_group import Counters
from ep.context_cache import open_cache
from ep.context_options import ContextOptions
from ep.context_reader import read_contexts
from ep.context_saving import Saved
from ep.context_shelf import registry_of, shelve
from ep.errors import EpError, ExecutionError, InvalidInput, UnsupportedModel, did_you_mean
from ep.library import Library
from ep.loader import build_model, read_proto
from ep.memory import trim
from ep.opened import Opened
from ep.plan import Plan, describe_plan
from ep.planned import NeedsGraph, Planned, Plans
from ep.provider import HOST
from ep.results import Outputs, apart, fresh
from ep.warmup import Shapes, warm_up
from ep.weight_report import WeightTable, describe_weights


class HostFallbackWarning(UserWarning):
    """Some nodes of a model run on the host, because the chosen provider declined them."""


def load(
    source: Any,
    device: str = "auto",
    *,
    weights: Any = None,
    strict: bool = False,
    options: Mapping[str, Any] | None = None,
    providers: Sequence[Any] | None = None,
) -> InferenceSession:
    """Loads an ONNX model and plans where its nodes run; nothing is compiled before the first run.

    `source` is a path, the bytes of a model file, or an `onnx.ModelProto`. `device` is `"auto"` (MLX on Apple
    silicon, else JAX's GPU, else JAX's CPU), `"mlx"`, `"jax"`, `"cpu"`, `"gpu"`, `"cuda:0"` or `"host"`
    (NumPy); `"jax:cpu"` and `"mlx:cpu"` are devices of one library. `weights` is a `.safetensors` file, a
    `….safetensors.index.json`, or a list of such files: its tensors become the initializers (and the inputs) of
    the same names. `strict=True` refuses a model of which a node would fall back to the host. `options` are
    namespaced (`"jax.…"`, `"mlx.…"`), beside `"compile": "on" | "off"`, `"precision": "highest" | "fast"` (fast
    lets JAX multiply float32 in TF32 or bfloat16 on GPUs) and `"weights": "map" | "copy"`: files are mapped, so
    nobody may write into them while the session lives, unless they are copied. `"context.cache": "auto" | a
    directory | "off"` says where compiled code waits for the next process; `"trust_native": True` runs the
    compiled code that a context model brings, which is as safe as running a program from there. `providers` are
    `ExecutionProvider` objects to use, in this order, instead of `device`.

    Raises:
        InvalidModel: the file is missing, damaged or breaks the specification.
        UnsupportedModel: an operator has no implementation, or `strict` found a fallback.
        BackendUnavailable: the device is not there, or its library is not installed.

    >>> session = load("model.onnx")  # doctest: +SKIP
    >>> outputs = session.run(None, {"x": x})  # doctest: +SKIP
    """
    return InferenceSession(source, device, weights=weights, strict=strict, options=options, providers=providers)


class InferenceSession:
    """A loaded model. Every method may be called from any thread."""

    def __init__(
        self,
        source: Any,
        device: str = "auto",
        *,
        weights: Any = None,
        strict: bool = False,
        options: Mapping[str, Any] | None = None,
        providers: Sequence[Any] | None = None,
        warn: bool = True,
    ) -> None:
        from ep.devices import resolve, split_options

        own, configured = split_options(options or {})
        self._configured = configured
        self._providers = tuple(resolve(device, configured) if providers is None else given(providers))
        self._backend = self._providers[0].backend
        registry = registry_of(self._providers)
        self._options, self._eager = ContextOptions.of(own), own.get("compile", "on") == "off"
        proto, self._store, self._name = read_proto(source, copy=own.get("weights") == "copy")
        contexts = read_contexts(proto, self._store.directories, self._name, tuple(registry))
        brought = () if contexts is None else contexts.brought
        self._library, self._counters = Library(open_cache(self._options.cache)), Counters()
        shelve(self._library, brought, registry, self._options.trust_native, ahead=not self._eager)
        self._lock = threading.RLock()
        self._plans = None if weights is not None or self._eager else self._plans_of(proto, contexts)
        self._build = partial(build_model, proto, self._store, self._name, contexts, weights)
        self._full: Opened | None = None
        self._planned = None if self._plans is None or self._options.write else self._plans.find()
        self._running: Opened | Planned = self._planned or self._opened
        self.inputs, self.outputs = self._running.inputs, self._running.output_infos
        self.overridable = self._running.overridable
        self._names = tuple(o.name for o in self.outputs)
        if (warn or strict) and self._planned is None:  # a plan has no nodes on the host
            self._report(strict)
        if self._options.write:
            context_saving.at_load(self, self._options)

    def _plans_of(self, proto: Any, contexts: Any) -> Plans | None:
        """The stored plans of the model, for a single provider that runs stored code without the graph."""
        others = [p for p in self._providers[1:] if p.name != HOST]
        if others or not self._backend.loads_in_threads or (self._library.cache is None and not self._library.shelf):
            return None
        return Plans.of(
            proto, contexts, self._store, self._name, self._backend, self._configured, self._library, self._counters
        )

    @property
    def _opened(self) -> Opened:
        """The model with its graph, which is opened when it is first needed."""
        with self._lock:
            if self._full is None:
                self._full = Opened(
                    self._build(), self._store, self._name, self._providers, self._library, self._counters,
                    eager=self._eager,
                )  # fmt: skip
                if self._planned is not None:
                    self._full.adopt(self._planned)
                self._running, self._planned = self._full, None
                del self._build  # and with it the protobuf
            return self._full

    def _report(self, strict: bool) -> None:
        if self._providers[0].name == HOST:
            return
        plan = describe_plan(self._name, self.providers, self._opened.executable)
        fallbacks = plan.fallbacks
        if not fallbacks:
            return
        lines = [f"'{n.node}' ({n.op}): {n.reason}" for n in fallbacks]
        if strict:
            raise UnsupportedModel(
                f"{len(lines)} of {len(plan.nodes)} nodes of {self._name} would run on the host:\n  "
                + "\n  ".join(lines),
                why="strict=True refuses every fallback.",
                fix="load it without strict=True, or choose another device.",
            )
        shown = "; ".join(lines[:3]) + ("; …" if len(lines) > 3 else "")
        warnings.warn(
            f"{len(lines)} of {len(plan.nodes)} nodes of {self._name} run on the host: {shown} "
            "(session.plan lists all)",
            HostFallbackWarning,
            stacklevel=4,
        )

    def warmup(
        self, shapes: Shapes | Sequence[Shapes] = (), *, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Compiles before the first run: for one signature, or for several, some at a time.

        Each is a mapping from inputs to shapes, or from symbolic dimensions to sizes; what is static may be left out.
        The model runs on zeros of these shapes; where contents matter, give arrays instead of shapes. `progress` is
        called with the numbers of signatures done and in all.

        Raises:
            InvalidInput: a name is unknown, or a size is missing.
            ExecutionError: the model fails on zeros.

        >>> session.warmup([{"input_ids": (1, 128)}, {"input_ids": (8, 128)}])  # doctest: +SKIP
        """
        self._library.keeping = True
        several = isinstance(shapes, Iterable) and not isinstance(shapes, Mapping)
        signatures: list[Any] = list(shapes) or [{}] if several else [shapes]
        warm_up(self, signatures, progress, self._backend.compiles_in_threads)

    def save_context(
        self, path: str | os.PathLike[str] | None = None, *, embed: bool = False, portable_only: bool = False
    ) -> Saved:
        """Writes a context model: compiled groups as `com.microsoft::EPContext` nodes, with the code compiled so far.

        `path` is `<model>_ctx.onnx` beside the model if not given. The stored code is in the model file with `embed`,
        else in a file beside it; `portable_only` leaves out what serves this kind of machine alone.

        Raises:
            UnsupportedContext: nothing of the model can be stored.
            InvalidInput: the path is unknown or cannot be written.

        >>> session.save_context("model_ctx.onnx")  # doctest: +SKIP
        """
        return context_saving.save(self, path, embed=embed, portable_only=portable_only)

    @property
    def name(self) -> str:
        """The model's file name, or its graph's."""
        return self._name

    @property
    def providers(self) -> tuple[str, ...]:
        """Names of the providers, in order of preference."""
        return tuple(p.name for p in self._providers)

    @property
    def plan(self) -> Plan:
        """Per node the provider and the reason, per partition what enters and leaves."""
        return describe_plan(self._name, self.providers, self._opened.executable, self.weights.totals)

    @property
    def weights(self) -> WeightTable:
        """Per weight whether the device borrows the file's memory or has a copy, and why. Nothing is read."""
        return describe_weights(self._name, self._opened.executable, self._opened.context)

    def hibernate(self) -> None:
        """Drops device copies of weights and all compiled code, and keeps the plan. The next run makes both again.

        Weights that were computed at load stay; those of files are read from there again.
        """
        self._running.forget()
        trim()

    def wake(self) -> None:
        """Brings the weights to the device, before a run would; after `hibernate`, or after `load`."""
        self._running.place()

    @property
    def counters(self) -> Counters:
        """Signatures found, compiled, and loaded as stored code; and the seconds that compiling took."""
        return self._counters

    def run(self, output_names: Sequence[str] | None, feeds: Mapping[str, Any] | None = None) -> list[Any]:
        """Runs the model and returns fresh, writable NumPy arrays (lists for sequences), in the order asked for.

        Raises:
            InvalidInput: a feed is missing, unknown, or of the wrong dtype, rank or shape, or has an index beyond what
                the model indexes with it (`IndexOutOfRange`); an output is unknown.
            ExecutionError: a node failed; the message names it.
        """
        wanted = self._numbers(output_names)
        try:
            with self._backend.scope():
                running, _, env = self._computed(feeds, private=False)
                xp = self._backend.xp
                return [fresh(env[running.outputs[number]], xp) for number in wanted]
        except EpError:
            raise
        except Exception as cause:
            raise self._failed(cause) from cause

    def evaluate(self, feeds: Mapping[str, Any]) -> list[Any]:
        """Runs the model on feeds that the caller has checked but for indices, and returns all results as they are.

        Feeds are NumPy arrays, arrays of the device's library, lists or dictionaries of them, or `None`. Results are
        the same, still computing perhaps, and may share memory with feeds. Call it within `backend.scope()`.
        """
        running, _, env = self._computed(feeds, checked=True)
        return [env[value] for value in running.outputs]

    def _computed(
        self, feeds: Mapping[str, Any] | None, *, private: bool = False, checked: bool = False
    ) -> tuple[Opened | Planned, dict[Any, Any], dict[Any, Any]]:
        """What ran the model on feeds, the environment that it got, and the one that it gave."""
        running = self._running
        try:
            entered = self._entered(running, feeds, private, checked)
            env = running.run(entered)
        except NeedsGraph:
            running = self._opened
            entered = self._entered(running, feeds, private, checked)
            env = running.run(entered)
        if self._library.unplanned and self._plans is not None:
            self._plans.keep(self._opened)
        return running, entered, env

    def _entered(self, running: Opened | Planned, feeds: Any, private: bool, checked: bool) -> dict[Any, Any]:
        if checked:
            return running.feeds.entered(feeds, self._backend)
        return running.feeds.check(feeds, self._backend, private)

    def __call__(self, feeds: Mapping[str, Any] | None = None, /, **named: Any) -> Outputs:
        """Runs the model and returns a mapping from output names to arrays that stay on the device.

        The call does not wait for the device. Results of nodes on the host are NumPy arrays. Where the
        library would narrow 64-bit arrays in the caller's code (JAX outside its x64 scope), they come as
        `TensorView`, which keeps their width.
        """
        backend = self._backend
        if feeds is None or (named and isinstance(feeds, Mapping)):
            feeds = {**(feeds or {}), **named}
        try:
            with backend.scope():
                running, entered, env = self._computed(feeds, private=True)
                results = apart([env[value] for value in running.outputs], entered.values(), backend.handle)
                backend.start([r for r in results if backend.is_array(r)])
        except EpError:
            raise
        except Exception as cause:
            raise self._failed(cause) from cause
        return Outputs(zip(self._names, map(self._providers[0].release, results), strict=True))

    def _failed(self, cause: Exception) -> ExecutionError:
        """What the library raises where results are computed, at the end of a run: no node can be named there."""
        return ExecutionError(
            f"the results of {self._name} cannot be computed on {self.providers[0]}.",
            why=f"{type(cause).__name__}: {cause}",
            fix="call the session outside of functions that a library traces (jit, compile, vmap, grad), with smaller "
            "inputs if memory is short; run it with options={'compile': 'off'} to learn which node fails.",
        )

    def _numbers(self, output_names: Sequence[str] | None) -> Sequence[int]:
        if output_names is None:
            return range(len(self._names))
        if isinstance(output_names, Mapping) or hasattr(output_names, "__array__"):
            raise InvalidInput(
                f"the output names are a {type(output_names).__name__}, not a list or None.",
                why="the feeds are the second argument.",
                fix="write session.run(None, {'name': array}), or session({'name': array}).",
            )
        if isinstance(output_names, str):
            raise InvalidInput(
                f"the output names are the text {output_names!r}, not a list.", fix=f"write [{output_names!r}]."
            )
        if not output_names:
            return range(len(self._names))
        unknown = [n for n in output_names if n not in self._names]
        if unknown:
            raise InvalidInput(
                f"{self._name} has no output {', '.join(map(repr, unknown))}.",
                why=f"its outputs are {', '.join(map(repr, self._names))}." + did_you_mean(unknown[0], self._names),
                fix="ask for these names, or pass None for all.",
            )
        return [self._names.index(n) for n in output_names]

    def __repr__(self) -> str:
        return f"<ep.InferenceSession {self._name} on {', '.join(self.providers)}>"


def given(providers: Sequence[Any]) -> Sequence[Any]:
    """The user's own providers, if that is what they are."""
    wrong = [provider for provider in providers if not hasattr(provider, "backend")]
    if wrong or not providers:
        raise InvalidInput(
            f"providers must be a list of ExecutionProvider objects, not {list(providers)!r}.",
            fix="name the device instead, as in ep.load(model, 'jax'), or pass initialised providers.",
        )
    return providers
