"""Commands pin, unpin and rollback: which version of a model is served, and by which engine."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from datetime import datetime
from typing import Any

from honed.protocol.methods import MODEL_HISTORY, MODEL_PIN, MODEL_ROLLBACK
from honed.protocol.params import HistoryParams, PinParams, RollbackParams
from honed.protocol.results import ModelHistory, VersionPinned
from honed.runtime.client import Client
from honed.tool.output import Output, line
from honed.tool.parser import Parser, UsageError, define

from .tasks import milliseconds


def define_rollback(rollback: Parser) -> None:
    """What `hone rollback` takes."""
    define(
        rollback,
        _rollback,
        details=(
            "The version left is set aside: tuning does not publish it again. 'hone history M' lists the "
            "versions; the last three keep their files."
        ),
        examples="hone rollback lightglue\nhone rollback lightglue 2",
    )
    _add_model(rollback)
    _add_version(rollback)


def define_pin(pin: Parser) -> None:
    """What `hone pin` takes."""
    define(
        pin,
        _pin,
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
    _add_model(pin)
    _add_version(pin)


def define_unpin(unpin: Parser) -> None:
    """What `hone unpin` takes."""
    define(unpin, _unpin, examples="hone unpin lightglue")
    _add_model(unpin)


def _add_model(command: Parser) -> None:
    command.add_argument("model", metavar="M", help="name of the model")


def _add_version(command: Parser) -> None:
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


def _rollback(arguments: argparse.Namespace, output: Output) -> None:
    model = arguments.model
    with Client(arguments.socket) as client:
        left = client.ask(MODEL_HISTORY, HistoryParams(name=model)).version
        params = RollbackParams(name=model, version=arguments.version)
        told = client.ask(MODEL_ROLLBACK, params, timeout=None)
    said = f"version {told.version} is served again, {left} is set aside"
    _tell(arguments, output, said, left=left, version=told.version)


def _pin(arguments: argparse.Namespace, output: Output) -> None:
    if sum((arguments.off, arguments.version is not None, arguments.engine is not None)) > 1:
        raise UsageError("give one of VERSION, --engine and --off")
    if arguments.engine is not None:
        told = _pinned(arguments, version=None, engine=arguments.engine)
        engine = "the CPU engine" if told.engine == "cpu" else "the compiled form"
        _tell(arguments, output, f"{engine} serves it until you let it go", engine=told.engine)
        return
    told = _pinned(arguments, version=0 if arguments.off else arguments.version)
    kept = "stays until you let it go" if told.pinned else "may be replaced by tuning"
    said = f"version {told.version} {kept}"
    _tell(arguments, output, said, version=told.version, pinned=told.pinned)


def _unpin(arguments: argparse.Namespace, output: Output) -> None:
    told = _pinned(arguments, version=0, engine="")
    _tell(arguments, output, "nothing is pinned", version=told.version, pinned=False, engine="")


def _pinned(
    arguments: argparse.Namespace, *, version: int | None, engine: str | None = None
) -> VersionPinned:
    with Client(arguments.socket) as client:
        params = PinParams(name=arguments.model, version=version, engine=engine)
        return client.ask(MODEL_PIN, params, timeout=None)


def _tell(arguments: argparse.Namespace, output: Output, said: str, **found: Any) -> None:
    text = f"{arguments.model}: {said}."
    output.emit({"model": arguments.model, **found}, lambda console: line(console, text))


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 1 << 31):
        raise argparse.ArgumentTypeError(f"{text!r} is not the number of a version")
    return int(text)
