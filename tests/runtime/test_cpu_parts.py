"""Models that run in parts: the rules of their files, and their process."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import onnx
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from honed.machine.devices import Device
from honed.runtime.compiled import modelfile, validate
from honed.runtime.compiled.model import (
    CPU_PART,
    CompiledModel,
    CpuPartition,
    HostCall,
    PartitionTable,
    PartitionTensor,
    Probe,
    Proof,
    SkippedSizes,
)
from honed.runtime.engines import PartLimits
from honed.runtime.errors import DeviceError, InvalidArgument, ModelFileError, ModelRefused
from honed.runtime.execution import cpuparts
from honed.runtime.execution.cpuparts import CpuPartitionProcess, PartitionsResult, SpecialisedSizes
from honed.runtime.execution.executor import Executor
from honed.runtime.execution.verification import check_behind, check_probe
from tests.processes import running_children

from .builder import ADD, INCREMENT, Builder

X = np.arange(8, dtype=np.float32)
KINDS = {"float32": TensorProto.FLOAT, "float64": TensorProto.DOUBLE}


def part(nodes: list[onnx.NodeProto], inputs: dict[str, str], outputs: dict[str, Any], **more: Any) -> bytes:
    """An ONNX file; inputs have 8 elements, outputs what is said."""
    graph = helper.make_graph(
        nodes,
        "part",
        [helper.make_tensor_value_info(name, KINDS[kind], [8]) for name, kind in inputs.items()],
        [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in outputs.items()],
        **more,
    )
    opsets = [helper.make_opsetid("", 17)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString())


def doubling() -> bytes:
    """In doubles, which the device's buffers are not."""
    return part(
        [helper.make_node("Add", ["s", "s"], ["t"])],
        {"s": "float64"},
        {"t": (TensorProto.DOUBLE, [8])},
    )


def choosing() -> bytes:
    """The elements of x where y is above 10."""
    return part(
        [
            helper.make_node("Greater", ["y", "ten"], ["large"]),
            helper.make_node("Compress", ["x", "large"], ["kept"]),
        ],
        {"y": "float32", "x": "float32"},
        {"kept": (TensorProto.FLOAT, ["n"])},
        initializer=[numpy_helper.from_array(np.float32(10), "ten")],
    )


def tensors(**kinds: tuple[str, int]) -> tuple[PartitionTensor, ...]:
    return tuple(
        PartitionTensor(name=name, dtype=kind, shape=(size,)) for name, (kind, size) in kinds.items()
    )


def model(first: bytes | None = None, last: bytes | None = None) -> Builder:
    """y = 2 (x + c) + 1 with the doubling in a part, and what of x is kept by y in the last part."""
    b = Builder()
    x, c = b.input("x", "float32", (8,)), b.constant(X)
    s, t, y = b.scratch("float32", (8,)), b.scratch("float32", (8,)), b.output("y", "float32", (8,))
    files = [np.frombuffer(data, np.uint8) for data in (first or doubling(), last or choosing())]
    parts = (
        CpuPartition(
            onnx=b.constant(files[0]),
            inputs=tensors(s=("float64", 8)),
            outputs=tensors(t=("float64", 8)),
            nodes=1,
            flops=8,
            why=("it is slow",),
        ),
        CpuPartition(
            onnx=b.constant(files[1]),
            inputs=tensors(y=("float32", 8), x=("float32", 8)),
            outputs=tensors(kept=("float32", -1)),
            nodes=2,
            flops=16,
            why=("its shape depends on the data",),
        ),
    )
    b.launch(b.kernel(ADD, "add", "rrw", 32, groups=8, block=1), x, c, s)
    b.call(CPU_PART, (s,), (t,), part=0, wanted=(0,))
    b.launch(b.kernel(INCREMENT, "increment", "rw", 32, groups=8, block=1), t, y)
    b.split = PartitionTable(
        parts=parts, tail=(1,), outputs=tensors(kept=("float32", -1), y=("float32", 8)), nodes=2, flops=16
    )
    return b


