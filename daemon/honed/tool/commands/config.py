"""Implements `hone config`: shows settings and origins, checks a file, has the service reload its files."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from honed.daemon.config import describe_config, load, memory, memory_sentence
from honed.process.limits import memory_mib
from honed.protocol import strict
from honed.protocol.errors import Unavailable
from honed.protocol.methods import CONFIG_RELOAD, CONFIG_SHOW
from honed.protocol.service import ConfigReloaded, ConfigShown, SettingChange
from honed.runtime.client import Client
from honed.tool.output import Console, Output, line, table
from honed.tool.parser import Parser, define


def define_config(config: Parser) -> None:
    """Define the arguments of `hone config`."""
    define(
        config,
        _config,
        details=(
            "Asks the running service; if none runs, shows the settings of one that this user would start. "
            "docs/configuration.md explains the settings."
        ),
        examples="""\
            hone config
            hone config --check /etc/honed/honed.toml
            hone config --reload""",
    )
    instead = config.add_mutually_exclusive_group()
    instead.add_argument(
        "--check", metavar="FILE", type=Path, help="only say whether FILE, with its drop-ins, is right"
    )
    instead.add_argument(
        "--reload", action="store_true", help="have the service read its files again and use what changed"
    )


def _config(arguments: argparse.Namespace, output: Output) -> None:
    if arguments.check is not None:
        _check(arguments.check, output)
    elif arguments.reload:
        with Client(arguments.socket) as client:
            reloaded = client.ask(CONFIG_RELOAD)
        output.emit(strict.to_plain(reloaded), lambda console: _print_reloaded(console, reloaded))
    else:
        running, config = _in_force(arguments.socket)
        document = {"running": running, **strict.to_plain(config)}
        output.emit(document, lambda console: _print(console, running, config))


def _check(file: Path, output: Output) -> None:
    # `load` needs a socket, and some users have no place for one; only the file is in question here.
    config = load(
        environ=os.environ, uid=os.geteuid(), config=file, overrides={"socket": "/run/honed/honed.sock"}
    )
    read = tuple(map(str, config.files))
    given = {name: origin for name, origin in config.origins.items() if origin.startswith(read)}
    document = {
        "files": list(read),
        "settings": [{"name": name, "origin": origin} for name, origin in given.items()],
    }
    said = f"{file} is right; with its drop-ins it gives {len(given)} of {len(config.origins)} settings."
    takes, machine = memory(config), memory_mib()
    if takes >= machine:
        said = f"{said} {memory_sentence(takes, machine)}"
    output.say(document, said)


def _in_force(socket: str | None) -> tuple[bool, ConfigShown]:
    """Return whether a service runs, and its settings, or those of one that this user would start."""
    try:
        with Client(socket) as client:
            return True, client.ask(CONFIG_SHOW)
    except Unavailable:
        return False, describe_config(
            load(environ=os.environ, uid=os.geteuid(), overrides={"socket": socket})
        )


def _print(console: Console, running: bool, config: ConfigShown) -> None:
    if not running:
        line(console, "No service runs; one that this user started now would use these settings.")
        console.print()
    rows = [(each.name, _value(each.value), each.unit, each.origin) for each in config.settings]
    console.print(table(("setting", "value", "unit", "origin"), rows))
    if config.machine_mib:
        console.print()
        line(console, memory_sentence(config.memory_mib, config.machine_mib))
    if config.problem:
        console.print()
        line(console, f"The files cannot be used as they are now: {config.problem}", "bold")
    elif config.pending:
        console.print()
        line(console, "The files were changed since the service read them:")
        _print_changes(console, config.pending)
        reload = any(each.effect != "restart" for each in config.pending)
        line(console, "'hone config --reload' makes the service use them." if reload else _RESTART)


_RESTART = "Restart the service to use them ('systemctl restart honed')."


def _print_reloaded(console: Console, reloaded: ConfigReloaded) -> None:
    if reloaded.applied:
        line(console, "The service uses these now:")
        _print_changes(console, reloaded.applied)
    if reloaded.restart:
        line(console, "These wait for a restart of the service ('systemctl restart honed'):")
        _print_changes(console, reloaded.restart)
    if not reloaded.applied and not reloaded.restart:
        line(console, "The files say what is in force already.")


def _print_changes(console: Console, changes: Sequence[SettingChange]) -> None:
    rows = [(each.name, _value(each.value), _value(each.configured), _NOTES[each.effect]) for each in changes]
    console.print(table(("setting", "was", "configured", ""), rows))


_NOTES = {"at once": "", "new connections": "for new connections", "restart": "after a restart"}


def _value(value: object) -> str:
    """Return a value as a configuration file would write it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key} = {_value(each)}' for key, each in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    return f'"{value}"' if isinstance(value, str) else str(value)
