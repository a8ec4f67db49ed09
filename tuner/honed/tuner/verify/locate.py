"""Finds the first node whose value differs between the reference and the compiled form.

Intermediate values are made outputs of variants of the model, a few at a time, and each variant is compiled
and run like the model itself. From a value that differs the search goes back towards the inputs, past no
value that agrees, until all that a differing node reads agrees.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np
import onnx

from honed.onnxfile.reading import reads
from honed.protocol.errors import HonedError
from honed.runtime.execution.verification import Difference

from . import graphs
from .evaluator import ReferenceFailure, evaluate
from .tolerance import compare_value, work

Run = Callable[[onnx.ModelProto, dict[str, np.ndarray]], Mapping[str, np.ndarray]]


def first_difference(
    model: onnx.ModelProto,
    inputs: Mapping[str, np.ndarray],
    run: Run,
    *,
    precision: str = "fp32",
    batch: int = 16,
    seconds: float = 600.0,
) -> str:
    """Return a sentence on the first node of a model with static shapes that computes a wrong value.

    `run(variant, inputs)` compiles and runs a model and returns its outputs by name; a HonedError that it
    raises ends the search with the results so far. `precision` is that of the arithmetic, as in `tolerance`.
    `batch` values are compared per variant, and no new variant is begun after `seconds`. Values that cannot
    be compared (those inside subgraphs, or of unknown shape) are skipped.
    """
    search = _Search(graphs.inline_functions(model), inputs, run, precision)
    return search.first(batch, time.monotonic() + seconds)


class _Unanswered(Exception):
    """Raised when a variant could not be run or evaluated; the text is a clause that says so."""


class _Search:
    """The state of one search: the values known to agree and to differ."""

    def __init__(
        self, model: onnx.ModelProto, inputs: Mapping[str, np.ndarray], run: Run, precision: str
    ) -> None:
        self.model, self.inputs, self.run, self.precision = model, dict(inputs), run, precision
        self.known = graphs.infer(model)
        self.work = work(model, self.known)
        self.maker = {name: i for i, node in enumerate(model.graph.node) for name in node.output if name}
        self.agrees: set[str] = set()

    def first(self, batch: int, deadline: float) -> str:
        try:
            wrong = self._look([v.name for v in self.model.graph.output])
        except _Unanswered as error:
            return f"the first differing node was not searched for: {error}"
        if not wrong:
            return "the difference did not show again when the model was run on the same inputs"
        worst = self._earliest(wrong)
        while behind := self._causes(worst.output):
            if time.monotonic() > deadline:
                return _at_most(worst, "the search was ended for lack of time")
            try:
                wrong = self._look([*self._pick(worst.output, behind, batch), worst.output])
            except _Unanswered as error:
                return _at_most(worst, str(error))
            if not wrong:
                return _at_most(worst, "it vanishes where the values before it are looked at")
            worst = self._earliest(wrong)
        if worst.output not in self.maker:
            return _at_most(worst, "no node makes it")
        node = self.model.graph.node[self.maker[worst.output]]
        return (
            f"the first value that differs is made by node {graphs.label(node)!r} ({node.op_type}): what it "
            f"reads agrees, and its {worst}"
        )

    def _look(self, names: Sequence[str]) -> list[Difference]:
        """Make `names` the outputs, run, and record those that agree; return the differences."""
        names = list(dict.fromkeys(names))
        nodes = [self.model.graph.node[i] for i in sorted(self._back(names))]
        outputs = [self._info(name) for name in names]
        variant = graphs.rebuild_model(self.model, nodes, self.model.graph.input, outputs)
        reference = evaluate(variant, [self.inputs])
        if isinstance(reference, ReferenceFailure):
            raise _Unanswered(reference.reason)
        try:
            found = self.run(variant, dict(self.inputs))
        except HonedError as error:
            raise _Unanswered(f"a part of the model could not be run ({error})") from error
        differences = []
        for name in names:
            expected = reference.outputs[0][name]
            allowed = self.work.tolerance_of(expected.dtype.name, self.precision)
            differences.append(compare_value(expected, found[name], allowed, name))
        self.agrees.update(d.output for d in differences if d.right)
        return [d for d in differences if not d.right]

    def _info(self, name: str) -> onnx.ValueInfoProto:
        """Return the declaration of a value as an output, with its declared or inferred shape."""
        declared = next((v for v in self.model.graph.output if v.name == name), None)
        return graphs.info(self.known[name], name) if declared is None else declared

    def _earliest(self, wrong: Iterable[Difference]) -> Difference:
        return min(wrong, key=lambda d: self.maker.get(d.output, -1))

    def _causes(self, name: str) -> list[str]:
        """Return the values that can be compared and may cause the error of `name`, in topological order."""
        nodes = self._back([name], self.agrees) - {self.maker.get(name, -1)}
        outputs = [o for i in sorted(nodes) for o in self.model.graph.node[i].output]
        return [o for o in outputs if o in self.known and o not in self.agrees]

    def _pick(self, name: str, causes: Sequence[str], count: int) -> list[str]:
        """Return which of the values in `causes`, from which `name` is computed, to compare next.

        These are the inputs of its node, which prove it right or wrong; a spread over the values on which no
        agreeing value depends, where the fault is more likely; and a spread over all, because the fault may
        be elsewhere.
        """
        vouched = self._back(self.agrees)
        suspects = [o for o in causes if self.maker[o] not in vouched]
        own = set(reads(self.model.graph.node[self.maker[name]]))
        half = (count + 1) // 2
        return [*_spread(suspects, half), *_spread(causes, half), *(o for o in causes if o in own)]

    def _back(self, names: Iterable[str], without: Collection[str] = ()) -> set[int]:
        """Return the nodes, by index, that the values depend on, except by way of the values `without`."""
        nodes: set[int] = set()
        waiting = list(names)
        while waiting:
            i = self.maker.get(waiting.pop())
            if i is None or i in nodes:
                continue
            nodes.add(i)
            waiting += [name for name in reads(self.model.graph.node[i]) if name not in without]
        return nodes


def _at_most(worst: Difference, why: str) -> str:
    return f"no single node can be blamed for the difference of {worst.output!r}, because {why}"


def _spread(names: Sequence[str], count: int) -> list[str]:
    """Return at most `count` of the names, evenly spread, the last one among them."""
    if len(names) <= count:
        return list(names)
    return [names[(i + 1) * len(names) // count - 1] for i in range(count)]
