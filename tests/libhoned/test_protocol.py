"""The library against services that are away, go away, are late, answer out of order, or answer nonsense."""

from __future__ import annotations

import ctypes
import resource
import select
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from honed.runtime import HONED_VERSION
from tests.daemon.running import DEADLINE, wait_for
from tests.processes import crowded

from .binding import CODES, FP32, Library
from .calls import Request, opened
from .fake import Connection, Fake, Message, right

# A call of the library that crashes or hangs ends no other test.
pytestmark = [pytest.mark.child, pytest.mark.timeout(150)]
X = np.arange(8, dtype=np.float32)
PATIENCE = int(DEADLINE * 1000)


def made(library: Library, service: int) -> Request:
    request = Request(library, service, "small")
    request.input("x", X)
    return request


def buffer_of(library: Library, service: int) -> ctypes.c_void_p:
    buffer = ctypes.c_void_p()
    assert library.buffer_new(service, 4096, ctypes.byref(buffer)) == CODES["OK"]
    assert library.buffer_bytes(buffer) == 4096
    return buffer


def test_nobody_there(library: Library, tmp_path: Path) -> None:
    with opened(library, tmp_path / "s") as service, made(library, service) as request:
        assert library.service_error(service) == ""
        assert library.service_connect(service, 0) == CODES["UNAVAILABLE"]
        assert library.service_error(service).startswith("no service answers at ")
        assert library.service_connect(service, 50) == CODES["UNAVAILABLE"]  # tries for so long
        assert request.infer() == CODES["UNAVAILABLE"]
        assert library.infer_patiently(request.c, 1) == CODES["UNAVAILABLE"]
        assert library.submit(request.c) == CODES["UNAVAILABLE"]
        assert library.collect(service, PATIENCE) is None
        assert request.error.startswith("no service answers at ")
        with Fake(tmp_path / "s"):
            assert library.service_connect(service, PATIENCE) == CODES["OK"]
            assert library.service_error(service) == ""
            assert request.infer() == CODES["OK"]
    with crowded(str(tmp_path / "crowded")), opened(library, tmp_path / "crowded") as service:
        assert library.service_connect(service, 0) == CODES["UNAVAILABLE"]
        assert library.service_error(service).startswith("too many apps are connecting to ")
    with opened(library, "/" + "x" * 200) as service:
        assert library.service_connect(service, -1) == CODES["INVALID_ARGUMENT"]


def test_names_and_sizes(library: Library) -> None:
    names = {
        name: number
        for name, number in CODES.items()
        if not name.startswith("SEQUENCE_") or name.endswith("LOST")
    }
    types = ["UNKNOWN", "BOOL", "UINT8", "INT8", "UINT16", "INT16", "UINT32", "INT32", "UINT64", "INT64"]
    types += ["FP16", "FP32", "FP64"]
    for name, number in names.items():
        if name in types:
            assert library.type_name(number) == ("" if name == "UNKNOWN" else name)
        else:
            assert library.code_name(number) == name
    assert [library.type_bytes(CODES[name]) for name in types] == [0, 1, 1, 1, 2, 2, 4, 4, 8, 8, 2, 4, 8]
    assert (library.type_bytes(99), library.type_name(99), library.code_name(99)) == (0, "", "INTERNAL")
    assert library.version() == HONED_VERSION
    passing = {name for name, number in names.items() if name not in types and library.code_passes(number)}
    assert passing == {"UNAVAILABLE", "DISCONNECTED", "RESOURCE_EXHAUSTED"}


