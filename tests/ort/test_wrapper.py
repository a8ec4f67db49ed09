"""The wrapper for Python beside a service of the tests: nothing grows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from .conftest import write_model
from .fake_service import FakeService

pytestmark = [pytest.mark.child, pytest.mark.timeout(1800)]
ROOT = Path(__file__).resolve().parents[2]
# Runs of threads that share sessions, three times, and once more in a forked child; the memory after each.
SCRIPT = """
import json, os, sys, threading
import numpy as np
from tests.ort.app import *
ort = quick()
path, threads, sessions, runs = sys.argv[1], *map(int, sys.argv[2:])
options = ort.SessionOptions()
options.intra_op_num_threads = 1
cpu = dict(sess_options=options, providers=["CPUExecutionProvider"])
every = [ort.InferenceSession(path, **cpu) for _ in range(sessions)]
inputs = [np.full((1 + rows, 512), rows, np.float32) for rows in range(2)]
wrong = []
def work(number):
    for i in range(number, number + runs):
        x = inputs[i % 2]
        (y,) = every[i % sessions].run(None, {"x": x})
        if not (np.array_equal(y, x) or np.array_equal(y, x + 1000)):
            wrong.append(i)
def all_work():
    started = [threading.Thread(target=work, args=(n,)) for n in range(threads)]
    [each.start() for each in started]
    [each.join() for each in started]
    status = open("/proc/self/status").read().split("VmRSS:")[1].split()[0]
    routed = sum(route.routed_runs for each in every for route in routes(each))
    own = sum(route.own_runs for each in every for route in routes(each))
    own += sum(each._honed.skipped[0] for each in every)
    return int(status), len(os.listdir("/proc/self/fd")), routed, own + routed
after = [all_work(), all_work()]
child = os.fork()
if not child:
    after = [all_work()]
    os._exit(len(wrong) > 0)
assert os.waitpid(child, 0)[1] == 0
for _ in range(6):  # What else is in the process may grow now and then; a leak grows each time
    after.append(all_work())
    if after[-1][0] < after[-2][0] + 8192:
        break
print(json.dumps([len(wrong), after]))
"""


@pytest.mark.parametrize(
    ("processes", "threads", "sessions", "runs"),
    [(1, 8, 20, 400), pytest.param(10, 24, 20, 140, marks=pytest.mark.slow)],
)
def test_nothing_grows(tmp_path: Path, processes: int, threads: int, sessions: int, runs: int) -> None:
    """Threads and sessions keep no memory and no descriptor, in processes that fork."""
    model, socket = tmp_path / "quick.onnx", tmp_path / "s"
    write_model(model, depth=2)
    command = [sys.executable, "-c", SCRIPT, str(model), str(threads), str(sessions), str(runs)]
    environment = {**os.environ, "HONED_SOCKET": str(socket), "PYTHONPATH": str(ROOT)}

    def run(_: int) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    with FakeService(socket), ThreadPoolExecutor(processes) as every:
        all_ended = list(every.map(run, range(processes)))
    for ended in all_ended:
        assert ended.returncode == 0, ended.stderr
        wrong, after = json.loads(ended.stdout.splitlines()[-1])
        print(after)
        assert not wrong
        assert after[-1][2] > 0
        # A count that two threads change at once may lose one.
        assert [each[3] for each in after] == pytest.approx(
            [threads * runs * (n + 1) for n in range(len(after))], rel=0.05
        )
        assert after[-1][0] < after[-2][0] + 8192
        assert after[-1][1] <= after[1][1] + threads
