"""Turns Relax operators into fused PrimFuncs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import ir, relax, s_tir, te, tirx, topi
from tvm.ir import IRModule

from honed.machine.profile import DeviceProfile
from honed.tuner.lower.statements import is_call, reduced_axes, with_fields
from honed.tuner.lower.target import alignment_of, target_for

from . import extremes, sorting, updates, winograd
from .dots import multiply_bytes
from .fusing import Joins, Traced, fuse, fuse_without_moves, join_functions, never
from .layouts import block_channels, block_lanes
from .packed import multiply_packed
from .views import annotate_views, bindings, read_by_strides

Legalise = Callable[[relax.BlockBuilder, relax.Call], relax.Expr]
# Most operators in a function. Those of models have 20 at most (LightGlue); TVM's code for a hundred slices
# that are concatenated, and sliced and concatenated again, takes minutes to compile.
MOST_FUSED = 64
_VECTOR = 4  # Output channels of a vector on Malis
# TVM's pattern of operators that move elements, which are not fused with a convolution before them
_INJECTIVE = 2
# Operators that unrolled recurrences have by the hundred.
_REPEATED = [
    f"relax.{name}"
    for name in ("add", "matmul", "multiply", "reshape", "sigmoid", "strided_slice", "subtract", "tanh")
]
# Reductions, which TVM does not fuse with the conversion of their operands.
_REDUCTIONS = [
    f"relax.{name}" for name in ("nn.layer_norm", "nn.log_softmax", "nn.softmax", "mean", "prod", "sum")
]
_SATURATED = 3.55
# Coefficients of erf(x) / x in x^2 for singles in [-4, 4], highest power first (Eigen 3.4,
# generic_fast_erf_float).
_NUMERATOR = (
    -2.72614225801306e-10, 2.77068142495902e-08, -2.10102402082508e-06, -5.69250639462346e-05,
    -7.34990630326855e-04, -2.95459980854025e-03, -1.60960333262415e-02,
)  # fmt: skip
_DENOMINATOR = (
    -1.45660718464996e-05, -2.13374055278905e-04, -1.68282697438203e-03, -7.37332916720468e-03,
    -1.42647390514189e-02,
)  # fmt: skip


def legalize(module: IRModule, profile: DeviceProfile, joins: Joins = never) -> tuple[IRModule, Traced]:
    """Return `main` as calls of fused PrimFuncs, of at most MOST_FUSED operators each, and of partitions.

    A chain of functions that `joins` accepts becomes one function. Constants are not folded here: TVM's
    FoldConstant compiles every operator that it folds, and the frontend has already folded them. The trace
    names what each call computes by the variables of the given module.
    """
    steps = relax.transform
    with target_for(profile), tvm.transform.PassContext(config={"relax.FuseOps.max_depth": MOST_FUSED}):
        simplified = tvm.transform.Sequential(
            [steps.DecomposeOpsForInference(), steps.CanonicalizeBindings(), steps.EliminateCommonSubexpr()]
        )
        simple = multiply_packed(multiply_bytes(simplified(module), profile), profile)
        strided, written = read_by_strides(simple)
        laid_out, origin = block_channels(strided, block_lanes(profile))
        rules = {"relax.erf": _erf} | extremes.rules()
        rules |= dict.fromkeys(
            ("relax.nn.conv1d", "relax.nn.conv2d"), partial(_legalise_convolution, profile)
        )
        rules["relax.right_shift"] = _shift
        rules["relax.memory.view"] = _bits
        rules["relax.topk"] = sorting.best_places
        bound = {b.var: b.value for b in bindings(laid_out["main"])}
        rules["relax.where"] = partial(updates.where, updates.find_updated(laid_out), bound)
        rules |= dict.fromkeys(_REDUCTIONS, partial(_of_halves, bound))
        rules["relax.mean"] = partial(_mean, bound)
        rules = dict.fromkeys(_REPEATED, partial(_as_before, {})) | rules
        legalised = tvm.transform.Sequential(
            [steps.LegalizeOps(rules), steps.DeadCodeElimination(), steps.AnnotateTIROpPattern()]
        )
        plain = annotate_views(legalised(laid_out))
        grouped, computed = (
            fuse_without_moves(plain, laid_out, alignment_of(profile))
            if profile.family.parts_of_buffers
            else fuse(plain)
        )
        functions = steps.DeadCodeElimination()(steps.FuseTIR()(grouped))
        single = _assign_single_elements(functions)
        chained, parts = join_functions(single, joins, rows=profile.family.rows)
        joined, pairs = updates.update_together(chained)
    traced: dict[relax.Var, tuple[relax.Var, ...]] = {}
    for var, made in computed.items():
        moved = ((written.get(o), o) for o in (origin.get(m, m) for m in made))
        traced[var] = tuple(one for pair in moved for one in pair if one is not None)
    return joined, traced | {
        var: tuple(o for made in all_ for o in traced[made]) for var, all_ in {**parts, **pairs}.items()
    }


def _as_before(
    before: dict[object, tuple[relax.Call, list[int]]], builder: relax.BlockBuilder, call: relax.Call
) -> relax.Expr:
    """Return TVM's legalisation; calls that differ only in their tensors share a function.

    Making one takes 0.4 ms. `before` has the first such call, and which of its operator's arguments it takes.
    """
    given = list(call.args)

    def place(value: relax.Expr) -> int | None:
        return next((n for n, one in enumerate(given) if one.same_as(value)), None)

    # Numbers become part of the function, tensors do not.
    sorts = (one.ty if isinstance(one, relax.Var) or _is_constant(one) else one for one in given)
    key = (
        str(call.op.name),
        tvm_ffi.structural_hash(call.attrs),
        *(tvm_ffi.structural_hash(one) for one in sorts),
        *map(place, given),
    )
    if key in before:
        made, places = before[key]
        return relax.call_tir(made.args[0], [given[n] for n in places], made.ty_args[0])
    plain: Legalise = call.op.get_attr("FLegalize")
    made = plain(builder, call)
    if is_call(made, "relax.call_tir"):
        found = [n for n in map(place, made.args[1]) if n is not None]
        if len(found) == len(made.args[1]):
            before[key] = made, found
    return made


def _is_constant(expr: relax.Expr) -> bool:
    return isinstance(expr, ir.GenericConst) and len(expr.ty.shape) > 0


def _erf(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Return erf as a rational function of basic operations, except for doubles.

    Drivers' own erf is slow, and TVM does not vectorise calls of it.
    """
    argument = call.args[0]
    wide = str(argument.ty.dtype) == "float64"
    return builder.call_te(topi.erf if wide else _rational_erf, argument, primfunc_name_hint="erf")


