"""Names models, variants and users' own models, and decides who sees them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from honed.daemon.store.compiled import Interface
from honed.protocol import strict
from honed.protocol.methods import NAME
from honed.protocol.params import LoadParams, RegionName, RegionParams, UploadOptions, UploadParams
from honed.protocol.strict import Map

MARK: Final = "@"
STORED: Final = re.compile(rf"{NAME.pattern}({MARK}[0-9a-z_]{{1,48}})?")  # Pattern of stored names
_LONGEST = 48  # Maximum length of the sizes as text
Shapes = Mapping[str, tuple[int, ...]]  # Shapes by input
_OWN: Final = re.compile(r"own-[0-9a-f]{40}")
NOBODYS: Final = f"own-{'0' * 40}"  # A name that no known contents have
_DEFAULTS: Final = UploadOptions(shapes={}, precision="auto", engine="fastest")
_FIELDS: Final = ("model_name", "model", "name")  # Fields of parameters that name a model
# LoadParams names a new model, the others a region.
_NO_MODELS: Final = (RegionName, RegionParams, LoadParams)
P = TypeVar("P")
R = TypeVar("R")


def model_of(name: str) -> str:
    """Return the name of a variant's model; any other name unchanged."""
    return name.partition(MARK)[0]


def is_variant(name: str) -> bool:
    """Return whether a name is that of a variant."""
    return MARK in name


def variant_name(model: str, shapes: Shapes, interface: Interface | None) -> str:
    """Return the name of the variant of `model` for these shapes of all inputs.

    Equal shapes always give the same name. It contains the dynamic sizes in the order of the inputs, those of
    a symbol once unless they differ; all sizes if it is not known which are dynamic; a digest if that is too
    long.
    """
    if interface is None:
        text = "_".join("x".join(map(str, sizes)) for _, sizes in sorted(shapes.items()))
    else:
        text = "x".join(map(str, _open_sizes(shapes, interface) or ()))
    if not 0 < len(text) <= _LONGEST:
        text = "z" + hashlib.sha256(json.dumps(sorted(shapes.items())).encode()).hexdigest()[:16]
    return f"{model}{MARK}{text}"


def _open_sizes(shapes: Shapes, interface: Interface) -> list[int] | None:
    """Return the dynamic sizes, or None if they do not determine the shapes."""
    sizes: list[int] = []
    different: list[int] = []
    named: dict[str, int] = {}
    contradicts = False  # ONNX Runtime accepts different sizes of a symbol
    for tensor in interface.inputs:
        given = shapes.get(tensor.name)
        if given is None or tensor.shape is None or len(tensor.shape) != len(given):
            return None
        symbols = tensor.symbols or ("",) * len(given)
        for size, symbol, number in zip(tensor.shape, symbols, given, strict=True):
            if size >= 0:
                continue
            sizes.append(number)
            if not symbol or symbol not in named:
                different.append(number)
                named[symbol] = number
            elif named[symbol] != number:
                contradicts = True
    return sizes if contradicts else different


def own_name(user: int, params: UploadParams) -> str:
    """Return the name of an upload of a user (uid); equal contents and options always give the same name.

    It reveals nothing of other users' models: names differ by user even for the same contents. A file that
    its app runs by itself is one model for all shapes.
    """
    options = params.parameters or _DEFAULTS
    shapes = {} if options.engine == "gpu" else options.shapes or {}
    # The name of the model file does not matter; external data is looked up by name.
    model, *data = zip(params.files, params.sha256, strict=True)
    said = (
        user,
        model[1],
        sorted(data),
        sorted(shapes.items()),
        options.precision or _DEFAULTS.precision,
        options.engine or _DEFAULTS.engine,
    )
    return f"own-{hashlib.sha256(json.dumps(said).encode()).hexdigest()[:40]}"


def is_own(name: str) -> bool:
    """Return whether only a user's own model, or a variant of one, may have this name."""
    return name.startswith("own-") and _OWN.fullmatch(model_of(name)) is not None


@dataclass(frozen=True, slots=True)
class Viewer:
    """A peer that looks at models: a uid; `all` for root and the user of the service, who see every model."""

    user: int
    all: bool

    def sees(self, owner: int | None) -> bool:
        """Return whether the peer sees a model of `owner`, None: of administrators."""
        return self.all or owner is None or owner == self.user

    def hide_names(self, text: str, own: frozenset[str]) -> str:
        """Return a text with the names of users' own models hidden, except those in `own`."""
        if self.all or "own-" not in text:
            return text
        return _OWN.sub(lambda m: m[0] if m[0] in own else "a model of a user", text)

    def veil(self, result: R, own: frozenset[str]) -> R:
        """Return a part of a result with `hide_names` applied to each text."""
        if self.all:
            return result
        plain = self._hide_names_in(strict.to_plain(result), own)
        return strict.from_plain(type(result), plain, where="veiled")

    def _hide_names_in(self, plain: Any, own: frozenset[str]) -> Any:
        if isinstance(plain, str):
            return self.hide_names(plain, own)
        if isinstance(plain, Mapping):
            return {key: self._hide_names_in(each, own) for key, each in plain.items()}
        if isinstance(plain, list | tuple):
            return [self._hide_names_in(each, own) for each in plain]
        return plain


EVERYTHING: Final = Viewer(user=0, all=True)


def naming_field(params: type[Any]) -> str | None:
    """Return the field of a method's parameters that names a model, or None."""
    if issubclass(params, _NO_MODELS):
        return None
    known = [field.name for field in dataclasses.fields(params) if field.name in _FIELDS]
    assert len(known) < 2, f"{params.__name__} names two models"
    return known[0] if known else None


def with_model_name(params: P, field: str, name: str) -> P:
    """Return the parameters with another name in this field."""
    changes: Map = {field: name}
    return dataclasses.replace(params, **changes)  # type: ignore[type-var]
