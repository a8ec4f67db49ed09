"""What serves a function first: picked by a shipped prior, the same every time, and right."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
import xgboost
from tvm import tirx

from honed.machine.devices import Device
from honed.machine.profile import DeviceProfile
from honed.tuner.first import first_kernels
from honed.tuner.lower.opencl import Lowered, LoweringFailed, lower_function
from honed.tuner.lower.target import target_for
from honed.tuner.search import prior
from honed.tuner.search.draw import Draw, Drawing
from honed.tuner.search.features import WIDTH
from honed.tuner.tune.extract import extract

from .lowering import normal, run_lowered
from .search_functions import dense, imagined, tasks

pytestmark = pytest.mark.tvm


SHIPPED = sorted(path.name.split("-")[0] for path in prior.FOLDER.glob(f"*-{prior.VERSION}.ubj"))


def test_processors_and_malis_have_a_prior() -> None:
    assert {"cpu", "mali"} <= set(SHIPPED)


@pytest.mark.parametrize("knows", [True, False])
def test_a_prior_that_knows_rules_may_prefer_one(knows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class LastFirst:
        """Scores what it is given last, which is the rule's schedule, highest."""

        name, knows_rules = "prior:planted", knows

        def predict(self, features: np.ndarray) -> np.ndarray:
            return np.arange(len(features), dtype=np.float32)

    monkeypatch.setattr("honed.tuner.first.prior_of", lambda _family: LastFirst())
    one = imagined("mali")
    rule, _, passed_over = first_kernels(dense(96, 130, 64), "main", target_for(one), one)
    assert (rule, passed_over) == ("matmul" if knows else "prior:planted", [])


