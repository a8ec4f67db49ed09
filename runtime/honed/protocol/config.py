"""The results of ConfigShow and ConfigReload, as docs/protocol.md has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, kw_only=True, eq=False)
class ShownSetting:
    """A setting in force."""

    name: str
    value: Any
    unit: str
    origin: str
    effect: str


@dataclass(slots=True, kw_only=True, eq=False)
class SettingChange:
    """A setting whose value the files say otherwise."""

    name: str
    value: Any
    configured: Any
    effect: str


@dataclass(slots=True, kw_only=True, eq=False)
class ConfigShown:
    """The result of ConfigShow."""

    settings: tuple[ShownSetting, ...]
    files: tuple[str, ...]
    pending: tuple[SettingChange, ...]
    problem: str


@dataclass(slots=True, kw_only=True, eq=False)
class ConfigReloaded:
    """The result of ConfigReload."""

    applied: tuple[SettingChange, ...]
    restart: tuple[SettingChange, ...]
    files: tuple[str, ...]
