"""Lowers a module from end to end: legalise, read the program, schedule, generate, plan."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from tvm import ir, relax, tirx
from tvm.ir import IRModule
from tvm.target import Target

from honed.machine.profile import DeviceProfile
from honed.process.forked import ForkPool
from honed.protocol import strict
from honed.protocol.errors import ModelRefused
from honed.runtime.compiled import model
from honed.runtime.compiled.model import CPU_PART

from .functions.fusing import Joins, move_of, never
from .functions.legalize import legalize
from .functions.updates import parameters_kept
from .opencl import Lowered, LoweringFailed, lower_function
from .plan import Plan, plan
from .program import (
    Call,
    Function,
    FunctionCall,
    HostFunctionCall,
    MemoryValue,
    Program,
    ValueView,
    Within,
    move_in_place,
)
from .schedule import SERIAL, default_kernels
from .target import alignment_of, target_for
from .workload import constant_parameters, form_key, function_flops, mark_constants, task_key

Progress = Callable[[float, str], None]
# Length of kernels' names: they fit a table, and PoCL, which makes them folder names, fails on long ones.
LONGEST_NAME = 40
# Takes a task and its function; returns the name of a schedule and the function scheduled by it, or None for
# the one that needs no trial. May raise LoweringFailed.
Choose = Callable[[str, tirx.PrimFunc], tuple[str, tirx.PrimFunc] | None]
# Takes a function, a name, a target and a profile; returns kernels that need no trial, as of
# `default_kernels`.
UntunedKernels = Callable[[tirx.PrimFunc, str, Target, DeviceProfile], tuple[str, Lowered, list[str]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweredModel:
    """A program with the functions it calls, not yet laid out in memory."""

    program: Program
    functions: dict[str, Function]
    notes: tuple[str, ...]

    @property
    def sources(self) -> dict[str, str]:
        """The source of each function's kernels."""
        return {name: function.source for name, function in self.functions.items()}

    def plan(self, profile: DeviceProfile, extra: Sequence[np.ndarray] = ()) -> Plan:
        """Lay the program out for a device; `extra` arrays become the last constants."""
        room = profile.limits.max_alloc_bytes
        return plan(self.program, self.functions, alignment_of(profile), room, extra)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lowering:
    """The context in which functions are lowered."""

    functions: Mapping[str, tirx.PrimFunc]  # Constants that may be packed are marked
    profile: DeviceProfile
    choose: Choose
    first: UntunedKernels


# A function's kernels, with notes for the user on how they were made; None, with why there are none.
_Found = tuple[Function | None, list[str]]


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
) -> LegalModel:
    """Return the `main` of a Relax module as calls of functions that are to be lowered.

    `names` maps variables of the module to the names of the operators whose results they hold. `joins` is as
    in `legalize`.
    """
    legal, traced = legalize(module, profile, joins)
    known = names or {}
    operators = {var: tuple(known[o] for o in made if o in known) for var, made in traced.items()}
    program = move_in_place(read_program(legal, operators), alignment_of(profile))
    called = dict.fromkeys(c.function for c in program.calls if isinstance(c, FunctionCall))
    constants = constant_parameters(program)
    functions = {name: mark_constants(legal[name], constants[name], profile) for name in called}
    return LegalModel(program=program, functions=functions)


def lower_module(
    module: IRModule,
    profile: DeviceProfile,
    progress: Progress = lambda _fraction, _text: None,
    choose: Choose = lambda _task, _func: None,
    first: UntunedKernels = default_kernels,
    names: Mapping[relax.Var, str] | None = None,
    processes: int = 0,
    joins: Joins = never,
    admit: Callable[[Program], None] = lambda _program: None,
) -> LoweredModel:
    """Lower the `main` of a Relax module with the chosen schedules, else with those that `first` gives.

    `progress` is called with the share done (0 to 1) and the present action. `processes` processes are forked
    for it; with none this process does it. `admit` may refuse the program before that. The rest is as in
    `legal_model`. Raises ModelRefused with every function that cannot be lowered.
    """
    progress(0.0, "legalise and fuse operators")
    legal = legal_model(module, profile, joins, names)
    admit(legal.program)
    called = legal.functions
    found: dict[str, _Found] = {}
    tools = _Lowering(functions=called, profile=profile, choose=choose, first=first)
    alike: dict[int, dict[str, tuple[str, str]]] = {}  # The tasks of functions, and their kernels' names
    taken: set[str] = set()
    for name, func in called.items():
        task = task_key(func)
        taken.add(short := kernel_name(name, task, taken))
        alike.setdefault(form_key(func), {})[name] = task, short
    with ForkPool(min(processes, len(alike)), tools) as forked:
        jobs = [(names, forked.begin(_lower_alike, names)) for names in alike.values()]
        begun = {name: job for names, job in jobs for name in names}
        for n, name in enumerate(called):
            progress(0.3 + 0.7 * n / len(called), f"kernel {n + 1} of {len(called)}: {name}")
            found[name] = begun[name].result()[name]
    if failed := tuple(f"{name}: {notes[0]}" for name, (made, notes) in found.items() if made is None):
        raise ModelRefused("some functions of the model cannot be turned into OpenCL kernels", failed)
    return LoweredModel(
        program=legal.program,
        functions={name: made for name, (made, _) in found.items() if made is not None},
        notes=tuple(note for _, notes in found.values() for note in notes),
    )


