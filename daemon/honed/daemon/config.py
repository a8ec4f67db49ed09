"""Loads the configuration from files, environment and command line, shows it, and reloads it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import difflib
import logging
import math
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from honed.machine.files import read_toml, unreadable_config
from honed.process.limits import memory_mib
from honed.protocol.errors import HonedError, InvalidArgument
from honed.protocol.service import ConfigReloaded, ConfigShown, SettingChange, ShownSetting

from .aio import in_thread
from .features.sequences import SequenceSettings
from .features.user_models import AppsSettings
from .idle.decision import IdleSettings
from .observe.usage import UsageSettings
from .serving.selection import Placement
from .settings.places import Places, drop_in_dir, places
from .settings.schema import (
    CpuSettings,
    HubSettings,
    Limits,
    ServeSettings,
    Service,
    Setting,
    VariantSettings,
    of_table,
)
from .systemd import Systemd
from .tuning.process import TunerSettings

# ---- Line numbers of settings in a TOML file, which `tomllib` does not report ----

_HEADER = re.compile(r"\s*\[\s*[\"']?([A-Za-z0-9_-]+)[\"']?\s*\]\s*(?:#.*)?")
_KEY = re.compile(r"\s*[\"']?([A-Za-z0-9_-]+)[\"']?\s*(?:\.\s*[\"']?([A-Za-z0-9_-]+)[\"']?\s*)?=")


def lines_of(text: str) -> dict[str, int]:
    """Return the line numbers, from 1, of the settings in a valid TOML document, by "table.key".

    Settings in inline tables are left out, and all of them where the document has texts of several lines,
    which could hold what only looks like a setting.
    """
    if '"""' in text or "'''" in text:
        return {}
    found: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), start=1):
        header, key = _HEADER.fullmatch(line), _KEY.match(line)
        if header:
            table = header[1]
        elif key:
            dotted = f"{key[1]}.{key[2]}" if key[2] else f"{table}.{key[1]}"
            found.setdefault(dotted, number)
    return found


# ---- The service's settings: defaults, then TOML files, then the environment, then the command line ----
#
# `honed.toml` has the tables in `Config`. Files in `honed.toml.d/` beside it that end in .toml are read after
# it in the order of their names; a later file wins setting by setting. Every setting keeps its origin.

