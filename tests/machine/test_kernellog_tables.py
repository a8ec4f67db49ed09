"""The drivers' tables: every row has its source and a sample, and costs no more than the record is long."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from honed.machine.kernellog.drivers import TABLES
from honed.machine.kernellog.fault import Driver, Fault, Pattern, RecordTable, Severity
from honed.machine.kernellog.parse import find, parse

RECORDS = [
    json.loads(line)
    for line in Path(__file__).with_name("test_kernellog_records.jsonl").read_text().splitlines()
]
ROWS = [(table, pattern) for table in TABLES for pattern in table.patterns]
OF_TABLES = pytest.mark.parametrize("table", TABLES, ids=lambda table: str(table.driver))
NVRM = "NVRM: Xid (PCI:0000:c1:00"
# Of rows that a format alone does not describe.
EXPRESSED = [
    *(f"{NVRM}): {number}, pid=5, name=python3, Ch 1" for number in (31, 45, 79, 999)),
    "NVRM: GPU 0000:01:00.0: GPU has fallen off the bus.",
    *(
        f"{driver} 0000:03:00.0: {text}"
        for driver in ("amdgpu", "i915", "xe")
        for text in ("device wedged, needs recovery", "GPU reset begin!", "GPU HANG: ecode 12")
    ),
    "Out of memory: Killed process 4321 (python3) total-vm:1kB",
]


@OF_TABLES
def test_every_row_says_where_its_driver_writes_it(table: RecordTable) -> None:
    for pattern in table.patterns:
        for source in pattern.source.split("; "):
            assert re.fullmatch(r"[\w/-]+\.[ch] \w+ .*\d.*", source), source


@OF_TABLES
def test_every_row_names_fields_of_a_fault(table: RecordTable) -> None:
    known = {"-", "status", *Fault.__dataclass_fields__}
    assert all(known.issuperset(pattern.fields.split()) for pattern in table.patterns)


def test_no_row_is_written_twice() -> None:
    for table in TABLES:
        formats = [pattern.format for pattern in table.patterns if pattern.expression is None]
        assert len(formats) == len(set(formats))


@pytest.mark.parametrize("driver", sorted({record["driver"] for record in RECORDS}))
def test_records_of_every_row(driver: str) -> None:
    for record in RECORDS:
        if record["driver"] == driver:
            fault = parse(record["message"])
            assert fault is not None, record
            assert (fault.driver, fault.severity) == (record["driver"], record["severity"]), record
            assert (fault.kind, fault.device) == (record["kind"], record["device"]), record
            says = {name: getattr(fault, name) for name in ("tgid", "tid", "comm", *record["says"])}
            assert says == {"tgid": None, "tid": None, "comm": None, **record["says"]}, record


def test_every_row_has_a_record() -> None:
    messages = [*(record["message"] for record in RECORDS), *EXPRESSED]
    hit = {(found.driver, id(found.pattern)) for text in messages if (found := find(text)) is not None}
    missed = [
        f"{table.driver}: {pattern.format}"
        for table, pattern in ROWS
        if (pattern.driver or table.driver, id(pattern)) not in hit
    ]
    assert missed == []


def test_every_driver_and_severity_has_a_row() -> None:
    assert {pattern.driver or table.driver for table, pattern in ROWS} == set(Driver)
    assert {pattern.severity for _, pattern in ROWS} == set(Severity)


WORDS = st.text(st.sampled_from("abcdefghijklmnopqrstuvwxyzABCDEF0123456789_-."), min_size=1, max_size=15)
_CONVERSION = re.compile(r"%([-+ #0]*[\d*]*(?:\.\d+)?)(?:hh|h|ll|l|z)?([diuxXsc]|p[A-Za-z]*)")
HEXADECIMAL = {"code", "status"}


def as_python(found: re.Match[str]) -> str:
    """The same conversion for Python's % operator, a pointer as its text."""
    return "%s" if found[2][0] == "p" else f"%{found[1]}{found[2]}"


