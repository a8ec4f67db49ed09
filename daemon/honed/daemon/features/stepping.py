"""Runs a decoder's step: by ONNX Runtime, in parts if it has many tokens, or in chunks by compiled shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from honed.daemon.core.model import ServedModel
from honed.daemon.serving import plan as plans
from honed.daemon.serving.plan import InferencePlan
from honed.daemon.store.compiled import Interface
from honed.daemon.worker.calls import GreedyChoice, RunStep, StepResult
from honed.daemon.worker.shared_memory import RegionTable
from honed.daemon.worker.step_inputs import StepSize
from honed.protocol.errors import InvalidArgument, PreconditionBroken
from honed.protocol.params import InferOptions, InputTensor, OutputTensor, PrepareParams
from honed.protocol.values import Data
from honed.runtime.dtypes import dtype

from .decoding import DecoderBucket, DecoderModel, TokenChunk, names, pack_integers, pieces
from .sequences import without_sequence

# Runs a checked step on the engine of a model (None: a compiled shape on trial), and returns its result.
Ask = Callable[[ServedModel | None, InferencePlan, Callable[[str], RunStep]], Awaitable[StepResult]]

_LOGITS_RANK = 3  # Rank of [batch, tokens, vocabulary]
_MAX_GREEDY = 1024  # Tokens that a request may ask for
_REPEATED = 16  # Tokens of one call of a worker, between which it runs other models


@dataclass(frozen=True, slots=True, kw_only=True)
class Alike:
    """A checked request of a sequence, shared by requests that differ only in their data and `id`.

    `params` is what runs, and `size` that of the first request. It `has_state`, or has tokens alone.
    `no_forms` is why compiled shapes cannot run it, or "" for one sequence of which tokens alone are sent,
    with inline outputs and none that is state. `plan` is the run by ONNX Runtime, `plans` holds those by
    compiled shapes.
    """

    decoder: DecoderModel
    params: PrepareParams
    size: StepSize
    max_answer_bytes: int
    last_token: bool
    has_state: bool
    tokens_alone: bool
    no_forms: str
    greedy: GreedyChoice | None
    plan: InferencePlan
    plans: dict[DecoderBucket, InferencePlan]

    def tokens(self, data: Sequence[Data]) -> Data:
        """Return the data of the tokens of a request that has no other input."""
        ((_, place),) = self.plan.inputs
        return data[0] if place is None else place.region.read(place.offset, place.nbytes)

    def next_token(self, token: int) -> tuple[tuple[InputTensor, ...], tuple[Data, ...]]:
        """Return the inputs and data of a request for one token."""
        (name,) = self.decoder.tokens
        spec = next(tensor for tensor in self.decoder.interface.inputs if tensor.name == name)
        tensor = InputTensor(name=name, datatype=dtype(spec.dtype).datatype, shape=(1, 1))
        return (tensor,), (pack_integers(spec.dtype, [token]),)


def alike_of(
    params: PrepareParams, decoder: DecoderModel, rows: int, regions: RegionTable, most: int
) -> Alike:
    """Check a request after `rows` tokens, whose response may have `most` bytes; raise InvalidArgument."""
    size, options = decoder.step(params, rows), params.parameters or InferOptions()
    greedy = _greedy(params, options, decoder, size)
    outputs = tuple(OutputTensor(name=tensor.name) for tensor in decoder.without_state.outputs)
    whole = dataclasses.replace(
        params,
        parameters=dataclasses.replace(
            without_sequence(options), last_token=None, greedy_tokens=None, stop_tokens=None
        ),
        outputs=(OutputTensor(name=greedy.logits),) if greedy is not None else params.outputs or outputs,
    )
    return Alike(
        decoder=decoder,
        params=whole,
        size=size,
        max_answer_bytes=most,
        last_token=bool(options.last_token) or greedy is not None,
        has_state=decoder.brings_state(params),
        tokens_alone=names(params) == decoder.tokens,
        no_forms=_no_forms(params, decoder, size),
        greedy=greedy,
        plan=plans.check(
            whole, None, decoder.interface_for(params, size), regions, max_bytes=most, keep=False
        ),
        plans={},
    )


def _greedy(
    params: PrepareParams, options: InferOptions, decoder: DecoderModel, size: StepSize
) -> GreedyChoice | None:
    """Return how a request's tokens are chosen, None if its client does that; raise InvalidArgument."""
    if options.greedy_tokens is None:
        if options.stop_tokens:
            raise InvalidArgument("stop_tokens are for greedy_tokens; give both")
        return None
    if not 1 <= options.greedy_tokens <= _MAX_GREEDY:
        raise InvalidArgument(f"greedy_tokens is {options.greedy_tokens}; give 1 to {_MAX_GREEDY}")
    tokens = [each for each in decoder.interface.inputs if each.name in decoder.tokens]
    logits = [each for each in decoder.without_state.outputs if len(each.shape or ()) == _LOGITS_RANK]
    if size.batch != 1 or params.outputs:
        raise InvalidArgument("greedy_tokens are for one sequence, and for its tokens alone; name no outputs")
    for tensor in params.inputs:
        if any(tensor.name == spec.name for spec in decoder.generated):
            raise InvalidArgument(
                f"greedy_tokens continue with tokens alone, but the request has {tensor.name!r}, which later "
                "steps would need, too; leave it out, or choose the tokens"
            )
    if len(tokens) != 1 or tokens[0].dtype not in ("int64", "int32") or len(logits) != 1:
        raise InvalidArgument(
            f"model {params.model_name!r} takes no numbers of tokens, or several of its outputs may be "
            "logits; ask for its outputs, and choose the tokens"
        )
    return GreedyChoice(tokens=tokens[0].name, logits=logits[0].name, stop=options.stop_tokens or ())