def test_the_socket_is_where_the_protocol_says(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HONED_SOCKET", str(tmp_path / "s"))
    service = library.service_new(None)
    with Fake(tmp_path / "s"):
        assert library.service_connect(service, 0) == CODES["OK"]
    library.service_free(service)


def test_open_shapes_and_types_of_later_versions_are_described(library: Library, tmp_path: Path) -> None:
    def answers(connection: Connection, request: Message) -> None:
        later = {"name": "z", "datatype": "FP8", "shape": [2]}
        told = right(request)
        connection.answer(
            request, {**told, "outputs": [*told["outputs"], later], "invention": {"a": [1, 2.5, -3, True]}}
        )

    model = ctypes.c_void_p()
    with Fake(tmp_path / "s", answers), opened(library, tmp_path / "s") as service:
        assert library.describe(service, "small", ctypes.byref(model)) == CODES["OK"]
        scalar, y, later = library.model_input(model, 1), *(library.model_output(model, i) for i in range(2))
        assert (library.tensor_rank(scalar), library.tensor_bytes(scalar)) == (0, 8)
        assert library.tensor_shape(y)[:2] == [-1, 8]
        assert library.tensor_bytes(y) == -1
        assert (library.tensor_type(later), library.tensor_bytes(later)) == (CODES["UNKNOWN"], -1)
        with Request(library, service, "small") as request:
            assert library.request_input_like(request.c, y, X.ctypes.data) == CODES["INVALID_ARGUMENT"]
    library.model_free(model)


def test_parameters_are_sent_as_the_protocol_has_them(library: Library, tmp_path: Path) -> None:
    with Fake(tmp_path / "s") as fake, opened(library, tmp_path / "s") as service:
        buffer = buffer_of(library, service)
        with made(library, service) as request:
            assert library.request_input_shared(request.c, "w", FP32, [2, 3], 2, buffer, 128) == CODES["OK"]
            assert library.request_want(request.c, "y") == CODES["OK"]
            assert library.request_want_shared(request.c, "z", buffer, 64, 32) == CODES["OK"]
            library.request_timeout(request.c, 1500 * 60)
            library.request_priority(request.c, 1)
            library.request_finite(request.c, 1)
            flags = CODES["SEQUENCE_START"] | CODES["SEQUENCE_LAST_TOKEN"]
            library.request_sequence(request.c, 2**64 - 1, flags)
            assert request.infer() == CODES["OK"], request.error
            assert set(request.outputs()) == {"y", "z"}
            assert request.infer() == CODES["OK"]
        library.buffer_free(buffer)
        library.ready(service, "small", ctypes.byref(ctypes.c_int()))
    assert fake.methods() == [
        "SystemSharedMemoryRegister",
        "ModelInfer",
        "ModelInfer",
        "SystemSharedMemoryUnregister",
        "ModelReady",
    ]
    name = fake.got[0][3][0]["name"]
    assert fake.got[0][3] == [{"name": name, "byte_size": 4096}]

    def place(offset: int, size: int) -> dict[str, Any]:
        return {
            "shared_memory_region": name,
            "shared_memory_offset": offset,
            "shared_memory_byte_size": size,
        }

    assert fake.got[1][3] == [
        {
            "model_name": "small",
            "parameters": {
                "timeout": 90_000_000,
                "priority": 1,
                "finite": True,
                "sequence_id": 2**64 - 1,
                "sequence_start": True,
                "sequence_end": False,
                "last_token": True,
            },
            "inputs": [
                {"name": "x", "datatype": "FP32", "shape": [8]},
                {"name": "w", "datatype": "FP32", "shape": [2, 3], "parameters": place(128, 24)},
            ],
            "outputs": [{"name": "y"}, {"name": "z", "parameters": place(64, 32)}],
            "raw_input_contents": [X.tobytes()],
        }
    ]
    later = fake.got[2][3][0]["parameters"]
    assert (later["sequence_start"], later["last_token"]) == (False, True)  # it has begun


@pytest.mark.parametrize(
    ("connection", "request_", "sent"),
    [
        (-1, -1, 86_400_000_000),
        (-1, 20_000, 20_000_000),
        (20_000, -1, 20_000_000),
        (2**31 - 1, -1, 86_400_000_000),
        (-1, 2**31 - 1, 86_400_000_000),
        (0, 90_000, 90_000_000),
    ],
)
def test_no_limit_is_the_longest_that_the_service_takes(
    library: Library, tmp_path: Path, connection: int, request_: int, sent: int
) -> None:
    with (
        Fake(tmp_path / "s") as fake,
        opened(library, fake.path) as service,
        made(library, service) as request,
    ):
        library.service_timeout(service, connection)
        library.request_timeout(request.c, request_)
        assert request.infer() == CODES["OK"], request.error
    assert fake.got[0][3][0]["parameters"]["timeout"] == sent


def test_answers_come_in_any_order_and_in_pieces(library: Library, tmp_path: Path) -> None:
    held: list[Message] = []

    def answers(connection: Connection, request: Message) -> None:
        held.append(request)
        if len(held) < 5:
            return
        connection.send([2, "News", [{"of": "no interest"}]])
        connection.answer([0, 2**32 - 1, "ModelReady", [{}]])  # nobody asked
        for each in reversed(held):
            result = right(each)
            result["raw_output_contents"] = [bytes([each[1] % 256]) * 32] * 2
            connection.answer(each, result)

    with Fake(tmp_path / "s", answers) as fake, opened(library, tmp_path / "s") as service:
        requests = [made(library, service) for _ in range(5)]
        for request in requests:
            assert library.submit(request.c) == CODES["OK"]
        ended = [library.collect(service, PATIENCE) for _ in range(5)]
        assert ended == [request.c for request in reversed(requests)]
        for request, sent in zip(requests, fake.got, strict=True):
            assert request.outputs()["y"].tobytes() == bytes([sent[1] % 256]) * 32
            request.free()


def test_calls_that_are_alike_are_prepared(library: Library, tmp_path: Path) -> None:
    with (
        Fake(tmp_path / "s") as fake,
        opened(library, fake.path) as service,
        made(library, service) as request,
    ):
        for _ in range(4):
            assert request.infer() == CODES["OK"]
        assert fake.methods() == ["ModelInfer", "ModelPrepare", "ModelInfer", "ModelRun", "ModelRun"]
        whole, prepared, _, run, _ = (message[3][0] for message in fake.got)
        assert "timeout" not in prepared["parameters"]
        assert run == {
            "number": run["number"],
            "timeout": whole["parameters"].pop("timeout"),
            "raw_input_contents": whole.pop("raw_input_contents"),
        }
        assert prepared == whole
        library.request_timeout(request.c, 1234)  # which each run has of its own
        assert request.infer() == CODES["OK"]
        assert (fake.methods()[-1], fake.got[-1][3][0]["timeout"]) == ("ModelRun", 1_234_000)
        fake.got.clear()
        library.request_priority(request.c, 1)  # another form
        for _ in range(3):
            assert request.infer() == CODES["OK"]
        assert fake.methods() == ["ModelInfer", "ModelPrepare", "ModelInfer", "ModelRun"]
        assert request.infer() == CODES["OK"]


@pytest.mark.parametrize("submitted", [False, True])
def test_a_number_that_the_service_forgot_is_not_seen(
    library: Library, tmp_path: Path, submitted: bool
) -> None:
    x, known = np.arange(8, dtype=np.float32), [True]

    def answers(connection: Connection, request: Message) -> None:
        if request[2] == "ModelRun" and not known[0]:
            connection.refuse(request, "NOT_PREPARED", "prepare it")
            return
        result = right(request)
        if "raw_input_contents" in request[3][0]:
            result["raw_output_contents"] = [request[3][0]["raw_input_contents"][0]] * 2
        connection.answer(request, result)

    def called(request: Request, service: int) -> bytes:
        x[:] += 1
        expected = x.tobytes()
        if submitted:
            assert library.submit(request.c) == CODES["OK"]
            x[:] += 100  # it was read
            assert library.collect(service, PATIENCE) == request.c
            assert library.request_code(request.c) == CODES["OK"], request.error
        else:
            assert request.infer() == CODES["OK"], request.error
        assert request.outputs()["y"].tobytes() == expected
        return expected

    with (
        Fake(tmp_path / "s", answers) as fake,
        opened(library, fake.path) as service,
        Request(library, service, "small") as request,
    ):
        request.input("x", x)
        for known[0] in (True, True, True, False, True, True, False, False):
            called(request, service)
        initials = "".join(method.removeprefix("Model")[0] for method in fake.methods())
        assert initials == "IPIRRIPIRRIPI"


def test_a_service_that_prepares_nothing(library: Library, tmp_path: Path) -> None:
    def answers(connection: Connection, request: Message) -> None:
        if request[2] == "ModelPrepare":
            connection.refuse(request, "UNIMPLEMENTED", "there is no method 'ModelPrepare'")
        else:
            connection.answer(request)

    with (
        Fake(tmp_path / "s", answers) as fake,
        opened(library, fake.path) as service,
        made(library, service) as request,
    ):
        for _ in range(5):
            assert request.infer() == CODES["OK"]
        assert fake.methods() == ["ModelInfer", "ModelPrepare", *["ModelInfer"] * 4]


def test_numbers_end_with_their_connection(library: Library, tmp_path: Path) -> None:
    with opened(library, tmp_path / "s") as service, made(library, service) as request:
        for _ in range(2):
            with Fake(tmp_path / "s") as fake:
                for _ in range(3):
                    assert library.infer_patiently(request.c, PATIENCE) == CODES["OK"]
                assert fake.methods() == ["ModelInfer", "ModelPrepare", "ModelInfer", "ModelRun"]


def test_a_deadline_passes_and_the_request_is_cancelled(library: Library, tmp_path: Path) -> None:
    with (
        Fake(tmp_path / "s", lambda connection, request: None) as fake,
        opened(library, fake.path) as service,
        made(library, service) as request,
    ):
        library.request_timeout(request.c, 20)
        assert request.infer() == CODES["DEADLINE_EXCEEDED"]
        assert request.error == "the service did not answer in time; give a longer timeout"
        assert library.submit(request.c) == CODES["OK"]
        # The descriptor tells of deadlines, too.
        assert select.select([library.service_fd(service)], [], [], DEADLINE)[0]
        assert library.collect(service, PATIENCE) == request.c
        assert library.request_code(request.c) == CODES["DEADLINE_EXCEEDED"]
        library.service_timeout(service, 20)
        assert library.ready(service, "small", ctypes.byref(ctypes.c_int())) == CODES["DEADLINE_EXCEEDED"]
        wait_for(lambda: len(fake.got) == 6, "the requests and their Cancels")
    numbers = [message[1] for message in fake.got[::2]]
    assert fake.got[1::2] == [[2, "Cancel", [{"msgid": number}]] for number in numbers]


def test_a_request_is_given_up(library: Library, tmp_path: Path) -> None:
    with Fake(tmp_path / "s", lambda connection, request: None) as fake:
        service = library.service_new(str(fake.path))  # is freed below
        requests = [made(library, service) for _ in range(3)]
        for request in requests:
            assert library.submit(request.c) == CODES["OK"]
        library.request_cancel(requests[0].c)
        assert select.select([library.service_fd(service)], [], [], DEADLINE)[0]
        assert library.collect(service, 0) == requests[0].c
        assert library.request_code(requests[0].c) == CODES["CANCELLED"]
        requests[1].free()
        assert library.collect(service, 10) is None
        wait_for(lambda: fake.methods().count("Cancel") == 2, "the Cancels")
        library.service_free(service)  # while the third is on its way
        assert library.request_code(requests[2].c) == CODES["CANCELLED"]
        assert requests[2].infer() == CODES["INVALID_ARGUMENT"]
        assert requests[2].error.startswith("the connection was freed")
        requests[0].free(), requests[2].free()


def test_a_service_that_goes_away_is_told_as_such_and_found_again(library: Library, tmp_path: Path) -> None:
    times = iter(range(100))

    def answers(connection: Connection, request: Message) -> None:
        if request[2] == "ModelInfer" and next(times) < 3:
            connection.close()
        else:
            connection.answer(request)

    with Fake(tmp_path / "s", answers) as fake, opened(library, fake.path) as service:
        buffer = buffer_of(library, service)
        with made(library, service) as request:
            assert library.request_want_shared(request.c, "y", buffer, 0, 32) == CODES["OK"]
            assert request.infer() == CODES["DISCONNECTED"]
            assert library.code_passes(CODES["DISCONNECTED"])
            library.request_sequence(request.c, 1, 0)
            assert library.infer_patiently(request.c, PATIENCE) == CODES["DISCONNECTED"]  # it may have run
            library.request_sequence(request.c, 0, 0)
            assert library.infer_patiently(request.c, PATIENCE) == CODES["OK"]
        library.buffer_free(buffer)
        assert fake.connections == 4
        assert fake.methods().count("SystemSharedMemoryRegister") == 4  # with each connection anew


def test_a_full_queue_is_waited_for(library: Library, tmp_path: Path) -> None:
    times = iter(range(100))

    def answers(connection: Connection, request: Message) -> None:
        if next(times) < 2:
            connection.refuse(request, "RESOURCE_EXHAUSTED", "the queue is full;\nslow down")
        else:
            connection.answer(request)

    with (
        Fake(tmp_path / "s", answers) as fake,
        opened(library, fake.path) as service,
        made(library, service) as request,
    ):
        assert request.infer() == CODES["RESOURCE_EXHAUSTED"]
        assert request.error == "the queue is full; slow down"
        assert library.infer_patiently(request.c, PATIENCE) == CODES["OK"]


def test_a_buffer_that_is_refused_fails_the_requests_that_use_it(library: Library, tmp_path: Path) -> None:
    def answers(connection: Connection, request: Message) -> None:
        if request[2] == "SystemSharedMemoryRegister":
            connection.refuse(request, "RESOURCE_EXHAUSTED", "too many regions")
        else:
            connection.answer(request)

    with Fake(tmp_path / "s", answers) as fake, opened(library, fake.path) as service:
        buffer = buffer_of(library, service)
        requests = [made(library, service) for _ in range(3)]
        for request in requests[:2]:
            assert library.request_input_shared(request.c, "x", FP32, [8], 1, buffer, 0) == CODES["OK"]
        library.buffer_free(buffer)
        for request in requests:
            assert library.submit(request.c) == CODES["OK"]
        assert {library.collect(service, PATIENCE) for _ in requests} == {request.c for request in requests}
        assert [request.error for request in requests] == ["too many regions", "too many regions", ""]
        for request in requests:
            request.free()
        assert fake.methods().count("ModelInfer") == 1


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"outputs": None}, "no list of tensors"),
        ({"outputs": [{"name": "y\0", "datatype": "FP32", "shape": [8]}]}, "no list of tensors"),
        ({"outputs": [{"name": "y", "datatype": "FP32", "shape": [-8]}]}, "a shape that is none"),
        (
            {"outputs": [{"name": "y", "datatype": "FP32", "shape": [2**62, 2**62]}]},
            "a shape beyond all memory",
        ),
        ({"raw_output_contents": []}, "outputs of other sizes"),
        ({"raw_output_contents": [b"", b""]}, "outputs of other sizes"),
        ({"raw_output_contents": [bytes(32)] * 3}, "outputs of other sizes"),
        ({"raw_output_contents": ["y" * 32, "y" * 32]}, "outputs of other sizes"),
    ],
)
def test_an_answer_that_makes_no_sense(
    library: Library, tmp_path: Path, change: dict[str, Any], sentence: str
) -> None:
    def answers(connection: Connection, request: Message) -> None:
        connection.answer(request, right(request) | change)

    with (
        Fake(tmp_path / "s", answers) as fake,
        opened(library, fake.path) as service,
        made(library, service) as request,
    ):
        assert request.infer() == CODES["INTERNAL"]
        assert sentence in request.error
        assert request.outputs() == {}


