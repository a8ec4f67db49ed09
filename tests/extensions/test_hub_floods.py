"""A million records, and millions of lines that are none: real bounds, and the memory of a real process."""

from __future__ import annotations

import json
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest

from honed.hub import layout, pulling
from honed.protocol import strict

from .hubserver import counting
from .test_hub_hostile import index, put, signed
from .test_hub_pull import CELLAR, Machine, of

MILLION = 1_000_000
MEMORY = (
    192 << 20
)  # bytes more than before, which is less than what came, and than the unit's MemoryMax= by far


def repeated(block: bytes, times: int) -> bytes:
    """A gzip file of the block so many times, which is compressed once."""
    deflate = zlib.compressobj(9, wbits=-15)
    deflated = deflate.compress(block) + deflate.flush(zlib.Z_FULL_FLUSH)  # refers to nothing before
    crc = 0
    for _ in range(times):
        crc = zlib.crc32(block, crc)
    size = len(block) * times & 0xFFFFFFFF
    ends = b"\x03\x00" + crc.to_bytes(4, "little") + size.to_bytes(4, "little")
    return b"\x1f\x8b\x08\0\0\0\0\0\0\xff" + deflated * times + ends


def records(workload: str) -> bytes:
    """A thousand lines of records, as they lie in a hub."""
    traces = (layout.shareable_part(of(workload=workload, trace=f"[{n}]" * 20)) for n in range(1000))
    return b"".join(json.dumps(each).encode() + b"\n" for each in traces)


def pulled(place: str, pulls: int = 1) -> dict[str, Any]:
    """What a process took that pulls so many times, and its memory."""
    command = [sys.executable, "-m", "tests.extensions.hub_puller", place, str(pulls)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=250)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def more(done: dict[str, Any]) -> int:
    """Bytes that pulling had in memory at the most, beside what the process had before; printed for -s."""
    print(f"{(done['peak'] - done['before']) >> 20} MiB more than {done['before'] >> 20}:", done["pulls"])
    return int(done["peak"] - done["before"])


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """Where the cellar means no harm."""
    Machine(tmp_path).push(CELLAR, of(workload="c"))
    return tmp_path


def test_the_files_of_this_test_are_what_they_should_be() -> None:
    assert list(layout.unpack_records(repeated(b"a\nb\n", 3))) == [b"a", b"b"] * 3
    assert zlib.decompress(repeated(records("w"), 2), wbits=31) == records("w") * 2


def test_a_million_records_are_taken_in_parts_and_leave_room_for_others(hub: Path) -> None:
    """Of a key that has signed them: twenty files, as many records as each may have, over HTTP."""
    blocks = (records(f"w{n}") for n in range(MILLION // layout.MAX_RECORDS))
    files = [repeated(block, layout.MAX_RECORDS // 1000) for block in blocks]
    signed(hub, layout.file_bytes(index(*(put(hub, data, records=layout.MAX_RECORDS) for data in files))))
    with counting(hub) as (url, asked):
        done = pulled(url, 3)
    share = pulling.MAX_SOURCE_RECORDS
    assert [pull["taken"] for pull in done["pulls"]] == [
        {"attic": share, "cellar": 1},
        {"attic": share, "cellar": 0},
        {"attic": share, "cellar": 0},
    ]
    assert sum(name.endswith(".gz") for name, _ in asked) == 1 + 3 * share // layout.MAX_RECORDS
    assert more(done) < MEMORY


@pytest.mark.parametrize("claimed", [MILLION, layout.MAX_RECORDS, 10])
def test_a_file_of_a_million_records_is_left(hub: Path, claimed: int) -> None:
    """Whether its index says so or not; nothing of it is taken, and it costs no more than its first part."""
    data = repeated(records("w"), MILLION // 1000)
    signed(hub, layout.file_bytes(index(put(hub, data, records=claimed))))
    done = pulled(str(hub), 2)
    told = {MILLION: "more records or bytes than a file may", 10: "more records than the index says"}
    first, second = done["pulls"]
    assert told.get(claimed, "holds more than") in first["problems"]["attic"]
    assert first["taken"] == {"attic": 0, "cellar": 1}
    assert second["taken"] == {"attic": 0, "cellar": 0}
    assert more(done) < MEMORY


def test_a_file_that_unpacks_to_far_more_than_it_may_is_left(hub: Path) -> None:
    """Records as large as may be, 400 MiB in less than one."""
    line = json.dumps(layout.shareable_part(of(trace="x" * (layout.MAX_LINE_BYTES - 1000)))).encode() + b"\n"
    data = repeated(line, 400)
    assert len(data) < 1 << 20
    signed(hub, layout.file_bytes(index(put(hub, data, records=layout.MAX_RECORDS))))
    (pull,) = (done := pulled(str(hub)))["pulls"]
    assert "more than 128 MiB" in pull["problems"]["attic"]
    assert pull["taken"] == {"attic": 0, "cellar": 1}
    assert more(done) < MEMORY


@pytest.mark.parametrize(
    "block",
    [b"garbage\n", b"\n", b"{}\n", b"[" * 999 + b"\n", b"x" * (1 << 20) + b"\n", bytes(1 << 20), b'"\xff"\n'],
)
def test_millions_of_lines_of_garbage_are_left(hub: Path, block: bytes) -> None:
    block, times = (block * 1000, 5000) if len(block) < 1000 else (block, 500)
    signed(hub, layout.file_bytes(index(put(hub, repeated(block, times), records=layout.MAX_RECORDS))))
    done = pulled(str(hub))
    (pull,) = done["pulls"]
    assert pull["problems"].keys() == {"attic"}
    assert pull["taken"] == {"attic": 0, "cellar": 1}
    assert more(done) < MEMORY


@pytest.mark.parametrize("what", ["entries", "withdrawn", "lists", "words", "large"])
def test_an_index_of_a_million_things_is_left(hub: Path, what: str) -> None:
    """Signed rightly: 4 MiB of it are read and parsed at the most."""
    entry, room = json.dumps(strict.to_plain(put(hub, b"x"))).encode(), layout.MAX_INDEX_BYTES - 1000
    start = layout.file_bytes(index())[:-2].rstrip()

    def listing(name: bytes, one: bytes, count: int) -> bytes:
        return start + b', "' + name + b'": [' + b",".join([one] * count) + b"]}"

    whole = {
        "entries": listing(b"entries", entry, room // (len(entry) + 1)),
        "withdrawn": listing(b"withdrawn", b'{"workload": "", "digest": ""}', room // 31),
        "lists": b"[" + b",".join([b"[]"] * (room // 3)) + b"]",
        "words": b"[" + b",".join([b'"a"'] * (room // 4)) + b"]",
        "large": listing(b"entries", entry, MILLION),
    }[what]
    assert what == "large" or 0.9 * room < len(whole) <= layout.MAX_INDEX_BYTES
    signed(hub, whole)
    (pull,) = (done := pulled(str(hub)))["pulls"]
    assert pull["problems"].keys() == {"attic"}
    assert pull["taken"]["cellar"] == 1
    assert more(done) < MEMORY
