"""Pushes and pulls: real folders and real HTTP; a list stands in for the service that takes records in."""

from __future__ import annotations

import http.server
import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from honed.hub import layout, pulling, pushing, remote
from honed.hub import web as hub_web
from honed.hub.layout import NamedKey, Withdrawn
from honed.hub.memory import HubState, IndexCache
from honed.hub.minisign import SecretKey
from honed.hub.pulling import Pulled
from honed.jobs.events import Imported
from honed.protocol.errors import InvalidArgument, Unavailable
from honed.protocol.values import DeviceIdentity

from .test_hub_files import record

NOW = 1.8e9
HERE = DeviceIdentity(platform="p", vendor="v", name="n", driver_version="1", kernel_driver="")
OWNER, ATTIC, CELLAR = (SecretKey(bytes([n]) * 8, bytes([n]) * 32) for n in (1, 2, 3))


class Machine:
    """A machine that pushes and pulls, without a service."""

    def __init__(self, place: str | Path, **trusted: SecretKey) -> None:
        self.store = remote.store(str(place))
        self.owner = trusted.pop("owner").public if "owner" in trusted else None
        self.trusted = {name: key.public for name, key in trusted.items()}
        self.memory, self.shelf = HubState(), IndexCache(self.store.url)
        self.lines: list[dict[str, Any]] = []

    def push(
        self,
        key: SecretKey,
        *records: dict[str, Any],
        spread: Any = (),
        withdrawn: Any = (),
        now: float = NOW,
    ) -> Any:
        return pushing.push(self.store, key, records, (), spread, withdrawn, self.memory, now)

    def pull(self, *, now: float = NOW, **options: Any) -> Pulled:
        here = {HERE: "0"}
        known = self.memory, self.shelf
        return pulling.pull(
            self.store, self.trusted, here, self._take_in, *known, now, owner=self.owner, **options
        )

    def _take_in(self, device: str, lines: Iterator[bytes]) -> Imported:
        assert device == "0"
        new = [json.loads(line) for line in lines]
        self.lines += new
        return Imported(count=len(new), merged=0, refused=())

    def problems(self, **options: Any) -> dict[str, str]:
        return {source.name: source.problem for source in self.pull(**options).sources if source.problem}


def of(device: DeviceIdentity = HERE, **changes: Any) -> dict[str, Any]:
    """A record of a device."""
    plain = {n: getattr(device, n) for n in ("platform", "vendor", "name", "driver_version", "kernel_driver")}
    return record(device=plain, **changes)


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """With two boards' records, which a keyring names."""
    place = tmp_path / "hub"
    boards = tuple(NamedKey(name, str(key.public)) for name, key in (("attic", ATTIC), ("cellar", CELLAR)))
    pushing.make(remote.store(str(place)), OWNER, boards, (), NOW)
    Machine(place).push(ATTIC, of(workload="a"), of(workload="b"))
    Machine(place).push(CELLAR, of(workload="c"))
    return place


def index_of(hub: Path, key: SecretKey) -> Path:
    return hub / layout.index_file(key.public)


def test_what_is_pushed_is_pulled_once(hub: Path) -> None:
    board = Machine(hub, owner=OWNER)
    assert board.pull().added == 3
    assert {line["measured_by"] for line in board.lines} == {"hub: attic", "hub: cellar"}
    assert board.pull().added == 0
    Machine(hub).push(CELLAR, of(workload="d"))
    assert board.pull().added == 1
    assert len(list((hub / layout.folder(CELLAR.public)).glob("*.gz"))) == 1  # what it had before is gone


def test_only_what_changed_is_pushed(hub: Path) -> None:
    board = Machine(hub)
    assert not board.push(CELLAR, of(workload="c")).changed
    assert board.push(CELLAR, of(workload="c"), now=NOW + 20 * 86400).changed  # or it would expire
    assert board.push(CELLAR, of(workload="c"), of(workload="x")).records == 2


def test_what_is_there_to_learn_from_is_pushed_and_not_pulled(hub: Path) -> None:
    folder = hub / layout.folder(CELLAR.public)
    spread = [of(workload="c", trace=f"[{n}]") for n in range(20)]
    assert Machine(hub).push(CELLAR, of(workload="c"), spread=spread).changed
    assert len(list(folder.glob("*.gz"))) == 2
    assert not Machine(hub).push(CELLAR, of(workload="c"), spread=spread).changed
    assert Machine(hub, cellar=CELLAR).pull().added == 1
    assert Machine(hub).push(CELLAR, of(workload="c"), spread=spread[:10]).changed
    assert len(list(folder.glob("*.gz"))) == 2  # what it had before is gone
    assert Machine(hub).push(CELLAR, of(workload="c"), spread=[of(workload="c")]).changed
    assert len(list(folder.glob("*.gz"))) == 1  # the same records are one file
    assert Machine(hub).push(CELLAR, of(workload="c")).changed
    assert len(list(folder.glob("*.gz"))) == 1


