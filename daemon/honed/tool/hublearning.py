"""`hone hub learn`: a prior out of records."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from honed.daemon.settings.schema import Limits
from honed.jobs import priorfile
from honed.jobs.commands import Learn
from honed.jobs.events import Learned
from honed.protocol.errors import NotFound, Unimplemented
from honed.protocol.methods import CONFIG_SHOW
from honed.protocol.strict import to_plain
from honed.runtime.client import Client

from .compiler import followed, started
from .output import Console, Output, clean, fields, line, table
from .parser import UsageError, add_action

_MOST_TASKS = 20  # that are shown, in a screen's height


def add_learning(actions: Any) -> None:
    """Add this action to those of `hone hub`."""
    learn = add_action(
        actions,
        "learn",
        _learn,
        about="learn a family's prior from records, by which schedules are chosen before any was measured",
        details=(
            "FROM is a hub, by its URL or folder, or what 'hone records export' wrote, or a folder of such. "
            "Of a hub only records signed by keys that are trusted are taken. A record names its task by a "
            "hash, so the models are needed, too. The prior is judged by tasks that it did not learn from; "
            "one that picks no better than what serves without it is not written, and the exit status is 1."
        ),
        examples="""\
            hone hub learn records/ --models models/ -o cpu.prior
            hone hub learn https://hub.example/honed --models models/ -o mali.prior --bench mali-g610
            hone hub learn predicted.jsonl --models models/ --bench mali-g610 -o mali.prior""",
    )
    learn.add_argument("source", metavar="FROM", help="a hub, a file of records, or a folder of such files")
    learn.add_argument(
        "--models", metavar="PATH", type=Path, required=True, help="the models' ONNX file, or their folder"
    )
    learn.add_argument("-o", "--output", metavar="F", type=Path, required=True, help="the file to write")
    learn.add_argument(
        "--owner", metavar="KEY", help="who signed the hub's list (default: of the service's configuration)"
    )
    family = learn.add_mutually_exclusive_group()
    family.add_argument(
        "--device", metavar="SPEC", help="OpenCL device whose family is learned of (default: the best here)"
    )
    family.add_argument("--profile", metavar="FILE", type=Path, help="profile of such a device")
    family.add_argument("--bench", metavar="NAME", help="bench of such a device: mali-g610")


def _learn(arguments: argparse.Namespace, output: Output) -> int:
    if arguments.output.is_dir():
        raise UsageError(f"{arguments.output} is a folder; name the file to write")
    with _records(arguments) as records:
        job = Learn(
            file=records,
            models=arguments.models,
            output=arguments.output,
            device=arguments.device,
            profile=arguments.profile,
            bench=arguments.bench,
        )
        with started(job, Limits()) as child:
            done = followed(child, "learn")
    output.emit(to_plain(done), lambda console: print_learned(console, done))
    return 0 if done.output else 1


def check_hub() -> None:
    """Raise Unimplemented without honed-hub."""
    if importlib.util.find_spec("honed.hub") is None:
        raise Unimplemented("hubs need the package honed-hub; 'apt install honed-hub'")


@contextmanager
def _records(arguments: argparse.Namespace) -> Iterator[Path]:
    """Where the files of records are; those of a hub are fetched and checked first."""
    source: str = arguments.source
    if "://" not in source and not any((Path(source) / part).exists() for part in ("hub.json", "boards")):
        yield Path(source)
        return
    check_hub()
    from honed.hub import gathering, machine, remote
    from honed.hub.minisign import PublicKey
    from honed.hub.settings import HubConfig

    store = remote.store(source if "://" in source else str(Path(source).absolute()))
    trusted: Mapping[str, PublicKey] = {}
    if arguments.owner:
        owner: PublicKey | None = PublicKey.parse(arguments.owner)
    else:
        with Client(arguments.socket) as client:
            settings = HubConfig.of(client.ask(CONFIG_SHOW))
        trusted, owner = settings.keys, settings.owner
    memory = machine.place(os.environ, os.getuid()).remembered()
    with tempfile.TemporaryDirectory(prefix="honed-learn-") as folder:
        found = gathering.gather(store, trusted, owner, memory, Path(folder), time.time())
        for problem in found.problems:
            print(f"hone: {clean(problem)}", file=sys.stderr)
        if not found.records:
            raise NotFound(f"{store.url} has no records by keys that are trusted; see 'hone hub status'")
        yield Path(folder)


def print_learned(console: Console, done: Learned) -> None:
    """What was learned, and the tasks where the prior's picks are worst."""
    rows = [
        (
            one.task,
            str(one.candidates),
            f"{one.correlation:.2f}",
            f"{one.prior:.2f}",
            f"{one.without:.2f}",
            "rule" if one.rule else "any",
        )
        for one in sorted(done.tasks, key=lambda one: one.prior)[:_MOST_TASKS]
    ]
    columns = ("task held out", ">candidates", ">correlation", ">prior", ">without", "which is")
    console.print(table(columns, rows))
    if more := len(done.tasks) - len(rows):
        line(console, f"and {more} more where the prior's picks are no worse; --json has all")
    summary = [
        ("family", done.family),
        ("candidates", str(done.candidates)),
        ("correlation", f"{done.correlation:.2f} on average, 1 ranks all rightly"),
        ("picks", f"{done.prior:.2f} of the best's speed, {done.without:.2f} without a prior"),
    ]
    console.print(fields(summary))
    if done.output:
        line(console, f"The prior is written to {done.output}. To choose by it from now on:")
        own = priorfile.SYSTEM / f"{done.family}{priorfile.SUFFIX}"
        line(console, f"  sudo install -D -m 644 {done.output} {own}")
    else:
        line(console, "The prior picks no better than what serves without one, and was not written.")
