"""What serves a function first: picked by a shipped prior, the same every time, and right."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
import xgboost
from tvm import te, tirx, topi

from honed.jobs import priorfile
from honed.jobs.priorfile import PriorFile
from honed.machine.devices import Device
from honed.machine.profile import DeviceProfile
from honed.tuner.compiler.schedules import untuned_kernels
from honed.tuner.lower.opencl import Lowered, LoweringFailed, lower_function
from honed.tuner.lower.target import target_for
from honed.tuner.search import costmodel
from honed.tuner.search.costmodel import WIDTH
from honed.tuner.search.draw import ScheduleSample, SpaceSampler
from honed.tuner.setup import PRIORS, for_defaults, load_shipped_prior, setup_for, tuning_key
from honed.tuner.tune.extract import extract
from tests.tuner.lower.lowering import normal, run_lowered

from .search_functions import dense, imagined, tasks

pytestmark = pytest.mark.tvm


SHIPPED = sorted(path.stem for path in PRIORS.glob(f"*{priorfile.SUFFIX}"))


def test_processors_and_malis_have_a_prior() -> None:
    assert {"cpu", "mali"} <= set(SHIPPED)


@pytest.mark.parametrize("knows", [True, False])
def test_a_prior_that_knows_rules_may_prefer_one(knows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class LastFirst:
        """Scores what it is given last, which is the rule's schedule, highest."""

        name, knows_rules = "prior:planted", knows

        def predict(self, features: np.ndarray) -> np.ndarray:
            return np.arange(len(features), dtype=np.float32)

    monkeypatch.setattr("honed.tuner.compiler.schedules.prior_of", lambda *_: LastFirst())
    one = imagined("mali")
    rule, _, passed_over = untuned_kernels(dense(96, 130, 64), "main", target_for(one), one)
    assert (rule, passed_over) == ("matmul" if knows else "prior:planted", [])


