"""Apps at either door beside a real service in trouble: no run fails, and none takes long."""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest

import honed.runtime
from honed.protocol.methods import MODEL_FORM
from honed.protocol.params import FormParams
from honed.runtime.errors import ResourceExhausted
from tests.daemon.running import DEADLINE, IDLE, NO_TUNER, Service, serving, wait_for
from tests.daemon.serving.vendors import Vendors
from tests.pocl import ALL

from .app import SIZE, model
from .conftest import WIDTH, Client, write_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.service,
    pytest.mark.opencl,
    pytest.mark.tvm,
    pytest.mark.timeout(1800),
]
ROOT = Path(__file__).resolve().parents[2]
CONFIG = IDLE + NO_TUNER + f'[serve]\nengine = "fastest"\n[service]\ndevice = "{ALL}"\nfallback = ""\n'
ROWS = 64
SECONDS = 2.0  # of each trouble
AGAIN_SECONDS = 600.0  # at most, until a model is compiled again, and the app asks for it
LONGEST_MS = 60_000  # far above a run on a busy machine; one that waits for the end of a trouble never ends
RUNS = 20  # during each trouble
ANSWERED = 25  # runs after which those before a trouble count for nothing
# Routed or not, as fast as a busy machine allows: what is shown is what happens to runs.
PYTHON = """
import json, os, select, sys, time
import numpy as np
from tests.ort.app import *
ort = quick()
policy.Route._affords = lambda *_: True
session = ort.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
own = session.run(None, feed())[0]
runs = wrong = 0
slowest = 0.0
while not select.select([0], [], [], 0)[0] or os.read(0, 1):  # as client.c does
    begun = time.monotonic()
    found = session.run(None, feed())[0]
    slowest = max(slowest, time.monotonic() - begun)
    wrong += not np.allclose(found, own, atol=1e-3)
    runs += 1
    time.sleep(0.005)
result = {"runs": runs, "failed": 0, "wrong": wrong, "slowest_us": int(slowest * 1e6)}
print(json.dumps(result))
"""


@pytest.fixture
def vendors(tmp_path: Path) -> Vendors:
    made = Vendors(tmp_path / "opencl")
    made.have("pthread")
    return made


@pytest.fixture
def service(
    tmp_path_factory: pytest.TempPathFactory, cache_dir: Path, vendors: Vendors, newer: Path
) -> Iterator[Service]:
    """A service of a newer version from the start on that follows the file `newer`."""
    patch = f"""
import os
import honed.runtime
if os.path.exists({str(newer)!r}):
    honed.runtime.HONED_VERSION = "9.0.0"
"""
    options: dict[str, Any] = {"config": CONFIG, "environment": vendors.environment, "patch": patch}
    with serving(tmp_path_factory, cache_dir, **options) as running:
        yield running


@pytest.fixture
def newer(tmp_path: Path) -> Path:
    return tmp_path / "newer"


@pytest.fixture(params=["preload", "python"])
def app(request: pytest.FixtureRequest, service: Service, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """An app that runs a model until its standard input ends, of which it takes a byte for each run."""
    settings = {"HONED_SOCKET": str(service.socket), "HONED_ORT_LOG": "1"}
    path = tmp_path / "model.onnx"
    shapes: dict[str, tuple[int, ...]] = {"x": (8, SIZE), "bias": ()}
    if request.param == "python":
        path.write_bytes(model())
        command = [sys.executable, "-c", PYTHON, str(path)]
        settings["PYTHONPATH"] = str(ROOT)
    else:
        client: Client = request.getfixturevalue("client")
        write_model(path, depth=30)
        shapes = {"x": (ROWS, WIDTH)}
        command = [
            str(client.program),
            client.runtime,
            str(path),
            "milliseconds=-1",
            "pause=5",
            f"rows={ROWS}",
        ]
        settings |= {"LD_PRELOAD": client.preloaded, "HONED_ORT_ALLOWANCE": "10"}
    with service.client() as asking:  # the app asks the more seldom the longer a file is being compiled
        sizes = {name: shape for name, shape in shapes.items() if shape}
        brought = asking.upload(path, engine="opencl", precision="fp32", shapes=sizes)
        asked = FormParams(name=brought.model_name, shapes=shapes)
        wait_for(lambda: asking.ask(MODEL_FORM, asked).verified, "the model to be compiled", service)
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            command, env={**os.environ, **settings}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
        )  # fmt: skip
    yield process
    if process.poll() is None:
        process.kill()


