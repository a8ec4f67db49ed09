"""What an ONNX file takes and gives, as it says: sizes may be open."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenTensor:
    """An input or output. A size of -1 is open; `shape` None: any number of dimensions.

    `symbols` names the dimensions whose sizes are equal wherever the name is; "" where there is none.
    """

    name: str
    dtype: str  # NumPy's name
    shape: tuple[int, ...] | None
    symbols: tuple[str, ...] = ()

    @property
    def is_open(self) -> bool:
        """Whether its shape is known only once it is there."""
        return self.shape is None or -1 in self.shape

    def takes(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor may have this shape."""
        if self.shape is None:
            return True
        return len(shape) == len(self.shape) and all(
            size in (-1, given) for size, given in zip(self.shape, shape, strict=True)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """Of one file, with what it says of its making."""

    inputs: tuple[OpenTensor, ...]
    outputs: tuple[OpenTensor, ...]
    opset: int
    producer: str
    state: tuple[tuple[str, str], ...] = ()  # outputs, and the inputs they are given to next
