"""`hone tune` and `hone tasks` against a real daemon. The tuning child is a stub."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from honed.protocol.results import ModelPublished
from honed.tool.commands.tasks import origin
from honed.tool.commands.tuning import result_text
from tests.daemon.conftest import SIZE, Hone
from tests.daemon.running import DEADLINE, Service, serving, wait_for_end
from tests.daemon.stubs import StubTuner, write_from
from tests.runtime.builder import Builder, chain

from .terminal import Terminal

pytestmark = [pytest.mark.service, pytest.mark.opencl]
X = np.linspace(-3, 4, SIZE, dtype=np.float32)
STEPS = 90  # launches of the untuned model
SPIN = 40_000  # steps of a launch that is not tuned, some 60 us: no load hides 90 of these
LONG = "fused_layer_norm_reshape_transpose_matmul_add_gelu_split_3"

SEARCH = f"""
def row(task, name, best, trials, failures, state, reason=""):
    return dict(task=task, name=name, weight=36, flops=100663296, bytes=2097152, roofline_us=800.0,
        default_us=9000.0, best_us=best, gflops=100663296 / best / 1e3 if best else None,
        roofline_share=800.0 / best if best else None, trials=trials, failures=failures, state=state,
        reason=reason)

def table(best, trials, failures, state="tuning"):
    rows = [row("a" * 16, "dense_3", best, trials, failures, state),
        row("b" * 16, {LONG!r}, 500.0, 0, {{}}, "tuning" if state == "tuning" else "lost",
            "" if state == "tuning" else "the compiler crashed twice: SIGSEGV"),
        row("c" * 16, "add", 5.0, 0, {{}}, "skipped", "too small to matter: 0.1 % of the model's time"),
        row("task", "add_1", 5.0, 0, {{}}, "skipped", "too small to matter: 0.2 % of the model's time")]
    forms = [dict(name="fused_dense_softmax_dense", joined="a" * 16, apart=["d", "e", "f"], calls=9,
        taken="apart", joined_us=120.4, apart_us=90.0)]
    return dict(tasks=rows, model=dict(before_us=36 * 9510.0, now_us=36 * (best + 510)), forms=forms)

def search(rounds):
    stopped = []  # no Event: a handler must take no lock that it may have interrupted
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.append(True))
    say(event="stage", stage="extract", fraction=0.0, text="extract the tasks")
    say(event="stage", stage="baseline", fraction=0.5, text="time default schedule 2 of 4")
    say(event="note", text="candidates are not watched")
    say(event="tasks", **table(9000.0, 0, {{}}))
    trials = 0
    for i in range(rounds):
        if stopped: break
        trials += 3
        for outcome, us in (("right", 4000.0 - i), ("wrong", None), ("build", None)):
            best = 4000.0 - i
            say(event="trial", task="a" * 16, outcome=outcome, reason="", us=us, best_us=best)
        say(event="round", round=i + 1, task="a" * 16, trials=trials, seconds=2.0 * i + 2,
            seconds_left=6000.0,
            ranking=dict(correlation=0.71, best_rank=2, batch=16), way="evolution",
            spent=dict(search=0.5, build=1.0, check=0.3, measure=0.2),
            **table(4000.0 - i, trials, {{"wrong": i + 1, "build": i + 1}}))
        if rounds > 100: time.sleep(0.05)
    say(event="totals", tuning=dict(trials=dict(right=trials), faults=0, reason="",
        gains=dict(m=dict(before_seconds=0.3, now_seconds=0.1))))
    return trials

def done(trials, **more):
    say(**dict(event="done", output=None, trials=trials, seconds=12.0, tuned=1, skipped=2, lost=1,
        failures=dict(wrong=2, build=2), before_us=None, after_us=None,
        spent=dict(search=1.0, build=5.0, check=2.5, measure=1.5),
        sentence="no schedule faster than the present ones was found",
        **table(4000.0, trials, dict(wrong=2, build=2), "tuned")) | more)

