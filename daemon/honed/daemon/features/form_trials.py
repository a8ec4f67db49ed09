"""Whether a compiled form of a decoder is to serve: it is right, and as fast as ONNX Runtime.

A form hides the room that is not used, which a model may not mind, so that its answers are compared with ONNX
Runtime's at several fill levels. Then both run steps in turns at these levels, each with its state where it
is when it serves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from honed.daemon.aio import in_thread
from honed.daemon.core.model import ServedModel
from honed.daemon.serving.loader import Loader
from honed.daemon.serving.plan import InferencePlan
from honed.daemon.serving.selection import EngineChoice, choose, engines_timed
from honed.daemon.worker.calls import RunStep, SetSequence, StepRan
from honed.daemon.worker.shared_memory import RegionTable
from honed.daemon.worker.step_inputs import Step
from honed.protocol.errors import HonedError
from honed.protocol.params import InferOptions

from .decoding import Decoder, Form, difference
from .stepping import Steps, alike_of

# Difference of a form and ONNX Runtime, of the largest value. The form's own answers are proven; rows in
# another place, or seen where they are not there, make it about 1, and products that ONNX Runtime quantises
# (files of onnxruntime-genai allow that) up to 0.12, with weights drawn at random.
_ALLOWED: Final = 0.2
_ROWS: Final = 64  # steps of one token that go on from a fill level, before it begins anew
_UNBOUNDED: Final = 1 << 62  # bytes of state


@dataclass(frozen=True, slots=True, kw_only=True)
class FormTrial:
    """A form, loaded on the device under `key`, beside the file of `entry`, loaded in the CPU engine.

    `numbers` are of sequences that nobody else uses.
    """

    decoder: Decoder
    form: Form
    entry: ServedModel
    device: Loader
    key: str
    cpu: Loader
    max_answer_bytes: int
    numbers: tuple[int, int, int]

    async def choice(self) -> EngineChoice:
        """Return the engine that is to run steps of that size; without times where the form is not right."""
        try:
            worst = await self._difference()
            if not worst <= _ALLOWED:
                return EngineChoice(
                    "cpu",
                    f"the compiled form differs by {worst:.2g} of the largest value from ONNX Runtime, and "
                    f"{_ALLOWED:g} is allowed",
                )
            for level in range(len(self.numbers)):
                await self._begin(level, self._levels[level])
            times = await engines_timed(self.device, self.cpu, self._by_form, self._by_file)
        except HonedError as error:
            return EngineChoice("cpu", f"the compiled form cannot run steps: {error}")
        of = len(self.numbers)
        times = dataclasses.replace(times, gpu_ms=times.gpu_ms / of, cpu_ms=times.cpu_ms / of)
        choice = choose(times, self.entry.manifest.owner)
        levels = " and ".join((", ".join(map(str, self._levels[:-1])), str(self._levels[-1])))
        tokens = f"{self._tokens} token{'s' * (self._tokens > 1)}"
        return dataclasses.replace(choice, why=f"{choice.why}, as steps of {tokens} after {levels} others")

    @property
    def _tokens(self) -> int:
        """Of a step: one, or those of two runs of the form."""
        return 1 if self.form.tokens == 1 else 2 * self.form.tokens

    @property
    def _levels(self) -> tuple[int, int, int]:
        """Return how many rows there are before the steps that are timed."""
        room = self.form.capacity - (_ROWS if self.form.tokens == 1 else self._tokens)
        return 0, room // 2, room

    def _checks(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield rows that there are, and the tokens of each step that follows."""
        tokens, capacity = self.form
        if tokens == 1:
            yield from ((0, (1, 1, 1)), (capacity // 2, (1, 1)), (capacity - 2, (1, 1)))
            return
        yield from ((0, (tokens + 1, tokens - 1)), (capacity // 2 - tokens, (tokens + 1,)))
        yield from ((capacity - tokens, (3,)), (capacity - tokens, (tokens,)))

    async def _difference(self) -> float:
        """Return how far the answers of the form are from ONNX Runtime's, of the largest value."""
        worst = 0.0
        for before, counts in self._checks():
            await self._begin(0, before)
            for count in counts:
                steps = self._steps(0, Step(1, count, before))
                expected, found = await steps.by_file(self.entry), await steps.by_forms({self.form: None})
                _, last = found[-1]
                for at, output in enumerate(self.decoder.without_state.outputs):
                    # The last token has seen all others; a vocabulary of 150,000 takes a while to compare.
                    both = last.result.raw[at], expected.result.raw[at]
                    worst = max(worst, await in_thread(difference, output.dtype, *both))
                before += count
        return worst

    async def _begin(self, level: int, rows: int) -> None:
        """Have both engines go on with a sequence of so many made-up rows."""
        if rows:
            held = self.decoder.held(Step(1, 1, 0))
            call = SetSequence(sequence=self.numbers[level], rows=rows, tensors=held)
            await self.cpu.step(call)
            await self.device.step(call)

    async def _by_form(self, turn: int) -> int:
        ran = [await steps.by_forms({self.form: None}) for steps in self._turn(turn)]
        return sum(_ns(one) for found in ran for _, one in found)

    async def _by_file(self, turn: int) -> int:
        return sum([_ns(await steps.by_file(self.entry)) for steps in self._turn(turn)])

    def _turn(self, turn: int) -> Iterator[Steps]:
        """Yield the steps of a turn, one at each fill level; a step can be run again from where it began."""
        on = turn % _ROWS if self.form.tokens == 1 else 0
        for level, rows in enumerate(self._levels):
            yield self._steps(level, Step(1, self._tokens, rows + on))

    def _steps(self, level: int, step: Step) -> Steps:
        async def ask(
            model: ServedModel | None, _: InferencePlan, asked: Callable[[str], RunStep]
        ) -> StepRan:
            if model is None:
                return await self.device.step(asked(self.key))
            return await self.cpu.step(asked(model.manifest.source_key))

        (params, data), regions = self.decoder.made_up(self.entry.name, step), RegionTable(0)
        params = dataclasses.replace(params, parameters=InferOptions(last_token=True))
        return Steps(
            alike=alike_of(params, self.decoder, step.before, regions, self.max_answer_bytes),
            data=data,
            step=step,
            number=self.numbers[level],
            regions=regions,
            max_state_bytes=_UNBOUNDED,
            ask=ask,
        )


def _ns(ran: StepRan) -> int:
    """Return what a run took in the worker, with its inputs and outputs on the way."""
    return ran.result.input_ns + ran.result.infer_ns + ran.result.output_ns
