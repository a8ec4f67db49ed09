"""Which device a model belongs to: pure decisions, and the settings they come from."""

from __future__ import annotations

from pathlib import Path

import pytest

from honed.daemon.config import load
from honed.daemon.serving.selection import Placement, PlacementDecision
from honed.runtime.errors import InvalidArgument, NotFound

FULL = {"mali": "ARM Platform/Mali-G610", "cpu": "PoCL/cortex-a76", "npu": ""}


def test_the_default_is_named_or_the_first() -> None:
    assert Placement("", (), {}).names == ("",)
    assert Placement("", ("mali", "cpu"), {}).default == "mali"
    assert Placement("cpu", ("mali", "CPU"), {}).names == ("cpu", "mali")
    assert Placement("npu", ("mali",), {}).names == ("npu", "mali")


def test_the_configuration_comes_before_what_was_asked_for() -> None:
    placement = Placement("", ("mali", "cpu"), {"m": "CPU"})
    assert placement.home("m", "mali", "asked for") == PlacementDecision(
        device="cpu", why="placed by the configuration"
    )
    assert placement.home("n", "MALI", "asked for") == PlacementDecision(device="mali", why="asked for")
    assert placement.home("n", "", "") == PlacementDecision(device="mali", why="")
    gone = placement.home("n", "npu", "asked for")
    assert (gone.device, "npu, which is not configured any more" in gone.why) == ("mali", True)


def test_what_users_ask_for() -> None:
    placement = Placement("", ("mali", "cpu", "npu"), {"m": "cpu"})
    assert placement.select("n", "Cpu", FULL) == ("cpu",)
    assert placement.select("n", "g610", FULL) == ("mali",)
    assert placement.select("n", "fastest", FULL) == ("mali", "cpu", "npu")
    assert placement.select("m", "cortex", FULL) == ("cpu",)
    for device in ("mali", "fastest"):
        with pytest.raises(InvalidArgument, match="places m on cpu"):
            placement.select("m", device, FULL)
    with pytest.raises(NotFound, match=r"'tpu' is none of .* ARM Platform/Mali-G610; PoCL/cortex-a76; npu;"):
        placement.select("n", "tpu", FULL)
    with pytest.raises(NotFound, match="several"):
        placement.select("n", "o", FULL)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('devices = "mali"', ["devices is 'mali'", 'texts in quotes, as ["mali", "cpu"]']),
        ("devices = [1]", ["devices is [1]"]),
        ('devices = [""]', ["devices is ['']"]),
        ('placement = ["mali"]', ["placement is ['mali']", "for each name"]),
        ("placement = {m = 1}", ["placement is {'m': 1}"]),
        ('devices = ["mali"]\nplacement = {m = "npu"}', [":3", "puts m on 'npu'", "use one of 'mali'"]),
        ('fallback = ["cpu"]', ["a text in quotes"]),
    ],
)
def test_wrong_settings_are_named(tmp_path: Path, text: str, parts: list[str]) -> None:
    file = tmp_path / "honed.toml"
    file.write_text(f"[service]\n{text}\n")
    with pytest.raises(InvalidArgument) as caught:
        load(environ={}, uid=0, config=file)
    for part in [str(file), *parts]:
        assert part in str(caught.value)


def test_settings(tmp_path: Path) -> None:
    file = tmp_path / "honed.toml"
    file.write_text('[service]\ndevices = ["mali", "cpu"]\n[service.placement]\nlightglue = "cpu"\n')
    service = load(environ={}, uid=0, config=file).service
    assert service.devices == ("mali", "cpu")
    assert service.placement == {"lightglue": "cpu"}
    assert service.fallback == "cpu"
