"""State kept between requests: which outputs it is, and what a sequence starts from whatever happens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from honed.daemon.features.sequences import (
    LiveSequence,
    SequenceFeature,
    SequenceKey,
    Sequences,
    SequenceSettings,
    StateTensor,
)
from honed.daemon.store import state_pairs
from honed.daemon.store.compiled import Interface, TensorSpec
from honed.runtime.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted, SequenceLost

Shape = tuple[int, ...] | None


def interface(inputs: dict[str, Shape], outputs: dict[str, Shape], said: dict[str, str] | None = None) -> Any:
    def tensors(of: dict[str, Shape]) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(name=name, dtype="float32", shape=shape) for name, shape in of.items())

    told = tuple((said or {}).items())
    return Interface(inputs=tensors(inputs), outputs=tensors(outputs), opset=17, producer="", state=told)


def named(found: tuple[state_pairs.StatePair, ...]) -> dict[str, str]:
    return {pair.output.name: pair.input.name for pair in found}


CACHE = (2, 1, 16)
FOUND: list[tuple[dict[str, Shape], dict[str, Shape], dict[str, str]]] = [
    (
        {"input": (-1, -1), "state": (2, -1, 128), "sr": ()},
        {"output": (-1, 1), "stateN": (-1, -1, -1)},
        {"stateN": "state"},
    ),
    ({"x": (1, 9), "h": CACHE, "c": CACHE}, {"y": (1,), "hn": CACHE, "cn": CACHE}, {"hn": "h", "cn": "c"}),
    ({"x": (1, 9), "h0": CACHE}, {"y": (1,), "hn": CACHE}, {"hn": "h0"}),
    (
        {"mix": (1, 9), "conv_cache": CACHE, "tra_cache": CACHE},
        {"enh": (1, 9), "conv_cache_out": CACHE, "tra_cache_out": CACHE},
        {"conv_cache_out": "conv_cache", "tra_cache_out": "tra_cache"},
    ),
    (
        {"ids": (1, 1), "past_key_values.0.key": (1, 2, -1, 4), "past_key_values.0.value": (1, 2, -1, 4)},
        {"logits": (1, 9), "present.0.key": (1, 2, -1, 4), "present.0.value": (1, 2, -1, 4)},
        {"present.0.key": "past_key_values.0.key", "present.0.value": "past_key_values.0.value"},
    ),
    ({"x": (1,), "prevState": CACHE}, {"y": (1,), "nextState": CACHE}, {"nextState": "prevState"}),
    # A filter of pictures is none, though its shapes fit, and neither is state of another size.
    ({"image_in": (1, 3)}, {"image_out": (1, 3)}, {}),
    ({"x": (1,), "state": (2, 3)}, {"y": (1,), "state_out": (2, 4)}, {}),
    # What could be two things is none.
    ({"x": (1,), "state": CACHE}, {"state_out": CACHE, "new_state": CACHE}, {}),
]


@pytest.mark.parametrize(("inputs", "outputs", "expected"), FOUND)
def test_state_is_found_by_names_and_shapes(
    inputs: dict[str, Shape], outputs: dict[str, Shape], expected: dict[str, str]
) -> None:
    assert named(state_pairs.pairs(interface(inputs, outputs), {})) == expected


def test_who_names_state_is_believed_if_it_can_be() -> None:
    model = interface({"a": CACHE, "b": CACHE}, {"x": CACHE, "y": (1,)}, {"x": "b"})
    assert named(state_pairs.pairs(model, {})) == {"x": "b"}
    assert named(state_pairs.pairs(model, {"x": "a"})) == {"x": "a"}
    assert state_pairs.from_text(" x = a,y=b ") == {"x": "a", "y": "b"}
    for wrong, told in (
        ({"z": "a"}, "no output 'z'"),
        ({"x": "z"}, "no input 'z'"),
        ({"y": "a"}, "not of the type and shape"),
    ):
        with pytest.raises(InvalidArgument, match=told):
            state_pairs.pairs(model, wrong)
    for text in ("x", "x=", "x=a,x=b"):
        with pytest.raises(InvalidArgument, match="is not OUT=IN"):
            state_pairs.from_text(text)


IDLE, MOST, MIB = 10.0, 3, 1
KEYS = st.builds(
    SequenceKey,
    user=st.sampled_from([1, 2]),
    model=st.sampled_from(["a", "b"]),
    name=st.sampled_from([1, 2, 3, 4, "1"]),
)


class Life(RuleBasedStateMachine):
    """Against a plain map of what each sequence's next request must start from."""

    @initialize()
    def start(self) -> None:
        settings = SequenceSettings(idle_seconds=IDLE, max_per_model=MOST, max_mib=MIB)
        self.sequences = Sequences(settings)
        self.model: dict[SequenceKey, tuple[bytes, float]] = {}
        self.under_way: dict[SequenceKey, tuple[LiveSequence, bool]] = {}
        self.source = {"a": "a1", "b": "b1"}
        self.now = 0.0

    def forget_idle(self) -> None:
        idle = [k for k, (_, at) in self.model.items() if k not in self.under_way and self.now - at >= IDLE]
        for key in idle:
            del self.model[key]

    @rule(key=KEYS)
    def begin(self, key: SequenceKey) -> None:
        if key in self.under_way:
            return  # one at a time
        self.forget_idle()
        self.model.pop(key, None)
        mine = {k for k in (*self.model, *self.under_way) if (k.user, k.model) == (key.user, key.model)}
        try:
            found = self.sequences.begin(key, self.source[key.model], (), self.now)
        except ResourceExhausted:
            assert len(mine) >= MOST
            return
        assert len(mine) < MOST
        assert found.tensors == {}
        self.under_way[key] = (found, True)

    @rule(key=KEYS)
    def go_on(self, key: SequenceKey) -> None:
        if key in self.under_way:
            return
        self.forget_idle()
        try:
            found = self.sequences.resume(key, self.source[key.model], self.now)
        except SequenceLost:
            assert key not in self.model
            return
        assert found.tensors["s"].data == self.model[key][0], "never from zero, never from another's"
        self.under_way[key] = (found, False)

    @rule(key=KEYS, nbytes=st.sampled_from([0, 1, 300 << 10, 700 << 10]), fill=st.integers(0, 255))
    def answered(self, key: SequenceKey, nbytes: int, fill: int) -> None:
        if key not in self.under_way:
            return
        sequence, first = self.under_way.pop(key)
        data = bytes([fill]) * nbytes
        others = sum(len(kept) for k, (kept, _) in self.model.items() if k.user == key.user and k != key)
        try:
            self.sequences.keep(sequence, {"s": StateTensor((nbytes,), data)}, self.now)
        except ResourceExhausted:
            assert others + nbytes > MIB << 20
            self.sequences.record_failure(sequence, first=first)
            return
        assert others + nbytes <= MIB << 20
        self.model[key] = (data, self.now)

    @rule(key=KEYS)
    def not_answered(self, key: SequenceKey) -> None:
        if key in self.under_way:
            sequence, first = self.under_way.pop(key)
            self.sequences.record_failure(sequence, first=first)
            if not first:
                self.model[key] = (self.model[key][0], sequence.used)

    @rule(key=KEYS)
    def end(self, key: SequenceKey) -> None:
        if key not in self.under_way:
            self.sequences.drop(key)
            self.model.pop(key, None)

    @rule(name=st.sampled_from(["a", "b"]))
    def another_model_of_that_name(self, name: str) -> None:
        if not any(key.model == name for key in self.under_way):
            self.source[name] += "'"
            for key in [key for key in self.model if key.model == name]:
                with pytest.raises(SequenceLost, match=r"its model was replaced|had no request"):
                    self.sequences.resume(key, self.source[name], self.now)
                del self.model[key]

    @rule(seconds=st.sampled_from([0.1, 4.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.sequences.expire(self.now)
        self.forget_idle()

    @invariant()
    def no_more_is_held_than_is_known(self) -> None:
        if not hasattr(self, "sequences"):
            return
        assert len(self.sequences) == len({*self.model, *self.under_way})
        held: dict[int, int] = {}
        for key, (data, _) in self.model.items():
            held[key.user] = held.get(key.user, 0) + len(data)
        assert self.sequences.nbytes == sum(held.values())
        assert all(nbytes <= MIB << 20 for nbytes in held.values())


TestLife = Life.TestCase
TestLife.settings = settings(stateful_step_count=40)


def test_it_is_told_why_a_sequence_is_gone() -> None:
    sequences = Sequences(SequenceSettings(idle_seconds=5.0))
    key = SequenceKey(1, "vad", "mic")
    sequences.keep(sequences.begin(key, "s", (), 0.0), {}, 0.0)
    sequences.expire(4.9)
    assert len(sequences) == 1
    with pytest.raises(SequenceLost, match=r"sequence 'mic' of model 'vad' .* no request for 5 s"):
        sequences.resume(key, "s", 6.0)
    with pytest.raises(SequenceLost, match="never begun, has ended, or the service was started anew"):
        sequences.resume(SequenceKey(2, "vad", "mic"), "s", 6.0)
    sequences.record_failure(sequences.begin(key, "s", (), 7.0), first=True)
    with pytest.raises(SequenceLost, match="its first request failed"):
        sequences.resume(key, "s", 7.0)


class Turns:
    """Requests of one sequence, in the order in which they had their turn."""

    def __init__(self) -> None:
        self.sequencer = SequenceFeature(SequenceSettings, cast(Any, None))
        self.had: list[int] = []
        self.go_on: list[asyncio.Event] = []
        self.ended: Callable[[int], object] = lambda _: None  # called before anybody hears of it

    def ask(self, number: int, seconds: float = 60.0, name: str = "s") -> asyncio.Task[float]:
        self.go_on.append(asyncio.Event())
        call = SimpleNamespace(deadline=time.monotonic() + seconds)

        async def work() -> float:
            key = SequenceKey(0, "m", name)
            deadline = await self.sequencer.begin_turn(key, cast(Any, call))
            try:
                self.had.append(number)
                await self.go_on[number].wait()
            finally:
                self.sequencer.end_turn(key)
            self.ended(number)
            return deadline

        return asyncio.ensure_future(work())


def test_requests_of_a_sequence_have_their_turns_and_those_that_leave_none() -> None:
    async def life() -> None:
        turns = Turns()
        tasks = [turns.ask(number) for number in range(5)]
        other = turns.ask(5, name="other")
        while len(turns.had) < 2:
            await asyncio.sleep(0)
        assert turns.had == [0, 5]
        tasks[1].cancel()
        turns.go_on[0].set()
        await tasks[0]
        while len(turns.had) < 3:
            await asyncio.sleep(0)
        tasks[2].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[2]
        for number in range(3, 6):
            turns.go_on[number].set()
        await asyncio.gather(*tasks[3:], other)
        assert turns.had == [0, 5, 2, 3, 4]
        assert not turns.sequencer._turns

    asyncio.run(life())


def test_a_turn_that_comes_as_its_request_leaves_is_the_next_one_s() -> None:
    async def life() -> None:
        turns = Turns()
        tasks = [turns.ask(number) for number in range(3)]
        while not turns.had:
            await asyncio.sleep(0)
        turns.ended = lambda number: number or tasks[1].cancel()
        for event in turns.go_on:
            event.set()
        await tasks[2]
        assert turns.had == [0, 2]
        assert tasks[1].cancelled()

    asyncio.run(life())


def test_a_request_whose_time_is_over_has_no_turn() -> None:
    async def life() -> None:
        turns = Turns()
        first, late, last = turns.ask(0), turns.ask(1, seconds=-1.0), turns.ask(2)
        with pytest.raises(DeadlineExceeded, match="before the one before it in sequence 's' of model 'm'"):
            await late
        for event in turns.go_on:
            event.set()
        assert await first < await last
        assert turns.had == [0, 2]

    asyncio.run(life())
