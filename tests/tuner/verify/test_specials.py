"""The probe with NaN and infinities: which models have one, and what is told of its answers."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from onnx import parser

from honed.runtime.execution.executor import Executor
from honed.tuner.verify import probes


def _chosen(body: str, rows: int = 4) -> probes.SpecialProbe | None:
    text = f"""<ir_version: 9, opset_import: ["": 20]>
        g (float[1,{rows},8] x, int64[2] i) => (y) {{ {body} }}"""
    given = {"x": np.ones((1, rows, 8), np.float32), "i": np.zeros(2, np.int64)}
    return probes.choose_special(parser.parse_model(text), given)


class _Device:
    """Gives what is known, whatever it is asked."""

    def __init__(self, answer: np.ndarray) -> None:
        self.answer = answer

    def run_compiled(self, _: Any) -> dict[str, np.ndarray]:
        return {"y": self.answer}


def test_holds_each_kind_once_and_is_compared_elementwise() -> None:
    probe = _chosen("y = Relu(x)")
    assert probe is not None
    x, y = probe.inputs["x"], probe.outputs["y"]
    assert [np.isnan(x).sum(), np.isposinf(x).sum(), np.isneginf(x).sum()] == [1, 1, 1]
    assert not probe.inputs["i"].any()

    def told(answer: np.ndarray) -> list[str]:
        return probes.differences(cast(Executor, _Device(answer)), probe, {"y": 1e-3})

    assert told(y) == []
    for wrong in (np.where(np.isnan(y), 0, y), np.where(np.isinf(y), 3.4e38, y)):
        (note,) = told(wrong.astype(np.float32))
        assert "output 'y'" in note
        assert "`finite`" in note


@pytest.mark.parametrize(
    ("body", "rows"),
    [
        ("y = MaxPool <kernel_shape = [2]> (x)", 4),
        ("y = ArgMax <axis = 1> (x)", 4),
        ("y = Relu(x)", 1),  # three of eight say more of the probe than of the model
        ("l = Constant <value_float = 1.0> () a = Log(x) y = Gather <axis = 2> (a, i)", 1),
    ],
)
def test_is_left_out_where_it_would_say_nothing(body: str, rows: int) -> None:
    assert _chosen(body, rows) is None
