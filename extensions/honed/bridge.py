"""Provides what bridges to other protocols share: options, settings, addresses, log, exit status."""

from __future__ import annotations

import argparse
import ipaddress
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Final, TypeVar

from honed.machine.files import read_toml
from honed.protocol.errors import HonedError, InvalidArgument
from honed.protocol.strict import SchemaError, from_plain
from honed.runtime import HONED_VERSION

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
_ENDPOINT: Final = re.compile(r"(ipc|tcp)://(.+)")
_TCP: Final = re.compile(r"\[?([0-9a-fA-F.:]+?)\]?:([0-9]{1,5})")
_MAX_SOCKET_PATH: Final = 107  # Bytes of sun_path
T = TypeVar("T")
_MOST: Final = 1e9  # Maximum of any number; more is a typing error


def ip_address(text: str) -> IpAddress:
    """Return the address; raise InvalidArgument for names and any text that is no address."""
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        raise InvalidArgument(f"address is {text!r}; give an IP address, as 127.0.0.1 or ::1") from None


def check_endpoint(endpoint: str, *, network: bool) -> None:
    """Raise InvalidArgument unless ZeroMQ can be bound to `endpoint`, a path or an address.

    Addresses that other machines reach are allowed with `network` only.
    """
    found = _ENDPOINT.fullmatch(endpoint)
    if found is None:
        raise InvalidArgument(
            f"endpoint is {endpoint!r}; give ipc:// with a path, or tcp:// with address:port"
        )
    kind, place = found.groups()
    if kind == "ipc":
        if not place.startswith("/") or len(place.encode()) > _MAX_SOCKET_PATH or "\0" in place:
            raise InvalidArgument(
                f"endpoint is {endpoint!r}; give an absolute path of at most {_MAX_SOCKET_PATH} bytes after ipc://"
            )
        return
    parts = _TCP.fullmatch(place)
    if parts is None or not 0 < int(parts[2]) < 65536:
        raise InvalidArgument(
            f"endpoint is {endpoint!r}; give an IP address and a port, as tcp://127.0.0.1:5555"
        )
    if not ip_address(parts[1]).is_loopback and not network:
        raise InvalidArgument(
            f"endpoint is {endpoint!r}, which other machines reach, and anyone there could use it; "
            "give network = true if that is meant"
        )


def load(kind: type[T], file: Path, *, required: bool) -> T:
    """Return the settings in `file`, or the defaults if it does not exist and is not `required`.

    `kind` is a dataclass whose fields all have defaults, and which raises InvalidArgument for values it does
    not allow. Raises InvalidArgument that names the file and what is wrong.
    """
    try:
        content, _ = read_toml(file)
    except FileNotFoundError:
        if required:
            raise InvalidArgument(f"there is no configuration file {file}; check --config") from None
        return kind()
    try:
        return from_plain(kind, content, where=str(file))
    except SchemaError as error:
        known = ", ".join(field.name for field in fields(kind))  # type: ignore[arg-type]
        raise InvalidArgument(f"{error}; the settings are {known}") from error
    except InvalidArgument as error:
        raise InvalidArgument(f"{file}: {error}") from error


def check_numbers(settings: Any, **least: float) -> None:
    """Raise InvalidArgument for a setting below its least value, or no sensible number."""
    for name, minimum in least.items():
        value = getattr(settings, name)
        if not minimum <= value <= _MOST:  # False for NaN, too
            raise InvalidArgument(f"{name} is {value!r}; give a number from {minimum:g} to {_MOST:g}")


def parser(program: str, description: str, config: Path) -> argparse.ArgumentParser:
    """Return a parser with the options that every bridge has; `config` is the default file."""
    made = argparse.ArgumentParser(prog=program, description=description)
    made.add_argument("--config", type=Path, metavar="FILE", help=f"settings, in TOML (default {config})")
    made.add_argument("--socket", metavar="PATH", help="the service's socket (or HONED_SOCKET)")
    made.add_argument("--verbose", action="store_true", help="log more")
    made.add_argument("--version", action="version", version=f"{program} {HONED_VERSION}")
    return made


def launch(
    options_of: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    kind: type[T],
    config: Path,
    serve: Callable[[T, str | None], Any],
) -> int:
    """Read the settings and serve; return the exit status: 0 stopped by a signal, 1 failed, 2 misused."""
    options = options_of.parse_args(arguments)
    os.umask(0o077)  # Files are private unless a bridge opens them to others
    level = logging.DEBUG if options.verbose else logging.INFO
    logging.basicConfig(level=level, stream=sys.stderr, format=f"{options_of.prog}: %(message)s")
    try:
        settings = load(kind, options.config or config, required=options.config is not None)
        serve(settings, options.socket)
    except HonedError as error:
        print(f"{options_of.prog}: {error}", file=sys.stderr)
        return 1
    return 0
