"""A service that has a compiled form of every model: its answers are y = x + 1000, or a test's."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import msgpack
import numpy as np

from tests.daemon.running import DEADLINE

Message = list[Any]
# Sends what it likes; whether the request is answered now.
Lie = Callable[["FakeService", socket.socket, Message], bool]


def answer_to(
    request: Message, time_us: int = 1, regions: Mapping[str, mmap.mmap] | None = None
) -> dict[str, Any]:
    """Return the answer of a service that has verified all; `regions` are the client's shared memory."""
    _, _, method, (params,) = request
    if method == "ModelBring":
        digest = params["sha256"][0]
        served = {"ready": True, "engine": "gpu", "engine_why": "", "outputs": []}
        return {"model_name": "own-" + digest[:40], "sha256": digest, **served}
    if method == "ModelForm":
        return {"verified": True, "time_us": time_us, "precision": "fp32", "why": ""}
    if method.startswith("SystemSharedMemory"):
        return {}
    (x,) = params["inputs"]
    if place := x.get("parameters"):
        begin = place["shared_memory_offset"]
        data = (regions or {})[place["shared_memory_region"]][
            begin : begin + place["shared_memory_byte_size"]
        ]
    else:
        (data,) = params["raw_input_contents"]
    y = np.frombuffer(data, np.float32) + np.float32(1000)
    fixed = {"datatype": "FP32", "shape": x["shape"], "parameters": {}}
    outputs = [{"name": each["name"], **fixed} for each in params["outputs"]]
    return {
        "model_name": params["model_name"],
        "parameters": {"queue_us": 1, "compute_us": 1, "engine": "gpu"},
        "outputs": outputs,
        "raw_output_contents": [y.tobytes()] * len(outputs),
    }


class FakeService:
    """Listens at a path, each client in a thread of its own."""

    def __init__(self, path: Path, lie: Lie | None = None, time_us: int = 1) -> None:
        """Initialise; `lie` is asked before each answer."""
        self.path, self.lie, self.time_us = path, lie, time_us
        self.counts: Counter[str] = Counter()
        self.requests: list[Message] = []  # but ModelInfer
        self.files: list[bytes] = []
        self.ended = threading.Event()
        self._clients: set[socket.socket] = set()
        self._listening = socket.socket(socket.AF_UNIX)

    def __enter__(self) -> FakeService:
        """Listen."""
        self._listening.bind(str(self.path))
        self._listening.listen(128)
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all connections."""
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._thread.join(DEADLINE)
        self.path.unlink()
        for client in list(self._clients):
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
        self.ended.set()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        unpacker = msgpack.Unpacker(max_buffer_size=1 << 28)
        regions: dict[str, mmap.mmap] = {}
        prepared: list[Any] = []
        self._clients.add(client)
        with client, contextlib.suppress(OSError):
            while True:
                data, descriptors, _, _ = socket.recv_fds(client, 1 << 16, 32)
                if not data:
                    break
                unpacker.feed(data)
                for request in unpacker:
                    if request[2] == "SystemSharedMemoryRegister":
                        regions[request[3][0]["name"]] = mmap.mmap(descriptors[0], request[3][0]["byte_size"])
                    if request[2] == "ModelPrepare":
                        prepared += request[3]
                        client.sendall(msgpack.packb([1, request[1], None, {"number": len(prepared)}]))
                        continue
                    if request[2] == "ModelRun":  # which is the whole request from here on
                        whole = prepared[request[3][0]["number"] - 1] | request[3][0]
                        request = [*request[:2], "ModelInfer", [whole]]
                    self._answer(client, request, regions)
                for descriptor in descriptors:
                    with os.fdopen(descriptor, "rb") as file:
                        file.seek(0)
                        self.files.append(file.read())
        self._clients.discard(client)

    def _answer(self, client: socket.socket, request: Message, regions: Mapping[str, mmap.mmap]) -> None:
        if request[0] != 0:
            return
        self.counts[request[2]] += 1
        if request[2] != "ModelInfer":
            self.requests.append(request)
        if self.lie is None or not self.lie(self, client, request):
            client.sendall(msgpack.packb([1, request[1], None, answer_to(request, self.time_us, regions)]))


def refuse(client: socket.socket, request: Message, code: str, kind: str = "", **more: Any) -> bool:
    """Answer with an error."""
    error = {"code": code, "message": f"refused: {code}", "type": kind, **more}
    client.sendall(msgpack.packb([1, request[1], error, None]))
    return True
