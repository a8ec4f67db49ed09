"""Jobs: what they answer is heard, and what drivers print beside it is not."""

from __future__ import annotations

import sys

from honed.process.children import run

ANSWERS = """
import sys
from honed.process.children import answering
print("a library says hello")
with answering() as say:
    say({"event": "first"})
    print("a driver speaks")
    say({"event": "last", "of": [1, None, 2.5]})
    sys.stdout.flush()
"""


def job(code: str) -> tuple[str, ...]:
    return sys.executable, "-c", code


def test_a_job_answers_maps_and_nothing_else_counts() -> None:
    answers, death = run(job(ANSWERS), seconds=60)
    assert answers == [{"event": "first"}, {"event": "last", "of": [1, None, 2.5]}]
    assert (death.status, death.said) == (0, "a driver speaks")


def test_what_a_job_said_before_it_broke_is_kept() -> None:
    code = "import sys; print('{\"one\": 1}'); print('{\"cut', end=''); sys.exit(3)"
    answers, death = run(job(code), seconds=60)
    assert (answers, death.status) == ([{"one": 1}], 3)


def test_lines_that_are_no_maps_are_passed_over() -> None:
    answers, death = run(job("print('[' * 100_000); print(3); print('{}'); print('NaN')"), seconds=60)
    assert (answers, death.status) == ([{}], 0)
