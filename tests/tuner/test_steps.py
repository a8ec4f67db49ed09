"""Sequences in compiled forms of a decoder: their rows stay on the device, and move where they are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from honed.daemon.features.decoding import (
    DecoderBucket,
    DecoderModel,
    TokenChunk,
    decoder_of,
    forms_for,
    pieces,
)
from honed.daemon.worker.calls import RunModel, RunStep, RunTemplate, StateTensorSpec
from honed.daemon.worker.step_inputs import StepSize
from honed.daemon.worker.steps import DeviceSequences
from honed.machine.devices import Device
from honed.protocol.errors import InvalidArgument, ResourceExhausted, SequenceLost
from honed.runtime.execution import memory
from honed.runtime.execution.executor import Executor, load
from honed.tuner.compiler import compile as compiling
from honed.tuner.compiler import verification
from honed.tuner.lower.schedule import default_kernels
from tests.decoders import HEADS, SIZE, VOCABULARY, Array, InApp, decoder, grouped
from tests.tuner.requests import request_for

pytestmark = [pytest.mark.opencl, pytest.mark.tvm]
ROOM, CHUNK, LAYERS = 16, 4, 1
TOLERANCE = 1e-3
HELD_ONCE = (
    StateTensorSpec(output="h1", input="h0", dtype="float32", initial_shape=(1, 2), axis=-1, set_once=False),
)
ROW_BYTES = 2 * LAYERS * HEADS * SIZE * 4


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return decoder(tmp_path_factory.mktemp("m") / "dec.onnx", layers=LAYERS)


def known_of(path: Path) -> DecoderModel:
    from honed.cpu.session import Session

    found = decoder_of(Session(path, 1).interface, {})
    assert found is not None
    return found


@pytest.fixture(scope="module")
def known(path: Path) -> DecoderModel:
    return known_of(path)


@pytest.fixture(scope="module")
def compiled(
    path: Path, known: DecoderModel, device: Device, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[DecoderBucket], Executor]]:
    """Any form, compiled once."""
    folder = tmp_path_factory.mktemp("forms")
    with ExitStack() as opened:
        yield cache(lambda form: opened.enter_context(compile_form(path, known, form, folder, device)))


def compile_form(
    path: Path, known: DecoderModel, form: DecoderBucket, folder: Path, device: Device
) -> Executor:
    request = request_for(
        path, device, "auto", output=folder / "{}x{}.honed".format(*form), shapes=known.shapes(form)
    )
    with pytest.MonkeyPatch.context() as patch:  # neither schedules nor proofs are what these tests are about
        patch.setattr(compiling, "untuned_kernels", lambda *given, **_: default_kernels(*given))
        patch.setattr(verification, "_probe", lambda _, draft, __: draft)
        compiling.compile_file(request, lambda *_: None)
    return load(request.output, device)


@pytest.fixture(scope="module")
def forms(compiled: Callable[[DecoderBucket], Executor]) -> dict[int, Executor]:
    """The forms by their tokens."""
    return {tokens: compiled(DecoderBucket(tokens, ROOM)) for tokens in (1, CHUNK)}


class Sequence:
    """One that is run by forms, beside the same with its cache in the app."""

    def __init__(self, number: int, path: Path, known: DecoderModel, sequences: DeviceSequences) -> None:
        self.number, self.rows, self.most, self.row_bytes = number, 0, 1 << 30, ROW_BYTES
        self._known, self._sequences, self._app = known, sequences, InApp(path)

    def asked(self, form: Executor, ids: Array) -> tuple[dict[str, Array], int, int]:
        """Run tokens [1, n] by a form for as many or more."""
        call, inputs = self.given(form, ids)
        return self._sequences.step(form, call, inputs)

    def given(self, form: Executor, ids: Array) -> tuple[RunStep, dict[str, Array]]:
        """The call for tokens [1, n], and its inputs for a form for as many or more."""
        shapes = {tensor.name: tensor.shape for tensor in form.model.inputs}
        tokens, count = shapes["input_ids"][1], ids.shape[1]
        piece = TokenChunk(DecoderBucket(tokens, shapes["past_key_values.0.key"][2]), self.rows, 0, count)
        kinds = {tensor.name: tensor.dtype for tensor in self._known.of_forms.inputs}
        contents = self._known.contents(piece, ids.tobytes())
        inputs = {
            given.name: np.frombuffer(data, kinds[given.name]).reshape(given.shape)
            for given, data in zip(self._known.inputs(piece.form), contents, strict=True)
        }
        nothing = RunTemplate(inputs=(), outputs=(), room=None, finite=False, keep=False, max_bytes=0)
        run = RunModel(key="", form=nothing.pack(), raw=())
        call = RunStep(
            run=run,
            sequence=self.number,
            rows=self.rows,
            count=count,
            batch=1,
            tensors=self._known.state_tensors(StepSize(1, tokens, 0)),
            constants=(),
            max_state_bytes=self.most,
            last_token=(),
        )
        return call, inputs

    def step(self, form: Executor, ids: Array) -> None:
        """Run tokens by both, and compare."""
        self.compare(self.asked(form, ids), ids)

    def step_to_last(self, form: Executor, ids: Array) -> None:
        """Run tokens by both, and compare the row of the last."""
        call, inputs = self.given(form, ids)
        call = replace(call, last_token=("logits",))
        outputs, self.rows, _ = self._sequences.step(form, call, inputs)
        assert outputs["logits"].shape == (1, 1, VOCABULARY)
        np.testing.assert_allclose(outputs["logits"], self._app.step(ids)[:, -1:], rtol=0, atol=TOLERANCE)

    def compare(self, found: tuple[dict[str, Array], int, int], ids: Array) -> None:
        """Compare what a step gave with ONNX Runtime's answer."""
        outputs, self.rows, nbytes = found
        assert nbytes == self.rows * self.row_bytes
        assert outputs.keys() == {"logits"}
        logits = outputs["logits"][:, : ids.shape[1]]
        np.testing.assert_allclose(logits, self._app.step(ids), rtol=0, atol=TOLERANCE)

    def generate(self, compiled: Callable[[DecoderBucket], Executor], ids: Array) -> Array:
        """Run tokens by the forms that serve them, and compare with ONNX Runtime; return its next token."""
        found, step = [], StepSize(1, ids.shape[1], self.rows)
        for piece in pieces(step, forms_for(step, 64)[0]):
            outputs, self.rows, _ = self.asked(
                compiled(piece.form), ids[:, piece.start : piece.start + piece.count]
            )
            found.append(outputs["logits"][:, : piece.count])
        logits, expected = np.concatenate(found, axis=1), self._app.step(ids)
        np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCE)
        second, first = np.sort(expected[0, -1])[-2:]
        token = expected[:, -1:].argmax(-1)
        if first - second > 2 * TOLERANCE:
            np.testing.assert_array_equal(logits[:, -1:].argmax(-1), token)
        return token


