"""Measures honed on your board, in ten minutes and one text file to send: `python -m benchmarks.board`.

Doctor's findings, the device and its peaks, small kernels that test what honed assumes of the machine, a
hundred kernels predicted for a Mali-G610 and measured here, five models served and tuned for a short time
beside what others publish of this chip, and the faults in the kernel log meanwhile. It needs no root,
installs nothing, and leaves nothing but the report, which has no names of hosts or users in it.

`python -m benchmarks.board machine` prints only the results of the small kernels, in a minute, and which of
honed's choices each answer changes: a table, or with --json its figures.
"""

from __future__ import annotations

import argparse
import getpass
import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from benchmarks import supervising
from honed.machine import devices
from honed.machine.families import mali_model
from honed.machine.kernellog.reader import Reader, find_fault, open_reader
from honed.machine.kernellog.story import DatedFault, group
from honed.machine.peaks import survey
from honed.machine.profile import DeviceProfile
from honed.protocol import strict
from honed.protocol.errors import HonedError

from . import anchors, kernels, machine, measuring, models, report
from .anonymous import anonymous, secrets
from .hone import Failed, Service, hone

_PEAKS_SHARE, _KERNELS_SHARE = 0.2, 0.3  # Shares of the time; the models get the rest
_DOCTOR_SECONDS = 120.0
_MACHINE_SECONDS, _MACHINE_SHARE = 60.0, 0.1
_KERNEL_SHARE = 0.05  # Share of the time for one kernel


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.board", description=__doc__)
    parser.add_argument(
        "what", nargs="?", choices=("all", "machine"), default="all", help="all, or a minute for the machine"
    )
    parser.add_argument("--device", metavar="SPEC", help="OpenCL device: a number or part of its name")
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="what it may take (10), a little more or less"
    )
    parser.add_argument("-o", "--output", type=Path, default=Path("board.txt"), help="the report (board.txt)")
    parser.add_argument(
        "--json", action="store_true", help="of `machine`: print JSON in the place of a table"
    )
    options = parser.parse_args()
    if options.json and options.what != "machine":
        parser.error("--json is for `machine`; the whole report is text")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Ends the service, too
    with tempfile.TemporaryDirectory(prefix="honed-board-") as cache:
        os.environ["XDG_CACHE_HOME"] = cache  # Removes what drivers cache, too
        if options.what == "machine":
            return _machine(options.device, as_json=options.json)
        hidden = secrets(
            getpass.getuser(),
            (platform.node(),),
            str(Path.home()),
            {cache: "TMP", str(supervising.ROOT): "CLONE"},
        )
        with options.output.open("w") as file:
            for part in _parts(options.device, Path(cache), options.minutes * 60):
                text = anonymous(part, hidden)
                print(text, end="", flush=True)
                file.write(text)
                file.flush()
    print(f"\n{options.output} is written. Read it, and send it to those who asked for it.", file=sys.stderr)
    return 0


def _machine(device: str | None, *, as_json: bool) -> int:
    """Print the results of the small kernels; return 1 if there is no device to run them."""
    try:
        found = devices.select(device)
    except HonedError as error:
        print(f"benchmarks.board: {error}", file=sys.stderr)
        return 1
    settled = machine.settle(found.profile.identity, found.spec, _MACHINE_SECONDS)
    print(json.dumps(strict.to_plain(settled), indent=1) if as_json else machine.table(settled).strip())
    return 0


def _parts(device: str | None, cache: Path, seconds: float) -> Iterator[str]:
    """Yield the report's parts as they are finished; a part that fails says so, and the others follow."""
    began = time.monotonic()
    log = _KernelLog()
    yield f"honed on a board, {time.strftime('%Y-%m-%d', time.gmtime())}, report 1\n"
    yield f"{platform.system()} {platform.release()} {platform.machine()}, {os.cpu_count()} cores\n"
    yield from _doctor()
    yield from _device(device, cache, began, seconds)
    yield report.heading("Faults in the kernel log meanwhile") + log.text()
    yield f"\nTook {time.monotonic() - began:.0f} s.\n"


def _device(device: str | None, cache: Path, began: float, seconds: float) -> Iterator[str]:
    try:
        found = survey(device, cache, seconds=_PEAKS_SHARE * seconds)
    except HonedError as error:
        yield f"{report.heading('Device')}There is none to measure: {error}\n"
        return
    yield _described(found.profile, found.no_peaks)
    most = min(_MACHINE_SECONDS, _MACHINE_SHARE * seconds)
    yield machine.table(machine.settle(found.profile.identity, found.spec, most))
    programs = kernels.in_turns(kernels.load())
    yield report.heading("Kernels, predicted and measured") + _comparable(found.profile.identity.name)
    measured = supervising.work_off(
        measuring.Measured,
        [*measuring.COMMAND, found.spec],
        len(programs),
        _KERNELS_SHARE * seconds,
        each_seconds=_KERNEL_SHARE * seconds,
    )
    yield report.kernel_tables(programs, measured)
    yield report.heading("Models, first served and tuned for a short time")
    yield from _models(found.spec, cache, began + seconds)


def _doctor() -> Iterator[str]:
    yield report.heading("Doctor")
    try:
        said = hone("doctor", seconds=_DOCTOR_SECONDS)
    except Failed as failed:
        yield f"{failed}\n"
        return
    for finding in said["findings"]:
        remedy = f" -> {finding['remedy']}" if finding["remedy"] else ""
        yield f"{finding['level']:4}  {finding['topic']}: {finding['what']}{remedy}\n"


def _described(profile: DeviceProfile, no_peaks: str) -> str:
    model = mali_model(profile.identity.name)
    row = "Mali model: none that is known by this name\n"
    if model is not None:
        row = (
            f"Mali model: {model.name}, "
            f"{model.fma_fp32} fp32 and {model.fma_fp16} fp16 multiply-adds a core and clock\n"
        )
    return report.heading("Device and peaks") + row + f"{no_peaks}\n" * bool(no_peaks) + profile.dumps()


def _comparable(name: str) -> str:
    model = mali_model(name)
    if model is not None and model.name == kernels.PREDICTED_FOR:
        return f"Predictions are for this GPU, a {kernels.PREDICTED_FOR} with four cores at 1 GHz.\n"
    return (
        f"Predictions are for a {kernels.PREDICTED_FOR} with four cores at 1 GHz, which {name} is not: "
        "only orders within a family can be compared, and ratios say nothing.\n"
    )


def _models(spec: str, cache: Path, end: float) -> Iterator[str]:
    try:
        with Service(spec, cache) as service:  # Starting takes long on a slow machine
            found = models.measure(service, end - time.monotonic())
            yield report.model_table(found) + anchors.beside(found)
    except Failed as failed:
        yield f"{failed}\n"


class _KernelLog:
    """A reader of the kernel log's records since its creation."""

    def __init__(self) -> None:
        self._reader: Reader | None = None
        self._why = ""
        try:
            self._reader = open_reader()
        except HonedError as error:
            self._why = str(error)

    def text(self) -> str:
        """Return each new fault as the kernel wrote it."""
        if self._reader is None:
            return f"not known: {self._why}\n"
        found: list[DatedFault] = []
        with suppress(HonedError):
            while records := self._reader.read():
                found += [one for one in map(find_fault, records) if one is not None]
        stories = group(found)
        lines = [
            f"{story.severity}: {' / '.join(s.fault.text.strip() for s in story.seen)}" for story in stories
        ]
        return "".join(f"{line}\n" for line in lines) or "none\n"


if __name__ == "__main__":
    raise SystemExit(main())
