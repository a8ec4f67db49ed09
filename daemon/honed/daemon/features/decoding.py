"""Describes a decoder: its state, the inputs derived from the number of tokens, and its compiled shapes."""

from __future__ import annotations

import dataclasses
import functools
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from honed.daemon.store import state_pairs
from honed.daemon.store.compiled import Interface, TensorSpec
from honed.daemon.store.names import variant_name
from honed.daemon.worker.calls import StateTensorSpec
from honed.daemon.worker.step_inputs import MASK_RANK, MASKS, StepSize, is_made, values_of
from honed.machine.profile import DeviceProfile
from honed.protocol.errors import InvalidArgument
from honed.protocol.params import InputTensor, PrepareParams
from honed.protocol.values import Data
from honed.runtime.compiled.model import ROWS_MASK
from honed.runtime.dtypes import dtype

# Names of a decoder's token inputs; prefix of inputs that the worker keeps from the first request.
_TOKENS: Final = ("input_ids", "decoder_input_ids", "inputs_embeds", "decoder_inputs_embeds")
_CONSTANT: Final = "encoder_"
# Tokens of a run of the compiled shapes for prompts. All devices have the shortest.
_CHUNKS: Final = (64, 128, 256)
_PART: Final = 256  # Tokens of a run by ONNX Runtime, if only the last token's outputs are requested
CAPACITIES: Final = (256, 512, 1024, 2048)
_POSITIONS: Final = "position_ids"
_WHOLE: Final = ("total_sequence_length", "total_seq_len")
_IN_FORMS: Final = (
    *MASKS, _POSITIONS, *_WHOLE, "cache_position", "past_sequence_length", "past_seq_len", "seqlens_k"
)  # fmt: skip
_MADE_UP: Final = 7  # Tokens of synthetic prompts are below this


class DecoderBucket(NamedTuple):
    """A compiled decoder shape: tokens per run and capacity in rows of state."""

    tokens: int
    capacity: int

    def __str__(self) -> str:
        """Return the size as text, to be followed by "rows of state"."""
        return f"{self.tokens} token{'s' * (self.tokens > 1)} with up to {self.capacity}"


# A comparison runs a compiled shape for prompts twice (`form_trials.py`).
FORMS: Final = tuple(
    DecoderBucket(tokens, room) for room in CAPACITIES for tokens in (1, *_CHUNKS) if 2 * tokens <= room
)


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """A run of a compiled shape for tokens `start` to `start + count` of a request.

    The sequence has `before` tokens before these.
    """

    form: DecoderBucket
    before: int
    start: int
    count: int


def longest_chunk(profile: DeviceProfile | None) -> int:
    """Return the tokens of a run of the compiled shapes for long prompts on a device.

    More tokens share each weight that is read and unpacked, and occupy more compute units. The units of a
    processor are busy with the fewest.
    """
    if profile is None or profile.family.processor:
        return _CHUNKS[0]
    return _CHUNKS[2 if profile.is_large_gpu else 1]


def forms_for(step: StepSize, longest: int) -> tuple[DecoderBucket, ...]:
    """Return the compiled shapes that can run a step, the one to compile first; none if it exceeds all.

    Prompts longer than the shortest chunk have runs of up to `longest` tokens. Because the last run may have
    more tokens than are left, shorter runs can be fewer tokens in all.
    """
    most = longest if step.tokens > _CHUNKS[0] else _CHUNKS[0]
    found = dict[DecoderBucket, int]()
    for tokens in (1,) if step.tokens == 1 else reversed(_CHUNKS):
        whole = math.ceil(step.tokens / tokens) * tokens
        rooms = (form for form in FORMS if form.tokens == tokens and form.capacity >= step.past + whole)
        if tokens <= most and (form := next(rooms, None)) is not None:
            found[form] = whole
    if longest == _CHUNKS[-1]:  # A shorter run takes such a device nearly as long
        return tuple(found)
    return tuple(sorted(found, key=found.__getitem__))


def pieces(step: StepSize, form: DecoderBucket) -> tuple[TokenChunk, ...]:
    """Return the runs of a compiled shape that a request needs."""
    return tuple(
        TokenChunk(form, step.past + start, start, min(form.tokens, step.tokens - start))
        for start in range(0, step.tokens, form.tokens)
    )


# Format characters of `struct` for the types of tokens, masks, positions and logits.
_FORMATS: Final[Mapping[str, str]] = {
    "int64": "q", "int32": "i", "bool": "?", "float64": "d", "float32": "f", "float16": "e"
}  # fmt: skip


def pack_integers(kind: str, values: Sequence[int]) -> bytes:
    """Return numbers as the little-endian bytes of a tensor whose type is in `_FORMATS`."""
    return struct.pack(f"<{len(values)}{_FORMATS[kind]}", *values)


