"""Merges twins, subgraphs of equal operators with equal weights on different values, along a batch axis.

Examples are the images of a matcher and the branches of a siamese network. Their values, each with a leading
axis of 1, are stacked along it, so a kernel of the merged graph replaces several. A node that reads a value
of its twin (as cross attention does) reads the stack with its parts in another order. Merging saves launches,
but adds those that stack and slice.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field

import numpy as np
import onnx

from .graph import ELEMENTWISE, REDUCTIONS, Graph, Shape, axis_of, perm_of

# Elements of stacked values: 128 MiB of float32, which every device allocates. Launches do not matter beyond.
_MOST_ELEMENTS = 1 << 25
# Operators for which a fusing compiler always launches a kernel.
LAUNCHED = REDUCTIONS | frozenset(
    {"MatMul", "Conv", "MaxPool", "AveragePool", "Softmax", "LogSoftmax", "LayerNormalization"}
    | {"ArgMax", "ArgMin"}
)
Key = tuple[object, ...]
# The number of the group and the number of the twin that makes it, by value
Places = dict[str, tuple[int, int]]


class Role(enum.Enum):
    """The role of an operand for twins."""

    STACKED = "stacked along axis 0, once for each twin"
    BROADCAST = "stacked where it differs, at the rank of the result"
    BATCHED = "stacked along axis 0, once for each twin; constants do not differ"
    SAME = "the same for all twins"


def roles(graph: Graph, node: onnx.NodeProto) -> tuple[Role, ...] | None:
    """Return the role of each operand; None where twins of the node cannot be merged.

    Where they can, the result has a leading axis of 1, and so has every operand that may be stacked (a
    BROADCAST or BATCHED operand once it has the rank of the result).
    """
    shape = graph.shape(node.output[0])
    if not shape or shape[0] != 1 or "" in node.input:
        return None
    count = len(node.input)
    if node.op_type in ELEMENTWISE:
        return (Role.BROADCAST,) * count
    if node.op_type == "MatMul":
        return _product(graph, node)
    if node.op_type == "Concat":
        return (Role.STACKED,) * count if axis_of(node, len(shape)) else None
    first = graph.shape(node.input[0]) if node.input else ()  # A node without inputs has none
    if first[:1] != (1,) or not _keeps_batch(graph, node):
        return None
    return (Role.STACKED, *(Role.SAME,) * (count - 1))


def _product(graph: Graph, node: onnx.NodeProto) -> tuple[Role, ...] | None:
    ranks = [len(graph.shape(name)) for name in node.input]
    if min(ranks) < 2:
        return None
    return (Role.STACKED, Role.SAME) if max(ranks) == 2 else (Role.BATCHED, Role.BATCHED)


def _keeps_batch(graph: Graph, node: onnx.NodeProto) -> bool:
    """Return whether an operator treats the parts of its first operand along axis 0 independently."""
    op, rank = node.op_type, len(graph.shape(node.input[0]))
    if op in ("Conv", "MaxPool", "AveragePool", "Reshape"):
        return True
    if op in ("Softmax", "LogSoftmax", "LayerNormalization", "ArgMax", "ArgMin", "Gather"):
        return axis_of(node, rank) > 0
    if op in REDUCTIONS:
        return all(axis % rank for axis in graph.numbers(node.input[1]))
    if op == "Transpose":
        return perm_of(node)[0] == 0
    if op == "Expand":
        return rank == len(graph.shape(node.output[0]))
    if op == "Slice":
        return all(axis % rank for axis in graph.numbers(node.input[3]))
    if op == "Pad":
        pads = graph.numbers(node.input[1])
        return pads[0] == pads[rank] == 0
    return False


@dataclass(frozen=True, slots=True)
class Group:
    """Twins, in the order in which they are stacked, and the roles of their operands."""

    nodes: tuple[onnx.NodeProto, ...]
    roles: tuple[Role, ...]

    def operand(self, position: int) -> tuple[str, ...]:
        """Return the operands of all twins at a position."""
        return tuple(node.input[position] for node in self.nodes)

    @property
    def values(self) -> tuple[str, ...]:
        """The values that the twins make."""
        return tuple(node.output[0] for node in self.nodes)


def places(groups: Sequence[Group]) -> Places:
    """Return the group and the place in it of each value of twins."""
    return {v: (n, at) for n, group in enumerate(groups) for at, v in enumerate(group.values)}


@dataclass(slots=True)
class _GroupFinder:
    graph: Graph
    groups: list[Group] = field(default_factory=list)
    member: Places = field(default_factory=dict)

    def key(self, node: onnx.NodeProto, roles: tuple[Role, ...], *, exact: bool) -> Key:
        """Return the properties that twins of a node share.

        Constants of elementwise nodes may differ unless `exact` is set.
        """
        attrs = sorted(a.SerializeToString(deterministic=True) for a in node.attribute)
        parts = [self._part(node, n, role, exact=exact) for n, role in zip(node.input, roles, strict=True)]
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

    def add(self, nodes: list[onnx.NodeProto], roles: tuple[Role, ...]) -> None:
        """Group nodes of one key where they follow twins, or where equal weights show that they are some."""
        elements = len(nodes) * math.prod(self.graph.shape(nodes[0].output[0]))
        if len(nodes) < 2 or elements > _MOST_ELEMENTS:
            return
        if any(name in self.member for name in nodes[0].input):
            nodes = self._order(nodes)
        elif not _weighs(self.graph, nodes[0]) or len({node.input[0] for node in nodes}) < len(nodes):
            nodes = []
        if not nodes:
            return
        for place, node in enumerate(nodes):
            self.member[node.output[0]] = len(self.groups), place
        self.groups.append(Group(tuple(nodes), roles))

    def _order(self, nodes: list[onnx.NodeProto]) -> list[onnx.NodeProto]:
        """Return nodes in the order of the twins that they follow.

        They follow by an operand of which each reads another twin. Returns no nodes where there is no such
        operand, or it has more twins.
        """
        for position, name in enumerate(nodes[0].input):
            given = [self.member.get(node.input[position]) for node in nodes]
            if name in self.member and len(set(given)) == len(self.groups[self.member[name][0]].nodes):
                by_place = {at: node for at, node in zip(given, nodes, strict=True) if at is not None}
                if len(by_place) == len(nodes):
                    return [by_place[at] for at in sorted(by_place)]
        return []


def find_groups(graph: Graph) -> list[Group]:
    """Return the groups of twins, each after those it reads.

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