def loaded(b: Builder, device: Device, folder: Path, process: CpuPartitionProcess | None = None) -> Executor:
    parts = CpuPartitionProcess if process is None else lambda: process
    return Executor(modelfile.read(b.write(folder / "m.honed", device.profile)), device, part_process=parts)


def children() -> list[psutil.Process]:
    return running_children("honed.cpu.parts", recursive=True)


@pytest.fixture
def executor(device: Device, tmp_path: Path) -> Iterator[Executor]:
    with loaded(model(), device, tmp_path) as opened:
        yield opened


@pytest.mark.opencl
def test_parts_run_in_their_order(either: Device, tmp_path: Path) -> None:
    with loaded(model(), either, tmp_path) as executor:
        for shift in (0, 3, -20, 1):
            x = X + shift
            out = executor.run({"x": x})
            y = 2 * (x + X) + 1
            assert list(out) == ["kept", "y"]
            np.testing.assert_array_equal(out["y"], y, strict=True)
            np.testing.assert_array_equal(out["kept"], x[y > 10], strict=True)
            assert all(value.flags.owndata and value.flags.writeable for value in out.values())


@pytest.mark.opencl
def test_the_process_is_there_while_a_model_needs_it(device: Device, tmp_path: Path) -> None:
    before = len(children())
    process = CpuPartitionProcess()
    with loaded(model(), device, tmp_path, process) as one:
        with loaded(model(), device, tmp_path, process) as other:
            assert len(children()) == before + 1
            other.run({"x": X})
        one.run({"x": X})
    assert len(children()) == before


@pytest.mark.opencl
def test_the_time_of_parts_is_in_the_profile(executor: Executor) -> None:
    rows = {row.name: row for row in executor.profile({"x": X}).kernels}
    assert rows["(cpu_part)"].count == 2


@pytest.mark.opencl
def test_a_process_that_ends_is_told_of(device: Device, tmp_path: Path) -> None:
    process = CpuPartitionProcess(PartLimits(threads=1))
    with loaded(model(), device, tmp_path, process) as executor:
        [child] = [c for c in children() if c.cmdline()[-2] == "1"]
        os.kill(child.pid, signal.SIGKILL)
        with pytest.raises(DeviceError, match="ended by signal SIGKILL"):
            executor.run({"x": X})


@pytest.mark.opencl
def test_a_part_that_gives_another_shape_than_it_says_is_an_error(device: Device, tmp_path: Path) -> None:
    odd = part(
        [helper.make_node("Concat", ["s", "s"], ["t"], axis=0)],
        {"s": "float64"},
        {"t": (TensorProto.DOUBLE, ["n"])},
    )
    with (
        loaded(model(first=odd), device, tmp_path) as executor,
        pytest.raises(InvalidArgument, match="instead of"),
    ):
        executor.run({"x": X})


@pytest.mark.opencl
@pytest.mark.parametrize(
    "data",
    [
        b"no ONNX file",
        *(pytest.param(d, marks=pytest.mark.slow) for d in (b"\0", random.Random(0).randbytes(200))),
    ],
)
def test_a_part_that_is_no_model_is_refused(device: Device, tmp_path: Path, data: bytes) -> None:
    with pytest.raises(ModelRefused):
        loaded(model(last=data), device, tmp_path)
    assert not children()


@pytest.mark.opencl
def test_a_part_reads_no_files(device: Device, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(np.float32(10).tobytes())
    outside = onnx.ModelProto.FromString(choosing())
    tensor = outside.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=str(secret).lstrip("/"))
    with pytest.raises(ModelRefused):
        loaded(model(last=outside.SerializeToString()), device, tmp_path)


@pytest.mark.opencl
def test_the_last_part_is_proven_on_the_references_values(device: Device, tmp_path: Path) -> None:
    def probed(kept: Any) -> bool:
        b = model()
        y = 2 * (X + X) + 1
        values = [b.constant(value) for value in (X, y, kept)]
        probe = Probe(inputs=(values[0],), outputs=(values[1],), tolerance=(0.0,), behind=(values[2],))
        b.proof = Proof(reference="r", probes=(probe,), device=None, error=())
        with loaded(b, device, tmp_path) as executor:
            assert all(found.right for found in check_probe(executor, probe))
            return all(found.right for found in check_behind(executor, probe))

    assert probed(X[3:])
    assert not probed(X[2:])
    assert not probed(X[3:] + 1)


