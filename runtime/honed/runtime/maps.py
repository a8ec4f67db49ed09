"""Lists of maps as two tensors: what classifiers of the ai.onnx.ml domain give (ZipMap), which apps ask for.

Every map of such a list has the same keys, so that the list travels as its keys, [classes], and a row of
values for each map, float32 [maps, classes].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .dtypes import STRING

Array = NDArray[Any]
Maps = list[dict[int, float]] | list[dict[str, float]]
# The types of keys, by what ONNX Runtime calls the lists (ONNX operators, ai.onnx.ml, ZipMap).
KEYS: Final = {
    "seq(map(int64,tensor(float)))": "int64",
    "seq(map(string,tensor(float)))": STRING.name,
}


def travelling(output: str) -> tuple[str, str]:
    """The names of the tensors of keys and of values, for an output that is a list of maps."""
    return f"{output}.keys", f"{output}.values"


def apart(maps: Sequence[Mapping[Any, float]], key_type: str) -> tuple[Array, Array]:
    """The keys and the values; raises ValueError where two maps differ in their keys."""
    keys = list(maps[0]) if maps else []
    if any(list(each) != keys for each in maps):
        raise ValueError("its maps have different keys")
    kept = np.array(keys, object if key_type == STRING.name else key_type)
    return kept, np.array([list(each.values()) for each in maps], np.float32).reshape(len(maps), len(keys))


def together(keys: Array, values: Array) -> Maps:
    """The list of maps again, as ONNX Runtime gives it."""
    names = [each.decode() if isinstance(each, bytes) else each for each in keys.tolist()]
    return [dict(zip(names, row, strict=True)) for row in values.tolist()]
