"""Defines the calls to the process that runs partitions, and its answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from honed.process.rpc import Call
from honed.protocol.values import Data
from honed.protocol.wire import FrameLimits
from honed.runtime.compiled.model import PartitionTensor

ALIGN = 64  # Bytes that tensors in shared memory are aligned to
FRAMES = FrameLimits(max_bytes=1 << 31, max_values=1 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPart(Call[None]):
    """Load the ONNX file in the message's descriptor as `part` with these `inputs`, optimised to `level`."""

    part: int
    inputs: tuple[PartitionTensor, ...]
    level: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UnloadPart(Call[None]):
    """Unload a partition; there is no answer but success."""

    part: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareMemory(Call[None]):
    """Map the memory in the message's descriptor, in place of any mapped before."""

    nbytes: int


@dataclass(slots=True, kw_only=True)
class SpecialisedSizes:
    """Sizes of a partition that a specialisation runs, as in `compiled.model.SizeSpecialisation`."""

    part: int
    sizes: tuple[int, ...]
    least: int


@dataclass(slots=True, kw_only=True)
class PartitionsResult:
    """The progress of `RunParts`: the number of partitions that ran, and their nanoseconds.

    `sizes` are those observed by each partition, including the one that stopped the run. `outputs` are the
    computed ones that are wanted, or read by partitions that did not run; their data is as in `RunParts`.
    """

    done: int
    ns: int
    sizes: tuple[tuple[int, ...], ...]
    outputs: tuple[PartitionTensor, ...]
    raw: tuple[Data, ...] = ()
    places: tuple[int, ...] = ()


@dataclass(slots=True, kw_only=True)
class RunParts(Call[PartitionsResult]):
    """Run `parts` once, in order, on `inputs` and outputs of earlier parts, for the `wanted` outputs.

    The data of `inputs` is in `raw`, or in shared memory at `places`, one offset for each. In the latter case
    the process writes outputs there, too, from `room` on, if they fit. The run stops before a part that
    observes sizes of `stops`.
    """

    parts: tuple[int, ...]
    inputs: tuple[PartitionTensor, ...]
    wanted: tuple[str, ...]
    stops: tuple[SpecialisedSizes, ...] = ()
    raw: tuple[Data, ...] = ()
    places: tuple[int, ...] = ()
    room: int = 0


def lay_out(sizes: Sequence[int], start: int) -> tuple[tuple[int, ...], int]:
    """Return aligned offsets for tensors of these sizes, in order from `start` on, and the end."""
    places = []
    for size in sizes:
        start = -(-start // ALIGN) * ALIGN
        places.append(start)
        start += size
    return tuple(places), start
