"""Runs an app with honed in the place of onnxruntime: `python -m honed.ort APP.py|-m MODULE ...`."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from honed import standin

_USAGE = """usage: python -m honed.ort [--socket PATH] [--fallback] APP.py [ARGUMENT ...]
       python -m honed.ort [--socket PATH] [--fallback] -m MODULE [ARGUMENT ...]

Runs a Python app that uses onnxruntime with honed in its place; the app stays as it is.

  --socket PATH   where the service listens, if not at its usual place
  --fallback      sessions that honed cannot serve are run by onnxruntime, where it is installed

Examples:
  python -m honed.ort read.py picture.png
  python -m honed.ort --fallback -m rapidocr_onnxruntime.main -img picture.png
"""


def main(arguments: list[str]) -> int:
    """Run the command line."""
    given = list(arguments)
    while given and given[0].startswith("--"):
        option = given.pop(0)
        if option == "--fallback":
            os.environ["HONED_ORT_FALLBACK"] = "1"
        elif option == "--socket" and given:
            os.environ["HONED_SOCKET"] = given.pop(0)
        elif option == "--help":
            print(_USAGE, end="")
            return 0
        else:
            print(f"{option} is not known here\n\n{_USAGE}", end="", file=sys.stderr)
            return 2
    if given[:1] == ["-h"] or not given or given == ["-m"]:
        print(_USAGE, end="", file=sys.stdout if given[:1] == ["-h"] else sys.stderr)
        return 0 if given[:1] == ["-h"] else 2
    standin.install()
    os.environ["HONED_ORT"] = "1"  # programs that the app starts
    if given[0] == "-m":
        sys.argv = given[1:]
        sys.path[0] = str(Path.cwd())
        runpy.run_module(given[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = given
        sys.path[0] = str(Path(given[0]).resolve().parent)
        runpy.run_path(given[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
