"""Decoders: keys and values stay in the worker, a request has tokens and gets logits."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import uuid
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import onnxruntime as ort
import pytest

from honed.cpu.session import BoundSession, Session, running_now
from honed.cpu.steps import CpuSequences
from honed.daemon.features.decoders import Decoders
from honed.daemon.features.decoding import (
    DecoderBucket,
    DecoderModel,
    TokenChunk,
    decoder_of,
    forms_for,
    longest_chunk,
    pieces,
)
from honed.daemon.settings.schema import Limits, VariantSettings
from honed.daemon.store import state_pairs
from honed.daemon.store.compiled import Interface, TensorSpec
from honed.daemon.worker.calls import OutputSpec, RunModel, RunStep, RunTemplate
from honed.daemon.worker.host import likeliest
from honed.daemon.worker.step_inputs import StepSize, values_of
from honed.machine.devices import rules_for
from honed.machine.families import FAMILIES
from honed.onnxfile.reading import MISLED
from honed.runtime import AsyncClient, Client
from honed.runtime.calling.calls import SequenceOptions
from honed.runtime.compiled.model import ROWS_MASK
from honed.runtime.errors import (
    DeadlineExceeded,
    InvalidArgument,
    ResourceExhausted,
    SequenceLost,
    Unavailable,
)
from tests.daemon.running import ALL_HOLDS, IDLE, NO_TUNER, Service, serving, wait_for
from tests.daemon.serving.test_sequence_service import kill_workers
from tests.decoders import VOCABULARY, WIDTH, Array, InApp, decoder, grouped
from tests.runtime.builder import PROFILE

CPU = '[serve]\nengine = "cpu"\n' + NO_TUNER


def spec(name: str, dtype: str, *sizes: int | str) -> TensorSpec:
    """A tensor whose open sizes have names."""
    shape = tuple(size if isinstance(size, int) else -1 for size in sizes)
    return TensorSpec(
        name=name, dtype=dtype, shape=shape, symbols=tuple("" if isinstance(s, int) else s for s in sizes)
    )


def interface(inputs: list[TensorSpec], outputs: list[TensorSpec]) -> Interface:
    return Interface(inputs=tuple(inputs), outputs=tuple(outputs), opset=17, producer="")


OPTIMUM = interface(
    [
        spec("input_ids", "int64", "batch_size", "sequence_length"),
        spec("attention_mask", "int64", "batch_size", "past_sequence_length + sequence_length"),
        spec("position_ids", "int64", "batch_size", "sequence_length"),
        spec("past_key_values.0.key", "float16", "batch_size", 3, "past_sequence_length", 64),
    ],
    [
        spec("logits", "float16", "batch_size", "sequence_length", 90),
        spec("present.0.key", "float16", "batch_size", 3, "past_sequence_length + sequence_length", 64),
    ],
)
WHISPER = interface(
    [
        spec("input_ids", "int64", "batch", "decoder_sequence_length"),
        spec("encoder_hidden_states", "float32", "batch", "encoder_sequence_length", 8),
        spec("past_key_values.0.decoder.key", "float32", "batch", 2, "past_decoder_sequence_length", 4),
        spec("past_key_values.0.encoder.key", "float32", "batch", 2, "encoder_sequence_length_out", 4),
        spec("use_cache_branch", "bool", 1),
        spec("cache_position", "int64", "decoder_sequence_length"),
    ],
    [
        spec("logits", "float32", "batch", "decoder_sequence_length", 50),
        spec("present.0.decoder.key", "float32", "batch", 2, "past_decoder_sequence_length + 1", 4),
        spec("present.0.encoder.key", "float32", "batch", 2, "encoder_sequence_length_out", 4),
    ],
)


def test_what_a_decoder_takes_is_known_by_its_names() -> None:
    known = decoder_of(OPTIMUM, {})
    assert known is not None
    assert [tensor.name for tensor in known.generated] == ["attention_mask", "position_ids"]
    (held,) = known.state_tensors(StepSize(2, 5, 0))
    assert (held.initial_shape, held.axis, held.set_once) == ((2, 3, 0, 64), 2, False)
    known = decoder_of(WHISPER, {})
    assert known is not None
    assert [tensor.name for tensor in known.generated] == ["use_cache_branch", "cache_position"]
    assert known.constants == ("encoder_hidden_states",)
    own, cross = known.state_tensors(StepSize(1, 3, 0))
    assert (own.axis, own.set_once, cross.axis, cross.set_once) == (2, False, -1, True)


@pytest.mark.parametrize(
    ("tokens", "past", "longest", "forms"),
    [
        (1, 600, 256, [(1, 1024)]),
        (65, 0, 64, [(64, 256)]),
        (64, 0, 256, [(64, 256)]),  # A run for longer prompts would be mostly padding
        (65, 0, 128, [(128, 256), (64, 256)]),
        (129, 0, 128, [(64, 256), (128, 256)]),  # 192 tokens, not 256
        (65, 0, 256, [(256, 512), (128, 256), (64, 256)]),
        (300, 0, 256, [(256, 512), (128, 512), (64, 512)]),
        (200, 1792, 256, [(256, 2048), (128, 2048), (64, 2048)]),
        (140, 1800, 256, [(64, 2048)]),  # The padding of longer runs has no room
        (200, 1857, 256, []),
    ],
)
def test_a_prompt_has_the_longest_runs_that_the_device_and_the_room_allow(
    tokens: int, past: int, longest: int, forms: list[tuple[int, int]]
) -> None:
    step = StepSize(1, tokens, past)
    assert [*forms_for(step, longest)] == forms
    for form in forms_for(step, longest):
        cut = pieces(step, form)
        assert all(piece.count == form.tokens for piece in cut[:-1])
        assert [piece.before for piece in cut] == [past + piece.start for piece in cut]
        assert cut[-1].start + cut[-1].count == tokens
        assert cut[-1].before + form.tokens <= form.capacity


@pytest.mark.parametrize(
    ("family", "units", "tokens"), [("cpu", 128, 64), ("mali", 4, 128), ("gpu", 20, 128), ("gpu", 132, 256)]
)
def test_devices_with_many_compute_units_have_longer_runs(family: str, units: int, tokens: int) -> None:
    limits = dataclasses.replace(PROFILE.limits, compute_units=units)
    profile = dataclasses.replace(PROFILE, limits=limits, rules=rules_for(FAMILIES[family], limits))
    assert (longest_chunk(profile), longest_chunk(None)) == (tokens, 64)


@pytest.mark.parametrize(
    ("serving", "failed", "chosen", "counted"),
    [
        ([], [], None, [256]),
        ([64], [], 64, [256, 64]),  # As earlier versions compiled it
        ([64, 256], [], 256, [256]),
        ([], [256], None, [256, 128]),
        ([], [256, 128], None, [256, 128, 64]),
        ([64], [256], 64, [256, 128, 64]),
    ],
)
def test_runs_of_fewer_tokens_serve_while_longer_ones_are_missing(
    serving: list[int], failed: list[int], chosen: int | None, counted: list[int]
) -> None:
    known = decoder_of(OPTIMUM, {})
    assert known is not None
    forms = forms_for(StepSize(1, 300, 0), 256)
    names = {known.variant("m", form): form for form in forms}
    entry, requested = SimpleNamespace(name="m"), list[str]()
    compared = SimpleNamespace(manifest=SimpleNamespace(decision=SimpleNamespace(times=())))
    log = SimpleNamespace(
        count_requests=lambda _, name, shapes: requested.append(name),
        wishes=lambda *_: [SimpleNamespace(name=n, failed=names[n].tokens in failed) for n in names],
    )
    decoders = Decoders(
        sequencer=cast(Any, None),
        registry=cast(Any, None),
        pool=cast(Any, None),
        leasing=cast(Any, None),
        usage_log=cast(Any, log),
        limits=Limits(),
        maker=cast(Any, SimpleNamespace(under=lambda _: "")),
        settings=VariantSettings,
    )
    call = SimpleNamespace(
        entry=entry, runner=lambda _, name: compared if names[name].tokens in serving else entry
    )
    found = decoders._choose_form(cast(Any, call), known, forms)
    assert (found and found[0].tokens) == chosen
    assert [names[name].tokens for name in requested] == counted


def test_forms_have_the_room_asked_for() -> None:
    known = decoder_of(OPTIMUM, {})
    assert known is not None
    assert [*known.shapes(DecoderBucket(1, 256)).values()] == [(1, 1), (1, 257), (1, 1), (1, 3, 256, 64)]


def test_forms_for_several_sequences_of_earlier_versions_are_known() -> None:
    known = decoder_of(OPTIMUM, {})
    assert known is not None
    one = known.shapes(DecoderBucket(1, 512))
    assert known.was_for_several({name: (4, *shape[1:]) for name, shape in one.items()})
    assert not known.was_for_several(one)
    assert not known.was_for_several(dict.fromkeys(one, (2, 7)))


def told(*names: str, in_place: tuple[str, ...] | None = ()) -> DecoderModel:
    """OPTIMUM's decoder with those of its inputs beside tokens and state."""
    inputs = [t for t in OPTIMUM.inputs if t.name.startswith(("input", "past")) or t.name in names]
    made = dataclasses.replace(interface(inputs, list(OPTIMUM.outputs)), in_place=in_place)
    known = decoder_of(made, {})
    assert known is not None
    return known


