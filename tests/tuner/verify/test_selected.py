"""Outputs behind a selection are compared as sets of rows where scores tie: no order of equals is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from honed.machine.devices import Device
from honed.runtime.compiled import modelfile
from honed.runtime.compiled.model import Selection
from honed.runtime.engines import HIGHEST, LOWEST
from honed.runtime.execution.verification import align_rows, compare
from honed.tuner.compiler import compile as compiling
from honed.tuner.verify import discontinuities, levels
from honed.tuner.verify.confined import DEFAULT_LIMITS
from tests.tuner.requests import request_for
from tests.tuner.verify.parsing import generate

from .test_discontinuities import runtime

TOLERANCE = (1e-3, 0.0, 1e-3)
NAMES = ("scores", "labels", "boxes")
ALL = (Selection(outputs=(0, 1, 2), axes=(1, 1, 1), score=0),)


def detector(spread: float, kept: int) -> onnx.ModelProto:
    """Queries with scores, classes and boxes, of which the best are kept, as exporters write a DETR."""
    model = parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17]>
f (float[1,24,16] x) => (float[1,{kept}] scores, int64[1,{kept}] labels, float[1,{kept},4] boxes)
<float spread = {{{spread}}}, int64[2] flat = {{1,-1}}, int64[1] k = {{{kept}}}, int64 classes = {{5}},
 int64[1] last = {{2}}, int64[3] four = {{1,1,4}}> {{
  l = MatMul(x, w)
  m = Mul(l, spread)
  p = Sigmoid(m)
  r = Reshape(p, flat)
  scores, i = TopK(r, k)
  labels = Mod(i, classes)
  q = Div(i, classes)
  u = Unsqueeze(q, last)
  t = Tile(u, four)
  b = MatMul(x, v)
  boxes = GatherElements<axis = 1>(b, t)
}}"""
    )
    rng = np.random.default_rng(3)
    for name, shape in {"w": (16, 5), "v": (16, 4)}.items():
        weights = rng.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(weights, name))
    return model


def right(reference: dict[str, np.ndarray], found: dict[str, np.ndarray]) -> bool:
    made = align_rows(ALL, NAMES, reference, found, TOLERANCE)
    pairs = zip(NAMES, TOLERANCE, strict=True)
    return all(compare(reference[name], made[name], allowed, name).right for name, allowed in pairs)


@pytest.fixture
def tied() -> dict[str, np.ndarray]:
    """Ten rows, of which the scores of four, and those of the last two, tie."""
    rng = np.random.default_rng(1)
    scores = np.array([9, 8, 7, 7, 7, 7, 5, 4, 3, 3], np.float32) / 10
    return {
        "scores": scores[None] + rng.uniform(-1e-6, 1e-6, (1, 10)).astype(np.float32),
        "labels": rng.integers(0, 5, (1, 10)),
        "boxes": rng.standard_normal((1, 10, 4)).astype(np.float32),
    }


def reordered(values: dict[str, np.ndarray], order: Sequence[int]) -> dict[str, np.ndarray]:
    return {name: value[:, list(order)] for name, value in values.items()}


def test_rows_whose_scores_tie_come_in_any_order(tied: dict[str, np.ndarray]) -> None:
    assert right(tied, tied)
    assert right(tied, reordered(tied, [0, 1, 5, 3, 2, 4, 6, 7, 9, 8]))


def test_rows_move_whole_and_each_only_once(tied: dict[str, np.ndarray]) -> None:
    order = [0, 1, 5, 3, 2, 4, 6, 7, 8, 9]
    for name in ("labels", "boxes"):
        assert not right(tied, {**reordered(tied, order), name: tied[name]})
    tied["labels"][:] = 0
    assert not right(tied, reordered(tied, [0, 1, 2, 2, 3, 4, 6, 7, 8, 9])), (
        "a row came twice, one not at all"
    )


def test_rows_whose_scores_differ_do_not_move(tied: dict[str, np.ndarray]) -> None:
    moved = reordered(tied, [1, 0, *range(2, 10)])
    assert not right(tied, moved)
    assert not right(tied, {**moved, "scores": tied["scores"]})