def _no_forms(params: PrepareParams, decoder: DecoderModel, size: StepSize) -> str:
    """Return why compiled shapes cannot run a request, or ""."""
    more = next((name for name in names(params) if name not in decoder.tokens), "")
    known = {output.name for output in decoder.without_state.outputs}
    if more:
        return f"a request gave {more!r} beside the tokens"
    if size.batch > 1:
        return f"a request had {size.batch} sequences as a batch"
    for output in params.outputs or ():
        if output.name not in known:
            return f"a request asked for {output.name!r}, which is state"
        if output.parameters is not None:
            return f"a request wanted {output.name!r} in shared memory"
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """A runner of a request's steps; `ask` differs between requests and comparisons.

    After a greedy step of one token, up to `remaining` ones follow in the same call of the worker.
    """

    alike: Alike
    data: Sequence[Data]
    step: StepSize
    number: int
    regions: RegionTable
    max_state_bytes: int
    ask: Ask
    remaining: int = 0

    async def by_file(self, entry: ServedModel) -> StepResult:
        """Run a step on the CPU engine, in parts if only the last token's outputs are requested."""
        alike, decoder, step = self.alike, self.alike.decoder, self.step
        parts = decoder.parts(step) if alike.last_token and alike.tokens_alone else ()
        if len(parts) < 2:
            begins = not step.past or alike.has_state
            later = (tuple(self.data),) * self._following_steps()
            call = partial(self._call, alike.plan, self.data, step, begins, later)
            return await self.ask(entry, alike.plan, call)
        tokens = alike.tokens(self.data)
        for part in parts:
            params, data = decoder.part(alike.params, tokens, step, part)
            plan = self._check(params, decoder.interface_for(params, part))
            ran = await self.ask(entry, plan, partial(self._call, plan, data, part, not part.past, ()))
        return ran

    async def by_form(
        self, form: DecoderBucket, runner: ServedModel | None
    ) -> list[tuple[TokenChunk, StepResult]]:
        """Run a step on the device in chunks by a compiled shape, and return the results.

        Raises PreconditionBroken if ONNX Runtime may run the step instead, as nothing has run.
        """
        found = []
        for piece in pieces(self.step, form):
            plan, call = self._plan(piece)
            try:
                found.append((piece, await self.ask(runner, plan, call)))
            except PreconditionBroken as error:
                if found:  # The state contains the first chunks, which ONNX Runtime would run again
                    raise InvalidArgument(str(error)) from error
                raise
        return found

    def _plan(self, piece: TokenChunk) -> tuple[InferencePlan, Callable[[str], RunStep]]:
        """Return the checked run of a chunk, and a function that returns its call for a key."""
        alike, decoder = self.alike, self.alike.decoder
        data = decoder.contents(piece, alike.tokens(self.data))
        if piece.form not in alike.plans:
            params = dataclasses.replace(alike.params, inputs=decoder.inputs(piece.form))
            alike.plans[piece.form] = self._check(params, decoder.of_forms)
        plan, step = alike.plans[piece.form], StepSize(1, piece.count, piece.before)
        room = piece.form.capacity - piece.before - 1
        later = tuple(
            decoder.contents(dataclasses.replace(piece, before=piece.before + 1 + at), data[0])
            for at in range(min(self._following_steps(), room))
        )
        return plan, partial(self._call, plan, data, step, not piece.before, later)

    def _following_steps(self) -> int:
        """Return the steps to run after this one in the same call."""
        plain = not self.alike.no_forms and self.alike.plan.inputs[0][1] is None and self.step.tokens == 1
        return min(self.remaining, _REPEATED - 1) if plain else 0

    def _check(self, params: PrepareParams, interface: Interface) -> InferencePlan:
        most = self.alike.max_answer_bytes
        return plans.check(params, None, interface, self.regions, max_bytes=most, keep=False)

    def _call(
        self,
        plan: InferencePlan,
        data: Sequence[Data],
        step: StepSize,
        begins: bool,
        later: tuple[tuple[Data, ...], ...],
        key: str,
    ) -> RunStep:
        decoder, greedy = self.alike.decoder, self.alike.greedy
        return RunStep(
            run=plan.call(data, key),
            sequence=self.number,
            rows=step.past,
            count=step.tokens,
            batch=step.batch,
            tensors=decoder.state_tensors(step) if begins else (),
            constants=decoder.constants,
            max_state_bytes=self.max_state_bytes,
            last_token=decoder.of_tokens if self.alike.last_token else (),
            greedy=dataclasses.replace(greedy, later=later) if greedy is not None and later else greedy,
        )