def prompt(length: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(0, VOCABULARY, (1, length))


def test_a_sequence_moves_between_forms(path: Path, known: DecoderModel, forms: dict[int, Executor]) -> None:
    one = Sequence(1, path, known, DeviceSequences())
    for length in (4, 3, 1, 1, 2, 1, 4):
        one.step(forms[1 if length == 1 else CHUNK], prompt(length, length))
    assert one.rows == ROOM


@pytest.mark.slow
def test_rows_are_written_where_the_others_are(device: Device, tmp_path: Path) -> None:
    path = grouped(tmp_path / "g.onnx", layers=1)
    known = known_of(path)
    with ExitStack() as opened:
        forms = {
            tokens: opened.enter_context(
                compile_form(path, known, DecoderBucket(tokens, ROOM), tmp_path, device)
            )
            for tokens in (1, CHUNK)
        }
        for form in forms.values():
            bound = {tensor.name: tensor.buffer for tensor in form.model.outputs}
            for tensor in form.model.inputs:
                assert (
                    bound.get(tensor.name.replace("past_key_values", "present"), tensor.buffer)
                    == tensor.buffer
                )
        sequences = DeviceSequences()
        both = [Sequence(number, path, known, sequences) for number in (1, 2)]
        for at, length in enumerate((4, 3, 1, 1, 2, 1)):
            for each in both:
                each.row_bytes = 2 * 2 * 8 * 4
                each.step(forms[1 if length == 1 else CHUNK], prompt(length, 7 * at + each.number))


@pytest.mark.parametrize(
    ("told", "sizes"),
    [
        ({"mask": False, "positions": False}, {CHUNK}),
        pytest.param({"mask": False, "positions": False}, {1, CHUNK}, marks=pytest.mark.slow),
        pytest.param({"mask": False}, {1, CHUNK}, marks=pytest.mark.slow),
        pytest.param({"positions": False}, {1, CHUNK}, marks=pytest.mark.slow),
    ],
)
def test_rows_are_found_by_the_length_of_the_state(
    told: dict[str, bool], sizes: set[int], device: Device, tmp_path: Path
) -> None:
    path = decoder(tmp_path / "d.onnx", layers=1, **told)
    known = known_of(path)
    with ExitStack() as opened:
        forms = {
            tokens: opened.enter_context(
                compile_form(path, known, DecoderBucket(tokens, ROOM), tmp_path, device)
            )
            for tokens in sizes
        }
        one = Sequence(1, path, known, DeviceSequences())
        for length in (1, 4, 1, 3, 2, 1, 4):
            one.step(forms[1 if length == 1 and 1 in forms else CHUNK], prompt(length, length))
        assert one.rows == ROOM


def test_sequences_share_a_form(path: Path, known: DecoderModel, forms: dict[int, Executor]) -> None:
    sequences = DeviceSequences()
    both = [Sequence(number, path, known, sequences) for number in (1, 2)]
    for at, length in enumerate((4, 1, 1, 3)):
        for each in both:
            each.step(forms[CHUNK if length > 1 else 1], prompt(length, 7 * at + each.number))


@pytest.mark.parametrize("copied", [0, 1 << 30])
def test_the_row_of_the_last_token_alone_is_read(
    copied: int,
    path: Path,
    known: DecoderModel,
    forms: dict[int, Executor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "_COPIED_BYTES", copied)  # Larger buffers are mapped
    one = Sequence(1, path, known, DeviceSequences())
    for length in (CHUNK, 3, 1):
        one.step_to_last(forms[CHUNK], prompt(length, length))
    one.step(forms[CHUNK], prompt(2))
    one.step_to_last(forms[1], prompt(1))


def test_other_runs_of_a_form_leave_a_sequence_as_it_was(
    path: Path, known: DecoderModel, forms: dict[int, Executor]
) -> None:
    sequences, form = DeviceSequences(), forms[CHUNK]
    one = Sequence(1, path, known, sequences)
    one.step(form, prompt(3))
    sequences.leave(form)
    form.run({tensor.name: np.ones(tensor.shape, tensor.dtype) for tensor in form.model.inputs})
    one.step(form, prompt(2))
    state = sequences.state(1, 5)
    assert all(array.shape == (1, HEADS, 5, SIZE) for array in state.values())


def test_a_step_is_repeated_where_its_answer_did_not_come(
    path: Path, known: DecoderModel, forms: dict[int, Executor]
) -> None:
    one = Sequence(1, path, known, DeviceSequences())
    one.step(forms[CHUNK], prompt(4))
    one.asked(forms[CHUNK], prompt(3, 5))
    one.step(forms[CHUNK], prompt(2))
    one.step(forms[1], prompt(1))


def test_what_is_not_there_is_lost_and_what_is_too_large_changes_nothing(
    path: Path, known: DecoderModel, forms: dict[int, Executor]
) -> None:
    sequences = DeviceSequences()
    one = Sequence(1, path, known, sequences)
    one.step(forms[CHUNK], prompt(4))
    one.most = 5 * ROW_BYTES
    with pytest.raises(ResourceExhausted, match=r"raise max_mib of \[sequences\]"):
        one.asked(forms[CHUNK], prompt(2))
    one.step(forms[1], prompt(1))
    sequences.drop((1, 9))
    with pytest.raises(SequenceLost, match="the process that held its state has ended"):
        one.asked(forms[1], prompt(1))
    with pytest.raises(SequenceLost, match="the process that held its state has ended"):
        sequences.state(1, 1)


def test_state_that_does_not_grow_is_not_kept_in_a_form(
    path: Path, known: DecoderModel, forms: dict[int, Executor], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Sequence(1, path, known, DeviceSequences())
    monkeypatch.setattr(type(known), "state_tensors", lambda *_: HELD_ONCE)
    with pytest.raises(InvalidArgument, match="state that does not grow"):
        one.asked(forms[1], prompt(1))


@pytest.mark.slow
def test_hundreds_of_greedy_steps_are_onnx_runtime_s_while_the_room_grows(
    path: Path, known: DecoderModel, compiled: Callable[[DecoderBucket], Executor]
) -> None:
    """All sequences take turns, so that each moves in and out of forms; prompts end within and at chunks."""
    sequences = DeviceSequences()
    lengths = (1, 63, 64, 65, 250, 900)
    turns = [
        (Sequence(number, path, known, sequences), [prompt(length, number)])
        for number, length in enumerate(lengths)
    ]
    for step in range(500):
        for each, ids in turns:
            if step < 150 or each.number < 2:
                ids.append(each.generate(compiled, ids[-1]))
    assert [each.rows for each, _ in turns] == [500, 562, *(length + 149 for length in lengths[2:])]
