"""A small builder of ONNX graphs: nodes, weights and constants under readable names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Shape = Sequence[int | str]


class GraphBuilder:
    """Collects nodes in the order they are made; every method gives the name of the value it makes.

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
        """A float32 scalar, shared by all who use the same value."""
        return self.constant(f"const/{value:.9g}", np.array(value, np.float32))

    def integers(self, *values: int) -> str:
        """An int64 vector, shared by all who use the same values."""
        return self.constant(f"const/[{','.join(map(str, values))}]", np.array(values, np.int64))

    def index(self, value: int) -> str:
        """An int64 scalar, which makes Gather drop the axis it picks from."""
        return self.constant(f"const/at{value}", np.array(value, np.int64))

    def model(
        self,
        name: str,
        inputs: Mapping[str, Shape],
        outputs: Mapping[str, Shape],
        *,
        opset: int,
        ir_version: int,
    ) -> onnx.ModelProto:
        """The model so far; inputs and outputs are float32 of the shapes given."""
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
