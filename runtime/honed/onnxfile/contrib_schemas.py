"""Replaces operators whose shapes ONNX's inference does not know by ONNX operators.

These are ONNX Runtime's own, and some of ONNX's domain of machine learning.

A stand-in has the same output types and shapes as the original, not the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

# ONNX Runtime has these in ONNX's domain. The first two it has at any opset; ONNX defines the first from 17
# on, the second never. The others are of opset NEWEST_OPSET, which the installed onnx need not know.
RUNTIMES_OWN = ("LayerNormalization", "SimplifiedLayerNormalization", "BitCast", "CumProd")
NEWEST_OPSET = 26
_END = np.iinfo(np.int64).max  # The end of a Slice


@dataclass(slots=True)
class _StandInWriter:
    """A collector of the nodes that replace one node, and of constants."""

    node: onnx.NodeProto
    shapes: dict[str, tuple[int, ...]]  # Shapes of initialisers
    types: dict[str, int]  # Element types of initialisers, by ONNX's numbers
    made: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[onnx.TensorProto] = field(default_factory=list)

    def inputs_at(self, *places: int) -> list[str]:
        """Return the names of the inputs at these places."""
        return [self.node.input[place] for place in places]

    def is_given(self, place: int) -> bool:
        """Return whether there is an input at this place."""
        return place < len(self.node.input) and bool(self.node.input[place])

    def add(self, op: str, inputs: Sequence[str], output: str = "", **attrs: object) -> str:
        """Add a node and return its output's name: `output` or else the first output of the original node."""
        output = output or self.node.output[0]
        self.made.append(helper.make_node(op, inputs, [output], **attrs))
        return output

    def copy(
        self, op: str, inputs: Sequence[str], outputs: Sequence[str], wanted: Callable[[str], bool]
    ) -> None:
        """Add a node with those attributes of the original node whose names are `wanted`."""
        made = helper.make_node(op, inputs, outputs)
        made.attribute.extend(a for a in self.node.attribute if wanted(a.name))
        self.made.append(made)

    def as_float(self, x: str) -> str:
        """Add a node whose output is `x` as type float, and return its output's name."""
        return self.add("Cast", [x], to=TensorProto.FLOAT)

    def inner(self, op: str, inputs: Sequence[str], **attrs: object) -> str:
        """Add a node whose output only other stand-ins read, and return the name of that output."""
        return self.add(op, inputs, f"{self.node.output[0]}, stand-in {len(self.made)}", **attrs)

    def wide(self, x: str, columns: int) -> str:
        """Add a node that widens `x` to that number of columns, and return its output's name."""
        return self.add("Gather", [x, self.integers(*[0] * columns)], axis=-1)

    def integers(self, *values: int) -> str:
        """Add a constant, and return its name."""
        name = f"{self.node.output[0]}, constant {len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.array(values, np.int64), name))
        return name

    def part_of_shape(self, x: str, start: int, end: int) -> str:
        """Add nodes that compute some sizes of `x`, and return their output's name."""
        ends = [self.integers(place) for place in (start, end, 0)]
        return self.inner("Slice", [self.inner("Shape", [x]), *ends])

    def join(self, parts: Sequence[str]) -> str:
        """Add a node that joins shapes, and return its output's name."""
        return self.inner("Concat", parts, axis=0)


def _attribute(node: onnx.NodeProto, name: str, default: int) -> int:
    return next((int(a.i) for a in node.attribute if a.name == name), default)


StandIn = Callable[[_StandInWriter], object]


def _same(w: _StandInWriter) -> None:
    """Write a stand-in whose output has the type and shape of the first input."""
    w.add("Identity", w.inputs_at(0))


def _as(op: str, *places: int, without: str = "channels_last") -> StandIn:
    """Return a stand-in that writes ONNX's operator `op` on the inputs at `places`.

    The operator has the node's attributes except those whose names begin with `without`.
    """
    return lambda w: w.copy(
        op, w.inputs_at(*places), w.node.output[:1], lambda name: not name.startswith(without)
    )


def _in_onnx(w: _StandInWriter) -> None:
    """Write a stand-in that is ONNX's operator of the node's name."""
    _as(w.node.op_type, *range(len(w.node.input)))(w)


