from __future__ import annotations

import contextlib
import hashlib
import os
import resource
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.runtime.compiled import modelfile
from honed.runtime.compiled.model import CPU_PART, CompiledModel, Copy, HostCall, Launch, Probe, Proof
from honed.runtime.errors import InvalidArgument, ModelFileError, NotFound

from .builder import Builder, add_constant, doubled

PREAMBLE = struct.Struct("<8sIIQ32s32s")
Plain = dict[str, Any]


def whole_model() -> Builder:
    """One of everything a header can hold."""
    b = add_constant()
    b.output("z", "float32", (8,))
    b.copy(b.inputs[0].buffer, len(b.buffers) - 1)
    b.output("twice", "float32", (8,))
    b.call(CPU_PART, (b.inputs[0].buffer,), (len(b.buffers) - 1,), part=0, wanted=(0,))
    copied = b.prepared("float32", (8,))
    b.prepare += [
        Copy(source=1, target=copied),
        Launch(kernel=1, buffers=(copied, b.prepared("float32", (8,)))),
    ]
    x = np.ones(8, np.float32)
    probe = Probe(
        inputs=(b.constant(x),),
        outputs=(b.constant(x), b.constant(x), b.constant(x)),
        tolerance=(1e-3, 0.0, 0.0),
    )
    b.proof = Proof(reference="none 1", probes=(probe,), device=None, error=())
    b.split = doubled(b, 8)
    return b


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return whole_model().write(tmp_path_factory.mktemp("written") / "m.honed")


@pytest.fixture
def path(tmp_path: Path, written: Path) -> Path:
    return Path(shutil.copy(written, tmp_path))


def test_what_is_written_is_read(path: Path) -> None:
    built = whole_model()
    with modelfile.read(path) as file:
        assert file.model == built.build()
        assert {type(step) for step in file.model.steps} >= {Copy, HostCall}
        assert [type(step) for step in file.model.prepare] == [Copy, Launch]
        for index, value in built.constants.items():
            np.testing.assert_array_equal(file.constant(index), value, strict=True)


def test_constants_are_views_of_the_page_aligned_file(path: Path) -> None:
    with modelfile.read(path) as file:
        value = file.constant(1)
    assert not value.flags.owndata
    assert not value.flags.writeable
    assert value.ctypes.data % 4096 == 0
    np.testing.assert_array_equal(value, np.arange(8, dtype=np.float32))  # after closing, too


def test_only_constants_have_values(path: Path) -> None:
    file = modelfile.read(path)
    for index in (0, -1, 99):
        with pytest.raises(InvalidArgument, match="not a constant"):
            file.constant(index)
    file.close()
    with pytest.raises(InvalidArgument, match="closed"):
        file.constant(1)


@pytest.mark.slow
def test_any_flipped_byte_is_an_error(tmp_path: Path) -> None:
    path = add_constant().write(tmp_path / "m.honed")
    data = path.read_bytes()
    with path.open("r+b", buffering=0) as file:
        for at in range(len(data)):
            os.pwrite(file.fileno(), bytes([data[at] ^ 1 << at % 8]), at)
            with pytest.raises(ModelFileError):
                modelfile.read(path)
            os.pwrite(file.fileno(), data[at : at + 1], at)
    assert modelfile.read(path).model == add_constant().build()


@pytest.mark.parametrize("change", [lambda d: d + b"\0", lambda d: d + d, lambda d: b"\0" + d])
def test_added_bytes_are_an_error(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ModelFileError):
        modelfile.read(path)


@given(st.data())
def test_any_cut_is_an_error(written: Path, data: st.DataObject) -> None:
    content = written.read_bytes()
    cut = written.with_name("cut.honed")
    cut.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    with pytest.raises(ModelFileError, match=r"cut|whole"):
        modelfile.read(cut)


@pytest.mark.parametrize("content", [b"", b"x" * 87, b"x" * 88, b"\x08\x07" * 5000])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match="not a"):
        modelfile.read(path)


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no file"):
        modelfile.read(tmp_path / "missing.honed")
    with pytest.raises(ModelFileError, match="cannot be read"):
        modelfile.read(tmp_path)


