"""The command line: `ep run | inspect | pack | compile | cache | doctor | demo`.

Exit codes: 0 all went well; 1 the model, or its run, failed; 2 the arguments are wrong; 3 a provider or a
package that the command needs is not available.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ep import cache_commands, cli_words, context_commands
from ep.errors import BackendUnavailable, EpError, InvalidInput

OK, FAILED, USAGE, UNAVAILABLE = 0, 1, 2, 3
CODES = ((BackendUnavailable, UNAVAILABLE), (InvalidInput, USAGE), (EpError, FAILED))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; errors are printed as what, why and fix."""
    commands = parser()
    if not (sys.argv[1:] if arguments is None else arguments):
        commands.print_help(sys.stderr)
        return USAGE
    options = commands.parse_args(arguments)
    try:
        return options.command(options)
    except EpError as error:
        show_error(error, options)
        return next(code for kind, code in CODES if isinstance(error, kind))
    except (BrokenPipeError, KeyboardInterrupt):
        return 130


def parser() -> argparse.ArgumentParser:
    """All commands with their arguments."""
    top = argparse.ArgumentParser(prog="ep", description="Run and look into ONNX models.")
    top.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = top.add_subparsers(metavar="COMMAND", required=True)
    run = _command(commands, "run", run_model, "run a model on arrays from files, or on random ones")
    run.add_argument("model", help="path of an ONNX file")
    run.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="NAME=SOURCE",
        help="an .npy file, an .npz file or 'random' (the default of every input)",
    )
    _add_dim(run, "size of a symbolic dimension in random inputs (default 1)")
    run.add_argument("--weights", action="append", metavar="FILE", help="safetensors files with the model's weights")
    run.add_argument("--seed", type=_count, default=0, help="seed of random inputs (default 0)")
    run.add_argument("--device", default="auto", help="auto, mlx, jax, cpu, gpu, cuda:0 or host")
    run.add_argument("--strict", action="store_true", help="refuse any node that would run on the host")
    run.add_argument("--trust-native", action="store_true", help="run the compiled code that a context model brings")
    cli_words.add_option(run)
    run.add_argument("--repeat", type=_count, default=0, metavar="N", help="run N times more, and time them")
    run.add_argument("--plan", action="store_true", help="show where each node runs, and why")
    run.add_argument("--save", metavar="FILE.npz", help="write the outputs to a file")
    look = _command(commands, "inspect", inspect_model, "what is in a model, and which provider takes what")
    look.add_argument("model", help="path of an ONNX file")
    _add_dim(look, "size of a symbolic dimension, for the estimate of memory (default 1)")
    look.add_argument("--weights", action="store_true", help="which weights a device borrows, which it copies, and why")
    look.add_argument("--device", help="the plan, the memory and the weights of one device: auto, mlx, jax, cpu, …")
    cli_words.add_option(look)
    pack = _command(commands, "pack", pack_model, "write a model again so that every weight can be borrowed")
    pack.add_argument("model", help="path of an ONNX file")
    pack.add_argument("out", help="path of the new model, or a folder for it; its data files are written beside it")
    kind = "kind of the data files (default safetensors)"
    pack.add_argument("--format", choices=("safetensors", "external"), default="safetensors", help=kind)
    pack.add_argument("--weights", action="append", metavar="FILE", help="safetensors files with the model's weights")
    converted = "also store, converted, the weights that this provider would convert at the first run"
    pack.add_argument("--for", dest="provider", choices=("jax", "mlx"), default="", help=converted)
    _add_dim(pack, "size of a symbolic dimension, with --for (default 1)")
    pack.add_argument("--no-fold", action="store_true", help="keep nodes whose results are constant")
    pack.add_argument("--shard", type=_bytes, metavar="SIZE", help="spread more data than this over files: 2GB, 500MB")
    context_commands.add_command(commands, _command, show)
    cache_commands.add_command(commands, _command, show)
    _command(commands, "doctor", doctor, "which providers work on this machine, and why others do not")
    files = _command(commands, "demo", demo, "tell the types of files with a published model, on every provider")
    files.add_argument("files", nargs="*", help="files to look at (default: those of this project)")
    return top


def _command(commands: Any, name: str, function: Any, text: str) -> argparse.ArgumentParser:
    made = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    made.add_argument("--json", action="store_true", help="print one JSON object, for machines")
    made.set_defaults(command=function, parser=made)
    return made


def _add_dim(command: argparse.ArgumentParser, text: str) -> None:
    command.add_argument("--dim", action=_Dims, default={}, type=_dim, metavar="NAME=N", help=text)


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        import ep

        print(f"ep-runtime {ep.__version__}")
        parser.exit()