Change = Callable[[CompiledModel], CompiledModel]


def split(**changes: Any) -> Change:
    return lambda m: replace(m, split=replace(m.split, **changes))  # type: ignore[type-var]


def of_part(index: int, **changes: Any) -> Change:
    def change(m: CompiledModel) -> CompiledModel:
        assert m.split is not None
        parts = list(m.split.parts)
        parts[index] = replace(parts[index], **changes)
        return replace(m, split=replace(m.split, parts=tuple(parts)))

    return change


def call(**changes: Any) -> Change:
    def change(m: CompiledModel) -> CompiledModel:
        steps = list(m.steps)
        assert isinstance(steps[1], HostCall)
        steps[1] = replace(steps[1], **changes)
        return replace(m, steps=tuple(steps))

    return change


WRONG: dict[str, Change] = {
    "no parts": split(parts=()),
    "too many parts": lambda m: split(parts=(m.split.parts[0],) * 17)(m),  # type: ignore[union-attr]
    "no such last part": split(tail=(2,)),
    "a last part before the first": split(tail=(-1,)),
    "the last part between steps": split(tail=(0,)),
    "no outputs": split(outputs=()),
    "an output twice": split(outputs=tensors(y=("float32", 8)) * 2),
    "an output that nothing gives": split(outputs=tensors(z=("float32", 8))),
    "an output of another shape": split(outputs=tensors(y=("float32", 9))),
    "an output of another type": split(outputs=tensors(kept=("float64", -1))),
    "less than nothing compiled": split(nodes=-1),
    "no such buffer": of_part(0, onnx=99),
    "a buffer that is no constant": of_part(0, onnx=0),
    "a constant that is no file": of_part(0, onnx=1),
    "negative work": of_part(0, flops=-1),
    "reasons without end": of_part(0, why=("x",) * 65),
    "an input without a name": of_part(0, inputs=tensors(**{"": ("float64", 8)})),
    "an input of a type nobody knows": of_part(0, inputs=tensors(s=("complex64", 8))),
    "an input of open size": of_part(1, inputs=tensors(y=("float32", -1))),
    "an input that nothing gives": of_part(1, inputs=tensors(z=("float32", 8))),
    "an open output in between": of_part(0, outputs=tensors(t=("float64", -1))),
    "an output of less than no size": of_part(1, outputs=tensors(kept=("float32", -2))),
    "an output as large as no memory": of_part(1, outputs=tensors(kept=("float32", 1 << 50))),
    "two that give the same": of_part(1, outputs=tensors(kept=("float32", -1), y=("float32", 8))),
    "a part without outputs": of_part(0, outputs=()),
    "a call of no part": call(attrs={}),
    "a call of a part that is no number": call(attrs={"part": True, "wanted": (0,)}),
    "a call of a part that is not there": call(attrs={"part": 7, "wanted": (0,)}),
    "a call of the last part": call(attrs={"part": 1, "wanted": (0,)}),
    "a call that wants nothing": call(attrs={"part": 0, "wanted": ()}, outputs=()),
    "a call that wants what is not there": call(attrs={"part": 0, "wanted": (1,)}),
    "a call with more to say": call(attrs={"part": 0, "wanted": (0,), "more": 1}),
    "a call with too few inputs": call(inputs=()),
    "a call that writes an input": call(outputs=(0,)),
    "a call of integers": of_part(0, inputs=tensors(s=("int32", 8))),
    "a call of another shape": of_part(0, inputs=tensors(s=("float64", 9))),
    "a part that runs twice": split(tail=(1, 1)),
    "a sized part between steps": of_part(0, sized=True),
    "rows of a part that has no sizes": of_part(1, by_rows=True),
    "sizes of a part that has none": split(left_out=(SkippedSizes(part=1, sizes=(), why=""),)),
    "sizes of no part": split(left_out=(SkippedSizes(part=9, sizes=(), why=""),)),
    "a call without parts": lambda m: replace(m, split=None),
}


