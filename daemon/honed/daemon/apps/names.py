"""What users' own models are called. No I/O."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Final

from honed.daemon.store.variantnames import model_of
from honed.protocol.params import BringOptions, BringParams

_OWN: Final = re.compile(r"own-[0-9a-f]{40}")
NOBODYS: Final = f"own-{'0' * 40}"  # that no contents are known to have
_DEFAULTS: Final = BringOptions(shapes={}, precision="auto", engine="fastest")


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
