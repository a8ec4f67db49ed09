"""The programs: how each is installed, and how it is run alone and beside honed."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import models

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
_NPM = ("onnxruntime-node@1.30.0", "@huggingface/transformers@4.3.2", "sherpa-onnx-node@1.13.8")
_PYPI = ("sherpa-onnx==2.0.1", "sherpa-onnx-core==2.0.1", "piper_phonemize==1.1.0")
_TOLERANCE = 1e-3
_ROUTED = re.compile(r"^honed: .* (\d+) of (\d+) runs routed$", re.MULTILINE)

PROGRAMS: dict[str, Callable[[Path], Sequence[str]]] = {
    "transformers.js": lambda folder: ("node", str(folder / "embed.mjs"), str(folder / "models"), "bert"),
    "onnxruntime-node": lambda folder: ("node", str(folder / "image.cjs"), str(folder / "images.onnx")),
    "sherpa-onnx-node": lambda folder: ("node", str(folder / "speech.cjs"), str(folder / "gtcrn.onnx")),
    "sherpa-onnx (Python)": lambda folder: (
        sys.executable,
        str(folder / "speech.py"),
        str(folder / "gtcrn.onnx"),
    ),
    "piper_phonemize": lambda folder: (sys.executable, str(folder / "vowels.py")),
}


@dataclass(frozen=True)
class Ran:
    """What a program answered, the milliseconds of its calls, its largest memory, and its runs.

    `runs` are those of ONNX Runtime beside honed, of which `routed` were answered by the service.
    """

    answer: Any
    times: Sequence[float]
    memory_mib: float
    routed: int
    runs: int
    log: str


def install(folder: Path) -> None:
    """Install the programs, and write their models, unless they are there."""
    done = folder / "installed"
    if done.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    # Their install scripts fetch libraries for GPUs, which need not be had.
    npm = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", str(folder), *_NPM]
    subprocess.run(npm, check=True, stdout=subprocess.DEVNULL)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(folder / "python"),
        *_PYPI,
    ]
    subprocess.run(pip, check=True)
    for script in (*_HERE.glob("*.mjs"), *_HERE.glob("*.cjs"), _HERE / "speech.py", _HERE / "vowels.py"):
        (folder / script.name).write_bytes(script.read_bytes())  # beside node_modules, where node looks
    models.write_embedder(folder / "models" / "bert")
    models.write_images(folder / "images.onnx")
    models.write_denoiser(folder / "gtcrn.onnx")
    done.touch()


def built(folder: Path) -> Path:
    """Return the preload library, made of this source."""
    subprocess.run(["make", "-s", "-C", str(_ROOT / "libhoned"), f"BUILD={folder / 'libhoned'}"], check=True)
    return folder / "libhoned" / "libhoned-ort.so"


def run(
    folder: Path, name: str, seconds: float, library: Path | None = None, socket: str = "", **more: str
) -> Ran:
    """Run a program, beside honed where there is a library to preload."""
    beside = {"LD_PRELOAD": str(library), "HONED_SOCKET": socket, "HONED_ORT_LOG": "1"} if library else {}
    environment = {**os.environ, "PYTHONPATH": str(folder / "python"), **beside, **more}
    command = ["/usr/bin/env", *PROGRAMS[name](folder), str(seconds)]
    with tempfile.TemporaryFile("w+") as errors:
        begun = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert begun.stdout is not None
        out = begun.stdout.read()
        _, status, usage = os.wait4(begun.pid, 0)
        begun.returncode = os.waitstatus_to_exitcode(status)
        errors.seek(0)
        log = errors.read()
    if begun.returncode:
        raise SystemExit(f"{name} ended with {begun.returncode}: {log}")
    said = json.loads(out.splitlines()[-1])
    counts = [tuple(map(int, each)) for each in _ROUTED.findall(log)]
    routed, runs = (sum(each[i] for each in counts) for i in range(2))
    return Ran(said["answer"], said["times"], usage.ru_maxrss / 1024, routed, runs, log)


def near(answer: Any, expected: Any) -> bool:
    """Return whether two answers are equal, numbers within a tolerance."""
    if isinstance(answer, list) and isinstance(expected, list):
        return len(answer) == len(expected) and all(map(near, answer, expected))
    if isinstance(answer, float | int) and isinstance(expected, float | int):
        return math.isclose(answer, expected, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    return bool(answer == expected)
