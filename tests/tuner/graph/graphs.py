"""What tests of passes share: made-up models, and whether a pass leaves their answers as they were."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import onnx
import onnx.parser
import onnxruntime

from honed.tuner.frontend import normalise
from honed.tuner.graph import Pass

HEADER = '<ir_version: 8, opset_import: ["" : 17]> g '


def parsed(text: str, **constants: np.ndarray) -> onnx.ModelProto:
    """A model written as ONNX's text, with constants."""
    model = onnx.parser.parse_model(HEADER + text)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(v, name) for name, v in constants.items())
    return model


def weights(*shape: int, seed: int = 0) -> np.ndarray:
    """Random float32 of such a size that products with them stay of unit size."""
    scale = np.sqrt(shape[0]) if len(shape) > 1 else 1.0
    return (np.random.default_rng((seed, *shape)).standard_normal(shape) / scale).astype(np.float32)


# Two towers of three products with the same weights.
TOWERS = """(float[1,6,8] x, float[1,6,8] y) => (float[1,6,8] u, float[1,6,8] v) {
    a = MatMul(x, w) b = Relu(a) c = MatMul(b, w2) d = Softmax(c) u = MatMul(d, w3)
    e = MatMul(y, w) f = Relu(e) g = MatMul(f, w2) h = Softmax(g) v = MatMul(h, w3) }"""
SAME = {"w": weights(8, 8), "w2": weights(8, 8, seed=1), "w3": weights(8, 8, seed=2)}


def after(model: onnx.ModelProto, passes: Sequence[Pass], tolerance: float = 1e-5) -> onnx.ModelProto:
    """The normalised model after passes, whose answers are found to be those without, and which is valid."""
    plain, done = normalise(model, passes=()), normalise(model, passes=passes)
    onnx.checker.check_model(done.model, full_check=True)
    rng = np.random.default_rng(1)
    given = {i.name: rng.standard_normal(i.shape).astype(i.numpy) for i in plain.inputs}
    moved = {name: _moved(value) for name, value in given.items()}
    every = [
        answers(each, values)
        for each, values in ((plain.model, given), (plain.model, moved), (done.model, given))
    ]
    for expected, sensitive, found in zip(*every, strict=True):
        # What turns the last bits of its inputs into more than the tolerance does so with those of its sums.
        allowed = max(
            tolerance * max(1.0, float(np.abs(expected).max())), float(np.abs(sensitive - expected).max())
        )
        np.testing.assert_allclose(found, expected, atol=allowed)
    return done.model


def _moved(value: np.ndarray) -> np.ndarray:
    """Each element a hundred of its last bits away, up or down."""
    if value.dtype.kind != "f":
        return value
    signs = np.random.default_rng(2).choice([-1.0, 1.0], value.shape)
    return (value * (1 + 100 * np.finfo(value.dtype).eps * signs)).astype(value.dtype)


def operators(model: onnx.ModelProto) -> Counter[str]:
    """How many nodes of each operator a model has."""
    return Counter(node.op_type for node in model.graph.node)


def answers(model: onnx.ModelProto, given: dict[str, np.ndarray]) -> list[np.ndarray]:
    """What ONNX Runtime answers."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    found: list[np.ndarray] = session.run(None, given)
    return found