@pytest.mark.parametrize(
    "bytes_",
    [
        b"\xc1",
        b"\x94\x01\x01\xc0\xd4\x01\x00",
        b"\x94\x01\x01\xc0\xdd\xff\xff\xff\xff",
        b"\x94\x01\x01\xc0\xde\xff\xff",
        b"\x91" * 100,
        b"\x93\x01\x01\xc0",
        b"\x94\x00\x01\xa1m\x91\x80",
        b"\x2a",
        b"\x90",
    ],
)
def test_bytes_that_are_no_message_end_the_connection(
    library: Library, tmp_path: Path, bytes_: bytes
) -> None:
    with Fake(tmp_path / "s", lambda c, r: c.send(bytes_)) as fake, opened(library, fake.path) as service:
        with made(library, service) as request:
            for _ in range(2):
                assert request.infer() == CODES["INTERNAL"]
                assert request.error.startswith("the service sent what is no message of its protocol")
        assert fake.connections == 2


def test_last_words_are_passed_on(library: Library, tmp_path: Path) -> None:
    def answers(connection: Connection, request: Message) -> None:
        connection.send([2, "Error", [{"code": "RESOURCE_EXHAUSTED", "message": "you ask too much"}]])
        connection.close()

    with (
        Fake(tmp_path / "s", answers) as fake,
        opened(library, fake.path) as service,
        made(library, service) as request,
    ):
        assert request.infer() == CODES["RESOURCE_EXHAUSTED"]
        assert request.error == "you ask too much"