Trouble = Callable[[Service, Vendors, Path], contextlib.AbstractContextManager[None]]


def bring_other(client: honed.runtime.Client, folder: Path) -> str:
    """Bring a large model of another app of the same user; return its name."""
    path = folder / "other.onnx"
    if not path.exists():
        write_model(path, depth=60)
    return client.upload(path, engine="opencl", shapes={"x": (16, WIDTH)}).model_name


@contextlib.contextmanager
def compiling(service: Service, _: Vendors, newer: Path) -> Iterator[None]:
    """Compile for another app."""
    with service.client() as client:
        other = bring_other(client, newer.parent)
        yield
        client.remove(other)


@contextlib.contextmanager
def stopped(service: Service, _: Vendors, __: Path) -> Iterator[None]:
    """Stop its process, as a debugger does."""
    service.process.send_signal(signal.SIGSTOP)
    yield
    service.process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def device_lost(service: Service, vendors: Vendors, _: Path) -> Iterator[None]:
    """Take the device away from its driver."""
    worker = service.worker
    assert worker is not None
    vendors.have("basic")
    worker.kill()
    wait_for(lambda: "is lost" in service.log, "the device to be lost", service)
    yield
    vendors.have("pthread")


@contextlib.contextmanager
def out_of_quota(service: Service, _: Vendors, newer: Path) -> Iterator[None]:
    """Let another model have the only place that its user has."""
    service.configure(CONFIG + "[apps]\nmax_models = 1\n")
    with service.client() as client:
        other = ""
        while not other:
            for entry in client.models():
                client.remove(entry["name"])
            with contextlib.suppress(ResourceExhausted):  # the app was quicker
                other = bring_other(client, newer.parent)
        with pytest.raises(ResourceExhausted):
            client.upload(model(9.0), engine="opencl")
        yield
        service.configure(CONFIG)
        client.remove(other)


@contextlib.contextmanager
def refused(service: Service, _: Vendors, __: Path) -> Iterator[None]:
    """Take no models of apps any more."""
    service.configure(CONFIG + "[apps]\nenabled = false\n")
    yield
    service.configure(CONFIG)


@contextlib.contextmanager
def killed(service: Service, _: Vendors, __: Path) -> Iterator[None]:
    """Kill it, and start it again."""
    service.kill()
    yield
    service.restart()
    service.wait_listening()


@contextlib.contextmanager
def replaced(service: Service, _: Vendors, newer: Path) -> Iterator[None]:
    """Have a newer version in its place."""
    service.process.terminate()
    service.process.wait(DEADLINE)
    newer.touch()
    yield
    service.restart()
    service.wait_listening()
    with service.client() as client:
        assert client.status()["version"] == "9.0.0"


TROUBLES: list[Trouble] = [compiling, stopped, device_lost, out_of_quota, refused, killed, replaced]


def answered(service: Service) -> int:
    """Return how many runs the service has answered."""
    with service.client() as client:
        return sum(each["inference_count"] for each in client.statistics())


def unread(pipe: IO[str]) -> int:
    """Return the bytes that its reader has not taken yet."""
    count = array.array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, count)
    return count[0]


def test_no_run_fails_or_takes_long(
    app: subprocess.Popen[str], service: Service, vendors: Vendors, newer: Path, tmp_path: Path
) -> None:
    """Runs are routed before each trouble and after the last one."""

    def routed() -> None:
        before = answered(service)
        wait_for(
            lambda: answered(service) >= before + ANSWERED,
            f"runs to be routed {when}",
            service,
            seconds=AGAIN_SECONDS,
        )

    def goes_on() -> None:
        pipe = app.stdin
        assert pipe is not None
        pipe.write("." * RUNS)
        pipe.flush()
        wait_for(lambda: not unread(pipe), f"the app to run its model {when}", service)

    when = "at first"
    for trouble in TROUBLES:
        routed()
        when = f"after {trouble.__name__}"
        with trouble(service, vendors, newer):
            time.sleep(SECONDS)
            goes_on()
    routed()
    out, _ = app.communicate(timeout=DEADLINE)
    assert app.returncode == 0, (tmp_path / "log").read_text()
    result = json.loads(out.splitlines()[0])
    assert (result["failed"], result["wrong"]) == (0, 0)
    assert result["slowest_us"] < 1000 * LONGEST_MS
    log = (tmp_path / "log").read_text()
    assert re.search(r"honed: .* [1-9]\d* of \d+ runs routed", log)
    assert re.search(r"honed: switching has cost [\d.]+ ms in [\d.]+ s", log)
