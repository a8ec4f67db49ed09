"""A searching child whose compiler breaks on one task: `broken_searcher HOW NAME`, HOW being dies, hangs,
raises or lowering-dies, in a process that it forked. Everything else is the real child.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from typing import Any

from tvm import tirx

from honed.tuner.lower.opencl import Lowered
from honed.tuner.measure import codec
from honed.tuner.tune import searcher

_extract = searcher.Searcher.extract
_propose = searcher.Searcher.propose


def command(how: str, name: str) -> tuple[str, ...]:
    """The child as a command."""
    return (sys.executable, "-m", "tests.tuner.liars.broken_searcher", how, name)


def main(how: str, name: str) -> None:
    """Serve, but for the task of that name; which key it has is kept in the folder for a successor."""

    def extract(self: searcher.Searcher, message: Mapping[str, Any]) -> codec.Message:
        found = _extract(self, message)
        broken = next(task["key"] for task in found["tasks"] if task["name"] == name)
        (self.making.folder / "broken").write_text(broken)
        return found

    lower = searcher.lower_function

    def lowered(func: tirx.PrimFunc, *given: Any) -> Lowered:
        if name in func.script():
            os.abort()
        return lower(func, *given)

    def propose(self: searcher.Searcher, message: Mapping[str, Any]) -> codec.Message:
        if message["task"] != (self.making.folder / "broken").read_text():
            return _propose(self, message)
        if how == "dies":
            os.abort()
        if how == "hangs":
            threading.Event().wait()
        if how == "lowering-dies":
            return _propose(self, message)
        raise RuntimeError("InternalError: Check failed: (it != end) is false: a step cannot be replayed")

    if how == "lowering-dies":
        searcher.lower_function = lowered
    searcher.Searcher.extract = extract  # type: ignore[method-assign]
    searcher.Searcher.propose = propose  # type: ignore[method-assign]
    searcher.main(sys.argv[3:])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
