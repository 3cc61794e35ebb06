"""Which fusions should onnxruntime's optimizer make? It is not here; the class can be imported and says so."""

from __future__ import annotations

from typing import Any

from ep.onnxruntime.options import failure_of


class FusionOptions:
    """Unsupported: models are optimised when they are loaded; rewriting files needs the genuine package."""

    def __init__(self, model_type: str) -> None:
        raise _refusal()

    @staticmethod
    def parse(args: Any) -> FusionOptions:
        """Unsupported, as the class is."""
        raise _refusal()


def _refusal() -> Exception:
    return failure_of("onnxruntime.transformers", "run this step where the genuine onnxruntime is installed.")