def test_others_may_take_the_place_of_rows_that_tie_with_the_last(tied: dict[str, np.ndarray]) -> None:
    for row, may in ((9, True), (8, True), (7, False), (3, False)):
        other = {name: value.copy() for name, value in tied.items()}
        other["boxes"][0, row] += 5
        assert right(tied, other) == may, row


def test_a_wrong_value_is_no_other_order(tied: dict[str, np.ndarray]) -> None:
    other = reordered(tied, [0, 1, 5, 3, 2, 4, 6, 7, 8, 9])
    other["boxes"][0, 3, 1] *= np.float32(1.5)
    assert not right(tied, other)


def found(model: onnx.ModelProto) -> tuple[Selection, ...]:
    inputs = generate(model, 2)
    tolerance = [1e-3 if v.type.tensor_type.elem_type == 1 else 0.0 for v in model.graph.output]
    return discontinuities.selections(model, inputs, runtime(model, inputs), tolerance, DEFAULT_LIMITS)


def test_what_follows_a_selection_is_found_however_it_is_computed() -> None:
    assert found(detector(1, 24)) == ALL
    behind = parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]>
f (float[12] x, float[12,3] d) => (float[3,6] y, float[12] z, float[6] s) <int64[1] k = {6}> {
  t, i = TopK(x, k)
  g = Gather(d, i)
  e = Sin(g)
  y = Transpose(e)
  z = Neg(x)
  s = Softmax(t)
}"""
    )
    assert found(behind) == (Selection(outputs=(0, 2), axes=(1, 0), score=2),)


def test_a_detector_with_near_equal_queries_is_right_in_any_order() -> None:
    """Scores that differ by the last bits: what computes them otherwise orders all rows otherwise."""
    model = detector(1e-7, 24 * 5)
    inputs = generate(model, 2)

    def otherwise(
        variant: onnx.ModelProto, sets: Sequence[Mapping[str, np.ndarray]]
    ) -> list[dict[str, np.ndarray]]:
        rng = np.random.default_rng(0)
        made = runtime(variant, sets)
        for each in made:
            each["r"] = each["r"] + rng.uniform(-1e-6, 1e-6, each["r"].shape).astype(np.float32)
        return made

    judged = discontinuities.judge(model, inputs, otherwise, precision="fp32", tolerance=TOLERANCE)
    assert judged is not None
    assert judged.wrong is None
    assert judged.selections == ALL
    assert judged.tolerance[1] == 0
    assert max(judged.tolerance) <= 2e-3


def test_it_is_compiled_and_its_file_says_which_rows_are_a_set(tmp_path: Path, device: Device) -> None:
    onnx.save(detector(1e-7, 24 * 5), tmp_path / "d.onnx")
    request = request_for(tmp_path / "d.onnx", device)
    made = compiling.compile_file(request, lambda *_: None)
    proof = modelfile.read(request.output).model.proof
    assert proof is not None
    assert proof.selections == ALL, made.model.source.notes
    assert all(
        error <= allowed for error, allowed in zip(proof.error, proof.probes[0].tolerance, strict=True)
    )


class Reordering(levels._Runs):
    """ONNX Runtime, which gives near-equal scores in another order at all levels but the lowest."""

    wrong: float = 0.0

    def at(self, level: str, *more: str) -> Sequence[Mapping[str, np.ndarray]] | str:
        found = super().at(LOWEST, *more)
        if level == LOWEST or isinstance(found, str):
            return found
        return [self._swapped(each) for each in found]

    def _swapped(self, given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return outputs with the two rows whose scores are closest in the place of each other."""
        scores = given["scores"][0]
        first = int(np.argmin(-np.diff(scores)))
        order = np.arange(scores.size)
        order[[first, first + 1]] = first + 1, first
        made = {name: np.take(value, order, 1) for name, value in given.items()}
        made["boxes"][0, order[0]] += self.wrong
        return made


@pytest.mark.parametrize(("wrong", "level"), [(0.0, HIGHEST), (9.0, LOWEST)])
def test_another_order_of_near_equals_lowers_no_level(
    monkeypatch: pytest.MonkeyPatch, wrong: float, level: str
) -> None:
    monkeypatch.setattr(levels, "_Runs", Reordering)
    monkeypatch.setattr(Reordering, "wrong", wrong)
    found = levels.highest(detector(0.01, 20), {}, DEFAULT_LIMITS)
    assert (found.level, found.checked) == (level, True), found.why
