"""Decides whether a compiled decoder shape, or a new version of it, is right and fast enough to serve.

A compiled shape masks the unused rows of its state. A model may ignore the mask, so its outputs are compared
with ONNX Runtime's at several fill levels. Then both run steps in turns at these levels, each with its state
where it lies in service.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

from honed.daemon.aio import in_thread
from honed.daemon.core.model import ServedModel
from honed.daemon.serving.loader import Loader
from honed.daemon.serving.plan import InferencePlan
from honed.daemon.serving.selection import EngineChoice, choose, engines_timed
from honed.daemon.serving.trial import PairedTrialResult, paired_trial
from honed.daemon.worker.calls import ComparisonRun, RunStep, SetSequence, StepResult
from honed.daemon.worker.shared_memory import RegionTable
from honed.daemon.worker.step_inputs import StepSize
from honed.protocol.errors import HonedError
from honed.protocol.params import InferOptions

from .decoding import DecoderBucket, DecoderModel, difference
from .stepping import Steps, alike_of

# Allowed difference from ONNX Runtime, relative to the largest value. The compiled outputs are verified
# already. Misplaced or unmasked rows cause a difference of about 1; products that ONNX Runtime quantises, as
# files of onnxruntime-genai allow, up to 0.12 with random weights.
_ALLOWED: Final = 0.2
_ROWS: Final = 64  # Steps of one token from a fill level before the state is reset
_UNBOUNDED: Final = 1 << 62  # Limit of a sequence's state in bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FormTrial:
    """A trial of a compiled shape of `entry`, loaded on the device as `key`; `numbers` are its sequences."""

    decoder: DecoderModel
    form: DecoderBucket
    entry: ServedModel
    device: Loader
    key: str
    max_answer_bytes: int
    numbers: tuple[int, int, int]

    async def beside_file(self, cpu: Loader) -> EngineChoice:
        """Return the engine that is to run steps of this size; without times if outputs differ or steps fail.

        The caller has loaded the file of `entry` in the CPU engine.
        """
        try:
            worst = await self._difference(cpu)
            if not worst <= _ALLOWED:
                return EngineChoice(
                    "cpu",
                    f"the compiled form differs by {worst:.2g} of the largest value from ONNX Runtime, and "
                    f"{_ALLOWED:g} is allowed",
                )
            for level, rows in enumerate(self._levels):
                await self._begin(level, rows, self.device, cpu)
            times = await engines_timed(self.device, cpu, self._by_form, partial(self._by_file, cpu))
        except HonedError as error:
            return EngineChoice("cpu", f"the compiled form cannot run steps: {error}")
        of = len(self.numbers)
        times = dataclasses.replace(times, gpu_ms=times.gpu_ms / of, cpu_ms=times.cpu_ms / of)
        choice = choose(times, self.entry.manifest.owner)
        levels = " and ".join((", ".join(map(str, self._levels[:-1])), str(self._levels[-1])))
        tokens = f"{self._tokens} token{'s' * (self._tokens > 1)}"
        return dataclasses.replace(choice, why=f"{choice.why}, as steps of {tokens} after {levels} others")

    async def beside_successor(self, successor: FormTrial, allowance: float) -> PairedTrialResult:
        """Time steps of this and another version in turns; raise a HonedError if one cannot run them."""
        for version in (self, successor):
            for level, rows in enumerate(self._levels):
                await version._begin(level, rows, self.device)
        return await paired_trial(self._by_form, successor._by_form, allowance)

    @property
    def _tokens(self) -> int:
        """The tokens of a timed step: 1, or those of two runs of the compiled shape."""
        return 1 if self.form.tokens == 1 else 2 * self.form.tokens

    @property
    def _levels(self) -> tuple[int, int, int]:
        """The fill levels, in rows of state, at which steps are timed."""
        room = self.form.capacity - (_ROWS if self.form.tokens == 1 else self._tokens)
        return 0, room // 2, room

    def _checks(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield fill levels in rows, each with the tokens of the steps that are compared from there."""
        tokens, capacity = self.form
        if tokens == 1:
            yield from ((0, (1, 1, 1)), (capacity // 2, (1, 1)), (capacity - 2, (1, 1)))
            return
        yield from ((0, (tokens + 1, tokens - 1)), (capacity // 2 - tokens, (tokens + 1,)))
        yield from ((capacity - tokens, (3,)), (capacity - tokens, (tokens,)))

    async def _difference(self, cpu: Loader) -> float:
        """Return the largest difference from ONNX Runtime's outputs, relative to the largest value."""
        worst = 0.0
        for before, counts in self._checks():
            await self._begin(0, before, self.device, cpu)
            for count in counts:
                step = StepSize(1, count, before)
                expected = await self._steps(0, step, cpu).by_file(self.entry)
                found = await self._steps(0, step, self.device).by_form(self.form, None)
                _, last = found[-1]
                for at, output in enumerate(self.decoder.without_state.outputs):
                    # The last token depends on all others. A vocabulary of 150,000 takes long to compare.
                    both = last.result.raw[at], expected.result.raw[at]
                    worst = max(worst, await in_thread(difference, output.dtype, *both))
                before += count
        return worst

    async def _begin(self, level: int, rows: int, *engines: Loader) -> None:
        """Set the state of a level's sequence to `rows` synthetic rows in all `engines`."""
        if rows:
            held = self.decoder.state_tensors(StepSize(1, 1, 0))
            for engine in engines:
                await engine.step(SetSequence(sequence=self.numbers[level], rows=rows, tensors=held))

    async def _by_form(self, turn: int) -> ComparisonRun:
        ran = [await steps.by_form(self.form, None) for steps in self._turn(turn, self.device)]
        return ComparisonRun(ns=sum(_ns(one) for found in ran for _, one in found))

    async def _by_file(self, cpu: Loader, turn: int) -> ComparisonRun:
        return ComparisonRun(
            ns=sum([_ns(await steps.by_file(self.entry)) for steps in self._turn(turn, cpu)])
        )

    def _turn(self, turn: int, engine: Loader) -> Iterator[Steps]:
        """Yield the steps of a turn, one at each fill level; a step can be repeated from its start."""
        on = turn % _ROWS if self.form.tokens == 1 else 0
        for level, rows in enumerate(self._levels):
            yield self._steps(level, StepSize(1, self._tokens, rows + on), engine)

    def _steps(self, level: int, step: StepSize, engine: Loader) -> Steps:
        async def ask(
            model: ServedModel | None, _: InferencePlan, call_for: Callable[[str], RunStep]
        ) -> StepResult:
            return await engine.step(call_for(self.key if model is None else model.manifest.source_key))

        (params, data), regions = self.decoder.synthetic_request(self.entry.name, step), RegionTable(0)
        params = dataclasses.replace(params, parameters=InferOptions(last_token=True))
        return Steps(
            alike=alike_of(params, self.decoder, step.past, regions, self.max_answer_bytes),
            data=data,
            step=step,
            number=self.numbers[level],
            regions=regions,
            max_state_bytes=_UNBOUNDED,
            ask=ask,
        )


def _ns(ran: StepResult) -> int:
    """Return the nanoseconds of a run in the worker, including inputs and outputs."""
    return ran.result.input_ns + ran.result.infer_ns + ran.result.output_ns
