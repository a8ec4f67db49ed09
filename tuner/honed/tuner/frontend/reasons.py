"""Why a model is refused: every reason, with the operator, its opset and the nodes it concerns."""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx

from honed.onnxfile.reading import shown
from honed.protocol.errors import ModelRefused

SHOWN_NODES = 3
# Why an operator without any rule is refused.
UNSUPPORTED = "the operator is not compiled"


@dataclass(slots=True)
class Reasons:
    """Refusals gathered over a whole graph, so that the user sees all of them at once."""

    general: list[str] = field(default_factory=list)
    _nodes: dict[tuple[str, str, int, str], list[str]] = field(default_factory=dict)

    def add(self, node: onnx.NodeProto, domain: str, opset: int, why: str) -> None:
        """Note that a node cannot be compiled."""
        name = shown(node.name or next((o for o in node.output if o), node.op_type), 80)
        names = self._nodes.setdefault((shown(node.op_type, 80), shown(domain, 80), opset, shown(why)), [])
        if name not in names:
            names.append(name)

    def count(self) -> int:
        """How many nodes and other things were noted."""
        return len(self.general) + sum(map(len, self._nodes.values()))

    def whys(self) -> tuple[str, ...]:
        """One clause for each kind of node, without the nodes and without what to do about them."""
        return tuple(f"{op}: {why.partition('; ')[0]}" for op, _, _, why in self._nodes)

    def texts(self) -> tuple[str, ...]:
        """One sentence for each reason."""
        found = [shown(text) for text in self.general]
        for (op, domain, opset, why), names in self._nodes.items():
            listed = ", ".join(names[:SHOWN_NODES]) + (", ..." if len(names) > SHOWN_NODES else "")
            nodes = f"node {listed}" if len(names) == 1 else f"{len(names)} nodes: {listed}"
            found.append(f"{op} ({domain or 'ai.onnx'}, opset {opset}; {nodes}): {why}")
        return tuple(found)

    def check(self) -> None:
        """Raise ModelRefused where there is any."""
        texts = self.texts()
        if len(texts) == 1:
            raise ModelRefused(f"the model cannot be compiled: {texts[0]}", texts)
        if texts:
            operators = ", ".join(dict.fromkeys(op for op, _, _, _ in self._nodes))
            named = f" (operators {operators})" if operators else ""
            raise ModelRefused(f"the model cannot be compiled, for {len(texts)} reasons{named}", texts)
