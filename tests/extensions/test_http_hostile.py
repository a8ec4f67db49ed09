"""HTTP from those who mean no good: each gets a 4xx or is cut off, and the next client is answered."""

from __future__ import annotations

import contextlib
import json
import select
import socket
from collections.abc import Callable, Iterator, Mapping
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import psutil
import pytest

from honed.http.main import main
from honed.runtime.dtypes import NARROW
from tests.daemon.running import DEADLINE, Made, Service, serving, state_with, wait_for

from .conftest import Bridge, Main
from .test_http_client import listening_at

pytestmark = [pytest.mark.service, pytest.mark.opencl]
CONFIG = """port = 0
max_connections = 8
max_body_mib = 2
max_json_mib = 1
max_bodies_mib = 4
arrival_seconds = 60
write_seconds = 3
idle_seconds = 4
"""
OF_BINARY_DATA = ("FP16", *(kind.datatype for kind in NARROW))
SIZE = 8  # elements of the model's input
X = {"name": "x", "datatype": "FP32", "shape": [SIZE]}
GOOD: Mapping[str, Any] = {"inputs": [{**X, "data": [1.5] * SIZE}]}
INFER = "/v2/models/small/infer"


@pytest.fixture(scope="module")
def service(
    tmp_path_factory: pytest.TempPathFactory, cache_dir: Path, made_once: Made, small_model: Path
) -> Iterator[Service]:
    stored = state_with(made_once, small_model, cache_dir)
    with serving(tmp_path_factory, cache_dir, stored=stored) as running:
        with running.client() as client:
            (tensor,) = client.metadata("small")["inputs"]
            assert tensor == X, "the requests are made for it"
        yield running


@pytest.fixture(scope="module")
def bridge(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bridge]:
    running = Bridge("honed.http.main", CONFIG, service.socket, tmp_path_factory.mktemp("http"))
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="module")
def hasty(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bridge]:
    """A bridge whose requests have to be there soon, which a busy machine may not keep."""
    config = CONFIG.replace("arrival_seconds = 60", "arrival_seconds = 1")
    running = Bridge("honed.http.main", config, service.socket, tmp_path_factory.mktemp("hasty"))
    yield running
    assert running.stop() == 0


@pytest.fixture
def address(bridge: Bridge, service: Service) -> Iterator[tuple[str, int]]:
    yield from _address(bridge, service)


@pytest.fixture
def hasty_address(hasty: Bridge, service: Service) -> Iterator[tuple[str, int]]:
    yield from _address(hasty, service)


def _address(bridge: Bridge, service: Service) -> Iterator[tuple[str, int]]:
    """Where it listens; afterwards it has served an honest client and logged no traceback."""
    host, _, port = listening_at(bridge).rpartition(":")
    yield host, int(port)

    def honest() -> bool:
        status, told = ask((host, int(port)), GOOD)
        return (status, status == 200 and told["outputs"][0]["data"][0]) == (200, 2.5)

    wait_for(honest, "an honest client to be served")
    assert bridge.process.poll() is None
    assert "Traceback" not in bridge.log, bridge.log
    assert service.answers()


def ask(
    address: tuple[str, int],
    body: Any,
    headers: Mapping[str, str] | None = None,
    *,
    path: str = INFER,
    method: str = "POST",
) -> tuple[int, Any]:
    """Status and JSON of the answer; 0 where the connection was closed instead."""
    connection = HTTPConnection(*address, timeout=60)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        connection.request(method, path, data, dict(headers or {}))
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read() or b"null")
    except (ConnectionError, TimeoutError):
        return 0, None
    finally:
        connection.close()


def changed(**change: Any) -> dict[str, Any]:
    return {"inputs": [{**GOOD["inputs"][0], **change}]}


