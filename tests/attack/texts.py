"""Texts: configuration files and lines of the kernel log."""

from __future__ import annotations

import contextlib
import json
import os
import random
import time
from pathlib import Path
from typing import Any

from honed.daemon.config import settings
from honed.machine.kernellog.parse import parse
from honed.machine.kernellog.reader import parse_raw
from honed.machine.kernellog.story import DatedFault, group
from honed.runtime.errors import HonedError

from .attack import Attack
from .bed import Bed
from .material.mutate import TEXTS, Mutator

_WORDS: tuple[str, ...] = (
    "[",
    "]",
    "[[",
    "=",
    '"',
    "'''",
    "\n",
    "#",
    "nan",
    "inf",
    "-1",
    "0",
    "1e400",
    "9" * 5000,
    "true",
    "{}",
    "[]",
)
_WORDS += (
    "1979-05-27",
    "\0",
    "\ufeff",
    "[limits]",
    "[limits.x]",
    "limits = 1",
    "max_queue",
    "[" * 5000,
    "{a=" * 2000,
)
_SAFE = ("limits", "usage", "idle")
_PARSE_SECONDS = 0.05  # for one line of any length
_RELOAD_SECONDS = 60.0
_KMSG_LINES = 3  # a run may write into the machine's log

_SAMPLES = Path(__file__).parents[1] / "machine" / "test_kernellog_samples.jsonl"
LINES: tuple[str, ...] = tuple(json.loads(line)["message"] for line in _SAMPLES.read_text().splitlines())


