"""Small models that apps run in their own process: a real service, and real processes."""

from __future__ import annotations

import contextlib
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import onnxruntime
import pytest

from honed import ort, standin
from honed.daemon.features import in_app as feature
from honed.daemon.store.names import own_name
from honed.machine.processors import first_placement, processors
from honed.ort import session
from honed.protocol.errors import HonedError, NotFound, PermissionDenied, ResourceExhausted, Unavailable
from honed.protocol.methods import MODEL_BORROW
from honed.protocol.params import BorrowParams, BringParams
from honed.protocol.results import NANOSECONDS, PAGE_BYTES, RECALLED, RETURNED, RUNS, ModelBorrowed
from honed.protocol.wire import close_all
from honed.runtime import Client
from honed.runtime.calling import calls, in_app
from honed.runtime.calling.in_app import ASKED_AFTER, DEVICE, Loan
from honed.runtime.calling.steps import Ask
from tests.daemon.clients.test_ort import model
from tests.daemon.conftest import Hone
from tests.daemon.running import NO_TUNER, Service, serving, wait_for
from tests.daemon.serving.own_models import ANNA, BERT, X, adding, beside, client, for_users

pytestmark = [pytest.mark.service, pytest.mark.opencl]
# On a machine that is shared a run may take long; how long is no matter here.
LENT = "\n[cpu]\nin_app_ms = 10000\n"
CPU = '[serve]\nengine = "cpu"\n' + NO_TUNER
_ROOT = Path(__file__).resolve().parents[3]
_COUNT = iter(range(1000))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> Iterator[Service]:
    with serving(tmp_path_factory, cache_dir, config=CPU + LENT) as service:
        yield service


