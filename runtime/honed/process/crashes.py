"""What a job was in when a signal ended it: the job tells it among its answers, by Python's faulthandler."""

from __future__ import annotations

import faulthandler
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Final

_FIRST: Final = b"Fatal Python error: "
_FRAME: Final = re.compile(r'  File "(.*)", line \d+ in (\S+)')
_LIBRARY: Final = re.compile(r".*/(?:site|dist)-packages/(\w+)")
_CALLED: Final = {"onnx": "ONNX", "onnxruntime": "ONNX Runtime", "tvm": "TVM", "tvm_ffi": "TVM"}
_answers: list[IO[str]] = []  # Where this process tells of its crash


@contextmanager
def telling(answers: IO[str]) -> Iterator[None]:
    """Have a crash of this process be reported among its answers while this lasts."""
    _answers.append(answers)
    tell_again()
    try:
        yield
    finally:
        faulthandler.disable()
        _answers.remove(answers)


def tell_again() -> None:
    """Tell of a crash although a library was loaded that handles signals itself, as TVM does."""
    if _answers:
        faulthandler.disable()
        faulthandler.enable(_answers[-1], all_threads=False)


class CrashHeard:
    """Hears among a job's lines in which library it crashed: `inside`, as in "infer_shapes of ONNX"."""

    def __init__(self) -> None:
        self.inside = ""
        self._begun = self._framed = False

    def hears(self, line: bytes) -> bool:
        """Return whether a line tells of a crash, which is the last that a job tells."""
        self._begun = self._begun or line.startswith(_FIRST)
        if self._begun and not self._framed and (frame := _FRAME.match(line.decode(errors="replace"))):
            self._framed = True
            if library := _LIBRARY.match(
                frame[1]
            ):  # Else it is in what is called without a wrapper in Python
                self.inside = f"{frame[2]} of {_CALLED.get(library[1], library[1])}"
        return self._begun
