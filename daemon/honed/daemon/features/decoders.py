"""Decoders: models whose state grows by a row for each token, and stays in the worker that runs them.

A request of a sequence has tokens and gets logits. The worker holds keys and values, and what only the first
request brings, such as an encoder's output. Masks, positions and lengths, which follow from how many tokens
there were, are made up here unless the request has them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any, Final

import numpy as np

from honed.daemon.core.model import ServedModel, is_cpu
from honed.daemon.core.queue import Replaced
from honed.daemon.feature import Feature, Infer, InferCall
from honed.daemon.idle.leasing import Leasing
from honed.daemon.observe.usage import UsageLog
from honed.daemon.serving import plan as plans
from honed.daemon.serving.pool import Pool
from honed.daemon.settings.schema import Limits
from honed.daemon.store import state_pairs
from honed.daemon.store.compiled import Interface, TensorSpec
from honed.daemon.worker.calls import DropSequences, HeldTensor, RunStep
from honed.protocol.dataclass import dataclass
from honed.protocol.errors import InvalidArgument, ResourceExhausted, SequenceLost, Unavailable
from honed.protocol.params import InferOptions, InferParams, InputTensor, OutputTensor
from honed.protocol.results import Inferred
from honed.runtime.dtypes import dtype

from .sequences import HeldSequence, SequenceKey, Sequencer, key_of, nothing, source_of

# What a decoder's tokens are called, and what is kept from the request that brings it.
_TOKENS: Final = ("input_ids", "decoder_input_ids", "inputs_embeds", "decoder_inputs_embeds")
_CONSTANT: Final = "encoder_"


@dataclass(frozen=True, slots=True)
class Step:
    """A request's size: its batch, its tokens, and how many came before."""

    batch: int
    tokens: int
    before: int

    @property
    def after(self) -> int:
        """How many tokens there are with this request."""
        return self.before + self.tokens


def _positions(step: Step, shape: tuple[int, ...]) -> np.ndarray:
    row = np.arange(step.before, step.after)
    sizes = [size for size in shape[:-2] if size > 0]  # some models have one for each of three directions
    return row if len(shape) == 1 else np.broadcast_to(row, (*sizes, step.batch, step.tokens))


