"""Generates inputs of decoders that follow from the number of tokens: masks, positions and lengths.

They are recognised by name. The worker that runs a step generates those that its request lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from honed.daemon.store.compiled import TensorSpec


@dataclass(frozen=True, slots=True)
class StepSize:
    """The size of a request: its batch, its tokens, and the tokens before it."""

    batch: int
    tokens: int
    past: int

    @property
    def after(self) -> int:
        """The number of tokens after this request."""
        return self.past + self.tokens


Values = tuple[tuple[int, ...], int | range]  # A shape, and its rows, or a value of all elements


MASKS: Final = ("attention_mask", "decoder_attention_mask")
MASK_RANK: Final = 2  # Dimensions of a mask of tokens, [batch, tokens]


def _ones(step: StepSize, _: tuple[int, ...]) -> Values:
    return (step.batch, step.after), 1


def _positions(step: StepSize, shape: tuple[int, ...]) -> Values:
    rows = range(step.past, step.after)
    if len(shape) == 1:
        return (step.tokens,), rows
    # Some models have positions in several dimensions.
    return (*(max(1, size) for size in shape[:-2]), step.batch, step.tokens), rows


def _length(*, before: bool) -> Callable[[StepSize, tuple[int, ...]], Values]:
    return lambda step, shape: ((1,) * len(shape), step.past if before else step.after)


# Names used by Optimum and onnxruntime-genai, with functions of the step and the model's shape.
_MADE: Final[Mapping[str, Callable[[StepSize, tuple[int, ...]], Values]]] = {
    "attention_mask": _ones,
    "decoder_attention_mask": _ones,
    "position_ids": _positions,
    "cache_position": _positions,
    "past_sequence_length": _length(before=True),
    "past_seq_len": _length(before=True),
    "total_sequence_length": _length(before=False),
    "total_seq_len": _length(before=False),
    "seqlens_k": lambda step, _: ((step.batch,), step.after - 1),
    "use_cache_branch": lambda step, shape: ((1,) * len(shape), int(step.past > 0)),
}


def is_made(tensor: TensorSpec) -> bool:
    """Return whether an input's values follow from the step."""
    if tensor.shape is None or tensor.name not in _MADE:
        return False
    return tensor.name not in MASKS or len(tensor.shape) == MASK_RANK  # Others may be added to scores


def values_of(tensor: TensorSpec, step: StepSize) -> Values:
    """Return the values in a step of an input for which `is_made` is true."""
    return _MADE[tensor.name](step, tensor.shape or ())
