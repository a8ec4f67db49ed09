"""Decoders: models whose state grows by a row for each token, and stays in the worker that runs them.

A request of a sequence has tokens and gets logits. The worker holds keys and values, and what only the first
request brings, such as an encoder's output. Masks, positions and lengths, which follow from how many tokens
there were, are made up here unless the request has them.

ONNX Runtime takes any number of tokens. Compiled are forms for one token and for many, with room for so many
before: shape variants (`variants.py`), which are made where they are asked for. A mask hides the room that is
not used, which a model may not mind; so a form serves only once it was compared with ONNX Runtime.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import field
from functools import partial
from typing import Any

from honed.daemon.aio import in_thread
from honed.daemon.core.model import ServedModel
from honed.daemon.core.queue import Replaced
from honed.daemon.core.state import Registry
from honed.daemon.feature import Feature, Infer, InferAnswer, InferCall, Work
from honed.daemon.idle.leasing import Leasing
from honed.daemon.observe.usage import UsageLog
from honed.daemon.serving import plan as plans
from honed.daemon.serving.in_flight import PendingRequest
from honed.daemon.serving.plan import CheckedForm
from honed.daemon.serving.pool import Pool
from honed.daemon.settings.schema import Limits
from honed.daemon.store.compiled import Interface
from honed.daemon.worker.calls import DropSequences, ReadSequence, RunStep, StepRan
from honed.daemon.worker.shared_memory import RegionLookup, RegionTable
from honed.daemon.worker.step_inputs import Step
from honed.daemon.worker.supervisor import WorkerDied
from honed.protocol.dataclass import dataclass
from honed.protocol.errors import DeviceError, InvalidArgument, ResourceExhausted, SequenceLost, Unavailable
from honed.protocol.params import Data, InferOptions, InferParams, InputTensor, OutputTensor
from honed.protocol.strict import Map
from honed.runtime.dtypes import dtype

from .decoding import (
    FORMS,
    Decoder,
    Form,
    Piece,
    decoder_of,
    difference,
    names,
    pieces,
    rows_of,
)
from .sequences import HeldSequence, SequenceKey, Sequencer, key_of, nothing, source_of, without_sequence

_log = logging.getLogger(__name__)
# Difference of a form and ONNX Runtime, of the largest value. The form's own answers are proven; rows in
# another place, or seen where they are not there, make it about 1, and products that ONNX Runtime quantises
# (files of onnxruntime-genai allow that) up to 0.12, with weights drawn at random.
_ALLOWED = 0.2
# Has the engine of a model run a step that was checked, and returns the worker's answer.
Ask = Callable[[ServedModel, CheckedForm, Callable[[str], RunStep]], Awaitable[StepRan]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Alike:
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


def _alike(params: InferParams, decoder: Decoder, rows: int, regions: RegionLookup, most: int) -> _Alike:
    """Check a request after `rows` tokens, whose answer may have `most` bytes; raise InvalidArgument."""
    size, options = decoder.step(params, rows), params.parameters or InferOptions()
    outputs = tuple(OutputTensor(name=tensor.name) for tensor in decoder.without_state.outputs)
    whole = dataclasses.replace(
        params,
        parameters=dataclasses.replace(without_sequence(options), last_token=None),
        outputs=params.outputs or outputs,
    )
    tokens_alone, known = names(params) == decoder.tokens, {output.name for output in outputs}
    return _Alike(
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
class _Steps:
    """Runs the steps of a request; `ask` differs between requests and comparisons."""

    alike: _Alike
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

    async def by_forms(self, forms: Mapping[Form, ServedModel]) -> list[tuple[Piece, StepRan]]:
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
            alike.forms[piece.form] = self._checked(params, decoder.without_state)
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


@dataclass(kw_only=True, eq=False)
class Decoders(Feature):
    """The steps of decoders' sequences: the feature of models whose state grows.

    `sequencer` has the sequences, and those of all other models.
    """

    sequencer: Sequencer
    registry: Registry
    pool: Pool
    leasing: Leasing
    ledger: UsageLog
    limits: Limits
    drop_variants: Callable[[Sequence[str]], Awaitable[None]]
    _tidied: bool = field(init=False, default=False)
    _numbers: itertools.count[int] = field(init=False, default_factory=lambda: itertools.count(1))
    _telling: set[asyncio.Task[None]] = field(init=False, default_factory=set)
    # What models take, by name, with what that was found in.
    _known: dict[str, tuple[Interface, Mapping[str, str], Decoder | None]] = field(
        init=False, default_factory=dict
    )
    # Why forms are not used, "" where they are, by the keys of forms and model.
    _compared: dict[tuple[str, str], str] = field(init=False, default_factory=dict)

    def wrap(self, entry: ServedModel, infer: Infer) -> Infer | None:
        """Run the steps of a model's sequences where their state is, if that grows."""
        decoder = self._decoder(entry)
        if decoder is None:
            return None

        async def infer_step(call: InferCall) -> InferAnswer:
            key = key_of(call.connection.peer.uid, call.params)
            if key is None:
                return await infer(call)
            deadline = await self.sequencer.begin_turn(key, call)
            try:
                return await self._run(key, call, decoder, deadline)
            except Replaced as error:  # its state is of the model before
                raise Unavailable(str(error)) from None
            finally:
                self.sequencer.end_turn(key)
                self._let_go()

        return infer_step

    def _decoder(self, entry: ServedModel) -> Decoder | None:
        interface, state = entry.manifest.interface, entry.manifest.state
        if interface is None:
            return None
        known = self._known.get(entry.name)
        if known is None or known[:2] != (interface, state):
            known = self._known[entry.name] = interface, state, decoder_of(interface, state)
        return known[2]

    def forget(self, model: str) -> None:
        """Forget what a model that was removed takes."""
        self._known.pop(model, None)

    async def _run(self, key: SequenceKey, call: InferCall, decoder: Decoder, deadline: float) -> InferAnswer:
        entry, sequences, params = call.entry, self.sequencer.sequences, call.params
        options, source = params.parameters or InferOptions(), source_of(entry)
        first, now = bool(options.sequence_start), time.monotonic()
        if first:
            sequence = sequences.begin(key, source, decoder.pairs, now)
            sequence.number = next(self._numbers)
        else:
            sequence = sequences.resume(key, source, now)
        if options.sequence_end and not params.inputs:
            sequences.drop(key)
            return nothing(params, entry)
        try:
            with self.leasing.serving(entry.name, call.connection.peer.pid):
                result = await self._step(sequence, call, decoder, deadline)
        except SequenceLost as lost:
            sequences.drop(key, str(lost))
            raise SequenceLost(f"{key.shown} is not known: {lost}; begin it with sequence_start") from None
        except BaseException:
            sequences.failed(sequence, first=first)
            raise
        if options.sequence_end:
            sequences.drop(key)
        return result

    async def _step(
        self, sequence: HeldSequence, call: InferCall, decoder: Decoder, deadline: float
    ) -> InferAnswer:
        arrived, sequences, entry = time.monotonic(), self.sequencer.sequences, call.entry
        regions, limit = call.connection.regions, self.limits.max_answer_bytes
        alike, most = sequence.alike, sequences.settings.max_tokens
        if isinstance(alike, _Alike) and alike.fits(call, decoder, limit):
            step = Step(alike.size.batch, alike.size.tokens, sequence.rows)
        else:
            alike = _alike(call.params, decoder, sequence.rows, regions, limit)
            sequence.alike = alike if alike.form.kept and not alike.has_state else None
            step = alike.size
        if step.after > most:
            raise ResourceExhausted(
                f"{sequence.key.shown} would have {step.after} tokens and may have {most}; begin it anew, or "
                "raise max_tokens of [sequences] in the configuration"
            )
        took: list[tuple[PendingRequest[Any], StepRan, CheckedForm]] = []

        async def ask(runner: ServedModel, form: CheckedForm, asked: Callable[[str], RunStep]) -> StepRan:
            file = runner is entry
            ran, work = await self.pool.asking.ask_for(
                call.connection.client,
                runner,
                asked,
                regions=form.regions,
                priority=form.plan.priority,
                timeout=deadline - time.monotonic(),
                open_shape=file,
                empty=form.empty if file else None,
            )
            took.append((work, ran, form))
            if not runner.away and (not file or runner.compiled is None):
                self.ledger.ran(runner.name, ran.result.infer_ns / 1e9)
            return ran

        steps = _Steps(
            alike=alike,
            data=call.params.raw_input_contents or (),
            step=step,
            number=sequence.number,
            regions=regions,
            max_state_bytes=sequences.allowance(sequence),
            ask=ask,
        )
        cut = pieces(step) if alike.plain and decoder.has_forms else ()
        forms = self._forms(call, decoder, cut)
        found: list[tuple[Piece, StepRan]] = []

        on_device = bool(forms) and (sequence.on_device or not step.before)
        if on_device:
            found = await steps.by_forms(forms)
        elif sequence.on_device and step.before:
            params = await self._taken_back(sequence, entry, call.params, decoder)
            whole = _alike(params, decoder, step.before, regions, limit)
            data = params.raw_input_contents or ()
            await dataclasses.replace(steps, alike=whole, data=data).by_file(entry)
        else:
            await steps.by_file(entry)
        work, ran, form = took[-1]
        sequence.on_device = on_device
        sequences.stepped(sequence, ran.rows, ran.nbytes, time.monotonic())
        answer = ran.result
        if len(took) > 1:
            spent = sum(each.result.infer_ns for _, each, _ in took)
            answer = dataclasses.replace(answer, infer_ns=spent)
        answered = self.pool.asking.noted(entry, work, answer, arrived)
        result = form.answer(answer, call.params.id or "", answered)
        whole_runs = len(found) < 2 and all(piece.count == piece.form.tokens for piece, _ in found)
        return result if alike.last_token or whole_runs else _joined(result, found)

    def _forms(self, call: InferCall, decoder: Decoder, cut: Sequence[Piece]) -> Mapping[Form, ServedModel]:
        """Return the forms that are to run pieces; none where one is missing. Counts what is asked for."""
        found: dict[Form, ServedModel] = {}
        for form in {piece.form for piece in cut}:
            shapes = decoder.shapes(form)
            self.ledger.asked(call.entry.name, decoder.variant(call.entry.name, form), shapes)
            runner = call.runner(shapes)
            if runner is call.entry or self._compared.get(_key(call.entry, runner), "?"):
                return {}
            found[form] = runner
        return found

    async def _taken_back(
        self, sequence: HeldSequence, entry: ServedModel, params: InferParams, decoder: Decoder
    ) -> InferParams:
        """Return a request with the state that the device has, for the CPU engine to go on."""
        server = self.pool.device_of(entry)
        try:
            read = ReadSequence(sequence=sequence.number)
            state = await server.supervisor.call(read, seconds=self.limits.run_seconds)
        except WorkerDied:
            raise SequenceLost("the process that held its state has ended") from None
        inputs = tuple(
            InputTensor(name=each.name, datatype=dtype(each.dtype).datatype, shape=each.shape)
            for each in state.tensors
        )
        return dataclasses.replace(
            params,
            inputs=(*inputs, *params.inputs),
            raw_input_contents=(*state.raw, *(params.raw_input_contents or ())),
        )

    # In the background

    def background(self, *, idle: bool) -> Work | None:
        """Compare the forms that were made with ONNX Runtime, before they serve."""
        if not idle:
            return None
        for entry in self.registry.models():
            decoder = self._decoder(entry)
            cpu = self.pool.servers.get(entry.cpu_engine)
            if decoder is None or not decoder.has_forms or cpu is None or not cpu.ready:
                continue
            loaded = {v.name: v for v in self.registry.variants(entry.name) if not self.registry.rests(v)}
            for form in FORMS:
                runner = loaded.get(decoder.variant(entry.name, form))
                if runner is not None and _key(entry, runner) not in self._compared:
                    compare = partial(self._compare, entry, decoder, form, runner)
                    return Work(f"comparing {runner.name}", compare)
        return None

    async def _compare(self, entry: ServedModel, decoder: Decoder, form: Form, runner: ServedModel) -> None:
        """Run a made-up sequence by a form and by ONNX Runtime, and note how they differ."""
        number, key, name = next(self._numbers), _key(entry, runner), runner.name
        try:
            worst = await self._difference(entry, decoder, form, runner, number)
        except (InvalidArgument, DeviceError, ResourceExhausted) as error:
            self._compared[key] = str(error)
            _log.warning("%s is not used in sequences: %s", name, error)
            return
        finally:
            self.sequencer.sequences.ended.append(number)
        wrong = not worst <= _ALLOWED
        self._compared[key] = f"{worst:.2g}" if wrong else ""
        if wrong:
            _log.warning(
                "%s is not used in sequences: it differs by %.2g of the largest value from ONNX Runtime, and "
                "%.2g is allowed",
                name,
                worst,
                _ALLOWED,
            )
        else:
            _log.info("%s runs sequences of up to %d tokens from now on", name, form.capacity)

    def _made_up(self, entry: ServedModel, decoder: Decoder, number: int, step: Step, seed: int) -> _Steps:
        """Return a step of a made-up sequence, whose tokens are those from `seed` on."""

        async def ask(model: ServedModel, _: CheckedForm, asked: Callable[[str], RunStep]) -> StepRan:
            server = self.pool.servers[entry.cpu_engine if model is entry else model.device]
            call = asked(model.key_on(server.name))
            return await server.supervisor.call(call, seconds=self.limits.run_seconds)

        regions = RegionTable(0)
        params = decoder.made_up(entry.name, Step(1, step.tokens, seed))
        return _Steps(
            alike=_alike(params, decoder, step.before, regions, self.limits.max_answer_bytes),
            data=params.raw_input_contents or (),
            step=step,
            number=number,
            regions=regions,
            max_state_bytes=1 << 62,
            ask=ask,
        )

    async def _difference(
        self, entry: ServedModel, decoder: Decoder, form: Form, runner: ServedModel, number: int
    ) -> float:
        """Return how far the answers of a form are from ONNX Runtime's, of the largest value."""
        before, worst = 0, 0.0
        # More than fits one run, and less.
        for tokens in (form.tokens + 1, form.tokens) if form.tokens > 1 else (1, 1, 1):
            step = Step(1, tokens, before)
            steps = self._made_up(entry, decoder, number, step, before)
            expected = await steps.by_file(entry)
            found = await steps.by_forms({form: runner})
            for at, output in enumerate(decoder.without_state.outputs):
                right = expected.result.raw[at]
                row = len(right) // tokens
                piece, ran = found[-1]
                # The last token has seen all others; a vocabulary of 150,000 takes a while to compare.
                last = rows_of(ran.result.raw[at], piece)[-row:]
                worst = max(worst, await in_thread(difference, output.dtype, last, bytes(right[-row:])))
            before = step.after
        return worst

    async def tidy(self) -> None:
        """Have workers let go of what nobody asked for; drop the forms that nothing runs any more."""
        self._let_go()
        for entry in self.registry.models() if not self._tidied else ():
            decoder = self._decoder(entry)
            if decoder is None or not decoder.has_forms:
                continue
            for variant in self.registry.variants(entry.name):
                if decoder.was_for_several(variant.manifest.shapes):
                    _log.warning(
                        "%s runs several sequences at once, which this version does not do; it is dropped, "
                        "sequences run one by one, and there is nothing to do",
                        variant.name,
                    )
                    await self.drop_variants([variant.name])
        self._tidied = True

    def _let_go(self) -> None:
        """Have workers let go of the sequences that have ended."""
        sequences = self.sequencer.sequences
        if not sequences.ended:
            return
        ended, sequences.ended = sequences.ended, []
        for server in self.pool.servers.values():
            if server.ready:
                sent = asyncio.ensure_future(server.loader.tell(DropSequences(sequences=tuple(ended))))
                self._telling.add(sent)
                sent.add_done_callback(self._telling.discard)

    async def close(self) -> None:
        """End what is under way."""
        await asyncio.gather(*self._telling, return_exceptions=True)


def _key(entry: ServedModel, form: ServedModel) -> tuple[str, str]:
    return entry.manifest.source_key, form.key


def _joined(result: Map, found: Sequence[tuple[Piece, StepRan]]) -> Map:
    """Return the result of the last piece with the outputs of all."""
    count = sum(piece.count for piece, _ in found)
    outputs = [{**each, "shape": [each["shape"][0], count, *each["shape"][2:]]} for each in result["outputs"]]
    raw = [b"".join(rows_of(ran.result.raw[at], piece) for piece, ran in found) for at in range(len(outputs))]
    return {**result, "outputs": outputs, "raw_output_contents": raw}
