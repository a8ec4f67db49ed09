"""Every signal of idleness, on the machines there are (issue 4, item 5)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.daemon.idle.signals import OwnLoadMeter, Sample, Signals
from honed.machine.processors import OtherLoadMeter, tree_seconds

from . import idle_trees as trees

EVERY = ("cpu pressure", "memory pressure", "io pressure", "load", "gpu", "gpu clock", "power")
GPU = "sys/devices/platform/fb000000.gpu"
DEVFREQ = f"{GPU}/devfreq/fb000000.gpu"
TICKS = os.sysconf("SC_CLK_TCK")


def signals(root: Path) -> dict[str, Sample]:
    return by_name(Signals(root), 0.0)


def by_name(reader: Signals, now: float) -> dict[str, Sample]:
    samples = reader.read(now, ()).samples
    named = {sample.signal: sample for sample in samples}
    assert len(named) == len(samples)
    assert set(EVERY) <= set(named)
    assert all(sample.text for sample in samples)
    return named


def values(root: Path) -> dict[str, float | None]:
    return {name: sample.value for name, sample in signals(root).items()}


def test_rk3588_with_kbase(tmp_path: Path) -> None:
    trees.rk3588_kbase(tmp_path)
    assert values(tmp_path) == {
        "cpu pressure": 1.25,
        "memory pressure": 0.0,
        "io pressure": 0.5,
        "load": 0.08,
        "gpu": 3.0,
        "gpu clock": 0.0,
        "temperature gpu-thermal": 44.384,
        "temperature soc-thermal": 46.23,
        "power": 0.0,
    }
    named = signals(tmp_path)
    assert named["temperature soc-thermal"].limit == 75.0
    assert named["temperature gpu-thermal"].limit == 115.0
    assert "tcpm-source-psy-4-0022" in named["power"].text


def test_kbase_without_load_in_devfreq_tells_its_utilisation(tmp_path: Path) -> None:
    trees.rk3588_kbase(tmp_path)
    (tmp_path / DEVFREQ / "load").unlink()
    assert values(tmp_path)["gpu"] == 7.0
    trees.write(tmp_path, {f"{DEVFREQ}/load": ""})  # Rockchip's file before its first measurement
    assert values(tmp_path)["gpu"] == 7.0


@pytest.mark.parametrize(("text", "percent"), [("0@300000000Hz", 0), ("100@1000000000Hz", 100), ("47", 47)])
def test_forms_of_devfreq_load(tmp_path: Path, text: str, percent: int) -> None:
    trees.rk3588_kbase(tmp_path)
    trees.write(tmp_path, {f"{DEVFREQ}/load": text})
    assert values(tmp_path)["gpu"] == percent


def test_a_suspended_gpu_is_not_used_whatever_it_said_before(tmp_path: Path) -> None:
    trees.rk3588_kbase(tmp_path)
    trees.write(
        tmp_path,
        {
            f"{GPU}/power/runtime_status": "suspended",
            f"{DEVFREQ}/load": "88@1000000000Hz",
            f"{DEVFREQ}/cur_freq": "1000000000",
        },
    )
    read = values(tmp_path)
    assert (read["gpu"], read["gpu clock"]) == (0.0, 0.0)


def test_clock(tmp_path: Path) -> None:
    trees.rk3588_kbase(tmp_path)
    trees.write(tmp_path, {f"{DEVFREQ}/cur_freq": "650000000"})
    assert values(tmp_path)["gpu clock"] == pytest.approx(50.0)
    # Older kernels write 0 where nobody has set bounds.
    trees.write(tmp_path, {f"{DEVFREQ}/min_freq": "0", f"{DEVFREQ}/max_freq": "0"})
    assert values(tmp_path)["gpu clock"] == pytest.approx(50.0)
    trees.write(tmp_path, {f"{DEVFREQ}/governor": "performance"})
    clock = signals(tmp_path)["gpu clock"]
    assert clock.value is None
    assert "650 MHz" in clock.text
    assert "performance" in clock.text


def test_rk3588_with_panthor(tmp_path: Path) -> None:
    trees.rk3588_panthor(tmp_path)
    assert values(tmp_path) == {
        "cpu pressure": 1.25,
        "memory pressure": 0.0,
        "io pressure": 0.5,
        "load": 0.025,
        "gpu": None,
        "gpu clock": 0.0,
        "temperature gpu-thermal": 49.0,
        "temperature package-thermal": 51.0,
        "power": None,
    }
    assert signals(tmp_path)["temperature gpu-thermal"].limit == 85.0


def test_panthor_engines_are_counted_once_per_client(tmp_path: Path) -> None:
    trees.rk3588_panthor(tmp_path)
    reader = Signals(tmp_path)

    def clients(first: int, second: int) -> None:
        for fd in (5, 9):  # the same client twice, as after dup
            trees.render_client(tmp_path, 700, fd, trees.PANTHOR_FDINFO.format(client=10, ns=first))
        trees.render_client(tmp_path, 800, 4, trees.PANTHOR_FDINFO.format(client=11, ns=second))

    clients(5_000_000_000, 1_000)
    assert by_name(reader, 100.0)["gpu"].value is None, "one look shows no share"
    clients(5_400_000_000, 100_001_000)
    assert by_name(reader, 102.0)["gpu"].value == pytest.approx(25.0)
    assert by_name(reader, 104.0)["gpu"].value == 0.0


def test_panthor_without_profiling_shows_no_utilisation(tmp_path: Path) -> None:
    trees.rk3588_panthor(tmp_path)
    trees.render_client(tmp_path, 700, 5, trees.PANTHOR_FDINFO.format(client=10, ns=0))
    reader = Signals(tmp_path)
    assert [by_name(reader, now)["gpu"].value for now in (1.0, 2.0)] == [None, None]


def test_panfrost_shows_its_busiest_engine(tmp_path: Path) -> None:
    trees.rk3588_panthor(tmp_path)
    reader = Signals(tmp_path)
    for now, fragment, tiler in ((1.0, 10, 10), (2.0, 300_000_010, 100_000_010)):
        text = trees.PANFROST_FDINFO.format(client=1, fragment=fragment, tiler=tiler)
        trees.render_client(tmp_path, 700, 5, text)
        sample = by_name(reader, now)["gpu"]
    assert sample.value == pytest.approx(30.0)


def test_a_laptop_on_battery(tmp_path: Path) -> None:
    trees.laptop_on_battery(tmp_path)
    named = signals(tmp_path)
    assert named["load"].value == pytest.approx(1.10 / 5)
    assert named["power"].value == 1.0
    assert "BAT0" in named["power"].text
    assert named["temperature x86_pkg_temp"].value == 55.0
    assert named["temperature x86_pkg_temp"].limit is None, "0 is no trip point"
    assert named["temperature acpitz"].limit == 105.0, "a fan that starts is no throttling"
    assert {name for name in named if name.startswith("temperature")} == {
        "temperature acpitz",
        "temperature x86_pkg_temp",
    }
    assert named["gpu"].value is named["gpu clock"].value is None
    trees.write(
        tmp_path,
        {
            "sys/class/power_supply/AC/online": "1",
            "sys/class/power_supply/BAT0/status": "Charging",
        },
    )
    assert signals(tmp_path)["power"].value == 0.0
    # A charger too weak for the machine.
    trees.write(tmp_path, {"sys/class/power_supply/BAT0/status": "Discharging"})
    assert signals(tmp_path)["power"].value == 1.0


def test_a_machine_with_none_of_them(tmp_path: Path) -> None:
    named = signals(tmp_path)
    assert set(named) == {*EVERY, "temperature"}
    assert all(sample.value is None for sample in named.values())


def test_this_machine() -> None:
    named = signals(Path("/"))
    assert named["load"].value is not None


@given(data=st.binary(max_size=200))
def test_whatever_the_files_hold_is_a_value_or_none(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    root = tmp_path_factory.mktemp("tree")
    trees.rk3588_kbase(root)
    trees.laptop_on_battery(root)
    trees.render_client(root, 700, 5, "")
    for file in root.rglob("*"):
        if file.is_file() and not file.is_symlink():
            file.write_bytes(data)
    reader = Signals(root)
    for now in (1.0, 2.0):
        for sample in reader.read(now, (1,)).samples:
            assert sample.value is None or isinstance(sample.value, float)


def stat(pid: int, parent: int, ticks: tuple[int, int, int, int], name: str = "x") -> dict[str, str]:
    times = " ".join(map(str, ticks))
    return {f"proc/{pid}/stat": f"{pid} ({name}) S {parent} 1 1 0 -1 4194560 1 2 3 4 {times} 20 0 1 0 5 6 7"}


def test_the_time_of_a_process_tree(tmp_path: Path) -> None:
    trees.write(
        tmp_path,
        {
            **stat(1, 0, (900, 900, 900, 900)),
            **stat(50, 1, (1, 2, 3, 4)),
            **stat(51, 50, (10, 20, 30, 40), name="a) S 1 (b"),
            **stat(52, 51, (100, 200, 300, 400)),
            **stat(60, 1, (5000, 0, 0, 0)),
        },
    )
    assert tree_seconds(tmp_path, (50,)) == {50: pytest.approx(1110 / TICKS)}
    assert tree_seconds(tmp_path, (50, 51)) == {
        50: pytest.approx(10 / TICKS),
        51: pytest.approx(1100 / TICKS),
    }
    assert tree_seconds(tmp_path, (99,)) == {}
    assert 0.0 < tree_seconds(Path("/"), (os.getpid(),))[os.getpid()] < 100_000.0


def test_our_share_follows_the_kernels_means_and_fades_with_them(tmp_path: Path) -> None:
    trees.rk3588_kbase(tmp_path)
    share = OwnLoadMeter(tmp_path)
    for second in range(601):  # two cores of eight, for ten minutes
        trees.write(tmp_path, stat(50, 1, (2 * TICKS * second, 0, 0, 0)))
        own = share.measure((50,), float(second))
    assert own.cpu_percent == pytest.approx(25.0, rel=1e-3)
    assert own.load_per_core == pytest.approx(0.25, rel=1e-3)
    own = share.measure((), 660.0)
    assert own.load_per_core == pytest.approx(0.25 / 2.718, rel=1e-2), "as the load average after a minute"
    assert own.cpu_percent < 0.1
    # What another tuner used before it came is not counted.
    trees.write(tmp_path, stat(70, 1, (10**9, 0, 0, 0)))
    assert share.measure((70,), 661.0).load_per_core < 0.1


def test_what_others_take_of_the_processors(tmp_path: Path) -> None:
    def at(user: int, idle: int, own: int) -> None:
        line = f"cpu  {user} 10 20 {idle} 40 5 6 7 8 9\ncpu0 1 1 1 1 1 1 1 1 1 1\n"
        trees.write(tmp_path, {"proc/stat": line, **stat(50, 1, (own, 0, 0, 0))})

    at(1000, 5000, 100)
    others = OtherLoadMeter((50,), tmp_path)
    assert others.percent() is None, "no tick has passed"
    at(1050, 5050, 150)  # a core of two was ours
    assert others.percent() == 0.0
    at(1150, 5050, 150)
    assert others.percent() == pytest.approx(100 * 100 / 200)
    at(1150, 5050, 400)  # rounded
    assert others.percent() == 0.0
    (tmp_path / "proc/stat").write_text("cpu 1 2 3\n")
    assert others.percent() is None
    bare = OtherLoadMeter((50,), tmp_path / "none")
    assert bare.percent() is None
