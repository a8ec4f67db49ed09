"""How a table of the configuration is declared: a dataclass whose fields know their unit and bounds."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal

Effect = Literal["at once", "new connections", "restart"]
RESTART: Final = MappingProxyType({"effect": "restart"})  # metadata of a field


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting: its place, type, unit ("" for none), least value (of numbers), and when a change counts.

    `effect` says when a running service that reads its files again uses a new value. `check` raises
    InvalidArgument with what to give instead for values that are wrong in another way.
    """

    table: str
    key: str
    kind: Any
    unit: str
    minimum: float
    effect: Effect
    check: Callable[[Any], object] | None = None

    @property
    def name(self) -> str:
        """`limits.max_queue`."""
        return f"{self.table}.{self.key}"


def setting(
    default: Any,
    *,
    unit: str = "",
    minimum: float = 1,
    effect: Effect = "at once",
    check: Callable[[Any], object] | None = None,
) -> Any:
    """A field of a table; the arguments are those of `Setting`."""
    metadata = {"unit": unit, "minimum": minimum, "effect": effect, "check": check}
    return dataclasses.field(default=default, metadata=metadata)


def of_table(table: str, kind: type[Any]) -> list[Setting]:
    """The settings of a table, in the order of its fields."""
    hints = typing.get_type_hints(kind)
    return [
        Setting(
            table=table,
            key=field.name,
            kind=hints[field.name],
            unit=field.metadata.get("unit", ""),
            minimum=float(field.metadata.get("minimum", 1 if hints[field.name] is int else 0)),
            effect=field.metadata.get("effect", "at once"),
            check=field.metadata.get("check"),
        )
        for field in dataclasses.fields(kind)
    ]
