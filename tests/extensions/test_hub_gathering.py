"""What is learned from of a hub: all that trusted keys have signed, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from honed.hub import layout, looking, pushing, remote
from honed.hub.layout import NamedKey
from honed.hub.looking import Gathered
from honed.hub.memory import HubState
from honed.hub.minisign import PublicKey
from honed.protocol.errors import InvalidArgument

from .test_hub_pull import ATTIC, CELLAR, HERE, NOW, OWNER, Machine, of

OTHER = replace(HERE, name="another device")


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """A hub whose list names the attic; the cellar has pushed, too."""
    folder = tmp_path / "hub"
    folder.mkdir()
    pushing.make(remote.store(str(folder)), OWNER, (NamedKey("attic", str(ATTIC.public)),), (), NOW)
    Machine(folder).push(ATTIC, of(trace="[1]"), of(OTHER, trace="[2]"))
    Machine(folder).push(CELLAR, of(trace="[3]"))
    return folder


def gathered(
    hub: Path, to: Path, trusted: dict[str, PublicKey] | None = None, memory: HubState | None = None
) -> tuple[Gathered, str]:
    """What is found, and all lines."""
    to.mkdir()
    owner = OWNER.public if trusted is None else None
    store, seen = remote.store(str(hub)), memory or HubState()
    done = looking.gather(store, trusted or {}, owner, seen, to, NOW)
    return done, "".join(path.read_text() for path in sorted(to.glob("*.jsonl")))


def test_records_of_all_devices_by_keys_on_the_list(hub: Path, tmp_path: Path) -> None:
    done, lines = gathered(hub, tmp_path / "to")
    assert (done.keys, done.records, done.problems) == (1, 2, [])
    assert '"[1]"' in lines
    assert '"[2]"' in lines
    assert '"[3]"' not in lines


def test_a_key_that_is_named_needs_no_list(hub: Path, tmp_path: Path) -> None:
    done, lines = gathered(hub, tmp_path / "to", {"cellar": CELLAR.public})
    assert done.records == 1
    assert '"[3]"' in lines


def test_nobody_is_trusted(hub: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="no key is trusted"):
        gathered(hub, tmp_path / "to", {})


@pytest.mark.parametrize("what", ["index", "signature", "records", "none"])
def test_what_was_changed_is_told_and_left(hub: Path, tmp_path: Path, what: str) -> None:
    folder = hub / layout.folder(ATTIC.public)
    index = folder / "index.json"
    match what:
        case "index":
            index.write_bytes(index.read_bytes().replace(b"another", b"amother"))
        case "signature":
            Path(f"{index}{layout.SIGNATURE}").write_bytes(b"")
        case "none":
            Path(f"{index}{layout.SIGNATURE}").unlink()
        case "records":
            for path in folder.glob("*.jsonl.gz"):
                path.write_bytes(path.read_bytes()[:-1])
    done, lines = gathered(hub, tmp_path / "to")
    assert done.records == 0
    assert len(done.problems) == 1
    assert done.problems[0].startswith("attic: ")
    assert not lines


def test_an_old_index_is_told_and_left(hub: Path, tmp_path: Path) -> None:
    memory = HubState(seen={ATTIC.public.name: 2**40})
    done, lines = gathered(hub, tmp_path / "to", memory=memory)
    assert "an old one again" in done.problems[0]
    assert not lines
