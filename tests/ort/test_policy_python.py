"""The machine that decides which runs are routed, in Python, by the scenarios that it shares with C's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from honed.ort.policy import Route, SwitchingCost

SCENARIOS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "policy.json").read_text())["scenarios"]


class Player:
    """A route and its clock."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.now = 1000 * 10**9
        half = settings.get("precision") == "auto"
        self.account = SwitchingCost(self.now)
        self.route = Route(self.account, settings.get("allowance", 1.0), half=half, now=self.now)

    def play(self, step: dict[str, Any]) -> None:
        """Take a step, and check what is to hold after it."""
        if "pass" in step:
            self.now += step["pass"]
        elif "service" in step:
            self.answer(step["service"])
        elif "begin" in step:
            assert bool(self.route.begin(self.now)) is (step["begin"] == "routed")
        elif "end" in step:
            self.end(step["end"], step["took"])
        else:
            for _ in range(step.get("times", 1)):
                assert bool(self.route.begin(self.now)) is (step["run"] != "own"), step
                self.now += step["took"]
                self.end(step["run"], step["took"])
        for key, value in step.get("expect", {}).items():
            assert self.told(key) == (value or "" if key == "why" else value), (step, key)

    def answer(self, said: Any) -> None:
        """Give the route what the service says."""
        if isinstance(said, str):
            self.route.accept_absence(self.now)
        else:
            self.route.accept_time(self.now, said["known"], half=said.get("precision") == "fp16")

    def end(self, how: str, took: int) -> None:
        """End a run."""
        {
            "own": self.route.record_own_run,
            "routed": self.route.record_routed_run,
            "failed": self.route.record_failure,
        }[how](self.now, took)

    def told(self, key: str) -> Any:
        """Return what a scenario expects something of."""
        match key:
            case "ask":
                return self.route.ask(self.now)
            case "rests":
                return self.now < self.route.rests_until(self.now)
            case "deadline":
                return self.route.begin(self.now)
            case "excess":
                return self.account.excess
        return getattr(self.route, key)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=[each["name"] for each in SCENARIOS])
def test_scenario(scenario: dict[str, Any]) -> None:
    """Each step of a scenario leads to what it says."""
    player = Player(scenario.get("settings", {}))
    for step in scenario["steps"]:
        player.play(step)
