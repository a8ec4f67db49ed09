"""Files that requests, an ONNX file and a candidate pass through: python -m benchmarks.passage CHECKOUT...

Counts the files in which a function runs, in any process, of a real service on the first OpenCL device: of
warm requests those that each of several passes through; of a client's first request those, and all that it
passes through; of the others all that one passes through, from `hone add` to READY, and from when the machine
is idle until the tuner's new version. Only those of warm requests are counted where something runs in ten
seconds of rest. Modules that only hold data are not counted, nor code that this model or device does not
need.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

_HERE: Final = Path(__file__).parent
_FOLDERS: Final = ("", "daemon", "runtime", "tuner")


def passed(root: Path) -> dict[int, set[str]]:
    """Return the files by the windows of `scenario`, below the root of a checkout."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HONED_", "XDG_"))}
    with tempfile.TemporaryDirectory(prefix="honed-passage-") as name:
        folder = Path(name)
        (folder / "window").write_bytes(b"\0")
        (folder / "notes").touch()
        paths = [str(_HERE / "hook"), *(str(root / part) for part in _FOLDERS)]
        environment = kept | {"PYTHONPATH": os.pathsep.join(paths), "HONED_PASSAGE": name}
        done = subprocess.run([sys.executable, _HERE / "scenario.py", name], env=environment, check=False)
        if done.returncode:
            log = (folder / "log").read_text()[-2000:] if (folder / "log").exists() else ""
            raise SystemExit(f"{root} cannot be looked at\n{log}")
        found: dict[int, set[str]] = defaultdict(set)
        for line in (folder / "notes").read_text().splitlines():
            number, path = line.split(" ", 1)
            if path.startswith(f"{root}/"):
                found[int(number)].add(path.removeprefix(f"{root}/"))
    return found


def ways(found: Mapping[int, set[str]]) -> dict[str, list[str]]:
    """Return the files by what passes through them."""
    from .scenario import CANDIDATE, FILE, REQUEST, REQUESTS, REST

    warm = set.intersection(*(found[REQUEST + n] for n in range(1, REQUESTS)))
    return {
        "a cold request": sorted(warm | (found[REQUEST] - found[REST])),
        "a warm request": sorted(warm),
        "an ONNX file": sorted(found[FILE] - found[REST]),
        "a candidate": sorted(found[CANDIDATE] - found[REST]),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table of files."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.passage", description=__doc__)
    parser.add_argument("checkouts", nargs="*", type=Path, default=[_HERE.parents[1]])
    parser.add_argument("--names", action="store_true", help="name the files, too")
    asked = parser.parse_args(arguments)
    columns = {root: ways(passed(root.resolve())) for root in asked.checkouts}
    print("| files passed through by |", " | ".join(map(str, columns)), "|")
    print("| --- |", " | ".join("---:" for _ in columns), "|")
    for what in next(iter(columns.values())):
        print(f"| {what} |", " | ".join(str(len(found[what])) for found in columns.values()), "|")
    if asked.names:
        for root, found in columns.items():
            for what, files in found.items():
                print(f"\n{root}, {what}:", *files, sep="\n  ")


if __name__ == "__main__":
    main()
