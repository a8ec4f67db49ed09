"""Jobs: what they answer is heard, and what drivers print beside it is not."""

from __future__ import annotations

import sys

import pytest

from honed.jobs.commands import Check, Compile, Listener
from honed.process.children import ExitInfo, JobCrashed, run

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


CRASHES = """
import sys
from honed.process.children import answering, tell_again
{imports}
with answering() as say:
    say({{"event": "first"}})
    tell_again()
    {crashes}
"""
# ONNX's own inference dereferences nothing here (https://github.com/onnx/onnx/issues/8207).
EINSUM = """onnx.shape_inference.infer_shapes(helper.make_model(helper.make_graph(
        [helper.make_node("Einsum", ["a", "b"], ["y"], equation="...,...->...")], "g",
        [helper.make_tensor_value_info(name, 1, shape) for name, shape in (("a", []), ("b", [2]))],
        [helper.make_tensor_value_info("y", 1, None)])))"""


@pytest.mark.parametrize(
    ("imports", "crashes", "inside"),
    [
        ("import ctypes", "ctypes.string_at(0)", ""),  # no library is known
        pytest.param(
            "import onnx, tvm; from onnx import helper",
            EINSUM,
            " in infer_shapes of ONNX",
            marks=pytest.mark.tvm,
        ),
    ],
)
def test_what_a_job_was_in_when_it_crashed_is_told(imports: str, crashes: str, inside: str) -> None:
    answers, death = run(job(CRASHES.format(imports=imports, crashes=crashes)), seconds=120)
    assert answers == [{"event": "first"}]
    assert str(death).startswith(f"it was ended by signal SIGSEGV{inside}")
    assert (" in " in str(death)) is bool(inside)


def test_a_crash_is_no_event_of_a_job() -> None:
    heard: Listener[object] = Listener(Compile(file="m", output="o").derive(Check))  # type: ignore[arg-type]
    file = "/usr/lib/python3/dist-packages/onnx/shape_inference.py"
    dump = ("Fatal Python error: Aborted", "", "Current thread 0x1 (most recent call first):")
    for line in (
        *dump,
        f'  File "{file}", line 57 in infer_shapes',
        '  File "x.py", line 1 in f',
        "",
        "Extension",
    ):
        assert heard.hear(line.encode()) is None
    with pytest.raises(JobCrashed, match=r"SIGABRT in infer_shapes of ONNX$"):
        heard.result(ExitInfo(status=-6))
