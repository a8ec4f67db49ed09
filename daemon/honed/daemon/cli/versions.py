"""Commands pin and rollback: which version of a model is served."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from datetime import datetime
from typing import TYPE_CHECKING, Any

from honed.protocol.methods import MODEL_HISTORY, MODEL_PIN, MODEL_ROLLBACK

from .output import Output, line
from .parser import UsageError, add_command
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
        about="keep a version of a model from being replaced by tuning",
        details="Without VERSION, the one that is served.",
        examples="hone pin lightglue\nhone pin lightglue 2\nhone pin lightglue --off",
    )
    pin.add_argument("--off", action="store_true", help="let tuning replace it again")
    for command in (rollback, pin):
        command.add_argument("model", metavar="M", help="name of the model")
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
        end = span.end or _state(history)
        yield str(version.number), _time(span.since), times, why, end
    served = {span.number for span in history.stints}
    for version in history.versions:
        if version.number not in served:
            yield str(version.number), "never", "-", version.why, version.quarantine


def _state(history: ModelHistory) -> str:
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

    if arguments.off and arguments.version is not None:
        raise UsageError("--off takes no VERSION; leave one of them out")
    with Client(arguments.socket) as client:
        params = PinParams(name=arguments.model, version=0 if arguments.off else arguments.version)
        told = client.ask(MODEL_PIN, params, timeout=None)
    kept = "stays until you let it go" if told.pinned else "may be replaced by tuning"
    text = f"{arguments.model}: version {told.version} {kept}."
    document = {"model": arguments.model, "version": told.version, "pinned": told.pinned}
    output.emit(document, lambda console: line(console, text))
    return 0


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 1 << 31):
        raise argparse.ArgumentTypeError(f"{text!r} is not the number of a version")
    return int(text)