def _levels(graph: Graph) -> list[list[onnx.NodeProto]]:
    """Return the nodes by the length of the longest path that leads to them."""
    depth: dict[str, int] = {}
    levels: dict[int, list[onnx.NodeProto]] = {}
    for node in graph.nodes:
        at = max((depth[name] + 1 for name in node.input if name in depth), default=0)
        depth[node.output[0]] = at
        levels.setdefault(at, []).append(node)
    return list(levels.values())


def _weighs(graph: Graph, node: onnx.NodeProto) -> bool:
    """Return whether a node multiplies by weights."""
    return node.op_type in ("MatMul", "Conv") and node.input[1] in graph.constants


_ELEMENTS = 1 << 18  # Elements that are copied in the time of a launch, 10 us at 200 GB/s
_MOST_LOOKED_AT = 1_000_000  # Groups examined in all trials of a region: seconds
_LONGEST = 8  # Groups that are dropped together at most, from an end of a region inwards


def worthwhile(graph: Graph, groups: Sequence[Group]) -> list[Group]:
    """Return the groups that save launches, in their order."""
    kept: set[int] = set()
    for region in _regions(groups):
        kept |= _trim(graph, groups, region)
    return [group for n, group in enumerate(groups) if n in kept]


def _regions(groups: Sequence[Group]) -> list[set[int]]:
    """Return the connected sets of groups: groups that read each other are in one set."""
    place = places(groups)
    region = {n: {n} for n in range(len(groups))}
    for n, group in enumerate(groups):
        for name in {name for node in group.nodes for name in node.input if name in place}:
            fewer, more = sorted((region[n], region[place[name][0]]), key=len)
            if fewer is not more:
                more |= fewer
                for member in fewer:
                    region[member] = more
    return list({id(found): found for found in region.values()}.values())


