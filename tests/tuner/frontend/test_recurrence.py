"""Recurrent layers, unrolled, give what ONNX Runtime gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from honed.runtime.errors import ModelRefused
from honed.tuner.frontend import normalise
from honed.tuner.frontend.rules.recurrence import LAYERS, MAX_STEPS

from .test_rules import floats, run

pytestmark = pytest.mark.tvm
# Those that need no parameters, but Softplus, which gives infinities above 88 in ONNX Runtime.
ACTIVATIONS = ["Sigmoid", "Tanh", "Relu", "HardSigmoid", "LeakyRelu", "Elu", "Softsign"]
UNBOUNDED = {"Relu", "LeakyRelu", "Elu"}  # these let rounding grow from step to step


def layer(
    op: str, data: dict[str, np.ndarray], constants: dict[str, np.ndarray], **attrs: Any
) -> onnx.ModelProto:
    """One layer; its inputs by ONNX's names, those missing left out."""
    order = ["X", "W", "R", "B", "sequence_lens", "initial_h", "initial_c", "P"][: 8 if op == "LSTM" else 6]
    results = ["Y", "Y_h", "Y_c"][: 3 if op == "LSTM" else 2]
    names = [n if n in data or n in constants else "" for n in order]
    graph = helper.make_graph(
        [helper.make_node(op, names, results, **attrs)],
        "layer",
        [helper.make_tensor_value_info(k, 1, v.shape) for k, v in data.items()],
        [helper.make_tensor_value_info(r, 1, None) for r in results],
        [numpy_helper.from_array(v, k) for k, v in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@given(st.sampled_from(sorted(LAYERS)), st.integers(1, 4), st.integers(1, 3), st.data())
def test_layers(op: str, steps: int, batch: int, draw: st.DataObject) -> None:
    direction = draw.draw(st.sampled_from(["forward", "reverse", "bidirectional"]))
    count, width, hidden = 2 if direction == "bidirectional" else 1, draw.draw(st.integers(1, 4)), 3
    gates = LAYERS[op].gates
    data = {"X": 2 * floats(steps, batch, width)}
    constants = {
        "W": floats(count, gates * hidden, width, seed=1),
        "R": floats(count, gates * hidden, hidden, seed=2),
    }
    attrs: dict[str, Any] = {"hidden_size": hidden, "direction": direction}
    maybe = lambda: draw.draw(st.booleans())  # noqa: E731
    if maybe():
        constants["B"] = floats(count, 2 * gates * hidden, seed=3)
    if maybe():
        lengths = st.lists(st.integers(1, steps), min_size=batch, max_size=batch)
        constants["sequence_lens"] = np.array(draw.draw(lengths), np.int32)
    if maybe():
        data["initial_h"] = floats(count, batch, hidden, seed=4)
    if maybe():
        attrs["clip"] = draw.draw(st.sampled_from([0.3, 1.0, 5.0]))
    if op == "GRU":
        attrs["linear_before_reset"] = draw.draw(st.integers(0, 1))
    if op == "LSTM" and maybe():
        data["initial_c"] = floats(count, batch, hidden, seed=5)
    if op == "LSTM" and maybe():
        constants["P"] = floats(count, 3 * hidden, seed=6)
    if op == "LSTM":
        attrs["input_forget"] = draw.draw(st.integers(0, 1))
    if maybe():
        chosen = len(LAYERS[op].activations) * count
        attrs["activations"] = draw.draw(
            st.lists(st.sampled_from(ACTIVATIONS), min_size=chosen, max_size=chosen)
        )
    model = layer(op, data, constants, **attrs)
    expected = run(model, data)
    done = normalise(model)
    allowed = 1e-4 if UNBOUNDED & set(attrs.get("activations", ())) else 2e-5
    for got, wanted in zip(run(done.model, data), expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=allowed, atol=allowed)


@pytest.mark.parametrize("op", sorted(LAYERS))
def test_batch_first_is_the_same_with_axes_exchanged(op: str) -> None:
    gates = LAYERS[op].gates
    weights = {"W": floats(1, gates * 3, 2, seed=1), "R": floats(1, gates * 3, 3, seed=2)}
    x, h = floats(4, 2, 2), floats(1, 2, 3, seed=3)
    expected = run(layer(op, {"X": x, "initial_h": h}, weights, hidden_size=3), {"X": x, "initial_h": h})
    given = {"X": x.transpose(1, 0, 2).copy(), "initial_h": h.transpose(1, 0, 2).copy()}
    found = run(normalise(layer(op, given, weights, hidden_size=3, layout=1)).model, given)
    np.testing.assert_allclose(found[0], expected[0].transpose(2, 0, 1, 3), rtol=1e-5, atol=1e-5)
    for got, wanted in zip(found[1:], expected[1:], strict=True):
        np.testing.assert_allclose(got, wanted.transpose(1, 0, 2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["LeakyRelu", "HardSigmoid", "ScaledTanh", "Affine"])
def test_parameters_of_activations(name: str) -> None:
    weights = {"W": floats(2, 3, 2, seed=1), "R": 0.3 * floats(2, 3, 3, seed=2)}
    x = floats(3, 2, 2)
    parameters: dict[str, Any] = {"activation_alpha": [0.3, 0.4]}
    if name != "LeakyRelu":
        parameters["activation_beta"] = [0.6, 0.7]
    attrs = {"hidden_size": 3, "direction": "bidirectional", "activations": [name, name], **parameters}
    model = layer("RNN", {"X": x}, weights, **attrs)
    for got, wanted in zip(run(normalise(model).model, {"X": x}), run(model, {"X": x}), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-5)


def test_a_long_sequence_is_refused_with_its_length() -> None:
    weights = {"W": floats(1, 3, 2), "R": floats(1, 3, 3)}
    model = layer("RNN", {"X": floats(MAX_STEPS + 1, 1, 2)}, weights, hidden_size=3)
    with pytest.raises(ModelRefused, match=f"{MAX_STEPS + 1} steps"):
        normalise(model)
