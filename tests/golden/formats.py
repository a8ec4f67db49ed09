"""Every stored and sent format, each as one sample: `python -m tests.golden.formats` writes the golden files.

A sample's values follow from types and the order of fields alone, so that renaming a class or a field in the
code changes none. Union types are sampled by each of their classes where they are the items of a list.
"""

from __future__ import annotations

import dataclasses
import json
import sqlite3
import sys
import tempfile
import typing
from collections.abc import Callable, Mapping
from contextlib import closing
from enum import StrEnum
from pathlib import Path, PurePath
from typing import Any, Literal

import msgpack

from honed.daemon.features import user_models
from honed.daemon.observe import latencies, usage
from honed.daemon.store import store
from honed.daemon.worker import calls as worker_calls
from honed.farm import rows
from honed.hub import layout, memory
from honed.jobs import commands, events, priorfile
from honed.machine.profile import DeviceProfile
from honed.process.rpc import Call
from honed.protocol import errors, strict
from honed.protocol.methods import METHODS
from honed.runtime.compiled.model import CompiledModel
from honed.runtime.execution import cpuparts
from honed.tuner.records import exchange
from honed.tuner.records import rows as record_rows
from honed.tuner.records.store import Records
from honed.tuner.service import view

FOLDER = Path(__file__).parent
CHOICES = {"precision": "fp16", "model": "lightglue"}  # of command lines, which refuse other words
Entry = tuple[Any, Callable[[], Any]]  # plain data as it is stored or sent, and what reads it back


def sample(hint: Any, number: int = 1, inside: tuple[type, ...] = (), *, in_list: bool = False) -> Any:
    """Return a value of a type; `number` makes it differ from others.

    A class that contains itself, which `inside` shows, is left out where it may be.
    """
    members = [member for member in strict.members_of(hint) if member is not type(None)]
    kind = members[0] if members else type(None)
    if kind in inside and (len(members) < len(strict.members_of(hint)) or in_list):
        return None
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return arguments[number % len(arguments)]
    if origin is tuple:
        items = strict.members_of(arguments[0]) if arguments[1:] == (...,) else arguments
        values = tuple(sample(item, number + n, inside, in_list=True) for n, item in enumerate(items))
        return tuple(value for value in values if value is not None)
    if origin in (dict, Mapping):
        return {sample(arguments[0], number): sample(arguments[1], number, inside)}
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return kind(
            **{
                field.name: sample(hints[field.name], n, (*inside, kind))
                for n, field in enumerate(dataclasses.fields(kind), 1)
            }
        )
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return list(kind)[number % len(kind)]
    if isinstance(kind, type) and issubclass(kind, PurePath):
        return kind(f"/folder/{number}")
    return SCALARS[kind](number)


SCALARS: dict[Any, Callable[[int], Any]] = {
    bool: lambda number: True,
    int: lambda number: number,
    float: lambda number: number + 0.5,
    str: lambda number: f"text {number}",
    bytes: lambda number: bytes([number]),
    memoryview: lambda number: bytes([number]),
    type(None): lambda number: None,
    Any: lambda number: {"any": number},
}


def plain_of(kind: Any, **options: bool) -> Entry:
    """Return the entry of a dataclass that `strict` writes."""
    value = sample(kind)
    plain = strict.to_plain(value, **options)
    return plain, lambda: strict.to_plain(strict.from_plain(kind, plain, where="sample"), **options)


# Of a manifest, as samples are numbered.
MANIFEST = (
    "name", "added", "compiled", "history", "sources", "shapes", "precision", "device", "placed", "interface",
    "wanted", "chosen", "why", "by_hand", "times", "pinned_engine", "awaits_compiler", "state", "owner",
    "settings", "optimisation", "raced",
)  # fmt: skip


def manifest() -> Entry:
    """Return the entry of a manifest, in which the decision between engines has no place of its own."""
    fields = {
        each.wire: each for kind in (store.EngineDecision, store.Manifest) for each in strict.fields_of(kind)
    }
    values = {wire: sample(fields[wire].hint, n, (store.Manifest,)) for n, wire in enumerate(MANIFEST, 1)}

    def made(kind: Any, **more: Any) -> Any:
        own = [each for each in strict.fields_of(kind) if each.wire in values]
        return kind(**{each.name: values[each.wire] for each in own}, **more)

    plain = store.to_plain(made(store.Manifest, decision=made(store.EngineDecision)))

    def ordered(plain: dict[str, Any]) -> dict[str, Any]:
        return {name: plain[name] for name in MANIFEST if name in plain}

    return ordered(plain), lambda: ordered(store.to_plain(store.from_plain(plain, "sample")))


