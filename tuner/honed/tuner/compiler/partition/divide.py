"""Divides a graph between compiled code and the CPU engine, in the fewest partitions worth having.

Compiled steps and partitions alternate: partitions run between steps, and one, the last, after all of them.
Only the last may make values whose shape depends on data; a `tied` value (no tensor, or of such a shape) does
not leave the partition that makes it. Work is estimated in operations.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Container, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

import onnx

from honed.tuner.frontend.signature import StaticTensorSpec

OPEN = 100  # Assumed size of an axis whose size depends on data


def flops(node: onnx.NodeProto, types: Mapping[str, StaticTensorSpec]) -> int:
    """Return the operations of a run: multiply-adds of products, steps of recurrences, elements of others."""
    shapes = [_sizes(types.get(name)) for name in node.input]
    made = elements(node, types)
    op = node.op_type
    if op in ("Conv", "ConvInteger", "QLinearConv", "ConvTranspose"):
        weights = shapes[3] if op == "QLinearConv" else shapes[1]
        over = math.prod(shapes[0]) if op == "ConvTranspose" else made
        return 2 * over * math.prod(weights[1:])
    if op in ("MatMul", "Gemm", "MatMulInteger", "QLinearMatMul"):
        rows = shapes[0]
        transposed = any(a.name == "transA" and a.i for a in node.attribute)
        return 2 * made * (rows[0] if transposed else rows[-1]) if rows else made
    if op in ("LSTM", "GRU", "RNN") and len(shapes) > 2 and len(shapes[0]) == 3:
        steps, batch = shapes[0][:2]
        return 2 * steps * batch * (math.prod(shapes[1]) + math.prod(shapes[2]))
    return made


def elements(node: onnx.NodeProto, types: Mapping[str, StaticTensorSpec]) -> int:
    """Return the number of elements of all outputs of a node."""
    return sum(math.prod(_sizes(types.get(name))) for name in node.output if name)


def _sizes(spec: StaticTensorSpec | None) -> tuple[int, ...]:
    return tuple(size if size >= 0 else OPEN for size in spec.shape) if spec is not None else (1,)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionThresholds:
    """The least work of a compiled stretch between partitions: a share of all work, and an absolute number.

    A transfer to a partition and back takes as long as a small core takes for `work` operations: half a
    millisecond. There are at most `most` partitions between compiled steps. A model is cut only if at least
    the share `whole` of all work is compiled.
    """

    share: float = 0.02
    work: int = 5_000_000
    most: int = 4
    whole: float = 0.1


WORTH = PartitionThresholds()
_MANY = 32  # Compiled stretches


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionNode:
    """A node: the values it reads and makes, whether it can be compiled, and an estimate of its work."""

    reads: tuple[str, ...]
    makes: tuple[str, ...]
    able: bool
    work: int


@dataclass(frozen=True, slots=True)
class StageAssignment:
    """The stage of each unit. Even ones are compiled; odd ones are partitions; the last one is `tail`.

    A unit's inputs are made in its own stage or in an earlier one.
    """

    stages: tuple[int, ...]
    tail: int | None

    def is_compiled(self, unit: int) -> bool:
        """Return whether a unit runs compiled."""
        return self.stages[unit] % 2 == 0


def divide(
    units: Sequence[PartitionNode],
    tied: Iterable[str],
    outputs: Iterable[str],
    worth: PartitionThresholds = WORTH,
) -> StageAssignment:
    """Divide units in topological order. `tied` values may be among the `outputs` of the graph.

    Where no unit is left to compile, all are in the last partition.
    """
    graph = _NodeGraph(units, frozenset(tied), frozenset(outputs))
    able = [unit.able for unit in units]
    while True:
        graph.close(able)
        behind = graph.tail_units(able)
        if any(able[n] for n in behind):  # Inputs of these units may be tied, too
            able = [one and n not in behind for n, one in enumerate(able)]
            continue
        stages = graph.stages(able, behind)
        if not _give_up_least(units, able, behind, stages, worth):
            break
    last = max(stages, default=0) + 1
    last += 1 - last % 2
    return StageAssignment(
        tuple(last if n in behind else stage for n, stage in enumerate(stages)), last if behind else None
    )


def with_less_to_hand_over(
    units: Sequence[PartitionNode],
    assignment: StageAssignment,
    light: Container[int],
    nbytes: Mapping[str, int],
    outputs: Container[str],
) -> StageAssignment:
    """Let the last partition run `light` units where that reduces the bytes transferred to it.

    `nbytes` are of values that units make; the partition reads other values without a transfer.
    """
    if assignment.tail is None:
        return assignment
    stages = list(assignment.stages)
    readers: dict[str, list[int]] = {}
    for n, unit in enumerate(units):
        for name in unit.reads:
            readers.setdefault(name, []).append(n)

    def only_behind(name: str) -> bool:
        return name not in outputs and all(stages[n] == assignment.tail for n in readers.get(name, ()))

    def is_handed_over(name: str) -> bool:
        return any(stages[n] == assignment.tail for n in readers.get(name, ()))

    for n in reversed(range(len(units))):
        unit = units[n]
        if not assignment.is_compiled(n) or n not in light or not all(map(only_behind, unit.makes)):
            continue
        saved = sum(nbytes[name] for name in unit.makes if is_handed_over(name))
        if saved > sum(nbytes.get(name, 0) for name in set(unit.reads) if not is_handed_over(name)):
            stages[n] = assignment.tail
    return StageAssignment(tuple(stages), assignment.tail)


def _give_up_least(
    units: Sequence[PartitionNode],
    able: list[bool],
    tail: set[int],
    stages: Sequence[int],
    worth: PartitionThresholds,
) -> bool:
    """Let the CPU engine run the compiled stretch of least work, where compiling it does not pay.

    Returns whether any was given up. Other stretches may merge then, and be worth their partitions; of very
    many, the lesser half goes at once.
    """
    total = sum(unit.work for unit in units)
    work: dict[int, int] = {}
    for n, unit in enumerate(units):
        if able[n]:
            work[stages[n]] = work.get(stages[n], 0) + unit.work
    between = {stage for n, stage in enumerate(stages) if not able[n] and n not in tail}
    if len(work) < 2:
        return False
    rising = sorted(work, key=lambda stage: (work[stage], -stage))
    if work[rising[0]] >= max(worth.share * total, worth.work) and len(between) <= worth.most:
        return False
    given_up = set(rising[: len(rising) // 2 if len(rising) > _MANY else 1])
    for n in range(len(units)):
        if able[n] and stages[n] in given_up:
            able[n] = False
    return True


class _NodeGraph:
    def __init__(self, units: Sequence[PartitionNode], tied: Set[str], outputs: Set[str]) -> None:
        self.units, self.tied, self.outputs = units, tied, outputs
        self.maker = {name: n for n, unit in enumerate(units) for name in unit.makes}
        self.before = [
            sorted({self.maker[name] for name in unit.reads if name in self.maker}) for unit in units
        ]
        self.after: list[list[int]] = [[] for _ in units]
        for n, makers in enumerate(self.before):
            for one in makers:
                self.after[one].append(n)
        # A unit that must share each unit's partition, or the unit itself
        self.group = list(range(len(units)))

    def close(self, able: list[bool]) -> None:
        """Merge units that must be in one partition with those between them, until none remains between."""
        while self._tie(able) or self._fill(able):
            pass

    def _tie(self, able: list[bool]) -> bool:
        """Merge units that pass on a tied value if any is in a partition; return whether anything changed."""
        changed = False
        readers: dict[str, list[int]] = {}
        for n, unit in enumerate(self.units):
            for name in unit.reads:
                if name in self.tied and name in self.maker:
                    readers.setdefault(name, [self.maker[name]]).append(n)
        for together in readers.values():
            if all(able[n] for n in together):
                continue
            changed |= self._join(together)
            for n in together:
                changed |= able[n]
                able[n] = False
        return changed

    def _root(self, unit: int) -> int:
        """Return the unit that represents a unit's group; one partition must hold the whole group."""
        while self.group[unit] != unit:
            self.group[unit] = self.group[self.group[unit]]
            unit = self.group[unit]
        return unit

    def _join(self, together: Sequence[int]) -> bool:
        roots = {self._root(n) for n in together}
        least = min(roots)
        for root in roots:
            self.group[root] = least
        return len(roots) > 1

    def _members(self) -> dict[int, list[int]]:
        """Return the units of each group, in order."""
        members: dict[int, list[int]] = {}
        for n in range(len(self.units)):
            members.setdefault(self._root(n), []).append(n)
        return members

    def _fill(self, able: list[bool]) -> bool:
        """Add to each group the units on paths that leave it and return; return whether any were added."""
        members, changed = self._members(), False
        for group in members.values():
            if len(group) == 1:
                continue
            below = self._find_reachable(group, self.after, members)
            above = self._find_reachable(group, self.before, members)
            inside = below & above - set(group)
            if inside:
                self._join([*group, *inside])
                for n in inside:
                    able[n] = False
                changed = True
        return changed

    def _find_reachable(
        self, start: Sequence[int], edges: Sequence[Sequence[int]], members: Mapping[int, Sequence[int]]
    ) -> set[int]:
        """Return all that can be reached from some units, entering and leaving a group anywhere."""
        seen: set[int] = set()
        own = set(start)
        waiting = deque(n for one in start for n in edges[one] if n not in own)
        while waiting:
            n = waiting.popleft()
            if n in seen:
                continue
            for one in members[self._root(n)]:
                if one not in seen:
                    seen.add(one)
                    waiting.extend(m for m in edges[one] if m not in seen)
        return seen

    def tail_units(self, able: Sequence[bool]) -> set[int]:
        """Return the units of the last partition.

        These are all units from tied outputs on, and partitions that lead nowhere else.
        """
        members = self._members()
        open_ = self.tied & self.outputs
        first = {self._root(n) for n, unit in enumerate(self.units) if not open_.isdisjoint(unit.makes)}
        start = [n for root in first for n in members[root]]
        found = {*start, *self._find_reachable(start, self.after, members)}
        self._lead_there(found, able, members)
        return found

    def _lead_there(
        self, units: set[int], able: Sequence[bool], members: Mapping[int, Sequence[int]]
    ) -> None:
        """Add the groups of partitions that lead to the found ones alone, and those that lead to these."""
        elsewhere = dict.fromkeys(members, 0)  # Edges from each group to others than those found
        for n in range(len(self.units)):
            for m in self.before[n]:
                elsewhere[self._root(m)] += n not in units and self._root(m) != self._root(n)
        waiting = [root for root, ways in elsewhere.items() if not ways]
        while waiting:
            group = members[waiting.pop()]
            if able[group[0]] or group[0] in units:
                continue
            units.update(group)
            own = self._root(group[0])
            for root in (self._root(m) for n in group for m in self.before[n]):
                elsewhere[root] -= root != own
                if root != own and not elsewhere[root]:
                    waiting.append(root)

    def stages(self, able: Sequence[bool], tail: set[int]) -> list[int]:
        """Return the earliest stage of each unit; 0 for the units that run after all stages."""
        members = self._members()
        stage = [0] * len(self.units)
        changed = True
        while changed:
            changed = False
            for group in members.values():
                if group[0] in tail:
                    continue
                least = max(self._earliest(m, stage, able) for m in group)
                for m in group:
                    changed |= stage[m] < least
                    stage[m] = max(stage[m], least)
        return stage

    def _earliest(self, unit: int, stage: Sequence[int], able: Sequence[bool]) -> int:
        """Return the earliest stage that a unit's inputs allow.

        An input of the unit's kind allows its own stage, an input of the other kind the one after.
        """
        own = [stage[m] + (able[m] != able[unit]) for m in self.before[unit]]
        return max([*own, 0 if able[unit] else 1])
