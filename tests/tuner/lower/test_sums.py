"""Long sums are added up in blocks by every schedule, and are as right as the bound says."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import tvm
from onnx import parser
from tvm import relax
from tvm.s_tir import Schedule

from honed.machine.devices import Device
from honed.machine.families import FAMILIES
from honed.tuner.compiler import verification
from honed.tuner.lower import schedule as scheduling
from honed.tuner.lower import sums
from honed.tuner.lower.opencl import LoweringFailed, blocks_to_loops, lower_function
from honed.tuner.lower.schedule import default_kernels, narrow_indices
from honed.tuner.lower.sums import most_additions
from honed.tuner.lower.target import target_for
from honed.tuner.search import rules
from honed.tuner.search.budget import size_of
from tests.tuner.search import search_functions
from tests.tuner.search.search_functions import draws, profile_of

from .lowering import Make, only_function, relax_module, run_lowered

pytestmark = pytest.mark.tvm

# The rules for a Mali have schedules of every kind: sketches, and groups that share work.
FAMILY = pytest.mark.parametrize(
    "family", [pytest.param(f, marks=() if f == "mali" else pytest.mark.slow) for f in FAMILIES]
)
U = 2.0**-24  # unit roundoff of float32
ADDITIONS = 512  # that a term of a sum of H W terms passes through, at most
EXTRA = 256 + 16  # additions more, where a schedule splits a sum into parts or lanes
H, W = 128, 256


def alike(*shape: int, about: float = 1.0, spread: float = 0.0, seed: int = 0) -> np.ndarray:
    """Numbers `about` the same: each addition to their sum is rounded the same way."""
    noise = np.random.default_rng(seed).uniform(-spread, spread, shape)
    return np.asarray(about + noise, np.float32)


def _mean(x: np.ndarray) -> np.ndarray:
    return np.mean(x.astype(np.float64), axis=(-2, -1))


@pytest.mark.parametrize("terms", [1, 2, 255, 256])
def test_short_sums_have_one_accumulator(terms: int) -> None:
    assert sums.additions(terms) == terms


@pytest.mark.parametrize(
    ("extent", "terms", "block"),
    [
        (4096, 1, 128),
        (1000, 1, 125),
        (59, 59, 1),  # 59 terms an iteration: a block of two would not divide
        (1009, 1, 127),  # prime: 7 blocks of 127, and one of 120
        (100, 1, 100),
        (3, 200, 1),
        (521, 128, 1),
    ],
)
def test_blocks_divide_a_loop_where_they_can(extent: int, terms: int, block: int) -> None:
    assert sums.block(extent, terms) == block


@pytest.mark.parametrize("terms", [257, 1000, 4096, 32768, 10**5, 10**6, 10**7])
def test_additions_is_a_bound_whatever_the_blocks(terms: int) -> None:
    """The longest way of a term through blocks of any allowed length."""

    def longest(left: int, depth: int = 0) -> int:
        if left <= sums.LONGEST:
            return left
        return max(block + longest(math.ceil(left / block)) for block in (32, 47, 64, 100, 128))

    assert longest(terms) <= sums.additions(terms) <= 768
    assert sums.additions(H * W) == ADDITIONS


INPUTS = {
    "constant": alike(2, H, W, about=0.1),
    "nearly constant": alike(2, H, W, about=0.1, spread=1e-3),
    "far from zero": alike(2, H, W, about=1000.3, spread=1e-2),
    "any": alike(2, H, W, about=0.0, spread=1.0),
    "prime": alike(2, 97, 331, about=0.7, spread=1e-6),
}
MEAN: Make = lambda _, v: relax.op.mean(v["x"], axis=[-2, -1])  # noqa: E731


@pytest.mark.parametrize("rule", ["default", "single work-item"])
@pytest.mark.parametrize("name", INPUTS)
def test_default_schedules_of_a_mean_keep_the_bound(
    name: str, rule: str, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if rule != "default":
        monkeypatch.setattr(scheduling, "_rules", lambda _func, _profile: iter(()))
    x = INPUTS[name]
    func = only_function(relax_module(MEAN, {"x": x}), device.profile)
    _, lowered, _ = default_kernels(func, "f", target_for(device.profile), device.profile)
    found = np.zeros(2, np.float32)
    run_lowered(lowered, [x], [found], device)
    _keeps_the_bound(found, x)


def _keeps_the_bound(found: np.ndarray, x: np.ndarray) -> None:
    bound = (ADDITIONS + EXTRA) * U * np.mean(np.abs(x.astype(np.float64)), axis=(-2, -1))
    assert (np.abs(found - _mean(x)) <= bound + U * np.abs(_mean(x))).all()


@FAMILY
def test_every_rule_of_a_family_keeps_the_bound(family: str, device: Device) -> None:
    """GPUs' rules share a long sum among the work-items of a group; some do not fit and are passed over."""
    profile = profile_of(family, device.profile)
    target, x = target_for(profile), INPUTS["constant"]
    func = narrow_indices(only_function(relax_module(MEAN, {"x": x}), profile))
    tried = 0
    for name, scheduled in scheduling._by_rules(func, target, profile, []):
        try:
            lowered = lower_function(scheduled.mod["main"], name.replace("-", "_"), target, profile)
        except LoweringFailed:
            continue
        found = np.zeros(2, np.float32)
        run_lowered(lowered, [x], [found], device)
        _keeps_the_bound(found, x)
        tried += 1
    assert tried


