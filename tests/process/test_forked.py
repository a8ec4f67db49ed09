"""Work shared out to forked processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures.process import BrokenProcessPool

import psutil
import pytest

from honed.process.forked import OWN_MIB, ForkPool
from tests.daemon.running import DEADLINE

TOOLS = {"twice": lambda number: 2 * number}  # not to be pickled: it is inherited


def twice(tools: dict, number: int) -> tuple[int, int]:  # type: ignore[type-arg]
    return tools["twice"](number), os.getpid()


def refuse(_: object, text: str) -> None:
    raise ValueError(text)


def end(_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("processes", [0, 1, 3])
def test_jobs_are_done_with_what_is_inherited(processes: int) -> None:
    with ForkPool(processes, TOOLS) as pool:
        begun = [pool.begin(twice, number) for number in range(20)]
        results = [one.result() for one in begun]
    assert [number for number, _ in results] == list(range(0, 40, 2))
    pids = {pid for _, pid in results}
    assert pids == {os.getpid()} if processes == 0 else os.getpid() not in pids
    assert len(pids) <= max(1, processes)


def test_an_error_travels_and_the_others_go_on() -> None:
    with ForkPool(2, TOOLS) as pool:
        refused, done = pool.begin(refuse, "no such number"), pool.begin(twice, 4)
        with pytest.raises(ValueError, match="no such number"):
            refused.result()
        assert done.result()[0] == 8


def take(_: object, mib: int) -> int:
    return len(bytearray(mib << 20))


def test_each_may_take_so_much_memory_of_its_own() -> None:
    with ForkPool(1, TOOLS) as pool:
        assert pool.begin(take, OWN_MIB // 2).result()
        with pytest.raises(MemoryError):
            pool.begin(take, 4 * OWN_MIB).result()  # what was freed before may be taken again


def test_a_process_that_ends_is_told() -> None:
    with ForkPool(2, TOOLS) as pool, pytest.raises(BrokenProcessPool):
        pool.begin(end).result()


def test_they_end_with_a_parent_that_is_killed() -> None:
    code = (
        "import time; from tests.process.test_forked import TOOLS, ForkPool, twice\n"
        "pool = ForkPool(2, TOOLS); pool.begin(twice, 1).result(); print('up', flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "up\n"
    children = psutil.Process(parent.pid).children()
    assert len(children) == 2
    parent.kill()
    parent.wait()
    gone, alive = psutil.wait_procs(children, timeout=DEADLINE)
    assert (len(gone), alive) == (2, [])
