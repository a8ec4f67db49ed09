"""Records through a real journal file and the real /dev/kmsg, and as /dev/kmsg escapes them."""

from __future__ import annotations

import errno
import os
import re
import secrets
import select
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.machine.kernellog.fault import Driver
from honed.machine.kernellog.parse import parse
from honed.machine.kernellog.reader import (
    JournalReader,
    KmsgReader,
    LogClock,
    Record,
    device_name,
    find_fault,
    open_reader,
    parse_raw,
)
from honed.runtime.errors import Unavailable
from tests.daemon.running import DEADLINE
from tests.machine.test_kernellog import ORDINARY, ROWS, SAMPLES

REMOTE = next(
    (
        path
        for path in ("/usr/lib/systemd/systemd-journal-remote", "/lib/systemd/systemd-journal-remote")
        if os.path.exists(path)
    ),
    shutil.which("systemd-journal-remote"),
)
MESSAGES = [*(sample["message"] for sample in SAMPLES), *(row.message for row in ROWS), *ORDINARY]
BOOT = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
needs_remote = pytest.mark.skipif(
    REMOTE is None, reason="needs systemd-journal-remote to make a journal file"
)
needs_kmsg = pytest.mark.skipif(
    not os.access("/dev/kmsg", os.R_OK | os.W_OK), reason="needs root and /dev/kmsg"
)


def escaped(message: str) -> bytes:
    """As the kernel writes a record's text to /dev/kmsg."""
    text = message.rstrip("\n").encode()
    return b"".join(bytes([byte]) if 32 <= byte < 127 and byte != 92 else b"\\x%02x" % byte for byte in text)


@pytest.mark.parametrize("message", MESSAGES)
def test_records_as_kmsg_escapes_them(message: str) -> None:
    raw = parse_raw(b"4,1234,5678901,-;" + escaped(message) + b"\n SUBSYSTEM=platform\n DEVICE=+platform:x\n")
    assert raw is not None
    assert raw.message == message.rstrip("\n")
    assert (raw.facility, raw.stamp_us, raw.device) == (0, 5678901, "x")
    plain, through = parse(message.rstrip("\n")), parse(raw.message)
    assert through == plain


def test_kmsg_forms() -> None:
    raw = parse_raw(b"30,7,1,c,caller=T1;a\\x5cb \\xff\n")
    assert raw is not None
    assert (raw.facility, raw.message, raw.device) == (3, "a\\b \ufffd", None)
    assert parse_raw(b"no record") is None
    assert parse_raw(b"") is None


@given(st.binary(max_size=300))
def test_any_bytes_from_kmsg(data: bytes) -> None:
    parse_raw(data)
    parse_raw(b"4,1,1,-;" + data)


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=200))
def test_escaping_is_undone(text: str) -> None:
    raw = parse_raw(b"4,1,1,-;" + escaped(text) + b"\n")
    assert raw is not None
    assert raw.message == text.rstrip("\n")


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("+platform:fb000000.gpu", "fb000000.gpu"),
        ("+platform:CIXH5000:00", "CIXH5000:00"),
        ("+pci:0000:01:00.0", "0000:01:00.0"),
        ("c10:58", None),
        ("b8:0", None),
        ("+platform:", None),
        (None, None),
    ],
)
def test_device_fields(field: str | None, name: str | None) -> None:
    assert device_name(field) == name


def test_clock_takes_the_promptest_record() -> None:
    clock = LogClock()
    clock.note(100.0, 782.6)
    clock.note(101.0, 783.501)
    clock.note(102.0, 785.0)
    assert clock.monotonic(102.0) == pytest.approx(784.501)
    clock.note(1000.0, 1682.9)  # long after: the clocks have drifted apart
    assert clock.monotonic(1000.0) == pytest.approx(1682.9)


# -- journal


def export(records: Iterable[dict[str, str | bytes]]) -> bytes:
    """Records in the journal's export format; values with newlines go in with their length."""
    data = b""
    for record in records:
        for name, value in record.items():
            value = value.encode() if isinstance(value, str) else value
            if b"\n" in value or name == "MESSAGE":
                data += name.encode() + b"\n" + struct.pack("<Q", len(value)) + value + b"\n"
            else:
                data += name.encode() + b"=" + value + b"\n"
        data += b"\n"
    return data


def entry(message: str | bytes, number: int, **more: str) -> dict[str, str | bytes]:
    """A journal entry of the kernel, received by journald 2 ms after it was stamped."""
    return {
        "__REALTIME_TIMESTAMP": str(1_700_000_000_000_000 + number * 1000),
        "__MONOTONIC_TIMESTAMP": str(50_002_000 + number * 1000),
        "_BOOT_ID": BOOT,
        "_TRANSPORT": "kernel",
        "_SOURCE_MONOTONIC_TIMESTAMP": str(50_000_000 + number * 1000),
        "PRIORITY": "4",
        "SYSLOG_FACILITY": "0",
        "SYSLOG_IDENTIFIER": "kernel",
        "MESSAGE": message,
        **more,
    }


