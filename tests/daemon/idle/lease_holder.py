"""A tuner's stand-in: a process that has the lease and obeys commands, or runs real kernels under it.

python -m tests.daemon.idle.lease_holder SOCKET BOUND        obeys lines on stdin, answers each with JSON
python -m tests.daemon.idle.lease_holder SOCKET BOUND MILLIS runs kernels of about that time until stdin ends
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from honed.runtime.calling.leaseclient import LeaseHolder
from honed.runtime.errors import HonedError

SPIN = """__kernel void spin(__global float* out, int rounds) {
  float x = get_global_id(0);
  for (int i = 0; i < rounds; ++i) x = fma(x, 0.999999f, 0.5f);
  out[get_global_id(0)] = x; }"""


class Tuner:
    """The process, from outside."""

    def __init__(self, socket: Path, bound: float, kernel_ms: float | None = None) -> None:
        extra = [] if kernel_ms is None else [str(kernel_ms)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.daemon.idle.lease_holder", str(socket), str(bound), *extra],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[3],
        )

    def __enter__(self) -> Tuner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.communicate()

    def say(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command.encode() + b"\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], 60)
        assert ready, "the tuner says nothing"
        said: dict[str, Any] = json.loads(self.process.stdout.readline())
        return said

    def do(self, command: str) -> dict[str, Any]:
        self.say(command)
        return self.hear()


def obey(lease: LeaseHolder) -> None:
    """Commands: `wait SECONDS`, `may`, `until revoked`, `release`."""
    for line in sys.stdin:
        command, _, argument = line.strip().partition(" ")
        told: dict[str, Any] = {}
        try:
            if command == "wait":
                told["granted"] = lease.wait_until_granted(float(argument))
            elif command == "until":
                while lease.may_run():
                    time.sleep(0.001)
            elif command == "release":
                lease.release()
            told |= {"may": lease.may_run(), "why": lease.why}
        except HonedError as error:
            told = {"error": type(error).__name__, "message": str(error)}
        print(json.dumps(told), flush=True)


def work(lease: LeaseHolder, kernel_ms: float) -> None:
    """Run kernels of about `kernel_ms` while the lease allows; when stdin ends it says how long they took."""
    import numpy as np
    import pyopencl as cl

    from honed.machine import devices

    device = devices.select(None)
    context = cl.Context([device.cl])
    queue = cl.CommandQueue(context)
    kernel = cl.Program(context, SPIN).build().spin
    out = cl.Buffer(context, cl.mem_flags.WRITE_ONLY, 4 * 256)

    def run(rounds: int) -> float:
        begun = time.perf_counter()
        kernel(queue, (256,), (64,), out, np.int32(rounds))
        queue.finish()
        return time.perf_counter() - begun

    run(1)
    rounds = 100_000
    while (taken := min(run(rounds) for _ in range(3))) < kernel_ms / 1e3 / 2:
        rounds = round(rounds * min(10.0, max(1.5, kernel_ms / 1e3 / taken)))
    rounds = max(1, round(rounds * kernel_ms / 1e3 / taken))
    longest, count = 0.0, 0
    print(json.dumps({"ready": True}), flush=True)
    while not _told():
        if not lease.wait_until_granted(0.05):
            continue
        while lease.may_run() and not _told():
            longest = max(longest, run(rounds))
            count += 1
        lease.release()
    print(json.dumps({"kernels": count, "longest_ms": longest * 1e3}), flush=True)


def _told() -> bool:
    return bool(select.select([sys.stdin], [], [], 0)[0])


if __name__ == "__main__":
    with LeaseHolder(float(sys.argv[2]), socket=sys.argv[1]) as holder:
        if len(sys.argv) > 3:
            work(holder, float(sys.argv[3]))
        else:
            obey(holder)
