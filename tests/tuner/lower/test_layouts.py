"""Convolutions in blocks of channels: the same answers, and only where that moves less."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper
from tvm import tirx

from honed.machine.devices import Device
from honed.tuner import frontend
from honed.tuner.compiler.schedules import untuned_kernels
from honed.tuner.compiler.verification import run_model
from honed.tuner.lower.functions.layouts import block, block_channels, block_lanes, blocked_shape
from honed.tuner.lower.module import lower_module
from tests.tuner.graph.graphs import answers, parsed, weights
from tests.tuner.search.search_functions import imagined

pytestmark = pytest.mark.tvm

LANES = 16
Shape = tuple[int, ...]


class _Made:
    """A model that grows node by node; each node reads values made before."""

    def __init__(self, data: st.DataObject, shape: Shape) -> None:
        self.draw = data.draw
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, np.ndarray] = {}
        self.shapes: dict[str, Shape] = {"x": shape}
        self.given = shape

    def constant(self, array: np.ndarray) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = array
        return name

    def add(self, op: str, inputs: list[str], shape: Shape, **attributes: object) -> str:
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [name], **attributes))
        self.shapes[name] = shape
        return name

    def numbers(self, *shape: int) -> np.ndarray:
        rng = np.random.default_rng(len(self.constants))
        return (rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]) or 1)).astype(np.float32)

    def step(self) -> None:
        """One more node, of a kind that fits the latest value."""
        value = list(self.shapes)[-1]
        images, channels, rows, columns = self.shapes[value]
        kind = self.draw(st.sampled_from(sorted(_KINDS)))
        _KINDS[kind](self, value, images, channels, rows, columns)

    def model(self) -> onnx.ModelProto:
        last = list(self.shapes)[-1]
        graph = helper.make_graph(
            self.nodes,
            "g",
            [helper.make_tensor_value_info("x", 1, self.given)],
            [helper.make_tensor_value_info(last, 1, self.shapes[last])],
            [numpy_helper.from_array(v, name) for name, v in self.constants.items()],
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _convolution(made: _Made, x: str, n: int, c: int, h: int, w: int) -> None:
    depthwise = made.draw(st.booleans())
    outputs = c if depthwise else made.draw(st.sampled_from([1, 5, 16, 24, 32, 40]))
    window = made.draw(st.sampled_from([1, 2, 3, 5]))
    stride, dilation = made.draw(st.sampled_from([(1, 1), (2, 1), (1, 2)]))
    covered = (window - 1) * dilation + 1
    pads = made.draw(st.tuples(*[st.integers(0, window // 2 * dilation)] * 4))
    out = [(extent + pads[i] + pads[i + 2] - covered) // stride + 1 for i, extent in enumerate((h, w))]
    if min(out) < 1 or min(h + pads[0] + pads[2], w + pads[1] + pads[3]) < covered:
        return
    weights = made.constant(made.numbers(outputs, 1 if depthwise else c, window, window))
    made.add(
        "Conv",
        [x, weights],
        (n, outputs, *out),
        group=c if depthwise else 1,
        pads=list(pads),
        strides=[stride] * 2,
        dilations=[dilation] * 2,
    )


def _elementwise(made: _Made, x: str, *shape: int) -> None:
    op = made.draw(st.sampled_from(["Add", "Mul", "Sub", "Div", "Relu", "Sigmoid", "Max", "Twice", "Root"]))
    if op in ("Relu", "Sigmoid"):
        made.add(op, [x], shape)
    elif op == "Twice":
        same = [name for name, other in made.shapes.items() if other == shape]
        made.add("Add", [x, made.draw(st.sampled_from(same))], shape)
    elif op == "Root":  # of what is not negative, and none that is computed of blocks
        made.add("Sqrt", [made.add("Abs", [x], shape)], shape)
    else:
        extents = made.draw(st.sampled_from([(), (shape[1], 1, 1), (1, shape[1], 1, 1), shape[2:]]))
        array = np.abs(made.numbers(*extents)) + np.float32(0.5)
        made.add(op, [x, made.constant(array.astype(np.float32))], shape)


def _pooled(made: _Made, x: str, n: int, c: int, h: int, w: int) -> None:
    op = made.draw(st.sampled_from(["MaxPool", "AveragePool", "GlobalAveragePool"]))
    if op == "GlobalAveragePool":
        made.add(op, [x], (n, c, 1, 1))
    elif min(h, w) >= 2:
        pads = made.draw(st.sampled_from([0, 1]))
        out = [(extent + 2 * pads - 2) // 2 + 1 for extent in (h, w)]
        made.add(op, [x], (n, c, *out), kernel_shape=[2, 2], strides=[2, 2], pads=[pads] * 4)


def _joined(made: _Made, x: str, n: int, c: int, h: int, w: int) -> None:
    others = [name for name, s in made.shapes.items() if (s[0], *s[2:]) == (n, h, w) and s[1] + c <= 80]
    if others:
        other = made.draw(st.sampled_from(others))
        made.add("Concat", [other, x], (n, c + made.shapes[other][1], h, w), axis=1)


def _larger(made: _Made, x: str, n: int, c: int, h: int, w: int) -> None:
    if h * w <= 64:
        scales = made.constant(np.array([1, 1, 2, 2], np.float32))
        made.add("Resize", [x, "", scales], (n, c, 2 * h, 2 * w), mode="nearest")


def _around(made: _Made, x: str, n: int, c: int, h: int, w: int) -> None:
    amounts = made.constant(np.array([0, 0, 1, 0, 0, 0, 0, 2]))
    made.add("Pad", [x, amounts, made.constant(np.float32(0.5))], (n, c, h + 1, w + 2))


def _turned(made: _Made, x: str, n: int, c: int, h: int, w: int) -> None:
    """What is computed of no blocks."""
    made.add("Transpose", [x], (n, c, w, h), perm=[0, 1, 3, 2])


_KINDS = {
    "convolution": _convolution,
    "convolution again": _convolution,
    "elementwise": _elementwise,
    "pool": _pooled,
    "join": _joined,
    "larger": _larger,
    "pad": _around,
    "turn": _turned,
}


@settings(max_examples=8)
@pytest.mark.slow
@given(st.data())
def test_answers_stay_the_same(device: Device, data: st.DataObject) -> None:
    """Of networks made at random, computed by the kernels that are first served."""
    shape = (data.draw(st.integers(1, 2)), data.draw(st.sampled_from([3, 8, 16, 40])), 7, 6)
    made = _Made(data, shape)
    _convolution(made, "x", *shape)
    for _ in range(data.draw(st.integers(1, 5))):
        made.step()
    if not made.nodes:
        return
    model = made.model()
    values = {"x": np.random.default_rng(0).standard_normal(shape).astype(np.float32)}
    (expected,) = answers(model, values)
    (found,) = run_model(model, values, device, "fp32").values()
    np.testing.assert_allclose(found, expected, atol=2e-5 * max(1.0, float(np.abs(expected).max())))


@given(st.tuples(st.integers(1, 2), st.integers(1, 40), st.integers(1, 3)), st.sampled_from([2, 4, 16]))
def test_blocks_hold_the_channels_and_zeros(shape: Shape, lanes: int) -> None:
    array = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    found = block(array, lanes)
    assert found.shape == blocked_shape(shape, lanes)
    plain = np.moveaxis(found, -1, 2).reshape(shape[0], -1, shape[2])
    np.testing.assert_array_equal(plain[:, : shape[1]], array)
    assert not plain[:, shape[1] :].any()


W = {
    "w": weights(16, 3, 3, 3),
    "u": weights(16, 16, 3, 3),
    "d": weights(16, 1, 3, 3),
    "p": weights(32, 16, 1, 1),
    "g": weights(16, 8, 3, 3),
    "infinite": np.array(np.inf, np.float32),
    "step": np.array(0.25, np.float32),
    "zero": np.array(3, np.uint8),
}
SAME = "pads = [1, 1, 1, 1]"
QUANTISED = "q = QuantizeLinear(a, step, zero) b = DequantizeLinear(q, step, zero)"


@pytest.mark.parametrize(
    ("body", "shape", "blocked", "moved"),
    [
        (f"a = Conv <{SAME}> (x, w) b = Relu(a) y = Conv <{SAME}> (b, u)", "1,16,20,20", 2, 1),
        (f"a = Conv <{SAME}> (x, w) b = Conv(a, p) y = GlobalAveragePool(b)", "1,32,1,1", 2, 0),
        (f"a = Conv <{SAME}> (x, w) b = Conv <{SAME}, group = 16> (a, d) y = Tanh(b)", "1,16,20,20", 2, 1),
        (f"a = Conv <{SAME}> (x, w) {QUANTISED} y = Conv <{SAME}> (b, u)", "1,16,20,20", 2, 1),
        # What is written into blocks would have to be moved out of them again, and nothing is padded.
        ("y = Conv(x, w)", "1,16,18,18", 0, 0),
        # Infinities, and what is divided by zero, would make numbers of what fills up a block that are none.
        (
            f"a = Conv <{SAME}> (x, w) b = Mul(a, infinite) y = Conv <{SAME}, group = 16> (b, d)",
            "1,16,20,20",
            0,
            0,
        ),
        # In groups of more than one channel.
        (f"y = Conv <{SAME}, group = 2> (z, g)", "1,16,20,20", 0, 0),
    ],
)
def test_blocks_are_made_where_they_save_moves(body: str, shape: str, blocked: int, moved: int) -> None:
    """`blocked` convolutions are computed so, and `moved` values moved into blocks or out of them."""
    model = parsed(f"(float[1,3,20,20] x, float[1,16,20,20] z) => (float[{shape}] y) {{ {body} }}", **W)
    made, _ = block_channels(frontend.import_relax(frontend.normalise(model)), LANES)
    names = [str(name.name_hint) for name, func in made.functions.items() if isinstance(func, tirx.PrimFunc)]
    assert sum(name.startswith("conv2d") for name in names) == blocked
    assert sum(name.startswith(("block", "unblock")) for name in names) == moved


def test_only_processors_compute_in_blocks() -> None:
    lanes = {family: block_lanes(imagined(family)) for family in ("cpu", "mali", "gpu")}
    assert lanes == {"cpu": LANES, "mali": 0, "gpu": 0}


def test_operators_keep_their_names() -> None:
    body = f"a = Conv <{SAME}> (x, w) b = Relu(a) y = Conv <{SAME}> (b, u)"
    text = f"(float[1,3,20,20] x) => (float[1,16,20,20] y) {{ {body} }}"
    imported = frontend.import_named(frontend.normalise(parsed(text, **W)))
    lowered = lower_module(imported.module, imagined("cpu"), names=imported.names)
    known = {name for call in lowered.program.calls for name in call.operators}
    assert known == set(imported.names.values())


def test_what_fills_up_a_block_makes_no_answer_wrong(device: Device) -> None:
    """Channels that are divided by constants leave no numbers behind that the next convolution would sum."""
    text = f"""(float[1,3,9,9] x) => (float[1,4,9,9] y) {{
        a = Conv <{SAME}> (x, w) b = Div(a, by) c = Sigmoid(b) y = Conv <{SAME}> (c, u) }}"""
    model = parsed(
        text, w=weights(5, 3, 3, 3), u=weights(4, 5, 3, 3), by=np.abs(weights(5, 1, 1)) + np.float32(1)
    )
    values = {"x": weights(1, 3, 9, 9)}
    (expected,) = answers(model, values)
    (found,) = run_model(model, values, device, "fp32").values()
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_vectors_are_rounded_whole() -> None:
    """Taken apart, what quantises is two to four times as much source, which drivers take long to build."""
    body = f"a = Conv <{SAME}> (x, w) {QUANTISED} y = Conv <{SAME}> (b, u)"
    text = f"(float[1,3,20,20] x) => (float[1,16,20,20] y) {{ {body} }}"
    imported = frontend.import_relax(frontend.normalise(parsed(text, **W)))
    lowered = lower_module(imported, imagined("cpu"), first=untuned_kernels)
    rounding = [
        line for one in lowered.functions.values() for line in one.source.splitlines() if "rint(" in line
    ]
    assert rounding
    assert not [line for line in rounding if ".s" in line]