def better(trials):
    shutil.copy(pathlib.Path(__file__).with_name("tuned"), option("--output"))
    done(trials, output=option("--output"), before_us=342360.0, after_us=171180.0, sentence="faster")
"""


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> StubTuner:
    return StubTuner(tmp_path_factory.mktemp("stub"))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, stub: StubTuner) -> Path:
    path = tmp_path_factory.mktemp("source") / "m.onnx"
    path.write_bytes(b"not really ONNX, which the stub does not mind")
    stub.knows(path, within(STEPS, SPIN))
    write_from(path, within(1), stub.beside("tuned"))
    return path


def within(launches: int, spin: int = 0) -> Builder:
    """Build x + STEPS in so many launches, each of which computes `spin` numbers in vain."""
    builder = Builder()
    current, y = builder.input("x", "float32", (SIZE,)), builder.output("y", "float32", (SIZE,))
    source = """__kernel void sum(__global const float* a, __global float* b) {
      int i = get_global_id(0); uint n = i;
      for (int step = 0; step < %d; step++) n = n * 1664525u + 1013904223u;
      b[i] = a[i] + %d.0f + (n == 4294967295u ? 1.0f : 0.0f); }"""
    kernel = builder.kernel(source % (spin, STEPS // launches), "sum", "rw", 4 * SIZE, groups=1, block=SIZE)
    for n in range(launches):
        last = n == launches - 1
        to = y if last else builder.scratch("float32", (SIZE,))
        builder.launch(kernel, current, to)
        current = to
    return builder


@pytest.fixture(scope="module")
def tuning_service(
    tmp_path_factory: pytest.TempPathFactory, cache_dir: Path, stub: StubTuner
) -> Iterator[Service]:
    with serving(tmp_path_factory, cache_dir, environment=stub.environment) as running:
        yield running


@pytest.fixture
def hone(
    tuning_service: Service,
    stub: StubTuner,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    typed: Hone,
) -> Hone:
    """Runs the tool; "m" was freshly added from `source`, or is as it was then."""
    monkeypatch.setenv("HONED_SOCKET", str(tuning_service.socket))
    monkeypatch.setenv("PYTHONPATH", stub.environment["PYTHONPATH"])
    with tuning_service.client() as client:
        there = [model["name"] for model in client.models()]
        if not there or client.show("m")["launches"] != STEPS:
            client.add(source, name="m", shapes={"x": (SIZE,)}, precision="fp32", replace=True)
    return typed


def answers(service: Service) -> Any:
    with service.client() as client:
        return client.infer("m", {"x": X})["y"]


BETTER = ModelPublished(published=True, version=2, sentence="version 2 is kept", old_us=345.2, new_us=269.9)


@pytest.mark.parametrize(
    ("answer", "engine", "text"),
    [
        (
            BETTER,
            "cpu",
            "m is tuned: 0.3452 ms an inference before, 0.2699 ms now, 1.28 times as fast, measured side by "
            "side. The CPU engine goes on serving it: it is faster.",
        ),
        (
            BETTER,
            "gpu",
            "m is served tuned: 0.3452 ms an inference before, 0.2699 ms now, 1.28 times as fast, measured "
            "side by side.",
        ),
        (replace(BETTER, old_us=None), "gpu", "m: version 2 is kept."),
        (replace(BETTER, published=False, sentence="whatever: it says"), "gpu", "m: whatever: it says."),
        (None, "gpu", "m is served as before: nothing is faster."),
    ],
)
def test_the_result_is_told_by_the_fields_of_the_answer(
    answer: ModelPublished | None, engine: str, text: str
) -> None:
    done: Any = SimpleNamespace(sentence="nothing is faster")
    placement: Any = SimpleNamespace(engine=engine, why="it is faster")
    assert result_text("m", done, answer, placement) == text


def test_a_faster_version_is_served(hone: Any, stub: StubTuner, tuning_service: Service) -> None:
    stub.behave(f"{SEARCH}\nbetter(search(2))")
    status, out, err = hone("tune", "m", "--trials", "6", "--minutes", "1")
    assert status == 0
    np.testing.assert_allclose(answers(tuning_service), X + STEPS)
    with tuning_service.client() as client:
        assert client.show("m")["launches"] == 1
        history, tuning = client.history("m"), client.metrics()["tuning"]
    assert tuning["trials"] == {"right": 6}
    assert tuning["gains"] == {"m": {"before_seconds": 0.3, "now_seconds": 0.1}}
    assert history["versions"][-1]["why"] == "hone tune: 6 trials in 12 s"
    text = " ".join(out.split())
    assert re.search(r"m is served tuned: [\d.,]+ .s an inference before, [\d.,]+ .s now, [\d.]+ times", text)
    assert "1 tuned, 2 skipped, 1 lost" in text
    assert "lost, the compiler crashed twice: SIGSEGV: fused_layer_norm_re" in text
    assert "skipped, too small to matter: add, add_1" in text
    assert "wrong 2, build 2" in text
    assert "rank correlation 0.71 in the latest batch of 16, whose fastest it ranked 2" in text
    lines = err.splitlines()
    assert lines[:4] == [
        "tune m: extract the tasks",
        "tune m: time default schedule 2 of 4",
        "tune m: note: candidates are not watched",
        "tune m: 4 tasks: 2 waiting, 2 skipped; estimated 342.4 ms an inference",
    ]
    assert lines[4].startswith("tune m: 3 trials")
    assert "estimated 162.4 ms, dense_3 4,000.0 us" in lines[4]


def test_the_child_is_given_what_it_needs(hone: Any, stub: StubTuner, tuning_service: Service) -> None:
    stub.behave(
        f"{SEARCH}\n"
        'kept = [pathlib.Path(sys.argv[-1]).read_text(), os.path.getsize(option("--current"))]\n'
        "done(0, sentence=json.dumps([sys.argv[1:], kept]))"
    )
    status, out, _ = hone("tune", "m", "--minutes", "0.5", "--json")
    assert status == 0
    document = json.loads(out)
    (command, *given), (text, size) = json.loads(document["sentence"])
    assert command == "tune"
    options = dict(argument.split("=", 1) for argument in given[:-1] if argument != "--")
    with tuning_service.client() as client:
        described, shown = client.status(), client.show("m")
    assert options["--shape"] == f"x={SIZE}"
    assert (options["--precision"], options["--name"], options["--seconds"]) == ("fp32", "m", "30")
    assert options["--device"] == described["device_spec"]
    assert options["--records"] == str(tuning_service.state / "records.sqlite")
    assert options["--cache-dir"] == described["places"]["cache_dir"]
    assert text.startswith("not really ONNX")
    assert size == shown["bytes"]
    assert (document["published"], document["stopped"]) == (False, False)
    assert document["sha256"] == shown["sha256"]


def test_nothing_better_leaves_the_model_as_it_was(
    hone: Any, stub: StubTuner, tuning_service: Service
) -> None:
    stub.behave(f"{SEARCH}\ndone(search(1))")
    before = answers(tuning_service)
    status, out, _ = hone("tune", "m")
    assert status == 0
    assert "m is served as before: no schedule faster" in out
    np.testing.assert_array_equal(answers(tuning_service), before)


def test_json_is_one_document(hone: Any, stub: StubTuner, tuning_service: Service) -> None:
    stub.behave(f"{SEARCH}\nbetter(search(2))")
    status, out, _ = hone("tune", "m", "--json")
    with tuning_service.client() as client:
        assert client.metrics()["tuning"]["trials"] == {"right": 6}
    assert status == 0
    document = json.loads(out)
    assert document["published"]
    assert [row["name"] for row in document["tasks"]] == ["dense_3", LONG, "add", "add_1"]
    assert document["estimate"]["before_us"] / document["estimate"]["now_us"] > 2
    assert document["ranking"] == {"correlation": 0.71, "best_rank": 2, "batch": 16}
    assert document["notes"] == ["candidates are not watched"]
    assert document["trials"] == 6
    assert document["spent"] == {"search": 1.0, "build": 5.0, "check": 2.5, "measure": 1.5}
    assert document["before_us"] > document["after_us"]


def test_a_model_replaced_meanwhile_is_left_alone(
    hone: Any, stub: StubTuner, tuning_service: Service, tmp_path: Path
) -> None:
    newer = chain(7, SIZE).write(tmp_path / "newer.honed")
    stub.behave(
        f"{SEARCH}\nfrom honed.runtime import Client\n"
        f'Client({str(tuning_service.socket)!r}).add({str(newer)!r}, name="m", replace=True)\nbetter(1)'
    )
    status, _, err = hone("tune", "m")
    assert status == 1
    assert "was replaced since its successor was made" in err
    np.testing.assert_array_equal(answers(tuning_service), X + 7)
    status, _, err = hone("tune", "m")
    assert status == 1
    assert "m was added compiled, so there is no source to tune" in err


def test_a_version_published_meanwhile_is_what_it_must_be_faster_than(
    hone: Any, stub: StubTuner, source: Path, tuning_service: Service, tmp_path: Path
) -> None:
    """An idle tuner's, for one: what was found by hand since is not lost."""
    between = tmp_path / "between.honed"
    write_from(source, within(STEPS // 3, SPIN), between)  # far from either, on a busy machine, too
    stub.behave(
        f"{SEARCH}\nfrom honed.runtime import Client\nclient = Client({str(tuning_service.socket)!r})\n"
        f'client.publish("m", {str(between)!r}, expected=client.show("m")["sha256"], why="idle")\nbetter(1)'
    )
    status, out, err = hone("tune", "m")
    assert status == 0, err
    assert "m is served tuned" in " ".join(out.split())
    with tuning_service.client() as client:
        reasons = [version["why"] for version in client.history("m")["versions"]]
        assert reasons[-2:] == ["idle", "hone tune: 1 trials in 12 s"]
        assert client.show("m")["launches"] == 1


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ('say(event="error", code="UNAVAILABLE", message="the device went away")', "the device went away"),
        ('say(event="refused", message="no", reasons=["because"])', "because"),
        ("os.kill(os.getpid(), 11)", "SIGSEGV"),
    ],
)
def test_failures_are_told(hone: Any, stub: StubTuner, code: str, said: str) -> None:
    stub.behave(f"{SEARCH}\nsearch(1)\n{code}\nsys.exit(1)")
    status, out, err = hone("tune", "m")
    assert (status, out) == (1, "")
    assert said in err
    assert "Traceback" not in err


