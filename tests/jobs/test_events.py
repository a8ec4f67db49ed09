"""What a child tells: every event there and back, and whatever else a child may write."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.jobs import events
from honed.jobs.commands import Check, Compile, Listener
from honed.jobs.events import CompileDone, Done, Faults, History, News, NoEvent, Result, Stage, Tuned
from honed.process.children import ExitInfo, JobCrashed
from honed.protocol.errors import MissingFiles
from honed.runtime.errors import HonedError, InvalidArgument, ModelRefused, ResourceExhausted

ESTIMATE = events.Estimate(before_us=2.0, now_us=1.0)
ROW = events.TaskRow(
    task="k", name="dense", weight=2, flops=8, bytes=4, roofline_us=0.5, default_us=None, best_us=1.0,
    gflops=8e-3, roofline_share=0.5, trials=3, filtered=1, failures={"wrong": 2}, state="tuning", reason="",
)  # fmt: skip
TABLE: dict[str, Any] = {"tasks": (ROW,), "model": ESTIMATE}
RANKING = events.Ranking(correlation=0.5, best_rank=1, batch=16)
NEWS: list[News] = [
    Stage(stage="lower", fraction=0.5, text="dense"),
    events.Note(text="candidates are not watched"),
    events.TasksFound(**TABLE),
    events.Round(
        round=1, task="k", way="evolution", spent=events.Spent(search=1.0), ranking=RANKING, trials=3,
        seconds=2.0, seconds_left=None, **TABLE,
    ),
    events.Trial(task="k", outcome="right", reason="", us=1.0, best_us=1.0),
    events.Filtered(task="k", reason="too long"),
    events.SearchCrashed(task="k", reason="it ended"),
    events.CandidateCondemned(task="k", reason="it faulted"),
]  # fmt: skip
PROOF = events.ProofReport(reference="r", probes=3, device=None, error={"y": 0.0}, tolerance={"y": 1e-3})
RESULTS: list[Result] = [
    Done(),
    CompileDone(
        output="m.honed", sha256="0", precision="fp32", why="", notes=("n",), kernels=1, launches=2,
        seconds=1.0, proof=PROOF,
    ),
    Tuned(
        output=None, trials=3, seconds=2.0, tuned=1, skipped=0, lost=0, failures={}, spent=events.Spent(),
        before_us=None, after_us=None, sentence="nothing", **TABLE,
    ),
    events.Written(output="m.onnx", seconds=1.0),
    events.Exported(output="r.jsonl", count=2),
    events.Imported(count=1, merged=2, refused=("line 3",)),
    History(
        points=(events.Point(time=1.0, us=2.0, trials=3),),
        versions=(events.TunedVersion(version=1, why="w", us=None, time=1.0, trials=0),),
    ),
    Faults(
        faults=(
            events.Quarantined(
                candidate="c", task="k", name="dense", outcome=None, reason="r", story=None, time=1.0,
                device="d", driver_version="v", measured_by="board",
            ),
        )
    ),
]  # fmt: skip


def line(**event: object) -> bytes:
    return json.dumps(event).encode() + b"\n"


def parsed(data: bytes) -> News | Done | HonedError:
    return events.parse(data, Done)


@pytest.mark.parametrize("event", [*NEWS, *RESULTS], ids=lambda event: type(event).__name__)
def test_an_event_travels(event: Any) -> None:
    kind = type(event) if isinstance(event, Result) else Done
    assert events.parse(line(**events.to_map(event)), kind) == event


@pytest.mark.parametrize(
    "error",
    [
        ModelRefused("no", ("a", "b")),
        MissingFiles("no", ("w.bin is missing",), ("w.bin",)),
        InvalidArgument("bad shape"),
        ResourceExhausted("too much"),
    ],
)
def test_an_error_travels(error: HonedError) -> None:
    told = parsed(line(**events.to_map(error)))
    assert type(told) is type(error)
    assert str(told) == str(error)
    assert getattr(told, "reasons", ()) == getattr(error, "reasons", ())
    assert getattr(told, "files", ()) == getattr(error, "files", ())


def test_progress_is_a_share() -> None:
    assert parsed(line(event="stage", stage="x", fraction=7)) == Stage(stage="x", fraction=1.0)
    assert parsed(line(event="stage", stage="x", fraction=float("nan"))) == Stage(stage="x", fraction=0.0)


def test_fields_of_a_later_version_are_passed_over() -> None:
    assert parsed(line(event="note", text="n", more=1)) == events.Note(text="n")


@pytest.mark.parametrize(
    "data",
    [b"", b"not json", b"[]", b'"x"', b"[" * 100_000, line(event="rest"), line(event=[]), line(event="note"),
     line(event="stage", stage=1, fraction=0.5), line(event="history", points=[], versions=[])],
)  # fmt: skip
def test_what_is_no_event_of_the_job(data: bytes) -> None:
    with pytest.raises(NoEvent):
        parsed(data)


@given(
    st.binary(max_size=60)
    | st.recursive(st.none() | st.text() | st.floats(), st.lists).map(lambda v: line(event=v))
)
def test_any_other_output_is_no_event(data: bytes) -> None:
    with pytest.raises(NoEvent):
        parsed(data)


def listener() -> Listener[Done]:
    return Listener(Compile(file="m", output="o").derive(Check))  # type: ignore[arg-type]


@pytest.mark.parametrize("news", NEWS, ids=lambda event: type(event).__name__)
def test_news_are_not_a_last_word(news: News) -> None:
    heard = listener()
    assert heard.hear(line(**events.to_map(news))) == news
    death = ExitInfo(status=-9)
    with pytest.raises(JobCrashed, match="ended by signal SIGKILL") as died:
        heard.result(death)
    assert died.value.death == death


def test_a_last_word_counts_where_the_child_ended_well() -> None:
    heard = listener()
    assert heard.hear(line(event="done")) is None
    assert heard.result(ExitInfo(status=0)) == Done()
    with pytest.raises(JobCrashed, match="ended with status 3"):
        heard.result(ExitInfo(status=3))
    heard.hear(line(event="refused", message="no", reasons=["a"]))
    with pytest.raises(ModelRefused, match="no"):
        heard.result(ExitInfo(status=1))
