"""Other people's programs alone and beside honed: `python -m benchmarks.native [PROGRAM ...]`.

The folder gets the programs from npm, PyPI and Debian 13 (for root), unless it has them. All are used for
--settle seconds beside a service of the benchmark's own, with libhoned-ort.so preloaded, while it compiles
their models; then each is used by turns, alone and beside honed. Answers must be equal within a tolerance.

    own, beside   median of a use, in ms; ratio: of a use beside honed over one alone right before it
    routed        the share of its runs of ONNX Runtime that the service answered in these turns
    switching     what trying, comparing and failed runs have cost until then, by the library's own account;
                  as a share of the time since the program began, and of the time of its uses
    memory        the most that it had, in MiB
"""

from __future__ import annotations

import sys

from benchmarks.beside.comparison import compare, parse

from .programs import build, debian_programs, programs


def main() -> int:
    """Run the command line; 1 where answers differ."""
    options = parse("benchmarks.native", __doc__, settle=240.0)
    folder, library = options.folder, build(options.folder)
    return compare({**programs(folder, library), **debian_programs(folder, library)}, options)


if __name__ == "__main__":
    sys.exit(main())