def into_journal(folder: Path, records: Iterable[dict[str, str | bytes]]) -> Path:
    """Put records at the end of the journal file in `folder`."""
    assert REMOTE is not None
    folder.mkdir(exist_ok=True)
    text = folder.parent / "export.txt"
    text.write_bytes(export(records))
    path = folder / "system.journal"
    subprocess.run([REMOTE, "-o", str(path), str(text)], check=True, capture_output=True, timeout=60)
    return path


def wait_for(reader: KmsgReader | JournalReader, wanted: int, match: str = "") -> list[Record]:
    """Records with `match` in them, read as an event loop would; fails when they do not come."""
    deadline = time.monotonic() + DEADLINE
    found: list[Record] = []
    while len(found) < wanted:
        left = deadline - time.monotonic()
        assert left > 0, f"only {len(found)} of {wanted} records came"
        assert select.select([reader.fileno()], [], [], left)[0], "the reader was not woken"
        found += [record for record in reader.read() if match in record.message]
    return found


@needs_remote
def test_every_record_through_a_real_journal(tmp_path: Path) -> None:
    messages = [message for message in MESSAGES if message.strip()]
    path = into_journal(tmp_path / "j", (entry(message, i) for i, message in enumerate(messages)))
    for place in ({"files": [str(path)]}, {"path": str(path.parent)}):
        with closing(JournalReader(from_start=True, **place)) as reader:
            records = reader.read()
            assert [record.message for record in records] == messages
            assert [parse(record.message) for record in records] == [parse(message) for message in messages]
            assert all(record.genuine for record in records)
            assert records[5].monotonic_s == pytest.approx(50.007)
            assert records[5].realtime_s == pytest.approx(1_700_000_000.005)
            assert reader.read() == []


@needs_remote
def test_journal_gives_devices_and_marks_forgeries(tmp_path: Path) -> None:
    message = "mali fb000000.gpu: Reset complete"
    path = into_journal(
        tmp_path / "j",
        [
            entry(message, 0, _KERNEL_DEVICE="+platform:fb000000.gpu", _KERNEL_SUBSYSTEM="platform"),
            entry(message, 1, _KERNEL_DEVICE="+usb:1-1"),
            entry(message, 2, SYSLOG_FACILITY="1", SYSLOG_IDENTIFIER="unknown"),
            {**entry(message, 3), "_TRANSPORT": "syslog"},
            entry(b"mali fb000000.gpu: \xff broken text", 4),
        ],
    )
    with closing(JournalReader(files=[str(path)], from_start=True)) as reader:
        records = reader.read()
    assert [record.device for record in records] == ["fb000000.gpu", "1-1", None, None]
    assert [record.genuine for record in records] == [True, True, False, True]
    assert [find_fault(record) is not None for record in records] == [True, False, False, False]
    assert records[3].message == "mali fb000000.gpu: \ufffd broken text"


@needs_remote
def test_journal_is_followed_from_its_end(tmp_path: Path) -> None:
    path = into_journal(tmp_path / "j", [entry("before", 0)])
    with closing(JournalReader(files=[str(path)])) as reader:
        assert reader.read() == []
        into_journal(tmp_path / "j", [entry("one", 1), entry("two\nlines", 2)])
        assert [record.message for record in wait_for(reader, 2)] == ["one", "two\nlines"]
        into_journal(tmp_path / "j", [entry("three", 3)])
        assert [record.message for record in wait_for(reader, 1)] == ["three"]


@needs_remote
def test_journal_without_kernel_records_is_followed_from_the_first(tmp_path: Path) -> None:
    path = into_journal(tmp_path / "j", [{**entry("a program's", 0), "_TRANSPORT": "stdout"}])
    with closing(JournalReader(files=[str(path)])) as reader:
        assert reader.read() == []
        into_journal(tmp_path / "j", [entry("the kernel's", 1)])
        assert [record.message for record in wait_for(reader, 1)] == ["the kernel's"]


def test_no_journal_file(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="the journal cannot be opened"):
        JournalReader(files=[str(tmp_path / "none.journal")])
    (tmp_path / "text.journal").write_text("this is no journal" * 100)
    with pytest.raises(Unavailable, match="the journal cannot be opened"):
        JournalReader(files=[str(tmp_path / "text.journal")])


# -- /dev/kmsg


def write_kmsg(message: str, priority: int = 4) -> None:
    """One record, with a descriptor of its own, since the kernel limits the rate per descriptor.

    Without the newline at its end the kernel would keep it back until the next record: it may be continued.
    """
    with open("/dev/kmsg", "wb", buffering=0) as kmsg:
        kmsg.write(b"<%d>" % priority + message.rstrip("\n").encode() + b"\n")


