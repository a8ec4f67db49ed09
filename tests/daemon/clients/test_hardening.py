"""Clients that break every rule: they get an error or are dropped, and nobody else notices."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from honed.runtime.errors import ResourceExhausted
from tests.daemon.conftest import SIZE
from tests.daemon.raw import Raw, packed
from tests.daemon.running import (
    DEADLINE,
    NO_TUNER,
    Made,
    Service,
    descriptors,
    memory,
    serving,
    state_with,
    wait_for,
)
from tests.runtime.builder import Builder

pytestmark = [pytest.mark.service, pytest.mark.opencl]
X = np.arange(SIZE, dtype=np.float32)
INFER: dict[str, Any] = {
    "model_name": "small",
    "inputs": [{"name": "x", "datatype": "FP32", "shape": [SIZE]}],
    "raw_input_contents": [X.tobytes()],
}
CONFIG = """
[limits]
max_message_bytes = 1_000_000
max_user_bytes = 4_000_000
max_user_connections = 40
message_seconds = 5.0
write_seconds = 1.0
max_unanswered = 8
max_regions = 4
"""


@pytest.fixture(scope="module")
def service(
    tmp_path_factory: pytest.TempPathFactory, cache_dir: Path, made_once: Made, small_model: Path
) -> Iterator[Service]:
    """A daemon with tight limits."""
    stored = state_with(made_once, small_model, cache_dir)
    with serving(tmp_path_factory, cache_dir, config=CONFIG, stored=stored) as running:
        with running.client() as client:
            client.add(wide_model(tmp_path_factory.mktemp("wide")), name="wide")
        yield running


def wide_model(folder: Path) -> Path:
    """One number in, 400,000 bytes out."""
    builder = Builder()
    x, y = builder.input("x", "float32", (1,)), builder.output("y", "float32", (100_000,))
    source = (
        "__kernel void spread(__global const float* a, __global float* b) { b[get_global_id(0)] = a[0]; }"
    )
    builder.launch(builder.kernel(source, "spread", "rw", 4, groups=100_000, block=1), x, y)
    return builder.write(folder / "wide.honed")


@pytest.fixture(autouse=True)
def nothing_leaks(service: Service) -> Iterator[None]:
    """After each test the service answers others, holds no more descriptors, and logged no traceback."""
    wait_for(lambda: connections(service) == 1, "earlier connections to end")
    before = descriptors(service.process.pid)
    yield
    wait_for(lambda: connections(service) == 1, "the connections to end", service)
    with service.client() as client:
        np.testing.assert_array_equal(client.infer("small", {"x": X})["y"], 2 * X + 1)
    wait_for(lambda: descriptors(service.process.pid) <= before, "descriptors to be closed", service)
    assert service.process.poll() is None
    assert "Traceback" not in service.log


def connections(service: Service) -> int:
    """How many there are, this one included; 0 where one more is too many."""
    with contextlib.suppress(ResourceExhausted), service.client() as client:
        return int(client.status()["connections"])
    return 0


def error_code(messages: list[list[Any]], msgid: int | None = None) -> str:
    """The code of the one error that ended a connection."""
    assert len(messages) == 1, messages
    if msgid is None:
        kind, method, [params] = messages[0]
        assert (kind, method) == (2, "Error")
        return str(params["code"])
    kind, answered, error, result = messages[0]
    assert (kind, answered, result) == (1, msgid, None)
    return str(error["code"])


@pytest.mark.parametrize(
    ("data", "code", "msgid"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "INVALID_ARGUMENT", None),
        (b"\x94\x00\x05\xa1m\x91\x81\xa1a\xc6\x7f\xff\xff\xff", "RESOURCE_EXHAUSTED", 5),
        (b"\x94\x00\x05\xa1m\x91\x81\xa1a\xdd\x7f\xff\xff\xff", "RESOURCE_EXHAUSTED", 5),
        (b"\x94\x00\x05\xa1m" + b"\x91" * 50, "INVALID_ARGUMENT", 5),
        (b"\x94\x00\x05\xa1m\x91\xc1", "INVALID_ARGUMENT", 5),
        (b"\x94\x00\x05\xa1m\x91\x81\xa1\xff\x00", "INVALID_ARGUMENT", 5),
        (b"\x94\x01\x05\xc0\xc0", "INVALID_ARGUMENT", None),  # a response nobody asked for
        (b"\x93\x02\xa8Surprise\x91\x80", "INVALID_ARGUMENT", None),
        (b"\xdd\xff\xff\xff\xff", "INVALID_ARGUMENT", None),
    ],
)
def test_broken_messages_end_the_connection_with_a_reason(
    service: Service, data: bytes, code: str, msgid: int | None
) -> None:
    with Raw(service.socket) as raw:
        raw.send(data)
        assert error_code(raw.rest(), msgid) == code


def test_a_message_that_is_too_large_is_answered_though_the_client_goes_on_sending(service: Service) -> None:
    with Raw(service.socket) as raw:
        raw.send(packed(9, "ModelInfer", {"raw_input_contents": [bytes(3_000_000)]}))
        assert error_code(raw.rest(), 9) == "RESOURCE_EXHAUSTED"


def test_wrong_calls_leave_the_connection_open(service: Service) -> None:
    with Raw(service.socket) as raw:
        assert raw.call("Nonsense", {})[2]["code"] == "UNIMPLEMENTED"
        assert raw.call("ModelInfer", {"surprise": 1})[2]["code"] == "INVALID_ARGUMENT"
        assert raw.call("ModelReady", {"name": "small", "version": "7"})[2]["code"] == "NOT_FOUND"
        assert (
            raw.call("SystemSharedMemoryRegister", {"name": "r", "byte_size": 8})[2]["code"]
            == "INVALID_ARGUMENT"
        )
        assert (
            raw.call("RepositoryModelLoad", {"model_name": "m", "files": []})[2]["code"] == "INVALID_ARGUMENT"
        )
        for wrong in (
            {**INFER, "raw_input_contents": []},
            {**INFER, "raw_input_contents": [X.tobytes(), b""]},
            {**INFER, "raw_input_contents": [X.tobytes()[:-1]]},
            {**INFER, "inputs": INFER["inputs"] * 2},
            {**INFER, "parameters": {"timeout": 0}},
            {**INFER, "parameters": {"priority": 9}},
        ):
            assert raw.call("ModelInfer", wrong)[2]["code"] == "INVALID_ARGUMENT"
        assert raw.call("ModelInfer", INFER)[3]["raw_output_contents"] == [(2 * X + 1).tobytes()]


def test_an_unanswered_number_cannot_be_used_again(service: Service) -> None:
    with Raw(service.socket) as raw:
        raw.send(packed(3, "ModelInfer", INFER) * 2)
        assert error_code([m for m in raw.rest() if m[0] == 2]) == "INVALID_ARGUMENT"


def test_pipelined_requests_in_one_piece_and_in_single_bytes(service: Service) -> None:
    data = b"".join(packed(i, "ModelInfer", INFER) for i in range(30))
    with Raw(service.socket) as raw:
        raw.send(data)
        assert sorted(raw.read()[1] for _ in range(30)) == list(range(30))  # type: ignore[index]
        for byte in packed(99, "ServerLive", {}):
            raw.send(bytes([byte]))
        assert raw.read() == [1, 99, None, {"live": True}]


def test_dying_in_the_middle_of_a_message(service: Service) -> None:
    whole = packed(1, "ModelInfer", INFER)
    for cut in range(1, len(whole), 7):
        with Raw(service.socket) as raw:
            raw.send(whole[:cut])


def test_dying_while_the_request_runs(service: Service) -> None:
    for _ in range(10):
        with Raw(service.socket) as raw:
            for i in range(5):
                raw.send(packed(i, "ModelInfer", INFER))


def test_one_byte_a_second_is_dropped_after_the_time_for_a_message(service: Service) -> None:
    with Raw(service.socket) as raw, Raw(service.socket) as other:
        begun = time.monotonic()
        raw.send(b"\x94")
        raw.socket.settimeout(0.1)
        got = b""
        while time.monotonic() < begun + DEADLINE and not got:
            try:
                got = raw.socket.recv(1000)
            except TimeoutError:
                raw.send(b"\x00" if time.monotonic() < begun + 0.3 else b"")
            assert other.call("ServerLive", {})[3] == {"live": True}
        assert 4.9 < time.monotonic() - begun < DEADLINE
        kind, _, [params] = msgpack.unpackb(got)
        assert (kind, params["code"]) == (2, "DEADLINE_EXCEEDED")


def test_a_message_announced_larger_than_sent_is_dropped_in_time(service: Service) -> None:
    with Raw(service.socket) as raw:
        raw.send(packed(4, "ModelInfer", {"raw_input_contents": [bytes(500_000)]})[:-1])
        assert error_code(raw.rest()) == "DEADLINE_EXCEEDED"


def test_never_reading_is_dropped_and_costs_no_memory(service: Service) -> None:
    before = memory(service.process.pid)
    request = {
        "model_name": "wide",
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [1]}],
        "raw_input_contents": [b"\0\0\0\0"],
    }
    with Raw(service.socket) as raw:
        raw.socket.settimeout(0.2)
        end = time.monotonic() + DEADLINE
        try:
            for i in range(100_000):
                raw.send(packed(i, "ModelInfer", request))
                assert time.monotonic() < end
        except TimeoutError:
            pass  # the service reads no further
        except (BrokenPipeError, ConnectionResetError):
            return
        assert memory(service.process.pid) - before < 40 << 20
        wait_for(lambda: connections(service) == 1, "the silent client to be dropped", service)


def test_unanswered_requests_are_bounded(service: Service) -> None:
    """Beyond max_unanswered nothing more is read, and everything is answered in the end."""
    with Raw(service.socket) as raw:
        data = b"".join(packed(i, "ModelInfer", INFER) for i in range(300))
        sender = threading.Thread(target=raw.send, args=(data,))
        sender.start()
        answers = [raw.read() for _ in range(300)]
        sender.join()
    assert sorted(answer[1] for answer in answers if answer) == list(range(300))
    assert all(answer and answer[2] is None for answer in answers)


def test_a_user_cannot_hold_more_than_its_share(service: Service) -> None:
    """Many connections that each hold a large unfinished message, and have long for the rest of it."""
    service.configure(CONFIG.replace("message_seconds = 5.0", "message_seconds = 600.0") + NO_TUNER)
    raws = [Raw(service.socket) for _ in range(8)]

    def refused() -> list[Raw]:
        told, _, _ = select.select([raw.socket for raw in raws], [], [], 0)
        return [raw for raw in raws if raw.socket in told]

    try:
        for raw in raws:
            raw.send(packed(1, "ModelInfer", {"raw_input_contents": [bytes(990_000)]})[:-1])
        wait_for(lambda: len(refused()) >= 3, "those that would be too much to be refused", service)
        codes = [message[2][0]["code"] for raw in refused() for message in raw.rest()]
        assert set(codes) == {"RESOURCE_EXHAUSTED"}
        assert len(refused()) <= 5, "4 million bytes are the others' share"
    finally:
        for raw in raws:
            raw.socket.close()
        service.configure(CONFIG + NO_TUNER)


def test_too_many_connections_are_refused_with_a_reason(service: Service) -> None:
    raws = [Raw(service.socket) for _ in range(39)]
    try:
        for raw in raws:
            raw.call("ServerLive", {})
        with Raw(service.socket) as one_more:
            one_more.call("ServerLive", {})
            with Raw(service.socket) as refused:
                assert error_code(refused.rest()) == "RESOURCE_EXHAUSTED"
    finally:
        for raw in raws:
            raw.socket.close()


def test_descriptors_nobody_asked_for_are_closed(service: Service) -> None:
    with open("/dev/null") as null, Raw(service.socket) as raw:
        raw.call("ServerLive", {})  # so that the connection is accepted and counted
        before = descriptors(service.process.pid)
        for _ in range(20):
            raw.call("ServerLive", {}, [null.fileno()] * 8)
        raw.send(packed(77, "ServerLive", {})[:3], [null.fileno()] * 8)  # with half a message
        raw.send(packed(77, "ServerLive", {})[3:])
        assert raw.read() == [1, 77, None, {"live": True}]
        wait_for(lambda: descriptors(service.process.pid) <= before, "descriptors to be closed", service)


def test_descriptors_with_half_a_message_are_closed_when_the_client_dies(service: Service) -> None:
    with open("/dev/null") as null, Raw(service.socket) as raw:
        raw.call("ServerLive", {})
        raw.send(packed(1, "SystemSharedMemoryRegister", {})[:5], [null.fileno()] * 16)


def test_more_descriptors_than_allowed_end_the_connection(service: Service) -> None:
    with open("/dev/null") as null, Raw(service.socket) as raw:
        raw.send(packed(1, "ServerLive", {})[:4], [null.fileno()] * 100)
        assert error_code(raw.rest()) == "RESOURCE_EXHAUSTED"


def memfd(size: int, *, sealed: bool = True) -> int:
    import fcntl

    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    if sealed:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return descriptor


def in_region(name: str, offset: int, size: int = 4 * SIZE) -> dict[str, Any]:
    place = {
        "shared_memory_region": name,
        "shared_memory_offset": offset,
        "shared_memory_byte_size": size,
    }
    return {**INFER, "inputs": [{**INFER["inputs"][0], "parameters": place}], "raw_input_contents": []}


def test_regions_that_lie(service: Service) -> None:
    good, bad = memfd(8192), memfd(8192, sealed=False)
    try:
        with Raw(service.socket) as raw:
            register = "SystemSharedMemoryRegister"
            refused = [
                raw.call(register, {"name": "r", "byte_size": 8192}, [bad]),
                raw.call(register, {"name": "r", "byte_size": 8193}, [good]),
                raw.call(register, {"name": "r", "byte_size": 2**62, "offset": 4096}, [good]),
                raw.call(register, {"name": "r", "byte_size": 8}, [good, good]),
                raw.call(register, {"name": "r", "byte_size": 8}, [raw.socket.fileno()]),
                raw.call(register, {"name": "../r", "byte_size": 8}, [good]),
            ]
            assert {answer[2]["code"] for answer in refused} == {"INVALID_ARGUMENT"}
            assert raw.call(register, {"name": "r", "byte_size": 4096, "offset": 4096}, [good])[2] is None
            assert raw.call(register, {"name": "r", "byte_size": 8}, [good])[2]["code"] == "ALREADY_EXISTS"
            outside = [in_region("r", offset) for offset in (4096, 4065, -1, 2**62)]
            outside += [in_region("r", 0, 31), in_region("r", 0, 33)]
            for request in outside:
                assert raw.call("ModelInfer", request)[2]["code"] == "INVALID_ARGUMENT"
            assert raw.call("ModelInfer", in_region("other", 0))[2]["code"] == "NOT_FOUND"
            os.pwrite(good, X.tobytes(), 4096 + 64)
            answer = raw.call("ModelInfer", in_region("r", 64))
            assert answer[3]["raw_output_contents"] == [(2 * X + 1).tobytes()]
            with Raw(service.socket) as stranger:  # regions belong to their connection
                assert stranger.call("ModelInfer", in_region("r", 64))[2]["code"] == "NOT_FOUND"
            for i in range(3):
                assert raw.call(register, {"name": f"r{i}", "byte_size": 8}, [good])[2] is None
            assert (
                raw.call(register, {"name": "r9", "byte_size": 8}, [good])[2]["code"] == "RESOURCE_EXHAUSTED"
            )
            status = raw.call("SystemSharedMemoryStatus", {})[3]["regions"]
            assert [region["name"] for region in status] == ["r", "r0", "r1", "r2"]
            assert raw.call("SystemSharedMemoryUnregister", {"name": "r"})[2] is None
            assert raw.call("SystemSharedMemoryUnregister", {"name": "r"})[2]["code"] == "NOT_FOUND"
            assert raw.call("SystemSharedMemoryUnregister", {})[2] is None
    finally:
        os.close(good)
        os.close(bad)


def test_models_that_are_no_files(service: Service, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    folder = os.open(tmp_path, os.O_RDONLY)
    (tmp_path / "f").write_bytes(b"x" * 10)
    write_only = os.open(tmp_path / "f", os.O_WRONLY)
    params = {"model_name": "m", "files": ["m.onnx"]}
    try:
        with Raw(service.socket) as raw:
            for descriptor in (reading, writing, folder, raw.socket.fileno(), write_only):
                assert raw.call("RepositoryModelLoad", params, [descriptor])[2]["code"] == "INVALID_ARGUMENT"
            for name in ("../m.onnx", "/m.onnx", "", "a\0b", ".."):
                answer = raw.call("RepositoryModelLoad", {**params, "files": [name]}, [write_only])
                assert answer[2]["code"] == "INVALID_ARGUMENT", name
            two = {**params, "files": ["a", "b"]}
            assert raw.call("RepositoryModelLoad", two, [write_only])[2]["code"] == "INVALID_ARGUMENT"
    finally:
        for descriptor in (reading, writing, folder, write_only):
            os.close(descriptor)
    assert os.listdir(service.state / "staging") == []


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.binary(max_size=400)
    | st.builds(
        packed,
        st.integers(0, 2**32 - 1),
        st.sampled_from(
            ["ModelInfer", "ServerStatus", "SystemSharedMemoryRegister", "RepositoryModelLoad", "x"]
        ),
        st.dictionaries(
            st.sampled_from(["model_name", "inputs", "outputs", "parameters", "name", "files", "byte_size"]),
            st.recursive(
                st.none() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=9) | st.binary(max_size=9),
                lambda v: st.lists(v, max_size=4) | st.dictionaries(st.text(max_size=9), v, max_size=4),
                max_leaves=8,
            ),
            max_size=5,
        ),
    ),
    cut=st.integers(0, 400),
)
def test_fuzzed_frames(service: Service, data: bytes, cut: int) -> None:
    with Raw(service.socket) as raw:
        raw.send(data[:cut])
        raw.send(data[cut:])
        raw.socket.shutdown(socket.SHUT_WR)
        for message in raw.rest():
            assert message[0] in (1, 2)


def test_cancel_of_what_is_not_there(service: Service) -> None:
    with Raw(service.socket) as raw:
        for msgid in (0, 5, -1, "x", None, [1]):
            raw.send(msgpack.packb([2, "Cancel", [{"msgid": msgid}]]))
        raw.send(msgpack.packb([2, "Cancel", [{}]]))
        assert raw.call("ServerLive", {})[3] == {"live": True}


@pytest.mark.parametrize("times", [1, 2])
def test_cancelled_requests_are_answered_so(service: Service, times: int) -> None:
    with Raw(service.socket) as raw:
        batch = b"".join(packed(i, "ModelInfer", INFER) for i in range(1, 8))
        cancels = b"".join(msgpack.packb([2, "Cancel", [{"msgid": i}]]) for i in range(1, 8))
        raw.send(batch + cancels * times)
        answers = [raw.read() for _ in range(7)]
        assert {answer[2]["code"] for answer in answers if answer and answer[2]} == {"CANCELLED"}
        assert raw.call("ServerLive", {})[3] == {"live": True}


def test_requests_are_cancelled_by_a_message_and_by_the_end_of_their_client(service: Service) -> None:
    with Raw(service.socket) as raw:
        cancel = msgpack.packb([2, "Cancel", [{"msgid": 1}]])
        raw.send(packed(1, "ModelInfer", INFER) + cancel + b"\xc1")  # a byte that MessagePack has no use for
        assert any(message[0] == 2 for message in raw.rest())
