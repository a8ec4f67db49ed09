"""What is requested and added, counted for the decision whether the machine is idle."""

from __future__ import annotations

from honed.daemon.idle.leasing import Activity


def test_activity() -> None:
    activity = Activity(10.0)

    def read(now: float) -> dict[str, float | None]:
        return {each.signal: each.value for each in activity.samples(now)}

    assert read(15.0) == {"requests": 5.0, "queue": 0.0, "adding": 0.0}
    activity.begin("a", 20.0)
    activity.begin("b", 21.0)
    assert read(24.0) == {"requests": 3.0, "queue": 2.0, "adding": 0.0}
    activity.end("a", 30.0)
    assert activity.since(31.0) == {"a": 1.0, "b": 10.0}
    assert "for a" in activity.samples(31.0)[0].text
    activity.forget("b")
    activity.end("b", 40.0)
    assert activity.since(41.0) == {"a": 11.0}
    activity.adding(1)
    assert read(41.0) == {"requests": 1.0, "queue": 0.0, "adding": 1.0}
