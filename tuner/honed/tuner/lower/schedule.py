"""Provides default schedules, function by function.

The rules of TVM's dlight that suit the function and the device are tried in order, and the first whose
kernels pass every check of `opencl` is used. A single work-item runs a function that none of them can
schedule, which always works and is slow: the caller reports it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from types import FunctionType

from tvm import s_tir, tirx
from tvm.ir import IRModule
from tvm.s_tir import dlight
from tvm.target import Target

from honed.machine.profile import DeviceProfile
from honed.process.limits import keep_freed

from .opencl import Lowered, LoweringFailed, last_line, lower_function
from .sums import reductions

SERIAL = "serial"
# Shorter reductions leave most work-items of a cooperating group idle.
_LEAST_COOPERATIVE = 64
# Rules fail in many ways on functions they were not made for.
_MISFITS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)

# TVM checks the arguments of a schedule's steps in Python, which takes a twentieth of compiling a model, and
# again in C++, which is enough.
for _name, _step in list(vars(s_tir.Schedule).items()):
    if isinstance(_step, FunctionType) and hasattr(_step, "__wrapped__"):
        setattr(s_tir.Schedule, _name, _step.__wrapped__)
# Rules try to inline each block. A block that cannot be inlined is an error, whose text TVM fills with the
# whole function.
s_tir.Schedule.__init__.__kwdefaults__["error_render_level"] = "fast"
# TVM makes a solver, with 16 MiB of its own, for each proof that a split has to be guarded.
keep_freed(32 << 20)


def default_kernels(
    func: tirx.PrimFunc, name: str, target: Target, profile: DeviceProfile
) -> tuple[str, Lowered, list[str]]:
    """Return the first default schedule of `func` that gives runnable kernels.

    Returns the rule's name, the kernels, and why each earlier rule that applied was passed over. Raises
    LoweringFailed where not even a single work-item can run the function (an operator with host code).
    """
    func = narrow_indices(func)
    passed_over: list[str] = []
    for rule, schedule in _by_rules(func, target, profile, passed_over):
        try:
            return rule, lower_function(schedule.mod["main"], name, target, profile), passed_over
        except LoweringFailed as failed:
            passed_over.append(f"{rule}: {failed}")
    try:
        scheduled = _single_work_item(func)
    except (RuntimeError, ValueError, TypeError) as error:
        raise LoweringFailed(last_line(error)) from error
    return SERIAL, lower_function(scheduled, name, target, profile), passed_over


def by_rule(func: tirx.PrimFunc, target: Target, profile: DeviceProfile) -> tuple[str, s_tir.Schedule] | None:
    """Return the first default rule that applies, and its schedule of the function; None where none does."""
    return next(_by_rules(narrow_indices(func), target, profile, []), None)


def _by_rules(
    func: tirx.PrimFunc, target: Target, profile: DeviceProfile, passed_over: list[str]
) -> Iterator[tuple[str, s_tir.Schedule]]:
    """Yield the name and the schedule of each rule that applies; add why a rule fails to `passed_over`."""
    for rule, make in _rules(func, profile):
        try:
            with target:
                found = make().apply(fresh(func), target, False)
        except _MISFITS as error:
            passed_over.append(f"{rule}: {last_line(error)}")
            continue
        if found is not None:
            yield rule, found[0] if isinstance(found, list) else found


def _rules(
    func: tirx.PrimFunc, profile: DeviceProfile
) -> Iterator[tuple[str, Callable[[], dlight.ScheduleRule]]]:
    yield "matmul", dlight.gpu.Matmul
    # A work-group on a CPU is one thread of the processor: cooperating only adds barriers.
    if not profile.family.processor and any(one.terms >= _LEAST_COOPERATIVE for one in reductions(func)):
        yield "gemv", dlight.gpu.GEMV
        yield "reduction", dlight.gpu.Reduction
        yield "general-reduction", dlight.gpu.GeneralReduction
    yield "fallback", dlight.gpu.Fallback


def fresh(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return a copy that shares nothing: schedules change the statements of their function in place.

    `s_tir.renew_defs` takes a twentieth of a deep copy, but refuses Relax's code for a value of rank 0.
    """
    try:
        return s_tir.renew_defs(func)
    except (RuntimeError, TypeError, ValueError):
        return copy.deepcopy(func)


def narrow_indices(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Use 32-bit index arithmetic, which GPUs do in one instruction.

    TVM's pass accepts no function with 64-bit data or more than 2^31 elements; those keep 64-bit shapes, and
    their indices are narrowed where the lowering can prove that they fit.
    """
    if any(
        str(b.dtype) in ("int64", "uint64") or math.prod(int(extent) for extent in b.shape) >= 2**31
        for b in func.params
    ):
        return func
    try:
        return tirx.transform.ForceNarrowIndexToInt32()(IRModule({"main": func}))["main"]
    except (RuntimeError, ValueError):
        return func  # 64-bit data inside the function


def _single_work_item(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Bind every outermost loop nest to a work-group of its own launch, in order.

    To a group and not to a work-item: buffers that one nest alone uses are then allocated around its launch,
    and not inside the kernel, where OpenCL C has no global memory to declare.
    """
    schedule = s_tir.Schedule(fresh(func))
    bound: set[str] = set()
    for block in schedule.get_child_blocks(schedule.get_sblock("root")):
        loops = schedule.get_loops(block)
        if loops and str(schedule.get(loops[0]).loop_var.name) in bound:
            continue  # An earlier block shares its nest
        outer = schedule.add_unit_loop(loops[0] if loops else block)
        schedule.bind(outer, "blockIdx.x")
        bound.add(str(schedule.get(outer).loop_var.name))
    return schedule.mod["main"]
