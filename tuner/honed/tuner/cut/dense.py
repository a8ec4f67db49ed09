"""What of the last part could be compiled if the sizes were known that depend on the data."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import onnx

from honed.runtime.dtypes import DTYPES
from honed.tuner.frontend.signature import TensorSpec
from honed.tuner.frontend.survey import SurveyedNode, survey

from .extract import carried
from .partition import Unit, Worth, divide
from .work import OPEN, flops

_CARRIED = {d.name: d for d in DTYPES}


def sized_stages(
    model: onnx.ModelProto,
    shapes: Mapping[str, tuple[int, ...]],
    learnt: Mapping[str, TensorSpec],
    last: Sequence[SurveyedNode],
    outputs: Collection[str],
    worth: Worth,
) -> list[int]:
    """For each node of the last part its place in a row of stages: odd ones the CPU engine runs in any case.

    Even ones have a dense part that has work which pays. All are 1 where there is none.
    """
    whole = [1] * len(last)
    known = survey(model, shapes, learnt, assumed=OPEN)
    if known is None:
        return whole
    able = {one.index: not one.why for one in known.nodes}
    units = [
        Unit(
            reads=one.reads,
            makes=tuple(name for name in one.node.output if name),
            able=able[one.index],
            work=flops(one.node, known.types),
        )
        for one in last
    ]
    tied = {
        name
        for unit in units
        for name in unit.makes
        if not carried(known.types.get(name), _CARRIED) and name not in known.constants
    }
    return _paying(units, divide(units, tied, outputs, worth).stages, worth)


def _paying(units: Sequence[Unit], stages: Sequence[int], worth: Worth) -> list[int]:
    """The stages, or one for all where what could be compiled has too little work."""
    total = sum(unit.work for unit in units)
    work: dict[int, int] = {}
    for unit, stage in zip(units, stages, strict=True):
        if stage % 2 == 0:
            work[stage] = work.get(stage, 0) + unit.work
    least = max(worth.share * total, worth.work)
    if not work or min(work.values()) < least:
        return [1] * len(stages)
    return list(stages)