def _lower_alike(tools: _Lowering, named: Mapping[str, tuple[str, str]]) -> dict[str, _Found]:
    """Lower functions of equal form in turn in one process, so that they share a schedule."""
    return {of: _lower(tools, of, *task) for of, task in named.items()}


def _lower(tools: _Lowering, of: str, task: str, name: str) -> _Found:
    """Lower the module's function `of` to kernels, named `name`."""
    func, profile, target = tools.functions[of], tools.profile, target_for(tools.profile)
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
            return None, [str(failed)]
        found = rule, lowered
        if rule == SERIAL:
            why = "; ".join(passed_over)
            notes.append(f"{name} runs on a single work-item, slowly: no default schedule fits ({why})")
    schedule, made = found
    total, executed = function_flops(func), sum(launch.flops for launch in made.launches)
    launches = tuple(replace(one, flops=round(total * one.flops / executed)) for one in made.launches)
    function = strict.copy_fields(Function, made, name=name, task=task, schedule=schedule, launches=launches)
    return function, notes


def kernel_name(name: str, task: str, taken: Container[str]) -> str:
    """Return a name not yet taken, of at most LONGEST_NAME characters.

    Names of many fused operators are cut; the task's key distinguishes cut names.
    """
    if len(name) <= LONGEST_NAME and name not in taken:
        return name
    for digits in range(4, len(task) + 1):
        cut = name[: LONGEST_NAME - 1 - digits].rstrip("_")
        if (short := f"{cut}_{task[:digits]}") not in taken:
            return short
    numbered = (f"{name[:16]}_{task}_{n}" for n in range(2, 10**6))
    return next(short for short in numbered if short not in taken)


# Reading the program. Values are keyed by the Relax variable object: variable names are not unique.


@dataclass(frozen=True, slots=True)
class _Seen:
    """A value at one point of the graph: the memory, and the shape in which it is read."""

    value: int
    shape: tuple[int, ...]


_Operators = Mapping[relax.Var, tuple[str, ...]]
_Bound = _Seen | tuple["_Bound", ...]


@dataclass()
class _Reader:
    module: IRModule
    values: list[MemoryValue] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    bound: dict[relax.Var, _Bound] = field(default_factory=dict)
    constants: dict[object, _Seen] = field(default_factory=dict)
    operators: _Operators = field(default_factory=dict)
    views: list[ValueView] = field(default_factory=list)
    parts: dict[tuple[int, tuple[_Seen, ...]], int] = field(default_factory=dict)  # Numbers of their calls

    def new(self, dtype: str, shape: tuple[int, ...], constant: np.ndarray | None = None) -> _Seen:
        self.values.append(MemoryValue(dtype=dtype, shape=shape, constant=constant))
        return _Seen(len(self.values) - 1, shape)

    def of(self, expr: relax.Expr) -> _Bound:
        """Return the value of an expression that computes nothing."""
        if isinstance(expr, relax.Var):
            return self.bound[expr]
        if isinstance(expr, ir.GenericConst):
            if expr not in self.constants:
                array = np.ascontiguousarray(expr.value.numpy()).reshape(tuple(expr.value.shape))
                self.constants[expr] = self.new(array.dtype.name, array.shape, array)
            return self.constants[expr]
        if isinstance(expr, relax.Tuple):
            return tuple(self.of(item) for item in expr.fields)
        if isinstance(expr, relax.TupleGetItem):
            whole = self.of(expr.tuple_value)
            assert isinstance(whole, tuple)
            item: _Bound = whole[expr.index]
            return item
        raise ModelRefused(
            f"the compiler cannot lower a {type(expr).__name__} of the model's graph; report this model",
            (f"unsupported expression {type(expr).__name__}",),
        )

    def tensors(self, expr: relax.Expr) -> list[_Seen]:
        """Return the values of one expression, or of all fields of a tuple."""
        found = self.of(expr)
        return [seen for seen in (found if isinstance(found, tuple) else (found,)) if isinstance(seen, _Seen)]


def read_program(module: IRModule, operators: _Operators | None = None) -> Program:
    """Return the program of `module["main"]`, with functions named by their global variables.

    `operators` names the operators that each variable's call computes. Raises ModelRefused, listing every
    operator that is left without a kernel.
    """
    main = module["main"]
    reader = _Reader(module, operators=operators or {})
    inputs = [reader.new(*_tensor(p.ty)) for p in main.params]
    reader.bound.update(zip(main.params, inputs, strict=True))
    left: list[str] = []
    for block in main.body.blocks:
        for binding in block.bindings:
            reason = _read_binding(reader, binding)
            if reason and reason not in left:
                left.append(reason)
    if left:
        raise ModelRefused("the model uses operators that have no kernel on an OpenCL device", tuple(left))
    outputs = reader.tensors(main.body.body)
    return Program(
        values=tuple(reader.values),
        inputs=tuple(seen.value for seen in inputs),
        outputs=tuple(seen.value for seen in outputs),
        output_shapes=tuple(seen.shape for seen in outputs),
        calls=tuple(reader.calls),
        views=tuple(reader.views),
    )


