"""Temporary folders of killed tuners do not pile up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from honed.tuner.records.store import ProcessIdentity
from honed.tuner.tune.children import scratch, sweep

LEAVES = (
    "import os, signal; from honed.tuner.tune.children import scratch\n"
    "made = scratch('honed-test-'); print(made.name, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
)


def test_what_a_killed_process_left_is_cleared_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    done = subprocess.run([sys.executable, "-c", LEAVES], stdout=subprocess.PIPE, text=True, check=False)
    left = Path(done.stdout.strip())
    assert left.parent == tmp_path
    assert left.is_dir()
    with scratch("honed-test-") as name:
        assert not left.exists()
        sweep(tmp_path, "honed-test-")
        assert Path(name).is_dir()
    assert list(tmp_path.iterdir()) == []


def test_nothing_else_is_touched(tmp_path: Path) -> None:
    """Folders without a readable owner, links, and those of processes that run."""
    for name, owner in (("a", ""), ("b", "not an owner"), ("c", str(ProcessIdentity.this_process()))):
        (tmp_path / f"honed-test-{name}").mkdir()
        if owner:
            (tmp_path / f"honed-test-{name}" / "owner").write_text(owner)
    gone = ProcessIdentity(boot_id="another", pid_namespace=1, pid=1, started=1)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "owner").write_text(str(gone))
    (tmp_path / "honed-test-link").symlink_to(elsewhere)
    before = sorted(tmp_path.iterdir())
    sweep(tmp_path, "honed-test-")
    assert sorted(tmp_path.iterdir()) == before
