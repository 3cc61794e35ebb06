"""What a user holds: `load` a model, `run` it on feeds, ask where it runs."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ep import context_saving
from ep.compile import Executable
from ep.compiled_group import Context, Counters
from ep.context_cache import open_cache
from ep.context_options import ContextOptions
from ep.context_reader import CONTEXTS
from ep.context_saving import Saved
from ep.context_shelf import registry_of, shelve
from ep.device_weights import DeviceWeights
from ep.errors import EpError, ExecutionError, InvalidInput, UnsupportedModel, did_you_mean
from ep.feeds import FeedCheck, ValueInfo
from ep.library import Library
from ep.loader import load_model
from ep.memory import trim
from ep.passes import prepare
from ep.placement import Placer
from ep.plan import Plan, describe_plan
from ep.program import to_host
from ep.provider import HOST
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

    `source` is a path, the bytes of a model file, or an `onnx.ModelProto`. `device` is `"auto"` (MLX on
    Apple silicon, else JAX's GPU, else JAX's CPU), `"mlx"`, `"jax"`, `"cpu"`, `"gpu"`, `"cuda:0"` or
    `"host"` (NumPy). `weights` is a `.safetensors` file, a `….safetensors.index.json`, or a list of such files:
    its tensors become the initializers (and the inputs) of the same names. `strict=True` refuses a model of
    which a node would fall back to the host. `options` are namespaced (`"jax.…"`, `"mlx.…"`), beside
    `"compile": "on" | "off"`, `"precision": "highest" | "fast"` (fast lets JAX multiply float32 in TF32 or
    bfloat16 on GPUs) and `"weights": "map" | "copy"`: files are mapped, so nobody may write into them while
    the session lives, unless they are copied. `"context.cache": "auto" | a directory | "off"` says where compiled
    code waits for the next process; `"trust_native": True` runs the compiled code that a context model brings,
    which is as safe as running a program from there. `providers` are `ExecutionProvider` objects to use, in this
    order, instead of `device`.

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
        self._providers = tuple(resolve(device, configured) if providers is None else given(providers))
        registry = registry_of(self._providers)
        model, store, self._name = load_model(
            source, weights, copy=own.get("weights") == "copy", sources=tuple(registry)
        )
        self._options = ContextOptions.of(own)
        library, eager = Library(open_cache(self._options.cache)), own.get("compile", "on") == "off"
        shelve(library, model.graph.meta[CONTEXTS], registry, self._options.trust_native, ahead=not eager)
        graph = prepare(model, store, self._name)
        self._graph, self._model = graph, model
        self._store = store
        self._context = self._make_context(graph, library, eager)
        # Overridable initializers are inputs with a default; all others must be fed.
        self.inputs = tuple(ValueInfo.of(v, graph.dtypes.get(v)) for v in graph.inputs if v not in graph.defaults)
        self.outputs = tuple(ValueInfo.of(v, graph.dtypes.get(v)) for v in graph.declared_outputs)
        self.overridable = tuple(ValueInfo.of(v, graph.dtypes.get(v)) for v in graph.defaults)
        self._names = tuple(o.name for o in self.outputs)
        self._feeds = FeedCheck(self._name, self.inputs, self.overridable, graph)
        self._executable = Executable(graph.steps, graph.inputs, graph.outputs, graph.constants, self._context)
        self._backend = self._providers[0].backend
        if warn or strict:
            self._report(strict)
        if self._options.write:
            context_saving.at_load(self, self._options)

    def _make_context(self, graph: Any, library: Library, eager: bool) -> Context:
        import ep.host_namespace as host

        backends = {p.name: p.backend for p in self._providers}
        placer = Placer([p for p in self._providers if p.name != HOST], graph.dtypes)
        weights = {name: DeviceWeights(backend, self._store) for name, backend in backends.items()}
        return Context(placer, backends, host, weights, Counters(), eager, library)

    def _report(self, strict: bool) -> None:
        if self._providers[0].name == HOST:
            return
        plan = describe_plan(self._name, self.providers, self._executable)
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
        self._context.library.keeping = True
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
        return describe_plan(self._name, self.providers, self._executable, self.weights.totals)

    @property
    def weights(self) -> WeightTable:
        """Per weight whether the device borrows the file's memory or has a copy, and why. Nothing is read."""
        return describe_weights(self._name, self._executable, self._context)

    def hibernate(self) -> None:
        """Drops device copies of weights and all compiled code, and keeps the plan. The next run makes both again.

        Weights that were computed at load stay; those of files are read from there again.
        """
        for _, runnable in self._executable.every():
            runnable.forget()
        self._context.library.forget()
        for weights in self._context.weights.values():
            weights.drop()
        trim()

    def wake(self) -> None:
        """Brings the weights to the device, before a run would; after `hibernate`, or after `load`."""
        for _, runnable in self._executable.every():
            with getattr(runnable, "backend", self._backend).scope():
                runnable.place()

    @property
    def counters(self) -> Counters:
        """Signatures found, compiled, and loaded as stored code; and the seconds that compiling took."""
        return self._context.counters

    def run(self, output_names: Sequence[str] | None, feeds: Mapping[str, Any] | None = None) -> list[Any]:
        """Runs the model and returns fresh, writable NumPy arrays (lists for sequences), in the order asked for.

        Raises:
            InvalidInput: a feed is missing, unknown, or of the wrong dtype, rank or shape, or has an index beyond what
                the model indexes with it (`IndexOutOfRange`); an output is unknown.
            ExecutionError: a node failed; the message names it.
        """
        wanted = self._values(output_names)
        try:
            with self._backend.scope():
                env = self._executable.run(self._feeds.check(feeds, self._backend, private=False))
                xp = self._backend.xp
                return [fresh(env[value], xp) for value in wanted]
        except EpError:
            raise
        except Exception as cause:
            raise self._failed(cause) from cause

    def evaluate(self, feeds: Mapping[str, Any]) -> list[Any]:
        """Runs the model on feeds that the caller has checked but for indices, and returns all results as they are.

        Feeds are NumPy arrays, arrays of the device's library, lists or dictionaries of them, or `None`. Results are
        the same, still computing perhaps, and may share memory with feeds. Call it within `backend.scope()`.
        """
        env = self._executable.run(self._feeds.entered(feeds, self._backend))
        return [env[value] for value in self._graph.outputs]

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
                entered = self._feeds.check(feeds, backend, private=True)
                env = self._executable.run(entered)
                results = apart([env[value] for value in self._graph.outputs], entered.values(), backend.handle)
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

    def _values(self, output_names: Sequence[str] | None) -> Sequence[Any]:
        if output_names is None:
            return self._graph.outputs
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
            return self._graph.outputs
        unknown = [n for n in output_names if n not in self._names]
        if unknown:
            raise InvalidInput(
                f"{self._name} has no output {', '.join(map(repr, unknown))}.",
                why=f"its outputs are {', '.join(map(repr, self._names))}." + did_you_mean(unknown[0], self._names),
                fix="ask for these names, or pass None for all.",
            )
        return [self._graph.outputs[self._names.index(n)] for n in output_names]

    def __repr__(self) -> str:
        return f"<ep.InferenceSession {self._name} on {', '.join(self.providers)}>"


