"""Boards that are trusted and mean harm, and folders in which anybody can write."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from honed.hub import layout, looking, pulling, pushing, remote
from honed.hub.layout import BoardIndex, IndexedFile, NamedKey
from honed.hub.memory import HubState
from honed.hub.minisign import PublicKey, SecretKey
from honed.protocol.errors import InvalidArgument, Unavailable
from honed.tool.main import main

from .test_hub_pull import ATTIC, CELLAR, HERE, NOW, OWNER, Machine, index_of, of


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """Where the attic means harm and the cellar does not."""
    place = tmp_path / "hub"
    pushing.make_overview(remote.store(str(place)))
    Machine(place).push(ATTIC, of(workload="a"), of(workload="b"))
    Machine(place).push(CELLAR, of(workload="c"))
    return place


def signed(hub: Path, data: bytes, key: SecretKey = ATTIC) -> None:
    pushing.write_signed(remote.store(str(hub)), layout.index_file(key.public), data, key)


def index(*entries: IndexedFile, **changes: Any) -> BoardIndex:
    whole: dict[str, Any] = {
        "honed_hub": 1, "serial": int(NOW) + 9, "created_s": NOW, "expires_s": NOW + 99, "entries": entries
    }  # fmt: skip
    return BoardIndex(**whole | changes)


def put(hub: Path, data: bytes, key: SecretKey = ATTIC, **claims: Any) -> IndexedFile:
    """A file of records in the hub, and what an index says of it."""
    entry = IndexedFile(
        sha256=layout.digest(data), bytes=len(data), records=1, device_key=HERE.key, device="n", driver="1",
        compiler="c",
    )  # fmt: skip
    remote.store(str(hub)).write(layout.object_file(key.public, entry.sha256), data)
    return replace(entry, **claims)


def problem(hub: Path) -> str:
    """Of the attic; what the cellar has is taken all the same."""
    board = Machine(hub, attic=ATTIC, cellar=CELLAR)
    problems = board.problems()
    assert [line["workload"] for line in board.lines if line["measured_by"] == "hub: cellar"] == ["c"]
    assert problems.keys() <= {"attic"}
    return problems.get("attic", "")


@pytest.mark.parametrize(
    "line",
    [
        b'{"flops": NaN}',
        b'{"flops": 1e999}',
        b'{"flops": -Infinity}',
        b'{"trace": "\\ud800"}',
        b'{"flops": ' + b"9" * 5000 + b"}",
        b'{"flops": ' + b"[" * 100_000 + b"}",
        b"\xff\xfe",
        b"null",
    ],
)
def test_lines_that_json_takes_and_records_are_not_are_told(hub: Path, line: bytes) -> None:
    """One of them once ended honed-hub, at each start anew."""
    whole = json.dumps(layout.shareable_part(of(workload="x"))).encode()
    entry = put(hub, gzip.compress(whole[:-1] + b", " + line[1:] + b"\n"))  # the latter of two keys counts
    signed(hub, layout.file_bytes(index(entry)))
    assert "no record" in problem(hub)


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xfe{}",
        '{"honed_hub": 1}'.encode("utf-16"),
        b"[" * 100_000,
        b"1" * 5000,
        b'{"honed_hub": 1, "serial": 1, "created_s": 1' + b"0" * 400 + b', "expires_s": 1, "entries": []}',
        b'{"honed_hub": 1, "serial": 1, "created_s": 1, "expires_s": 1e999, "entries": []}',
        b'{"honed_hub": 1, "serial": 18446744073709551616, "created_s": 1, "expires_s": 1, "entries": []}',
        b'{"honed_hub": 1, "serial": 1e9, "created_s": 1, "expires_s": 1, "entries": []}',
        b"[" + b"[]," * 1_000_000 + b"[]]",
        b"{}" + b" " * (3 << 20),
    ],
)
def test_signed_nonsense_is_told(hub: Path, data: bytes) -> None:
    signed(hub, data)
    assert problem(hub)


def test_names_that_lead_elsewhere_are_no_hashes(hub: Path) -> None:
    data = layout.file_bytes(index(put(hub, b"x")))
    for name in ("../../../../etc/passwd", "/etc/passwd", "A" * 64, "a" * 63 + "\n"):
        plain = json.loads(data)
        plain["entries"][0]["sha256"] = name
        signed(hub, json.dumps(plain).encode())
        assert "no hash" in problem(hub)


def test_a_file_that_holds_more_than_its_index_says_is_left(hub: Path) -> None:
    data = layout.pack_records(layout.shareable_part(of(workload=f"w{n}")) for n in range(9))
    signed(hub, layout.file_bytes(index(put(hub, data, records=8))))
    assert "more records than the index says" in problem(hub)
    signed(hub, layout.file_bytes(index(put(hub, data, records=9, bytes=len(data) - 1))))
    assert "larger than" in problem(hub)


@pytest.mark.parametrize("claims", [{"records": 1_000_000}, {"bytes": 1 << 40}, {"records": 2**63}])
def test_an_entry_that_claims_too_much_is_told_and_hides_no_other(hub: Path, claims: dict[str, int]) -> None:
    """What was only put off was put off for ever, and all behind it."""
    packed = [layout.pack_records([layout.shareable_part(of(workload=w))]) for w in ("x", "y")]
    signed(hub, layout.file_bytes(index(put(hub, packed[0], **claims), put(hub, packed[1]))))
    board = Machine(hub, attic=ATTIC)
    assert "more records or bytes than a file may" in board.problems()["attic"]
    assert [line["workload"] for line in board.lines] == ["y"]


@pytest.mark.parametrize("cap", ["MAX_SOURCE_RECORDS", "MAX_SOURCE_BYTES"])
def test_no_board_leaves_no_room_for_others(hub: Path, cap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is first has no more than its share, however much it has; the rest comes with later pulls."""
    files = [layout.pack_records([layout.shareable_part(of(workload=f"w{n}"))]) for n in range(5)]
    assert len({len(data) for data in files}) == 1
    size = 2 if cap == "MAX_SOURCE_RECORDS" else 2 * len(files[0])
    monkeypatch.setattr(pulling, "MAX_RECORDS", 3)
    monkeypatch.setattr(pulling, cap, size)
    signed(hub, layout.file_bytes(index(*(put(hub, data) for data in files))))
    board = Machine(hub, attic=ATTIC, cellar=CELLAR)
    assert board.pull().added == 3
    assert [line["workload"] for line in board.lines] == ["w0", "w1", "c"]
    board.pull()
    board.pull()
    assert {line["workload"] for line in board.lines} == {"c", *(f"w{n}" for n in range(5))}


