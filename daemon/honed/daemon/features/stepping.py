"""Runs a decoder's step: by ONNX Runtime, in parts if it has many tokens, or in chunks by compiled shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from honed.daemon.core.model import ServedModel
from honed.daemon.serving import plan as plans
from honed.daemon.serving.plan import InferencePlan
from honed.daemon.store.compiled import Interface
from honed.daemon.worker.calls import RunStep, StepResult
from honed.daemon.worker.shared_memory import RegionLookup
from honed.daemon.worker.step_inputs import StepSize
from honed.protocol.params import Data, InferOptions, OutputTensor, PrepareParams

from .decoding import DecoderBucket, DecoderModel, TokenChunk, names, pieces
from .sequences import without_sequence

# Runs a checked step on the engine of a model (None: a compiled shape on trial), and returns its result.
Ask = Callable[[ServedModel | None, InferencePlan, Callable[[str], RunStep]], Awaitable[StepResult]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alike:
    """A checked request of a sequence, shared by requests that differ only in their data and `id`.

    `params` is what runs, and `size` that of the first request. It `has_state`, or has tokens alone. It is
    `plain` if compiled shapes may run it: one sequence, only inline outputs and none that is state. `plan` is
    the run by ONNX Runtime, `plans` holds those by compiled shapes.
    """

    decoder: DecoderModel
    params: PrepareParams
    size: StepSize
    max_answer_bytes: int
    last_token: bool
    has_state: bool
    tokens_alone: bool
    plain: bool
    plan: InferencePlan
    plans: dict[DecoderBucket, InferencePlan]

    def tokens(self, data: Sequence[Data]) -> Data:
        """Return the data of the tokens of a request that has no other input."""
        ((_, place),) = self.plan.inputs
        return data[0] if place is None else place.region.read(place.offset, place.nbytes)


def alike_of(
    params: PrepareParams, decoder: DecoderModel, rows: int, regions: RegionLookup, most: int
) -> Alike:
    """Check a request after `rows` tokens, whose response may have `most` bytes; raise InvalidArgument."""
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
        params=whole,
        size=size,
        max_answer_bytes=most,
        last_token=bool(options.last_token),
        has_state=decoder.brings_state(params),
        tokens_alone=tokens_alone,
        plain=tokens_alone
        and size.batch == 1
        and all(output.parameters is None and output.name in known for output in whole.outputs or ()),
        plan=_checked(whole, decoder.interface_for(params, size), regions, most),
        plans={},
    )


def _checked(params: PrepareParams, interface: Interface, regions: RegionLookup, most: int) -> InferencePlan:
    return plans.check(params, None, interface, regions, max_bytes=most, keep=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """A runner of a request's steps; `ask` differs between requests and comparisons."""

    alike: Alike
    data: Sequence[Data]
    step: StepSize
    number: int
    regions: RegionLookup
    max_state_bytes: int
    ask: Ask

    async def by_file(self, entry: ServedModel) -> StepResult:
        """Run a step on the CPU engine, in parts if only the last token's outputs are requested."""
        alike, decoder, step = self.alike, self.alike.decoder, self.step
        parts = decoder.parts(step) if alike.last_token and alike.tokens_alone else ()
        if len(parts) < 2:
            begins = not step.past or alike.has_state
            return await self.ask(entry, alike.plan, partial(self._call, alike.plan, self.data, step, begins))
        tokens = alike.tokens(self.data)
        for part in parts:
            params, data = decoder.part(alike.params, tokens, step, part)
            plan = self._checked(params, decoder.interface_for(params, part))
            ran = await self.ask(entry, plan, partial(self._call, plan, data, part, not part.past))
        return ran

    async def by_forms(
        self, forms: Mapping[DecoderBucket, ServedModel | None]
    ) -> list[tuple[TokenChunk, StepResult]]:
        """Run a step on the device in chunks by shapes of one capacity, and return the results."""
        found = []
        for piece in pieces(self.step, min(form.capacity for form in forms)):
            plan, call = self._planned(piece)
            found.append((piece, await self.ask(forms[piece.form], plan, call)))
        return found

    def _planned(self, piece: TokenChunk) -> tuple[InferencePlan, Callable[[str], RunStep]]:
        """Return the checked run of a chunk, and a function that returns its call for a key."""
        alike, decoder = self.alike, self.alike.decoder
        data = decoder.contents(piece, alike.tokens(self.data))
        if piece.form not in alike.plans:
            params = dataclasses.replace(alike.params, inputs=decoder.inputs(piece.form))
            alike.plans[piece.form] = self._checked(params, decoder.of_forms)
        plan, step = alike.plans[piece.form], StepSize(1, piece.count, piece.before)
        return plan, partial(self._call, plan, data, step, not piece.before)

    def _checked(self, params: PrepareParams, interface: Interface) -> InferencePlan:
        return _checked(params, interface, self.regions, self.alike.max_answer_bytes)

    def _call(
        self, plan: InferencePlan, data: Sequence[Data], step: StepSize, begins: bool, key: str
    ) -> RunStep:
        decoder = self.alike.decoder
        return RunStep(
            run=plan.call(data, key),
            sequence=self.number,
            rows=step.past,
            count=step.tokens,
            batch=step.batch,
            tensors=decoder.held(step) if begins else (),
            constants=decoder.constants,
            max_state_bytes=self.max_state_bytes,
            last_token=decoder.of_tokens if self.alike.last_token else (),
        )
