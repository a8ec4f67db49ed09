"""Decides whether rows of a partition's inputs are independent, so that extra rows do no harm."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper

from honed.tuner.frontend.signature import StaticTensorSpec
from honed.tuner.frontend.survey import NodeSurvey, survey

_ROWS = 97  # Rows assumed for the analysis; no size of a model's own is likely to be as many
_ELEMENTWISE = """
Abs Add And BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Cast Ceil Celu Clip Cos Div Dropout Elu Equal
Erf Exp Floor Gelu Greater GreaterOrEqual HardSigmoid HardSwish Identity IsInf IsNaN LeakyRelu Less
LessOrEqual Log Max Mean Min Mish Mod Mul Neg Not Or PRelu Pow Reciprocal Relu Round Selu Sigmoid Sign Sin
Softplus Softsign Sqrt Sub Sum Tan Tanh ThresholdedRelu Where Xor
"""
_OF_IMAGES = """
AveragePool BatchNormalization Conv ConvTranspose DepthToSpace GlobalAveragePool GlobalMaxPool
InstanceNormalization LRN MaxPool SpaceToDepth
"""  # Operators that affect the first axis only when they work along it
_REDUCTIONS = {"ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "ReduceL1", "ReduceL2"}
_ALONG_AN_AXIS = {"Softmax": -1, "LogSoftmax": -1, "Hardmax": -1, "LayerNormalization": -1}
_AXIS_AND_NO_OTHER = {"ArgMax": 0, "ArgMin": 0, "TopK": -1, "Split": 0, "Concat": 0, "CumSum": 0}


def by_rows(
    model: onnx.ModelProto, inputs: Sequence[StaticTensorSpec], outputs: Sequence[StaticTensorSpec]
) -> bool:
    """Return whether rows are independent, along the first axis of each value whose size depends on the data.

    Returns True only where every operator is known to keep rows independent.
    """
    if any(-1 in spec.shape[1:] for spec in (*inputs, *outputs)):
        return False
    shapes = {spec.name: tuple(_ROWS if size == -1 else size for size in spec.shape) for spec in inputs}
    found = survey(model, shapes)
    if found is None:
        return False
    known = _KnownRows(found, {spec.name for spec in inputs if -1 in spec.shape})
    if not all(known.follow(one.node, folded=one.folded) for one in found.nodes):
        return False
    return all((spec.name in known.rows) == (-1 in spec.shape) for spec in outputs) and not (
        known.counts & {spec.name for spec in outputs}
    )


@dataclass()
class _KnownRows:
    """Values that consist of `rows`, and `counts` that depend on their number.

    Other values depend on neither.
    """

    survey: NodeSurvey
    rows: set[str]
    counts: set[str] = field(default_factory=set)

    def follow(self, node: onnx.NodeProto, *, folded: bool) -> bool:
        """Record the node's outputs; False where rows may affect each other, or their number matters."""
        reads, makes = [name for name in node.input if name], [name for name in node.output if name]
        if self.rows.isdisjoint(reads) and self.counts.isdisjoint(reads):
            return not any(attribute.HasField("g") for attribute in node.attribute)
        if folded:
            self.counts.update(makes)
            return True
        shape = set(reads[1:2]) if node.op_type in ("Reshape", "Expand") else set()
        if not self.counts.isdisjoint(set(reads) - shape) or not self._rule(node):
            return False
        self.rows.update(makes)
        return all(self.shape(name)[:1] == (_ROWS,) for name in makes)

    def _rule(self, node: onnx.NodeProto) -> bool:
        if node.domain not in ("", "ai.onnx"):
            return False
        if node.op_type in _ELEMENTWISE.split():
            return self._is_aligned(node)
        if node.op_type in _OF_IMAGES.split():
            return self._only(node, 0) and len(self.shape(node.input[0])) > 2
        rule = _RULES.get(node.op_type)
        if rule is not None:
            return rule(self, node)
        default = _ALONG_AN_AXIS.get(node.op_type, _AXIS_AND_NO_OTHER.get(node.op_type))
        return default is not None and self._beside(node, default)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a value; () where it is not known."""
        spec = self.survey.types.get(name)
        return spec.shape if spec is not None else ()

    def _only(self, node: onnx.NodeProto, *places: int) -> bool:
        """Return whether only the inputs read at these places consist of rows."""
        return all((name in self.rows) == (n in places) for n, name in enumerate(node.input) if name)

    def _is_aligned(self, node: onnx.NodeProto) -> bool:
        """Return whether rows are combined only with rows, or with values equal for each row."""
        rank = len(self.shape(node.output[0]))
        shapes = [(name in self.rows, self.shape(name)) for name in node.input if name]
        return all(len(s) == rank if row else len(s) < rank or s[:1] == (1,) for row, s in shapes)

    def _beside(self, node: onnx.NodeProto, default: int) -> bool:
        """Return whether a node works along an axis that is not the first."""
        axis = int(_attribute(node, "axis", default))
        rank = len(self.shape(node.input[0]))
        several = node.op_type == "Concat"
        rows = all(name in self.rows for name in node.input) if several else self._only(node, 0)
        return rows and axis % max(1, rank) > 0

    def axes(self, node: onnx.NodeProto) -> Sequence[int]:
        """Return the axes that the attribute or the second input gives; none where neither does."""
        given = _attribute(node, "axes", None)
        if given is None and len(node.input) > 1:
            given = self.survey.constants.get(node.input[1], np.array([])).ravel()
        return [] if given is None else [int(axis) for axis in given]

    def _changes_axes(self, node: onnx.NodeProto) -> bool:
        """Return whether a node drops or inserts axes after the first."""
        axes = self.axes(node)
        rank = max(len(self.shape(node.input[0])), len(self.shape(node.output[0])))
        return bool(axes) and self._only(node, 0) and all(axis % rank > 0 for axis in axes)

    def _multiplies(self, node: onnx.NodeProto) -> bool:
        left, right = (self.shape(name) for name in node.input[:2])
        if self._only(node, 0):
            return len(left) >= 2 and len(right) <= max(2, len(left) - 1)
        return self._only(node, 0, 1) and len(left) == len(right) > 2

    def _gemm(self, node: onnx.NodeProto) -> bool:
        added = self.shape(node.input[2]) if len(node.input) > 2 else ()
        same = len(added) < 2 or added[0] == 1
        return same and self._only(node, 0) and not _attribute(node, "transA", 0)

    def _gathers(self, node: onnx.NodeProto) -> bool:
        axis = int(_attribute(node, "axis", 0)) % max(1, len(self.shape(node.input[0])))
        return self._only(node, 1) if axis == 0 else self._only(node, 0)

    def _slices(self, node: onnx.NodeProto) -> bool:
        constant = self.survey.constants.get(node.input[3]) if len(node.input) > 3 else None
        rank = len(self.shape(node.input[0]))
        return self._only(node, 0) and constant is not None and all(a % rank > 0 for a in constant.tolist())


_RULES: Mapping[str, Callable[[_KnownRows, onnx.NodeProto], bool]] = {
    "Flatten": lambda _, node: int(_attribute(node, "axis", 1)) == 1,
    "Gather": _KnownRows._gathers,
    "Gemm": _KnownRows._gemm,
    "MatMul": _KnownRows._multiplies,
    # Rows stay whole: the sizes after the first are a row's own.
    "Reshape": lambda known, node: node.input[0] in known.rows,
    "RoiAlign": lambda known, node: known._only(node, 1, 2),
    "Slice": _KnownRows._slices,
    "Transpose": lambda _, node: list(_attribute(node, "perm", []))[:1] == [0],
    **dict.fromkeys(
        _REDUCTIONS | {"Squeeze", "Unsqueeze"},
        _KnownRows._changes_axes,
    ),
}


def _attribute(node: onnx.NodeProto, name: str, default: Any) -> Any:
    found = next((a for a in node.attribute if a.name == name), None)
    return default if found is None else helper.get_attribute_value(found)