def test_the_sketches_whose_draws_score_best_are_drawn_from_more(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[int]()

    class Tracked(Drawing):
        """Keeps which sketches were drawn from."""

        def of(self, sketch: int) -> Iterator[Draw]:
            asked.append(sketch)
            return super().of(sketch)

    class LikesTheThird:
        """Scores the first draw of the third sketch best, and all others alike."""

        name, knows_rules = "prior:planted", False

        def predict(self, features: np.ndarray) -> np.ndarray:
            scores = np.zeros(len(features), np.float32)
            scores[2:3] = 1.0
            return scores

    monkeypatch.setattr("honed.tuner.first.Drawing", Tracked)
    monkeypatch.setattr("honed.tuner.first.prior_of", lambda _family: LikesTheThird())
    one = imagined("mali")
    first_kernels(dense(96, 130, 64), "main", target_for(one), one)
    sketches = len(set(asked))
    assert asked[:sketches] == list(range(sketches))
    assert asked[sketches:] == [2] * (12 - sketches)


@pytest.mark.parametrize("family", SHIPPED)
def test_priors_know_the_present_features_and_are_small(family: str) -> None:
    found = prior.prior_of(family)
    assert found is not None
    assert found.name == f"prior:{family}-{prior.VERSION}"
    assert found.predict(np.zeros((3, WIDTH), np.float32)).shape == (3,)
    assert (prior.FOLDER / f"{family}-{prior.VERSION}.ubj").stat().st_size < 2 << 20


def test_one_learned_from_other_features_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = xgboost.DMatrix(np.eye(4, 5, dtype=np.float32), label=np.arange(4))
    xgboost.train({}, data, 1).save_model(tmp_path / f"cpu-{prior.VERSION}.ubj")
    monkeypatch.setattr(prior, "FOLDER", tmp_path)
    prior.prior_of.cache_clear()
    try:
        with pytest.raises(ValueError, match="from 5 features"):
            prior.prior_of("cpu")
    finally:
        prior.prior_of.cache_clear()


@pytest.mark.opencl
def test_the_pick_is_the_same_every_time_and_right(device: Device, profile: DeviceProfile) -> None:
    func, target = dense(96, 128, 64), target_for(profile)
    rule, lowered, passed_over = first_kernels(func, "main", target, profile)
    assert rule.startswith("prior:")
    assert passed_over == []
    assert first_kernels(func, "main", target, profile)[1] == lowered
    a, b, c = normal(96, 64), normal(64, 128), np.zeros((96, 128), np.float32)
    run_lowered(lowered, [a, b], [c], device)
    np.testing.assert_allclose(c, a @ b, rtol=1e-4, atol=1e-4)


def test_what_is_small_and_what_has_no_prior_go_by_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    one = imagined("cpu")
    assert not first_kernels(dense(8, 8, 8), "main", target_for(one), one)[0].startswith("prior:")
    monkeypatch.setattr("honed.tuner.first.prior_of", lambda _family: None)
    assert not first_kernels(dense(96, 128, 64), "main", target_for(one), one)[0].startswith("prior:")


@pytest.mark.parametrize(("family", "prior"), [("cpu", True), ("mali", False)])
def test_small_functions_of_several_parts_are_one_launch_on_processors(
    family: str, prior: bool, tmp_path: Path
) -> None:
    """Of a softmax rules make three."""
    ((task, func),) = [(one.task, one.func) for one in tasks("softmax", tmp_path, imagined(family))]
    origin, lowered, _ = first_kernels(func, task.name, target_for(imagined(family)), imagined(family))
    assert origin.startswith("prior:") == prior
    assert (len(lowered.launches) == 1) == prior


def test_what_cannot_be_lowered_is_passed_over_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    one, refused = imagined("cpu"), list[tirx.PrimFunc]()

    def picky(func: tirx.PrimFunc, *others: Any) -> Lowered:
        if len(refused) < 2:
            refused.append(func)
            raise LoweringFailed("it is not to my taste")
        return lower_function(func, *others)

    monkeypatch.setattr("honed.tuner.first.lower_function", picky)
    rule, _, passed_over = first_kernels(dense(96, 128, 64), "main", target_for(one), one)
    assert rule == passed_over[0].split(": ")[0]
    assert passed_over == [f"{rule}: it is not to my taste"] * 2


def test_where_no_pick_can_be_lowered_a_rule_does() -> None:
    one = imagined("cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("honed.tuner.first._TRIED", 0)
        assert first_kernels(dense(96, 128, 64), "main", target_for(one), one)[0] == "matmul"


def test_products_of_gpus_begin_with_a_table_that_fills_the_device() -> None:
    one = imagined("gpu")
    origin, lowered, _ = first_kernels(dense(192, 512, 512), "main", target_for(one), one)
    assert origin == "tables:gpu"
    (launch,) = lowered.launches
    assert launch.grid[0] >= one.limits.compute_units
    origin, lowered, _ = first_kernels(dense(8, 64, 512), "main", target_for(one), one)
    assert origin == "tables:gpu", "none fills the device"
    assert lowered.launches[0].grid[0] > 1
    origin, _, _ = first_kernels(dense(1, 64, 4096), "main", target_for(one), one)
    assert not origin.startswith("tables"), "rules share the sums of a vector's product out"


def test_products_of_malis_begin_with_a_table_and_else_the_prior_picks() -> None:
    one = imagined("mali")
    origin, lowered, _ = first_kernels(dense(192, 256, 256), "main", target_for(one), one)
    assert origin == "tables:mali"
    assert [(launch.grid, launch.block) for launch in lowered.launches] == [((4, 6, 1), (8, 8, 1))]
    origin, _, _ = first_kernels(dense(192, 49, 64), "main", target_for(one), one)
    assert origin == "prior:mali-1"


@pytest.mark.parametrize(("family", "expected"), [("mali", "prior:mali"), ("cpu", "tables:cpu")])
def test_convolutions_are_served_with_their_weights_laid_out(
    family: str, expected: str, tmp_path: Path
) -> None:
    one = imagined(family)
    graph = (
        "g (float[1, 32, 28, 28] x, float[32, 32, 3, 3] w) => (float[1, 32, 28, 28] y) "
        "{ y = Conv <pads = [1, 1, 1, 1]> (x, w) }"
    )
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {graph}')
    onnx.save(model, tmp_path / "model.onnx")
    ((task, *_), _) = extract(tmp_path / "model.onnx", {}, "fp32", one)
    origin, lowered, _ = first_kernels(task.func, "main", target_for(one), one)
    assert origin.startswith(expected)
    assert len(lowered.launches) == 3  # the weights packed, the image padded, and both multiplied
