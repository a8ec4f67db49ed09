"""Inputs of decoders that follow from how many tokens there are: masks, positions and lengths.

The service knows them by their names, and the worker that runs a step makes those that its request lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from honed.daemon.store.compiled import TensorSpec


@dataclass(frozen=True, slots=True)
class StepSize:
    """A request's size: its batch, its tokens, and how many came before."""

    batch: int
    tokens: int
    past: int

    @property
    def after(self) -> int:
        """How many tokens there are with this request."""
        return self.past + self.tokens


Values = tuple[tuple[int, ...], int | range]  # A shape, and its rows, or the one value of all elements


def _ones(step: StepSize, _: tuple[int, ...]) -> Values:
    return (step.batch, step.after), 1


def _positions(step: StepSize, shape: tuple[int, ...]) -> Values:
    rows = range(step.past, step.after)
    if len(shape) == 1:
        return (step.tokens,), rows
    # Some models have one for each direction.
    return (*(max(1, size) for size in shape[:-2]), step.batch, step.tokens), rows


def _length(*, before: bool) -> Callable[[StepSize, tuple[int, ...]], Values]:
    return lambda step, shape: ((1,) * len(shape), step.past if before else step.after)


# By their names in files of Optimum and onnxruntime-genai: their values for the shape that the model says.
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
    """Return whether an input follows from a step."""
    return tensor.name in _MADE and tensor.shape is not None


def values_of(tensor: TensorSpec, step: StepSize) -> Values:
    """Return the values that an input has in a step, for which `is_made` is true."""
    return _MADE[tensor.name](step, tensor.shape or ())
