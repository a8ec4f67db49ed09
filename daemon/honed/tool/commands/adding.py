"""Implements `hone add`, which adds models to the service."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from honed.protocol import strict
from honed.protocol.errors import HonedError
from honed.protocol.methods import REPOSITORY_MODEL_LOAD
from honed.protocol.results import ModelAdded
from honed.protocol.values import engine_name
from honed.runtime.client import Client
from honed.tool.output import Console, Output, Reporter, clean, line
from honed.tool.parser import (
    Parser,
    UsageError,
    add_compile_options,
    define,
    shape_sets,
    unique,
)

_SUFFIXES = (".onnx", ".honed")
_BY = {"cpu": " by the CPU engine", "gpu+cpu": " in parts"}


def define_add(add: Parser) -> None:
    """Define the arguments of `hone add`."""
    define(
        add,
        _add,
        details=(
            "Takes ONNX files with their external data beside them, compiled .honed files, or folders. "
            "Each file becomes a model with the file's name. If one fails, the others are added, and the "
            "exit status is 1."
        ),
        examples="""\
            hone add lightglue.onnx
            hone add detector.onnx recogniser.onnx
            hone add models/ --no-wait
            hone add yolox.onnx --name detector --shape images=1,3,416,416
            hone add yolox.onnx --shape images=1,3,416,416 --shape images=1,3,640,640
            hone add squeezenet.onnx --precision fp32 --replace
            hone add yolox.onnx --calibration pictures/
            hone add lightglue.onnx --device mali
            hone add lightglue.onnx --device fastest
            hone add silero_vad.onnx --no-wait
            hone add yolox.onnx --engine opencl""",
    )
    add.add_argument(
        "files", metavar="FILE", type=Path, nargs="+", help="an ONNX or .honed file, or a folder of such"
    )
    add.add_argument("--name", metavar="N", help="the name to serve it by (default: the file's name)")
    add_compile_options(add, several=True)
    _add_serving_options(add)


def _add_serving_options(add: argparse.ArgumentParser) -> None:
    add.add_argument(
        "--replace",
        action="store_true",
        help="take the place of a model of that name once the new one is ready",
    )
    add.add_argument(
        "--device",
        metavar="SPEC",
        help="the device of the service that serves it: part of its name, or 'fastest' to compare all "
        "(default: what the configuration says)",
    )
    add.add_argument(
        "--engine",
        type=engine_name,  # Older names, too
        choices=("fastest", "opencl", "onnxruntime"),
        help="the engine that serves it: the faster one, its compiled form, or ONNX Runtime on the processor "
        "(default: what the configuration says)",
    )
    add.add_argument(
        "--state",
        action="append",
        type=_state,
        default=[],
        metavar="OUT=IN",
        help="in a sequence, output OUT is input IN of the next request; give one for each "
        "(default: by the file's metadata, or by names and shapes)",
    )
    waiting = add.add_mutually_exclusive_group()
    waiting.add_argument(
        "--wait",
        action="store_true",
        default=True,
        help="wait until it is compiled or cannot be (default); the CPU engine serves it meanwhile",
    )
    waiting.add_argument(
        "--no-wait", dest="wait", action="store_false", help="end as soon as it is served; compiling goes on"
    )


def _state(text: str) -> tuple[str, str]:
    output, equals, given = text.partition("=")
    if not (output and equals and given):
        raise argparse.ArgumentTypeError(f"{text!r} is not OUT=IN")
    return output, given


def _add(arguments: argparse.Namespace, output: Output) -> int:
    files = list(_files(arguments.files))
    if len(files) == 1:
        with Client(arguments.socket) as client:
            added = _add_model(client, files[0], arguments)
        output.emit(added, lambda console: _print_added(console, added))
        return 0
    for option, given in (
        ("--name", arguments.name),
        ("--shape", arguments.shape),
        ("--state", arguments.state),
    ):
        if given:
            raise UsageError(
                f"{option} is of one model, and {len(files)} files are given; add that one by itself"
            )
    return _add_several(files, arguments, output)


def _add_several(files: Sequence[Path], arguments: argparse.Namespace, output: Output) -> int:
    """Add files one after the other; report each failure at once, and return 1 if there was any."""
    lines: list[dict[str, object]] = []
    failed = 0
    for file in files:
        try:
            with Client(arguments.socket) as client:
                added = _add_model(client, file, arguments)
        except HonedError as error:
            failed += 1
            print(f"hone: {clean(str(file))}: {clean(str(error))}", file=sys.stderr, flush=True)
            lines.append(
                {"file": str(file), "added": None, "error": {"code": error.code, "message": str(error)}}
            )
            continue
        lines.append({"file": str(file), "added": strict.to_plain(added), "error": None})
        if not output.json:
            output.emit(added, lambda console, added=added: _print_added(console, added))  # type: ignore[misc]
    if output.json:
        output.emit({"files": lines}, lambda _: None)
    return int(failed > 0)


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    """Yield files, and the models in folders by name; raise UsageError for a folder without any."""
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        found = sorted(file for file in path.iterdir() if file.suffix in _SUFFIXES and file.is_file())
        if not found:
            raise UsageError(f"{path} has no {' or '.join(_SUFFIXES)} file; name a folder that has")
        yield from found


def _add_model(client: Client, file: Path, arguments: argparse.Namespace) -> ModelAdded:
    shapes, *variants = shape_sets(arguments.shape)
    with Reporter(f"add {arguments.name or file.name}") as reporter:
        result = client.add(
            file,
            name=arguments.name,
            shapes=shapes,
            variants=variants,
            precision=arguments.precision,
            replace=arguments.replace,
            device=arguments.device,
            calibration=arguments.calibration,
            engine=arguments.engine,
            wait=arguments.wait,
            state=unique("--state", arguments.state),
            progress=lambda news: reporter.update(news["stage"], news["fraction"], news["text"]),
        )
    return REPOSITORY_MODEL_LOAD.result_of(result)


def _print_added(console: Console, added: ModelAdded) -> None:
    compiled = f"{added.kernels} kernels, {added.launches} launches an inference, " if added.kernels else ""
    by = _BY.get(added.engine, "")
    line(console, f"{added.model_name} is served{by}: {compiled}added in {added.seconds:.1f} s.")
    if added.engine_why:
        line(console, f"engine: {added.engine_why}")
    for note in added.notes:
        line(console, f"note: {note}")
