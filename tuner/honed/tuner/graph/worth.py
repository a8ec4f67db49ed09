"""Which twins pay: what is launched less for them, and what stacking and taking apart launches more."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .graph import Graph
from .groups import Group, Places, places
from .stacking import LAUNCHED, Role

_ELEMENTS = 1 << 18  # that are copied in the time of a launch, 10 us at 200 GB/s
_MOST_LOOKED_AT = 1_000_000  # groups, in all trials of a region: seconds
_LONGEST = 8  # groups that are left out together at most, from an end of a region inwards


def worthwhile(graph: Graph, groups: Sequence[Group]) -> list[Group]:
    """The groups that save launches, in their order."""
    readers = _readers(graph)
    kept: set[int] = set()
    for region in _regions(groups):
        kept |= _trimmed(graph, groups, region, readers)
    return [group for n, group in enumerate(groups) if n in kept]


def _readers(graph: Graph) -> dict[str, list[str]]:
    """What reads each value: the values of nodes, "" for an output of the model."""
    found = {name: [n.output[0] for n in nodes] for name, nodes in graph.users().items()}
    for name in graph.outputs:
        found.setdefault(name, []).append("")
    return found


def _regions(groups: Sequence[Group]) -> list[set[int]]:
    """Groups that read each other, together."""
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


def _trimmed(
    graph: Graph, groups: Sequence[Group], region: set[int], readers: dict[str, list[str]]
) -> set[int]:
    """What is left of a region when the ends that do not pay are cut off."""
    best, most = set(region), _gain(graph, groups, region, readers)
    trials = _MOST_LOOKED_AT // len(region)
    while trials > 0:
        cuts = _ends(groups, best)[:trials]
        gains = [_gain(graph, groups, best - cut, readers) for cut in cuts]
        trials -= len(cuts)
        if max(gains, default=most) <= most:
            break
        most = max(gains)
        best = best - cuts[gains.index(most)]
    return best if most > 0 else set()


def _ends(groups: Sequence[Group], region: set[int]) -> list[set[int]]:
    """Groups at the borders of a region, and chains from there inwards."""
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


def _gain(graph: Graph, groups: Sequence[Group], region: set[int], readers: dict[str, list[str]]) -> int:
    """Launches that the groups of a region save, less those that stack, swap and take apart."""
    chosen = [groups[n] for n in sorted(region)]
    place = places(chosen)
    stacks: set[tuple[str, ...]] = set()
    single = {v for v in place if any(reader not in place for reader in readers.get(v, ()))}
    saved = 0
    for group in chosen:
        saved += (len(group.nodes) - 1) * (group.nodes[0].op_type in LAUNCHED)
        for position, role in enumerate(group.roles):
            names = group.operand(position)
            if shared(names, role):
                single.update(name for name in names if name in place)
            elif not _free(graph, chosen, place, names):
                stacks.add(names)
                if len({place[name][0] if name in place else -1 for name in names}) > 1:
                    single.update(name for name in names if name in place)
    copied = [name for names in stacks for name in names] + list(single)
    elements = sum(math.prod(graph.shape(name)) for name in copied)
    return saved - len(stacks) - len(single) - elements // _ELEMENTS


def shared(names: Sequence[str], role: Role) -> bool:
    """Whether all twins read one value that need not be repeated."""
    return role is Role.SAME or (role is not Role.STACKED and len(set(names)) == 1)


def _free(graph: Graph, groups: Sequence[Group], place: Places, names: tuple[str, ...]) -> bool:
    """Whether operands are stacked already, or when compiling."""
    if names[0] in place and groups[place[names[0]][0]].values == names:
        return True
    return all(name in graph.constants for name in names)
