"""A service of the test's own making: what it answers to a request, and when it goes away."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import msgpack

from tests.daemon.running import DEADLINE

Message = list[Any]
Answers = Callable[["Connection", Message], None]

RIGHT: dict[str, dict[str, Any]] = {
    "ModelMetadata": {
        "name": "small",
        "versions": ["1"],
        "platform": "honed_opencl",
        "inputs": [
            {"name": "x", "datatype": "FP32", "shape": [8]},
            {"name": "s", "datatype": "INT64", "shape": []},
        ],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 8]}],
    },
    "ModelReady": {"ready": True},
    "RepositoryIndex": {
        "models": [
            {"name": name, "version": "1", "state": "READY", "reason": "", "engine": "gpu", "engine_why": ""}
            for name in ("small", "large")
        ]
    },
    "SystemSharedMemoryRegister": {},
    "SystemSharedMemoryUnregister": {},
}


PREPARED: list[dict[str, Any]] = []  # by all clients, each under its number, from 1 on


def right(request: Message) -> dict[str, Any]:
    """The result that a service would give."""
    _, _, method, (params,) = request
    if method == "ModelPrepare":
        PREPARED.append(params)
        return {"number": len(PREPARED)}
    if method == "ModelRun":
        params = PREPARED[params["number"] - 1]
    elif method != "ModelInfer":
        return RIGHT[method]
    wanted = params.get("outputs") or [{"name": "y"}, {"name": "z"}]
    outputs = [{"name": w["name"], "datatype": "FP32", "shape": [8], "parameters": {}} for w in wanted]
    contents = [bytes(range(32)) for w in wanted if "parameters" not in w]
    told = {"queue_us": 41, "compute_us": 120, "engine": "gpu"}
    return {
        "model_name": params["model_name"],
        "model_version": "1",
        "id": "",
        "parameters": told,
        "outputs": outputs,
        "raw_output_contents": contents,
    }


class Connection:
    """One client."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected

    def send(self, message: Any) -> None:
        self.socket.sendall(message if isinstance(message, bytes) else msgpack.packb(message))

    def answer(self, request: Message, result: Any = None) -> None:
        self.send([1, request[1], None, right(request) if result is None else result])

    def refuse(self, request: Message, code: str, message: str, kind: str = "") -> None:
        self.send([1, request[1], {"code": code, "message": message, "type": kind}, None])

    def close(self) -> None:
        """With everything that was said arriving first."""
        self.socket.shutdown(socket.SHUT_RDWR)


class Fake:
    """Listens at a path; every message of a client is given to `answers`, in one thread."""

    def __init__(self, path: Path, answers: Answers | None = None) -> None:
        self.path = path
        self.got: list[Message] = []
        self.connections = 0
        self._answers = answers or (lambda connection, request: connection.answer(request))
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(path))
        self._listening.listen()
        self._lock = threading.Lock()
        self._ending = False
        self._connected: socket.socket | None = None
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Fake:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._ending = True
            self._hang_up()
        self._thread.join(DEADLINE)
        self._listening.close()
        self.path.unlink()
        assert not self._thread.is_alive()

    def methods(self) -> list[str]:
        return [message[2] if message[0] == 0 else message[1] for message in self.got]

    def _hang_up(self) -> None:
        if self._connected is not None:
            with contextlib.suppress(OSError):  # it is closed already
                self._connected.shutdown(socket.SHUT_RDWR)

    def _serve(self) -> None:
        while True:
            try:
                connected, _ = self._listening.accept()
            except OSError:
                return
            self.connections += 1
            with connected:
                with self._lock:
                    self._connected = connected
                    if self._ending:
                        return
                self._serve_one(connected)

    def _serve_one(self, connected: socket.socket) -> None:
        unpacker = msgpack.Unpacker(max_buffer_size=1 << 28)
        connection = Connection(connected)
        try:
            while data := connected.recv(1 << 16):
                unpacker.feed(data)
                for message in unpacker:
                    self.got.append(message)
                    if message[0] == 0:
                        self._answers(connection, message)
        except OSError:
            return  # the client went away, or was closed by what answers
