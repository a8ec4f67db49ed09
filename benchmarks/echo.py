"""Measures the least that a request by the socket can cost: `python -m benchmarks.echo [--blocks N]`.

A client, a service and a worker pass a message of 32 bytes on and back by honed's own connections, in three
processes, and do nothing else. Prints what a tenth of the blocks do not exceed, as `benchmarks.latency`.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import socket
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np

from honed.daemon.listener import listen
from honed.protocol.aiolink import AsyncLink
from honed.protocol.errors import Unavailable
from honed.protocol.peer import Peer, RequestReceived, ResponseReceived, read_socket, write_socket
from honed.protocol.wire import FrameLimits
from honed.runtime.client import SocketLink

from .latency import processor_seconds

_REQUESTS = 100  # In a block
_PARAMS = {"number": 1, "timeout": 60_000_000, "raw_input_contents": [bytes(32)]}


def _peer(*, serves: bool) -> Peer:
    return Peer(serves=serves, receiving=FrameLimits(), sending=FrameLimits())


def _work(connected: socket.socket) -> None:
    """Answer each request with its parameters."""
    peer = _peer(serves=True)
    while read_socket(connected, peer):
        while isinstance(event := peer.next_event(), RequestReceived):
            peer.answer(event.msgid, event.params)
        write_socket(connected, peer)


async def _serve(listening: socket.socket, worker: socket.socket) -> None:
    """Pass the requests of a client to the worker, and its answers back."""
    loop, peer = asyncio.get_running_loop(), _peer(serves=True)
    link = AsyncLink(worker, _peer(serves=False), lambda: Unavailable("the worker ended"))
    connected, _ = await loop.sock_accept(listening)

    def answer(msgid: int, answered: ResponseReceived | Exception) -> None:
        assert isinstance(answered, ResponseReceived)
        peer.answer(msgid, answered.result)
        write_socket(connected, peer)

    def read() -> None:
        read_socket(connected, peer)
        while isinstance(event := peer.next_event(), RequestReceived):
            link.ask(event.method, event.params, partial(answer, event.msgid))

    loop.add_reader(connected.fileno(), read)
    await asyncio.Event().wait()


def measure(blocks: int) -> None:
    """Print the latency of a message, and the processor time of each process for it."""
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="echo-") as folder:
        path = Path(folder) / "s"
        listening, (ours, theirs) = listen(path), socket.socketpair()
        worker = fork.Process(target=_work, args=(theirs,), daemon=True)
        service = fork.Process(target=lambda: asyncio.run(_serve(listening, ours)), daemon=True)
        worker.start()
        service.start()
        link = SocketLink(str(path), 60.0)
        pids = {"service": service.pid or 0, "worker": worker.pid or 0, "client": os.getpid()}
        figures = []
        for _ in range(blocks):
            before, latencies = [processor_seconds(pid) for pid in pids.values()], []
            for _ in range(_REQUESTS):
                began = time.perf_counter()
                link.wait(link.send("ModelRun", _PARAMS, ()), None)
                latencies.append(time.perf_counter() - began)
            spent = [processor_seconds(pid) for pid in pids.values()]
            times = [(now - then) / _REQUESTS for now, then in zip(spent, before, strict=True)]
            figures.append([float(np.median(latencies)), *times])
        for name, us in zip(("latency", *pids), np.percentile(figures, 10, axis=0) * 1e6, strict=True):
            print(f"{name}: {us:.0f} us")
        link.close()
        service.terminate()
        worker.terminate()


def main() -> None:
    """Read the arguments, and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--blocks", type=int, default=40, help="of 100 messages")
    measure(parser.parse_args().blocks)


if __name__ == "__main__":
    main()