def _trim(graph: Graph, groups: Sequence[Group], region: set[int]) -> set[int]:
    """Return the region without the ends that do not pay; empty where nothing left saves launches."""
    best, most = set(region), _gain(graph, groups, region)
    trials = _MOST_LOOKED_AT // len(region)
    while trials > 0:
        cuts = _ends(groups, best)[:trials]
        gains = [_gain(graph, groups, best - cut) for cut in cuts]
        trials -= len(cuts)
        if max(gains, default=most) <= most:
            break
        most = max(gains)
        best = best - cuts[gains.index(most)]
    return best if most > 0 else set()


def _ends(groups: Sequence[Group], region: set[int]) -> list[set[int]]:
    """Return the groups at the borders of a region, and chains from there inwards."""
    place = places(groups)
    read = {
        n: {place[name][0] for node in groups[n].nodes for name in node.input if name in place} & region
        for n in region
    }
    reading: dict[int, set[int]] = {n: set() for n in region}
    for n, sources in read.items():
        for source in sources:
            reading[source].add(n)
    found: list[set[int]] = []
    for inwards, outwards in ((read, reading), (reading, read)):
        for n in region:
            if not outwards[n]:
                found += _chains(n, inwards, outwards)
    return found


def _chains(end: int, inwards: dict[int, set[int]], outwards: dict[int, set[int]]) -> list[set[int]]:
    chain, found = {end}, [{end}]
    while len(chain) < _LONGEST:
        following = {n for member in chain for n in inwards[member] if outwards[n] <= chain} - chain
        if not following:
            break
        chain = chain | following
        found.append(chain)
    return found


def _gain(graph: Graph, groups: Sequence[Group], region: set[int]) -> int:
    """Return the launches that the groups of a region save, less those that stack, swap and slice."""
    chosen = [groups[n] for n in sorted(region)]
    place = places(chosen)
    stacks: set[tuple[str, ...]] = set()
    single = {value for value in place if graph.leaves(value, place)}
    saved = 0
    for group in chosen:
        saved += (len(group.nodes) - 1) * (group.nodes[0].op_type in LAUNCHED)
        for position, role in enumerate(group.roles):
            names = group.operand(position)
            if is_shared(names, role):
                single.update(name for name in names if name in place)
            elif not _free(graph, chosen, place, names):
                stacks.add(names)
                if len({place[name][0] if name in place else -1 for name in names}) > 1:
                    single.update(name for name in names if name in place)
    copied = [name for names in stacks for name in names] + list(single)
    elements = sum(math.prod(graph.shape(name)) for name in copied)
    return saved - len(stacks) - len(single) - elements // _ELEMENTS


def is_shared(names: Sequence[str], role: Role) -> bool:
    """Return whether all twins read one value that need not be repeated."""
    return role is Role.SAME or (role is not Role.STACKED and len(set(names)) == 1)


def _free(graph: Graph, groups: Sequence[Group], place: Places, names: tuple[str, ...]) -> bool:
    """Return whether stacking operands costs nothing: they are stacked already, or are constants."""
    if names[0] in place and groups[place[names[0]][0]].values == names:
        return True
    return all(name in graph.constants for name in names)


def fuse_horizontally(graph: Graph) -> tuple[Graph, int]:
    """Return the graph with twins merged where that saves launches, and how many merged nodes there are."""
    groups = worthwhile(graph, find_groups(graph))
    if not groups:
        return graph, 0
    return _Merger(graph.copy(), groups, places(groups)).merge(), len(groups)


