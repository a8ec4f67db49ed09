"""A BERT as PyTorch exports it: `python -m benchmarks.bert -o FILE.onnx [--open]`.

An encoder of BERT (Devlin et al., NAACL 2019) with seeded weights, at opset 14: layer normalisation taken
apart, GELU by Erf, three products for queries, keys and values, and a mask that is added to their scores.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto

from honed.tuner.lightglue import GraphBuilder

LAYERS, HEADS, WIDTH = 4, 4, 256
TOKENS, MOST_TOKENS, VOCABULARY = 128, 512, 1000
_MASKED = -1e4


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bert", description=__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--open", action="store_true", help=f"of any number of tokens up to {MOST_TOKENS}")
    options = parser.parse_args()
    onnx.save(build(tokens=None if options.open else TOKENS), options.output)
    return 0


def build(layers: int = LAYERS, tokens: int | None = TOKENS, seed: int = 0) -> onnx.ModelProto:
    """Return the encoder as an ONNX model; None: its number of tokens is open.

    Inputs: input_ids, int64 [1, tokens] below VOCABULARY, and attention_mask, int64, 1 where a token is.
    Output: hidden, float32 [1, tokens, WIDTH].
    """
    net = _Encoder(np.random.default_rng(seed), tokens)
    net.encoder(layers)
    many = "tokens" if tokens is None else tokens
    inputs = {"input_ids": (1, many), "attention_mask": (1, many)}
    model = net.graph.model("bert", inputs, {"hidden": (1, many, WIDTH)}, opset=14, ir_version=8)
    for given in model.graph.input:
        given.type.tensor_type.elem_type = TensorProto.INT64
    onnx.checker.check_model(model, full_check=True)
    return model


class _Encoder:
    """Writes the parts of the network; `name` is that of the part, values are named after it."""

    def __init__(self, rng: np.random.Generator, tokens: int | None) -> None:
        self.graph = GraphBuilder()
        self._rng = rng
        self._tokens = tokens

    def encoder(self, layers: int) -> None:
        """Add the embeddings and the layers."""
        op = self.graph.op
        row = op("mask/row", "Unsqueeze", "attention_mask", self.graph.integers(1, 2))
        absent = op("mask/absent", "Sub", self.graph.scalar(1), op("mask/float", "Cast", row, to=1))
        mask = op("mask", "Mul", absent, self.graph.scalar(_MASKED))
        words = op("words", "Gather", self._weights("words/table", VOCABULARY, WIDTH), "input_ids")
        placed = op("placed", "Add", words, self._places())
        x = self._norm("norm", placed)
        for n in range(layers):
            x = self._layer(f"layer.{n}", x, mask)
        op("hidden", "Identity", x)

    def _places(self) -> str:
        if self._tokens is not None:
            return self._weights("places", 1, self._tokens, WIDTH)
        op, integers = self.graph.op, self.graph.integers
        table = self._weights("places/table", 1, MOST_TOKENS, WIDTH)
        many = op("places/many", "Gather", op("places/shape", "Shape", "input_ids"), integers(1))
        return op("places", "Slice", table, integers(0), many, integers(1))

    def _layer(self, name: str, x: str, mask: str) -> str:
        op = self.graph.op
        context = self._attention(f"{name}/attention", x, mask)
        x = self._norm(f"{name}/norm1", op(f"{name}/sum1", "Add", context, x))
        wide = self._linear(f"{name}/wide", x, WIDTH, 4 * WIDTH)
        erf = op(f"{name}/erf", "Erf", op(f"{name}/root", "Div", wide, self.graph.scalar(math.sqrt(2))))
        gate = op(f"{name}/gate", "Mul", wide, op(f"{name}/one", "Add", erf, self.graph.scalar(1)))
        gelu = op(f"{name}/gelu", "Mul", gate, self.graph.scalar(0.5))
        narrow = self._linear(f"{name}/narrow", gelu, 4 * WIDTH, WIDTH)
        return self._norm(f"{name}/norm2", op(f"{name}/sum2", "Add", narrow, x))

    def _attention(self, name: str, x: str, mask: str) -> str:
        op = self.graph.op
        query, key, value = (
            self._heads(f"{name}/{part}", self._linear(f"{name}/{part}", x, WIDTH, WIDTH), perm)
            for part, perm in (("query", (0, 2, 1, 3)), ("key", (0, 2, 3, 1)), ("value", (0, 2, 1, 3)))
        )
        scores = op(f"{name}/scores", "MatMul", query, key)
        scaled = op(f"{name}/scaled", "Div", scores, self.graph.scalar(math.sqrt(WIDTH // HEADS)))
        shares = op(f"{name}/shares", "Softmax", op(f"{name}/masked", "Add", scaled, mask), axis=-1)
        mixed = op(f"{name}/mixed", "MatMul", shares, value)
        rows = op(f"{name}/rows", "Transpose", mixed, perm=(0, 2, 1, 3))
        joined = op(f"{name}/joined", "Reshape", rows, self.graph.integers(1, self._tokens or -1, WIDTH))
        return self._linear(f"{name}/output", joined, WIDTH, WIDTH)

    def _heads(self, name: str, x: str, perm: tuple[int, ...]) -> str:
        shape = self.graph.integers(1, self._tokens or -1, HEADS, WIDTH // HEADS)
        return self.graph.op(
            f"{name}/heads", "Transpose", self.graph.op(f"{name}/cut", "Reshape", x, shape), perm=perm
        )

    def _linear(self, name: str, x: str, inputs: int, outputs: int) -> str:
        product = self.graph.op(
            f"{name}/matmul", "MatMul", x, self._weights(f"{name}/weight", inputs, outputs)
        )
        return self.graph.op(f"{name}/add", "Add", self._weights(f"{name}/bias", outputs), product)

    def _norm(self, name: str, x: str) -> str:
        op = self.graph.op
        centred = op(f"{name}/centred", "Sub", x, op(f"{name}/mean", "ReduceMean", x, axes=[-1]))
        square = op(f"{name}/square", "Pow", centred, self.graph.scalar(2))
        variance = op(f"{name}/variance", "ReduceMean", square, axes=[-1])
        deviation = op(
            f"{name}/deviation", "Sqrt", op(f"{name}/more", "Add", variance, self.graph.scalar(1e-12))
        )
        unit = op(f"{name}/unit", "Div", centred, deviation)
        scaled = op(f"{name}/scaled", "Mul", unit, self._weights(f"{name}/scale", WIDTH))
        return op(f"{name}/shifted", "Add", scaled, self._weights(f"{name}/shift", WIDTH))

    def _weights(self, name: str, *shape: int) -> str:
        """Add random weights, scaled so that products with them stay of unit size."""
        size = 1 / math.sqrt(shape[0]) if len(shape) == 2 and shape[0] != VOCABULARY else 1.0
        return self.graph.constant(name, (size * self._rng.standard_normal(shape)).astype(np.float32))


if __name__ == "__main__":
    raise SystemExit(main())
