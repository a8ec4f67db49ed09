"""Reports, with Python's faulthandler, the function in which a job crashed, and parses such reports."""

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
_answers: list[IO[str]] = []  # Streams to which this process reports its crash


@contextmanager
def telling(answers: IO[str]) -> Iterator[None]:
    """Report a crash of this process to its stream of answers during the block."""
    _answers.append(answers)
    tell_again()
    try:
        yield
    finally:
        faulthandler.disable()
        _answers.remove(answers)


def tell_again() -> None:
    """Enable the report again after a library was loaded that handles signals itself, as TVM does."""
    if _answers:
        faulthandler.disable()
        faulthandler.enable(_answers[-1], all_threads=False)


class CrashHeard:
    """A parser of crash reports in a job's lines; `inside` says where, as in "infer_shapes of ONNX"."""

    def __init__(self) -> None:
        self.inside = ""
        self._begun = self._framed = False

    def hears(self, line: bytes) -> bool:
        """Return whether a line belongs to a crash report, which is the last output of a job."""
        self._begun = self._begun or line.startswith(_FIRST)
        if self._begun and not self._framed and (frame := _FRAME.match(line.decode(errors="replace"))):
            self._framed = True
            if library := _LIBRARY.match(frame[1]):  # Libraries without a Python wrapper do not match
                self.inside = f"{frame[2]} of {_CALLED.get(library[1], library[1])}"
        return self._begun