@dataclass(slots=True)
class _Merger:
    graph: Graph
    groups: list[Group]
    place: Places
    stacks: dict[tuple[str, ...], str] = field(default_factory=dict)
    made: list[onnx.NodeProto] = field(default_factory=list)

    def merge(self) -> Graph:
        for group in self.groups:
            first = group.values[0]
            kind = self.graph.types[first]
            self.stacks[group.values] = self.graph.unique(f"{first}/twins")
            self.graph.types[self.stacks[group.values]] = kind.along(0, len(group.nodes))
        for node in self.graph.nodes:
            number, twin = self.place.get(node.output[0], (-1, -1))
            if number < 0:
                self.made.append(node)
                continue
            group = self.groups[number]
            if twin == 0:
                self.made.append(self._merge(group))
            # The name of this twin's value serves readers of it alone; it is dropped without any.
            self.made.append(self.graph.slice(self.stacks[group.values], node.output[0], 0, twin, twin + 1))
        return self.graph.tidy(self.made)

    def _merge(self, group: Group) -> onnx.NodeProto:
        node = deepcopy(group.nodes[0])
        node.output[0] = node.name = self.stacks[group.values]
        rank = len(self.graph.shape(node.output[0]))
        for position, role in enumerate(group.roles):
            node.input[position] = self._operand(group.operand(position), role, rank)
        if node.op_type in ("Reshape", "Expand"):
            target = np.array(self.graph.shape(node.output[0]), np.int64)
            node.input[1] = self.graph.constant(target, f"{node.name}/shape")
        return node

    def _operand(self, names: tuple[str, ...], role: Role, rank: int) -> str:
        """Return the name of an operand for all twins."""
        if is_shared(names, role):
            return names[0]
        if role is Role.STACKED or len(self.graph.shape(names[0])) == rank:
            return self._stack(names)
        return self._align(names, rank)

    def _stack(self, names: tuple[str, ...]) -> str:
        """Return values with a leading axis of 1, stacked along it."""
        if names not in self.stacks:
            name = self.graph.unique(f"{names[0]}/stacked")
            kind = self.graph.types[names[0]]
            stacked = kind.along(0, len(names))
            if all(n in self.graph.constants for n in names):
                name = self.graph.constant(np.concatenate([self.graph.constants[n] for n in names]), name)
            elif (source := self._source(names)) is None:
                self.made.append(self.graph.node("Concat", names, name, stacked, axis=0))
            else:
                order = [self.place[n][1] for n in names]
                if order == list(range(len(source.nodes)))[::-1]:
                    self.made.append(self.graph.reverse(self.stacks[source.values], name, 0))
                else:
                    indices = self.graph.constant(np.array(order, np.int64), f"{name}/order")
                    given = (self.stacks[source.values], indices)
                    self.made.append(self.graph.node("Gather", given, name, stacked, axis=0))
            self.stacks[names] = name
        return self.stacks[names]

    def _source(self, names: tuple[str, ...]) -> Group | None:
        """Return the group that makes all of these values; None where there is no such group."""
        found = {self.place[name][0] if name in self.place else -1 for name in names}
        number = found.pop()
        return self.groups[number] if number >= 0 and not found else None

    def _align(self, names: tuple[str, ...], rank: int) -> str:
        """Return values of a lower rank stacked for broadcasting: with leading axes of 1."""
        shape = self.graph.shape(names[0])
        ones = (1,) * (rank - len(shape))
        if shape[:1] == (1,):
            stacked = self._stack(names)
            return self._reshape(stacked, (len(names), *ones, *shape[1:]))
        return self._stack(tuple(self._reshape(name, (*ones, *shape)) for name in names))

    def _reshape(self, name: str, shape: Shape) -> str:
        output = self.graph.unique(f"{name}/aligned")
        if name in self.graph.constants:
            return self.graph.constant(self.graph.constants[name].reshape(shape), output)
        self.made.append(self.graph.reshape(name, output, shape))
        return output
