"""What parent and child say to each other: msgpack maps with their length before them."""

from __future__ import annotations

import argparse
import socket
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgpack

from honed.protocol.strict import from_plain, to_plain
from honed.tuner.lower.program import KernelLaunch, MemoryValue
from honed.tuner.records.verdict import Outcome, Timing, Verdict

from .candidate import Candidate, Workload

_LENGTH = struct.Struct("<I")
MAX_BYTES = 64 << 20
Message = dict[str, Any]


class ChannelClosed(Exception):
    """The other side is gone, or what it sent is no message."""


def channel(argv: list[str] | None, program: str) -> socket.socket:
    """A child's channel, whose descriptor it is told by `--channel`."""
    parser = argparse.ArgumentParser(prog=program)
    parser.add_argument("--channel", type=int, required=True)
    return socket.socket(fileno=parser.parse_args(argv).channel)


def send(channel: socket.socket, message: Mapping[str, Any]) -> None:
    """Send one message; raises ChannelClosed."""
    data: bytes = msgpack.packb(message, use_bin_type=True)
    try:
        channel.sendall(_LENGTH.pack(len(data)) + data)
    except OSError as error:
        raise ChannelClosed(f"the other side of the measurement is gone ({error.strerror})") from error


def receive(channel: socket.socket) -> Message:
    """The next message. Raises ChannelClosed, and TimeoutError where the channel's timeout passes."""
    (size,) = _LENGTH.unpack(_exactly(channel, _LENGTH.size))
    if size > MAX_BYTES:
        raise ChannelClosed(f"the other side of the measurement announces {size} bytes")
    try:
        message = msgpack.unpackb(_exactly(channel, size), raw=False)
    except (ValueError, msgpack.UnpackException) as error:
        raise ChannelClosed("the other side of the measurement sent no message") from error
    if not isinstance(message, dict):
        raise ChannelClosed("the other side of the measurement sent no map")
    return message


def _exactly(channel: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        try:
            piece = channel.recv(min(size - len(data), 1 << 20))
        except TimeoutError:
            raise
        except OSError as error:
            raise ChannelClosed(f"the other side of the measurement is gone ({error.strerror})") from error
        if not piece:
            raise ChannelClosed("the other side of the measurement is gone")
        data += piece
    return bytes(data)


def workload_to_plain(workload: Workload) -> Message:
    """A map of `workload`; its parameters carry no constants."""
    plain: Message = to_plain(workload)
    return plain | {"parameters": _values_to_plain(workload.parameters), "folder": str(workload.folder)}


def candidate_to_plain(candidate: Candidate) -> Message:
    """A map of `candidate`."""
    plain: Message = to_plain(candidate)
    return plain | {"inner": _values_to_plain(candidate.inner)}


def workload_from_plain(plain: Message) -> Workload:
    """What `workload_to_plain` described."""
    return Workload(
        task=plain["task"],
        parameters=_values_from_plain(plain["parameters"]),
        outputs=tuple(plain["outputs"]),
        sets=int(plain["sets"]),
        folder=Path(plain["folder"]),
        flops=plain["flops"],
        bytes=plain["bytes"],
        tolerance=tuple(plain["tolerance"]),
        constants=tuple(plain["constants"]),
    )


def candidate_from_plain(plain: Message) -> Candidate:
    """What `candidate_to_plain` described."""
    return Candidate(
        id=plain["id"],
        source=plain["source"],
        inner=_values_from_plain(plain["inner"]),
        launches=tuple(from_plain(KernelLaunch, launch, where="a launch") for launch in plain["launches"]),
    )


def verdict_from_plain(plain: Message) -> Verdict:
    """The verdict in `to_plain`'s form; raises ValueError for anything else."""
    timing, yardstick = plain.get("timing"), plain["yardstick_s"]
    return Verdict(
        outcome=Outcome(plain["outcome"]),
        reason=str(plain["reason"]),
        timing=None if timing is None else from_plain(Timing, timing, where="a timing"),
        yardstick_s=None if yardstick is None else float(yardstick),
        seconds=float(plain["seconds"]),
    )


def _values_to_plain(values: Sequence[MemoryValue]) -> list[list[Any]]:
    return [[value.dtype, list(value.shape)] for value in values]


def _values_from_plain(plain: list[list[Any]]) -> tuple[MemoryValue, ...]:
    return tuple(MemoryValue(dtype=dtype, shape=tuple(shape)) for dtype, shape in plain)