STATE, MASK, POSITIONS = "past_key_values.0.key", "attention_mask", "position_ids"


def test_a_form_has_a_mask_of_rows_where_nothing_else_tells_which_there_are() -> None:
    form, piece = DecoderBucket(64, 256), TokenChunk(DecoderBucket(64, 256), 5, 0, 3)
    shapes = {STATE: (1, 3, 256, 64), "input_ids": (1, 64)}
    both = told(MASK, POSITIONS)
    assert both.shapes(form) == {**shapes, MASK: (1, 320), POSITIONS: (1, 64)}
    places = np.frombuffer(both.contents(piece, prompt(3).tobytes())[2], np.int64)
    assert places.tolist() == [5, 6, *[7] * 62]  # those of the padding are within the model's table
    untold = told(MASK, POSITIONS.upper())
    assert untold.shapes(form) == {**shapes, MASK: (1, 320), ROWS_MASK: (1, 256)}
    assert told().shapes(form) == {**shapes, ROWS_MASK: (1, 256)}
    *_, rows = told().contents(piece, prompt(3).tobytes())
    assert rows == b"\1" * 5 + bytes(251)
    for given in ((STATE,), None):  # an earlier version did not say whether rows are written in place
        assert told(MASK, in_place=given).shapes(form) == {**shapes, MASK: (1, 256)}


def test_a_decoder_says_what_keeps_it_from_forms() -> None:
    assert not told(MASK, POSITIONS).no_forms
    whisper = decoder_of(WHISPER, {})
    assert whisper is not None
    assert "past_key_values.0.encoder.key' does not grow by a row for each token" in whisper.no_forms

    def why(*more: TensorSpec, logits: TensorSpec = OPTIMUM.outputs[0]) -> str:
        known = decoder_of(interface([*OPTIMUM.inputs, *more], [logits, OPTIMUM.outputs[1]]), {})
        assert known is not None
        return known.no_forms

    assert "its input 'speaker' is neither its tokens, a mask, a position nor a length" in why(
        spec("speaker", "int64", "batch_size")
    )
    assert "its input 'use_cache_branch' cannot be made" in why(spec("use_cache_branch", "bool", 1))
    pooled = spec("logits", "float16", "batch_size", 90)
    assert "its output 'logits' has no row of numbers for each token" in why(logits=pooled)
    assert not why(spec("cache_position", "int64", "sequence_length"))
    added = dataclasses.replace(OPTIMUM.inputs[1], shape=(-1, 1, -1, -1), symbols=())
    known = decoder_of(interface([OPTIMUM.inputs[0], added, *OPTIMUM.inputs[2:]], list(OPTIMUM.outputs)), {})
    assert known is not None
    assert known.no_forms == "its mask 'attention_mask' is not [batch, tokens], of 2 dimensions"
    assert "attention_mask" not in [tensor.name for tensor in known.generated]


