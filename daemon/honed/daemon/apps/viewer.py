"""Who sees which models: those of administrators all do, a user's own only the user, and root. No I/O."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from honed.protocol import strict
from honed.protocol.params import ChainParams, LoadParams, RegionName, RegionParams
from honed.protocol.strict import Map

from .names import is_own

P = TypeVar("P")
R = TypeVar("R")
_FIELDS: Final = ("model_name", "model", "name")  # of parameters, that name a model
_NO_MODELS: Final = (
    RegionName,
    RegionParams,
    LoadParams,
    ChainParams,
)  # the last two make one, whose name none may have
_HIDDEN: Final = re.compile(r"own-[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class Viewer:
    """A peer, by its user; `all` is seen by root and the user whom the service runs as."""

    user: int
    all: bool

    def sees(self, owner: int | None) -> bool:
        """Whether a model of this owner, None: of administrators, is there for the peer."""
        return self.all or owner is None or owner == self.user

    def veiled(self, text: str, own: frozenset[str]) -> str:
        """A sentence for people without the names of models, but those in `own`, that users have brought."""
        if self.all or "own-" not in text:
            return text
        return _HIDDEN.sub(lambda m: m[0] if m[0] in own else "a model of a user", text)

    def veil(self, told: R, own: frozenset[str]) -> R:
        """The same for all that a part of a result tells."""
        if self.all:
            return told
        plain = self._veiled_in(strict.to_plain(told), own)
        return strict.from_plain(type(told), plain, where="veiled")

    def _veiled_in(self, plain: Any, own: frozenset[str]) -> Any:
        if isinstance(plain, str):
            return self.veiled(plain, own)
        if isinstance(plain, Mapping):
            return {key: self._veiled_in(each, own) for key, each in plain.items()}
        if isinstance(plain, list | tuple):
            return [self._veiled_in(each, own) for each in plain]
        return plain


EVERYTHING: Final = Viewer(user=0, all=True)


def model_named(params: Any) -> tuple[str, str] | None:
    """The field of a method's parameters that names a model, and the name; None where there is none."""
    if isinstance(params, _NO_MODELS):
        return None
    for field in _FIELDS:
        name = getattr(params, field, None)
        if isinstance(name, str) and is_own(name):
            return field, name
    return None


def renamed(params: P, field: str, name: str) -> P:
    """The parameters with another name in this field."""
    changes: Map = {field: name}
    return dataclasses.replace(params, **changes)  # type: ignore[type-var]