def test_the_model_keeps_the_rules(tmp_path: Path) -> None:
    written = model().write(tmp_path / "m.honed")
    with modelfile.read(written) as file:
        assert file.model == model().build()


@pytest.mark.parametrize("name", WRONG)
def test_what_breaks_a_rule_is_refused(name: str) -> None:
    with pytest.raises(ModelFileError):
        validate.check(WRONG[name](model().build()))


@given(data=st.data())
def test_whatever_parts_say_is_kept_or_refused(data: st.DataObject) -> None:
    def some(strategy: Any, value: Any) -> Any:
        return data.draw(st.one_of(st.just(value), strategy))

    numbers = st.integers(-2, 6)
    shapes = st.lists(st.integers(-2, 9), max_size=3).map(tuple)
    kinds = st.sampled_from(["float32", "float64", "int64", "bool", "text"])
    built = model().build()
    assert built.split is not None

    def drawn(found: tuple[PartitionTensor, ...]) -> tuple[PartitionTensor, ...]:
        changed = [
            PartitionTensor(
                name=some(st.text(max_size=2), t.name),
                dtype=some(kinds, t.dtype),
                shape=some(shapes, t.shape),
            )
            for t in found
        ]
        return tuple(some(st.lists(st.sampled_from(changed), max_size=3), changed))

    parts = tuple(
        replace(
            p,
            onnx=some(numbers, p.onnx),
            inputs=drawn(p.inputs),
            outputs=drawn(p.outputs),
            sized=some(st.booleans(), p.sized),
            by_rows=some(st.booleans(), p.by_rows),
        )
        for p in built.split.parts
    )
    sizes = st.lists(numbers, max_size=2).map(tuple)
    out = st.builds(SkippedSizes, part=numbers, sizes=sizes, why=st.just("it is slower"))
    changed = PartitionTable(
        parts=parts,
        tail=some(st.lists(numbers, max_size=2).map(tuple), built.split.tail),
        outputs=drawn(built.split.outputs),
        nodes=some(numbers, 2),
        flops=some(numbers, 2),
        left_out=some(st.lists(out, max_size=2).map(tuple), ()),
    )
    attrs = {"part": some(numbers, 0), "wanted": some(st.lists(numbers, max_size=2).map(tuple), (0,))}
    with_both = call(attrs=attrs)(replace(built, split=changed))
    try:
        validate.check(with_both)
    except ModelFileError:
        return
    assert {t.name for t in with_both.model_outputs}
    assert with_both.split is not None
    assert attrs["part"] not in with_both.split.tail
    for each in with_both.split.left_out:
        assert each.part in with_both.split.tail
        assert with_both.split.parts[each.part].sized


@pytest.mark.opencl
def test_without_the_cpu_engine_it_is_told_what_to_install(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpuparts, "has_cpu_engine", lambda: False)
    with pytest.raises(DeviceError, match="install honed-cpu"):
        loaded(model(), device, tmp_path)


def keeping(kept: str) -> bytes:
    """All of x doubled, and the elements of x above 0, of any size."""
    nodes = [
        helper.make_node("Add", ["x", "x"], ["all"]),
        helper.make_node("Greater", ["x", "none"], ["above"]),
        helper.make_node("Compress", ["x", "above"], [kept]),
    ]
    graph = helper.make_graph(
        nodes,
        "part",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"])],
        [
            helper.make_tensor_value_info("all", TensorProto.FLOAT, ["n"]),
            helper.make_tensor_value_info(kept, TensorProto.FLOAT, ["m"]),
        ],
        initializer=[numpy_helper.from_array(np.float32(0), "none")],
    )
    opsets = [helper.make_opsetid("", 17)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString())


