"""What our OpenCL C printer writes, and that it means what TIR means."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tvm import s_tir, te, tirx

from honed.machine.devices import Device
from honed.tuner.compiler.schedules import untuned_kernels
from honed.tuner.lower import ROLLED
from honed.tuner.lower.opencl import Lowered, LoweringFailed, lower_function
from honed.tuner.lower.printer import terms
from honed.tuner.lower.printer.blocks import Names
from honed.tuner.lower.printer.terms import Term
from honed.tuner.lower.schedule import narrow_indices
from honed.tuner.lower.target import target_for
from honed.tuner.search import rules
from honed.tuner.search.draw import SpaceSampler
from honed.tuner.search.sketches.grouped import tile_sliced
from honed.tuner.search.sketches.held import held_clocks
from honed.valhall.bench import bench_profile
from tests.runtime.builder import PROFILE
from tests.tuner.lower.lowering import Run, run_lowered, run_together
from tests.tuner.search.search_functions import dense, draws, imagined

from .printers import assert_same_answers, print_both

pytestmark = pytest.mark.tvm
N = 64


def scheduled(tensors: Sequence[te.Tensor], lanes: int = 1, groups: int = 4) -> tirx.PrimFunc:
    """The only block's loops fused and split to groups, a loop, and vectors."""
    schedule = s_tir.Schedule(te.create_prim_func(list(tensors)))
    (block,) = schedule.get_child_blocks(schedule.get_sblock("root"))
    spatial = [
        loop
        for loop, axis in zip(schedule.get_loops(block), schedule.get(block).iter_vars, strict=False)
        if axis.iter_type != tirx.IterVar.CommReduce
    ]
    outer, _, inner = schedule.split(schedule.fuse(*spatial), [groups, None, lanes])
    schedule.bind(outer, "blockIdx.x")
    if lanes > 1:
        schedule.vectorize(inner)
    return narrow_indices(schedule.mod["main"])


def lowered(func: tirx.PrimFunc) -> Lowered:
    return lower_function(func, "f", target_for(PROFILE), PROFILE)


def run(func: tirx.PrimFunc, inputs: Sequence[np.ndarray], output: np.ndarray, device: Device) -> np.ndarray:
    target = target_for(device.profile)
    run_lowered(lower_function(func, "f", target, device.profile), list(inputs), [output], device)
    return output


def placeholders(*dtypes: str, extent: int = N) -> list[te.Tensor]:
    return [te.placeholder((extent,), dtype, name) for dtype, name in zip(dtypes, "abcdef", strict=False)]


def over(make: Callable[..., Any], *inputs: te.Tensor, extent: int = N) -> list[te.Tensor]:
    return [*inputs, te.compute((extent,), lambda i: make(i, *inputs), "out")]


# Memory


def test_aligned_vectors_are_read_whole() -> None:
    source = lowered(scheduled(over(lambda i, a: a[i] * 2.0, *placeholders("float32")), lanes=4)).source
    assert "*(__global const float4*)(a" in source
    assert "*(__global float4*)(out" in source
    assert "vload" not in source
    assert "vstore" not in source


def test_local_memory_used_twice_is_aligned_for_the_vectors_of_both_uses() -> None:
    """The partial sums of a sliced product lie where an operand was, which was read element by element."""
    profile, func = imagined("gpu"), dense(64, 64, 128)
    limits = rules.rules_of(profile)
    assert limits.groups is not None
    assert limits.groups.tile is not None
    schedule = s_tir.Schedule(func)
    tile_sliced(schedule, limits.groups.tile, limits.sketches, 4, slices=4)
    vectors = 0
    for drawn in draws(func, profile, [schedule], 8):
        source = lower_function(drawn.mod["main"], "f", target_for(profile), profile).source
        for name, aligned in re.findall(r"__local float (\w+)\[\d+\](.*);", source):
            widths = [int(n) for n in re.findall(rf"\(__local float(\d+)\*\)\({name} ", source)]
            vectors += len(widths)
            assert not widths or f"aligned({4 * max(widths)})" in aligned, source
    assert vectors


def test_vectors_that_may_not_be_aligned_are_not(device: Device) -> None:
    (a,) = placeholders("float32", extent=N + 1)
    func = scheduled(over(lambda i, a: a[i + 1], a), lanes=4)
    assert "vload4(0, a" in lowered(func).source
    x = np.arange(N + 1, dtype=np.float32)
    np.testing.assert_array_equal(run(func, [x], np.zeros(N, np.float32), device), x[1:])


