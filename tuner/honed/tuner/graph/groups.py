"""Finding twins: nodes that do the same with the same weights on different values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import onnx

from .graph import Graph
from .stacking import ELEMENTWISE, Role, roles

# Of stacked values: 128 MiB of float32, which every device allocates. Launches do not matter beyond.
_MOST_ELEMENTS = 1 << 25
Key = tuple[object, ...]
Places = dict[str, tuple[int, int]]  # of a value: the number of its group, and which twin makes it


@dataclass(frozen=True, slots=True)
class Group:
    """Twins, in the order in which they are stacked, and the roles of their operands."""

    nodes: tuple[onnx.NodeProto, ...]
    roles: tuple[Role, ...]

    def operand(self, position: int) -> tuple[str, ...]:
        """What each twin reads there."""
        return tuple(node.input[position] for node in self.nodes)

    @property
    def values(self) -> tuple[str, ...]:
        """What each twin makes."""
        return tuple(node.output[0] for node in self.nodes)


def places(groups: Sequence[Group]) -> Places:
    """Where each value of twins is."""
    return {v: (n, at) for n, group in enumerate(groups) for at, v in enumerate(group.values)}


@dataclass(slots=True)
class _GroupFinder:
    graph: Graph
    groups: list[Group] = field(default_factory=list)
    member: Places = field(default_factory=dict)

    def key(self, node: onnx.NodeProto, given: tuple[Role, ...], *, exact: bool) -> Key:
        """What twins have in common. Constants of elementwise nodes may differ where it need not be exact."""
        attrs = sorted(a.SerializeToString(deterministic=True) for a in node.attribute)
        parts = [self._part(node, n, role, exact=exact) for n, role in zip(node.input, given, strict=True)]
        return node.op_type, tuple(attrs), self.graph.types[node.output[0]], *parts

    def _part(self, node: onnx.NodeProto, name: str, role: Role, *, exact: bool) -> Key:
        if name in self.graph.constants:
            kind = self.graph.types[name]
            differs = not exact and role is Role.BROADCAST and len(kind.shape) > 0
            return ("like", kind) if differs else ("constant", self.graph.digest(name))
        if role is Role.SAME:
            return "value", name
        if name in self.member:
            return "group", self.member[name][0]
        return "type", self.graph.types[name]

    def add(self, nodes: list[onnx.NodeProto], given: tuple[Role, ...]) -> None:
        """Group nodes of one key where they follow twins, or where equal weights say that they are some."""
        elements = len(nodes) * math.prod(self.graph.shape(nodes[0].output[0]))
        if len(nodes) < 2 or elements > _MOST_ELEMENTS:
            return
        if any(name in self.member for name in nodes[0].input):
            nodes = self._ordered(nodes)
        elif not _weighs(self.graph, nodes[0]) or len({node.input[0] for node in nodes}) < len(nodes):
            nodes = []
        if not nodes:
            return
        for place, node in enumerate(nodes):
            self.member[node.output[0]] = len(self.groups), place
        self.groups.append(Group(tuple(nodes), given))

    def _ordered(self, nodes: list[onnx.NodeProto]) -> list[onnx.NodeProto]:
        """Nodes in the order of the twins that they follow, by an operand of which each reads another one.

        None of them where there is no such operand, or it has more twins.
        """
        for position, name in enumerate(nodes[0].input):
            given = [self.member.get(node.input[position]) for node in nodes]
            if name in self.member and len(set(given)) == len(self.groups[self.member[name][0]].nodes):
                by_place = {at: node for at, node in zip(given, nodes, strict=True) if at is not None}
                if len(by_place) == len(nodes):
                    return [by_place[at] for at in sorted(by_place)]
        return []


def find_groups(graph: Graph) -> list[Group]:
    """Twins, every group after those it reads.

    Only nodes as far from the inputs as each other are grouped, so that no twin can depend on another and the
    graph of groups has no cycle.
    """
    finder = _GroupFinder(graph)
    for level in _levels(graph):
        stackable = [(node, given) for node in level if (given := roles(graph, node)) is not None]
        for exact in (True, False):
            buckets: dict[Key, list[tuple[onnx.NodeProto, tuple[Role, ...]]]] = {}
            for node, given in stackable:
                if node.output[0] not in finder.member and (exact or node.op_type in ELEMENTWISE):
                    buckets.setdefault(finder.key(node, given, exact=exact), []).append((node, given))
            for bucket in buckets.values():
                finder.add([node for node, _ in bucket], bucket[0][1])
    return finder.groups


def _levels(graph: Graph) -> Iterator[list[onnx.NodeProto]]:
    """The nodes by the length of the longest path that leads to them."""
    depth: dict[str, int] = {}
    levels: list[list[onnx.NodeProto]] = []
    for node in graph.nodes:
        at = max((depth[name] + 1 for name in node.input if name in depth), default=0)
        depth[node.output[0]] = at
        if at == len(levels):
            levels.append([])
        levels[at].append(node)
    yield from levels


def _weighs(graph: Graph, node: onnx.NodeProto) -> bool:
    """Whether a node multiplies by weights."""
    return node.op_type in ("MatMul", "Conv") and node.input[1] in graph.constants
