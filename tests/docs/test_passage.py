"""Files that things pass through are noted while a window is open, and counted right."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import passage
from benchmarks.passage.__main__ import ways

pytest.importorskip("onnx")
HOOK = Path(passage.__file__).with_name("hook")
CALLER = """
import os, threading
from honed import one, two
window = os.open(os.environ["HONED_PASSAGE"] + "/window", os.O_WRONLY)
one.called()
os.pwrite(window, bytes([7]), 0)
threading.Thread(target=two.called).start()
"""


def test_a_file_is_noted_where_a_function_of_it_runs_in_a_window(tmp_path: Path) -> None:
    package = tmp_path / "honed"
    package.mkdir()
    for name in ("one", "two"):
        (package / f"{name}.py").write_text("def called():\n    pass\n")
    (tmp_path / "window").write_bytes(b"\0")
    (tmp_path / "notes").touch()
    found = {"PYTHONPATH": f"{HOOK}{os.pathsep}{tmp_path}", "HONED_PASSAGE": str(tmp_path)}
    subprocess.run([sys.executable, "-P", "-c", CALLER], env=os.environ | found, check=True)
    assert (tmp_path / "notes").read_text() == f"7 {package / 'two.py'}\n"


def test_a_warm_request_passes_through_what_all_do_and_the_rest_through_what_does_not_run_at_rest() -> None:
    from benchmarks.passage.scenario import CANDIDATE, FILE, REQUEST, REQUESTS, REST

    found = {REQUEST + n: {"a.py", "b.py", f"{n}.py"} for n in range(REQUESTS)}
    found |= {FILE: {"a.py", "c.py"}, CANDIDATE: {"c.py", "d.py"}, REST: {"c.py"}}
    assert ways(found) == {
        "a cold request": ["0.py", "a.py", "b.py"],
        "a warm request": ["a.py", "b.py"],
        "an ONNX file": ["a.py"],
        "a candidate": ["d.py"],
    }
