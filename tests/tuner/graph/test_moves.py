"""Cells cut out by slices and joined again are one transpose, where each element is moved once."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax

from honed.tuner.graph import Pass
from honed.tuner.graph.moves import join_moves
from honed.tuner.lower.functions.legalize import MOST_FUSED, legalize
from honed.tuner.lower.module import read_program
from tests.runtime.builder import PROFILE
from tests.tuner.lower.lowering import normal, relax_module

from .graphs import after, operators, parsed

MOVES = (Pass("moves", join_moves),)
TURNED = {"Reshape": 2, "Transpose": 1, "Relu": 1}


class _Text:
    """Nodes as ONNX's text, with the constants they read."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.constants: dict[str, np.ndarray] = {}

    def ints(self, *numbers: int) -> str:
        name = "c" + "_".join(str(n).replace("-", "m") for n in numbers)
        self.constants[name] = np.array(numbers, np.int64)
        return name

    def cut(self, x: str, out: str, axis: int, start: int, end: int, step: int = 1) -> str:
        given = ", ".join((x, *(self.ints(n) for n in (start, end, axis, step))))
        self.lines.append(f"{out} = Slice({given})")
        return out

    def join(self, parts: list[str], out: str, axis: int) -> str:
        self.lines.append(f"{out} = Concat<axis={axis}>({', '.join(parts)})")
        return out

    def unfold(self, x: str, axis: int, extent: int, size: int, step: int, rank: int) -> str:
        """Windows along an axis as PyTorch exports `unfold`: a slice for each, its window moved last."""
        perm = [*range(axis), *range(axis + 1, rank), axis]
        parts = []
        for n, start in enumerate(range(0, extent - size + 1, step)):
            part = self.cut(x, f"{x}{axis}s{n}", axis, start, start + size)
            self.lines.append(f"{part}t = Transpose<perm={perm}>({part})")
            self.lines.append(f"{part}u = Unsqueeze({part}t, {self.ints(axis)})")
            parts.append(f"{part}u")
        return self.join(parts, f"{x}{axis}", axis)

    def model(self, of: str, given: str, output: str) -> onnx.ModelProto:
        text = f"(float[{given}] x) => (float[{output}] y) {{ {' '.join(self.lines)} y = Relu({of}) }}"
        return parsed(text, **self.constants)


def _cells(offsets: list[tuple[int, int]], size: int = 4) -> onnx.ModelProto:
    """Every `size`-th pixel from each offset on, joined along the channels."""
    text = _Text()
    rows = {i: text.cut("x", f"r{i}", 2, i, 8, size) for i, _ in offsets}
    parts = [text.cut(rows[i], f"p{n}", 3, j, 12, size) for n, (i, j) in enumerate(offsets)]
    return text.model(text.join(parts, "u", 1), "2,3,8,12", f"2,{3 * len(parts)},{8 // size},{12 // size}")


ALL = list(product(range(4), range(4)))


@pytest.mark.parametrize("offsets", [ALL, [(j, i) for i, j in ALL]])
def test_cells_by_strided_slices_are_one_transpose(offsets: list[tuple[int, int]]) -> None:
    assert operators(after(_cells(offsets), MOVES)) == TURNED


@pytest.mark.parametrize("offsets", [ALL[:-1], [*ALL[:-1], (0, 0)], [ALL[1], ALL[0], *ALL[2:]]])
def test_cells_that_lack_an_offset_or_are_in_no_order_are_left_alone(
    offsets: list[tuple[int, int]],
) -> None:
    assert operators(after(_cells(offsets), MOVES))["Concat"] == 1


