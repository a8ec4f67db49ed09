"""Implements `hone hub`: shares what tuning learned by a folder of signed files, and learns priors."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from honed.daemon.settings.schema import Limits
from honed.jobs import priorfile
from honed.jobs.commands import Learn
from honed.jobs.events import Learned
from honed.protocol import strict
from honed.protocol.errors import InvalidArgument, NotFound
from honed.protocol.methods import CONFIG_SHOW, check_name
from honed.protocol.params import HintFigures
from honed.protocol.strict import to_plain
from honed.runtime.client import Client
from honed.tool.commands.models import set_aside
from honed.tool.compiler import follow, running_job
from honed.tool.output import Console, Output, clean, fields, line, seconds_text, table
from honed.tool.parser import Parser, Run, UsageError, add_action, add_actions

if TYPE_CHECKING:
    from honed.hub.layout import Keyring, NamedKey
    from honed.hub.machine import HubConfig, HubPlace, HubStatus
    from honed.hub.memory import KeyStanding
    from honed.hub.minisign import SecretKey
    from honed.hub.pulling import Pulled


_MOST_TASKS = 20  # Maximum tasks shown, in a screen's height
_SHOWN: Final = 5  # Maximum sentences shown about refused records
_URL = "where the hub is: a URL or the path of a folder (default: hub.url of the service's configuration)"


def add_learning(actions: Any) -> None:
    """Add the action `learn` to those of `hone hub`."""
    learn = add_action(
        actions,
        "learn",
        _learn,
        about="learn from records a prior, which chooses schedules before any is measured",
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
        with running_job(job, Limits()) as child:
            done = follow(child, "learn")
    output.emit(to_plain(done), lambda console: print_learned(console, done))
    return 0 if done.output else 1


@contextmanager
def _records(arguments: argparse.Namespace) -> Iterator[Path]:
    """Yield the file or folder of records; those of a hub are fetched and checked first."""
    source: str = arguments.source
    if "://" not in source and not any((Path(source) / part).exists() for part in ("hub.json", "boards")):
        yield Path(source)
        return
    from honed.hub import looking, machine, remote
    from honed.hub.minisign import PublicKey

    store = remote.store(_url(source))
    trusted: Mapping[str, PublicKey] = {}
    if arguments.owner:
        owner: PublicKey | None = PublicKey.parse(arguments.owner)
    else:
        with Client(arguments.socket) as client:
            settings = _settings(client)
        trusted, owner = settings.keys, settings.owner
    memory = machine.place(os.environ, os.getuid()).read_state()
    with tempfile.TemporaryDirectory(prefix="honed-learn-") as folder:
        found = looking.gather(store, trusted, owner, memory, Path(folder), time.time())
        for problem in found.problems:
            print(f"hone: {clean(problem)}", file=sys.stderr)
        if not found.records:
            raise NotFound(f"{store.url} has no records by keys that are trusted; see 'hone hub status'")
        yield Path(folder)


def print_learned(console: Console, done: Learned) -> None:
    """Print what was learned, and the tasks where the prior's picks are worst."""
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


def define_hub(hub: Parser) -> None:
    """Define the arguments of `hone hub`."""
    actions = add_actions(hub)
    _add_owning(actions)
    _add_sharing(actions)
    add_learning(actions)


def _add_owning(actions: Any) -> None:
    _add(
        actions,
        "key",
        _key,
        about="show the key of this machine, which is made where it has none",
        details="Others trust it by name, in [hub.keys] of their configuration or in the hub's own list.",
        examples="hone hub key",
    )
    init = _add(
        actions,
        "init",
        _init,
        about="make a hub: a folder with an empty list of keys, signed by this machine's",
        details="Machines trust that list whose configuration names this key as hub.owner.",
        examples="hone hub init /srv/www/hub",
    )
    trust = _add(
        actions,
        "trust",
        _trust,
        about="put a machine's key on the hub's list, which this machine's key must have signed",
        examples="hone hub trust /srv/www/hub attic RWQf6LRCGA9i53mlYecO4IzT51TGPpvWucNSCh1CBM0QTaLn73Y7GFO3",
    )
    revoke = _add(
        actions,
        "revoke",
        _revoke,
        about="take a key off the hub's list, so that boards no longer trust it",
        examples="hone hub revoke /srv/www/hub attic",
    )
    for parser in (init, trust, revoke):
        parser.add_argument("url", metavar="URL", help="where the hub can be written")
    trust.add_argument("name", metavar="NAME", help="what the machine is called")
    trust.add_argument("key", metavar="KEY", help="as 'hone hub key' prints it there")
    revoke.add_argument("name", metavar="NAME", help="name on the list, or a key's 16 digits")