def test_tasks(hone: Any, stub: StubTuner) -> None:
    stub.behave(f'{SEARCH}\nsay(event="tasks", **table(4000.0, 3, {{}}, "tuned"))\nsay(event="done")')
    status, out, _ = hone("tasks", "m")
    assert status == 0
    assert out.splitlines()[0].split() == [
        "task", "runs", "MFLOP", "floor", "us", "best", "us", "from", "state",
    ]  # fmt: skip
    assert out.splitlines()[1].split() == ["dense_3", "36", "100.7", "800", "4,000", "-", "tuned"]
    assert "…" in out.splitlines()[2]
    text = " ".join(out.split())
    assert "lost, the compiler crashed twice: SIGSEGV: fused" in text
    assert "4 tasks: 2 skipped, 1 tuned, 1 lost; estimated 342.4 ms an inference before, 162.4 ms now" in text
    assert "3 kernels: fused_dense_softmax_dense (one kernel 120 us, 3 kernels 90.0 us)" in text
    document = json.loads(hone("tasks", "m", "--json")[1])
    assert [(form["taken"], form["calls"]) for form in document["forms"]] == [("apart", 9)]
    assert [row["task"][0] for row in document["tasks"]] == ["a", "b", "c", "t"]
    assert [row["schedule"] for row in document["tasks"]] == [None, None, None, "by hand"]
    stub.behave('say(event="done")')
    status, _, err = hone("tasks", "m")
    assert status == 1
    assert "without telling the tasks" in err


