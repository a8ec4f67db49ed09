"""A model as a straight line of calls on values: what lies between Relax and the plan.

Free of TVM, so that planning can be tested with programs made by hand. A value is a piece of memory, not
a tensor: reshapes do not appear here, both of their sides are the same value.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from honed.runtime.compiled.model import Attr, KernelArg


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryValue:
    """Memory that is written once (by one call, or from outside) and read after that."""

    dtype: str
    shape: tuple[int, ...]
    constant: np.ndarray | None = None

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelLaunch:
    """One launch inside a function.

    `args` name memory by position: 0 .. n-1 are the function's inputs then outputs, n and above its
    inner buffers.
    """

    entry: str
    args: tuple[int, ...]
    arg_types: tuple[KernelArg, ...]
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    flops: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A PrimFunc turned into OpenCL C: one or more launches and the memory they share between them."""

    name: str
    task: str
    schedule: str
    source: str
    parameters: int  # inputs and outputs together
    inner: tuple[MemoryValue, ...]
    launches: tuple[KernelLaunch, ...]


@dataclass(frozen=True, slots=True)
class Within:
    """The bytes of the value `inner` are those of the value `outer` from `offset` on."""

    inner: int
    outer: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionCall:
    """Run `functions[function]` on values.

    One with `moves`, all of one `outer`, only copies: it need not run where its values lie so.
    """

    function: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    operators: tuple[str, ...] = ()  # that it computes, by the values they make
    moves: tuple[Within, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFunctionCall:
    """Run a part of the model in the CPU engine on values, seen in the shapes given here."""

    function: str
    inputs: tuple[int, ...]
    input_shapes: tuple[tuple[int, ...], ...]
    outputs: tuple[int, ...]
    attrs: dict[str, Attr]
    operators: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueView:
    """An operator whose result is `value` seen with a shape of its own."""

    operator: str
    value: int
    shape: tuple[int, ...]


Call = FunctionCall | HostFunctionCall


@dataclass(frozen=True, slots=True)
class PlacedBlock:
    """Values in one piece of memory, which the value `whole` fills; each with its offset there (bytes)."""

    whole: int
    places: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The whole model. `inputs` and `outputs` index `values`, in the order of the model's signature.

    A value lies in one block at most, and memory of its own where it lies in none.
    """

    values: tuple[MemoryValue, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    output_shapes: tuple[tuple[int, ...], ...]
    calls: tuple[Call, ...]
    views: tuple[ValueView, ...] = ()
    blocks: tuple[PlacedBlock, ...] = ()
