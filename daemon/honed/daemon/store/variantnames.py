"""What variants are called: a model, and the sizes that its file leaves open: `lightglue@191x200`. No I/O."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Final

from honed.daemon.store.interface import Interface
from honed.protocol.methods import NAME

MARK: Final = "@"
STORED: Final = re.compile(rf"{NAME.pattern}({MARK}[0-9a-z_]{{1,48}})?")  # what a stored name may be
_LONGEST = 48  # of the sizes as text
Shapes = Mapping[str, tuple[int, ...]]  # by input


def model_of(name: str) -> str:
    """The model that a name stands for: itself, or the one that it is a variant of."""
    return name.partition(MARK)[0]


def is_variant(name: str) -> bool:
    """Whether it is no model of its own."""
    return MARK in name


def variant_name(model: str, shapes: Shapes, interface: Interface | None) -> str:
    """The name of the variant of `model` for these shapes of all inputs: always the same for the same.

    It tells the open sizes in the order of the inputs, those of one symbol once, unless these differ; all
    sizes where it is not known which are open; a digest where that is too long.
    """
    if interface is None:
        text = "_".join("x".join(map(str, sizes)) for _, sizes in sorted(shapes.items()))
    else:
        text = "x".join(map(str, _open_sizes(shapes, interface) or ()))
    if not 0 < len(text) <= _LONGEST:
        text = "z" + hashlib.sha256(json.dumps(sorted(shapes.items())).encode()).hexdigest()[:16]
    return f"{model}{MARK}{text}"


def _open_sizes(shapes: Shapes, interface: Interface) -> list[int] | None:
    """None where they do not tell the shapes."""
    sizes: list[int] = []
    different: list[int] = []
    named: dict[str, int] = {}
    contradicts = False  # which ONNX Runtime does not mind
    for tensor in interface.inputs:
        given = shapes.get(tensor.name)
        if given is None or tensor.shape is None or len(tensor.shape) != len(given):
            return None
        symbols = tensor.symbols or ("",) * len(given)
        for size, symbol, number in zip(tensor.shape, symbols, given, strict=True):
            if size >= 0:
                continue
            sizes.append(number)
            if not symbol or symbol not in named:
                different.append(number)
                named[symbol] = number
            elif named[symbol] != number:
                contradicts = True
    return sizes if contradicts else different
