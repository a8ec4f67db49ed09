"""The tables in pages that repeat the code: settings, memory, metrics, rules of devices, kernel records.

`python -m tests.docs.schemas` writes them, so that no page can differ from the code.
"""

from __future__ import annotations

import re
import tempfile
import textwrap
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any, Final
from unittest import mock

from honed.daemon.config import TABLES, Config, load, memory, settings, value
from honed.daemon.observe.openmetrics import FAMILIES
from honed.daemon.settings import schema
from honed.daemon.settings.schema import DAEMON_MIB, Setting, shares
from honed.machine.families import FAMILIES as DEVICE_FAMILIES
from honed.machine.families import DeviceFamily
from honed.machine.kernellog.drivers import TABLES as RECORD_TABLES
from honed.machine.kernellog.fault import Driver, Severity
from honed.protocol.service import Metrics
from tests.golden.formats import sample

from .texts import ROOT

CONFIGURATION: Final = ROOT / "docs" / "configuration.md"
SHIPPED: Final = ROOT / "packaging" / "honed.toml"
METRICS: Final = ROOT / "docs" / "metrics.md"
PROFILES: Final = ROOT / "docs" / "dev" / "devices.md"
KERNEL_LOG: Final = ROOT / "docs" / "dev" / "kernel-log.md"
DRIVERS: Final = [driver for driver in Driver if driver is not Driver.KERNEL]
_SHOWN_GIB: Final = 16  # Memory of the machine whose defaults are shown
_GIB: Final = (2, 4, 8, 16, 32)
_HEADING: Final = re.compile(r"^## (\[.*\]): (.*)$", re.MULTILINE)


def configuration() -> str:
    """Return the page, with the tables below the headings that name tables of the settings, and of memory."""
    page = CONFIGURATION.read_text()
    for heading in _HEADING.finditer(page):
        rows = [_setting(each) for each in settings().values() if f"[{each.table}]" in heading[1]]
        page = _replaced(page, heading[0], "| setting | default | unit | reload | meaning |", rows)
    header = f"| part | setting | {' | '.join(f'{gib} GiB' for gib in _GIB)} |"
    return _replaced(page, "## Memory", header, _memory())


def shipped() -> str:
    """Return honed.toml as it is installed: every setting, commented out, with its default."""
    head, _, _ = SHIPPED.read_text().partition("\n\n")
    headings = _HEADING.findall(CONFIGURATION.read_text())
    titles = {table: title for names, title in headings for table in TABLES if f"[{table}]" in names}
    lines = [head.rstrip()]
    for table in TABLES:
        assert table in titles, f"write a heading '## [{table}]: ...' for the table into {CONFIGURATION.name}"
        title = titles[table]
        lines += ["", f"# {title[:1].upper()}{title[1:]}.", f"[{table}]"]
        for each in settings().values():
            if each.table == table:
                comment = textwrap.wrap(f"{_meaning(each)}.", 116, break_on_hyphens=False)
                lines += ["", *(f"# {line}" for line in comment), f"#{each.key} = {_default(each)}"]
    return "\n".join(lines) + "\n"


def metrics() -> str:
    """Return the page with a row for each metric."""
    rows = [
        f"| `{family.name}` | {family.kind} | {family.unit} | {_labels(family.samples)} | {family.about} |"
        for family in FAMILIES
    ]
    header = "| metric | type | unit | labels | meaning |"
    return _replaced(METRICS.read_text(), "## Every metric", header, rows)


def kernel_log() -> str:
    """Return the page with the kinds of record of each driver."""
    items = "\n".join(map(_driver, DRIVERS))
    return re.sub(r"(?:^- `.*\n(?:  .*\n)*)+", lambda _: f"{items}\n", KERNEL_LOG.read_text(), flags=re.M)


def profiles() -> str:
    """Return the page with the rules of each family of devices."""
    numbers: dict[str, Callable[[DeviceFamily], object]] = {
        "`max_threads` (at most the device's work-group size)": lambda its: its.max_threads,
        "`local_memory`": lambda its: "if the device has any" if its.local_memory else "no",
        "`max_vector_bytes`": lambda its: its.max_vector_bytes,
        "`max_unroll`": lambda its: its.max_unroll,
        "`max_source_bytes`": lambda its: f"{its.max_source_bytes >> 10} KiB",
        "`max_queued_launches`": lambda its: its.max_queued_launches or "no cap",
    }
    rows = [
        f"| {rule} | {' | '.join(str(number(its)) for its in DEVICE_FAMILIES.values())} |"
        for rule, number in numbers.items()
    ]
    return _replaced(PROFILES.read_text(), "## Rules", f"| rule | {' | '.join(DEVICE_FAMILIES)} |", rows)


