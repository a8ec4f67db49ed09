"""Shapes as they are given on a command line."""

from __future__ import annotations

from collections.abc import Sequence

from honed.runtime.errors import InvalidArgument


def parse_shapes(texts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """`INPUT=1,3,224,224` for each input; raises InvalidArgument for anything else."""
    return dict(map(_shape, texts))


def _shape(text: str) -> tuple[str, tuple[int, ...]]:
    name, equals, extents = text.rpartition("=")
    try:
        if not equals or not name:
            raise ValueError
        return name, tuple(int(extent) for extent in extents.split(",") if extent.strip())
    except ValueError:
        raise InvalidArgument(f"--shape {text!r} is not of the form INPUT=1,3,224,224") from None
