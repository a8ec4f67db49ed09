"""Twins: subgraphs that do the same with the same weights on different values become one, with a batch axis.

The images of a matcher, the branches of a siamese network. Their values, each with a leading axis of 1, are
stacked along it, so a kernel of the merged graph does what several did. What reads a value of its twin (as
cross attention does) reads the stack with its parts in another order.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx

from .graph import Graph, Shape, TensorType, copied
from .groups import Group, Places, find_groups, places
from .stacking import Role
from .worth import shared, worthwhile


def merge_twins(graph: Graph) -> tuple[Graph, int]:
    """The graph with twins merged where that saves launches, and how many nodes it has in place of twins."""
    groups = worthwhile(graph, find_groups(graph))
    if not groups:
        return graph, 0
    return _Merger(graph.copy(), groups, places(groups)).merged(), len(groups)


@dataclass(slots=True)
class _Merger:
    graph: Graph
    groups: list[Group]
    place: Places
    stacks: dict[tuple[str, ...], str] = field(default_factory=dict)
    made: list[onnx.NodeProto] = field(default_factory=list)

    def merged(self) -> Graph:
        for group in self.groups:
            first = group.values[0]
            kind = self.graph.types[first]
            self.stacks[group.values] = self.graph.unique(f"{first}/twins")
            self.graph.types[self.stacks[group.values]] = TensorType(kind.elem, _times(kind.shape, group))
        for node in self.graph.nodes:
            number, twin = self.place.get(node.output[0], (-1, -1))
            if number < 0:
                self.made.append(node)
                continue
            group = self.groups[number]
            if twin == 0:
                self.made.append(self._merge(group))
            # Under its own name, for what reads this twin's value alone; dropped where nothing does.
            self.made.append(self.graph.slice(self.stacks[group.values], node.output[0], 0, twin, twin + 1))
        return self.graph.tidied(self.made)

    def _merge(self, group: Group) -> onnx.NodeProto:
        node = copied(group.nodes[0])
        node.output[0] = node.name = self.stacks[group.values]
        rank = len(self.graph.shape(node.output[0]))
        for position, role in enumerate(group.roles):
            node.input[position] = self._operand(group.operand(position), role, rank)
        if node.op_type in ("Reshape", "Expand"):
            target = np.array(self.graph.shape(node.output[0]), np.int64)
            node.input[1] = self.graph.constant(target, f"{node.name}/shape")
        return node

    def _operand(self, names: tuple[str, ...], role: Role, rank: int) -> str:
        """The name of an operand for all twins."""
        if shared(names, role):
            return names[0]
        if role is Role.STACKED or len(self.graph.shape(names[0])) == rank:
            return self._stack(names)
        return self._aligned(names, rank)

    def _stack(self, names: tuple[str, ...]) -> str:
        """Values with a leading axis of 1, one after the other along it."""
        if names not in self.stacks:
            name = self.graph.unique(f"{names[0]}/stacked")
            kind = self.graph.types[names[0]]
            stacked = TensorType(kind.elem, (len(names), *kind.shape[1:]))
            if all(n in self.graph.constants for n in names):
                name = self.graph.constant(np.concatenate([self.graph.constants[n] for n in names]), name)
            elif (source := self._source(names)) is None:
                self.made.append(self.graph.node("Concat", names, name, stacked, axis=0))
            else:
                order = [self.place[n][1] for n in names]
                if order == list(range(len(source.nodes)))[::-1]:
                    self.made.append(self.graph.reversed(self.stacks[source.values], name, 0))
                else:
                    indices = self.graph.constant(np.array(order, np.int64), f"{name}/order")
                    given = (self.stacks[source.values], indices)
                    self.made.append(self.graph.node("Gather", given, name, stacked, axis=0))
            self.stacks[names] = name
        return self.stacks[names]

    def _source(self, names: tuple[str, ...]) -> Group | None:
        """The group that makes all of them."""
        found = {self.place[name][0] if name in self.place else -1 for name in names}
        number = found.pop()
        return self.groups[number] if number >= 0 and not found else None

    def _aligned(self, names: tuple[str, ...], rank: int) -> str:
        """Values of a lower rank stacked as broadcasting sees them: with leading axes of 1."""
        shape = self.graph.shape(names[0])
        ones = (1,) * (rank - len(shape))
        if shape[:1] == (1,):
            stacked = self._stack(names)
            return self._reshaped(stacked, (len(names), *ones, *shape[1:]))
        return self._stack(tuple(self._reshaped(name, (*ones, *shape)) for name in names))

    def _reshaped(self, name: str, shape: Shape) -> str:
        output = self.graph.unique(f"{name}/aligned")
        if name in self.graph.constants:
            return self.graph.constant(self.graph.constants[name].reshape(shape), output)
        self.made.append(self.graph.reshape(name, output, shape))
        return output


def _times(shape: Shape, group: Group) -> Shape:
    return (len(group.nodes), *shape[1:])
