"""Places are a pure function of environment and user."""

from __future__ import annotations

from pathlib import Path

import pytest

from honed.daemon.settings.places import drop_in_dir, places
from honed.runtime.errors import InvalidArgument


def test_root_gets_the_places_of_a_system_service() -> None:
    found = places({"HOME": "/root", "XDG_STATE_HOME": "/root/state", "XDG_RUNTIME_DIR": "/run/user/0"}, 0)
    assert found.socket == Path("/run/honed/honed.sock")
    assert found.state_dir == Path("/var/lib/honed")
    assert found.cache_dir == Path("/var/cache/honed")
    assert found.config == Path("/etc/honed/honed.toml")
    assert drop_in_dir(found.config) == Path("/etc/honed/honed.toml.d")


def test_systemd_names_the_folders_of_an_unprivileged_service() -> None:
    environ = {
        "RUNTIME_DIRECTORY": "/run/honed",
        "STATE_DIRECTORY": "/var/lib/honed:/var/lib/other",
        "CACHE_DIRECTORY": "/var/cache/honed",
        "CONFIGURATION_DIRECTORY": "/etc/honed",
    }
    assert places(environ, 990) == places({}, 0)


def test_a_user_service_of_systemd_stays_in_the_users_folders() -> None:
    environ = {"RUNTIME_DIRECTORY": "/run/user/7/honed", "STATE_DIRECTORY": "/home/u/.local/state/honed"}
    found = places({**environ, "CACHE_DIRECTORY": "/home/u/.cache/honed"}, 7)
    assert found.socket == Path("/run/user/7/honed/honed.sock")
    assert found.state_dir == Path("/home/u/.local/state/honed")


def test_an_ordinary_user_gets_xdg_defaults() -> None:
    found = places({"HOME": "/home/u", "XDG_RUNTIME_DIR": "/run/user/7"}, 7)
    assert found.socket == Path("/run/user/7/honed/honed.sock")
    assert found.state_dir == Path("/home/u/.local/state/honed")
    assert found.cache_dir == Path("/home/u/.cache/honed")
    assert found.config == Path("/home/u/.config/honed/honed.toml")


def test_xdg_variables_win_and_relative_ones_are_ignored() -> None:
    environ = {
        "HOME": "/home/u",
        "XDG_STATE_HOME": "/s",
        "XDG_CACHE_HOME": "relative",
        "XDG_CONFIG_HOME": "",
        "XDG_RUNTIME_DIR": "run",
    }
    found = places(environ, 7)
    assert found.state_dir == Path("/s/honed")
    assert found.cache_dir == Path("/home/u/.cache/honed")
    assert found.config == Path("/home/u/.config/honed/honed.toml")
    assert found.socket is None


def test_no_home_is_a_clear_error() -> None:
    with pytest.raises(InvalidArgument, match="HOME"):
        places({"XDG_RUNTIME_DIR": "/run/user/7"}, 7)
