"""What is a model once its graph is open? Its nodes bound to lowerings and placed, as groups that can be compiled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ep.compile import Executable
from ep.compiled_group import CompiledGroup, Context, Counters
from ep.device_weights import DeviceWeights
from ep.fed_indices import FedIndices
from ep.feeds import FeedCheck, ValueInfo
from ep.identity import Unstorable, group_digest
from ep.library import Library
from ep.passes import prepare
from ep.placement import Placer
from ep.provider import HOST
from ep.weights import WeightStore

if TYPE_CHECKING:
    import onnx_ir as ir

    from ep.planned import Planned


class Opened:
    """A model with its graph, and how it runs: `run` fills an environment of values."""

    def __init__(
        self,
        model: ir.Model,
        store: WeightStore,
        name: str,
        providers: Sequence[Any],
        library: Library,
        counters: Counters,
        *,
        eager: bool,
    ) -> None:
        """Raises `InvalidModel` or `UnsupportedModel`, with all problems of the model in one error."""
        import ep.host_namespace as host

        self.model, self.store, self.backend = model, store, providers[0].backend
        self.providers = tuple(p.name for p in providers)
        self.graph = graph = prepare(model, store, name)
        backends = {p.name: p.backend for p in providers}
        placer = Placer([p for p in providers if p.name != HOST], graph.dtypes)
        weights = {name: DeviceWeights(backend, store) for name, backend in backends.items()}
        self.context = Context(placer, backends, host, weights, counters, eager, library)
        # Overridable initializers are inputs with a default; all others must be fed.
        self.inputs = tuple(ValueInfo.of(v, graph.dtypes.get(v)) for v in graph.inputs if v not in graph.defaults)
        self.output_infos = tuple(ValueInfo.of(v, graph.dtypes.get(v)) for v in graph.declared_outputs)
        self.overridable = tuple(ValueInfo.of(v, graph.dtypes.get(v)) for v in graph.defaults)
        self.outputs = graph.outputs
        values = {v.name: v for v in graph.inputs}
        self.feeds = FeedCheck(name, self.inputs, self.overridable, values, graph.defaults, FedIndices(graph))
        self.executable = Executable(graph.steps, graph.inputs, graph.outputs, graph.constants, self.context)

    def run(self, env: dict[Any, Any]) -> dict[Any, Any]:
        """The environment with the outputs."""
        return self.executable.run(env)

    def adopt(self, planned: Planned) -> None:
        """Goes on with the code and the weights of the plan by which the model ran before its graph was opened."""
        for runnable, group in zip(self.executable.runnables, planned.groups, strict=False):
            if not isinstance(runnable, CompiledGroup) or self._identity(runnable) != group.part.identity:
                continue
            runnable.cache.update(dict(group.cache))  # other threads may still add to it
            for past in list(group.calls):
                runnable.variants.bought(past, None)
            names = dict(zip(group.group.weights, runnable.group.weights, strict=True))
            runnable.weights.adopt(group.weights, names)

    def _identity(self, group: CompiledGroup) -> str | None:
        try:
            group.identity = group_digest(group.group, self.graph.constants, group.backend)
        except Unstorable:
            return None
        return group.identity

    def forget(self) -> None:
        """Drops device copies of weights and all compiled code; the next run makes both again."""
        for _, runnable in self.executable.every():
            runnable.forget()
        self.context.library.forget()
        for weights in self.context.weights.values():
            weights.drop()

    def place(self) -> None:
        """Brings the weights to the device, before a run would."""
        for _, runnable in self.executable.every():
            with getattr(runnable, "backend", self.backend).scope():
                runnable.place()