def test_what_follows_from_a_step_is_made_in_the_model_s_shape() -> None:
    step = StepSize(2, 3, 5)

    def made(name: str, *sizes: int) -> tuple[tuple[int, ...], int | list[int]]:
        shape, values = values_of(spec(name, "int64", *sizes), step)
        return shape, [*values] if isinstance(values, range) else values

    assert made("attention_mask", -1, -1) == ((2, 8), 1)
    assert made("position_ids", -1, -1) == ((2, 3), [5, 6, 7])
    assert made("position_ids", 3, -1, -1) == ((3, 2, 3), [5, 6, 7])
    assert made("cache_position", -1) == ((3,), [5, 6, 7])
    assert made("past_sequence_length", 1) == ((1,), 5)
    assert made("total_sequence_length") == ((), 8)
    assert made("seqlens_k", -1) == ((2,), 7)
    assert made("use_cache_branch", 1) == ((1,), 1)


def test_state_that_does_not_grow_makes_no_decoder() -> None:
    lstm = interface(
        [spec("x", "float32", 1, 4), spec("h", "float32", 1, "batch", 8)],
        [spec("y", "float32", 1, 4), spec("hn", "float32", 1, "batch", 8)],
    )
    assert decoder_of(lstm, {}) is None
    fixed = interface(
        [spec("x", "float32", 1, 4), spec("past.key", "float32", "batch", 8)],
        [spec("y", "float32", 1, 4), spec("present.key", "float32", "batch", 8)],
    )
    assert decoder_of(fixed, {}) is None


def test_a_past_that_is_not_named_as_keys_or_values_is_noticed() -> None:
    inputs = [spec("input_ids", "int64", "batch", "seq"), spec("past_0", "float32", 2, "batch", 2, "past", 4)]
    outputs = [
        spec("logits", "float32", "batch", "seq", 9),
        spec("present_0", "float32", 2, "batch", 2, "past + seq", 4),
    ]
    assert decoder_of(interface(inputs, outputs), {}) is None
    assert [pair.may_grow for pair in state_pairs.pairs(interface(inputs, outputs), {})] == [True]
    assert not any(pair.may_grow for pair in state_pairs.pairs(OPTIMUM, {}))


def test_sizes_without_names_grow_from_the_third_axis_on() -> None:
    inputs = [spec("input_ids", "int64", 1, -1), spec("cached_key.0", "float32", 16, -1, 64)]
    outputs = [spec("logits", "float32", 1, -1, 9), spec("new_cached_key.0", "float32", 16, -1, 64)]
    given = {"new_cached_key.0": "cached_key.0"}
    assert decoder_of(interface(inputs, outputs), given) is None
    inputs[1], outputs[1] = (spec(t.name, "float32", -1, 2, -1, 64) for t in (inputs[1], outputs[1]))
    known = decoder_of(interface(inputs, outputs), given)
    assert known is not None
    assert known.state_tensors(StepSize(3, 1, 0))[0].initial_shape == (3, 2, 0, 64)


def close(found: Array, expected: Array) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


class Sequence:
    """One without a service, beside the same with its cache in the app."""

    def __init__(self, number: int, session: Session, sequences: CpuSequences, path: Path) -> None:
        known = decoder_of(session.interface, {})
        assert known is not None
        self.number, self.rows, self.most, self.app = number, 0, 1 << 30, InApp(path)
        self._known, self._session, self._sequences = known, session, sequences

    def call(self, count: int) -> RunStep:
        outputs = (OutputSpec(name="logits", place=None),)
        form = RunTemplate(inputs=(), outputs=outputs, room=None, finite=False, keep=False, max_bytes=1 << 20)
        return RunStep(
            run=RunModel(key="", form=form.pack(), raw=()),
            sequence=self.number,
            rows=self.rows,
            count=count,
            batch=1,
            tensors=() if self.rows else self._known.state_tensors(StepSize(1, count, 0)),
            constants=(),
            max_state_bytes=self.most,
            last_token=(),
        )

    def step(self, ids: Array) -> Array:
        """The logits of a step alone."""
        found, self.rows, _ = self._sequences.step(self._session, self.call(ids.shape[1]), {"input_ids": ids})
        return found["logits"]

    def compare(self, ids: Array) -> None:
        close(self.step(ids), self.app.step(ids))


def begun(session: Session, sequences: CpuSequences, ids: Array, path: Path) -> Array:
    """The logits of a step that begins a sequence, without a service."""
    return Sequence(1, session, sequences, path).step(ids)


@pytest.mark.parametrize("made", [decoder, grouped, partial(grouped, mask=False)])
def test_steps_of_a_token_go_on_whatever_room_there_is_and_run_again(
    tmp_path: Path, made: Callable[[Path], Path]
) -> None:
    path = made(tmp_path / "m.onnx")
    sequence = Sequence(1, Session(path, 1), CpuSequences(), path)
    for step in range(140):  # a cache has room for 128 at first
        sequence.compare(prompt(1, step))
        if step % 50 == 3:  # nobody had the answer of one
            sequence.step(prompt(1, 999))
            sequence.rows -= 1
    sequence.most = 10
    with pytest.raises(ResourceExhausted, match=r"raise max_mib of \[sequences\]"):
        sequence.step(prompt(1))
    sequence.most = 1 << 30
    sequence.compare(prompt(1, 500))