class Outputs(Mapping[str, Any]):
    """Outputs by name, in the model's order."""

    def __init__(self, items: Any) -> None:
        self._items = dict(items)

    def __getitem__(self, name: str) -> Any:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return f"Outputs({', '.join(self._items)})"


def given(providers: Sequence[Any]) -> Sequence[Any]:
    """The user's own providers, if that is what they are."""
    wrong = [provider for provider in providers if not hasattr(provider, "backend")]
    if wrong or not providers:
        raise InvalidInput(
            f"providers must be a list of ExecutionProvider objects, not {list(providers)!r}.",
            fix="name the device instead, as in ep.load(model, 'jax'), or pass initialised providers.",
        )
    return providers


def apart(results: list[Any], entered: Iterable[Any], handle: Callable[[Any], Any]) -> list[Any]:
    """The results, none of which is a feed, a constant or another result: a write into one reaches no other."""
    seen = set(map(id, _arrays(entered)))

    def own(value: Any) -> Any:
        if isinstance(value, list):
            return [own(item) for item in value]
        if isinstance(value, np.ndarray):
            flags = value.flags
            value = value if flags.owndata and flags.writeable and id(value) not in seen else value.copy()
        elif id(value) in seen and value is not None:
            value = handle(value)
        seen.add(id(value))
        return value

    return [own(value) for value in results]


def _arrays(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list):
            yield from _arrays(value)
        else:
            yield value


def fresh(value: Any, xp: Any) -> Any:
    """The value as arrays of the user's own: NumPy, writable, shared with nobody."""
    if isinstance(value, list):
        return [fresh(item, xp) for item in value]
    if value is None or isinstance(value, dict):
        return value
    array = to_host(value, xp)
    return array if array.flags.writeable and array.flags.owndata and array is not value else np.array(array)
