"""`.honed` files whose header is altered and whose checksums are right all the same."""

from __future__ import annotations

import contextlib
import hashlib
import random
import struct
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgpack

from honed.runtime.compiled import modelfile
from honed.runtime.errors import HonedError

from .attack import Attack
from .bed import VICTIM, Bed
from .material.mutate import FLOATS, Mutator, shown

_PREAMBLE = struct.Struct("<8sIIQ32s32s")
_LARGE = 31 << 20  # bytes of a header: just inside of what is allowed
_NESTED = 100_000
_READS = 40  # files read here for each that is added
_NAME = "offered"
# What a kernel may compute is not checked, and cannot be: its source and its grid stay as they are.
_UNTOUCHED = frozenset({"sources", "grid", "block", "entry", "access"})
_REFUSALS = {"INVALID_ARGUMENT", "FAILED_PRECONDITION", "RESOURCE_EXHAUSTED"}


def assembled(header: bytes, constants: bytes, *, padding: bytes | None = None) -> bytes:
    """A file with this header, whatever it says, and checksums that match."""
    at = -(-(_PREAMBLE.size + len(header)) // 4096) * 4096
    fill = bytes(at - _PREAMBLE.size - len(header)) if padding is None else padding
    digests = hashlib.sha256(header).digest(), hashlib.sha256(constants).digest()
    return (
        _PREAMBLE.pack(modelfile.MAGIC, modelfile.FORMAT_VERSION, len(header), len(constants), *digests)
        + header
        + fill
        + constants
    )


def taken_apart(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and constants of a right file."""
    _, _, size, constants, *_ = _PREAMBLE.unpack_from(data)
    header: dict[str, Any] = msgpack.unpackb(data[_PREAMBLE.size : _PREAMBLE.size + size])
    return header, data[len(data) - constants :]


class Headers(Attack):
    """Adds files that are wrong; the few that are still right must answer right."""

    name = "honed-headers"
    what = ".honed files altered under right checksums, headers of 31 MiB of nothing, nested, with NaN"

    def run(self, bed: Bed, rng: random.Random, seconds: float) -> None:
        end = time.monotonic() + seconds
        mutator = Mutator(rng)
        header, constants = taken_apart(VICTIM.write(bed.scratch / "right.honed").read_bytes())
        makers = (
            partial(altered, header, constants, mutator),
            partial(altered, header, constants, mutator),
            partial(altered, header, constants, mutator),
            partial(_bytes, header, constants, mutator),
            partial(_answers, header, constants, mutator),
            partial(_forms, header, constants, mutator),
        )
        self._offer(bed, *_large(header, constants, mutator))
        while time.monotonic() < end:
            for _ in range(_READS):
                self._read(bed, *rng.choice(makers)()[:2])
            maker: Callable[[], tuple[str, bytes] | tuple[str, bytes, bool]] = rng.choice(makers)
            if rng.random() < 0.05:
                maker = partial(_large, header, constants, mutator)
            self._offer(bed, *maker())

    def _read(self, bed: Bed, label: str, data: bytes) -> None:
        """The reader alone, here: an addition takes much longer."""
        bed.findings.offered(label, data)
        with bed.written("read.honed", data) as path:
            try:
                modelfile.read(path).close()
            except HonedError:
                return
            except Exception as error:  # noqa: BLE001 - that is what is looked for
                bed.findings.problem(f"the reader raised {error!r:.300} for {label}")

    def _offer(self, bed: Bed, label: str, data: bytes, proven: bool = True) -> None:
        """Add it; where its probes are as they were, what is let in must answer right."""
        bed.findings.offered(label, data)
        with bed.written("offered.honed", data) as path, bed.client() as client:
            try:
                client.add(path, name=_NAME)
            except HonedError as error:
                bed.findings.answered({"code": error.code, "message": str(error)}, label)
                if error.code not in _REFUSALS:
                    bed.findings.problem(f"{error.code} for {label}: {error}")
                return
            bed.findings.answered(None, label)
            if proven:
                self._compare(bed, label)
            with contextlib.suppress(HonedError):
                client.remove(_NAME)

    def _compare(self, bed: Bed, label: str) -> None:
        """What was let in answers as the file it was made from, or cannot be asked so."""
        import numpy as np

        x = np.linspace(-5, 5, VICTIM.n, dtype=np.float32)
        with bed.client() as client:
            try:
                described = client.metadata(_NAME)
                given = {tensor["name"]: x for tensor in described["inputs"]}
                found = client.infer(_NAME, given)
            except HonedError as error:
                if error.code != "INVALID_ARGUMENT":
                    bed.findings.problem(f"{error.code} from what was let in, {label}: {error}")
                return
        for array in found.values():
            if array.dtype == np.float32 and array.tobytes() != VICTIM.answer(x).tobytes():
                bed.findings.wrong += 1
                bed.findings.problem(f"a file that answers wrong was let in: {label}")


def altered(header: dict[str, Any], constants: bytes, mutator: Mutator) -> tuple[str, bytes, bool]:
    """One to three places of the header hold something else; the last tells whether the proof does not."""
    kept = {key: header[key] for key in _UNTOUCHED & header.keys()}
    rest = {key: value for key, value in header.items() if key not in kept}
    times = mutator.rng.choice((1, 1, 2, 3))
    changed = mutator.tree(rest, times)
    if isinstance(changed, dict):
        changed |= kept
        for old, new in zip(header["kernels"], _maps(changed.get("kernels")), strict=False):
            new |= {key: old[key] for key in _UNTOUCHED & old.keys() & new.keys()}
    proven = isinstance(changed, dict) and changed.get("proof") == header["proof"]
    return f"header with {_difference(header, changed)}", _file(changed, constants), proven


def _bytes(header: dict[str, Any], constants: bytes, mutator: Mutator) -> tuple[str, bytes]:
    """The header's bytes changed, or the constants', the padding's, the preamble's."""
    packed: bytes = msgpack.packb(header)
    kind = mutator.rng.randrange(4)
    if kind == 0:
        source = packed.index(b"__kernel")  # what follows may be read as another kernel
        return "altered header bytes", assembled(mutator.data(packed[:source]) + packed[source:], constants)
    if kind == 1:
        return "altered constants", assembled(packed, mutator.data(constants))
    if kind == 2:
        fill = -(_PREAMBLE.size + len(packed)) % 4096
        padding = mutator.rng.choice((bytes(fill + 4096), bytes(max(0, fill - 1)) + b"\1", b""))
        return "other padding", assembled(packed, constants, padding=padding)
    whole = assembled(packed, constants)
    return "altered preamble", mutator.data(whole[: _PREAMBLE.size]) + whole[_PREAMBLE.size :]


def _answers(header: dict[str, Any], constants: bytes, mutator: Mutator) -> tuple[str, bytes]:
    """Weights changed and the probes left: the file computes something else than it says."""
    changed = bytearray(constants)
    at = 4 * mutator.rng.randrange(VICTIM.n)  # of c, the first constant
    weight = mutator.rng.choice((-1e3, 7e5, -0.0, float("nan"), float("inf")))
    changed[at : at + 4] = struct.pack("<f", weight)
    return "other weights", assembled(msgpack.packb(header), bytes(changed))


def _forms(header: dict[str, Any], constants: bytes, mutator: Mutator) -> tuple[str, bytes]:
    """Headers that no writer of maps can make."""
    packed: bytes = msgpack.packb(header)
    forms: dict[str, bytes] = {
        "lists 100,000 deep": b"\x91" * _NESTED + b"\xc0",
        "maps 100,000 deep": b"\x81\xa1a" * _NESTED + b"\xc0",
        "the first key twice": bytes([packed[0] + 1]) + packed[1:] + packed[1:8] + b"\xc0",
        "a second value": packed + b"\xc0",
        "nothing": b"",
        "nil": b"\xc0",
        "an extension": b"\xd4\x01\x00",
        "a list instead of a map": msgpack.packb(list(header.items())),
        "integer keys": b"\x81\x01\x02",
        "surrogates": b"\x81\xa3\xed\xa0\x80\xc0",
        "a map of 4 billion": b"\xdf\xff\xff\xff\xff",
        "a list of 4 billion": b"\xdd\xff\xff\xff\xff",
        "a string of 4 GB": b"\xdb\xff\xff\xff\xff",
        "NaN as peaks": msgpack.packb({**header, "arena_bytes": float("nan")}),
    }
    for number in FLOATS[3:]:
        proof = {**header["proof"], "error": [number]}
        forms[f"proof with {number}"] = msgpack.packb({**header, "proof": proof})
    name = mutator.rng.choice(list(forms))
    return name, assembled(forms[name], constants)


def _large(header: dict[str, Any], constants: bytes, mutator: Mutator) -> tuple[str, bytes]:
    """31 MiB of something small, many times over, where a list or text may be."""
    items: dict[str, Any] = {
        "empty maps": {},
        "empty lists": [],
        "empty strings": "",
        "zeros": 0,
        "numbers": 1.5,
        "long strings": "a" * 60_000,
        "steps": {"copy": {"source": 2, "target": 2}},
        "buffers": header["buffers"][0],
        "kernels": header["kernels"][0],
    }
    name = mutator.rng.choice((*items, "one string", "one string of __kernel", "a map"))
    if name in items:
        item = packed(items[name])
        count = _LARGE // len(item)
        filler = b"\xdd" + struct.pack(">I", count) + item * count
    elif name == "a map":
        count = _LARGE // 10
        filler = b"\xdf" + struct.pack(">I", count) + b"".join(b"\xa8%08x\xc0" % i for i in range(count))
    else:
        text = b"__kernel " * (_LARGE // 9) if "kernel" in name else b"a" * _LARGE
        filler = b"\xdb" + struct.pack(">I", len(text)) + text
    field = mutator.rng.choice(
        ("sources", "steps", "buffers", "kernels", "inputs", "compiler", "notes", "error")
    )
    place = "here it goes"
    changed = {**header, field: place} if field in header else header
    if field == "notes":
        changed = {**header, "source": {**header["source"], "notes": place}}
    elif field == "error":
        changed = {**header, "proof": {**header["proof"], "error": place}}
    whole = packed(changed).replace(packed(place), filler)
    return f"a header of 31 MiB: {name} as {field}", assembled(whole, constants)


def packed(header: Any) -> bytes:
    """As MessagePack."""
    data: bytes = msgpack.packb(header)
    return data


def _file(header: Any, constants: bytes) -> bytes:
    try:
        return assembled(msgpack.packb(header), constants)
    except (ValueError, TypeError, OverflowError, UnicodeEncodeError):
        return assembled(b"\xc1", constants)


def _maps(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _difference(old: Any, new: Any, place: str = "") -> str:
    """Where and what, for people."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            if key not in old or key not in new:
                return f"{place}.{str(key)[:30]} {'new' if key in new else 'gone'}"
            if (found := _difference(old[key], new[key], f"{place}.{key}")) != "":
                return found
        return ""
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = (_difference(a, b, f"{place}[{i}]") for i, (a, b) in enumerate(zip(old, new, strict=True)))
        return next((found for found in pairs if found), "")
    return "" if old == new and type(old) is type(new) else f"{place} = {shown(new, 60)}"
