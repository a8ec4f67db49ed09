"""Turns a scheduled PrimFunc into OpenCL C with its launches and inner buffers.

The passes are those of TVM's S-TIR pipeline up to the split of host and device code, and our own that adds
long sums up in blocks. The remaining host function consists of allocations and launches only, which is what a
plan needs; TVM's later passes would pack arguments for its runtime, and assert them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import tvm
from tvm import ir, s_tir, sym, tirx
from tvm.ir import IRModule
from tvm.target import Target
from tvm_ffi import structural_map

from honed.machine.profile import DeviceProfile
from honed.runtime.compiled.model import KernelArg

from . import target
from .barriers import divergent_barriers
from .functions import extremes
from .printer.kernel import print_kernels
from .program import KernelLaunch, MemoryValue
from .statements import is_call, lookup_tables, memory_by_buffer, memory_of, nodes, parts
from .sums import stage_sums

_AXES = ("x", "y", "z")
_UNKNOWN = 2**31  # Exceeds the bound of any bounded expression
_ARITHMETIC = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Max, tirx.Min)
_KERNEL_LAUNCH = 2  # CallingConv::kDeviceKernelLaunch
target.register()
extremes.register()


class LoweringFailed(Exception):
    """A schedule of a function gives no kernel that may be run; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """OpenCL C and the data needed to run it; see `program.Function`."""

    source: str
    inner: tuple[MemoryValue, ...]
    launches: tuple[KernelLaunch, ...]


def lower_function(func: tirx.PrimFunc, name: str, target: Target, profile: DeviceProfile) -> Lowered:
    """Generate OpenCL C for a scheduled function; raises LoweringFailed where it must not be run."""
    module = IRModule({name: func.with_attr("global_symbol", name)})
    try:
        passes = [*blocks_to_loops(pairs=profile.pairs_in_turns), *_loops_to_kernels()]
        split = tvm.transform.Sequential(passes)(tirx.transform.BindTarget(target)(module))
        kernels = {str(f.attrs["global_symbol"]): f for f in split.functions.values() if _is_kernel(f)}
        _check_local_memory(kernels, profile)  # Checked before printing, which takes most of the time
        source = print_kernels(kernels, profile)
    except (ValueError, TypeError, RuntimeError) as error:
        raise LoweringFailed(last_line(error)) from error
    host = next(f for f in split.functions.values() if not _is_kernel(f))
    lowered = _read_host(host, len(func.params), kernels, source)
    _check(lowered, profile)
    return lowered


def blocks_to_loops(*, pairs: bool) -> list[tvm.transform.Pass]:
    """Return the passes that leave a function loops in place of blocks; `pairs` is as in `stage_sums`."""
    s, t = s_tir.transform, tirx.transform
    return [
        s.CanonicalizeLoop(),
        s.LowerCrossThreadReduction(),
        s.LowerInitBlock(),
        s.PlanAndUpdateBufferAllocationLocation(),
        s.ConvertBlocksToOpaque(),
        s.LiftThreadBinding(),
        s.ManifestSharedMemoryLocalStage(),
        s.CompactBufferAllocation(),
        s.UnifyThreadBinding(),
        s.LowerMatchBuffer(),
        t.StmtSimplify(),
        s.AnnotateIrregularLoop(),
        s.InjectSoftwarePipeline(),
        s.LowerOpaqueBlock(),
        stage_sums(pairs=pairs),
    ]


def _loops_to_kernels() -> list[tvm.transform.Pass]:
    s, t = s_tir.transform, tirx.transform
    return [
        t.FlattenBuffer(),
        t.NarrowDataType(32),
        s.LoopPartition(),
        t.VectorizeLoop(True),
        s.InjectVirtualThread(),
        _inner_as_parameters(),
        t.StorageRewrite(),
        s.HoistIfThenElse(),
        t.RemoveNoOp(),  # Before loops are unrolled, since TVM simplifies each store twice for it
        t.UnrollLoop(),
        s.RenormalizeSplitPattern(),
        t.StmtSimplify(),
        s.RewriteUnsafeSelect(),
        t.CommonSubexprElim(),
        t.VerifyMemory(),
        t.AnnotateEntryFunc(),
        s.ThreadSync("shared"),
        s.LowerThreadAllreduce(),
        s.MergeSharedMemoryAllocations(),
        t.SplitHostDevice(),
    ]


