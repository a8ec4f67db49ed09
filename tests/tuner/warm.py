"""Evaluators of models that begin with NumPy and ONNX Runtime imported: forks of a process that has done it.

Starting one takes a quarter of a second of processor time, nearly all of it for imports, and tests of the
compiler start hundreds. Here each is a process of its own all the same, with its limits, its files and its
answers; only `python -m` is left out, which tests/tuner/verify/test_reference.py has.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING
from unittest.mock import patch

from honed.process import children
from honed.process.children import FREE, ExitInfo, ResourceLimits
from honed.process.limits import limit
from honed.tuner.verify import evaluator

if TYPE_CHECKING:
    import pytest  # which the forks do not need

_MODULE = evaluator.__name__
_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload([__name__, "onnxruntime"])
_start: Callable[..., tuple[bytes, ExitInfo]] = children.output


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have evaluators forked until it is undone."""
    monkeypatch.setattr(children, "output", _output)


def _output(
    program: Sequence[str],
    bounds: ResourceLimits = FREE,
    *,
    seconds: float | None,
    environment: Mapping[str, str] | None = None,
) -> tuple[bytes, ExitInfo]:
    head = children.python(_MODULE)
    if tuple(program[: len(head)]) != head:
        return _start(program, bounds, seconds=seconds, environment=environment)
    with tempfile.TemporaryDirectory() as folder:
        for name in ("1", "2"):
            (Path(folder) / name).touch()
        given = list(program[len(head) :]), bounds, dict(environment or {}), folder
        process = _forks.Process(target=_evaluate, args=given)
        with patch.dict(sys.modules, __main__=ModuleType("__main__")):  # else the fork imports pytest's
            process.start()
        process.join(seconds)
        late = process.is_alive()
        process.kill()
        process.join()
        answers = (Path(folder) / "1").read_bytes()
        with (Path(folder) / "2").open("rb") as log:
            said = children.last_line(log)
    return answers, ExitInfo(status=process.exitcode, deadline=seconds if late else None, said=said)


def _evaluate(arguments: list[str], bounds: ResourceLimits, environment: dict[str, str], folder: str) -> None:
    for number in (1, 2):
        file = os.open(f"{folder}/{number}", os.O_WRONLY)
        os.dup2(file, number)
    os.environ.update(environment)
    if bounds.address_mib:
        limit(resource.RLIMIT_AS, bounds.address_mib << 20)
    if bounds.cpu_seconds:
        limit(resource.RLIMIT_CPU, bounds.cpu_seconds)
    sys.exit(evaluator.main(arguments))
