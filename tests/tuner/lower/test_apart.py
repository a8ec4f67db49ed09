"""Which concatenations and slices are kept out of fused functions, and that answers are those of copies."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from unittest import mock

import numpy as np
import onnx
import pytest

from honed.machine.devices import Device
from honed.tuner import frontend
from honed.tuner.compiler.fusion import FusionPolicy
from honed.tuner.compiler.verification import run_model
from honed.tuner.lower.functions import fusing, legalize
from honed.tuner.lower.module import lower_module, read_program
from honed.tuner.lower.program import Program, move_in_place
from honed.tuner.lower.target import alignment_of
from tests.tuner.graph.graphs import answers, parsed, weights
from tests.tuner.search.search_functions import imagined, profile_of

pytestmark = pytest.mark.tvm

SAME = "pads = [1, 1, 1, 1]"
# Two convolutions of 16 channels whose images are 8 x 8, so that each takes 4 KiB.
BOTH = f"a = Conv <{SAME}> (x, w) b = Conv <{SAME}> (x, v)"
W = {
    "w": weights(16, 3, 3, 3),
    "v": weights(16, 3, 3, 3, seed=1),
    "u": weights(8, 32, 1, 1),
    "half": weights(8, 16, 1, 1),
    "odd": weights(3, 3, 3, 3),
    "p": weights(8, 19, 1, 1),
    "q": weights(8, 48, 1, 1),
    "scales": np.array([1, 1, 2, 2], np.float32),
    "starts": np.array([16]),
    "ends": np.array([32]),
    "axes": np.array([1]),
}
# By what they show: the body after BOTH, the result's shape, how many calls are left for a Mali with and
# without values in place, and how many blocks there are.
CASES: dict[str, tuple[str, str, int, int, int]] = {
    "a concatenation that is read": ("c = Concat <axis = 1> (a, b) y = Conv(c, u)", "1,8,8,8", 3, 4, 1),
    "an output": ("y = Concat <axis = 1> (a, b)", "1,32,8,8", 2, 3, 1),
    "a part is read elsewhere": (
        "c = Concat <axis = 1> (a, b) d = Conv(c, u) e = Conv(a, half) y = Add(d, e)",
        "1,8,8,8",
        4,
        5,
        1,
    ),
    "of three in two steps": (
        f"c = Concat <axis = 1> (a, b) d = Conv(c, u) e = Conv <{SAME}> (x, w2) "
        "f = Concat <axis = 1> (c, e) g = Conv(f, q) y = Add(d, g)",
        "1,8,8,8",
        5,
        7,
        1,
    ),
    "a slice that is read": (
        f"c = Conv <{SAME}> (x, both) d = Slice(c, starts, ends, axes) e = Conv(d, half) f = Conv(c, u) "
        "y = Add(e, f)",
        "1,8,8,8",
        3,
        4,
        1,
    ),
    # What is around it makes one kernel with it, which there would be without it, too.
    "read by what is elementwise": (
        "c = Concat <axis = 1> (a, b) d = Sigmoid(c) e = Mul(c, d) y = Conv(e, u)",
        "1,8,8,8",
        4,
        4,
        0,
    ),
    "of images that are enlarged": (
        """e = Resize <mode = "nearest"> (a, , scales) f = Resize <mode = "nearest"> (b, , scales)
        c = Concat <axis = 1> (e, f) y = Conv(c, u)""",
        "1,8,16,16",
        4,
        4,
        0,
    ),
    # One kernel less moves: it writes half of what it wrote.
    "of one that is enlarged": (
        f"""e = Resize <mode = "nearest"> (a, , scales) f = Conv <{SAME}> (z, v)
        c = Concat <axis = 1> (e, f) y = Conv(c, u)""",
        "1,8,16,16",
        4,
        4,
        1,
    ),
    # What would not lie in one piece, or not begin where a buffer may.
    "along another axis": ("c = Concat <axis = 2> (a, b) y = Conv(c, half)", "1,8,16,8", 4, 4, 0),
    "of parts that end anywhere": (
        f"o = Conv <{SAME}> (t, odd) d = Conv <{SAME}> (t, w) c = Concat <axis = 1> (o, d) y = Conv(c, p)",
        "1,8,5,5",
        4,
        4,
        0,
    ),
    "of the model's input": ("c = Concat <axis = 1> (n, a) y = Conv(c, u)", "1,8,8,8", 3, 3, 0),
}
INPUTS = "float[1,3,8,8] x, float[1,3,16,16] z, float[1,3,5,5] t, float[1,16,8,8] n"


def _model(name: str) -> onnx.ModelProto:
    body, shape, *_ = CASES[name]
    constants = W | {"w2": weights(16, 3, 3, 3, seed=2), "both": weights(32, 3, 3, 3)}
    return parsed(f"({INPUTS}) => (float[{shape}] y) {{ {BOTH} {body} }}", **constants)


def _program(model: onnx.ModelProto, family: str, *, in_place: bool = True) -> Program:
    profile = imagined(family)
    module = frontend.import_relax(frontend.normalise(model))
    fuse = fusing.fuse_without_moves if in_place else lambda plain, *_: fusing.fuse(plain)
    with mock.patch.object(legalize, "fuse_without_moves", fuse):
        legal, _ = legalize.legalize(module, profile, FusionPolicy(profile))
    return move_in_place(read_program(legal), alignment_of(profile))


@pytest.mark.parametrize("name", CASES)
def test_what_is_moved_lies_in_place_where_that_pays(name: str) -> None:
    _, _, left, copied, blocks = CASES[name]
    model = _model(name)
    with_blocks, without = (_program(model, "mali", in_place=one) for one in (True, False))
    found = len(with_blocks.calls), len(without.calls), len(with_blocks.blocks), len(without.blocks)
    assert found == (left, copied, blocks, 0)


@pytest.mark.parametrize("family", ["cpu", "mali"])
@pytest.mark.parametrize("name", CASES)
def test_answers_are_those_of_copies(device: Device, name: str, family: str) -> None:
    there = replace(device, profile=profile_of(family, device.profile))
    model = _model(name)
    rng = np.random.default_rng(0)
    values = {
        i.name: rng.standard_normal([d.dim_value for d in i.type.tensor_type.shape.dim]).astype(np.float32)
        for i in model.graph.input
    }
    (expected,) = answers(model, values)
    (found,) = run_model(model, values, there, "fp32").values()
    np.testing.assert_allclose(found, expected, atol=2e-5 * max(1.0, float(np.abs(expected).max())))


def test_outputs_do_not_lie_in_others() -> None:
    text = f"({INPUTS}) => (float[1,16,8,8] a, float[1,32,8,8] y) {{ {BOTH} y = Concat <axis = 1> (a, b) }}"
    program = _program(parsed(text, **W), "mali")
    assert (len(program.calls), program.blocks) == (3, ())


def test_blocks_of_channels_lie_in_place_on_processors() -> None:
    model = _model("a concatenation that is read")
    assert len(_program(model, "cpu").blocks) == 1


def test_other_devices_copy() -> None:
    """NVIDIA's driver takes longer for a launch with a part of a buffer than for one that copies."""
    assert not _program(_model("a concatenation that is read"), "gpu").blocks


def test_operators_in_place_keep_their_names_as_views() -> None:
    imported = frontend.import_named(frontend.normalise(_model("a concatenation that is read")))
    lowered = lower_module(imported.module, imagined("mali"), names=imported.names)
    known = Counter(name for call in lowered.program.calls for name in call.operators)
    known.update(view.operator for view in lowered.program.views)
    assert known == Counter(imported.names.values())
    assert "c/Concat" in {view.operator for view in lowered.program.views}
