"""Reads the configuration again while the service runs, and changes what can be changed."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from honed.protocol.errors import HonedError
from honed.protocol.service import ConfigReloaded, ConfigShown, SettingChange, ShownSetting

from .blocking import in_thread
from .config import Config, settings, value
from .notify import Systemd
from .settings.sections import Setting

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
        """The result of ConfigShow: what is in force, and what the files say instead."""
        pending: tuple[SettingChange, ...] = ()
        problem = ""
        try:
            on_disk = await in_thread(self._read)
        except HonedError as error:
            problem = str(error)
        else:
            pending = tuple(_change(*each) for each in _differences(self.config, on_disk))
        return shown(self.config, pending, problem)

    async def reload(self) -> ConfigReloaded:
        """The result of ConfigReload; a file that is wrong raises InvalidArgument and changes nothing."""
        async with self._turn:
            self._systemd.reloading()
            try:
                return self._apply(await in_thread(self._read))
            except HonedError as error:
                _log.error("the configuration stays as it was: %s", error)
                raise
            finally:
                self._systemd.tell("READY=1")

    def signalled(self) -> None:
        """Reload, where nobody waits for the result: the log tells it."""
        task = asyncio.ensure_future(self._reload_for_log())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reload_for_log(self) -> None:
        with contextlib.suppress(HonedError):  # the log has it already
            await self.reload()

    def _apply(self, new: Config) -> ConfigReloaded:
        found = _differences(self.config, new)
        later = [each for each in found if each[0].effect == "restart"]
        now = [each for each in found if each[0].effect != "restart"]
        self.config = _mixed(self.config, new)
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


def shown(config: Config, pending: tuple[SettingChange, ...] = (), problem: str = "") -> ConfigShown:
    """Every setting with value, unit, origin, and when a change counts; and the files that were read."""
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
    )


def _differences(old: Config, new: Config) -> list[tuple[Setting, Any, Any]]:
    """The settings whose values differ, with both."""
    pairs = ((each, value(old, each.name), value(new, each.name)) for each in settings().values())
    return [(setting, before, after) for setting, before, after in pairs if before != after]


def _mixed(old: Config, new: Config) -> Config:
    """`new` where a running service can follow it, else `old`; the limits are the object they were."""
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
