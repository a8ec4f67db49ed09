"""Commands pin, unpin and rollback: which version of a model is served, and by which engine."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from datetime import datetime
from typing import TYPE_CHECKING, Any

from honed.protocol.methods import MODEL_HISTORY, MODEL_PIN, MODEL_ROLLBACK
from honed.tool.output import Output, line
from honed.tool.parser import UsageError, add_command

from .tasks import milliseconds

if TYPE_CHECKING:
    from honed.protocol.versions import ModelHistory


def register(commands: Any) -> None:
    """Add these commands to the parser."""
    rollback = add_command(
        commands,
        "rollback",
        _rollback,
        about="serve an earlier version of a model again",
        details=(
            "The version left is set aside: tuning does not publish it again. 'hone history M' lists the "
            "versions; the last three keep their files."
        ),
        examples="hone rollback lightglue\nhone rollback lightglue 2",
    )
    pin = add_command(
        commands,
        "pin",
        _pin,
        about="keep a version of a model from being replaced by tuning, or have one engine serve it",
        details="Without VERSION, the one that is served.",
        examples=(
            "hone pin lightglue\nhone pin lightglue 2\nhone pin lightglue --engine cpu\n"
            "hone pin lightglue --off"
        ),
    )
    pin.add_argument("--off", action="store_true", help="let tuning replace it again")
    pin.add_argument(
        "--engine",
        choices=("gpu", "cpu"),
        help="have the compiled form, or ONNX Runtime, serve it, whichever is faster; no version is pinned",
    )
    unpin = add_command(
        commands,
        "unpin",
        _unpin,
        about="let go of the version and the engine of a model that are pinned",
        examples="hone unpin lightglue",
    )
    for command in (rollback, pin, unpin):
        command.add_argument("model", metavar="M", help="name of the model")
    for command in (rollback, pin):
        command.add_argument("version", metavar="VERSION", nargs="?", type=_number, help="its number")


def version_rows(history: ModelHistory) -> Iterable[tuple[str, ...]]:
    """Rows of a table: number, since, until, side by side, why it came, why it went."""
    versions = {version.number: version for version in history.versions}
    for span in history.stints:
        version = versions[span.number]
        times = "-"
        if version.old_us and version.new_us:
            times = f"{milliseconds(version.old_us)} -> {milliseconds(version.new_us)}"
        why = version.why
        end = span.end or version_state(history)
        yield str(version.number), _time(span.since), times, why, end
    served = {span.number for span in history.stints}
    for version in history.versions:
        if version.number not in served:
            yield str(version.number), "never", "-", version.why, version.quarantine


def version_state(history: ModelHistory) -> str:
    """What is to be said of the version that is served."""
    states = ["served"]
    if history.pinned:
        states.append("pinned")
    if history.on_trial:
        states.append("on trial")
    return ", ".join(states)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M")


def _rollback(arguments: argparse.Namespace, output: Output) -> int:
    from honed.protocol.params import HistoryParams, RollbackParams
    from honed.runtime.client import Client

    model = arguments.model
    with Client(arguments.socket) as client:
        left = client.ask(MODEL_HISTORY, HistoryParams(name=model)).version
        params = RollbackParams(name=model, version=arguments.version)
        told = client.ask(MODEL_ROLLBACK, params, timeout=None)
    document = {"model": model, "left": left, "version": told.version}
    text = f"{model}: version {told.version} is served again, {left} is set aside."
    output.emit(document, lambda console: line(console, text))
    return 0


def _pin(arguments: argparse.Namespace, output: Output) -> int:
    from honed.protocol.params import PinParams
    from honed.runtime.client import Client

    if sum((arguments.off, arguments.version is not None, arguments.engine is not None)) > 1:
        raise UsageError("give one of VERSION, --engine and --off")
    if arguments.engine is not None:
        return _pin_engine(arguments, output)
    with Client(arguments.socket) as client:
        params = PinParams(name=arguments.model, version=0 if arguments.off else arguments.version)
        told = client.ask(MODEL_PIN, params, timeout=None)
    kept = "stays until you let it go" if told.pinned else "may be replaced by tuning"
    text = f"{arguments.model}: version {told.version} {kept}."
    document = {"model": arguments.model, "version": told.version, "pinned": told.pinned}
    output.emit(document, lambda console: line(console, text))
    return 0


def _pin_engine(arguments: argparse.Namespace, output: Output) -> int:
    from honed.protocol.params import PinParams
    from honed.runtime.client import Client

    with Client(arguments.socket) as client:
        params = PinParams(name=arguments.model, version=None, engine=arguments.engine)
        told = client.ask(MODEL_PIN, params, timeout=None)
    engine = "the CPU engine" if told.engine == "cpu" else "the compiled form"
    document = {"model": arguments.model, "engine": told.engine}
    text = f"{arguments.model}: {engine} serves it until you let it go."
    output.emit(document, lambda console: line(console, text))
    return 0


def _unpin(arguments: argparse.Namespace, output: Output) -> int:
    from honed.protocol.params import PinParams
    from honed.runtime.client import Client

    with Client(arguments.socket) as client:
        params = PinParams(name=arguments.model, version=0, engine="")
        told = client.ask(MODEL_PIN, params, timeout=None)
    document = {"model": arguments.model, "version": told.version, "pinned": False, "engine": ""}
    text = f"{arguments.model}: nothing is pinned."
    output.emit(document, lambda console: line(console, text))
    return 0


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 1 << 31):
        raise argparse.ArgumentTypeError(f"{text!r} is not the number of a version")
    return int(text)
