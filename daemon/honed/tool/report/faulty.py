"""What went wrong: ends of workers, versions and candidates in quarantine, the kernel log."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree.ElementTree import Element

from honed.daemon.observe.faults import OTHER, WHOSE, BlamedFault
from honed.jobs.events import Quarantined
from honed.tool.commands.faults import REACH
from honed.tool.output import capital

from .contents import Report
from .markup import Cell, badge, element, more, name_of, table
from .words import day, moment

_SHOWN = 10  # candidates, or faults, before those that are shown when asked for


def faults(report: Report) -> Element:
    """All of it; it says so where nothing went wrong, and where that cannot be told."""
    return element(
        "div",
        element("h3", "Worker processes"),
        _ends(report),
        element("h3", "Versions in quarantine"),
        _versions(report),
        element("h3", "Candidates in quarantine"),
        *_candidates(report.faults.quarantined),
        element("h3", "Kernel log"),
        *_log(report),
    )


def count(report: Report) -> int:
    """How many there are to look at; those of other programs are not counted."""
    ends = sum(sum(device.worker.ends.values()) for device in report.metrics.devices)
    ours = sum(fault.whose != OTHER for fault in report.faults.log)
    return ends + ours + len(report.faults.quarantined or ())


def _nothing(text: str) -> Element:
    return element("p", text, class_="empty")


def _ends(report: Report) -> Element:
    rows: list[tuple[Cell, ...]] = [
        (moment(end.time), device.shown, badge(end.kind, "bad"), end.reason)
        for device in report.metrics.devices
        for end in device.worker.last_ends
    ]
    if not rows:
        return _nothing("None ended by itself since the service started.")
    return table("The last that the service did not end", ("when", "device", "how", "~why"), rows)


def _versions(report: Report) -> Element:
    rows = [
        (name_of(model.listed.name), str(version.number), moment(version.made), version.quarantine)
        for model in report.models
        for version in model.history.versions
        if version.quarantine
    ]
    if not rows:
        return _nothing("None: no version that tuning published did wrong.")
    return table("Versions that are not served again", ("model", ">version", "made", "~why"), rows)


def _candidates(found: Sequence[Quarantined] | None) -> list[Element]:
    if found is None:
        return [_nothing("Not told; the notes say why.")]
    if not found:
        return [_nothing("None: no candidate faulted, hung, or took the machine down.")]
    made = [_candidate_table(found[:_SHOWN])]
    if len(found) > _SHOWN:
        made.append(more(f"{len(found) - _SHOWN} more", _candidate_table(found[_SHOWN:])))
    return made


def _candidate_table(found: Sequence[Quarantined]) -> Element:
    return table(
        "Candidates that are never run again on this device",
        ("task", "when", "outcome", "~what happened"),
        [
            (
                name_of(each.name or each.task),
                moment(each.time),
                badge(each.outcome or "no verdict", "warn"),
                element("span", each.reason, _story(each)),
            )
            for each in found
        ],
    )


def _story(each: Quarantined) -> Element | None:
    if not each.story or each.story == each.reason:
        return None
    return more("what the kernel log says", element("pre", each.story))


def _log(report: Report) -> list[Element]:
    told = report.faults
    if told.log_reason:
        return [_nothing(f"{capital(told.log_reason)}.")]
    if not told.log:
        return [_nothing("It holds no fault of a GPU since the machine started.")]
    latest = [_fault(fault) for fault in reversed(told.log)]
    rest = latest[_SHOWN:]
    return [*latest[:_SHOWN], *([more(f"{len(rest)} earlier ones", *rest)] if rest else [])]


def _fault(fault: BlamedFault) -> Element:
    by = f" {fault.device}" if fault.device else ""
    by += f", process {fault.process}" if fault.process is not None else ""
    by += f" ({fault.command})" if fault.command else ""
    return element(
        "div",
        element(
            "p", badge(REACH.get(fault.severity, fault.severity), "bad"), element("strong", fault.meaning)
        ),
        element("p", f"{day(fault.time)}, {fault.driver}{by}: {WHOSE[fault.whose]}"),
        more("records", element("pre", "\n".join(fault.records))),
        class_="fault",
    )
