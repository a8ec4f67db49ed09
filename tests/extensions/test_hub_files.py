"""What lies in a hub: keys, signatures, indexes, files of records; Debian's minisign beside."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.hub import layout
from honed.hub.layout import BoardIndex, IndexedFile, Keyring, NamedKey, Withdrawn
from honed.hub.minisign import BadSignature, PublicKey, SecretKey
from honed.protocol import strict
from honed.protocol.errors import InvalidArgument

NOW = 1.8e9
KEY = SecretKey(b"12345678", bytes(range(32)))
OTHER = SecretKey(b"87654321", bytes(range(1, 33)))
HASH = st.text("0123456789abcdef", min_size=64, max_size=64)
ENTRIES = st.lists(
    st.builds(
        IndexedFile,
        sha256=HASH,
        bytes=st.integers(0, 1 << 40),
        records=st.integers(0, 1 << 40),
        device_key=HASH,
        device=st.text(),
        driver=st.text(),
        compiler=st.text(),
    ),
    max_size=5,
)
INDEXES = st.builds(
    BoardIndex,
    honed_hub=st.just(1),
    serial=st.integers(0, 1 << 50),
    created_s=st.floats(0, NOW),
    expires_s=st.floats(NOW, 1e12),
    entries=ENTRIES.map(tuple),
    withdrawn=st.lists(st.builds(Withdrawn, st.text(max_size=3), HASH), max_size=4).map(tuple),
)


def keyring(**changes: Any) -> Keyring:
    whole: dict[str, Any] = {"honed_hub": 1, "serial": 1, "created_s": NOW, "expires_s": NOW + 9} | changes
    return Keyring(**whole)


@given(st.binary(max_size=200), st.text(st.characters(exclude_characters="\n\r", exclude_categories=["C"])))
def test_a_signature_is_of_its_data_and_key_alone(data: bytes, comment: str) -> None:
    signature = KEY.sign(data, comment)
    assert KEY.public.check(data, signature) == comment
    with pytest.raises(BadSignature, match="signed by key"):
        OTHER.public.check(data, signature)
    with pytest.raises(BadSignature, match="changed or cut off"):
        KEY.public.check(data + b"x", signature)


@given(st.data())
def test_no_changed_signature_is_taken(data: st.DataObject) -> None:
    signature = bytearray(KEY.sign(b"data", "comment"))
    lines = signature.split(b"\n")
    first = len(lines[0]) + 1  # what is before is not signed
    at = data.draw(st.integers(first, len(signature) - 2))
    signature[at] ^= data.draw(st.integers(1, 255))
    try:
        comment = KEY.public.check(b"data", bytes(signature))
    except BadSignature:
        return
    assert comment == "comment"  # base64's last digits, and white space, have bits that say nothing


@pytest.mark.parametrize("signature", [b"", b"\n\n\n\n", b"untrusted comment: \n\ntrusted comment: \n\n"])
def test_no_signature_is_none(signature: bytes) -> None:
    """fwupd once took none for one that is right."""
    with pytest.raises(BadSignature):
        KEY.public.check(b"data", signature)


def test_minisign_itself_agrees(tmp_path: Path) -> None:
    minisign = shutil.which("minisign")
    assert minisign is not None, "apt install minisign"
    (file := tmp_path / "f").write_bytes(b"records" * 99)
    (tmp_path / "f.minisig").write_bytes(KEY.sign(file.read_bytes(), "f"))
    subprocess.run([minisign, "-V", "-q", "-P", str(KEY.public), "-m", file], check=True)
    made = [minisign, "-G", "-W", "-p", tmp_path / "public", "-s", tmp_path / "secret"]
    subprocess.run(made, check=True, capture_output=True)
    theirs = SecretKey.load(tmp_path / "secret")
    assert theirs.public == PublicKey.parse((tmp_path / "public").read_text())
    KEY.save(tmp_path / "ours")
    signing = [minisign, "-S", "-s", tmp_path / "ours", "-m", file, "-x", tmp_path / "sig", "-t", "hello"]
    subprocess.run(signing, check=True, capture_output=True)
    assert KEY.public.check(file.read_bytes(), (tmp_path / "sig").read_bytes()) == "hello"


def test_a_secret_key_is_its_owners_and_never_overwritten(tmp_path: Path) -> None:
    KEY.save(tmp_path / "key")
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    assert SecretKey.load(tmp_path / "key") == KEY
    with pytest.raises(InvalidArgument, match="already"):
        OTHER.save(tmp_path / "key")
    with pytest.raises(InvalidArgument, match=r"no key of minisign's|is not base64"):
        PublicKey.parse("RWnonsense")


@given(INDEXES)
def test_an_index_comes_back(index: BoardIndex) -> None:
    assert layout.read_index(layout.file_bytes(index), NOW) == index


@given(
    st.binary(max_size=300)
    | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(repr).map(str.encode)
)
def test_whatever_is_no_index_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidArgument):
        layout.read_index(data, NOW)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"honed_hub": 2}, "format 2"),
        ({"expires_s": NOW - 86400}, "expired 1.0 days ago"),
        ({"created_s": NOW + 1e6}, "future"),
        ({"expires_s": float("inf")}, "cannot be|no number"),
        ({"serial": -1}, "cannot be"),
        ({"boards": (NamedKey("a", "RWQ"),)}, "base64|no key"),
        ({"boards": (NamedKey("a", str(KEY.public)),) * 10_001}, "more than 10000 boards"),
    ],
)
def test_a_keyring_that_cannot_be_is_refused(changes: dict[str, Any], why: str) -> None:
    plain = strict.to_plain(keyring(**changes))
    with pytest.raises(InvalidArgument, match=why):
        layout.read_keyring(json.dumps(plain).encode(), NOW)


def test_an_older_index_is_a_replay() -> None:
    layout.newer(3, None)
    layout.newer(3, 3)
    with pytest.raises(InvalidArgument, match="number 2, and number 3 was seen"):
        layout.newer(2, 3)


def test_whom_a_keyring_names_is_trusted_until_revoked() -> None:
    trusted = {"me": KEY.public}
    ring = keyring(boards=(NamedKey("me", str(OTHER.public)),))
    assert layout.trusted_keys(trusted, []) == trusted
    assert layout.trusted_keys(trusted, [ring]) == trusted | {f"me {OTHER.public.name}": OTHER.public}
    assert layout.trusted_keys(trusted, [ring, keyring(revoked=(OTHER.public.name.lower(),))]) == trusted
    assert layout.trusted_keys(trusted, [keyring(revoked=(KEY.public.name,))]) == {}


@given(st.lists(INDEXES, max_size=5), st.randoms())
def test_what_is_withdrawn_does_not_depend_on_the_order(found: list[BoardIndex], random: Any) -> None:
    other = list(found)
    random.shuffle(other)
    withdrawn = layout.several_withdrawals(found, 2)
    assert withdrawn == layout.several_withdrawals(other, 2)
    for one in withdrawn:
        assert sum(one in index.withdrawn for index in found) >= 2


def record(**changes: Any) -> dict[str, Any]:
    """A line of an export."""
    device = dict.fromkeys(("platform", "vendor", "name", "driver_version", "kernel_driver"), "x")
    return {
        "honed_records": 1, "device": device, "compiler": "tvm 1, lowering 2", "workload": "w",
        "name": "my secret layer", "flops": 2.0, "bytes": 3.0, "trace": "[1]", "state": "done",
        "outcome": "right", "reason": "at /home/me", "story": "kernel log of my machine", "timing": None,
        "source_sha256": None, "created_s": 1e9 + 12345.6, "finished_s": 1e9 + 99999.9,
        "measured_by": "my-board",
    } | changes  # fmt: skip


def test_what_is_a_boards_own_stays_there() -> None:
    data = layout.pack_records([layout.shareable_part(record())])
    text = gzip.decompress(data).decode()
    for own in ("secret", "/home", "kernel log", "my-board", "12345"):
        assert own not in text
    assert data == layout.pack_records([layout.shareable_part(record())])
    (line,) = (each for each in layout.unpack_records(data) if each)
    hint, schedule = layout.hint_of(line, "attic")
    read = json.loads(hint)
    assert read["compiler"] == "tvm 1, lowering 2, by attic"
    assert read["measured_by"] == "hub: attic"
    assert set(read) == set(record())
    assert schedule.workload == "w"


@given(st.lists(st.binary(max_size=50).filter(lambda line: b"\n" not in line and line), max_size=30))
def test_lines_come_out_as_they_went_in(lines: list[bytes]) -> None:
    data = gzip.compress(b"".join(line + b"\n" for line in lines))
    assert [line for line in layout.unpack_records(data) if line] == lines


def test_files_that_grow_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "MAX_RAW_BYTES", 3 << 20)
    with pytest.raises(InvalidArgument, match="more than 3 MiB"):
        list(layout.unpack_records(gzip.compress((b"x" * 999 + b"\n") * (4 << 10))))
    with pytest.raises(InvalidArgument, match="a record of more than 1 MiB"):
        list(layout.unpack_records(gzip.compress(bytes(2 << 20))))
    many = gzip.compress(b"{}\n" * (layout.MAX_RECORDS + 1))
    with pytest.raises(InvalidArgument, match="50000 records"):
        list(layout.unpack_records(many))


@given(st.binary(max_size=100))
def test_damage_is_told(data: bytes) -> None:
    whole = gzip.compress(b"line\n" * 9)
    with pytest.raises(InvalidArgument, match=r"damaged|cut off"):
        list(layout.unpack_records(whole[: len(whole) // 2] + data))
    with pytest.raises(InvalidArgument, match="not the file that the index names"):
        layout.check_hash(whole, "0" * 64)


@given(
    st.binary(max_size=60)
    | st.recursive(
        st.none() | st.integers() | st.text(), lambda s: st.lists(s) | st.dictionaries(st.text(), s)
    ).map(lambda v: json.dumps(v).encode())
)
def test_lines_that_are_no_records_are_refused(line: bytes) -> None:
    with pytest.raises(InvalidArgument, match="no record"):
        layout.hint_of(line, "attic")
