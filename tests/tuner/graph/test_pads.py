"""Zeros around an image belong to the convolutions that read it, with the same answers."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from honed.tuner.graph import Pass
from honed.tuner.graph.folding import fold_pads

from .graphs import after, operators, parsed, weights

PADS = (Pass("pads", fold_pads),)
ZERO, ONE = np.float32(0), np.float32(1)


def _model(body: str, amounts: list[int], value: np.float32 = ZERO, groups: int = 1) -> onnx.ModelProto:
    weight = weights(4, 4 // groups, 3, 3)
    text = f"(float[1,4,6,7] x) => (float[a,b,c,d] y) {{ p = Pad(x, amounts, value) {body} }}"
    return parsed(text, amounts=np.array(amounts), value=value, w=weight)


@settings(max_examples=25)
@given(
    widths=st.tuples(*[st.integers(0, 2)] * 4),
    own=st.tuples(*[st.integers(0, 1)] * 4),
    strides=st.sampled_from([(1, 1), (2, 1), (2, 2)]),
    groups=st.sampled_from([1, 2, 4]),
)
def test_a_convolution_pads_its_image_itself(
    widths: tuple[int, ...], own: tuple[int, ...], strides: tuple[int, int], groups: int
) -> None:
    amounts = [0, 0, *widths[:2], 0, 0, *widths[2:]]
    body = f"y = Conv <pads = {list(own)}, strides = {list(strides)}, group = {groups}> (p, w)"
    found = operators(after(_model(body, amounts, groups=groups), PADS))
    assert found == {"Conv": 1}


def test_all_that_read_the_padded_image_pad_it() -> None:
    body = "a = Conv <strides = [2, 2]> (p, w) b = Conv <strides = [2, 2]> (p, w) y = Add(a, b)"
    found = operators(after(_model(body, [0, 0, 1, 1, 0, 0, 1, 1]), PADS))
    assert found["Pad"] == 0


@pytest.mark.parametrize(
    ("body", "amounts", "value"),
    [
        ("y = Conv(p, w)", [0, 0, 1, 1, 0, 0, 1, 1], ONE),  # not with zeros
        ("a = Conv(p, w) r = ReduceMax <keepdims = 1> (p) y = Add(a, r)", [0, 0, 1, 1, 0, 0, 1, 1], ZERO),
        ("y = Conv(p, w)", [1, 0, 0, 0, 0, 0, 0, 0], ZERO),  # another image
    ],
)
def test_other_pads_are_left_alone(body: str, amounts: list[int], value: np.float32) -> None:
    found = operators(after(_model(body, amounts, value), PADS))
    assert found["Pad"] == 1
