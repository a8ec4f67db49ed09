"""Files that keep what the service knows: whole, safe from a full disk, set aside where unreadable."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest

from honed.daemon.observe.statefile import StateFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    count: int


def file(path: Path) -> StateFile[Value]:
    return StateFile(path, Value, "the count")


def test_it_is_written_when_it_changed(tmp_path: Path) -> None:
    path = tmp_path / "count.json"
    kept = file(path)
    assert kept.read() is None
    asyncio.run(kept.save(Value(count=1)))
    written = path.stat().st_ino
    asyncio.run(kept.save(Value(count=1)))
    asyncio.run(kept.save(None))
    assert path.stat().st_ino == written
    again = file(path)
    assert again.read() == Value(count=1)
    asyncio.run(again.save(Value(count=1)))
    assert path.stat().st_ino == written
    asyncio.run(again.save(Value(count=2)))
    assert file(path).read() == Value(count=2)


def test_what_could_not_be_written_is_written_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "gone" / "count.json"
    kept = file(path)
    asyncio.run(kept.save(Value(count=1)))
    asyncio.run(kept.save(None))
    assert caplog.text.count("the count cannot be saved") == 1
    path.parent.mkdir()
    asyncio.run(kept.save(None))
    assert file(path).read() == Value(count=1)


def test_what_is_as_before_a_failure_is_not_written_again(tmp_path: Path) -> None:
    folder = tmp_path / "there"
    folder.mkdir()
    kept = file(folder / "count.json")
    asyncio.run(kept.save(Value(count=1)))
    folder.rename(tmp_path / "away")
    asyncio.run(kept.save(Value(count=2)))
    asyncio.run(kept.save(Value(count=1)))
    (tmp_path / "away").rename(folder)
    asyncio.run(kept.save(None))
    assert file(folder / "count.json").read() == Value(count=1)


@pytest.mark.parametrize("data", [b"", b"\xff", b"[]", b'{"count": "1"}', b'{"count": -1}', b"[" * 100_000])
def test_what_cannot_be_read_is_set_aside_and_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, data: bytes
) -> None:
    def check(value: Value) -> None:
        if value.count < 0:
            raise ValueError("it is negative")

    path = tmp_path / "count.json"
    path.write_bytes(data)
    assert file(path).read(check) is None
    assert (tmp_path / "count.json.damaged").read_bytes() == data
    assert "the count is lost" in caplog.text
