"""What the process that runs parts of models is asked for, and what it answers: the contract of both ends."""

from __future__ import annotations

from dataclasses import dataclass

from honed.protocol.params import Data
from honed.protocol.wire import FrameLimits

from .model import PartTensor

LOAD, RUN, UNLOAD = "LoadPart", "RunPart", "UnloadPart"
FRAMES = FrameLimits(max_bytes=1 << 31, max_values=1 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPart:
    """Hold the ONNX file that comes along, as `part`, to be run for `outputs`; the answer is empty."""

    part: int
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnloadPart:
    """Let go of it; the answer is empty."""

    part: int


@dataclass(slots=True, kw_only=True)
class RunPart:
    """Run once on tensors, whose data is in `raw`."""

    part: int
    inputs: tuple[PartTensor, ...]
    raw: tuple[Data, ...]


@dataclass(slots=True, kw_only=True)
class PartRan:
    """The outputs, in the order in which they were named when it was loaded."""

    outputs: tuple[PartTensor, ...]
    raw: tuple[Data, ...]