def _unfolded(step: int) -> onnx.ModelProto:
    """8 x 8 cells as PyTorch exports `x.unfold(2, 8, step).unfold(3, 8, step)`, as channels of pixels."""
    text = _Text()
    rows, columns = (24 - 8) // step + 1, (32 - 8) // step + 1
    cells = text.unfold(text.unfold("x", 2, 24, 8, step, 4), 3, 32, 8, step, 5)
    text.lines.append(f"a = Reshape({cells}, {text.ints(1, 1, rows, columns, 64)})")
    text.lines.append("b = Transpose<perm=[0,1,4,2,3]>(a)")
    text.lines.append(f"c = Reshape(b, {text.ints(1, -1, rows, columns)})")
    return text.model("c", "1,1,24,32", f"1,64,{rows},{columns}")


def test_an_unfold_of_both_axes_is_one_transpose() -> None:
    done = after(_unfolded(8), MOVES)
    assert operators(done) == TURNED
    (node,) = (node for node in done.graph.node if node.op_type == "Transpose")
    shapes = {i.name: [d.dim_value for d in i.type.tensor_type.shape.dim] for i in done.graph.value_info}
    assert shapes[node.input[0]] == [1, 3, 8, 4, 8]  # the batch stays an axis of its own


def test_windows_that_overlap_are_left_alone() -> None:
    model = _unfolded(4)
    assert operators(after(model, MOVES)) == operators(after(model, ()))


def test_what_others_read_as_well_is_still_made() -> None:
    text = _Text()
    parts = [text.cut("x", f"p{n}", 1, n, 8, 2) for n in range(2)]
    text.join(parts, "u", 0)
    text.lines.append("v = Add(p1, u)")
    done = operators(after(text.model("v", "1,8", "2,4"), MOVES))
    assert (done["Concat"], done["Transpose"], done["Slice"]) == (0, 1, 1)


def test_parts_that_are_joined_as_they_were_are_the_value_itself() -> None:
    text = _Text()
    parts = [text.cut("x", f"p{n}", 1, 2 * n, 2 * n + 2) for n in range(4)]
    assert operators(after(text.model(text.join(parts, "u", 1), "1,8", "1,8"), MOVES))["Concat"] == 0


def test_a_part_that_is_joined_twice_is_left_alone() -> None:
    text = _Text()
    part = text.cut("x", "p", 1, 0, 8, 2)
    assert operators(after(text.model(text.join([part, part], "u", 1), "1,8", "1,8"), MOVES))["Concat"] == 1


def test_parts_in_reverse_are_left_alone() -> None:
    text = _Text()
    parts = [text.cut("x", f"p{n}", 1, 6 - 2 * n, 8 - 2 * n) for n in range(4)]
    assert operators(after(text.model(text.join(parts, "u", 1), "1,8", "1,8"), MOVES))["Concat"] == 1


@settings(max_examples=30)
@given(st.permutations(range(4)), st.lists(st.integers(2, 3), min_size=4, max_size=4), st.integers(0, 3))
def test_any_transpose_taken_apart_is_found(perm: list[int], shape: list[int], axis: int) -> None:
    """Slices of one along an axis, each transposed, joined where that axis went."""
    text = _Text()
    parts = []
    for n in range(shape[axis]):
        part = text.cut("x", f"p{n}", axis, n, n + 1)
        text.lines.append(f"{part}t = Transpose<perm={perm}>({part})")
        parts.append(f"{part}t")
    joined = text.join(parts, "u", perm.index(axis))
    extents = [",".join(map(str, s)) for s in (shape, [shape[p] for p in perm])]
    assert operators(after(text.model(joined, *extents), MOVES))["Concat"] == 0


@pytest.mark.tvm
def test_no_function_has_more_operators_than_can_be_compiled() -> None:
    def chain(builder: relax.BlockBuilder, values: Mapping[str, relax.Var]) -> relax.Expr:
        found = values["x"]
        for _ in range(2 * MOST_FUSED):
            found = builder.emit(relax.op.tanh(found))
        return found

    legal, _ = legalize(relax_module(chain, {"x": normal(4)}), PROFILE)
    assert len(read_program(legal).calls) == 2
