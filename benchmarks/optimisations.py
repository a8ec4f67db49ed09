"""Finds models ONNX Runtime optimises wrongly: `python -m benchmarks.optimisations MODEL.onnx|FOLDER...`.

Each is checked as the service checks models of its CPU engine (docs/engines.md): a row has the level that
serves, the error of the highest level, the seconds of the check, and what is wrong or why it could not be
checked. Of a folder all `*.onnx` in it and below are checked, equal files once. With `--only-wrong` rows of
right models are left out. The last line counts.
"""

from __future__ import annotations

import argparse
import hashlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from honed.protocol.errors import HonedError
from honed.protocol.values import OptimisationCheck
from honed.runtime.engines import HIGHEST
from honed.tuner.verify import levels
from honed.tuner.verify.confined import DEFAULT_LIMITS


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.optimisations", description=__doc__)
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL|FOLDER")
    parser.add_argument("--only-wrong", action="store_true")
    options = parser.parse_args()
    print("| model | level | error | s | what is wrong, or why it is not checked |\n|---|---|---|---|---|")
    seconds: list[float] = []
    counted: Counter[str] = Counter()
    for file in _files(options.models):
        try:
            found = levels.of_file(file, {}, DEFAULT_LIMITS)
        except HonedError as error:
            found = OptimisationCheck(level=HIGHEST, checked=False, error=None, why=str(error), seconds=0.0)
        state = _state(found)
        counted[state] += 1
        if found.checked:
            seconds.append(found.seconds)
        if state == "wrong" or not options.only_wrong:
            off = "-" if found.error is None else f"{found.error:.2g}"
            level = found.level if found.checked else "?"
            print(f"| {_name(file)} | {level} | {off} | {found.seconds:.1f} | {found.why} |", flush=True)
    took = f"; {median(seconds):.1f} s each in the middle, {max(seconds):.1f} s at most" if seconds else ""
    print(f"{counted['right']} right, {counted['wrong']} wrong, {counted['not checked']} not checked{took}")
    return 0


def _state(found: OptimisationCheck) -> str:
    if not found.checked:
        return "not checked"
    return "right" if found.level == HIGHEST else "wrong"


def _files(given: list[Path]) -> Iterator[Path]:
    """Yield each file once, by its content."""
    seen: set[bytes] = set()
    for path in given:
        for file in sorted(path.rglob("*.onnx")) if path.is_dir() else [path]:
            digest = hashlib.sha256(file.read_bytes()).digest()
            if digest not in seen:
                seen.add(digest)
                yield file


def _name(file: Path) -> str:
    return file.name if file.stem != "model" else f"{file.parent.name}/{file.name}"


if __name__ == "__main__":
    raise SystemExit(main())
