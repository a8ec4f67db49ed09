"""Users' own models: what they are called, and who sees which: those of administrators all do. No I/O."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from honed.daemon.store.variantnames import model_of
from honed.protocol import strict
from honed.protocol.params import BringOptions, BringParams, LoadParams, RegionName, RegionParams
from honed.protocol.strict import Map

_OWN: Final = re.compile(r"own-[0-9a-f]{40}")
NOBODYS: Final = f"own-{'0' * 40}"  # that no contents are known to have
_DEFAULTS: Final = BringOptions(shapes={}, precision="auto", engine="fastest")
_FIELDS: Final = ("model_name", "model", "name")  # of parameters, that name a model
# The last one makes one, whose name none may have.
_NO_MODELS: Final = (RegionName, RegionParams, LoadParams)
P = TypeVar("P")
R = TypeVar("R")


def own_name(user: int, params: BringParams) -> str:
    """The name of what a user (uid) brings: always the same for the same contents and options.

    Of another user's it tells nothing: names differ by user, though contents are the same.
    """
    options = params.parameters or _DEFAULTS
    # What the model file is called changes nothing; external data is looked up by name.
    model, *data = zip(params.files, params.sha256, strict=True)
    said = (
        user,
        model[1],
        sorted(data),
        sorted((options.shapes or {}).items()),
        options.precision or _DEFAULTS.precision,
        options.engine or _DEFAULTS.engine,
    )
    return f"own-{hashlib.sha256(json.dumps(said).encode()).hexdigest()[:40]}"


def is_own(name: str) -> bool:
    """Whether only a model that was brought, or a variant of one, may have this name."""
    return _OWN.fullmatch(model_of(name)) is not None


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
        return _OWN.sub(lambda m: m[0] if m[0] in own else "a model of a user", text)

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