def test_what_is_used_wrongly_is_said_before_anything_is_sent(library: Library, tmp_path: Path) -> None:
    with Fake(tmp_path / "s") as fake, opened(library, fake.path) as service, opened(library, "/x") as other:
        with Request(library, service, "small") as request:
            foreign, buffer = buffer_of(library, other), buffer_of(library, service)
            wrong = [
                library.request_input(request.c, "x", FP32, [-1, 8], 2, X.ctypes.data),
                library.request_input(request.c, "x", 99, [8], 1, X.ctypes.data),
                library.request_input(request.c, "x", FP32, [2**62, 2**62], 2, X.ctypes.data),
                library.request_input(request.c, "x", FP32, [8], 1, None),
                library.request_input_shared(request.c, "x", FP32, [8], 1, foreign, 0),
                library.request_input_shared(request.c, "x", FP32, [8], 1, buffer, 4096 - 28),
                library.request_input_shared(request.c, "x", FP32, [8], 1, buffer, 2**64 - 16),
                library.request_want_shared(request.c, "x", buffer, 4096, 1),
                library.buffer_new(service, 0, ctypes.byref(ctypes.c_void_p())),
            ]
            assert wrong == [CODES["INVALID_ARGUMENT"]] * len(wrong)
            library.buffer_free(foreign), library.buffer_free(buffer)
            given = library.request_input(request.c, "x", FP32, [2**30], 1, X.ctypes.data)
            assert (given, request.infer()) == (CODES["OK"], CODES["RESOURCE_EXHAUSTED"])
            assert "put them in a honed_buffer" in request.error
        assert fake.got == []