def test_what_is_refused_counts_against_what_a_pull_takes(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line costs the service, whatever it makes of it."""
    monkeypatch.setattr(pulling, "MAX_RECORDS", 2)
    board = Machine(hub, attic=ATTIC, cellar=CELLAR)
    take_in = board._take_in
    monkeypatch.setattr(board, "_take_in", lambda *given: replace(take_in(*given), count=0))
    assert board.pull().added == 0
    assert len(board.lines) == 2


def test_who_names_the_file_of_another_spoils_it_for_nobody(hub: Path) -> None:
    """By saying of it what is not so, or by having it taken in its own name."""
    (file,) = index_of(hub, CELLAR).parent.glob("*.gz")
    for records in (0, 1):
        signed(hub, layout.file_bytes(index(put(hub, file.read_bytes(), records=records))))
        problem(hub)  # has the cellar's taken


def test_what_the_service_refuses_now_comes_again(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board = Machine(hub, attic=ATTIC)

    def refusing(*_: Any) -> Any:
        raise InvalidArgument("there is no device 0")

    with monkeypatch.context() as patched:
        patched.setattr(board, "_take_in", refusing)
        assert "no device 0" in board.problems()["attic"]
    assert board.pull().added == 2


def test_a_list_of_another_owner_has_numbers_of_its_own(hub: Path) -> None:
    """One who moves to another hub is not told of a replay."""
    board = Machine(hub, owner=OWNER)
    for owner, now in ((OWNER, NOW + 99), (CELLAR, NOW)):
        boards = (NamedKey("attic", str(ATTIC.public)),)
        pushing.make(remote.store(str(hub)), owner, boards, (), now)
        board.owner = owner.public
        assert not board.problems(now=NOW + 99)
    pushing.make(remote.store(str(hub)), OWNER, (), (), NOW)  # forgot what came before
    board.owner = OWNER.public
    assert "an old one again" in board.problems(now=NOW + 99)[layout.HUB]


def test_a_key_with_the_id_of_another_is_none_of_the_two(hub: Path, tmp_path: Path) -> None:
    """An id is its owner's to choose: it would spoil the other's folder and numbers, and its revocation."""
    liar = PublicKey(CELLAR.id, ATTIC.public.key)
    assert layout.trusted_keys({"cellar": CELLAR.public, "liar": liar}, []) == {"cellar": CELLAR.public}


def test_nobody_comes_on_the_list_with_the_id_of_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, hub = str(tmp_path / "owner"), str(tmp_path / "hub")
    assert main(["hub", "init", hub, "--folder", folder]) == 0
    assert main(["hub", "trust", hub, "cellar", str(CELLAR.public), "--folder", folder]) == 0
    liar = PublicKey(CELLAR.id, ATTIC.public.key)
    assert main(["hub", "trust", hub, "liar", str(liar), "--folder", folder]) != 0
    assert "another machine's key has the id" in capsys.readouterr().err
    assert (tmp_path / "hub" / layout.OVERVIEW).exists()


def test_a_number_that_cannot_grow_spoils_no_other_key(hub: Path) -> None:
    signed(hub, layout.file_bytes(index(put(hub, b"x"), serial=2**64 - 1)))
    board = Machine(hub, attic=ATTIC, cellar=CELLAR)
    board.pull()
    Machine(hub).push(CELLAR, of(workload="d"))
    board.pull()
    assert [line["workload"] for line in board.lines] == ["c", "d"]


def trap(kind: str, path: Path, outside: Path) -> None:
    """In the place of a file or folder of the hub."""
    if path.is_dir():
        path.rename(path.with_name("away"))
    else:
        path.unlink()
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "link":
            path.symlink_to(outside)
        case "loop":
            path.symlink_to(path)
        case "device":
            path.symlink_to("/dev/zero")


@pytest.mark.parametrize("what", ["index.json", "index.json.minisig", "gz", "whole"])
@pytest.mark.parametrize("kind", ["fifo", "folder", "link", "loop", "device"])
def test_traps_in_a_shared_folder_are_told_and_hold_up_nobody(
    hub: Path, tmp_path: Path, what: str, kind: str
) -> None:
    """A FIFO in the place of an index once stopped everybody who pulled."""
    folder = index_of(hub, ATTIC).parent
    path = folder if what == "whole" else next(folder.glob("*.gz")) if what == "gz" else folder / what
    (outside := tmp_path / "outside").mkdir()
    trap(kind, path, outside)
    told = problem(hub)
    assert told or what == "whole", "what is no folder has no index"
    if kind in ("link", "loop", "device"):
        assert "link" in told


@pytest.mark.parametrize("what", ["boards", "folder", "index.json"])
def test_nothing_is_written_through_a_link(hub: Path, tmp_path: Path, what: str) -> None:
    """Such as root would follow on a stick that somebody else has prepared."""
    (outside := tmp_path / "outside").mkdir()
    victim = outside / "index.json"
    victim.write_text("mine")
    index = index_of(hub, CELLAR)
    path = {"boards": index.parent.parent, "folder": index.parent, "index.json": index}[what]
    if path.is_dir():
        path.rename(tmp_path / "away")
    else:
        path.unlink()
    path.symlink_to(victim if what == "index.json" else outside)
    with pytest.raises(InvalidArgument, match="is a link or behind one"):
        Machine(hub).push(CELLAR, of(workload="new"))
    assert victim.read_text() == "mine"
    assert list(outside.iterdir()) == [victim]


def test_the_hub_itself_may_be_behind_a_link(hub: Path, tmp_path: Path) -> None:
    (link := tmp_path / "link").symlink_to(hub)
    Machine(link).push(CELLAR, of(workload="new"))
    assert Machine(link, cellar=CELLAR).pull().added == 1


def test_what_got_lost_is_put_there_again(hub: Path) -> None:
    """Without a change: with the push that an index would else expire without."""
    for file in index_of(hub, CELLAR).parent.glob("*.gz"):
        file.unlink()
    Machine(hub).push(CELLAR, of(workload="c"), now=NOW + 16 * 86400)
    board = Machine(hub, cellar=CELLAR)
    assert board.pull(now=NOW + 16 * 86400).added == 1


def _swap(index: Path) -> None:
    index.unlink()
    index.mkdir()


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda index: index.write_bytes(index.read_bytes()[:-9]), "nothing was pushed.*remove it"),
        (lambda index: index.write_bytes(b"\x00"), "nothing was pushed.*remove it"),
        (lambda index: index.with_name("index.json.minisig").unlink(), "no signature; restore"),
        (_swap, "no file, and was left; restore"),
    ],
)
def test_a_push_loses_nothing_where_the_index_cannot_be_read(
    hub: Path, damage: Callable[[Path], None], why: str
) -> None:
    damage(index_of(hub, CELLAR))
    before = _files_below(hub)
    with pytest.raises(InvalidArgument, match=why):
        Machine(hub).push(CELLAR, of(workload="new"))
    assert _files_below(hub) == before


def test_a_push_loses_nothing_of_a_hub_that_is_away(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board, before = Machine(hub), _files_below(hub)

    def fail(*_: Any) -> Any:
        raise Unavailable("the network is away")

    monkeypatch.setattr(type(board.store), "look", fail)
    with pytest.raises(Unavailable):
        board.push(CELLAR, of(workload="new"))
    assert _files_below(hub) == before


def _files_below(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_push_goes_on_after_one_that_was_interrupted(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An expired index is known, too: the files that it alone names are removed."""
    board = Machine(hub)
    board.push(CELLAR, of(workload="c"))
    write = type(board.store).write
    for most in range(6):
        left = iter(range(most))

        def fail(self: Any, name: str, data: bytes, left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                raise Unavailable("the machine is off")
            write(self, name, data)

        with monkeypatch.context() as off, suppress(Unavailable):
            off.setattr(type(board.store), "write", fail)
            board.push(CELLAR, of(workload=f"{most}"))
        board.push(CELLAR, of(workload="d", flops=float(most)))
    files = len(_files_below(hub))
    board.push(CELLAR, of(workload="e"), now=NOW + 100 * 86400)
    assert len(_files_below(hub)) == files
    assert not Machine(hub, cellar=CELLAR).problems(now=NOW + 100 * 86400)


def test_what_is_learned_from_is_bounded(hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looking, "_MOST", 600)
    (to := tmp_path / "to").mkdir()
    store = remote.store(str(hub))
    done = looking.gather(store, {"a": ATTIC.public, "c": CELLAR.public}, None, HubState(), to, NOW)
    assert (done.keys, done.records) == (1, 2)
    assert "more than" in done.problems[0]
    assert sum(path.stat().st_size for path in to.iterdir()) < 2 * 600


def test_a_list_that_names_a_key_which_is_none_is_told(hub: Path) -> None:
    ring = layout.Keyring(
        honed_hub=1, serial=1, created_s=NOW, expires_s=NOW + 9, boards=(NamedKey("x", "RWnonsense"),)
    )
    pushing.write_signed(remote.store(str(hub)), layout.HUB, layout.file_bytes(ring), OWNER)
    board = Machine(hub, owner=OWNER, cellar=CELLAR)
    assert board.problems().keys() == {layout.HUB}
    assert len(board.lines) == 1
