"""The name of a schedule in a compiled model says where it comes from."""

from __future__ import annotations

import pytest

from honed.runtime.compiled.model import ScheduleProvenance, ScheduleSource, SearchStrategy


@pytest.mark.parametrize(
    ("text", "origin"),
    [
        ("prior:cpu-1", ScheduleProvenance(ScheduleSource.PRIOR, "cpu-1")),
        ("tables:gpu", ScheduleProvenance(ScheduleSource.TABLES, "gpu")),
        ("matmul", ScheduleProvenance(ScheduleSource.RULE, "matmul")),
        ("record:0123456789ab", ScheduleProvenance(ScheduleSource.RECORD, "0123456789ab")),
        ("measured:0123456789ab", ScheduleProvenance(ScheduleSource.MEASURED, "0123456789ab")),
        (
            "measured:tables:0123456789ab",
            ScheduleProvenance(ScheduleSource.MEASURED, "0123456789ab", SearchStrategy.TABLES),
        ),
        (
            "predicted:descent:0123456789ab",
            ScheduleProvenance(ScheduleSource.PREDICTED, "0123456789ab", SearchStrategy.DESCENT),
        ),
    ],
)
def test_a_name_and_its_origin(text: str, origin: ScheduleProvenance) -> None:
    assert ScheduleProvenance.parse(text) == origin
    assert str(origin) == text


@pytest.mark.parametrize("text", ["", "matmul", "newer:0123", "kin:0123"])
def test_a_name_of_no_known_form_is_a_rules(text: str) -> None:
    assert ScheduleProvenance.parse(text) == ScheduleProvenance(ScheduleSource.RULE, text)


def test_only_what_was_measured_was_tried() -> None:
    assert [source for source in ScheduleSource if ScheduleProvenance(source, "x").tried] == [
        ScheduleSource.RECORD,
        ScheduleSource.MEASURED,
    ]