class Configuration(Attack):
    """Wrong files and reloads: each is INVALID_ARGUMENT and changes nothing."""

    name = "configuration"
    what = "honed.toml altered, wrong types, ranges, tables, bytes; each followed by a reload"

    def run(self, bed: Bed, rng: random.Random, seconds: float) -> None:
        end = time.monotonic() + seconds
        file = bed.service.socket.parent / "honed.toml"
        usual = file.read_bytes()
        try:
            with bed.client(timeout=_RELOAD_SECONDS) as client:
                usual_settings = _shown(client.config())
                while time.monotonic() < end:
                    label, data = self._written(rng, usual)
                    bed.findings.offered(label, data)
                    file.write_bytes(data)
                    self._reload(bed, client, label, usual_settings)
                    file.write_bytes(usual)
        finally:
            file.write_bytes(usual)
            with bed.client() as client, contextlib.suppress(HonedError):
                client.reload_config()

    def _reload(self, bed: Bed, client: Any, label: str, before: dict[str, Any]) -> None:
        try:
            client.reload_config()
        except HonedError as error:
            bed.findings.answered({"code": error.code, "message": str(error)}, label)
            if error.code != "INVALID_ARGUMENT":
                bed.findings.problem(f"{error.code} for {label}: {error}")
            elif _shown(client.config()) != before:
                bed.findings.problem(f"{label} was refused and changed something")
            return
        bed.findings.answered(None, label)
        bed.findings.problem(f"{label} was accepted")

    def _written(self, rng: random.Random, usual: bytes) -> tuple[str, bytes]:
        mutator, kind = Mutator(rng), rng.randrange(4)
        if kind == 0:
            return "altered bytes", _wrong(mutator.data(usual))
        if kind == 1:
            return "words", _wrong("".join(rng.choices(_WORDS, k=rng.randrange(1, 12))).encode())
        if kind == 2:
            size = rng.choice(((1 << 20) + 1, 1 << 19))
            return "a large file", _wrong(rng.choice((b"#", b"[[a]]\n", b"a.", b"\0")) * (size // 2))
        known = [each for each in settings().values() if each.table in _SAFE]
        each = rng.choice(known)
        value: Any = rng.choice(
            (-1, -(2**63), 2**80, -0.5, float("nan"), float("-inf"), *TEXTS, [], {}, None, [[]] * 99)
        )
        text = json.dumps(value) if isinstance(value, str | list) else _toml(value)
        return f"{each.name} = {text[:60]}", _wrong(f"[{each.table}]\n{each.key} = {text}\n".encode())


def _wrong(data: bytes) -> bytes:
    """The same, wrong for certain: what is tried is that nothing changes."""
    return data + b"\n[service]\nno_such_setting = 1\n"


def _toml(value: Any) -> str:
    return "{ a = 1 }" if isinstance(value, dict) else str(value)


def _shown(config: dict[str, Any]) -> dict[str, Any]:
    return {each["name"]: each["value"] for each in config["settings"]}


class KernelLog(Attack):
    """Lines for the parser, in this process; a few harmless ones for the service."""

    name = "kernel-log"
    what = "records of GPU faults altered, lengthened, repeated: parsed, grouped, in linear time"

    def run(self, bed: Bed, rng: random.Random, seconds: float) -> None:
        for line in LINES:  # a driver's patterns are made with its first record
            parse(line)
        end, mutator = time.monotonic() + seconds, Mutator(rng)
        found: list[DatedFault] = []
        self._write(bed, mutator)
        while time.monotonic() < end:
            line = self._line(mutator)
            bed.findings.offered("a line", line)
            begun = time.thread_time()
            fault = self._checked(
                bed, "parse", line, lambda line=line: parse(line, device=rng.choice((None, "fb000000.gpu")))
            )
            self._checked(bed, "parse_raw", line, lambda line=line: parse_raw(line.encode(errors="replace")))
            if time.thread_time() - begun > _PARSE_SECONDS:
                bed.findings.problem(
                    f"{time.thread_time() - begun:.2f} s for a line of {len(line)}: {line[:200]!r}"
                )
            if fault is not None:
                found.append(DatedFault(fault=fault, monotonic_s=rng.uniform(0, 30)))
            if len(found) >= 400:
                begun = time.thread_time()
                self._checked(bed, "group", line, lambda: group(found))
                if time.thread_time() - begun > 2.0:
                    bed.findings.problem(f"{time.thread_time() - begun:.1f} s to group 400 records")
                found.clear()

    def _checked(self, bed: Bed, what: str, line: str, call: Any) -> Any:
        try:
            return call()
        except Exception as error:  # noqa: BLE001 - it says that it never raises
            bed.findings.problem(f"{what} raised {error!r} for {line[:300]!r}")
            return None

    def _line(self, mutator: Mutator) -> str:
        rng = mutator.rng
        line = rng.choice(LINES)
        kind = rng.randrange(6)
        if kind == 0:
            return mutator.data(line.encode()).decode(errors="replace")
        if kind == 1:
            words = line.split(" ")
            words[rng.randrange(len(words))] = rng.choice(
                (*TEXTS, "9" * 5000, "0x" + "f" * 5000, "\u0661\u0662")
            )
            return " ".join(words)
        if kind == 2:
            at = rng.randrange(len(line))
            part = line[at : at + rng.choice((1, 1, 3, 9))]
            return line[:at] + part * rng.choice((100, 3000, 60_000)) + line[at:]
        if kind == 3:
            return line[: rng.randrange(len(line))] + rng.choice(LINES)
        if kind == 4:
            head = f"{rng.randrange(2**40)},{rng.randrange(2**70)},{rng.choice(('1', '-1', '9' * 30))}"
            return f"{head},-;{line}\n SUBSYSTEM=x\n DEVICE=+platform:{line}"
        return line

    def _write(self, bed: Bed, mutator: Mutator) -> None:
        """Written by a program, so that the service must not take them for the kernel's."""
        if not bed.root:
            return
        with contextlib.suppress(OSError), open("/dev/kmsg", "wb", buffering=0) as kmsg:
            for _ in range(_KMSG_LINES):
                line = self._line(mutator).replace("\0", "").encode(errors="replace")[:900]
                bed.findings.offered("a line in /dev/kmsg", line)
                os.write(kmsg.fileno(), b"<12>attack: " + line.replace(b"\n", b" "))
