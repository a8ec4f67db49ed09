"""Run ONNX's node tests through the whole of honed on an OpenCL device.

    python -m tests.tuner.backend.run [--filter RE] [--jobs 2] [--json OUT] [--write-list]

`--write-list` makes right.txt of the cases that ran: do not use it with `--filter`, which drops the others.
It changes nothing for an operator of which ONNX has no node tests.

Prints how many cases were imported, compiled, right, refused with a reason, wrong; then how the CPU engine
did on those that the compiler refused, as ONNX ships them. Parameters that exporters write as constants are
frozen for the compiler (cases.PARAMETERS). A case that kills its process counts as a crash.
"""

from __future__ import annotations

import argparse
import collections
import json
import queue
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import cases

RIGHT_LIST = Path(__file__).with_name("right.txt")
CASE_SECONDS = 60.0  # a case that takes longer is stopped


class Worker:
    """A process that runs cases; started again after one kills it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, name: str) -> dict[str, Any]:
        """The result of one case."""
        if self._process is None:
            self._process = self._start()
        process = self._process
        assert process.stdin is not None
        try:
            process.stdin.write(name + "\n")
            process.stdin.flush()
            line = self._line(process, CASE_SECONDS)
        except BrokenPipeError:
            line = ""
        if line:
            return dict(json.loads(line))
        process.kill()
        status = process.wait()
        self._process = None
        text = (
            f"stopped after {CASE_SECONDS:.0f} s"
            if status == -9
            else f"the process died with status {status}"
        )
        return {"name": name, "outcome": "crash", "stage": "", "text": text}

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(30)

    @staticmethod
    def _start() -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.tuner.backend.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            bufsize=1,
        )
        if not Worker._line(process, 120.0):
            raise RuntimeError(
                "the worker did not start; run python -m tests.tuner.backend.worker to see why"
            )
        return process

    @staticmethod
    def _line(process: subprocess.Popen[str], seconds: float) -> str:
        assert process.stdout is not None
        readable, _, _ = select.select([process.stdout], [], [], seconds)
        return process.stdout.readline() if readable else ""


def run(names: list[str], jobs: int, show: bool = True) -> list[dict[str, Any]]:
    """Results of the cases, in their order."""
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in names:
        waiting.put(name)
    results: dict[str, dict[str, Any]] = {}

    def serve() -> None:
        worker = Worker()
        try:
            while True:
                try:
                    name = waiting.get_nowait()
                except queue.Empty:
                    return
                results[name] = worker.run(name)
                if show and len(results) % 50 == 0:
                    print(f"  {len(results)} of {len(names)}", flush=True)
        finally:
            worker.close()

    threads = [threading.Thread(target=serve) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[name] for name in names]


def summary(results: list[dict[str, Any]]) -> dict[str, int]:
    """Counts: how far cases came and how they ended."""
    outcomes = collections.Counter(r["outcome"] for r in results)
    ran = [r for r in results if r["outcome"] in ("right", "wrong")]
    imported = [r for r in results if r["stage"] in ("compile", "compare")]
    return {
        "cases": len(results),
        "imported": len(imported),
        "compiled": len(ran),
        "right": outcomes["right"],
        "refused with a reason": outcomes["refused"],
        "wrong": outcomes["wrong"],
        "errors": outcomes["error"],
        "crashes": outcomes["crash"],
    }


def on_cpu(results: list[dict[str, Any]]) -> dict[str, int]:
    """Counts of the CPU engine on what the compiler refused, and of both engines together.

    The CPU engine is the reference: where it is wrong, what ONNX expects proves it so.
    """
    outcomes = collections.Counter(r["cpu"]["outcome"] for r in results if "cpu" in r)
    compiled = sum(r["outcome"] == "right" for r in results)
    return {
        "right on the CPU engine": outcomes["right"],
        "refused there too": outcomes["refused"],
        "differs from ONNX there": outcomes["wrong"],
        "right over both": compiled + outcomes["right"],
    }


def why_refused(texts: Iterable[str]) -> collections.Counter[str]:
    """How often each reason of the CPU engine is given, whatever it names."""
    short = (text.split(" with name ")[0].split("; only tensors")[0] for text in texts)
    return collections.Counter(re.sub(r"'[^']*' ", "", text)[:160] for text in short)


def main(argv: list[str] | None = None) -> int:
    """Run, print, write; 1 where a case is wrong, fails without a reason or crashes."""
    parser = argparse.ArgumentParser(description="Run ONNX's node tests through honed.")
    parser.add_argument("--filter", default="", help="regular expression that names must match")
    parser.add_argument("--all", action="store_true", help="run every case (the default without --filter)")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write every result here")
    parser.add_argument("--write-list", action="store_true", help="write the right ones to right.txt")
    options = parser.parse_args(argv)
    names = [n for n in sorted(cases.all_cases()) if options.all or re.search(options.filter, n)]
    began = time.monotonic()
    results = run(names, options.jobs)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    if options.write_list:
        right = sorted(r["name"] for r in results if r["outcome"] == "right")
        RIGHT_LIST.write_text("\n".join(right) + "\n")
    for result in results:
        if result["outcome"] in ("wrong", "error", "crash"):
            print(f"{result['outcome']:8} {result['name']}: {result['text']}")
    reasons = collections.Counter(
        r["text"].split(" (", 1)[0] + ": " + r["text"].rsplit("): ", 1)[-1]
        for r in results
        if r["outcome"] == "refused"
    )
    print("refused:")
    for reason, count in reasons.most_common():
        print(f"  {count:4} {reason[:180]}")
    print("refused by the CPU engine too:")
    refused = (r["cpu"]["text"] for r in results if r.get("cpu", {}).get("outcome") == "refused")
    for reason, count in why_refused(refused).most_common():
        print(f"  {count:4} {reason}")
    for result in results:
        if result.get("cpu", {}).get("outcome") == "wrong":
            print(f"differs from ONNX on the CPU engine: {result['name']}: {result['cpu']['text']}")
    for label, number in {**summary(results), **on_cpu(results)}.items():
        print(f"{label:>24}: {number}")
    print(f"{'seconds':>24}: {time.monotonic() - began:.0f}")
    return 1 if any(r["outcome"] in ("wrong", "error", "crash") for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
