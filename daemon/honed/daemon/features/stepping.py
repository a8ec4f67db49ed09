"""Runs of a decoder's step: by the file, in parts where it has many tokens, or piece by piece by forms."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from honed.daemon.core.model import ServedModel
from honed.daemon.feature import InferCall
from honed.daemon.serving import plan as plans
from honed.daemon.serving.plan import CheckedForm
from honed.daemon.store.compiled import Interface
from honed.daemon.worker.calls import RunStep, StepRan
from honed.daemon.worker.shared_memory import RegionLookup
from honed.daemon.worker.step_inputs import Step
from honed.protocol.params import Data, InferOptions, InferParams, OutputTensor

from .decoding import Decoder, Form, Piece, names, pieces
from .sequences import without_sequence

# Has the engine of a model, None for a form on trial, run a step that was checked; returns its answer.
Ask = Callable[[ServedModel | None, CheckedForm, Callable[[str], RunStep]], Awaitable[StepRan]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alike:
    """What requests of a sequence have in common if they differ in their data and `id` alone, checked.

    `asked` is one of them as its client sent it, without data, and `size` its size; `params` is what runs.
    It `has_state`, or has tokens alone, and is `plain` where forms may run it: of one sequence, with outputs
    in line that are no state. `form` is its run by the file, and `forms` are those by compiled forms.
    """

    decoder: Decoder
    asked: InferParams
    params: InferParams
    size: Step
    max_answer_bytes: int
    last_token: bool
    has_state: bool
    tokens_alone: bool
    plain: bool
    form: CheckedForm
    forms: dict[Form, CheckedForm]

    def fits(self, call: InferCall, decoder: Decoder, max_answer_bytes: int) -> bool:
        """Return whether a request is one of them, for a decoder that is known and under the same limit."""
        params, asked = call.params, self.asked
        return (
            decoder is self.decoder
            and max_answer_bytes == self.max_answer_bytes
            and params.inputs == asked.inputs
            and params.outputs == asked.outputs
            and params.parameters == asked.parameters
            and self.form.fits(params.raw_input_contents or (), call.connection.regions)
        )

    def tokens(self, data: Sequence[Data]) -> Data:
        """Return the tokens of a request that has nothing else."""
        ((_, place),) = self.form.plan.inputs
        return data[0] if place is None else place.region.read(place.offset, place.nbytes)


def alike_of(params: InferParams, decoder: Decoder, rows: int, regions: RegionLookup, most: int) -> Alike:
    """Check a request after `rows` tokens, whose answer may have `most` bytes; raise InvalidArgument."""
    size, options = decoder.step(params, rows), params.parameters or InferOptions()
    outputs = tuple(OutputTensor(name=tensor.name) for tensor in decoder.without_state.outputs)
    whole = dataclasses.replace(
        params,
        parameters=dataclasses.replace(without_sequence(options), last_token=None),
        outputs=params.outputs or outputs,
    )
    tokens_alone, known = names(params) == decoder.tokens, {output.name for output in outputs}
    return Alike(
        decoder=decoder,
        asked=dataclasses.replace(params, id=None, raw_input_contents=None),
        params=dataclasses.replace(whole, id=None, raw_input_contents=None),
        size=size,
        max_answer_bytes=most,
        last_token=bool(options.last_token),
        has_state=decoder.brings_state(params),
        tokens_alone=tokens_alone,
        plain=tokens_alone
        and size.batch == 1
        and all(output.parameters is None and output.name in known for output in whole.outputs or ()),
        form=_checked(whole, decoder.interface_for(params, size), regions, most),
        forms={},
    )


def _checked(params: InferParams, interface: Interface, regions: RegionLookup, most: int) -> CheckedForm:
    return CheckedForm(plans.check(params, None, interface, regions, max_bytes=most, keep=False))


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Runs the steps of a request; `ask` differs between requests and comparisons."""

    alike: Alike
    data: Sequence[Data]
    step: Step
    number: int
    regions: RegionLookup
    max_state_bytes: int
    ask: Ask

    async def by_file(self, entry: ServedModel) -> StepRan:
        """Have the CPU engine run a step."""
        alike, decoder, step = self.alike, self.alike.decoder, self.step
        parts = decoder.parts(step) if alike.last_token and alike.tokens_alone else ()
        if len(parts) < 2:
            begins = not step.before or alike.has_state
            return await self.ask(entry, alike.form, partial(self._call, alike.form, self.data, step, begins))
        tokens = alike.tokens(self.data)
        for part in parts:
            params = decoder.part(alike.params, tokens, step, part)
            form = self._checked(params, decoder.interface_for(params, part))
            call = partial(self._call, form, params.raw_input_contents or (), part, not part.before)
            ran = await self.ask(entry, form, call)
        return ran

    async def by_forms(self, forms: Mapping[Form, ServedModel | None]) -> list[tuple[Piece, StepRan]]:
        """Have the device run a step, piece by piece, by forms of one capacity, and return what each gave."""
        found = []
        for piece in pieces(self.step, min(form.capacity for form in forms)):
            form, call = self._planned(piece)
            found.append((piece, await self.ask(forms[piece.form], form, call)))
        return found

    def _planned(self, piece: Piece) -> tuple[CheckedForm, Callable[[str], RunStep]]:
        """Return the run of a form for a piece of a request, checked, and the call for the form's key."""
        alike, decoder = self.alike, self.alike.decoder
        data = decoder.contents(piece, alike.tokens(self.data))
        if piece.form not in alike.forms:
            params = dataclasses.replace(
                alike.params, inputs=decoder.inputs(piece.form), raw_input_contents=data
            )
            alike.forms[piece.form] = self._checked(params, decoder.of_forms)
        form, step = alike.forms[piece.form], Step(1, piece.count, piece.before)
        return form, partial(self._call, form, data, step, not piece.before)

    def _checked(self, params: InferParams, interface: Interface) -> CheckedForm:
        return _checked(params, interface, self.regions, self.alike.max_answer_bytes)

    def _call(self, form: CheckedForm, data: Sequence[Data], step: Step, begins: bool, key: str) -> RunStep:
        decoder = self.alike.decoder
        return RunStep(
            run=form.call(data, key),
            sequence=self.number,
            rows=step.before,
            count=step.tokens,
            batch=step.batch,
            tensors=decoder.held(step) if begins else (),
            constants=decoder.constants,
            max_state_bytes=self.max_state_bytes,
            last_token=decoder.of_tokens if self.alike.last_token else (),
        )
