"""A client written from docs/protocol.md alone: a socket, MessagePack and struct, nothing of honed."""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import struct
from pathlib import Path
from typing import Any

import msgpack
import pytest

from tests.daemon.running import Service

pytestmark = [pytest.mark.service, pytest.mark.opencl]


class OutsideClient:
    """MessagePack-RPC over a Unix stream socket."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        self._messages = msgpack.Unpacker(raw=False, max_buffer_size=64 << 20)
        self._msgid = 0
        self.progress: list[dict[str, Any]] = []

    def call(self, method: str, params: dict[str, Any], descriptors: tuple[int, ...] = ()) -> Any:
        self._msgid += 1
        request = msgpack.packb([0, self._msgid, method, [params]])
        if descriptors:
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(descriptors)}i", *descriptors))
            request = request[self._socket.sendmsg([request], [rights]) :]
        self._socket.sendall(request)
        while True:
            for message in self._messages:
                if message[0] == 2:
                    self.progress.append(message[2][0])
                    continue
                kind, msgid, error, result = message
                assert (kind, msgid) == (1, self._msgid)
                if error is not None:
                    raise RuntimeError(f"{error['code']}: {error['message']}")
                return result
            data = self._socket.recv(65536)
            assert data, "the service closed the connection"
            self._messages.feed(data)

    def close(self) -> None:
        self._socket.close()


def test_an_outside_client_adds_lists_and_infers(service: Service, small_model: Path) -> None:
    client = OutsideClient(str(service.socket))
    assert client.call("ServerLive", {}) == {"live": True}
    model = os.open(small_model, os.O_RDONLY)
    added = client.call(
        "RepositoryModelLoad", {"model_name": "outside", "files": ["outside.honed"]}, (model,)
    )
    os.close(model)
    assert added["model_name"] == "outside"
    assert client.progress[-1]["fraction"] == 1.0
    names = [entry["name"] for entry in client.call("RepositoryIndex", {})["models"]]
    assert names == ["outside", "small"]

    metadata = client.call("ModelMetadata", {"name": "outside"})
    (tensor,) = metadata["inputs"]
    assert tensor == {"name": "x", "datatype": "FP32", "shape": [8]}
    values = [1.5 * i for i in range(8)]
    expected = [value + i + 1 for i, value in enumerate(values)]
    request = {
        "model_name": "outside",
        "id": "mine",
        "inputs": [tensor],
        "raw_input_contents": [struct.pack("<8f", *values)],
    }
    answer = client.call("ModelInfer", request)
    assert answer["id"] == "mine"
    assert answer["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [8], "parameters": {}}]
    assert list(struct.unpack("<8f", answer["raw_output_contents"][0])) == expected

    client.call("RepositoryModelUnload", {"model_name": "outside"})
    with pytest.raises(RuntimeError, match="NOT_FOUND: there is no model 'outside'"):
        client.call("ModelInfer", request)
    client.close()


def test_an_outside_client_uses_shared_memory(service: Service) -> None:
    client = OutsideClient(str(service.socket))
    memory = os.memfd_create("region", os.MFD_ALLOW_SEALING)
    os.ftruncate(memory, 4096)
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    mapped = mmap.mmap(memory, 4096)
    client.call("SystemSharedMemoryRegister", {"name": "mine", "byte_size": 4096}, (memory,))
    mapped[0:32] = struct.pack("<8f", *range(8))

    def at(offset: int) -> dict[str, Any]:
        return {
            "shared_memory_region": "mine",
            "shared_memory_offset": offset,
            "shared_memory_byte_size": 32,
        }

    answer = client.call(
        "ModelInfer",
        {
            "model_name": "small",
            "inputs": [{"name": "x", "datatype": "FP32", "shape": [8], "parameters": at(0)}],
            "outputs": [{"name": "y", "parameters": at(1024)}],
        },
    )
    assert answer["raw_output_contents"] == []
    assert struct.unpack("<8f", mapped[1024:1056]) == tuple(2.0 * i + 1 for i in range(8))
    client.call("SystemSharedMemoryUnregister", {"name": "mine"})
    mapped.close()
    os.close(memory)
    client.close()
