"""Many inferences leave memory and descriptors where they were."""

from __future__ import annotations

import numpy as np
import psutil
import pytest

from honed.runtime import Client
from tests.daemon.conftest import SIZE
from tests.daemon.running import Service, descriptors, memory

pytestmark = [pytest.mark.service, pytest.mark.opencl]
X = np.arange(SIZE, dtype=np.float32)


@pytest.mark.slow
def test_ten_thousand_inferences_leave_memory_where_it_was(service: Service) -> None:
    worker = service.worker
    assert worker is not None
    processes = [psutil.Process(service.process.pid), worker]

    def held() -> list[tuple[int, int]]:
        return [(memory(process.pid), descriptors(process.pid)) for process in processes]

    with service.client() as client:
        infer(client, 1000)
        before = held()
        infer(client, 9000)
        after = held()
    for (bytes_before, open_before), (bytes_after, open_after) in zip(before, after, strict=True):
        assert bytes_after - bytes_before < 2 << 20
        assert open_after == open_before


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
    before, open_files = memory(process.pid), descriptors(process.pid)
    come_and_go(400)
    assert memory(process.pid) - before < 2 << 20
    assert abs(descriptors(process.pid) - open_files) <= 2  # the last connection may still be closing
