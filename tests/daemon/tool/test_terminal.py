"""`hone` in a real terminal: a bar that moves, and a terminal left as it was."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from tests.daemon.running import DEADLINE

STUB = """
import json, sys
def say(**event): print(json.dumps(event), flush=True)
for i in range(20):
    say(event="stage", stage=f"s{i}", fraction=i / 20, text=f"step {i} " + "long " * 40)
say(event="refused", message="no", reasons=["because"])
sys.exit(1)
"""


@pytest.mark.parametrize("columns", [30, 80])
def test_progress_in_a_terminal(tmp_path: Path, columns: int) -> None:
    package = tmp_path / "honed" / "tuner"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(STUB)
    main_end, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "honed.tool.main", "compile", "x", "-o", "y"],
        env=os.environ | {"PYTHONPATH": str(tmp_path), "TERM": "xterm", "COLUMNS": str(columns)},
        stdin=terminal,
        stdout=subprocess.PIPE,
        stderr=terminal,
    )
    os.close(terminal)
    shown = b""
    try:
        while data := os.read(main_end, 65536):
            shown += data
    except OSError:  # EIO: the other end is closed
        pass
    finally:
        os.close(main_end)
    assert process.stdout is not None
    assert process.stdout.read() == b""
    process.stdout.close()
    assert process.wait(timeout=DEADLINE) == 1
    text = shown.decode()
    assert "%" in text
    assert "hone: no" in text
    assert "- because" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h"), "the cursor is shown again"
    assert "Traceback" not in text