def test_vectors_longer_than_the_alignment_of_buffers_are_not_taken_for_aligned() -> None:
    func = scheduled(over(lambda i, a: a[i] + a[i], *placeholders("int64")), lanes=16)
    assert "vload16" in lowered(func).source


def test_a_product_moves_its_pointers_and_keeps_its_sums_in_registers() -> None:
    profile = imagined("mali", 256)
    func = narrow_indices(dense(192, 512, 512, "float16"))
    target = target_for(profile)
    space = rules.space(func, target, profile)
    (drawn,) = draws(func, profile, space[:1], 1)
    source = lower_function(drawn.mod["main"], "f", target, profile).source
    loop = source[source.index("for (") :]
    loop = loop[: loop.index("\n  }")]
    assert re.search(r"\n +a_k\w* \+= \d+;", loop)
    assert re.search(r"\n +b_k\w* \+= \d+;", loop)
    assert "AT(" not in loop
    assert "vload" not in source
    assert not re.search(r"half\d* \w+\[\d+\]", source)
    assert re.search(r"(\w+) = mad\(.+, \1\);", loop)


@pytest.mark.parametrize(
    ("driver", "terms", "first", "steps"),  # loops of 64 turns, of 32 within others, and of 64
    [("26.2", 256, True, 2), ("26.2", 512, False, 0), ("25.0", 256, False, 0)],
)
def test_mesa_26_adds_to_addresses_what_it_cannot_know(
    driver: str, terms: int, first: bool, steps: int
) -> None:
    profile = bench_profile("mali-g610", driver)
    func = narrow_indices(dense(192, 256, terms, "float16"))
    _, lowered, _ = untuned_kernels(func, "main", target_for(profile), profile)
    before, *loops = lowered.source.split("  for (")
    assert ("T_matmul_at = " in before) == first, "pointers that are needed behind a loop come before it"
    assert ("T_matmul_at = " in loops[-1]) != first
    declared = re.findall(r"const ulong (by_(\d+)) = \2u \+ get_group_id\(2\);", before)
    assert len(declared) == steps, "as many as leave registers for pointers"
    assert all(f", {name})" in loops[-1] for name, _ in declared)


@pytest.mark.parametrize(
    ("dtype", "terms", "words"), [("float16", 512, 4), ("float16", 256, 0), ("float32", 512, 0)]
)
def test_sums_of_halves_that_wait_for_those_of_a_block_are_words_of_two(
    dtype: str, terms: int, words: int
) -> None:
    profile = imagined("mali")
    drawing = SpaceSampler(narrow_indices(dense(192, 512, terms, dtype)), profile, 1)
    rows = [row for sketch in range(drawing.sketches) for row in drawing.rows_of(sketch)]
    made = drawing.schedule_of(min(rows, key=lambda row: held_clocks(row.drawn)))
    assert made is not None
    source = lower_function(made.mod["main"], "f", target_for(profile), profile).source
    assert len(re.findall(r"\buint4 (.*);", source)) == (words > 0)
    added = re.findall(r"(\w+) = as_uint4\(as_half8\(\1\) \+ (\w+_part\w*)\);", source)
    assert len(added) == words
    assert all(f"{part} = mad(" in source for _, part in added), "those of a block are added up as they are"
    turns = re.findall(r"for \(int (\w+) = 0; \1 < \d+;", source)
    moved = re.findall(r"__global const \w+\* \w+?_(\w+) = \w+_at;", source)
    assert moved == turns[-1:] * 2, "where a sum goes on after a block, its pointers do, too"


@pytest.mark.parametrize(
    ("axis", "first"),
    [("blockIdx.x", "get_group_id(2)"), ("blockIdx.z", "0")],  # of several groups along z, it is not always 0
)
def test_the_compiler_cannot_tell_how_many_turns_a_rolled_loop_takes(
    axis: str, first: str, device: Device
) -> None:
    a = te.placeholder((4, N), "float32", "a")
    schedule = s_tir.Schedule(te.create_prim_func([a, te.compute((4, N), lambda i, j: a[i, j] + 1.0, "out")]))
    group, loop = schedule.get_loops(schedule.get_sblock("out"))
    schedule.bind(group, axis)
    schedule.annotate(loop, ROLLED, 1)
    func, x = narrow_indices(schedule.mod["main"]), np.arange(4.0 * N, dtype=np.float32).reshape(4, N)
    assert re.findall(r"for \(int \w+ = (.+?);", lowered(func).source) == [first]
    np.testing.assert_array_equal(run(func, [x], np.zeros((4, N), np.float32), device), x + 1)


