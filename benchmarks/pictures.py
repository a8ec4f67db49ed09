"""The pictures of the README, of a real service: `python -m benchmarks.pictures [FOLDER]`, some ten minutes.

A service of its own serves a model of poolings and a product whose shapes no shipped table covers, so that
tuning can gain something on a processor, too. Requests come in bursts; between them the service tunes by
itself. Then `hone history --served --png` draws the latency of the requests. LightGlue (`hone demo`) is
added, and Chromium (Debian's package) takes a picture of the page of `hone report`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from benchmarks.passage.scenario import IDLE, write_model
from honed.protocol.errors import HonedError
from honed.runtime.client import Client

_IMAGE = (1, 16, 125, 127)
_VERSIONS, _SECONDS, _AFTER = 3, 300.0, 45.0  # Versions to wait for, the limit of that, and seconds after it
_BURST, _PAUSE_SECONDS = 5, 5.0  # Requests, and between two bursts


def main() -> None:
    """Write both pictures of the README."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("docs/images"), help="to write them to")
    folder = parser.parse_args().folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    hone = [sys.executable, "-m", "honed.tool.main"]
    with tempfile.TemporaryDirectory(prefix="pictures-") as temporary, contextlib.ExitStack() as ended:
        place = Path(temporary)
        (place / "honed.toml").write_text(IDLE)
        os.environ["HONED_SOCKET"] = str(place / "s")
        service = [sys.executable, "-m", "honed.daemon.service", f"--config={place / 'honed.toml'}"]
        service += [f"--state-dir={place / 'state'}", f"--cache-dir={place / 'cache'}"]
        running = subprocess.Popen(service, stdin=subprocess.DEVNULL)
        ended.callback(running.wait)
        ended.callback(running.terminate)
        _until_ready()
        write_model(place / "pooling.onnx", _IMAGE)
        with Client() as client:
            client.add(place / "pooling.onnx", name="pooling", engine="gpu")
            stop = threading.Event()
            asking = threading.Thread(target=_ask, args=("pooling", stop))
            asking.start()
            end = time.monotonic() + _SECONDS
            while client.history("pooling")["version"] < _VERSIONS and time.monotonic() < end:
                time.sleep(1.0)
            time.sleep(_AFTER)
            stop.set()
            asking.join()
            subprocess.run([*hone, "demo", "lightglue", "-o", str(place / "lightglue.onnx")], check=True)
            client.add(place / "lightglue.onnx", name="lightglue")
            for _ in range(_BURST):
                client.infer("lightglue", _made_up(client, "lightglue"))
        curve = folder / "latency.svg"
        subprocess.run([*hone, "history", "pooling", "--served", "--png", str(curve)], check=True)
        subprocess.run([*hone, "report", "-o", str(place / "report.html")], check=True)
        photograph(place / "report.html", folder / "report.png")


def photograph(page: Path, picture: Path) -> None:
    """Have Chromium draw the top of a page."""
    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit("there is no chromium; install it (apt install chromium)")
    size = ["--window-size=1100,1000", "--hide-scrollbars"]
    options = ["--headless", "--no-sandbox", "--disable-gpu", *size, f"--screenshot={picture}"]
    subprocess.run([chromium, *options, page.as_uri()], check=True)


def _until_ready() -> None:
    end = time.monotonic() + 120.0
    while time.monotonic() < end:
        with contextlib.suppress(HonedError), Client() as client:
            if client.ready():
                return
        time.sleep(0.2)
    raise SystemExit("the service does not become ready; its log says why")


def _ask(model: str, stop: threading.Event) -> None:
    """Make requests in bursts."""
    with Client() as client:
        given = _made_up(client, model)
        while not stop.wait(_PAUSE_SECONDS):
            for _ in range(_BURST):
                client.infer(model, given)


def _made_up(client: Client, model: str) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        tensor["name"]: random.standard_normal(tensor["shape"]).astype(np.float32)
        for tensor in client.metadata(model)["inputs"]
    }


if __name__ == "__main__":
    main()
