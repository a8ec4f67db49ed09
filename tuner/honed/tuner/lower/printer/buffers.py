"""The memory a kernel knows: arguments, local arrays, and private arrays, some of them held in registers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from tvm import ir, tirx
from tvm_ffi import structural_walk

from .types import LANES, Type, Unprintable, parsed

Space = Literal["global", "local", "private"]
# Of every buffer that a plan, a measurement or a driver gives a kernel, in bytes: `plan` places scratch so,
# and OpenCL's own allocations are aligned to its largest type, which is larger (OpenCL 3.0, 5.2.1).
ALIGNED = 64
_MOST_REGISTERS = 256  # scalars of one array


@dataclass(slots=True)
class KernelBuffer:
    """Memory as the kernel sees it; `element` is what TIR indexes, perhaps a vector."""

    name: str
    space: Space
    element: Type
    nbytes: int
    written: bool = True
    aligned: int = ALIGNED  # bytes
    registers: list[str] = field(default_factory=list)  # the variables that an array in registers became
    width: int = 1  # scalars in each of them

    @property
    def wide(self) -> bool:
        """Whether offsets into it, in bytes, may need more than 32 bits."""
        return self.nbytes >= 1 << 31


@dataclass(slots=True)
class ArrayUses:
    """How a private array is indexed."""

    constant: bool = True
    lanes: set[int] = field(default_factory=set)
    widest: int = 1  # scalars read or written at once


def private_uses(body: tirx.Stmt) -> dict[Any, ArrayUses]:
    """How the arrays of a kernel are indexed, by buffer; under other names of the same memory, too."""
    found: dict[Any, ArrayUses] = {}
    behind: dict[Any, Any] = {}

    def declared(statement: tirx.DeclBuffer) -> None:
        source = statement.data
        if isinstance(source, ir.Call) and str(source.op.name) == "tirx.buffer_data":
            behind[statement.buffer] = behind.get(source.args[0], source.args[0])

    def used(buffer: Any, indices: list[Any]) -> None:
        uses = found.setdefault(behind.get(buffer, buffer), ArrayUses())
        _note(uses, indices)
        lanes = parsed(str(indices[0].ty.dtype)).lanes * parsed(str(buffer.dtype)).lanes
        uses.widest = max(uses.widest, lanes)

    structural_walk(
        body,
        [
            (tirx.DeclBuffer, declared),
            (ir.TensorLoad, lambda load: used(load.source, list(load.indices))),
            (tirx.BufferStore, lambda store: used(store.buffer, list(store.indices))),
        ],
        order="pre",
    )
    return found


def _note(uses: ArrayUses, indices: list[Any]) -> None:
    index = indices[0] if len(indices) == 1 else None
    if isinstance(index, tirx.IntImm):
        uses.lanes.add(1)
    elif isinstance(index, tirx.Ramp) and isinstance(index.stride, tirx.IntImm):
        uses.constant &= isinstance(index.base, tirx.IntImm)
        if int(index.stride) != 1:
            uses.lanes.add(1)  # a lane here, a lane there: they are read one by one
            return
        uses.lanes.add(int(index.lanes))
    else:
        uses.constant = False
        uses.lanes.add(1)


def register_width(uses: ArrayUses, element: Type, elements: int) -> int | None:
    """How many scalars each variable holds if the array is held in registers; None if it must stay one."""
    if not uses.constant or elements * element.lanes > _MOST_REGISTERS:
        return None
    widest = max(uses.lanes, default=1)
    if element.lanes > 1:
        return element.lanes if widest == 1 else None
    return widest if widest in LANES and widest != 3 else 1


def space_of(scope: str) -> Space:
    """The address space of a storage scope."""
    if scope == "global":
        return "global"
    if scope == "shared":
        return "local"
    if scope == "local":
        return "private"
    raise Unprintable(f"OpenCL C has no memory of scope {scope!r}")