def test_a_buffer_larger_than_all_memory_takes_none(library: Library) -> None:
    """The kernel would give page after page until others are killed; a limit is there, too."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)  # which memfds obey
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with opened(library, "/x") as service:
            buffer = ctypes.c_void_p()
            assert library.buffer_new(service, 2**62, ctypes.byref(buffer)) == CODES["NO_MEMORY"]
            assert "Cannot allocate memory" in library.service_error(service)
            assert library.buffer_new(service, 2 << 20, ctypes.byref(buffer)) == CODES["NO_MEMORY"]
            assert "File too large" in library.service_error(service)  # the limit does hold
            assert buffer.value is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_message_larger_than_the_sockets_buffers_goes_both_ways(library: Library, tmp_path: Path) -> None:
    large = np.arange(1 << 21, dtype=np.float32)

    def answers(connection: Connection, request: Message) -> None:
        if request[2] == "ModelPrepare":
            connection.answer(request)
            return
        contents = request[3][0]["raw_input_contents"]
        given = {"name": "y", "datatype": "FP32", "shape": [1 << 21]}
        connection.answer(request, right(request) | {"outputs": [given], "raw_output_contents": contents})

    with (
        Fake(tmp_path / "s", answers) as fake,
        opened(library, fake.path) as service,
        Request(library, service, "small") as request,
    ):
        request.input("x", large)
        for number in range(3):
            large[0] = number
            assert request.infer() == CODES["OK"], request.error
            np.testing.assert_array_equal(request.outputs()["y"], large)


class Refusing(Fake):
    """Refuses the first message before it has all of it, reads no more of it, and does not hang up."""

    def _serve_one(self, connected: socket.socket) -> None:
        if self.connections > 1:
            super()._serve_one(connected)
            return
        connected.recv(1 << 16)
        Connection(connected).refuse([0, 1], "RESOURCE_EXHAUSTED", "too large")
        self.first = connected.dup()


def test_what_is_left_of_a_message_refused_early_does_not_hold_up_the_next(
    library: Library, tmp_path: Path
) -> None:
    with (
        Refusing(tmp_path / "s") as fake,
        opened(library, fake.path) as service,
        Request(library, service, "small") as request,
    ):
        request.input("x", np.zeros(1 << 22, np.float32))
        assert request.infer() == CODES["RESOURCE_EXHAUSTED"]
        request.input("x", X)
        library.request_timeout(request.c, PATIENCE)
        assert request.infer() == CODES["OK"], request.error
        assert fake.connections == 2
        fake.first.close()


def test_a_patient_call_ends_with_its_patience(library: Library, tmp_path: Path) -> None:
    def answers(connection: Connection, request: Message) -> None:
        connection.refuse(request, "UNAVAILABLE", "starting")

    with (
        Fake(tmp_path / "s", answers) as fake,
        opened(library, fake.path) as service,
        made(library, service) as request,
    ):
        patience, tries = 200, 0
        while tries < 2:  # a machine may be so busy that there is no time for another one
            patience, before, begun = 2 * patience, len(fake.got), time.monotonic()
            assert library.infer_patiently(request.c, patience) == CODES["UNAVAILABLE"]
            assert request.error == "starting"
            assert time.monotonic() - begun >= 0.1
            tries = len(fake.got) - before
