"""Each rule decides the range of its example's input."""

from __future__ import annotations

import re

import onnx
import pytest
from onnx import parser

from honed.tuner.verify import ranges
from honed.tuner.verify.graphs import SourceGraph
from honed.tuner.verify.ranges import NAMES, RULES, NameRule, Rule, of_inputs


def example(row: Rule | NameRule) -> onnx.ModelProto:
    given, _, nodes = row.example.partition(" => ")
    inputs, _, constants = given.partition(" | ")
    outputs = "y, z" if " z = " in nodes else "y"
    header = '<ir_version: 10, opset_import: ["": 24, "com.microsoft": 1]>'
    text = (
        f"{header} f ({inputs}) => ({outputs}) <{constants}> {{ {nodes.replace('ms.', 'com.microsoft.')} }}"
    )
    return parser.parse_model(text.replace(" <> ", " "))


@pytest.mark.parametrize("row", [*RULES, *NAMES], ids=lambda row: f"{row[0]} {row[1]}")
def test_a_rule_alone_decides_the_range_of_its_example(
    row: Rule | NameRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = example(row)
    name = "i" if isinstance(row, Rule) else re.split(r"[ ,]", row.example)[1]
    found = of_inputs(SourceGraph(model), shaping=True)[name]
    if isinstance(row, Rule):
        others = {place: each for place, each in ranges._BY_PLACE.items() if each is not row}
        monkeypatch.setattr(ranges, "_BY_PLACE", others)
    else:
        monkeypatch.setattr(ranges, "NAMES", tuple(each for each in NAMES if each is not row))
    assert of_inputs(SourceGraph(model), shaping=True)[name] != found