def _inner_as_parameters() -> tvm.transform.Pass:
    """Return a pass that turns buffers between launches into parameters at the end of a function's list.

    TVM's StorageRewrite lets buffers share memory, including a result and an operand of equal size where each
    element is made from the one in its place. Between kernels that sharing is not allowed: kernel arguments
    are `restrict`, and the plan places every buffer of a model by when it is used. StorageRewrite leaves
    parameters alone.
    """
    return tirx.transform.prim_func_pass(_as_parameters, opt_level=0, name="honed.InnerAsParameters")


def _as_parameters(func: tirx.PrimFunc, _module: ir.IRModule, _context: object) -> tirx.PrimFunc:
    launches = [one for one in nodes(func.body, tirx.AttrStmt) if one.attr_key == "thread_extent"]
    own = {one.buffer for launch in launches for one in nodes(launch, tirx.AllocBuffer)}
    inner = [
        one.buffer
        for one in nodes(func.body, tirx.AllocBuffer)
        if str(one.buffer.scope()) == "global" and one.buffer not in own
    ]
    if not inner:
        return func
    allocated = [(tirx.AllocBuffer, lambda one: one if one.buffer not in inner else tirx.Evaluate(0))]
    body = structural_map(func.body, allocated)
    return tirx.PrimFunc([*func.params, *inner], body, func.ret_type, func.attrs, func.span)


def _is_kernel(func: tirx.PrimFunc) -> bool:
    return int(func.attrs.get("calling_conv", 0)) == _KERNEL_LAUNCH


