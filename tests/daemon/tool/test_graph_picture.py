"""The graph of a compiled model as a picture: all of it, once, well-formed, nothing over anything else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.runtime.compiled import validate
from honed.runtime.compiled.model import CompiledModel, Copy, Operator, Part, Tensor, View
from honed.tool.view.boxes import draw
from honed.tool.view.graph import page, picture
from honed.tool.view.layered import GAP_Y, BoxSize, Layout, lay_out
from tests.runtime.builder import INCREMENT, Builder, add_prepared, chain

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "</text><script>alert('1')</script>&\x1b[2J\x00\n]]>"


def _model() -> CompiledModel:
    """y = (x + p) + p with p prepared, as one part of two operators; its sum is also a view, and copied."""
    model = add_prepared().build()
    fused = (
        Operator(name="block/a", op="Add", passes=("twins",)),
        Operator(name="block/b", op="Add", passes=("twins", "factors")),
    )
    view = View(operator=Operator(name="v", op="Reshape", passes=()), shape=(2, 4), buffer=4)
    return replace(model, parts=(Part(operators=fused, prepare=(0,), steps=(0, 1)),), views=(view,))


def _texts(svg: str, kind: str = "") -> list[str]:
    tree = ElementTree.fromstring(svg)
    return [t.text or "" for t in tree.iter(f"{SVG}text") if t.get("class", "") == kind or not kind]


def test_a_part_is_a_box_with_all_that_is_known_of_it() -> None:
    drawing = draw(_model(), {"add": 12.5})
    assert [box.kind for box in drawing.boxes] == ["input", "part", "output"]
    assert drawing.edges == ((0, 1), (1, 2))
    box = drawing.boxes[1]
    assert (box.title, box.group, box.passes) == ("Add x2", "block", ("twins", "factors"))
    assert [(step.text, step.us, step.prepared) for step in box.steps] == [
        ("increment", None, True), ("add", 12.5, False), ("add", 12.5, False),
    ]  # fmt: skip
    assert box.us == 25
    assert box.notes == (
        "prepared constant float32 8",
        "= float32 8",
        "seen as 2x4: Reshape, a view",
        "constant float32 8",
    )
    texts = _texts(picture(drawing, "small", ("a fact",)).svg)
    for wanted in ("small", "a fact", "Add x2", "12.5 us", "once", "twins", "factors", *box.notes):
        assert wanted in texts


def test_every_step_is_drawn_once_also_of_files_that_do_not_know_their_operators() -> None:
    for model in (add_prepared().build(), chain(50).build(), _model()):
        drawing = draw(model, {})
        assert sum(len(box.steps) for box in drawing.boxes) == len(model.prepare) + len(model.steps)
        tree = ElementTree.fromstring(picture(drawing, "m", ()).svg)
        steps = [g for g in tree.iter(f"{SVG}g") if g.get("class") == "step"]
        assert len(steps) == len(model.prepare) + len(model.steps)
        drawn = [next(g.iter(f"{SVG}title")).text or "" for g in steps]
        assert all(any(f"kernel {k.name}\n" in title for title in drawn) for k in model.kernels)


def test_what_is_copied_is_told_apart() -> None:
    model = replace(_model(), steps=(*_model().steps, Copy(source=3, target=4)))
    assert [box.kind for box in draw(model, {}).boxes] == ["input", "part", "copy", "output"]


def test_what_lies_in_place_is_a_view_where_it_is_made() -> None:
    b = Builder()
    x, whole = b.input("x", "float32", (64,)), b.scratch("float32", (128,))
    first, second = b.inside(whole, 0, (64,)), b.inside(whole, 256, (64,))
    y = b.output("y", "float32", (128,))
    one = b.kernel(INCREMENT, "increment", "rw", 256, groups=64, block=1, name="one")
    b.launch(one, x, first)
    b.launch(one, x, second)
    b.launch(b.kernel(INCREMENT, "increment", "rw", 512, groups=128, block=1, name="both"), whole, y)
    b.launch(one, second, b.output("z", "float32", (64,)))
    joined, cut = (Operator(name=name, op=name, passes=()) for name in ("Concat", "Slice"))
    model = b.build()
    model = replace(
        model,
        views=(
            View(operator=joined, shape=(2, 64), buffer=whole),
            View(operator=cut, shape=(64,), buffer=second),
        ),
    )
    validate.check(model)
    drawing = draw(model, {})
    assert drawing.edges == ((0, 1), (0, 2), (1, 3), (2, 3), (2, 4), (3, 5), (4, 6))
    assert drawing.boxes[1].notes == ("= float32 64", "part of 2x64: Concat, a view")
    assert drawing.boxes[2].notes == (
        "= float32 64", "seen as 64: Slice, a view", "part of 2x64: Concat, a view",
    )  # fmt: skip


@pytest.mark.parametrize("whole", [False, True])
def test_names_are_text_and_nothing_else(whole: bool) -> None:
    model = _model()
    bad = Operator(name=HOSTILE, op=HOSTILE, passes=(HOSTILE,))
    model = replace(
        model,
        inputs=(Tensor(name=HOSTILE, dtype="float32", shape=(8,), buffer=0),),
        kernels=tuple(replace(k, name=f"{HOSTILE}{n}") for n, k in enumerate(model.kernels)),
        parts=(Part(operators=(bad,), prepare=(0,), steps=(0, 1)),),
    )
    drawn = picture(draw(model, {}), HOSTILE, (HOSTILE,))
    tree = ElementTree.fromstring(drawn.svg)
    assert {element.tag for element in tree.iter()} <= {
        f"{SVG}{tag}" for tag in ("svg", "title", "style", "rect", "text", "g", "path")
    }
    text = page(drawn, HOSTILE) if whole else drawn.svg
    assert text.count("<script>") == int(whole)
    assert "\x1b" not in text
    assert "\x00" not in text


def test_a_picture_needs_nothing_from_elsewhere() -> None:
    drawn = picture(draw(_model(), {}), "m", ())
    assert "http" not in page(drawn, "m").replace("http://www.w3.org/2000/svg", "")


@given(st.data())
def test_no_box_lies_over_another_and_lines_run_down(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 12))
    side = st.integers(10, 90)
    sizes = [BoxSize(data.draw(side), data.draw(side)) for _ in range(count)]
    edges = [
        (data.draw(st.integers(0, reader - 1)), reader)
        for reader in range(1, count)
        for _ in range(data.draw(st.integers(0, 2)))
    ]
    found = lay_out(sizes, edges)
    _check_boxes(found, sizes)
    for (writer, reader), line in found.lines.items():
        heights = [y for _, y in line]
        assert heights == sorted(heights)
        assert heights[0] == found.corners[writer][1] + sizes[writer].height
        assert heights[-1] == found.corners[reader][1] >= heights[0] + GAP_Y - 1e-6
        assert all(-1e-6 <= x <= found.width + 1e-6 for x, _ in line)
        for n in set(range(count)) - {writer, reader}:
            left, top = found.corners[n]
            inside = [
                (x, y) for x, y in line
                if left < x < left + sizes[n].width and top < y < top + sizes[n].height
            ]  # fmt: skip
            assert not inside


def _check_boxes(found: Layout, sizes: Sequence[BoxSize]) -> None:
    spans = [
        (x, y, x + size.width, y + size.height) for (x, y), size in zip(found.corners, sizes, strict=True)
    ]
    assert all(x >= -1e-6 and right <= found.width + 1e-6 for x, _, right, _ in spans)
    assert all(y >= 0 and bottom <= found.height + 1e-6 for _, y, _, bottom in spans)
    for (x, y, right, bottom), (x2, y2, right2, bottom2) in combinations(spans, 2):
        assert right <= x2 + 1e-6 or right2 <= x + 1e-6 or bottom <= y2 + 1e-6 or bottom2 <= y + 1e-6