@needs_kmsg
def test_records_through_the_real_kmsg() -> None:
    device = f"honed-{secrets.token_hex(4)}.gpu"
    messages = [m.replace("fb000000.gpu", device) for m in MESSAGES if "mali fb000000.gpu" in m]
    with closing(KmsgReader()) as reader:
        before = time.monotonic()
        for message in messages:
            write_kmsg(message)
        records = wait_for(reader, len(messages), device)
        after = time.monotonic()
        assert [record.message for record in records] == [message.rstrip("\n") for message in messages]
        for record, message in zip(records, messages, strict=True):
            assert not record.genuine
            assert before - 0.5 <= record.monotonic_s <= after
            assert abs(record.realtime_s - time.time()) < 60
            assert find_fault(record) is None
            fault = parse(record.message, device=record.device)
            assert (fault is None) == (parse(message) is None)
            if fault is not None:
                assert fault.driver in (Driver.KBASE, Driver.KBASE_JM)
                assert fault.device == device
        assert [record for record in reader.read() if device in record.message] == []


@needs_kmsg
def test_program_cannot_pass_for_the_kernel() -> None:
    mark = secrets.token_hex(8)
    with closing(KmsgReader()) as reader:
        write_kmsg(f"mali fb000000.gpu: Reset complete {mark}", priority=0)
        assert [record.genuine for record in wait_for(reader, 1, mark)] == [False]


@needs_kmsg
def test_kmsg_from_its_start_and_from_its_end() -> None:
    mark = secrets.token_hex(8)
    write_kmsg(mark)
    with closing(KmsgReader(from_start=True)) as reader:
        assert len(wait_for(reader, 1, mark)) == 1
    with closing(KmsgReader()) as reader:
        assert all(mark not in record.message for record in reader.read())


@needs_kmsg
def test_reading_goes_on_after_overwritten_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's answer to a reader it has overtaken, without flooding this machine's log."""
    answers: list[bytes | OSError] = [
        b"4,10,1000,-;one\n",
        OSError(errno.EPIPE, "Broken pipe"),
        b"4,15,2000,-;two\n",
        BlockingIOError(errno.EAGAIN, "nothing"),
    ]

    def read(_descriptor: int, _length: int) -> bytes:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    with closing(KmsgReader()) as reader:
        monkeypatch.setattr(os, "read", read)
        records = reader.read()
        monkeypatch.undo()
        assert [record.message for record in records] == ["one", "two"]


@needs_kmsg
@pytest.mark.flood
def test_reader_overtaken_by_a_real_flood() -> None:
    mark = secrets.token_hex(8)
    with closing(KmsgReader()) as reader:
        write_kmsg("the first")
        reader.read()
        for i in range(20_000):
            write_kmsg(f"honed test filler {i} " + "x" * 800)
        write_kmsg(mark)
        assert len(wait_for(reader, 1, mark)) == 1


def test_no_kernel_log(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="cannot be read"):
        KmsgReader(str(tmp_path / "none"))
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(Unavailable, match="is not a kernel log"):
        KmsgReader(str(tmp_path / "fifo"))


# -- whichever


@needs_kmsg
def test_root_reads_one_of_them() -> None:
    reader = open_reader()
    try:
        assert reader.fileno() >= 0
        assert isinstance(reader.read(), list)
    finally:
        reader.close()
        reader.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become a user without permissions")
@pytest.mark.parametrize("closed", ["journal", "journal/m", "journal/m/system.journal"])
def test_without_permission_it_says_which_group(tmp_path: Path, closed: str) -> None:
    for name in ("journal/m/system.journal", "kmsg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / closed).chmod(0o700 if (tmp_path / closed).is_dir() else 0o600)
    (tmp_path / "kmsg").chmod(0o600)
    # Imports first: an ordinary user may not be able to read this checkout.
    code = """
import os, pathlib, sys, systemd.journal
from honed.machine.kernellog import reader
folder = pathlib.Path(sys.argv[1])
reader.JOURNALS = (folder / "journal",)
reader.KmsgReader.__init__.__defaults__ = (str(folder / "kmsg"),)
os.setgroups([]); os.setgid(65534); os.setuid(65534)
try:
    reader.open_reader()
except Exception as error:
    print(type(error).__name__, error)
"""
    for folder in [tmp_path, *tmp_path.parents]:
        if os.stat(folder).st_uid == 0 and folder.is_relative_to("/tmp") and folder != Path("/tmp"):
            folder.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert re.match(
        r"PermissionDenied the kernel log cannot be read: .*group systemd-journal", done.stdout
    ), done.stdout + done.stderr
    assert "CAP_SYSLOG" in done.stdout