def _channels_first(write: StandIn) -> StandIn:
    def unless_last(w: _StandInWriter) -> None:
        if not _attribute(w.node, "channels_last", 0):
            write(w)

    return unless_last


def _average(w: _StandInWriter) -> None:
    kept = {"auto_pad", "ceil_mode", "kernel_shape", "pads", "strides"}
    w.copy("MaxPool", w.inputs_at(0), w.node.output[:1], kept.__contains__)


def _write_normalisation(w: _StandInWriter) -> None:
    total = w.add("Add", w.inputs_at(0, 1))
    if len(w.node.output) > 3 and w.node.output[3]:
        w.add("Identity", [total], w.node.output[3])


def _attention(w: _StandInWriter) -> None:
    columns, sizes = w.shapes.get(w.node.input[1], ()), _sizes(w.node)
    if len(columns) == 2:
        whole = w.inner("MatMul", w.inputs_at(0, 1))
        if w.node.op_type == "QAttention":
            whole = w.inner("Cast", [whole], to=TensorProto.FLOAT)
        w.wide(whole, sizes[2] if len(sizes) == 3 else columns[1] // 3)


def _sizes(node: onnx.NodeProto) -> list[int]:
    return next((list(a.ints) for a in node.attribute if a.name == "qkv_hidden_sizes"), [])


def _heads(w: _StandInWriter) -> None:
    """Write keys and values of [B, L, N * H] or [B, N, L, H], whose rank is not known here."""
    if not w.is_given(2):
        return  # Packed, which the frontend refuses
    columns = [w.part_of_shape(w.node.input[2], *ends) for ends in ((1, -2), (-1, _END))]  # N if apart; H
    product = w.inner("Reshape", [w.inner("ConstantOfShape", [w.join(columns)]), w.integers(-1)])
    w.add("Gather", [w.node.input[0], w.inner("Cast", [product], to=TensorProto.INT64)], axis=-1)
    heads = w.integers(_attribute(w.node, "num_heads", 1))
    for output, new, past in zip(w.node.output[1:3], (1, 2), (6, 7), strict=False):
        if not output:
            continue
        if w.is_given(8):  # The past has room for the new rows
            w.add("Identity", w.inputs_at(past), output)
            continue
        length = w.part_of_shape(w.node.input[new], -2, -1)
        apart = w.inner(
            "Reshape", [w.node.input[new], w.join([w.integers(0), heads, length, w.integers(-1)])]
        )
        w.add("Concat", [*(w.inputs_at(past) if w.is_given(past) else ()), apart], output, axis=2)


def _write_transposed_product(w: _StandInWriter) -> None:
    if _attribute(w.node, "transBatchA", 0) or _attribute(w.node, "transBatchB", 0):
        return
    left = "ji" if _attribute(w.node, "transA", 0) else "ij"
    right = "kj" if _attribute(w.node, "transB", 0) else "jk"
    w.add("Einsum", w.inputs_at(0, 1), equation=f"...{left},...{right}->...ik")


def _gemm_of_integers(w: _StandInWriter) -> None:
    product = [f"{w.node.output[0]}, stand-in"]
    w.copy("Gemm", w.inputs_at(0, 3), product, lambda _: True)
    if w.is_given(8):
        w.add("Identity", product)
    else:
        w.as_float(*product)


def _write_grouped(w: _StandInWriter) -> None:
    if w.is_given(1):  # Absent if queries, keys and values are in one tensor
        _same(w)


def _few_bits_table(w: _StandInWriter) -> None:
    columns, bits = w.shapes.get(w.node.input[0], ()), _attribute(w.node, "bits", 4)
    if w.types.get(w.node.input[0]) in (TensorProto.INT4, TensorProto.UINT4):
        bits = 8  # Four-bit values are elements of their own
    if columns:
        numbers = w.inner("Gather", w.inputs_at(0, 1), axis=0)
        typed = w.inner("CastLike", [numbers, w.node.input[2]])
        w.wide(typed, columns[-1] * 8 // bits)


_STAND_INS: dict[str, StandIn] = {
    **dict.fromkeys(["BiasGelu", "FastGelu", "Gelu", "QuickGelu", "RotaryEmbedding"], _same),
    **dict.fromkeys(["QLinearLeakyRelu", "QLinearSigmoid", "QLinearSoftmax"], _same),
    **dict.fromkeys(["DequantizeLinear", "GatherND", "GridSample", "QuantizeLinear", "Trilu"], _in_onnx),
    **dict.fromkeys(["Attention", "QAttention"], _attention),
    **dict.fromkeys(["FusedMatMul", "TransposeMatMul"], _write_transposed_product),
    **dict.fromkeys(["SkipLayerNormalization", "SkipSimplifiedLayerNormalization"], _write_normalisation),
    "DynamicQuantizeLSTM": lambda w: w.copy("LSTM", w.inputs_at(0, 1, 2), w.node.output, lambda _: True),
    "DynamicQuantizeMatMul": _as("MatMul", 0, 1),
    "EmbedLayerNormalization": lambda w: w.add("Gather", w.inputs_at(2, 0), axis=0),
    "FusedConv": _as("Conv", 0, 1, without="activation"),
    "FusedGemm": _as("Gemm", 0, 1, without="activation"),
    "GatherBlockQuantized": _few_bits_table,
    "GroupQueryAttention": _write_grouped,
    "MatMulIntegerToFloat": lambda w: w.as_float(w.inner("MatMul", w.inputs_at(0, 1))),
    "MatMulNBits": lambda w: w.wide(w.node.input[0], _attribute(w.node, "N", 1)),
    "MultiHeadAttention": _heads,
    "QEmbedLayerNormalization": lambda w: w.as_float(w.inner("Gather", w.inputs_at(2, 0), axis=0)),
    "QGemm": _gemm_of_integers,
    "QLinearAdd": _as("Add", 0, 3),
    "QLinearAveragePool": _channels_first(_average),
    "QLinearConcat": lambda w: w.add("Concat", w.node.input[2::3], axis=_attribute(w.node, "axis", 0)),
    "QLinearConv": _channels_first(_as("Conv", 0, 3)),
    "QLinearGlobalAveragePool": _channels_first(_as("GlobalMaxPool", 0)),
    "QLinearMul": _as("Mul", 0, 3),
    "QLinearWhere": _as("Where", 0, 1, 4),
}  # fmt: skip


def _targets(w: _StandInWriter) -> None:
    """Write a stand-in whose output has a row of targets for each row of features."""
    w.wide(w.inner("Cast", w.inputs_at(0), to=TensorProto.FLOAT), _attribute(w.node, "targets", 1))


def _side_by_side(w: _StandInWriter) -> None:
    floats = [w.inner("Cast", [name], to=TensorProto.FLOAT) for name in w.node.input]
    w.add("Concat", floats, axis=1)


_OF_MACHINE_LEARNING: dict[str, StandIn] = {
    **dict.fromkeys(["Normalizer", "Scaler"], lambda w: w.as_float(w.node.input[0])),
    **dict.fromkeys(["LinearRegressor", "SVMRegressor"], _targets),
    "FeatureVectorizer": _side_by_side,
    "Imputer": _same,
}
_RUNTIMES_OWN: dict[str, StandIn] = {**dict.fromkeys(RUNTIMES_OWN, _same), "BitCast": _as("Cast", 0)}
_BY_DOMAIN = {"com.microsoft": _STAND_INS, "ai.onnx.ml": _OF_MACHINE_LEARNING}


def with_stand_ins(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of the model whose types and shapes ONNX's inference can infer, by stand-ins for nodes.

    Returns the model itself where no node needs a stand-in.
    """
    shapes = {t.name: tuple(t.dims) for t in model.graph.initializer}
    types = {t.name: t.data_type for t in model.graph.initializer}
    nodes: list[onnx.NodeProto] = []
    constants: list[onnx.TensorProto] = []
    stood = False
    for node in model.graph.node:
        writer = _StandInWriter(node=node, shapes=shapes, types=types)
        if node.output and (stand_in := _BY_DOMAIN.get(node.domain, {}).get(node.op_type)):
            stand_in(writer)
        elif node.domain in ("", "ai.onnx") and node.op_type in RUNTIMES_OWN:
            _RUNTIMES_OWN[node.op_type](writer)
        nodes += writer.made or [node]
        stood = stood or bool(writer.made)
        constants += writer.constants
    if not stood:
        return model
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    del copy.graph.node[:]
    copy.graph.node.extend(nodes)
    copy.graph.initializer.extend(constants)
    return copy