def test_a_tile_that_is_read_across_its_vectors_stays_in_registers(device: Device) -> None:
    a = te.placeholder((4, 4), "float32", "a")
    tile = te.compute((4, 4), lambda i, j: a[i, j] + 1.0, "tile")
    schedule = s_tir.Schedule(te.create_prim_func([a, te.compute((4, 4), lambda i, j: tile[j, i], "out")]))
    group = schedule.add_unit_loop(schedule.get_loops(schedule.get_sblock("out"))[0])
    schedule.bind(group, "blockIdx.x")
    schedule.set_scope(schedule.get_sblock("tile"), 0, "local")
    schedule.compute_at(schedule.get_sblock("tile"), group)
    for name in ("tile", "out"):
        *_, rows, columns = schedule.get_loops(schedule.get_sblock(name))
        schedule.unroll(rows)
        schedule.vectorize(columns)
    func = narrow_indices(schedule.mod["main"])
    assert "float4 tile_local_0, tile_local_1, tile_local_2, tile_local_3;" in lowered(func).source
    x = np.arange(16, dtype=np.float32).reshape(4, 4)
    np.testing.assert_array_equal(run(func, [x], np.zeros((4, 4), np.float32), device), x.T + 1)


def test_what_runs_backwards_is_addressed_with_signed_offsets(device: Device) -> None:
    func = scheduled(over(lambda i, a: a[N - 1 - i], *placeholders("float32")), lanes=2)
    x = np.arange(N, dtype=np.float32)
    np.testing.assert_array_equal(run(func, [x], np.zeros(N, np.float32), device), x[::-1])


def test_buffers_of_two_gigabytes_have_long_offsets() -> None:
    a = te.placeholder((1 << 30,), "float32", "a")
    out = te.compute((1 << 30,), lambda i: a[(1 << 30) - 1 - i] + 1.0, "out")
    schedule = s_tir.Schedule(te.create_prim_func([a, out]))
    outer, inner = schedule.split(schedule.get_loops(schedule.get_sblock("out"))[0], [None, 64])
    schedule.bind(outer, "blockIdx.x")
    schedule.bind(inner, "threadIdx.x")
    source = lowered(schedule.mod["main"]).source
    assert "UL * " in source
    assert "uint" not in source


def test_an_index_that_was_read_is_followed_only_where_it_holds(device: Device) -> None:
    a, b = te.placeholder((8,), "float32", "a"), te.placeholder((N,), "int32", "b")

    def looked_up(i: Any, a: te.Tensor, b: te.Tensor) -> Any:
        held = tirx.all(b[i] >= 0, b[i] < 8)
        return tirx.if_then_else(held, a[b[i]], tirx.const(-1.0, "float32"))

    func = scheduled(over(looked_up, a, b))
    table = np.arange(8, dtype=np.float32) + 1
    index = np.where(np.arange(N) % 3 == 0, -(1 << 28), np.arange(N) % 8).astype(np.int32)
    found = run(func, [table, index], np.zeros(N, np.float32), device)
    np.testing.assert_array_equal(found, np.where(index < 0, np.float32(-1), table[index.clip(0)]))


def test_a_value_needed_twice_is_read_once() -> None:
    source = lowered(scheduled(over(lambda i, a: a[i] * a[i] + a[i], *placeholders("float32")))).source
    assert len(re.findall(r"= a_\w+\[0\];", source)) == 1
    assert re.search(r"mad\((\w+), \1, \1\)", source)


def test_what_is_read_under_a_condition_stays_under_it() -> None:
    def guarded(i: Any, a: te.Tensor) -> Any:
        return tirx.if_then_else(i < 32, a[i] * a[i], tirx.const(0.0, "float32"))

    a = te.placeholder((32,), "float32", "a")
    source = lowered(scheduled(over(guarded, a))).source
    assert re.search(r"\? a_\w+\[0\] \* a_\w+\[0\] : 0\.0f", source)


# Values


