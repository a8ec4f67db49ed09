"""What the process that runs parts of models is asked for, and what it answers: the contract of both ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from honed.process.rpc import Call
from honed.protocol.params import Data
from honed.protocol.wire import FrameLimits
from honed.runtime.compiled.model import PartitionTensor

ALIGN = 64  # Bytes; where tensors in shared memory start
FRAMES = FrameLimits(max_bytes=1 << 31, max_values=1 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPart(Call[None]):
    """Hold the ONNX file that comes along, optimised to `level`, as `part`, which takes `inputs`."""

    part: int
    inputs: tuple[PartitionTensor, ...]
    level: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UnloadPart(Call[None]):
    """Let go of it."""

    part: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareMemory(Call[None]):
    """Map the memory that comes along, in place of any before."""

    nbytes: int


@dataclass(slots=True, kw_only=True)
class SpecialisedSizes:
    """Sizes of a part for which something else is to run it, as in `honed.runtime.compiled.model.Form`."""

    part: int
    sizes: tuple[int, ...]
    least: int


@dataclass(slots=True, kw_only=True)
class PartitionsResult:
    """How many of the parts ran, in how many nanoseconds, and for each the sizes it met, that left out, too.

    `outputs` are of those that were made what is wanted, or read by the parts that did not run; their data as
    in `RunParts`.
    """

    done: int
    ns: int
    sizes: tuple[tuple[int, ...], ...]
    outputs: tuple[PartitionTensor, ...]
    raw: tuple[Data, ...] = ()
    places: tuple[int, ...] = ()


@dataclass(slots=True, kw_only=True)
class RunParts(Call[PartitionsResult]):
    """Run `parts` once, one after the other, on tensors given and what those before made, for those `wanted`.

    The data of `inputs` is in `raw`, or in shared memory at `places`, one for each. Then outputs are to be
    placed there, too, from `room` on, where there is enough. Before a part that meets sizes of `stops` they
    are left.
    """

    parts: tuple[int, ...]
    inputs: tuple[PartitionTensor, ...]
    wanted: tuple[str, ...]
    stops: tuple[SpecialisedSizes, ...] = ()
    raw: tuple[Data, ...] = ()
    places: tuple[int, ...] = ()
    room: int = 0


def laid_out(sizes: Sequence[int], start: int) -> tuple[tuple[int, ...], int]:
    """Return aligned places for so many bytes each, one after the other from `start` on, and the end."""
    places = []
    for size in sizes:
        start = -(-start // ALIGN) * ALIGN
        places.append(start)
        start += size
    return tuple(places), start
