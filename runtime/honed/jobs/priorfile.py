"""Reads and writes the file of a learned prior, and finds an administrator's own.

A line of JSON describes the file, and XGBoost's model follows. XGBoost ends the process on some damaged files
(5 of 40 that were changed at random), so it gets none before the hash is verified.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from honed.protocol import strict
from honed.protocol.errors import InvalidArgument

# Raised when features change, so that older files are not used.
FORMAT: Final = 1
SUFFIX: Final = ".prior"  # Suffix of the family's name
SYSTEM: Final = Path("/etc/honed/priors")
_MAX_BYTES: Final = 16 << 20
_MAX_HEADER: Final = 1024
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PriorHeader:
    honed_prior: int  # FORMAT
    family: str
    knows_rules: bool
    sha256: str  # SHA-256 of the rest of the file


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorFile:
    """A prior: `model` is XGBoost's, as UBJSON.

    `knows_rules`: it also learned from default rules, so that its scores of them compare with those of draws.
    """

    family: str
    knows_rules: bool
    model: bytes

    @property
    def digest(self) -> str:
        """The first 8 hexadecimal digits of the model's SHA-256, which identify it."""
        return _sha256(self.model)[:8]

    def to_bytes(self) -> bytes:
        """Return the contents of the file that `read` reads."""
        header = _PriorHeader(
            honed_prior=FORMAT, family=self.family, knows_rules=self.knows_rules, sha256=_sha256(self.model)
        )
        return json.dumps(strict.to_plain(header)).encode() + b"\n" + self.model


@functools.lru_cache(maxsize=8)
def _sha256(model: bytes) -> str:
    """Return the SHA-256 of a model, in hexadecimal digits.

    It is cached: the model has about a megabyte, and each compiled function needs the digest.
    """
    return hashlib.sha256(model).hexdigest()


def read(path: Path) -> PriorFile:
    """Return the prior in a file.

    Raises InvalidArgument if the file cannot be read, is no prior, is damaged, or was learned by another
    version of honed.
    """
    try:
        with path.open("rb") as file:
            first, model = file.readline(_MAX_HEADER), file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be read ({error.strerror})") from error
    try:
        plain = json.loads(first)
        if not isinstance(plain, dict) or "honed_prior" not in plain:
            raise ValueError("it says so nowhere")
        if plain["honed_prior"] != FORMAT:
            raise InvalidArgument(f"{path} was learned by another version of honed; learn it anew")
        header = strict.from_plain(_PriorHeader, plain, where="it")
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{path} is no prior of honed ({error}); 'hone hub learn' makes one") from error
    if len(model) > _MAX_BYTES or _sha256(model) != header.sha256:
        raise InvalidArgument(f"{path} is damaged; copy or learn it anew")
    return PriorFile(family=header.family, knows_rules=header.knows_rules, model=model)


def own_folders(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Return the folders of own priors: the user's, then the system's.

    A prior in them takes the place of the prior that ships for its family.
    """
    home = environ.get("XDG_CONFIG_HOME") or (f"{environ['HOME']}/.config" if environ.get("HOME") else "")
    users = (Path(home) / "honed/priors",) if home.startswith("/") else ()
    return (*users, SYSTEM)


def own(family: str) -> PriorFile | None:
    """Return the administrator's own prior of a family, or None if there is none.

    Reads a changed file again. Logs and skips a file that cannot be used.
    """
    for folder in own_folders(os.environ):
        path = folder / f"{family}{SUFFIX}"
        try:
            state = path.stat()
        except FileNotFoundError:
            continue
        except OSError as error:
            _log.warning("%s cannot be read (%s); it is not used", path, error.strerror)
            continue
        if found := _load_usable(path, state.st_ino, state.st_size, state.st_mtime_ns):
            return found
    return None


@functools.lru_cache(maxsize=8)
def _load_usable(path: Path, *_state: int) -> PriorFile | None:
    """Return the prior in a file whose state is `_state`; log and return None if it cannot be used.

    The result is cached until the state of the file changes.
    """
    try:
        return usable(path)
    except InvalidArgument as error:
        _log.warning("%s; it is not used", error)
        return None


def usable(path: Path) -> PriorFile:
    """Return the prior in a file, as `read` does, whose name must be that of the prior's family."""
    found = read(path)
    if found.family != path.name.removesuffix(SUFFIX):
        raise InvalidArgument(f"{path} is a prior of {found.family}; call it {found.family}{SUFFIX}")
    return found
