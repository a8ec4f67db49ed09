"""What a pull asks for: what did not change is not sent, and with an overview not asked for. It may lie."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st

from honed.hub import layout, looking, pushing, remote
from honed.hub.layout import NamedKey, Overview
from honed.hub.looking import LOOKS, to_ask
from honed.hub.memory import MAX_FILE, IndexCache, KeptFile
from honed.hub.minisign import PublicKey, SecretKey
from honed.protocol.errors import Unavailable

from .hubserver import Asked, counting
from .test_hub_pull import ATTIC, CELLAR, NOW, OWNER, Machine, index_of, of

DAY = 86400.0
BOARDS = tuple(NamedKey(name, str(key.public)) for name, key in (("attic", ATTIC), ("cellar", CELLAR)))


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """With an overview, and two boards' records."""
    place = tmp_path / "hub"
    store = remote.store(str(place))
    pushing.make_overview(store)
    pushing.make(store, OWNER, BOARDS, (), NOW)
    Machine(place).push(ATTIC, of(workload="a"))
    Machine(place).push(CELLAR, of(workload="b"))
    return place


@pytest.fixture
def web(hub: Path) -> Iterator[tuple[str, Asked]]:
    with counting(hub) as served:
        yield served


def file_of(key: SecretKey) -> str:
    return layout.index_file(key.public)


def test_when_nothing_changed_a_pull_asks_twice_and_is_sent_nothing(web: tuple[str, Asked]) -> None:
    url, asked = web
    board = Machine(url, owner=OWNER)
    assert board.pull().added == 2
    asked.clear()
    assert not board.problems()
    assert asked == [(layout.HUB, 304), (layout.OVERVIEW, 304)]


def test_what_changed_is_asked_for_alone(hub: Path, web: tuple[str, Asked]) -> None:
    url, asked = web
    board = Machine(url, owner=OWNER)
    board.pull()
    Machine(hub).push(CELLAR, of(workload="c"))
    asked.clear()
    assert board.pull().added == 1
    index = file_of(CELLAR)
    assert asked[:4] == [(layout.HUB, 304), (layout.OVERVIEW, 200), (index, 200), (f"{index}.minisig", 200)]
    assert [status for _, status in asked[4:]] == [200]  # the records


def test_without_an_overview_each_index_is_asked_for_and_sent_once(hub: Path, web: tuple[str, Asked]) -> None:
    url, asked = web
    (hub / layout.OVERVIEW).unlink()
    board = Machine(url, owner=OWNER)
    assert board.pull().added == 2
    asked.clear()
    assert not board.problems()
    assert [status for _, status in asked] == [304, 404, 304, 304]
    Machine(hub).push(CELLAR, of(workload="c"))
    assert board.pull().added == 1
    assert not (hub / layout.OVERVIEW).exists()  # whoever keeps the hub took it away


@pytest.mark.parametrize(
    "lie",
    [
        b"",
        b"{",
        b"[]",
        b'{"honed_hub": 2, "indexes": {}}',
        b'{"honed_hub": 1, "indexes": {}}',
        b'{"honed_hub": 1, "indexes": {"x": "y"}}',
        b'{"honed_hub": 1, "indexes": []}',
        b"\xff\xfe",
        b"[" * 100_000,
        b" " * (layout.MAX_OVERVIEW_BYTES + 1),
    ],
)
def test_an_overview_that_is_none_costs_requests_and_keeps_nothing_back(hub: Path, lie: bytes) -> None:
    board = Machine(hub, owner=OWNER)
    board.pull()
    Machine(hub).push(CELLAR, of(workload="c"))
    (hub / layout.OVERVIEW).write_bytes(lie)
    assert board.pull().added == 1
    Machine(hub).push(ATTIC, of(workload="d"))  # mends it
    assert board.pull().added == 1
    assert ATTIC.public.name in json.loads((hub / layout.OVERVIEW).read_bytes())["indexes"]


