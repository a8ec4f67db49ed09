"""A real daemon, from add to remove: right answers, clear errors, shared memory, both clients."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import numpy as np
import pytest

from honed.runtime import AsyncClient, Client
from honed.runtime.compiled.model import Probe, Proof
from honed.runtime.errors import (
    AlreadyExists,
    DeadlineExceeded,
    InvalidArgument,
    ModelFileError,
    ModelRefused,
    NotFound,
)
from tests.daemon.conftest import SIZE
from tests.daemon.running import Service, descriptors, wait_for
from tests.runtime.builder import Builder, add_constant, chain

pytestmark = [pytest.mark.service, pytest.mark.opencl]
X = np.linspace(-3, 4, SIZE, dtype=np.float32)
Y = X + np.arange(SIZE, dtype=np.float32) + 1


def test_infers_and_describes_itself(client: Client) -> None:
    np.testing.assert_array_equal(client.infer("small", {"x": X})["y"], Y)
    assert client.live()
    assert client.ready()
    assert client.ready("small")
    [listed] = client.models()
    assert (listed["name"], listed["version"], listed["state"]) == ("small", "1", "READY")
    assert (listed["engine"], listed["reason"]) == ("gpu", "")
    metadata = client.metadata("small")
    assert metadata["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [SIZE]}]
    assert metadata["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [SIZE]}]
    assert client.metadata()["limits"]["max_unanswered"] == 64


def test_outputs_are_the_callers_own(client: Client) -> None:
    y = client.infer("small", {"x": X})["y"]
    y += 1
    np.testing.assert_array_equal(client.infer("small", {"x": X})["y"], Y)


def test_accepts_lists_strided_and_big_endian_arrays(client: Client) -> None:
    wide = np.repeat(X, 2)
    np.testing.assert_array_equal(client.infer("small", {"x": wide[::2]})["y"], Y)
    np.testing.assert_array_equal(client.infer("small", {"x": X.astype(">f4")})["y"], Y)
    with pytest.raises(InvalidArgument, match="FP64"):
        client.infer("small", {"x": [1.0] * SIZE})


def test_shows_where_a_model_comes_from(client: Client) -> None:
    shown = client.show("small")
    assert shown["source"]["producer"] == "tests"
    assert [kernel["launches"] for kernel in shown["kernels"]] == [1, 1]
    assert shown["launches"] == 2
    assert shown["state"] == "READY"
    assert shown["proof"] is None


def test_profiles_every_kernel(client: Client) -> None:
    profile = client.profile("small", runs=3)
    assert {row["name"] for row in profile["rows"]} == {"add", "increment"}
    assert profile["runs"] == 3
    assert profile["sum_us"] == pytest.approx(sum(row["us"] for row in profile["rows"]))
    assert sum(row["share"] for row in profile["rows"]) == pytest.approx(1)
    with pytest.raises(InvalidArgument, match="runs"):
        client.profile("small", runs=0)


def test_counts_what_it_served(client: Client) -> None:
    before = client.statistics("small")[0]
    client.infer("small", {"x": X})
    with pytest.raises(InvalidArgument):
        client.infer("small", {"x": X * np.nan}, finite=True)
    after = client.statistics("small")[0]
    assert after["inference_count"] == before["inference_count"] + 1
    assert after["inference_stats"]["fail"]["count"] == before["inference_stats"]["fail"]["count"] + 1
    assert after["inference_stats"]["compute_infer"]["ns"] > before["inference_stats"]["compute_infer"]["ns"]


def test_carries_tensors_without_numpy(client: Client, service: Service) -> None:
    client.infer("small", {"x": X})
    client.status()
    assert "numpy" not in Path(f"/proc/{service.process.pid}/maps").read_text()


def test_status_names_the_device_and_the_worker(client: Client, service: Service) -> None:
    status = client.status()
    assert status["worker"]["state"] == "ready"
    assert service.worker is not None
    assert status["worker"]["pid"] == service.worker.pid
    assert status["device"]["name"]
    assert status["peaks"]["fp32_gflops"] > 0
    assert status["models"]["READY"] >= 1
    assert status["pid"] == service.process.pid


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "input 'x' is missing"),
        ({"x": X, "z": X}, "no input 'z'"),
        ({"x": X[:3]}, r"shape \[3\]"),
        ({"x": X.reshape(1, -1)}, r"shape \[1, 8\]"),
        ({"x": X.astype(np.int32)}, "INT32"),
    ],
)
def test_refuses_wrong_inputs(client: Client, inputs: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        client.infer("small", inputs)


def test_not_a_number_passes_unless_refused(client: Client) -> None:
    holed = X.copy()
    holed[3] = np.nan
    assert np.isnan(client.infer("small", {"x": holed})["y"][3])
    with pytest.raises(InvalidArgument, match="NaN"):
        client.infer("small", {"x": holed}, finite=True)


def test_unknown_models_and_outputs(client: Client) -> None:
    with pytest.raises(NotFound, match="there is no model 'nope'"):
        client.infer("nope", {"x": X})
    with pytest.raises(NotFound):
        client.show("nope")
    with pytest.raises(NotFound):
        client.remove("nope")
    with pytest.raises(InvalidArgument, match="no output 'q'"):
        client.infer("small", {"x": X}, outputs=["q"])


def test_shared_memory_both_ways(client: Client) -> None:
    with client.region(1 << 16) as region:
        x, y = region.array("float32", (SIZE,)), region.array("float32", (SIZE,))
        for factor in (1, 2, 3):
            x[:] = X * factor
            out = client.infer("small", {"x": x}, outputs={"y": y})
            assert out["y"] is y
            np.testing.assert_array_equal(y, X * factor + np.arange(SIZE) + 1)
    np.testing.assert_array_equal(client.infer("small", {"x": X})["y"], Y)


def test_results_into_arrays_of_the_caller(client: Client) -> None:
    y = np.zeros(SIZE, np.float32)
    assert client.infer("small", {"x": X}, outputs={"y": y})["y"] is y
    np.testing.assert_array_equal(y, Y)
    with pytest.raises(InvalidArgument, match="make them equal"):
        client.infer("small", {"x": X}, outputs={"y": np.zeros(3, np.float32)})


def test_regions_leave_nothing_behind(client: Client, service: Service) -> None:
    worker = service.worker
    assert worker is not None

    def held() -> tuple[int, int, int]:
        mapped = sum("memfd:honed" in m.path for m in worker.memory_maps(grouped=False))
        return descriptors(service.process.pid), descriptors(worker.pid), mapped

    def gone() -> bool:
        """What was there before may go, too, as of a process that has built something."""
        return all(now <= then for now, then in zip(held(), before, strict=True))

    with client.region(1 << 16) as region:
        client.infer("small", {"x": region.array("float32", (SIZE,))})
    wait_for(lambda: held()[2] == 0, "the first mapping to go")
    before = held()
    for _ in range(20):
        with client.region(1 << 16) as region:
            client.infer("small", {"x": region.array("float32", (SIZE,))})
    wait_for(gone, "descriptors and mappings to go")
    for _ in range(20):
        other = service.client()
        with other.region(1 << 16) as region:
            other.infer("small", {"x": region.array("float32", (SIZE,))})
            other.close()  # the service forgets regions with their connection
    wait_for(gone, "descriptors and mappings to go with the connection")


def test_add_refuses_what_is_taken_and_replaces_when_told(
    client: Client, small_model: Path, tmp_path: Path
) -> None:
    with pytest.raises(AlreadyExists, match="'small'"):
        client.add(small_model, name="small")
    client.add(small_model, name="twin")  # the same file under a second name
    other = chain(3, SIZE).write(tmp_path / "chain.honed")
    client.add(other, name="twin", replace=True)
    np.testing.assert_array_equal(client.infer("twin", {"x": X})["y"], X + 3)
    np.testing.assert_array_equal(client.infer("small", {"x": X})["y"], Y)
    client.remove("twin")
    with pytest.raises(NotFound):
        client.infer("twin", {"x": X})


def test_add_refuses_bad_names_and_files(client: Client, small_model: Path, tmp_path: Path) -> None:
    for name in ("", "-a", "a/b", "a" * 65, "ä"):
        with pytest.raises(InvalidArgument):
            client.add(small_model, name=name)
    with pytest.raises(NotFound):
        client.add(tmp_path / "absent.onnx")
    with pytest.raises(InvalidArgument, match="compiled already"):
        client.add(small_model, name="shaped", shapes={"x": (3,)})
    broken = bytearray(small_model.read_bytes())
    broken[-1] ^= 1
    (tmp_path / "broken.honed").write_bytes(broken)
    with pytest.raises(ModelFileError, match="damaged"):
        client.add(tmp_path / "broken.honed")
    assert [m["name"] for m in client.models()] == ["small"]


def test_a_model_with_wrong_answers_is_not_served(client: Client, tmp_path: Path) -> None:
    builder = add_constant(SIZE)
    given, wanted = builder.constant(X), builder.constant(Y + 0.5)
    probe = Probe(inputs=(given,), outputs=(wanted,), tolerance=(1e-3,))
    builder.proof = Proof(reference="by hand", probes=(probe,), device=None, error=())
    path = builder.write(tmp_path / "wrong.honed")
    with pytest.raises(ModelRefused) as refused:
        client.add(path)
    assert any("'y'" in reason for reason in refused.value.reasons)
    assert [m["name"] for m in client.models()] == ["small"]


def test_a_proven_model_shows_what_was_compared(client: Client, tmp_path: Path) -> None:
    builder = add_constant(SIZE)
    given, wanted = builder.constant(X), builder.constant(Y)
    probe = Probe(inputs=(given,), outputs=(wanted,), tolerance=(1e-3,))
    builder.proof = Proof(reference="by hand", probes=(probe,), device=None, error=())
    client.add(builder.write(tmp_path / "proven.honed"))
    shown = client.show("proven")
    assert shown["proof"]["reference"] == "by hand"
    assert shown["checked"]["outputs"] == [{"name": "y", "tolerance": 1e-3, "error": 0.0, "covered": None}]
    client.remove("proven")


def test_a_kernel_that_does_not_build_is_a_clear_error(client: Client, tmp_path: Path) -> None:
    builder = Builder()
    x, y = builder.input("x", "float32", (4,)), builder.output("y", "float32", (4,))
    source = "__kernel void broken(__global const float* a, __global float* b) { this is no OpenCL }"
    builder.launch(builder.kernel(source, "broken", "rw", 16, groups=1, block=4), x, y)
    with pytest.raises(ModelRefused, match="cannot run the model") as refused:
        client.add(builder.write(tmp_path / "broken.honed"))
    assert "cannot compile a kernel" in refused.value.reasons[0]
    np.testing.assert_array_equal(client.infer("small", {"x": X})["y"], Y)


def test_clients_at_once_get_their_own_answers(service: Service) -> None:
    failures: list[str] = []

    def ask(number: int) -> None:
        with service.client() as client:
            for i in range(50):
                x = np.full(SIZE, 1000 * number + i, np.float32)
                if not np.array_equal(client.infer("small", {"x": x})["y"], x + np.arange(SIZE) + 1):
                    failures.append(f"client {number}, request {i}")

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_threads_share_one_client(client: Client) -> None:
    failures: list[int] = []

    def ask(number: int) -> None:
        for i in range(25):
            x = np.full(SIZE, 1000 * number + i, np.float32)
            if not np.array_equal(client.infer("small", {"x": x})["y"], x + np.arange(SIZE) + 1):
                failures.append(number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_models_come_and_go_while_clients_infer(service: Service, small_model: Path) -> None:
    stop, answered, failures = threading.Event(), [0], list[Exception]()
    before: list[int] = []

    def ask() -> None:
        with service.client() as client:
            while not stop.is_set():
                try:
                    np.testing.assert_array_equal(client.infer("small", {"x": X})["y"], Y)
                except Exception as error:  # noqa: BLE001 - shown by the assertion below
                    failures.append(error)
                answered[0] += 1

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        with service.client() as client:
            for _ in range(2):
                client.add(small_model, name="guest")
                client.infer("guest", {"x": X})
                client.remove("guest")
                before.append(answered[0])
                wait_for(lambda: answered[0] > before[-1], "it to go on", service)
    finally:
        stop.set()
        thread.join()
    assert not failures


def test_deadlines(client: Client, service: Service) -> None:
    """The worker is stopped meanwhile: its answer could come before the deadline is seen."""
    client.infer("small", {"x": X})
    worker = service.worker
    assert worker is not None
    worker.suspend()
    try:
        with pytest.raises(DeadlineExceeded, match="while it ran"):
            client.infer("small", {"x": X}, timeout=0.01)
    finally:
        worker.resume()
    np.testing.assert_array_equal(client.infer("small", {"x": X})["y"], Y)


def test_asyncio_client(service: Service, small_model: Path) -> None:
    async def run() -> None:
        async with AsyncClient(service.socket) as client:
            assert await client.live()
            many = [client.infer("small", {"x": X + i}) for i in range(30)]
            for i, out in enumerate(await asyncio.gather(*many)):
                np.testing.assert_allclose(out["y"], Y + i, rtol=1e-6)
            stages: list[str] = []
            await client.add(small_model, name="later", progress=lambda p: stages.append(p["stage"]))
            assert stages[0] == "receive"
            assert stages[-1] == "load"
            async with client.region(4096) as region:
                x = region.array("float32", (SIZE,))
                x[:] = X
                np.testing.assert_array_equal((await client.infer("later", {"x": x}))["y"], Y)
            await client.remove("later")
            with pytest.raises(NotFound):
                await client.show("later")
            assert (await client.status())["queue"] == {"waiting": 0, "running": 0}

    asyncio.run(run())


class Stop(Exception):
    pass


def test_a_failing_progress_callback_cancels_the_addition(service: Service, small_model: Path) -> None:
    def stop(_: object) -> None:
        raise Stop

    async def run() -> None:
        async with AsyncClient(service.socket) as client:
            with pytest.raises(Stop):
                await client.add(small_model, name="stopped-too", progress=stop)
            assert await client.live()

    with service.client() as client:
        with pytest.raises(Stop):
            client.add(small_model, name="stopped", progress=stop)
        asyncio.run(run())
        wait_for(lambda: not client.status()["jobs"], "the additions to end", service)
        # Whether it was in time is a matter of luck; that the model is whole or absent is not.
        for name in {m["name"] for m in client.models()} - {"small"}:
            np.testing.assert_array_equal(client.infer(name, {"x": X})["y"], Y)
            client.remove(name)


def test_cancelled_tasks_leave_the_connection_usable(service: Service) -> None:
    async def run() -> None:
        async with AsyncClient(service.socket) as client:
            tasks = [asyncio.create_task(client.infer("small", {"x": X})) for _ in range(20)]
            await asyncio.sleep(0)
            for task in tasks[::2]:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(r, asyncio.CancelledError) for r in results[::2])
            for result in results[1::2]:
                assert isinstance(result, dict)
                np.testing.assert_array_equal(result["y"], Y)

    asyncio.run(run())
