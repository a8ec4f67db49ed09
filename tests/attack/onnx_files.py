"""ONNX files for the compiler.

`OnnxFiles` adds them to the service, whose compiler takes seconds for each; `Frontend` gives many to the
compiler's frontend in a child, which must answer each with a model or a HonedError.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from honed.runtime.errors import HonedError

from .attack import Attack
from .bed import Bed
from .material.onnx_makers import offered

_REFUSALS = {"INVALID_ARGUMENT", "FAILED_PRECONDITION", "RESOURCE_EXHAUSTED"}
_ONE_SECONDS = 10.0  # of processor time, that the frontend may take for one small file
_STUCK_SECONDS = 90.0  # on the clock
_MEMORY_BYTES = 3 << 30  # of the child that runs the frontend
_NAME = "compiled"


class OnnxFiles(Attack):
    """Files added to the service: its compiler's child takes the blow."""

    name = "onnx-files"
    what = "altered ONNX files, deep graphs and functions, giant claims, outside paths, through the service"
    least_seconds = 8.0

    def run(self, bed: Bed, rng: random.Random, seconds: float) -> None:
        end = time.monotonic() + seconds
        while True:
            label, data = offered(rng, costly=False)
            bed.findings.offered(label, data)
            with bed.written("offered.onnx", data) as path, bed.client(timeout=120) as client:
                try:
                    client.add(path, name=_NAME, shapes=rng.choice(({}, {"x": (2, 8)})))
                    bed.findings.answered(None, label)
                    client.remove(_NAME)
                except HonedError as error:
                    bed.findings.answered({"code": error.code, "message": str(error)}, label)
                    if error.code not in _REFUSALS:
                        bed.findings.problem(f"{error.code} for {label}: {error}")
            if time.monotonic() > end:
                return


class Frontend(Attack):
    """The compiler's frontend in a child of ours, for volume."""

    name = "onnx-frontend"
    what = "the same files in thousands, given to the compiler's frontend alone"
    least_seconds = 3.0

    def run(self, bed: Bed, rng: random.Random, seconds: float) -> None:
        self._file, self._label = bed.scratch / "frontend.onnx", bed.scratch / "frontend.label"
        for path in (self._file, self._label):
            path.write_bytes(b"")
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._child(bed, rng.randrange(2**63), end - time.monotonic())

    def _child(self, bed: Bed, seed: int, seconds: float) -> None:
        """One child until its time is over, or it is stuck with one file."""
        command = [sys.executable, "-m", "tests.attack.onnx_files", str(seed), str(seconds), str(bed.scratch)]
        log = bed.scratch / "frontend.log"
        with log.open("wb") as stream:
            child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stream, text=True)
        assert child.stdout is not None
        while child.poll() is None:
            time.sleep(0.05)
            if time.time() - self._label.stat().st_mtime > _STUCK_SECONDS and self._label.read_text():
                child.kill()
                self._kept(bed, f"the frontend took more than {_STUCK_SECONDS:.0f} s")
        for line in child.stdout.read().splitlines():
            if line.startswith("tries "):
                bed.findings.tries += int(line.split()[1])
            else:
                bed.findings.problem(line)
        if child.returncode not in (0, -signal.SIGKILL):
            self._kept(bed, f"the frontend ended with {child.returncode}: {log.read_text()[-1500:]}")
        child.stdout.close()

    def _kept(self, bed: Bed, problem: str) -> None:
        label = self._label.read_text()
        bed.findings.offered(label, self._file.read_bytes())
        bed.findings.problem(f"{problem} ({label})")


def main(arguments: list[str]) -> None:
    """In the child: many files; what is neither a model nor a HonedError is printed."""
    import resource

    from honed.tuner.frontend import load, normalise

    rng, seconds, folder = random.Random(int(arguments[0])), float(arguments[1]), Path(arguments[2])
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, _MEMORY_BYTES))
    path, tries = folder / "frontend.onnx", 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        label, data = offered(rng)
        path.write_bytes(data)
        path.with_suffix(".label").write_text(label)
        tries += 1
        begun = time.process_time()
        try:
            normalise(load(path))
        except HonedError:
            pass
        except BaseException as error:  # noqa: BLE001 - that is what is looked for
            kept = folder.parent / f"frontend-{tries}.onnx"
            kept.write_bytes(data)
            print(f"{type(error).__name__} for {label} ({kept}): {str(error)[:300]!r}", flush=True)
        if time.process_time() - begun > _ONE_SECONDS:
            print(f"{label} took {time.process_time() - begun:.0f} s", flush=True)
    print(f"tries {tries}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
