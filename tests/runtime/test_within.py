"""Buffers within others: what a file may declare, what steps may do with it, and that the executor obeys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.machine.devices import Device
from honed.runtime import load
from honed.runtime.compiled import plan, validate
from honed.runtime.compiled.model import CPU_PART, CompiledModel, Launch
from honed.runtime.compiled.plan import WrittenBytes, check_declared, share_bytes
from honed.runtime.errors import DeviceError, ModelFileError
from honed.runtime.execution.executor import Executor

from .builder import ADD, INCREMENT, Builder, doubled

N = 1024  # floats of a part: a multiple of every device's alignment
BYTES = 4 * N


def _both(place: str = "scratch") -> Builder:
    """y = (x + 1 and x + 2, one behind the other) + 1; where `place` is output, w is what lies so."""
    b = Builder()
    x = b.input("x", "float32", (N,))
    whole = b.output("w", "float32", (2 * N,)) if place == "output" else b.scratch("float32", (2 * N,))
    first, second = b.inside(whole, 0, (N,)), b.inside(whole, BYTES, (N,))
    y = b.output("y", "float32", (2 * N,))
    one = b.kernel(INCREMENT, "increment", "rw", BYTES, groups=N, block=1, name="one")
    both = b.kernel(INCREMENT, "increment", "rw", 2 * BYTES, groups=2 * N, block=1, name="both")
    b.launch(one, x, first)
    b.launch(one, first, second)
    b.launch(both, whole, y)
    return b


# _both: buffers 0 x, 1 the whole, 2 and 3 its parts, 4 y
def _buffer(index: int, **changes: object) -> Callable[[CompiledModel], CompiledModel]:
    def change(model: CompiledModel) -> CompiledModel:
        buffers = list(model.buffers)
        buffers[index] = replace(buffers[index], **changes)  # type: ignore[arg-type]
        return replace(model, buffers=tuple(buffers))

    return change


def _step(index: int, *buffers: int) -> Callable[[CompiledModel], CompiledModel]:
    def change(model: CompiledModel) -> CompiledModel:
        steps = list(model.steps)
        steps[index] = Launch(kernel=steps[index].kernel, buffers=buffers)  # type: ignore[union-attr]
        return replace(model, steps=tuple(steps))

    return change


BROKEN: dict[str, tuple[Callable[[CompiledModel], CompiledModel], str]] = {
    "in nothing": (_buffer(3, within=5), "buffer 3 lies within buffer 5, which does not exist"),
    "before the first": (_buffer(3, within=-1), "buffer 3 lies within buffer -1, which does not exist"),
    "in itself": (_buffer(3, within=3), "buffer 3 lies within buffer 3, which itself lies within another"),
    "in a part": (_buffer(3, within=2), "buffer 3 lies within buffer 2, which itself lies within another"),
    "in each other": (_buffer(1, within=2), "buffer 1 lies within buffer 2, which itself lies"),
    "of another place": (_buffer(3, within=4), "they are of the places scratch and output"),
    "of a constant": (
        lambda m: _buffer(1, place="constant")(_buffer(2, place="constant")(m)),
        "they are of the places constant and constant",
    ),
    "of another type": (_buffer(3, dtype="int32"), "they are int32 and float32"),
    "of no bytes": (_buffer(3, shape=(0,), nbytes=0), "lies within buffer 1 and has no bytes"),
    "before its start": (_buffer(3, offset=-128), "at offset -128, no multiple of 128"),
    "misaligned": (_buffer(3, offset=BYTES - 64), f"at offset {BYTES - 64}, no multiple of 128"),
    "beyond its end": (
        _buffer(3, offset=BYTES + 128),
        f"buffer 3 lies within buffer 1, which has {2 * BYTES} bytes, and ends at {2 * BYTES + 128}",
    ),
    "far beyond": (_buffer(3, offset=1 << 70), "and ends at"),
    "of a wrong size": (_buffer(3, nbytes=BYTES - 4), f"says {BYTES - 4} bytes"),
    "an output's tensor": (
        lambda m: replace(m, outputs=(replace(m.outputs[0], buffer=3, shape=(N,)),)),
        "which is of place scratch",
    ),
    "read and written at once": (
        _step(1, 1, 3),
        "step 1 uses buffers 1 and 3, which share bytes, and writes one of them",
    ),
    "a part missing": (_step(1, 0, 2), "step 2 reads buffer 1 before all of it was written"),
    "parts over each other": (
        _buffer(3, offset=BYTES - 128),
        "step 1 uses buffers 2 and 3, which share bytes",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_named(name: str) -> None:
    change, message = BROKEN[name]
    with pytest.raises(ModelFileError) as caught:
        validate.check(change(_both().build()))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_whole_is_read_and_not_written_with_its_parts() -> None:
    b = _both()
    b.launch(1, 1, 4)
    validate.check(b.build())
    b.launch(0, 0, 1)
    with pytest.raises(ModelFileError, match=r"steps write buffers . and ., which share bytes of buffer 1"):
        validate.check(b.build())


def test_an_output_in_parts_is_written_when_all_parts_are() -> None:
    model = _both("output").build()
    validate.check(model)
    with pytest.raises(ModelFileError, match="nothing writes all of output 'w'"):
        validate.check(replace(model, steps=model.steps[:1]))


def test_an_outputs_tensor_is_no_part() -> None:
    model = _both("output").build()
    inside = replace(model.outputs[0], buffer=3, shape=(N,))
    with pytest.raises(ModelFileError, match="output 'w' is in buffer 3, which lies within another"):
        validate.check(replace(model, outputs=(inside, model.outputs[1])))


def test_a_family_lives_as_long_as_any_of_it() -> None:
    b = _both()
    other = b.scratch("float32", (N,))
    b.buffers[other] = replace(b.buffers[other], offset=BYTES)
    b.steps.insert(1, Launch(kernel=0, buffers=(0, other)))
    with pytest.raises(ModelFileError, match="share scratch bytes and both live at step 1"):
        validate.check(b.build())


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), max_size=20), st.data())
def test_written_bytes_agree_with_a_set(spans: list[tuple[int, int]], data: st.DataObject) -> None:
    found, known = WrittenBytes(), set[int]()
    for start, length in spans:
        found.add(range(start, start + length))
        known.update(range(start, start + length))
        assert found.starts == sorted(found.starts)
        assert found.ends == sorted(found.ends)
        asked = data.draw(st.integers(0, 45)), data.draw(st.integers(1, 12))
        span = range(asked[0], asked[0] + asked[1])
        assert found.covers(span) == known.issuperset(span)


@dataclass(frozen=True, slots=True)
class _Touch:
    """A step by the buffers it reads and writes."""

    reads: tuple[int, ...]
    writes: tuple[int, ...]


@given(st.data())
def test_steps_agree_with_following_every_byte(data: st.DataObject) -> None:
    b = Builder()
    roots = [b.scratch("uint8", (128 * data.draw(st.integers(1, 5)),)) for _ in range(2)]
    indices = list(roots)
    for _ in range(data.draw(st.integers(0, 5))):
        root = data.draw(st.sampled_from(roots))
        units = b.buffers[root].nbytes // 128
        start = data.draw(st.integers(0, units - 1))
        indices.append(b.inside(root, 128 * start, (128 * data.draw(st.integers(1, units - start)),)))
    touches = []
    for _ in range(data.draw(st.integers(1, 5))):
        some = data.draw(st.lists(st.sampled_from(indices), min_size=1, max_size=3, unique=True))
        count = data.draw(st.integers(0, len(some)))
        touches.append(_Touch(tuple(some[:count]), tuple(some[count:])))
    for touch in touches:
        args = "r" * len(touch.reads) + "w" * len(touch.writes)
        kernel = b.kernel("", "touch", args, 0, groups=1, block=1, kind="uint8")
        b.launch(kernel, *touch.reads, *touch.writes)
    model = b.build()
    check_declared(model.buffers, 128)
    if _possible(model, touches):
        plan.check(model)
    else:
        with pytest.raises(ModelFileError, match=r"share bytes|before all|before anything"):
            plan.check(model)


def _possible(model: CompiledModel, touches: Sequence[_Touch]) -> bool:
    def lies(index: int) -> set[tuple[int, int]]:
        buffer = model.buffers[index]
        root, start = (index, 0) if buffer.within is None else (buffer.within, buffer.offset)
        return {(root, start + n) for n in range(buffer.nbytes)}

    written = set[tuple[int, int]]()
    for touch in touches:
        used = [*touch.reads, *touch.writes]
        for one in touch.writes:
            if any(other != one and lies(one) & lies(other) for other in used):
                return False
        if any(not lies(one) <= written for one in touch.reads):
            return False
        written = written.union(*map(lies, touch.writes))
    writers = {one for touch in touches for one in touch.writes}
    return not any(share_bytes(model.buffers, i, j) for i in writers for j in writers if i < j)


@pytest.fixture(params=["scratch", "output"])
def executor(request: pytest.FixtureRequest, either: Device, tmp_path: Path) -> Iterator[Executor]:
    file = _both(request.param).write(tmp_path / "m.honed", either.profile)
    with load(file, either) as loaded:
        yield loaded


def test_parts_are_written_where_the_whole_is_read(executor: Executor) -> None:
    for k in range(3):
        x = np.random.default_rng(k).standard_normal(N, np.float32)
        whole = np.concatenate([x + np.float32(1), x + np.float32(1) + np.float32(1)])
        for _ in range(2):
            out = executor.run({"x": x})
            np.testing.assert_array_equal(out["y"], whole + np.float32(1))
            if "w" in out:
                np.testing.assert_array_equal(out["w"], whole)
        assert executor.profile({"x": x}).launches == 3


def test_parts_of_inputs_are_read_where_they_lie(either: Device, tmp_path: Path) -> None:
    b = Builder()
    x = b.input("x", "float32", (3 * N,))
    y = b.output("y", "float32", (N,))
    add = b.kernel(ADD, "add", "rrw", BYTES, groups=N, block=1)
    b.launch(add, b.inside(x, 0, (N,)), b.inside(x, 2 * BYTES, (N,)), y)
    with load(b.write(tmp_path / "m.honed", either.profile), either) as loaded:
        given = np.random.default_rng(0).standard_normal(3 * N, np.float32)
        np.testing.assert_array_equal(loaded.run({"x": given})["y"], given[:N] + given[2 * N :])


def test_parts_in_the_cpu_engine_read_and_write_within_buffers(either: Device, tmp_path: Path) -> None:
    b = Builder()
    x = b.input("x", "float32", (2 * N,))
    whole, y = b.scratch("float32", (2 * N,)), b.output("y", "float32", (2 * N,))
    increment = b.kernel(INCREMENT, "increment", "rw", BYTES, groups=N, block=1, name="one")
    both = b.kernel(INCREMENT, "increment", "rw", 2 * BYTES, groups=2 * N, block=1, name="both")
    first, second = b.inside(whole, 0, (N,)), b.inside(whole, BYTES, (N,))
    b.call(CPU_PART, (b.inside(x, BYTES, (N,)),), (second,), part=0, wanted=(0,))
    b.launch(increment, second, first)
    b.launch(both, whole, y)
    b.split = doubled(b, N)
    with load(b.write(tmp_path / "m.honed", either.profile), either) as loaded:
        given = np.random.default_rng(0).permutation(2 * N).astype(np.float32)
        last = 2 * given[N:]
        np.testing.assert_array_equal(loaded.run({"x": given})["y"], np.concatenate([last + 2, last + 1]))


def test_a_device_that_aligns_wider_refuses_parts(device: Device, tmp_path: Path) -> None:
    b = Builder()
    x, y = b.input("x", "float32", (2 * N,)), b.output("y", "float32", (N,))
    b.launch(b.kernel(INCREMENT, "increment", "rw", BYTES, groups=N, block=1), b.inside(x, BYTES, (N,)), y)
    file = b.write(tmp_path / "m.honed", device.profile)
    wide = replace(device.profile.limits, base_align_bytes=2 * BYTES)
    with pytest.raises(DeviceError, match="needs buffers aligned"):
        load(file, replace(device, profile=replace(device.profile, limits=wide)))