def test_an_overview_that_says_that_nothing_changed_keeps_it_back_for_a_day(hub: Path) -> None:
    board = Machine(hub, owner=OWNER)
    board.pull()
    old = (hub / layout.OVERVIEW).read_bytes()
    Machine(hub).push(CELLAR, of(workload="c"))
    (hub / layout.OVERVIEW).write_bytes(old)
    assert board.pull(now=NOW + 6 * 3600).added == 0
    assert board.pull(now=NOW + DAY).added == 1


def test_who_is_named_is_asked_for_whatever_the_overview_says(hub: Path) -> None:
    board = Machine(hub, owner=OWNER)
    board.pull()
    old = (hub / layout.OVERVIEW).read_bytes()
    Machine(hub).push(CELLAR, of(workload="c"))
    (hub / layout.OVERVIEW).write_bytes(old)
    assert board.pull(names=frozenset({"attic"})).added == 0
    assert board.pull(names=frozenset({"cellar"})).added == 1


def test_what_is_kept_back_is_told_when_it_expires(hub: Path, web: tuple[str, Asked]) -> None:
    """Whatever the overview and a server say: an index ends, and is asked for then with each pull."""
    url, asked = web
    board = Machine(url, owner=OWNER)
    board.pull()
    late = NOW + pushing.LASTS + 1
    for _ in range(2):
        asked.clear()
        assert {name for name, why in board.problems(now=late).items() if "expired" in why} == {
            "attic",
            "cellar",
        }
        assert (file_of(ATTIC), 304) in asked or (file_of(ATTIC), 200) in asked
    Machine(hub).push(ATTIC, of(workload="c"), now=late)
    assert "attic" not in board.problems(now=late)


def test_an_index_that_is_gone_is_told_within_a_day(hub: Path) -> None:
    board = Machine(hub, owner=OWNER)
    board.pull()
    index_of(hub, ATTIC).unlink()
    assert not board.problems()
    assert board.problems(now=NOW + DAY) == {"attic": "what it had there is gone"}
    assert board.problems(now=NOW + DAY) == {"attic": "what it had there is gone"}  # and from then on


def test_who_has_nothing_there_is_found_when_the_overview_names_it_or_within_a_day(tmp_path: Path) -> None:
    hub = tmp_path / "hub"
    store = remote.store(str(hub))
    pushing.make_overview(store)
    pushing.make(store, OWNER, BOARDS, (), NOW)
    board = Machine(hub, owner=OWNER)
    assert not board.problems()
    Machine(hub).push(ATTIC, of(workload="a"))
    assert board.pull().added == 1
    overview = (hub / layout.OVERVIEW).read_bytes()
    Machine(hub).push(CELLAR, of(workload="b"))
    (hub / layout.OVERVIEW).write_bytes(overview)  # as where its records come by rsync
    assert board.pull().added == 0
    assert board.pull(now=NOW + DAY).added == 1


def test_an_index_that_came_again_is_refused_though_its_overview_came_with_it(hub: Path) -> None:
    board = Machine(hub, owner=OWNER)
    old = {path: path.read_bytes() for path in hub.rglob("*") if path.is_file()}
    board.pull()
    Machine(hub).push(CELLAR, of(workload="c"))
    board.pull()
    for path, data in old.items():
        path.write_bytes(data)
    assert "seen before" in board.problems()["cellar"]
    assert "seen before" in board.problems(now=NOW + DAY)["cellar"]


def test_whose_note_was_lost_notes_it_again(hub: Path) -> None:
    """Two that push at the same moment: the latter writes the overview that it read before."""
    board, attic = Machine(hub, owner=OWNER), Machine(hub, owner=OWNER)
    board.pull()
    before = (hub / layout.OVERVIEW).read_bytes()
    attic.push(ATTIC, of(workload="c"))
    attic.pull(own=ATTIC.public)
    assert attic.memory.noted
    (hub / layout.OVERVIEW).write_bytes(before)
    Machine(hub).push(CELLAR, of(workload="d"))
    assert board.pull().added == 1
    attic.pull(own=ATTIC.public)
    assert not attic.memory.noted
    pushing.note(attic.store, ATTIC.public, attic.memory.index)
    assert board.pull().added == 1
    (hub / layout.OVERVIEW).write_bytes(before)
    assert not attic.push(ATTIC, of(workload="c")).changed  # does so, too
    attic.pull(own=ATTIC.public)
    assert attic.memory.noted


