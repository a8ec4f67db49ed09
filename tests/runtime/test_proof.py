from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from honed.machine.devices import Device
from honed.runtime import load
from honed.runtime.compiled.model import Probe, Proof
from honed.runtime.errors import InvalidArgument
from honed.runtime.execution import verification

from .builder import Builder, add_constant

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("reference", "actual", "error", "index"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0, (0,)),
        ([1.0, -4.0], [1.5, -4.0], 0.125, (0,)),
        ([1.0, -4.0], [1.0, -3.0], 0.25, (1,)),
        ([0.0, 0.0], [0.0, 0.25], 0.25, (1,)),
        ([NAN, INF], [NAN, INF], 0.0, (0,)),
        ([NAN, 2.0], [NAN, 1.0], 0.5, (1,)),
        ([INF, 2.0], [INF, 1.0], 0.5, (1,)),
        ([1.0, NAN], [1.0, 1.0], INF, (1,)),
        ([1.0, 1.0], [1.0, NAN], INF, (1,)),
        ([1.0, INF], [1.0, -INF], INF, (1,)),
        ([1.0, INF], [1.0, 3e38], INF, (1,)),
        ([1.0, 3e38], [1.0, INF], INF, (1,)),
        ([INF, 1.0], [NAN, 1.0], INF, (0,)),
    ],
)
def test_errors(reference: list[float], actual: list[float], error: float, index: tuple[int, ...]) -> None:
    found = verification.compare(np.array(reference, np.float32), np.array(actual, np.float32), 0.2, "y")
    assert found.error == error
    assert found.index == index
    assert found.right == (error <= 0.2)
    assert "'y'" in str(found)


def test_a_tolerance_of_zero_asks_for_equality() -> None:
    large = np.array([2**62, 1])
    assert verification.compare(large, large, 0.0).right
    assert not verification.compare(large, np.array([2**62 + 1, 1]), 0.0).right  # both are the same float64
    assert not verification.compare(np.array([True]), np.array([False]), 0.0).right
    tiny = np.array([1.0, 0.0])
    assert not verification.compare(tiny, np.array([1.0, 5e-324]), 0.0).right


def test_shapes_without_elements_or_dimensions() -> None:
    assert verification.compare(np.zeros((0, 3)), np.zeros((0, 3)), 0.0).right
    assert verification.compare(np.array(2.0), np.array(1.0), 0.0).index == ()
    assert verification.compare(np.array(2.0), np.array(1.0), 0.0).error == 0.5


def test_other_shapes_and_dtypes_cannot_be_compared() -> None:
    with pytest.raises(InvalidArgument):
        verification.compare(np.zeros(2), np.zeros((2, 1)), 0.0)
    with pytest.raises(InvalidArgument):
        verification.compare(np.zeros(2), np.zeros(2, np.float32), 0.0)


def probed(*offsets: float) -> Builder:
    """add_constant with one probe for each offset, whose expected output is that far off the truth."""
    b = add_constant()
    x = np.ones(8, np.float32)
    probes = [
        Probe(
            inputs=(b.constant(x),),
            outputs=(b.constant(x + np.arange(8, dtype=np.float32) + np.float32(1 + offset)),),
            tolerance=(1e-3,),
        )
        for offset in offsets
    ]
    b.proof = Proof(reference="by hand", probes=tuple(probes), device=None, error=())
    return b


def test_probes(device: Device, tmp_path: Path) -> None:
    with load(probed(0.0, 0.5).write(tmp_path / "m.honed", device.profile), device) as executor:
        right, wrong = verification.check_probes(executor)
    assert right.right
    assert right.error == 0
    assert right.output == "y"
    assert not wrong.right
    assert wrong.error == pytest.approx(0.5 / 9.5)
    assert wrong.expected - wrong.found == 0.5


WRITING = """__kernel void writing(__global const {kind}* a, __global {kind}* out) {{
  int i = get_global_id(0); {store} }}"""


@pytest.mark.parametrize("store", ["", "if (i % 2) out[i] = a[i];", "out[i] = out[i];", "out[i] = a[i];"])
@pytest.mark.parametrize(
    ("seen", "held", "kind"),
    [
        ("float32", "float32", "float"),
        ("float16", "float32", "float"),
        ("int32", "int32", "int"),
        ("int8", "int8", "char"),
        ("bool", "uint8", "uchar"),
    ],
)
def test_what_is_not_written_is_wrong_whatever_memory_holds(
    device: Device, tmp_path: Path, seen: str, held: str, kind: str, store: str
) -> None:
    """Answers come twice, so the run before has left the second, and fresh memory may hold zeros."""
    b = Builder()
    x, y = b.input("x", held, (8,)), b.output("y", seen, (8,), held=held)
    source, nbytes = WRITING.format(kind=kind, store=store), 8 * np.dtype(held).itemsize
    b.launch(b.kernel(source, "writing", "rw", nbytes, groups=8, block=1, kind=held), x, y)
    probes = [
        Probe(
            inputs=(b.constant(np.full(8, value, held)),),
            outputs=(b.constant(np.full(8, value, seen)),),
            tolerance=(1e-3 if "float" in seen else 0.0,),
        )
        for value in (1, 1, 0, 0)
    ]
    b.proof = Proof(reference="by hand", probes=tuple(probes), device=None, error=())
    with load(b.write(tmp_path / "m.honed", device.profile), device) as executor:
        executor.run({"x": np.ones(8, held)})
        found = [each.right for each in verification.check_probes(executor)]
    assert found == [store == "out[i] = a[i];"] * 4


def test_no_probes(device: Device, tmp_path: Path) -> None:
    with load(add_constant().write(tmp_path / "m.honed", device.profile), device) as executor:
        assert verification.check_probes(executor) == ()