@FAMILY
def test_draws_of_every_sketch_keep_the_bound(family: str, device: Device) -> None:
    profile = profile_of(family, device.profile)
    target, x = target_for(profile), INPUTS["constant"]
    func = narrow_indices(only_function(relax_module(MEAN, {"x": x}), profile))
    space = rules.space(func, target, profile)
    assert space
    for schedule in (one for sketch in space for one in draws(func, profile, [sketch], 1)):
        found = np.zeros(2, np.float32)
        run_lowered(lower_function(schedule.mod["main"], "f", target, profile), [x], [found], device)
        _keeps_the_bound(found, x)


SOFTMAX: Make = lambda _, v: relax.op.nn.softmax(v["x"], axis=-1)  # noqa: E731


@FAMILY
def test_sketches_still_keep_rows_in_one_kernel(family: str, device: Device) -> None:
    """And what they draw of a long softmax is right."""
    profile = profile_of(family, device.profile)
    x = alike(4, 3000, about=2.0, spread=1e-4)
    func = narrow_indices(only_function(relax_module(SOFTMAX, {"x": x}), profile))
    target = target_for(profile)
    drawn: list[Schedule] = []
    for sketch in rules.space(func, target, profile):
        drawn += draws(func, profile, [sketch], 1)
    launches = []
    for schedule in drawn:
        found = np.zeros(x.shape, np.float32)
        lowered = lower_function(schedule.mod["main"], "f", target, profile)
        run_lowered(lowered, [x], [found], device)
        exact = np.exp(x.astype(np.float64) - x.max())
        exact /= exact.sum(-1, keepdims=True)
        np.testing.assert_allclose(found, exact, rtol=2e-5)
        launches.append(len(lowered.launches))
    assert min(launches) == 1


@pytest.mark.parametrize("depth", [1000, 1021])
@FAMILY
def test_draws_of_long_products_are_right(family: str, depth: int, device: Device) -> None:
    """With few accumulators they are added up in blocks, in loops of every kind that tiles are made of."""
    profile = profile_of(family, device.profile)
    a, b = alike(8, depth, about=0.3), alike(depth, 16, about=0.1, spread=1e-3)
    func = narrow_indices(search_functions.dense(8, 16, depth))
    target = target_for(profile)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    in_blocks = 0
    for schedule in (one for s in rules.space(func, target, profile) for one in draws(func, profile, [s], 1)):
        found = np.zeros((8, 16), np.float32)
        lowered = lower_function(schedule.mod["main"], "f", target, profile)
        run_lowered(lowered, [a, b], [found], device)
        np.testing.assert_allclose(found, exact, rtol=depth * U)
        in_blocks += "_part" in lowered.source
    assert in_blocks


@pytest.mark.parametrize(("dtype", "blocks"), [("float16", True), ("float32", False)])
def test_a_product_of_operands_in_registers_is_a_product(dtype: str, *, blocks: bool) -> None:
    """Its accumulators are not doubled, but for halves, which lose more in a long sum and take less room."""
    profile = search_functions.imagined("mali", 256)
    func, target = narrow_indices(search_functions.dense(64, 64, 1024, dtype)), target_for(profile)
    space = rules.space(func, target, profile)[:1]
    drawn = next(one for one in draws(func, profile, space, 12) if size_of(one.mod["main"]).registers > 8)
    lowered = lower_function(drawn.mod["main"], "f", target, profile)
    assert "_local" in lowered.source
    assert ("_part" in lowered.source) == blocks


