"""A kernel: its signature, its body, and what a source needs before its kernels."""

from __future__ import annotations

import re
from typing import Any

from tvm import ir, tirx
from tvm_ffi import structural_walk

from . import extremes, types
from .blocks import Blocks
from .buffers import KernelBuffer, private_uses
from .calls import Calls
from .expressions import Expressions
from .memory import KernelMemory
from .names import Names
from .statements import Statements
from .types import Unprintable

_AT = "#define AT(type, base, bytes) ((__global type*)((__global const char*)(base) + (bytes)))"
_EXTENSIONS = {"cl_khr_fp16": re.compile(r"\bhalf\d*\b"), "cl_khr_fp64": re.compile(r"\bdouble\d*\b")}


def source_of(kernels: dict[str, tirx.PrimFunc], *, contract: bool) -> str:
    """One source with all kernels, by their entry names."""
    texts = [_kernel(entry, func, contract=contract) for entry, func in kernels.items()]
    body = "\n".join(texts)
    before = [
        f"#pragma OPENCL EXTENSION {e} : enable" for e, word in _EXTENSIONS.items() if word.search(body)
    ]
    if "AT(" in body:
        before.append(_AT)
    before += extremes.definitions(body)
    return "\n".join([*before, "", body] if before else [body])


def _kernel(entry: str, func: tirx.PrimFunc, *, contract: bool) -> str:
    names = Names()
    names.fresh(entry)
    blocks = Blocks(names)
    expressions = Expressions(blocks, contract=contract)
    memory = KernelMemory(blocks, expressions)
    expressions.load = memory.load
    calls = Calls(blocks, expressions, memory)
    expressions.call = calls.term
    statements = Statements(blocks, expressions, memory, calls)
    written = _written(func)
    restrict = "restrict " if bool(func.attrs.get("tirx.noalias", False)) else ""
    arguments = []
    for pointer in func.params:
        buffer = _argument(pointer, names, pointer in written)
        memory.buffers[pointer] = buffer
        kind = types.name(types.stored(buffer.element))
        const = "" if buffer.written else "const "
        arguments.append(f"__global {const}{kind}* {restrict}{buffer.name}")
    statements.uses = private_uses(func.body)
    statements.write(func.body)
    lines = "\n".join(blocks.text())
    # Told of nothing, NVIDIA's compiler takes as many registers as groups of 256 work-items allow.
    group = f"__attribute__((reqd_work_group_size({', '.join(map(str, statements.work_group))})))"
    return f"__kernel {group}\nvoid {entry}({', '.join(arguments)}) {{\n{lines}\n}}\n"


def _argument(pointer: ir.Var, names: Names, written: bool) -> KernelBuffer:
    if not isinstance(pointer.ty, ir.PointerType):
        raise Unprintable(f"kernel argument {pointer.name} is not a pointer")
    element = types.vector(types.parsed(str(pointer.ty.element_type.dtype)), 1)
    return KernelBuffer(names.fresh(str(pointer.name).removesuffix("_ptr")), "global", element, 0, written)


def _written(func: tirx.PrimFunc) -> set[Any]:
    """The arguments that the kernel stores to."""
    behind: dict[Any, Any] = {}

    def declared(node: tirx.DeclBuffer) -> None:
        source = node.data.args[0] if isinstance(node.data, ir.Call) else node.data
        behind[node.buffer] = behind.get(source, source)

    stored: set[Any] = set()
    structural_walk(func.body, [(tirx.DeclBuffer, declared)], order="pre")
    structural_walk(func.body, [(tirx.BufferStore, lambda n: stored.add(n.buffer))], order="pre")
    return {behind.get(buffer, buffer) for buffer in stored}