def test_tensors_of_any_size_are_handed_over_and_back() -> None:
    """Small ones over the socket, others through memory that grows; what has no room there by the socket."""
    sizes = (8, 100_000, 1, 400_000, 20_000)
    parts = tuple(
        CpuPartition(
            onnx=0,
            inputs=tensors(x=("float32", size)),
            outputs=tensors(all=("float32", size), kept=("float32", -1)),
            nodes=3,
            flops=3,
            why=(),
        )
        for size in sizes
    )
    made = PartitionTable(parts=parts, tail=(), outputs=(), nodes=0, flops=0)
    data = np.frombuffer(keeping("kept"), np.uint8)
    file = cast(
        modelfile.ModelFile, SimpleNamespace(model=SimpleNamespace(split=made), constant=lambda _: data)
    )
    with CpuPartitionProcess().open(file) as opened:
        for share in (0.0, 0.5, 1.0):
            earlier = []
            for number, size in enumerate(sizes):
                x = np.random.default_rng(number).uniform(share - 1, share, size).astype(np.float32)
                found = opened.run(number, [x])
                earlier.append((found, x))
            for found, x in earlier:
                np.testing.assert_array_equal(found[0], x + x, strict=True)
                np.testing.assert_array_equal(found[1], x[x > 0], strict=True)


def one(given: str, made: str, op: str, *more: str) -> tuple[CpuPartition, bytes]:
    """A part of one node, on and to as many elements as there are."""
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]) for name in (given, made)]
    none = numpy_helper.from_array(np.float32(0), "none")
    nodes = [helper.make_node(op, [given, *more], [made])]
    if op == "Compress":
        nodes = [
            helper.make_node("Greater", [given, "none"], ["above"]),
            helper.make_node("Compress", [given, "above"], [made]),
        ]
    graph = helper.make_graph(nodes, "part", ends[:1], ends[1:], initializer=[none])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    described = CpuPartition(
        onnx=0,
        inputs=tensors(**{given: ("float32", -1)}),
        outputs=tensors(**{made: ("float32", -1)}),
        nodes=1,
        flops=1,
        why=(),
        sized=True,
    )
    return described, bytes(model.SerializeToString())


def test_parts_run_on_until_one_meets_sizes_to_stop_at() -> None:
    """What the rest needs, or is wanted, comes back; large values as small ones."""
    made = [one("x", "kept", "Compress"), one("kept", "less", "Neg"), one("less", "root", "Neg")]
    files = iter([data for _, data in made])
    split_ = PartitionTable(
        parts=tuple(part for part, _ in made), tail=(0, 1, 2), outputs=(), nodes=0, flops=0
    )
    file = cast(
        modelfile.ModelFile,
        SimpleNamespace(
            model=SimpleNamespace(split=split_),
            constant=lambda _: np.frombuffer(next(files), np.uint8),
        ),
    )
    stops = [
        SpecialisedSizes(part=1, sizes=(5,), least=0),
        SpecialisedSizes(part=2, sizes=(90_000,), least=80_000),
    ]
    with CpuPartitionProcess().open(file) as opened:
        for above, done, back in (
            (0, 3, {"root"}),
            (5, 1, {"kept"}),
            (6, 3, {"root"}),
            (79_999, 3, {"root"}),
            (85_000, 2, {"less"}),
            (90_000, 2, {"less"}),
            (90_001, 3, {"root"}),
        ):
            x = np.ones(100_000, np.float32)
            x[above:] = -1
            ran, values = opened.run_chain([0, 1, 2], {"x": x}, ["root"], stops)
            assert (ran.done, set(values)) == (done, back)
            assert ran.sizes == ((100_000,), (above,), (above,))[: done + 1]
            [value] = values.values()
            np.testing.assert_array_equal(value, x[:above] if "less" not in values else -x[:above])


def test_an_answer_that_cannot_be_one_is_an_error_of_the_process() -> None:
    part_, _ = one("x", "y", "Neg")
    for ran in (
        PartitionsResult(done=2, ns=1, sizes=((1,), (1,)), outputs=()),
        PartitionsResult(done=-1, ns=1, sizes=(), outputs=()),
        PartitionsResult(done=1, ns=1, sizes=(), outputs=()),
        PartitionsResult(done=1, ns=1, sizes=((1, 2),), outputs=()),
    ):
        with pytest.raises(DeviceError, match="what it should not"):
            cpuparts._check_answer([part_], ran)
