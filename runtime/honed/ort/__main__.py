"""Runs an app with its ONNX Runtime's runs routed to honed: `python -m honed.ort APP.py|-m MODULE ...`."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from pathlib import Path

from honed.ort import install

_USAGE = """usage: python -m honed.ort [--socket PATH] APP.py [ARGUMENT ...]
       python -m honed.ort [--socket PATH] -m MODULE [ARGUMENT ...]

Runs a Python app that uses onnxruntime; runs go to honed's compiled forms where that is faster for the app.

  --socket PATH   where the service listens, if not at its usual place

HONED_ORT_LOG=1 writes a line on each change to stderr; docs/onnxruntime.md has the other variables.

Examples:
  python -m honed.ort read.py picture.png
  HONED_ORT_LOG=1 python -m honed.ort -m rapidocr_onnxruntime.main -img picture.png
"""


def main(arguments: list[str]) -> int:
    """Run the command line."""
    given = list(arguments)
    while given and given[0].startswith("--"):
        option = given.pop(0)
        if option == "--socket" and given:
            os.environ["HONED_SOCKET"] = given.pop(0)
        elif option == "--help":
            print(_USAGE, end="")
            return 0
        elif option != "--fallback":  # Earlier versions had it; the app's session always falls back
            print(f"{option} is not known here\n\n{_USAGE}", end="", file=sys.stderr)
            return 2
    if given[:1] == ["-h"] or not given or given == ["-m"]:
        print(_USAGE, end="", file=sys.stdout if given[:1] == ["-h"] else sys.stderr)
        return 0 if given[:1] == ["-h"] else 2
    install()
    importlib.util.find_spec("onnxruntime")  # Prints what to install if it is missing
    os.environ["HONED_ORT"] = "1"  # Programs that the app starts inherit it
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
