"""What a decoder takes and gives: its state, what follows from the number of its tokens, and its forms."""

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
from honed.daemon.worker.step_inputs import StepSize, is_made, values_of
from honed.protocol.errors import InvalidArgument
from honed.protocol.params import Data, InputTensor, PrepareParams
from honed.runtime.dtypes import dtype
from honed.runtime.execution.growth import ROWS_MASK

# What a decoder's tokens are called, and what is kept from the request that brings it.
_TOKENS: Final = ("input_ids", "decoder_input_ids", "inputs_embeds", "decoder_inputs_embeds")
_CONSTANT: Final = "encoder_"
_CHUNK: Final = 64  # Tokens of a form for many
_PART: Final = 256  # Tokens of a run of the file, where those before the last need no answer
_CAPACITIES: Final = (256, 512, 1024, 2048)
_MASKS: Final = ("attention_mask", "decoder_attention_mask")
_MASK_RANK: Final = 2
_POSITIONS: Final = "position_ids"
_WHOLE: Final = ("total_sequence_length", "total_seq_len")
_IN_FORMS: Final = (
    *_MASKS, _POSITIONS, *_WHOLE, "cache_position", "past_sequence_length", "past_seq_len", "seqlens_k"
)  # fmt: skip
_MADE_UP: Final = 7  # Tokens of made-up prompts are below


class DecoderBucket(NamedTuple):
    """A compiled form: how many tokens it runs at once, and how many rows of state it has room for."""

    tokens: int
    capacity: int

    def __str__(self) -> str:
        """Return its size for people, before "rows of state"."""
        return f"{self.tokens} token{'s' * (self.tokens > 1)} with up to {self.capacity}"


FORMS: Final = tuple(DecoderBucket(tokens, room) for room in _CAPACITIES for tokens in (1, _CHUNK))


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """One run of a form, for tokens `start` to `start + count` of a request.

    `before` tokens of the sequence come before them.
    """

    form: DecoderBucket
    before: int
    start: int
    count: int


def pieces(step: StepSize, least: int = 0) -> tuple[TokenChunk, ...]:
    """Return the runs of a form, with room for at least so many rows, that a request takes.

    There are none where it has more tokens than any has room for.
    """
    tokens = 1 if step.tokens == 1 else _CHUNK
    starts = range(0, step.tokens, tokens)
    # The last run may have more tokens than the request.
    room = max(least, step.past + len(starts) * tokens)
    capacity = next((size for size in _CAPACITIES if size >= room), 0)
    form = DecoderBucket(tokens, capacity)
    return tuple(
        TokenChunk(form, step.past + start, start, min(tokens, step.tokens - start))
        for start in (starts if capacity else ())
    )


# As `struct` writes the types of tokens, masks, positions and logits.
_FORMATS: Final[Mapping[str, str]] = {
    "int64": "q", "int32": "i", "bool": "?", "float64": "d", "float32": "f", "float16": "e"
}  # fmt: skip


def packed(kind: str, values: Sequence[int]) -> bytes:
    """Return numbers as the bytes of a tensor of a type in `_FORMATS`, row-major."""
    return struct.pack(f"<{len(values)}{_FORMATS[kind]}", *values)


def difference(kind: str, found: Data, right: Data) -> float:
    """Return the largest difference of two tensors, relative to the largest value of `right`.

    Infinity where `found` has a NaN.
    """
    form = f"<{len(right) // dtype(kind).itemsize}{_FORMATS[kind]}"
    pairs = [*zip(struct.unpack(form, found), struct.unpack(form, right), strict=True)]
    if any(math.isnan(one) for one, _ in pairs):
        return math.inf
    largest = max((abs(other) for _, other in pairs), default=0.0) or 1.0
    return max((abs(one - other) for one, other in pairs), default=0.0) / largest


