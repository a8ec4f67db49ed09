"""When honed-hub pulls and pushes, without clocks; and its looks at a service that a stub stands for."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from honed.hub import main as schedule
from honed.hub.machine import HubConfig, HubPlace
from honed.hub.main import HubAction, ServiceView, key_of
from honed.hub.memory import HubState
from honed.hub.minisign import PublicKey, SecretKey
from honed.hub.pushing import LASTS
from honed.protocol.errors import InvalidArgument, PermissionDenied, Unavailable, Unimplemented
from honed.protocol.service import ConfigShown, ShownSetting

NOW = 1.8e9
HOUR = 3600.0
SETTINGS = HubConfig(
    url="/hub", push_url="/hub", owner=None, keys={}, pull=True, push=True, hold=False, hours=6.0
)
VIEW = ServiceView(models=frozenset({"m"}), trials=7, idle=True, tuning=False, running_s=1e6)


def remembered(**changes: object) -> HubState:
    memory = HubState(pulled_s=NOW, pushed_s=NOW, models=("m",), trials=7)
    for name, value in changes.items():
        setattr(memory, name, value)
    return memory


def due(
    memory: HubState, after: float = 60.0, settings: HubConfig = SETTINGS, view: ServiceView = VIEW
) -> HubAction | None:
    return schedule.due(settings, memory, view, NOW + after, 0.5)


def test_nothing_is_due_without_a_hub_or_reason() -> None:
    assert due(remembered()) is None
    assert due(HubState(), settings=replace(SETTINGS, url="")) is None


def test_it_pulls_at_first_for_new_models_and_now_and_then() -> None:
    assert due(HubState()) is HubAction.PULL
    assert due(remembered(), view=replace(VIEW, models=frozenset({"m", "new"}))) is HubAction.PULL
    assert due(remembered(), view=replace(VIEW, models=frozenset())) is None
    assert due(remembered(), 6.1 * HOUR) is HubAction.PULL
    assert due(remembered(pushed_s=None, trials=0), settings=replace(SETTINGS, pull=False)) is HubAction.PUSH


def test_a_busy_machine_is_waited_for_but_not_for_ever() -> None:
    busy = replace(VIEW, idle=False)
    assert due(remembered(), 6.1 * HOUR, view=busy) is None
    assert due(remembered(), 24.5 * HOUR, view=busy) is HubAction.PULL


def test_it_pushes_once_a_day_when_tuning_has_ended() -> None:
    settings, more = replace(SETTINGS, pull=False), replace(VIEW, trials=99)
    assert due(remembered(), 10 * HOUR, settings, more) is None
    assert due(remembered(), 21 * HOUR, settings, more) is HubAction.PUSH
    assert due(remembered(), 21 * HOUR, settings, replace(more, tuning=True)) is None
    assert due(remembered(), 21 * HOUR, settings) is None
    assert due(remembered(), LASTS / 2 + 60, settings) is HubAction.PUSH  # or it would expire
    assert due(remembered(), 21 * HOUR, replace(settings, push=False), more) is None


def test_a_hub_that_is_away_for_a_day_is_asked_ever_more_rarely() -> None:
    memory, now, asked = HubState(), NOW, 0
    while now < NOW + 24 * HOUR:
        if schedule.due(SETTINGS, memory, VIEW, now, 0.5) is not None:
            schedule.record_failure(memory, "pull: http://hub cannot be read", now, 0.5)
            asked += 1
        now += 60.0
    assert 8 <= asked <= 12
    assert memory.problem.startswith("pull: ")
    schedule.record_success(memory)
    assert (memory.failures, memory.retry_s, memory.problem) == (0, 0.0, "")


@given(st.integers(0, 10_000), st.floats(0, 1))
def test_no_wait_is_longer_than_six_hours(failures: int, chance: float) -> None:
    memory = HubState(failures=failures)
    schedule.record_failure(memory, "", NOW, chance)
    assert 0 < memory.retry_s - NOW <= 6 * HOUR


@given(st.floats(0, 1), st.floats(0, 1e8), st.booleans(), st.booleans(), st.integers(0, 30))
def test_a_clock_set_back_holds_nothing_up(
    chance: float, back: float, idle: bool, tuning: bool, failures: int
) -> None:
    """It pulls at once; after a failure no later than that may take with a clock that is right."""
    view, then = replace(VIEW, idle=idle, tuning=tuning), NOW - back - 1
    assert schedule.due(SETTINGS, remembered(), view, then, chance) is HubAction.PULL
    memory = HubState(failures=failures)
    schedule.record_failure(memory, "pull: the hub is away", NOW, chance)
    told = [schedule.due(SETTINGS, memory, view, now, chance) for now in (then, then + 6 * HOUR)]
    assert HubAction.PULL in told


@given(
    hours=st.floats(0.1, 100),
    chance=st.floats(0, 1),
    off=st.floats(0, 100 * HOUR),
    running=st.floats(0, 1e6),
)
@example(hours=1.0, chance=1.0, off=0.0, running=1800.0)
def test_what_is_overdue_waits_for_a_part_of_half_an_hour_and_no_longer(
    hours: float, chance: float, off: float, running: float
) -> None:
    settings, view = replace(SETTINGS, hours=hours), replace(VIEW, running_s=running)
    overdue = 1.1 * hours * HOUR + 1e-6  # moments since 1970 are no finer than 0.24 us
    memory, now = remembered(), NOW + overdue + off
    told = schedule.due(settings, memory, view, now, chance)
    if running >= min(0.5, hours) * HOUR:
        assert told is HubAction.PULL
    elif running < chance * min(0.5, hours) * HOUR:
        assert told is None
    assert (
        schedule.due(settings, HubState(), view, now, chance) is HubAction.PULL
    )  # the first waits for nobody


def busiest(times: list[float], window: float) -> int:
    """The most of them in any such window."""
    return max(sum(begin <= time < begin + window for time in times) for begin in times)


@given(st.lists(st.floats(0, 1), min_size=20, max_size=60, unique=True), st.integers(0, 20))
def test_machines_that_fail_together_come_back_apart(chances: list[float], failures: int) -> None:
    """Each at a moment of its own, as far apart as their chances are, within the latter half of the wait."""
    waits = []
    for chance in chances:
        memory = HubState(failures=failures)
        schedule.record_failure(memory, "", NOW, chance)
        waits.append(memory.retry_s - NOW)
    longest = min(300.0 * 2**failures, 6 * HOUR)
    assert all(longest / 2 <= wait <= longest for wait in waits)
    assert busiest(waits, longest / 20) <= busiest(chances, 0.11)


@given(st.lists(st.floats(0, 1), min_size=20, max_size=60, unique=True), st.floats(1, 100))
def test_machines_that_come_on_together_pull_apart(chances: list[float], days: float) -> None:
    def pulls(chance: float) -> float:
        now, running = NOW + days * 24 * HOUR, 0.0
        while due_at(now + running, running, chance) is None:
            running += 60.0
        return running

    def due_at(now: float, running: float, chance: float) -> HubAction | None:
        settings = replace(SETTINGS, push=False)
        return schedule.due(settings, remembered(), replace(VIEW, running_s=running), now, chance)

    assert busiest([pulls(chance) for chance in chances], 60.0) <= busiest(chances, 0.1)


def shown(**values: object) -> ConfigShown:
    usual: dict[str, object] = {
        "url": "u", "push_url": "", "owner": "", "keys": {}, "pull": True, "push": True, "hold": False,
        "hours": 1.0, "trials": 4,
    }  # fmt: skip
    rows = tuple(
        ShownSetting(name=f"hub.{name}", value=value, unit="", origin="", effect="")
        for name, value in (usual | values).items()
    )
    return ConfigShown(settings=rows, files=(), pending=(), problem="")


def test_settings_are_the_services() -> None:
    key = SecretKey.make().public
    settings = HubConfig.of(shown(keys={"attic": str(key)}, owner=str(key)))
    assert (settings.push_url, settings.keys, settings.owner) == ("u", {"attic": key}, key)
    assert isinstance(settings.owner, PublicKey)
    with pytest.raises(InvalidArgument, match=r"\[hub\] key attic"):
        HubConfig.of(shown(keys={"attic": "RWnonsense"}))
    with pytest.raises(InvalidArgument, match="cannot name a key"):
        HubConfig.of(shown(keys={"at tic": str(key)}))
    with pytest.raises(Unimplemented, match="update"):
        HubConfig.of(ConfigShown(settings=(), files=(), pending=(), problem=""))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a folder another user's")
def test_root_does_not_spoil_the_folder_of_another_user(tmp_path: Path) -> None:
    place = HubPlace(tmp_path / "hub")
    with place.changing() as memory:
        memory.trials = 3
    os.chown(place.folder, 12345, 12345)
    with pytest.raises(PermissionDenied, match="sudo -u honed-hub"), place.changing():
        pass
    with pytest.raises(PermissionDenied, match="another user"):
        key_of(place)


def test_one_command_at_a_time(tmp_path: Path) -> None:
    place = HubPlace(tmp_path / "hub")
    with place.changing() as memory:
        memory.trials = 3
        with pytest.raises(Unavailable, match="another command"), place.changing():
            pass
    assert place.read_state().trials == 3
