"""The units as they lie in debian/, without installing them."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from honed.daemon.features.user_models import AppsSettings
from honed.daemon.settings.schema import MAKING_PERCENT, Limits
from honed.frigate.main import FrigateSettings
from honed.http.app import HttpSettings
from honed.process.limits import MEMORY_PERCENT
from honed.protocol.strict import from_plain
from honed.runtime import HONED_VERSION

ROOT = Path(__file__).resolve().parents[2]
SERVICES = ("honed.service", "honed-tuner.service")
FARM = "honed-farm.service"
BRIDGES = ("honed-frigate.service", "honed-http.service")
needs_systemd = pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")


def directives(unit: str) -> list[tuple[str, str]]:
    lines = (ROOT / "debian" / unit).read_text().splitlines()
    return [
        (key, value)
        for key, equals, value in (line.partition("=") for line in lines)
        if equals and key[0] != "#"
    ]


@needs_systemd
@pytest.mark.parametrize(
    ("unit", "most"),
    [
        ("honed.service", 1.0),
        *((unit, 1.5) for unit in ("honed-tuner.service", "honed-hub.service", *BRIDGES)),
    ],
)
def test_the_services_are_hardened(unit: str, most: float) -> None:
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", ROOT / "debian" / unit]
    told = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    found = re.search(r"Overall exposure level for \S+: ([0-9.]+)", told)
    assert found is not None, told
    assert float(found[1]) <= most


def test_both_services_see_the_same_devices_and_folders() -> None:
    shared = (
        "DeviceAllow",
        "DevicePolicy",
        "StateDirectory",
        "StateDirectoryMode",
        "CacheDirectory",
        "User",
        "UMask",
    )
    one, other, farm = ([d for d in directives(unit) if d[0] in shared] for unit in (*SERVICES, FARM))
    assert sorted(one) == sorted(other) == sorted(farm)


def test_what_would_break_the_services_is_off() -> None:
    for unit in (*SERVICES, FARM):
        given = dict(directives(unit))
        for key in ("PrivateUsers", "PrivateDevices", "MemoryDenyWriteExecute", "ProcSubset"):
            assert key not in given, f"{unit}: docs/security.md says why {key} stays off"


def test_what_debhelper_and_systemd_would_make_of_the_units() -> None:
    """Also= has debhelper restart the socket at upgrades; After= has a crashed service wait for its tuner."""
    assert "Also" not in dict(directives("honed.service"))
    assert dict(directives("honed-tuner.service"))["After"] == "honed.socket"


def test_a_farm_is_the_tuner_with_a_network() -> None:
    """And it joins none that nobody has named: without HONED_FARM its address is empty, which is refused."""
    own = {"Description", "Documentation", "PartOf", "ExecStart", "EnvironmentFile", "WantedBy"}
    tuner, farm = ({d for d in directives(unit) if d[0] not in own} for unit in (SERVICES[1], FARM))
    assert tuner - farm == {
        ("PrivateNetwork", "yes"),
        ("RestrictAddressFamilies", "AF_UNIX"),
        ("IPAddressDeny", "any"),
    }
    assert farm - tuner == {("RestrictAddressFamilies", "AF_UNIX AF_INET AF_INET6")}
    assert dict(directives(FARM))["ExecStart"].endswith(" ${HONED_FARM}")


def test_bridges_see_nothing_but_this_machine() -> None:
    for unit in BRIDGES:
        given = dict(directives(unit))
        assert (given["IPAddressDeny"], given["IPAddressAllow"]) == ("any", "localhost")
        assert given["PrivateDevices"] == "yes"


@pytest.mark.parametrize("kind", [FrigateSettings, HttpSettings])
def test_the_configuration_of_a_bridge_shows_every_default(kind: type[Any]) -> None:
    file = ROOT / "packaging" / f"honed-{kind.__module__.split('.')[1]}.toml"
    given = tomllib.loads(re.sub(r"^#(?=\w+ = )", "", file.read_text(), flags=re.M))
    assert set(given) == {field.name for field in fields(kind)}
    assert from_plain(kind, given, where=file.name) == kind()


def test_memory_max_of_the_bridges_is_above_what_they_take() -> None:
    """Bodies come in parts that are joined; then there are JSON's objects, and the answer."""
    http = HttpSettings()
    most = {
        "honed-frigate.service": FrigateSettings().max_message_mib,
        "honed-http.service": 2 * http.max_bodies_mib + http.max_bodies_mib + 64 * http.max_json_mib,
    }
    for unit, mib in most.items():
        assert mib + 128 <= int(dict(directives(unit))["MemoryMax"].removesuffix("G")) << 10


