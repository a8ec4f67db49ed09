"""Command infer: run a model once."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from honed.protocol.methods import MODEL_METADATA
from honed.protocol.params import ModelParams
from honed.runtime.calling.calls import InferenceAnswer
from honed.runtime.client import Client
from honed.tool import arrays
from honed.tool.arrays import Array, ArraySummary
from honed.tool.output import Console, Output, line, shape_text, table
from honed.tool.parser import Parser, define, named_file, patience, unique


def define_infer(infer: Parser) -> None:
    """What `hone infer` takes."""
    define(
        infer,
        _infer,
        details="Prints a summary of each output and writes it to OUTPUT-DIR/<output>.npy.",
        examples="""\
            hone infer lightglue --random
            hone infer mobilenet --input image=cat.npy --output-dir out
            hone infer mobilenet --input image=cat.npy --output-dir out --json""",
    )
    add_input_options(infer)
    infer.add_argument(
        "--output-dir", metavar="D", type=Path, help="folder for the outputs (default: they are not kept)"
    )
    infer.add_argument(
        "--timeout",
        metavar="S",
        type=patience,
        default=60.0,
        help="seconds to wait (default 60); inf: no limit",
    )


def add_input_options(parser: Parser) -> None:
    """The model and what to run it on, as infer and bench take them."""
    parser.add_argument("model", metavar="M", help="name of the model")
    parser.add_argument(
        "--input",
        action="append",
        type=named_file,
        default=[],
        metavar="NAME=FILE.npy",
        help="an input; give one for each",
    )
    parser.add_argument("--random", action="store_true", help="make up the inputs that are not given")
    parser.add_argument("--seed", type=int, default=0, help="of made-up inputs (default 0)")


def inputs(client: Client, arguments: argparse.Namespace, *, random: bool) -> dict[str, Array]:
    """An array for every input of the model: from its file, or made up where `random`."""
    return arrays.collect(
        client.ask(MODEL_METADATA, ModelParams(name=arguments.model)).inputs,
        unique("--input", arguments.input),
        model=arguments.model,
        random=random,
        seed=arguments.seed,
    )


def _infer(arguments: argparse.Namespace, output: Output) -> None:
    with Client(arguments.socket) as client:
        values = inputs(client, arguments, random=arguments.random)
        answer = client.answer(arguments.model, values, timeout=arguments.timeout)
    outputs = answer.outputs
    files = arrays.save(arguments.output_dir, outputs) if arguments.output_dir else {}
    found = {name: arrays.summary(array) for name, array in outputs.items()}
    document = {
        "model": arguments.model,
        "engine": answer.engine,
        "compute_us": answer.compute_us,
        "outputs": tuple(
            {"name": name, **asdict(summary), "file": str(files[name]) if files else None}
            for name, summary in found.items()
        ),
    }
    output.emit(document, lambda console: _print(console, answer, found, files))


def _print(
    console: Console, answer: InferenceAnswer, outputs: Mapping[str, ArraySummary], files: Mapping[str, Path]
) -> None:
    rows = [
        (name, shape_text(each.dtype, each.shape), _number(each.min), _number(each.max))
        for name, each in outputs.items()
    ]
    console.print(table(("output", "type", ">min", ">max"), rows))
    for name, each in outputs.items():
        if each.not_finite:
            line(console, f"{name} has {each.not_finite} elements that are NaN or infinite.")
    for name, file in files.items():
        line(console, f"{name} is in {file}")
    line(console, f"answered by the engine {answer.engine} in {answer.compute_us / 1000:.3f} ms")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"