def spawned(service: Service, stub: StubTuner, *arguments: str) -> subprocess.Popen[str]:
    environment = os.environ | dict(stub.environment) | {"HONED_SOCKET": str(service.socket)}
    return subprocess.Popen(
        [sys.executable, "-m", "honed.tool.main", "tune", "m", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.usefixtures("hone")
def test_one_signal_uses_what_was_found(
    stub: StubTuner, tuning_service: Service, number: signal.Signals
) -> None:
    stub.behave(f"{SEARCH}\nbetter(search(10000))")
    with spawned(tuning_service, stub, "--json") as process:
        assert process.stderr is not None
        until(process.stderr, "3 trials")
        process.send_signal(number)
        out, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0
    assert "stopping after this candidate; Ctrl-C again to abort" in err
    document = json.loads(out)
    assert document["stopped"]
    assert document["published"]
    with tuning_service.client() as client:
        assert client.show("m")["launches"] == 1


@pytest.mark.usefixtures("hone")
def test_two_signals_abort(stub: StubTuner, tuning_service: Service) -> None:
    stub.behave(
        f"{SEARCH}\nsearch(1)\nsay(event='stage', stage='publish', fraction=0, text=f'pid {{os.getpid()}}')\n"
        "while True: time.sleep(60)"
    )
    before = answers(tuning_service)
    with spawned(tuning_service, stub) as process:
        assert process.stderr is not None
        pid = int(until(process.stderr, "pid ").split()[-1])
        process.send_signal(signal.SIGINT)
        until(process.stderr, "stopping after")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=DEADLINE)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err
    np.testing.assert_array_equal(answers(tuning_service), before)
    wait_for_end(pid)


@pytest.mark.usefixtures("hone")
def test_a_child_that_was_not_ready_to_be_stopped(stub: StubTuner, tuning_service: Service) -> None:
    stub.behave("say(event='stage', stage='extract', fraction=0, text='import')\ntime.sleep(600)")
    with spawned(tuning_service, stub) as process:
        assert process.stderr is not None
        until(process.stderr, "import")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 130
    assert "Traceback" not in err


@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (120, 30), (40, 12)])
@pytest.mark.usefixtures("hone")
def test_live_in_a_terminal(
    stub: StubTuner, tuning_service: Service, tmp_path: Path, columns: int, lines: int
) -> None:
    """The screen as a person sees it, while the child waits in the middle of its search."""
    go = tmp_path / "go"
    stub.behave(
        f"{SEARCH}\ntrials = search(2)\n"
        f"while not os.path.exists({str(go)!r}): time.sleep(0.01)\nbetter(trials)"
    )
    environment = dict(stub.environment) | {"HONED_SOCKET": str(tuning_service.socket)}
    with Terminal(["tune", "m", "--trials", "20"], environment, columns, lines) as terminal:
        terminal.until("cost model")
        if columns >= 80:
            terminal.until("3,999")  # Of the second round; a read may end within a frame
        screen = terminal.until("162.3 ms now" if columns >= 80 else "6")
        assert "dense_3" in screen
        if columns >= 80:
            assert "6 in" in screen
            assert re.search(r"time left +1 h (40|39) min", screen)
            assert "…" in screen
        if columns == 120:
            assert "wrong 2, build 2" in screen or "build 2, wrong 2" in screen
        go.touch()
        status, left = terminal.finish()
    assert status == 0
    assert "m is served tuned" in " ".join(left.split())
    assert terminal.cursor_shown
    assert "Traceback" not in left


def until(stream: Any, text: str) -> str:
    """The first line with `text`."""
    for line in stream:
        if text in line:
            return str(line)
    raise AssertionError(f"{text!r} was not said")


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        ("prior:cpu-1", "prior"),
        ("record:0123456789ab", "record"),
        ("measured:kin:0123456789ab", "here, kin"),
        ("measured:0123456789ab", "here"),
        ("matmul", "rule"),
        (None, "-"),
    ],
)
def test_where_a_schedule_comes_from(schedule: str | None, said: str) -> None:
    assert origin(schedule) == said
