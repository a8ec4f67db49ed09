"""What is stored and sent stays as it is, whatever it is called in the code."""

from __future__ import annotations

import pytest

from tests.golden.formats import FOLDER, FORMATS, text_of


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_written_and_read_as_its_golden_file_has_it(name: str) -> None:
    entries = FORMATS[name]()
    golden = (FOLDER / f"{name}.txt").read_text()
    assert text_of(entries) == golden, (
        f"a format changed; if it should: python -m tests.golden.formats {name}"
    )
    read = {label: (again(), again) for label, (_, again) in entries.items()}
    assert text_of(read) == golden