def last_line(error: BaseException) -> str:
    """Return the last line of a TVM error, at most 300 characters, without the trace in its text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__


def _read_host(
    host: tirx.PrimFunc, parameters: int, kernels: dict[str, tirx.PrimFunc], source: str
) -> Lowered:
    """Read launches out of the host function, whose inner buffers follow its `parameters`."""
    memory: dict[ir.Var, int] = {parameter: n for n, parameter in enumerate(host.params)}
    inner = tuple(_value(b.dtype, _static_shape(b.shape)) for b in host.params[parameters:])
    launches: list[KernelLaunch] = []
    for statement in _statements(host.body):
        if isinstance(statement, tirx.DeclBuffer):
            memory[statement.buffer] = memory[memory_of(statement.data)]
        elif isinstance(statement, tirx.Evaluate) and is_call(statement.value, "tirx.call_ffi_kernel"):
            launches.append(_read_launch(statement.value, memory, kernels))
        elif not (isinstance(statement, tirx.Evaluate) and isinstance(statement.value, tirx.IntImm)):
            raise LoweringFailed(f"part of the function would run on the host ({type(statement).__name__})")
    return Lowered(source=source, inner=inner, launches=tuple(launches))


def _statements(body: tirx.Stmt) -> list[tirx.Stmt]:
    if isinstance(body, tirx.SeqStmt):
        return [s for part in body.seq for s in _statements(part)]
    if isinstance(body, tirx.AttrStmt):
        return _statements(body.body)
    return [body]


def _value(dtype: object, shape: tuple[int, ...]) -> MemoryValue:
    """Return a buffer as scalar elements: TVM types it float16x4, say, where all accesses are vectors."""
    element, _, lanes = str(dtype).partition("x")
    return MemoryValue(dtype=element, shape=(*shape, int(lanes)) if lanes else shape)


def _static_shape(shape: Iterable[object]) -> tuple[int, ...]:
    extents = list(shape)
    if not all(isinstance(extent, tirx.IntImm) for extent in extents):
        raise LoweringFailed(f"an inner buffer has the symbolic shape {extents}")
    return tuple(int(extent) for extent in extents)  # type: ignore[call-overload]


def _read_launch(call: ir.Call, memory: dict[ir.Var, int], kernels: dict[str, tirx.PrimFunc]) -> KernelLaunch:
    entry = str(call.args[0].value)
    kernel = kernels[entry]
    count = len(kernel.params)
    grid, block = [1, 1, 1], [1, 1, 1]
    for tag, extent in zip(call.attrs.launch_params, call.args[1 + count :], strict=True):
        kind, _, axis = str(tag).partition(".")
        (grid if kind == "blockIdx" else block)[_AXES.index(axis)] = int(extent)
    types, nbytes = _arguments(kernel)
    return KernelLaunch(
        entry=entry,
        args=tuple(memory[memory_of(pointer)] for pointer in call.args[1 : 1 + count]),
        arg_types=types,
        grid=(grid[0], grid[1], grid[2]),
        block=(block[0], block[1], block[2]),
        # Good only for dividing a function's work among its kernels: padding and repeated work count, too.
        flops=max(1, _operations(kernel.body)) * math.prod(grid) * math.prod(block),
        bytes=nbytes,
    )


def _operations(stmt: tirx.Stmt) -> int:
    """Return the floating-point operations that a work-item executes, if guards let all of them through."""
    if isinstance(stmt, tirx.BufferStore):
        types = (str(node.ty.dtype) for node in nodes(stmt.value, _ARITHMETIC))
        return sum(int(one.partition("x")[2] or 1) for one in types if one.startswith("float"))
    if isinstance(stmt, tirx.IfThenElse):
        return _operations(stmt.then_case)
    within = sum(map(_operations, parts(stmt)))
    if isinstance(stmt, tirx.For):
        most = sym.Analyzer().const_int_bound(stmt.extent).max_value
        return most * within if most < _UNKNOWN else 1
    return within


def _arguments(kernel: tirx.PrimFunc) -> tuple[tuple[KernelArg, ...], int]:
    """Return how the kernel uses its pointer arguments, in order, and the least bytes that it moves."""
    pointer_of = memory_by_buffer(kernel.body)
    elements: dict[ir.Var, int] = {}
    for buffer, pointer in pointer_of.items():
        elements[pointer] = max(elements.get(pointer, 0), math.prod(_static_shape(buffer.shape)))
    read = {pointer_of.get(n.source, n.source) for n in nodes(kernel.body, ir.TensorLoad)}
    written = {pointer_of.get(n.buffer, n.buffer) for n in nodes(kernel.body, tirx.BufferStore)}
    tables = lookup_tables(kernel.body, pointer_of)
    results = max((elements.get(pointer, 0) for pointer in kernel.params if pointer in written), default=0)
    found, nbytes = [], 0
    for pointer in kernel.params:
        dtype = str(pointer.ty.element_type.dtype)
        access: Literal["read", "write", "readwrite"] = "read"
        if pointer in written:
            access = "readwrite" if pointer in read else "write"
        value = _value(dtype, (elements.get(pointer, 0),))
        found.append(KernelArg(dtype=value.dtype, nbytes=value.nbytes, access=access))
        nbytes += value.nbytes_of(results) if pointer in tables else value.nbytes
    return tuple(found), nbytes


def _check_local_memory(kernels: dict[str, tirx.PrimFunc], profile: DeviceProfile) -> None:
    most = profile.limits.local_mem_bytes
    for kernel in kernels.values():
        local = 0
        for node in nodes(kernel.body, tirx.AllocBuffer):
            scope = str(node.buffer.scope())
            if scope == "global":
                raise LoweringFailed(f"the kernel declares global memory of its own ({node.buffer.name})")
            if scope.startswith("shared"):
                local += _value(node.buffer.dtype, _static_shape(node.buffer.shape)).nbytes
        if local > most:
            raise LoweringFailed(f"{local} bytes of local memory are more than the device's {most}")


def _check(lowered: Lowered, profile: DeviceProfile) -> None:
    limits, rules = profile.limits, profile.rules
    if not lowered.launches:
        raise LoweringFailed("the schedule launches no kernel")
    if len(lowered.source) > rules.max_source_bytes * len(lowered.launches):
        raise LoweringFailed(
            f"the source has {len(lowered.source)} bytes, above the device profile's {rules.max_source_bytes}"
        )
    for launch in lowered.launches:
        if not limits.allows_group(launch.block):
            raise LoweringFailed(f"work-group {launch.block} is larger than the device allows")
    for found in divergent_barriers(lowered.source):
        raise LoweringFailed(found)