BINARY = {**X, "parameters": {"binary_data_size": SIZE * 4}}


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe{}", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"inputs":' * 50_000, "not JSON"),
        (b"[]", "a JSON object"),
        (b'{"inputs": [{"name": "x", "shape": [' + b"9" * 5000 + b"]}]}", "not JSON"),
        ({}, "inputs must be a list"),
        ({"inputs": 3}, "inputs must be a list"),
        ({"inputs": [3]}, "a list of JSON objects"),
        ({"inputs": [{}]}, "must have a name"),
        ({**GOOD, "parameters": []}, "must be a JSON object"),
        ({**GOOD, "parameters": {"priority": -1}}, "priority"),
        ({**GOOD, "parameters": {"timeout": "soon"}}, "timeout"),
        ({**GOOD, "parameters": {"sequence_id": [1]}}, "sequence_id"),
        ({**GOOD, "parameters": {"binary_data_output": 1}}, "binary_data_output must be true or false"),
        ({**GOOD, "id": 7}, "id must be a text"),
        ({**GOOD, "outputs": [{"name": "y"}, {"name": "y"}]}, "named twice"),
        ({**GOOD, "outputs": [{"name": "y", "parameters": {"classification": 3}}]}, "classification"),
        *((changed(datatype=kind), f"{kind}, which JSON does not carry") for kind in OF_BINARY_DATA),
        (changed(datatype="BYTES"), "give texts"),
        (changed(datatype="BYTES", data=["\ud800"] * SIZE), "half of a surrogate pair"),
        (changed(datatype="BYTES", data=["a"] * SIZE), "BYTES"),
        (changed(datatype="INT8"), "give whole numbers from -128 to 127"),
        (changed(datatype="INT8", data=[300] * SIZE), "give whole numbers from -128 to 127"),
        (changed(datatype="BOOL"), "give true or false"),
        (changed(datatype=["FP32"]), "datatype of 'x' must be a text"),
        (changed(datatype="FP12"), "is not supported"),
        (changed(datatype="INT32", data=[1] * SIZE), "INT32"),
        (changed(shape=[SIZE + 1]), "has 8 elements"),
        (changed(shape=[-1]), "not negative"),
        (changed(shape=[1 << 62, 1 << 62]), "not negative"),
        (changed(shape=[True] * 3), "not negative"),
        (changed(shape=[2, 4]), "x"),
        (changed(shape=[2, 4], data=[[1, 2, 3, 4], [1, 2, 3]]), "not nested as its shape"),
        (changed(data=["a"] * SIZE), "give numbers"),
        (changed(data=[None] * SIZE), "give numbers"),
        (changed(data=[10**30] * SIZE), "beyond 2^64"),
        (changed(data={"a": 1}), "must be a list"),
        (changed(parameters={"shared_memory_region": "r"}), "shared memory"),
        (changed(parameters={"binary_data_size": 4}), "and 0 bytes follow"),
        ({"inputs": [{**X, "name": "other", "data": [1] * SIZE}]}, "other"),
    ],
)
def test_a_body_that_is_no_request(address: tuple[str, int], body: Any, sentence: str) -> None:
    status, told = ask(address, body)
    assert status == 400
    assert sentence in told["error"]


@pytest.mark.parametrize(
    ("said", "length", "more", "sentence"),
    [
        (BINARY, "-1", b"\0" * 32, "must be the number of bytes"),
        (BINARY, "1e3", b"\0" * 32, "must be the number of bytes"),
        (BINARY, "9" * 400, b"\0" * 32, "must be the number of bytes"),
        (BINARY, "100000", b"\0" * 32, "and the body has"),
        (BINARY, "3", b"\0" * 32, "not JSON"),
        (BINARY, None, b"\0" * 31, "and 31 bytes follow"),
        (BINARY, None, b"\0" * 33, "1 bytes follow that belong to no input"),
        ({**BINARY, "parameters": {"binary_data_size": -1}}, None, b"\0" * 32, "correct it"),
        ({**BINARY, "parameters": {"binary_data_size": 1e1}}, None, b"\0" * 32, "correct it"),
        ({**BINARY, "parameters": {"binary_data_size": 28}}, None, b"\0" * 28, "x"),
        ({**BINARY, "shape": [1 << 39]}, None, b"\0" * 32, "x"),
        ({**BINARY, "data": [1]}, None, b"\0" * 32, "send one of them"),
    ],
)
def test_lengths_and_shapes_that_lie(
    address: tuple[str, int], said: Any, length: str | None, more: bytes, sentence: str
) -> None:
    text = json.dumps({"inputs": [said]}).encode()
    headers = {"Inference-Header-Content-Length": length or str(len(text))}
    status, told = ask(address, text + more, headers)
    assert status == 400
    assert sentence in told["error"]


