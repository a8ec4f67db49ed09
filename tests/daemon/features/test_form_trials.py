"""A form beside ONNX Runtime: compared at fill levels, timed with its state in place, refused with reason."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from honed.daemon.features.decoding import Decoder, Form, decoder_of
from honed.daemon.features.form_trials import FormTrial
from honed.daemon.serving.selection import EngineChoice
from honed.daemon.worker.calls import InferenceResult, RunStep, SetSequence, StepRan
from honed.protocol.errors import InvalidArgument
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
    pid: int = 0
    engine: Any = field(default_factory=lambda: SimpleNamespace(on_processor=False, fingerprint="x"))

    async def step(self, call: Any) -> Any:
        if isinstance(call, SetSequence):
            self.set.append(call.rows)
            return None
        assert isinstance(call, RunStep)
        assert call.last_token == ("logits",)
        self.steps.append((call.rows, call.count))
        after = call.rows + call.count
        if after > self.most:
            raise InvalidArgument("it has no such place")
        logits = np.linspace(-1, 1, WORDS) + (self.off if after > self.wrong else 0)
        ns = int(self.ms * 1e6)
        result = InferenceResult(
            raw=(logits.astype(np.float16).tobytes(),),
            shapes=((1, 1, WORDS),),
            offsets=(-1,),
            input_ns=0,
            infer_ns=ns,
            output_ns=0,
        )
        return StepRan(result=result, rows=after, nbytes=0)


def choice(form: Form, device: Engine, cpu: Engine) -> EngineChoice:
    known = decoder_of(OPTIMUM, {})
    assert isinstance(known, Decoder)
    entry = SimpleNamespace(name="m", manifest=SimpleNamespace(source_key="source", owner=None))
    trial = FormTrial(
        decoder=known,
        form=form,
        entry=cast(Any, entry),
        device=cast(Any, device),
        key="form",
        cpu=cast(Any, cpu),
        max_answer_bytes=1 << 30,
        numbers=(1, 2, 3),
    )
    return asyncio.run(trial.choice())


def test_a_token_is_timed_at_three_fill_levels_with_the_state_in_place() -> None:
    device, cpu = Engine(1.3), Engine(12.7)
    found = choice(Form(1, 256), device, cpu)
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
    found = choice(Form(64, 256), device, cpu)
    assert found.engine == "cpu"  # two runs take 8 ms
    assert found.times is not None
    assert (found.times.gpu_ms, found.times.cpu_ms) == pytest.approx((8.0, 6.0))
    assert {count for _, count in cpu.steps[-3:]} == {128}


@pytest.mark.parametrize("rows", [0, 2, 129, 255])
def test_a_form_that_is_wrong_anywhere_does_not_serve(rows: int) -> None:
    found = choice(Form(1, 256), Engine(1.0, off=0.5, wrong=rows), Engine(9.0))
    assert (found.engine, found.times) == ("cpu", None)
    assert "the compiled form differs by 0.5 of the largest value from ONNX Runtime" in found.why


def test_what_an_engine_refuses_is_why() -> None:
    found = choice(Form(64, 256), Engine(1.0), Engine(9.0, most=200))
    assert (found.engine, found.times) == ("cpu", None)
    assert found.why == "the compiled form cannot run steps: it has no such place"
