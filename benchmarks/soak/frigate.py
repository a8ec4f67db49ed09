"""Sends pictures through `honed-frigate` at a rate, with the bridge and the service killed in between.

    python -m benchmarks.soak.frigate --minutes 10 --rate 30

The CPU engine serves YOLOX-nano, the detector behaves like Frigate's plug-in, and every answer is compared
with those of ONNX Runtime and of the tests' reference. Prints a line at the end; exit status 1 if one was
wrong, or if more were lost than were in flight at the kills.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnxruntime
from tests.daemon.running import Service, start
from tests.extensions import frigate_reference
from tests.extensions.conftest import YOLOX, Bridge
from tests.extensions.detector import Detector

CONFIG = '\n[serve]\nengine = "cpu"\n\n[cpu]\nthreads = 1\n'


@dataclass
class Tally:
    """The results of the pictures."""

    right: int = 0
    wrong: int = 0
    lost_at_kills: int = 0
    lost: int = 0
    late: int = 0  # Right, and more than 200 ms after they were sent
    rate: float = 0.0  # A second, of those that were right
    milliseconds: list[float] = field(default_factory=list)

    def line(self) -> str:
        """Return the counts as a line of text."""
        median, p99, longest = np.percentile(self.milliseconds, [50, 99, 100])
        return (
            f"{self.right} right, {self.rate:.1f} a second, {self.wrong} wrong, "
            f"{self.lost_at_kills} lost when something was killed, {self.lost} lost otherwise, "
            f"{self.late} after 200 ms; median {median:.0f}, p99 {p99:.0f}, longest {longest:.0f} ms"
        )


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--rate", type=float, default=30, help="pictures a second, at most")
    parser.add_argument(
        "--timeout-ms", type=int, default=200, help="request_timeout_ms of Frigate's detector"
    )
    parser.add_argument("--kills", type=int, default=4, help="of the bridge and the service, in turns")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="honed-") as name:
        folder = Path(name)
        (folder / "state").mkdir()
        service = start(folder / "state", folder / "cache", config=CONFIG)
        try:
            with service.client() as client:
                client.add(YOLOX)
            endpoint = f"ipc://{folder}/detector"
            bridge = Bridge(
                "honed.frigate.main", f'endpoint = "{endpoint}"\nretry_seconds = 60', service.socket, folder
            )
            try:
                tally = soak(options, service, bridge, endpoint)
            finally:
                bridge.stop()
        finally:
            service.stop()
    print(tally.line())
    return int(tally.wrong > 0 or tally.lost > 0 or tally.lost_at_kills > options.kills)


def soak(options: argparse.Namespace, service: Service, bridge: Bridge, endpoint: str) -> Tally:
    """Send the pictures, one after the other, no more than `rate` a second."""
    picture = frigate_reference.photograph(416, 416)
    session = onnxruntime.InferenceSession(YOLOX, providers=["CPUExecutionProvider"])
    wanted = frigate_reference.yolox(session.run(None, {"images": picture})[0], 416, 416)
    detector = Detector(endpoint, YOLOX, "yolox", timeout_ms=options.timeout_ms)
    seconds = options.minutes * 60
    kills = [seconds * (number + 1) / (options.kills + 1) for number in range(options.kills)]
    tally = Tally()
    begun = time.monotonic()
    while (now := time.monotonic() - begun) < seconds:
        killing = bool(kills) and now >= kills[0]
        if killing:
            kill(bridge if len(kills) % 2 == 0 else service)
            del kills[0]
        lost, sent = detector.lost, time.monotonic()
        found = detector.detect(picture)
        took = (time.monotonic() - sent) * 1000
        if detector.lost > lost:
            tally.lost_at_kills += killing
            tally.lost += not killing
        elif not np.allclose(found, wanted, rtol=1e-5, atol=1e-6):
            tally.wrong += 1
        else:
            tally.right += 1
            tally.milliseconds.append(took)
            tally.late += took > 200
        time.sleep(max(0.0, sent + 1 / options.rate - time.monotonic()))
    tally.rate = len(tally.milliseconds) / seconds
    detector.close()
    return tally


def kill(victim: Bridge | Service) -> None:
    """Kill by SIGKILL, and start another at once, as systemd does."""
    victim.kill()
    if isinstance(victim, Bridge):
        victim.start()
    else:
        victim.restart()


if __name__ == "__main__":
    sys.exit(main())
