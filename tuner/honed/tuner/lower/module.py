"""The whole of lowering: legalise, schedule, generate, plan."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from tvm import relax, tirx
from tvm.ir import IRModule
from tvm.target import Target
from tvm_ffi import structural_hash

from honed.machine.forked import Forked
from honed.machine.profile import DeviceProfile
from honed.protocol import strict
from honed.protocol.errors import ModelRefused

from .cost import function_flops
from .functions.joining import Joins, never
from .functions.legalize import legalize_traced
from .graph import read_program
from .opencl import Lowered, LoweringFailed, lower_function
from .operands import constant_parameters, mark_constants, marked, unmarked
from .plan import Plan, plan
from .program import Function, FunctionCall, KernelLaunch, Program, moved_in_place
from .schedule import SERIAL, default_kernels
from .target import alignment_of, target_for

Progress = Callable[[float, str], None]
# Of kernels, in characters: they fit a table, and PoCL, which makes them folder names, fails on long ones.
LONGEST_NAME = 40
# Given a task and its function: the name of a schedule and the function scheduled by it, or None for the
# one that needs no trial. May raise LoweringFailed.
Choose = Callable[[str, tirx.PrimFunc], tuple[str, tirx.PrimFunc] | None]
# Given a function, a name, a target and a profile: kernels that need no trial, as of `default_kernels`.
First = Callable[[tirx.PrimFunc, str, Target, DeviceProfile], tuple[str, Lowered, list[str]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweredModel:
    """A program with the functions it calls, not yet laid out in memory."""

    program: Program
    functions: dict[str, Function]
    notes: tuple[str, ...]

    def plan(self, profile: DeviceProfile, extra: Sequence[np.ndarray] = ()) -> Plan:
        """Lay it out for a device; `extra` arrays become the last constants."""
        room = profile.limits.max_alloc_bytes
        return plan(self.program, self.functions, alignment_of(profile), room, extra)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lowering:
    """What functions are lowered with."""

    functions: Mapping[str, tirx.PrimFunc]  # constants that may be packed are marked
    target: Target
    profile: DeviceProfile
    choose: Choose
    first: First


@dataclass(frozen=True, slots=True)
class _Found:
    """A function's kernels, with what the user should know of how they came to be; or why there are none."""

    function: Function | None
    notes: list[str]
    failed: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LegalModel:
    """A program, and the functions that it calls; the constants that may be packed are marked."""

    program: Program
    functions: Mapping[str, tirx.PrimFunc]


def legal_model(
    module: IRModule,
    profile: DeviceProfile,
    joins: Joins = never,
    names: Mapping[relax.Var, str] | None = None,
    *,
    views: bool = True,
    blocked: bool = True,
    in_place: bool = True,
) -> LegalModel:
    """The `main` of a Relax module as calls of functions that are to be lowered.

    `names` are those of the operators that variables of the module hold the results of. `joins`, `views`,
    `blocked` and `in_place` are as in `legalize`.
    """
    legal, traced = legalize_traced(module, profile, joins, views=views, blocked=blocked, in_place=in_place)
    known = names or {}
    operators = {var: tuple(known[o] for o in made if o in known) for var, made in traced.items()}
    program = moved_in_place(read_program(legal, operators), alignment_of(profile))
    called = dict.fromkeys(c.function for c in program.calls if isinstance(c, FunctionCall))
    constants = constant_parameters(program)
    functions = {name: mark_constants(legal[name], constants[name], profile) for name in called}
    return LegalModel(program=program, functions=functions)


