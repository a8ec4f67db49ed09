"""How large a model becomes when the functions it defines are expanded, found without expanding any.

Functions that call functions can stand for more nodes than there is time to visit: thirty of them, each of
which calls the one before twice, for a billion.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import onnx

from honed.protocol.errors import ModelRefused

Key = tuple[str, str]  # domain and name


@dataclass(frozen=True, slots=True)
class _Body:
    nodes: int
    calls: Counter[Key]


def check_expansion(model: onnx.ModelProto, limit: int) -> None:
    """Raise ModelRefused where more than `limit` nodes would be visited, or a function contains itself."""
    known = {(f.domain, f.name) for f in model.functions}
    bodies = {(f.domain, f.name): _body(f.node, known) for f in model.functions}
    whole = _body(model.graph.node, known)
    sizes: dict[Key, int] = {}
    for key in whole.calls:
        _measure(key, bodies, sizes)
    if _size(whole, sizes) > limit:
        raise ModelRefused(
            f"the model grows beyond {limit} nodes when its functions are expanded; export it without them"
        )


def _measure(key: Key, bodies: dict[Key, _Body], sizes: dict[Key, int]) -> None:
    """Find the size of a function and of all that it calls; without recursion, which they could exhaust."""
    open_calls: list[tuple[Key, Iterator[Key]]] = [(key, iter(bodies[key].calls))]
    within = {key}
    while open_calls:
        current, callees = open_calls[-1]
        callee = next((each for each in callees if each not in sizes), None)
        if callee is None:
            sizes[current] = _size(bodies[current], sizes)
            within.discard(current)
            open_calls.pop()
        elif callee in within:
            text = f"function {callee[1][:80]!r} of the model is nested within itself"
            raise ModelRefused(f"the model cannot be compiled: {text}; export it without", (text,))
        else:
            within.add(callee)
            open_calls.append((callee, iter(bodies[callee].calls)))


def _size(body: _Body, sizes: dict[Key, int]) -> int:
    return body.nodes + sum(count * sizes[key] for key, count in body.calls.items())


def _body(nodes: Iterable[onnx.NodeProto], known: set[Key]) -> _Body:
    """The nodes of a graph or function with those of its branches, and how often they call which function."""
    count, calls = 0, Counter[Key]()
    waiting = [nodes]
    while waiting:
        for node in waiting.pop():
            count += 1
            if (node.domain, node.op_type) in known:
                calls[node.domain, node.op_type] += 1
            for attribute in node.attribute:
                waiting += [graph.node for graph in (attribute.g, *attribute.graphs) if graph.node]
    return _Body(count, calls)
