"""Measures what the worst input costs other clients: the event loop's longest stall and the daemon's memory.

python -m benchmarks.hostile

A stall is the longest round trip of a request of another process, less the time that threads waited for a
processor (see tests.attack.meter). Each input is sent five times; the worst counts.
"""

from __future__ import annotations

import hashlib
import os
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.attack import users
from tests.attack.aside import Aside
from tests.daemon.raw import Raw, packed
from tests.daemon.running import Service, start
from tests.runtime.builder import chain

from honed.runtime.compiled import modelfile
from honed.runtime.compiled.model import FORMAT_VERSION

TIMES = 5
SETTLE_SECONDS = 0.3
LARGE = (64 << 20) - 65_536
Send = Callable[[Service], None]


def frame(params: Any, method: str = "ModelInfer") -> Send:
    """Return a function that sends one request and reads any answer."""
    data = packed(1, method, params)

    def send(service: Service) -> None:
        with Raw(service.socket) as raw:
            raw.send(data)
            raw.read()

    return send


def infer(**changes: Any) -> Send:
    """Return a request for the model, with `changes` to its parameters."""
    tensor = {"name": "x", "datatype": "FP32", "shape": [256]}
    return frame({"model_name": "m", "inputs": [tensor], "raw_input_contents": [bytes(1024)]} | changes)


def load_sizes(inputs: int, rank: int) -> Send:
    """Return a request to add a model with the sizes of many inputs."""
    sizes = {f"i{i}": [1] * rank for i in range(inputs)}
    params = {"model_name": "h", "files": ["h"], "parameters": {"shapes": sizes}}
    return frame(params, "RepositoryModelLoad")


def compiled(header: bytes) -> Send:
    """Return a request to add a compiled file with this header, all checksums right."""
    digest = hashlib.sha256(header).digest()
    preamble = struct.pack(
        "<8sIIQ32s32s",
        modelfile.MAGIC,
        FORMAT_VERSION,
        len(header),
        0,
        digest,
        hashlib.sha256().digest(),
    )
    body = preamble + header
    data = body + bytes(-len(body) % 4096)

    def send(service: Service) -> None:
        descriptor = os.memfd_create("hostile")
        os.pwrite(descriptor, data, 0)
        with Raw(service.socket) as raw:
            params = {"model_name": "h", "files": ["h.honed"]}
            raw.call("RepositoryModelLoad", params, [descriptor])
        os.close(descriptor)

    return send


def corpus() -> Iterator[tuple[str, Send]]:
    """Yield hostile requests with their names."""
    text, data = "a" * 60_000, bytes(LARGE)
    values, most = 65_000, 8_000
    yield "a small request", infer()
    yield "64 MiB of data for a small input", infer(raw_input_contents=[data])
    yield "64 MiB in 60,000 pieces", infer(raw_input_contents=[bytes(1024)] * 60_000)
    yield "64 MiB of text in 1,000 keys", frame({f"{i}{text}": 1 for i in range(1000)})
    yield "64 MiB of text in a list", infer(inputs=[text] * 1000)
    yield "an id of 60 MiB", infer(id="a" * LARGE)
    yield "data in place of a name", infer(model_name=data)
    yield "data in place of a number", infer(parameters={"timeout": data})
    yield "a shape of 65,000 sizes", infer(inputs=[{"name": "x", "datatype": "FP32", "shape": [1] * values}])
    yield "a shape of 8,000 sizes", infer(inputs=[{"name": "x", "datatype": "FP32", "shape": [2**40] * most}])
    yield "1,000 inputs", infer(inputs=[{"name": "x", "datatype": "FP32", "shape": [1]}] * 1000)
    yield "8,000 empty maps", infer(inputs=[{}] * most)
    yield "64 MiB in 8,000 pieces", infer(raw_input_contents=[bytes(8000)] * most)
    yield "240 kB of text in keys", frame({f"{i}{text}": 1 for i in range(4)})
    yield "8,000 keys", frame({str(i): 1 for i in range(most // 2)})
    yield "250 sizes of inputs", load_sizes(250, 16)
    yield "1,500 sizes of inputs", load_sizes(1500, 1)
    yield "8,000 inputs", infer(inputs=[{"name": "x", "datatype": "FP32", "shape": [1]}] * 8000)
    yield "65,000 empty maps", infer(inputs=[{}] * values)
    yield (
        "20,000 sizes of inputs",
        frame(
            {
                "model_name": "h",
                "files": ["h"],
                "parameters": {"shapes": {f"i{i}": [1] for i in range(20_000)}},
            },
            "RepositoryModelLoad",
        ),
    )
    yield "a key that is unknown, of 60 kB", infer(**{text: 1})
    empty = 31 << 20
    yield (
        "a header of 31 MiB of empty maps",
        compiled(b"\x81\xa1k\xdd" + struct.pack(">I", empty) + b"\x80" * empty),
    )
    yield (
        "a header of one text of 31 MiB",
        compiled(b"\x81\xa1k\xdb" + struct.pack(">I", empty) + b"a" * empty),
    )
    many = 200_000
    yield (
        "a header of 200,000 lists in lists",
        compiled(b"\x81\xa1k\xdd" + struct.pack(">I", many) + b"\x91\x90" * many),
    )
    yield "a header nested 500 deep", compiled(b"\x81\xa1k" + b"\x91" * 500 + b"\x90")


def main() -> None:
    """Measure every request, and print a table."""
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder)
        service = start(state / "state", state / "cache")
        try:
            with service.client() as client:
                client.add(chain(1, 256).write(state / "m.honed"), name="m")
            meter = Aside("meter", str(service.socket), str(users.ROOT))
            print(f"{'input':42} {'stall, ms':>10} {'daemon, MiB':>12}")
            worst = [measured(name, send, service, meter) for name, send in corpus()]
            meter.close()
        finally:
            service.stop()
    stall, memory = (max(column) for column in zip(*worst, strict=True))
    print(f"{'the worst':42} {stall:10.1f} {memory:12.0f}")


def measured(name: str, send: Send, service: Service, meter: Aside) -> tuple[float, float]:
    """Return the longest stall in milliseconds, and the daemon's peak memory in MiB."""
    Path(f"/proc/{service.process.pid}/clear_refs").write_text("5")
    meter.take()
    for _ in range(TIMES):
        send(service)
    time.sleep(SETTLE_SECONDS)
    stall = float(meter.take()["worst_ms"])
    status = Path(f"/proc/{service.process.pid}/status").read_text()
    peak = int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 1024
    print(f"{name:42} {stall:10.1f} {peak:12.0f}", flush=True)
    return stall, peak


if __name__ == "__main__":
    main()
