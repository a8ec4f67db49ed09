"""A stand-in for the compiler and tuner, for tests of what surrounds them."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from honed.runtime.compiled import modelfile
from honed.runtime.compiled.model import PrecisionChoice
from tests.runtime.builder import Builder

# "Compiles" a source by looking up a compiled file that was made for it.
_COMPILE = """
import hashlib, json, os, pathlib, shutil, signal, sys, threading, time

def say(**event): print(json.dumps(event), flush=True)

def option(name):
    for i, argument in enumerate(sys.argv):
        if argument == name: return sys.argv[i + 1]
        if argument.startswith(name + "="): return argument.partition("=")[2]
    return None

if sys.argv[1] in ("check", "compile"):
    source = pathlib.Path(sys.argv[-1]).read_bytes()
    key = hashlib.sha256(source).hexdigest()
    checking = sys.argv[1] == "check"
    first = pathlib.Path(__file__).with_name(key + ".py")
    if first.exists(): exec(first.read_text())
    if checking:
        say(event="done")
        sys.exit(0)
    shutil.copy(pathlib.Path(__file__).with_name(key), option("--output"))
    say(event="done", output=option("--output"), sha256=key, precision="fp32", why="", notes=[], kernels=1,
        launches=1, seconds=0.1, proof=dict(reference="none", probes=0, device=None, error={}, tolerance={}))
    sys.exit(0)
"""


class StubTuner:
    """A package `honed.tuner` of our own making, found before the real one under `environment`."""

    def __init__(self, folder: Path) -> None:
        self._package = folder / "stub" / "honed" / "tuner"
        self._package.mkdir(parents=True)
        (self._package / "__init__.py").touch()
        self.behave("")

    @property
    def environment(self) -> Mapping[str, str]:
        """For the processes that should find it."""
        return {"PYTHONPATH": os.pathsep.join((str(self._package.parents[1]), *_python_path()))}

    def behave(self, code: str) -> None:
        """What it does when it is started for anything but compiling; `say(**event)` writes an event."""
        (self._package / "__main__.py").write_text(f"{_COMPILE}\n{code}\n")

    def first(self, source: Path, code: str) -> None:
        """What it does before it compiles or, `checking`, checks `source`."""
        self.beside(f"{_sha256(source)}.py").write_text(code)

    def beside(self, name: str) -> Path:
        """A file that its code finds with `pathlib.Path(__file__).with_name(name)`."""
        return self._package / name

    def knows(self, source: Path, builder: Builder, choice: PrecisionChoice | None = None) -> None:
        """Make it compile `source` to the model of `builder`."""
        write_from(source, builder, self.beside(_sha256(source)), choice=choice)


def write_from(
    source: Path,
    builder: Builder,
    target: Path,
    *,
    precision: str = "fp32",
    choice: PrecisionChoice | None = None,
) -> Path:
    """A compiled file that says it was made from `source`."""
    model = builder.build()
    made_from = dataclasses.replace(
        model.source, sha256=_sha256(source), filename=source.name, precision=precision, choice=choice
    )
    modelfile.write(target, dataclasses.replace(model, source=made_from), builder.constants)
    return target


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _python_path() -> tuple[str, ...]:
    kept = os.environ.get("PYTHONPATH")
    return (kept,) if kept else ()
