"""The graph of a compiled model in DOT: all of it, once, and names are text."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace

from honed.runtime.compiled import validate
from honed.runtime.compiled.model import CompiledModel, Copy, FusedGroup, Operator, Tensor, View
from honed.tool.view.graph import lay_out, to_dot
from tests.runtime.builder import INCREMENT, Builder, add_prepared, chain

HOSTILE = '" ]; }\\ digraph \x1b[2J\x00\n</x>&'


def _model() -> CompiledModel:
    """y = (x + p) + p with p prepared, as one part of two operators; its sum is also a view, and copied."""
    model = add_prepared().build()
    fused = (
        Operator(name="block/a", op="Add", passes=("twins",)),
        Operator(name="block/b", op="Add", passes=("twins", "factors")),
    )
    view = View(operator=Operator(name="v", op="Reshape", passes=()), shape=(2, 4), buffer=4)
    return replace(model, parts=(FusedGroup(operators=fused, prepare=(0,), steps=(0, 1)),), views=(view,))


STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


def test_a_part_is_a_box_with_all_that_is_known_of_it() -> None:
    drawing = lay_out(_model(), {"add": 12.5})
    assert [box.kind for box in drawing.boxes] == ["input", "part", "output"]
    assert drawing.edges == ((0, 1), (1, 2))
    box = drawing.boxes[1]
    assert (box.title, box.group, box.passes) == ("Add x2", "block", ("twins", "factors"))
    assert box.steps == ("increment  once", "add  12.5 us", "add  12.5 us")
    assert box.us == 25
    assert box.notes == (
        "prepared constant float32 8",
        "= float32 8",
        "seen as 2x4: Reshape, a view",
        "constant float32 8",
    )
    text = to_dot(drawing, "small", ("a fact",))
    for wanted in ("small", "a fact", "Add x2", "12.5 us", "once", "[twins]", "[factors]", *box.notes):
        assert wanted in text
    assert "n0 -> n1" in text


def test_every_step_is_drawn_once_also_of_files_that_do_not_know_their_operators() -> None:
    for model in (add_prepared().build(), chain(50).build(), _model()):
        drawing = lay_out(model, {})
        assert sum(len(box.steps) for box in drawing.boxes) == len(model.prepare) + len(model.steps)
        text = to_dot(drawing, "m", ())
        assert all(kernel.name in text for kernel in model.kernels)


def test_what_is_copied_is_told_apart() -> None:
    model = replace(_model(), steps=(*_model().steps, Copy(source=3, target=4)))
    assert [box.kind for box in lay_out(model, {}).boxes] == ["input", "part", "copy", "output"]


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
    drawing = lay_out(model, {})
    assert drawing.edges == ((0, 1), (0, 2), (1, 3), (2, 3), (2, 4), (3, 5), (4, 6))
    assert drawing.boxes[1].notes == ("= float32 64", "part of 2x64: Concat, a view")
    assert drawing.boxes[2].notes == (
        "= float32 64", "seen as 64: Slice, a view", "part of 2x64: Concat, a view",
    )  # fmt: skip


def test_names_are_text_and_nothing_else() -> None:
    model = _model()
    bad = Operator(name=HOSTILE, op=HOSTILE, passes=(HOSTILE,))
    model = replace(
        model,
        inputs=(Tensor(name=HOSTILE, dtype="float32", shape=(8,), buffer=0),),
        kernels=tuple(replace(k, name=f"{HOSTILE}{n}") for n, k in enumerate(model.kernels)),
        parts=(FusedGroup(operators=(bad,), prepare=(0,), steps=(0, 1)),),
    )
    text = to_dot(lay_out(model, {}), HOSTILE, (HOSTILE,))
    assert "digraph" not in STRING.sub("", text).replace("digraph", "", 1), "a name ended its string"
    assert STRING.sub("", text).count("{") == STRING.sub("", text).count("}")
    assert "\x1b" not in text
    assert "\x00" not in text
    if shutil.which("dot"):
        assert (
            subprocess.run(["dot", "-Tsvg"], input=text.encode(), capture_output=True, check=False).returncode
            == 0
        )