def test_who_may_not_write_the_overview_pushes_all_the_same(
    hub: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where a store's policy gives a board its own folder alone."""
    pusher = Machine(hub)
    write = pusher.store.write

    def refused(name: str, data: bytes) -> None:
        if name == layout.OVERVIEW:
            raise Unavailable("403")
        write(name, data)

    monkeypatch.setattr(pusher.store, "write", refused)
    assert pusher.push(CELLAR, of(workload="c")).changed
    assert "others will find what was pushed later" in caplog.text
    assert Machine(hub, cellar=CELLAR).pull().added == 1


def test_what_is_kept_is_checked_like_what_comes_from_the_hub(hub: Path) -> None:
    board = Machine(hub, owner=OWNER)
    board.pull()
    file = file_of(ATTIC)
    kept = board.shelf.files[file]
    forged = kept.text.replace('"records": 1', '"records": 2')
    overview = Overview(honed_hub=1, indexes={ATTIC.public.name: layout.digest(forged.encode())})
    (hub / layout.OVERVIEW).write_bytes(layout.file_bytes(overview))
    board.shelf.put(file, replace(kept, text=forged))
    found = looking.look(
        board.store, board.trusted, board.owner, board.memory, board.shelf, NOW, own=CELLAR.public
    )
    (attic,) = found
    assert attic.problem == ""
    assert attic.index is not None
    assert attic.index.entries[0].records == 1


def test_another_key_of_that_name_is_not_trusted(hub: Path) -> None:
    """A key's id is its owner's to choose."""
    board = Machine(hub, attic=ATTIC)
    board.pull()
    board.trusted = {"attic": PublicKey(ATTIC.id, CELLAR.public.key)}
    assert "is wrong" in board.problems()["attic"]


def test_what_is_kept_is_of_one_hub_and_damage_costs_no_more_than_requests(
    tmp_path: Path, hub: Path, caplog: pytest.LogCaptureFixture
) -> None:
    board = Machine(hub, owner=OWNER)
    board.pull()
    path = tmp_path / "shelf.json"
    board.shelf.save(path)
    assert IndexCache.load(path, board.shelf.url).files == board.shelf.files
    assert IndexCache.load(path, "http://another").files == {}
    assert IndexCache.load(tmp_path / "none", "x").files == {}
    assert not caplog.text
    path.write_bytes(b"{" + path.read_bytes())
    assert IndexCache.load(path, board.shelf.url).files == {}
    assert "damaged" in caplog.text


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    def kept(letters: int) -> KeptFile:
        return KeptFile(text="x" * letters, signature="", tag="", looked_s=NOW)

    monkeypatch.setattr("honed.hub.memory.MAX_WHOLE", 100)
    shelf = IndexCache("x")
    shelf.put("a", kept(60))
    shelf.put("b", kept(60))
    assert set(shelf.files) == {"a"}
    shelf.put("a", kept(30))
    shelf.put("b", kept(60))
    assert set(shelf.files) == {"a", "b"}
    monkeypatch.setattr("honed.hub.memory.MAX_WHOLE", 10 * MAX_FILE)
    shelf.put("a", kept(MAX_FILE + 1))
    assert set(shelf.files) == {"b"}


def test_who_is_trusted_no_more_is_kept_no_more(hub: Path) -> None:
    board = Machine(hub, owner=OWNER)
    board.pull()
    pushing.make(remote.store(str(hub)), OWNER, BOARDS[1:], (ATTIC.public.name,), NOW)
    board.pull()
    assert set(board.shelf.files) == {layout.HUB, layout.OVERVIEW, file_of(CELLAR)}


def test_one_index_that_cannot_be_read_holds_up_no_other_and_several_are_a_hub_that_is_away(
    hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = Machine(hub, owner=OWNER)
    read, broken = board.store.look, {file_of(ATTIC)}

    def look(name: str, most: int, tag: str = "") -> Any:
        if name in broken:
            raise Unavailable("it answers 500")
        return read(name, most, tag)

    monkeypatch.setattr(board.store, "look", look)
    assert board.problems() == {"attic": "it answers 500"}
    assert [line["workload"] for line in board.lines] == ["b"]
    broken.add(file_of(CELLAR))
    with pytest.raises(Unavailable, match="500"):
        board.pull(names=frozenset({"cellar"}))


class Tagging(MemoryFileSystem):
    """A store that tells ETags, as S3's does, and counts what is opened."""

    protocol = "tagging"
    opened: list[str]

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        data = self.cat_file(path)
        return {**super().info(path, **options), "ETag": f'"{layout.digest(data)}"'}

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        self.opened.append(path)
        return super().open(path, mode, **options)


def test_stores_with_etags_send_what_changed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("tagging", Tagging, clobber=True)
    monkeypatch.setattr(Tagging, "opened", [], raising=False)
    place = f"tagging://hub-{id(monkeypatch)}"
    Machine(place).push(ATTIC, of())
    board = Machine(place, attic=ATTIC)
    assert board.pull().added == 1
    Tagging.opened.clear()
    assert board.pull().added == 0
    assert Tagging.opened == []
    Machine(place).push(ATTIC, of(workload="z"))
    assert board.pull().added == 1


def test_a_store_that_never_answers_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries wait as long as a byte comes now and then."""
    fsspec.register_implementation("tagging", Tagging, clobber=True)
    monkeypatch.setattr(Tagging, "opened", [], raising=False)
    place, answers = f"tagging://hub-{id(monkeypatch)}", threading.Event()
    Machine(place).push(ATTIC, of())
    monkeypatch.setattr(Tagging, "info", lambda *_, **__: answers.wait())
    monkeypatch.setattr(remote, "WHOLE_SECONDS", 0.2)
    with pytest.raises(Unavailable, match="took more than"):
        Machine(place, attic=ATTIC).pull()
    answers.set()
    monkeypatch.setattr(remote, "_PATIENCE_SECONDS", -1.0)
    with pytest.raises(Unavailable, match="took more than -0 min"):
        Machine(place, attic=ATTIC).pull()


KEPT = st.builds(
    KeptFile,
    text=st.sampled_from(["", "one", "two"]),
    signature=st.just(""),
    tag=st.just(""),
    looked_s=st.floats(NOW - 3 * DAY, NOW + DAY),
)


@given(
    st.dictionaries(st.integers(0, 200).map(str), KEPT, max_size=120),
    st.dictionaries(st.integers(0, 200).map(str), st.sampled_from(["one", "two"]).map(looking._sha256)),
    st.sets(st.integers(0, 200).map(str)),
)
def test_all_that_may_have_changed_is_asked_for_and_some_of_the_rest(
    kept: dict[str, KeptFile], listed: dict[str, str], files: set[str]
) -> None:
    keys = {file: file for file in files}
    assert to_ask(keys, kept, None, NOW) == files
    asked = to_ask(keys, kept, listed, NOW)
    same = {f for f in files if f in kept and looking._sha256(kept[f].text) == listed.get(f, "")}
    assert files - same <= asked <= files
    old = {file for file in same if not NOW - DAY < kept[file].looked_s <= NOW}
    assert len(asked & same) == min(LOOKS, len(old))
    assert asked & same <= old
    left = old - asked
    assert all(kept[a].looked_s <= kept[b].looked_s for a in asked & same for b in left)


@given(st.integers(1, 300), st.integers(1, 24))
def test_every_index_is_asked_for_in_its_turn(boards: int, hours: int) -> None:
    """Though an overview says for ever that nothing changed."""
    files = {str(n): str(n) for n in range(boards)}
    kept = {file: KeptFile(text="", signature="", tag="", looked_s=NOW) for file in files}
    day, turns = -(-24 // hours) * hours * 3600.0, -(-boards // LOOKS)
    longest = day + turns * hours * 3600.0
    for pull in range(1, int(2 * longest / (hours * 3600.0)) + 2):
        now = NOW + pull * hours * 3600.0
        for file in to_ask(files, kept, {}, now):
            assert now - kept[file].looked_s <= longest
            kept[file] = replace(kept[file], looked_s=now)
        assert min(each.looked_s for each in kept.values()) >= now - longest
