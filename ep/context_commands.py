"""What does `ep compile` do? It compiles a model for some shapes, into a context model."""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ep import cli_words
from ep.context_cache import ContextNotice
from ep.errors import InvalidInput, counted
from ep.summary import size as byte_size
from ep.targets import check_target

if TYPE_CHECKING:
    from ep.context_writer import Saved


def add_command(commands: Any, command: Any, show: Any) -> None:
    """Register the command; `command` makes a parser, `show` prints an object or its `to_dict()`."""
    made = command(commands, "compile", lambda options: show(compile_model(options), options), COMPILE)
    made.add_argument("model", help="path of an ONNX file")
    made.add_argument("-o", "--output", metavar="FILE", help="path of the new model (default MODEL_ctx.onnx)")
    made.add_argument("--device", default="auto", help="auto, mlx, jax, cpu, gpu or cuda:0")
    made.add_argument(
        "--shape",
        action="append",
        default=[],
        type=shape,
        metavar="NAME:1x128",
        help="shape of an input, or size of a dimension; a name that comes again begins another signature",
    )
    cli_words.add_option(made)
    place = made.add_mutually_exclusive_group()
    place.add_argument("--embed", action="store_true", help="store the code in the model file")
    place.add_argument("--external", action="store_true", help="store it in a file beside the model (default)")
    made.add_argument("--portable-only", action="store_true", help="store the graph alone, for any machine; no code")


COMPILE = "compile a model for some shapes, into a model that starts without compiling"


def shape(text: str) -> tuple[str, tuple[int, ...]]:
    """`name:1x128` as name and shape; the name itself may hold colons."""
    name, separator, sizes = text.rpartition(":")
    parts = sizes.split("x") if sizes else []
    if not separator or not name or not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME:1x128")
    return name, tuple(map(int, parts))


def signatures(shapes: Sequence[tuple[str, tuple[int, ...]]]) -> list[dict[str, tuple[int, ...]]]:
    """The shapes in groups of different names."""
    found: list[dict[str, tuple[int, ...]]] = [{}]
    for name, sizes in shapes:
        if name in found[-1]:
            found.append({})
        found[-1][name] = sizes
    return found


@dataclass(frozen=True, slots=True)
class Compiled:
    """What `ep compile` did."""

    saved: Saved
    signatures: int
    compiled: int
    loaded: int
    seconds: float
    notices: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The facts as plain data, ready for JSON."""
        saved = self.saved
        return {
            "model": str(saved.model), "blobs": list(map(str, saved.blobs)), "blob_bytes": saved.blob_bytes,
            "weights": list(map(str, saved.weights)),
            "partitions": saved.partitions, "functions": saved.functions, "left_out": list(saved.left_out),
            "signatures": self.signatures, "compiled": self.compiled, "loaded": self.loaded,
            "seconds": self.seconds, "notices": list(self.notices),
        }  # fmt: skip

    def __str__(self) -> str:
        saved = self.saved
        files = ", ".join(str(path) for path in (saved.model, *saved.blobs, *saved.weights))
        partitions, functions = counted(saved.partitions, "partition"), counted(saved.functions, "compiled function")
        lines = [
            f"{files}: {partitions}, {functions} for {counted(self.signatures, 'signature')}, "
            f"{byte_size(saved.blob_bytes)}; {self.compiled} compiled and {self.loaded} found in the cache, "
            f"in {self.seconds:.1f} s"
        ]
        return "\n".join([*lines, *map("note: {}".format, (*saved.left_out, *self.notices))])


def compile_model(options: argparse.Namespace) -> Compiled:
    """Compile a model for the shapes asked for, and write the context model."""
    from ep.context_saving import target_of
    from ep.session import load

    started = time.perf_counter()
    if options.output:
        check_target(options.output, [options.model])
    with warnings.catch_warnings(record=True) as caught, _progress(options.json) as progress:
        warnings.simplefilter("always", ContextNotice)
        session = load(options.model, options.device, options=cli_words.given(options))
        wanted = signatures(options.shape)
        dynamic = not options.shape and any(None in _static(info) for info in session.inputs)
        if options.portable_only or dynamic:
            wanted = []
        if dynamic and not options.portable_only:
            raise InvalidInput(
                f"{session.name} has inputs with dynamic shapes, and --shape says for which to compile.",
                why="its inputs are " + "; ".join(map(str, session.inputs)) + ".",
                fix="pass --shape NAME:1x128 for each of them, or --portable-only to store the graph alone.",
            )
        target_of(session, options.output)  # before the work is done
        if wanted:
            session.warmup(wanted, progress=progress)
        saved = session.save_context(options.output, embed=options.embed, portable_only=options.portable_only)
    translate = cli_words.translator(options.parser)
    notices = tuple(translate(str(w.message)) for w in caught if issubclass(w.category, ContextNotice))
    counters = session.counters
    seconds = time.perf_counter() - started
    return Compiled(saved, len(wanted), counters.misses, counters.loaded, seconds, notices)


def _static(info: Any) -> list[int | None]:
    return [None] if info.shape is None else [d if isinstance(d, int) else None for d in info.shape]


@contextmanager
def _progress(quiet: bool) -> Iterator[Any]:
    """A bar on the terminal, with the time that is spent, over the signatures that are compiled."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
