"""Programs with an ONNX Runtime, and the preload library: same answers, whatever the service does."""

from __future__ import annotations

import os
import random
import re
import shutil
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest

from tests.attack.material.mutate import Mutator
from tests.libhoned.binding import ROOT

from .conftest import Client, Ended, Made, compile_client, write_model
from .fake_service import FakeService, Lie, Message, answer_to, refuse

pytestmark = [pytest.mark.child, pytest.mark.timeout(600)]
SLOWEST_US = (
    60_000_000  # far above a deadline and a run on a busy machine; what waits for an answer never ends
)


def check(ended: Ended, *who: str) -> None:
    """Assert that all runs gave the right answers in time."""
    assert set(who or ("first", "second")) <= set(ended.of)
    for result in ended.of.values():
        assert (result["failed"], result["wrong"]) == (0, 0)
        assert result["slowest_us"] < SLOWEST_US


def test_runs_are_routed(client: Client, tmp_path: Path, slow_model: Path) -> None:
    """The file and the kind's sizes go to the service, then the runs; the log has a line for each change."""
    with FakeService(tmp_path / "s") as service:
        ended = client(tmp_path / "s", "until=50", HONED_ORT_LOG="1")
        assert service.files == [slow_model.read_bytes()]
        (bring, form, *_) = (request[3][0] for request in service.requests)
    check(ended)
    assert ended.of["second"]["routed"] == 50
    assert bring["files"] == ["slow.onnx"]
    assert bring["parameters"] == {"engine": "opencl", "precision": "fp32", "shapes": {"x": [1, 512]}}
    assert form["shapes"] == {"x": [1, 512]}
    assert form["report"]["app"] == "ort-client"
    assert form["report"]["own_runs"] == 20
    *changes, cost = ended.stderr.splitlines()
    assert cost.startswith("honed: switching has cost ")
    states = [line.split(": ", 2)[2].split(";")[0] for line in changes]
    assert states[0] == "own"
    assert "routed" in states[states.index("trying") :]
    assert states[-1].endswith("runs routed"), "what the session had when it was released"


def test_a_linked_program(made_once: Made, client: Client, tmp_path: Path) -> None:
    """A program that the linker bound to ONNX Runtime is reached, too."""
    library = Path(client.runtime)
    flags = ["-Wl,--no-as-needed", str(library), f"-Wl,-rpath,{library.parent}"]
    program = made_once("ort-client-linked", lambda path: compile_client(path, *flags))
    with FakeService(tmp_path / "s"):
        ended = replace(client, program=program, runtime="-")(tmp_path / "s", "until=20")
    check(ended)
    assert ended.of["second"]["routed"] == 20


def test_honed_run(client: Client, tmp_path: Path, preload: Path) -> None:
    """honed-run preloads the library, and gives the program's own exit status."""
    run = str(ROOT / "libhoned" / "ort" / "honed-run")
    library = str(preload / "libhoned-ort.so")
    with FakeService(tmp_path / "s"):
        ended = replace(client, preloaded="")(
            tmp_path / "s", "until=20", before=(run,), HONED_ORT_LIBRARY=library
        )
    assert ended.of["second"]["routed"] == 20
    env = {**os.environ, "HONED_ORT_LIBRARY": library}
    assert subprocess.run([run, "sh", "-c", "exit 7"], env=env, check=False).returncode == 7
    assert subprocess.run([run], capture_output=True, check=False).returncode == 2


def quicker(client: Client, folder: Path) -> Client:
    """A model of which a run takes a fifth as long; so one that is not answered is given up sooner."""
    write_model(folder / "quicker.onnx", depth=20)
    return replace(client, model=folder / "quicker.onnx")


@pytest.mark.parametrize("case", ["bytes=1", "case=given", "case=release", "kinds=3", "threads=4", "rows=40"])
def test_ways_to_run(client: Client, tmp_path: Path, case: str) -> None:
    """Sessions out of memory or made anew, outputs given, several kinds and threads, large inputs."""
    if case == "rows=40":
        client = quicker(client, tmp_path)
    with FakeService(tmp_path / "s"):
        ended = client(tmp_path / "s", "until=30", case)
    check(ended)
    assert ended.of["second"]["routed"] >= 30