@pytest.fixture(autouse=True)
def pointed(served: Service, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process is an app of that service's."""
    monkeypatch.setenv("HONED_SOCKET", str(served.socket))
    session._clients.clear()
    yield
    for each in session._clients.values():
        each.close()
    session._clients.clear()


@pytest.fixture
def app(served: Service) -> Iterator[Client]:
    with served.client(in_app=True) as connected:
        yield connected


@pytest.fixture
def name(app: Client, tmp_path: Path) -> str:
    """A model that the CPU engine serves: y = x + 1."""
    return added(app, tmp_path, f"m{next(_COUNT)}", 1)


def added(app: Client, folder: Path, name: str, number: float, *, replace: bool = False) -> str:
    (folder / "m.onnx").write_bytes(adding(number))
    app.add(folder / "m.onnx", name=name, engine="cpu", replace=replace)
    return name


def asked(app: Client, name: str, requests: int = ASKED_AFTER) -> bool:
    """Make so many requests; whether the model runs in this process then."""
    for _ in range(requests):
        app.infer(name, {"x": X})
    return app.answer(name, {"x": X}).device == DEVICE


def borrow(app: Client, name: str) -> None:
    """Take a loan and forget it."""
    close_all(app._exchange(Ask(MODEL_BORROW, BorrowParams(name=name, run_us=1))).descriptors)


def answer(app: Client, name: str) -> tuple[float, bool]:
    """What the model adds, and whether it ran in this process."""
    found = app.answer(name, {"x": X})
    return float(found.outputs["y"][0]), found.device == DEVICE


def test_the_same_answers_come_from_the_app_and_all_are_counted(
    served: Service, app: Client, typed: Hone
) -> None:
    path = _ROOT / "tests/models/silero_vad.onnx"
    app.add(path, name="vad", engine="cpu")
    rng = np.random.default_rng(0)
    state = rng.standard_normal((2, 1, 128)).astype(np.float32)
    feed: dict[str, Any] = {
        "input": rng.standard_normal((1, 512)).astype(np.float32),
        "state": state,
        "sr": np.array(16000, np.int64),
    }
    first = app.answer("vad", feed)
    for _ in range(ASKED_AFTER):
        last = app.answer("vad", feed)
    assert (first.device == DEVICE, last.device == DEVICE) == (False, True)
    assert (last.engine, last.queue_us) == ("cpu", 0)
    assert {k: v.tobytes() for k, v in last.outputs.items()} == {
        k: v.tobytes() for k, v in first.outputs.items()
    }
    only = app.infer("vad", feed, outputs=["output"])
    assert list(only) == ["output"]
    assert only["output"].tobytes() == first.outputs["output"].tobytes()
    assert app.show("vad")["in_apps"] == 1
    status, told, _ = typed("--socket", str(served.socket), "list")
    # Beside models of users, which other tests may have left, there is less room, and the cell is wrapped.
    assert (status, "apps" in told) == (0, True)
    assert "also runs it inside an app" in typed("--socket", str(served.socket), "show", "vad")[1]
    wait_for(lambda: app.statistics("vad")[0]["inference_count"] == ASKED_AFTER + 2, "the runs to be counted")
    metrics = next(each for each in app.metrics()["models"] if each["name"] == "vad")
    assert metrics["engines"] == {"cpu": ASKED_AFTER + 2}
    assert metrics["requests"] == ASKED_AFTER + 2
    assert app.status()["idle"]["models"]["vad"] < 60
    app.remove("vad")


def test_sessions_run_in_the_app_as_onnxruntime_does_and_raise_the_same(served: Service) -> None:
    data = adding(5)
    ours: Any = ort.InferenceSession(data)
    theirs = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    socket = [ours.run(None, {"x": X}) for _ in range(ASKED_AFTER)]
    assert ours.honed_engine == "onnxruntime"
    for names in (None, [], ["y"], ("y",)):
        [found] = ours.run(names, {"x": X})
        assert found.tobytes() == socket[0][0].tobytes() == theirs.run(names, {"x": X})[0].tobytes()
    assert ours.run(None, {"x": X.tolist()})[0].tobytes() == socket[0][0].tobytes()
    strange: tuple[dict[str, Any], ...] = (
        {"x": X.astype(np.float64)},
        {"x": X[:2]},
        {"x": X, "other": X},
        {"other": X},
        {"x": None},
        {},
    )
    for feed in strange:
        with pytest.raises(Exception) as expected:  # noqa: PT011 - which one is what is compared
            theirs.run(None, feed)
        with pytest.raises(Exception) as found_error:  # noqa: PT011
            ours.run(None, feed)
        assert type(found_error.value).__name__ == type(expected.value).__name__
    assert ours.run(None, {"x": X})[0].tobytes() == socket[0][0].tobytes()


def test_an_app_that_wants_few_threads_has_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    right, asked_for = in_app._session, list[int]()

    def made(data: bytes, told: ModelBorrowed) -> Any:
        asked_for.append(told.threads)
        return right(data, told)

    monkeypatch.setattr(in_app, "_session", made)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    few = ort.InferenceSession(adding(6), options)
    for _ in range(ASKED_AFTER):
        few.run(None, {"x": X})
    assert (asked_for, few.honed_engine) == ([1], "onnxruntime")
    known = in_app.InApp()
    known.loans["m"] = cast(Any, SimpleNamespace(threads=2))
    assert [known.loan("m", threads) is None for threads in (0, 1, 2)] == [False, True, False]


def test_a_small_model_has_one_thread_until_its_settings_were_compared(app: Client, name: str) -> None:
    def lent(us: int) -> tuple[int, int]:
        reply = app._exchange(Ask(MODEL_BORROW, BorrowParams(name=name, run_us=us)))
        close_all(reply.descriptors)
        terms = MODEL_BORROW.result_of(reply.result)
        return terms.threads, terms.bound_us

    first = first_placement(processors(Path("/"), os.sched_getaffinity(0))).threads
    assert [lent(us) for us in (1, 400, 401)] == [(1, 800), (1, 800), (first, 10_000_000)]


CHANGES: dict[str, Callable[[Client, str, Path], object]] = {
    "replaced": lambda app, name, folder: added(app, folder, name, 2, replace=True),
    "set": lambda app, name, _: app.set(name, warm_up=1),
    "warmed up in shapes": lambda app, name, _: app.set(name, warm_up_shapes={"x": (4,)}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_it_is_called_back(served: Service, app: Client, name: str, tmp_path: Path, change: str) -> None:
    assert asked(app, name)
    with served.client() as admin:
        CHANGES[change](admin, name, tmp_path)
    assert answer(app, name) == (2.0 if change == "replaced" else 1.0, False)
    assert app.show(name)["in_apps"] == 0
    assert asked(app, name, 2 * ASKED_AFTER)  # it is asked for again, later than at first
    assert answer(app, name) == (2.0 if change == "replaced" else 1.0, True)


def test_what_is_removed_is_not_found(served: Service, app: Client, name: str) -> None:
    assert asked(app, name)
    with served.client() as admin:
        admin.remove(name)
    with pytest.raises(NotFound):
        app.infer(name, {"x": X})
    assert name in served.log


def test_no_request_is_lost_and_none_is_answered_by_what_was_replaced(
    served: Service, app: Client, name: str, tmp_path: Path
) -> None:
    assert asked(app, name)
    acknowledged, stop = [1.0], threading.Event()
    wrong: list[object] = []
    answered = [0]

    def ask() -> None:
        while not stop.is_set():
            least = acknowledged[0]
            try:
                found, _ = answer(app, name)
            except HonedError as error:
                wrong.append(error)
                return
            answered[0] += 1
            if found < least:
                wrong.append((least, found))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    with served.client() as admin:
        for number in (2.0, 3.0, 4.0):
            before = answered[0]
            added(admin, tmp_path, name, number, replace=True)
            acknowledged[0] = number
            wait_for(lambda before=before: wrong or answered[0] > before + 100, "requests", served)  # type: ignore[misc]
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.slow
@pytest.mark.tvm
def test_a_compiled_form_calls_it_back(start_service: Callable[..., Service], tmp_path: Path) -> None:
    service = start_service(config='[serve]\nengine = "fastest"\n' + NO_TUNER + LENT)
    with service.client(in_app=True, timeout=600.0) as app, service.client() as admin:
        (tmp_path / "m.onnx").write_bytes(adding(1))
        app.add(tmp_path / "m.onnx", name="m")
        admin.pin("m", engine="onnxruntime")
        assert asked(app, "m", 20 * ASKED_AFTER)
        admin.pin("m", engine="opencl")
        found = app.answer("m", {"x": X})
        assert (found.engine, float(found.outputs["y"][0])) == ("gpu", 1.0)
        assert app.show("m")["in_apps"] == 0
        assert "another engine serves it" in service.log


def test_one_setting_turns_it_off(start_service: Callable[..., Service], tmp_path: Path) -> None:
    service = start_service(config=CPU + LENT)
    with service.client(in_app=True) as app:
        added(app, tmp_path, "m", 1)
        assert asked(app, "m")
        service.configure(CPU + "\n[cpu]\nin_app_ms = 0\n")
        assert answer(app, "m") == (1.0, False)
        assert app.show("m")["in_apps"] == 0
        assert not asked(app, "m", 2 * ASKED_AFTER)
        with pytest.raises(Unavailable, match="in_app_ms of \\[cpu\\] is 0"):
            app.ask(MODEL_BORROW, BorrowParams(name="m", run_us=1))


def test_a_service_that_dies_is_noticed(start_service: Callable[..., Service], tmp_path: Path) -> None:
    service = start_service(config=CPU + LENT)
    with service.client(in_app=True) as app:
        added(app, tmp_path, "m", 1)
        assert asked(app, "m")
        loan = app.loan("m")
        service.kill()
        assert loan is not None
        loan._look = 0  # it looks at times only
        with pytest.raises(Unavailable):
            app.infer("m", {"x": X})
        assert loan.ended
        service.restart()
        service.wait_listening()
        service.wait_ready()
        assert answer(app, "m") == (1.0, False)


def test_what_is_not_lent(app: Client, name: str, tmp_path: Path) -> None:
    app.add(beside(tmp_path, 1), name=f"{name}-e", engine="cpu")
    (tmp_path / "open.onnx").write_bytes(model())
    app.add(tmp_path / "open.onnx", name=f"{name}-o", engine="cpu")
    app.set(f"{name}-o", max_batch=4)
    for which, us, told in (
        (name, 10_000_001, "a run takes 10000001 us, more than 10000 ms"),
        (f"{name}-e", 1, "it has external data"),
        (f"{name}-o", 1, "its requests are run together"),
    ):
        with pytest.raises(Unavailable, match=told):
            app.ask(MODEL_BORROW, BorrowParams(name=which, run_us=us))


def test_users_get_what_they_have_brought_and_nothing_of_others(
    tmp_path_factory: pytest.TempPathFactory, cache_dir: Path, tmp_path: Path
) -> None:
    with (
        for_users(tmp_path_factory, cache_dir, LENT) as service,
        service.client(in_app=True) as root,
        client(service, ANNA) as anna,
        client(service, BERT) as bert,
    ):
        added(root, tmp_path, "theirs", 1)
        assert not asked(anna, "theirs")  # the file is the administrators'
        assert asked(root, "theirs")
        mine = anna.bring(adding(2), engine="cpu").model_name
        assert asked(anna, mine)
        for each in (mine, own_name(BERT, BringParams(files=("m",), sha256=("0" * 64,))), "theirs"):
            with pytest.raises(PermissionDenied, match="may not call ModelBorrow"):
                bert.ask(MODEL_BORROW, BorrowParams(name=each, run_us=1))
        assert not any(each["name"] == mine for each in bert.models())
        again = bert.bring(adding(2), engine="cpu").model_name
        assert (again != mine, asked(bert, again)) == (True, True)
        anna.remove(mine)
        with pytest.raises(NotFound):
            anna.infer(mine, {"x": X})
        assert answer(bert, again) == (2.0, True)


def test_apps_without_onnxruntime_or_with_another_use_the_service(
    served: Service, app: Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as without:
        without.setattr(standin, "installed", lambda: False)
        assert not asked(app, name)
    with monkeypatch.context() as other:
        other.setattr(standin, "_kept", [SimpleNamespace(__version__="1.0")])
        assert not asked(app, name, 2 * ASKED_AFTER)
    wait_for(lambda: app.show(name)["in_apps"] == 0, "the loan to be given back")
    with served.client(in_app=True) as another:
        assert asked(another, name)


def test_a_run_that_fails_here_is_answered_by_the_service(app: Client, name: str) -> None:
    assert asked(app, name)
    loan = app.loan(name)
    assert loan is not None

    def fails(*_: object) -> None:
        raise RuntimeError("a fault of this process")

    loan._session = SimpleNamespace(run=fails)
    assert answer(app, name) == (1.0, False)
    assert (loan.ended, app.loan(name)) == (True, None)


def test_other_answers_than_the_services_are_not_used(
    app: Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = in_app._session
    monkeypatch.setattr(in_app, "_session", lambda _, told: right(adding(1.5), told))
    assert not asked(app, name)
    assert answer(app, name) == (1.0, False)


def test_requests_that_ask_for_more_are_the_services(
    app: Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "_LEAST_SECONDS", 60.0)
    assert asked(app, name)
    into = np.empty(4, np.float32)
    options: tuple[dict[str, Any], ...] = ({"finite": True}, {"timeout": 59.0}, {"outputs": {"y": into}})
    for each in options:
        assert app.answer(name, {"x": X}, **each).device != DEVICE
    assert app.answer(name, {"x": X}, timeout=60.0, priority=1).device == DEVICE
    with pytest.raises(HonedError, match="priority"):
        app.infer(name, {"x": X}, priority=9)
    with pytest.raises(HonedError):
        app.infer(name, {"x": X}, outputs=["y", "no"])
    assert answer(app, name) == (1.0, False) or app.loan(name) is not None


def test_a_forked_app_goes_by_the_service_and_ends(served: Service, tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(adding(3))
    script = tmp_path / "app.py"
    script.write_text(
        "import os, sys\n"
        "import numpy as np\n"
        "from honed import ort\n"
        "x = np.arange(4, dtype=np.float32)\n"
        f"ours = ort.InferenceSession({str(tmp_path / 'm.onnx')!r})\n"
        f"for _ in range({ASKED_AFTER}): ours.run(None, {{'x': x}})\n"
        "assert ours.honed_engine == 'onnxruntime', ours.honed_engine\n"
        "child = os.fork()\n"
        f"for _ in range(2 * {ASKED_AFTER}):\n"
        "    assert (ours.run(None, {'x': x})[0] == x + 3).all()\n"
        "if not child:\n"
        "    assert ours.honed_engine == 'cpu', ours.honed_engine\n"
        "    sys.exit(7)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7\n"
        "assert ours.honed_engine == 'onnxruntime', ours.honed_engine\n"
    )
    environment = {**os.environ, "HONED_SOCKET": str(served.socket)}
    ran = partial(subprocess.run, check=False, capture_output=True, text=True, timeout=120)
    done = ran([sys.executable, str(script)], env=environment)
    assert done.returncode == 0, done.stderr
    through = [sys.executable, "-m", "honed.ort", "--socket", str(served.socket), str(script)]
    script.write_text(script.read_text().replace("from honed import ort", "import onnxruntime as ort"))
    done = ran(through)
    assert done.returncode == 0, done.stderr


def test_a_hostile_app_harms_neither_the_service_nor_its_figures(
    served: Service, app: Client, name: str
) -> None:
    app.infer(name, {"x": X})
    reply = app._exchange(Ask(MODEL_BORROW, BorrowParams(name=name, run_us=1)))
    page, file = reply.descriptors
    for size in (0, 2 * PAGE_BYTES):
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(page, size)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(file, b"x")
    words = memoryview(mmap.mmap(page, PAGE_BYTES)).cast("Q")
    words[RUNS] = words[NANOSECONDS] = (1 << 64) - 1
    wait_for(lambda: app.statistics(name)[0]["inference_count"] > 1, "the runs to be counted")
    words[RUNS], words[NANOSECONDS] = 0, 1
    counted = app.statistics(name)[0]
    assert counted["inference_count"] < 1e9
    assert counted["inference_stats"]["success"]["ns"] < 1e13
    words[RETURNED] = 1
    wait_for(lambda: app.show(name)["in_apps"] == 0, "the loan to end")
    for _ in range(3):  # one app has one loan of a model
        borrow(app, name)
    assert app.show(name)["in_apps"] == 1


def test_loans_are_bounded(app: Client, name: str, monkeypatch: pytest.MonkeyPatch, served: Service) -> None:
    app.infer(name, {"x": X})
    others = [served.client() for _ in range(feature.MOST_OF_USER + 1)]
    try:
        for each in others[1:]:
            borrow(each, name)
        with pytest.raises(ResourceExhausted, match="too many"):
            borrow(others[0], name)
    finally:
        for each in others:
            each.close()
    wait_for(lambda: app.show(name)["in_apps"] == 0, "their ends")
    wait_for(lambda: not pages(served), "the service to let go of their pages")


def pages(served: Service) -> list[str]:
    """The pages of loans that a service holds."""
    found = []
    for each in Path(f"/proc/{served.process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.append(os.readlink(each))
    return [path for path in found if "honed-loan" in path]


def test_threads_run_where_those_of_the_cpu_engine_run(monkeypatch: pytest.MonkeyPatch) -> None:
    number = max(os.sched_getaffinity(0))
    told = ModelBorrowed(
        runtime=onnxruntime.__version__,
        level="all",
        threads=2,
        spinning=False,
        processors=(number,),
        bound_us=1,
    )
    if len(os.sched_getaffinity(0)) > 1:
        before = set(os.listdir("/proc/self/task"))
        made = in_app._session(adding(1), told)
        [new] = map(int, set(os.listdir("/proc/self/task")) - before)
        wait_for(lambda: os.sched_getaffinity(new) == {number}, "the thread to move")
        assert made.get_providers() == ["CPUExecutionProvider"]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {number + 1, number + 2})
    with pytest.raises(OSError, match="may not use the processors"):
        in_app._session(adding(1), told)


class _Slow:
    """A session whose runs are told to take long."""

    def get_inputs(self) -> list[Any]:
        return [SimpleNamespace(name="x", type="tensor(float)")]

    get_outputs = get_inputs

    def run(self, names: list[str], feed: dict[str, Any], options: None) -> list[Any]:
        return [feed["x"]]


def test_runs_that_take_too_long_end_a_loan() -> None:
    told = ModelBorrowed(runtime="", level="all", threads=1, spinning=True, processors=(), bound_us=0)
    words = memoryview(bytearray(PAGE_BYTES)).cast("Q")
    loan = Loan(_Slow(), told, words, lambda: True)
    runs = 0
    while loan.run(["x"], {"x": X}) is not None:
        runs += 1
    assert (runs, words[RUNS], words[RETURNED], words[RECALLED], loan.ended) == (21, 21, 1, 0, True)