CHOICES: dict[str, tuple[tuple[str, ...], str, Callable[..., Any], Callable[..., Any]]] = {
    "by bytes": (
        ("int8", "float32", "float32"),
        "float32",
        lambda i, a, b, c: tirx.Select(a[i] > 3, b[i], c[i]),
        lambda a, b, c: np.where(a > 3, b, c),
    ),
    "by doubles": (
        ("float64", "int16", "int16"),
        "int16",
        lambda i, a, b, c: tirx.Select(a[i] < 0.5, b[i], c[i]),
        lambda a, b, c: np.where(a < 0.5, b, c),
    ),
    "truths of several widths": (
        ("int8", "float32", "int64"),
        "bool",
        lambda i, a, b, c: tirx.Or(tirx.And(a[i] > 3, tirx.Not(b[i] < 0.0)), c[i] == 1),
        lambda a, b, c: ((a > 3) & ~(b < 0)) | (c == 1),
    ),
    "stored truths": (
        ("bool", "bool"),
        "bool",
        lambda i, a, b: tirx.And(a[i], tirx.Not(b[i])),
        lambda a, b: a & ~b,
    ),
    "numbers of truths": (
        ("bool", "int32"),
        "int32",
        lambda i, a, b: a[i].astype("int32") + b[i],
        lambda a, b: a.astype(np.int32) + b,
    ),
    "truths of numbers": (
        ("float32",),
        "bool",
        lambda i, a: (a[i] * 2.0).astype("int32").astype("bool"),
        lambda a: (a * np.float32(2)).astype(np.int32) != 0,
    ),
    "bytes wrap": (
        ("int8", "int8"),
        "bool",
        lambda i, a, b: a[i] + b[i] < a[i] * b[i],
        lambda a, b: (a + b) < (a * b),
    ),
    "unsigned shorts wrap": (
        ("uint16", "uint16"),
        "uint16",
        lambda i, a, b: tirx.div(a[i] - b[i], tirx.const(3, "uint16")),
        lambda a, b: (a - b) // np.uint16(3),
    ),
    "conversions drop fractions": (
        ("float32",),
        "int8",
        lambda i, a: (a[i] * 10.0).astype("int8"),
        lambda a: (a * np.float32(10)).astype(np.int8),
    ),
    "largest and least": (
        ("int32", "int32"),
        "int32",
        lambda i, a, b: te.max(a[i], b[i]) - te.min(a[i], 7),
        lambda a, b: np.maximum(a, b) - np.minimum(a, 7),
    ),
    "not a number": (
        ("float32", "float32"),
        "float32",
        lambda i, a, b: tirx.Select(tirx.isnan(tirx.sqrt(a[i])), b[i], a[i]),
        lambda a, b: np.where(np.isnan(np.sqrt(a)), b, a),
    ),
    "steps of a vector": (
        ("float32",),
        "float32",
        lambda i, a: a[i] * i.astype("float32"),
        lambda a: a * np.arange(N, dtype=np.float32),
    ),
}


@pytest.mark.parametrize("lanes", [1, 4])
def test_values_are_those_of_tir(lanes: int, device: Device) -> None:
    runs, target = dict[str, Run](), target_for(device.profile)
    for name, (dtypes, result, make, _) in CHOICES.items():
        func = scheduled(over(make, *placeholders(*dtypes)), lanes)
        rng = np.random.default_rng(3)
        inputs = [
            rng.standard_normal(N).astype(d) if d.startswith("float") else _integers(rng, d) for d in dtypes
        ]
        lowered = lower_function(func, name.replace(" ", "_"), target, device.profile)
        runs[name] = lowered, inputs, [np.zeros(N, result)]
    run_together(list(runs.values()), device)
    for name, (_, inputs, (found,)) in runs.items():
        _, result, _, expected = CHOICES[name]
        with np.errstate(all="ignore"):
            np.testing.assert_allclose(found, expected(*inputs).astype(result), rtol=1e-6, err_msg=name)


def _integers(rng: np.random.Generator, dtype: str) -> np.ndarray:
    if dtype == "bool":
        return rng.integers(0, 2, N).astype(bool)
    small = np.dtype(dtype).itemsize < 4
    low, high = (np.iinfo(dtype).min, np.iinfo(dtype).max) if small else (-9, 9)
    return rng.integers(low, high, N, dtype, endpoint=True)


