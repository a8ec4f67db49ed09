"""Hot swaps under load: `python -m benchmarks.swaps`.

Four client processes send 10,000 requests while ten versions of a model, each faster than the one before, are
published. Prints lost and wrong requests, and the latencies of requests near a swap beside the median around
them; the same load without swaps, run before and after, shows the machine's own latencies.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
from tests.daemon import spin
from tests.daemon.running import start, wait_for
from tests.daemon.spin import X

from honed.runtime import Client
from honed.runtime.errors import HonedError

CLIENTS, REQUESTS, SWAPS = 4, 10_000, 10
NEAR_SECONDS = 2.0  # Requests from a publication's begin to this long after its end are near it
TURNS, STEP = 60_000, 0.85
Row = tuple[float, float, str]  # Times of sending and answer, and what was wrong


def model(folder: Path, number: int) -> Path:
    """Write a model that is faster by each version."""
    return spin.write(folder / f"v{number}.honed", round(TURNS * STEP**number))


def ask(socket: Path, count: int, go: Event, out: Any) -> None:
    """Send a client's requests, and put their rows into `out`."""
    rows: list[Row] = []
    with Client(socket) as client:
        go.wait()
        for _ in range(count):
            begun = time.monotonic()
            try:
                right = np.allclose(client.infer("m", {"x": X})["y"], X + 1)
                said = "" if right else "wrong"
            except HonedError as error:
                said = f"lost: {error}"
            rows.append((begun, time.monotonic(), said))
    out.put(rows)


def load(socket: Path, total: int) -> tuple[list[multiprocessing.Process], Event, Any]:
    """Start client processes that wait for the event."""
    go = multiprocessing.Event()
    out: multiprocessing.Queue[Any] = multiprocessing.Queue()
    clients = [
        multiprocessing.Process(target=ask, args=(socket, total // CLIENTS, go, out)) for _ in range(CLIENTS)
    ]
    for client in clients:
        client.start()
    return clients, go, out


def collected(clients: list[multiprocessing.Process], out: Any) -> list[Row]:
    """Return the rows of all clients, after they ended."""
    rows = sorted(row for _ in clients for row in out.get())
    for client in clients:
        client.join()
    return rows


def slow(rows: list[Row], near: list[Row]) -> tuple[float, float, int]:
    """Return the median of `rows` in ms, the largest of `near` over it, and the number over twice it."""
    middle = statistics.median(end - begin for begin, end, _ in rows)
    ratios = [(end - begin) / middle for begin, end, _ in near]
    return middle * 1e3, max(ratios, default=0.0), sum(ratio > 2 for ratio in ratios)


def control(socket: Path, total: int) -> dict[str, Any]:
    """Measure the load without swaps."""
    clients, go, out = load(socket, total)
    go.set()
    rows = collected(clients, out)
    middle, worst, beyond = slow(rows, rows)
    return {"requests": len(rows), "median_ms": middle, "worst_ratio": worst, "beyond_twice": beyond}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        service = start(folder / "state", folder / "cache")
        try:
            with service.client() as client:
                client.add(model(folder, 0), name="m")
                before = control(service.socket, options.requests // 4)
                clients, go, out = load(service.socket, options.requests)
                go.set()
                swaps: list[tuple[float, float, dict[str, Any]]] = []
                while sum(reported["published"] for _, _, reported in swaps) < SWAPS:
                    number = len(swaps) + 1  # A version that is not faster is replaced by a faster one
                    wait_for(lambda: not client.history("m")["on_trial"], "the trial to end", service)
                    begun = time.monotonic()
                    expected = client.show("m")["sha256"]
                    reported = client.publish("m", model(folder, number), expected=expected, why="bench")
                    swaps.append((begun, time.monotonic(), reported))
                rows = collected(clients, out)
                after = control(service.socket, options.requests // 4)
        finally:
            service.stop()
    report(options.json, rows, swaps, before, after)


def report(
    as_json: bool,
    rows: list[Row],
    swaps: list[tuple[float, float, dict[str, Any]]],
    before: dict[str, Any],
    after: dict[str, Any],
) -> None:
    """Print the clients' results."""
    each = []
    for begun, ended, reported in swaps:
        around = [r for r in rows if begun - NEAR_SECONDS < r[0] < ended + NEAR_SECONDS]
        # The longer of the medians before and after: the swap makes the later ones shorter.
        earlier = [r for r in around if r[0] < begun] or around
        close = [r for r in rows if begun - 0.5 < r[1] and r[0] < ended + NEAR_SECONDS]
        each.append(
            {
                "published": reported["published"],
                "sentence": reported["sentence"],
                "seconds": ended - begun,
                "worst": slow(earlier, close)[1],
            }
        )
    during = [r for r in rows if any(b < r[1] and r[0] < e for b, e, _ in swaps)]
    result = {
        "requests": len(rows),
        "lost": sum(said.startswith("lost") for _, _, said in rows),
        "wrong": sum(said == "wrong" for _, _, said in rows),
        "published": sum(reported["published"] for _, _, reported in swaps),
        "requests_while_publishing": len(during),
        "worst_ratio_near_a_swap": max(e["worst"] for e in each),
        "swaps": each,
        "without_swaps": [before, after],
    }
    if as_json:
        print(json.dumps(result, indent=1))
        return
    print(f"requests          {result['requests']}, {result['requests_while_publishing']} while publishing")
    print(f"lost, wrong       {result['lost']}, {result['wrong']}")
    print(f"swaps             {result['published']} of {len(swaps)} published")
    for swap in (swap for swap in result["swaps"] if not swap["published"]):
        print(f"not published     {swap['sentence']}")
    print("slowest request near each swap, over the median just before it:")
    print("  " + " ".join(f"{e['worst']:.2f}" for e in each))
    for name, figures in (("before", before), ("after", after)):
        print(
            f"no swaps, {name:7s} {figures['requests']} requests, median {figures['median_ms']:.1f} ms, "
            f"slowest {figures['worst_ratio']:.2f} times that, {figures['beyond_twice']} beyond twice"
        )


if __name__ == "__main__":
    main()
