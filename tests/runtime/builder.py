"""Builds compiled models by hand, with kernels written in OpenCL C, for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper

from honed.machine.profile import DeviceIdentity, DeviceLimits, DeviceProfile, ScheduleRules
from honed.runtime.compiled import modelfile
from honed.runtime.compiled.model import (
    Attr,
    Buffer,
    CompiledModel,
    Copy,
    CpuPartition,
    HostCall,
    Kernel,
    KernelArg,
    Launch,
    PartitionTable,
    PartitionTensor,
    Place,
    Preparation,
    Proof,
    SourceModel,
    Step,
    Tensor,
)
from honed.runtime.dtypes import dtype

ALIGN = 4096  # bytes, of every scratch buffer and constant
PROFILE = DeviceProfile(
    identity=DeviceIdentity(
        platform="none", vendor="none", name="paper", driver_version="1", kernel_driver=""
    ),
    limits=DeviceLimits(
        compute_units=4,
        max_work_group_size=256,
        max_work_item_sizes=(256, 256, 256),
        local_mem_bytes=32768,
        global_mem_bytes=1 << 30,
        max_alloc_bytes=1 << 28,
        base_align_bytes=128,
        fp16=False,
        fp64=False,
        int8_dots=False,
        host_unified=True,
    ),
    rules=ScheduleRules(
        family="gpu",
        max_threads=256,
        local_memory=True,
        max_vector_bytes=16,
        max_unroll=64,
        max_source_bytes=1 << 16,
        max_queued_launches=0,
    ),
    peaks=None,
)
ADD = """__kernel void add(__global const float* a, __global const float* b, __global float* out) {
  int i = get_global_id(0); out[i] = a[i] + b[i]; }"""
INCREMENT = """__kernel void increment(__global const float* a, __global float* out) {
  int i = get_global_id(0); out[i] = a[i] + 1.0f; }"""


def only_in_groups_of_two(source: str) -> str:
    """The kernel of `source`, which a driver refuses to launch in work-groups of another size."""
    return source.replace("__kernel", "__kernel __attribute__((reqd_work_group_size(2, 1, 1)))")


@dataclass
class Builder:
    """Collects the parts of a model; each method gives the index of what it added."""

    buffers: list[Buffer] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    sha256: str = "0" * 64  # of the source
    kernels: list[Kernel] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    prepare: list[Preparation] = field(default_factory=list)
    constants: dict[int, NDArray[Any]] = field(default_factory=dict)
    proof: Proof | None = None
    split: PartitionTable | None = None
    arena_bytes: int = 0
    prepared_bytes: int = 0
    constant_bytes: int = 0

    def input(self, name: str, kind: str, shape: tuple[int, ...], held: str | None = None) -> int:
        index = self._buffer(held or kind, shape, "input", 0)
        self.inputs.append(Tensor(name=name, dtype=kind, shape=shape, buffer=index))
        return index

    def output(self, name: str, kind: str, shape: tuple[int, ...], held: str | None = None) -> int:
        index = self._buffer(held or kind, shape, "output", 0)
        self.outputs.append(Tensor(name=name, dtype=kind, shape=shape, buffer=index))
        return index

    def scratch(self, kind: str, shape: tuple[int, ...]) -> int:
        index = self._buffer(kind, shape, "scratch", self.arena_bytes)
        self.arena_bytes += -(-self.buffers[index].nbytes // ALIGN) * ALIGN
        return index

    def inside(self, whole: int, offset: int, shape: tuple[int, ...]) -> int:
        """Part of another buffer, from `offset` (bytes) on."""
        outer = self.buffers[whole]
        index = self._buffer(outer.dtype, shape, outer.place, offset)
        self.buffers[index] = replace(self.buffers[index], within=whole)
        return index

    def prepared(self, kind: str, shape: tuple[int, ...]) -> int:
        index = self._buffer(kind, shape, "prepared", self.prepared_bytes)
        self.prepared_bytes += -(-self.buffers[index].nbytes // ALIGN) * ALIGN
        return index

    def constant(self, value: NDArray[Any]) -> int:
        index = self._buffer(value.dtype.name, value.shape, "constant", self.constant_bytes)
        self.constant_bytes += -(-value.nbytes // ALIGN) * ALIGN
        self.constants[index] = value
        return index

    def kernel(
        self,
        source: str,
        entry: str,
        args: str,
        nbytes: int,
        *,
        groups: int,
        block: int,
        kind: str = "float32",
        name: str | None = None,
        flops: int = 0,
        moved: int = 0,
    ) -> int:
        """`args` says the access of each argument: r, w or x (both); each holds `nbytes`."""
        if source not in self.sources:
            self.sources.append(source)
        access = {"r": "read", "w": "write", "x": "readwrite"}
        self.kernels.append(
            Kernel(
                name=name or entry,
                source=self.sources.index(source),
                entry=entry,
                args=tuple(KernelArg(dtype=kind, nbytes=nbytes, access=access[a]) for a in args),  # type: ignore[arg-type]
                grid=(groups, 1, 1),
                block=(block, 1, 1),
                flops=flops,
                bytes=moved,
                task="task",
                schedule="by hand",
            )
        )
        return len(self.kernels) - 1

    def launch(self, kernel: int, *buffers: int) -> None:
        self.steps.append(Launch(kernel=kernel, buffers=buffers))

    def copy(self, source: int, target: int) -> None:
        self.steps.append(Copy(source=source, target=target))

    def call(self, function: str, inputs: tuple[int, ...], outputs: tuple[int, ...], **attrs: Attr) -> None:
        self.steps.append(HostCall(function=function, inputs=inputs, outputs=outputs, attrs=attrs))

    def build(self, profile: DeviceProfile = PROFILE) -> CompiledModel:
        return CompiledModel(
            source=SourceModel(
                sha256=self.sha256, filename="m.onnx", producer="tests", opset=17, precision="fp32", notes=()
            ),
            compiler={"tests": "1"},
            device=profile,
            inputs=tuple(self.inputs),
            outputs=tuple(self.outputs),
            buffers=tuple(self.buffers),
            arena_bytes=self.arena_bytes,
            constant_bytes=self.constant_bytes,
            sources=tuple(self.sources),
            kernels=tuple(self.kernels),
            steps=tuple(self.steps),
            proof=self.proof,
            prepare=tuple(self.prepare),
            prepared_bytes=self.prepared_bytes,
            split=self.split,
        )

    def write(self, path: Path, profile: DeviceProfile = PROFILE) -> Path:
        modelfile.write(path, self.build(profile), self.constants)
        return path

    def _buffer(self, kind: str, shape: tuple[int, ...], place: Place, offset: int) -> int:
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype(kind).itemsize
        self.buffers.append(Buffer(dtype=kind, shape=shape, place=place, offset=offset, nbytes=nbytes))
        return len(self.buffers) - 1


def doubled(b: Builder, n: int) -> PartitionTable:
    """One part, number 0, for a call between steps: it doubles n singles."""
    here = helper.make_tensor_value_info("in", TensorProto.FLOAT, [n])
    there = helper.make_tensor_value_info("out", TensorProto.FLOAT, [n])
    graph = helper.make_graph([helper.make_node("Add", ["in", "in"], ["out"])], "part", [here], [there])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    part = CpuPartition(
        onnx=b.constant(np.frombuffer(model.SerializeToString(), np.uint8)),
        inputs=(PartitionTensor(name="in", dtype="float32", shape=(n,)),),
        outputs=(PartitionTensor(name="out", dtype="float32", shape=(n,)),),
        nodes=1,
        flops=n,
        why=("it is slow",),
    )
    outputs = tuple(PartitionTensor(name=t.name, dtype=t.dtype, shape=t.shape) for t in b.outputs)
    return PartitionTable(parts=(part,), tail=(), outputs=outputs, nodes=1, flops=n)


def add_constant(n: int = 8) -> Builder:
    """y = (x + c) + 1 with c = 0, 1, 2, ...: one input, one constant, one scratch buffer, one output."""
    b = Builder()
    x, c = b.input("x", "float32", (n,)), b.constant(np.arange(n, dtype=np.float32))
    s, y = b.scratch("float32", (n,)), b.output("y", "float32", (n,))
    b.launch(b.kernel(ADD, "add", "rrw", 4 * n, groups=n, block=1, flops=n, moved=12 * n), x, c, s)
    b.launch(b.kernel(INCREMENT, "increment", "rw", 4 * n, groups=n, block=1, flops=n, moved=8 * n), s, y)
    return b


def add_prepared(n: int = 8) -> Builder:
    """y = (x + p) + p with p = c + 1 prepared and c = 0, 1, 2, ..."""
    b = Builder()
    x, c = b.input("x", "float32", (n,)), b.constant(np.arange(n, dtype=np.float32))
    p, s, y = b.prepared("float32", (n,)), b.scratch("float32", (n,)), b.output("y", "float32", (n,))
    add = b.kernel(ADD, "add", "rrw", 4 * n, groups=n, block=1, flops=n, moved=12 * n)
    increment = b.kernel(INCREMENT, "increment", "rw", 4 * n, groups=n, block=1, flops=n, moved=8 * n)
    b.prepare.append(Launch(kernel=increment, buffers=(c, p)))
    b.launch(add, x, p, s)
    b.launch(add, s, p, y)
    return b


def chain(launches: int, n: int = 8) -> Builder:
    """y = x + launches, one launch for each 1."""
    b = Builder()
    current = b.input("x", "float32", (n,))
    kernel = b.kernel(INCREMENT, "increment", "rw", 4 * n, groups=1, block=n, flops=n, moved=8 * n)
    halves = (b.scratch("float32", (n,)), b.scratch("float32", (n,)))
    for i in range(launches - 1):
        b.launch(kernel, current, halves[i % 2])
        current = halves[i % 2]
    b.launch(kernel, current, b.output("y", "float32", (n,)))
    return b