WRITTEN: Final[dict[Path, Callable[[], str]]] = {
    CONFIGURATION: configuration,
    SHIPPED: shipped,
    METRICS: metrics,
    KERNEL_LOG: kernel_log,
    PROFILES: profiles,
}


def _replaced(page: str, heading: str, header: str, rows: Iterable[str]) -> str:
    """Return the page with `rows` in the first table of this header after the heading."""
    before, found, section = page.partition(f"\n{heading}\n")
    above, there, below = section.partition(f"\n{header}\n")
    assert found, heading
    assert there, (heading, header)
    rule = "|" + "---|" * (header.count("|") - 1)
    _, _, after = below.partition("\n\n")
    end = f"\n\n{after}" if after else "\n"
    return f"{before}{found}{above}{there}" + "\n".join([rule, *rows]) + end


def _setting(each: Setting) -> str:
    unit = f"{each.unit} " if each.unit else ""
    return f"| `{each.name}` | `{_default(each)}` | {unit}| {each.effect} | {_meaning(each)} |"


def _meaning(each: Setting) -> str:
    """Return what the setting means, with a minimum that is not to be expected."""
    if each.kind is bool or each.kind not in (int, float) or each.minimum in (0, 1):
        return each.meaning
    return f"{each.meaning}. At least {each.minimum:g}"


def _default(each: Setting) -> str:
    """Return the default of root's service on the machine that the page is about, as TOML."""
    default: Any = value(_defaults(_SHOWN_GIB), each.name)
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, int):
        return f"{default:_}" if default >= 100_000 else str(default)
    if isinstance(default, tuple):
        return str(list(default))
    return f'"{default}"' if isinstance(default, str | Path) else str(default)


@cache
def _defaults(gib: int) -> Config:
    """Return the configuration of root's service without a file on a machine of this memory."""
    with (
        tempfile.NamedTemporaryFile() as empty,
        mock.patch.object(schema, "own_shares", return_value=shares(gib << 10)),
    ):
        return load(environ={}, uid=0, config=Path(empty.name))


def _memory() -> list[str]:
    """Return the rows of what the limits add up to."""
    of = [shares(gib << 10) for gib in _GIB]
    answers = "2 \N{MULTIPLICATION SIGN} `max_message_bytes`"
    users = "`apps.max_users` \N{MULTIPLICATION SIGN} `apps.memory_mib`"
    rows: list[tuple[str, str, list[int] | list[str]]] = [
        ("the daemon, without messages", "", [DAEMON_MIB] * len(of)),
        ("messages and answers of all users", "`max_all_bytes`", [s.messages for s in of]),
        ("an answer on its way, for each device", answers, [2 * s.message for s in of]),
        ("the worker, for each device", "`worker_memory_mib`", [s.worker for s in of]),
        ("the CPU engine, twice while models are isolated", "`cpu.memory_mib`", [s.cpu for s in of]),
        ("CPU engines of users", users, [f"{s.users} \N{MULTIPLICATION SIGN} {s.app}" for s in of]),
        (
            "compiling or tuning, in turns",
            "`compile_memory_mib`, `tuner.memory_mib`",
            [max(s.compiler, s.tuner) for s in of],
        ),
        ("in all", "", [memory(_defaults(gib)) for gib in _GIB]),
    ]
    shown = lambda figure: f"{figure:,}" if isinstance(figure, int) else figure  # noqa: E731
    return [
        f"| {part} | {setting}{' ' if setting else ''}| {' | '.join(map(shown, figures))} |"
        for part, setting, figures in rows
    ]


def _labels(samples: Callable[[Metrics], Iterable[Any]]) -> str:
    """Return the labels of a family, by samples of a document in which every field has a value."""
    names = dict.fromkeys(label for each in samples(sample(Metrics)) for label in each.labels)
    return ", ".join(f"`{name}`" for name in names)


def _driver(driver: Driver) -> str:
    """Return what is known of a driver: its formats, and their kinds by what a record says is lost."""
    rows = ((table, pattern) for table in RECORD_TABLES for pattern in table.patterns)
    own = [pattern for table, pattern in rows if (pattern.driver or table.driver) is driver]
    kinds = [
        f"**{severity}** {', '.join(sorted({row.kind for row in own if row.severity is severity}))}"
        for severity in Severity
        if any(row.severity is severity for row in own)
    ]
    text = f"- `{driver}` ({len(own)}): {'; '.join(kinds)}"
    return textwrap.fill(text, 120, subsequent_indent="  ", break_on_hyphens=False)
