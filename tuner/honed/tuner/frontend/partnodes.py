"""Nodes that stand for parts of a model which the CPU engine runs.

In the graph that is given one node of PART_DOMAIN stands for a part, with its number as attribute `part`. In
the normalised graph, whose nodes have one output each, there is one of PART_OP for each output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx
from onnx import helper

from .builder import Builder
from .signature import TensorSpec
from .values import Item, NodeRefused, Value

PART_DOMAIN = "honed.cpu_part"  # a file's own nodes of this name are refused, as of any that is unknown
PART_OP = "CpuPart"
Parts = Mapping[int, Sequence[TensorSpec]]  # the outputs of each part
NO_PARTS: Parts = {}


def part_values(
    builder: Builder, node: onnx.NodeProto, inputs: Sequence[Item | None], parts: Parts
) -> list[Item]:
    """The outputs of a part."""
    given = [item for item in inputs if isinstance(item, Value)]
    if len(given) != len(inputs):
        raise NodeRefused("what it is given is not compiled")
    number = next(int(a.i) for a in node.attribute if a.name == "part")
    found: list[Item] = []
    for index, (name, spec) in enumerate(zip(node.output, parts[number], strict=True)):
        made = helper.make_node(
            PART_OP,
            [value.name for value in given],
            [builder.unique(f"{name}/part")],
            name=name,
            part=number,
            output=index,
            **({"shape": list(spec.shape)} if spec.shape else {}),
        )
        found.append(builder.opaque(made, spec.numpy, spec.shape))
    return found