def lower_module(
    module: IRModule,
    profile: DeviceProfile,
    progress: Progress = lambda _fraction, _text: None,
    choose: Choose = lambda _task, _func: None,
    first: First = default_kernels,
    names: Mapping[relax.Var, str] | None = None,
    processes: int = 0,
    joins: Joins = never,
    *,
    views: bool = True,
    blocked: bool = True,
    in_place: bool = True,
) -> LoweredModel:
    """Lower the `main` of a Relax module with the schedules chosen, else with those that `first` gives.

    `progress` is called with the share done (0 to 1) and what is being done. So many `processes` are forked
    for it; with none this process does it. The rest is as in `legal_model`. Raises ModelRefused with every
    function that cannot be lowered.
    """
    progress(0.0, "legalise and fuse operators")
    legal = legal_model(module, profile, joins, names, views=views, blocked=blocked, in_place=in_place)
    called, target = legal.functions, target_for(profile)
    found: dict[str, _Found] = {}
    tools = _Lowering(functions=called, target=target, profile=profile, choose=choose, first=first)
    with Forked(min(processes, len(called)), tools) as forked:
        begun = {name: forked.begin(_lower, name, *task) for name, task in _named(called).items()}
        for n, (name, one) in enumerate(begun.items()):
            progress(0.3 + 0.7 * n / len(called), f"kernel {n + 1} of {len(called)}: {name}")
            found[name] = one.result()
    if failed := tuple(f"{name}: {one.failed}" for name, one in found.items() if one.function is None):
        raise ModelRefused("some functions of the model cannot be turned into OpenCL kernels", failed)
    return LoweredModel(
        program=legal.program,
        functions={name: one.function for name, one in found.items() if one.function is not None},
        notes=tuple(note for one in found.values() for note in one.notes),
    )


def _named(functions: Mapping[str, tirx.PrimFunc]) -> dict[str, tuple[str, str]]:
    """By function its task, and the name that its kernels get."""
    found: dict[str, tuple[str, str]] = {}
    taken: set[str] = set()
    for name, func in functions.items():
        task = task_key(func)
        short = kernel_name(name, task, taken)
        taken.add(short)
        found[name] = task, short
    return found


def _lower(tools: _Lowering, of: str, task: str, name: str) -> _Found:
    """The kernels of the module's function `of`, under a name of theirs."""
    func, target, profile = tools.functions[of], tools.target, tools.profile
    notes: list[str] = []
    found: tuple[str, Lowered] | None = None
    try:
        chosen = tools.choose(task, func)
        if chosen is not None:
            found = chosen[0], lower_function(chosen[1], name, target, profile)
    except LoweringFailed as failed:
        notes.append(f"{name} keeps its default schedule, the recorded one cannot be used: {failed}")
    if found is None:
        try:
            rule, lowered, passed_over = tools.first(func, name, target, profile)
        except LoweringFailed as failed:
            return _Found(None, notes, str(failed))
        found = rule, lowered
        if rule == SERIAL:
            why = "; ".join(passed_over)
            notes.append(f"{name} runs on a single work-item, slowly: no default schedule fits ({why})")
    schedule, made = found
    launches = _share_flops(made, function_flops(func))
    return _Found(
        strict.like(Function, made, name=name, task=task, schedule=schedule, launches=launches), notes
    )


def kernel_name(name: str, task: str, taken: Container[str]) -> str:
    """A name not yet taken of at most LONGEST_NAME characters: those of many fused operators are cut.

    Cut names are told apart by their task.
    """
    if len(name) <= LONGEST_NAME and name not in taken:
        return name
    for digits in range(4, len(task) + 1):
        cut = name[: LONGEST_NAME - 1 - digits].rstrip("_")
        if (short := f"{cut}_{task[:digits]}") not in taken:
            return short
    numbered = (f"{name[:16]}_{task}_{n}" for n in range(2, 10**6))
    return next(short for short in numbered if short not in taken)


def task_key(func: tirx.PrimFunc) -> str:
    """What names a workload in every model: the structural hash of its unscheduled function.

    Behind it are the parameters that may be packed, as they are constants: it is another workload where they
    are not, with other times for the same schedules.
    """
    marks = "".join(f"_c{n}" for n in marked(func))
    return f"{structural_hash(unmarked(func)) & 0xFFFFFFFFFFFFFFFF:016x}{marks}"


def _share_flops(lowered: Lowered, total: int) -> tuple[KernelLaunch, ...]:
    """Divide a function's operations among its launches by what each executes."""
    executed = sum(launch.flops for launch in lowered.launches)
    return tuple(replace(one, flops=round(total * one.flops / executed)) for one in lowered.launches)
