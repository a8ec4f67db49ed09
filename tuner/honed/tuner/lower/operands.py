"""Which operands of a function are constants that a schedule may lay out anew before it is served."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from tvm import ir, s_tir, tirx
from tvm_ffi import structural_walk

from honed.machine.families import Packing
from honed.machine.profile import DeviceProfile

from .program import FunctionCall, Program
from .statements import loads, uses

_IMAGE_AXES = 4  # of a convolution's weights and results
_MARK = "honed.constants"
ALIGNED_PIXELS = 4  # images of a multiple are multiplied as they are


def constant_parameters(program: Program) -> dict[str, frozenset[int]]:
    """For each function the parameters that are constants in all its calls."""
    found: dict[str, frozenset[int]] = {}
    for call in program.calls:
        if isinstance(call, FunctionCall):
            here = frozenset(n for n, v in enumerate(call.inputs) if program.values[v].constant is not None)
            found[call.function] = found.get(call.function, here) & here
    return found


def mark_constants(func: tirx.PrimFunc, constants: Iterable[int], profile: DeviceProfile) -> tirx.PrimFunc:
    """Mark those of a function's constant parameters that candidates for the device may pack.

    Only for them it matters to a candidate's time that they are constants.
    """
    packs = _PACKED[profile.family.packing]
    found = [n for n in sorted(constants) if packs(func, func.params[n])]
    return func.with_attr(_MARK, found) if found else func


def marked(func: tirx.PrimFunc) -> tuple[int, ...]:
    """The numbers of the parameters that are marked."""
    return tuple(int(n) for n in func.attrs[_MARK]) if _MARK in func.attrs else ()


def unmarked(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function without its marks."""
    return func.without_attr(_MARK)


def _has_window(func: tirx.PrimFunc, weights: ir.Var) -> bool:
    """Whether they are summed over channels and a window, and have an axis of outputs to themselves."""
    found: list[bool] = []

    def visit(block: s_tir.SBlock) -> None:
        over = [axis for axis in block.iter_vars if axis.iter_type == tirx.IterVar.CommReduce]
        kept = [axis.var for axis in block.iter_vars if axis.iter_type != tirx.IterVar.CommReduce]
        summed = [load for load in loads(block.body) if uses(load.indices, [axis.var for axis in over])]
        mine = [index for load in summed if load.source.same_as(weights) for index in load.indices]
        others = [index for load in summed if not load.source.same_as(weights) for index in load.indices]
        own = any(uses(mine, [axis]) and not uses(others, [axis]) for axis in kept)
        found.append(own and math.prod(int(axis.dom.extent) for axis in over[1:]) > 1)

    structural_walk(func.body, [(s_tir.SBlock, visit)], order="post")
    return any(found)


def _of_sums(func: tirx.PrimFunc, weights: ir.Var) -> bool:
    """Whether they are summed with another operand."""
    found: list[bool] = []

    def visit(block: s_tir.SBlock) -> None:
        over = [axis.var for axis in block.iter_vars if axis.iter_type == tirx.IterVar.CommReduce]
        summed = [load for load in loads(block.body) if uses(load.indices, over)]
        mine = [load for load in summed if load.source.same_as(weights)]
        found.append(0 < len(mine) < len(summed))

    structural_walk(func.body, [(s_tir.SBlock, visit)], order="post")
    return any(found)


def _has_window_or_odd_image(func: tirx.PrimFunc, weights: ir.Var) -> bool:
    """Whether they have a window, or are summed with an image whose pixels no vector divides."""
    pixels = math.prod(int(extent) for extent in func.params[-1].shape[2:])
    images = len(func.params[-1].shape) == len(weights.shape) == _IMAGE_AXES
    odd = images and pixels % ALIGNED_PIXELS != 0
    return _has_window(func, weights) or (odd and _of_sums(func, weights))


# What sketches lay out in a launch of their own: `search.packed`, `pointwise`, `channels` and `panels`.
_PACKED: Mapping[Packing, Callable[[tirx.PrimFunc, ir.Var], bool]] = {
    Packing.NONE: lambda _func, _weights: False,
    Packing.WINDOWS: _has_window_or_odd_image,
    Packing.OPERANDS: _of_sums,
}