def stored() -> dict[str, Entry]:
    """Return what the service, the tuner and the hub store as JSON, and profiles, by format."""
    return {
        "manifest": manifest(),
        "usage": plain_of(usage._Saved),
        "latencies": plain_of(latencies.Curves),
        "apps": plain_of(user_models.UserQuotas),
        "tuner": plain_of(view._File),
        "prior": plain_of(priorfile._PriorHeader),
        "hub state": plain_of(memory.HubState),
        "hub cache": plain_of(memory._Whole),
        "hub index": plain_of(layout.BoardIndex),
        "hub keyring": plain_of(layout.Keyring),
        "hub overview": plain_of(layout.Overview),
        "profile": plain_of(DeviceProfile),
    }


def compiled() -> dict[str, Entry]:
    """Return the header of a compiled file."""
    return {"header": plain_of(CompiledModel)}


def records() -> dict[str, Entry]:
    """Return the tables of the records, their columns in order, and a line of exported records."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "records.sqlite"
        Records.open(path).close()
        with closing(sqlite3.connect(path)) as connection:
            tables = dict(connection.execute("SELECT name, sql FROM sqlite_master WHERE sql > ''"))
    return {
        "tables": (tables, lambda: tables),
        "candidates": (record_rows._COLUMNS, lambda: record_rows._COLUMNS),
        "line": plain_of(exchange.Line),
    }


def socket() -> dict[str, Entry]:
    """Return the parameters and the result of each method of the service, and each error."""
    entries = {}
    for method in METHODS.values():
        entries[f"{method.name} parameters"] = plain_of(method.params)
        entries[f"{method.name} result"] = plain_of(method.result)
    for name, kind in errors._ERROR_TYPES.items():
        entries[f"error {name}"] = error_of(kind)
    return entries


def error_of(kind: type[errors.HonedError]) -> Entry:
    """Return the entry of an error, whose lists are filled where it has some."""
    error = kind("a sentence")
    for name in vars(error):
        setattr(error, name, 7 if isinstance(getattr(error, name), int) else ("a", "b"))
    plain = errors.error_to_map(error)
    return plain, lambda: errors.error_to_map(errors.error_from_map(plain))


def jobs() -> dict[str, Entry]:
    """Return the command line of each job, and each event with the news of its way."""
    entries: dict[str, Entry] = {}
    for job in (*commands.JOBS, *commands.extension("farm")):
        entries[" ".join(job.command)] = command_of(job)
    for kind in (*typing.get_args(events.News), *typing.get_args(events.Result)):
        entries[f"event {len(entries)}"] = event_of(kind)
    return entries


def command_of(job: type[commands.Job[Any]]) -> Entry:
    """Return the entry of a job: its arguments."""
    value = sample(job)
    words = {name: word for name, word in CHOICES.items() if hasattr(value, name)}
    arguments = dataclasses.replace(value, **words).arguments()
    return arguments, lambda: commands.parse(arguments, "").arguments()


def event_of(kind: type[Any]) -> Entry:
    """Return the entry of an event."""
    plain = events.to_map(sample(kind))
    result = kind if kind in typing.get_args(events.Result) else events.Done
    return plain, lambda: events.to_map(events.from_map(plain, result))


def farm() -> dict[str, Entry]:
    """Return each row that travels between a search and its boards."""
    kinds = [kind for kind in vars(rows).values() if getattr(kind, "__module__", "") == rows.__name__]
    found = [kind for kind in kinds if isinstance(kind, type) and dataclasses.is_dataclass(kind)]
    return {f"row {number}": row_of(kind) for number, kind in enumerate(found)}


def row_of(kind: type[Any]) -> Entry:
    """Return the entry of a row; an answer of a board says which it is."""
    data = rows.pack(sample(kind))
    read = rows.answer if kind in typing.get_args(rows.Answer) else lambda data: rows.unpack(kind, data)
    return msgpack.unpackb(data), lambda: msgpack.unpackb(rows.pack(read(data)))


def workers() -> dict[str, Entry]:
    """Return the calls of workers and of the processes of CPU partitions, and their answers."""
    entries: dict[str, Entry] = {}
    for module in (worker_calls, cpuparts):
        for kind in vars(module).values():
            if isinstance(kind, type) and issubclass(kind, Call) and dataclasses.is_dataclass(kind):
                if kind.__module__ != module.__name__:
                    continue
                entries[kind.method] = plain_of(kind)
                if dataclasses.is_dataclass(kind.answer()):
                    entries[f"{kind.method} answer"] = plain_of(kind.answer())
    return entries


FORMATS: dict[str, Callable[[], dict[str, Entry]]] = {
    each.__name__: each for each in (stored, compiled, records, socket, jobs, farm, workers)
}


def text_of(entries: dict[str, Entry]) -> str:
    """Return the contents of a golden file: a line for each key of each entry."""
    lines = []
    for name, (plain, _) in entries.items():
        if isinstance(plain, dict):
            lines += [name, *(f"  {key}: {json.dumps(item, default=repr)}" for key, item in plain.items())]
        else:
            lines.append(f"{name}: {json.dumps(plain)}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for name in sys.argv[1:] or FORMATS:
        (FOLDER / f"{name}.txt").write_text(text_of(FORMATS[name]()))
