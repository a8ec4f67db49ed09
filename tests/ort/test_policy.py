"""The machine that decides which runs are routed, in C, against the scenarios shared with Python's."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "libhoned" / "ort"
SCENARIOS: list[dict[str, Any]] = json.loads((HERE / "policy.json").read_text())["scenarios"]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the program that runs scenarios, with sanitizers."""
    path = tmp_path_factory.mktemp("policy") / "driver"
    flags = ["-std=c99", "-g", "-Wall", "-Wextra", "-Werror", "-fsanitize=address,undefined"]
    files = [HERE / "policy_driver.c", SOURCES / "policy.c"]
    subprocess.run(["cc", *flags, f"-I{SOURCES}", "-o", path, *files], check=True)
    return path


def lines_of(scenario: dict[str, Any]) -> Iterator[str]:
    """Yield a scenario as lines for the driver."""
    settings = scenario.get("settings", {})
    name, half = scenario["name"].replace(" ", "-"), settings.get("precision") == "auto"
    yield f"scenario {name} {settings.get('allowance', 1.0)} {int(half)}"
    for step in scenario["steps"]:
        if "pass" in step:
            yield f"pass {step['pass']}"
        elif step.get("service") in ("unknown", "gone"):
            yield "unknown"
        elif "service" in step:
            yield f"known {step['service']['known']} {int(step['service'].get('precision') == 'fp16')}"
        elif "begin" in step:
            yield f"begin {step['begin']}"
        elif "end" in step:
            yield f"end {step['end']} {step['took']}"
        elif "run" in step:
            yield f"{step['run']} {step['took']} {step.get('times', 1)}"
        for key, value in step.get("expect", {}).items():
            yield f"expect {key} {json.dumps(value).strip(chr(34))}"


@pytest.mark.parametrize("scenario", SCENARIOS, ids=[each["name"] for each in SCENARIOS])
def test_scenario(driver: Path, scenario: dict[str, Any]) -> None:
    """Each step of a scenario leads to what it says."""
    lines = "\n".join((*lines_of(scenario), ""))
    ran = subprocess.run([driver], input=lines, capture_output=True, text=True, check=True)
    assert not ran.stdout + ran.stderr
