"""Command chain: have several models run as one; and a chain as `hone show` prints it."""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from honed.protocol import strict
from honed.protocol.errors import InvalidArgument
from honed.protocol.params import ChainStep
from honed.protocol.results import ChainAdded, ModelShown, TensorMetadata
from honed.runtime.client import Client
from honed.tool.output import Console, Output, clean, fields, line, moment_text, shape_text, table
from honed.tool.parser import Parser, define

_EXAMPLE = """\
hone chain faces.toml
hone chain faces.toml --name faces2 --replace

faces.toml has a table for each step, a run of a model, and one of outputs. Where an input
comes from is STEP:OUTPUT, or the name of an input that the chain is to have:
  [[step]]
  model = "detector"
  inputs = { image = "picture" }

  [[step]]
  name = "embed"            # as the model where it is left out
  model = "facenet"
  inputs = { x = "detector:crops" }

  [outputs]
  boxes = "detector:boxes"
  embeddings = "embed:y\""""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainFile:
    """What the file of a chain has."""

    step: tuple[ChainStep, ...]
    outputs: dict[str, str]


def define_chain(chain: Parser) -> None:
    """What `hone chain` takes."""
    define(
        chain,
        _chain,
        details=(
            "Apps send one request; tensors between the steps stay in the service. The chain is there until "
            "'hone remove' removes it."
        ),
        examples=_EXAMPLE,
    )
    chain.add_argument("file", metavar="FILE", type=Path, help="the .toml file of the chain")
    chain.add_argument("--name", metavar="N", help="name of the chain (default: that of the file)")
    chain.add_argument("--replace", action="store_true", help="take the place of the chain of that name")


def read(path: Path) -> ChainFile:
    """The file of a chain; raises InvalidArgument, or OSError where it cannot be read."""
    try:
        with path.open("rb") as file:
            plain = tomllib.load(file)
        return strict.from_plain(ChainFile, plain, where=path.name)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, strict.Mismatch) as error:
        raise InvalidArgument(
            f"{path} is not the file of a chain: {error}; see 'hone chain --help'"
        ) from error


def _chain(arguments: argparse.Namespace, output: Output) -> None:
    given = read(arguments.file)
    name = arguments.name or arguments.file.stem
    with Client(arguments.socket) as client:
        added = client.add_chain(name, given.step, given.outputs, replace=arguments.replace)
    output.emit(added, lambda console: _print_added(console, added))


def _print_added(console: Console, added: ChainAdded) -> None:
    steps = ", ".join(step.name for step in added.steps)
    line(console, f"{added.model_name} is served, a chain of {len(added.steps)} steps: {steps}")
    console.print(_tensors(added.inputs, added.outputs, {}))


def print_chain(console: Console, chain: ModelShown) -> None:
    """A chain, as `hone show` tells it."""
    state = chain.state.lower() + (f": {chain.reason}" if chain.reason else "")
    added = ("added", moment_text(chain.added))
    console.print(fields([("chain", f"{chain.name} ({state})"), ("sha256", chain.sha256), added]))
    console.print()
    console.print(table(("step", "model", "input", "comes from"), _step_rows(chain.steps)))
    console.print()
    console.print(_tensors(chain.inputs, chain.outputs, chain.step_outputs))


def _step_rows(steps: Sequence[ChainStep]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for step in steps:
        named = (step.name, step.model)
        for name, source in step.inputs.items():
            rows.append((*named, clean(name), clean(source)))
            named = ("", "")
        if not step.inputs:
            rows.append((*named, "", ""))
    return rows


def _tensors(
    inputs: Sequence[TensorMetadata], outputs: Sequence[TensorMetadata], sources: Mapping[str, str]
) -> Any:
    rows = [("in", t.name, shape_text(t.datatype, t.shape), "") for t in inputs]
    rows += [("out", t.name, shape_text(t.datatype, t.shape), sources.get(t.name, "")) for t in outputs]
    return table(("", "tensor", "type", "is" if sources else ""), rows)