def _add_sharing(actions: Any) -> None:
    push = _add(
        actions,
        "push",
        _push,
        about="put what this machine has measured into the hub",
        details="Schedules and their times go, without names of models, machines or files.",
        examples="hone hub push\nhone hub push /media/stick/hub",
    )
    pull = _add(
        actions,
        "pull",
        _pull,
        about="take what others have measured on such devices",
        details="It is tried here before it is served, when the machine is idle or by 'hone tune'.",
        examples="hone hub pull\nhone hub pull --hold\nhone hub pull --from attic",
    )
    pull.add_argument("--hold", action="store_true", help="look, and take nothing")
    pull.add_argument(
        "--from", dest="names", action="append", metavar="NAME", help="only of this key; may be given again"
    )
    status = _add(
        actions,
        "status",
        _status,
        about="say what the hub has for this machine, whose records it takes, and their results here",
        examples="hone hub status\nhone hub status https://hub.example/honed --json",
    )
    for parser in (push, pull, status):
        parser.add_argument("url", metavar="URL", nargs="?", help=_URL)


def _add(actions: Any, name: str, run: Run, **options: str) -> Parser:
    parser = add_action(actions, name, run, **options)
    parser.add_argument(
        "--folder",
        metavar="DIR",
        type=Path,
        help="where this machine's key is (default: /var/lib/honed-hub, of a user ~/.local/state/honed/hub)",
    )
    return parser


def _place(arguments: argparse.Namespace) -> HubPlace:
    from honed.hub import machine

    given: Path | None = arguments.folder
    return machine.HubPlace(given.absolute()) if given else machine.place(os.environ, os.getuid())


def _key(arguments: argparse.Namespace, output: Output) -> None:
    key = _own(arguments).public
    document = {"key_id": key.name, "key": str(key)}
    output.emit(document, lambda console: console.print(fields([("key id", key.name), ("key", str(key))])))


def _own(arguments: argparse.Namespace) -> SecretKey:
    from honed.hub.main import key_of

    return key_of(_place(arguments))


def _init(arguments: argparse.Namespace, output: Output) -> None:
    from honed.hub import layout, pushing, remote

    store = remote.store(_url(arguments.url))
    try:
        store.read(layout.HUB, layout.MAX_INDEX_BYTES)
    except (NotFound, remote.FolderMissing):
        pushing.make_overview(store)
        _list(arguments, output, (), (), "There is a hub")
        return
    raise InvalidArgument(f"there is a hub at {store.url} already; 'hone hub trust' names machines there")


def _trust(arguments: argparse.Namespace, output: Output) -> None:
    from honed.hub.layout import NamedKey
    from honed.hub.minisign import PublicKey

    before = _keyring(arguments)
    key = PublicKey.parse(arguments.key)
    name = check_name(arguments.name, "machine")
    if key.name in before.revoked:
        raise InvalidArgument(f"key {key.name} was revoked; make another on that machine")
    boards = tuple(board for board in before.boards if board.name != name)
    if key.name in {PublicKey.parse(board.key).name for board in boards}:
        raise InvalidArgument(f"another machine's key has the id {key.name}; make another on that machine")
    _list(arguments, output, (*boards, NamedKey(name, str(key))), before.revoked, f"{name} is trusted")


def _revoke(arguments: argparse.Namespace, output: Output) -> None:
    from honed.hub.minisign import PublicKey

    before, name = _keyring(arguments), arguments.name
    ids = {board.name: PublicKey.parse(board.key).name for board in before.boards}
    key_id = ids.get(name, name.upper())
    if len(key_id) != 16 or not set(key_id) <= set("0123456789ABCDEF"):
        raise NotFound(f"the hub's list has no {name!r}; give a name of it, or a key's 16 digits")
    boards = tuple(board for board in before.boards if ids[board.name] != key_id)
    revoked = tuple(dict.fromkeys((*before.revoked, key_id)))
    _list(arguments, output, boards, revoked, f"Key {key_id} is revoked")


def _keyring(arguments: argparse.Namespace) -> Keyring:
    """Return the hub's list, expired or not.

    Raises NotFound if there is none, InvalidArgument if another key signed it.
    """
    from honed.hub import layout, looking, remote

    store = remote.store(_url(arguments.url))
    data = looking.read_signed(store, layout.HUB, _own(arguments).public)
    return layout.read_keyring(data, None)