def test_bodies_that_are_too_large(address: tuple[str, int]) -> None:
    assert ask(address, b"[" + b"1," * 600_000)[0] == 400
    status, told = ask(address, b"x" * (3 << 20))
    assert status in (413, 0), "the client may be cut off while it still sends"
    assert status == 0 or "2 MiB" in told["error"]


def test_paths_and_methods_that_there_are_not(address: tuple[str, int]) -> None:
    for path in ("/nothing", "/v2/models/", "/v2/models/small/../../etc", "/v2//health", "/%2e%2e/%00"):
        status, told = ask(address, b"", path=path, method="GET")
        assert (status, bool(told["error"])) == (404, True), path
    assert ask(address, b"", method="GET")[0] == 405
    assert ask(address, b"", method="DELETE", path="/v2/models/small")[0] == 405
    for name in ("x" * 300, "%00", "..%2f", "a%20b"):
        status, told = ask(address, b"", path=f"/v2/models/{name}", method="GET")
        assert 400 <= status < 500, name
        assert told["error"]


def test_pages_in_a_browser_are_refused(address: tuple[str, int]) -> None:
    own = f"{address[0]}:{address[1]}"
    for headers in (
        {"Host": "evil.example"},
        {"Host": "localhost.evil.example:8000"},
        {"Host": ""},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Host": "[::1", "Origin": "x"},
    ):
        status, told = ask(address, GOOD, headers)
        assert status == 403, headers
        assert told["error"]
    assert ask(address, GOOD, {"Origin": f"http://{own}"})[0] == 200
    assert ask(address, GOOD, {"Host": f"localhost:{address[1]}"})[0] == 200


RAW = (
    b"\0" * 100,
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"POST /v2 HTTP/1.1\r\nhost: localhost\r\ncontent-length: -5\r\n\r\n",
    b"POST /v2 HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n",
    b"POST /v2 HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    b"GET /v2 HTTP/1.1\r\nhost: localhost\r\n" + b"x-a: b\r\n" * 10_000 + b"\r\n",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"GET /v2 HTTP/1.1\r\n\r\n",
    b"GET /v2 HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
    b"GET /v2/health/live HTTP/1.1\r\nhost: localhost\r\n\r\n" * 200,
)


@pytest.mark.parametrize("sent", RAW, ids=range(len(RAW)))
def test_bytes_that_are_no_http(address: tuple[str, int], sent: bytes) -> None:
    with socket.create_connection(address, timeout=60) as raw:
        try:
            raw.sendall(sent)
            raw.shutdown(socket.SHUT_WR)
            received = read_all(raw)
        except ConnectionError:
            return
    assert received.startswith((b"HTTP/1.1 4", b"HTTP/1.1 200")) or not received


def read_all(raw: socket.socket) -> bytes:
    received = b""
    while more := raw.recv(1 << 16):
        received += more
    return received


HEAD = b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n" % INFER.encode()


@pytest.mark.parametrize(
    "begun",
    [
        b"",
        b"POST /v2 HT",
        HEAD,
        HEAD + b"{",
        b"GET /v2/health/live HTTP/1.1\r\nhost: localhost\r\n\r\nGET /v2",
        b"GET /v2/health/live HTTP/1.1\r\nhost: localhost\r\n\r\n" + HEAD,
    ],
    ids=range(6),
)
def test_who_does_not_go_on_is_cut_off(hasty_address: tuple[str, int], begun: bytes) -> None:
    """All connections there may be are taken; the honest client after this is served all the same."""
    waiting = []
    for _ in range(8):
        raw = socket.create_connection(hasty_address, timeout=60)
        with contextlib.suppress(ConnectionError):  # that had its time
            raw.sendall(begun)
        waiting.append(raw)
    for raw in waiting:
        with raw, contextlib.suppress(ConnectionError):
            read_all(raw)


def test_one_byte_at_a_time_does_not_help(hasty_address: tuple[str, int]) -> None:
    """A slow loris has the time that everybody has, however often it sends."""
    with socket.create_connection(hasty_address, timeout=0.2) as raw:
        raw.sendall(b"GET /v2 HTTP/1.1\r\n")

        def cut_off() -> bool:
            try:
                raw.sendall(b"a: b\r\n")
                return raw.recv(1) == b""
            except TimeoutError:
                return False
            except ConnectionError:
                return True

        wait_for(cut_off, "the connection to be closed")


def test_who_does_not_read_is_cut_off(address: tuple[str, int], bridge: Bridge) -> None:
    process = psutil.Process(bridge.process.pid)
    asked = b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n" * 400
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect(address)
        mine = raw.getsockname()
        raw.setblocking(False)
        try:
            while asked:
                asked = asked[raw.send(asked) :]
        except BlockingIOError:
            pass
        wait_for(
            lambda: mine not in [tuple(each.raddr) for each in process.net_connections() if each.raddr],
            "the connection to be closed",
        )


def test_more_connections_than_allowed(address: tuple[str, int]) -> None:
    waiting = [socket.create_connection(address, timeout=60) for _ in range(8)]
    status, told = ask(address, GOOD)
    assert status == 0 or (status, "too many connections" in told["error"]) == (503, True)
    for raw in waiting:
        raw.close()


def test_bodies_that_are_not_finished_take_no_more_than_allowed(address: tuple[str, int]) -> None:
    """Three of nearly 2 MiB, where 4 MiB are allowed in all: one is told to come again, and others go on."""
    answers = []
    waiting = []
    part = b"x" * (3 << 19)
    head = b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % (
        INFER.encode(),
        len(part) + 1,
    )
    for _ in range(3):
        raw = socket.create_connection(address, timeout=60)
        raw.sendall(head + part)
        waiting.append(raw)
    ready, _, _ = select.select(waiting, [], [], DEADLINE)
    assert len(ready) == 1
    for raw in sorted(waiting, key=lambda each: each not in ready):
        with raw:
            if raw not in ready:
                raw.sendall(b"x")
            answers.append(raw.recv(12))
    assert answers == [b"HTTP/1.1 503", b"HTTP/1.1 400", b"HTTP/1.1 400"]


def test_it_listens_on_this_machine_only(bridge: Bridge, address: tuple[str, int]) -> None:
    process = psutil.Process(bridge.process.pid)
    listening = [each.laddr.ip for each in process.net_connections() if each.status == psutil.CONN_LISTEN]
    assert listening == ["127.0.0.1"]
    others = [
        each.address
        for addresses in psutil.net_if_addrs().values()
        for each in addresses
        if each.family == socket.AF_INET and not each.address.startswith("127.")
    ]
    for other in others:
        with pytest.raises(OSError, match="refused"):
            socket.create_connection((other, address[1]), timeout=5)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ('address = "everywhere"', "give an IP address"),
        ("port = 70000", "port is 70000"),
        ('address = "203.0.113.1"\nport = 0', "cannot be listened at"),
        ("max_body_mib = 0", "max_body_mib is 0"),
        ("colour = 1", "the settings are address"),
    ],
)
def test_wrong_settings_are_one_sentence(
    refused: Callable[[Main, str], str], config: str, sentence: str
) -> None:
    said = refused(main, config)
    assert sentence in said
    assert said.count("\n") == 1


def test_the_program_ends_with_wrong_settings(
    start_bridge: Callable[[str, str, Path], Bridge], tmp_path: Path
) -> None:
    bridge = start_bridge("honed.http.main", "= 3", tmp_path / "none")
    assert bridge.process.wait(60) == 1
    assert "is not TOML" in bridge.log
    assert bridge.log.count("\n") == 1
