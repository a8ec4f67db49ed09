"""Many inferences leave memory and descriptors where they were."""

from __future__ import annotations

import numpy as np
import psutil
import pytest

from honed.runtime import Client
from tests.daemon.conftest import SIZE
from tests.daemon.running import Service, descriptors, memory, wait_for

pytestmark = [pytest.mark.service, pytest.mark.opencl]
X = np.arange(SIZE, dtype=np.float32)
LEAK = 700 << 10  # Bytes by which a process grows in a round, if it keeps some 200 for each request


@pytest.mark.slow
def test_thousands_of_inferences_leave_memory_where_it_was(service: Service) -> None:
    worker = service.worker
    assert worker is not None
    processes = [psutil.Process(service.process.pid), worker]

    with service.client() as client:
        infer(client, 1000)
        opened, grown = [descriptors(process.pid) for process in processes], list[list[int]]()
        # What else the processes do may grow now and then; a leak grows each time.
        while len(grown) < 10 and not is_steady(grown):
            before = [memory(process.pid) for process in processes]
            infer(client, 3000)
            grown.append([memory(p.pid) - then for p, then in zip(processes, before, strict=True)])
        assert is_steady(grown), grown
        for process, most in zip(processes, opened, strict=True):
            wait_closed(process.pid, most, service)


def is_steady(grown: list[list[int]]) -> bool:
    """Whether each process has had a round in which it did not grow as it does by a leak."""
    return bool(grown) and all(min(process) < LEAK for process in zip(*grown, strict=True))


def wait_closed(pid: int, most: int, service: Service) -> None:
    """Until a process has no more descriptors open: it may be writing a file, or closing a connection."""
    wait_for(lambda: descriptors(pid) <= most, "descriptors to be closed", service)


def infer(client: Client, count: int) -> None:
    for i in range(count):
        y = client.infer("small", {"x": X + i})["y"]
        assert y[0] == i + 1


@pytest.mark.slow
def test_connections_that_come_and_go_leave_memory_where_it_was(service: Service) -> None:
    process = psutil.Process(service.process.pid)

    def come_and_go(count: int) -> None:
        for _ in range(count):
            with service.client() as client, client.region(1 << 16) as region:
                x = region.array("float32", (SIZE,))
                x[:] = X
                np.testing.assert_array_equal(client.infer("small", {"x": x})["y"], 2 * X + 1)

    come_and_go(100)
    opened, grown = descriptors(process.pid), list[list[int]]()
    while len(grown) < 10 and not is_steady(grown):
        before = memory(process.pid)
        come_and_go(130)
        grown.append([memory(process.pid) - before])
    assert is_steady(grown), grown
    wait_closed(process.pid, opened, service)
