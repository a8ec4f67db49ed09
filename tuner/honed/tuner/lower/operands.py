"""Which operands of a function are constants that a schedule may lay out anew before it is served."""

from __future__ import annotations

import math
from collections.abc import Iterable

from tvm import ir, s_tir, tirx
from tvm_ffi import structural_walk

from honed.runtime.profile import DeviceProfile

from .program import FunctionCall, Program
from .statements import loads, uses

# Whose spaces have sketches that lay weights out in a launch of their own (`search.packed`).
_PACKING = frozenset({"mali"})


def constant_parameters(program: Program) -> dict[str, frozenset[int]]:
    """For each function the parameters that are constants in all its calls."""
    found: dict[str, frozenset[int]] = {}
    for call in program.calls:
        if isinstance(call, FunctionCall):
            here = frozenset(n for n, v in enumerate(call.inputs) if program.values[v].constant is not None)
            found[call.function] = found.get(call.function, here) & here
    return found


def packable(func: tirx.PrimFunc, constants: Iterable[int], profile: DeviceProfile) -> tuple[int, ...]:
    """Those of the constant parameters that candidates for the device may pack: weights of convolutions.

    Only for them it matters to a candidate's time that they are constants.
    """
    if profile.rules.family not in _PACKING:
        return ()
    return tuple(n for n in sorted(constants) if _has_window(func, func.params[n]))


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