def test_other_devices_records_stay_there(hub: Path) -> None:
    Machine(hub).push(CELLAR, of(replace(HERE, name="another")), of(replace(HERE, driver_version="2")))
    board = Machine(hub, cellar=CELLAR)
    assert board.pull().added == 1
    assert board.lines[0]["device"]["driver_version"] == "2"


def test_who_is_not_trusted_is_not_read(hub: Path) -> None:
    assert Machine(hub, attic=ATTIC).pull().added == 2
    with pytest.raises(InvalidArgument, match="no key is trusted"):
        Machine(hub).pull()
    pushing.make(remote.store(str(hub)), OWNER, (NamedKey("attic", str(ATTIC.public)),), (), NOW)
    assert Machine(hub, owner=OWNER).pull().added == 2
    boards = (NamedKey("attic", str(ATTIC.public)),)
    pushing.make(remote.store(str(hub)), OWNER, boards, (ATTIC.public.name,), NOW)
    assert Machine(hub, owner=OWNER).pull().added == 0


def test_hold_looks_only(hub: Path) -> None:
    board = Machine(hub, owner=OWNER)
    assert board.pull(hold=True).held == 3
    assert not board.lines
    assert board.pull().added == 3


@pytest.mark.parametrize("victim", ["index", "keyring"])
@pytest.mark.parametrize(
    ("attack", "why"),
    [
        ("none", "no signature"),
        ("empty", "no signature"),
        ("other", "signed by"),
        ("changed", "changed or cut off"),
        ("half", "changed or cut off"),
        ("endless", "larger than"),
    ],
)
def test_what_is_not_signed_is_not_taken(hub: Path, victim: str, attack: str, why: str) -> None:
    file = index_of(hub, ATTIC) if victim == "index" else hub / layout.HUB
    signature = file.with_name(file.name + layout.SIGNATURE)
    match attack:
        case "none":
            signature.unlink()
        case "empty":
            signature.write_bytes(b"")
        case "other":
            stranger = SecretKey(b"stranger", b"s" * 32)
            signature.write_bytes(stranger.sign(file.read_bytes(), "x"))
        case "changed":
            file.write_bytes(file.read_bytes().replace(b'"serial": 1', b'"serial": 7'))
        case "half":
            file.write_bytes(file.read_bytes()[:99])
        case "endless":
            with file.open("r+b") as open_:
                open_.truncate(1 << 34)
    board = Machine(hub, owner=OWNER, cellar=CELLAR)
    problems = board.problems()
    assert why in problems["attic" if victim == "index" else layout.HUB]
    assert [line["workload"] for line in board.lines] == ["c"]  # the other's trouble is not this one's


def test_what_expired_or_comes_again_is_not_taken(hub: Path) -> None:
    board = Machine(hub, attic=ATTIC)
    assert "expired" in board.problems(now=NOW + 40 * 86400)["attic"]
    old = {path: path.read_bytes() for path in index_of(hub, ATTIC).parent.iterdir()}
    assert board.pull().added == 2
    Machine(hub).push(ATTIC, of(workload="new"))
    board.pull()
    for path, data in old.items():
        path.write_bytes(data)
    assert "seen before" in board.problems()["attic"]


def test_files_that_are_not_what_the_index_names_are_told_and_fetched_again(hub: Path) -> None:
    (file,) = (hub / layout.folder(ATTIC.public)).glob("*.gz")
    whole = file.read_bytes()
    board = Machine(hub, attic=ATTIC)
    for data in (whole[:50], layout.pack_records([layout.shareable_part(of(trace="[666]"))])):
        file.write_bytes(data)
        assert "changed or cut off" in board.problems()["attic"]
    file.unlink()
    assert "has no boards" in board.problems()["attic"]
    file.write_bytes(whole)
    assert board.pull().added == 2


def test_a_million_records_are_left(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulling, "MAX_RECORDS", 2)
    board = Machine(hub, attic=ATTIC, cellar=CELLAR)
    assert board.pull().added == 2
    assert board.pull().added == 1


