"""Other people's programs alone and beside honed: `python -m benchmarks.native FOLDER [PROGRAM ...]`.

FOLDER gets the programs, from npm and PyPI, unless it has them. Each program does the same work for
--seconds, alone and with libhoned-ort.so preloaded, in turns, against a service of the benchmark's own, which
has --settle seconds to compile its model before. Answers must be equal within a tolerance.

    own, beside   median of a call of the program in the second half of a turn, in ms; the median of turns
    routed        the share of the program's runs of ONNX Runtime that the service answered
    memory        the program's largest, in MiB
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median

from benchmarks.serving import service

from .programs import PROGRAMS, Ran, built, install, near, run

_CONFIG = """
[tuner]
spawn = false
[idle]
quiet_seconds = 0.2
settle_seconds = 0
max_pressure_percent = 1000
max_load_per_core = 1000
max_gpu_percent = 100
"""


def main() -> int:
    """Run the command line; 1 where answers differ."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.native", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help=f"of {', '.join(PROGRAMS)}; all")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each turn")
    parser.add_argument("--settle", type=float, default=300.0, help="seconds until a model is compiled")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    install(options.folder)
    library, wrong = built(options.folder), 0
    print(
        "| program | own, ms | beside, ms | routed | memory own, MiB | beside |\n"
        "|---|---:|---:|---:|---:|---:|"
    )
    for name in options.programs or PROGRAMS:
        with service(options.folder, _CONFIG) as client:
            run(options.folder, name, options.settle, library, client.socket)
            alone: list[Ran] = []
            beside: list[Ran] = []
            for _ in range(options.turns):
                alone.append(run(options.folder, name, options.seconds))
                beside.append(run(options.folder, name, options.seconds, library, client.socket))
        if not all(near(each.answer, alone[0].answer) for each in (*alone, *beside)):
            print(f"{name}: answers differ", file=sys.stderr)
            wrong = 1
        routed = sum(each.routed for each in beside) / max(1, sum(each.runs for each in beside))
        own, with_honed = (
            median(median(each.times[len(each.times) // 2 :]) for each in both) for both in (alone, beside)
        )
        memory = [max(each.memory_mib for each in both) for both in (alone, beside)]
        print(
            f"| {name} | {own:.2f} | {with_honed:.2f} | {routed:.0%} | {memory[0]:.0f} | {memory[1]:.0f} |",
            flush=True,
        )
    return wrong


if __name__ == "__main__":
    sys.exit(main())