@pytest.mark.parametrize("made", [decoder, grouped])
def test_a_step_that_is_ended_leaves_its_sequence_as_it_was(
    tmp_path: Path, made: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, ends = made(tmp_path / "m.onnx"), ort.RunOptions()
    ends.terminate = True
    sequence = Sequence(1, Session(path, 1), CpuSequences(), path)
    for step in range(6):
        sequence.compare(prompt(1 + step % 3, step))
        with monkeypatch.context() as patched:
            patched.setattr(running_now, "options", ends)
            with pytest.raises(InvalidArgument, match="terminate"):
                sequence.step(prompt(1 + step % 2, 99))


def test_nothing_of_a_message_is_held_until_the_next_step(tmp_path: Path) -> None:
    path, sequences, ids = grouped(tmp_path / "m.onnx"), CpuSequences(), prompt(3)
    begun(Session(path, 1), sequences, ids, path)
    held = weakref.ref(ids)
    del ids
    gc.collect()
    assert held() is None


def test_a_step_goes_on_by_the_session_that_is_loaded_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, ids, run = grouped(tmp_path / "m.onnx"), prompt(3), BoundSession.run
    session = Session(made, 1)
    first = session._session

    def misled(bound: BoundSession) -> None:
        if bound.session is first:
            raise RuntimeError(MISLED)
        run(bound)

    monkeypatch.setattr(BoundSession, "run", misled)
    logits = begun(session, CpuSequences(), ids, made)
    np.testing.assert_array_equal(logits, InApp(made).step(ids))


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> Iterator[Service]:
    with serving(tmp_path_factory, cache_dir, config=CPU) as running:
        yield running


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, service: Service) -> Path:
    made = decoder(tmp_path_factory.mktemp("m") / "dec.onnx")
    with service.client() as client:
        client.add(made, name="dec", engine="onnxruntime")
    return made