def test_schedules_that_two_boards_took_back_are_left(hub: Path) -> None:
    back = [Withdrawn("a", layout.digest(b"[1]")[:12])]
    Machine(hub).push(CELLAR, withdrawn=back)
    board = Machine(hub, owner=OWNER, ours=OWNER)
    assert board.pull().added == 2  # one is none
    stale = [Withdrawn("a", "0" * 12), *back]
    Machine(hub).push(OWNER, of(workload="a"), of(workload="e"))
    Machine(hub).push(ATTIC, of(workload="b"), withdrawn=stale)
    pulled = board.pull()
    assert pulled.withdrawn == 1
    assert [line["workload"] for line in board.lines[2:]] == ["e", "b"]


def test_what_a_machine_took_back_it_does_not_put_there(hub: Path) -> None:
    back = [Withdrawn("a", layout.digest(b"[1]")[:12])]
    assert Machine(hub).push(ATTIC, of(workload="a"), of(workload="b"), withdrawn=back).records == 1


class _Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        if not self.path.endswith("endless"):
            super().do_GET()
            return
        self.send_response(200)
        self.end_headers()
        while True:
            try:
                self.wfile.write(bytes(1 << 16))
            except OSError:
                return


@pytest.fixture
def web(hub: Path) -> Iterator[str]:
    """The hub on HTTP."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, directory=str(hub)))
    thread = threading.Thread(target=partial(server.serve_forever, poll_interval=0.005))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_plain_web_server_is_a_hub(web: str) -> None:
    board = Machine(web, owner=OWNER)
    assert board.pull().added == 3
    with pytest.raises(InvalidArgument, match="push to the folder"):
        board.push(ATTIC, of())
    with pytest.raises(InvalidArgument, match="larger than 1000"):
        board.store.read("endless", 1000)


def test_a_web_server_can_read_what_a_private_user_pushes(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        Machine(tmp_path / "a" / "hub").push(ATTIC, of())
    finally:
        os.umask(before)
    written = [tmp_path / "a", *(tmp_path / "a").rglob("*")]
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in written)
    assert all(path.stat().st_mode & 0o001 for path in written if path.is_dir())


def test_what_fsspec_reads_is_a_hub() -> None:
    place = f"memory://hub-{time.monotonic_ns()}"
    Machine(place).push(ATTIC, of())
    Machine(place).push(ATTIC, of(workload="z"))
    assert Machine(place, attic=ATTIC).pull().added == 1
    with pytest.raises(InvalidArgument, match="cannot be read"):
        remote.store("nonsense://x")


def test_a_hub_that_is_away_is_told() -> None:
    with pytest.raises(Unavailable, match="cannot be read"):
        Machine("http://127.0.0.1:9", owner=OWNER).pull()


def test_a_file_that_takes_for_ever_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_web, "WHOLE_SECONDS", 0.0)
    with pytest.raises(Unavailable, match="took more than"):
        hub_web.read_bounded(lambda _: b"x", 1000, "slow")


def test_memory_is_kept(tmp_path: Path, hub: Path) -> None:
    board = Machine(hub, owner=OWNER)
    board.pull()
    board.memory.save(tmp_path / "state" / "memory.json")
    assert HubState.load(tmp_path / "state" / "memory.json") == board.memory
    assert HubState.load(tmp_path / "none") == HubState()
    (tmp_path / "bad").write_text("{")
    with pytest.raises(InvalidArgument, match="damaged"):
        HubState.load(tmp_path / "bad")


def test_a_file_signed_as_another_is_not_taken(hub: Path) -> None:
    """One key's index in place of another file that the same key signed."""
    pushing.make(remote.store(str(hub)), ATTIC, (), (), NOW)
    index, keyring = index_of(hub, ATTIC), hub / layout.HUB
    for suffix in ("", layout.SIGNATURE):
        (index.parent / (index.name + suffix)).write_bytes(
            keyring.with_name(keyring.name + suffix).read_bytes()
        )
    assert "as another file" in Machine(hub, attic=ATTIC).problems()["attic"]


def test_a_boards_key_signs_no_list(hub: Path) -> None:
    stranger = SecretKey(b"stranger", b"s" * 32)
    boards = (NamedKey("stranger", str(stranger.public)),)
    Machine(hub).push(stranger, of(workload="x"))
    pushing.make(remote.store(str(hub)), ATTIC, boards, (), NOW)
    board = Machine(hub, owner=OWNER, attic=ATTIC)
    assert "signed by key" in board.problems()[layout.HUB]
    assert {line["workload"] for line in board.lines} == {"a", "b"}