def _tensor(ty: object) -> tuple[str, tuple[int, ...]]:
    """Return the dtype and the static shape of a tensor type."""
    shape = getattr(ty, "shape", None)
    if shape is None or not all(isinstance(extent, tirx.IntImm) for extent in shape):
        raise ModelRefused(
            "the shape of a value inside the model depends on its data; fix input shapes with --shape",
            (f"a value of type {ty} has no fixed shape",),
        )
    return str(ty.dtype), tuple(int(extent) for extent in shape)  # type: ignore[attr-defined]


def _read_binding(reader: _Reader, binding: relax.Binding) -> str | None:
    """Bind one variable; return the reason if it cannot be lowered."""
    value, ty = binding.value, binding.var.ty
    if isinstance(binding, relax.MatchCast) or not isinstance(value, relax.Call):
        reader.bound[binding.var] = reader.of(value)
        return None
    fields = getattr(ty, "fields", None)
    outputs = [reader.new(*_tensor(one)) for one in ([ty] if fields is None else fields)]
    reader.bound[binding.var] = outputs[0] if fields is None else tuple(outputs)
    name = str(getattr(value.op, "name", value.op))
    if name == "relax.call_tir":
        _read_call_tir(reader, binding.var, value, outputs)
        return None
    called = str(getattr(value.args[0], "global_symbol", "")) if name == "relax.call_dps_packed" else ""
    if (part := model.part_named(called)) is not None:
        _read_part(reader, binding.var, value, outputs, part)
        return None
    return f"{name.removeprefix('relax.')} has no kernel"


def _read_part(
    reader: _Reader, var: relax.Var, call: relax.Call, outputs: list[_Seen], part: tuple[int, int]
) -> None:
    """Read one output of a partition that the CPU engine runs; outputs for equal inputs share one call."""
    inputs = reader.tensors(call.args[1])
    at = reader.parts.setdefault((part[0], tuple(inputs)), len(reader.calls))
    if at == len(reader.calls):
        first = HostFunctionCall(
            function=CPU_PART,
            inputs=tuple(s.value for s in inputs),
            input_shapes=tuple(s.shape for s in inputs),
            outputs=(),
            attrs={"part": part[0], "wanted": ()},
        )
        reader.calls.append(first)
    before = reader.calls[at]
    assert isinstance(before, HostFunctionCall)
    wanted = before.attrs["wanted"]
    assert isinstance(wanted, tuple)
    reader.calls[at] = replace(
        before,
        outputs=(*before.outputs, *(s.value for s in outputs)),
        attrs={"part": part[0], "wanted": (*wanted, part[1])},
        operators=(*before.operators, *reader.operators.get(var, ())),
    )


def _read_call_tir(reader: _Reader, var: relax.Var, call: relax.Call, outputs: list[_Seen]) -> None:
    function, inputs = call.args[0], reader.tensors(call.args[1])
    if len(inputs) == 1 and len(outputs) == 1 and relax.analysis.has_reshape_pattern(reader.module[function]):
        source = reader.values[inputs[0].value]
        target = reader.values[outputs[0].value]
        if source.dtype == target.dtype and source.nbytes == target.nbytes:
            reader.bound[var] = seen = _Seen(inputs[0].value, outputs[0].shape)
            reader.views += [
                ValueView(operator=operator, value=seen.value, shape=seen.shape)
                for operator in reader.operators.get(var, ())
            ]
            return
    if all(reader.values[s.value].nbytes == 0 for s in outputs):
        return  # There is nothing to compute
    reader.calls.append(
        FunctionCall(
            function=str(function.name_hint),
            inputs=tuple(s.value for s in inputs),
            outputs=tuple(s.value for s in outputs),
            operators=reader.operators.get(var, ()),
            moves=_moves(reader, function, inputs, outputs),
            keeps=tuple(inputs[place].value for place in parameters_kept(reader.module[function])),
        )
    )


def _moves(
    reader: _Reader, function: relax.GlobalVar, inputs: list[_Seen], outputs: list[_Seen]
) -> tuple[Within, ...]:
    """Return where the values of a call would lie if it were done in place."""
    move = move_of(reader.module[function])
    if move is None:
        return ()
    if move.cuts:
        return (Within(outputs[0].value, inputs[0].value, move.offsets[0]),)
    return tuple(
        Within(part.value, outputs[0].value, offset)
        for part, offset in zip(inputs, move.offsets, strict=True)
    )
