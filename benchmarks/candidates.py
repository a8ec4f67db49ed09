"""Candidates that are judged in a given time, beside another checkout's.

python -m benchmarks.candidates MODEL.onnx --against TREE [--seconds N] [--turns N]

Both checkouts, each with a .venv of its own, tune the model from nothing, in turns and with the same seed, on
the first OpenCL device.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

_HERE = Path(__file__).parents[1]


def main() -> None:
    """Print a row for each turn, and the ratio of the sums."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.candidates", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--against", type=Path, metavar="TREE", required=True, help="another checkout")
    parser.add_argument("--seconds", type=int, default=60, help="of each session")
    parser.add_argument("--turns", type=int, default=2)
    options = parser.parse_args()
    print("| turn | before | now |\n|---|---|---|", flush=True)
    totals = [0, 0]
    with tempfile.TemporaryDirectory(prefix="honed-candidates-") as name:
        for turn in range(options.turns):
            for n, tree in enumerate((options.against.resolve(), _HERE)):
                caches = Path(name) / str(n)
                caches.mkdir(exist_ok=True)
                judged = _judged(tree, options.model.resolve(), caches, f"{turn}.db", options.seconds)
                totals[n] += judged
                print(f"| {turn + 1} | {judged} | " if n == 0 else f"{judged} |\n", end="", flush=True)
    print(f"now {totals[1] / max(1, totals[0]):.2f} times as many candidates")


def _judged(tree: Path, model: Path, caches: Path, records: str, seconds: int) -> int:
    """Return how many candidates a session of a checkout measured, with new records."""
    command = [str(tree / ".venv/bin/python"), "-P", "-m", "honed.tuner", "tune", str(model)]
    command += ["--records", str(caches / records), "--cache-dir", str(caches)]
    command += ["--seconds", str(seconds), "--seed", "1"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{tree}: {done.stderr.strip() or done.stdout.strip()[-500:]}")
    return sum('"trial"' in line.partition(",")[0] for line in done.stdout.splitlines())


if __name__ == "__main__":
    main()
