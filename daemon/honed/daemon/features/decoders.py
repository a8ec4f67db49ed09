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
from functools import cache, partial
from statistics import median

from honed.daemon.aio import in_thread
from honed.daemon.core.model import ServedModel
from honed.daemon.core.queue import Replaced
from honed.daemon.core.state import Registry
from honed.daemon.feature import Feature, Infer, InferCall, Work
from honed.daemon.idle.leasing import Leasing
from honed.daemon.observe.usage import UsageLog
from honed.daemon.serving import plan as plans
from honed.daemon.serving.plan import InferencePlan
from honed.daemon.serving.pool import Pool
from honed.daemon.settings.schema import Limits
from honed.daemon.store.compiled import Interface
from honed.daemon.store.names import variant_name
from honed.daemon.worker.calls import DropSequences, ReadSequence, RunStep, StepRan, WorkerCall
from honed.daemon.worker.shared_memory import RegionLookup, RegionTable
from honed.daemon.worker.supervisor import WorkerDied
from honed.process.rpc import R
from honed.protocol.dataclass import dataclass
from honed.protocol.errors import DeviceError, InvalidArgument, ResourceExhausted, SequenceLost, Unavailable
from honed.protocol.params import InferOptions, InferParams, InputTensor
from honed.protocol.results import Inferred
from honed.runtime.dtypes import dtype

from .decoding import (
    FORMS,
    JOINT,
    Decoder,
    Form,
    Piece,
    Step,
    decoder_of,
    difference,
    joint_forms,
    names,
    pieces,
    rows_of,
)
from .joint_steps import JointSteps, Planned, Ran, Turn, steps_call
from .sequences import HeldSequence, SequenceKey, Sequencer, key_of, nothing, source_of

