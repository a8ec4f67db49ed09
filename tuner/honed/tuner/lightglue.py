"""The demo model: a LightGlue matcher with seeded weights, made with onnx.helper and NumPy alone.

The architecture is LightGlue's ("LightGlue: Local Feature Matching at Light Speed", Lindenberger, Sarlin
and Pollefeys, ICCV 2023): nine layers, each a self-attention with rotary position encoding and a
cross-attention, for both images; then a double log-softmax over the similarities plus the logarithm of
both points' matchability. The operators are the ones an exporter writes. The weights are random but not
arbitrary: the network leaves a descriptor recognisable, so it really matches what `example_inputs` gives.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from honed.protocol.errors import InvalidArgument

OPSET = 17  # The first with LayerNormalization
IR_VERSION = 8  # The format version of the ONNX release that introduced opset 17
LAYERS = 9
HEADS = 4
WIDTH = 256
HEAD_WIDTH = WIDTH // HEADS
KEYPOINTS = 192  # Per image, by default
MAX_KEYPOINTS = 4096

_UPDATE = 0.2  # Size of a block's change to a descriptor, next to the descriptor's own
_SIMILARITY = 0.9  # Gain of the final projection: how far matches stand out in the scores
_MATCHABLE = 2.0  # Bias of the matchability: most points are assumed to have a partner
_EPSILON = 1e-5


def build(keypoints: int | None = KEYPOINTS, seed: int = 0) -> onnx.ModelProto:
    """Build the matcher as an ONNX model (opset 17) of `keypoints` points per image; None: symbolic, named N.

    Inputs, float32: kpts0 and kpts1 [1, N, 2] (x and y, each normalised to -1..1), desc0 and desc1
    [1, N, 256] (elements of about unit size). Outputs, float32: scores [1, N, N], the log-probability
    that point i of image 0 is point j of image 1; matchability0 and matchability1 [1, N], the
    probability that a point has a partner at all. Equal seeds give equal weights. Raises
    InvalidArgument for a number of keypoints outside 1..4096.
    """
    _check(keypoints)
    size: int | str = "N" if keypoints is None else keypoints
    net = _Matcher(np.random.default_rng(seed))
    net.matcher()
    model = net.model(
        "lightglue",
        {
            "kpts0": (1, size, 2),
            "kpts1": (1, size, 2),
            "desc0": (1, size, WIDTH),
            "desc1": (1, size, WIDTH),
        },
        {"scores": (1, size, size), "matchability0": (1, size), "matchability1": (1, size)},
        opset=OPSET,
        ir_version=IR_VERSION,
    )
    onnx.checker.check_model(model)
    return model


def write(
    path: str | os.PathLike[str], keypoints: int = KEYPOINTS, symbolic: bool = False, seed: int = 0
) -> Path:
    """Write the model to `path` (45 MB), with a symbolic N where `symbolic`.

    The file is replaced whole or not at all. Raises OSError where it cannot be written.
    """
    target = Path(path)
    data = build(None if symbolic else keypoints, seed).SerializeToString(deterministic=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(data)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return target


def example_inputs(keypoints: int = KEYPOINTS, seed: int = 0) -> dict[str, np.ndarray]:
    """Return two views of one scene for the model, float32: image 1 shows image 0's points in another order.

    Its points are turned and shifted a little and its descriptors carry noise; point `i` of image 0 is
    point `partners(keypoints, seed)[i]` of image 1.
    """
    _check(keypoints)
    rng = np.random.default_rng([seed, 1])
    order = rng.permutation(keypoints)
    kpts0 = rng.uniform(-0.9, 0.9, (keypoints, 2))
    desc0 = rng.standard_normal((keypoints, WIDTH))
    angle = 0.1
    turn = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    kpts1 = (kpts0 @ turn.T + (0.03, -0.02))[order]
    desc1 = (desc0 + 0.3 * rng.standard_normal(desc0.shape))[order]
    values = {"kpts0": kpts0, "kpts1": kpts1, "desc0": desc0, "desc1": desc1}
    return {name: np.ascontiguousarray(value[None], np.float32) for name, value in values.items()}


def partners(keypoints: int = KEYPOINTS, seed: int = 0) -> np.ndarray:
    """Return the true matches of `example_inputs`, int64 [keypoints].

    Element i is the index in image 1 of point i of image 0.
    """
    _check(keypoints)
    order = np.random.default_rng([seed, 1]).permutation(keypoints)
    return np.argsort(order)


def _check(keypoints: int | None) -> None:
    if keypoints is not None and not 1 <= keypoints <= MAX_KEYPOINTS:
        raise InvalidArgument(f"keypoints is {keypoints}; give a number from 1 to {MAX_KEYPOINTS}")


class GraphBuilder:
    """A collector of an ONNX graph's nodes in their order.

    Every method returns the name of the value it makes.

    A value is named after its node, so a name such as `layers.3/self0/qkv/add` says where it comes from.
    """

    def __init__(self) -> None:
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: dict[str, onnx.TensorProto] = {}

    def op(self, name: str, op_type: str, *inputs: str, **attrs: Any) -> str:
        """Add one node with a single output of the same name."""
        self._nodes.append(helper.make_node(op_type, list(inputs), [name], name=name, **attrs))
        return name

    def constant(self, name: str, value: np.ndarray) -> str:
        """Add an initializer, once: the name must stand for the same value wherever it is used."""
        if name not in self._initializers:
            self._initializers[name] = numpy_helper.from_array(value, name)
        return name

    def scalar(self, value: float) -> str:
        """Return a float32 scalar constant; equal values share one."""
        return self.constant(f"const/{value:.9g}", np.array(value, np.float32))

    def integers(self, *values: int) -> str:
        """Return an int64 vector constant; equal values share one."""
        return self.constant(f"const/[{','.join(map(str, values))}]", np.array(values, np.int64))

    def index(self, value: int) -> str:
        """Return an int64 scalar constant, which makes Gather drop the axis it picks from."""
        return self.constant(f"const/at{value}", np.array(value, np.int64))

    def model(
        self,
        name: str,
        inputs: Mapping[str, Sequence[int | str]],
        outputs: Mapping[str, Sequence[int | str]],
        *,
        opset: int,
        ir_version: int,
    ) -> onnx.ModelProto:
        """Return the model built so far; inputs and outputs are float32 of the given shapes."""
        graph = helper.make_graph(
            self._nodes,
            name,
            [helper.make_tensor_value_info(n, TensorProto.FLOAT, list(s)) for n, s in inputs.items()],
            [helper.make_tensor_value_info(n, TensorProto.FLOAT, list(s)) for n, s in outputs.items()],
            list(self._initializers.values()),
        )
        return helper.make_model(
            graph,
            producer_name="honed",
            ir_version=ir_version,
            opset_imports=[helper.make_opsetid("", opset)],
        )


class _Matcher(GraphBuilder):
    """The network; weights are drawn when first used and shared by both images."""

    def __init__(self, rng: np.random.Generator) -> None:
        super().__init__()
        self._rng = rng

    def matcher(self) -> None:
        """Add everything from the four inputs to the three outputs."""
        desc0, desc1 = "desc0", "desc1"
        rotary0 = self.rotary("posenc0", "kpts0")
        rotary1 = self.rotary("posenc1", "kpts1")
        for layer in range(LAYERS):
            name = f"layers.{layer}"
            desc0 = self.self_block(name, 0, desc0, rotary0)
            desc1 = self.self_block(name, 1, desc1, rotary1)
            desc0, desc1 = self.cross_block(name, desc0, desc1)
        self.assignment(desc0, desc1)

    def rotary(self, name: str, keypoints: str) -> tuple[str, str]:
        """Return cosines and sines [1, 1, N, 64] of a learnt Fourier encoding of positions, each twice."""
        weight = self.weight("posenc.Wr.weight", 2, HEAD_WIDTH // 2, 1.0)
        angles = self.op(f"{name}/Wr/matmul", "MatMul", keypoints, weight)
        pair = []
        for kind in ("Cos", "Sin"):
            part = f"{name}/{kind.lower()}"
            value = self.op(f"{part}/value", kind, angles)
            column = self.op(f"{part}/unsqueeze", "Unsqueeze", value, self.integers(3))
            twice = self.op(f"{part}/twice", "Concat", column, column, axis=3)
            pair.append(self.op(f"{part}/heads", "Reshape", twice, self.integers(1, 1, -1, HEAD_WIDTH)))
        return pair[0], pair[1]

    def rotate(self, name: str, x: str, rotary: tuple[str, str]) -> str:
        """Turn each pair of channels of x [1, 4, N, 64] by its angle: x cos + (-odd, even) sin."""
        pairs = self.op(f"{name}/pairs", "Reshape", x, self.integers(1, HEADS, -1, HEAD_WIDTH // 2, 2))
        even = self.op(f"{name}/even", "Gather", pairs, self.index(0), axis=4)
        odd = self.op(f"{name}/odd", "Gather", pairs, self.index(1), axis=4)
        minus = self.op(f"{name}/neg", "Neg", odd)
        left = self.op(f"{name}/left", "Unsqueeze", minus, self.integers(4))
        right = self.op(f"{name}/right", "Unsqueeze", even, self.integers(4))
        crossed = self.op(f"{name}/concat", "Concat", left, right, axis=4)
        turned = self.op(f"{name}/turned", "Reshape", crossed, self.integers(1, HEADS, -1, HEAD_WIDTH))
        by_cos = self.op(f"{name}/mul_cos", "Mul", x, rotary[0])
        by_sin = self.op(f"{name}/mul_sin", "Mul", turned, rotary[1])
        return self.op(f"{name}/add", "Add", by_cos, by_sin)

    def self_block(self, layer: str, image: int, x: str, rotary: tuple[str, str]) -> str:
        """Apply attention of one image's points to each other, then the update of x [1, N, 256]."""
        weights, name = f"{layer}.self", f"{layer}/self{image}"
        qkv = self.linear(f"{name}/qkv", x, f"{weights}.qkv", WIDTH, 3 * WIDTH)
        split = self.op(f"{name}/split", "Reshape", qkv, self.integers(1, -1, HEADS, HEAD_WIDTH, 3))
        heads = self.op(f"{name}/heads", "Transpose", split, perm=[0, 2, 1, 3, 4])
        q, k, v = (
            self.op(f"{name}/{part}", "Gather", heads, self.index(i), axis=4) for i, part in enumerate("qkv")
        )
        q = self.rotate(f"{name}/rotary_q", q, rotary)
        k = self.rotate(f"{name}/rotary_k", k, rotary)
        message = self.linear(
            f"{name}/out_proj", self.attention(name, q, k, v), f"{weights}.out_proj", WIDTH, WIDTH
        )
        return self.update(f"{name}/ffn", x, message, f"{weights}.ffn")

    def cross_block(self, layer: str, x0: str, x1: str) -> tuple[str, str]:
        """Apply attention of each image's points to the other's, then the update of both [1, N, 256]."""
        weights = f"{layer}.cross"
        names = (f"{layer}/cross0", f"{layer}/cross1")
        points = (x0, x1)
        qk, v = (
            [
                self.heads(f"{n}/{part}", self.linear(f"{n}/{part}", x, f"{weights}.{part}", WIDTH, WIDTH))
                for n, x in zip(names, points, strict=True)
            ]
            for part in ("to_qk", "to_v")
        )
        updated = []
        for image, (name, x) in enumerate(zip(names, points, strict=True)):
            other = 1 - image
            merged = self.attention(name, qk[image], qk[other], v[other])
            message = self.linear(f"{name}/to_out", merged, f"{weights}.to_out", WIDTH, WIDTH)
            updated.append(self.update(f"{name}/ffn", x, message, f"{weights}.ffn"))
        return updated[0], updated[1]

    def heads(self, name: str, x: str) -> str:
        """Split [1, N, 256] into heads [1, 4, N, 64]."""
        split = self.op(f"{name}/split", "Reshape", x, self.integers(1, -1, HEADS, HEAD_WIDTH))
        return self.op(f"{name}/heads", "Transpose", split, perm=[0, 2, 1, 3])

    def attention(self, name: str, q: str, k: str, v: str) -> str:
        """Return softmax(q k^T / 8) v over the heads [1, 4, N, 64], merged to [1, N, 256]."""
        keys = self.op(f"{name}/attention/keys", "Transpose", k, perm=[0, 1, 3, 2])
        products = self.op(f"{name}/attention/scores", "MatMul", q, keys)
        scaled = self.op(f"{name}/attention/scaled", "Mul", products, self.scalar(HEAD_WIDTH**-0.5))
        weights = self.op(f"{name}/attention/softmax", "Softmax", scaled, axis=-1)
        values = self.op(f"{name}/attention/values", "MatMul", weights, v)
        rows = self.op(f"{name}/attention/rows", "Transpose", values, perm=[0, 2, 1, 3])
        return self.op(f"{name}/attention/merged", "Reshape", rows, self.integers(1, -1, WIDTH))

    def update(self, name: str, x: str, message: str, weights: str) -> str:
        """Return x + W2 gelu(norm(W1 [x, message])), the feed-forward of every block; [1, N, 256]."""
        both = self.op(f"{name}/concat", "Concat", x, message, axis=2)
        wide = self.linear(f"{name}/fc1", both, f"{weights}.fc1", 2 * WIDTH, 2 * WIDTH)
        normed = self.op(
            f"{name}/norm",
            "LayerNormalization",
            wide,
            self.vector(f"{weights}.norm.weight", 2 * WIDTH, mean=1.0),
            self.vector(f"{weights}.norm.bias", 2 * WIDTH),
            axis=-1,
            epsilon=_EPSILON,
        )
        active = self.gelu(f"{name}/gelu", normed)
        change = self.linear(f"{name}/fc2", active, f"{weights}.fc2", 2 * WIDTH, WIDTH, gain=_UPDATE)
        return self.op(f"{name}/add", "Add", x, change)

    def gelu(self, name: str, x: str) -> str:
        """Return x (1 + erf(x / sqrt 2)) / 2, written out as exporters do below opset 20."""
        scaled = self.op(f"{name}/div", "Div", x, self.scalar(math.sqrt(2.0)))
        erf = self.op(f"{name}/erf", "Erf", scaled)
        shifted = self.op(f"{name}/add", "Add", erf, self.scalar(1.0))
        product = self.op(f"{name}/mul", "Mul", x, shifted)
        return self.op(f"{name}/half", "Mul", product, self.scalar(0.5))

    def assignment(self, desc0: str, desc1: str) -> None:
        """Add the three outputs: log-assignment scores and both images' matchability."""
        projected = [
            self.op(
                f"assignment/scaled{i}",
                "Mul",
                self.linear(f"assignment/final_proj{i}", x, "assignment.final_proj", WIDTH, WIDTH),
                self.scalar(WIDTH**-0.25),
            )
            for i, x in enumerate((desc0, desc1))
        ]
        columns = self.op("assignment/columns", "Transpose", projected[1], perm=[0, 2, 1])
        similarity = self.op("assignment/similarity", "MatMul", projected[0], columns)
        by_row = self.op("assignment/log_softmax0", "LogSoftmax", similarity, axis=2)
        by_column = self.op("assignment/log_softmax1", "LogSoftmax", similarity, axis=1)
        logs = []
        for i, desc in enumerate((desc0, desc1)):
            name = f"assignment/matchability{i}"
            logit = self.linear(name, desc, "assignment.matchability", WIDTH, 1)
            probability = self.op(f"{name}/sigmoid", "Sigmoid", logit)
            logs.append(self.op(f"{name}/log", "Log", probability))
            self.op(f"matchability{i}", "Squeeze", probability, self.integers(2))
        other = self.op("assignment/certainty1", "Transpose", logs[1], perm=[0, 2, 1])
        certainty = self.op("assignment/certainty", "Add", logs[0], other)
        assigned = self.op("assignment/assigned", "Add", by_row, by_column)
        self.op("scores", "Add", assigned, certainty)

    def linear(self, name: str, x: str, weights: str, inputs: int, outputs: int, *, gain: float = 1.0) -> str:
        """Return x W + b, with W [inputs, outputs] as exporters transpose it."""
        matrix = self.weight(f"{weights}.weight", inputs, outputs, gain / math.sqrt(inputs))
        product = self.op(f"{name}/matmul", "MatMul", x, matrix)
        return self.op(f"{name}/add", "Add", product, self.vector(f"{weights}.bias", outputs))

    def weight(self, name: str, inputs: int, outputs: int, deviation: float) -> str:
        """Return a random matrix; the final projection is near the identity, so that matches stand out."""
        if name not in self._initializers:
            value = self._rng.standard_normal((inputs, outputs), np.float32) * np.float32(deviation)
            if name == "assignment.final_proj.weight":
                value = np.float32(0.1) * value + np.float32(_SIMILARITY) * np.eye(inputs, dtype=np.float32)
            self.constant(name, value)
        return name

    def vector(self, name: str, length: int, *, mean: float = 0.0) -> str:
        """Return a bias or the weights of a norm: small random values around `mean`."""
        if name not in self._initializers:
            value = self._rng.standard_normal(length, np.float32) * np.float32(0.05) + np.float32(mean)
            if name == "assignment.matchability.bias":
                value = value + np.float32(_MATCHABLE)
            self.constant(name, value)
        return name
