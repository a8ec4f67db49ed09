"""Clients that want more than their share, or send what costs much: others are served, memory is bounded."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import socket
import stat
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.hostile import compiled

from honed.daemon import listener
from honed.runtime import Client
from honed.runtime.compiled import modelfile
from honed.runtime.errors import InvalidArgument
from tests.daemon import spin
from tests.daemon.conftest import SIZE
from tests.daemon.raw import Raw, packed
from tests.daemon.running import NO_TUNER, Service, wait_for
from tests.runtime.builder import Builder, add_constant, chain

pytestmark = [pytest.mark.service, pytest.mark.opencl]
Starter = Callable[..., Service]
X = np.arange(SIZE, dtype=np.float32)
INFER: dict[str, Any] = {
    "model_name": "small",
    "inputs": [{"name": "x", "datatype": "FP32", "shape": [SIZE]}],
    "raw_input_contents": [X.tobytes()],
}


def peak_mib(service: Service) -> float:
    """Of the daemon's memory since it was forgotten last."""
    status = Path(f"/proc/{service.process.pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 1024


@contextmanager
def little_memory(service: Service, mib: float) -> Iterator[None]:
    """The daemon's memory grows by no more than that."""
    Path(f"/proc/{service.process.pid}/clear_refs").write_text("5")
    before = peak_mib(service)
    yield
    assert peak_mib(service) - before < mib


def test_text_is_bounded_before_it_is_read(service: Service) -> None:
    with little_memory(service, 10), Raw(service.socket) as raw:
        raw.send(packed(1, "ModelInfer", INFER | {"id": "a" * (60 << 20)})[: 8 << 20])
        message = raw.read()
    assert message is not None
    assert message[2]["code"] == "RESOURCE_EXHAUSTED"
    assert "text" in message[2]["message"]


def test_messages_that_were_begun_are_gone_with_their_connection(service: Service) -> None:
    """They are in no account any more: who connects again and again would have many times its share."""
    begun = packed(1, "ModelInfer", INFER | {"raw_input_contents": [bytes(40 << 20)]})[:-1]
    with service.client() as client, little_memory(service, 200):
        for _ in range(5):
            raws = [Raw(service.socket) for _ in range(3)]
            for raw in raws:
                raw.send(begun)
            for raw in raws:
                raw.socket.close()
            wait_for(lambda: client.status()["connections"] == 1, "the connections to be gone", service)


def test_whole_frames_count_for_their_user(start_service: Starter, small_model: Path) -> None:
    """What waits holds its frame's bytes, whatever they were in."""
    service = start_service(config="[limits]\nmax_user_bytes = 2_000_000\nmax_message_bytes = 900_000\n")
    with service.client() as client:
        client.add(small_model, name="small")
    worker = service.worker
    assert worker is not None
    worker.suspend()
    held = [Raw(service.socket) for _ in range(4)]
    ended = 0
    for raw in held:
        frames = [packed(n, "ModelInfer", INFER | {"id": "a" * 250_000}) for n in range(3)]
        for frame in frames:
            try:
                raw.send(frame)
            except BrokenPipeError:
                break
    worker.resume()
    for raw in held:
        answers = [raw.read() for _ in range(3)]
        ended += any(m is not None and m[0] == 2 and m[2][0]["code"] == "RESOURCE_EXHAUSTED" for m in answers)
        raw.socket.close()
    assert ended


def test_a_header_that_would_become_gigabytes_costs_a_child(service: Service) -> None:
    empty = 31 << 20
    with little_memory(service, 200):
        compiled(b"\x81\xa1k\xdd" + empty.to_bytes(4, "big") + b"\x80" * empty)(service)
    with service.client() as client:
        assert [model["name"] for model in client.models()] == ["small"]


def test_a_header_is_bounded_before_it_is_built(tmp_path: Path) -> None:
    path = add_constant(SIZE).write(tmp_path / "m.honed")
    data = path.read_bytes()
    many = 150_000
    header = b"\x81\xa1k\xdd" + struct.pack(">I", many) + (b"\x98" + b"\xc0" * 8) * many
    digest = hashlib.sha256(header).digest()
    body = (
        struct.pack(
            "<8sIIQ32s32s",
            data[:8],
            modelfile.FORMAT_VERSION,
            len(header),
            0,
            digest,
            hashlib.sha256().digest(),
        )
        + header
    )
    path.write_bytes(body + bytes(-len(body) % 4096))
    with pytest.raises(InvalidArgument, match=f"more than {modelfile.MAX_HEADER_VALUES} values"):
        modelfile.read(path)


def test_long_profiles_do_not_lock_out_another_client(start_service: Starter, tmp_path: Path) -> None:
    service = start_service(config="[limits]\nmax_queue = 16\n")
    with service.client() as client:
        client.add(spin.write(tmp_path / "spin.honed", 60_000), name="spin")
        client.add(add_constant(SIZE).write(tmp_path / "small.honed"), name="small")
        greedy = [Raw(service.socket) for _ in range(6)]
        for raw in greedy:
            for msgid in range(8):
                raw.send(packed(msgid, "ModelProfile", {"name": "spin", "parameters": {"runs": 100}}))
        wait_for(lambda: client.status()["queue"]["waiting"] == 16, "the queue to be full", service)
        for _ in range(20):
            np.testing.assert_array_equal(client.infer("small", {"x": X}, priority=1)["y"], 2 * X + 1)
        assert client.status()["queue"]["waiting"] >= 14  # they are not done: others ran in between
        for raw in greedy:
            raw.socket.close()
        wait_for(lambda: client.status()["queue"]["waiting"] == 0, "the profiles to be cancelled", service)


def test_a_profile_in_turns_is_as_before(service: Service) -> None:
    with service.client() as client:
        one, many = client.profile("small", 1), client.profile("small", 7)
    assert (one["runs"], many["runs"]) == (1, 7)
    assert one.keys() == many.keys()
    assert {row["name"] for row in one["rows"]} == {row["name"] for row in many["rows"]}
    assert many["sum_us"] == pytest.approx(sum(row["us"] for row in many["rows"]))
    assert sum(row["share"] for row in many["rows"]) == pytest.approx(1.0)


def test_who_sends_no_more_is_answered(service: Service) -> None:
    for _ in range(20):
        with Raw(service.socket) as raw:
            raw.request("ModelInfer", INFER)
            raw.request("ModelInfer", INFER)
            raw.socket.shutdown(socket.SHUT_WR)
            answers = raw.rest()
        assert sorted(answer[1] for answer in answers) == [1, 2]
        assert all(answer[2] is None for answer in answers)


def test_who_is_gone_has_its_requests_cancelled(service: Service) -> None:
    with service.client() as client:
        worker = service.worker
        assert worker is not None
        worker.suspend()
        try:
            with Raw(service.socket) as raw:
                raw.request("ModelInfer", INFER)
                raw.socket.shutdown(socket.SHUT_WR)
                wait_for(lambda: sum(client.status()["queue"].values()) == 1, "the request", service)
                other = Raw(service.socket)
                other.request("ModelInfer", INFER)
                wait_for(lambda: sum(client.status()["queue"].values()) == 2, "the other", service)
                other.socket.close()
                wait_for(lambda: sum(client.status()["queue"].values()) == 1, "it to be cancelled", service)
        finally:
            worker.resume()
        wait_for(lambda: sum(client.status()["queue"].values()) == 0, "the first to end", service)


def sealed_memfd(nbytes: int, flags: int = 0) -> int:
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    os.ftruncate(descriptor, nbytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return descriptor


def test_memory_that_cannot_be_mapped_is_refused(service: Service) -> None:
    huge = 1 << 62
    descriptor = sealed_memfd(huge)
    with Raw(service.socket) as raw:
        params = {"name": "r", "byte_size": huge}
        error = raw.call("SystemSharedMemoryRegister", params, [descriptor])[2]
    os.close(descriptor)
    assert error["code"] == "INVALID_ARGUMENT"
    assert "cannot be mapped" in error["message"]


def test_memory_that_is_sealed_afterwards_is_the_clients_mistake(service: Service) -> None:
    descriptor = sealed_memfd(4096)
    place = {"shared_memory_region": "r", "shared_memory_byte_size": 4 * SIZE}
    tensor = {"name": "x", "datatype": "FP32", "shape": [SIZE], "parameters": place}
    asked = {"model_name": "small", "inputs": [tensor]}
    with Raw(service.socket) as raw:
        params = {"name": "r", "byte_size": 4096}
        assert raw.call("SystemSharedMemoryRegister", params, [descriptor])[2] is None
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, 0x0010)  # F_SEAL_FUTURE_WRITE
        codes = [raw.call("ModelInfer", asked)[2]["code"] for _ in range(2)]
    os.close(descriptor)
    assert codes == ["INVALID_ARGUMENT"] * 2
    assert "Traceback" not in service.log


@pytest.mark.parametrize(
    ("files", "shapes"),
    [
        (["m.onnx"], {"a\0b": [1]}),
        (["m.onnx"], {"": [1]}),
        (["m.onnx"], {"a" * 2000: [1]}),
        (["m.onnx"], {f"i{i}": [1] for i in range(300)}),
        (["m" * 1000], {}),
        (["a", "a/b"], {}),
    ],
)
def test_names_that_cannot_be_are_invalid(service: Service, files: list[str], shapes: dict[str, Any]) -> None:
    descriptors = [os.memfd_create("model") for _ in files]
    params = {"model_name": "m", "files": files, "parameters": {"shapes": shapes}}
    with Raw(service.socket) as raw:
        error = raw.call("RepositoryModelLoad", params, descriptors)[2]
    for descriptor in descriptors:
        os.close(descriptor)
    assert error["code"] == "INVALID_ARGUMENT", error


def test_outputs_larger_than_an_answer_are_refused_before_they_are_computed(
    start_service: Starter, tmp_path: Path
) -> None:
    from .test_hardening import wide_model

    service = start_service(config="[limits]\nmax_message_bytes = 100_000\n")
    with service.client() as client:
        client.add(wide_model(tmp_path), name="wide")
        given = np.ones(1, np.float32)
        inputs = [{"name": "x", "datatype": "FP32", "shape": [1]}]
        params = {"model_name": "wide", "inputs": inputs, "raw_input_contents": [given.tobytes()]}
        with Raw(service.socket) as raw:
            error = raw.call("ModelInfer", params)[2]
        assert (error["code"], error["type"]) == ("RESOURCE_EXHAUSTED", "AnswerTooLarge"), error
        assert "shared memory" in error["message"]
        assert 400_000 <= error["byte_size"] < 410_000
        assert client.statistics("wide")[0]["inference_count"] == 0
        # honed's own clients then place them there.
        assert client.infer("wide", {"x": given})["y"].shape == (100_000,)
        assert client.statistics("wide")[0]["inference_count"] == 1


def test_what_the_service_writes_is_for_nobody_else(tmp_path: Path, cache_dir: Path) -> None:
    from tests.daemon.running import start

    (tmp_path / "cache").mkdir(mode=0o700)
    peaks = shutil.copytree(cache_dir / "peaks", tmp_path / "cache" / "peaks")  # measuring takes seconds
    service = start(
        tmp_path / "state", tmp_path / "cache", prefix=("/bin/sh", "-c", 'umask 000; exec "$@"', "sh")
    )
    try:
        with service.client() as client:
            client.add(chain(1, SIZE).write(tmp_path / "m.honed"), name="m")
            client.infer("m", {"x": X})
        written = [*(tmp_path / "state").rglob("*"), *(tmp_path / "cache").rglob("*")]
        assert written
        written = [path for path in written if not path.is_relative_to(peaks)]
        open_to_others = [path for path in written if stat.S_IMODE(path.lstat().st_mode) & 0o077]
        assert open_to_others == []
    finally:
        service.stop()


@pytest.mark.slow
def test_inputs_are_not_kept_where_nobody_wants_that(start_service: Starter, tmp_path: Path) -> None:
    """A version that is wrong for a client's input only is not found out: it was compared on zeros."""
    service = start_service(config="[usage]\nkeep_inputs = false\n")
    given = np.full(spin.SIZE, 5.0, np.float32)
    with service.client() as client:
        client.add(spin.write(tmp_path / "slow.honed", 60_000), name="spin")
        client.infer("spin", {"x": given})
        served = client.show("spin")["sha256"]
        wrong = spin.write(tmp_path / "wrong.honed", 10, "if (x[0] > 4.0f) y[i] = 0.0f;")
        assert client.publish("spin", wrong, expected=served, why="test")["published"]


@pytest.mark.slow
def test_a_large_tensor_makes_the_way_there_and_back(start_service: Starter, tmp_path: Path) -> None:
    """Data is decoded and sent without copies, wherever a reading cuts it."""
    n = 3 << 20
    path = large_model(tmp_path, n)
    service = start_service()
    with service.client() as client:
        client.add(path, name="large")
        for seed in range(3):
            given = np.random.default_rng(seed).random(n, np.float32)
            np.testing.assert_array_equal(client.infer("large", {"x": given})["y"], given + 1)


def large_model(folder: Path, n: int) -> Path:
    builder = Builder()
    x, y = builder.input("x", "float32", (n,)), builder.output("y", "float32", (n,))
    source = """__kernel void inc(__global const float* a, __global float* b) {
      int i = get_global_id(0); b[i] = a[i] + 1.0f; }"""
    builder.launch(builder.kernel(source, "inc", "rw", 4 * n, groups=n // 256, block=256), x, y)
    return builder.write(folder / "large.honed")


def test_clients_side_by_side_get_their_own(service: Service) -> None:
    """Many connections of one process take turns, and each gets its answers."""
    wrong: list[object] = []

    def ask(number: int) -> None:
        with Client(service.socket) as client:
            for _ in range(20):
                given = X + number
                if not np.array_equal(client.infer("small", {"x": given})["y"], given + X + 1):
                    wrong.append(number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_who_is_refused_and_gone_already_needs_no_reason(service: Service) -> None:
    service.configure("[limits]\nmax_user_connections = 2\n" + NO_TUNER)
    held = [Raw(service.socket) for _ in range(2)]
    for _ in range(300):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connecting:
            connecting.connect(str(service.socket))
    assert held[0].call("ServerLive", {})[2] is None
    for raw in held:
        raw.socket.close()
    wait_for(service.answers, "room for others", service)
    service.configure(NO_TUNER)
    assert "Traceback" not in service.log


def test_the_socket_is_open_to_all_from_its_first_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everybody may connect: who may do what is decided by request."""
    monkeypatch.setattr(Path, "chmod", None)
    before = os.umask(0o077)
    try:
        with listener.listen(tmp_path / "s"):
            assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o666
    finally:
        assert os.umask(before) == 0o077
