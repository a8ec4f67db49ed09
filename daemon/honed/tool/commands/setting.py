"""Command set: how a model is served."""

from __future__ import annotations

import argparse

from honed.protocol import strict
from honed.protocol.methods import MODEL_SET
from honed.protocol.params import SetParams
from honed.protocol.results import ModelSettings
from honed.runtime.client import Client
from honed.tool.output import Output, line
from honed.tool.parser import Parser, UsageError, define, shape, unique

_DELAY_MS = 2.0  # where requests are to be run together, and nothing says how long they wait


def define_set(parser: Parser) -> None:
    """What `hone set` takes."""
    define(
        parser,
        _set,
        details=(
            "With --batch, requests that differ in their first dimension only are run as one: each waits for "
            "others until the batch is full, or --delay is over. That is for models whose file leaves the "
            "first size of all inputs and outputs open, and is tried out first. With --warm-up "
            "a model is run on zeros when it is loaded, before it serves."
        ),
        examples=(
            "hone set embedder --batch 8 --delay 2\nhone set embedder --batch 0\n"
            "hone set detector --warm-up 3 --shape images=1,3,640,640"
        ),
    )
    parser.add_argument("model", metavar="M", help="the model's name")
    parser.add_argument("--batch", metavar="N", type=int, help="run up to N rows together; 0: none")
    parser.add_argument(
        "--delay",
        metavar="MS",
        type=float,
        help=f"milliseconds that a request waits ({_DELAY_MS:g})",
    )
    parser.add_argument("--warm-up", metavar="N", type=int, help="runs before it serves; 0: none")
    parser.add_argument(
        "--shape",
        metavar="IN=1,3,224,224",
        action="append",
        type=shape,
        help="the shape in which to warm up an input whose sizes the model leaves open",
    )


def _set(arguments: argparse.Namespace, output: Output) -> None:
    given = (arguments.batch, arguments.delay, arguments.warm_up, arguments.shape)
    if all(each is None for each in given):
        raise UsageError("give --batch, --delay, --warm-up or --shape")
    delay = _DELAY_MS if arguments.delay is None and arguments.batch else arguments.delay
    params = SetParams(
        name=arguments.model,
        max_batch=arguments.batch,
        batch_delay_us=None if delay is None else round(delay * 1000),
        warm_up=arguments.warm_up,
        warm_up_shapes=unique("--shape", arguments.shape) if arguments.shape else None,
    )
    with Client(arguments.socket) as client:
        told = client.ask(MODEL_SET, params, timeout=None)
    output.emit(
        {"model": arguments.model, **strict.to_plain(told)},
        lambda console: line(console, f"{arguments.model}: {described(told)}."),
    )


def described(settings: ModelSettings) -> str:
    """A model's settings in words."""
    parts = []
    if settings.max_batch:
        delay = settings.batch_delay_us / 1000
        parts.append(f"up to {settings.max_batch} rows run together, after {delay:g} ms at most")
    if settings.warm_up:
        parts.append(f"{settings.warm_up} runs warm it up")
    return ", ".join(parts) or "each request runs by itself, nothing warms it up"
