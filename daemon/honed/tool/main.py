"""Provides `hone`, the command line. Exit status: 0 done, 1 failed, 2 used wrongly, 130 interrupted."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Sequence

from honed.protocol.errors import HonedError
from honed.runtime import HONED_VERSION

from .commands import COMMANDS, GROUPS
from .output import Output, clean, print_json
from .parser import Parser, UsageError, add_command, add_global_options

DONE, FAILED, USED_WRONGLY = 0, 1, 2
INTERRUPTED = 128 + signal.SIGINT
BROKEN_PIPE = 128 + signal.SIGPIPE
_EXAMPLES = """\
examples:
  hone demo lightglue -o lightglue.onnx
  hone add lightglue.onnx
  hone infer lightglue --random --output-dir out
  hone profile lightglue
  hone tune lightglue --minutes 20
  hone doctor

environment:
  HONED_SOCKET   the service's socket, as --socket
  HONED_DEVICE   the OpenCL device that compile, doctor and farm worker use, as --device
  HONED_FARM     the farm that scheduler and worker are of, as their URL
  HONED_TRACEBACK=1   show where an error in hone itself happened

'hone COMMAND --help' explains a command.
"""


_START = """\
honed serves ONNX models on this machine. To begin:

  hone demo lightglue -o lightglue.onnx   write a model to try
  hone add lightglue.onnx                 serve it at once; compile and verify it
  hone infer lightglue --random           run it on made-up inputs
  hone status                             what the service does, and whether it may tune
  hone doctor                             what is wrong, and what to do

'hone --help' lists all commands, 'hone COMMAND --help' explains one.
"""


class _Grouped(argparse.RawDescriptionHelpFormatter):
    """A help formatter that puts a heading before the first listed command of each group."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog)
        self._headings = {row.name: group for group, rows in GROUPS.items() for row in rows}

    def _format_action(self, action: argparse.Action) -> str:
        text = super()._format_action(action)
        group = self._headings.pop(action.dest, "")
        if not group:
            return text
        self._headings = {name: other for name, other in self._headings.items() if other != group}
        return f"\n  {group}:\n{text}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; print errors instead of raising them."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # The caller closed it
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # The reader closed our output, so it needs no message
        _give_up_stdout()
        return BROKEN_PIPE


def parser(argv: Sequence[str] | None = None) -> Parser:
    """Return the parser of the whole command line.

    With `argv`, commands that it does not name are defined by name only. If it names none, the help is shown,
    so commands of extensions that are not installed are omitted.
    """
    made = Parser(
        prog="hone",
        description="Models on this machine's OpenCL device, through the honed service.",
        epilog=_EXAMPLES,
        formatter_class=_Grouped,
        allow_abbrev=False,
    )
    add_global_options(made)
    version = f"%(prog)s {HONED_VERSION}"
    made.add_argument("--version", action="version", version=version, help="print the version and exit")
    commands = made.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser, title="commands")
    named = [each for each in COMMANDS if each.name in (argv or ())]
    for each in COMMANDS:
        if not named and not each.is_installed():
            continue
        command = add_command(commands, each.name, each.about)
        if argv is None or each in named:
            each.define(command)
    return made


def _run(argv: Sequence[str]) -> int:
    as_json = "--json" in argv
    try:
        status = _command(argv)
        sys.stdout.flush()
    except UsageError as error:
        return _fail(as_json, USED_WRONGLY, "INVALID_ARGUMENT", str(error))
    except HonedError as error:
        return _fail(as_json, FAILED, error.code, str(error), getattr(error, "reasons", ()))
    except BrokenPipeError:
        raise
    except MemoryError:
        return _fail(as_json, FAILED, "RESOURCE_EXHAUSTED", "memory ran out; close something and try again")
    except OSError as error:
        _flush_or_give_up()
        what = f"{error.filename}: " if error.filename else ""
        return _fail(as_json, FAILED, "INTERNAL", f"{what}{error.strerror or error}; mend that and try again")
    except Exception as error:
        if os.environ.get("HONED_TRACEBACK"):
            raise
        sentence = f"an error in hone itself ({type(error).__name__}: {error}); report it with the output of "
        return _fail(as_json, FAILED, "INTERNAL", f"{sentence}the same command under HONED_TRACEBACK=1")
    return status


def _command(argv: Sequence[str]) -> int:
    if not argv:
        print(_START, end="")
        return DONE
    try:
        arguments = parser(argv).parse_args(argv)
    except SystemExit as exit_:  # --help and --version have printed
        return int(exit_.code or 0)
    status: int | None = arguments.run(arguments, Output(json=arguments.json))
    return status or DONE


def _fail(as_json: bool, status: int, code: str, message: str, reasons: Sequence[str] = ()) -> int:
    """Print an error on stderr, and on stdout too where JSON is expected there."""
    print(f"hone: {clean(message)}", file=sys.stderr)
    for reason in (r for r in reasons if r not in message):
        print(f"  - {clean(reason)}", file=sys.stderr)
    if as_json:
        with contextlib.suppress(OSError):  # Stdout itself may have failed; stderr has the sentence
            print_json({"error": {"code": code, "message": message, "reasons": list(reasons)}})
        _flush_or_give_up()
    return status


def _flush_or_give_up() -> None:
    try:
        sys.stdout.flush()
    except OSError:
        _give_up_stdout()


def _give_up_stdout() -> None:
    """Redirect stdout to /dev/null, lest Python complain when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