def value(data: st.DataObject, conversion: str) -> str | int:
    """Something for it to write."""
    if conversion == "s":
        return data.draw(WORDS)
    number = data.draw(st.integers(0, 2**31 - 1))
    return f"{number:016x}" if conversion[0] == "p" else number


def before(table: RecordTable) -> str:
    """What this driver writes before a message."""
    if table.words:
        return f"{table.words[0]} fb000000.gpu: " + ("RKNPU: " if table.driver is Driver.RKNPU else "")
    return ""


@OF_TABLES
@given(st.data())
@settings(max_examples=5)
def test_what_a_format_writes_is_read_back(table: RecordTable, data: st.DataObject) -> None:
    for pattern in table.patterns:
        if pattern.expression is None:
            reads_back(table, pattern, data)


def reads_back(table: RecordTable, pattern: Pattern, data: st.DataObject) -> None:
    given_values = [value(data, found[2]) for found in _CONVERSION.finditer(pattern.format)]
    message = _CONVERSION.sub(as_python, pattern.format) % tuple(given_values)
    opening = next((text for text in table.openings if message.startswith(text)), None)
    found = find(message if opening is not None else before(table) + message)
    assert found is not None, pattern.format
    assert found.pattern is pattern, found.pattern.format
    for name, written in zip(pattern.fields.split(), given_values, strict=False):
        if name != "-":
            read = found.match[name]
            number = isinstance(written, int)
            assert (int(read, 16 if name in HEXADECIMAL else 10) if number else read) == written, name


# A program may write anything to the kernel's log, though not in the kernel's name.
HOSTILE = ["0", "f", " ", ": ", "(", "[", "_", "%", "0x", "pid: 1\n", "\n", "exception type 0x1: ", ", pid="]
HOSTILE_BYTES = 64 << 10
LONGEST_S = 0.05  # of processor time; what grows with the square of the length takes ten times that


def cost_s(work: Callable[[], object]) -> float:
    """Processor time of `work` in this thread, the least of a few when it seems much."""
    least = float("inf")
    for _ in range(5):
        begun = time.thread_time()
        work()
        least = min(least, time.thread_time() - begun)
        if least < LONGEST_S:
            break
    return least


@OF_TABLES
def test_hostile_records_cost_little(table: RecordTable) -> None:
    own = [record["message"] for record in RECORDS if record["driver"] == table.driver][:40]
    for fragment in [*HOSTILE, *(own or EXPRESSED)]:
        text = fragment * (HOSTILE_BYTES // len(fragment))
        for opening in (before(table), *table.openings):
            message = opening + text
            assert cost_s(lambda: parse(message)) < LONGEST_S, (opening, fragment)  # noqa: B023


@OF_TABLES
def test_no_row_backtracks(table: RecordTable) -> None:
    """As they are, without the limit on what is looked at: each conversion followed by what may follow it."""
    for pattern in table.patterns:
        literal = re.split(_CONVERSION, pattern.format)[0]
        for fragment in (*HOSTILE, pattern.format, re.sub(_CONVERSION, "7", pattern.format)):
            text = literal + fragment * (HOSTILE_BYTES // len(fragment))
            assert cost_s(lambda: pattern.start.match(text)) < LONGEST_S, fragment  # noqa: B023


@given(st.sampled_from(RECORDS), st.data())
def test_damaged_records_never_raise(record: dict[str, Any], data: st.DataObject) -> None:
    message = record["message"]
    cut = data.draw(st.integers(0, len(message)))
    insert = data.draw(st.text(max_size=10))
    parse(message[:cut])
    parse(message[:cut] + insert + message[cut:])
    parse(message.replace("3", "3" * data.draw(st.integers(1, 10_000))))


def test_a_format_without_enough_conversions_is_refused() -> None:
    row = Pattern("x", Severity.QUEUE, "%d %%", "a.c f 1", "tgid tid")
    with pytest.raises(ValueError, match="no conversion for tid"):
        _ = row.start