def test_another_version_is_named(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[8] = 9
    path.write_bytes(data)
    with pytest.raises(ModelFileError, match="version 9"):
        modelfile.read(path)


def rewrite_header(path: Path, header: bytes) -> None:
    """Put another header into the file, with checksums that fit it."""
    data = path.read_bytes()
    magic, version, size, constant_bytes, _, digest = PREAMBLE.unpack(data[:88])
    constants = data[-(-(88 + size) // 4096) * 4096 :]
    preamble = PREAMBLE.pack(
        magic, version, len(header), constant_bytes, hashlib.sha256(header).digest(), digest
    )
    path.write_bytes((preamble + header).ljust(-(-(88 + len(header)) // 4096) * 4096, b"\0") + constants)


def plain_header(path: Path) -> Plain:
    data = path.read_bytes()
    found: Plain = msgpack.unpackb(data[88 : 88 + PREAMBLE.unpack(data[:88])[2]])
    return found


def test_rewriting_the_same_header_is_accepted(path: Path) -> None:
    rewrite_header(path, msgpack.packb(plain_header(path)))
    assert modelfile.read(path).model == whole_model().build()


def test_a_file_from_before_there_was_preparation(tmp_path: Path) -> None:
    path = add_constant().write(tmp_path / "m.honed")
    header = plain_header(path)
    del header["prepare"], header["prepared_bytes"]
    rewrite_header(path, msgpack.packb(header))
    assert modelfile.read(path).model == add_constant().build()


MUTATIONS: dict[str, tuple[Callable[[Plain], object], str]] = {
    "unknown key": (lambda h: h.update(extra=1), "unknown key 'extra'"),
    "missing key": (lambda h: h.pop("arena_bytes"), "lacks the key 'arena_bytes'"),
    "text for a number": (
        lambda h: h.update(arena_bytes="4096"),
        "arena_bytes is '4096' instead of an integer",
    ),
    "bool for a number": (lambda h: h.update(arena_bytes=True), "arena_bytes is True instead of an integer"),
    "float for a number": (lambda h: h.update(arena_bytes=1.0), "arena_bytes is 1.0"),
    "nil where none may be": (lambda h: h.update(steps=None), "steps is None instead of a list"),
    "number for text": (lambda h: h["sources"].append(3), r"sources\[2\] is 3"),
    "short triple": (lambda h: h["kernels"][0].update(grid=[1, 1]), "2 items instead of 3"),
    "unknown place": (lambda h: h["buffers"][0].update(place="attic"), "'attic' instead of one of input"),
    "unknown step": (lambda h: h["steps"].append({"jump": {}}), "kind 'jump'"),
    "two steps in one": (lambda h: h["steps"][0].update(copy={}), "instead of a map of one of"),
    "attribute of bytes": (lambda h: h["steps"][3]["hostcall"].update(attrs={"axis": [1.5]}), "attrs"),
    "host call in preparation": (
        lambda h: h["prepare"].append(h["steps"][3]),
        r"prepare\[2\] is of kind 'hostcall' instead of one of launch, copy",
    ),
    "nil for no preparation": (lambda h: h.update(prepare=None), "prepare is None instead of a list"),
    "preparation without its section": (lambda h: h.pop("prepared_bytes"), "outside the prepared section"),
    "prepared buffers without preparation": (
        lambda h: (h.pop("prepare"), h["steps"][0]["launch"].update(buffers=[0, 7, 2])),
        "step 0 reads buffer 7 before",
    ),
    "list for a map": (lambda h: h.update(proof=[]), "proof is"),
    "constants elsewhere": (lambda h: h.update(constant_bytes=h["constant_bytes"] + 64), "contradicts"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_header_that_says_something_else(path: Path, name: str) -> None:
    mutate, message = MUTATIONS[name]
    header = plain_header(path)
    mutate(header)
    rewrite_header(path, msgpack.packb(header))
    with pytest.raises(ModelFileError, match=message):
        modelfile.read(path)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\xc1",
        b"\x80\x80",  # two values
        b"\x91" * 5000 + b"\xc0",
        b"\xdd\xff\xff\xff\xff",  # a list announced and not there
        b"\xdf\xff\xff\xff\xff",
        b"\x82\xa1a\x01\xa1a\x02",  # the same key twice
        b"\x81\x01\x02",  # a key that is no string
        b"\xc4\x01x",
        b"\xd4\x00\x00",
        b"\xa1\xff",  # not UTF-8
        b"\xc0",
    ],
)
def test_a_header_that_is_no_map(path: Path, header: bytes) -> None:
    rewrite_header(path, header)
    with pytest.raises(ModelFileError, match="malformed"):
        modelfile.read(path)


@given(st.data())
def test_a_header_with_bytes_changed_never_breaks_the_reader(written: Path, data: st.DataObject) -> None:
    fuzzed = Path(shutil.copy(written, written.with_name("fuzzed.honed")))
    content = fuzzed.read_bytes()
    header = bytearray(content[88 : 88 + PREAMBLE.unpack(content[:88])[2]])
    for _ in range(data.draw(st.integers(1, 4))):
        header[data.draw(st.integers(0, len(header) - 1))] = data.draw(st.integers(0, 255))
    rewrite_header(fuzzed, bytes(header))
    # A changed name or comment can still be a model; what is not must be refused as such.
    with contextlib.suppress(ModelFileError):
        assert isinstance(modelfile.read(fuzzed).model, CompiledModel)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "has no value"),
        ({1: np.zeros(8, np.float32), 0: np.zeros(8, np.float32)}, "not a constant"),
        ({1: np.zeros(8)}, "float64"),
        ({1: np.zeros(9, np.float32)}, r"\[9\]"),
        ({1: np.zeros(8, ">f4")}, ">f4"),
    ],
)
def test_values_must_fit_their_buffers(tmp_path: Path, values: dict[int, Any], message: str) -> None:
    path = tmp_path / "m.honed"
    with pytest.raises(ModelFileError, match=message):
        modelfile.write(path, add_constant().build(), values)
    assert list(tmp_path.iterdir()) == []


def test_values_need_not_be_contiguous(tmp_path: Path) -> None:
    values = np.arange(16, dtype=np.float32)[::-2]
    modelfile.write(tmp_path / "m.honed", add_constant().build(), {1: values})
    np.testing.assert_array_equal(modelfile.read(tmp_path / "m.honed").constant(1), values)


def test_a_wrong_model_is_not_written(path: Path) -> None:
    before = path.read_bytes()
    model = replace(add_constant().build(), arena_bytes=0)
    with pytest.raises(ModelFileError, match="scratch arena"):
        modelfile.write(path, model, add_constant().constants)
    assert path.read_bytes() == before


def test_a_full_disk_leaves_what_was_there(path: Path) -> None:
    code = f"""
import resource
from pathlib import Path
from honed.runtime.compiled import modelfile
from honed.runtime.errors import ResourceExhausted
file = modelfile.read({str(path)!r})
constants = {{i: file.constant(i) for i, b in enumerate(file.model.buffers) if b.place == "constant"}}
resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))
try:
    modelfile.write({str(path)!r}, file.model, constants)
except ResourceExhausted as error:
    print(error)
"""
    before = path.read_bytes()
    assert len(before) > 6000 > 0
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 6000
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "no room left" in done.stdout
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="cannot be written"):
        add_constant().write(tmp_path / "nowhere" / "m.honed")