DEFAULT_ORIGIN: Final = "default"
# Removed settings, with advice: files that still have them are read.
REMOVED: Final = {
    "cpu.in_app_ms": "apps no longer borrow small models; HONED_ORT=1 has an app run its own beside honed",
}
_ENVIRONMENT: Final = {"socket": "HONED_SOCKET", "device": "HONED_DEVICE"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The configuration, with a field for each table.

    `origins` maps "service.socket" and so on to where the value came from: a file with the line, an
    environment variable, an option, or "default".
    """

    service: Service
    serve: ServeSettings
    cpu: CpuSettings
    sequences: SequenceSettings
    limits: Limits
    variants: VariantSettings
    apps: AppsSettings
    usage: UsageSettings
    idle: IdleSettings
    tuner: TunerSettings
    hub: HubSettings
    files: tuple[Path, ...]  # Files read, in order
    origins: Mapping[str, str]
    notes: tuple[str, ...] = ()  # Notes about removed settings in the files


TABLES: Final[Mapping[str, type[Any]]] = MappingProxyType(
    {
        name: kind
        for name, kind in typing.get_type_hints(Config).items()
        if isinstance(kind, type) and dataclasses.is_dataclass(kind)
    }
)


@dataclass(frozen=True, slots=True)
class _Value:
    value: object
    origin: str


def load(
    *,
    environ: Mapping[str, str],
    uid: int,
    config: Path | None = None,
    overrides: Mapping[str, str | Path | None] | None = None,
) -> Config:
    """Return the configuration of a process with this environment and user id.

    `config` (--config) replaces the usual file and must exist; the usual one need not. `overrides` are those
    of the command line: "socket", "state_dir", "cache_dir" and "device"; None means not given. Raises
    InvalidArgument, which names the file, the setting and the allowed values.
    """
    usual = places(environ, uid)
    values = _defaults(usual)
    files = _files(config.absolute() if config else usual.config, required=config is not None)
    notes: list[str] = []
    for file in files:
        values.update(_from_file(file, notes))
    values.update(_from_environment(environ))
    values.update(_from_command_line(overrides or {}))
    if "service.socket" not in values:
        raise InvalidArgument(
            "there is no place for the socket because XDG_RUNTIME_DIR is not set; give one with --socket"
        )
    loaded = Config(
        **{
            table: kind(
                **{each.name: values[f"{table}.{each.name}"].value for each in dataclasses.fields(kind)}
            )
            for table, kind in TABLES.items()
        },
        files=files,
        origins=MappingProxyType({name: value.origin for name, value in sorted(values.items())}),
        notes=tuple(notes),
    )
    _check_placement(loaded.service, loaded.origins["service.placement"])
    return loaded


def _check_placement(service: Service, origin: str) -> None:
    placement = Placement(service.device, service.devices, service.placement)
    for model, device in service.placement.items():
        if placement.find(device) is None:
            raise InvalidArgument(
                f"{origin}: [service] placement puts {model} on {device!r}, which is not among the devices; "
                f"use one of {_join(placement.names, '{!r}')}, or add it to devices"
            )


def memory(config: Config) -> int:
    """Return the maximum MiB of simultaneous processes, the machine's memory if one has no limit."""
    limits, machine = config.limits, memory_mib()
    if not (limits.worker_memory_mib and config.cpu.memory_mib and config.tuner.memory_mib):
        return machine
    placed = Placement(config.service.device, config.service.devices, config.service.placement)
    return limits.memory_mib(
        devices=len(placed.names),
        tuner_mib=config.tuner.memory_mib,
        cpu_mib=config.cpu.memory_mib,
        apps_mib=config.apps.all_mib if config.apps.enabled else 0,
    )


def memory_sentence(takes: int, machine: int) -> str:
    """Return a sentence about the sum of the limits of memory, with a remedy if it is too large."""
    sentence = (
        f"With these limits honed takes at most {takes:,} MiB of memory, {takes * 100 / machine:.0f} % of "
        f"this machine's {machine:,} MiB"
    )
    if takes < machine:
        return f"{sentence}."
    return (
        f"{sentence}: apps may be ended when memory runs out; lower the settings that end in memory_mib, or "
        "leave them to their defaults."
    )


def settings() -> dict[str, Setting]:
    """Return every setting by its name ("limits.max_queue"), table by table."""
    return {each.name: each for table, kind in TABLES.items() for each in of_table(table, kind)}


def value(config: Config, name: str) -> Any:
    """Return the value of the setting "table.key"."""
    table, _, key = name.partition(".")
    return getattr(getattr(config, table), key)


def _defaults(usual: Places) -> dict[str, _Value]:
    service = Service(socket=usual.socket or Path(), state_dir=usual.state_dir, cache_dir=usual.cache_dir)
    tables = {table: service if kind is Service else kind() for table, kind in TABLES.items()}
    values = {
        name: _Value(getattr(tables[each.table], each.key), DEFAULT_ORIGIN)
        for name, each in settings().items()
    }
    if usual.socket is None:
        del values["service.socket"]
    return values


def _files(config: Path, *, required: bool) -> tuple[Path, ...]:
    try:
        there, regular = config.exists(), config.is_file()
    except OSError as error:
        raise unreadable_config(config, error) from error
    if required and not regular:
        raise InvalidArgument(f"there is no configuration file {config}; check its path")
    folder = drop_in_dir(config)
    try:
        drop_ins = sorted(p for p in folder.iterdir() if p.suffix == ".toml" and not p.name.startswith("."))
    except (FileNotFoundError, NotADirectoryError):
        drop_ins = []
    except OSError as error:
        raise InvalidArgument(
            f"configuration folder {folder} cannot be read ({error.strerror}); check its permissions"
        ) from error
    return tuple(([config] if there else []) + drop_ins)


def _from_file(file: Path, notes: list[str]) -> dict[str, _Value]:
    known = settings()
    values: dict[str, _Value] = {}
    try:
        content, text = read_toml(file)
    except FileNotFoundError as error:  # The file was removed since it was looked for
        raise unreadable_config(file, error) from error
    lines = lines_of(text)
    for table, given in content.items():
        if table not in TABLES:
            raise InvalidArgument(
                f"{file}: there is no table [{table}]{_nearest(table, TABLES)}; use {_join(TABLES, '[{}]')}"
            )
        if not isinstance(given, dict):
            raise InvalidArgument(f"{file}: {table} must be a table; write [{table}] on a line of its own")
        keys = [each.key for each in known.values() if each.table == table]
        for key, value in given.items():
            name = f"{table}.{key}"
            origin = f"{file}:{lines[name]}" if name in lines else str(file)
            if name in REMOVED:
                notes.append(f"{origin}: [{table}] {key} has left, delete the line: {REMOVED[name]}")
                continue
            if name not in known:
                raise InvalidArgument(
                    f"{origin}: [{table}] has no setting {key!r}{_nearest(key, keys)}; "
                    f"use one of {_join(keys)}"
                )
            values[name] = _Value(_check_type(known[name], value, origin), origin)
    return values


def _from_environment(environ: Mapping[str, str]) -> dict[str, _Value]:
    return {
        f"service.{key}": _Value(_shell_value(key, environ[variable]), f"environment variable {variable}")
        for key, variable in _ENVIRONMENT.items()
        if environ.get(variable)
    }


def _from_command_line(overrides: Mapping[str, str | Path | None]) -> dict[str, _Value]:
    return {
        f"service.{key}": _Value(_shell_value(key, value), f"option --{key.replace('_', '-')}")
        for key, value in overrides.items()
        if value is not None
    }


def _shell_value(key: str, value: str | Path) -> str | Path:
    """Return a value given in a shell; relative paths are relative to the current folder."""
    return str(value) if key == "device" else Path(value).absolute()


def _check_type(setting: Setting, value: object, origin: str) -> object:
    """Return `value` as the field's type; TOML has no paths, and an integer will do for a float."""
    where = f"{origin}: [{setting.table}] {setting.key}"
    if setting.kind is Path:
        if not isinstance(value, str) or not value.startswith("/"):
            raise InvalidArgument(f"{where} is {value!r}; give an absolute path in quotes")
        return Path(value)
    if setting.kind is float and type(value) is int:
        value = float(value)
    if setting.kind == tuple[str, ...] and _texts(value):
        return tuple(value)  # type: ignore[arg-type]
    if setting.kind == dict[str, str] and isinstance(value, dict) and _texts(list(value.values())):
        return value
    if type(value) is not setting.kind:
        raise InvalidArgument(f"{where} is {value!r}; give {_KINDS[setting.kind]}")
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not math.isfinite(value) or value < setting.minimum:
            raise InvalidArgument(f"{where} is {value!r}; give a number of at least {setting.minimum:g}")
        if abs(value) > 2**63 - 1:
            raise InvalidArgument(f"{where} is {value!r}; give a number below 2^63")
    if setting.check is not None:
        try:
            setting.check(value)
        except InvalidArgument as error:
            raise InvalidArgument(f"{where} is {value!r}; {error}") from error
    return value


_KINDS: Final[Mapping[Any, str]] = MappingProxyType(
    {
        int: "a whole number",
        float: "a number",
        str: "a text in quotes",
        bool: "true or false",
        tuple[str, ...]: 'texts in quotes, as ["mali", "cpu"]',
        dict[str, str]: 'a text in quotes for each name, as {lightglue = "mali"}',
    }
)


def _texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) and each for each in value)


