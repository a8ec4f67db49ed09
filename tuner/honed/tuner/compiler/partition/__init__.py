"""Partitions a model that cannot be compiled whole into a compiled program and parts for the CPU engine."""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import onnx
from onnx import helper, numpy_helper

from honed.runtime.compiled.parts import MAX_PARTS, MAX_REASONS
from honed.runtime.engines import HIGHEST
from honed.tuner.frontend.signature import CARRIED, StaticTensorSpec
from honed.tuner.frontend.survey import BEHIND, Learnt, NodeSurvey, SurveyedNode, survey
from honed.tuner.frontend.values import NodeRefused, numpy_dtype
from honed.tuner.frontend.walk import PART_DOMAIN, Parts
from honed.tuner.verify.graphs import bind_shapes

from . import valuetypes
from .divide import (
    OPEN,
    WORTH,
    PartitionNode,
    PartitionThresholds,
    StageAssignment,
    divide,
    elements,
    flops,
    with_less_to_hand_over,
)
from .rows import by_rows


class Extractor:
    """A builder of models from some nodes of one model; they keep its opsets and functions."""

    def __init__(self, model: onnx.ModelProto, surveyed: NodeSurvey) -> None:
        self._model = model
        self._survey = surveyed
        self._initial = {tensor.name: tensor for tensor in model.graph.initializer}
        self._sparse = {tensor.values.name: tensor for tensor in model.graph.sparse_initializer}

    def constant(self, name: str) -> bool:
        """Return whether a value is known when compiling, or stored in the file."""
        return name in self._survey.constants or name in self._initial or name in self._sparse

    def spec(self, name: str) -> StaticTensorSpec:
        """Return the type of a value, or the declared type of an output that inference does not know.

        Declared sizes are not trusted and become -1. Raises NodeRefused where the rank is unknown, or where
        honed does not carry the type.
        """
        known = self._survey.types.get(name)
        if known is None:
            declared = next((v.type.tensor_type for v in self._model.graph.output if v.name == name), None)
            if declared is None or not declared.HasField("shape"):
                raise NodeRefused(f"how many dimensions {name[:80]!r} has is not known")
            # Declared sizes are not trusted: files may state those of other inputs.
            open_ = (-1,) * len(declared.shape.dim)
            known = StaticTensorSpec(name=name, dtype=numpy_dtype(declared.elem_type).name, shape=open_)
        if known.dtype not in CARRIED:
            raise NodeRefused(f"{name[:80]!r} is {known.dtype}, which does not travel")
        return known

    def part(
        self, nodes: Sequence[SurveyedNode], elsewhere: Container[str], *, sized: bool
    ) -> CpuPartitionModel:
        """Return a partition of these nodes alone; `elsewhere` are the values that other nodes read."""
        made = dict.fromkeys(name for one in nodes for name in one.node.output if name)
        given = dict.fromkeys(name for one in nodes for name in one.reads)
        taken = tuple(self.spec(name) for name in given if name not in made and not self.constant(name))
        gives = tuple(self.spec(name) for name in made if name in elsewhere)
        model = self._build([one.node for one in nodes], taken, gives, given)
        sized = sized and any(-1 in spec.shape for spec in taken)
        whys = sorted(dict.fromkeys(one.why for one in nodes if one.why), key=lambda why: why == BEHIND)
        return CpuPartitionModel(
            model=model,
            inputs=taken,
            outputs=gives,
            nodes=len(nodes),
            flops=sum(flops(one.node, self._survey.observed) for one in nodes),
            why=tuple(whys[:MAX_REASONS]),
            sized=sized,
            by_rows=sized and by_rows(model, taken, gives),
        )

    def without(self, tail: Collection[int], outputs: Sequence[StaticTensorSpec]) -> onnx.ModelProto:
        """Return the original model without some of its nodes, by number, and nodes that only they need.

        A value that is known while compiling, such as a shape, becomes a constant in place of its node.
        """
        gone: set[str] = set()
        for one in self._survey.nodes:
            if one.index in tail or (one.folded and not gone.isdisjoint(one.reads)):
                gone.update(one.node.output)
        needed = {spec.name for spec in outputs}
        kept: list[SurveyedNode] = []
        for one in reversed(self._survey.nodes):
            if gone.isdisjoint(one.node.output) and not needed.isdisjoint(one.node.output):
                kept.append(one)
                needed.update(one.reads)
        kept.reverse()
        known = gone & needed & self._survey.constants.keys()
        model = self._build([one.node for one in kept], (), outputs, known)
        model.graph.input.extend(self._model.graph.input)
        model.graph.initializer.extend(t for name, t in self._initial.items() if name in needed)
        model.graph.sparse_initializer.extend(t for name, t in self._sparse.items() if name in needed)
        return model

    def program(
        self,
        stretches: Sequence[Sequence[SurveyedNode] | tuple[int, Sequence[str], Sequence[str]]],
        outputs: Sequence[StaticTensorSpec],
    ) -> onnx.ModelProto:
        """Return a model of stretches of nodes, with one node for each partition between them.

        The node holds the partition's number, its inputs and its outputs.
        """
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
                read |= _read(stretch)
        read -= {spec.name for spec in self._survey.inputs}  # Without elements they are constants, too
        model = self._build(nodes, (), outputs, read)
        model.graph.input.extend(self._model.graph.input)
        return model

    def _build(
        self,
        nodes: Sequence[onnx.NodeProto],
        inputs: Sequence[StaticTensorSpec],
        outputs: Sequence[StaticTensorSpec],
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


def _read(nodes: Iterable[SurveyedNode]) -> set[str]:
    return {name for one in nodes for name in one.reads}


def _info(spec: StaticTensorSpec) -> onnx.ValueInfoProto:
    return onnx.ValueInfoProto(name=spec.name, type=spec.type_proto())


def is_carried(spec: StaticTensorSpec | None) -> bool:
    """Return whether partitions can exchange a value: a tensor of known sizes, of a type honed carries."""
    return spec is not None and spec.dtype in CARRIED and all(size >= 0 for size in spec.shape)


MAX_NODES = 20_000  # Dividing more may take minutes


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuPartitionModel:
    """A partition for the CPU engine. Sizes that depend on the data are -1.

    `sized`: such sizes alone keep it from being compiled. `by_rows`: rows are independent, so computing more
    rows than there are does no harm.
    """

    model: onnx.ModelProto
    inputs: tuple[StaticTensorSpec, ...]
    outputs: tuple[StaticTensorSpec, ...]
    nodes: int
    flops: int
    why: tuple[str, ...]
    sized: bool = False
    by_rows: bool = False

    @property
    def names(self) -> tuple[list[str], list[str]]:
        """The names of the partition's inputs and outputs."""
        return [spec.name for spec in self.inputs], [spec.name for spec in self.outputs]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionedModel:
    """A partitioned model.

    `program` is the compiled model, with a node of PART_DOMAIN for each partition except those in `tail`,
    which run in turn after it on its outputs and the model's inputs. `source` is the same model with the
    file's operators, for the reference. `outputs` are the model's. `nodes` and `flops` count what is
    compiled. ONNX Runtime optimises the partitions to `level`.
    """

    program: onnx.ModelProto
    source: onnx.ModelProto
    parts: tuple[CpuPartitionModel, ...]
    tail: tuple[int, ...]
    outputs: tuple[StaticTensorSpec, ...]
    nodes: int
    flops: int
    level: str = HIGHEST

    @property
    def ends(self) -> tuple[str, ...]:
        """The names of the model's outputs that tail partitions compute."""
        made = {spec.name for n in self.tail for spec in self.parts[n].outputs}
        return tuple(spec.name for spec in self.outputs if spec.name in made)

    @property
    def between(self) -> Parts:
        """The outputs of the partitions between compiled steps, by number."""
        return {n: part.outputs for n, part in enumerate(self.parts) if n not in self.tail}

    @property
    def share(self) -> float:
        """The compiled share of the model's work, 0 to 1."""
        return self.flops / max(1, self.flops + sum(part.flops for part in self.parts))

    @property
    def sized_share(self) -> float:
        """The share of the work that is compiled once the data-dependent sizes are known, 0 to 1."""
        left = sum(part.flops for part in self.parts if not part.sized)
        return 1 - left / max(1, self.flops + sum(part.flops for part in self.parts))


def partition_model(
    model: onnx.ModelProto,
    shapes: Mapping[str, tuple[int, ...]],
    worth: PartitionThresholds = WORTH,
    unbuilt: Mapping[str, str] = MappingProxyType({}),
) -> PartitionedModel | str:
    """Cut a checked model into the fewest partitions worth having, or return why it is not cut.

    The reason is a clause, and "" where the model's inputs are the reason. `unbuilt` is as in `survey`.
    """
    found = survey(model, shapes, unbuilt=unbuilt)
    if found is None:
        return ""
    refused = {name for one in found.nodes if one.why for name in one.node.output if name}
    learnt: Mapping[str, Learnt] = {}
    if refused:
        bound = bind_shapes(model, {spec.name: spec.shape for spec in found.inputs})
        learnt = valuetypes.ask(bound, refused)
        found = survey(model, shapes, learnt, unbuilt=unbuilt) or found
    outputs = tuple(v.name for v in model.graph.output)
    nodes = _select_needed(found.nodes, outputs)
    if len(nodes) > MAX_NODES:
        return f"it is not cut in parts: it has {len(nodes)} nodes, and {MAX_NODES} are looked at"
    units, tied = _units(nodes, found)
    nbytes = {name: _nbytes(found.types.get(name)) for unit in units for name in unit.makes}
    light = {n for n, one in enumerate(nodes) if units[n].work <= elements(one.node, found.observed)}
    divided = with_less_to_hand_over(units, divide(units, tied, outputs, worth), light, nbytes, outputs)
    last = [n for n, stage in enumerate(divided.stages) if stage == divided.tail]
    behind = (
        _assign_last_stages(model, shapes, learnt, [nodes[n] for n in last], outputs, worth) if last else []
    )
    try:
        try:
            made = _cut(model, found, nodes, outputs, *_place(divided, last, behind))
        except NodeRefused:
            made = _cut(model, found, nodes, outputs, *_place(divided, last, [1] * len(last)))
    except NodeRefused as refusal:
        return f"it is not cut in parts: {refusal}"
    if made.sized_share < worth.whole:
        return f"it is not cut in parts: {made.share:.1%} of its operations would be compiled, too few to pay"
    return made


def _place(divided: StageAssignment, last: Sequence[int], stages: Sequence[int]) -> tuple[Sequence[int], int]:
    """Place the nodes of the last partition in stages of their own; the lowest stage takes its place.

    Returns the stage of each node, and the first stage that runs after the compiled program.
    """
    placed = list(divided.stages)
    begin = max(placed, default=0) + 1  # The last partition's stage is odd, and the highest
    for n, stage in zip(last, stages, strict=True):
        placed[n] = begin + stage
    return placed, begin


def _nbytes(spec: StaticTensorSpec | None) -> int:
    return math.prod(spec.shape) * spec.numpy.itemsize if is_carried(spec) and spec else 0


def _select_needed(nodes: Sequence[SurveyedNode], outputs: Sequence[str]) -> list[SurveyedNode]:
    """Return the nodes that an output depends on; nodes known while compiling are left out."""
    wanted, kept = set(outputs), []
    for one in reversed(nodes):
        if not one.folded and not wanted.isdisjoint(one.node.output):
            kept.append(one)
            wanted.update(one.reads)
    return kept[::-1]


def _units(nodes: Sequence[SurveyedNode], surveyed: NodeSurvey) -> tuple[list[PartitionNode], set[str]]:
    """Return the nodes as units to divide, judged by a survey, and the values that cannot be transferred."""
    able = {one.index: not one.why for one in surveyed.nodes}
    units = [
        PartitionNode(
            reads=one.reads,
            makes=tuple(name for name in one.node.output if name),
            able=able[one.index],
            work=flops(one.node, surveyed.observed),
        )
        for one in nodes
    ]
    made = {name for unit in units for name in unit.makes}
    return units, {n for n in made if not is_carried(surveyed.types.get(n)) and n not in surveyed.constants}


def _assign_last_stages(
    model: onnx.ModelProto,
    shapes: Mapping[str, tuple[int, ...]],
    learnt: Mapping[str, Learnt],
    last: Sequence[SurveyedNode],
    outputs: Collection[str],
    worth: PartitionThresholds,
) -> list[int]:
    """Return the stage of each node of the last partition; the CPU engine always runs odd stages.

    Even stages have enough work and could be compiled if the sizes that depend on the data were known. All
    are 1 where there is none. Two sets of sizes are tried, and the one that compiles more is used: made-up
    sizes, which the estimates of work assume, and those of a run, which are consistent with each other.
    """
    found = [[1] * len(last)]
    for as_observed in (False, True):
        known = survey(model, shapes, learnt, assumed=OPEN, as_observed=as_observed)
        if known is not None:
            units, tied = _units(last, known)
            found.append(_paying(units, divide(units, tied, outputs, worth).stages, worth))
    return max(found, key=lambda stages: sum(stage % 2 == 0 for stage in stages))


def _paying(units: Sequence[PartitionNode], stages: Sequence[int], worth: PartitionThresholds) -> list[int]:
    """Return the stages, or stage 1 for all nodes where what could be compiled has too little work."""
    total = sum(unit.work for unit in units)
    work: dict[int, int] = {}
    for unit, stage in zip(units, stages, strict=True):
        if stage % 2 == 0:
            work[stage] = work.get(stage, 0) + unit.work
    least = max(worth.share * total, worth.work)
    if not work or min(work.values()) < least:
        return [1] * len(stages)
    return list(stages)


def _cut(
    model: onnx.ModelProto,
    surveyed: NodeSurvey,
    nodes: Sequence[SurveyedNode],
    outputs: Sequence[str],
    placed: Sequence[int],
    tail: int,
) -> PartitionedModel:
    """Cut a model by its nodes' stages; the CPU engine runs the odd ones, and all from `tail` on.

    An even one from `tail` on could be compiled if its sizes were known.
    """
    extractor = Extractor(model, surveyed)
    stages: dict[int, list[SurveyedNode]] = {}
    for one, stage in sorted(zip(nodes, placed, strict=True), key=lambda pair: pair[1]):
        stages.setdefault(stage, []).append(one)
    odd = [stage for stage in stages if stage % 2 == 1 or stage >= tail]
    if len(odd) > MAX_PARTS or len(odd) == len(stages):
        raise NodeRefused("no stretch of it that can be compiled has work that pays")
    parts: dict[int, CpuPartitionModel] = {}
    for stage in odd:
        others = (_read(ones) for other, ones in stages.items() if other != stage)
        elsewhere = {*outputs}.union(*others)
        parts[stage] = extractor.part(stages[stage], elsewhere, sized=stage % 2 == 0)
    behind = [stage for stage in odd if stage >= tail]
    specs = tuple(extractor.spec(name) for name in outputs)
    gives = _compiled_outputs(surveyed, specs, [parts[stage] for stage in behind])
    given = extractor.without({one.index for stage in behind for one in stages[stage]}, gives)
    program = given
    if len(odd) > len(behind) or not odd:
        stretches = [
            (odd.index(stage), *parts[stage].names) if stage in parts else stages[stage]
            for stage in stages
            if stage not in behind
        ]
        program = extractor.program(stretches, gives)
    compiled = [one for stage, those in stages.items() if stage not in parts for one in those]
    return PartitionedModel(
        program=program,
        source=given,
        parts=tuple(parts.values()),
        tail=tuple(odd.index(stage) for stage in behind),
        outputs=specs,
        nodes=len(compiled),
        flops=sum(flops(one.node, surveyed.observed) for one in compiled),
    )


def _compiled_outputs(
    surveyed: NodeSurvey, outputs: Sequence[StaticTensorSpec], tail: Sequence[CpuPartitionModel]
) -> tuple[StaticTensorSpec, ...]:
    """Return the outputs of the compiled program: the model's own, and values that tail partitions read."""
    by_parts = {spec.name for part in tail for spec in part.outputs}
    elsewhere = by_parts | {spec.name for spec in surveyed.inputs}
    gives = {spec.name: spec for spec in outputs if spec.name not in by_parts}
    gives |= {spec.name: spec for part in tail for spec in part.inputs if spec.name not in elsewhere}
    if not gives:
        raise NodeRefused("nothing that can be compiled of it is used by the rest")
    return tuple(gives.values())
