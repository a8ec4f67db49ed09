"""What runs behind all steps of a model: parts in the CPU engine, and compiled forms for some sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from honed.protocol.results import MetSizes
from honed.runtime.compiled.model import CompiledModel
from honed.runtime.compiled.parts import covers

from .cpuparts import OpenParts
from .partcalls import SizesToStopAt

Array = NDArray[Any]
RunForm = Callable[[int, Mapping[str, Array]], Mapping[str, Array]]  # a form by number, on its inputs


class PartsBehind:
    """Those of one model; with none of them nothing is made."""

    def __init__(self, model: CompiledModel, parts: OpenParts | None) -> None:
        """`parts` are loaded."""
        self._parts = parts
        self._split = model.split
        self._wanted = [tensor.name for tensor in model.made_behind]
        self._forms = model.forms
        self._stops = [
            SizesToStopAt(part=form.part, sizes=form.sizes, least=form.least) for form in model.forms
        ]

    def run(
        self, values: Mapping[str, Array], run_form: RunForm | None
    ) -> tuple[dict[str, Array], tuple[MetSizes, ...]]:
        """The outputs that parts make of values by name, and the sizes that sized parts met.

        Forms run by `run_form`, where there is one. Raises as `OpenParts.run`, and what that does.
        """
        if self._split is None or self._parts is None:
            return {}, ()
        left, there, met = list(self._split.behind), dict(values), list[MetSizes]()
        while left:
            ran, made = self._parts.run_chain(left, there, self._wanted, self._stops if run_form else ())
            there |= made
            met += self._met(left, ran.sizes)
            left = left[ran.done :]
            if left and run_form is not None:
                there |= self._formed(left[0], ran.sizes[ran.done], there, run_form)
                left = left[1:]
        return {name: there[name] for name in self._wanted}, tuple(met)

    def _met(self, numbers: Sequence[int], sizes: Sequence[tuple[int, ...]]) -> list[MetSizes]:
        assert self._split is not None
        each = zip(numbers, sizes, strict=False)
        return [MetSizes(part=n, sizes=those) for n, those in each if self._split.parts[n].sized]

    def _formed(
        self, number: int, met: tuple[int, ...], values: Mapping[str, Array], run_form: RunForm
    ) -> dict[str, Array]:
        """What a part makes of values, by the least of its forms that is for sizes that were met.

        Its last row is repeated as often as the form has rows more.
        """
        assert self._split is not None
        part = self._split.parts[number]
        fit = [
            (form.sizes, n)
            for n, form in enumerate(self._forms)
            if form.part == number and covers(form.sizes, form.least, met)
        ]
        sizes, form = min(fit)
        given = {tensor.name: values[tensor.name] for tensor in part.inputs}
        if sizes == met:
            return dict(run_form(form, given))
        more = sizes[0] - met[0]
        for tensor in part.inputs:
            if -1 in tensor.shape:
                rows = given[tensor.name]
                given[tensor.name] = np.concatenate([rows, np.repeat(rows[-1:], more, 0)])
        made = run_form(form, given)
        return {t.name: made[t.name][: met[0]] if -1 in t.shape else made[t.name] for t in part.outputs}
