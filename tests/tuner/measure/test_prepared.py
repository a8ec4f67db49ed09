"""Candidates that pack constants first: checked whole, timed without it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from honed.machine.devices import Device
from honed.machine.opencl import cl, context
from honed.machine.profile import DeviceProfile
from honed.protocol.strict import from_plain, to_plain
from honed.runtime.compiled.model import KernelArg
from honed.tuner.lower.program import KernelLaunch, MemoryValue
from honed.tuner.measure import timing
from honed.tuner.measure.candidate import (
    Candidate,
    MeasureLimits,
    Workload,
    inference_launches,
    prepared_launches,
)
from honed.tuner.measure.checks import Launched
from honed.tuner.measure.measurer import Measurer
from honed.tuner.records.rows import Outcome
from tests.tuner.liars import honest

N = 4096
PACK = """__kernel void pack(__global const float* w, __global float* p) {
  int i = get_global_id(0); p[i] = w[i] + w[i]; }
"""
MULTIPLY = """__kernel void multiply(__global const float* x, __global const float* p, __global float* y) {
  int i = get_global_id(0); y[i] = x[i] * p[i]; }
"""
SPOIL = MULTIPLY.replace("* p[i];", "* p[i]; ((__global float*)p)[i] += 1.0f;")


@pytest.fixture(scope="module")
def measurer(device: Device, profile: DeviceProfile) -> Iterator[Measurer]:
    """One child for all candidates, whose verdicts are looked at and not their times."""
    limits = MeasureLimits(run_seconds=10.0, timing_seconds=0.02, warm_seconds=0.0)
    with Measurer(device.spec, profile, limits) as one:
        yield one


@pytest.fixture
def workload(tmp_path: Path) -> Workload:
    """y = x * (w + w), w being the same in all inferences."""
    rng = np.random.default_rng(1)
    sets = []
    for _ in range(3):
        x, w = rng.standard_normal((2, N)).astype(np.float32)
        sets.append(((x, w), (x * (w + w),)))
    return replace(honest.kept(tmp_path / "packed", sets, flops=2 * N), constants=(1,))


def candidate(multiply: str = MULTIPLY, name: str = "packed") -> Candidate:
    """Packs w into an inner buffer, then multiplies."""
    value = MemoryValue(dtype="float32", shape=(N,))

    def launch(entry: str, *args: int) -> KernelLaunch:
        access = ["read"] * (len(args) - 1) + ["write"]
        return KernelLaunch(
            entry=entry,
            args=args,
            arg_types=tuple(
                KernelArg(dtype="float32", nbytes=value.nbytes, access=a)  # type: ignore[arg-type]
                for a in access
            ),
            grid=(N // 64, 1, 1),
            block=(64, 1, 1),
            flops=N,
            bytes=0,
        )

    launches = (launch("pack", 1, 3), launch("multiply", 0, 3, 2))
    return Candidate(id=name, source=PACK + multiply, inner=(value,), launches=launches)


def test_what_depends_on_constants_only_is_prepared(workload: Workload) -> None:
    one = candidate()
    assert prepared_launches(workload, one) == {0}
    assert [launch.entry for launch in inference_launches(workload, one)] == ["multiply"]
    assert prepared_launches(replace(workload, constants=()), one) == set()
    assert prepared_launches(replace(workload, constants=(0,)), one) == set()
    assert prepared_launches(replace(workload, constants=(0, 1)), one) == {0}, "outputs are never prepared"


def test_the_constants_reach_the_child(workload: Workload) -> None:
    assert from_plain(Workload, to_plain(workload), where="") == workload


@pytest.mark.opencl
def test_a_run_is_what_an_inference_launches(device: Device, workload: Workload) -> None:
    queue = cl.CommandQueue(context(device.cl))
    buffers = [cl.Buffer(context(device.cl), cl.mem_flags.READ_WRITE, 4 * N) for _ in range(4)]
    one = candidate()
    program = timing.build(context(device.cl), one.source)
    runnable = timing.BoundCandidate(queue, one, program, buffers, prepared_launches(workload, one))
    assert (len(runnable), runnable.prepares) == (1, True)

    def read(_event: object) -> Launched:
        return Launched(0, 0, 1)

    assert len(runnable.prepare(read).launches) == 1
    assert len(runnable.run(read, 3).launches) == 3
    whole = timing.BoundCandidate(queue, one, program, buffers)
    assert (len(whole), whole.prepares) == (2, False)


@pytest.mark.opencl
def test_a_candidate_that_packs_is_right(measurer: Measurer, workload: Workload) -> None:
    for constants in ((), (1,)):
        measurer.load(replace(workload, constants=constants))
        verdict = measurer.measure(candidate(name=f"packed {constants}"))
        assert verdict.outcome is Outcome.RIGHT, verdict.reason


@pytest.mark.opencl
@pytest.mark.parametrize(
    ("multiply", "why"),
    [(SPOIL, "differs"), (MULTIPLY.replace("p[i];", "p[i ^ 1];"), "differs")],
    ids=["changes what is packed", "reads it wrongly"],
)
def test_a_candidate_that_is_wrong_in_a_later_run(
    measurer: Measurer, workload: Workload, multiply: str, why: str
) -> None:
    measurer.load(workload)
    verdict = measurer.measure(candidate(multiply, name=multiply))
    assert verdict.outcome is Outcome.WRONG
    assert why in verdict.reason


@pytest.mark.opencl
def test_packing_outside_of_the_constants_is_refused(measurer: Measurer, workload: Workload) -> None:
    measurer.load(workload)
    one = candidate()
    wild = replace(one, id="wild", source=one.source.replace("p[i] = w[i]", "p[i + 1] = w[i]"))
    verdict = measurer.measure(wild)
    assert verdict.outcome in (Outcome.OUT_OF_BOUNDS, Outcome.WRONG)
