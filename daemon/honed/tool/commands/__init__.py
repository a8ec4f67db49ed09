"""Lists the commands of `hone` by groups, those of extensions among them.

Only the module of the command that runs is imported, so that all commands start quickly. An extension's
command is found as an entry point of the group `honed.commands`.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Final, NamedTuple

from honed.tool.parser import Parser

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


@cache
def _of_extensions() -> dict[str, EntryPoint]:
    """Return the commands of installed extensions. Reading them is slow, and most commands never do."""
    from importlib.metadata import entry_points

    return {each.name: each for each in entry_points(group="honed.commands")}


class CommandRow(NamedTuple):
    """A command `hone NAME`, which `define_NAME` in `module`, a module of this package, defines.

    With `package`, the command's Debian package, an entry point names the function instead.
    """

    name: str
    module: str
    about: str
    package: str = ""

    def is_installed(self) -> bool:
        """Return whether the command is installed."""
        return not self.package or self.name in _of_extensions()

    def define(self, command: Parser) -> None:
        """Define the command's arguments and function, or name the package that is missing."""
        if not self.package:
            module = import_module(f".{self.module}", __package__)
            getattr(module, f"define_{self.name}")(command)
        elif self.is_installed():
            _of_extensions()[self.name].load()(command)
        else:
            command.missing = f"hone {self.name} is in the package {self.package}: apt install {self.package}"


# Grouped and ordered as in 'hone --help'.
# fmt: off
GROUPS: Final = {
    "models": (
        CommandRow("add", "adding", "add a model: serve it, compile it, verify it"),
        CommandRow("list", "models", "list the models of the service"),
        CommandRow("show", "models", "show where a model comes from, how it was verified, and its kernels"),
        CommandRow("remove", "models", "remove a model and its files for good"),
        CommandRow("set", "models", "run requests together, or warm a model up"),
        CommandRow("rollback", "models", "serve an earlier version of a model again"),
        CommandRow("pin", "models",
                   "keep a version of a model from being replaced by tuning, or have one engine serve it"),
        CommandRow("unpin", "models", "release the pinned version and engine of a model"),
    ),
    "answers": (
        CommandRow("infer", "infer", "run a model once on .npy files, or on made-up inputs"),
        CommandRow("bench", "infer", "time a model through the socket, as an app sees it"),
        CommandRow("profile", "profiling",
                   "show where the time of an inference goes, kernel by kernel or node by node"),
    ),
    "tuning": (
        CommandRow("tune", "tuning", "make a model faster on this machine"),
        CommandRow("tasks", "tasks", "list the tuning tasks of a model"),
        CommandRow("history", "history", "show how tuning made a model faster, and its versions"),
        CommandRow("records", "records", "export and import what tuning has learned"),
        CommandRow("faults", "faults", "list quarantined candidates and faults of the GPU"),
    ),
    "the service": (
        CommandRow("status", "models",
                   "say what the service is doing, on which device, and whether the machine is idle"),
        CommandRow("top", "top", "watch what the service serves, and how fast"),
        CommandRow("report", "",
                   "draw the service on one page: models, latencies, what tuning gained, faults, the machine",
                   "honed"),
        CommandRow("metrics", "models", "print every figure the service has of itself, as OpenMetrics text"),
        CommandRow("config", "config", "show every setting with its value and where that comes from"),
        CommandRow("doctor", "doctor",
                   "explain this machine's OpenCL and say what to do about what is wrong"),
    ),
    "several machines": (
        CommandRow("hub", "", "share what tuning has learned with other machines", "honed-hub"),
        CommandRow("farm", "", "search on many machines at once", "honed-farm"),
    ),
    "files, without the service": (
        CommandRow("demo", "compiling", "write a demo model as an ONNX file"),
        CommandRow("fit", "compiling",
                   "say what of an ONNX file would be compiled, and what the CPU engine would run"),
        CommandRow("compile", "compiling",
                   "compile an ONNX file to a .honed file, here and without the service"),
    ),
}
# fmt: on
COMMANDS: Final = tuple(row for rows in GROUPS.values() for row in rows)