def _nearest(name: str, names: typing.Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    return f" (did you mean {close[0]}?)" if close else ""


def _join(names: typing.Iterable[str], form: str = "{}") -> str:
    return ", ".join(form.format(name) for name in names)


# ---- Reload of the configuration while the service runs, as far as settings can change ----

_log = logging.getLogger(__name__)


class Reloader:
    """Holds the configuration in force.

    `read` reads the files as at the start (it blocks, and raises InvalidArgument). `changed` is called with
    the new configuration after the values in `config.limits` have changed in place.
    """

    def __init__(
        self, config: Config, read: Callable[[], Config], systemd: Systemd, changed: Callable[[Config], None]
    ) -> None:
        self.config = config
        self._read = read
        self._systemd = systemd
        self._changed = changed
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def show(self) -> ConfigShown:
        """Return the result of ConfigShow: the settings in force, and differences of the files from them."""
        pending: tuple[SettingChange, ...] = ()
        problem = ""
        try:
            on_disk = await in_thread(self._read)
        except HonedError as error:
            problem = str(error)
        else:
            pending = tuple(_change(*each) for each in _differences(self.config, on_disk))
        return describe_config(self.config, pending, problem)

    async def reload(self) -> ConfigReloaded:
        """Read the configuration again and return the result of ConfigReload.

        A file that is wrong raises InvalidArgument and changes nothing.
        """
        async with self._turn:
            self._systemd.reloading()
            try:
                return self._apply(await in_thread(self._read))
            except HonedError as error:
                _log.error("the configuration stays as it was: %s", error)
                raise
            finally:
                self._systemd.tell("READY=1")

    def handle_signal(self) -> None:
        """Reload the configuration in a task; the result goes to the log."""
        task = asyncio.ensure_future(self._reload_for_log())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reload_for_log(self) -> None:
        with contextlib.suppress(HonedError):  # The log has it already
            await self.reload()

    def _apply(self, new: Config) -> ConfigReloaded:
        found = _differences(self.config, new)
        later = [each for each in found if each[0].effect == "restart"]
        now = [each for each in found if each[0].effect != "restart"]
        self.config = _merge_reloadable(self.config, new)
        self._changed(self.config)
        for setting, old, then in now:
            _log.info("%s is %s now, was %s", setting.name, then, old)
        for setting, old, then in later:
            _log.warning("%s stays %s until a restart; then it is %s", setting.name, old, then)
        _log.info("the configuration was read again: %d changes, %d for a restart", len(now), len(later))
        return ConfigReloaded(
            applied=tuple(_change(*each) for each in now),
            restart=tuple(_change(*each) for each in later),
            files=tuple(map(str, new.files)),
        )


def describe_config(
    config: Config, pending: tuple[SettingChange, ...] = (), problem: str = ""
) -> ConfigShown:
    """Return every setting and the files that were read.

    A setting has its value, unit and origin, and when a change of it counts.
    """
    return ConfigShown(
        settings=tuple(
            ShownSetting(
                name=setting.name,
                value=_plain(value(config, setting.name)),
                unit=setting.unit,
                origin=config.origins[setting.name],
                effect=setting.effect,
            )
            for setting in settings().values()
        ),
        files=tuple(map(str, config.files)),
        pending=pending,
        problem=problem,
        memory_mib=memory(config),
        machine_mib=memory_mib(),
    )


def _differences(old: Config, new: Config) -> list[tuple[Setting, Any, Any]]:
    """Return the settings whose values differ, each with its old and its new value."""
    pairs = ((each, value(old, each.name), value(new, each.name)) for each in settings().values())
    return [(setting, before, after) for setting, before, after in pairs if before != after]


def _merge_reloadable(old: Config, new: Config) -> Config:
    """Return `new` where a running service can follow it, and `old` for settings that need a restart.

    The limits stay the same object, which takes the new values.
    """
    kept = {each.name for each, *_ in _differences(old, new) if each.effect == "restart"}
    kept_keys: dict[str, dict[str, Any]] = {}
    for name in kept:
        table, _, key = name.partition(".")
        kept_keys.setdefault(table, {})[key] = value(old, name)
    origins: Mapping[str, str] = {
        name: old.origins[name] if name in kept else origin for name, origin in new.origins.items()
    }
    old.limits.become(new.limits)
    tables = {
        table: dataclasses.replace(getattr(new, table), **values) for table, values in kept_keys.items()
    }
    return dataclasses.replace(
        new, **{**tables, "limits": old.limits, "origins": MappingProxyType(dict(origins))}
    )


def _change(setting: Setting, in_force: Any, configured: Any) -> SettingChange:
    return SettingChange(
        name=setting.name, value=_plain(in_force), configured=_plain(configured), effect=setting.effect
    )


def _plain(anything: Any) -> Any:
    if isinstance(anything, tuple):
        return list(anything)
    return str(anything) if isinstance(anything, Path) else anything