@dataclass(frozen=True, kw_only=True)  # No slots: what each request needs is made once
class DecoderModel:
    """What is known of a model whose state grows: its pairs, and its other inputs by what they are."""

    interface: Interface
    pairs: tuple[state_pairs.StatePair, ...]
    made: tuple[TensorSpec, ...]
    constants: tuple[str, ...]
    tokens: tuple[str, ...]
    _shapes: dict[DecoderBucket, dict[str, tuple[int, ...]]] = field(
        init=False, default_factory=dict, compare=False
    )
    _variants: dict[tuple[str, DecoderBucket], str] = field(init=False, default_factory=dict, compare=False)

    def step(self, params: PrepareParams, rows: int) -> StepSize:
        """Return the size of a request after `rows` tokens, or after those of the state that it brings.

        Raises InvalidArgument where it has no tokens.
        """
        shapes = {tensor.name: tensor.shape for tensor in params.inputs}
        for each in self._held if self.brings_state(params) else ():
            if each.axis >= 0 and len(shape := shapes.get(each.input, ())) > each.axis:
                rows = shape[each.axis]
        for name in self.tokens:
            if len(shape := shapes.get(name, ())) > 1:
                return StepSize(shape[0], shape[1], rows)
        raise InvalidArgument(
            f"input {self.tokens[0]!r} is missing, or has no tokens; give it with shape [batch, tokens]"
        )

    def interface_for(self, params: PrepareParams, step: StepSize) -> Interface:
        """Return the interface that a request is checked by: without what it may leave to the worker."""
        given = {tensor.name for tensor in params.inputs}
        left = self._state.union(t.name for t in self.made).union(self.constants if step.past else ())
        inputs = tuple(t for t in self.interface.inputs if t.name in given or t.name not in left)
        return dataclasses.replace(self.interface, inputs=inputs)

    def brings_state(self, params: PrepareParams) -> bool:
        """Return whether a request has some of the state itself."""
        return any(tensor.name in self._state for tensor in params.inputs)

    @functools.cached_property
    def _state(self) -> frozenset[str]:
        return frozenset(pair.input.name for pair in self.pairs)

    @property
    def has_forms(self) -> bool:
        """Whether forms with room for more tokens than there were can answer."""
        return not self.no_forms

    @functools.cached_property
    def no_forms(self) -> str:
        """Why there are no forms; "" where there are, in which each token has its own row of each output."""
        known = {*self._state, *self.tokens, *self._made}
        odd = [tensor.name for tensor in self.interface.inputs if tensor.name not in known]
        for held in self._held:
            if held.axis < 0:
                return f"its state {held.input!r} does not grow by a row for each token"
        for name in (*odd, *self.tokens[1:]):
            return f"its input {name!r} is neither its tokens, a mask, a position nor a length"
        for tensor in self.made:
            if tensor.name not in _IN_FORMS or (
                tensor.name in _MASKS and len(tensor.shape or ()) != _MASK_RANK
            ):
                return f"its input {tensor.name!r} cannot be made for more rows than there are"
        if next(t.dtype for t in self.interface.inputs if t.name in self.tokens) not in _FORMATS:
            return f"its tokens {self.tokens[0]!r} are of a type that the service cannot make up"
        for output in self.without_state.outputs:
            shape = output.shape or ()
            if shape[:1] not in ((-1,), (1,)) or shape[1:2] != (-1,) or output.dtype not in _FORMATS:
                return f"its output {output.name!r} has no row of numbers for each token"
        return ""

    @functools.cached_property
    def _made(self) -> frozenset[str]:
        return frozenset(tensor.name for tensor in self.made)

    @functools.cached_property
    def in_place(self) -> bool:
        """Whether the model writes new rows behind those that there are; else they are last, behind the room.

        Where that is not known, it does if nobody tells it the positions, so that it counts a mask's ones.
        """
        if self.interface.in_place is not None:
            return self._state <= frozenset(self.interface.in_place)
        return not self._made.isdisjoint(_MASKS) and _POSITIONS not in self._made

    @functools.cached_property
    def _is_told(self) -> bool:
        """Whether a form's other inputs tell which rows of the room are there; else it has ROWS_MASK."""
        return self.in_place or (not self._made.isdisjoint(_MASKS) and _POSITIONS in self._made)

    def shapes(self, form: DecoderBucket) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all inputs of a form."""
        if form not in self._shapes:
            self._shapes[form] = self._shapes_of(form)
        return self._shapes[form]

    def variant(self, model: str, form: DecoderBucket) -> str:
        """Return the name of the variant of a model that is a form."""
        known = model, form
        if known not in self._variants:
            self._variants[known] = variant_name(model, self.shapes(form), self.interface)
        return self._variants[known]

    def form_of(self, shapes: Mapping[str, tuple[int, ...]]) -> DecoderBucket | None:
        """Return the form that has these shapes."""
        forms = FORMS if self.has_forms else ()
        return next((form for form in forms if self.shapes(form) == dict(shapes)), None)

    def was_for_several(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Return whether shapes are those of a form for 2 or 4 sequences, as earlier versions made them."""
        firsts = {shape[:1] for shape in shapes.values()}
        one = {name: (1, *shape[1:]) for name, shape in shapes.items()}
        return firsts <= {(2,), (4,)} and any(one == self.shapes(form) for form in FORMS if form.tokens == 1)

    def _shapes_of(self, form: DecoderBucket) -> dict[str, tuple[int, ...]]:
        held = {each.input: each for each in self._held}
        found: dict[str, tuple[int, ...]] = {}
        for tensor in self.interface.inputs:
            if (each := held.get(tensor.name)) is not None:
                shape = [*each.initial_shape]
                shape[each.axis] = form.capacity
            elif tensor.name in _MASKS:
                shape = [1, form.capacity + (0 if self.in_place else form.tokens)]
            elif tensor in self.made:
                shape = [*values_of(tensor, StepSize(1, form.tokens, 0))[0]]
            else:
                shape = [1, form.tokens, *(tensor.shape or ())[2:]]
            found[tensor.name] = tuple(shape)
        return found if self._is_told else {**found, ROWS_MASK: (1, form.capacity)}

    @functools.cached_property
    def without_state(self) -> Interface:
        """Return the interface of a form without what the worker holds."""
        given = {pair.output.name for pair in self.pairs}
        inputs = tuple(tensor for tensor in self.interface.inputs if tensor.name not in self._state)
        outputs = tuple(tensor for tensor in self.interface.outputs if tensor.name not in given)
        return dataclasses.replace(self.interface, inputs=inputs, outputs=outputs)

    @functools.cached_property
    def of_tokens(self) -> tuple[str, ...]:
        """The outputs that have a row for each token, [batch, tokens, ...]."""
        outputs = self.without_state.outputs
        return tuple(t.name for t in outputs if len(t.shape or ()) > 1 and (t.shape or ())[1] < 0)

    def made_up(self, model: str, step: StepSize) -> tuple[PrepareParams, tuple[Data, ...]]:
        """Return a request for made-up tokens, which every vocabulary has, or for made-up embeddings."""
        (name,) = self.tokens
        spec = next(tensor for tensor in self.interface.inputs if tensor.name == name)
        shape = (1, step.tokens, *(spec.shape or ())[2:])
        numbers = [number % _MADE_UP for number in range(step.past, step.past + math.prod(shape))]
        tensor = InputTensor(name=name, datatype=dtype(spec.dtype).datatype, shape=shape)
        return PrepareParams(model_name=model, inputs=(tensor,)), (packed(spec.dtype, numbers),)

    @functools.cached_property
    def of_forms(self) -> Interface:
        """Return the interface of forms without what the worker holds."""
        if self._is_told:
            return self.without_state
        mask = TensorSpec(name=ROWS_MASK, dtype="uint8", shape=(1, -1))
        return dataclasses.replace(self.without_state, inputs=(*self.without_state.inputs, mask))

    def inputs(self, form: DecoderBucket) -> tuple[InputTensor, ...]:
        """Return the inputs of a form that the worker does not hold."""
        shapes = self.shapes(form)
        return tuple(
            InputTensor(name=spec.name, datatype=dtype(spec.dtype).datatype, shape=shapes[spec.name])
            for spec in self.of_forms.inputs
        )

    def contents(self, piece: TokenChunk, data: Data) -> tuple[bytes, ...]:
        """Return the data of `inputs` for a piece of tokens, padded with the first that there are."""
        return tuple(self._content(spec, piece, data) for spec in self.of_forms.inputs)

    def _content(self, spec: TensorSpec, piece: TokenChunk, data: Data) -> bytes:
        form, shape = piece.form, self.shapes(piece.form)[spec.name]
        if spec.name in self.tokens:
            row = dtype(spec.dtype).itemsize * math.prod(shape[2:])
            rows = bytes(data[piece.start * row : (piece.start + piece.count) * row])
            return (rows * -(-form.tokens // piece.count))[: form.tokens * row]
        if spec.name == ROWS_MASK:
            return b"\1" * piece.before + bytes(form.capacity - piece.before)
        if spec.name in _MASKS:
            hidden, seen = (packed(spec.dtype, [one]) for one in (0, 1))
            if self.in_place:  # Tokens of the padding are behind the client's, which do not see them
                mask = seen * (piece.before + form.tokens)
            else:
                mask = seen * piece.before + hidden * (form.capacity - piece.before) + seen * piece.count
            return mask + hidden * (math.prod(shape) - len(mask) // len(seen))
        if spec.name in _WHOLE and self.in_place:  # Of a cache that has all of the room
            return packed(spec.dtype, [form.capacity])
        _, values = values_of(spec, StepSize(1, form.tokens, piece.before))
        if isinstance(values, int):
            return packed(spec.dtype, [values] * math.prod(shape))
        last, count = piece.before + piece.count - 1, math.prod(shape)
        return packed(spec.dtype, [min(each, last) for each in values] * (count // len(values)))

    def parts(self, step: StepSize) -> tuple[StepSize, ...]:
        """Return the runs of the file by which the last token of a request is answered.

        A long prompt has several, as the answers for all of its tokens may need more memory than there is.
        """
        if step.batch > 1 or step.tokens <= _PART:
            return (step,)
        starts = range(step.past, step.after, _PART)
        return tuple(StepSize(1, min(_PART, step.after - start), start) for start in starts)

    def part(
        self, params: PrepareParams, tokens: Data, step: StepSize, part: StepSize
    ) -> tuple[PrepareParams, tuple[Data, ...]]:
        """Return what a part of a step is given, of a request that has nothing but tokens."""
        (tensor,) = params.inputs
        row, start = len(tokens) // step.tokens, part.past - step.past
        content = bytes(tokens[start * row : (start + part.tokens) * row])
        shape = (1, part.tokens, *tensor.shape[2:])
        cut = InputTensor(name=tensor.name, datatype=tensor.datatype, shape=shape)
        return dataclasses.replace(params, inputs=(cut,)), (content,)

    def held(self, step: StepSize) -> tuple[StateTensorSpec, ...]:
        """Return what the worker holds of a sequence that has batches of that size."""
        if step.batch == 1:
            return self._held
        opens = [(pair.input.shape or (0,))[0] < 0 for pair in self.pairs]
        return tuple(
            dataclasses.replace(each, initial_shape=(step.batch, *each.initial_shape[1:]))
            if is_open
            else each
            for each, is_open in zip(self._held, opens, strict=True)
        )

    @functools.cached_property
    def _held(self) -> tuple[StateTensorSpec, ...]:
        """Return what the worker holds of one sequence.

        Keys and values of what was encoded are made by the first request for good.
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
    """Return what is known of a model, `named` being its state by output; None where none of it grows."""
    pairs = state_pairs.pairs(interface, named)
    if not any(pair.grows_on >= 0 for pair in pairs):
        return None
    state = {pair.input.name for pair in pairs}
    others = [tensor for tensor in interface.inputs if tensor.name not in state]
    made = tuple(tensor for tensor in others if is_made(tensor) and tensor.dtype in _FORMATS)
    constants = tuple(tensor.name for tensor in others if tensor.name.startswith(_CONSTANT))
    rest = [t.name for t in others if t not in made and t.name not in constants]
    tokens = tuple(name for name in rest if name in _TOKENS) or tuple(rest)
    if not tokens:
        return None
    return DecoderModel(interface=interface, pairs=pairs, made=made, constants=constants, tokens=tokens)


def names(params: PrepareParams) -> tuple[str, ...]:
    """Return the names of a request's inputs."""
    return tuple(tensor.name for tensor in params.inputs)


def rows_of(data: Data, piece: TokenChunk) -> bytes:
    """Return the part of an output, row-major, that is of the client's tokens."""
    return bytes(data[: len(data) // piece.form.tokens * piece.count])