def prompt(length: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(0, VOCABULARY, (1, length))


def best(logits: Array) -> Array:
    """The token that is likeliest next, [1, 1]."""
    return logits[:, -1:].argmax(-1)


@pytest.mark.service
@pytest.mark.parametrize("length", [1, 5, 40])
def test_steps_are_those_of_a_cache_in_the_app(service: Service, path: Path, length: int) -> None:
    own = InApp(path)
    with service.client() as client, client.sequence("dec") as sequence:
        ids = prompt(length)
        for _ in range(20):
            answered = sequence.infer({"input_ids": ids})
            assert answered.keys() == {"logits"}
            expected = own.step(ids)
            close(answered["logits"], expected)
            ids = best(expected)
        status = client.status()["sequences"]
        assert status["count"] == 1
        assert status["bytes"] == sum(array.nbytes for array in own.state.values())
    with service.client() as client:
        assert client.status()["sequences"] == {"count": 0, "bytes": 0}


@pytest.mark.service
def test_caches_are_appended_to_where_they_are(service: Service, tmp_path: Path) -> None:
    made = grouped(tmp_path / "m.onnx")
    with service.client() as client:
        client.add(made, name="grouped", engine="onnxruntime")
        held = set()
        with client.sequence("grouped") as one, client.sequence("grouped") as other:
            owns, ids = (InApp(made), InApp(made)), [prompt(7, 1), prompt(60, 2)]
            for step in range(12):
                for at, sequence in enumerate((one, other)):
                    if (at, step) == (1, 6):  # more than there is room for
                        ids[at] = prompt(80, 3)
                    expected = owns[at].step(ids[at])
                    close(sequence.infer({"input_ids": ids[at]})["logits"], expected)
                    ids[at] = best(expected)
                held.add(client.status()["sequences"]["bytes"])
            with pytest.raises(InvalidArgument, match="cannot be run on these inputs"):
                one.infer({"input_ids": np.array([[VOCABULARY + 9]])})
            found = one.infer({"input_ids": ids[0]}, outputs=["logits", "present.1.value"])
            close(found["logits"], owns[0].step(ids[0]))
            close(found["present.1.value"], owns[0].state["past_key_values.1.value"])
        row = 2 * 2 * 2 * 8 * 4  # bytes in all caches
        assert held == {(128 + 128) * row, (128 + 256) * row}


@pytest.mark.service
def test_sequences_do_not_meet(service: Service, path: Path) -> None:
    with service.client() as client, client.sequence("dec") as one, client.sequence("dec") as other:
        owns, ids = (InApp(path), InApp(path)), [prompt(7, 1), prompt(3, 2)]
        for _ in range(8):
            for at, sequence in enumerate((one, other)):
                expected = owns[at].step(ids[at])
                close(sequence.infer({"input_ids": ids[at]})["logits"], expected)
                ids[at] = best(expected)


@pytest.mark.service
def test_a_request_that_fails_leaves_its_sequence_as_it_was(service: Service, path: Path) -> None:
    own = InApp(path)
    with service.client() as client, client.sequence("dec") as sequence:
        sequence.infer({"input_ids": prompt(4)})
        own.step(prompt(4))
        with pytest.raises(InvalidArgument, match="cannot be run on these inputs"):
            sequence.infer({"input_ids": np.array([[VOCABULARY + 9]])})
        with pytest.raises(InvalidArgument, match="input 'input_ids' is missing, or has no tokens"):
            sequence.infer({"attention_mask": np.ones((1, 5), np.int64)})
        with pytest.raises(InvalidArgument, match="no input 'x'"):
            sequence.infer({"input_ids": prompt(1), "x": prompt(1)})
        close(sequence.infer({"input_ids": prompt(2)})["logits"], own.step(prompt(2)))


@pytest.mark.service
def test_masks_and_positions_may_be_given(service: Service, path: Path) -> None:
    masked = np.array([[0, 0, 1, 1]])
    given = {"input_ids": prompt(4), "attention_mask": masked, "position_ids": np.array([[0, 0, 0, 1]])}
    with service.client() as client:
        plain = {f"past_key_values.{at}.{what}": 0 for at in (0, 1) for what in ("key", "value")}
        empty = {name: np.zeros((1, 2, 0, 4), np.float32) for name in plain}
        expected = client.infer("dec", {**given, **empty})
        with client.sequence("dec") as sequence:
            close(sequence.infer(given)["logits"], expected["logits"])
        # The state of an earlier request may begin a sequence, too.
        state = {name: expected[name.replace("past_key_values", "present")] for name in plain}
        own = InApp(path)
        own.step(prompt(4))
        own.state = dict(state)
        with client.sequence("dec") as sequence:
            for ids in (prompt(1), prompt(2)):
                found = sequence.infer({"input_ids": ids, **(state if not sequence.begun else {})})
                close(found["logits"], own.step(ids))
            for ids in (prompt(1, 1), prompt(1, 2), prompt(1, 3)):  # or go on from there again
                own.state, own.tokens = dict(state), 4
                found = sequence.infer({"input_ids": ids, **state})
                close(found["logits"], own.step(ids))
            close(sequence.infer({"input_ids": ids})["logits"], own.step(ids))


@pytest.mark.service
def test_batches_are_of_one_sequence(service: Service, path: Path) -> None:
    own, ids = InApp(path), np.concatenate([prompt(4, 1), prompt(4, 2)])
    with service.client() as client, client.sequence("dec") as sequence:
        for _ in range(4):
            expected = own.step(ids)
            close(sequence.infer({"input_ids": ids})["logits"], expected)
            ids = best(expected)


@pytest.mark.service
def test_tokens_may_lie_in_a_region_that_is_registered_anew(service: Service, path: Path) -> None:
    own = InApp(path)

    def step(client: Client, ids: Array) -> None:
        found = client.infer(
            "dec", {"input_ids": ids}, sequence=SequenceOptions("shared", start=not own.tokens)
        )
        close(found["logits"], own.step(np.array(ids)))

    for seed in range(3):  # each with a client, and a region, of the same name
        with service.client() as client, client.region(4096) as region:
            places = [region.array("int64", (1, 1)) for _ in range(2)]
            for number in range(4):
                ids = places[(seed + number // 2) % 2]
                ids[...] = prompt(1, 4 * seed + number)
                step(client, ids)
    with service.client() as client:
        step(client, prompt(1, 50))
        client.infer("dec", {}, sequence=SequenceOptions("shared", end=True))


@pytest.mark.service
@pytest.mark.parametrize("length", [1, 9, 500])  # the last takes more than one run
def test_the_last_token_alone_is_answered(service: Service, path: Path, length: int) -> None:
    own, ids = InApp(path), prompt(length)
    with service.client() as client, client.sequence("dec") as sequence:
        for _ in range(3):
            found = sequence.infer({"input_ids": ids}, last_token=True)["logits"]
            expected = own.step(ids)[:, -1:]
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
            ids = best(expected)
        for last_token in (False, True):
            ids = prompt(2, 7)
            found = sequence.infer({"input_ids": ids}, last_token=last_token)["logits"]
            np.testing.assert_allclose(found, own.step(ids)[:, -found.shape[1] :], rtol=1e-4, atol=1e-4)
            assert found.shape[1] == 2 - last_token
        found = sequence.infer({"input_ids": ids}, outputs=["logits", "present.0.key"], last_token=True)
        own.step(ids)
        np.testing.assert_allclose(found["present.0.key"], own.state["past_key_values.0.key"], rtol=1e-4)
        with pytest.raises(InvalidArgument, match="last_token is for sequences of models that generate"):
            client.infer("dec", {"input_ids": ids}, sequence=SequenceOptions(0, last_token=True))


def expected_tokens(own: InApp, ids: Array, count: int) -> list[int]:
    """The likeliest tokens after a prompt, by ONNX Runtime with the cache in the app."""
    found = list[int]()
    for _ in range(count):
        ids = best(own.step(ids))
        found.append(int(ids[0, 0]))
    return found


@pytest.mark.service
@pytest.mark.parametrize(("length", "count"), [(1, 1), (1, 5), (9, 40), (500, 3)])
def test_greedy_tokens_are_those_that_an_app_would_choose(
    service: Service, path: Path, length: int, count: int
) -> None:
    own = InApp(path)
    expected = expected_tokens(own, prompt(length), count)
    with service.client() as client, client.sequence("dec") as sequence:
        tokens = sequence.generate({"input_ids": prompt(length)}, count)
        assert (tokens.dtype, tokens.tolist()) == (np.int64, [expected])
        # The last token has not been run: it may be the next request's, alone or with others.
        more = expected_tokens(own, tokens[:, -1:], 20)
        assert sequence.generate({"input_ids": tokens[:, -1:]}, 20).tolist() == [more]
        close(sequence.infer({"input_ids": prompt(3)})["logits"], own.step(prompt(3)))


@pytest.mark.parametrize("kind", [np.float16, np.float32])
def test_the_likeliest_token_has_the_largest_logit(kind: type) -> None:
    rng = np.random.default_rng(0)
    for logits in (*rng.standard_normal((50, 300)), *-rng.uniform(1, 9, (50, 300)), np.full(3, -np.inf)):
        logits = logits.astype(kind)
        assert logits[likeliest(logits)] == logits.max()


@pytest.mark.service
def test_greedy_tokens_of_an_asynchronous_client(service: Service, path: Path) -> None:
    async def generate() -> Array:
        async with AsyncClient(service.socket) as client, client.sequence("dec") as sequence:
            return await sequence.generate({"input_ids": prompt(5)}, 6)

    assert asyncio.run(generate()).tolist() == [expected_tokens(InApp(path), prompt(5), 6)]


@pytest.mark.service
def test_greedy_tokens_end_with_one_that_stops(service: Service, path: Path) -> None:
    own = InApp(path)
    expected = expected_tokens(own, prompt(5), 30)
    stop, own = expected[19], InApp(path)
    count = expected.index(stop) + 1
    expected_tokens(own, prompt(5), count)
    with service.client() as client, client.sequence("dec") as sequence:
        tokens = sequence.generate({"input_ids": prompt(5)}, 30, stop=[stop, VOCABULARY + 1])
        assert tokens.tolist() == [expected[:count]]
        close(sequence.infer({"input_ids": prompt(3)})["logits"], own.step(prompt(3)))


@pytest.mark.service
def test_greedy_tokens_that_nobody_waits_for_leave_the_sequence_as_it_was(
    service: Service, path: Path
) -> None:
    own = InApp(path)
    own.step(prompt(5))
    with service.client() as client, client.sequence("dec") as sequence:
        sequence.infer({"input_ids": prompt(5)})
        with pytest.raises(DeadlineExceeded):
            sequence.generate({"input_ids": prompt(1)}, 1000, timeout=0.05)
        close(sequence.infer({"input_ids": prompt(3)})["logits"], own.step(prompt(3)))


@pytest.mark.service
def test_greedy_tokens_that_cannot_be_chosen_are_refused(service: Service, path: Path) -> None:
    ids = {"input_ids": prompt(2)}
    with service.client() as client, client.sequence("dec") as sequence:
        first = SequenceOptions("g", start=True)
        for options, said in (
            ({"greedy_tokens": 1025}, "greedy_tokens is 1025; give 1 to 1024"),
            ({"greedy_tokens": -1}, "greedy_tokens is -1"),
            ({"stop_tokens": (1,)}, "stop_tokens are for greedy_tokens"),
        ):
            with pytest.raises(InvalidArgument, match=said):
                client.infer("dec", ids, sequence=dataclasses.replace(first, **options))
        with pytest.raises(InvalidArgument, match="name no outputs"):
            client.infer("dec", ids, outputs=["logits"], sequence=dataclasses.replace(first, greedy_tokens=2))
        mask = {"attention_mask": np.array([[0, 1]])}  # The service would attend to what this hides
        with pytest.raises(InvalidArgument, match="the request has 'attention_mask', which later steps"):
            sequence.generate(ids | mask, 2)
        with pytest.raises(InvalidArgument, match="are for one sequence"):
            sequence.generate({"input_ids": prompt(2).repeat(2, 0)}, 2)
        with pytest.raises(InvalidArgument, match="greedy_tokens is for sequences of models that generate"):
            client.infer("dec", ids, sequence=SequenceOptions(0, greedy_tokens=2))


@pytest.mark.service
def test_state_is_given_to_who_names_it(service: Service, path: Path) -> None:
    own = InApp(path)
    own.step(prompt(3))
    with service.client() as client, client.sequence("dec") as sequence:
        found = sequence.infer({"input_ids": prompt(3)}, outputs=["present.1.value"])
        close(found["present.1.value"], own.state["past_key_values.1.value"])


@pytest.mark.service
def test_an_encoder_s_output_is_given_once(service: Service, tmp_path: Path) -> None:
    made = decoder(tmp_path / "e.onnx", encoder=True)
    encoded = np.random.default_rng(3).standard_normal((1, 6, WIDTH)).astype(np.float32)
    own, ids = InApp(made, encoder_hidden_states=encoded), prompt(2)
    with service.client() as client:
        client.add(made, name="both", engine="onnxruntime")
        with client.sequence("both") as sequence:
            for step in range(6):
                more = {} if step else {"encoder_hidden_states": encoded}
                found = sequence.infer({"input_ids": ids, **more})["logits"]
                expected = own.step(ids)
                close(found, expected)
                ids = best(expected)
            for _ in range(3):  # what was made of it may be given as well, and is kept
                key = "past_key_values.0.encoder.key"
                own.state[key] = own.state[key] + 1
                found = sequence.infer({"input_ids": ids, key: own.state[key]})["logits"]
                close(found, own.step(ids))
            close(sequence.infer({"input_ids": ids})["logits"], own.step(ids))
        own = InApp(made, encoder_hidden_states=encoded)
        with client.sequence("both") as sequence:  # or with each token
            for seed in range(4):
                given = {"input_ids": prompt(1, seed), "encoder_hidden_states": encoded}
                close(sequence.infer(given)["logits"], own.step(prompt(1, seed)))
        with pytest.raises(InvalidArgument, match="input 'encoder_hidden_states' is missing"):
            client.sequence("both").infer({"input_ids": ids})


@pytest.mark.service
def test_a_worker_that_ends_loses_sequences(start_service: Callable[..., Service], tmp_path: Path) -> None:
    service = start_service(config=CPU)
    made = decoder(tmp_path / "dec.onnx")
    with service.client() as client:
        client.add(made, name="dec", engine="onnxruntime")
        sequence = client.sequence("dec")
        sequence.infer({"input_ids": prompt(4)})
        kill_workers(service)
        with pytest.raises(SequenceLost, match="the process that held its state has ended; begin it with"):
            sequence.infer({"input_ids": prompt(1)})
        with pytest.raises(SequenceLost, match="the process that held its state has ended"):
            sequence.infer({"input_ids": prompt(1)})
        sequence.restart()
        expected = InApp(made).step(prompt(4))
        close(sequence.infer({"input_ids": prompt(4)})["logits"], expected)


@pytest.mark.service
def test_tokens_and_bytes_are_bounded(start_service: Callable[..., Service], tmp_path: Path) -> None:
    service = start_service(config=f"{CPU}[sequences]\nmax_tokens = 60\nmax_mib = 1\n")
    small = decoder(tmp_path / "small.onnx")
    with service.client() as client:
        client.add(small, name="small", engine="onnxruntime")
        client.add(decoder(tmp_path / "large.onnx", layers=40), name="large", engine="onnxruntime")
        own = InApp(small)
        with client.sequence("small") as sequence:
            sequence.infer({"input_ids": prompt(50)})
            own.step(prompt(50))
            with pytest.raises(ResourceExhausted, match="would have 61 tokens and may have 60"):
                sequence.infer({"input_ids": prompt(11)})
            close(sequence.infer({"input_ids": prompt(3)})["logits"], own.step(prompt(3)))
            # 40 layers have 2560 bytes a token: 60 have 150 kB.
            held = [client.sequence("large") for _ in range(7)]
            for each in held[:-1]:
                each.infer({"input_ids": prompt(60)})
            with pytest.raises(ResourceExhausted, match=r"raise max_mib of \[sequences\]"):
                held[-1].infer({"input_ids": prompt(60)})
            assert client.status()["sequences"]["bytes"] <= 1 << 20
            for each in held:
                each.close()
            for _ in range(2):
                found = sequence.infer({"input_ids": prompt(1)})["logits"]
                close(found, own.step(prompt(1)))
            service.configure(f"{CPU}[sequences]\nmax_tokens = 55\nmax_mib = 1\n")
            with pytest.raises(ResourceExhausted, match="would have 56 tokens and may have 55"):
                sequence.infer({"input_ids": prompt(1)})
        own = InApp(small)
        expected = expected_tokens(own, prompt(50), 6)
        with client.sequence("small") as sequence:  # As many as there is room for, and the last is not run
            assert sequence.generate({"input_ids": prompt(50)}, 20).tolist() == [expected]
            with pytest.raises(ResourceExhausted, match="would have 56 tokens and may have 55"):
                sequence.generate({"input_ids": prompt(1)}, 20)
        large = SequenceOptions("large", start=True, greedy_tokens=400)
        service.configure(f"{CPU}[sequences]\nmax_tokens = 500\nmax_mib = 1\n")
        with pytest.raises(ResourceExhausted, match=r"raise max_mib of \[sequences\]"):
            client.infer("large", {"input_ids": prompt(60)}, sequence=large)
        assert client.status()["sequences"] == {"count": 0, "bytes": 0}


@pytest.mark.service
def test_a_sequence_that_goes_on_must_have_begun(service: Service, path: Path) -> None:
    with service.client() as client:
        with pytest.raises(SequenceLost, match="it was never begun"):
            client.infer("dec", {"input_ids": prompt(1)}, sequence=SequenceOptions("unknown"))
        client.infer("dec", {"input_ids": prompt(1)}, sequence=SequenceOptions("short", start=True, end=True))
        with pytest.raises(SequenceLost, match="it has ended"):
            client.infer("dec", {"input_ids": prompt(1)}, sequence=SequenceOptions("short"))


PAUSE = 30.0  # seconds without requests, in which forms are compiled and compared
CPU_FASTER = (
    ALL_HOLDS
    + """
from honed.daemon.serving import trial

engines.can_compiled_serve = lambda *_, **__: False
trial._BUSY_PERCENT = 1e9  # The times are final, whatever else runs
"""
)
OFTEN = IDLE + "[variants]\nrequests = 2\n"


def course(made: Path, length: int, steps: int, seed: int = 0) -> list[tuple[Array, Array]]:
    """The tokens of a sequence's steps with their logits, by ONNX Runtime."""
    own, ids, found = InApp(made), prompt(length, seed), []
    for _ in range(steps):
        found.append((ids, own.step(ids)))
        ids = best(found[-1][1])
    return found


def ask(client: Client, steps: list[tuple[Array, Array]]) -> list[str]:
    """The engines of a sequence's steps, whose answers are right; nothing is computed between them."""
    name, last = uuid.uuid4().hex, len(steps) - 1
    answers = [
        client.infer_response(
            "dec", {"input_ids": ids}, sequence=SequenceOptions(name, start=not at, end=at == last)
        )
        for at, (ids, _) in enumerate(steps)
    ]
    for answer, (_, expected) in zip(answers, steps, strict=True):
        found = answer.outputs["logits"]
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-3 * np.abs(expected).max())
    return [answer.engine for answer in answers]


def run(client: Client, made: Path, length: int, steps: int) -> list[str]:
    """The engines of a sequence's steps, whose answers are right."""
    return ask(client, course(made, length, steps))


def variant_of(client: Client, form: str) -> dict[str, Any]:
    """What is shown of a form that was compiled and compared with ONNX Runtime, empty if there is none."""
    variants = {each["name"]: each for each in client.show("dec")["variants"]}
    return variants.get(form, {})


def serves(client: Client, form: str) -> bool:
    """Whether a form was compared with ONNX Runtime and serves."""
    variant = variant_of(client, form)
    return (variant.get("engine"), variant.get("state")) == ("gpu", "READY")


@pytest.mark.service
@pytest.mark.opencl
def test_what_a_form_waits_for_is_said(start_service: Callable[..., Service], tmp_path: Path) -> None:
    busy = f'[serve]\nengine = "fastest"\n[idle]\nquiet_seconds = 600\n{NO_TUNER}'
    service = start_service(config=busy)
    made = decoder(tmp_path / "dec.onnx", layers=1)
    with service.client() as client:
        added = client.add(made, name="dec")
        assert added["engine_why"].startswith("its state grows with each token")

        def said() -> str:
            return str(client.show("dec")["forms"])

        assert said().endswith("runs its steps yet: no sequence has gone on since the service started")
        run(client, made, 1, 6)
        wanting = "not with 1 token with up to 256 rows of state: steps of this size count 6 of the 20 that"
        assert wanting in said()
        service.configure(f"{busy}\n[variants]\nrequests = 2\n")
        assert "it is compiled when the machine is idle, which it is not: requests" in said()
        service.configure(f"{busy}\n[variants]\nper_model = 0\n")
        assert "rows of state: per_model of [variants] is 0" in said()
        step = {"input_ids": prompt(1)}
        with client.sequence("dec") as sequence:
            sequence.infer({**step, "attention_mask": np.ones((1, 1), np.int64)})
            assert "beside the tokens" not in said()
            sequence.infer({**step, "attention_mask": np.ones((1, 2), np.int64)})
            assert said().endswith("; a request gave 'attention_mask' beside the tokens")
            sequence.infer(step)
            assert "beside the tokens" not in said()
            sequence.infer(step, outputs=["logits", "present.0.key"])
            assert said().endswith("; a request asked for 'present.0.key', which is state")


@pytest.mark.slow
@pytest.mark.service
@pytest.mark.opencl
@pytest.mark.tvm
def test_forms_that_are_asked_for_often_run_sequences(
    start_service: Callable[..., Service], tmp_path: Path
) -> None:
    service = start_service(config=f'[serve]\nengine = "fastest"\n{NO_TUNER}{OFTEN}', patch=ALL_HOLDS)
    made = decoder(tmp_path / "dec.onnx", layers=1, slow=2500)

    with service.client(timeout=None) as client:
        client.add(made, name="dec")
        for _ in range(3):
            run(client, made, 70, 2)
        for form in ("dec@1x1x257x256", "dec@1x64x320x256"):
            wait_for(lambda form=form: serves(client, form), form, service)
        for length in (1, 150):
            assert set(run(client, made, length, 8)) == {"gpu"}
        # There is no form yet for more tokens: the CPU engine goes on with the state of the device.
        assert run(client, made, 250, 12) == ["gpu"] * 7 + ["cpu"] * 5
        with client.sequence("dec") as one, client.sequence("dec") as other:
            owns, ids = (InApp(made), InApp(made)), [prompt(70, 1), prompt(3, 2)]
            for _ in range(4):
                for at, sequence in enumerate((one, other)):
                    expected = owns[at].step(ids[at])
                    found = sequence.infer({"input_ids": ids[at]})["logits"]
                    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-3 * np.abs(expected).max())
                    ids[at] = best(expected)

        own, ids = InApp(made), prompt(230, 4)
        with client.sequence("dec") as sequence:  # From the form for prompts to that for tokens, and on
            for count in (1, 10, 40):
                tokens = sequence.generate({"input_ids": ids}, count)
                for token in tokens[0]:
                    logits = own.step(ids)[0, -1]
                    assert logits[token] > logits.max() - 2e-3 * np.abs(logits).max()
                    ids = np.array([[token]])

        wait_for(lambda: serves(client, "dec@1x1x513x512"), "more room", service)
        sequence = client.sequence("dec")
        sequence.infer({"input_ids": prompt(4)})
        kill_workers(service)
        with pytest.raises(SequenceLost, match="the process that held its state has ended"):
            sequence.infer({"input_ids": prompt(1)})


@pytest.mark.slow
@pytest.mark.service
@pytest.mark.opencl
@pytest.mark.tvm
@pytest.mark.parametrize(
    ("inputs", "lengths_of_runs"),
    [({"mask": False, "positions": False}, [64]), ({"positions": False}, [64, 128])],
)
def test_prompts_around_every_boundary_of_forms_that_are_told_little(
    inputs: dict[str, bool],
    lengths_of_runs: list[int],
    start_service: Callable[..., Service],
    tmp_path: Path,
) -> None:
    config = f'[serve]\nengine = "fastest"\n{NO_TUNER}{OFTEN}'
    longest = f"decoders.longest_chunk = lambda _: {lengths_of_runs[-1]}\n"
    patch = f"{CPU_FASTER}from honed.daemon.features import decoders\n{longest}"
    service = start_service(config=config, patch=patch)
    made = decoder(tmp_path / "dec.onnx", layers=1, **inputs)
    lengths = (1, 2, 63, 64, 65, 127, 129, 191, 192, 193, 250)
    with service.client(timeout=None) as client:
        client.add(made, name="dec")
        assert "no compiled form runs its steps yet" in client.show("dec")["forms"]
        for length in lengths:
            run(client, made, length, 3)
        names = [variant_name(made, DecoderBucket(tokens, 256)) for tokens in (1, *lengths_of_runs)]
        with pytest.raises(Unavailable, match="no compiled form that could be pinned: its state grows"):
            client.pin("dec", engine="gpu")
        for name in names[:2]:
            wait_for(lambda name=name: variant_of(client, name), name, service)
        said = client.show("dec")["forms"]
        rest = [f"{tokens} tokens with up to 256" for tokens in lengths_of_runs]
        for size in ("1 token with up to 256", rest[0]):
            assert f"{size} rows of state: the CPU engine is faster: compiled" in said
        for _ in range(3):
            assert set(run(client, made, 255, 6)) == {"cpu"}
        said = client.show("dec")["forms"]
        assert "1 token with up to 512, 64 tokens with up to 512, " in said
        assert "rows of state: those compiled so far are slower on this processor" in said
        client.pin("dec", engine="gpu")
        run(client, made, 129, 3)  # Loads the forms
        for name in names:
            wait_for(lambda name=name: serves(client, name), name, service)
        for length in lengths:
            assert set(run(client, made, length, 3)) == {"gpu"}
        said = client.show("dec")["forms"]
        assert said.startswith(", ".join(["compiled forms run 1 token with up to 256", *rest]))
        # The form for a prompt is not there yet, that for the tokens behind it is: its state moves.
        name = variant_name(made, DecoderBucket(1, 512))
        for _ in range(3):
            run(client, made, 255, 6)
        wait_for(lambda: variant_of(client, name), name, service)
        run(client, made, 260, 4)
        wait_for(lambda: serves(client, name), name, service)
        assert run(client, made, 260, 4)[1:] == ["gpu"] * 3
        client.pin("dec", engine="")
        assert set(run(client, made, 129, 3)) == {"cpu"}


def variant_name(made: Path, form: DecoderBucket) -> str:
    known = decoder_of(Session(made, 1).interface, {})
    assert known is not None
    return known.variant("dec", form)


@pytest.mark.service
def test_bench_generates_tokens(
    service: Service, path: Path, typed: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HONED_SOCKET", str(service.socket))
    status, out, _ = typed("bench", "dec", "--tokens", "5", "--prompt", "9", "--json")
    figures = json.loads(out)
    assert status == 0
    assert (figures["prompt"], figures["tokens"], figures["engines"]) == (9, 5, {"cpu": 5})
    assert figures["state_bytes"] == 13 * 2 * 2 * WIDTH * 4
    status, out, _ = typed("bench", "dec", "--tokens", "4", "--prompt", "9", "--sequences", "3", "--json")
    figures = json.loads(out)
    assert (figures["sequences"], figures["engines"]) == (3, {"cpu": 12})
    assert figures["state_bytes"] == 3 * 12 * 2 * 2 * WIDTH * 4
    status, out, _ = typed("bench", "dec", "--tokens", "1")
    assert "first token" in out
    assert "tokens a second" not in out