def difference(kind: str, actual: Data, right: Data) -> float:
    """Return the largest difference of two tensors, relative to the largest value of `right`.

    It is infinite if `actual` has a NaN.
    """
    form = f"<{len(right) // dtype(kind).itemsize}{_FORMATS[kind]}"
    pairs = [*zip(struct.unpack(form, actual), struct.unpack(form, right), strict=True)]
    if any(math.isnan(one) for one, _ in pairs):
        return math.inf
    largest = max((abs(other) for _, other in pairs), default=0.0) or 1.0
    return max((abs(one - other) for one, other in pairs), default=0.0) / largest


@dataclass(frozen=True, kw_only=True)  # Cached properties need a __dict__, so there are no slots
class DecoderModel:
    """A model whose state grows: its state pairs, and other inputs by kind; the worker fills `generated`."""

    interface: Interface
    pairs: tuple[state_pairs.StatePair, ...]
    generated: tuple[TensorSpec, ...]
    constants: tuple[str, ...]
    tokens: tuple[str, ...]
    _shapes: dict[DecoderBucket, dict[str, tuple[int, ...]]] = field(
        init=False, default_factory=dict, compare=False
    )
    _variants: dict[tuple[str, DecoderBucket], str] = field(init=False, default_factory=dict, compare=False)

    def step(self, params: PrepareParams, rows: int) -> StepSize:
        """Return the size of a request's step after `rows` tokens, or after those of the state that it sends.

        Raises InvalidArgument if it has no tokens.
        """
        shapes = {tensor.name: tensor.shape for tensor in params.inputs}
        for each in self._single_state_tensors if self.brings_state(params) else ():
            if each.axis >= 0 and len(shape := shapes.get(each.input, ())) > each.axis:
                rows = shape[each.axis]
        for name in self.tokens:
            if len(shape := shapes.get(name, ())) > 1:
                return StepSize(shape[0], shape[1], rows)
        raise InvalidArgument(
            f"input {self.tokens[0]!r} is missing, or has no tokens; give it with shape [batch, tokens]"
        )

    def interface_for(self, params: PrepareParams, step: StepSize) -> Interface:
        """Return the interface to check a request against: without inputs that it leaves to the worker."""
        given = {tensor.name for tensor in params.inputs}
        left = self._state.union(t.name for t in self.generated).union(self.constants if step.past else ())
        inputs = tuple(t for t in self.interface.inputs if t.name in given or t.name not in left)
        return dataclasses.replace(self.interface, inputs=inputs)

    def brings_state(self, params: PrepareParams) -> bool:
        """Return whether a request sends state itself."""
        return any(tensor.name in self._state for tensor in params.inputs)

    @functools.cached_property
    def _state(self) -> frozenset[str]:
        return frozenset(pair.input.name for pair in self.pairs)

    @property
    def has_forms(self) -> bool:
        """Return whether the model can run in compiled shapes."""
        return not self.no_forms

    @functools.cached_property
    def no_forms(self) -> str:
        """The reason why the model cannot run in compiled shapes, or ""."""
        known = {*self._state, *self.tokens, *self._names_generated}
        odd = [tensor.name for tensor in self.interface.inputs if tensor.name not in known]
        for held in self._single_state_tensors:
            if held.axis < 0:
                return f"its state {held.input!r} does not grow by a row for each token"
        for name in (*odd, *self.tokens[1:]):
            if name in MASKS:
                return f"its mask {name!r} is not [batch, tokens], of {MASK_RANK} dimensions"
            return f"its input {name!r} is neither its tokens, a mask, a position nor a length"
        for tensor in self.generated:
            if tensor.name not in _IN_FORMS:
                return f"its input {tensor.name!r} cannot be made for more rows than there are"
        if next(t.dtype for t in self.interface.inputs if t.name in self.tokens) not in _FORMATS:
            return f"its tokens {self.tokens[0]!r} are of a type that the service cannot make up"
        for output in self.without_state.outputs:
            shape = output.shape or ()
            if shape[:1] not in ((-1,), (1,)) or shape[1:2] != (-1,) or output.dtype not in _FORMATS:
                return f"its output {output.name!r} has no row of numbers for each token"
        return ""

    @functools.cached_property
    def _names_generated(self) -> frozenset[str]:
        return frozenset(tensor.name for tensor in self.generated)

    @functools.cached_property
    def in_place(self) -> bool:
        """Return whether the model writes new rows of state after the used ones, not after the capacity.

        If the interface does not say so, a model does that if it has a mask and no positions: it counts ones.
        """
        if self.interface.in_place is not None:
            return self._state <= frozenset(self.interface.in_place)
        return not self._names_generated.isdisjoint(MASKS) and _POSITIONS not in self._names_generated

    @functools.cached_property
    def _is_told(self) -> bool:
        """Return whether the model's inputs show which rows are used; if not, its shapes have ROWS_MASK."""
        return self.in_place or (
            not self._names_generated.isdisjoint(MASKS) and _POSITIONS in self._names_generated
        )

    def shapes(self, form: DecoderBucket) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all inputs of a compiled shape."""
        if form not in self._shapes:
            self._shapes[form] = self._shapes_of(form)
        return self._shapes[form]

    def variant(self, model: str, form: DecoderBucket) -> str:
        """Return the name of the model's variant for a compiled shape."""
        known = model, form
        if known not in self._variants:
            self._variants[known] = variant_name(model, self.shapes(form), self.interface)
        return self._variants[known]

    def form_of(self, shapes: Mapping[str, tuple[int, ...]]) -> DecoderBucket | None:
        """Return the compiled shape whose inputs have these shapes, or None."""
        forms = FORMS if self.has_forms else ()
        return next((form for form in forms if self.shapes(form) == dict(shapes)), None)

    def was_for_several(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Return whether shapes are for 2 or 4 sequences, as earlier versions compiled them."""
        firsts = {shape[:1] for shape in shapes.values()}
        one = {name: (1, *shape[1:]) for name, shape in shapes.items()}
        return firsts <= {(2,), (4,)} and any(one == self.shapes(form) for form in FORMS if form.tokens == 1)

    def _shapes_of(self, form: DecoderBucket) -> dict[str, tuple[int, ...]]:
        held = {each.input: each for each in self._single_state_tensors}
        found: dict[str, tuple[int, ...]] = {}
        for tensor in self.interface.inputs:
            if (each := held.get(tensor.name)) is not None:
                shape = [*each.initial_shape]
                shape[each.axis] = form.capacity
            elif tensor.name in MASKS:
                shape = [1, form.capacity + (0 if self.in_place else form.tokens)]
            elif tensor in self.generated:
                shape = [*values_of(tensor, StepSize(1, form.tokens, 0))[0]]
            else:
                shape = [1, form.tokens, *(tensor.shape or ())[2:]]
            found[tensor.name] = tuple(shape)
        return found if self._is_told else {**found, ROWS_MASK: (1, form.capacity)}

    @functools.cached_property
    def without_state(self) -> Interface:
        """The interface without state, which the worker holds."""
        given = {pair.output.name for pair in self.pairs}
        inputs = tuple(tensor for tensor in self.interface.inputs if tensor.name not in self._state)
        outputs = tuple(tensor for tensor in self.interface.outputs if tensor.name not in given)
        return dataclasses.replace(self.interface, inputs=inputs, outputs=outputs)

    @functools.cached_property
    def of_tokens(self) -> tuple[str, ...]:
        """The names of outputs with a row for each token, [batch, tokens, ...]."""
        outputs = self.without_state.outputs
        return tuple(t.name for t in outputs if len(t.shape or ()) > 1 and (t.shape or ())[1] < 0)

    def synthetic_request(self, model: str, step: StepSize) -> tuple[PrepareParams, tuple[Data, ...]]:
        """Return a synthetic request; its tokens are so small that every vocabulary has them."""
        (name,) = self.tokens
        spec = next(tensor for tensor in self.interface.inputs if tensor.name == name)
        shape = (1, step.tokens, *(spec.shape or ())[2:])
        numbers = [number % _MADE_UP for number in range(step.past, step.past + math.prod(shape))]
        tensor = InputTensor(name=name, datatype=dtype(spec.dtype).datatype, shape=shape)
        return PrepareParams(model_name=model, inputs=(tensor,)), (pack_integers(spec.dtype, numbers),)

    @functools.cached_property
    def of_forms(self) -> Interface:
        """The interface of compiled shapes without state; it may have ROWS_MASK."""
        if self._is_told:
            return self.without_state
        mask = TensorSpec(name=ROWS_MASK, dtype="uint8", shape=(1, -1))
        return dataclasses.replace(self.without_state, inputs=(*self.without_state.inputs, mask))

    def inputs(self, form: DecoderBucket) -> tuple[InputTensor, ...]:
        """Return the inputs of a compiled shape except state."""
        shapes = self.shapes(form)
        return tuple(
            InputTensor(name=spec.name, datatype=dtype(spec.dtype).datatype, shape=shapes[spec.name])
            for spec in self.of_forms.inputs
        )

    def contents(self, piece: TokenChunk, data: Data) -> tuple[bytes, ...]:
        """Return the data of `inputs` for a chunk; tokens are padded by repeating the chunk's."""
        return tuple(self._content(spec, piece, data) for spec in self.of_forms.inputs)

    def _content(self, spec: TensorSpec, piece: TokenChunk, data: Data) -> bytes:
        form, shape = piece.form, self.shapes(piece.form)[spec.name]
        if spec.name in self.tokens:
            row = dtype(spec.dtype).itemsize * math.prod(shape[2:])
            rows = bytes(data[piece.start * row : (piece.start + piece.count) * row])
            return (rows * -(-form.tokens // piece.count))[: form.tokens * row]
        if spec.name == ROWS_MASK:
            return b"\1" * piece.before + bytes(form.capacity - piece.before)
        if spec.name in MASKS:
            hidden, seen = (pack_integers(spec.dtype, [one]) for one in (0, 1))
            if self.in_place:  # Padding follows the client's tokens, which do not attend to it
                mask = seen * (piece.before + form.tokens)
            else:
                mask = seen * piece.before + hidden * (form.capacity - piece.before) + seen * piece.count
            return mask + hidden * (math.prod(shape) - len(mask) // len(seen))
        if spec.name in _WHOLE and self.in_place:  # The buffer of the state has the whole capacity
            return pack_integers(spec.dtype, [form.capacity])
        _, values = values_of(spec, StepSize(1, form.tokens, piece.before))
        if isinstance(values, int):
            return pack_integers(spec.dtype, [values] * math.prod(shape))
        last, count = piece.before + piece.count - 1, math.prod(shape)
        return pack_integers(spec.dtype, [min(each, last) for each in values] * (count // len(values)))

    def parts(self, step: StepSize) -> tuple[StepSize, ...]:
        """Return the runs by ONNX Runtime that answer a request for the last token's outputs.

        A long prompt has several, because the outputs of all its tokens may exceed the memory.
        """
        if step.batch > 1 or step.tokens <= _PART:
            return (step,)
        starts = range(step.past, step.after, _PART)
        return tuple(StepSize(1, min(_PART, step.after - start), start) for start in starts)

    def part(
        self, params: PrepareParams, tokens: Data, step: StepSize, part: StepSize
    ) -> tuple[PrepareParams, tuple[Data, ...]]:
        """Return the request and data of a part of a step, for a request that has only tokens."""
        (tensor,) = params.inputs
        row, start = len(tokens) // step.tokens, part.past - step.past
        content = bytes(tokens[start * row : (start + part.tokens) * row])
        shape = (1, part.tokens, *tensor.shape[2:])
        cut = InputTensor(name=tensor.name, datatype=tensor.datatype, shape=shape)
        return dataclasses.replace(params, inputs=(cut,)), (content,)

    def state_tensors(self, step: StepSize) -> tuple[StateTensorSpec, ...]:
        """Return the state tensors that the worker holds of a sequence with the step's batch size."""
        if step.batch == 1:
            return self._single_state_tensors
        opens = [(pair.input.shape or (0,))[0] < 0 for pair in self.pairs]
        return tuple(
            dataclasses.replace(each, initial_shape=(step.batch, *each.initial_shape[1:]))
            if is_open
            else each
            for each, is_open in zip(self._single_state_tensors, opens, strict=True)
        )

    @functools.cached_property
    def _single_state_tensors(self) -> tuple[StateTensorSpec, ...]:
        """The state tensors of a sequence of batch size 1.

        The first request sets keys and values of encoder outputs; later ones do not change them.
        """
        once = {pair.output.name for pair in self.pairs if ".encoder." in pair.input.name}
        return tuple(
            StateTensorSpec(
                output=pair.output.name,
                input=pair.input.name,
                dtype=pair.input.dtype,
                initial_shape=tuple(
                    size if size >= 0 else int(not axis) for axis, size in enumerate(pair.input.shape or ())
                ),
                axis=pair.grows_on if pair.output.name not in once else -1,
                set_once=pair.output.name in once,
            )
            for pair in self.pairs
        )


def decoder_of(interface: Interface, named: Mapping[str, str]) -> DecoderModel | None:
    """Return a model's description as a decoder; `named` is its state by output. None if no state grows."""
    if not state_pairs.grows(interface, named):
        return None
    pairs = state_pairs.pairs(interface, named)
    state = {pair.input.name for pair in pairs}
    others = [tensor for tensor in interface.inputs if tensor.name not in state]
    made = tuple(tensor for tensor in others if is_made(tensor) and tensor.dtype in _FORMATS)
    constants = tuple(tensor.name for tensor in others if tensor.name.startswith(_CONSTANT))
    rest = [t.name for t in others if t not in made and t.name not in constants]
    tokens = tuple(name for name in rest if name in _TOKENS) or tuple(rest)
    if not tokens:
        return None
    return DecoderModel(interface=interface, pairs=pairs, generated=made, constants=constants, tokens=tokens)


def names(params: PrepareParams) -> tuple[str, ...]:
    """Return the names of a request's inputs."""
    return tuple(tensor.name for tensor in params.inputs)


def rows_of(data: Data, piece: TokenChunk) -> bytes:
    """Return the rows of a row-major output that belong to the client's tokens."""
    return bytes(data[: len(data) // piece.form.tokens * piece.count])
