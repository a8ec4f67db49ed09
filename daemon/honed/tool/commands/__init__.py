"""The commands of `hone`, one module for a group of them.

Only the module of the command that runs is imported, so that each imports what it needs, and all start
quickly.
"""

from __future__ import annotations

from importlib import import_module
from typing import Final, NamedTuple

from honed.tool.parser import Parser


class Command(NamedTuple):
    """`hone NAME`, of which the function `define_NAME` of `module`, in this package, says more."""

    name: str
    module: str
    about: str

    def define(self, command: Parser) -> None:
        """Tell its parser what it takes, and what carries it out."""
        module = import_module(f".{self.module}", __package__)
        getattr(module, f"define_{self.name}")(command)


# In the order of 'hone --help'.
# fmt: off
COMMANDS: Final = (
    Command("status", "models",
            "say what the service is doing, on which device, and whether the machine is idle"),
    Command("list", "models", "list the models of the service"),
    Command("show", "models", "show where a model comes from, how it was proven right, and its kernels"),
    Command("remove", "models", "remove a model and its files for good, or a chain of models"),
    Command("add", "adding", "add a model: serve it, compile it, prove it right"),
    Command("chain", "chains", "have several models of the service run one after the other, as one model"),
    Command("fit", "fit", "say what of an ONNX file would be compiled, and what the CPU engine would run"),
    Command("infer", "infer", "run a model once on .npy files, or on made-up inputs"),
    Command("bench", "bench", "time a model through the socket, as an app sees it"),
    Command("profile", "profiling",
            "show where the time of an inference goes, kernel by kernel or node by node"),
    Command("tune", "tuning", "make a model faster on this machine"),
    Command("tasks", "tasks", "list the tuning tasks of a model"),
    Command("history", "history", "show how tuning made a model faster, and its versions"),
    Command("rollback", "versions", "serve an earlier version of a model again"),
    Command("pin", "versions",
            "keep a version of a model from being replaced by tuning, or have one engine serve it"),
    Command("unpin", "versions", "let go of the version and the engine of a model that are pinned"),
    Command("set", "setting", "have requests run together, or a model warmed up"),
    Command("records", "records", "export and import what tuning has learned"),
    Command("hub", "hub", "share what tuning has learned with other machines"),
    Command("faults", "faults", "list candidates in quarantine and faults of the GPU"),
    Command("compile", "compiling", "compile an ONNX file to a .honed file, here and without the service"),
    Command("demo", "compiling", "write a demo model as an ONNX file"),
    Command("farm", "farm", "search on many machines at once"),
    Command("top", "top", "watch what the service serves, and how fast"),
    Command("report", "reporting",
            "draw the service on one page: models, latencies, what tuning won, faults, the machine"),
    Command("metrics", "metrics", "print every figure the service has of itself, as OpenMetrics text"),
    Command("config", "config", "show every setting with its value and where that comes from"),
    Command("doctor", "doctor", "explain this machine's OpenCL and say what to do about what is wrong"),
)
# fmt: on