_log = logging.getLogger(__name__)
# Difference of a form and ONNX Runtime, of the largest value. The form's own answers are proven; rows in
# another place, or seen where they are not there, make it about 1, and products that ONNX Runtime quantises
# (files of onnxruntime-genai allow that) up to 0.12, with weights drawn at random.
_ALLOWED = 0.2
_TIMED = 9  # pairs of runs of a form for several sequences, and of that for one
# Has the engine of a model run a step that was planned, and returns the worker's answer.
Ask = Callable[[ServedModel, InferencePlan, Callable[[str], RunStep]], Awaitable[StepRan]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Steps:
    """Runs the steps of one sequence; `ask` differs between requests and comparisons."""

    decoder: Decoder
    number: int
    regions: RegionLookup
    max_answer_bytes: int
    max_state_bytes: int
    last_token: bool
    ask: Ask

    async def by_file(self, entry: ServedModel, params: InferParams, step: Step) -> StepRan:
        """Have the CPU engine run a step."""
        plan, begins = self._checked(params, step), not step.before or self.decoder.brings_state(params)
        parts = self.decoder.parts(step) if self.last_token and names(params) == self.decoder.tokens else ()
        if len(parts) < 2:
            return await self._run(entry, plan, step, step.before, step.tokens, begins=begins)
        params = self._in_line(params, plan)
        for part in parts:
            plan = self._checked(self.decoder.part(params, step, part), part)
            ran = await self._run(entry, plan, part, part.before, part.tokens, begins=not part.before)
        return ran

    async def by_forms(
        self, forms: Mapping[Form, ServedModel], params: InferParams, step: Step
    ) -> list[tuple[Piece, StepRan]]:
        """Have the device run a step, piece by piece, by forms of one capacity, and return what each gave."""
        params, found = self.in_line(params, step), []
        for piece in pieces(step, min(form.capacity for form in forms)):
            planned = self.planned(params, piece)
            found.append((piece, await self.ask(forms[piece.form], planned.plan, planned.call)))
        return found

    def planned(self, params: InferParams, piece: Piece) -> Planned:
        """Return the run of a form for a piece of a request whose data is in line."""
        plan = self._plan(self.decoder.piece(params, piece), self.decoder.without_state)
        step = Step(1, piece.count, piece.before)
        call = partial(self._call, plan, step, piece.before, piece.count, not piece.before)
        return Planned(piece, plan, call)

    def in_line(self, params: InferParams, step: Step) -> InferParams:
        """Return a request, of which tokens are all, with its data in line; raise InvalidArgument."""
        return self._in_line(params, self._checked(params, step))

    def _in_line(self, params: InferParams, plan: InferencePlan) -> InferParams:
        """Return a request, of which tokens are all, with its data in line."""
        places = {tensor.name: place for tensor, place in plan.inputs}
        place = places[self.decoder.tokens[0]]
        if place is None:
            return params
        inputs = tuple(dataclasses.replace(tensor, parameters=None) for tensor in params.inputs)
        data = place.region.read(place.offset, place.nbytes)
        return dataclasses.replace(params, inputs=inputs, raw_input_contents=(data,))

    def _checked(self, params: InferParams, step: Step) -> InferencePlan:
        return self._plan(*self.decoder.given(params, step))

    def _plan(self, params: InferParams, interface: Interface) -> InferencePlan:
        most = self.max_answer_bytes
        return plans.check(params, None, interface, self.regions, max_bytes=most, keep=False)

    async def _run(
        self, runner: ServedModel, plan: InferencePlan, step: Step, rows: int, count: int, *, begins: bool
    ) -> StepRan:
        call = partial(self._call, plan, step, rows, count, begins)
        return await self.ask(runner, plan, call)

    def _call(
        self, plan: InferencePlan, step: Step, rows: int, count: int, begins: bool, key: str
    ) -> RunStep:
        return RunStep(
            run=plan.for_worker(key),
            sequence=self.number,
            rows=rows,
            count=count,
            tensors=self.decoder.held(step) if begins else (),
            constants=self.decoder.constants,
            max_state_bytes=self.max_state_bytes,
            last_token=self.decoder.of_tokens if self.last_token else (),
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
    _numbers: itertools.count[int] = field(init=False, default_factory=lambda: itertools.count(1))
    _telling: set[asyncio.Task[None]] = field(init=False, default_factory=set)
    # What models take, by name, with what that was found in.
    _known: dict[str, tuple[Interface, Mapping[str, str], Decoder | None]] = field(
        init=False, default_factory=dict
    )
    # Why forms are not used, "" where they are, by the keys of forms and model.
    _compared: dict[tuple[str, str], str] = field(init=False, default_factory=dict)
    # For how many sequences forms for several take less time than runs one by one, by the same keys.
    _least: dict[tuple[str, str], int] = field(init=False, default_factory=dict)
    # Models that ONNX Runtime runs, and what for: steps of so many of their sequences have overlapped.
    _wanted: set[tuple[str, Form]] = field(init=False, default_factory=set)
    _joint: JointSteps = field(init=False)

    def __post_init__(self) -> None:
        self._joint = JointSteps(pool=self.pool, ledger=self.ledger)

    def wrap(self, entry: ServedModel, infer: Infer) -> Infer | None:
        """Run the steps of a model's sequences where their state is, if that grows."""
        decoder = self._decoder(entry)
        if decoder is None:
            return None

        async def infer_step(call: InferCall) -> Inferred:
            key = key_of(call.connection.peer.uid, call.params)
            if key is None:
                return await infer(call)
            async with self.sequencer.turn(key, call.params) as params:
                try:
                    return await self._run(key, dataclasses.replace(call, params=params), decoder)
                except Replaced as error:  # its state is of the model before
                    raise Unavailable(str(error)) from None
                finally:
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
        self._joint.forget(model)
        self._wanted = {(name, form) for name, form in self._wanted if name != model}

    async def _run(self, key: SequenceKey, call: InferCall, decoder: Decoder) -> Inferred:
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
        plain = dataclasses.replace(
            options, sequence_id=None, sequence_start=None, sequence_end=None, last_token=None
        )
        call = dataclasses.replace(call, params=dataclasses.replace(params, parameters=plain))
        try:
            with self.leasing.serving(entry.name, call.connection.peer.pid):
                result = await self._step(sequence, call, decoder, last_token=bool(options.last_token))
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
        self, sequence: HeldSequence, call: InferCall, decoder: Decoder, *, last_token: bool
    ) -> Inferred:
        arrived, sequences, entry = time.monotonic(), self.sequencer.sequences, call.entry
        step, most = decoder.step(call.params, sequence.rows), sequences.settings.max_tokens
        if step.after > most:
            raise ResourceExhausted(
                f"{sequence.key.shown} would have {step.after} tokens and may have {most}; begin it anew, or "
                "raise max_tokens of [sequences] in the configuration"
            )
        took: list[Ran] = []

        async def ask(runner: ServedModel, plan: InferencePlan, asked: Callable[[str], RunStep]) -> StepRan:
            file = runner is entry
            ran, work = await self.pool.asking.ask_for(
                call.connection.client,
                runner,
                asked,
                regions=plan.regions,
                priority=plan.priority,
                timeout=plan.timeout - (time.monotonic() - arrived),
                open_shape=file,
                empty=plan.empty if file else None,
            )
            took.append((work, ran, plan))
            if not runner.away and (not file or runner.compiled is None):
                self.ledger.ran(runner.name, ran.result.infer_ns / 1e9)
            return ran

        steps = _Steps(
            decoder=decoder,
            number=sequence.number,
            regions=call.connection.regions,
            max_answer_bytes=self.limits.max_answer_bytes,
            max_state_bytes=sequences.allowance(sequence),
            last_token=last_token,
            ask=ask,
        )
        forms = self._forms(call, decoder, step)
        found: list[tuple[Piece, StepRan]] = []

        on_device = bool(forms) and (sequence.on_device or not step.before)

        async def alone() -> Ran:
            if on_device:
                found[:] = await steps.by_forms(forms, call.params, step)
            else:
                params = call.params
                if sequence.on_device and step.before:
                    params = await self._taken_back(sequence, entry, params, decoder)
                await steps.by_file(entry, params, step)
            return took[-1]

        if on_device == sequence.on_device or not step.before:
            turn = self._turn(call, steps, step, alone, arrived, on_device=on_device)
        else:
            turn = None
        last = await (alone() if turn is None else self._joint.run(turn))
        sequence.on_device = on_device
        work, ran, plan = last
        sequences.stepped(sequence, ran.rows, ran.nbytes, time.monotonic())
        spent = sum(each.result.infer_ns for _, each, _ in took or [last])
        whole = dataclasses.replace(ran.result, infer_ns=spent)
        result = plan.result(whole, self.pool.asking.noted(entry, work, whole, arrived))
        whole_runs = len(found) < 2 and all(piece.count == piece.form.tokens for piece, _ in found)
        return result if last_token or whole_runs else _joined(result, found)

    def _turn(
        self,
        call: InferCall,
        steps: _Steps,
        step: Step,
        alone: Callable[[], Awaitable[Ran]],
        arrived: float,
        *,
        on_device: bool,
    ) -> Turn | None:
        """Return a step of one token, to be run alone or with those of others; None where it is another."""
        entry, decoder = call.entry, steps.decoder
        if step.tokens > 1 or not (decoder.has_joint_forms and _is_plain(call.params, decoder, step)):
            return None
        capacity = max((piece.form.capacity for piece in pieces(step)), default=0)
        if not capacity:
            return None

        def form(capacity: int, sequences: int) -> tuple[int, ServedModel] | None:
            for each in joint_forms(capacity, sequences):
                runner = call.runner(decoder.shapes(each)) if on_device else entry
                least = self._least.get(_joint_key(entry, runner, each), sequences + 1)
                if on_device == (runner is not entry) and least <= sequences:
                    return each.sequences, runner
            return None

        def wish(sequences: int) -> None:
            wanted = joint_forms(capacity, sequences)[0]
            if not on_device:
                self._wanted.add((entry.name, wanted))
                return
            shapes = decoder.shapes(wanted)
            self.ledger.asked(entry.name, variant_name(entry.name, shapes, decoder.interface), shapes)

        line = cache(lambda: steps.in_line(call.params, step))
        return Turn(
            call=call,
            number=steps.number,
            arrived=arrived,
            deadline=arrived + plans.timeout_us(call.params.parameters) / 1e6,
            capacity=capacity,
            on_device=on_device,
            planned=cache(lambda capacity: steps.planned(line(), *pieces(step, capacity))),
            form=form,
            wish=wish,
            alone=alone,
        )

    def _forms(self, call: InferCall, decoder: Decoder, step: Step) -> Mapping[Form, ServedModel]:
        """Return the forms that are to run a request; none where one is missing. Counts what is asked for."""
        if not (decoder.has_forms and _is_plain(call.params, decoder, step)):
            return {}
        found: dict[Form, ServedModel] = {}
        for form in {piece.form for piece in pieces(step)}:
            shapes = decoder.shapes(form)
            name = variant_name(call.entry.name, shapes, decoder.interface)
            self.ledger.asked(call.entry.name, name, shapes)
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
            for name, form in self._wanted:
                if name == entry.name and _joint_key(entry, entry, form) not in self._compared:
                    compare = partial(self._compare, entry, decoder, form, entry, entry)
                    return Work(f"comparing {name} for {form.sequences} sequences at once", compare)
            loaded = {v.name: v for v in self.registry.variants(entry.name) if not self.registry.rests(v)}
            for form in (*FORMS, *(JOINT if decoder.has_joint_forms else ())):
                runner, alone = (
                    loaded.get(variant_name(entry.name, decoder.shapes(each), decoder.interface))
                    for each in (form, Form(form.tokens, form.capacity))
                )
                if runner is None or alone is None or _key(entry, runner) in self._compared:
                    continue
                compare = partial(self._compare, entry, decoder, form, runner, alone)
                return Work(f"comparing {runner.name}", compare)
        return None

    async def _ask_worker(
        self, entry: ServedModel, model: ServedModel, asked: Callable[[str], WorkerCall[R]]
    ) -> R:
        """Have the engine of a form, or of the file where `model` is `entry`, run a call for its key."""
        server = self.pool.servers[entry.cpu_engine if model is entry else model.device]
        call = asked(model.key_on(server.name))
        return await server.supervisor.call(call, seconds=self.limits.run_seconds)

    async def _compare(
        self, entry: ServedModel, decoder: Decoder, form: Form, runner: ServedModel, alone: ServedModel
    ) -> None:
        """Run made-up sequences by a form and by ONNX Runtime, and note how they differ.

        `alone` is the form for one of them.
        """

        async def ask(model: ServedModel, _: InferencePlan, asked: Callable[[str], RunStep]) -> StepRan:
            return await self._ask_worker(entry, model, asked)

        several = [
            _Steps(
                decoder=decoder,
                number=next(self._numbers),
                regions=RegionTable(0),
                max_answer_bytes=self.limits.max_answer_bytes,
                max_state_bytes=1 << 62,
                last_token=False,
                ask=ask,
            )
            for _ in range(form.sequences + 1)
        ]
        key, least, name = _joint_key(entry, runner, form), 1, runner.name
        try:
            if form.sequences > 1:
                worst, least = await self._joint_difference(entry, decoder, form, (runner, alone), several)
            else:
                worst = await self._difference(entry, decoder, form, runner, several[0])
        except (InvalidArgument, DeviceError, ResourceExhausted) as error:
            self._compared[key] = str(error)
            _log.warning("%s is not used in sequences: %s", name, error)
            return
        finally:
            self.sequencer.sequences.ended += [steps.number for steps in several]
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
        elif least > form.sequences:
            _log.info("%s: steps of %d sequences as one take longer than one by one", name, form.sequences)
        elif form.sequences > 1:
            self._least[key] = least
            _log.info("%s runs steps of %d to %d sequences as one from now on", name, least, form.sequences)
        else:
            _log.info("%s runs sequences of up to %d tokens from now on", name, form.capacity)

    async def _difference(
        self, entry: ServedModel, decoder: Decoder, form: Form, runner: ServedModel, steps: _Steps
    ) -> float:
        """Return how far the answers of a form are from ONNX Runtime's, of the largest value."""
        before, worst = 0, 0.0
        # More than fits one run, and less.
        for tokens in (form.tokens + 1, form.tokens) if form.tokens > 1 else (1, 1, 1):
            step = Step(1, tokens, before)
            params = decoder.made_up(entry.name, step)
            expected = await steps.by_file(entry, params, step)
            found = await steps.by_forms({form: runner}, params, step)
            for at, output in enumerate(decoder.without_state.outputs):
                right = expected.result.raw[at]
                row = len(right) // tokens
                piece, ran = found[-1]
                # The last token has seen all others; a vocabulary of 150,000 takes a while to compare.
                last = rows_of(ran.result.raw[at], piece)[-row:]
                worst = max(worst, await in_thread(difference, output.dtype, last, bytes(right[-row:])))
            before = step.after
        return worst

    async def _joint_difference(
        self,
        entry: ServedModel,
        decoder: Decoder,
        form: Form,
        runners: tuple[ServedModel, ServedModel],
        several: Sequence[_Steps],
    ) -> tuple[float, int]:
        """Return what `_difference` does, of a form for several sequences, each of which begins a turn later.

        Also returns for how many sequences the first of `runners`, that form, takes less time than as many
        runs of the second, which is for one: the last of `several`.
        """
        (runner, alone), (*members, single), worst = runners, several, 0.0
        for turn in range(form.sequences + 2):
            planned: list[Planned] = []
            expected: list[StepRan] = []
            for at, steps in enumerate(members[: turn + 1]):
                step = Step(1, 1, turn - at)
                params = decoder.made_up(entry.name, Step(1, 1, turn + at))
                expected.append(await steps.by_file(entry, params, step))
                planned.append(steps.planned(params, *pieces(step, form.capacity)))
            found = await self._ask_worker(entry, runner, partial(steps_call, form, planned))
            for own, other in zip(found.members, expected, strict=True):
                for output, row, right in zip(
                    decoder.without_state.outputs, own.result.raw, other.result.raw, strict=True
                ):
                    worst = max(worst, await in_thread(difference, output.dtype, row, right))
        ratios: list[float] = []
        for turn in range(_TIMED):
            # A step can be run again, from the rows that it began with.
            together = await self._ask_worker(entry, runner, partial(steps_call, form, planned))
            step = Step(1, 1, turn)
            params = decoder.made_up(entry.name, step)
            if alone is entry:
                ran = await single.by_file(entry, params, step)
            else:
                [(_, ran)] = await single.by_forms({Form(1, form.capacity): alone}, params, step)
            ratios.append(together.members[0].result.infer_ns / max(1, ran.result.infer_ns))
        return worst, max(2, int(median(ratios)) + 1)

    async def tidy(self) -> None:
        """Have workers let go of what nobody asked for."""
        self._let_go()

    def _let_go(self) -> None:
        """Have workers let go of the sequences that have ended."""
        ended, self.sequencer.sequences.ended = self.sequencer.sequences.ended, []
        if not ended:
            return
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


def _joint_key(entry: ServedModel, runner: ServedModel, form: Form) -> tuple[str, str]:
    """Return the key of a form for several sequences, which ONNX Runtime runs where it is not compiled."""
    return entry.manifest.source_key, runner.key if runner is not entry else str(form)


def _is_plain(params: InferParams, decoder: Decoder, step: Step) -> bool:
    """Return whether a request has tokens of one sequence, and wants outputs in line that are no state."""
    known = {tensor.name for tensor in decoder.without_state.outputs}
    return (
        step.batch == 1
        and names(params) == decoder.tokens
        and all(output.parameters is None and output.name in known for output in params.outputs or ())
    )


def _joined(result: Inferred, found: Sequence[tuple[Piece, StepRan]]) -> Inferred:
    """Return the result of the last piece with the outputs of all."""
    count = sum(piece.count for piece, _ in found)
    order = [each.name for each in result.outputs]
    raw = [b"".join(rows_of(ran.result.raw[at], piece) for piece, ran in found) for at in range(len(order))]
    outputs = tuple(
        dataclasses.replace(each, shape=(each.shape[0], count, *each.shape[2:])) for each in result.outputs
    )
    return dataclasses.replace(result, outputs=outputs, raw_output_contents=tuple(raw))
