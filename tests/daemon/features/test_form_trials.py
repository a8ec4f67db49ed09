"""A form beside ONNX Runtime: compared at fill levels, timed with its state in place, refused with reason."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from honed.daemon.features.decoders import Decoders
from honed.daemon.features.decoding import DecoderBucket, DecoderModel, decoder_of
from honed.daemon.features.form_trials import FormTrial
from honed.daemon.serving.selection import EngineChoice
from honed.daemon.serving.trial import PairedTrialResult
from honed.daemon.settings.schema import Limits, VariantSettings
from honed.daemon.store.store import EngineTimes
from honed.daemon.store.versions import GAIN
from honed.daemon.worker.calls import InferenceResult, RunStep, SetSequence, StepResult, pack_layout
from honed.protocol.errors import InvalidArgument
from honed.runtime.engines import MIN_PAIRS, PairedTiming
from tests.daemon.features.test_decoders import OPTIMUM

WORDS = 90


@dataclass
class Engine:
    """A loader that answers steps: each takes `ms`, and its answer is off by `off` behind `wrong` rows."""

    ms: float
    off: float = 0.0
    wrong: int = 1 << 30
    most: int = 1 << 30  # rows that it takes
    set: list[int] = field(default_factory=list)
    steps: list[tuple[int, int]] = field(default_factory=list)
    of: list[tuple[str, int]] = field(default_factory=list)  # which model and which sequence each step was of
    faster: float = 1.0  # times as long as the others the model "faster" takes
    pid: int = 0
    engine: Any = field(default_factory=lambda: SimpleNamespace(on_processor=False, fingerprint="x"))

    answers: PairedTrialResult | None = None
    compared: list[tuple[str, str]] = field(default_factory=list)

    async def compare(self, old: str, new: str, allowance: float, *, most: int) -> PairedTrialResult:
        assert (most, self.answers is not None) == (MIN_PAIRS, True)
        self.compared.append((old, new))
        return cast(PairedTrialResult, self.answers)

    async def step(self, call: Any) -> Any:
        if isinstance(call, SetSequence):
            self.set.append(call.rows)
            return None
        assert isinstance(call, RunStep)
        assert call.last_token == ("logits",)
        self.steps.append((call.rows, call.count))
        self.of.append((call.run.key, call.sequence))
        after = call.rows + call.count
        if after > self.most:
            raise InvalidArgument("it has no such place")
        logits = np.linspace(-1, 1, WORDS) + (self.off if after > self.wrong else 0)
        ns = int(self.ms * 1e6 * (self.faster if call.run.key == "faster" else 1.0))
        result = InferenceResult(
            raw=(logits.astype(np.float16).tobytes(),),
            layout=pack_layout([(1, 1, WORDS)], [-1]),
            input_ns=0,
            infer_ns=ns,
            output_ns=0,
        )
        return StepResult(result=result, rows=after, nbytes=0)


def trial(form: DecoderBucket, device: Engine, key: str, numbers: tuple[int, int, int]) -> FormTrial:
    known = decoder_of(OPTIMUM, {})
    assert isinstance(known, DecoderModel)
    entry = SimpleNamespace(name="m", manifest=SimpleNamespace(source_key="source", owner=None))
    return FormTrial(
        decoder=known,
        form=form,
        entry=cast(Any, entry),
        device=cast(Any, device),
        key=key,
        max_answer_bytes=1 << 30,
        numbers=numbers,
    )


def choice(form: DecoderBucket, device: Engine, cpu: Engine) -> EngineChoice:
    return asyncio.run(trial(form, device, "form", (1, 2, 3)).beside_file(cast(Any, cpu)))


def test_a_token_is_timed_at_three_fill_levels_with_the_state_in_place() -> None:
    device, cpu = Engine(1.3), Engine(12.7)
    found = choice(DecoderBucket(1, 256), device, cpu)
    assert found.engine == "gpu"
    assert found.times is not None
    assert (round(found.times.gpu_ms, 3), round(found.times.cpu_ms, 3)) == (1.3, 12.7)
    assert "as steps of 1 token after 0, 96 and 192 others" in found.why
    assert device.set == cpu.set == [128, 254, 96, 192]
    # Right with an empty, a half and a full room, then steps that go on from the three levels.
    assert device.steps[:7] == [(0, 1), (1, 1), (2, 1), (128, 1), (129, 1), (254, 1), (255, 1)]
    assert {rows for rows, _ in device.steps[7:10]} == {0, 96, 192}
    assert {rows for rows, _ in device.steps[10:13]} == {1, 97, 193}


def test_a_prompt_is_two_runs_of_a_form_and_one_of_onnx_runtime() -> None:
    device, cpu = Engine(4.0), Engine(6.0)
    found = choice(DecoderBucket(64, 256), device, cpu)
    assert found.engine == "cpu"  # two runs take 8 ms
    assert found.times is not None
    assert (found.times.gpu_ms, found.times.cpu_ms) == pytest.approx((8.0, 6.0))
    assert {count for _, count in cpu.steps[-3:]} == {128}


@pytest.mark.parametrize("rows", [0, 2, 129, 255])
def test_a_form_that_is_wrong_anywhere_does_not_serve(rows: int) -> None:
    found = choice(DecoderBucket(1, 256), Engine(1.0, off=0.5, wrong=rows), Engine(9.0))
    assert (found.engine, found.times) == ("cpu", None)
    assert "the compiled form differs by 0.5 of the largest value from ONNX Runtime" in found.why


def test_what_an_engine_refuses_is_why() -> None:
    found = choice(DecoderBucket(64, 256), Engine(1.0), Engine(9.0, most=200))
    assert (found.engine, found.times) == ("cpu", None)
    assert found.why == "the compiled form cannot run steps: it has no such place"


@pytest.mark.parametrize(("form", "steps"), [(DecoderBucket(1, 256), 1), (DecoderBucket(64, 256), 2)])
@pytest.mark.parametrize(("faster", "holds"), [(0.5, True), (0.99, False)])
def test_versions_of_a_form_take_turns_at_steps_each_with_sequences_of_its_own(
    form: DecoderBucket, steps: int, faster: float, holds: bool
) -> None:
    device = Engine(2.0, faster=faster)
    served, successor = trial(form, device, "served", (1, 2, 3)), trial(form, device, "faster", (4, 5, 6))
    result = asyncio.run(served.beside_successor(successor, 1 / GAIN))
    assert result.runs.within_allowance is holds
    assert (result.first_us, result.second_us) == pytest.approx((6e3 * steps, 6e3 * steps * faster))
    room = 192 if form.tokens == 1 else 128
    assert device.set == [room // 2, room] * 2, "the state is there before a step is timed"
    assert set(device.of) == {("served", n) for n in (1, 2, 3)} | {("faster", n) for n in (4, 5, 6)}


@pytest.mark.parametrize("wrong", ["", "output 'logits' differs"])
def test_a_new_version_of_a_form_is_compared_by_its_answers_and_then_by_steps(wrong: str) -> None:
    known, form = decoder_of(OPTIMUM, {}), DecoderBucket(1, 256)
    assert isinstance(known, DecoderModel)
    model = SimpleNamespace(name="m", manifest=SimpleNamespace(interface=OPTIMUM, state={}, source_key="s"))
    variant = SimpleNamespace(name="m@1x1x256", manifest=SimpleNamespace(shapes=known.shapes(form)))
    sequences = SimpleNamespace(ended=[])
    decoders = Decoders(
        sequencer=cast(Any, SimpleNamespace(sequences=sequences)),
        registry=cast(Any, SimpleNamespace(find={"m": model}.get)),
        pool=cast(Any, None),
        leasing=cast(Any, None),
        usage_log=cast(Any, None),
        limits=Limits(),
        maker=cast(Any, SimpleNamespace()),
        settings=VariantSettings,
    )
    assert decoders.version_comparer(cast(Any, model)) is None, "the model itself is no form"
    comparer = decoders.version_comparer(cast(Any, variant))
    assert comparer is not None
    device = Engine(2.0, faster=0.5, answers=PairedTrialResult(runs=PairedTiming(1.0), wrong=wrong))
    result = asyncio.run(cast(Any, comparer(cast(Any, device), "served", "faster", 1 / GAIN)))
    assert device.compared == [("served", "faster")]
    assert (result.wrong, bool(device.steps)) == (wrong, not wrong)
    assert sorted(sequences.ended) == ([] if wrong else [1, 2, 3, 4, 5, 6])
    assert wrong or result.runs.within_allowance


def test_a_form_is_compared_ever_more_seldom_while_other_programs_are_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A form of that name that comes after it was removed has pauses of its own."""
    known = decoder_of(OPTIMUM, {})
    assert isinstance(known, DecoderModel)
    device = SimpleNamespace(ready=True, engine=SimpleNamespace(fingerprint="x"))
    decision = SimpleNamespace(times=EngineTimes(gpu_ms=1.0, cpu_ms=1.0, device="x", runtime="x"))
    shapes = known.shapes(DecoderBucket(1, 256))
    manifest = SimpleNamespace(shapes=shapes, owner=None, decision=decision)
    variant = SimpleNamespace(name="m@1x1x256", key="form", manifest=manifest)
    model = SimpleNamespace(name="m", manifest=SimpleNamespace(interface=OPTIMUM, state={}))
    compared: list[str] = []

    async def choose_again(_: Any, form: Any) -> None:
        compared.append(form.name)

    decoders = Decoders(
        sequencer=cast(Any, None),
        registry=cast(Any, SimpleNamespace(find={"m": model}.get, variants=lambda: [variant])),
        pool=cast(Any, SimpleNamespace(device_of=lambda _: device, cpu_for=lambda _: device)),
        leasing=cast(Any, SimpleNamespace(adding=lambda *_: contextlib.nullcontext())),
        usage_log=cast(Any, None),
        limits=Limits(),
        maker=cast(Any, SimpleNamespace(choose_again=choose_again)),
        settings=VariantSettings,
    )
    now = 0.0
    monkeypatch.setattr("honed.daemon.background.time.monotonic", lambda: now)
    assert decoders.background(idle=True) is None
    decision.times = dataclasses.replace(decision.times, others_percent=50.0)
    assert decoders.background(idle=False) is None
    done: list[float] = []
    while now < 20_000:
        if (work := decoders.background(idle=True)) is not None:
            asyncio.run(cast(Any, work.run()))
            done.append(now)
        now += 20.0
    assert done == [0.0, 60.0, 180.0, 420.0, 900.0, 1860.0, 3780.0, 7380.0, 10_980.0, 14_580.0, 18_180.0]
    assert decoders.background(idle=True) is None
    decoders.forget("another")
    assert decoders.background(idle=True) is None
    decoders.forget(variant.name)
    assert decoders.background(idle=True) is not None
    assert compared == [variant.name] * len(done)