# Inputs that follow from a step, by their names in files of Optimum and onnxruntime-genai: the value for the
# shape that the model says.
_MADE: Final[Mapping[str, Callable[[Step, tuple[int, ...]], Any]]] = {
    "attention_mask": lambda step, _: np.ones((step.batch, step.after)),
    "decoder_attention_mask": lambda step, _: np.ones((step.batch, step.after)),
    "position_ids": _positions,
    "cache_position": _positions,
    "past_sequence_length": lambda step, shape: np.full([1] * len(shape), step.before),
    "past_seq_len": lambda step, shape: np.full([1] * len(shape), step.before),
    "total_sequence_length": lambda step, shape: np.full([1] * len(shape), step.after),
    "total_seq_len": lambda step, shape: np.full([1] * len(shape), step.after),
    "seqlens_k": lambda step, _: np.full(step.batch, step.after - 1),
    "use_cache_branch": lambda step, shape: np.full([1] * len(shape), step.before > 0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """What is known of a model whose state grows: its pairs, and its other inputs by what they are."""

    interface: Interface
    pairs: tuple[state_pairs.StatePair, ...]
    made: tuple[TensorSpec, ...]
    constants: tuple[str, ...]
    tokens: tuple[str, ...]

    def step(self, params: InferParams, rows: int) -> Step:
        """Return the size of a request after `rows` tokens, or after those of the state that it brings.

        Raises InvalidArgument where it has no tokens.
        """
        shapes = {tensor.name: tensor.shape for tensor in params.inputs}
        for pair in self.pairs:
            if pair.grows_on >= 0 and len(shape := shapes.get(pair.input.name, ())) > pair.grows_on:
                rows = shape[pair.grows_on]
        for name in self.tokens:
            if len(shape := shapes.get(name, ())) > 1:
                return Step(shape[0], shape[1], rows)
        raise InvalidArgument(
            f"input {self.tokens[0]!r} is missing, or has no tokens; give it with shape [batch, tokens]"
        )

    def given(self, params: InferParams, step: Step) -> tuple[InferParams, Interface]:
        """Return the request with what follows from its step, and the interface that it is checked by.

        That is the model's without what the worker holds.
        """
        given = {tensor.name for tensor in params.inputs}
        inputs: list[InputTensor] = []
        contents: list[bytes] = []
        for spec in self.made:
            if spec.name in given:
                continue
            value = np.asarray(_MADE[spec.name](step, spec.shape or ()), dtype(spec.dtype).numpy, order="C")
            inputs.append(InputTensor(name=spec.name, datatype=dtype(spec.dtype).datatype, shape=value.shape))
            contents.append(value.tobytes())
        held = {pair.input.name for pair in self.pairs}
        if step.before:
            held.update(self.constants)
        state = {pair.output.name for pair in self.pairs}
        outputs = tuple(tensor for tensor in self.interface.outputs if tensor.name not in state)
        more = dataclasses.replace(
            params,
            inputs=(*inputs, *params.inputs),
            raw_input_contents=(*contents, *(params.raw_input_contents or ())),
            outputs=params.outputs or tuple(OutputTensor(name=tensor.name) for tensor in outputs),
        )
        taken = tuple(t for t in self.interface.inputs if t.name not in held or t.name in given)
        return more, dataclasses.replace(self.interface, inputs=taken)

    def held(self, step: Step) -> tuple[HeldTensor, ...]:
        """Return what the worker holds of a sequence that has batches of that size."""
        return tuple(
            HeldTensor(
                output=pair.output.name,
                input=pair.input.name,
                dtype=pair.input.dtype,
                begins=tuple(
                    size if size >= 0 else 0 if axis else step.batch
                    for axis, size in enumerate(pair.input.shape or ())
                ),
                axis=pair.grows_on if pair.output.name not in self._once else -1,
                once=pair.output.name in self._once,
            )
            for pair in self.pairs
        )

    @property
    def _once(self) -> frozenset[str]:
        """Return the state that the first request makes for good: keys and values of what was encoded."""
        return frozenset(pair.output.name for pair in self.pairs if ".encoder." in pair.input.name)


def decoder_of(interface: Interface, named: Mapping[str, str]) -> Decoder | None:
    """Return what is known of a model, `named` being its state by output; None where none of it grows."""
    pairs = state_pairs.pairs(interface, named)
    if not any(pair.grows_on >= 0 for pair in pairs):
        return None
    state = {pair.input.name for pair in pairs}
    others = [tensor for tensor in interface.inputs if tensor.name not in state]
    made = tuple(tensor for tensor in others if tensor.name in _MADE and tensor.shape is not None)
    constants = tuple(tensor.name for tensor in others if tensor.name.startswith(_CONSTANT))
    rest = [t.name for t in others if t not in made and t.name not in constants]
    tokens = tuple(name for name in rest if name in _TOKENS) or tuple(rest)
    if not tokens:
        return None
    return Decoder(interface=interface, pairs=pairs, made=made, constants=constants, tokens=tokens)


@dataclass(kw_only=True)
class Decoders(Feature):
    """The steps of decoders' sequences: the feature of models whose state grows.

    `sequencer` has the sequences, and those of all other models.
    """

    sequencer: Sequencer
    pool: Pool
    leasing: Leasing
    ledger: UsageLog
    limits: Limits
    _numbers: itertools.count[int] = field(init=False, default_factory=lambda: itertools.count(1))
    _telling: set[asyncio.Task[None]] = field(init=False, default_factory=set)

    def wrap(self, entry: ServedModel, infer: Infer) -> Infer | None:
        """Run the steps of a model's sequences where their state is, if that grows."""
        interface = entry.manifest.interface
        decoder = decoder_of(interface, entry.manifest.state) if interface is not None else None
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
        try:
            result = await self._step(sequence, call, decoder)
        except SequenceLost as lost:
            sequences.drop(key, str(lost))
            raise SequenceLost(f"{key.shown} is not known: {lost}; begin it with sequence_start") from None
        except BaseException:
            sequences.failed(sequence, first=first)
            raise
        if options.sequence_end:
            sequences.drop(key)
        return result

    async def _step(self, sequence: HeldSequence, call: InferCall, decoder: Decoder) -> Inferred:
        arrived, entry, most = time.monotonic(), call.entry, self.sequencer.sequences.settings.max_tokens
        step = decoder.step(call.params, sequence.rows)
        if step.after > most:
            raise ResourceExhausted(
                f"{sequence.key.shown} would have {step.after} tokens and may have {most}; begin it anew, or "
                "raise max_tokens of [sequences] in the configuration"
            )
        params, interface = decoder.given(call.params, step)
        plain = dataclasses.replace(
            params.parameters or InferOptions(), sequence_id=None, sequence_start=None, sequence_end=None
        )
        plan = plans.check(
            dataclasses.replace(params, parameters=plain),
            None,
            interface,
            call.connection.regions,
            max_bytes=self.limits.max_answer_bytes,
            keep=False,
        )

        def ask(key: str) -> RunStep:
            return RunStep(
                run=plan.for_worker(key),
                sequence=sequence.number,
                rows=step.before,
                tensors=decoder.held(step),
                constants=decoder.constants,
                max_state_bytes=self.sequencer.sequences.allowance(sequence),
            )

        with self.leasing.serving(entry.name, call.connection.peer.pid):
            ran, work = await self.pool.asking.ask_for(
                call.connection.client,
                entry,
                ask,
                regions=plan.regions,
                priority=plan.priority,
                timeout=plan.timeout,
                open_shape=True,
                empty=plan.empty,
            )
        self.sequencer.sequences.stepped(sequence, ran.rows, ran.nbytes, time.monotonic())
        if entry.compiled is None and not entry.away:
            self.ledger.ran(entry.name, ran.result.infer_ns / 1e9)
        return self.pool.asking.noted(entry, plan, work, ran.result, arrived)

    async def tidy(self) -> None:
        """Have workers let go of what nobody asked for."""
        self.sequencer.sequences.expire(time.monotonic())
        self._let_go()

    def _let_go(self) -> None:
        """Have workers let go of the sequences that have ended."""
        ended, self.sequencer.sequences.ended = self.sequencer.sequences.ended, []
        if not ended:
            return
        for name, server in self.pool.servers.items():
            if is_cpu(name) and server.ready:
                told = asyncio.ensure_future(server.loader.tell(DropSequences(sequences=tuple(ended))))
                self._telling.add(told)
                told.add_done_callback(self._telling.discard)

    async def close(self) -> None:
        """End what is under way."""
        await asyncio.gather(*self._telling, return_exceptions=True)