@pytest.mark.parametrize("case", ["twice", "profile", "initializer", "clone"])
def test_runs_that_stay_own(client: Client, tmp_path: Path, case: str) -> None:
    """What only the app's own session can do is never handed over."""
    with FakeService(tmp_path / "s") as service:
        ended = client(tmp_path / "s", "runs=60", f"case={case}")
        assert not service.counts
    check(ended)


def test_errors_are_the_apps_own(client: Client, tmp_path: Path) -> None:
    """Runs that ONNX Runtime refuses are refused by it."""
    with FakeService(tmp_path / "s"), ThreadPoolExecutor() as every:
        keys = [("runs=60", f"case={case}") for case in ("misfit", "terminate")]
        for ended in every.map(lambda each: client(tmp_path / "s", *each), keys):
            assert all(result["failed"] == result["runs"] == 60 for result in ended.of.values())


def test_a_forked_child(client: Client, tmp_path: Path) -> None:
    """Both parent and child go on, each with connections of its own."""
    with FakeService(tmp_path / "s"):
        ended = client(tmp_path / "s", "until=30", "case=fork")
    check(ended, "first", "parent", "child", "second")
    assert ended.of["child"]["routed"] == ended.of["parent"]["routed"] == 30


def test_external_data(client: Client, tmp_path: Path) -> None:
    """Files beside the model are sent when the service asks for them, and none from elsewhere."""
    model = tmp_path / "model" / "slow.onnx"
    model.parent.mkdir()
    write_model(model, external=True)

    def lie(service: FakeService, connected: socket.socket, request: Message) -> bool:
        if request[2] != "ModelBring" or len(request[3][0]["files"]) > 1:
            return False
        return refuse(connected, request, "FAILED_PRECONDITION", "MissingFiles", external_data=asked)

    asked = ["weights.bin"]
    with FakeService(tmp_path / "s", lie) as service:
        ended = replace(client, model=model)(tmp_path / "s", "until=20")
        assert service.files[-1] == (model.parent / "weights.bin").read_bytes()
    check(ended)
    assert ended.of["second"]["routed"] == 20
    asked = ["../s2"]
    (tmp_path / "s2").write_text("secret")
    refused: list[float] = []

    def went_on() -> bool:
        """For longer than the pause before another question."""
        if service.counts["ModelBring"]:
            refused.append(time.monotonic())
        return bool(refused) and time.monotonic() > refused[0] + 3

    with FakeService(tmp_path / "s", lie) as service:
        check(replace(client, model=model)(tmp_path / "s", until=went_on))
        assert service.counts == {"ModelBring": 1}  # and never again


def wrong(**fields: object) -> Lie:
    """Answer a run with something else in its result."""

    def lie(service: FakeService, connected: socket.socket, request: Message) -> bool:
        if request[2] != "ModelInfer":
            return False
        connected.sendall(msgpack.packb([1, request[1], None, answer_to(request) | fields]))
        return True

    return lie


def at_runs(act: Lie) -> Lie:
    """Misbehave at runs alone."""
    return lambda service, connected, request: request[2] == "ModelInfer" and act(service, connected, request)


def hang_up(_: FakeService, connected: socket.socket, __: Message) -> bool:
    """End the connection."""
    connected.shutdown(socket.SHUT_RDWR)
    return True


def cut(_: FakeService, connected: socket.socket, request: Message) -> bool:
    """End the connection within an answer."""
    connected.sendall(msgpack.packb([1, request[1], None, answer_to(request)])[:100])
    return hang_up(_, connected, request)


def half(_: FakeService, connected: socket.socket, request: Message) -> bool:
    """Have a form in fp16."""
    if request[2] != "ModelForm":
        return False
    connected.sendall(msgpack.packb([1, request[1], None, answer_to(request) | {"precision": "fp16"}]))
    return True