def test_a_rule_that_makes_what_cannot_be_lowered_is_not_picked() -> None:
    """The scores of a step of a decoder whose room is odd, for heads that share keys, with a mask."""
    shapes = {"asked": (1, 4, 1, 64), "keys": (2, 513, 64), "mask": (1, 1, 1, 513)}
    asked, keys, mask = (te.placeholder(shape, name=name) for name, shape in shapes.items())
    inner, whole = te.reduce_axis((0, 64)), (1, 4, 1, 513)
    scores = te.compute(
        whole, lambda b, h, i, j: te.sum(asked[b, h, i, inner] * keys[h // 2, j, inner], inner)
    )
    masked = te.compute(whole, lambda b, h, i, j: scores[b, h, i, j] + mask[b, 0, i, j])
    one = imagined("mali")
    rule, _, _ = untuned_kernels(
        te.create_prim_func([asked, keys, mask, masked]), "main", target_for(one), one
    )
    assert rule.startswith("prior:")


def test_the_sketches_whose_draws_score_best_are_drawn_from_more(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[int]()

    class Tracked(SpaceSampler):
        """Keeps which sketches were drawn from."""

        def of(self, sketch: int) -> Iterator[ScheduleSample]:
            asked.append(sketch)
            return super().of(sketch)

    class LikesTheThird:
        """Scores the first draw of the third sketch best, and all others alike."""

        name, knows_rules = "prior:planted", False

        def predict(self, features: np.ndarray) -> np.ndarray:
            scores = np.zeros(len(features), np.float32)
            scores[2:3] = 1.0
            return scores

    monkeypatch.setattr("honed.tuner.compiler.schedules.SpaceSampler", Tracked)
    monkeypatch.setattr("honed.tuner.compiler.schedules.prior_of", lambda *_: LikesTheThird())
    one = imagined("mali")
    untuned_kernels(dense(96, 130, 64), "main", target_for(one), one)
    sketches = len(set(asked))
    assert asked[:sketches] == list(range(sketches))
    assert asked[sketches:] == [2] * (12 - sketches)


@pytest.mark.parametrize("family", SHIPPED)
def test_priors_know_the_present_features_and_are_small(family: str) -> None:
    found = costmodel.prior_of(family)
    assert found is not None
    file = load_shipped_prior(family)
    assert file is not None
    assert found.name == f"prior:{family}-{file.digest}"
    assert found.predict(np.zeros((3, WIDTH), np.float32)).shape == (3,)
    assert (PRIORS / f"{family}{priorfile.SUFFIX}").stat().st_size < 2 << 20


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a user's own priors lie."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(priorfile, "SYSTEM", tmp_path / "system")
    folder = tmp_path / "honed/priors"
    folder.mkdir(parents=True)
    return folder


def learned(features: int) -> bytes:
    """What is written of a prior of a processor."""
    data = xgboost.DMatrix(np.eye(4, features, dtype=np.float32), label=np.arange(4))
    model = bytes(xgboost.train({}, data, 1).save_raw("ubj"))
    return PriorFile(family="cpu", knows_rules=True, model=model).to_bytes()


def test_an_own_prior_is_used_in_the_place_of_the_one_that_ships(folder: Path) -> None:
    one = imagined("cpu")
    before, kept_under = costmodel.prior_of("cpu"), for_defaults(setup_for(one.identity), "cpu")
    finished = tuning_key("a model", setup_for(one.identity))
    (folder / "cpu.prior").write_bytes(learned(WIDTH))
    own, file = costmodel.prior_of("cpu"), priorfile.read(folder / "cpu.prior")
    assert before is not None
    assert own is not None
    assert own.name == f"prior:cpu-own-{file.digest}"
    assert before.name.startswith("prior:cpu-")
    assert kept_under.compiler.endswith(before.name.removeprefix("prior:cpu-"))
    assert own.knows_rules
    under = for_defaults(setup_for(one.identity), "cpu")
    assert (under == kept_under, under.compiler.endswith(file.digest)) == (False, True)
    assert tuning_key("a model", setup_for(one.identity)) != finished, "its defaults are timed again"
    assert for_defaults(setup_for(one.identity), "gpu") == setup_for(one.identity), "it has none"
    (folder / "cpu.prior").unlink()
    assert costmodel.prior_of("cpu") is before


@pytest.mark.parametrize("wrong", ["features", "damaged", "cut", "other", "none", "old"])
def test_an_own_prior_that_cannot_be_used_is_told_and_left(
    folder: Path, caplog: pytest.LogCaptureFixture, wrong: str
) -> None:
    data = learned(5 if wrong == "features" else WIDTH)
    match wrong:
        case "damaged":
            data = data[:400] + bytes([data[400] ^ 1]) + data[401:]
        case "cut":
            data = data[:-1]
        case "other":
            data = data.replace(b'"cpu"', b'"gpu"')
        case "none":
            data = b"\0" * 5000
        case "old":
            data = data.replace(b'"honed_prior": 1', b'"honed_prior": 0')
    (folder / "cpu.prior").write_bytes(data)
    found = costmodel.prior_of("cpu")
    assert found is not None
    file = load_shipped_prior("cpu")
    assert file is not None
    assert found.name == f"prior:cpu-{file.digest}"
    assert "is used" in caplog.text or "is not used" in caplog.text


@pytest.mark.opencl
def test_the_pick_is_the_same_every_time_and_right(device: Device, profile: DeviceProfile) -> None:
    func, target = dense(96, 128, 64), target_for(profile)
    rule, lowered, passed_over = untuned_kernels(func, "main", target, profile)
    assert rule.startswith("prior:")
    assert passed_over == []
    assert untuned_kernels(func, "main", target, profile)[1] == lowered
    a, b, c = normal(96, 64), normal(64, 128), np.zeros((96, 128), np.float32)
    run_lowered(lowered, [a, b], [c], device)
    np.testing.assert_allclose(c, a @ b, rtol=1e-4, atol=1e-4)


def test_what_is_small_and_what_has_no_prior_go_by_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    one = imagined("cpu")
    assert not untuned_kernels(dense(8, 8, 8), "main", target_for(one), one)[0].startswith("prior:")
    monkeypatch.setattr("honed.tuner.compiler.schedules.prior_of", lambda *_: None)
    assert not untuned_kernels(dense(96, 128, 64), "main", target_for(one), one)[0].startswith("prior:")


@pytest.mark.parametrize("family", ["cpu", "mali"])
def test_small_functions_of_several_parts_are_one_launch(family: str, tmp_path: Path) -> None:
    """Of a softmax rules make three."""
    ((task, func),) = [(one.task, one.func) for one in tasks("softmax", tmp_path, imagined(family))]
    origin, lowered, _ = untuned_kernels(func, task.name, target_for(imagined(family)), imagined(family))
    assert origin.startswith("prior:")
    assert len(lowered.launches) == 1


def test_what_cannot_be_lowered_is_passed_over_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    one, refused = imagined("cpu"), list[tirx.PrimFunc]()

    def picky(func: tirx.PrimFunc, *others: Any) -> Lowered:
        if len(refused) < 2:
            refused.append(func)
            raise LoweringFailed("it is not to my taste")
        return lower_function(func, *others)

    monkeypatch.setattr("honed.tuner.compiler.schedules.lower_function", picky)
    rule, _, passed_over = untuned_kernels(dense(96, 128, 64), "main", target_for(one), one)
    assert rule == passed_over[0].split(": ")[0]
    assert passed_over == [f"{rule}: it is not to my taste"] * 2


def _step(row: int, factor: float) -> tirx.PrimFunc:
    """One step of a recurrence: a state times its weights, and the step's row of what was given."""
    state, weights, given = (te.placeholder(shape) for shape in ((1, 48), (48, 48), (8, 48)))
    added = topi.nn.matmul(state, weights)
    step = te.compute((1, 48), lambda i, j: added[i, j] * factor + given[row, j])
    return te.create_prim_func([state, weights, given, step])


def test_functions_of_one_form_are_scheduled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    one, drawings = imagined("cpu"), list[SpaceSampler]()

    class Counted(SpaceSampler):
        """Keeps every search of a space."""

        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            drawings.append(self)

    monkeypatch.setattr("honed.tuner.compiler.schedules.SpaceSampler", Counted)
    steps = [_step(0, 0.5), _step(3, 0.5), _step(5, 0.25)]
    plain = [untuned_kernels(func, "main", target_for(one), one) for func in steps]
    assert len(drawings) == len(steps)
    first = partial(untuned_kernels, traces_by_form={})
    shared = [first(func, "main", target_for(one), one) for func in steps]
    assert len(drawings) == len(steps) + 1
    assert shared == plain
    assert len({lowered.source for _, lowered, _ in shared}) == len(steps)
    first(dense(96, 128, 64), "main", target_for(one), one)
    partial(untuned_kernels, traces_by_form={})(steps[0], "main", target_for(one), one)
    assert len(drawings) == len(steps) + 3, "other functions, and other models, share nothing"


def test_where_no_pick_can_be_lowered_a_rule_does_for_all_of_a_form(monkeypatch: pytest.MonkeyPatch) -> None:
    one = imagined("cpu")
    first = partial(untuned_kernels, traces_by_form={})
    monkeypatch.setattr("honed.tuner.compiler.schedules._TRIED", 0)
    assert first(dense(96, 128, 64), "main", target_for(one), one)[0] == "matmul"
    monkeypatch.setattr("honed.tuner.compiler.schedules._SOURCES", None)  # nothing is picked again
    assert first(dense(96, 128, 64), "main", target_for(one), one)[0] == "matmul"


def test_products_of_gpus_begin_with_a_table_that_fills_the_device() -> None:
    one = imagined("gpu")
    origin, lowered, _ = untuned_kernels(dense(192, 512, 512), "main", target_for(one), one)
    assert origin == "tables:gpu"
    (launch,) = lowered.launches
    assert launch.grid[0] >= one.limits.compute_units
    origin, lowered, _ = untuned_kernels(dense(8, 64, 512), "main", target_for(one), one)
    assert origin == "tables:gpu", "none fills the device"
    assert lowered.launches[0].grid[0] > 1
    origin, _, _ = untuned_kernels(dense(1, 64, 4096), "main", target_for(one), one)
    assert not origin.startswith("tables"), "rules share the sums of a vector's product out"


@pytest.mark.parametrize(("k", "items"), [(1536, 256), (256, 32)])
def test_long_sums_are_shared_by_as_many_warps_as_a_unit_has_schedulers(k: int, items: int) -> None:
    one = imagined("gpu")
    one = replace(one, limits=replace(one.limits, compute_units=132))
    origin, lowered, _ = untuned_kernels(dense(64, 576, k), "main", target_for(one), one)
    assert origin == "tables:gpu"
    assert math.prod(lowered.launches[0].block) == items


def test_products_of_malis_begin_with_a_table_where_vectors_fit() -> None:
    one = imagined("mali")
    origin, lowered, _ = untuned_kernels(dense(192, 256, 256), "main", target_for(one), one)
    assert origin == "tables:mali"
    assert [(launch.grid, launch.block) for launch in lowered.launches] == [((4, 6, 1), (16, 4, 1))]
    origin, _, _ = untuned_kernels(dense(192, 49, 64), "main", target_for(one), one)
    assert not origin.startswith("tables"), "4 does not divide its columns"


@pytest.mark.parametrize("family", ["mali", "cpu"])
def test_convolutions_are_served_with_their_weights_laid_out(family: str, tmp_path: Path) -> None:
    one = imagined(family)
    graph = (
        "g (float[1, 32, 28, 28] x, float[32, 32, 3, 3] w) => (float[1, 32, 28, 28] y) "
        "{ y = Conv <pads = [1, 1, 1, 1]> (x, w) }"
    )
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {graph}')
    onnx.save(model, tmp_path / "model.onnx")
    (task, *_) = extract(tmp_path / "model.onnx", {}, "fp32", one).tasks
    origin, lowered, _ = untuned_kernels(task.func, "main", target_for(one), one)
    assert origin == f"tables:{family}"
    assert len(lowered.launches) == 3  # the weights packed, the image padded, and both multiplied
