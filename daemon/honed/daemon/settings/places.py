"""Determines the folders of the service, and whether its optional packages are installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from honed.protocol.errors import InvalidArgument

SYSTEM_SOCKET = Path("/run/honed/honed.sock")
SYSTEM_STATE = Path("/var/lib/honed")
SYSTEM_CACHE = Path("/var/cache/honed")
SYSTEM_CONFIG = Path("/etc/honed/honed.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The absolute paths of the service, which need not exist; `socket` is None without a folder for it."""

    socket: Path | None
    state_dir: Path  # Models and manifests: losing it loses models
    cache_dir: Path  # May be emptied at any time
    config: Path

    @property
    def records(self) -> Path:
        """The path of the tuning records."""
        return records_in(self.state_dir)


def drop_in_dir(config: Path) -> Path:
    """Return the folder of drop-in files: `honed.toml.d` for `honed.toml`."""
    return config.with_name(config.name + ".d")


def records_in(state_dir: Path) -> Path:
    """Return the path of the records of a service with this state folder."""
    return state_dir / "records.sqlite"


def places(environ: Mapping[str, str], uid: int) -> Places:
    """Return the places for a process with this environment and user id; the first of these that fits.

    1. systemd started us with StateDirectory= and the like: the folders it names (systemd.exec(5));
    2. the user is root: the folders of a system service;
    3. an ordinary user: the XDG base directories (specification 0.8), relative values ignored as it says.

    Raises InvalidArgument for an ordinary user whose environment has neither HOME nor the XDG variables.
    """
    if uid == 0 or _from_systemd(environ, "STATE_DIRECTORY"):
        usual = Places(
            socket=SYSTEM_SOCKET, state_dir=SYSTEM_STATE, cache_dir=SYSTEM_CACHE, config=SYSTEM_CONFIG
        )
    else:
        usual = _user(environ)
    runtime = _from_systemd(environ, "RUNTIME_DIRECTORY")
    config = _from_systemd(environ, "CONFIGURATION_DIRECTORY")
    return Places(
        socket=runtime / "honed.sock" if runtime else usual.socket,
        state_dir=_from_systemd(environ, "STATE_DIRECTORY") or usual.state_dir,
        cache_dir=_from_systemd(environ, "CACHE_DIRECTORY") or usual.cache_dir,
        config=config / "honed.toml" if config else usual.config,
    )


def _user(environ: Mapping[str, str]) -> Places:
    runtime = _absolute(environ, "XDG_RUNTIME_DIR")
    return Places(
        socket=runtime / "honed" / "honed.sock" if runtime else None,
        state_dir=_home(environ, "XDG_STATE_HOME", ".local/state") / "honed",
        cache_dir=_home(environ, "XDG_CACHE_HOME", ".cache") / "honed",
        config=_home(environ, "XDG_CONFIG_HOME", ".config") / "honed" / "honed.toml",
    )


def _home(environ: Mapping[str, str], variable: str, beneath: str) -> Path:
    given = _absolute(environ, variable)
    if given is not None:
        return given
    home = _absolute(environ, "HOME")
    if home is None:
        raise InvalidArgument(
            f"neither {variable} nor HOME names a folder; set HOME or say where to keep things "
            "with --state-dir, --cache-dir and --config"
        )
    return home / beneath


def _absolute(environ: Mapping[str, str], variable: str) -> Path | None:
    value = environ.get(variable, "")
    return Path(value) if value.startswith("/") else None


def _from_systemd(environ: Mapping[str, str], variable: str) -> Path | None:
    """Return the first folder of the colon-separated list that systemd sets in `variable`."""
    first = environ.get(variable, "").split(":", 1)[0]
    return Path(first) if first.startswith("/") else None


def users_cache(cache_dir: Path, owner: int) -> Path:
    """Return a user's own cache folder, separate from other users'."""
    return cache_dir / "users" / str(owner)


NO_COMPILER = "the compiler is not installed; install honed-tuner (apt install honed-tuner)"


def compiler() -> bool:
    """Return whether the compiler is installed, without importing it."""
    return importlib.util.find_spec("honed.tuner") is not None