def test_systemd_and_not_the_service_starts_the_tuner() -> None:
    settings = tomllib.loads((ROOT / "packaging/systemd/10-systemd.toml").read_text())
    assert settings == {"tuner": {"spawn": False}}


def test_restarts_of_the_service_do_not_keep_the_tuner_from_starting() -> None:
    """systemd counts them for the tuner, too, which starts with it: 10 in 10 minutes left a board untuned."""
    tuner = dict(directives("honed-tuner.service"))
    assert tuner["StartLimitIntervalSec"] == "0"
    assert int(tuner["RestartSec"]) >= 60, "one that fails at once is not started all the time"


def test_memory_max_is_what_the_limits_add_up_to() -> None:
    """The service's as a whole, and of that what compiling or tuning has, in turns."""
    assert dict(directives("honed.service"))["MemoryMax"] == f"{MEMORY_PERCENT}%"
    for unit in (SERVICES[1], FARM):
        given = dict(directives(unit))
        assert given["MemoryMax"] == f"{MAKING_PERCENT}%"
        assert int(given["MemoryHigh"].removesuffix("%")) < MAKING_PERCENT


def test_what_memory_runs_out_for_is_no_app() -> None:
    """Children of the service say so themselves (`honed.process.limits`)."""
    for unit in (SERVICES[1], FARM):
        assert int(dict(directives(unit))["OOMScoreAdjust"]) > 0
    for unit in (*SERVICES, FARM):
        assert dict(directives(unit))["OOMPolicy"] == "continue"


def test_tasks_max_is_above_the_threads_of_all_models() -> None:
    """A model on the CPU engine has a thread for each of a board's eight cores but one."""
    apps = AppsSettings(max_users=16)
    threads = 7 * (Limits().max_models + apps.max_users * apps.max_models)
    assert threads + 512 <= int(dict(directives("honed.service"))["TasksMax"]) <= 1.2 * threads


def test_the_package_has_the_version_of_the_program() -> None:
    changelog = (ROOT / "debian/changelog").read_text()
    assert changelog.startswith(f"honed ({HONED_VERSION})")


def test_the_groups_are_those_the_service_knows() -> None:
    from honed.daemon.transport.access import CHANGE_GROUP, HINTS_GROUP, INFER_GROUP

    made = re.findall(r"^[ug] (\S+)", (ROOT / "debian/honed.sysusers").read_text(), re.MULTILINE)
    assert made == [INFER_GROUP, CHANGE_GROUP, HINTS_GROUP]


@pytest.mark.parametrize("user", ["honed-frigate", "honed-http", "honed-hub"])
def test_users_with_a_network_change_no_models(user: str) -> None:
    from honed.daemon.transport.access import HINTS_GROUP, INFER_GROUP

    groups = re.findall(rf"^m {user} (\S+)", (ROOT / f"debian/{user}.sysusers").read_text(), re.MULTILINE)
    assert groups == [INFER_GROUP, *([HINTS_GROUP] if user == "honed-hub" else [])]


@pytest.mark.skipif(not shutil.which("sh"), reason="needs a shell")
def test_the_shell_scripts_parse() -> None:
    scripts = [
        ROOT / "packaging" / name
        for name in ("build-deb", "check-deb", "container-test", "bundle/fetch", "bin/dist-info")
    ]
    scripts += [
        ROOT / "debian/tests" / name
        for name in (
            "common",
            "service",
            "life",
            "idle",
            "upgrade",
            "before",
            "remove",
            "bridges",
            "hub",
            "farm",
        )
    ]
    scripts += [
        ROOT / f"debian/{package}.postrm"
        for package in ("honed", "honed-cpu", "honed-farm", "honed-frigate", "honed-http", "honed-hub")
    ]
    scripts += [ROOT / f"debian/{package}.postinst" for package in ("honed", "honed-cpu", "honed-hub")]
    for script in scripts:
        subprocess.run(["sh", "-n", script], check=True)


def test_what_container_tests_import_is_there() -> None:
    imports = [
        line
        for script in (ROOT / "debian/tests").iterdir()
        for line in re.findall(r"^from honed[\w.]* import .+$", script.read_text(), re.MULTILINE)
    ]
    assert len(imports) > 5
    for line in imports:
        exec(line, {})