class _Dims(argparse.Action):
    """Sizes by name; each name once."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, value: Any, option: str | None = None) -> None:
        name, size = value
        if name in namespace.dim:
            parser.error(f"argument {option}: '{name}' is given twice")
        namespace.dim = namespace.dim | {name: size}


def _dim(text: str) -> tuple[str, int]:
    name, separator, size = text.rpartition("=")
    if not separator or not name or not size.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=N")
    return name, int(size)


def _bytes(text: str) -> int:
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "": 1}
    number = text.rstrip("KMGiBkmgb")
    unit = text[len(number) :].upper()
    if not number.isdecimal() or not int(number) or unit not in units:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size, such as 500MB or 2GiB")
    return int(number) * units[unit]


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not 0 or a positive number")
    return int(text)


# Commands.


def run_model(options: argparse.Namespace) -> int:
    from ep.targets import check_replaced, check_target
    from ep.trial import try_model

    if options.save:  # before the model runs
        inputs = (source.rpartition("=")[2] for source in options.input)
        check_replaced(check_target(options.save, [options.model, *(options.weights or ()), *inputs]))
    with _notes(options):
        trial = try_model(
            options.model,
            options.device,
            weights=options.weights,
            strict=options.strict,
            options=cli_words.given(options),
            given=options.input,
            dims=options.dim,
            seed=options.seed,
            repeat=options.repeat,
        )
    if options.save:
        trial.save(options.save)
    if options.json:
        return print_json(trial.to_dict(with_plan=options.plan))
    print_rich(trial.with_plan() if options.plan else trial)
    return OK


@contextmanager
def _notes(options: argparse.Namespace) -> Iterator[None]:
    """Shows warnings as notes; what runs on the host is part of what is printed."""
    from ep.session import HostFallbackWarning

    translate = cli_words.translator(options.parser)

    def note(message: Warning | str, *_: Any, **__: Any) -> None:
        """The line of Python that a warning comes from says nothing to who runs a command."""
        print(f"note: {translate(str(message))}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HostFallbackWarning)
        warnings.showwarning = note
        yield


def inspect_model(options: argparse.Namespace) -> int:
    from ep.summary import summarize

    if options.weights:
        return inspect_weights(options)
    with _notes(options):
        summary = summarize(options.model, options.dim, options.device or "", cli_words.given(options))
    if options.json:
        print_json(summary.to_dict())
    else:
        print_rich(summary)
    return FAILED if summary.problems else OK


def inspect_weights(options: argparse.Namespace) -> int:
    from ep.session import load

    with _notes(options):
        weights = load(options.model, options.device or "auto", options=cli_words.given(options)).weights
    if options.json:
        return print_json(weights.to_dict())
    print_rich(weights)
    return OK


def pack_model(options: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.progress import Progress

    from ep.packing import pack

    quiet = options.json or not sys.stderr.isatty()
    with Progress(console=Console(stderr=True), transient=True, disable=quiet) as bar:
        task = bar.add_task("writing", total=None)
        packed = pack(
            options.model,
            options.out,
            format=options.format,
            weights=options.weights,
            provider=options.provider,
            fold=not options.no_fold,
            shapes=options.dim,
            shard_bytes=options.shard,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    if options.json:
        return print_json(packed.to_dict())
    print_rich(str(packed))
    return OK


def doctor(options: argparse.Namespace) -> int:
    from ep.doctor import examine

    report = examine()
    if options.json:
        print_json(report.to_dict())
    else:
        print_rich(report)
    return OK if report.works else UNAVAILABLE


def demo(options: argparse.Namespace) -> int:
    from ep.demo import run_demo

    report = run_demo(options.files)
    if options.json:
        print_json(report.to_dict())
    else:
        print_rich(report)
    return OK


# Printing.


def show(report: Any, options: argparse.Namespace) -> int:
    if options.json:
        return print_json(report.to_dict())
    print_rich(str(report))
    return OK


def print_json(data: Any) -> int:
    print(json.dumps(data, indent=2, default=str, allow_nan=False))
    return OK


def print_rich(thing: Any) -> None:
    """Prints tables and text; without a terminal, lines are as wide as they need to be."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else 140
    Console(width=width, highlight=False, markup=False, emoji=False).print(thing)  # names are not markup


def show_error(error: EpError, options: argparse.Namespace) -> None:
    kind, translate = type(error).__name__, cli_words.translator(options.parser)
    where = f"{error.at}: " if error.at else ""
    what, why, fix = map(translate, (where + error.what, error.why, error.fix))
    if options.json:
        print_json({"error": {"kind": kind, "what": what, "why": why, "fix": fix}})
        return
    from rich.console import Console
    from rich.text import Text

    text = Text.assemble((f"{kind}: ", "bold red"), what)
    for label, part in (("Why", why), ("Fix", fix)):
        if part:
            text.append(f"\n{label}: ", "bold").append(part, "not bold")
    Console(stderr=True, highlight=False, soft_wrap=True).print(text)


if __name__ == "__main__":
    sys.exit(main())