Y = {"name": "y", "datatype": "FP32"}
LIES: dict[str, Lie] = {  # those of the second half only at runs
    "never answers": lambda service, *_: service.ended.wait(),
    "hangs up": hang_up,
    "garbage": lambda _, connected, __: connected.sendall(b"\xc1" * 64) or True,
    "quota": lambda _, c, request: refuse(c, request, "RESOURCE_EXHAUSTED"),
    "older": lambda _, c, request: refuse(c, request, "UNIMPLEMENTED"),
    "no right": lambda _, c, request: refuse(c, request, "PERMISSION_DENIED"),
    "half": half,
    "never answers runs": at_runs(lambda *_: True),
    "hangs up at runs": at_runs(hang_up),
    "cuts answers": at_runs(cut),
    "another shape": wrong(outputs=[Y | {"shape": [512]}]),
    "another size": wrong(outputs=[Y | {"shape": [1, 511]}]),
    "another type": wrong(outputs=[Y | {"datatype": "FP64", "shape": [1, 256]}]),
    "another name": wrong(outputs=[Y | {"name": "x", "shape": [1, 512]}]),
    "no output": wrong(outputs=[], raw_output_contents=[]),
    "not compiled": at_runs(lambda _, c, request: refuse(c, request, "UNAVAILABLE", "NotCompiled")),
}


QUICK = {"garbage", "half", "never answers runs", "hangs up at runs", "another shape", "not compiled"}


@pytest.mark.parametrize(
    "lies",
    [
        pytest.param(sorted(QUICK), id="quick"),
        *(pytest.param([each], id=each, marks=pytest.mark.slow) for each in LIES if each not in QUICK),
    ],
)
def test_a_service_that_misbehaves(client: Client, tmp_path: Path, lies: list[str]) -> None:
    """Whatever the service does, each run gives the app its answer in time."""
    quick = quicker(client, tmp_path)
    with ThreadPoolExecutor(len(lies)) as every:  # of services with an app each; apps mostly rest
        for outcome in [every.submit(misbehave, lie, quick, tmp_path / str(n)) for n, lie in enumerate(lies)]:
            outcome.result()


def misbehave(lie: str, client: Client, socket: Path) -> None:
    """Run an app beside a service that lies so."""
    keys = ("case=given",) if lie.startswith("another") else ()
    asked = "ModelInfer" if list(LIES).index(lie) > list(LIES).index("half") else "ModelBring"
    with FakeService(socket, LIES[lie]) as service:
        counts = service.counts

        def enough() -> bool:
            if lie == "half":  # it is asked again, or else used
                return counts["ModelForm"] > 1 or counts["ModelInfer"] > 0
            return counts[asked] > (asked == "ModelInfer")

        ended = client(socket, *keys, until=enough, HONED_ORT_LOG="1")
        assert asked == "ModelInfer" or not service.counts["ModelInfer"], lie
    check(ended)
    assert not sum(result["routed"] for result in ended.of.values()), lie
    runs = sum(result["runs"] for result in ended.of.values())
    assert f": 0 of {runs} runs routed\n" in ended.stderr, lie


def test_every_run_is_counted(client: Client, tmp_path: Path) -> None:
    """Runs that are looked at and runs that rest add up, whichever threads and kinds they are of."""
    with FakeService(tmp_path / "s", LIES["quota"]):
        ended = quicker(client, tmp_path)(
            tmp_path / "s", "threads=4", "kinds=3", "runs=150", HONED_ORT_LOG="1"
        )
    check(ended)
    counted = sum(map(int, re.findall(r": 0 of (\d+) runs routed$", ended.stderr, re.MULTILINE)))
    assert counted == sum(result["runs"] for result in ended.of.values())


def test_a_model_that_was_removed_is_brought_again(client: Client, tmp_path: Path) -> None:
    """A service that lost the model gets it with a later question."""

    def lie(service: FakeService, connected: socket.socket, request: Message) -> bool:
        lost = request[2] == "ModelForm" and service.counts["ModelForm"] == 1
        return lost and refuse(connected, request, "NOT_FOUND")

    with FakeService(tmp_path / "s", lie) as service:
        ended = client(tmp_path / "s", "until=20")
        assert service.counts["ModelBring"] == 2
    check(ended)
    assert ended.of["second"]["routed"] == 20


