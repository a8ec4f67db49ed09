"""Layer normalisations that exporters took apart are one operator, with the same answers."""

from __future__ import annotations

import numpy as np
import pytest

from honed.tuner.graph import Pass
from honed.tuner.graph.moves import join_norms

from .graphs import after, operators, parsed, weights

NORMS = (Pass("norms", join_norms),)
PARTS = (
    "m = ReduceMean<axes=[{axis}]>(x) c = Sub(x, m) s = Pow(c, two) v = ReduceMean<axes=[{axis}]>(s) "
    "e = Add({plus}) d = Sqrt(e) "
)
CONSTANTS = {"two": np.float32(2), "tiny": np.float32([1e-3]), "g": weights(8), "b": weights(1, 1, 8)}


def _operators(
    body: str, *, axis: int = -1, plus: str = "v, tiny", **constants: np.ndarray
) -> dict[str, int]:
    parts = PARTS.format(axis=axis, plus=plus)
    text = f"(float[2,5,8] x) => (float[2,5,8] y) {{ {parts} {body} }}"
    return operators(after(parsed(text, **CONSTANTS | constants), NORMS))


@pytest.mark.parametrize("plus", ["v, tiny", "tiny, v"])
@pytest.mark.parametrize(
    ("body", "others"),
    [
        ("n = Div(c, d) a = Mul(n, g) y = Add(b, a)", {}),
        ("n = Div(c, d) y = Mul(g, n)", {}),
        ("n = Div(c, d) y = Add(n, b)", {}),
        ("y = Div(c, d)", {}),
        ("n = Div(c, d) a = Add(n, b) y = Mul(a, g)", {"Mul": 1}),  # the offset is multiplied, too
        ("n = Div(c, d) a = Mul(n, g) r = Relu(n) y = Add(a, r)", {"Mul": 1, "Relu": 1, "Add": 1}),
        ("n = Div(c, d) y = Mul(n, h)", {"Mul": 1}),  # by columns
    ],
)
def test_parts_of_a_layer_normalisation_are_one(body: str, others: dict[str, int], plus: str) -> None:
    assert _operators(body, plus=plus, h=weights(5, 1)) == {"LayerNormalization": 1} | others


@pytest.mark.parametrize(
    ("body", "axis", "plus"),
    [
        ("y = Div(c, d)", 1, "v, tiny"),  # along columns
        ("y = Div(x, d)", -1, "v, tiny"),  # not centred
        ("n = Div(c, d) y = Add(n, c)", -1, "v, tiny"),  # the centred value is read besides
        ("n = Div(c, d) y = Mul(n, d)", -1, "v, tiny"),  # and the deviation
        ("y = Div(c, d)", -1, "v, m"),  # nothing constant is added
        ("y = Div(c, d)", -1, "v, h"),  # by columns
    ],
)
def test_what_is_no_layer_normalisation_is_left_alone(body: str, axis: int, plus: str) -> None:
    found = _operators(body, axis=axis, plus=plus, h=np.abs(weights(5, 1)))
    assert found["LayerNormalization"] == 0
    assert found["ReduceMean"] == 2