def _expression(rng: random.Random, leaves: list[Any], depth: int) -> Any:
    if depth == 0 or rng.random() < 0.15:
        return rng.choice(leaves) if rng.random() < 0.7 else tirx.const(rng.randint(-9, 9), "int32")
    a, b = (_expression(rng, leaves, depth - 1) for _ in range(2))
    kind = rng.randrange(14)
    if kind < 3:
        return [a + b, a - b, a * b][kind]
    divisor = tirx.const(rng.randint(2, 9), "int32")
    if kind < 7:
        return [tirx.floordiv, tirx.floormod, tirx.truncdiv, tirx.truncmod][kind - 3](a, divisor)
    if kind < 9:
        return [te.max, te.min][kind - 7](a, b)
    if kind < 11:
        return [tirx.Select, tirx.if_then_else][kind - 9](a < b, a + 1, b)
    return [lambda: a & b, lambda: a | b, lambda: (a ^ b) >> 1][kind - 11]()


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_made_up_expressions_give_what_tvm_prints(seed: int, lanes: int, device: Device) -> None:
    rng = random.Random(seed)
    a, b = placeholders("int32", "int32")
    outs = [
        te.compute(
            (N,),
            lambda i: _expression(rng, [a[i], b[i], (i % 7).astype("int32"), a[(i * 5) % N]], 4),
            f"out{n}",
        )
        for n in range(12)
    ]
    schedule = s_tir.Schedule(te.create_prim_func([a, b, *outs]))
    for block in schedule.get_child_blocks(schedule.get_sblock("root")):
        outer, inner = schedule.split(schedule.get_loops(block)[0], [None, lanes])
        schedule.bind(outer, "blockIdx.x")
        if lanes > 1:
            schedule.vectorize(inner)
    target = target_for(device.profile)
    try:
        both = print_both(narrow_indices(schedule.mod["main"]), "f", target, device.profile)
    except ValueError as unprintable:
        pytest.skip(str(unprintable))
    assert_same_answers(both, device)


@given(st.floats(width=32, allow_nan=False), st.sampled_from([32, 64]))
def test_numbers_are_written_exactly(value: float, bits: int) -> None:
    text = terms.floating(value, terms.Type("float", bits)).text
    plain = text.removeprefix("(double)").removesuffix("f").replace("INFINITY", "inf")
    assert np.array(float(plain), f"float{bits}").tobytes() == np.array(value, f"float{bits}").tobytes()


@given(
    st.sampled_from(["+", "-", "*", "/", "%", "&", ">>"]),
    *(st.tuples(st.integers(-40, 40), st.integers(0, 30)) for _ in range(2)),
)
def test_bounds_hold_every_value(sign: str, a: tuple[int, int], b: tuple[int, int]) -> None:
    (al, ah), (bl, bh) = (a[0], a[0] + a[1]), (b[0], b[0] + b[1] % 4)
    if sign == ">>" and bl < 0:
        return
    bounds = terms.bounds(sign, _between(al, ah), _between(bl, bh))
    if bounds is None:
        return
    for x in range(al, ah + 1):
        for y in range(bl, bh + 1):
            if sign in "/%" and y == 0:
                continue
            assert bounds[0] <= _computed(sign, x, y) <= bounds[1]


def _between(low: int, high: int) -> Term:
    return Term("x", terms.INT, low=low, high=high)


def _computed(sign: str, x: int, y: int) -> int:
    """In C, division drops the fraction."""
    if sign in "/%":
        quotient = abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)
        return quotient if sign == "/" else x - quotient * y
    return {"+": x + y, "-": x - y, "*": x * y, "&": x & y, ">>": x >> max(y, 0)}[sign]


@pytest.mark.parametrize("name", ["max", "float4", "kernel", "get_local_id", "3d", "a.b", "__x", "size_t"])
def test_names_are_not_those_of_opencl(name: str) -> None:
    found = Names().fresh(name)
    assert found != name
    assert found.isidentifier()
    assert not found.startswith("__")


def test_names_are_unique() -> None:
    names = Names()
    assert len({names.fresh(n) for n in ("a", "a", "a_1", "a", "a_1")}) == 5


def test_a_vector_that_opencl_has_no_type_for_is_refused_with_the_reason() -> None:
    (a,) = placeholders("float32", extent=60)
    with pytest.raises(LoweringFailed, match="no vectors of 5 elements"):
        lowered(scheduled(over(lambda i, a: a[i] + 1.0, a, extent=60), lanes=5))


@pytest.mark.parametrize(("family", "called"), [("cpu", False), ("mali", True)])
def test_processors_compilers_fuse_products_with_sums_themselves(family: str, called: bool) -> None:
    profile = imagined(family)
    func, target = narrow_indices(dense(8, 32, 64)), target_for(profile)
    (drawn,) = draws(func, profile, rules.space(func, target, profile)[:1], 1)
    source = lower_function(drawn.mod["main"], "f", target, profile).source
    assert ("mad(" in source) == called
    assert called or re.search(r"(\w+) = .+ \* .+ \+ \1;", source)
