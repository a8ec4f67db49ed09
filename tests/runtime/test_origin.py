"""The name of a schedule in a compiled model says where it comes from."""

from __future__ import annotations

import pytest

from honed.runtime.compiled.model import Origin, ScheduleSource, Way


@pytest.mark.parametrize(
    ("text", "origin"),
    [
        ("prior:cpu-1", Origin(ScheduleSource.PRIOR, "cpu-1")),
        ("tables:gpu", Origin(ScheduleSource.TABLES, "gpu")),
        ("matmul", Origin(ScheduleSource.RULE, "matmul")),
        ("record:0123456789ab", Origin(ScheduleSource.RECORD, "0123456789ab")),
        ("measured:0123456789ab", Origin(ScheduleSource.MEASURED, "0123456789ab")),
        ("measured:tables:0123456789ab", Origin(ScheduleSource.MEASURED, "0123456789ab", Way.TABLES)),
        ("predicted:descent:0123456789ab", Origin(ScheduleSource.PREDICTED, "0123456789ab", Way.DESCENT)),
    ],
)
def test_a_name_and_its_origin(text: str, origin: Origin) -> None:
    assert Origin.parse(text) == origin
    assert str(origin) == text


@pytest.mark.parametrize("text", ["", "matmul", "newer:0123", "kin:0123"])
def test_a_name_of_no_known_form_is_a_rules(text: str) -> None:
    assert Origin.parse(text) == Origin(ScheduleSource.RULE, text)


def test_only_what_was_measured_was_tried() -> None:
    assert [source for source in ScheduleSource if Origin(source, "x").tried] == [
        ScheduleSource.RECORD,
        ScheduleSource.MEASURED,
    ]
