"""Describes a function as a workload: its name, its operations and bytes, and the constants it may pack."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from tvm import ir, s_tir, tirx
from tvm.ir import IRModule
from tvm.s_tir.analysis import estimate_tir_flops
from tvm_ffi import structural_hash, structural_map

from honed.machine.families import Packing
from honed.machine.profile import DeviceProfile

from .program import FunctionCall, MemoryValue, Program
from .statements import count_reached, loads, lookup_tables, nodes, reduced_axes, uses

_IMAGE_AXES = 4  # Axes of a convolution's weights and results
_MARK = "honed.constants"
ALIGNED_PIXELS = 4  # Images of a multiple are multiplied as they are


def task_key(func: tirx.PrimFunc) -> str:
    """Return the key of a workload in every model: the structural hash of its unscheduled function.

    The key ends with the numbers of the parameters that may be packed, because they are constants. Without
    them it is another workload, with other times for the same schedules.
    """
    marks = "".join(f"_c{n}" for n in marks_of(func))
    return f"{structural_hash(func.without_attr(_MARK)) & 0xFFFFFFFFFFFFFFFF:016x}{marks}"


def form_key(func: tirx.PrimFunc) -> int:
    """Return a key equal for functions that differ in offsets and factors alone: one schedule suits all.

    Such are quantised layers, and the steps of an unrolled recurrence, which read different rows.
    """
    body = structural_map(
        func.body,
        [
            ((tirx.Add, tirx.Sub), lambda sum_: sum_.a if isinstance(sum_.b, tirx.IntImm) else sum_),
            (ir.TensorLoad, _from_the_first),
            (ir.Range, lambda one: ir.Range(0, one.extent) if isinstance(one.min, tirx.IntImm) else one),
            (tirx.FloatImm, lambda number: tirx.FloatImm(number.ty.dtype, 1.0)),
        ],
    )
    return int(structural_hash(func.with_body(body)))


def _from_the_first(load: ir.TensorLoad) -> ir.TensorLoad:
    """Return a load with 0 for its constant indices."""
    indices = list(load.indices)
    if not any(isinstance(index, tirx.IntImm) for index in indices):
        return load
    first = [tirx.IntImm(i.ty.dtype, 0) if isinstance(i, tirx.IntImm) else i for i in indices]
    return tirx.BufferLoad(load.source, first)


def function_flops(func: tirx.PrimFunc) -> int:
    """Return the operations of an unscheduled function.

    Arithmetic, comparisons and intrinsics count as one operation each.
    """
    return int(estimate_tir_flops(IRModule({"main": func})))


def function_bytes(func: tirx.PrimFunc) -> int:
    """Return the least bytes that an unscheduled function moves.

    It reads and writes its parameters; of a lookup table it reads one element for each of its results.
    """
    tables, written = lookup_tables(func.body), {one.buffer for one in nodes(func.body, tirx.BufferStore)}
    values = list(zip(func.params, parameters(func), strict=True))
    results = max((math.prod(value.shape) for buffer, value in values if buffer in written), default=0)
    return sum(value.nbytes_of(results) if buffer in tables else value.nbytes for buffer, value in values)


def count_reached_bytes(func: tirx.PrimFunc) -> int:
    """Return the least bytes that an unscheduled function moves where it reads only parts of its parameters.

    Schedules are chosen by `function_bytes`, for which a part counts as the whole.
    """
    found, tables = count_reached(func.body), lookup_tables(func.body)
    parts_ = zip(func.params, parameters(func), strict=True)
    unread = (value.nbytes - value.nbytes_of(found.get(p, 0)) for p, value in parts_ if p not in tables)
    return function_bytes(func) - sum(unread)


def parameters(func: tirx.PrimFunc) -> tuple[MemoryValue, ...]:
    """Return a function's parameters as values."""
    return tuple(
        MemoryValue(dtype=str(p.dtype), shape=tuple(int(extent) for extent in p.shape)) for p in func.params
    )


def constant_parameters(program: Program) -> dict[str, frozenset[int]]:
    """Return, for each function, the parameters that are constants in all its calls."""
    found: dict[str, frozenset[int]] = {}
    for call in program.calls:
        if isinstance(call, FunctionCall):
            here = frozenset(n for n, v in enumerate(call.inputs) if program.values[v].constant is not None)
            found[call.function] = found.get(call.function, here) & here
    return found


def mark_constants(func: tirx.PrimFunc, constants: Iterable[int], profile: DeviceProfile) -> tirx.PrimFunc:
    """Mark the constant parameters that candidates for the device may pack.

    A candidate's time depends only on these being constant.
    """
    packs = _PACKED[profile.family.packing]
    found = [n for n in sorted(constants) if packs(func, func.params[n])]
    return func.with_attr(_MARK, found) if found else func


def marks_of(func: tirx.PrimFunc) -> tuple[int, ...]:
    """Return the numbers of the marked parameters."""
    return tuple(int(n) for n in func.attrs[_MARK]) if _MARK in func.attrs else ()


def _summed(block: s_tir.SBlock, weights: ir.Var) -> tuple[list[ir.TensorLoad], list[ir.TensorLoad]]:
    """Return the loads that a block sums: those of weights, and the others."""
    over = [axis.var for axis in reduced_axes(block)]
    summed = [load for load in loads(block.body) if uses(load.indices, over)]
    mine = [load for load in summed if load.source.same_as(weights)]
    return mine, [load for load in summed if not load.source.same_as(weights)]


def _has_window(func: tirx.PrimFunc, weights: ir.Var) -> bool:
    """Return whether weights are summed over channels and a window, and have a separate axis of outputs."""

    def is_so(block: s_tir.SBlock) -> bool:
        mine, others = ([i for load in of for i in load.indices] for of in _summed(block, weights))
        kept = [axis.var for axis in block.iter_vars if axis.iter_type != tirx.IterVar.CommReduce]
        own = any(uses(mine, [axis]) and not uses(others, [axis]) for axis in kept)
        return own and math.prod(int(axis.dom.extent) for axis in reduced_axes(block)[1:]) > 1

    return any(is_so(block) for block in nodes(func.body, s_tir.SBlock))


def _of_sums(func: tirx.PrimFunc, weights: ir.Var) -> bool:
    """Return whether weights are summed with another operand."""
    return any(all(_summed(block, weights)) for block in nodes(func.body, s_tir.SBlock))


def _has_window_or_odd_image(func: tirx.PrimFunc, weights: ir.Var) -> bool:
    """Return whether weights have a window, or are summed with an image whose pixels no vector divides."""
    pixels = math.prod(int(extent) for extent in func.params[-1].shape[2:])
    images = len(func.params[-1].shape) == len(weights.shape) == _IMAGE_AXES
    odd = images and pixels % ALIGNED_PIXELS != 0
    return _has_window(func, weights) or (odd and _of_sums(func, weights))


# Constants that sketches lay out in a separate launch: `tile_packed`, `pointwise`, `channels`, `panels` and
# `blockwise`.
_PACKED: Mapping[Packing, Callable[[tirx.PrimFunc, ir.Var], bool]] = {
    Packing.NONE: lambda _func, _weights: False,
    Packing.WINDOWS: _has_window_or_odd_image,
    Packing.OPERANDS: _of_sums,
}