def _list(
    arguments: argparse.Namespace,
    output: Output,
    boards: tuple[NamedKey, ...],
    revoked: tuple[str, ...],
    said: str,
) -> None:
    from honed.hub import pushing, remote

    store, key = remote.store(_url(arguments.url)), _own(arguments)
    made = pushing.make(store, key, boards, revoked, time.time())
    document = {"url": store.url, "owner": str(key.public), **strict.to_plain(made)}
    rows = [(board.name, board.key) for board in boards] or [("nobody", "is on the list yet")]

    def show(console: Console) -> None:
        line(console, f"{said} at {store.url}. Machines trust its list by this in their [hub]:")
        line(console, f'  owner = "{key.public}"')
        console.print(fields(rows))

    output.emit(document, show)


def _url(url: str) -> str:
    return url if "://" in url else str(Path(url).absolute())


def _push(arguments: argparse.Namespace, output: Output) -> None:
    from honed.hub import machine

    place, key = _place(arguments), _own(arguments)
    with Client(arguments.socket) as client, place.changing() as memory:
        url = _url(_require_url(arguments.url, _settings(client).push_url))
        pushed = machine.push(client, key, memory, url)
    document = {"url": url, **dataclasses.asdict(pushed)}
    said = f"{url} has {pushed.records} records of this machine"
    output.say(document, f"{said}{'' if pushed.changed else ', as before'}.")


def _pull(arguments: argparse.Namespace, output: Output) -> int:
    from honed.hub import machine

    place = _place(arguments)
    with Client(arguments.socket) as client, place.changing() as memory:
        settings = dataclasses.replace(_settings(client), hold=arguments.hold)
        url = _url(_require_url(arguments.url, settings.url))
        names = frozenset(arguments.names) if arguments.names else None
        with place.index_cache(url) as shelf:
            pulled = machine.pull(client, settings, memory, shelf, place.own(), names)
    document = {"url": url, **strict.to_plain(pulled), "sources": tuple(pulled.sources)}
    output.emit(document, lambda console: _print_pulled(console, url, pulled))
    return 1 if not pulled.added and not pulled.merged and any(s.problem for s in pulled.sources) else 0


def _print_pulled(console: Console, url: str, pulled: Pulled) -> None:
    held = f", {pulled.held} are there and were not taken" if pulled.held else ""
    back = f", {pulled.withdrawn} were taken back on other machines and left" if pulled.withdrawn else ""
    line(console, f"{pulled.added} records of {url} are new, {pulled.merged} were here already{held}{back}.")
    for source in pulled.sources:
        if source.problem:
            line(console, f"  {source.name}: {source.problem}")
    for reason in pulled.refused[:_SHOWN]:
        line(console, f"  {reason}")


def _status(arguments: argparse.Namespace, output: Output) -> None:
    from honed.hub import machine

    place = _place(arguments)
    with Client(arguments.socket) as client:
        settings = _settings(client)
        given = arguments.url or settings.url
        status = machine.look(client, settings, place, _url(given) if given else "")
    output.emit(strict.to_plain(status), lambda console: _print_status(console, status))


def _print_status(console: Console, status: HubStatus) -> None:
    rows = [
        ("hub", status.url or "none"),
        ("key", status.key or "none yet; 'hone hub key' makes one"),
        ("pulled", _ago(status.pulled_s)),
        ("pushed", _ago(status.pushed_s)),
        ("waiting", f"{status.waiting} records"),
    ]
    if status.last_problem:
        again = f"; tried again in {seconds_text(status.retry_seconds)}" if status.retry_seconds else ""
        rows.append(("last try", status.last_problem + again))
    if status.problem:
        rows.append(("problem", status.problem))
    rows += [("set aside", text) for text in set_aside(status.hints)]
    console.print(fields(rows))
    names = dict.fromkeys([*(source.name for source in status.sources), *status.hints])
    if names:
        console.print()
        console.print(_sources({source.name: source for source in status.sources}, status.hints, list(names)))


def _sources(sources: Mapping[str, KeyStanding], hints: Mapping[str, HintFigures], names: list[str]) -> Any:
    def row(name: str) -> list[str]:
        source, hint = sources.get(name), hints.get(name)
        counts = [str(hint.taken), str(hint.tried), str(hint.failed)] if hint else ["0", "0", "0"]
        state = (
            source.problem if source and source.problem else "set aside" if hint and hint.aside else "trusted"
        )
        return [name, source.key_id if source else "", *counts, state]

    return table(["key", "id", "taken", "tried", "failed", ""], [row(name) for name in names])


def _ago(when: float | None) -> str:
    return "never" if when is None else f"{seconds_text(max(0.0, time.time() - when))} ago"


def _settings(client: Client) -> HubConfig:
    from honed.hub.machine import HubConfig

    return HubConfig.of(client.ask(CONFIG_SHOW))


def _require_url(url: str | None, configured: str) -> str:
    if url or configured:
        return url or configured
    raise InvalidArgument("there is no hub; give its URL, or set hub.url in the configuration")
