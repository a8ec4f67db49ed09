"""Recorded times undo a fusion, and make one: the model's kernels change, its answers do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx
import pytest

from honed.jobs.events import FusionChoice
from honed.machine.devices import Device
from honed.machine.peaks import survey
from honed.machine.profile import DeviceProfile
from honed.runtime.compiled import modelfile
from honed.runtime.compiled.model import CompiledModel
from honed.tuner.compiler import compile as compiling
from honed.tuner.compiler.compile import CompileResult, compile_file
from honed.tuner.compiler.fusion import FusionAlternatives, describe
from honed.tuner.lower.opencl import Lowered
from honed.tuner.lower.schedule import default_kernels
from honed.tuner.records.rows import DefaultScheduleTime
from honed.tuner.records.store import Records
from honed.tuner.setup import for_defaults, setup_for
from honed.tuner.tune.children import Extract, SearchChild
from honed.tuner.tune.extract import Extraction, extract
from honed.tuner.tune.session import SearchBudget
from tests.tuner import running
from tests.tuner.records.test_records import weights
from tests.tuner.requests import request_for
from tests.tuner.search.search_functions import profile_of

from .test_attend import attention

pytestmark = [pytest.mark.tvm, pytest.mark.opencl]

# Of rows, columns of a head and keys: what a processor of two units is expected to compute in one kernel, and
# what is expected to read its keys too often for that.
_ONE, _SEVERAL = (16, 64, 1024), (7, 64, 1024)


@dataclass(kw_only=True)
class Bench:
    """A model, its tasks, and records of their times."""

    path: Path
    records: Path
    profile: DeviceProfile
    device: Device
    found: Extraction

    @property
    def contest(self) -> FusionAlternatives:
        (only,) = self.found.contests
        return only

    def time(self, **seconds: float) -> None:
        """Record what both forms take by default, each form's functions alike."""
        with Records.open(self.records) as records:
            for form, keys in (("joined", [self.contest.fused]), ("apart", self.contest.unfused)):
                for key in keys:
                    taken = DefaultScheduleTime(seconds=seconds[form], rate=None)
                    setup = for_defaults(setup_for(self.profile.identity), self.profile.rules.family)
                    records.put_default(key, setup, taken)

    def compiled(self) -> tuple[CompileResult, CompiledModel]:
        """The model with the records' schedules, proven on the device."""
        request = request_for(self.path, self.device, profile=self.profile, records=self.records)
        result = compile_file(request, lambda _stage, _fraction, _text: None)
        return result, modelfile.read(request.output).model


@pytest.fixture
def bench(device: Device, tmp_path: Path) -> Callable[[tuple[int, int, int]], Bench]:
    def made(extents: tuple[int, int, int]) -> Bench:
        rows, width, keys = extents
        shapes: dict[str, tuple[int, ...]] = {
            "q": (1, 1, rows, width),
            "k": (1, 1, width, keys),
            "v": (1, 1, keys, width),
        }
        onnx.save(attention(shapes), path := tmp_path / "m.onnx")
        profile = profile_of("cpu", device.profile)
        profile = replace(profile, limits=replace(profile.limits, compute_units=2))
        return Bench(
            path=path,
            records=tmp_path / "records.sqlite",
            profile=profile,
            device=device,
            found=extract(path, {}, "fp32", profile),
        )

    return made


def _tasks(made: CompiledModel) -> set[str]:
    return {kernel.task for kernel in made.kernels}


@pytest.mark.parametrize(("extents", "expected"), [(_ONE, "joined"), (_SEVERAL, "apart")])
def test_recorded_times_decide_in_both_directions(
    bench: Callable[..., Bench], extents: tuple[int, int, int], expected: str
) -> None:
    one = bench(extents)
    contest = one.contest
    assert contest.expected == expected
    weights = {task.task.key: task.task.weight for task in (*one.found.tasks, *one.found.rivals)}
    assert {weights[key] for key in contest.keys(contest.expected)} == {1}
    assert weights.keys() == {contest.fused, *contest.unfused}

    Records.open(one.records).close()
    _, unmeasured = one.compiled()
    assert _tasks(unmeasured) == set(contest.keys(contest.expected))
    assert not [note for note in unmeasured.source.notes if "as measured" in note]

    measured: tuple[tuple[float, float, FusionChoice], ...] = (
        (900e-6, 100e-6, "apart"),
        (50e-6, 300e-6, "joined"),
    )
    for joined, apart, taken in measured:
        one.time(joined=joined, apart=apart)
        result, made = one.compiled()
        assert not result.fell_back
        assert _tasks(made) == set(contest.keys(taken))
        notes = tuple(note for note in made.source.notes if "as measured" in note)
        assert len(notes) == (taken != expected)
        assert notes == describe([contest], {contest.fused: joined, **dict.fromkeys(contest.unfused, apart)})
        assert made.proof is not None, "the answers were compared on the device"
        assert made.proof.device == one.device.profile.identity.name
        assert one.compiled()[1] == made, "the same records give the same model"


def planted(*given: Any, **_: Any) -> tuple[str, Lowered, list[str]]:
    """Kernels that take no exponential, as if the driver had made something else of them."""
    _, lowered, passed_over = default_kernels(*given)
    return "planted", replace(lowered, source=lowered.source.replace("exp(", "fabs(")), passed_over


def test_a_model_that_is_one_joined_kernel_falls_back_to_default_rules(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = bench(_ONE)
    Records.open(one.records).close()
    monkeypatch.setattr(compiling, "untuned_kernels", planted)
    result, made = one.compiled()
    assert "gave wrong answers" in result.fell_back
    assert _tasks(made) == set(one.contest.unfused)


@pytest.mark.slow
def test_a_session_times_both_forms_and_compiling_takes_the_one_it_found(
    bench: Callable[..., Bench], cache_dir: Path
) -> None:
    one = bench(_ONE)
    events: list[dict[str, Any]] = []
    profile = replace(one.profile, peaks=survey(None, cache_dir).profile.peaks)
    call = Extract(path=one.path, shapes={}, precision="fp32")
    with (
        SearchChild(profile, one.records.with_suffix(".npz"), 0) as search,
        running.session(one.device.spec, profile, one.records, search, events.append) as session,
    ):
        session.run(lambda: search.find_tasks(call), SearchBudget(trials=0))
        (form,) = session.table().forms
        runs = {p.task.key: p.weight for p in session.tasks}
        seconds = {p.task.key: p.best for p in session.tasks if p.best is not None}
        named = weights(session.records, "m").keys()
    contest = one.contest
    assert form.joined_us is not None
    assert form.apart_us is not None
    taken = set(contest.keys(form.taken))
    assert runs == {key: int(key in taken) for key in (contest.fused, *contest.unfused)}
    assert named == {contest.fused}, "the model has no more tasks than it runs"
    (row,) = next(e for e in events if e["event"] == "tasks")["forms"]
    assert row["taken"] == form.taken
    _, made = one.compiled()
    assert _tasks(made) == taken
    assert describe([contest], seconds) == tuple(n for n in made.source.notes if "as measured" in n)
