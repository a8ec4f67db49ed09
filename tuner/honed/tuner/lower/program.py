"""Represents a model as a straight line of calls on values, between Relax and the plan.

Free of TVM, so that planning can be tested with programs made by hand. A value is a piece of memory, not
a tensor: reshapes do not appear here, both of their sides are the same value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from honed.protocol.strict import ABSENT
from honed.runtime.compiled.model import Attr, KernelArg


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryValue:
    """Memory that is written once (by one call, or from outside) and read after that."""

    dtype: str
    shape: tuple[int, ...]
    constant: np.ndarray | None = field(default=None, metadata=ABSENT)

    @property
    def nbytes(self) -> int:
        """Size of the value in bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize

    def nbytes_of(self, most: int) -> int:
        """Return the bytes of at most `most` elements."""
        return min(self.nbytes, most * np.dtype(self.dtype).itemsize)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelLaunch:
    """A launch inside a function.

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

    A call with `moves`, all of one `outer`, only copies: it need not run where its values lie in place. A
    call with `keeps`, one input of the model for each output, writes some elements of it; the others keep the
    input's values.
    """

    function: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    operators: tuple[str, ...] = ()  # Operators that it computes, named by the values they make
    moves: tuple[Within, ...] = ()
    keeps: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFunctionCall:
    """Run a partition of the model in the CPU engine on values in the shapes of this call."""

    function: str
    inputs: tuple[int, ...]
    input_shapes: tuple[tuple[int, ...], ...]
    outputs: tuple[int, ...]
    attrs: dict[str, Attr]
    operators: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueView:
    """An operator whose result is `value` read with a shape of its own."""

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


# The operands of a concatenation lie one after the other in its result, and a slice lies in its operand:
# where possible, each is written where it is read. Values that lie in one another are a block, which one of
# them fills; values computed at different places in it are disjoint.

_Places = Mapping[int, int]  # Bytes from the start of their block, by value


def move_in_place(program: Program, alignment: int) -> Program:
    """Return the program without the calls that move values which can lie in place, each in its block.

    Blocks begin, and values lie in them, at multiples of `alignment` (bytes). A call stays where an input, an
    output or a constant would have to lie within another value, and where two values would need the same
    bytes. It also stays where the moved value depends on constants only: that is moved once.
    """
    found = _Blocks(program, alignment)
    kept: list[Call] = []
    views = list(program.views)
    for call in program.calls:
        if not (isinstance(call, FunctionCall) and call.moves and found.take(call)):
            kept.append(call)
            continue
        (result,) = call.outputs
        shape = program.values[result].shape
        views += [ValueView(operator=name, value=result, shape=shape) for name in call.operators]
    return replace(program, calls=tuple(kept), views=tuple(views), blocks=found.blocks())


def constant_values(program: Program) -> frozenset[int]:
    """Return constants, and the values that are computed from constants only."""
    found = {v for v, value in enumerate(program.values) if value.constant is not None}
    for call in program.calls:
        if not isinstance(call, HostFunctionCall) and found.issuperset(call.inputs):
            found.update(call.outputs)
    return frozenset(found)


@dataclass()
class _Blocks:
    """The values by their places, for the calls accepted so far."""

    program: Program
    alignment: int
    block_of: dict[int, _Places] = field(default_factory=dict)  # Blocks of the values that share one
    moved: set[int] = field(default_factory=set)  # Values that no call computes any more

    def __post_init__(self) -> None:
        self._constant = constant_values(self.program)
        self._owners = {*self.program.inputs, *self.program.outputs}

    def take(self, call: FunctionCall) -> bool:
        """Place a call's values in place, where they can be; return whether that was done."""
        places = self._join(call.moves)
        if places is None or not self._is_allowed(places, self.moved | set(call.outputs)):
            return False
        self.moved.update(call.outputs)
        self.block_of.update(dict.fromkeys(places, places))
        return True

    def blocks(self) -> tuple[PlacedBlock, ...]:
        """Return the final blocks, each with its values' offsets."""
        distinct = {id(places): places for places in self.block_of.values()}
        return tuple(
            PlacedBlock(whole=self._whole(places), places=tuple(sorted(places.items())))
            for places in distinct.values()
        )

    def _join(self, moves: Iterable[Within]) -> _Places | None:
        """Return the blocks of all moved values as one block; None where a value would lie at two places."""
        found: dict[int, int] = {}
        for move in moves:
            outer = found or self.block_of.get(move.outer, {move.outer: 0})
            inner = self.block_of.get(move.inner, {move.inner: 0})
            shift = outer[move.outer] + move.offset - inner[move.inner]
            placed = {value: at + shift for value, at in inner.items()}
            if any(outer.get(value, at) != at for value, at in placed.items()):
                return None
            found = {**outer, **placed}
        start = min(found.values(), default=0)
        return {value: at - start for value, at in found.items()}

    def _is_allowed(self, places: _Places, moved: set[int]) -> bool:
        values = self.program.values
        spans = {value: range(at, at + values[value].nbytes) for value, at in places.items()}
        computed = sorted((span.start, span.stop) for value, span in spans.items() if value not in moved)
        whole = spans[self._whole(places)]
        return (
            all(at % self.alignment == 0 and spans[value] for value, at in places.items())
            and self._constant.isdisjoint(places)
            and all(one.stop <= whole.stop for one in spans.values())
            and whole.start == 0
            and all(end <= start for (_, end), (start, _) in pairwise(computed))
            and self._owners.intersection(places) <= {self._whole(places)}
        )

    def _whole(self, places: _Places) -> int:
        """Return the largest value of a block; of several, one that has memory of its own."""
        return max(places, key=lambda value: (self.program.values[value].nbytes, value in self._owners))
