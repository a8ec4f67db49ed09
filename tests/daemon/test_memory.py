"""The memory of small boards: what honed takes at rest, and that no app is ended for it. As root."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from honed.daemon.settings.schema import shares
from honed.process.limits import MEMORY_PERCENT
from honed.protocol.params import TunerRunParams
from honed.runtime import Client
from honed.runtime.dtypes import from_datatype
from honed.runtime.errors import ModelRefused
from tests.daemon.running import Service, wait_for
from tests.models import FOLDER

lightglue = pytest.importorskip("honed.tuner.lightglue")
pytestmark = [pytest.mark.service, pytest.mark.opencl, pytest.mark.tvm, pytest.mark.slow]
REST_MIB = 60  # of the service and its tuner, without models
APP_MIB = 500
APP = f"""
import time
held = bytearray(b"x") * ({APP_MIB} << 20)
print("ready", flush=True)
time.sleep(100_000)
"""
FASTEST = '[serve]\nengine = "fastest"\n'
SHAPES = {("silero_vad", "input"): (1, 576)}  # for others 1 is right where a size is open
SECONDS = 30.0  # of LightGlue's tuning
V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


def pss(pid: int) -> float:
    """The proportional share of memory of a process, MiB."""
    rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(row.split()[1]) for row in rows if row.startswith("Pss:")) / 1024


def test_service_and_tuner_take_little_at_rest(start_service: Callable[..., Service]) -> None:
    service = start_service(config="[tuner]\nspawn = true\n")
    with service.client() as client:
        wait_for(lambda: "nothing is left" in client.status()["tuner"]["text"], "the tuner to rest", service)
        tuner = client.status()["tuner"]["pid"]
    took = {"service": pss(service.process.pid), "tuner": pss(tuner)}
    print(took)
    assert sum(took.values()) <= REST_MIB


@contextlib.contextmanager
def group(parent: Path, mib: int, name: str) -> Iterator[Path]:
    """A memory cgroup of so many MiB below another; skips the test where none can be made."""
    made = parent / name
    try:
        made.mkdir()
        old = parent.is_relative_to(V1) and V1.exists()
        (made / ("memory.limit_in_bytes" if old else "memory.max")).write_text(str(mib << 20))
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    try:
        yield made
    finally:
        for line in (made / "cgroup.procs").read_text().split():
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(int(line)).kill()
        wait_for(lambda: not (made / "cgroup.procs").read_text(), "the cgroup to be empty")
        made.rmdir()


def inside(place: Path) -> tuple[str, ...]:
    """What runs the command that follows in a cgroup."""
    return ("sh", "-c", 'echo $$ >"$0/cgroup.procs" && exec "$@"', str(place))


def answer(client: Client, name: str) -> None:
    """Have a model answer once, on zeros in the least shapes that it takes."""
    inputs = {}
    for each in client.metadata(name)["inputs"]:
        shape = SHAPES.get((name, each["name"]), tuple(max(1, size) for size in each["shape"]))
        inputs[each["name"]] = np.zeros(shape, from_datatype(each["datatype"]).numpy)
    if name == "silero_vad":
        inputs["sr"][()] = 16_000
    assert client.infer(name, inputs)


@contextlib.contextmanager
def small_board(start_service: Callable[..., Service], gib: int) -> Iterator[Client]:
    """Serve in cgroups as systemd makes them: a machine with an app, and honed's unit with its share.

    At the end both still run, and the kernel has ended nothing for want of memory.
    """
    root = V1 if V1.exists() else V2
    with contextlib.ExitStack() as stack:
        board = stack.enter_context(group(root, gib << 10, f"honed-{uuid.uuid4()}"))
        if root == V2:
            (board / "cgroup.subtree_control").write_text("+memory")
        unit = stack.enter_context(group(board, (gib << 10) * MEMORY_PERCENT // 100, "honed.service"))
        others = stack.enter_context(group(board, gib << 10, "app.service"))
        app = stack.enter_context(
            subprocess.Popen([*inside(others), sys.executable, "-c", APP], stdout=subprocess.PIPE)
        )
        stack.callback(app.kill)
        assert app.stdout is not None
        assert app.stdout.readline() == b"ready\n"
        service = start_service(config=f"{FASTEST}[tuner]\nspawn = false\n", prefix=inside(unit))
        stack.callback(service.kill)
        with service.client(timeout=None) as client:
            settings = {each["name"]: each["value"] for each in client.config()["settings"]}
            assert abs(settings["limits.compile_memory_mib"] - shares(gib << 10).compiler) <= 1
            yield client
        assert service.process.poll() is None
        assert app.poll() is None
        assert [killed(each) for each in (others, unit)] == [0, 0]


def killed(place: Path) -> int:
    """How many processes of a cgroup the kernel has ended for want of memory."""
    rows = (place / ("memory.oom_control" if V1.exists() else "memory.events")).read_text().splitlines()
    return next(int(row.split()[1]) for row in rows if row.startswith("oom_kill "))


@pytest.mark.skipif(os.geteuid() != 0, reason="makes cgroups, which needs root")
@pytest.mark.parametrize("gib", [2, 4])
def test_no_app_is_ended_while_models_are_added_tuned_and_served(
    start_service: Callable[..., Service], gib: int
) -> None:
    with small_board(start_service, gib) as client:
        for model in sorted(FOLDER.glob("*.onnx")):
            added = client.add(model)
            print(model.stem, added["engine"], added["engine_why"])
            answer(client, model.stem)
        print(client.run_tuner(TunerRunParams(command="tune", model="mobilenet_v2_035_128", seconds=20.0)))
        for model in FOLDER.glob("*.onnx"):
            answer(client, model.stem)


@pytest.mark.skipif(os.geteuid() != 0, reason="makes cgroups, which needs root")
@pytest.mark.parametrize("gib", [2, 4])
def test_lightglue_is_tuned_and_served_or_refused_in_a_sentence(
    start_service: Callable[..., Service], gib: int, tmp_path: Path
) -> None:
    """In 2 GiB ONNX Runtime would need some 220 MiB and has 180, the compiler 613 and has 491."""
    with small_board(start_service, gib) as client:
        model = lightglue.write(tmp_path / "lightglue.onnx")
        if gib == 2:
            with pytest.raises(ModelRefused, match="compiling it takes at least 493 MiB") as refused:
                client.add(model)
            assert "of cpu.memory_mib" in refused.value.reasons[0]
            assert client.models() == []
            return
        assert client.add(model)["kernels"]
        print(client.run_tuner(TunerRunParams(command="tune", model="lightglue", seconds=SECONDS)))
        answer(client, "lightglue")