def test_fp16_by_wish(client: Client, tmp_path: Path) -> None:
    """A form in fp16 answers where the user allows it."""
    with FakeService(tmp_path / "s", half):
        ended = client(tmp_path / "s", "until=20", HONED_ORT_PRECISION="auto")
    assert ended.of["second"]["routed"] == 20


LIES_TOLD = 4  # answers; the pauses before each question double


class Liar:
    """Answers wrongly now and then, in any way."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.mutator = Mutator(self.random)

    def __call__(self, service: FakeService, connected: socket.socket, request: Message) -> bool:
        if self.random.random() < 0.7:
            return False
        answer = [1, request[1], None, answer_to(request)]
        data = msgpack.packb(answer)
        match self.random.randrange(4):
            case 0:
                data = data[: self.random.randrange(len(data))]
            case 1:
                data = self.mutator.data(data)
            case 2:
                try:
                    data = msgpack.packb([*answer[:3], self.mutator.tree(answer[3], 2)])
                except (ValueError, TypeError, OverflowError):
                    data = b"\xc0"
            case _:
                data = data * 2
        connected.sendall(data)
        return self.random.random() < 0.5 and hang_up(service, connected, request)


@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 8))])
def test_lies_end_no_app(client: Client, sanitized: str, tmp_path: Path, seed: int) -> None:
    """Answers of nonsense break no memory, and no run fails."""
    with FakeService(tmp_path / "s", Liar(seed)) as service:
        ended = replace(quicker(client, tmp_path), preloaded=sanitized)(
            tmp_path / "s", "threads=2", "kinds=2", until=lambda: service.counts.total() >= LIES_TOLD
        )
    assert not any(result["failed"] for result in ended.of.values())


@pytest.mark.skipif(shutil.which("valgrind") is None, reason="there is no valgrind")
@pytest.mark.slow
def test_valgrind_finds_nothing(client: Client, tmp_path: Path) -> None:
    """No error and no leak has a function of the library in it."""
    report, model = tmp_path / "report", tmp_path / "quick.onnx"
    write_model(model, depth=0)  # Valgrind makes it slow enough
    run = ("valgrind", "--fair-sched=yes", "--leak-check=full", "--trace-children=no", f"--log-file={report}")
    with FakeService(tmp_path / "s"):
        ended = replace(client, model=model)(
            tmp_path / "s", "until=5", "sessions=2", before=run, HONED_ORT_LOG="1"
        )
    assert ended.of["first"]["routed"] >= 5
    blamed = [each for each in report.read_text().split("\n\n") if "libhoned-ort" in each and "at 0x" in each]
    assert not blamed


@pytest.mark.parametrize(
    ("processes", "threads", "sessions", "runs"),
    [(1, 8, 20, 300), pytest.param(10, 24, 20, 140, marks=pytest.mark.slow)],
)
def test_nothing_grows(
    client: Client, tmp_path: Path, processes: int, threads: int, sessions: int, runs: int
) -> None:
    """Threads and sessions keep no memory and no descriptor, in processes that fork."""
    model = tmp_path / "quick.onnx"
    write_model(model, depth=2)  # ONNX Runtime keeps weights for each session and node
    quick = replace(client, model=model)
    keys = (f"threads={threads}", f"sessions={sessions}", f"runs={runs}", "kinds=2", "case=fork", "pause=0")
    keys += ("until=1",) * (processes == 1)  # Few runs of ten processes are routed at all
    with FakeService(tmp_path / "s") as service, ThreadPoolExecutor(processes) as every:
        all_ended = list(every.map(lambda _: quick(tmp_path / "s", *keys), range(processes)))
        assert service.counts["ModelInfer"] or processes > 1  # which may be too busy for it
    for ended in all_ended:
        check(ended, "first", "child", "parent", "second")
        first, second = ended.of["first"], ended.of["second"]
        print({name: (first[name], second[name]) for name in ("runs", "routed", "rss_kib", "files")})
        assert second["rss_kib"] < first["rss_kib"] + 8192
        assert second["files"] <= first["files"] + 3 * 16  # of connections, of which there are 16 at most
