"""A searching child whose compiler breaks on one task: `broken_searcher HOW NAME`, HOW being dies, hangs,
raises or lowering-dies, in a process that it forked. Everything else is the real child.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

from tvm import tirx

from honed.process.rpc import by_name
from honed.tuner.lower.opencl import Lowered
from honed.tuner.tune import searcher
from honed.tuner.tune.children import Extract, Propose, Proposed
from honed.tuner.tune.task import ModelTasks

HANGS_FOR = 1.0  # Seconds that it says it may take; what others propose has its usual time
_extract = searcher.Searcher.extract
_propose = searcher.Searcher.propose


def command(how: str, name: str) -> tuple[str, ...]:
    """The child as a command."""
    return (sys.executable, "-m", "tests.tuner.liars.broken_searcher", how, name)


def main(how: str, name: str) -> None:
    """Serve, but for the task of that name; which key it has is kept in the folder for a successor."""

    def extract(self: searcher.Searcher, call: Extract) -> ModelTasks:
        found = _extract(self, call)
        broken = next(task.key for task in found.tasks if task.name == name)
        (self.making.folder / "broken").write_text(broken)
        return found

    lower = searcher.lower_function

    def lowered(func: tirx.PrimFunc, *given: Any) -> Lowered:
        if name in func.script():
            os.abort()
        return lower(func, *given)

    def propose(self: searcher.Searcher, call: Propose) -> Proposed | None:
        if call.task.key != (self.making.folder / "broken").read_text():
            return _propose(self, call)
        if how == "dies":
            os.abort()
        if how == "hangs":
            self.progress(phase="it hangs", seconds=HANGS_FOR)
            threading.Event().wait()
        if how == "lowering-dies":
            return _propose(self, call)
        raise RuntimeError("InternalError: Check failed: (it != end) is false: a step cannot be replayed")

    if how == "lowering-dies":
        searcher.lower_function = lowered
    searcher.Searcher.METHODS |= by_name({Extract: extract, Propose: propose})
    searcher.main(sys.argv[3:])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
