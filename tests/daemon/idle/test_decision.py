"""When the machine counts as idle: verdicts and the decision, without a clock."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.daemon.idle.decision import (
    MAX_GAP,
    Context,
    Decision,
    IdleSettings,
    decide,
    judge,
    parse,
)
from honed.daemon.idle.signals import OwnLoad, Sample
from honed.protocol.service import SignalReading
from honed.runtime.errors import InvalidArgument

SETTINGS = IdleSettings()
CONTEXT = Context(own=OwnLoad(), leased=False, was_idle=True, minute=12 * 60)
QUIET = {
    "requests": 1000.0,
    "queue": 0.0,
    "adding": 0.0,
    "worker": 0.0,
    "cpu pressure": 0.0,
    "memory pressure": 0.0,
    "io pressure": 0.0,
    "load": 0.0,
    "gpu": 0.0,
    "gpu clock": 0.0,
    "temperature gpu-thermal": 40.0,
    "power": 0.0,
}
BUSY = {
    "requests": 29.9,
    "queue": 1.0,
    "adding": 1.0,
    "worker": 1.0,
    "cpu pressure": 10.1,
    "memory pressure": 10.1,
    "io pressure": 10.1,
    "load": 0.51,
    "gpu": 10.1,
    "temperature gpu-thermal": 75.1,
    "power": 1.0,
}
NOT_JUDGED = {"gpu clock"}  # where the utilisation is known
FIGURES = st.fixed_dictionaries(
    {name: st.none() | st.floats(0, 200, allow_nan=False) for name in QUIET if name != "requests"}
)


def sample(signal: str, value: float | None, limit: float | None = None) -> Sample:
    return Sample(signal=signal, value=value, unit="", text="it is so", limit=limit)


def samples(**changed: float | None) -> list[Sample]:
    named = QUIET | {name.replace("_", " "): value for name, value in changed.items()}
    return [sample(name, value) for name, value in named.items()]


def verdicts(
    given: list[Sample], settings: IdleSettings = SETTINGS, context: Context = CONTEXT
) -> dict[str, str]:
    return {reading.signal: reading.verdict for reading in judge(given, settings, context)}


def long_quiet(settings: IdleSettings = SETTINGS) -> Decision:
    """A machine that was quiet for long, at 100 s."""
    readings = judge(samples(), settings, CONTEXT)
    decision = decide(readings, settings, 0.0)
    for now in range(10, 101, 10):
        decision = decide(readings, settings, float(now), decision)
    return decision


def test_each_signal_alone_makes_the_machine_busy() -> None:
    before = long_quiet()
    assert before.idle
    assert set(QUIET) - set(BUSY) == NOT_JUDGED
    for name, value in BUSY.items():
        readings = judge([sample(n, value if n == name else v) for n, v in QUIET.items()], SETTINGS, CONTEXT)
        assert [reading.signal for reading in readings if reading.verdict == "busy"] == [name]
        decision = decide(readings, SETTINGS, 101.0, before)
        assert not decision.idle
        assert name in decision.why


def test_what_a_machine_does_not_show_does_not_count() -> None:
    readings = judge([sample(name, None) for name in QUIET], SETTINGS, CONTEXT)
    assert {reading.verdict for reading in readings} == {"absent"}
    assert decide(readings, SETTINGS, 101.0, long_quiet()).idle


def test_the_clock_counts_where_the_use_is_not_known() -> None:
    assert verdicts(samples(gpu=None, gpu_clock=50.0))["gpu clock"] == "busy"
    assert verdicts(samples(gpu=0.0, gpu_clock=50.0))["gpu clock"] == "quiet"


def test_the_tuners_own_work_is_not_held_against_the_machine() -> None:
    own = dataclasses.replace(CONTEXT, leased=True, own=OwnLoad(cpu_percent=60.0, load_per_core=0.9))
    given = samples(gpu=100.0, gpu_clock=100.0, cpu_pressure=65.0, load=1.2)
    assert set(verdicts(given, context=own).values()) == {"quiet", "absent"}
    for busier in ({"cpu_pressure": 71.0}, {"load": 1.5}, {"memory_pressure": 11.0}, {"io_pressure": 11.0}):
        changed = samples(gpu=100.0, **busier)
        assert list(verdicts(changed, context=own).values()).count("busy") == 1
    # Without a lease somebody else uses the GPU.
    assert verdicts(given, context=dataclasses.replace(own, leased=False))["gpu"] == "busy"


@pytest.mark.parametrize(
    ("temperature", "trip", "was_idle", "verdict"),
    [
        (75.0, None, True, "quiet"),
        (75.1, None, True, "busy"),
        (70.1, None, False, "busy"),
        (70.0, None, False, "quiet"),
        (75.0, 85.0, True, "quiet"),
        (60.0, 65.0, True, "quiet"),
        (60.1, 65.0, True, "busy"),
        (56.0, 65.0, False, "busy"),
    ],
)
def test_temperature_counts_with_the_trip_point_and_must_fall_clearly(
    temperature: float, trip: float | None, was_idle: bool, verdict: str
) -> None:
    context = dataclasses.replace(CONTEXT, was_idle=was_idle)
    assert verdicts([sample("temperature x", temperature, trip)], context=context)["temperature x"] == verdict


def test_on_battery() -> None:
    assert verdicts(samples(power=1.0), IdleSettings(on_battery=True))["power"] == "quiet"


def test_switched_off() -> None:
    decision = decide(judge(samples(), SETTINGS, CONTEXT), IdleSettings(enabled=False), 101.0, long_quiet())
    assert not decision.idle
    assert "enabled" in decision.why


@pytest.mark.parametrize(
    ("window", "minute", "verdict"),
    [
        ("", 0, "absent"),
        ("09:00-17:30", 9 * 60, "quiet"),
        ("09:00-17:30", 17 * 60 + 29, "quiet"),
        ("09:00-17:30", 17 * 60 + 30, "busy"),
        ("09:00-17:30", 0, "busy"),
        ("22:00-06:00", 22 * 60, "quiet"),
        ("22:00-06:00", 23 * 60, "quiet"),
        ("22:00 - 06:00", 0, "quiet"),
        ("22:00-06:00", 6 * 60, "busy"),
        ("22:00-06:00", 21 * 60 + 59, "busy"),
    ],
)
def test_window(window: str, minute: int, verdict: str) -> None:
    context = dataclasses.replace(CONTEXT, minute=minute)
    assert verdicts([], IdleSettings(window=window), context) == {"window": verdict}


@pytest.mark.parametrize(
    "text", ["22:00", "24:00-01:00", "1:00-2:00", "a-b", "10:00-10:00", "10:00-11:00-12:00"]
)
def test_windows_that_are_none(text: str) -> None:
    with pytest.raises(InvalidArgument, match='as "22:00-06:30"'):
        parse(text)


def test_idle_comes_after_settling_and_busy_at_once() -> None:
    quiet, busy = judge(samples(), SETTINGS, CONTEXT), judge(samples(load=1.0), SETTINGS, CONTEXT)
    first = decide(quiet, SETTINGS, 100.0)
    assert not first.idle
    assert "0 of 5 s" in first.why
    assert not decide(quiet, SETTINGS, 104.9, first).idle
    idle = decide(quiet, SETTINGS, 105.0, first)
    assert idle.idle
    assert not decide(busy, SETTINGS, 105.1, idle).idle
    assert not decide(quiet, SETTINGS, 106.0, decide(busy, SETTINGS, 105.1, idle)).idle


def test_a_request_needs_its_own_quiet_time_and_no_settling_after_it() -> None:
    before = long_quiet()
    asked = decide(judge(samples(requests=1.0), SETTINGS, CONTEXT), SETTINGS, 101.0, before)
    assert not asked.idle
    assert decide(judge(samples(requests=30.0), SETTINGS, CONTEXT), SETTINGS, 102.0, asked).idle


def test_what_was_not_watched_is_not_known() -> None:
    quiet = judge(samples(), SETTINGS, CONTEXT)
    assert decide(quiet, SETTINGS, 100.0 + MAX_GAP, long_quiet()).idle
    assert not decide(quiet, SETTINGS, 100.1 + MAX_GAP, long_quiet()).idle, "the machine slept, say"
    assert not decide(quiet, SETTINGS, 99.0, long_quiet()).idle, "a clock that went back"


@given(
    figures=FIGURES,
    more=st.fixed_dictionaries({name: st.floats(0, 100, allow_nan=False) for name in QUIET}),
    requests=st.floats(0, 100, allow_nan=False),
    own=st.builds(OwnLoad, cpu_percent=st.floats(0, 100), load_per_core=st.floats(0, 2)),
    leased=st.booleans(),
    was_idle=st.booleans(),
    settings=st.builds(
        IdleSettings,
        enabled=st.booleans(),
        quiet_seconds=st.floats(0, 100),
        settle_seconds=st.floats(0, 20),
        max_pressure_percent=st.floats(0, 100),
        max_load_per_core=st.floats(0, 2),
        max_gpu_percent=st.floats(0, 100),
        max_temperature_c=st.floats(0, 100),
        on_battery=st.booleans(),
        window=st.sampled_from(["", "11:00-13:00", "13:00-11:00"]),
    ),
    before=st.none() | st.just(long_quiet()),
    limit=st.none() | st.floats(20, 120),
)
def test_more_business_never_turns_busy_into_idle(
    figures: dict[str, float | None],
    more: dict[str, float],
    requests: float,
    own: OwnLoad,
    leased: bool,
    was_idle: bool,
    settings: IdleSettings,
    before: Decision | None,
    limit: float | None,
) -> None:
    def taken(values: dict[str, float | None]) -> tuple[tuple[SignalReading, ...], Decision]:
        context = Context(own=own, leased=leased, was_idle=was_idle, minute=12 * 60)
        readings = judge([sample(name, value, limit) for name, value in values.items()], settings, context)
        return readings, decide(readings, settings, 101.0, before)

    less: dict[str, float | None] = figures | {"requests": requests}
    busier = {name: None if value is None else value + more[name] for name, value in less.items()}
    busier["requests"] = max(0.0, requests - more["requests"])
    (calm, first), (busy, second) = taken(less), taken(busier)
    assert first.idle or not second.idle
    for a, b in zip(calm, busy, strict=True):
        assert (a.verdict, b.verdict) in {
            ("quiet", "quiet"),
            ("quiet", "busy"),
            ("busy", "busy"),
            ("absent", "absent"),
        }
    assert first.idle == (not first.why or first.why == "all signals are quiet")
    assert not first.idle or (settings.enabled and all(r.verdict != "busy" for r in calm))
