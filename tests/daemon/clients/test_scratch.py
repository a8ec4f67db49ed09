"""Large tensors, which clients hand over in shared memory by themselves."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.protocol import methods
from honed.protocol.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted
from honed.runtime import AsyncClient, Client
from honed.runtime.calling.shared_memory import LARGE, MEMORY, MOST_SENT, Region, Scratch, region_bytes
from tests.daemon.running import Service, descriptors, wait_for
from tests.runtime.builder import add_constant

N = 1 << 16
X = np.linspace(-3, 4, N, dtype=np.float32)
Y = X + np.arange(N, dtype=np.float32)


@pytest.fixture(scope="module")
def large(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Service:
    """The service with a second model, which has more than LARGE bytes in and out."""
    with service.client() as client:
        client.add(add_constant(N).write(tmp_path_factory.mktemp("models") / "large.honed"))
    return service


@pytest.fixture
def loaded(large: Service) -> Iterator[Client]:
    """A client of a service that has the large model, too."""
    with large.client() as client:
        yield client


def placed(client: Client, model: str = "large") -> int:
    """How many regions the service knows of this connection."""
    return len(client.ask(methods.SHARED_MEMORY_STATUS).regions)


def test_what_is_too_large_is_told_the_limit_that_it_meets() -> None:
    """Not that of messages, where it is shared memory that cannot be had."""
    scratch, short = Scratch(), ResourceExhausted("there is no memory for a region")
    scratch.check_sendable([MOST_SENT], short)
    scratch.check_sendable([MOST_SENT // 2, MOST_SENT // 2], None)
    with pytest.raises(ResourceExhausted, match="there is no memory for a region"):
        scratch.check_sendable([MOST_SENT + 1], short)
    most = MEMORY
    assert scratch.bytes_for("m", [most]) == (0, 0)
    with pytest.raises(ResourceExhausted, match=f"have {most} bytes, and a client shares at most {most}"):
        scratch.check_sendable([most], None)


@pytest.mark.service
@pytest.mark.opencl
class TestService:
    """With a real one."""

    def test_a_region_that_cannot_be_had_is_the_reason_told(
        self, service: Service, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refused(self: Client, nbytes: int) -> Region:
            raise ResourceExhausted(f"no region of {nbytes} bytes")

        monkeypatch.setattr(Client, "_new_region", refused)
        with service.client() as client:
            x = np.zeros(MOST_SENT // 4 + 1, np.float32)
            with pytest.raises(ResourceExhausted, match="no region of"):
                client.infer("small", {"x": x})

    def test_answers_are_right_and_the_callers_own(self, loaded: Client) -> None:
        expected = loaded.infer("large", {"x": X})["y"].copy()
        assert placed(loaded) == 1
        first = loaded.infer("large", {"x": X})["y"]
        second = loaded.infer("large", {"x": X + 1})["y"]
        np.testing.assert_array_equal(first, expected)
        np.testing.assert_array_equal(second - first, (X + 1 + (expected - X)) - expected)
        into = np.empty(N, np.float32)
        assert loaded.infer("large", {"x": X}, outputs={"y": into})["y"] is into
        np.testing.assert_array_equal(into, expected)

    def test_small_requests_take_none(self, loaded: Client) -> None:
        loaded.infer("small", {"x": np.zeros(8, np.float32)})
        assert placed(loaded) == 0

    def test_threads_share_a_client(self, loaded: Client) -> None:
        base = loaded.infer("large", {"x": X})["y"] - X
        wrong: list[int] = []

        def ask(seed: int) -> None:
            x = np.random.default_rng(seed).standard_normal(N).astype(np.float32)
            answers = [loaded.infer("large", {"x": x})["y"] for _ in range(5)]
            wrong.extend(seed for answer in answers if not np.allclose(answer, x + base, rtol=1e-5, atol=0.1))

        threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        loaded.infer("large", {"x": X})
        assert placed(loaded) <= 6

    def test_a_refused_request_costs_no_region(self, loaded: Client) -> None:
        for _ in range(20):
            with pytest.raises(InvalidArgument, match="FP64"):
                loaded.infer("large", {"x": X.astype(np.float64)})
        right = loaded.infer("large", {"x": X})["y"]
        np.testing.assert_array_equal(loaded.infer("large", {"x": X})["y"], right)
        assert placed(loaded) <= 2
        assert len(loaded._regions) <= 2

    def test_a_request_whose_time_passed_gives_its_region_up(self, service: Service, loaded: Client) -> None:
        """The worker is stopped meanwhile: its answer could come before the deadline is seen."""
        right = loaded.infer("large", {"x": X})["y"]
        worker = service.worker
        assert worker is not None
        worker.suspend()
        try:
            with pytest.raises(DeadlineExceeded):
                loaded.infer("large", {"x": X}, timeout=0.01)
        finally:
            worker.resume()
        np.testing.assert_array_equal(loaded.infer("large", {"x": X})["y"], right)

    def test_goes_on_with_a_service_that_was_restarted(self, service: Service, loaded: Client) -> None:
        right = loaded.infer("large", {"x": X})["y"]
        loaded.infer("large", {"x": X})
        service.kill()
        service.restart()
        service.wait_listening()
        service.wait_ready()
        np.testing.assert_array_equal(loaded.infer("large", {"x": X})["y"], right)

    def test_a_service_that_takes_no_more_regions_gets_tensors_sent(self, loaded: Client) -> None:
        right = loaded.infer("large", {"x": X})["y"]
        loaded.close()
        with contextlib.ExitStack() as held:
            limit = loaded.metadata()["limits"]["max_regions"]
            for _ in range(limit - placed(loaded)):
                held.enter_context(loaded.region(4096))
            np.testing.assert_array_equal(loaded.infer("large", {"x": X})["y"], right)
            assert not loaded._scratch.take(1)

    def test_closed_clients_keep_no_descriptors(self, service: Service, loaded: Client) -> None:
        for _ in range(3):
            loaded.infer("large", {"x": X})  # it has the regions that it may keep
        own, theirs = descriptors(os.getpid()), descriptors(service.process.pid)
        for _ in range(3):
            with service.client() as client:
                client.infer("large", {"x": X})
            Client(str(service.socket)).infer("large", {"x": X})  # and not closed
        gc.collect()
        assert descriptors(os.getpid()) <= own
        loaded.infer("large", {"x": X})
        wait_for(lambda: descriptors(service.process.pid) <= theirs, "the service to close theirs", service)

    def test_asynchronous_ones_too(self, service: Service, loaded: Client) -> None:
        base = loaded.infer("large", {"x": X})["y"] - X

        async def many() -> None:
            async with AsyncClient(service.socket) as client:
                answers = await asyncio.gather(*(client.infer("large", {"x": X + i}) for i in range(8)))
                for i, answer in enumerate(answers):
                    np.testing.assert_allclose(answer["y"], X + i + base, rtol=1e-5, atol=0.1)
                cancelled = asyncio.ensure_future(client.infer("large", {"x": X}))
                await asyncio.sleep(0)
                cancelled.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await cancelled
                np.testing.assert_allclose(
                    (await client.infer("large", {"x": X}))["y"], X + base, rtol=1e-5, atol=0.1
                )

        asyncio.run(many())


@given(st.lists(st.integers(1, 1 << 22), min_size=1, max_size=12))
def test_regions_are_reused_and_few_lie_ready(sizes: list[int]) -> None:
    scratch, made = Scratch(), 0
    for size in sizes:
        region = scratch.take(size)
        if region is None:
            made += 1
            region = Region(f"r{made}", region_bytes(size))
        assert region.nbytes >= size
        with scratch.lend(region):
            assert region not in scratch._free
    assert made <= len({region_bytes(size) for size in sizes})
    scratch.close()
    assert len(list(scratch.take_dropped())) == made


def test_what_a_request_needs_is_learned_from_answers() -> None:
    scratch = Scratch()
    assert scratch.bytes_for("m", [100]) == (0, 0)
    scratch.note_sizes("m", [LARGE])
    given_bytes, room = scratch.bytes_for("m", [100])
    assert given_bytes >= 100
    assert room >= LARGE
    assert scratch.bytes_for("other", [100]) == (0, 0)
    assert scratch.bytes_for("m", [1 << 40]) == (0, 0)