def _rational_erf(x: te.Tensor) -> te.Tensor:
    """Return erf of halves or singles, computed in singles: halves cannot hold the coefficients.

    The absolute error is at most 5.2e-7 (measured over [-6, 6]). The result is exactly -1 or 1 beyond
    _SATURATED, where the quotient would soon round to numbers outside [-1, 1]; NaN for NaN.
    """

    def value(*indices: tirx.Var) -> tirx.PrimExpr:
        given = x(*indices).astype("float32")
        square = given * given
        quotient = given * _polynomial(square, _NUMERATOR) / _polynomial(square, _DENOMINATOR)
        one = tirx.const(1.0, "float32")
        # Comparisons with NaN are false, so that NaN yields the quotient, which is NaN too.
        above = tirx.Select(given >= _SATURATED, one, quotient)
        return tirx.Select(given <= -_SATURATED, -one, above).astype(x.dtype)

    return te.compute(x.shape, value, name="erf", tag=topi.tag.ELEMWISE)


def _shift(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Return a right shift; shifts that grow along one axis, as of packed numbers, are computed, not read."""
    packed, shifts = call.args
    table = shifts.value.numpy() if isinstance(shifts, ir.GenericConst) else np.zeros(())
    axis = next((n for n, extent in enumerate(table.shape) if extent > 1), None)
    steps = np.unique(np.diff(table.reshape(-1).astype(np.int64)))
    if (
        axis is None
        or table.ndim != len(packed.ty.shape)
        or table.size != table.shape[axis]
        or len(steps) != 1
    ):
        return ir.Op.get("relax.right_shift").get_attr("FLegalize")(builder, call)

    def unpack(x: te.Tensor) -> te.Tensor:
        shape = [*x.shape[:axis], table.size, *x.shape[axis + 1 :]]

        def value(*indices: tirx.Var) -> tirx.PrimExpr:
            at = [tirx.IntImm("int64", 0) if n == axis else one for n, one in enumerate(indices)]
            shift = indices[axis] * int(steps[0]) + int(table.reshape(-1)[0])
            return x(*at) >> shift.astype(x.dtype)

        return te.compute(shape, value, name="right_shift", tag=topi.tag.BROADCAST)

    return builder.call_te(unpack, packed, primfunc_name_hint="unpack")


def _bits(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Return the bits of each element as another type of as many bits."""
    dtype = str(call.ty.dtype)

    def bits(x: te.Tensor) -> te.Tensor:
        return te.compute(
            x.shape, lambda *at: tirx.reinterpret(dtype, x(*at)), name="bits", tag=topi.tag.ELEMWISE
        )

    return builder.call_te(bits, call.args[0], primfunc_name_hint="bits")


def _mean(
    makers: Mapping[relax.Var, relax.Expr], builder: relax.BlockBuilder, call: relax.Call
) -> relax.Expr:
    """Return a mean. A mean of squares computes the squares itself, and converts their operands.

    TVM does not fuse a mean's operand into it: squares and converted values would be stored.
    """
    square: Any = makers.get(call.args[0])
    if not is_call(square, "relax.multiply") or not square.args[0].same_as(square.args[1]):
        return _of_halves(makers, builder, call)
    given, dtype = square.args[0], str(call.ty.dtype)
    cast: Any = makers.get(given)
    axes, keep = [int(axis) for axis in call.attrs.axis], bool(call.attrs.keepdims)

    def mean(x: te.Tensor) -> te.Tensor:
        wide = topi.cast(x, dtype)
        terms = math.prod(int(x.shape[axis]) for axis in axes)
        return topi.divide(topi.sum(topi.multiply(wide, wide), axes, keep), terms)

    source = cast.args[0] if is_call(cast, "relax.astype") else given
    return builder.call_te(mean, source, primfunc_name_hint="mean_of_squares")


def _of_halves(
    makers: Mapping[relax.Var, relax.Expr], builder: relax.BlockBuilder, call: relax.Call
) -> relax.Expr:
    """Return TVM's legalisation, where a reduction converts singles that were halves itself.

    Otherwise the operator that makes the halves would store them as singles, which doubles the memory
    traffic.
    """
    cast: Any = makers.get(call.args[0])
    if is_call(cast, "relax.astype") and str(cast.args[0].ty.dtype) == "float16":
        builder = _Converting(builder, cast, call.args[0])
    return call.op.get_attr("FLegalize")(builder, call)


class _Converting:
    """A builder whose functions convert a cast's operand where they would read its `result`."""

    def __init__(self, builder: relax.BlockBuilder, cast: relax.Call, result: relax.Expr) -> None:
        self._builder = builder
        self._cast = cast
        self._result = result

    def call_te(self, func: Callable[..., te.Tensor], *args: Any, **attrs: Any) -> relax.Call:
        """Return the call of a function that computes what `func` does."""
        converts = [isinstance(one, relax.Expr) and one.same_as(self._result) for one in args]
        dtype = str(self._result.ty.dtype)

        def convert(*given: Any, **others: Any) -> te.Tensor:
            own = [topi.cast(one, dtype) if mine else one for one, mine in zip(given, converts, strict=True)]
            return func(*own, **others)

        read = [self._cast.args[0] if mine else one for one, mine in zip(args, converts, strict=True)]
        named = {"primfunc_name_hint": func.__name__} | attrs
        return self._builder.call_te(convert, *read, **named)


def _polynomial(x: tirx.PrimExpr, coefficients: tuple[float, ...]) -> tirx.PrimExpr:
    """Evaluate a polynomial by Horner's rule, the highest power first."""
    found = tirx.const(coefficients[0], "float32")
    for coefficient in coefficients[1:]:
        found = found * x + tirx.const(coefficient, "float32")
    return found


def _assign_single_elements(module: IRModule) -> IRModule:
    """Return the module, with plain assignments for blocks that reduce a single element.

    Such a reduction is left where a kernel, a pooling window or a reduced axis has one element. Schedules
    drop its loops, and with them everything that distinguishes it from an elementwise block. Inlining the
    operators that follow then inlines them into its initial value too, and they are applied twice (TVM 0.27,
    ReverseComputeInline).
    """
    for name, func in list(module.functions.items()):
        if isinstance(func, tirx.PrimFunc):
            body = tvm_ffi.structural_map(func.body, [(s_tir.SBlock, _without_init)])
            if not body.same_as(func.body):
                module.update_func(name, func.with_body(body))
    return module


def _without_init(block: s_tir.SBlock) -> s_tir.SBlock:
    one = (isinstance(v.dom.extent, tirx.IntImm) and int(v.dom.extent) == 1 for v in reduced_axes(block))
    if block.init is None or not all(one):
        return block
    axes = [tirx.IterVar(v.dom, v.var, tirx.IterVar.DataPar, v.thread_tag) for v in block.iter_vars]
    return with_fields(block, iter_vars=axes, body=_fold(block.init, block.body), init=None)


def _fold(init: tirx.Stmt, update: tirx.Stmt) -> tirx.Stmt:
    """Return the update applied to the initial value, as one assignment where both are assignments."""
    if not (isinstance(init, tirx.BufferStore) and isinstance(update, tirx.BufferStore)):
        return tirx.SeqStmt([init, update])

    def initial(load: ir.TensorLoad) -> ir.Expr:
        return init.value if load.source.same_as(init.buffer) else load

    value = tvm_ffi.structural_map(update.value, [(ir.TensorLoad, initial)])
    return tirx.BufferStore(update.buffer, value, list(update.indices))


def _legalise_convolution(
    profile: DeviceProfile, builder: relax.BlockBuilder, call: relax.Call
) -> relax.Expr:
    """Return the legalised convolution: special cases of the device, else TVM's legalisation."""
    what = winograd.match_winograd(call) if profile.family.winograd else None
    if what is not None:
        return winograd.convolve(builder, call, what)
    plain: Legalise = call.op.get_attr("FLegalize")
    added = _outputs_added(profile, call)
    if not added:
        return plain(builder, call)
    image, weights = call.args
    given = weights.value.numpy()
    more = relax.const(np.pad(given, [(0, added), *[(0, 0)] * (given.ndim - 1)]))
    rounded = builder.normalize(relax.Call(call.op, [image, more], call.attrs))
    made = builder.emit(plain(builder, rounded))
    ends = [int(extent) for extent in call.ty.shape]
    return builder.call_te(
        topi.strided_slice,
        made,
        begin=[0] * len(ends),
        end=ends,
        primfunc_name_hint="without_rounding",
        primfunc_attrs={"op_pattern": _INJECTIVE},
    )


def _outputs_added(profile: DeviceProfile, call: relax.Call) -> int:
    """Return how many output channels with weights of 0 a convolution gets, so that its outputs fill vectors.

    It gets some only if it has a window, constant weights, and more outputs than one vector holds, and if
    half a vector does not divide their number. With fewer outputs the additions would take longer than
    vectors save.
    """
    attrs, weights = call.attrs, call.args[1]
    plain = attrs.kernel_layout in ("OIW", "OIHW") and attrs.out_layout in ("NCW", "NCHW")
    if attrs.groups != 1 or not plain or not isinstance(weights, ir.GenericConst):
        return 0
    outputs, _, *window = (int(extent) for extent in weights.ty.shape)
    vector = _VECTOR if profile.family.vectors_of_channels else block_lanes(profile)
    if math.prod(window) == 1 or outputs <= vector or outputs % max(1, vector // 2) == 0:
        return 0
    if outputs % 2 and not profile.family.vectors_of_channels and int(call.ty.shape[-1]) % (vector // 2) == 0:
        return 0  # Schedules for odd outputs put vectors along rows
    return -outputs % vector
