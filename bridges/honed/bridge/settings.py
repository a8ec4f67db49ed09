"""A bridge's settings: a TOML file without tables, whose keys are the fields of a dataclass with defaults."""

from __future__ import annotations

import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any, Final, TypeVar

from honed.protocol.errors import InvalidArgument
from honed.protocol.strict import Mismatch, from_plain

T = TypeVar("T")
_MAX_BYTES: Final = 64 << 10
_MOST: Final = 1e9  # of any number: more is a slip of the pen


def load(kind: type[T], file: Path, *, required: bool) -> T:
    """The settings in `file`; the defaults where it is not there and not `required`.

    `kind` is a dataclass whose fields all have defaults, and raises InvalidArgument for values it does not
    allow. Raises InvalidArgument that names the file and what is wrong.
    """
    try:
        with file.open("rb") as stream:
            data = stream.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        if required:
            raise InvalidArgument(f"there is no configuration file {file}; check --config") from None
        return kind()
    except OSError as error:
        raise InvalidArgument(
            f"configuration file {file} cannot be read ({error.strerror}); check its permissions"
        ) from error
    if len(data) > _MAX_BYTES:
        raise InvalidArgument(f"configuration file {file} is larger than {_MAX_BYTES} bytes; shorten it")
    try:
        content = tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"configuration file {file} is not TOML: {error}; correct that line") from error
    try:
        return from_plain(kind, content, where=str(file))
    except Mismatch as error:
        known = ", ".join(field.name for field in fields(kind))  # type: ignore[arg-type]
        raise InvalidArgument(f"{error}; the settings are {known}") from error
    except InvalidArgument as error:
        raise InvalidArgument(f"{file}: {error}") from error


def check_numbers(settings: Any, **least: float) -> None:
    """Raise InvalidArgument where a setting is less than its least value, or no sensible number."""
    for name, minimum in least.items():
        value = getattr(settings, name)
        if not minimum <= value <= _MOST:  # false for NaN, too
            raise InvalidArgument(f"{name} is {value!r}; give a number from {minimum:g} to {_MOST:g}")