@pytest.mark.parametrize(
    ("dtype", "rows", "steps", "turns"),
    [
        ("float16", 6, 8, True),
        ("float16", 6, 2, False),  # too few terms to pay
        ("float16", 8, 8, False),  # too many sums
        ("float32", 6, 8, False),
    ],
)
def test_sums_of_halves_go_by_turns_where_only_those_are_paired(
    dtype: str, rows: int, steps: int, *, turns: bool
) -> None:
    """Small whole numbers are added up exactly in any order."""
    schedule = Schedule(search_functions.dense(rows, 4, 48, dtype))
    block = schedule.get_sblock("T_matmul")
    i, j, k = schedule.get_loops(block)
    outer, inner = schedule.split(k, [None, steps])
    schedule.reorder(outer, inner, i, j)
    schedule.unroll(inner)
    schedule.unroll(i)
    schedule.vectorize(j)
    schedule.decompose_reduction(block, outer)
    func = schedule.mod["main"].with_attr("global_symbol", "main")
    single, staged = (
        tvm.transform.Sequential(blocks_to_loops(pairs=pairs))(tvm.IRModule({"main": func}))
        for pairs in (False, True)
    )
    assert "_part" not in single.script()
    assert ("_part" in staged.script()) == turns
    draw = np.random.default_rng(0)
    a, b = (draw.integers(-3, 4, shape).astype(dtype) for shape in ((rows, 48), (48, 4)))
    found = tvm.runtime.tensor(np.zeros((rows, 4), dtype))
    tvm.compile(staged, target="llvm")["main"](*(tvm.runtime.tensor(one) for one in (a, b)), found)
    np.testing.assert_array_equal(found.numpy(), a @ b)


MODELS = {
    "ReduceMean": "y = ReduceMean <keepdims = 0> (x, axes)",
    "ReduceSum": "s = ReduceSum <keepdims = 0> (x, axes) y = Div(s, count)",
    "GlobalAveragePool": "g = GlobalAveragePool(x) y = Squeeze(g, axes)",
    "InstanceNormalization": "y = InstanceNormalization(x, one, zero)",
    "LayerNormalization": "y = LayerNormalization <axis = 2> (x, ones, zeros)",
    "Softmax": "f = Flatten <axis = 2> (x) s = Softmax <axis = 1> (f) y = Mul(s, count)",
    "MatMul": "r = Reshape(x, row) y = MatMul(r, column)",
}


def _model(name: str) -> Any:
    shape = {
        "InstanceNormalization": f"1,2,{H},{W}",
        "LayerNormalization": f"1,2,{H},{W}",
        "Softmax": f"2,{H * W}",
        "MatMul": "2,1",
    }.get(name, "1,2")
    return parser.parse_model(
        f'<ir_version: 9, opset_import: ["": 18]> f (float[1,2,{H},{W}] x, float[{H},{W}] ones, '
        f"float[{H},{W}] zeros, float[{H * W},1] column) => (float[{shape}] y) "
        f"<int64[2] axes = {{2, 3}}, int64[2] row = {{2, {H * W}}}, float count = {{{H * W}.0}}, "
        f"float[2] one = {{1.0, 1.0}}, float[2] zero = {{0.0, 0.0}}> {{ {MODELS[name]} }}"
    )


def _exact(name: str, x: np.ndarray, column: np.ndarray) -> np.ndarray:
    wide = x.astype(np.float64)
    mean = wide.mean((2, 3), keepdims=True)
    if name in ("InstanceNormalization", "LayerNormalization"):
        return (wide - mean) / np.sqrt(wide.var((2, 3), keepdims=True) + 1e-5)
    if name == "Softmax":
        powers = np.exp(wide - wide.max()).reshape(2, -1)
        return powers / powers.sum(-1, keepdims=True) * H * W
    if name == "MatMul":
        return wide.reshape(2, -1) @ column.astype(np.float64)
    return mean.reshape(1, 2)


@pytest.mark.parametrize("spread", [0.0, pytest.param(1e-2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MODELS)
def test_models_of_long_sums_are_right_on_flat_inputs(name: str, spread: float, device: Device) -> None:
    """As far off as u times the additions of its longest sum, and what was computed from it, allow."""
    x = alike(1, 2, H, W, about=0.3, spread=spread)
    column = alike(H * W, 1, about=0.01, seed=1)
    given = {
        "x": x,
        "ones": np.ones((H, W), np.float32),
        "zeros": np.zeros((H, W), np.float32),
        "column": column,
    }
    found = verification.run_model(_model(name), given, device)["y"]
    exact = _exact(name, x, column)
    if name in ("InstanceNormalization", "LayerNormalization"):
        # The mean's error, seen against the deviation: 0.3 / sqrt(variance + epsilon) times as large.
        mean_error = ADDITIONS * U * np.max(x) / np.sqrt(x.astype(np.float64).var() + 1e-5)
        assert np.max(np.abs(found - exact)) <= 1.1 * mean_error + 1e-5
        return
    error = np.max(np.abs(found - exact)) / np.max(np.abs(exact))
    assert error <= 1.1 * ADDITIONS * U + 1e-6


def test_bound_counts_products_in_full_and_sums_in_blocks(device: Device) -> None:
    x = alike(4, 4096)
    total = only_function(relax_module(lambda _, v: relax.op.sum(v["x"], axis=1), {"x": x}), device.profile)
    assert most_additions(total) == sums.additions(4096) < 4096
    make: Make = lambda _, v: relax.op.matmul(v["x"], v["w"])  # noqa: E731
    product = only_function(relax_module(make, {"x": x, "w": alike(4096, 5)}), device.profile)
    assert most_additions(product) == 4096
