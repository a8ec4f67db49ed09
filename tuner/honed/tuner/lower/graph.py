"""Reads the `main` of a legalised Relax module into a program.

Values are keyed by the Relax variable object: variable names are not unique.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from tvm import ir, relax, tirx
from tvm.ir import IRModule

from honed.protocol.errors import ModelRefused
from honed.runtime.compiled import model
from honed.runtime.compiled.model import CPU_PART

from .functions.apart import move_of
from .program import Call, FunctionCall, HostFunctionCall, MemoryValue, Program, ValueView, Within


@dataclass(frozen=True, slots=True)
class Seen:
    """A value as the graph sees it at one point: the memory, and the shape it is seen with."""

    value: int
    shape: tuple[int, ...]


Operators = Mapping[relax.Var, tuple[str, ...]]
Bound = Seen | tuple["Bound", ...]


@dataclass
class _Reader:
    module: IRModule
    values: list[MemoryValue] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    bound: dict[relax.Var, Bound] = field(default_factory=dict)
    constants: dict[object, Seen] = field(default_factory=dict)
    reshapes: dict[str, bool] = field(default_factory=dict)
    operators: Operators = field(default_factory=dict)
    views: list[ValueView] = field(default_factory=list)
    parts: dict[tuple[int, tuple[Seen, ...]], int] = field(default_factory=dict)  # numbers of their calls

    def new(self, dtype: str, shape: tuple[int, ...], constant: np.ndarray | None = None) -> Seen:
        self.values.append(MemoryValue(dtype=dtype, shape=shape, constant=constant))
        return Seen(len(self.values) - 1, shape)

    def of(self, expr: relax.Expr) -> Bound:
        """The value of an expression that computes nothing."""
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
            item: Bound = whole[expr.index]
            return item
        raise ModelRefused(
            f"the compiler cannot lower a {type(expr).__name__} of the model's graph; report this model",
            (f"unsupported expression {type(expr).__name__}",),
        )

    def tensors(self, exprs: list[relax.Expr]) -> list[Seen]:
        found = [self.of(e) for e in exprs]
        return [seen for seen in found if isinstance(seen, Seen)]


def read_program(module: IRModule, operators: Operators | None = None) -> Program:
    """The program of `module["main"]`, whose functions are named by their global variables.

    `operators` names what each variable's call computes.
    Raises ModelRefused, with every operator that is left without a kernel.
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
    result = reader.of(main.body.body)
    outputs = [s for s in (result if isinstance(result, tuple) else (result,)) if isinstance(s, Seen)]
    return Program(
        values=tuple(reader.values),
        inputs=tuple(seen.value for seen in inputs),
        outputs=tuple(seen.value for seen in outputs),
        output_shapes=tuple(seen.shape for seen in outputs),
        calls=tuple(reader.calls),
        views=tuple(reader.views),
    )


def _tensor(ty: object) -> tuple[str, tuple[int, ...]]:
    """Dtype and static shape of a tensor type."""
    shape = getattr(ty, "shape", None)
    if shape is None or not all(isinstance(extent, tirx.IntImm) for extent in shape):
        raise ModelRefused(
            "the shape of a value inside the model depends on its data; fix input shapes with --shape",
            (f"a value of type {ty} has no fixed shape",),
        )
    return str(ty.dtype), tuple(int(extent) for extent in shape)  # type: ignore[attr-defined]


def _types(ty: object) -> list[tuple[str, tuple[int, ...]]]:
    fields = getattr(ty, "fields", None)
    return [_tensor(f) for f in fields] if fields is not None else [_tensor(ty)]


def _read_binding(reader: _Reader, binding: relax.Binding) -> str | None:
    """Bind one variable; returns why it cannot be lowered, if so."""
    if isinstance(binding, relax.MatchCast):
        reader.bound[binding.var] = reader.of(binding.value)
        return None
    value = binding.value
    if not isinstance(value, relax.Call):
        reader.bound[binding.var] = reader.of(value)
        return None
    outputs = [reader.new(dtype, shape) for dtype, shape in _types(binding.var.ty)]
    is_tuple = getattr(binding.var.ty, "fields", None) is not None
    reader.bound[binding.var] = tuple(outputs) if is_tuple else outputs[0]
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
    reader: _Reader, var: relax.Var, call: relax.Call, outputs: list[Seen], part: tuple[int, int]
) -> None:
    """One output of a part that the CPU engine runs; outputs for the same inputs are of one call."""
    arguments = call.args[1]
    inputs = reader.tensors(list(arguments.fields) if isinstance(arguments, relax.Tuple) else [arguments])
    key = (part[0], tuple(inputs))
    made = HostFunctionCall(
        function=CPU_PART,
        inputs=tuple(s.value for s in inputs),
        input_shapes=tuple(s.shape for s in inputs),
        outputs=tuple(s.value for s in outputs),
        attrs={"part": part[0], "wanted": (part[1],)},
        operators=reader.operators.get(var, ()),
    )
    at = reader.parts.get(key)
    if at is None:
        reader.parts[key] = len(reader.calls)
        reader.calls.append(made)
        return
    before = reader.calls[at]
    assert isinstance(before, HostFunctionCall)
    wanted = before.attrs["wanted"]
    assert isinstance(wanted, tuple)
    reader.calls[at] = replace(
        before,
        outputs=(*before.outputs, *made.outputs),
        attrs={"part": part[0], "wanted": (*wanted, part[1])},
        operators=(*before.operators, *made.operators),
    )


def _read_call_tir(reader: _Reader, var: relax.Var, call: relax.Call, outputs: list[Seen]) -> None:
    function = call.args[0]
    arguments = call.args[1]
    inputs = reader.tensors(list(arguments.fields) if isinstance(arguments, relax.Tuple) else [arguments])
    if len(inputs) == 1 and len(outputs) == 1 and _is_reshape(reader, function):
        source = reader.values[inputs[0].value]
        target = reader.values[outputs[0].value]
        if source.dtype == target.dtype and source.nbytes == target.nbytes:
            reader.bound[var] = Seen(inputs[0].value, outputs[0].shape)
            for operator in reader.operators.get(var, ()):
                reader.views.append(
                    ValueView(operator=operator, value=inputs[0].value, shape=outputs[0].shape)
                )
            return
    if all(reader.values[s.value].nbytes == 0 for s in outputs):
        return  # nothing to compute
    reader.calls.append(
        FunctionCall(
            function=str(function.name_hint),
            inputs=tuple(s.value for s in inputs),
            outputs=tuple(s.value for s in outputs),
            operators=reader.operators.get(var, ()),
            moves=_moves(reader, function, inputs, outputs),
        )
    )


def _moves(
    reader: _Reader, function: relax.GlobalVar, inputs: list[Seen], outputs: list[Seen]
) -> tuple[Within, ...]:
    """Where the values of a call would lie, were it in place."""
    move = move_of(reader.module[function])
    if move is None:
        return ()
    if move.cuts:
        return (Within(outputs[0].value, inputs[0].value, move.offsets[0]),)
    return tuple(
        Within(part.value, outputs[0].value, offset)
        for part, offset in zip(inputs, move.offsets, strict=True)
    )


def _is_reshape(reader: _Reader, function: relax.GlobalVar) -> bool:
    name = str(function.name_hint)
    if name not in reader.reshapes:
        reader.reshapes[name] = bool(relax.analysis.has_reshape_pattern(reader.module[function]))
    return reader.reshapes[name]
