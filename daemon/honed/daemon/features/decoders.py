"""Runs decoders: models whose state grows by a row for each token, and stays in the worker that runs them.

A request of a sequence sends tokens and receives logits. The worker holds keys and values, and inputs that
only the first request sends, such as an encoder's output. Masks, positions and lengths, which follow from the
number of tokens, are generated unless the request has them.

ONNX Runtime accepts any number of tokens. Compiled shapes have one token or a chunk, and a fixed capacity of
state; they are shape variants (`variants.py`), compiled on demand. A mask hides unused rows of state. A model
may ignore that mask, so a compiled shape serves only after a comparison with ONNX Runtime.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from honed.daemon.background import Pauses
from honed.daemon.core.model import ServedModel
from honed.daemon.core.state import Registry
from honed.daemon.feature import BackgroundTask, Feature, FeatureRequest, Infer
from honed.daemon.idle.leasing import Leasing
from honed.daemon.observe.usage import ShapeDemand, UsageLog
from honed.daemon.serving.engine_server import EngineServer
from honed.daemon.serving.in_flight import PendingRequest
from honed.daemon.serving.loader import Loader, VersionComparer
from honed.daemon.serving.plan import InferencePlan
from honed.daemon.serving.pool import EngineManager
from honed.daemon.serving.selection import EngineChoice
from honed.daemon.serving.trial import PairedTrialResult
from honed.daemon.settings import places
from honed.daemon.settings.schema import Limits, VariantSettings
from honed.daemon.store.compiled import Interface
from honed.daemon.store.names import Shapes, model_of
from honed.daemon.worker.calls import (
    DropSequences,
    ReadSequence,
    RunStep,
    SequenceState,
    SetSequence,
    StepResult,
    state_lost,
)
from honed.daemon.worker.step_inputs import StepSize
from honed.daemon.worker.supervisor import WorkerDied
from honed.protocol.errors import PreconditionBroken, ResourceExhausted, SequenceLost
from honed.protocol.params import InferOptions, InputTensor, PrepareParams
from honed.protocol.service import IdleStatus
from honed.protocol.strict import Map
from honed.protocol.values import Data
from honed.runtime.dtypes import dtype
from honed.runtime.engines import MIN_PAIRS

from .decoding import (
    CAPACITIES,
    FORMS,
    DecoderBucket,
    DecoderModel,
    TokenChunk,
    decoder_of,
    forms_for,
    longest_chunk,
    rows_of,
)
from .form_trials import FormTrial
from .sequences import (
    LiveSequence,
    SequenceFeature,
    SequenceKey,
    empty_result,
    source_of,
    state_of,
    tokens_result,
)
from .stepping import Steps, alike_of
from .variants import HOPELESS, VariantCompiler

_NO_GAIN: Final = "those compiled so far are slower on this processor than ONNX Runtime"
_TOO_LONG: Final = f"its sequences have more than {CAPACITIES[-1]:,} tokens"

_log = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class Decoders(Feature):
    """A feature that runs the sequences of models whose state grows.

    `sequencer` holds the sequences of all models.
    """

    sequencer: SequenceFeature
    registry: Registry
    pool: EngineManager
    leasing: Leasing
    usage_log: UsageLog
    limits: Limits
    maker: VariantCompiler
    settings: Callable[[], VariantSettings]  # The settings in force
    _tidied: bool = field(init=False, default=False)
    _numbers: itertools.count[int] = field(init=False, default_factory=lambda: itertools.count(1))
    _telling: set[asyncio.Task[None]] = field(init=False, default_factory=set)
    # Cached decoders by model, with the interface and state that they were derived from.
    _known: dict[str, tuple[Interface, Mapping[str, str], DecoderModel | None]] = field(
        init=False, default_factory=dict
    )
    _refused: set[str] = field(init=False, default_factory=set)  # Keys of compiled shapes with wrong outputs
    _pauses: Pauses = field(init=False, default_factory=Pauses)
    # Reasons by model why compiled shapes could not run its latest step; none if they could.
    _no_forms: dict[str, str] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.maker.trial = self.trial

    def wrap(self, entry: ServedModel, infer: Infer) -> Infer | None:
        """Run the steps of a model's sequences where their state lies, if the state grows."""
        decoder = self._decoder(entry)
        if decoder is None:
            return None

        async def run(key: SequenceKey, call: FeatureRequest) -> Map:
            try:
                return await self._run(key, call, decoder)
            finally:
                self._let_go()

        return self.sequencer.in_turns(infer, run)

    def _decoder(self, entry: ServedModel) -> DecoderModel | None:
        interface, state = entry.manifest.interface, entry.manifest.state
        if interface is None:
            return None
        known = self._known.get(entry.name)
        if known is None or known[:2] != (interface, state):
            known = self._known[entry.name] = interface, state, decoder_of(interface, state)
        return known[2]

    def show_fields(self, entry: ServedModel) -> Mapping[str, object]:
        """Return which compiled shapes run a decoder's steps, and why others do not."""
        decoder = self._decoder(entry)
        if decoder is not None:
            return {"forms": self._describe_forms(entry, decoder)}
        unnamed = next((pair.input.name for pair in state_of(entry) if pair.may_grow), "")
        why = f"its state {unnamed!r} is not named as keys or values, one input for each"
        return {"forms": f"no compiled form runs its steps: {why}"} if unnamed else {}

    def _describe_forms(self, entry: ServedModel, decoder: DecoderModel) -> str:
        manifest, why = entry.manifest, decoder.no_forms
        if not why and manifest.engine_wanted(self.maker.policy) == "cpu":
            why = "ONNX Runtime was asked for"
        if not why and manifest.owner is not None:
            why = "those of users are not compiled for further sizes"
        if not why and not places.compiler():
            why = "the compiler is not installed (apt install honed-tuner)"
        if why:
            return f"no compiled form runs its steps: {why}"
        wishes = {wish.name: wish for wish in self.usage_log.wishes(entry.name, self.maker.under(entry))}
        failures, idle = sum(bool(wish.failed) for wish in wishes.values()), self.leasing.idle()
        hopeless = failures >= HOPELESS and not self.registry.variants(entry.name)
        serving, others = list[str](), dict[str, list[str]]()
        for form in FORMS:
            name = decoder.variant(entry.name, form)
            variant, wish = self.registry.variant(name), wishes.get(name)
            if variant is None:
                why = (
                    self._explain_wish(wish, idle)
                    if wish is not None and (wish.failed or not hopeless)
                    else ""
                )
            elif variant.manifest.decision.times is None and variant.key not in self._refused:
                why = "it is compared when idle"
            elif not self.maker.is_for_device(entry, variant.manifest):
                why = variant.manifest.decision.reason
            else:
                serving.append(str(form))
                why = ""
            if why:
                others.setdefault(why, []).append(str(form))
        parts = [f"compiled forms run {', '.join(serving)} rows of state"] if serving else []
        parts += [f"not with {', '.join(forms)} rows of state: {why}" for why, forms in others.items()]
        parts += [self._no_forms[entry.name]] if entry.name in self._no_forms else []
        if parts:
            return "; ".join(parts if serving else ("no compiled form runs its steps", *parts))
        return "no compiled form runs its steps yet: no sequence has gone on since the service started"

    def _explain_wish(self, wish: ShapeDemand, idle: IdleStatus) -> str:
        """Return why a requested compiled shape is not there."""
        settings = self.settings()
        if wish.failed:
            return wish.failed
        if wish.name in self.maker.changes.active:
            return "it is being compiled"
        if not settings.per_model:
            return "per_model of [variants] is 0"
        count = round(wish.requests, 1)  # Counted as in `next_shapes`
        if count < settings.requests:
            return f"steps of this size count {count:g} of the {settings.requests:g} that it takes"
        if idle.idle:
            return "it is compiled next"
        return f"it is compiled when the machine is idle, which it is not: {idle.why}"

    def _note(self, model: str, step: StepSize, why: str) -> None:
        """Record why compiled shapes could not run a step; a first one may have more inputs than the rest."""
        if why and step.past:
            self._no_forms[model] = why
        elif not why and self._no_forms:
            self._no_forms.pop(model, None)

    def forget(self, model: str) -> None:
        """Drop the cached decoder of a removed model, or the pause of a removed variant."""
        self._known.pop(model, None)
        self._no_forms.pop(model, None)
        self._pauses.forget(model)

    async def _run(self, key: SequenceKey, call: FeatureRequest, decoder: DecoderModel) -> Map:
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
            return empty_result(call)
        try:
            with self.leasing.serving(entry.name, call.connection.peer.pid):
                result = await self._step(sequence, call, decoder)
        except SequenceLost as lost:
            sequences.drop(key, str(lost))
            raise key.lost(str(lost)) from None
        except BaseException:
            sequences.record_failure(sequence, first=first)
            raise
        if options.sequence_end:
            sequences.drop(key)
        return result

    async def _step(self, sequence: LiveSequence, call: FeatureRequest, decoder: DecoderModel) -> Map:
        arrived, sequences, entry = time.monotonic(), self.sequencer.sequences, call.entry
        options = call.params.parameters or InferOptions()
        regions, limit = call.connection.regions, self.limits.max_answer_bytes
        most, rows = sequences.settings.max_tokens, sequence.rows
        alike = call.compute_once(
            ("step", bool(rows)),  # The first request has inputs that later ones omit
            (decoder, limit, regions.changes),
            lambda: alike_of(call.params, decoder, rows, regions, limit),
        )
        alike.plan.check_data(call.data)
        step = StepSize(alike.size.batch, alike.size.tokens, rows)
        if alike.has_state:  # The state's shape determines the number of rows
            step = decoder.step(call.params, rows)
        if step.after > most:
            raise ResourceExhausted(
                f"{sequence.key.label} would have {step.after} tokens and may have {most}; begin it anew, or "
                "raise max_tokens of [sequences] in the configuration"
            )
        took: list[tuple[PendingRequest[Any], StepResult, InferencePlan]] = []

        async def ask(
            runner: ServedModel | None, plan: InferencePlan, call_for: Callable[[str], RunStep]
        ) -> StepResult:
            assert runner is not None
            file = runner is entry
            work = await self.pool.requests.ask_for(
                call.connection.client,
                runner,
                call_for,
                regions=plan.regions,
                priority=plan.priority,
                timeout=call.seconds(plan),
                open_shape=file,
                empty=plan.empty if file else None,
                held=True,
            )
            [ran] = work.answers
            took.append((work, ran, plan))
            infer_ns = ran.result.infer_ns / max(1, len(ran.tokens))
            self.usage_log.count_run(runner, infer_ns, fits=not file)
            return ran

        tokens, found = list[int](), list[tuple[TokenChunk, StepResult]]()
        wanted = options.greedy_tokens or 0
        while True:
            steps = Steps(
                alike=alike,
                data=call.data,
                step=step,
                number=sequence.number,
                regions=regions,
                max_state_bytes=sequences.allowance(sequence),
                ask=ask,
                remaining=min(wanted - len(tokens) - 1, most - step.after),
            )
            found = await self._run_steps(steps, sequence, call, decoder)
            work, ran, plan = took[-1]
            tokens += ran.tokens
            if alike.greedy is None or len(tokens) >= wanted or ran.rows >= most:
                break
            if tokens[-1] in alike.greedy.stop:
                break
            inputs, data = alike.next_token(tokens[-1])
            params = dataclasses.replace(call.params, inputs=inputs)
            call, step = dataclasses.replace(call, params=params, data=data), StepSize(1, 1, ran.rows)
            alike = call.compute_once(
                ("step", "next"),
                (decoder, limit, regions.changes),
                partial(alike_of, params, decoder, ran.rows, regions, limit),
            )
        sequences.record_step(sequence, ran.rows, ran.nbytes, time.monotonic())
        answer = ran.result
        if len(took) > 1:
            spent = sum(each.result.infer_ns for _, each, _ in took)
            answer = dataclasses.replace(answer, infer_ns=spent)
        answered = self.pool.requests.record_run(entry, work, answer, arrived)
        if alike.greedy is not None:
            return tokens_result(call, tokens, answered)
        result = plan.answer(answer, call.id, answered)
        whole_runs = len(found) < 2 and all(piece.count == piece.form.tokens for piece, _ in found)
        return result if alike.last_token or whole_runs else _join_results(result, found)

    async def _run_steps(
        self, steps: Steps, sequence: LiveSequence, call: FeatureRequest, decoder: DecoderModel
    ) -> list[tuple[TokenChunk, StepResult]]:
        """Run a step where its sequence's state lies, or move that; return the chunks by compiled shapes."""
        entry, alike, step = call.entry, steps.alike, steps.step
        usable = decoder.has_forms and not alike.no_forms
        forms = forms_for(step, self._longest_chunk(entry)) if usable else ()
        self._note(entry.name, step, alike.no_forms or ("" if forms else _TOO_LONG))
        chosen = self._choose_form(call, decoder, forms)
        if chosen is not None and step.past and not sequence.on_device:
            chosen = chosen if await self._move_to_device(sequence, entry, decoder, step) else None
        if chosen is not None:
            with suppress(PreconditionBroken):  # Then ONNX Runtime runs it
                found = await steps.by_form(*chosen)
                sequence.on_device = True
                return found
        if sequence.on_device and step.past:
            params, data = await self._fetch_state(sequence, entry, call, step)
            whole = alike_of(params, decoder, step.past, steps.regions, self.limits.max_answer_bytes)
            steps = dataclasses.replace(steps, alike=whole, data=data)
        await steps.by_file(entry)
        sequence.on_device = False
        return []

    def _choose_form(
        self, call: FeatureRequest, decoder: DecoderModel, forms: Sequence[DecoderBucket]
    ) -> tuple[DecoderBucket, ServedModel] | None:
        """Return the first of the compiled shapes that serves, with its variant; count what is requested.

        That is the shape that serves, and before it those up to the first that may still be compiled.
        """
        entry, missing = call.entry, list[str]()
        for form in forms:
            shapes, name = decoder.shapes(form), decoder.variant(entry.name, form)
            runner = call.runner(shapes, name)
            serves = runner is not entry and runner.manifest.decision.times is not None
            if serves or all(self._has_failed(entry, each) for each in missing):
                self.usage_log.count_requests(entry.name, name, shapes)
            if serves:
                return form, runner
            missing.append(name)
        return None

    def _longest_chunk(self, entry: ServedModel) -> int:
        return longest_chunk(self.pool.device_of(entry).supervisor.profile)

    def _has_failed(self, entry: ServedModel, variant: str) -> bool:
        """Return whether a compiled shape could not be compiled, for example for lack of memory."""
        wishes = self.usage_log.wishes(entry.name, self.maker.under(entry))
        return any(wish.failed for wish in wishes if wish.name == variant)

    async def _fetch_state(
        self, sequence: LiveSequence, entry: ServedModel, call: FeatureRequest, step: StepSize
    ) -> tuple[PrepareParams, tuple[Data, ...]]:
        """Return a request with the state read from the device, so that the CPU engine can continue."""
        state = await self._read(self.pool.device_of(entry), sequence, step)
        inputs = tuple(
            InputTensor(name=each.name, datatype=dtype(each.dtype).datatype, shape=each.shape)
            for each in state.tensors
        )
        params = dataclasses.replace(call.params, inputs=(*inputs, *call.params.inputs))
        return params, (*state.raw, *call.data)

    async def _move_to_device(
        self, sequence: LiveSequence, entry: ServedModel, decoder: DecoderModel, step: StepSize
    ) -> bool:
        """Move a sequence's state from the CPU engine to the device; return False if that crashes."""
        state = await self._read(self.pool.servers[entry.cpu_engine], sequence, step)
        held = {each.input: each for each in decoder.state_tensors(step)}
        tensors = tuple(held[tensor.name] for tensor in state.tensors)
        call = SetSequence(sequence=sequence.number, rows=step.past, tensors=tensors, raw=state.raw)
        try:
            await self.pool.device_of(entry).supervisor.call(call, seconds=self.limits.run_seconds)
        except WorkerDied:
            return False
        return True

    async def _read(self, server: EngineServer, sequence: LiveSequence, step: StepSize) -> SequenceState:
        """Return the state before a step from the worker that holds it; raise SequenceLost if that ended."""
        read = ReadSequence(sequence=sequence.number, rows=step.past)
        try:
            return await server.supervisor.call(read, seconds=self.limits.run_seconds)
        except WorkerDied:
            raise state_lost() from None

    # Background work

    def form_of(self, variant: ServedModel) -> tuple[ServedModel, DecoderModel, DecoderBucket] | None:
        """Return a variant's model, decoder and compiled shape; None if it is not of a decoder."""
        entry = self.registry.find(model_of(variant.name))
        decoder = self._decoder(entry) if entry is not None and entry.name != variant.name else None
        form = decoder.form_of(variant.manifest.shapes) if decoder is not None else None
        return (entry, decoder, form) if entry is not None and decoder is not None and form else None

    def trial(
        self, entry: ServedModel, shapes: Shapes, device: EngineServer, key: str, cpu: EngineServer
    ) -> Awaitable[EngineChoice] | None:
        """Return the trial of a shape loaded on the device against ONNX Runtime; None if not a decoder's."""
        decoder = self._decoder(entry)
        form = decoder.form_of(shapes) if decoder is not None else None
        if decoder is None or form is None:
            return None

        async def choice() -> EngineChoice:
            with self._form_trial(entry, decoder, form, device.loader, key) as trial:
                found = await trial.beside_file(cpu.loader)
            if found.times is None:
                self._refused.add(key)
            self._give_up(entry, decoder, form, found)
            return found

        return choice()

    def _give_up(
        self, entry: ServedModel, decoder: DecoderModel, form: DecoderBucket, choice: EngineChoice
    ) -> None:
        """Compile no further forms if all, `HOPELESS` or more, were slower on the cores of ONNX Runtime."""
        kept = {each.name: each.manifest.decision for each in self.registry.variants(entry.name)}
        chosen = {name: (decision.chosen, decision.times) for name, decision in kept.items()}
        chosen[decoder.variant(entry.name, form)] = choice.engine, choice.times
        slower = [
            engine == "cpu" and times is not None and times.same_cores and times.others_percent is None
            for engine, times in chosen.values()
        ]
        if (
            len(slower) < HOPELESS
            or not all(slower)
            or entry.manifest.engine_wanted(self.maker.policy) == "gpu"
        ):
            return
        for missing in FORMS:
            name = decoder.variant(entry.name, missing)
            if name not in chosen and missing.tokens <= self._longest_chunk(entry):
                shapes, under = decoder.shapes(missing), self.maker.under(entry)
                self.usage_log.record_failure(entry.name, name, shapes, _NO_GAIN, under)

    def version_comparer(self, entry: ServedModel) -> VersionComparer | None:
        """Return the comparison of a variant's versions by outputs and steps; None if not a decoder's."""
        if (form := self.form_of(entry)) is None:
            return None

        async def compare(device: Loader, old: str, new: str, allowance: float) -> PairedTrialResult:
            answers = await device.compare(old, new, allowance, most=MIN_PAIRS)
            if answers.wrong:
                return answers
            with (
                self._form_trial(*form, device, old) as before,
                self._form_trial(*form, device, new) as successor,
            ):
                return await before.beside_successor(successor, allowance)

        return compare

    @contextmanager
    def _form_trial(
        self, entry: ServedModel, decoder: DecoderModel, form: DecoderBucket, device: Loader, key: str
    ) -> Iterator[FormTrial]:
        """Create a trial of a compiled shape; its sequences end with the context."""
        numbers = next(self._numbers), next(self._numbers), next(self._numbers)
        try:
            yield FormTrial(
                decoder=decoder,
                form=form,
                entry=entry,
                device=device,
                key=key,
                max_answer_bytes=self.limits.max_answer_bytes,
                numbers=numbers,
            )
        finally:
            self.sequencer.sequences.ended += numbers

    def background(self, *, idle: bool) -> BackgroundTask | None:
        """Return the comparison of the next variant that has none, or whose times are outdated."""
        for variant in self.registry.variants() if idle else ():
            if (found := self.form_of(variant)) is not None and self._due(variant):
                return BackgroundTask(f"comparing {variant.name}", partial(self._compare, found[0], variant))
        return None

    def _due(self, variant: ServedModel) -> bool:
        times, device = variant.manifest.decision.times, self.pool.device_of(variant)
        cpu = self.pool.cpu_for(variant.manifest.owner)
        if cpu is None or not device.ready or not self._pauses.over(variant.name):
            return False
        if times is None:
            return variant.key not in self._refused
        here = device.engine.fingerprint, cpu.engine.fingerprint
        return times.others_percent is not None or (times.device, times.runtime) != here

    async def _compare(self, entry: ServedModel, variant: ServedModel) -> None:
        self._pauses.begin(variant.name)
        with self.leasing.adding(0, "a form of a decoder is being compared"):
            await self.maker.choose_again(entry, variant)

    async def tidy(self) -> None:
        """Have workers drop ended sequences; once, remove variants that this version does not run."""
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
                    await self.maker.changes.remove_variants([variant.name])
        self._tidied = True

    def _let_go(self) -> None:
        """Have workers drop the state of sequences that have ended."""
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
        """Wait until the workers have dropped ended sequences."""
        await asyncio.gather(*self._telling, return_exceptions=True)


def _join_results(result: Map, answers: Sequence[tuple[TokenChunk, StepResult]]) -> Map:
    """Return the last chunk's result with the outputs of all chunks."""
    count = sum(piece.count for piece, _ in answers)
    outputs = [{**each, "shape": [each["shape"][0], count, *each["shape"][2:]]} for each in result["outputs"]]
    raw = [
        b"".join(rows_of(ran.result.raw[at], piece) for piece, ran in answers) for at in range(len(outputs))
    ]
    return {**result, "outputs": outputs, "raw_output_contents": raw}
