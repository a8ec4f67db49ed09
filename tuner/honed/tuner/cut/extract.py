"""Models of the parts of a model, out of the nodes of each."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import onnx
from onnx import helper, numpy_helper

from honed.tuner.frontend.partnodes import PART_DOMAIN
from honed.tuner.frontend.signature import CARRIED, TensorSpec
from honed.tuner.frontend.survey import NodeSurvey, SurveyedNode


class Extractor:
    """Makes models of some nodes of one model, which keep its opsets and functions."""

    def __init__(self, model: onnx.ModelProto, found: NodeSurvey) -> None:
        self._model = model
        self._survey = found
        self._initial = {tensor.name: tensor for tensor in model.graph.initializer}
        self._sparse = {tensor.values.name: tensor for tensor in model.graph.sparse_initializer}

    def constant(self, name: str) -> bool:
        """Whether a value is known when compiling, or kept in the file."""
        return name in self._survey.constants or name in self._initial or name in self._sparse

    def part(
        self, nodes: Sequence[SurveyedNode], inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
    ) -> onnx.ModelProto:
        """The nodes alone."""
        return self._made([one.node for one in nodes], inputs, outputs, self._read(nodes))

    def without(self, behind: Collection[int], outputs: Sequence[TensorSpec]) -> onnx.ModelProto:
        """The model as it was given without some of its nodes, by number, and without what only they need.

        What is known of their values while compiling, as a shape is, is a constant where it was a node.
        """
        gone: set[str] = set()
        for one in self._survey.nodes:
            if one.index in behind or (one.folded and not gone.isdisjoint(one.reads)):
                gone.update(one.node.output)
        needed = {spec.name for spec in outputs}
        kept: list[SurveyedNode] = []
        for one in reversed(self._survey.nodes):
            if gone.isdisjoint(one.node.output) and not needed.isdisjoint(one.node.output):
                kept.append(one)
                needed.update(one.reads)
        kept.reverse()
        known = gone & needed & self._survey.constants.keys()
        model = self._made([one.node for one in kept], (), outputs, known)
        model.graph.input.extend(self._model.graph.input)
        model.graph.initializer.extend(t for name, t in self._initial.items() if name in needed)
        model.graph.sparse_initializer.extend(t for name, t in self._sparse.items() if name in needed)
        return model

    def program(
        self,
        stretches: Sequence[Sequence[SurveyedNode] | tuple[int, Sequence[str], Sequence[str]]],
        outputs: Sequence[TensorSpec],
    ) -> onnx.ModelProto:
        """Stretches of nodes, with a node for each part between them: its number, what it reads and makes."""
        nodes: list[onnx.NodeProto] = []
        read: set[str] = {spec.name for spec in outputs}
        for stretch in stretches:
            if isinstance(stretch, tuple):
                number, given, made = stretch
                nodes.append(
                    helper.make_node(
                        "Part", given, made, name=f"part {number}", domain=PART_DOMAIN, part=number
                    )
                )
            else:
                nodes += [one.node for one in stretch]
                read |= self._read(stretch)
        model = self._made(nodes, (), outputs, read)
        model.graph.input.extend(self._model.graph.input)
        return model

    def _read(self, nodes: Iterable[SurveyedNode]) -> set[str]:
        return {name for one in nodes for name in one.reads}

    def _made(
        self,
        nodes: Sequence[onnx.NodeProto],
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        read: Collection[str],
    ) -> onnx.ModelProto:
        graph = helper.make_graph(
            nodes, "part", [_info(spec) for spec in inputs], [_info(spec) for spec in outputs]
        )
        for name in sorted(read):
            if name in self._initial:
                graph.initializer.append(self._initial[name])
            elif name in self._sparse:
                graph.sparse_initializer.append(self._sparse[name])
            elif name in self._survey.constants:
                graph.initializer.append(numpy_helper.from_array(self._survey.constants[name], name))
        return helper.make_model(
            graph,
            opset_imports=self._model.opset_import,
            functions=self._model.functions,
            ir_version=self._model.ir_version,
            producer_name=self._model.producer_name,
            producer_version=self._model.producer_version,
        )


def _info(spec: TensorSpec) -> onnx.ValueInfoProto:
    return onnx.ValueInfoProto(name=spec.name, type=spec.type_proto())


def carried(spec: TensorSpec | None) -> bool:
    """Whether a value can be handed from part to part: a tensor of known sizes and of a type that travels."""
    return spec is not None and spec.dtype in CARRIED and all(size >= 0 for size in spec.shape)