def test_what_was_revoked_stays_so(hub: Path) -> None:
    board = Machine(hub, owner=OWNER, attic=ATTIC)
    pushing.make(remote.store(str(hub)), OWNER, (), (ATTIC.public.name,), NOW)
    assert board.pull().added == 0
    for file in (layout.HUB, layout.HUB + layout.SIGNATURE):
        (hub / file).unlink()
    assert board.problems() == {layout.HUB: "it was there before, and is gone"}
    assert not board.lines


def test_an_index_that_goes_away_is_told(hub: Path) -> None:
    board = Machine(hub, attic=ATTIC)
    board.pull()
    index_of(hub, ATTIC).unlink()
    assert board.problems() == {"attic": "what it had there is gone"}


def test_own_records_are_not_pulled(hub: Path) -> None:
    board = Machine(hub, owner=OWNER)
    assert [source.name for source in board.pull(own=ATTIC.public).sources] == ["cellar"]
    assert board.pull(names=frozenset({"attic"})).added == 2


def test_a_service_that_goes_away_loses_nothing(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board = Machine(hub, attic=ATTIC)
    with monkeypatch.context() as patched:
        patched.setattr(board, "_take_in", lambda *_: (_ for _ in ()).throw(Unavailable("no service")))
        with pytest.raises(Unavailable):
            board.pull()
    assert board.pull().added == 2


def test_one_slow_file_does_not_hold_up_the_others(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board = Machine(hub, attic=ATTIC, cellar=CELLAR)
    read = board.store.read

    def slow(name: str, most: int) -> bytes:
        if name.startswith(layout.folder(ATTIC.public)) and name.endswith(".gz"):
            raise Unavailable("it took more than 300 s, and was left")
        return read(name, most)

    monkeypatch.setattr(board.store, "read", slow)
    assert "took more than" in board.problems()["attic"]
    assert [line["workload"] for line in board.lines] == ["c"]


def test_what_is_no_record_is_told_and_left(hub: Path) -> None:
    data = layout.pack_records([{"honed_records": 1}])
    entry = layout.IndexedFile(
        sha256=layout.digest(data), bytes=len(data), records=1, device_key=HERE.key, device="n", driver="1",
        compiler="c",
    )  # fmt: skip
    index = layout.BoardIndex(
        honed_hub=1, serial=int(NOW) + 9, created_s=NOW, expires_s=NOW + 99, entries=(entry,)
    )
    store = remote.store(str(hub))
    store.write(layout.object_file(ATTIC.public, entry.sha256), data)
    pushing.write_signed(store, layout.index_file(ATTIC.public), layout.file_bytes(index), ATTIC)
    board = Machine(hub, attic=ATTIC)
    assert "no record" in board.problems()["attic"]
    assert not board.problems()  # it will not change


def test_old_drivers_and_compilers_are_left_behind(hub: Path) -> None:
    board = Machine(hub)
    lines = [of(compiler=f"lowering {n}", workload=f"w{n}") for n in range(5)]
    assert board.push(CELLAR, *lines).files == 3
    puller = Machine(hub, cellar=CELLAR)
    puller.pull()
    assert {line["workload"] for line in puller.lines} == {"w2", "w3", "w4"}


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.sampled_from([1, 2, 3]), st.text("abc", min_size=1, max_size=2)), max_size=8),
    st.randoms(use_true_random=False),
)
def test_pushes_merge_in_any_order(pushed: list[tuple[int, str]], random: Any) -> None:
    """Whatever the order of machines' pushes and however often: the same is pulled."""
    keys = {1: OWNER, 2: ATTIC, 3: CELLAR}
    theirs = {n: [of(workload=w) for m, w in pushed if m == n] for n in keys}

    def pulled(order: list[int]) -> set[tuple[str, str]]:
        place = f"memory://merge-{time.monotonic_ns()}"
        for number in order:
            Machine(place).push(keys[number], *theirs[number])
        board = Machine(place, a=OWNER, b=ATTIC, c=CELLAR)
        board.pull()
        board.pull()
        return {(line["measured_by"], line["workload"]) for line in board.lines}

    order = [*keys, *keys]
    random.shuffle(order)
    assert pulled(order) == pulled([1, 2, 3])
